"""One run on an accelerator: what it computes, and how fast, in ten minutes.

    python -m benchmarks.device --out DIR           # all stages
    python -m benchmarks.device speed conv          # some
    python -m benchmarks.device --small             # in tiny sizes on CPU, to see that it runs

A bare machine needs Python 3.11 or newer, this repository's folders `fedjax_sim` and `benchmarks`,
and `pip install "jax[cuda12]" flax optax`; `pip install torch` adds PyTorch's rows. Nothing is
downloaded: all samples are random.

Each stage has a limit in seconds and runs in a process of its own. Each measurement is a line of
JSON, printed and written to DIR/STAGE.jsonl as soon as it is known; an error is a line too, and so
is a measurement that is skipped because its stage has too little time left. The exit status is 0
if no line is an error, and 2 if there is no accelerator.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import fedjax_sim as fs
from benchmarks import methods
from benchmarks.aot import TEXTS, text_experiment
from benchmarks.baselines import ours
from benchmarks.speed import Run, find_run, repeat
from benchmarks.workloads import WORKLOADS, Timing, Workload
from fedjax_sim.cli.training import Precision
from fedjax_sim.engine.memory import MB
from fedjax_sim.models.convolutions import LOWERINGS, Lowering
from fedjax_sim.run.environment import environment

HERE = Path(__file__).resolve().parent
GRACE = 10  # seconds after its limit that a stage is killed
SECONDS = 1.5  # the length of a measurement of speed
QUICK = "--xla_backend_optimization_level=0"  # for `--small`: most of its time is compiling
FLAGS = (
    "",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",
    "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_unroll_loops=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_gpu_graph_min_graph_size=1",
    "--xla_gpu_autotune_level=0",
)
"""XLA's options for GPUs, each tried in a process of its own. An unknown one ends a process on
CPU too: `--small` gives it all of them."""

Row = dict[str, Any]


class Stage:
    """A stage at work: it writes lines until its time is over.

    Attributes:
        small: whether all sizes are tiny.
    """

    def __init__(self, path: Path, seconds: float, small: bool) -> None:
        self.small = small
        self._path, self._end = path, time.monotonic() + seconds

    def note(self, **row: Any) -> None:
        """Writes and prints a line."""
        line = json.dumps({"stage": self._path.stem, **row}, default=float)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)

    def attempt(self, need: float, measure: Callable[[], Row], **what: Any) -> None:
        """Notes a measurement, for which a GPU needs so many seconds, or why there is none."""
        began = time.monotonic()
        if self._end - began < need:
            self.note(**what, skipped=f"{self._end - began:.0f} s left, {need:.0f} needed")
            return
        try:
            row = measure()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:300]
            self.note(**what, error=message, trace=traceback.format_exc()[-600:])
        else:
            self.note(**(what | row), seconds=round(time.monotonic() - began, 1))


def env(stage: Stage) -> None:
    """The machine, and the most that it does: products, copies, launches of kernels."""
    device, small = jax.devices()[0], stage.small
    stage.note(
        **environment(),
        kind=device.device_kind,
        devices=list(map(str, jax.devices())),
        memory_mb=(device.memory_stats() or {}).get("bytes_limit", 0) / MB,
    )
    n, steps = (256, 20) if small else (8192, 2000)

    def product(dtype: str, precision: str | None) -> Row:
        a = jax.random.normal(jax.random.key(0), (n, n)).astype(dtype)
        run = jax.jit(functools.partial(jnp.matmul, precision=precision))
        return {"tflops": 2 * n**3 / seconds_of(lambda: run(a, a), small) / 1e12}

    def copy() -> Row:
        a, run = jnp.ones(16 * n * n), jax.jit(lambda a: a + 1)
        return {"tb_per_second": 2 * a.nbytes / seconds_of(lambda: run(a), small) / 1e12}

    def loop(end: str, kernels: int) -> Row:
        def body(_: Any, x: jax.Array) -> jax.Array:
            for _ in range(kernels):
                x = jax.lax.optimization_barrier(jnp.sin(x))
            return x

        def run(x: jax.Array, given: int) -> jax.Array:
            return jax.lax.fori_loop(0, steps if end == "constant" else given, body, x)

        x, jitted = jnp.ones((256, 256)), jax.jit(run)
        return {"us_per_step": 1e6 * seconds_of(lambda: jitted(x, steps), small) / steps}

    for kind in (("bfloat16", None), *(("float32", p) for p in (None, "highest", "tensorfloat32"))):
        measure = functools.partial(product, *kind)
        stage.attempt(4, measure, what="product", n=n, dtype=kind[0], precision=kind[1])
    stage.attempt(3, copy, what="copy")
    for end in ("constant", "data"):
        for kernels in (1, 10):
            measure = functools.partial(loop, end, kernels)
            stage.attempt(3, measure, what="loop", end=end, kernels=kernels)


def seconds_of(run: Callable[[], Any], small: bool) -> float:
    """Returns the mean seconds of a call, over as many calls as take half a second."""
    jax.block_until_ready(run())
    began, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - began < (0.01 if small else 0.5):
        out = run()
        calls += 1
        if calls % 8 == 0:  # the queue of an accelerator stays short
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / calls


def same(stage: Stage) -> None:
    """Weights trained here compared with a CPU's, and what must be equal to the bit."""
    here, cpu = fs.make_execution(1), fs.make_execution(1, backend="cpu")
    apart, laned = (fs.make_execution(1, lanes=lanes) for lanes in (0, 2))

    def weights(method: Any, execution: fs.Execution, precision: str | None) -> Any:
        with jax.default_matmul_precision(precision or "default"):
            return methods.outcome(methods.trained(method, execution))

    def compared(one: Any, other: Any) -> Row:
        a, b = weights(*one), weights(*other)
        return {"same_bits": methods.same_bits(a, b), "gap": methods.gap(a, b)}

    fedavg, shifted = fs.fedavg, functools.partial(fs.phase_shift, phases=1)
    pairs: dict[str, Any] = {
        "fedavg again": ((fedavg, here, None), (fedavg, here, None)),
        "phase_shift(phases=1) and fedavg": ((shifted, here, None), (fedavg, here, None)),
        "lanes 0 and 2": ((fedavg, apart, "highest"), (fedavg, laned, "highest")),
        "fedavg and a CPU": ((fedavg, here, None), (fedavg, cpu, None)),
    }
    some = dict(list(methods.METHODS.items())[: 1 if stage.small else None])
    pairs |= {
        f"{name} and a CPU at highest precision": ((m, here, "highest"), (m, cpu, None))
        for name, m in some.items()
    }
    for what, pair in pairs.items():
        stage.attempt(12, functools.partial(compared, *pair), what=what)


def work_of(name: str, small: bool, **changes: Any) -> Workload:
    """Returns a workload with other fields, and tiny if it is small."""
    work = dataclasses.replace(WORKLOADS[name], **changes)
    if not small:
        return work
    shape = {"cnn": (8, 8, 3), "lstm": (8,)}.get(work.net, work.shape)
    cohort = min(work.cohort, 4)
    return dataclasses.replace(work, shape=shape, samples=16, clients=8, cohort=cohort, batch=2)


def rate(run: Run, work: Workload, small: bool) -> Row:
    """Returns the speed of a function that trains on one device."""
    found = repeat(run, work, 1, 0.01 if small else SECONDS, 1)
    return {key: found[key] for key in ("samples_per_second", "compile_seconds", "note")}


def contestant_rate(contestant: str, work: Workload, small: bool) -> Row:
    """Returns the speed of a contestant of `benchmarks.speed`."""
    return rate(find_run(contestant), work, small)


def our_rate(
    work: Workload,
    small: bool,
    *,
    precision: Precision = "f32",
    way: Lowering | None = None,
    **options: Any,
) -> Row:
    """Returns our speed on one device, with options of `make_execution`."""
    execution = fs.make_execution(1, **options)

    def run(work: Workload, rounds: int, devices: int) -> Timing:
        del devices
        return ours.run_on(execution, work, rounds, precision, way)

    found = rate(run, work, small)
    experiment = ours.session(work, execution, precision, way).experiment
    used = experiment.programs.algorithm.parts.execution.lanes
    return found | {"device_mb": experiment.device_bytes / MB, "used_lanes": used}


def speed(stage: Stage) -> None:
    """Ours compared with PyTorch, plain JAX, and plain JAX with one model for all samples."""
    every = ("W1",) if stage.small else ("W2", "W1", "W4", "W3", "W5", "W7", "W6")
    only = {"plain": ("W1", "W2", "W4"), "central": ("W1", "W2", "W3"), "bf16": ("W1", "W2")}
    only["bf16_weights"] = only["bf16"]
    if importlib.util.find_spec("torch") is None:
        only["torch"] = ()
        stage.note(who="torch", skipped="torch is not installed")
    for name in every:
        small, work = stage.small, work_of(name, stage.small)
        batch = work.cohort * work.batch
        whole = dataclasses.replace(work, clients=1, cohort=1, batch=batch, alpha=None)
        rates: dict[str, Callable[[], Row]] = {
            "ours": functools.partial(our_rate, work, small),
            "torch": functools.partial(contestant_rate, "torch", work, small),
            "plain": functools.partial(contestant_rate, "plain", work, small),
            "central": functools.partial(contestant_rate, "plain", whole, small),
            "bf16": functools.partial(our_rate, work, small, precision="bf16"),
            "bf16_weights": functools.partial(our_rate, work, small, precision="bf16_weights"),
        }
        for who, measure in rates.items():
            if name in only.get(who, every):
                stage.attempt(15, measure, work=name, who=who)


def conv(stage: Stage) -> None:
    """Each way to compute convolutions, and fewer clients at once."""
    ways: list[Row] = [{"way": way, "precision": "f32"} for way in LOWERINGS]
    ways += [{"way": way, "precision": "bf16"} for way in LOWERINGS if way != "winograd"]
    ways += [{"way": "lax", "chunk": 10}]
    for name in ("W2",) if stage.small else ("W2", "W3"):
        work = work_of(name, stage.small)
        for way in ways[3::4] if stage.small else ways:
            measure = functools.partial(our_rate, work, stage.small, **way)
            stage.attempt(15, measure, work=name, **way)


def lanes(stage: Stage) -> None:
    """Numbers of lanes with clients of unequal sizes; None is the number that we choose."""
    for cohort in (4,) if stage.small else (10, 40):
        work = work_of("W1", stage.small, cohort=cohort)
        for count in (3,) if stage.small else (None, 0, 3, 6, 20):
            measure = functools.partial(our_rate, work, stage.small, lanes=count)
            stage.attempt(10, measure, work="W1", cohort=cohort, lanes=count)


def text(stage: Stage) -> None:
    """The LSTM with several steps in each turn of its loop; the transformer, whole and by LoRA."""
    small, scan = stage.small, jax.lax.scan

    def unrolled(steps: int) -> Row:
        def scan_unrolled(*args: Any, **options: Any) -> Any:
            return scan(*args, **(options | {"unroll": steps}))

        ours.session.cache_clear()  # its key has no number of steps
        with mock.patch.object(jax.lax, "scan", scan_unrolled):
            return our_rate(work_of("W5", small), small)

    def windows(work: str) -> Row:
        text = TEXTS[work]._replace(clients=1) if small else TEXTS[work]
        experiment = text_experiment(text, fs.make_execution(1))
        run, _, _ = jax.block_until_ready(experiment.advance(experiment.start([0]), 1))
        samples, began = 0, time.perf_counter()
        while not samples or time.perf_counter() - began < (0.01 if small else SECONDS):
            run, metrics, _ = jax.block_until_ready(experiment.advance(run, 1))
            samples += int(metrics.samples[0, 0])
        seconds = time.perf_counter() - began
        return {
            "samples_per_second": samples / seconds,
            "device_mb": experiment.device_bytes / MB,
        }

    for steps in (2,) if small else (1, 5, 10, 20):
        stage.attempt(10, functools.partial(unrolled, steps), work="W5", unroll=steps)
    for work in ("LoRA",) if small else TEXTS:
        stage.attempt(15, functools.partial(windows, work), work=work)


def flags(stage: Stage) -> None:
    """XLA's options."""
    for name in ("W4",) if stage.small else ("W1", "W2"):
        measure = functools.partial(our_rate, work_of(name, stage.small), stage.small)
        stage.attempt(7, measure, work=name, xla_flags=os.environ.get("XLA_FLAGS", ""))


STAGES: dict[str, tuple[int, Callable[[Stage], None]]] = {
    "env": (35, env),
    "same": (70, same),
    "speed": (160, speed),
    "conv": (75, conv),
    "lanes": (40, lanes),
    "text": (45, text),
    "flags": (115, flags),
}
"""The limit of each in seconds, and what it does."""


def run_stage(name: str, out: Path, small: bool) -> bool:
    """Runs a stage in a process of its own for each of its options; False without accelerator."""
    path, end = out / f"{name}.jsonl", time.monotonic() + STAGES[name][0]
    path.unlink(missing_ok=True)
    given = os.environ.get("XLA_FLAGS", QUICK if small else "")
    options: tuple[str, ...] = FLAGS if name == "flags" else ("",)
    if small:
        options = (" ".join(options[1:]),)
    for i, option in enumerate(options):
        seconds = (end - time.monotonic()) / (len(options) - i)
        job = [sys.executable, "-m", "benchmarks.device", name, f"--out={out}", f"--job={seconds}"]
        variables = os.environ | {"XLA_FLAGS": " ".join(filter(None, (given, option)))}
        if small:
            job.append("--small")
            variables["JAX_PLATFORMS"] = "cpu"
        try:
            status = subprocess.call(job, env=variables, cwd=HERE.parent, timeout=seconds + GRACE)
            message = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, message = 1, f"killed after {seconds + GRACE:.0f} s"
        if status == 2:
            return False
        if status:
            Stage(path, 0, small).note(xla_flags=variables["XLA_FLAGS"], error=message)
    return True


def main(argv: list[str] | None = None) -> int:
    """Runs the stages; returns the exit status."""
    listed = (f"  {name:<6}{limit:>4} s  {run.__doc__}" for name, (limit, run) in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description=__doc__,
        epilog="\n".join(["stages:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="which to run; default: all")
    parser.add_argument("--small", action="store_true", help="tiny sizes on CPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "device", metavar="DIR")
    parser.add_argument("--job", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = args.stages or list(STAGES)
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"STAGE must be one of {', '.join(STAGES)}, got {unknown[0]}")
    out = args.out.resolve()
    if args.job is not None:
        if not args.small and jax.default_backend() == "cpu":
            print("no accelerator: JAX has CPUs alone, for which there is --small", file=sys.stderr)
            return 2
        STAGES[names[0]][1](Stage(out / f"{names[0]}.jsonl", args.job, args.small))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if not all(run_stage(name, out, args.small) for name in names):
        return 2
    lines = [line for name in names for line in (out / f"{name}.jsonl").open(encoding="utf-8")]
    return int(any("error" in json.loads(line) for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
