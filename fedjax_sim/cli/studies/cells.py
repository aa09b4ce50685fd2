"""Runs the cells of a study, one after the other or all by an executor."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path

import jax

from fedjax_sim.cli.studies.executors import opened
from fedjax_sim.engine.memory import trim

LOSSES = 4
"""Workers that may be lost in a row, without a cell that ends meanwhile."""

POLL = 0.2
"""Seconds between two looks at what runs."""

Main = Callable[[Sequence[str]], int]

_one = threading.Lock()


def run_cell(main: Main, argv: Sequence[str], where: str, log: str) -> int:
    """Runs a cell in a worker, with paths and modules as seen from the folder ``where``.

    Cells of one process run one after the other, and print to the file ``log``.
    """
    if where not in sys.path:
        sys.path.insert(0, where)
    with (
        _one,
        contextlib.chdir(where),
        Path(log).open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            return main([*argv])
        except Exception:
            traceback.print_exc()
            return 2
        finally:
            jax.clear_caches()  # another cell has other shapes
            trim()


def by_executor(
    text: str, main: Main, cells: Mapping[str, Sequence[str]], folder: Path
) -> Iterator[tuple[str, int]]:
    """Runs cells by an executor; one whose worker is lost goes on with another.

    It yields each cell as it ends, with its status.

    Raises:
        ValueError: if there is no such executor, or workers are lost again and again.
    """
    waiting, losses = dict(cells), 0
    while waiting:
        with opened(text) as executor:

            def begin(name: str, on: Executor = executor) -> Future[int]:
                return on.submit(
                    run_cell, main, waiting[name], os.getcwd(), str(folder / f"{name}.log")
                )

            jobs, broken = {name: begin(name) for name in waiting}, False
            while jobs and not broken:
                time.sleep(POLL)
                for name, job in [*jobs.items()]:
                    if not job.done():
                        continue
                    try:
                        status = job.result()
                    except Exception as error:  # the executor's: run_cell has none
                        losses += 1
                        if losses == LOSSES:
                            raise ValueError(
                                f"--executor {text}: lost {LOSSES} workers in a row, the last by "
                                f"{type(error).__name__}: {error}"
                            ) from error
                        if broken := isinstance(error, BrokenExecutor):
                            break  # all are lost
                        jobs[name] = begin(name)
                        continue
                    losses = 0
                    del jobs[name], waiting[name]
                    yield name, status
