"""Scaffnew step by step against NumPy, its special cases, its optimum and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, play
from oracle import Layers, Oracle, average, layers_of, loss_and_gradient, plus, zeros

import fedjax_sim as fs
from fedjax_sim import algorithms
from fedjax_sim.base import ClientView
from fedjax_sim.engine.batches import shuffled
from fedjax_sim.engine.streams import Round

LR, COIN, ROUNDS, BATCH = 0.1, 0.15, 4, 8
N = 8
ONE = fs.make_execution(devices=1)
_shuffled = jax.jit(shuffled, static_argnums=2)


def made(model: fs.Model, momentum: float = 0.0, **options: Any) -> fs.Algorithm:
    local = fs.local_sgd(
        fs.empirical_risk(model), optax.sgd(LR, momentum=momentum or None), batch_size=BATCH
    )
    given: dict[str, Any] = {"clients_per_round": N, "lr": LR, "momentum": momentum, "coin": COIN}
    return algorithms.scaffnew(local, **given | options).on(ONE)


def lengths(rounds: int) -> list[int]:
    """The steps from one average to the next, by the coins that the package tosses."""
    key = jax.random.fold_in(jax.random.key(0), 1)
    keys = [jax.random.fold_in(jax.random.fold_in(key, t), Round.COIN) for t in range(rounds)]
    return [int(fs.local.geometric(COIN).draw(key, ())) for key in keys]


def steps_of_the_paper(oracle: Oracle, coins: list[int]) -> list[Layers]:
    """Algorithm 2 as it is printed, one step after another; the averages."""
    start = layers_of(oracle.initial)
    x, h = [start] * N, [zeros(start)] * N
    velocity = [zeros(start)] * N
    averages: list[Layers] = []
    order: dict[int, np.ndarray] = {}
    done = 0
    # Without momentum this is the paper's p / γ.
    factor = COIN * (1 - oracle.momentum * (1 - COIN)) / oracle.lr
    for theta in coins:
        for k in range(N):
            n = int(oracle.sizes[k])
            epoch, batch = divmod(done, -(-n // oracle.batch))
            if batch == 0:
                key = jax.random.fold_in(oracle.key(len(averages), Round.CLIENTS), k)
                key = jax.random.fold_in(key, epoch)
                order[k] = np.asarray(_shuffled(key, jnp.int32(n), oracle.data.capacity))[:n]
            mine = order[k][batch * oracle.batch : (batch + 1) * oracle.batch]
            rows = oracle.rows(k)[mine]
            _, slope = loss_and_gradient(x[k], oracle.data.x[rows], oracle.data.y[rows])
            velocity[k] = plus(plus(slope, h[k], -1), velocity[k], oracle.momentum)
            x[k] = plus(x[k], velocity[k], -oracle.lr)
        done += 1
        if theta:
            mean = average(x, [1.0] * N)
            h = [plus(h[k], plus(mean, x[k], -1), factor) for k in range(N)]
            x, velocity, done = [mean] * N, [zeros(start)] * N, 0
            averages.append(mean)
    return averages


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_are_the_steps_of_the_paper(
    federation: Federation, models: dict[str, fs.Model], momentum: float
) -> None:
    """Eight unequal clients, of one to five minibatches, through several epochs in a round."""
    model = models["logistic"]
    algorithm = made(model, momentum).on(fs.make_execution(devices=1 if momentum else 2))
    out = play(algorithm, model, federation.data, ROUNDS)
    steps = lengths(ROUNDS)
    assert min(steps) < 5 < max(steps)
    assert [int(m.steps) for m in out.metrics] == [N * t for t in steps]
    coins = [int(i == t - 1) for t in steps for i in range(t)]
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    oracle = Oracle(federation.data, initial, LR, momentum, BATCH, 1)
    for ours, theirs in zip(out.servers, steps_of_the_paper(oracle, coins), strict=True):
        assert_trees(layers_of(ours), theirs, rtol=2e-4, atol=2e-5)
    after = out.states[-1].client_state.corrections[0]
    total = jax.tree.map(lambda h: h.sum(axis=0), after.h)
    assert_trees(total, jax.tree.map(jnp.zeros_like, total), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_with_an_average_after_every_step_it_is_parallel_sgd(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """The variates move, but their sum is 0."""
    model = models["logistic"]
    ours = made(model, coin=1.0)
    plain = fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), batch_size=BATCH)
    theirs = (
        algorithms.parallel_sgd(plain, clients_per_round=N)
        .on(ONE)
        .replace(weighting=fs.weighting.equal)
    )
    a, b = (play(algorithm, model, federation.data, 3) for algorithm in (ours, theirs))
    assert_trees(a.servers, b.servers, rtol=1e-5, atol=1e-6)
    h = a.states[-1].client_state.corrections[0].h
    assert max(float(jnp.abs(w).max()) for w in jax.tree.leaves(h)) > 1e-3


@pytest.mark.slow
def test_it_ends_at_the_optimum(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Of the plain mean of all losses, with whole gradients; without variates it drifts off."""
    model = models["logistic"]
    risk = fs.empirical_risk(model, l2=0.5)
    local = fs.local_sgd(risk, optax.sgd(LR), batch_size=64)
    ours = algorithms.scaffnew(local, clients_per_round=N, lr=LR, momentum=0.0, coin=COIN).on(ONE)
    plain = ours.replace(local=ours.parts.local.change(corrections=None))

    oracle = Oracle(federation.data, None, LR, 0, 64, 1)

    def slope(server: Any) -> float:
        layers = layers_of(server)
        slopes = [
            loss_and_gradient(layers, oracle.data.x[rows], oracle.data.y[rows])[1]
            for rows in map(oracle.rows, range(N))
        ]
        decay = [w if w.ndim > 1 else 0 * w for w in layers]  # of no bias
        mean = plus(average(slopes, [1.0] * N), decay, 0.5)
        return float(np.sqrt(sum((g * g).sum() for g in mean)))

    ends = [slope(play(a, model, federation.data, 100).servers[-1]) for a in (ours, plain)]
    assert ends[0] < 1e-3
    assert ends[1] > 3e-2


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_coins_are_geometric(p: float) -> None:
    part = fs.local.geometric(p)
    count = 20_000
    keys = jax.random.split(jax.random.key(5), count)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: part.draw(key, ())))(keys))
    for t in range(1, 6):
        share = p * (1 - p) ** (t - 1)
        assert abs((drawn == t).mean() - share) < 4 * np.sqrt(share * (1 - share) / count)
    assert abs(drawn.mean() - 1 / p) < 4 * np.sqrt(1 - p) / p / np.sqrt(count)


def test_the_last_coin_of_a_float_is_the_most() -> None:
    """Of 1 - 2**-23, the largest number below 1 that is drawn; a coin of 1 always comes up."""
    part = fs.local.geometric(0.2)
    assert part.most == 1 + int(23 * np.log(2) / -np.log(0.8))
    assert fs.local.geometric(1.0).most == 1


FIT: dict[str, tuple[Callable[[fs.Algorithm], Any], str]] = {
    "steps": (lambda a: a.parts.local.change(steps=5), "steps must be drawn, such as by geo"),
    "two lengths": (
        lambda a: a.parts.local.change(max_steps=3),
        "max_steps must be None if steps are drawn, got 3",
    ),
    "no minibatch": (
        lambda a: a.parts.local.change(last_batch="drop"),
        "last_batch must be 'keep' or 'refill' if steps are drawn, got 'drop'",
    ),
}


@pytest.mark.parametrize("case", FIT)
def test_what_does_not_fit_is_refused(models: dict[str, fs.Model], case: str) -> None:
    change, message = FIT[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        change(made(models["logistic"]))


def test_none_may_be_left_out(federation: Federation, models: dict[str, fs.Model]) -> None:
    algorithm = made(models["logistic"], clients_per_round=5)
    message = "clients_per_round must be all 8 clients for selection everyone(), got 5"
    with pytest.raises(ValueError, match=re.escape(message)):
        play(algorithm, models["logistic"], federation.data, 1)


def test_the_server_tosses_no_coin(models: dict[str, fs.Model]) -> None:
    """Where a model is trained outside of a round, there is none."""
    local = fs.local_sgd(
        fs.empirical_risk(models["logistic"]), optax.sgd(LR), steps=fs.local.geometric(COIN)
    )
    samples = jnp.zeros((3, 6)), jnp.zeros(3, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    root = ClientView(*samples, jnp.int32(0), jnp.int32(3), 3)
    start = models["logistic"].init(jax.random.key(0))
    with pytest.raises(
        ValueError, match="steps needs the key of a round, which only its training clients"
    ):
        local.train(jax.random.key(0), start, root, ((), ()), ((), ()))
