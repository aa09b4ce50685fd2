"""``python -m fedjax_sim.study FILE.toml``: methods tuned and compared as a file says."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_sim import bench
from fedjax_sim.base.files import write_text
from fedjax_sim.base.words import counted
from fedjax_sim.cli.claims import Claim, claim_begun, claim_new, is_free
from fedjax_sim.cli.commands import complain, enter, plain
from fedjax_sim.cli.flags import Parser, flag
from fedjax_sim.cli.folder import versions, write_json
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.machine import Machine, folder_name
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.report import aligned
from fedjax_sim.cli.reporting.compare import OF_FOLDS
from fedjax_sim.cli.reporting.tables import Table
from fedjax_sim.cli.running import finished
from fedjax_sim.cli.stopping import held
from fedjax_sim.cli.studies.plan import Cell, Study, read_study
from fedjax_sim.cli.studies.results import Row, rows_of, write_results
from fedjax_sim.cli.studies.view import viewed
from fedjax_sim.cli.watching import Watch
from fedjax_sim.engine.memory import trim

PROGRAM = "fedjax_sim.study"
FILE, CELLS = "study.toml", "cells"
NOT_OF_A_STUDY = (
    "out", "or_resume", "resume", "distributed", "compile_for", "checkpoints", "dry_run", "json"
)  # fmt: skip


class _Asked(NamedTuple):
    """What the command line says.

    Attributes:
        file: the study file; None for the one of the folder.
        folder: of the study.
        resumed: whether it goes on there.
        named: whether the user chose a new folder's name; a default that is taken gets a suffix.
        dry_run: whether it is only told what would run.
        machine: arguments for every run.
    """

    file: Path | None
    folder: Path
    resumed: bool
    named: bool
    dry_run: bool
    machine: tuple[str, ...]


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
        study = read_study(file)
        if asked.dry_run:
            _show_plan(study)
            return 0
        claim = _open(study, asked, file)
    except (ValueError, OSError) as error:
        return complain(PROGRAM, f"error: {plain(error)}", 2)
    on = f"go on with: python -m {PROGRAM} --resume {shlex.quote(str(claim.path))}"
    try:
        return _carry_out(study, asked._replace(folder=claim.path), on)
    except BrokenPipeError:
        raise
    except OSError as error:
        return complain(PROGRAM, f"error: {plain(error)}; {on}", 2)
    finally:
        claim.release()


def _carry_out(study: Study, asked: _Asked, on: str) -> int:
    """Runs the cells and writes the tables; returns the status of the command.

    Args:
        study: what runs.
        asked: what the command line says, with the folder of the study.
        on: how to go on with what is stopped.
    """
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
        "--out",
        metavar="DIR",
        type=folder_name,
        help="new folder (default: runs/study-<file>-<date>-<time>)",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        type=folder_name,
        help="go on with the study in this folder; with FILE.toml, which may have more cells or "
        "more rounds than before",
    )
    parser.add_argument(
        "--or-resume",
        action="store_true",
        help="if --out has this study already, go on with it as --resume does",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and end")
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR)"
    )
    Machine.add_flags(parser.add_argument_group("every run"), helping=True, without=NOT_OF_A_STUDY)
    given = parser.parse_args(argv)
    if given.file is None and given.resume is None:
        raise ValueError("name a study file, or a folder to go on in: FILE.toml or --resume DIR")
    if given.out is not None and given.resume is not None:
        raise ValueError(f"--out is for a new study; --resume {given.resume} goes on in its folder")
    if given.or_resume and given.out is None:
        raise ValueError("--or-resume is for --out, which names the folder of the study")
    if given.resume is not None and not (Path(given.resume) / FILE).is_file():
        raise ValueError(f"--resume: {given.resume} has no study: it lacks {FILE}")
    file = None if given.file is None else Path(given.file)
    stem = "" if file is None else file.stem
    folder = Path(
        given.resume or given.out or f"runs/study-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    resumed = given.resume is not None or (given.or_resume and (folder / FILE).is_file())
    named = given.out is not None
    return _Asked(file, folder, resumed, named, given.dry_run, _machine(vars(given)))


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


def _open(study: Study, asked: _Asked, file: Path) -> Claim:
    """Claims the folder; of one that goes on, checks that its cells are those of the file."""
    text = file.read_text(encoding="utf-8")
    if asked.resumed:
        for cell in study.cells:
            folder = _folder(asked, cell)
            if (folder / "config.json").exists():
                parse([*cell.argv, "--resume", str(folder)])
                read_summary(folder)  # before anything runs, if it is damaged
            elif not is_free(folder):
                raise ValueError(f"{folder} has files, but no config.json: move it away")
        claim = claim_begun(asked.folder)
    else:
        claim = claim_new(asked.folder, named=asked.named)
    told: dict[str, Any] = {
        "rows": study.rows,
        "baseline": study.baseline,
        "cells": [{"folder": f"{CELLS}/{c.name}", "settings": c.settings} for c in study.cells],
        "versions": versions(),
    }
    try:
        write_text(claim.path / FILE, text)
        write_json(claim.path / "study.json", told)
    except OSError:
        claim.release(remove=True)
        raise
    return claim


def _run(cell: Cell, asked: _Asked, watch: Watch) -> int:
    """Runs a cell, or what it still lacks; gives the status of its command."""
    folder = _folder(asked, cell)
    if not (folder / "config.json").exists():
        return bench.main([*cell.argv, *asked.machine, "--out", str(folder)], watch)
    done = finished(cell.config, folder)
    if done is not None:
        return done
    return bench.main([*cell.argv, *asked.machine, "--resume", str(folder)], watch)


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
