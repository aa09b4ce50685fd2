"""``python -m fedjax_sim.bench``: compares algorithms; prints tables and writes a run folder."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_sim.base.data import ElsewhereError
from fedjax_sim.cli.build import build
from fedjax_sim.cli.commands import complain, enter, plain, warnings_in_a_line
from fedjax_sim.cli.dry import show_plan
from fedjax_sim.cli.flags import flagged
from fedjax_sim.cli.folder import RunFolder
from fedjax_sim.cli.machine import ON_HOST, start_jax
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.processes import in_step, wait, writes
from fedjax_sim.cli.resuming import to_go_on
from fedjax_sim.cli.running import (
    checkpoints_found,
    finished_status,
    open_folder,
    programs,
    run,
    show_outcome,
)
from fedjax_sim.cli.stopping import STOPPING, Stopped
from fedjax_sim.cli.watching import bar, nobody
from fedjax_sim.engine.memory import TooLargeError
from fedjax_sim.run import CheckpointError
from fedjax_sim.run.environment import versions

PROGRAM = "fedjax_sim.bench"
LOST, INTERRUPTED, TERMINATED = 3, 130, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None: the arguments of this process.

    Returns:
        The exit status: 0, 1 if a loss diverged, 2 for bad input, 3 if another process of the run
        is lost, 130 for Ctrl-C, 143 for SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    folder: RunFolder | None = None
    command = shlex.join(["python", "-m", PROGRAM, *argv])

    def stopped(status: int) -> int:
        return complain(PROGRAM, f"stopped{_kept(folder)}", status)

    def stopped_at_once(status: int) -> None:
        stopped(status)
        if folder is not None:
            folder.close()

    STOPPING.last_words.append(stopped_at_once)
    try:
        try:
            config = parse(argv)
            if config.machine.or_resume and config.machine.resume is not None:
                done = finished_status(config, Path(config.machine.resume))
                if done is not None:
                    return done
            start_jax(config.machine)
            with in_step() as same:
                setup = build(config)
                problem = setup.problem
                same += [repr((config.record(), versions()))]
                same += [problem.data, problem.test, problem.validation]
                same += checkpoints_found(config)
                groups = programs(config, setup)
                if config.machine.dry_run:
                    print(setup.about.text())
                    show_plan(config, setup, groups)
                    return 0
                STOPPING.patient = True
                folder = open_folder(config, setup, groups, argv) if writes() else None
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            return complain(PROGRAM, f"error: {plain(error)}", 2)
        if folder is not None:
            print(setup.about.text(), flush=True)
        try:
            with warnings_in_a_line(PROGRAM):
                shown = nobody if folder is None else bar
                outcome = run(config, setup, groups, folder, command, shown)
                if folder is not None:
                    show_outcome(outcome, config, setup, folder.path)
        except (TooLargeError, ElsewhereError, CheckpointError) as error:
            return complain(PROGRAM, f"error: {flagged(error, ON_HOST)}{_kept(folder)}", 2)
        except BrokenPipeError:
            raise
        except OSError as error:
            return complain(PROGRAM, f"error: {plain(error)}{_kept(folder)}", 2)
        except jax.errors.JaxRuntimeError as error:
            if not jax.distributed.is_initialized():
                raise
            why = str(error).partition("\n")[0]
            return complain(PROGRAM, f"error: lost another process: {why}{_kept(folder)}", LOST)
        if writes():
            for name, message in outcome.diverged.items():
                complain(PROGRAM, f"error: {name}: {message}{_kept(folder)}", 1)
        wait()
    except KeyboardInterrupt as error:
        status = stopped(error.status if isinstance(error, Stopped) else INTERRUPTED)
        if isinstance(error, Stopped):
            wait()
        return status
    finally:
        STOPPING.patient = False
        STOPPING.last_words.remove(stopped_at_once)
        if folder is not None:
            folder.close()
    return 1 if outcome.diverged else 0


def _kept(folder: RunFolder | None) -> str:
    if folder is None and jax.distributed.is_initialized() and not writes():
        return ""  # process 0 knows
    if folder is None or not (folder.recorded or folder.saved):
        return "; nothing was recorded"
    kept = f"; the records so far are in {folder.path}"
    if folder.checkpoints.exists():
        kept += f"; continue with: {to_go_on(PROGRAM, folder.path)}"
    return kept


def leave(status: int) -> int:
    """The status; a process that was stopped or left alone ends at once.

    It would wait for programs that XLA still compiles, and for the other processes.
    """
    if status in (LOST, INTERRUPTED, TERMINATED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    enter(lambda: leave(main()))
