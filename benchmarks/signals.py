"""Signals at random moments of commands: is each heard, and does the run go on to the bit?

    python -m benchmarks.signals                # 200 signals, two at a time
    python -m benchmarks.signals --count 20

Three methods and a study run undisturbed once. Then each command gets SIGINT or SIGTERM at a random
moment of its life (import, compile, train, save, draw), half of them a second one soon after, and
resumes with the command in its last line, until it ends. Exit status 1 if a process ignored a
signal for a second, lived five seconds after a second one, or ended with another result.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

STUDY = """
run = {model = "logistic", clients = 6, rounds = 10, seeds = 1}
grid = {emd = [0.5, 1.4]}
methods = ["fedavg(lr=0.1)", "fedavg(lr=0.01)"]
"""
SMALL = "--clients 12 --clients-per-round 6 --model logistic --compare none --checkpoint-every 0.1"
COMMANDS = {
    "fedavg": f"bench --algo fedavg {SMALL} --rounds 60 --eval-every 20",
    "scaffold": f"bench --algo scaffold {SMALL} --rounds 40 --eval-every 7",
    "phase_shift": f"bench --algo phase_shift {SMALL} --rounds 40 --eval-every 40",
    "study": "study FILE",
}
HEARD, ENDED, STARTED = 1.0, 5.0, 0.2
"""Bounds in seconds: until a signal is answered, until a second signal has ended the process, and
until Python runs the package, before which a signal ends the process without a line."""


class Life(NamedTuple):
    """The outcome of a process that received signals.

    Attributes:
        status: its exit status.
        heard: seconds until it said something; None if it had ended before.
        ended: seconds from its last signal to its end.
        err: what it said.
    """

    status: int
    heard: float | None
    ended: float
    err: str


def live(argv: Sequence[str], waits: Sequence[float]) -> Life:
    """Runs a command, which gets a signal after each of some waits."""
    said: list[tuple[float, str]] = []
    sent: list[float] = []
    with subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:

        def listen() -> None:
            assert process.stderr is not None
            said.extend((time.perf_counter(), line) for line in process.stderr if line.strip())

        listener = threading.Thread(target=listen)
        listener.start()
        for wait in waits:
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                sent.append(time.perf_counter())
                process.send_signal(random.choice((signal.SIGINT, signal.SIGTERM)))
        status = process.wait()
        now = time.perf_counter()
        listener.join()
    heard = None
    if sent:
        heard = min((at - sent[0] for at, line in said if at > sent[0]), default=float("inf"))
    return Life(status, heard, now - sent[-1] if sent else 0.0, "".join(line for _, line in said))


def command(name: str, out: Path) -> list[str]:
    """The command of that name, into a new folder."""
    file = out.parent / "study.toml"
    file.write_text(STUDY, encoding="utf-8")
    module, *flags = COMMANDS[name].replace("FILE", str(file)).split()
    return [
        sys.executable,
        "-m",
        f"fedjax_sim.{module}",
        *flags,
        "--devices",
        "1",
        "--out",
        str(out),
    ]


def results(out: Path) -> dict[str, bytes]:
    """The files that must be the same, by name."""
    names = "metrics.jsonl", "results.csv", "clients.jsonl"
    found = (path for path in sorted(out.rglob("*")) if path.name in names)
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def trial(name: str, seconds: float, whole: dict[str, bytes], draw: random.Random) -> list[Any]:
    """Gives a command signals until it ends by itself; returns what was seen, by life."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        argv = command(name, out)
        for turn in range(3):
            first = draw.uniform(0, 0.8 * seconds)
            waits = [first, draw.uniform(0, 1)] if draw.random() < 0.5 else [first]
            life = live(argv, waits if turn == 0 else ())
            if turn == 0 and first < STARTED and life.status < 0 and not life.err:
                found.append((life._replace(heard=None), []))
                continue
            wrong = []
            if life.heard is not None and life.heard > HEARD:
                wrong.append(f"heard after {life.heard:.2f} s")
            if turn == 0 and len(waits) == 2 and life.ended > ENDED:
                wrong.append(f"ended {life.ended:.2f} s after the second signal")
            if life.status not in (0, 130, 143) or "Traceback" in life.err:
                wrong.append(f"status {life.status}: {life.err.strip()[-300:]}")
            found.append((life, wrong))
            if life.status == 0:
                break
            config = out / ("study.toml" if name == "study" else "config.json")
            if config.exists():
                argv = [*command(name, out)[:3], "--devices", "1", "--resume", str(out)]
        if life.status != 0 or results(out) != whole:
            found[-1][1].append("another result than without signals")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="commands that get signals")
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    # A shell lets what it starts in the background ignore SIGINT, children included.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    known: dict[str, tuple[float, dict[str, bytes]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in COMMANDS:
            out = Path(folder) / name / "run"
            out.parent.mkdir()
            began = time.perf_counter()
            subprocess.run(command(name, out), capture_output=True, check=True)
            known[name] = time.perf_counter() - began, results(out)
            print(f"fedjax_sim.{COMMANDS[name]}: {known[name][0]:.1f} s", flush=True)
    names = [*COMMANDS] * -(-args.count // len(COMMANDS))
    with ThreadPoolExecutor(args.at_once) as pool:
        jobs = [
            pool.submit(trial, name, *known[name], random.Random(f"{args.seed}.{i}"))
            for i, name in enumerate(names[: args.count])
        ]
        lives = [
            (name, *one) for name, job in zip(names, jobs, strict=False) for one in job.result()
        ]
    heard = [life.heard for _, life, _ in lives if life.heard is not None]
    counts = Counter(life.status for _, life, _ in lives)
    print(f"{len(heard)} signals, heard after at most {max(heard):.2f} s; statuses {dict(counts)}")
    for name, _, wrong in lives:
        for what in wrong:
            print(f"{name}: {what}")
    return int(any(wrong for *_, wrong in lives))


if __name__ == "__main__":
    sys.exit(main())
