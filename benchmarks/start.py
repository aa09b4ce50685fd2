"""CPU seconds of the main command from start to finish, with nothing compiled beforehand.

    git worktree add ../before COMMIT && python3 -m venv ../before/venv
    ../before/venv/bin/pip install ../before
    taskset -c 0,1 python -m benchmarks.start ../before/venv/bin/python

Runs the command with each Python that is named, and with this one, one after the other, in an empty
folder and with an empty cache, and prints a table in markdown. The first run of each is left out:
it reads the packages from the disk.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record

COMMAND = "-m fedjax_sim.bench --algo phase_shift --phases 4 --seeds 1"


def measured(python: str) -> float:
    """User CPU seconds of one run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        printed = subprocess.run(
            [python, *COMMAND.split(), "--out", f"{folder}/run"],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if printed.returncode:
            sys.exit(f"{python}: {printed.stderr}")
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    """Runs, measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", help="others, in whose environments a fedjax_sim is")
    parser.add_argument("--runs", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    args = parser.parse_args()
    started = time.time()
    pythons = [*args.pythons, sys.executable]
    seconds: dict[str, list[float]] = {python: [] for python in pythons}
    for turn in range(args.runs + 1):
        for python in pythons:
            used = measured(python)
            print(f"{python}: {used:.1f} s{'' if turn else ', left out'}", file=sys.stderr)
            if turn:
                seconds[python].append(used)
    first = sum(seconds[pythons[0]])
    rows = [
        {
            "Python": python,
            "user CPU seconds": ", ".join(f"{used:.1f}" for used in found),
            "mean": sum(found) / args.runs,
            "of the first": sum(found) / first,
        }
        for python, found in seconds.items()
    ]
    print(markdown(rows))
    if args.out is not None:
        write_record(args.out, started, runs=seconds)


if __name__ == "__main__":
    main()
