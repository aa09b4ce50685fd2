"""FAVOR: a deep Q-network that chooses clients, against a plain program."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SIZES, make_federation, promising

import fedjax_sim as fs
from fedjax_sim.base import ClientData, Variables
from fedjax_sim.client import reports
from fedjax_sim.engine.streams import Round, Seed, stream
from fedjax_sim.plan.reinforcement import Network, sketch

N, M, D, H, C, ROUNDS = len(SIZES), 3, 4, 8, 4, 9
SETTINGS: dict[str, Any] = {
    "target": 0.6, "base": 8.0, "discount": 0.7, "explore": 0.8, "decay": 0.7, "lr": 0.2,
    "steps": 2, "batch": 6, "replay": C, "copied": 5, "size": D, "hidden": H,
}  # fmt: skip
SLEEPY = fs.clock.simulated(1.0, available=fs.clock.bernoulli(0.7), failures=0.3)


@functools.cache
def net() -> fs.Model:
    return fs.models.logistic((6,), 3)


@functools.cache
def data() -> ClientData:
    return jax.device_put(make_federation().data)


@functools.cache
def local() -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(net()), optax.sgd(0.3), 4, 2)


def first(variables: Variables, client: Any) -> Variables:
    kept, told = local().client_state(variables), local().shared_state(variables)
    client = dataclasses.replace(client, round=jnp.int32(0), coin=jax.random.key(0))
    return local().train(jax.random.key(0), variables, client, kept, told).variables


def part(**changes: Any) -> fs.base.Selection:
    return fs.selection.deep_q(reports.accuracy(net(), 3), first, **{**SETTINGS, **changes})


def algorithm(clock: fs.base.Clock | None = None, **changes: Any) -> fs.Algorithm:
    return fs.compose(
        local(),
        selection=part(**changes),
        clients_per_round=M,
        clock=clock,
    ).on(fs.make_execution(devices=1))


def play(made: fs.Algorithm, rounds: int = ROUNDS) -> list[tuple[Any, Any, Any, Any]]:
    """The key of each round, the state before it, its report and the state after it."""
    state = jax.jit(made.init)(jax.random.key(0), net().init(jax.random.key(1)), data())
    step, out = jax.jit(made.step), []
    for t in range(rounds):
        key = jax.random.fold_in(stream(jax.random.key(0), Seed.ROUNDS), t)
        after, metrics = step(key, state, data())
        out.append((key, state, metrics, after))
        state = after
    return out


def begun(chooser: fs.base.Selection) -> Any:
    """The first state."""
    init = jax.jit(chooser.init, static_argnums=2)
    return init(net().init(jax.random.key(1)), data(), fs.make_execution(devices=1))


_sketch = jax.jit(sketch, static_argnums=1)


@jax.jit
def rounds_drawn(learning: Any, i: Any, known: Any) -> Any:
    """Of those that are known, for a step."""
    return jax.random.randint(jax.random.fold_in(learning, i), (6,), 0, known)


@jax.jit
def chance(key: Any, explore: Any) -> Any:
    """Of a round: the key of its steps, which slots explore, and who is drawn for these."""
    learning, acting = jax.random.split(stream(key, Round.SELECTION))
    coins, tickets = jax.random.split(acting)
    return learning, jax.random.bernoulli(coins, explore, (M,)), jax.random.uniform(tickets, (N,))


def doubles(values: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), values)


def right(server: Any) -> np.ndarray:
    """The right answers of each client at a model."""
    leaves = {leaf.ndim: np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(server)}
    hit = np.argmax(np.asarray(data().x) @ leaves[2] + leaves[1], axis=1) == data().y
    index, start = np.asarray(data().index), np.asarray(data().start)
    return np.array([hit[index[start[k] : start[k + 1]]].sum() for k in range(N)])


def q(theta: Any, states: np.ndarray) -> np.ndarray:
    return np.maximum(states @ theta[0] + theta[1], 0) @ theta[2] + theta[3]


def gradient(theta: Any, states: np.ndarray, wanted: np.ndarray, taken: np.ndarray) -> Any:
    """Of the mean squared error of what was taken."""
    hidden = np.maximum(states @ theta[0] + theta[1], 0)
    away = 2 * np.where(taken, q(theta, states) - wanted[:, None], 0) / taken.sum()
    back = away @ theta[2].T * (hidden > 0)
    return [states.T @ back, back.sum(0), hidden.T @ away, away.sum(0)]


def test_the_agent_against_a_plain_program() -> None:
    """Double Q-learning by RMSprop from a replay of rounds, of which the oldest are forgotten.

    Clients sleep and are lost.
    """
    memory: list[Any] = []
    theta: Any = None
    accuracy, greedy, lost = 0.0, 0, 0
    for t, (key, before, metrics, after) in enumerate(play(algorithm(SLEEPY))):
        old, new = before.selection, after.selection
        here = np.concatenate([old.models.ravel(), old.server]) / np.float64(old.scale)
        if theta is None:
            theta, nu = [*doubles(old.network)], [np.zeros(a.shape) for a in old.network]
            older = theta
        asked = np.asarray(new.client) < N
        n = np.array(SIZES) * asked
        accuracy = right(before.server) @ asked / n.sum() if n.any() else accuracy
        assert float(new.accuracy) == pytest.approx(accuracy, rel=1e-5)
        if t:
            memory[-1] += [8.0 ** (accuracy - 0.6) - 1, here]
        learning, explores, tickets = chance(key, np.float32(0.8 * 0.7**t))
        for i in range(2 if t else 0):
            known = min(t, C - 1)
            draws = np.asarray(rounds_drawn(learning, i, known)).tolist()
            states, taken, rewards, later = map(
                np.array, zip(*(memory[-1 - b] for b in draws), strict=True)
            )
            ahead = q(older, later)[np.arange(6), q(theta, later).argmax(1)]
            grads = gradient(theta, states, rewards + 0.7 * ahead, taken)
            nu = [0.9 * v + 0.1 * g**2 for v, g in zip(nu, grads, strict=True)]
            theta = [
                w - 0.2 * g / np.sqrt(v + 1e-8) for w, g, v in zip(theta, grads, nu, strict=True)
            ]
        for ours, theirs in zip(theta, new.network, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=2e-3, atol=2e-4)
        older = theta if t % 5 == 0 else older
        for ours, theirs in zip(older, new.target, strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=2e-3, atol=2e-4)
        # Slots that explore go to others, drawn uniformly.
        left, luck = int(np.sum(explores)), np.asarray(tickets)
        order = np.argsort(-q(theta, here))
        others = sorted(order[M - left :], key=(-luck).__getitem__)
        chosen = {*order[: M - left].tolist(), *map(int, others[:left])}
        assert set(np.flatnonzero(new.chosen[t % C]).tolist()) == chosen
        assert set(np.asarray(metrics.client).tolist()) - {N} <= chosen
        greedy += M - left
        memory.append([here, np.isin(np.arange(N), [*chosen])])
        # What the server has of their models it sees.
        moved = doubles(after.server.params), doubles(before.server.params)
        step = _sketch(Variables(jax.tree.map(lambda a, b: np.float32(a - b), *moved), {}), D)
        np.testing.assert_allclose(new.server - old.server, step, atol=1e-5)
        changed = (np.asarray(new.models) != np.asarray(old.models)).any(axis=1)
        assert set(np.flatnonzero(changed).tolist()) <= chosen
        came = np.flatnonzero(changed)
        lost += M - len(came)
        if len(came):
            n = np.array(SIZES)[came]
            mean = n @ (np.asarray(new.models)[came] - np.asarray(old.server)) / n.sum()
            np.testing.assert_allclose(mean, step, atol=1e-5)
        assert int(metrics.uploads) >= len(came)
        assert metrics.answers == asked.sum() == metrics.downloads
    assert 0 < greedy < M * ROUNDS
    assert lost > 0


@pytest.mark.slow
def test_a_model_that_is_withheld_is_not_seen() -> None:
    made = algorithm().replace(sending=(fs.sending.relevant_only(1.0),))
    withheld = 0
    for _, before, metrics, after in play(made, 3):
        seen = np.asarray(after.selection.models) != np.asarray(before.selection.models)
        # Fewer if a client trains to the model that it had before.
        assert np.count_nonzero(seen.any(axis=1)) <= int(metrics.uploads)
        withheld += M - int(metrics.uploads)
    assert 0 < withheld < 3 * M


def test_it_starts_from_the_models_that_all_clients_train() -> None:
    made, start = algorithm(), net().init(jax.random.key(1))
    state = jax.jit(made.init)(jax.random.key(0), start, data()).selection
    pool = data()
    for k in (0, 5):
        alone = ClientData(pool.x, pool.y, pool.index, pool.start[k : k + 2], pool.capacity)
        one = fs.make_execution(devices=1)
        own = jax.jit(lambda w, alone, one=one: one.per_client(first, w, alone))(start, alone)
        away = jax.tree.map(lambda a, b: a[0] - b, own, start)
        np.testing.assert_allclose(state.models[k], sketch(away, D), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(state.server, 0)
    assert float(state.scale) == pytest.approx(float(jnp.sqrt(jnp.mean(state.models**2))))
    size = 4 * (6 * 3 + 3)
    assert made.setup_traffic(start, data()) == (N * size, N * size)
    assert made.traffic(start, data()).answer == 4


@pytest.mark.slow
def test_a_network_that_is_given_chooses() -> None:
    """Without exploring and learning the largest Q are the cohort; some clients are asked."""
    b_bias = jnp.array([0.0, 5, 1, 9, 2, 7, 3, 4], jnp.float32)
    given = Network(jnp.zeros(((N + 1) * D, H)), jnp.zeros(H), jnp.zeros((H, N)), b_bias)
    made = algorithm(network=given, steps=0, explore=0.0, evaluated=2)
    for _, _, metrics, after in play(made, 3):
        assert set(np.asarray(metrics.client).tolist()) == {1, 3, 5}
        assert int(metrics.answers) == 2
        np.testing.assert_array_equal(after.selection.network.b_bias, b_bias)
    with pytest.raises(ValueError, match=r"network must have \(36, 8\) inputs and outputs, got"):
        play(algorithm(network=given._replace(b_bias=b_bias[1:])), 1)


@pytest.mark.slow
def test_it_learns_whom_to_choose() -> None:
    """The server model is good after a round with client 6, whatever else it does."""
    chooser = part(discount=0.0, explore=1.0, decay=0.98, replay=100, batch=32, steps=4, lr=0.01)
    state = begun(chooser)
    none, everyone = jnp.zeros(1, jnp.int32), jnp.arange(N, dtype=jnp.int32)
    draw, tell = jax.jit(chooser.draw), jax.jit(chooser.record_answers)
    chosen, good = [], 0.0
    for t in range(250):
        state = tell(state, everyone, jnp.full(N, good, jnp.float32))
        drawn, state = draw(jax.random.key(t), state, data(), none, none == 0, none)
        chosen.append(int(drawn[0]))
        good = float(chosen[-1] == 6)
    assert len({*chosen[:50]}) > 4
    assert chosen[-20:].count(6) > 16


def test_exploring_alone_draws_uniformly() -> None:
    chooser = part(explore=1.0, decay=1.0, steps=0)
    state = begun(chooser)
    none = jnp.zeros(M, jnp.int32)
    draw = jax.vmap(lambda key: chooser.draw(key, state, data(), none, none == 0, none)[0])
    found = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 4000)))
    counts = np.bincount(found.ravel(), minlength=N)
    assert (np.abs(counts / 4000 - M / N) < 0.04).all()


def test_sketches_keep_inner_products() -> None:
    """On average over many pairs of orthogonal and of equal models."""
    models = jax.random.normal(jax.random.key(0), (400, 300))
    small = np.asarray(jax.vmap(lambda w: sketch(Variables({"w": w}, {}), 64))(models))
    assert (small**2).sum(axis=1).mean() == pytest.approx(300, rel=0.05)
    assert abs((small[1:] * small[:-1]).sum(axis=1).mean()) < 5 * 300 / 8 / 20


def test_refusals() -> None:
    told = algorithm().parts.selection
    with pytest.raises(ValueError, match="needs models that return in the round in which they"):
        algorithm().replace(selection=promising(told, poll=None), flight=fs.flight.delayed(2))
    wrong: dict[str, tuple[Any, str]] = {
        "discount": (1.5, "in [0, 1], got 1.5"),
        "explore": (-0.1, "in [0, 1], got -0.1"),
        "base": (1.0, "more than 1, got 1.0"),
        "lr": (0.0, "positive, got 0.0"),
        "steps": (-1, "at least 0, got -1"),
        "replay": (1, "at least 2, got 1"),
        "copied": (0, "at least 1, got 0"),
        "evaluated": (0, "at least 1, got 0"),
    }
    for name, (value, what) in wrong.items():
        with pytest.raises(ValueError, match=re.escape(f"{name} must be {what}")):
            part(**{name: value})
