"""Compares results of Python by the tables and tests of a report."""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedjax_sim.base.brief import html_table
from fedjax_sim.cli.report import aligned
from fedjax_sim.cli.reporting.command import own_files, write
from fedjax_sim.cli.reporting.compare import Group, grouped, tuned
from fedjax_sim.cli.reporting.contents import titles
from fedjax_sim.cli.reporting.formats import comma_separated, latex, measurements
from fedjax_sim.cli.reporting.read import Reading, read
from fedjax_sim.cli.reporting.statistics import spread
from fedjax_sim.cli.reporting.tables import Table, scores
from fedjax_sim.cli.saving import check_named, write_records
from fedjax_sim.run import Result

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The table of a report: scores, differences to the baseline with p-values, and traffic.

    Attributes:
        reading: the results, as a report reads them.
        groups: the methods by problem.
    """

    reading: Reading
    groups: list[Group]

    def __repr__(self) -> str:
        tables = self._tables().items()
        return "\n\n".join(f"{title}\n{aligned([t.head, *t.rows])}" for title, t in tables)

    def _repr_html_(self) -> str:
        return "".join(html_table(title, t.rows, t.head) for title, t in self._tables().items())

    def to_latex(self) -> str:
        """Returns the table as a ``tabular`` of booktabs, the ``table.tex`` of a report."""
        return latex(self._tables(), spread(trial.runs for trial in self.reading.trials))

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row for each method, with the columns of a report's ``table.csv``."""
        import pandas

        return pandas.read_csv(
            io.StringIO(
                comma_separated([row for group in self.groups for row in measurements(group)])
            )
        )

    def save(self, folder: str | Path) -> None:
        """Writes the report: ``report.html``, ``table.tex``, ``table.csv`` and the pictures.

        Args:
            folder: new, or the folder of an earlier report, which is replaced.

        Raises:
            ValueError: if the folder has a file of another origin, or one that was changed.
            OSError: if a file cannot be written.
        """
        try:
            write(self.reading, self.groups, (), Path(folder), own_files(Path(folder)))
        except ValueError as error:
            raise ValueError(str(error).replace("--out", "folder", 1)) from error

    def _tables(self) -> dict[str, Table]:
        tables = [scores(tuned(group) or group, with_differences=True) for group in self.groups]
        return dict(zip(titles(self.groups), tables, strict=True))


def compare(results: Mapping[str, Result], baseline: str | None = None) -> Comparison:
    """Compares results as ``python -m fedjax_sim.report`` compares run folders.

    Methods are compared with the baseline in pairs of the same seed, fold and partition, by
    Wilcoxon's signed-rank test, or the corrected resampled t-test for folds. Results of different
    data or numbers of clients are in separate tables.

    Args:
        results: results by the names of their methods.
        baseline: name of the method that the others are compared with; None: the first.

    Returns:
        The comparison, which notebooks show as a table.

    Raises:
        ValueError: if the results are of different tasks, or none has the baseline's name.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> def run(algorithm):
        ...     return fs.simulate(algorithm, problem.model, problem.data, problem.test, rounds=3,
        ...                        classes=10, seeds=range(3))
        >>> fedprox = fs.algorithms.fedprox(local, clients_per_round=5, mu=1.0)
        >>> found = fs.compare({"FedAvg": run(fs.fedavg(local, clients_per_round=5)),
        ...                     "FedProx": run(fedprox)}, baseline="FedAvg")
        >>> found.to_pandas()[["method", "runs", "baseline", "pairs"]]
            method  runs baseline  pairs
        0   FedAvg     3   FedAvg    NaN
        1  FedProx     3   FedAvg    3.0
    """
    check_named(results)
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for i, (name, result) in enumerate(results.items()):
            path = Path(place) / str(i) / quote(name, safe=" (),=+")[:200]
            folder, summary = write_records(path, {name: result}, dataset=None, partition=None)
            try:
                folder.write_summary(summary, [name])
            finally:
                folder.close()
            folders.append(path)
        reading = read(folders)
    try:
        return Comparison(reading, grouped(reading.trials, baseline, reading.baseline))
    except ValueError as error:
        raise ValueError(str(error).replace("--baseline", "baseline", 1)) from error
