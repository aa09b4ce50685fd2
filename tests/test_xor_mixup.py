"""XorMixup: what clients send in code, and what the server makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees, play, rejects
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim.data import XorMixup, xor_mixup
from fedjax_sim.partition import Partition, partition_from_lists


@st.composite
def dealt(draw: Any) -> tuple[Any, Any, Partition, Any, int, int]:
    labels = np.array(draw(st.lists(st.integers(0, 3), min_size=9, max_size=30)))
    x = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, (len(labels), 2, 3))
    owned = np.split(np.arange(len(labels)), [3, 5, 8])
    clients = partition_from_lists(owned[:3])
    return x.astype(np.uint8), labels, clients, owned[3], draw(st.integers(1, 4)), draw(
        st.integers(0, 5)
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(dealt())
def test_every_sample_is_what_its_rows_say(case: Any) -> None:
    """Targets and what codes them are one client's, of two classes; the server has the second."""
    x, y, partition, root, samples, seed = case
    can = [
        any(y[i] != y[j] and y[j] in y[root] for i in mine for j in mine)
        for mine in partition.lists
    ]
    if not any(can):
        with pytest.raises(ValueError, match="a client with samples of two classes"):
            xor_mixup(x, y, partition, root, samples=samples, seed=seed)
        return
    made = xor_mixup(x, y, partition, root, samples=samples, seed=seed)
    count = samples * sum(can)
    assert made.made_of.shape == (count, 3)
    owner = np.repeat(np.arange(3), partition.sizes)
    for row, (i, j, b) in enumerate(made.made_of, len(x)):
        assert owner[i] == owner[j]
        assert y[i] != y[j] == y[b]
        assert b in root
        assert (made.x[row] == (x[i] ^ x[j] ^ x[b])).all()
        assert made.y[row] == y[i]
    senders = owner[made.made_of[:, 0]]
    assert np.bincount(senders, minlength=3).tolist() == [samples * one for one in can]
    assert (made.x[: len(x)] == x).all()
    assert made.root.tolist() == [*root, *range(len(x), len(x) + count)]
    again = xor_mixup(x, y, partition, root, samples=samples, seed=seed)
    assert (again.made_of == made.made_of).all()


def test_all_choices_are_as_likely() -> None:
    """Pairs of two classes of which the server has the second, and its samples of that one."""
    y = np.array([0, 0, 1, 2, 1, 1, 0])
    clients = partition_from_lists([[0, 1, 2, 3]])
    made = xor_mixup(np.zeros((7, 1), np.uint8), y, clients, [4, 5, 6], samples=9000, seed=0)
    found, counts = np.unique(made.made_of, axis=0, return_counts=True)
    pairs = [(i, j) for i in range(4) for j in range(3) if y[i] != y[j]]
    wanted = [(i, j, b) for i, j in pairs for b in (4, 5, 6) if y[b] == y[j]]
    assert found.tolist() == [list(one) for one in wanted]
    expected = np.array([9000 / len(pairs) / (1 + (y[j] == 1)) for _, j, _ in wanted])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_a_server_trains_on_them() -> None:
    """Hybrid-FL's server has n_0 samples and those that it made, which go up too."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = (100 * y[:, None] + rng.integers(0, 50, (40, 4))).astype(np.uint8)
    partition = partition_from_lists(np.split(np.arange(30), 3))
    made = xor_mixup(x, y, partition, np.arange(30, 40), samples=5, seed=1)
    data = fs.client_data(made.x, made.y, partition, root=made.root)
    model = fs.models.with_scaling(fs.models.logistic((4,), 2), np.zeros(4), np.full(4, 100.0))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    algorithm = fs.fedavg(local, clients_per_round=3).replace(server=fs.server.train_beside(local))
    start = jax.eval_shape(model.init, jax.random.key(0))
    assert algorithm.setup_traffic(start, data).up == (10 + 15) * (4 + 4)
    plain = fs.client_data(x, y, partition, root=np.arange(30, 40))
    ours, theirs = (play(algorithm, model, d, 2).servers for d in (data, plain))
    with pytest.raises(AssertionError):
        assert_trees(ours, theirs, rtol=1e-3)


p2 = partition_from_lists([[0, 1], [2]])
SHARED = dataclasses.replace(p2, repeats=True)
ROWS = np.zeros((5, 2), np.uint8)
REFUSED: dict[str, tuple[Callable[[], XorMixup], str]] = {
    "floats": (
        lambda: xor_mixup(ROWS / 255, [0, 1, 0, 1, 0], p2, [3], samples=1, seed=0),
        "x must be uint8, as its bits are exchanged, got float64",
    ),
    "none": (
        lambda: xor_mixup(ROWS, [0, 1, 0, 1, 0], p2, [3], samples=0, seed=0),
        "samples must be at least 1, got 0",
    ),
    "beyond int32": (
        lambda: xor_mixup(ROWS, [0, 2**33, 0, 1, 0], p2, [3], samples=1, seed=0),
        "y must be in 0 … M - 1, got 0 … 8589934592",
    ),
    "no root": (
        lambda: xor_mixup(ROWS, [0, 1, 0, 1, 0], p2, [], samples=1, seed=0),
        "root must have at least one row, got none",
    ),
    "outside": (
        lambda: xor_mixup(ROWS, [0, 1, 0, 1, 0], p2, [3, 5], samples=1, seed=0),
        "root must be integers in 0 to 4, got 3 to 5",
    ),
    "one class": (
        lambda: xor_mixup(ROWS, [0, 0, 0, 1, 0], p2, [3], samples=1, seed=0),
        "partition must have a client with samples of two classes, of which the server has one",
    ),
    "shared": (
        lambda: xor_mixup(ROWS, [0, 1, 0, 1, 0], SHARED, [3], samples=1, seed=0),
        "partition must have every sample once",
    ),
}


test_bad_input_is_named = rejects(REFUSED)
