"""Every named method with an MLP and with a CNN that has BatchNorm, and random compositions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees

import fedjax_sim as fs
from fedjax_sim import catalogue
from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.flags import keywords
from fedjax_sim.models import layers

COHORT, ROUNDS, LR, MOMENTUM = 4, 3, 0.05, 0.5


class Sent(NamedTuple):
    """Bytes of one run, as a hand counts them, of models of ``size`` bytes; the options given."""

    options: dict[str, Any] = {}  # noqa: RUF012
    up: Callable[[int], int] = lambda size: ROUNDS * COHORT * size
    down: Callable[[int], int] = lambda size: ROUNDS * COHORT * size


PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10  # of the MLP below
TENTH = 61  # entries: round(0.1 * PARAMETERS)
# Golomb: b* = 1 + floor(log2(log(0.618) / log(0.9))) = 3; 3 + 1 / (1 - 0.9 ** 8) bits a position.
POSITIONS = TENTH * (3 + 1 / (1 - 0.9**8))
TERNARY = math.ceil((POSITIONS + TENTH + 32) / 8)
TOP_K = math.ceil((POSITIONS + 32 * TENTH) / 8)
QSGD = math.ceil((8 * PARAMETERS + 32) / 8)  # 255 codes fit in 8 bits


def times(factor: float) -> Callable[[int], int]:
    return lambda size: round(factor * ROUNDS * COHORT * size)


def each(message: int) -> Callable[[int], int]:
    return lambda size: ROUNDS * COHORT * message


METHODS: dict[str, Sent] = {
    "fedavg": Sent(),
    # Two groups of 2: one uploads in each round, and in the end so does the other.
    "phase_shift": Sent({"phases": 2}, up=lambda size: (ROUNDS + 1) * 2 * size),
    "radfed": Sent({"redistribution_rounds": 2}),
    "radfedi": Sent({"redistribution_rounds": 2}),
    "radfedp": Sent({"redistribution_rounds": 2}),
    "radfedm": Sent({"redistribution_rounds": 2}),
    "radfeda": Sent({"redistribution_rounds": 2}),
    "fedprox": Sent({"mu": 0.1}),
    "scaffold": Sent(up=times(2), down=times(2)),
    "fednova": Sent(),
    "mfl": Sent(up=times(2), down=times(2)),  # a momentum is as large as a model
    "parallel_sgd": Sent(),
    "fedavgm": Sent(),
    "fedadagrad": Sent(),
    "fedadam": Sent(),
    "fedyogi": Sent(),
    "ozdayi": Sent(),
    "fedasync": Sent(),
    # A ring of 4: all get the first model, send theirs to two neighbours between rounds, and send
    # the last for the mean.
    "gossip": Sent(
        up=lambda size: ((ROUNDS - 1) * 2 + 1) * COHORT * size,
        down=lambda size: (1 + (ROUNDS - 1) * 2) * COHORT * size,
    ),
    "qffl": Sent(),
    "afl": Sent(),
    "robust": Sent(),
    "fltrust": Sent(),
    # 8 clients, 4 a round: a client comes back after two updates.
    "stc": Sent({"sparsity": 0.1}, up=each(TERNARY), down=each(2 * TERNARY)),
    "fedavg_top_k": Sent({"sparsity": 0.1}, up=each(TOP_K)),
    "fedavg_qsgd": Sent({"levels": 127}, up=each(QSGD)),
    "dp_fedavg": Sent({"sampling": "fixed"}),
    "ifca": Sent({"clusters": 3}, down=times(3)),  # a client tries all models
    "dynamic_clustering": Sent({"cluster_limit": 180.0}),  # one cluster
    "ditto": Sent(),
    "fine_tuned": Sent(),
    "fedmix": Sent(),
    # Two mediators, each of whose models goes to a client and back in every round.
    "astraea": Sent({"mediator_size": 2}, up=times(0.5), down=times(0.5)),
}


class Net(nn.Module):
    """A convolution with BatchNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None = None) -> jax.Array:
        x = layers.Conv(4, 3)(x)
        x = nn.relu(layers.BatchNorm()(x, train=train, mask=mask))
        return layers.Dense(10)(x.mean(axis=(1, 2)))


@pytest.fixture(scope="module")
def digits() -> tuple[fs.ClientData, tuple[np.ndarray, np.ndarray]]:
    """Few digits at unequal clients, one of them with less than a minibatch."""
    images = fs.load_dataset("digits")
    x = images.train_x.astype(np.float32) / 16
    sizes = [5, 17, 33, 9, 24, 16, 40, 12]
    partition = fs.partition.Partition(
        np.arange(sum(sizes), dtype=np.int32), np.cumsum([0, *sizes]).astype(np.int32)
    )
    root = np.arange(sum(sizes), sum(sizes) + 20)  # the server's own
    test = (images.test_x[:100].astype(np.float32) / 16, images.test_y[:100])
    return fs.client_data(x, images.train_y, partition, root=root), test


def networks() -> dict[str, fs.Model]:
    shape = (8, 8, 1)
    return {
        "mlp": fs.models.mlp(shape, 10, widths=(8,)),
        "cnn": fs.models.from_linen(Net(), shape),
    }


def make(name: str, model: fs.Model) -> fs.Algorithm:
    objective = fs.empirical_risk(model)
    local = fs.local_sgd(objective, optax.sgd(LR, momentum=MOMENTUM))
    function = ALGORITHMS[name]
    common = {"objective": objective, "classes": 10, "lr": LR, "momentum": MOMENTUM}
    given = {key: value for key, value in common.items() if key in keywords(function)}
    return function(local, clients_per_round=COHORT, **given, **METHODS[name].options)


def run(name: str, model: fs.Model, digits: Any, seeds: tuple[int, ...]) -> fs.Result:
    data, test = digits
    return fs.simulate(make(name, model), model, data, test, rounds=ROUNDS, classes=10, seeds=seeds)


def test_the_table_is_complete() -> None:
    assert set(METHODS) == set(ALGORITHMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_method(name: str, digits: Any) -> None:
    """Finite; compiled once; two seeds at once are two runs; bytes as counted by hand."""
    model = networks()["mlp"]
    both, alone = run(name, model, digits, (3, 4)), run(name, model, digits, (4,))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(both.variables))
    second = jax.tree.map(lambda a: a[1:], both.variables)
    # The server of STC meets ties, which the last bit of a sum decides.
    atol = 2e-2 if name == "stc" else 2e-5
    assert_trees(second, alone.variables, rtol=2e-4, atol=atol)
    assert both.xla_programs <= 4
    last, size = both.evaluations[-1], both.model_bytes
    assert last.bytes_up.tolist() == [METHODS[name].up(size)] * 2
    assert last.bytes_down.tolist() == [METHODS[name].down(size)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_method_with_batchnorm(name: str, digits: Any) -> None:
    """As above; the running statistics are averaged and never leave the numbers."""
    if name == "dp_fedavg":  # statistics would tell of samples without noise
        with pytest.raises(ValueError, match="BatchNorm"):
            run(name, networks()["cnn"], digits, (3,))
        return
    result = run(name, networks()["cnn"], digits, (3,))
    leaves = jax.tree.leaves(result.variables)
    assert all(np.isfinite(a).all() for a in leaves)
    variances = [
        a for path, a in jax.tree.leaves_with_path(result.variables.state) if "var" in str(path)
    ]
    assert variances
    assert all((a >= 0).all() for a in variances)
    assert result.xla_programs <= 4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_method_is_one_composition_and_documented(name: str) -> None:
    method = next(m for m in catalogue.catalogue() if m.name == name)
    assert method.parts
    assert method.traffic
    assert method.source
    texts = inspect.getdoc(ALGORITHMS[name]) or ""
    assert all(f"{key}:" in texts for key in keywords(ALGORITHMS[name]) if key not in COMMON)


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[1] / "docs" / "algorithms.md"
    assert page.read_text(encoding="utf-8") == catalogue.page(), (
        "python -m fedjax_sim.catalogue > docs/algorithms.md"
    )
