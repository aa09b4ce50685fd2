"""The results of a study: the scores of each run, and the table of methods by one setting."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from fedjax_sim.base.files import write_text
from fedjax_sim.cli.reporting.compare import best_of, decisive, over_runs
from fedjax_sim.cli.reporting.formats import (
    comma_separated,
    latex_of,
    markdown,
    plain,
    terminal,
)
from fedjax_sim.cli.reporting.read import Reading, Trial, read_folders
from fedjax_sim.cli.reporting.wide import wides
from fedjax_sim.cli.studies import plan


def write_results(study: plan.Study, cells: Collection[str], folder: Path) -> str:
    """Writes ``results.csv`` (a line for each run), ``table.md`` and ``table.tex``.

    Args:
        study: the study.
        cells: the names of the finished cells.
        folder: the folder of the study.

    Returns:
        The table for the terminal.
    """
    reading = read_folders([folder])
    write_text(folder / "results.csv", comma_separated([*_lines(study, reading, cells)]))
    made = [(wide.title, wide.table(), wide.note) for wide in wides(reading, study.across)]
    pages = chain.from_iterable((plain(t), markdown(found), plain(n)) for t, found, n in made)
    write_text(folder / "table.md", "\n\n".join(filter(None, pages)) + "\n")
    write_text(folder / "table.tex", latex_of(made))
    return "\n\n".join(terminal(*one) for one in made)


def _lines(study: plan.Study, reading: Reading, cells: Collection[str]) -> Iterator[dict[str, Any]]:
    for cell in study.cells:
        for method in study.rows:
            tried = [t for t in reading.trials if (t.run, t.row) == (cell.name, method)]
            trial = select_setting(tried)
            if trial is None or cell.name not in cells:
                continue
            over, validation = over_runs(trial, decisive([trial])), over_runs(trial, "validation")
            assert over is not None
            for i, (key, test) in enumerate(zip(trial.keys, over.values.tolist(), strict=True)):
                yield {
                    **{name: cell.settings.get(name, "") for name in study.columns},
                    "method": method,
                    "setting": trial.algorithm,
                    "seed": key.seed,
                    "fold": key.fold,
                    "validation": None if validation is None else float(validation.values[i]),
                    "test": None if math.isnan(test) else test,
                }


def select_setting(tried: list[Trial]) -> Trial | None:
    """Returns the setting that validation chose, by the clients' own models if there are any.

    None if all have diverged or have no score.
    """
    own = [trial for trial in tried if trial.own] or tried
    finished = [trial for trial in own if not trial.diverged]
    best = best_of(finished) if len(finished) > 1 else None
    return best or next(iter(finished), None)
