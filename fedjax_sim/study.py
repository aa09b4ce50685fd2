"""``python -m fedjax_sim.study FILE.toml``: tunes and compares methods as a file describes."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_sim import bench
from fedjax_sim.base.files import write_text
from fedjax_sim.base.words import counted
from fedjax_sim.cli.claims import Claim, claim_begun, claim_new, is_free
from fedjax_sim.cli.commands import complain, enter, plain
from fedjax_sim.cli.folder import write_json
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.reading import CELLS
from fedjax_sim.cli.resuming import to_go_on
from fedjax_sim.cli.stopping import STOPPING, Stopped
from fedjax_sim.cli.studies.asked import FILE, PROGRAM, Asked, parse_study
from fedjax_sim.cli.studies.plan import Cell, Study, read_study
from fedjax_sim.cli.studies.results import write_results
from fedjax_sim.engine.memory import trim
from fedjax_sim.run.environment import versions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 1 if a loss diverged, 2 for bad input, 130 for Ctrl-C, 143 for SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        asked = parse_study(argv)
        study = read_study(asked.file, asked.trust)
        if asked.dry_run:
            _show_plan(study, asked)
            return 0
        claim = _open(study, asked)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return complain(PROGRAM, f"error: {plain(error)}", 2)
    first, step = asked.shard
    part = f" --shard {first}/{step}" * (step > 1)
    on = f"continue with: {to_go_on(PROGRAM, claim.path)}{part}"
    try:
        return _carry_out(study, asked._replace(folder=claim.path), on)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return complain(PROGRAM, f"error: {plain(error)}; {on}", 2)
    finally:
        claim.release()


def _carry_out(study: Study, asked: Asked, on: str) -> int:
    """Runs the cells and writes the tables; returns the status of the command.

    ``on`` is the command that resumes the study.
    """
    print(study)
    mine = {cell.name: cell for cell in _mine(study, asked)}
    statuses: dict[str, int] = {}

    def stopped(status: int) -> int:
        return complain(PROGRAM, f"stopped; {on}", status)

    STOPPING.last_words.append(stopped)
    try:
        for number, (name, cell) in enumerate(mine.items(), 1):
            print(f"\n[{number}/{len(mine)}] {name}\n", flush=True)
            statuses[name] = status = bench.main(_argv(cell, asked))
            if status > 2:
                return stopped(status)
            STOPPING.check()
            jax.clear_caches()  # another cell has other shapes
            trim()
    except KeyboardInterrupt as error:
        return stopped(error.status if isinstance(error, Stopped) else bench.INTERRUPTED)
    finally:
        STOPPING.last_words.remove(stopped)
    lacking = [name for name in mine if statuses[name] == 2]
    if len(mine) == len(study.cells) > len(lacking):
        done = mine.keys() - {*lacking}
        print(f"\n{write_results(study, done, asked.folder)}")
        print(f"tables, and results.csv with the selected settings: {asked.folder}")
        print(f"a page: python -m fedjax_sim.report {shlex.quote(str(asked.folder))}")
    elif not lacking:
        print(f"\n{counted(len(mine), 'cell')} of {len(study.cells)}: {asked.folder}")
        print(f"all together: python -m {PROGRAM} --merge DIR DIR ... --out DIR")
    if lacking:
        return complain(PROGRAM, f"error: no results of {', '.join(lacking)}: see above; {on}", 2)
    return max(statuses.values(), default=0)


def _open(study: Study, asked: Asked) -> Claim:
    """Claims the folder; if it is resumed, checks that its cells match the file."""
    text = asked.file.read_text(encoding="utf-8")
    if asked.resumed:
        for cell in study.cells:
            folder = _folder(asked, cell)
            if (folder / "config.json").exists():
                parse([*cell.argv, *asked.to_resume(folder)])
                read_summary(folder)  # before anything runs, if it is damaged
            elif not is_free(folder):
                raise ValueError(f"{folder} has files, but no config.json: move it away")
        claim = claim_begun(asked.folder)
    else:
        claim = claim_new(asked.folder, named=asked.named)
    record: dict[str, Any] = {
        "rows": study.rows,
        "baseline": study.baseline,
        "columns": study.across,
        "cells": [{"folder": f"{CELLS}/{c.name}", "settings": c.settings} for c in study.cells],
        "versions": versions(),
    }
    try:
        write_text(claim.path / FILE, text)
        write_json(claim.path / "study.json", record)
        _copy_cells(study, asked, claim.path)
    except (ValueError, OSError):
        claim.release(remove=True)
        raise
    return claim


def _copy_cells(study: Study, asked: Asked, into: Path) -> None:
    """Copies the cells of other folders of the study, each once."""
    for cell in study.cells:
        for folder in asked.merged:
            source, target = folder / CELLS / cell.name, into / CELLS / cell.name
            if (source / "config.json").exists() and not target.exists():
                parse([*cell.argv, *asked.to_resume(source)])  # it is this cell
                shutil.copytree(source, target, symlinks=True)


def _mine(study: Study, asked: Asked) -> Sequence[Cell]:
    """Returns the cells of the shard."""
    first, step = asked.shard
    return study.cells[first - 1 :: step]


def _argv(cell: Cell, asked: Asked) -> list[str]:
    """The arguments of the command that starts or resumes a cell."""
    return [*cell.argv, *asked.machine, "--out", str(_folder(asked, cell)), "--or-resume"]


def _folder(asked: Asked, cell: Cell) -> Path:
    return asked.folder / CELLS / cell.name


def _show_plan(study: Study, asked: Asked) -> None:
    print(study)
    for row, texts in study.rows.items():
        several = f", of which validation chooses one: {' '.join(texts)}"
        print(f"  {row}: {counted(len(texts), 'setting')}{several * (len(texts) > 1)}")
    for cell in _mine(study, asked):
        print(f"\n{cell.name}:\n  {shlex.join(['python', '-m', bench.PROGRAM, *cell.argv])}")


if __name__ == "__main__":
    enter(lambda: bench.leave(main()))
