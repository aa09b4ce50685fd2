"""Strict JAX, four CPU devices of which one is the default, no network; a small federation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax


def supported(flag: str) -> bool:
    """Returns whether this XLA has a flag: it ends the process if not, so another one asks."""
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    given = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(asked, env=given, capture_output=True, check=False).returncode == 0


# Most of a test is compiling, and XLA compiles small programs 2.5 times as fast without the passes
# that make large ones run fast, and without splitting them to compile the parts in parallel. What
# users run is compiled as they have it by test_users.py and the commands of .ci/run.
if "XLA_FLAGS" not in os.environ:  # the workers of pytest-xdist have it from the first process
    quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if supported(emitters := "--xla_cpu_use_fusion_emitters=false"):
        quick.append(emitters)
    os.environ["XLA_FLAGS"] = " ".join(quick)
# Before any backend starts: importing fedjax_sim must not come first.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Where in Python each operation was made is noted for messages and profiles that no test reads.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_default_device", jax.devices()[0])  # tests about devices ask for more

import chex  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import fedjax_sim as fs  # noqa: E402
from fedjax_sim.base.signatures import keywords  # noqa: E402
from fedjax_sim.engine.memory import trim  # noqa: E402
from fedjax_sim.run.cache import count_programs  # noqa: E402

collect_ignore = ["mutants.py"]
"""A command, which needs the packages of ``.[dev]``."""

T = TypeVar("T")
SIZES = (1, 3, 16, 17, 40, 5, 33, 8)
LOCAL = ("127.", "localhost", "::1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One example of each file of methods trains, of 2 s; tests/test_methods.py traces them all."""
    seen, kept = set[Path](), []
    for item in items:
        of_methods = "algorithms" in item.path.parts
        if of_methods or item.path.parts[-2:] == ("cli", "loading.py"):
            item.add_marker(pytest.mark.slow)
        if not of_methods or item.path not in seen:
            kept.append(item)
        seen.add(item.path)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reaches the network or the user's cache: each data set is decoded once in a run."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(LOCAL):
            raise OSError(f"a test tried to reach {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        ours = tmp_path_factory.getbasetemp()
        everyones = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours
        patch.setenv("FEDJAX_SIM_CACHE_DIR", str(everyones / "cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """Frees compiled programs between two files, before a worker's memory reaches 2 GB (Linux)."""
    yield
    usage = Path("/proc/self/statm")
    pages = int(usage.read_text(encoding="utf-8").split()[1]) if usage.exists() else 0
    if pages and pages * os.sysconf("SC_PAGE_SIZE") > 1e9:
        jax.clear_caches()
        gc.collect()
        trim()


@pytest.fixture(autouse=True)
def _fresh_trace_counter() -> None:
    """``chex.assert_max_traces`` counts by source code: each case of a test counts from 0."""
    chex.clear_trace_counter()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It is heard: a shell lets what it starts in the background ignore it, children included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


BARE = """
import sys
from fedjax_sim import {command}
from fedjax_sim.cli import folder, running
from fedjax_sim.run.programs import Programs
running.draw_clients = folder.draw_curves = Programs.check = lambda *args: None
sys.exit({command}.main(sys.argv[1:]))
"""
"""A program that is a bare command, see below."""


def _made_once(make: Callable[..., fs.Model]) -> Callable[..., fs.Model]:
    """A function that gives the same network for the same arguments."""
    made: dict[Any, fs.Model] = {}

    def once(*args: Any) -> fs.Model:
        key = tuple(a.tobytes() if isinstance(a, np.ndarray) else a for a in args)
        if key not in made:
            made[key] = make(*args)
        return made[key]

    return once


ONE_NETWORK = {
    "model_of": _made_once(fs.models.factories.model_of),
    "with_scaling": _made_once(fs.models.with_scaling),
}
"""As commands make networks, but one for all runs: its draw and scores are compiled once."""


@contextlib.contextmanager
def _bare() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, once in ONE_NETWORK.items():
            patch.setattr(f"fedjax_sim.cli.build.{name}", once)
        patch.setattr("fedjax_sim.cli.running.draw_clients", lambda *args: None)
        patch.setattr("fedjax_sim.cli.folder.draw_curves", lambda *args: None)
        patch.setattr("fedjax_sim.run.programs.Programs.check", lambda self: None)
        yield


@pytest.fixture
def bare_command() -> Iterator[None]:
    """Commands draw no pictures, do not check first whether a method fits and share networks."""
    with _bare():
        yield


@pytest.fixture(scope="module")
def bare_commands() -> Iterator[None]:
    """The same to the end of a file."""
    with _bare():
        yield


@pytest.fixture(scope="session")
def data_dir() -> str:
    """The real data sets, where this machine has them."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    given = os.environ.get("FEDJAX_SIM_DATA_DIR") or (str(beside) if beside.is_dir() else None)
    if given is None:
        pytest.skip(f"FEDJAX_SIM_DATA_DIR is not set and {beside} does not exist")
    return given


def some_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """The first cases of a test as they are, the others with the slow tests."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=[pytest.mark.slow] if i >= quick else [])
        for i, row in enumerate(rows)
    ]


class Federation(NamedTuple):
    """Clients and a test set of one synthetic problem."""

    data: fs.ClientData
    test: tuple[np.ndarray, np.ndarray]
    classes: int

    @property
    def task(self) -> fs.tasks.Task:
        """What y are."""
        return fs.tasks.classification(self.classes)

    @property
    def sizes(self) -> np.ndarray:
        """n_k."""
        return np.diff(self.data.start)

    @property
    def partition(self) -> fs.partition.Partition:
        """Who owns which sample."""
        return fs.partition.Partition(np.asarray(self.data.index), np.asarray(self.data.start))


def altered_data(data: fs.ClientData, **fields: Any) -> fs.ClientData:
    """With other fields; like those of ``fs.client_data``, they may be NumPy's."""
    return dataclasses.replace(data, **fields)


def with_root(data: fs.ClientData, rows: Any) -> fs.ClientData:
    """The server owns these rows of x."""
    index = np.concatenate([data.index, np.asarray(rows, np.int32)])
    root = np.array([len(data.index), len(index)], np.int32)
    return altered_data(data, index=index, root=root, capacity=max(data.capacity, len(rows)))


def promising(part: Any, **promises: Any) -> Any:
    """Returns a part with other promises or methods, of a subclass with the same name."""
    kind = type(type(part).__name__, (type(part),), promises)
    return kind(**{field.name: getattr(part, field.name) for field in dataclasses.fields(part)})


def rejects(
    cases: Mapping[str, tuple[Callable[..., Any], str]], *fixtures: str, escape: bool = True
) -> Callable[..., None]:
    """Makes the test that every case, called with fixtures, is a ValueError with its message."""

    @pytest.mark.parametrize("case", cases)
    def test(case: str, request: pytest.FixtureRequest) -> None:
        make, message = cases[case]
        given = [request.getfixturevalue(name) for name in fixtures]
        with pytest.raises(ValueError, match=re.escape(message) if escape else message) as caught:
            make(*given)
        assert len(str(caught.value).splitlines()) == 1

    return test


def known(value: T | None) -> T:
    """What a result has here, and others may lack."""
    assert value is not None
    return value


def make_federation(
    sizes: Sequence[int] = SIZES,
    shape: Sequence[int] = (6,),
    classes: int = 3,
    seed: int = 0,
    tests: int = 203,
) -> Federation:
    """Gaussian blobs, one for each class, dealt in random order to clients of these sizes."""
    rng = np.random.default_rng(seed)
    centres = 2.0 * rng.normal(size=(classes, *shape)) / np.sqrt(np.prod(shape) / 6)

    def sample(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, classes, n).astype(np.int32)
        return (centres[y] + rng.normal(size=(n, *shape))).astype(np.float32), y

    total = sum(sizes)
    x, y = sample(total + 5)  # five samples that no client owns
    start = np.cumsum([0, *sizes]).astype(np.int32)
    index = rng.permutation(total + 5)[:total].astype(np.int32)
    data = fs.client_data(x, y, fs.partition.Partition(index, start))
    return Federation(data, sample(tests), classes)


def context_of(params: Any) -> Any:
    """What an objective sees of a client that nobody asks about."""
    return fs.base.Context(fs.Variables(params, {}), None, jax.random.key(0))  # type: ignore[arg-type]


class Play(NamedTuple):
    """The states after every round, what each reported, and the final collection."""

    states: list[Any]
    metrics: list[Any]
    final: Any
    final_uploads: int

    @property
    def servers(self) -> list[Any]:
        """The server model's variables after every round."""
        return [s.server for s in self.states]


def play(
    algorithm: fs.Algorithm, model: fs.Model, data: fs.ClientData, rounds: int, seed: int = 0
) -> Play:
    """Rounds one by one, with the keys that :func:`fedjax_sim.simulate` uses."""
    data = jax.device_put(data)
    root = jax.random.key(seed)
    run_key = jax.random.fold_in(root, 1)
    state = algorithm.init(run_key, model.init(jax.random.fold_in(root, 0)), data)
    step = jax.jit(algorithm.step)
    states, metrics = [], []
    for t in range(rounds):
        key = jax.random.fold_in(run_key, t)
        with count_programs() as counter:
            state, report = step(key, state, data)
        assert t == 0 or counter.programs == 0, "a round was compiled again"
        states.append(state)
        metrics.append(report)
    final, uploads = jax.jit(algorithm.collect)(jax.random.fold_in(run_key, rounds), state, data)
    return Play(states, metrics, final, int(uploads))


class Rounds(NamedTuple):
    """What :func:`play_numbers` gives.

    Attributes:
        servers: the server model's variables after every round.
        metrics: what each reported.
        state: the last one.
        numbers: the options that the programs take as arguments.
        fixed: the others.
    """

    servers: list[Any]
    metrics: list[Any]
    state: Any
    numbers: dict[str, Any]
    fixed: frozenset[tuple[str, Any]]


Make = Callable[..., fs.Algorithm]


@functools.cache
def first_weights(model: fs.Model) -> fs.Variables:
    """Those that :func:`play` starts from with seed 0."""
    return model.init(jax.random.fold_in(jax.random.key(0), 0))


@functools.cache
def _step(make: Make, name: str, model: fs.Model, fixed: frozenset[tuple[str, Any]]) -> Any:
    def step(numbers: dict[str, Any], key: Any, state: Any, data: fs.ClientData) -> Any:
        return make(name, model, **numbers, **dict(fixed)).step(key, state, data)

    return jax.jit(step)


def play_numbers(
    make: Make,
    name: str,
    model: fs.Model,
    data: fs.ClientData,
    rounds: int,
    options: dict[str, Any],
    concrete: Sequence[str] = (),
) -> Rounds:
    """:func:`play` of ``make(name, model, **options)``; runs that differ in floats share a program.

    But for those that are ``concrete``: the programs depend on them.
    """
    numbers = {k: v for k, v in options.items() if type(v) is float and k not in concrete}
    fixed, data = frozenset(options.items() - numbers.items()), jax.device_put(data)
    step, run_key = _step(make, name, model, fixed), jax.random.fold_in(jax.random.key(0), 1)
    state = make(name, model, **options).init(run_key, first_weights(model), data)
    servers, metrics = [], []
    for t in range(rounds):
        state, report = step(numbers, jax.random.fold_in(run_key, t), state, data)
        servers.append(state.server)
        metrics.append(report)
    return Rounds(servers, metrics, state, numbers, fixed)


def needs_a_clock(method: Callable[..., Any]) -> bool:
    """Whether a named method has no meaning without one."""
    clock = keywords(method).get("clock")
    return clock is not None and clock.default is not None


def assert_trees(a: Any, b: Any, rtol: float | None = None, atol: float = 0.0) -> None:
    """Equal to the bit if ``rtol`` is None, else close."""
    if rtol is None:
        chex.assert_trees_all_equal(a, b)
    else:
        chex.assert_trees_all_close(a, b, rtol=rtol, atol=atol)


def largest_change(a: Any, b: Any) -> float:
    """The largest absolute difference between two pytrees."""
    return max(
        float(np.abs(np.asarray(u) - np.asarray(v)).max())
        for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="session")
def federation() -> Federation:
    return make_federation()


@pytest.fixture(scope="session")
def rooted(federation: Federation) -> fs.ClientData:
    """The server owns the samples that no client does: five, fewer than the mean client."""
    data = federation.data
    return with_root(data, np.setdiff1d(np.arange(len(data.x)), data.index))


@pytest.fixture(scope="session")
def net() -> fs.Model:
    """One hidden layer, of 4 features."""
    return fs.models.mlp((6,), 3, widths=(4,))


@pytest.fixture(scope="session")
def models(federation: Federation) -> dict[str, fs.Model]:
    shape = federation.data.x.shape[1:]
    build: dict[str, Callable[[], fs.Model]] = {
        "logistic": lambda: fs.models.logistic(shape, federation.classes),
        "mlp": lambda: fs.models.mlp(shape, federation.classes, widths=(7, 5)),
    }
    return {name: make() for name, make in build.items()}


@pytest.fixture
def logistic(models: dict[str, fs.Model]) -> fs.Model:
    return models["logistic"]


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """What XLA makes meanwhile of the programs that are compiled ahead, as those of a run are."""
    compile_one, texts = jax.stages.Lowered.compile, []

    def noted(self: jax.stages.Lowered, *args: Any, **options: Any) -> jax.stages.Compiled:
        made = compile_one(self, *args, **options)
        texts.append(known(made.as_text()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", noted)
        yield texts


def unordered_sums(program: str) -> list[str]:
    """The lines of a compiled program that add floats of several devices in whatever order.

    Where all devices but one add zeros, as if a row is gathered, there is nothing to order.
    """
    bodies = dict(re.findall(r"^%(\S+) \([^\n]*\{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL))
    found = []
    for line in program.splitlines():
        sums = re.search(r"= (.*?) all-reduce\((.*?)\), .*to_apply=%([^\s,]+)", line)
        if (
            sums is None
            or not re.search(r"\b(f|bf)\d+\[", sums[1])
            or " add(" not in bodies[sums[3]]
        ):
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        one_of_them = (
            all(part.strip("()").endswith("/gather") for part in name[1].split(":"))
            if name
            else all("dynamic-update-slice" in operand for operand in sums[2].split(", "))
        )
        if not one_of_them:
            found.append(line)
    return found
