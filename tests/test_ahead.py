"""Programs for devices that are not there: all methods lower, and XLA compiles for TPUs."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known, largest_change, some_slow
from jax.experimental import topologies

import fedjax_sim as fs
from fedjax_sim.base import Array, Variables
from fedjax_sim.bench import main
from fedjax_sim.cli.making import make, stand_in
from fedjax_sim.engine import memory, targets
from fedjax_sim.engine.cores import available_cores
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.engine.targets import devices_of, options_for
from fedjax_sim.models import layers
from fedjax_sim.models.convolutions import conv
from fedjax_sim.run import programs
from fedjax_sim.run.cache import count_programs, weights_program
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.runner import Runner

FIRST = ["weights", "start", "advance", "evaluate"]


@functools.lru_cache(maxsize=4)  # one is compiled once for each execution that it runs on
def algorithm_of(name: str, model: fs.Model, clients: int) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    common = stand_in(
        model, local=local, classes=3, momentum=0.0,
        clients_per_round=clients if name == "scaffnew" else 4,
    )  # fmt: skip
    # Mediators must divide the cohort; the network has no norms.
    own: dict[str, dict[str, Any]] = {"astraea": {"mediator_size": 2}, "fedbn": {"norms": "*bias"}}
    return make(name, common, **own.get(name, {}))


def experiment_of(
    name: str,
    federation: Federation,
    model: fs.Model,
    devices: int | Sequence[jax.Device] = 1,
    chunk: int | None = 0,
    samples_mb: float | None = None,
    client_state_mb: float | None = None,
    model_devices: int = 1,
) -> Runner:
    """Two runs of a method, by default on one device as on an accelerator: all clients at once."""
    execution = fs.make_execution(
        devices,
        chunk,
        samples_mb=samples_mb,
        client_state_mb=client_state_mb,
        model_devices=model_devices,
    )
    x, y = (np.asarray(a) for a in (federation.data.x, federation.data.y))
    unowned = np.setdiff1d(np.arange(len(x)), federation.data.index)
    data = fs.client_data(x, y, federation.partition, root=unowned)
    return Experiment(
        algorithm_of(name, model, len(federation.sizes)),
        model,
        data,
        federation.test,
        classes=3,
        seeds=(0, 1),
        execution=execution,
    ).runner()


@pytest.mark.parametrize(("name", "devices"), some_slow([("fedavg", 2), ("radfed", 1)]))
def test_what_is_compiled_ahead_is_what_runs(
    name: str, devices: int, federation: Federation, models: dict[str, fs.Model]
) -> None:
    made = experiment_of(name, federation, models["logistic"], devices=devices)
    told = {program.name: program for program in made.programs.compiled_ahead()}
    assert list(told) == [*FIRST, *(["finish"] if name == "radfed" else [])]
    for name, given in (("advance", federation.data), ("evaluate", federation.test)):
        assert told[name].arguments > sum(a.nbytes for a in jax.tree.leaves(given))
    assert bool(told["advance"].collectives) == (devices > 1)
    assert all(program.seconds > 0 and program.temporaries >= 0 for program in told.values())
    run = made.start((0, 1))
    assert run.keys.shape == (2,)


@pytest.mark.slow
def test_weights_are_drawn_by_one_program_of_a_model(federation: Federation) -> None:
    """Each run's are those of its seed alone."""
    model = fs.models.logistic((6,), 3)
    first, second = (experiment_of(name, federation, model) for name in ("fedavg", "fedprox"))
    drawn = first.start((5, 9)).state.server
    with count_programs() as counter:
        again = second.start((9, 5)).state.server
    assert counter.programs == 2  # start and advance
    assert_trees(drawn, jax.tree.map(lambda a: a[::-1], again))
    assert largest_change(drawn, again) > 0.01
    alone = model.init(stream(jax.random.key(5), Seed.WEIGHTS))
    assert_trees(jax.tree.map(lambda a: a[0], drawn), alone, rtol=1e-6)


@pytest.mark.slow
def test_training_is_traced_once_for_all_that_asks(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """For the round; the shapes at the start and the traffic hang on no step."""
    plain, traces = fs.empirical_risk(models["logistic"]), []

    def counted(*args: Any) -> Any:
        traces.append(1)
        return plain(*args)

    local = fs.local_sgd(counted, optax.sgd(0.1), batch_size=8)
    one = fs.make_execution(devices=1)
    algorithm = fs.radfed(local, clients_per_round=4).on(one)
    given = models["logistic"], federation.data, federation.test
    fs.simulate(algorithm, *given, rounds=1, classes=3, execution=one)
    assert len(traces) == 1


def test_a_model_may_be_drawn_by_what_is_no_key() -> None:
    @dataclasses.dataclass
    class Constant:
        value: float

        def __call__(self, key: jax.Array) -> fs.Variables:
            return fs.Variables(jnp.float32(self.value), ())

    init = Constant(2.0)
    drawn = weights_program(init, fs.make_execution())(np.zeros(3, np.uint32))
    assert drawn.params.tolist() == [2.0] * 3


@pytest.mark.slow
def test_what_draws_weights_goes_with_the_model() -> None:
    """Or the trunks of all models of a session would stay."""
    model = fs.models.logistic((6,), 3)
    draw = weights_program(model.init, fs.make_execution())
    draw.lower(np.zeros(2, np.uint32)).compile()
    gone = weakref.ref(model.init), weakref.ref(draw)
    del model, draw
    gc.collect()
    assert [known() for known in gone] == [None, None]


Run = Callable[..., fs.Result]


@pytest.fixture(scope="module")
def run(federation: Federation, models: dict[str, fs.Model]) -> Run:
    """Runs a round on two devices, compiled once."""
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    return functools.partial(
        fs.simulate, fs.fedavg(local, clients_per_round=4), models["logistic"], federation.data,
        federation.test, rounds=1, classes=3, execution=fs.make_execution(devices=2),
    )  # fmt: skip


def test_a_run_says_what_it_holds_before_it_starts(run: Run, federation: Federation) -> None:
    said: list[Any] = []
    result = run(on_compiled=said.append, on_evaluation=lambda e: said.append(e.round))
    assert said == [result.device_bytes, 1]
    data = sum(a.nbytes for a in jax.tree.leaves((federation.data, federation.test)))
    assert result.device_bytes > data + result.model_bytes


def test_a_run_that_does_not_fit_is_refused_before_it_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = 10**9
    monkeypatch.setattr(memory, "memory_of", lambda devices: there)
    monkeypatch.setattr(memory, "MB", 1)
    there = run().device_bytes
    run()  # just fits
    there -= 1
    message = f"needs {there + 1:,} MB on each of 2 devices, which have {there:,} MB: take"
    with pytest.raises(fs.TooLargeError, match=message):
        run(on_evaluation=lambda e: pytest.fail("it ran"))


@pytest.mark.slow
def test_the_command_refuses_what_does_not_fit(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda devices: 10**5)
    monkeypatch.setattr(memory, "MB", 1000)
    monkeypatch.chdir(tmp_path)
    argv = "--no-cache --rounds 1 --clients 10 --seeds 1 --model logistic --algo fedavg"
    assert main([*argv.split(), "--compare", "none", "--devices", "1"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"error: the run needs \d+ MB on the device, which has 100 MB: .*nothing was recorded", last
    )
    assert not [*tmp_path.glob("runs/*/*")]


class Refused:
    """A program that XLA does not compile."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def compile(self, options: Any) -> None:
        raise jax.errors.JaxRuntimeError(self.reason)


def test_what_the_compiler_says_does_not_fit_is_one_line() -> None:
    full: Any = Refused("RESOURCE_EXHAUSTED: Ran out of memory: 54.91G exceeds 15.75G.\nBuffers:\n")
    with pytest.raises(memory.TooLargeError, match=r"^Ran out .* 15.75G: take fewer[^\n]*$"):
        memory.compile_program(full)
    broken: Any = Refused("INTERNAL: a bug: RESOURCE_EXHAUSTED")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        memory.compile_program(broken)


COUNTS = {"v5e:1x1": 1, "v5e:2x2": 4, "h100": 1, "h100:2": 2}


ACCELERATED = [
    *((name, t, 1) for name in ("fedavg", "phase_shift", "radfed", "scaffold") for t in COUNTS),
    *(("radfed", target, 2) for target in ("v5e:2x2", "h100:2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "parts"), ACCELERATED)
def test_small_programs_compile_for_accelerators(
    name: str, target: str, parts: int, federation: Federation, models: dict[str, fs.Model]
) -> None:
    try:
        devices = devices_of(target)
    except ImportError as error:
        pytest.skip(str(error))
    assert len(devices) == COUNTS[target]
    made = experiment_of(name, federation, models["logistic"], devices, None, model_devices=parts)
    assert [p.name for p in made.programs.compiled_ahead()][:4] == FIRST


@pytest.mark.slow
def test_a_step_of_fifty_cnns_takes_half_the_memory_on_a_tpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what it takes by im2col: W2 of the benchmarks."""
    try:
        (chip,) = devices_of("v5e:1x1")
    except ImportError as error:
        pytest.skip(str(error))
    model = fs.models.two_conv((32, 32, 3), 10)

    def step(variables: Variables, x: Array, y: Array) -> Any:
        def loss(params: Any) -> Array:
            logits, _ = model.apply(Variables(params, variables.state), x, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        gradients = jax.grad(loss)(variables.params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, variables.params, gradients)

    def of_fifty(a: Any) -> jax.ShapeDtypeStruct:
        there = jax.sharding.SingleDeviceSharding(chip)
        return jax.ShapeDtypeStruct((50, *a.shape), a.dtype, sharding=there)

    batch = np.zeros((10, 32, 32, 3), np.float32), np.zeros(10, np.int32)
    given = jax.tree.map(of_fifty, (jax.eval_shape(model.init, jax.random.key(0)), *batch))

    def temporaries() -> int:
        program = jax.jit(jax.vmap(step)).lower(*given).compile()
        size: int = known(program.memory_analysis()).temp_size_in_bytes
        return size

    ours = temporaries()
    monkeypatch.setattr(layers, "conv", functools.partial(conv, lowering="im2col"))
    assert ours <= temporaries() / 2


LEVEL = {"xla_backend_optimization_level": 1}
PLAIN = {"xla_cpu_use_fusion_emitters": False}
REGIONS = "xla_cpu_copy_insertion_use_region_analysis"
IN_PLACE = {REGIONS: True}
DISABLED, SHARING = "xla_disable_hlo_passes", "cpu-parallel-task-assigner"
BARRIERS = "cse_barrier_expander"
ALONE, KEPT = {DISABLED: SHARING}, {DISABLED: BARRIERS}
BOTH = {DISABLED: f"{SHARING},{BARRIERS}"}


@pytest.mark.parametrize(
    ("flags", "devices", "largest", "quick", "full"),
    [
        ("", 2, 2**30, LEVEL | PLAIN | ALONE, IN_PLACE | BOTH),
        ("", 1, 2**30, LEVEL | PLAIN, IN_PLACE | KEPT),
        ("", 1, None, LEVEL | PLAIN, IN_PLACE | KEPT),
        ("", 1, 2**10, LEVEL | PLAIN | ALONE, IN_PLACE | BOTH),
        ("--xla_cpu_use_fusion_emitters=true", 1, None, LEVEL, IN_PLACE | KEPT),
        ("--xla_backend_optimization_level=2", 1, None, PLAIN, IN_PLACE | KEPT),
        (f"--{REGIONS}=false", 1, None, LEVEL | PLAIN, KEPT),
        (
            f"--{DISABLED}=fusion,dce", 2, None,
            LEVEL | PLAIN | {DISABLED: f"fusion,dce,{SHARING}"},
            IN_PLACE | {DISABLED: f"fusion,dce,{SHARING},{BARRIERS}"},
        ),
    ],
)  # fmt: skip
def test_options_for_cpus(
    flags: str, devices: int, largest: int | None, quick: Any, full: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(targets, "_supported", lambda *_: True)
    monkeypatch.setenv("XLA_FLAGS", flags)
    here = jax.devices()
    monkeypatch.setattr(jax, "local_devices", lambda **_: here[:devices])
    assert options_for(here[:1], quick=True, largest=largest) == quick
    assert options_for(here[:1], largest=largest) == full


def test_an_option_that_xla_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, and not counted as a program; other errors of XLA's are not hidden."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(targets, "_IN_PLACE", {"xla_no_such_option": 1})
    with count_programs() as counter:
        assert options_for(jax.devices()) == BOTH
        quick = options_for(jax.devices(), quick=True) or {}
        assert quick.items() >= (LEVEL | ALONE).items()
    assert counter.programs == 0
    monkeypatch.setattr(targets, "_IN_PLACE", {"xla_backend_optimization_level": "high"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        options_for(jax.devices())


def test_short_runs_compile_quickly(
    federation: Federation, models: dict[str, fs.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of many rounds do not, nor those whose rounds are not known."""
    wanted: list[bool] = []
    monkeypatch.setattr(programs, "options_for", lambda _, quick, largest: wanted.append(quick))

    def quick(made: Runner, rounds: int | None) -> dict[str, bool]:
        wanted.clear()
        names = [
            name
            for name, _ in made.programs.lowered()
            if made.programs.options(name, rounds) is None
        ]
        return dict(zip(names, wanted, strict=True))

    made = experiment_of("radfed", federation, models["logistic"])
    all_names = {*FIRST, "finish"}
    once = {"weights", "start", "finish"}
    assert quick(made, 3) == dict.fromkeys(all_names, True)
    for rounds in (None, 10**7):
        assert quick(made, rounds) == {name: name in once for name in all_names}
    ended = experiment_of("ccvr", federation, models["mlp"])  # its finish trains a layer
    assert not quick(ended, None)["finish"]


def rounds_of(made: Runner) -> str:
    """What XLA makes of the rounds."""
    _, lowered = next(one for one in made.programs.lowered() if one[0] == "advance")
    return str(memory.compile_program(lowered, made.programs.options("advance")).as_text())


@pytest.mark.slow
def test_a_step_changes_weights_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so a layer whose update XLA may put before the gradient of the one before."""
    x, y = np.zeros((20, 6), np.float32), np.zeros(20, np.int32)
    data = fs.client_data(x, y, fs.partition.iid(y, 4, seed=0))
    model = fs.models.mlp((6,), 3, widths=(40, 50))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=4)
    one = fs.make_execution(devices=1)
    algorithm = fs.fedavg(local, clients_per_round=2).on(one)
    made = Experiment(algorithm, model, data, (x, y), classes=3, execution=one).runner()
    copies = []
    for flags in ("", f"--{REGIONS}=false"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        copies.append(len(re.findall(r"= f32\[40,50\]\S* copy\(", rounds_of(made))))
    assert copies[0] == copies[1] - 1


def test_a_part_may_print(federation: Federation, models: dict[str, fs.Model]) -> None:
    """An operation that makes no array is none of the largest."""

    def told(step: jax.Array) -> jax.Array:
        jax.debug.callback(lambda step: None, step)
        return jnp.float32(0.1)

    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(told))
    one = fs.make_execution(devices=1)
    algorithm = fs.fedavg(local, clients_per_round=4).on(one)
    given = models["logistic"], federation.data, federation.test
    result = fs.simulate(algorithm, *given, rounds=1, classes=3, execution=one)
    assert np.isfinite(result.accuracy).all()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "shared"), [(4, False), (20_000, True)])
def test_what_a_step_takes_of_many_samples_waits_for_no_thread(
    width: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA on CPU shares a gather of four of them between threads; a large layer may be shared.

    So it is on the only device of a process; of several none shares anything.
    """
    here = jax.devices()
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: here[:1])
    x = np.zeros((200_000, 6), np.float32)
    partition = fs.partition.iid(np.zeros(len(x), np.int32), 100, seed=0)
    data = fs.client_data(x, np.zeros(len(x), np.int32), partition)
    model = fs.models.mlp((6,), 3, widths=(width,))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=4)
    one = fs.make_execution(devices=1)
    made = Experiment(
        fs.algorithms.scaffold(local, clients_per_round=5).on(one),
        model, data, (x[:9], [0, 1, 2] * 3), classes=3, execution=one,
    ).runner()  # fmt: skip
    text = rounds_of(made)
    assert ('outer_dimension_partitions":["' in text) == (shared and available_cores() > 1)


def no_topology(*_: Any, **__: Any) -> Any:
    """What JAX says without a plugin."""
    raise NotImplementedError("topology not implemented for cuda")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("v5e:2x2", "v5e:2x2 needs libtpu: pip install 'jax[tpu]'"),
        ("h100", "h100 needs JAX's plugin for CUDA (pip install 'jax[cuda12]'), "),
        ("h100:0", "must be like v5e:2x2, v6e:1x1 or another kind of TPU with the "),
    ],
)
def test_a_target_without_its_compiler_is_one_line(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(topologies, "get_topology_desc", no_topology)
    with pytest.raises((ValueError, ImportError), match=re.escape(message)):
        devices_of(target)
