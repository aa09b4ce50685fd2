"""Signals: what a thread hears ends a command at once, or when its work is safe."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from benchmarks import signals
from fedjax_sim.cli.stopping import Stopped, Stopping


class Noting(Stopping):
    """Notes what would end the process."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int | str] = []
        self.leave = self.told.append
        self.last_words.append(lambda status: self.told.append("outer"))
        self.last_words.append(lambda status: self.told.append("inner"))


@pytest.fixture
def stopping() -> Noting:
    return Noting()


def test_nothing_would_be_lost(stopping: Noting) -> None:
    stopping.check()
    stopping.hear(signal.SIGTERM)
    assert stopping.told == ["inner", "outer", 143]


def test_a_patient_command_stops_when_it_looks(stopping: Noting) -> None:
    stopping.patient = True
    stopping.hear(signal.SIGTERM)
    assert stopping.told == []
    with pytest.raises(Stopped) as stopped:
        stopping.check()
    assert stopped.value.status == 143
    stopping.hear(signal.SIGINT)
    assert stopping.told == [130]


def test_one_process_stops_them_all(stopping: Noting) -> None:
    with pytest.raises(Stopped):
        stopping.check(lambda number: max(number, signal.SIGTERM))


BUSY = """
import hashlib
from fedjax_sim.cli.commands import enter
def main():
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
    return 0
enter(main)
"""
"""A command whose main thread is in a C function for minutes."""


@pytest.mark.parametrize("argv", [["-c", BUSY], ["-m", "fedjax_sim.bench"]])
def test_it_is_heard_whatever_runs(argv: list[str]) -> None:
    """A long call, or the imports."""
    for wait in (0.5, 1.0, 2.0):
        process = subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        if argv[0] == "-c":
            assert process.stdout.readline() == "busy\n"
        else:
            time.sleep(wait)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
        if process.returncode != -signal.SIGTERM:  # it came before Python itself was there
            break
    assert process.returncode == 143
    assert err == "\nfedjax_sim: stopped\n"


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_signals_at_random_moments() -> None:
    """Also a second one; each run goes on to the bit."""
    assert signals.main(["--count", "4"]) == 0
