"""``python -m fedjax_sim.study FILE.toml``: methods tuned and compared as a file says."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_sim import bench
from fedjax_sim.base.files import write_text
from fedjax_sim.base.words import counted
from fedjax_sim.cli.commands import complain, enter
from fedjax_sim.cli.flags import Parser, flag
from fedjax_sim.cli.folder import check_free, versions, write_json
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.machine import Machine
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.reading import CELLS, check_entries
from fedjax_sim.cli.report import aligned
from fedjax_sim.cli.reporting.compare import OF_FOLDS
from fedjax_sim.cli.reporting.tables import Table
from fedjax_sim.cli.resuming import add_trust, to_go_on, written
from fedjax_sim.cli.stopping import held
from fedjax_sim.cli.studies.plan import Cell, Study, read_study
from fedjax_sim.cli.studies.results import Row, rows_of, write_results
from fedjax_sim.cli.studies.view import viewed
from fedjax_sim.cli.watching import Watch
from fedjax_sim.engine.memory import trim

PROGRAM = "fedjax_sim.study"
FILE = "study.toml"
NOT_OF_A_STUDY = (
    "out", "resume", "distributed", "compile_for", "checkpoints", "dry_run", "json"
)  # fmt: skip


class _Asked(NamedTuple):
    """What the command line says.

    Attributes:
        file: the study file; None for the one of the folder.
        folder: of the study.
        resumed: whether it goes on there.
        dry_run: whether it is only told what would run.
        trust: the modules that names in the file and the folder may import.
        machine: arguments for every run.
    """

    file: Path | None
    folder: Path
    resumed: bool
    dry_run: bool
    trust: tuple[str, ...]
    machine: tuple[str, ...]

    def to_resume(self, folder: Path) -> tuple[str, ...]:
        """The arguments that go on with a cell in its folder."""
        return (*(f"--trust={module}" for module in self.trust), "--resume", str(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None for those of this process.

    Returns:
        The exit status: 0, 1 if a loss diverged, 2 for bad input, 130 for Ctrl-C, 143 for SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        asked = _parse(argv)
        file = asked.folder / FILE if asked.file is None else asked.file
        study = read_study(file, asked.trust)
        if asked.dry_run:
            _show_plan(study)
            return 0
        _open(study, asked, file)
    except (ValueError, OSError) as error:
        return complain(PROGRAM, f"error: {error}", 2)
    on = f"go on with: {to_go_on(PROGRAM, asked.folder)}"
    print(study)
    statuses: list[int] = []
    rows: list[Row] = []
    try:
        with viewed(study) as view:
            for number, cell in enumerate(study.cells, 1):
                print(f"\n[{number}/{len(study.cells)}] {cell.name}\n", flush=True)
                view.begins(cell)
                statuses.append(_run(cell, asked, view.program))
                if statuses[-1] > 2:
                    break
                found = rows_of(study, cell, _folder(asked, cell)) if statuses[-1] < 2 else []
                rows += found
                with held():
                    view.ended(cell, found)
                    jax.clear_caches()  # another cell has other shapes
                    trim()
    except KeyboardInterrupt:
        statuses.append(bench.INTERRUPTED)
    if statuses[-1] > 2:
        return complain(PROGRAM, f"stopped; {on}", statuses[-1])
    if rows:
        table = write_results(study, rows, asked.folder)
        print(f"\n{_shown(table)}\n\n{_explained(rows)}\ntables: {asked.folder}")
        print(f"a page: python -m fedjax_sim.report {shlex.quote(str(asked.folder))}")
    lacking = [c.name for c, status in zip(study.cells, statuses, strict=True) if status == 2]
    if lacking:
        return complain(PROGRAM, f"error: no results of {', '.join(lacking)}: see above; {on}", 2)
    return max(statuses)


def _parse(argv: Sequence[str]) -> _Asked:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Runs what a study file says: methods, each with settings among which "
        "validation clients choose, on every setting of a grid. Prints a table and writes a "
        "folder: a run of fedjax_sim.bench for each cell, results.csv, table.md, table.tex.",
    )
    parser.add_argument("file", metavar="FILE.toml", nargs="?", help="the study file")
    parser.add_argument(
        "--out", metavar="DIR", help="new folder (default: runs/study-<file>-<date>-<time>)"
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the study in this folder; with FILE.toml, which may have more cells or "
        "more rounds than before",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and end")
    add_trust(parser)
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR)"
    )
    Machine.add_flags(parser.add_argument_group("every run"), helping=True, without=NOT_OF_A_STUDY)
    given = parser.parse_args(argv)
    if given.file is None and given.resume is None:
        raise ValueError("name a study file, or a folder to go on in: FILE.toml or --resume DIR")
    if given.out is not None and given.resume is not None:
        raise ValueError(f"--out is for a new study; --resume {given.resume} goes on in its folder")
    if given.resume is not None:
        check_entries(Path(given.resume))
        if not (Path(given.resume) / FILE).is_file():
            raise ValueError(f"--resume: {given.resume} has no study: it lacks {FILE}")
    file = None if given.file is None else Path(given.file)
    stem = "" if file is None else file.stem
    new = given.out or f"runs/study-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(given.resume or new)
    resumed, trust = given.resume is not None, tuple(given.trust)
    return _Asked(file, folder, resumed, given.dry_run, trust, _machine(vars(given)))


def _machine(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of the machine, for every run."""
    words = []
    for name in (*(field.name for field in dataclasses.fields(Machine)), "data_dir"):
        value = None if name in NOT_OF_A_STUDY else given.get(name)
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif value is not None:
            words.append(f"{flag(name)}={value}")
    return tuple(words)


def _open(study: Study, asked: _Asked, file: Path) -> None:
    """Makes the folder; of one that goes on, checks that its cells are those of the file."""
    text = file.read_text(encoding="utf-8")
    if asked.resumed:
        for cell in study.cells:
            folder = _folder(asked, cell)
            if (folder / "config.json").exists():
                parse([*cell.argv, *asked.to_resume(folder)])
                read_summary(folder)  # before anything runs, if it is damaged
            elif folder.exists():
                shutil.rmtree(folder)  # killed before it began
    else:
        check_free(asked.folder)
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_text(asked.folder / FILE, text)
    told: dict[str, Any] = {
        "rows": study.rows,
        "baseline": study.baseline,
        "cells": [{"folder": f"{CELLS}/{c.name}", "settings": c.settings} for c in study.cells],
        "versions": versions(),
    }
    write_json(asked.folder / "study.json", told)


def _run(cell: Cell, asked: _Asked, watch: Watch) -> int:
    """Runs a cell, or what it still lacks; gives the status of its command."""
    folder = _folder(asked, cell)
    if not (folder / "config.json").exists():
        return bench.main([*cell.argv, *asked.machine, "--out", str(folder)], watch)
    found, rounds = read_summary(folder), written(folder)["rounds"]
    if rounds == cell.config.experiment.rounds and {*cell.config.algorithms} <= found.keys():
        print(f"done before: {folder}")
        return int(any("diverged" in found[name] for name in cell.config.algorithms))
    return bench.main([*cell.argv, *asked.machine, *asked.to_resume(folder)], watch)


def _folder(asked: _Asked, cell: Cell) -> Path:
    return asked.folder / CELLS / cell.name


def _show_plan(study: Study) -> None:
    print(study)
    for row, texts in study.rows.items():
        several = f", of which validation clients choose one: {' '.join(texts)}"
        print(f"  {row}: {counted(len(texts), 'setting')}{several * (len(texts) > 1)}")
    for cell in study.cells:
        print(f"\n{cell.name}:\n  {shlex.join(['python', '-m', bench.PROGRAM, *cell.argv])}")


def _shown(found: Table) -> str:
    """The table for the terminal; * is the best."""
    lines = [[cell.text + "*" * cell.best for cell in row] for row in found.rows]
    return aligned([found.head, *lines])


def _explained(rows: Sequence[Row]) -> str:
    runs = max(len(row.runs) for row in rows)
    text = f"* best mean; mean ± standard deviation over {runs} runs"
    if rows[0].validation is not None:
        text += ", each at the round that is best on its validation clients"
    if any("fold" in run for row in rows for run in row.runs):
        return f"{text}; p: {OF_FOLDS} of the runs' differences, two-sided"
    text += "; p: Wilcoxon's signed-rank test of the runs' differences, two-sided"
    if runs > 1:
        text += f" (of {runs} runs at least {2 ** (1 - runs):.2g})"
    return text


if __name__ == "__main__":
    enter(lambda: bench.leave(main()))
