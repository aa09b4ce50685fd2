"""Compares results from Python with the tables and tests of a report."""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedjax_sim.cli.reporting.command import SETTING, write
from fedjax_sim.cli.reporting.compare import Group, grouped
from fedjax_sim.cli.reporting.contents import summaries
from fedjax_sim.cli.reporting.formats import comma_separated, latex_of, measurements, terminal
from fedjax_sim.cli.reporting.page import fragment
from fedjax_sim.cli.reporting.read import Reading, read_folders
from fedjax_sim.cli.reporting.tables import Table
from fedjax_sim.cli.reporting.wide import Wide, wides
from fedjax_sim.cli.saving import check_alike, check_named, check_text, write_records
from fedjax_sim.run import Result

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The table of a report: scores, differences from the baseline with p-values, and traffic.

    For results by column, the table of a paper: methods by columns, with marks.

    Attributes:
        reading: the results, as a report reads them.
        groups: the methods by problem.
        wide: methods by columns; empty if the results have no columns.
    """

    reading: Reading
    groups: list[Group]
    wide: list[Wide]

    def __repr__(self) -> str:
        return "\n\n".join(terminal(*one) for one in self._tables())

    def _repr_html_(self) -> str:
        return fragment(item for parts in self._tables() for item in parts if item)

    def to_latex(self) -> str:
        """Returns the table as a ``tabular`` of booktabs.

        It is the ``table.tex`` of a report; with columns its ``wide.tex``, and the ``table.tex``
        of a study.
        """
        return latex_of(self._tables())

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row for each method, as in a report's ``table.csv``, or ``wide.csv``."""
        import pandas

        rows = [row for group in self.groups for row in measurements(group)]
        if self.wide:
            rows = [row for wide in self.wide for row in wide.numbers()]
        return pandas.read_csv(io.StringIO(comma_separated(rows)))

    def save(self, folder: str | Path) -> None:
        """Writes the report: ``report.html``, ``table.tex``, ``table.csv`` and the pictures.

        Args:
            folder: new, or the folder of an earlier report, which is replaced.

        Raises:
            ValueError: if the folder has other files and no report.
            OSError: if a file cannot be written.
        """
        try:
            write(self.reading, self.groups, self.wide, Path(folder))
        except ValueError as error:
            raise ValueError(str(error).replace("--out", "folder", 1)) from error

    def _tables(self) -> list[tuple[str, Table, str]]:
        """Returns the tables with their titles and notes."""
        if self.wide:
            return [(wide.title, wide.table(), wide.note) for wide in self.wide]
        return summaries(self.reading, self.groups)


_Part = tuple[str, str | None, Mapping[str, Result]]
"""Results that share a folder, with its name and their column if there are columns."""


def compare(
    results: Mapping[str, Result] | Mapping[str, Mapping[str, Result]],
    baseline: str | None = None,
    *,
    score: str | None = None,
) -> Comparison:
    """Compares results like ``python -m fedjax_sim.report``.

    Methods are compared with the baseline in pairs of the same seed, fold and partition, by
    Wilcoxon's signed-rank test, or the corrected resampled t-test for folds. Results of different
    data or numbers of clients are in separate tables. Results by column make the table of a paper,
    methods by columns, as the report's ``--wide`` does. If a method has several settings, such as
    ``"fedavg(lr=0.01)"`` and ``"fedavg(lr=0.1)"``, the tables have the one that is best on the
    validation samples.

    Args:
        results: results by the names of their methods, or such results by the title of each column.
          The results of a column must have the same seeds, clients and task.
        baseline: name of the method with which the others are compared; None: the first.
        score: the score of the table, which also selects settings, such as ``"f1"``; None: the
            task's.

    Returns:
        The comparison, which notebooks show as a table.

    Raises:
        ValueError: if the results of a column differ in their seeds, clients or task, or the
          baseline or score is unknown.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> def run(algorithm, rounds=3):
        ...     return fs.simulate(algorithm, problem.model, problem.data, problem.test,
        ...                        rounds=rounds, classes=10, seeds=range(3))
        >>> fedavg = fs.fedavg(local, clients_per_round=5)
        >>> fedprox = fs.algorithms.fedprox(local, clients_per_round=5, mu=1.0)
        >>> found = fs.compare({"FedAvg": run(fedavg), "FedProx": run(fedprox)}, baseline="FedAvg")
        >>> found.to_pandas()[["method", "runs", "baseline", "pairs"]]
            method  runs baseline  pairs
        0   FedAvg     3   FedAvg    NaN
        1  FedProx     3   FedAvg    3.0
        >>> both = {n: {"FedAvg": run(fedavg, n), "FedProx": run(fedprox, n)} for n in (1, 3)}
        >>> wide = fs.compare({f"{n} rounds": found for n, found in both.items()})
        >>> [*wide.to_pandas()][1:4]
        ['method', '1 rounds mean', '1 rounds std']
    """
    parts = _parts(results)
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for i, (name, column, part) in enumerate(parts):
            path = Path(place) / str(i) / quote(name, safe=" (),=+")[:200]
            folder, summary = write_records(path, part, dataset=None, partition=column, score=score)
            try:
                folder.write_summary(summary, part)
            finally:
                folder.close()
            folders.append(path)
        reading = read_folders(folders)
    try:
        groups = grouped(reading.trials, baseline, reading.baseline)
        wide = wides(reading, SETTING, baseline) if parts[0][1] is not None else []
        return Comparison(reading, groups, wide)
    except ValueError as error:
        raise ValueError(str(error).replace("--baseline", "baseline", 1)) from error


def _parts(results: Any) -> list[_Part]:
    """Returns the results of each column, or each result alone, after checking them."""
    if not isinstance(results, Mapping) or not any(
        isinstance(part, Mapping) for part in results.values()
    ):
        check_named(results)
        return [(name, None, {name: result}) for name, result in results.items()]
    for column, part in results.items():
        check_text(column)
        try:
            check_named(part)
            check_alike(part)
        except ValueError as error:
            text = str(error).replace("save it in a folder", "compare it in a column")
            raise ValueError(f"column {column!r}: {text}") from error
    return [(column, column, part) for column, part in results.items()]
