"""Training speed of `fedjax_sim` next to what users have today, on this machine, in one run.

    python -m benchmarks.speed --work W1 W4 --contestants ours torch4

Every pair of workload and contestant runs in a process of its own, one after another, so that
thread pools, devices and memory are apart. Compiling and starting processes come before the
clock and are reported apart. Speed is real training samples per second; padding does not count.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import PINS, python_of
from benchmarks.workloads import WORKLOADS, Timing, Workload

HERE = Path(__file__).resolve().parent
CONTESTANTS = {
    "ours": "fedjax_sim",
    "plain": "flax and optax, vmap over the cohort of a scan over padded steps",
    "torch": "PyTorch, one process, its best number of threads",
    "torch4": "PyTorch, one process of one thread per device (4 by default)",
    "fedjax": "FedJAX, a client after another, a jitted step for each minibatch",
    "pfl": "pfl-research with PyTorch, one process",
    "flower": "Flower's simulation with PyTorch, a Ray actor of one thread per device",
}
"""Those of PINS run in environments of their own, which `python -m benchmarks.peers` makes."""
OWN = [name for name in CONTESTANTS if name not in PINS]
PATIENCE = 6  # a measurement of one round may last this many times `--seconds`

Run = Callable[[Workload, int, int], Timing]


def find_run(contestant: str) -> Run:
    """The function of a contestant, imported only here: the parent process stays small."""
    module, name = {
        "ours": ("benchmarks.baselines.ours", "run"),
        "plain": ("benchmarks.baselines.plain_jax", "run"),
        "torch": ("benchmarks.baselines.torch_loop", "run"),
        "torch4": ("benchmarks.baselines.torch_loop", "run_processes"),
        "fedjax": ("benchmarks.peers.fedjax_loop", "run"),
        "pfl": ("benchmarks.peers.pfl_loop", "run"),
        "flower": ("benchmarks.peers.flower_simulation", "run"),
    }[contestant]
    run: Run = getattr(importlib.import_module(module), name)
    return run


def cut(run: Run, workload: Workload, devices: int, seconds: float) -> tuple[Workload, Timing]:
    """Fewer clients per round if a whole round would outlast PATIENCE times `seconds`.

    A tenth of the cohort is tried, as a round of the plain version can take minutes on CPU; the
    timing of that trial is returned too.
    """
    pilot = dataclasses.replace(workload, cohort=max(2, workload.cohort // 10))
    trial = run(pilot, 1, devices)
    whole_round = trial.seconds * workload.cohort / pilot.cohort
    cohort = int(workload.cohort * PATIENCE * seconds / whole_round)
    return dataclasses.replace(workload, cohort=max(1, min(cohort, workload.cohort))), trial


def measure(
    contestant: str, workload: Workload, devices: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """Measures a contestant, on a smaller cohort if a round of the plain version takes too long."""
    run, whole, trial_seconds = find_run(contestant), workload, 0.0
    if contestant == "plain":
        workload, trial = cut(run, workload, devices, seconds)
        trial_seconds = trial.compile_seconds
    found = repeat(run, workload, devices, seconds, repeats)
    notes = [found["note"]] if found["note"] else []
    if workload.cohort < whole.cohort:
        notes.append(f"cut to {workload.cohort} of {whole.cohort} clients a round")
    return {
        **found,
        "compile_seconds": max(found["compile_seconds"], trial_seconds),
        "peak_mb": peak_mb(),
        "note": ", ".join(notes),
        **({"versions": installed()} if contestant in PINS else {}),
    }


def repeat(
    run: Run, workload: Workload, devices: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """Repeat a measurement of about `seconds` after finding how many rounds it takes.

    A measurement is one run of many rounds, or several runs where the workload bounds their length.
    """
    timings = [run(workload, 1, devices)]
    rounds, calls = 1, 1
    for target in (seconds / 10, seconds):  # the first round alone is a poor guide
        wanted = max(rounds, math.ceil(target * rounds / timings[-1].seconds))
        rounds = min(wanted, workload.max_rounds or wanted)
        calls = math.ceil(wanted / rounds)
        if target < seconds and rounds > 1:
            timings.append(run(workload, rounds, devices))
    repetitions = []
    for _ in range(repeats):
        done = [run(workload, rounds, devices) for _ in range(calls)]
        timings += done
        repetitions.append({"seconds": sum(t[0] for t in done), "samples": sum(t[1] for t in done)})
    return {
        "samples_per_second": statistics.median(r["samples"] / r["seconds"] for r in repetitions),
        "compile_seconds": max(t.compile_seconds for t in timings),
        "cohort": workload.cohort,
        "rounds_per_run": rounds,
        "runs_per_repetition": calls,
        "repetitions": repetitions,
        "note": timings[-1].note,
    }


def peak_mb() -> float:
    """Peak resident memory of this process and its workers.

    Shared memory and mapped files (libraries) count once, in the parent.
    """
    total = _status_kb("self", "VmHWM")
    for child in multiprocessing.active_children():
        pid = str(child.pid)
        shared = _status_kb(pid, "RssShmem") + _status_kb(pid, "RssFile")
        total += _status_kb(pid, "VmHWM") - shared
    return total / 1024


def _status_kb(pid: str, field: str) -> int:
    # Not getrusage: its maximum survives fork and exec, so a child would start with its parent's.
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        import resource

        scale = 1024 if sys.platform == "darwin" else 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // scale
        return peak if (pid, field) == ("self", "VmHWM") else 0
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def spawn(contestant: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own; a failure becomes `{"error": ...}`."""
    job = json.dumps([contestant, name, args.devices, args.seconds, args.repeats])
    python = python_of(contestant) if contestant in PINS else sys.executable
    command = [python, "-m", "benchmarks.speed", "--job", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"work": name, "contestant": contestant, "error": lines[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"work": name, "contestant": contestant, **result}


def installed() -> dict[str, str]:
    """The versions in a peer's environment, which cannot import this package."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "torch", "numpy", "fedjax", "pfl", "flwr", "ray"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def add_ratios(results: list[dict[str, Any]]) -> None:
    """Give every result the speed of ours divided by its own, where both are known."""
    speed = "samples_per_second"
    ours = {r["work"]: r[speed] for r in results if r["contestant"] == "ours" and speed in r}
    for result in results:
        if speed in result and result["work"] in ours:
            result["ratio"] = ours[result["work"]] / result[speed]


ROW = "{:<5}{:<12}{:>11}{:>8}{:>11}{:>9}  {}"


def print_row(result: dict[str, Any]) -> None:
    """One line of the table."""
    name = (result["work"], result["contestant"])
    if "error" in result:
        print(ROW.format(*name, "-", "-", "-", "-", result["error"][:80]))
        return
    ratio = f"{result['ratio']:.2f}" if "ratio" in result else "-"
    speed, start = f"{result['samples_per_second']:,.0f}", f"{result['compile_seconds']:.1f}"
    print(ROW.format(*name, speed, ratio, start, f"{result['peak_mb']:,.0f}", result["note"]))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    contestants = "\n".join(f"  {key:<8}{text}" for key, text in CONTESTANTS.items())
    works = "\n".join(f"  {w.name:<8}{w.title}" for w in WORKLOADS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        epilog=f"workloads:\n{works}\n\ncontestants:\n{contestants}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--work", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=OWN, metavar="NAME")
    add("--devices", type=int, default=4, help="devices of ours, processes of torch4")
    add("--repeats", type=int, default=3, help="measurements; the median counts")
    add("--seconds", type=float, default=8.0, help="target length of a measurement")
    add("--out", type=Path, default=HERE / "results" / "speed.jsonl", help="one line per run")
    add("--job", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def available(contestants: list[str]) -> list[str]:
    """Contestants that can run here, and one line with the reason for each of the others."""
    for name in sorted(PINS.keys() & set(contestants)):
        if not python_of(name).exists():
            print(f"{name} is not installed: python -m benchmarks.peers {name}")
            contestants = [c for c in contestants if c != name]
    if importlib.util.find_spec("torch") is None and {"torch", "torch4"} & set(contestants):
        print("torch is not installed: pip install '.[benchmarks]'")
        return [c for c in contestants if not c.startswith("torch")]
    if "torch4" in contestants and shutil.which("nvidia-smi"):
        import torch

        if torch.cuda.is_available():
            print("torch4 is for CPUs: here torch runs in one process on the GPU")
            return [c for c in contestants if c != "torch4"]
    return contestants


def main(argv: list[str] | None = None) -> None:
    """Run every pair, print the table, append one JSON line."""
    args = parse(argv)
    if args.job:
        contestant, name, devices, seconds, repeats = json.loads(args.job)
        print(json.dumps(measure(contestant, WORKLOADS[name], devices, seconds, repeats)))
        return
    started = time.time()
    pairs = itertools.product(args.work, available(args.contestants))
    results = []
    for name, contestant in pairs:
        print(f"{name} {contestant} ...", file=sys.stderr, flush=True)
        results.append(spawn(contestant, name, args))
    add_ratios(results)
    print("Random data of the right shapes: speed does not depend on its content.")
    print(ROW.format("work", "contestant", "samples/s", "ours/it", "compile s", "peak MB", "note"))
    for result in results:
        print_row(result)
    from fedjax_sim.run.environment import environment  # not before: the parent stays small

    record = {
        **environment(started=started),
        "devices": args.devices,
        "seconds": args.seconds,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
