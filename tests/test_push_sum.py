"""Push-sum, against plain NumPy and against gossip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, assert_trees, largest_change, make_federation, play, rejects

import fedjax_sim as fs
from fedjax_sim import flight, redistribution, selection, tree, weighting
from fedjax_sim.algorithms import gossip, push_sum
from fedjax_sim.base import LocalUpdate

LR, ROUNDS, BATCH, NODES, LINKS = 0.1, 4, 8, 6, 2
MODEL = fs.models.logistic((6,), 3)
SHARES = redistribution.outgoing(redistribution.one_sided(NODES, LINKS, 1))


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation((9, 20, 5, 14, 30, 3, 12, 7))


def local() -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(MODEL), optax.sgd(LR), batch_size=BATCH)


def pushed(matrix: Any, **parts: Any) -> fs.Algorithm:
    made: dict[str, Any] = {
        "selection": selection.uniform(sticky=True),
        "clients_per_round": len(matrix),
        "flight": flight.serverless(redistribution=redistribution.push(matrix)),
        "weighting": weighting.equal,
    }
    return fs.compose(local(), **(made | parts)).on(fs.make_execution(devices=1))


def close(ours: Any, theirs: oracle.Layers) -> None:
    for a, b in zip(oracle.layers_of(ours), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def sum_of(*terms: tuple[float, oracle.Layers]) -> oracle.Layers:
    return [sum(a * layer for a, layer in zip(*row, strict=True)) for row in columns(terms)]


def columns(terms: tuple[tuple[float, oracle.Layers], ...]) -> Any:
    factors = [a for a, _ in terms]
    return [(factors, layers) for layers in zip(*(layers for _, layers in terms), strict=True)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_push_sum_against_numpy(federation: Federation, sign: float) -> None:
    """Six of eight clients, on rows of which two are padding; also if all turn updates around."""
    method = push_sum(
        local(),
        clients_per_round=NODES,
        links=LINKS,
        graph_seed=1,
    ).on(fs.make_execution(devices=4 if sign > 0 else 1))
    if sign < 0:
        method = method.replace(sending=(fs.attacks.sign_flip(np.ones(8, bool), 1.0),))
    ours = play(method, MODEL, federation.data, ROUNDS)
    initial = MODEL.init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(federation.data, initial, LR, 0.0, BATCH, 1)
    nodes = ours.metrics[0].client.tolist()
    assert len({*nodes} - {8}) == NODES
    x, weight = [oracle.layers_of(initial)] * NODES, np.ones(NODES)
    for t in range(ROUNDS):
        if t:
            x = [sum_of(*zip(SHARES[i], x, strict=True)) for i in range(NODES)]
            weight = SHARES.astype(np.float64) @ weight
        z = [sum_of((1 / weight[i], x[i])) for i in range(NODES)]
        trained = [clients.train(t, k, model) for k, model in zip(nodes, z, strict=True)]
        x = [sum_of((1, x[i]), (sign, trained[i]), (-sign, z[i])) for i in range(NODES)]
        slots = ours.states[t].slots
        np.testing.assert_allclose(slots.weight, weight, rtol=1e-5)
        for i in range(NODES):
            close(jax.tree.map(lambda a, i=i: a[i], slots.variables), x[i])
    assert np.ptp(weight) > 0.1  # how many send to a client differs
    close(ours.final, oracle.average(x, [1.0] * NODES))  # of the z by their weights
    evaluated = method.evaluated(jax.random.key(0), ours.states[-1], federation.data)
    assert_trees(evaluated, ours.final, rtol=1e-6, atol=1e-7)


def test_mixing_keeps_the_mean_that_is_evaluated(federation: Federation) -> None:
    """Clients that learn nothing: only an equal mean of unequal models would drift."""
    apart = play(pushed(SHARES), MODEL, federation.data, 2)
    still = fs.local_sgd(fs.empirical_risk(MODEL), optax.sgd(0.0), batch_size=BATCH)
    method = pushed(SHARES).replace(local=still)
    state, step = apart.states[-1], jax.jit(method.step)
    before = method.evaluated(jax.random.key(0), state, federation.data)
    spread = [largest_change(*ends_of(state))]
    for t in range(60):
        state, _ = step(jax.random.key(t), state, federation.data)
    spread.append(largest_change(*ends_of(state)))
    after = method.evaluated(jax.random.key(0), state, federation.data)
    assert_trees(after, before, rtol=1e-4, atol=1e-5)
    assert spread[1] < 1e-3 * spread[0]  # and all agree on it
    used = jax.tree.map(lambda a: a / tree.expand(state.slots.weight, a), state.slots.variables)
    assert_trees(jax.tree.map(lambda a: a[0], used), after, rtol=1e-3, atol=1e-4)


def ends_of(state: Any) -> list[Any]:
    """The models of two clients."""
    used = jax.tree.map(lambda a: a / tree.expand(state.slots.weight, a), state.slots.variables)
    return [jax.tree.map(lambda a, i=i: a[i], used) for i in (0, 3)]


def test_a_weight_travels_with_every_model(federation: Federation) -> None:
    variables = MODEL.init(jax.random.key(0))
    size = 4 * (6 * 3 + 3)
    sizes = {
        name: method.traffic(variables, federation.data)
        for name, method in {
            "push": push_sum(local(), clients_per_round=NODES),
            "gossip": gossip(local(), clients_per_round=NODES),
        }.items()
    }
    assert (sizes["push"].upload, sizes["push"].download) == (size + 4, size + 4)
    assert (sizes["gossip"].upload, sizes["gossip"].download) == (size, size)


@pytest.mark.parametrize(("slots", "links"), [(2, 1), (3, 2), (7, 1), (7, 3), (7, 6)])
def test_one_sided_graphs(slots: int, links: int) -> None:
    edges = redistribution.one_sided(slots, links, 5)
    assert edges.sum(axis=0).tolist() == [links] * slots
    assert not edges.diagonal().any()
    assert all(edges[(j + 1) % slots, j] for j in range(slots))
    matrix = redistribution.outgoing(edges)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-6)
    np.testing.assert_allclose(matrix.diagonal(), 1 / (1 + links), rtol=1e-6)
    assert ((matrix > 0) == edges | np.eye(slots, dtype=bool)).all()
    if links == 3:
        assert (edges != redistribution.one_sided(slots, links, 6)).any()


CHAIN = np.array([[0.5, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 1.0]])
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (
        lambda: redistribution.push([[0.5, 0.5], [0.25, 0.75]]),
        "matrix must have columns of sum 1, column 0 has 0.75",
    ),
    "square": (lambda: redistribution.push([[1.0, 0.0]]), "matrix must be square, got one of"),
    "negative": (
        lambda: redistribution.push([[1.5, 0.5], [-0.5, 0.5]]),
        "matrix must have a positive diagonal and nothing negative",
    ),
    "nothing kept": (
        lambda: redistribution.push([[0.0, 1.0], [1.0, 0.0]]),
        "matrix must have a positive diagonal",
    ),
    "unheard": (
        lambda: redistribution.push(CHAIN),
        "matrix must let every slot reach every other, slot 1 does not reach slot 0",
    ),
    "no links": (
        lambda: push_sum(local(), clients_per_round=4, links=0),
        "links must be in 1..3, the other clients, got 0",
    ),
    "links": (
        lambda: push_sum(local(), clients_per_round=4, links=4),
        "links must be in 1..3, the other clients, got 4",
    ),
    "slots": (
        lambda: pushed(SHARES, clients_per_round=4),
        "matrix must mix the 4 slots, got one of 6",
    ),
}


test_what_is_refused = rejects(REFUSED)
