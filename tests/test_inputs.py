"""Inputs mean what they say, or are refused: other labels for a client, data, advice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, altered_data, assert_trees, largest_change

import fedjax_sim as fs
from fedjax_sim.base import Batch, PyTree
from fedjax_sim.client.mixup import peer_means
from fedjax_sim.data import eval_set
from fedjax_sim.engine.batches import root_view, rows_at
from fedjax_sim.engine.clients import label_counts, samples_of, visits
from fedjax_sim.partition import partition_from_lists
from fedjax_sim.run.checks import check_sets
from fedjax_sim.run.layout import RunAxes

PLAIN = {"personal": False}


def flips(federation: Federation, malicious: tuple[int, ...] = (1, 4, 6)) -> np.ndarray:
    """``int32[N, M]``: these clients see class y as M - 1 - y, the others as it is."""
    classes = np.arange(federation.classes, dtype=np.int32)
    hostile = np.isin(np.arange(federation.data.clients), malicious)
    return np.where(hostile[:, None], classes[::-1], classes)


def relabelled(federation: Federation) -> tuple[fs.ClientData, fs.ClientData]:
    """Clients that see flipped classes, and clients whose samples have flipped labels."""
    data, table = federation.data, flips(federation)
    y = np.array(data.y)
    for k, rows in enumerate(federation.partition.lists):
        y[rows] = table[k, y[rows]]
    assert (y != np.asarray(data.y)).any()
    return altered_data(data, relabel=table), altered_data(data, y=y)


KEY = jax.random.key(3)
Run = Callable[[fs.ClientData], tuple[Any, Any]]


@pytest.fixture(scope="module")
def run(federation: Federation, models: dict[str, fs.Model]) -> Run:
    """Four rounds of mediators, which carry models and count labels: last state, all metrics."""
    model = models["logistic"]
    algorithm = fs.algorithms.astraea(
        fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1)),
        clients_per_round=6,
        classes=federation.classes,
        mediator_size=2,
    ).on(fs.make_execution(devices=1))

    def rounds(data: fs.ClientData) -> tuple[Any, Any]:
        state = algorithm.init(KEY, model.init(KEY), data)
        keys = jax.random.split(KEY, 4)
        return jax.lax.scan(lambda state, key: algorithm.step(key, state, data), state, keys)

    return rounds


@pytest.fixture(scope="module")
def compiled(run: Run) -> Run:
    """The data are its argument."""
    return jax.jit(run)


@pytest.mark.slow
def test_a_run_with_relabel_is_a_run_on_flipped_labels(
    federation: Federation, compiled: Run
) -> None:
    """All that reads a label sees the client's own: gradients, losses, groups of mediators."""
    seen, written = map(compiled, relabelled(federation))
    assert_trees(seen, written)  # to the bit
    honest, _ = compiled(altered_data(federation.data, relabel=flips(federation, ())))
    assert largest_change(seen[0].server.params, honest.server.params) > 1e-2


def test_data_straight_from_client_data(federation: Federation, run: Run, compiled: Run) -> None:
    """NumPy's arrays that a program closes over are what they are as its argument."""
    _, data = relabelled(federation)
    assert isinstance(data.index, np.ndarray)
    closed, expected = jax.jit(lambda: run(data))(), compiled(data)
    assert_trees(closed[0].server, expected[0].server, rtol=1e-6, atol=1e-7)


def test_label_counts_are_of_the_labels_that_a_client_sees(federation: Federation) -> None:
    seen, written = relabelled(federation)
    counts = label_counts(seen, federation.classes)
    assert np.array_equal(counts, label_counts(written, federation.classes))
    assert np.array_equal(counts.sum(axis=1), federation.sizes)


def test_relabel_of_one_client_by_run_and_never_of_the_server(federation: Federation) -> None:
    data = jax.device_put(altered_data(federation.data, root=np.array([0, 5], np.int32)))
    tables = jnp.stack([jnp.asarray(flips(federation, hostile)) for hostile in ((2,), (3, 5))])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def labels(table: jax.Array, clients: jax.Array) -> jax.Array:
        one = altered_data(data, relabel=table)

        def of(visit: PyTree) -> jax.Array:
            return rows_at(visit.view(samples_of(one), one), jnp.arange(3, dtype=jnp.int32)).y

        server = rows_at(root_view(one), jnp.arange(3, dtype=jnp.int32)).y
        return jnp.concatenate([jax.vmap(of)(visits(one, clients)), server[None]])

    clients = np.array([2, 3, 6], np.int32)
    lists = federation.partition.lists
    own = np.stack([*(lists[k][:3] for k in clients), np.asarray(data.index)[:3]])
    y = np.asarray(data.y)[own]
    top = federation.classes - 1
    expected = [[top - y[0], *y[1:]], [y[0], top - y[1], *y[2:]]]
    assert np.array_equal(labels(tables, jnp.asarray(clients)), np.array(expected))


def test_a_peer_of_fedmix_sends_the_labels_that_it_sees(federation: Federation) -> None:
    """A malicious peer's means have wrong labels at every client, a good one's at none."""
    transform = jax.jit(jax.vmap(peer_means(4), in_axes=(0, None, 0)))
    batch = Batch(jnp.zeros((2, 6)), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    peers = []
    for data in map(jax.device_put, relabelled(federation)):
        clients = jnp.arange(40, dtype=jnp.int32) % 8
        views = jax.vmap(lambda visit, data=data: visit.view(samples_of(data), data))(
            visits(data, clients, peers=True)
        )
        peers.append(transform(jax.random.split(KEY, 40), batch, views).peer)
    assert_trees(*peers)


@pytest.mark.parametrize("runs", [1, 2])
def test_every_run_has_the_labels_and_what_was_sent_to_it(
    federation: Federation, runs: int
) -> None:
    data = fs.client_data(federation.data.x, federation.data.y, [federation.partition] * runs)
    sent, table = np.arange(5, 5 + runs, dtype=np.int32), flips(federation)
    data = jax.device_put(altered_data(data, relabel=table, sent=sent))
    axes = RunAxes.of(data, (), runs)
    each = axes.map(lambda one: (one.sent, one.relabel), in_axes=(axes.data,))(data)
    assert each[0].tolist() == sent.tolist()
    assert np.array_equal(each[1], np.broadcast_to(table, (runs, *table.shape)))


def with_first(array: Any, value: Any) -> np.ndarray:
    """A copy with another first number."""
    changed = np.array(array)
    changed.flat[0] = value
    return changed


Change = Callable[[Federation], tuple[dict[str, Any], tuple[Any, Any]]]


def other_clients(**fields: Callable[[fs.ClientData], Any]) -> Change:
    """Other fields of the clients' data."""
    return lambda f: ({name: make(f.data) for name, make in fields.items()}, f.test)


def another_test(make: Callable[[Any, Any], tuple[Any, Any]]) -> Change:
    """Another test set."""
    return lambda f: ({}, make(*f.test))


REFUSED: dict[str, tuple[Change, str]] = {
    "labels from 1": (
        other_clients(y=lambda data: data.y + 1),
        "data.y must be in 0 to 2, as classes is 3, got 1 to 3",
    ),
    "a label below 0": (
        other_clients(y=lambda data: with_first(data.y, -1)),
        "data.y must be in 0 to 2, as classes is 3, got -1 to 2",
    ),
    "test labels": (
        another_test(lambda x, y: (x, y + 7)),
        "test.y must be in 0 to 2, as classes is 3, got 7 to 9",
    ),
    "relabel": (
        other_clients(relabel=lambda data: np.full((8, 3), 3, np.int32)),
        "data.relabel must be in 0 to 2, as classes is 3, got 3 to 3",
    ),
    "relabel of others": (
        other_clients(relabel=lambda data: np.zeros((7, 3), np.int32)),
        r"data.relabel must be int32 \[8, 3\], a row for each client, got \[7, 3\]",
    ),
    "dtype": (
        another_test(lambda x, y: (x.astype(np.uint8), y)),
        "test.x must be float32 as the clients' samples are, got uint8",
    ),
    "half": (
        another_test(lambda x, y: (x.astype(np.float16), y)),
        "test.x must be float32 as the clients' samples are, got float16",
    ),
    "NaN": (
        other_clients(x=lambda data: with_first(data.x, np.nan)),
        r"data.x must be finite in float32, got nan at \[0(, 0)*\]",
    ),
    "inf": (
        another_test(lambda x, y: (with_first(x, -np.inf), y)),
        r"test.x must be finite in float32, got -inf at \[0(, 0)*\]",
    ),
    "too large": (
        another_test(lambda x, y: (with_first(x.astype(np.float64), 1e300), y)),
        r"test.x must be finite in float32, got 1e\+300 at \[0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_simulate_refuses_inputs_that_mean_nothing(
    federation: Federation, models: dict[str, fs.Model], case: str
) -> None:
    change, message = REFUSED[case]
    fields, test = change(federation)
    data = altered_data(federation.data, **fields)
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=2)
    with pytest.raises(ValueError, match=f"^{message}"):
        fs.simulate(algorithm, models["logistic"], data, test, rounds=1, classes=3)


def test_tokens_that_jax_would_wrap_are_refused() -> None:
    tokens = np.array([[3], [2**40]])
    data = fs.client_data(tokens, [0, 1], partition_from_lists([[0], [1]]))
    with pytest.raises(ValueError, match=r"^data.x must be within int32, got 1099511627776 at \[1"):
        check_sets(data, {"test": eval_set(tokens[:1].astype(np.int32), [0])}, 1, **PLAIN)


def test_any_byte_order_is_taken() -> None:
    """JAX knows the machine's alone: it rejected the model instead."""
    x, y = np.arange(6.0).reshape(3, 2).astype(">f4"), np.array([0, 1, 1], ">i8")
    data = fs.client_data({"a": x}, y, partition_from_lists([[0], [1, 2]]))
    assert data.x["a"].dtype == np.float32
    assert np.array_equal(data.x["a"], x)
    assert data.y.tolist() == [0, 1, 1]


def test_inputs_that_jax_makes_the_same_are_taken(federation: Federation) -> None:
    """float64 and int64 become what the clients have; small integers are numbers already."""
    x, y = federation.test
    check_sets(federation.data, {"test": eval_set(x.astype(np.float64), y)}, 1, **PLAIN)
    for kinds in ((np.int64, np.int32), (np.uint8, np.uint8), (np.float16, np.float16)):
        data = altered_data(federation.data, x=federation.data.x.astype(kinds[0]))
        check_sets(data, {"test": eval_set(x.astype(kinds[1]), y)}, 1, **PLAIN)


def test_a_pool_that_all_share_is_looked_at_once() -> None:
    class Counted(np.ndarray):
        looks = 0

        def min(self, *args: Any, **kwargs: Any) -> Any:
            Counted.looks += 1
            return super().min(*args, **kwargs)

    x, y = np.zeros((6, 2), np.float32).view(Counted), np.arange(6, dtype=np.int32) % 2
    owners = partition_from_lists([[0, 1], [2]])
    data = dataclasses.replace(fs.client_data(np.asarray(x), y, owners), x=x)
    sets = {
        name: dataclasses.replace(eval_set(np.asarray(x), y, owners), x=x)
        for name in ("test", "validation")
    }
    check_sets(data, sets, 1, **PLAIN)
    assert Counted.looks == 1
