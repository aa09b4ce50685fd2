"""Dada: a graph that is learned of the models and losses, and models that stay apart."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, altered_data, make_federation, play, some_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

import fedjax_sim as fs
from fedjax_sim import flight, redistribution, tree
from fedjax_sim.algorithms import dada, gossip, push_sum
from fedjax_sim.base import LocalInfo, LocalUpdate, Slots, Variables
from fedjax_sim.plan.moves import DELTA

LR, ROUNDS, BATCH, NODES = 0.1, 4, 8, 7
MU_1, MU_2, PENALTY, PEERS, MIXING = 0.7, 0.4, 3.0, 3, 0.6
ONE = fs.make_execution(devices=1)
MODEL = fs.models.logistic((6,), 3)
RISK = fs.empirical_risk(MODEL)
Matrix = np.ndarray
NO_DATA: Any = None
_permutation = jax.jit(lambda key: jax.random.permutation(key, NODES))


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation((9, 20, 5, 14, 30, 3, 12, 7))


def local() -> LocalUpdate:
    return fs.local_sgd(RISK, optax.sgd(LR), batch_size=BATCH)


def made(clients: int = NODES, **options: Any) -> fs.Algorithm:
    return dada(local(), clients_per_round=clients, objective=RISK, **options)


def settled(losses: Matrix, distance: Matrix, graph: Matrix) -> float:
    """J as a function of w, without what w does not change; the losses by their confidence."""
    degree = graph.sum(axis=1)
    shape = PENALTY * np.square(graph).sum() / 2 - np.log(degree + DELTA).sum()
    return float(degree @ losses + MU_1 / 4 * (graph * distance).sum() + MU_2 * shape)


def best(losses: Matrix, distance: Matrix, graph: Matrix, i: int, j: int) -> float:
    """The weight of one edge at which J is least, by a root finder of SciPy's."""

    def slope(w: float) -> float:
        p, q = graph[i].sum() - graph[i, j] + DELTA, graph[j].sum() - graph[i, j] + DELTA
        cost = losses[i] + losses[j] + MU_1 / 2 * distance[i, j]
        return float(cost + MU_2 * (2 * PENALTY * w - 1 / (p + w) - 1 / (q + w)))

    return 0.0 if slope(0) >= 0 else float(optimize.brentq(slope, 0, 10, xtol=1e-12))


def squares(models: list[oracle.Layers]) -> Matrix:
    flat = np.array([np.concatenate([a.ravel() for a in model]) for model in models])
    return np.square(flat[:, None] - flat).sum(axis=2)


def test_against_numpy(federation: Federation) -> None:
    """Seven of eight clients, so that one of them misses each meeting, on four devices."""
    method = made(
        mu_1=MU_1,
        mu_2=MU_2,
        penalty=PENALTY,
        peers=PEERS,
        mixing_lr=MIXING,
    ).on(fs.make_execution(devices=4))
    ours = play(method, MODEL, federation.data, ROUNDS)
    initial = MODEL.init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(federation.data, initial, LR, 0.0, BATCH, 1)
    nodes = ours.metrics[0].client.tolist()
    sizes = federation.sizes[nodes]
    confidence = sizes / sizes.max()
    models = [oracle.layers_of(initial)] * NODES
    graph, exchanged = np.zeros((NODES, NODES)), 0
    for t in range(ROUNDS):
        if t:
            losses = confidence * [
                oracle.loss_and_gradient(model, clients.data.x[rows], clients.data.y[rows])[0]
                for model, rows in zip(models, map(clients.rows, nodes), strict=True)
            ]
            distance, seen = squares(models), np.eye(NODES, dtype=bool)
            for key in jax.random.split(clients.key(t, 1), PEERS):
                order = np.asarray(_permutation(key))
                for i, j in zip(order[:3], order[3:6], strict=True):
                    graph[i, j] = graph[j, i] = best(losses, distance, graph, i, j)
                    seen[i, j] = True
            exchanged = ((graph > 0) | seen).sum() - NODES
            models = [
                [
                    (confidence[k] * mine + MIXING * MU_1 * np.tensordot(share, others, 1))
                    / (confidence[k] + MIXING * MU_1)
                    for mine, others in zip(models[k], columns(models), strict=True)
                ]
                for k in range(NODES)
                for share in [graph[k] / graph[k].sum()]
            ]
        models = [clients.train(t, k, model) for k, model in zip(nodes, models, strict=True)]
        state = ours.states[t]
        np.testing.assert_allclose(state.redistribution, graph, rtol=2e-4, atol=2e-5)
        for i in range(NODES):
            mine = oracle.layers_of(jax.tree.map(lambda a, i=i: a[i], state.slots.variables))
            for a, b in zip(mine, models[i], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert ours.metrics[t].uploads == exchanged
        assert ours.metrics[t].downloads == (exchanged if t else NODES)
    assert 0 < (graph > 0).sum() < NODES * (NODES - 1)  # some have no edge


def columns(models: list[oracle.Layers]) -> list[Matrix]:
    """Each layer of all models."""
    return [np.array(layers) for layers in zip(*models, strict=True)]


def slots_of(models: Matrix, losses: Matrix, sizes: Matrix | None = None) -> Slots:
    """Models of one layer, which their clients have trained once."""
    count = len(models)
    sizes = np.ones(count) if sizes is None else sizes
    once = jnp.ones(count, jnp.int32)
    return Slots(
        Variables({"w": jnp.asarray(models, jnp.float32)}, {}),
        jnp.arange(count, dtype=jnp.int32),
        once,
        jnp.asarray(sizes, jnp.int32),
        LocalInfo(once, once, once, {"final_loss": jnp.asarray(losses, jnp.float32)}),
        (),
        (),
    )


@functools.cache
def meetings(peers: int) -> Any:
    """So many, compiled once for each number of clients."""
    return jax.jit(redistribution.learned(MU_1, MU_2, PENALTY, peers=peers).move)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), count=st.sampled_from([2, 5]))
@settings(max_examples=15, deadline=None)
def test_the_graph_is_where_j_is_least(seed: int, count: int) -> None:
    """J falls from meeting to meeting, to what SciPy finds for all weights at once."""
    rng = np.random.default_rng(seed)
    models, losses = rng.normal(size=(count, 3)), rng.exponential(size=count)
    sizes = rng.integers(1, 50, count)
    weighted, distance = losses * sizes / sizes.max(), squares([[row] for row in models])
    slots, graph = slots_of(models, losses, sizes), redistribution.learned().init(count, NO_DATA)
    j = settled(weighted, distance, np.asarray(graph, np.float64))
    for meeting in range(4):
        graph = meetings(1)(jax.random.key(meeting), graph, slots)[1]
        lower = settled(weighted, distance, np.asarray(graph, np.float64))
        assert lower <= j + 1e-4 * abs(j)
        j = lower
    weights = np.asarray(meetings(600)(jax.random.key(seed), graph, slots)[1], np.float64)
    assert (weights == weights.T).all()
    assert (weights.diagonal() == 0).all()
    above = np.triu_indices(count, 1)

    def of_weights(w: Matrix) -> float:
        full = np.zeros((count, count))
        full[above] = w
        return settled(weighted, distance, full + full.T)

    start = np.full(len(above[0]), 0.1)
    least = optimize.minimize(of_weights, start, bounds=[(0, None)] * len(start), tol=1e-12)
    assert of_weights(weights[above]) <= least.fun + 1e-4 * max(1, abs(least.fun))


def test_who_is_alike_listens_to_each_other() -> None:
    """Two kinds of clients; of one kind, whose losses are large count less."""
    models = np.repeat([[0.0, 0.0], [4.0, 4.0]], 4, axis=0)
    losses = np.array([0.1, 0.1, 0.1, 2.0] * 2)
    part = redistribution.learned(peers=300)
    moves, graph = jax.jit(part.move)(
        jax.random.key(0), part.init(8, NO_DATA), slots_of(models, losses)
    )
    weights = np.asarray(graph)
    assert (weights[:4, 4:] == 0).all()
    assert weights[0, 1] > 2 * weights[0, 3] > 0
    assert isinstance(moves, redistribution.Mixing)
    shares = np.asarray(moves.matrix)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(shares.diagonal(), 1 / 1.5, rtol=1e-6)  # c = 1, the pull a half


def test_nothing_is_learned_of_models_that_nobody_has_trained(federation: Federation) -> None:
    alone = play(made(mixing_lr=0.0).on(ONE), MODEL, federation.data, 1)
    assert (alone.states[0].redistribution == 0).all()
    assert alone.metrics[0].uploads == 0
    part = redistribution.learned(peers=40)
    slots = slots_of(np.eye(4), np.ones(4))
    idle = slots._replace(visits=jnp.array([1, 1, 0, 1]))
    graph = np.asarray(jax.jit(part.move)(jax.random.key(0), part.init(4, NO_DATA), idle)[1])
    assert (graph[2] == 0).all()
    assert (graph[[0, 0, 1], [1, 3, 3]] > 0).all()


def own_scores(method: fs.Algorithm, state: Any, data: fs.ClientData) -> Any:
    """Of each client the first weights of its own model, and the model that is evaluated."""

    def score(fixed: Any, variables: Any, task: Any) -> Any:
        del fixed, task
        return variables.params["Dense_0"]["Dense_0"]["bias"]

    @jax.jit
    def both(state: Any, data: fs.ClientData) -> Any:
        key, tasks = jax.random.key(0), jnp.zeros(data.clients)
        own = method.score_personal(key, state, data, score, (), tasks)
        return own, method.evaluated(key, state, data)

    return both(state, jax.device_put(data))


@pytest.mark.parametrize("kind", some_slow(["dada", "gossip", "push_sum"]))
def test_a_node_s_own_model_is_its_own(federation: Federation, kind: str) -> None:
    """The one client that is no node has the mean of all."""
    method = (
        {
            "dada": made(),
            "gossip": gossip(local(), clients_per_round=NODES),
            "push_sum": push_sum(local(), clients_per_round=NODES, graph_seed=3),
        }[kind]
        .replace(personal=fs.personal.as_received())
        .on(ONE)
    )
    state = play(method, MODEL, federation.data, 3).states[-1]
    found, mean = own_scores(method, state, federation.data)
    models = state.slots.variables
    if kind == "push_sum":
        assert np.ptp(state.slots.weight) > 0.1
        models = jax.tree.map(lambda a: a / tree.expand(state.slots.weight, a), models)
    bias = models.params["Dense_0"]["Dense_0"]["bias"]
    nodes = state.slots.client
    np.testing.assert_allclose(found[nodes], bias, rtol=1e-5)
    (other,) = set(range(8)) - {*nodes.tolist()}
    np.testing.assert_allclose(found[other], mean.params["Dense_0"]["Dense_0"]["bias"], rtol=1e-5)


@pytest.mark.slow
def test_two_kinds_of_clients_are_told_apart() -> None:
    """Half of the clients have their labels the other way round."""
    federation = make_federation((6,) * 12, classes=2, tests=400)
    x, y = federation.data.x, federation.data.y.copy()
    kind = np.arange(12) % 2
    rows = federation.data.index.reshape(12, 6)
    y[rows[kind == 1]] = 1 - y[rows[kind == 1]]
    data = altered_data(federation.data, y=y)
    model = fs.models.logistic(x.shape[1:], 2)
    risk = fs.empirical_risk(model)
    train = fs.local_sgd(risk, optax.sgd(0.1), batch_size=BATCH)
    method = dada(train, clients_per_round=12, objective=risk).on(ONE)
    state = play(method, model, data, 15).states[-1]
    graph, mine = np.asarray(state.redistribution), kind[state.slots.client]
    same = (mine[:, None] == mine) & ~np.eye(12, dtype=bool)
    assert graph[same].mean() > 5 * graph[mine[:, None] != mine].mean()


def sends(method: fs.Algorithm, data: fs.ClientData) -> tuple[int, int]:
    size = method.traffic(MODEL.init(jax.random.key(0)), data)
    return size.upload, size.download


def test_three_numbers_travel_with_every_model(federation: Federation) -> None:
    size = 4 * (6 * 3 + 3)
    assert sends(made(), federation.data) == (size + 12, size + 12)


LEARNED = redistribution.learned()


def test_clients_that_report_no_loss_are_refused(federation: Federation) -> None:
    method = gossip(local(), clients_per_round=4).replace(flight=flight.serverless(LEARNED))
    wanted = "redistribution learned() needs clients that report final_loss, local is local_sgd("
    with pytest.raises(ValueError, match=re.escape(wanted)):
        method.init(jax.random.key(0), MODEL.init(jax.random.key(0)), federation.data)


@pytest.mark.slow
def test_attackers_are_left_out(federation: Federation) -> None:
    """A client that sends nonsense is far from all others: nobody listens to it."""
    noisy = fs.attacks.gaussian(np.arange(8) == 2, 30.0)
    method = made(8, peers=8).on(ONE).replace(sending=(noisy,))
    state = play(method, MODEL, federation.data, 4).states[-1]
    slot = int(jnp.argmax(state.slots.client == 2))
    graph = np.asarray(state.redistribution)
    others = np.delete(np.delete(graph, slot, 0), slot, 1)
    assert graph[slot].max() < 0.05 * others.max()
