"""Every named method: its bytes, its devices and its runs beside one another."""

from __future__ import annotations

import doctest
import functools
import inspect
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import algorithms
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from composing import PART_LIST, SLOTS, refusal
from composition import parts_of
from conftest import (
    assert_trees,
    compiled_programs,
    needs_a_clock,
    play,
    some_slow,
    unordered_sums,
)
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from test_contracts import named as named_method
from test_contracts import update as any_local

import fedjax_sim as fs
from fedjax_sim import (
    clustering,
    compression,
    flight,
    preaggregation,
    redistribution,
    selection,
    sending,
    server,
    weighting,
)
from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli.build import build
from fedjax_sim.cli.catalogue import describe_method
from fedjax_sim.cli.making import make as make_on
from fedjax_sim.cli.making import stand_in
from fedjax_sim.cli.parser import parse
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.engine.reading import without_dead_code
from fedjax_sim.models import layers
from fedjax_sim.privacy import poisson
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.simulation import Toy

COHORT, ROUNDS, LR, MOMENTUM = 4, 3, 0.05, 0.5


class Sent(NamedTuple):
    """Bytes of one run, as a hand counts them, of models of ``size`` bytes; the options given."""

    options: dict[str, Any] = {}  # noqa: RUF012
    up: Callable[[int], int] = lambda size: ROUNDS * COHORT * size
    down: Callable[[int], int] = lambda size: ROUNDS * COHORT * size
    network: str = "mlp"


PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10  # of the MLP below
STATISTICS = 4 * 2 * 8  # bytes of its BatchNorm's means and variances
TENTH = 61  # entries: round(0.1 * PARAMETERS)
# Golomb: b* = 1 + floor(log2(log(0.618) / log(0.9))) = 3; 3 + 1 / (1 - 0.9 ** 8) bits a position.
POSITIONS = TENTH * (3 + 1 / (1 - 0.9**8))
# 62 of the 618 parameters of the other network.
TERNARY = math.ceil((62 * (POSITIONS / TENTH + 1) + 32) / 8)
TOP_K = math.ceil((POSITIONS + 32 * TENTH) / 8)
QSGD = math.ceil((8 * PARAMETERS + 32) / 8)  # 255 codes fit in 8 bits


SIZES = [5, 17, 33, 9, 24, 16, 40, 12]
CLIENTS = len(SIZES)
ROOT = 20  # samples of the server's own
# Of each 6 samples, the last ones fewer: an image of 64 floats and a label for each sample.
MEANS = sum(math.ceil(n / 6) * 64 * 4 + n * 4 for n in SIZES)


def and_a_number(size: int) -> int:
    return ROUNDS * COHORT * (size + 4)


def times(factor: float) -> Callable[[int], int]:
    return lambda size: round(factor * ROUNDS * COHORT * size)


def narrow(size: int) -> int:
    assert size == 4 * (75 * 8 + 10)
    return ROUNDS * sum(4 * (75 * 8 // 2 ** (k % 3) + 10) for k in range(CLIENTS))


def in_thirds(size: int) -> int:
    """Of 8 units all, 6 or 3."""
    return ROUNDS * sum(4 * (75 * (8, 6, 3)[k % 3] + 10) for k in range(CLIENTS))


def beside_statistics(factor: int) -> Callable[[int], int]:
    """So many models, of which only one has statistics."""
    return lambda size: ROUNDS * COHORT * (factor * size - (factor - 1) * STATISTICS)


def each(message: int) -> Callable[[int], int]:
    return lambda size: ROUNDS * COHORT * message


HEAD = 4 * (8 * 10 + 10)
PROTOTYPES = 4 * 10 * (8 + 1)  # of 10 classes and 8 features, and how many samples are behind each


def without(numbers: int) -> Callable[[int], int]:
    return lambda size: ROUNDS * COHORT * (size - 4 * numbers)


bodies = without(8 * 10 + 10)

METHODS: dict[str, Sent] = {
    "fedavg": Sent(network="normed"),
    # Two groups of 2: one uploads in each round, and in the end so does the other.
    "phase_shift": Sent({"phases": 2}, up=lambda size: (ROUNDS + 1) * 2 * size, network="normed"),
    "radfed": Sent({"redistribution_rounds": 2}, network="normed"),
    # Three edges pass on two models each way: they start twice, and meet after rounds 2 and 3.
    "hierfavg": Sent({"edges": 3}, up=times(1.5), down=times(1.5)),
    # All are sent the first model for a score of it; every visit gives another.
    "radfedi": Sent(
        {"redistribution_rounds": 2},
        up=lambda size: 4 * CLIENTS + ROUNDS * COHORT * (size + 4),
        down=lambda size: (CLIENTS + ROUNDS * COHORT) * size,
    ),
    "radfedp": Sent({"redistribution_rounds": 2}),
    "radfedm": Sent({"redistribution_rounds": 2}),
    "radfeda": Sent({"redistribution_rounds": 2}),
    "fedprox": Sent({"mu": 0.1}),
    "scaffold": Sent(up=beside_statistics(2), down=beside_statistics(2), network="normed"),
    "scaffnew": Sent({"clients_per_round": CLIENTS}, up=times(2), down=times(2)),  # all, not half
    # A gradient and two numbers up, two numbers down.
    "adaptive_steps": Sent(
        up=lambda size: ROUNDS * COHORT * (2 * size + 8),
        down=lambda size: ROUNDS * COHORT * (size + 8),
    ),
    # A model travels to all of the cohort, with the steps; four numbers come back.
    "loadaboost": Sent(up=and_a_number, down=and_a_number),
    "skewscout": Sent(
        up=lambda size: ROUNDS * COHORT * (size + 16),
        down=lambda size: ROUNDS * COHORT * (2 * size + 4),
    ),
    "fednova": Sent(up=and_a_number),  # T_k
    "mfl": Sent(up=times(2), down=times(2)),  # a momentum is as large as a model
    "parallel_sgd": Sent(),
    "fedavgm": Sent(),
    "fedadagrad": Sent(),
    "fedadam": Sent(network="normed"),
    "fedyogi": Sent(),
    "ozdayi": Sent(),
    "semifl": Sent(network="normed"),
    "fedasync": Sent({"buffer_size": 2}, up=times(0.5), down=times(0.5), network="normed"),
    "fedbuff": Sent({"buffer_size": 2}, up=times(0.5), down=times(0.5)),
    # A ring of 4: all get the first model, send theirs to two neighbours between rounds, and send
    # the last for the mean.
    "gossip": Sent(
        up=lambda size: ((ROUNDS - 1) * 2 + 1) * COHORT * size,
        down=lambda size: (1 + (ROUNDS - 1) * 2) * COHORT * size,
        network="normed",
    ),
    # The same of two that each sends to, with a weight.
    "push_sum": Sent(
        up=lambda size: ((ROUNDS - 1) * 2 + 1) * COHORT * (size + 4),
        down=lambda size: (1 + (ROUNDS - 1) * 2) * COHORT * (size + 4),
    ),
    # The same of all three others, once everybody has met everybody, with three numbers.
    "dada": Sent(
        {"peers": 60},
        up=lambda size: ((ROUNDS - 1) * 3 + 1) * COHORT * (size + 12),
        down=lambda size: (1 + (ROUNDS - 1) * 3) * COHORT * (size + 12),
    ),
    "qffl": Sent(up=and_a_number, network="normed"),  # F_k
    "afl": Sent(up=and_a_number),
    "robust": Sent(network="normed"),
    "fltrust": Sent(),
    "zeno": Sent(),
    "feddf": Sent({"distill_steps": 2}, network="normed"),
    # All send in the first round; then not all signs are those of the server's step.
    "cmfl": Sent({"relevance": 1.0}, up=lambda size: COHORT * size),
    # 8 clients, 4 a round: a client comes back after two updates, and is sent both codes.
    # Statistics are sent as they are.
    "stc": Sent(
        {"sparsity": 0.1},
        up=each(TERNARY + STATISTICS),
        down=each(2 * TERNARY + STATISTICS),
        network="normed",
    ),
    "fedavg_top_k": Sent({"sparsity": 0.1}, up=each(TOP_K)),
    "fedavg_qsgd": Sent({"levels": 127}, up=each(QSGD)),
    # 152 of 610 entries, among 256, and two seeds and two ends.
    "fedavg_sketched": Sent(
        {"share": 0.25, "bits": 2}, up=each(math.ceil((256 * 2 + 64) / 8) + 2 * 8)
    ),
    "dp_fedavg": Sent({"sampling": "fixed"}),
    "dp_ftrl": Sent(),
    "dp_sgd": Sent(),
    # A client tries all models, and says which it took.
    "ifca": Sent({"clusters": 3}, up=and_a_number, down=times(3), network="normed"),
    "dynamic_clustering": Sent({"cluster_limit": 180.0}, up=and_a_number),  # one cluster
    "ditto": Sent(network="normed"),
    "fine_tuned": Sent(),
    "per_fedavg": Sent({"hessian": True}),
    "pfedme": Sent(),
    "apfl": Sent({"learned": True}),
    "fedrod": Sent(),
    "fedala": Sent(),
    "fedamp": Sent(network="normed"),
    # Two models of others, and two numbers back.
    "fedfomo": Sent({"downloads": 2}, up=lambda size: ROUNDS * COHORT * (size + 8), down=times(2)),
    # A head of 10 classes and 8 units stays, or it alone travels, or it is sent once to all.
    "fedper": Sent(up=bodies, down=bodies),
    "fedrep": Sent({"head_epochs": 1}, up=bodies, down=bodies),
    "lg_fedavg": Sent(up=each(HEAD), down=each(HEAD)),
    "fedbn": Sent({"norms": "*bias"}, up=without(8 + 10), down=without(8 + 10), network="normed"),
    "fedmd": Sent({"public_samples": 12}, up=each(4 * 12 * 10), down=each(4 * 12 * 10 + 4)),
    "fd": Sent(up=each(4 * 10 * 10), down=each(4 * 10 * (10 + 1))),
    "fedproto": Sent(up=each(PROTOTYPES), down=each(PROTOTYPES)),
    "fedbabu": Sent(up=bodies, down=lambda size: CLIENTS * HEAD + bodies(size)),
    "feddyn": Sent(),
    "fedadmm": Sent(),
    "moon": Sent(),
    "fedntd": Sent(),
    "fedgkd": Sent({"buffer": 2}, down=times(2)),  # a teacher, of however many models
    "fedlc": Sent(),
    "fedrs": Sent(),
    # All clients, whose 8 hidden units, or a half or a quarter, have 64 inputs and 10 outputs.
    "heterofl": Sent({"clients_per_round": CLIENTS}, up=narrow, down=narrow),
    "fedrolex": Sent({"clients_per_round": CLIENTS}, up=narrow, down=narrow),
    "fjord": Sent({"clients_per_round": CLIENTS}, up=in_thirds, down=in_thirds),
    "feddisco": Sent(up=lambda size: 4 * CLIENTS + ROUNDS * COHORT * size),  # how far each is
    # In the end all are sent the model, and tell moments of 8 features for each of 10 classes.
    "ccvr": Sent(
        up=lambda size: ROUNDS * COHORT * size + CLIENTS * 4 * 10 * (8 * 8 + 8 + 1),
        down=lambda size: (ROUNDS * COHORT + CLIENTS) * size,
    ),
    "fedsam": Sent(),
    "fedlesam": Sent(),
    "fedexp": Sent(),
    "fedcm": Sent({"alpha": 0.5}, down=times(2)),  # a momentum down, which the server knows itself
    "diloco": Sent(),
    # Head and norm, the rest, and head and norm again; whole models down, and then the last ones.
    "streaming_diloco": Sent(
        up=lambda size: COHORT * (size + HEAD + 4 * 2 * 8 + STATISTICS),
        down=lambda size: COHORT * 2 * size,
        network="normed",
    ),
    "mimelite": Sent({"beta": 0.5}, up=times(2), down=times(2)),  # a gradient up, a momentum down
    # A gradient up and the mean of all down, then as FedAvg; a momentum down.
    "mime": Sent(
        {"beta": 0.5}, up=beside_statistics(2), down=beside_statistics(3), network="normed"
    ),
    # The means of all clients first go to the server, and from there to the others.
    # Six are sent the model, and say their losses.
    "power_of_choice": Sent(
        {"candidates": 6},
        up=lambda size: ROUNDS * (COHORT * size + 6 * 4),
        down=lambda size: ROUNDS * 6 * size,
    ),
    "fedcs": Sent(up=lambda size: ROUNDS * COHORT * (size + 3 * 4)),  # of a device, three numbers
    # All train once for their seconds, and are evaluated in the first round and the third.
    "tifl": Sent(
        {"tiers": 2},
        up=lambda size: (CLIENTS + ROUNDS * COHORT) * size + 2 * CLIENTS * 4,
        down=lambda size: (CLIENTS + 2 * CLIENTS + COHORT) * size,
    ),
    "hybrid_fl": Sent(up=lambda size: ROOT * (64 * 4 + 4) + ROUNDS * COHORT * (size + 3 * 4)),
    "oort": Sent(up=and_a_number),
    # All train once, and are evaluated in every round.
    "favor": Sent(
        up=lambda size: (CLIENTS + ROUNDS * COHORT) * size + ROUNDS * CLIENTS * 4,
        down=lambda size: (1 + ROUNDS) * CLIENTS * size,
    ),
    # All are sent the first model for a score of it; a visit gives another.
    "isfedavg": Sent(
        up=lambda size: 4 * CLIENTS + ROUNDS * COHORT * (size + 4),
        down=lambda size: (CLIENTS + ROUNDS * COHORT) * size,
    ),
    "ocs": Sent({"senders": 4.0}, up=and_a_number),  # as many as train: all send
    "fedmix": Sent(
        {"mix_samples": 6},
        up=lambda size: MEANS + ROUNDS * COHORT * size,
        down=lambda size: (CLIENTS - 1) * MEANS + ROUNDS * COHORT * size,
    ),
    # All say how many samples of each digit they have. Two mediators, each of whose models goes to
    # a client and back in every round.
    "astraea": Sent(
        {"mediator_size": 2},
        up=lambda size: CLIENTS * 10 * 4 + ROUNDS * 2 * size,
        down=times(0.5),
    ),
}


class Net(nn.Module):
    """A hidden layer with BatchNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None = None) -> jax.Array:
        # No bias: of its gradient BatchNorm leaves rounding, of which Adam makes whole steps.
        x = nn.Dense(8, use_bias=False)(x.reshape(len(x), -1))
        x = x[:, None, None]  # an image of one pixel
        x = nn.relu(layers.BatchNorm()(x, train=train, mask=mask))
        return layers.Dense(10)(x[:, 0, 0])


@functools.cache
def digits() -> tuple[fs.ClientData, tuple[np.ndarray, np.ndarray]]:
    """Few digits at unequal clients, one of them with less than a minibatch."""
    images = fs.load_dataset("digits")
    x = images.train_x.astype(np.float32) / 16
    partition = fs.partition.Partition(
        np.arange(sum(SIZES), dtype=np.int32), np.cumsum([0, *SIZES]).astype(np.int32)
    )
    root = np.arange(sum(SIZES), sum(SIZES) + ROOT)  # the server's own
    test = (images.test_x[:100].astype(np.float32) / 16, images.test_y[:100])
    return fs.client_data(x, images.train_y, partition, root=root), test


@functools.cache
def networks() -> dict[str, fs.Model]:
    shape = (8, 8, 1)
    return {
        "mlp": fs.models.mlp(shape, 10, widths=(8,)),
        "normed": fs.models.from_linen(Net(), shape),
    }


def make(
    name: str, model: fs.Model, devices: int | None = None, chunk: int | None = None
) -> fs.Algorithm:
    common = stand_in(
        model, lr=LR, momentum=MOMENTUM, clients_per_round=COHORT,
        clock=fs.clock.simulated(0.5, LINK, deadline=1e9),
        execution=fs.make_execution(devices, chunk),
    )  # fmt: skip
    return make_on(name, common, **METHODS[name].options)


def simulated(algorithm: fs.Algorithm, model: fs.Model, seeds: tuple[int, ...]) -> fs.Result:
    data, test = digits()
    return fs.simulate(
        algorithm, model, data, test, rounds=ROUNDS, classes=10, seeds=seeds, initial=start(model)
    )


@functools.cache
def start(model: fs.Model) -> fs.Variables:
    """Drawn once: most of what a start compiles is the draw of its weights."""
    return jax.jit(model.init)(jax.random.key(0))


LINK = fs.clock.bandwidth(1e4, 4e4)
ON_A_CLOCK = {name for name, method in ALGORITHMS.items() if needs_a_clock(method)}
UNTIMED = {
    "gossip": "flight",
    "push_sum": "flight",
    "dada": "flight",
    "hierfavg": "flight",
    "fedasync": "broadcast",
    "fedbuff": "broadcast",
}
"""Methods whose rounds are no rounds of a clock, and the part by which; of the last two it is what
stands for a clock, see tests/test_arrivals.py."""


ALL_COME = {
    "scaffnew": "clients that are never lost, asleep or late",
    "isfedavg": "clients that are never lost, asleep or late",
    "streaming_diloco": "models without fragments",
}
"""Methods that a clock must not keep a client from, and what their rejection says."""


LOOKS = {
    "power_of_choice": {"asleep"},
    "fedcs": {"asleep", "late"},
    "hybrid_fl": {"asleep", "late"},
    "tifl": {"asleep"},
    "oort": {"asleep"},
}
"""Methods that see before the draw who is asleep, or who would be late."""


SOME_COME = fs.clock.simulated(
    fs.clock.tiers(1, 3), available=fs.clock.bernoulli(0.7), failures=0.3, deadline=2.5
)
PRIVATE = ("dp_fedavg", "dp_ftrl", "dp_sgd")


def on_a_clock_of_equal_devices(name: str, plain: fs.Algorithm) -> fs.Algorithm:
    """That of every method which has no own; without one if it takes none, in a line."""
    if name in ON_A_CLOCK:
        return plain
    clock = fs.clock.simulated(0.5, LINK)
    if name not in UNTIMED:
        return plain.replace(clock=clock)
    with pytest.raises(ValueError, match=f"clock simulated.*{UNTIMED[name]} is ") as caught:
        plain.replace(clock=clock)
    assert len(str(caught.value).splitlines()) == 1
    return plain


def test_the_table_is_complete() -> None:
    assert set(METHODS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str) -> None:
    """Two seeds: compiled once, bytes by hand, finite."""
    model = networks()[METHODS[name].network]
    both = simulated(make(name, model, devices=1), model, (3, 4))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(both.variables))
    assert both.xla_programs <= 5
    assert_statistics(both.variables, METHODS[name].network)
    last, size = both.evaluations[-1], both.model_bytes
    assert last.bytes_up.tolist() == [METHODS[name].up(size)] * 2
    assert last.bytes_down.tolist() == [METHODS[name].down(size)] * 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_example_of_a_method_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is traced; one example of each file trains, see conftest."""

    def traced(toy: Toy, algorithm: fs.Algorithm, rounds: int, seed: int = 0) -> float:
        one, key = algorithm.on(fs.make_execution(devices=1)), jax.random.key(seed)
        data = jax.device_put(toy.data)
        jax.eval_shape(lambda: one.step(key, one.init(key, toy.model.init(key), data), data))
        return 1.0

    monkeypatch.setattr(Toy, "accuracy", traced)
    text = inspect.getdoc(ALGORITHMS[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


SHAPES = ("fedavg", "phase_shift", "radfed", "scaffold", "gossip", "fedasync", "ifca", "ditto")
"""A method of each shape of round."""


@pytest.mark.parametrize("name", SHAPES)
def test_devices_and_a_clock_of_equal_devices_change_nothing(name: str) -> None:
    """Two seeds on 4 devices, a model at a time: sums in order, each seed as it is alone.

    Several processes then compute the same bits, see tests/test_distributed.py. Alone, on one
    device, all clients of a round train at once, as on an accelerator.
    """
    model = networks()[METHODS[name].network]
    with compiled_programs() as programs:
        both = simulated(make(name, model, devices=4), model, (3, 4))
    assert len(programs) >= 2
    assert not [line for text in programs for line in unordered_sums(text)]
    algorithm = on_a_clock_of_equal_devices(name, make(name, model, devices=1, chunk=0))
    alone = simulated(algorithm, model, (4,))
    second = jax.tree.map(lambda a: a[1:], both.variables)
    assert_trees(second, alone.variables, rtol=2e-5, atol=2e-6)
    if name not in UNTIMED:
        assert (np.diff(alone.seconds[:, 0], prepend=0) > 0).all()


QUICK = ("fedasync", "fedproto", "fedcs", "astraea", "radfeda")
"""Methods that draw or carry what others do not, and compile soon."""
CHOOSING = (
    "favor", "oort", "power_of_choice", "tifl", "dp_fedavg", "dp_ftrl", "radfedi", "dada",
    "push_sum", "scaffnew",
)  # fmt: skip
"""And the others that draw a cohort, or send models on, by a part that no other one has."""


@pytest.mark.parametrize("name", some_slow([*QUICK, *CHOOSING], len(QUICK)))
def test_x64_changes_no_cohort(name: str) -> None:
    """Who trains, and where models go on; computed without what they do not depend on."""
    model = networks()[METHODS[name].network]
    algorithm = make(name, model, devices=1, chunk=0)

    def cohorts(key: jax.Array, weights: fs.Variables, data: fs.ClientData) -> Any:
        def body(state: Any, key: jax.Array) -> Any:
            state, metrics = algorithm.step(key, state, data)
            return state, (metrics.client, metrics.source)

        keys = jax.random.split(key, ROUNDS)
        return jax.lax.scan(body, algorithm.init(key, weights, data), keys)[1]

    found = []
    for x64 in (False, True):
        with enable_x64(x64):
            given = jax.random.key(0), start(model), digits()[0]
            traced = jax.jit(cohorts).trace(*given).jaxpr
            rest, used = without_dead_code(traced.jaxpr, given)
            leaves = zip(jax.tree.leaves(given), jax.tree.leaves(used), strict=True)
            run = jax.jit(jaxpr_as_fun(ClosedJaxpr(rest, traced.consts)))
            found.append(run(*(leaf for leaf, use in leaves if use)))
    assert_trees(*found)


@pytest.mark.parametrize("name", some_slow(["phase_shift", "fedavg", "radfed", "scaffold"]))
def test_x64_changes_no_run(name: str) -> None:
    """On a clock, of a model of float32."""
    model, found = networks()["mlp"], []
    for x64 in (False, True):
        with enable_x64(x64):
            algorithm = make(name, model, devices=1).replace(clock=SOME_COME)
            found.append(simulated(algorithm, model, (3,)))
    assert_trees(found[1].variables, found[0].variables, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(found[1].seconds, found[0].seconds)


LOWERED = (
    "ccvr", "dp_ftrl", "dynamic_clustering", "fd", "favor", "fedala", "fedasync",
    "fedavg_sketched", "feddf", "fedmd", "fedrolex", "gossip", "ifca", "oort", "phase_shift",
    "robust", "scaffold", "stc", "streaming_diloco", "zeno",
)  # fmt: skip
"""Methods with an operation, or a shape of round, that no other one has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERED)
def test_method_is_lowered_for_accelerators(name: str) -> None:
    model = networks()[METHODS[name].network]
    algorithm = on_a_clock_of_equal_devices(name, make(name, model, devices=1, chunk=0))
    given = Experiment(algorithm, model, *digits(), classes=10, seeds=(4,)).runner().programs
    weights = jax.tree.map(lambda a: a[None], start(model))
    lowered = [program for program, _ in given.lowered(["cuda", "tpu"], weights)]
    assert lowered[:3] == ["start", "advance", "evaluate"]


LIKE_FEDAVG = (
    "parallel_sgd", "fedprox", "fedntd", "fedlc", "fedrs", "fedsam", "fedmix", "per_fedavg",
    "pfedme", "dp_sgd", "feddisco", "fine_tuned",
)  # fmt: skip
"""Methods that differ from FedAvg in what a client minimises or starts with, or in the end."""
LIKE_OTHERS = (
    "fedavgm", "fedadagrad", "fedyogi", "fedavg_qsgd", "fedavg_sketched", "lg_fedavg", "fedrep",
    "fedbn", "radfedm", "radfedp", "radfeda", "afl", "fedrolex", "fjord", "mimelite",
)  # fmt: skip
"""Methods whose parts are those of another one in other settings, or two parts of two others."""
WITH_ABSENT = METHODS.keys() - {*ALL_COME, *UNTIMED, *LIKE_FEDAVG, *LIKE_OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WITH_ABSENT))
def test_clients_that_do_not_come_break_nothing(name: str) -> None:
    """Asleep, lost or late: weights and states stay finite, and variances of BatchNorm positive."""
    network = "mlp" if name in PRIVATE else "normed"
    model = networks()[network]
    algorithm = make(name, model, 1).replace(clock=SOME_COME)
    played = play(algorithm, model, digits()[0], ROUNDS, seed=3)
    kept = played.states[-1]._replace(diagnostics=())
    floats = [a for a in jax.tree.leaves(kept) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert all(np.isfinite(a).all() for a in (*floats, *jax.tree.leaves(played.final)))
    assert_statistics(played.final, network)
    for count in ("asleep", "lost", "late"):
        seen = sum(int(getattr(metrics.time, count)) for metrics in played.metrics)
        assert (seen > 0) == (count not in LOOKS.get(name, ())), count


@pytest.mark.parametrize("name", sorted(ALL_COME))
def test_methods_that_need_every_client(name: str) -> None:
    with pytest.raises(ValueError, match=f"needs {ALL_COME[name]}"):
        make(name, networks()["mlp"], 1).replace(clock=SOME_COME)


@pytest.mark.parametrize("name", PRIVATE)
def test_statistics_would_tell_of_samples_without_noise(name: str) -> None:
    model = networks()["normed"]
    with pytest.raises(ValueError, match="BatchNorm"):
        simulated(make(name, model), model, (3,))


def assert_statistics(variables: fs.Variables, network: str) -> None:
    """Of BatchNorm: running variances of its one layer, none negative."""
    state = jax.tree.leaves_with_path(variables.state)
    variances = [a for path, a in state if "var" in str(path)]
    assert len(variances) == (network == "normed")
    assert all((a >= 0).all() for a in variances)


def no_risk(params: Any, state: Any, *_: Any) -> Any:
    return jnp.float32(0), state


WHOLE = 4 * PARAMETERS
STICKY = selection.uniform(sticky=True)
NO_SERVER = {"server": server.replace()}  # to compress, or none at all
# Parts besides compressed uploads and a compressed server, of 8 clients and 4 slots; the messages
# in a model up and in one down, None: it goes whole.
COMPRESSED: dict[str, tuple[dict[str, Any], int | None, int | None]] = {
    "every client comes back after 2 rounds": ({}, 1, 2),
    "half of the slots are idle": ({"selection": selection.uniform(active=2)}, 1, 4),
    "a cohort of 2, by coins": ({"selection": poisson(2)}, 1, 4),
    # From here on a slot keeps its client for 2 rounds and sends one message of both.
    "4 downloads in 2 rounds, an update": (
        {"selection": STICKY, "flight": flight.delayed(2)}, 1, 2,
    ),
    "4 downloads in 2 rounds, 2 updates": (
        {"selection": STICKY, "flight": flight.staggered(2)}, 1, 4,
    ),
    "8 downloads in 2 rounds, 2 updates": (
        {
            "selection": STICKY, "flight": flight.staggered(2, refresh=flight.drift_correction()),
        }, 1, 2,
    ),
    # The server takes a message of what it sent, and sends on another client's model.
    "redistributed by the server": (
        {"flight": flight.delayed(3, redistribution=redistribution.permute)},
        1, None,
    ),
    "redistributed by the clients": (
        {
            "selection": STICKY,
            "flight": flight.delayed(3, redistribution=redistribution.permute),
        }, None, None,
    ),
    "gossip": (
        {
            "selection": STICKY,
            "flight": flight.serverless(
                redistribution.matchings(redistribution.ring(COHORT), 1.0)
            ),
            **NO_SERVER,
        }, None, None,
    ),
    "the clusters' own models": (
        {"broadcast": clustering.ifca(2, no_risk), **NO_SERVER}, 1, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_models(case: str) -> None:
    parts, up, down = COMPRESSED[case]
    model, code = networks()["mlp"], compression.top_k(0.1)
    variables = model.init(jax.random.key(0))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR))
    defaults: dict[str, Any] = {
        "selection": selection.uniform(),
        "clients_per_round": COHORT,
        "sending": (sending.compressed(code),),
        "server": compression.compress_server(server.replace(), code),
    }
    algorithm = fs.compose(local, **(defaults | parts))
    traffic = algorithm.traffic(variables, digits()[0])
    assert traffic.upload == (WHOLE if up is None else up * TOP_K)
    assert traffic.download == (WHOLE if down is None else down * TOP_K)


def test_what_is_not_read_is_not_sent() -> None:
    """A loss that the clients report; only q-FFL's server needs it."""
    model = networks()["mlp"]
    risk = fs.empirical_risk(model)
    local = with_initial_loss(fs.local_sgd(risk, optax.sgd(LR)), risk)
    variables = model.init(jax.random.key(0))
    fair = fs.compose(
        local,
        selection=selection.uniform(),
        clients_per_round=COHORT,
        preaggregation=(preaggregation.q_fair(1.0, LR), preaggregation.agnostic(0.1)),
    )
    plain = fs.fedavg(local, clients_per_round=COHORT)
    assert plain.traffic(variables, digits()[0]).message == 0
    assert fair.traffic(variables, digits()[0]).message == 4


# Whether clients count equally, where one may choose: as the paper has it, if it says.
EQUAL_WEIGHTS = {
    "fedavg": False,
    "robust": True,
    "zeno": True,
    "cmfl": False,
    "ocs": False,
    "stc": True,
    "dynamic_clustering": True,
    "ifca": False,
    "ditto": False,
    "fine_tuned": False,
    "per_fedavg": True,
    "pfedme": True,
    "apfl": True,
    "fedrod": False,
    "fedala": False,
    "fedper": False,
    "fedrep": False,
    "lg_fedavg": False,
    "fedbn": False,
    "fedbabu": False,
    "heterofl": True,
    "fedrolex": False,
    "fjord": False,
    "moon": False,
    "fedntd": False,
    "fedgkd": False,
    "fedlc": False,
    "ccvr": False,
    "fedsam": False,
    "fedlesam": True,
    "fedexp": True,
    "fedcm": True,
    "mimelite": False,
    "mime": False,
}


@pytest.mark.parametrize("name", EQUAL_WEIGHTS)
def test_equal_weights_are_equal(name: str) -> None:
    local = fs.local_sgd(no_risk, optax.sgd(LR))
    common = stand_in(networks()["mlp"], local=local, lr=LR, momentum=0.0)

    def weights(**options: Any) -> Any:
        algorithm = make_on(name, common, clients_per_round=COHORT, **options)
        return algorithm.parts.weighting

    assert weights(equal_weights=True) is weighting.equal
    assert weights(equal_weights=False) is weighting.by_samples
    assert weights() is weights(equal_weights=EQUAL_WEIGHTS[name])


def test_no_method_with_weights_is_left_out() -> None:
    found = {name for name, method in ALGORITHMS.items() if "equal_weights" in keywords(method)}
    assert found == set(EQUAL_WEIGHTS)


def mean_without(rows: np.ndarray, cut: int) -> np.ndarray:
    return np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)


def nearest(rows: np.ndarray, malicious: int, keep: int) -> np.ndarray:
    """(Multi-)Krum: the rows with the smallest sums of squares to their nearest others."""
    square = np.sum((rows[:, None] - rows[None]) ** 2, axis=-1)
    near = np.sort(square, axis=1)[:, 1 : len(rows) - malicious - 1]
    assert near.shape[1] == len(rows) - malicious - 2
    return rows[np.argsort(near.sum(axis=1))[:keep]].mean(axis=0)


def least_distance(rows: np.ndarray) -> np.ndarray:
    """The geometric median, by 2,000 plain Weiszfeld steps."""
    point = rows.mean(axis=0)
    for _ in range(2000):
        weight = 1 / np.linalg.norm(rows - point, axis=1)
        point = weight @ rows / weight.sum()
    return point


def filtered(rows: np.ndarray, malicious: int) -> np.ndarray:
    """CAF, by the covariance matrix."""
    weight, found = np.ones(len(rows)), []
    while weight.sum() > len(rows) - 2 * malicious:
        mean = weight @ rows / weight.sum()
        values, vectors = np.linalg.eigh(np.cov(rows.T, aweights=weight, ddof=0))
        found.append((values[-1], mean))
        along = ((rows - mean) @ vectors[:, -1]) ** 2 * (weight > 0)
        weight = weight * (1 - along / along.max())
    return min(found, key=lambda pair: pair[0])[1]


RULES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "mean": lambda rows, f: rows.mean(axis=0),
    "coordinate_median": lambda rows, f: np.median(rows, axis=0),
    "trimmed_mean": mean_without,
    "geometric_median": lambda rows, f: least_distance(rows),
    "krum": lambda rows, f: nearest(rows, f, 1),
    "multi_krum": lambda rows, f: nearest(rows, f, len(rows) - f),
    "caf": filtered,
}


SKEWED = np.random.default_rng(181).exponential(size=(10, 3)) ** 2
SHARED = ("trimmed_mean", "krum", "multi_krum", "caf")  # the rules that have a share


@pytest.mark.parametrize(
    ("rule", "byzantine"),
    [(rule, None) for rule in (None, *RULES)] + [(r, b) for r in SHARED for b in (0.1, 0.3)],
)
def test_robust_follows_the_rule_and_the_share_that_it_is_given(
    rule: Any, byzantine: float | None
) -> None:
    """By default the median of every coordinate, and a fifth of the cohort."""
    given = {} if rule is None else {"aggregator": rule}
    given |= {} if byzantine is None else {"byzantine": byzantine}
    local = fs.local_sgd(no_risk, optax.sgd(LR))
    made = ALGORITHMS["robust"](local, clients_per_round=10, **given)
    found = jax.jit(made.parts.aggregator)(jnp.asarray(SKEWED, jnp.float32), jnp.ones(10))
    malicious = {None: 2, 0.1: 1, 0.3: 3}[byzantine]
    wanted = RULES[rule or "coordinate_median"](SKEWED, malicious)
    np.testing.assert_allclose(found, wanted, atol=0.02)


def test_rows_tell_all_rules_and_shares_apart() -> None:
    """By far more than the tolerance of the test before."""
    values = [RULES[name](SKEWED, 2) for name in RULES if name not in SHARED]
    values += [RULES[name](SKEWED, f) for name in SHARED for f in (1, 2, 3)]
    for i, a in enumerate(values):
        assert all(np.abs(a - b).max() > 0.1 for b in values[:i])


def test_robust_mixes_if_it_is_told_to() -> None:
    """With the share that the rule is given too; of buckets it must withstand s times as many."""
    local = fs.local_sgd(no_risk, optax.sgd(LR))
    for options, before, rule in (
        (
            {"mixing": "nearest"},
            "(nearest_neighbour_mixing(byzantine=0.1),)",
            "trimmed_mean(beta=0.1)",
        ),
        ({"mixing": "buckets"}, "(bucketing(),)", "trimmed_mean()"),
        (
            {"mixing": "buckets", "bucket_size": 4},
            "(bucketing(size=4),)",
            "trimmed_mean(beta=0.4)",
        ),
    ):
        made = ALGORITHMS["robust"](
            local, clients_per_round=20, aggregator="trimmed_mean", byzantine=0.1, **options
        )
        found = [fs.base.shown(p) for p in (made.parts.preaggregation, made.parts.aggregator)]
        assert found == [before, rule]


def test_robust_clips_if_it_is_told_to() -> None:
    local = fs.local_sgd(no_risk, optax.sgd(LR))
    made = [ALGORITHMS["robust"](local, clients_per_round=4, clip=c) for c in (None, 0.5)]
    assert made[0].parts.sending == ()
    (part,) = made[1].parts.sending
    long, short = (fs.Variables(jnp.float32([3 * c, 4 * c]), jnp.float32(9)) for c in (1, 0.05))
    for update, wanted in ((long, [0.3, 0.4]), (short, [0.15, 0.2])):
        sent = part.send(jax.random.key(0), (), update, (), jnp.int32(0)).update
        np.testing.assert_allclose(sent.params, wanted, rtol=1e-6)
        assert float(sent.state) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients_per_round": 4}, None),  # the median knows no share
        (
            {"clients_per_round": 4, "aggregator": "trimmed_mean"},
            "aggregator trimmed_mean() needs a larger cohort, for beta=0.2 of the rows that it",
        ),
        ({"clients_per_round": 5, "aggregator": "trimmed_mean"}, None),
        (
            {"clients_per_round": 4, "aggregator": "krum"},
            "aggregator krum() needs a larger cohort, for byzantine=0.2 of the rows",
        ),
        ({"clients_per_round": 5, "aggregator": "krum"}, None),
        (
            {"clients_per_round": 6, "aggregator": "multi_krum", "byzantine": 0.4},
            "for byzantine=0.4 of the rows that it gets, clients_per_round is 6: use 7 rows, by",
        ),  # 2 of 6, which must be 7
        ({"clients_per_round": 7, "aggregator": "multi_krum", "byzantine": 0.4}, None),
        ({"clients_per_round": 1, "aggregator": "krum", "byzantine": 0.0}, None),
    ],
)
def test_robust_needs_a_cohort_that_its_share_divides(
    options: dict[str, Any], message: str | None
) -> None:
    local = fs.local_sgd(no_risk, optax.sgd(LR))
    if message is None:
        assert ALGORITHMS["robust"](local, **options).slots == options["clients_per_round"]
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        ALGORITHMS["robust"](local, **options)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_method_is_one_composition_and_documented(name: str) -> None:
    method, parts = describe_method(name), parts_of(ALGORITHMS[name])
    assert parts
    assert all(part.meaning for part in parts)
    assert method.traffic
    assert method.source
    texts = inspect.getdoc(ALGORITHMS[name]) or ""
    assert all(f"{key}:" in texts for key in keywords(ALGORITHMS[name]) if key not in COMMON)


@pytest.mark.slow
@pytest.mark.parametrize("name", algorithms.ASKED)
def test_a_command_asks_for_what_it_must_be_given(name: str) -> None:
    given = shlex.split(algorithms.command(name))[3:]
    build(parse([*given, "--compare", "none", "--seeds", "1"]))
    with pytest.raises(ValueError, match=f"^{name}: "):
        build(parse([*given[:2], "--compare", "none"]))


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[1] / "docs" / "algorithms.md"
    assert page.read_text(encoding="utf-8") == algorithms.page(), (
        "python docs/algorithms.py > docs/algorithms.md"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS)[::6])
def test_a_part_fits_a_method_or_is_refused_in_a_line_that_names_two(name: str) -> None:
    """Parts of all roles that the method leaves as compose takes them; of every sixth method.

    What does not fit is nearly always two parts, see tests/test_compositions.py.
    """
    method = named_method(name, any_local())
    fixed = {line.strip().partition("=")[0] for line in method.parts.written()} - {"local"}
    for part in PART_LIST:
        of_a_graph = part.role == "redistribution" and method.slots != SLOTS
        if part.role not in fixed | {"setting"} and not of_a_graph:
            refusal(part, method=method)
