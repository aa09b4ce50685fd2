"""``python -m fedjax_sim.bench``: compares algorithms; prints tables and writes a run folder."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_sim.base.data import ElsewhereError
from fedjax_sim.cli.build import Setup, build
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
    run,
)
from fedjax_sim.cli.stopping import STOPPING, Stopped
from fedjax_sim.cli.summary import show
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
    command = _Command(sys.argv[1:] if argv is None else list(argv))
    STOPPING.last_words.append(command.stopped_at_once)
    try:
        setup = command.prepare()
        return setup if isinstance(setup, int) else command.carry_out(setup)
    except KeyboardInterrupt as error:
        status = command.stopped(error.status if isinstance(error, Stopped) else INTERRUPTED)
        if isinstance(error, Stopped):
            wait()
        return status
    finally:
        STOPPING.patient = False
        STOPPING.last_words.remove(command.stopped_at_once)
        command.close()


class _Command:
    """A call of the command, and its run folder as soon as there is one."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self.folder: RunFolder | None = None

    def prepare(self) -> Setup | int:
        """Builds and checks everything, and opens the run folder.

        Returns:
            What there is to run, or the exit status if there is nothing.
        """
        try:
            config = parse(self.argv)
            machine = config.machine
            if machine.or_resume and machine.resume is not None:
                done = finished_status(config, Path(machine.resume))
                if done is not None:
                    return done
            start_jax(machine)
            with in_step() as same:
                setup = build(config)
                problem = setup.problem
                same += [repr((config.record(), versions()))]
                same += [problem.data, problem.test, problem.validation]
                same += checkpoints_found(config)
                if machine.dry_run:
                    print(setup.about.text())
                    show_plan(setup)
                    return 0
                STOPPING.patient = True
                if writes():
                    self.folder = open_folder(setup, self.argv)
            return setup
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            return complain(PROGRAM, f"error: {plain(error)}", 2)

    def carry_out(self, setup: Setup) -> int:
        """Runs the algorithms, prints the tables, and returns the exit status."""
        command = shlex.join(["python", "-m", PROGRAM, *self.argv])
        if self.folder is not None:
            print(setup.about.text(), flush=True)
        try:
            with warnings_in_a_line(PROGRAM):
                watch = nobody if self.folder is None else bar
                outcome = run(setup, self.folder, command, watch)
                if self.folder is not None and outcome.results:
                    show(setup, outcome.summaries)
                    print(f"\nrecords and pictures: {self.folder.path}")
        except (TooLargeError, ElsewhereError, CheckpointError) as error:
            return complain(PROGRAM, f"error: {flagged(error, ON_HOST)}{self._kept()}", 2)
        except BrokenPipeError:
            raise
        except OSError as error:
            return complain(PROGRAM, f"error: {plain(error)}{self._kept()}", 2)
        except jax.errors.JaxRuntimeError as error:
            if not jax.distributed.is_initialized():
                raise
            why = str(error).partition("\n")[0]
            return complain(PROGRAM, f"error: lost another process: {why}{self._kept()}", LOST)
        if writes():
            for name, message in outcome.diverged.items():
                complain(PROGRAM, f"error: {name}: {message}{self._kept(ended=True)}", 1)
        wait()
        return 1 if outcome.diverged else 0

    def stopped(self, status: int) -> int:
        """Prints that the run stopped and where its records are; returns the status."""
        return complain(PROGRAM, f"stopped{self._kept()}", status)

    def stopped_at_once(self, status: int) -> None:
        """Prints this and closes the folder: the process ends without returning to ``main``."""
        self.stopped(status)
        self.close()

    def close(self) -> None:
        """Closes the folder, if there is one."""
        if self.folder is not None:
            self.folder.close()

    def _kept(self, *, ended: bool = False) -> str:
        folder = self.folder
        if folder is None and jax.distributed.is_initialized() and not writes():
            return ""  # process 0 knows
        if folder is None or not (folder.recorded or folder.saved):
            return "; nothing was recorded"
        kept = f"; the records so far are in {folder.path}"
        if folder.checkpoints.exists() and not ended:
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
