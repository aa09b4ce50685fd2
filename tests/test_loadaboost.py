"""LoAdaBoost against NumPy, its special cases, its bytes and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import (
    Federation,
    Play,
    assert_trees,
    make_federation,
    play,
    play_numbers,
    rejects,
)

import fedjax_sim as fs
from fedjax_sim.base import LocalUpdate

LR, BATCH, M, ROUNDS = 0.05, 8, 4, 8
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


def local_of(model: fs.Model, epochs: float, **settings: Any) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), BATCH, epochs, **settings)


def boosted(model: fs.Model, epochs: float, clients: int = M) -> fs.Algorithm:
    return fs.algorithms.loadaboost(
        local_of(model, epochs),
        clients_per_round=clients,
        objective=fs.empirical_risk(model),
    ).on(ONE["execution"])


@functools.cache
def rounds_of(epochs: int, clients: int, model: fs.Model) -> Play:
    """Of the method."""
    return play(boosted(model, epochs, clients), model, make_federation().data, ROUNDS)


@pytest.mark.parametrize(("epochs", "stops", "cohort"), [(6, (3, 6, 8, 9), M), (3, (2, 4), 3)])
def test_like_the_paper(
    epochs: int,
    stops: tuple[int, ...],
    cohort: int,
    federation: Federation,
    models: dict[str, fs.Model],
) -> None:
    """Who is above the median of the last cohort trains on, to the next stop; by hand.

    Nobody does before there is one.
    """
    model, data = models["logistic"], federation.data
    start = model.init(jax.random.fold_in(jax.random.key(0), 0))
    plain = oracle.Oracle(data, start, LR, 0.0, BATCH, 1)
    server, median, taken = oracle.layers_of(start), np.inf, []
    played = rounds_of(epochs, cohort, model)
    for t, ours in enumerate(played.servers):
        clients, losses, found, lengths = plain.draw(t, cohort, []), [], [], []
        for k in clients:
            for stop in stops:  # every epoch has its own key: from the start, to a later end
                longer = dataclasses.replace(plain, epochs=stop)
                layers = longer.train(t, k, server)
                x, y = (np.asarray(a)[plain.rows(k)] for a in (data.x, data.y))
                loss, _ = oracle.loss_and_gradient(layers, x, y)
                if loss <= median:
                    break
            losses.append(loss)
            found.append(layers)
            lengths.append(stop)
        steps = sum(
            n * -(-int(plain.sizes[k]) // BATCH) for n, k in zip(lengths, clients, strict=True)
        )
        assert int(played.metrics[t].steps) == steps
        server = oracle.average(found, [float(plain.sizes[k]) for k in clients])
        median = float(np.median(losses))
        taken += lengths
        for a, b in zip(server, oracle.layers_of(ours), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert set(taken) == set(stops)


def test_with_one_epoch_nobody_trains_on(models: dict[str, fs.Model]) -> None:
    local: Any = boosted(models["logistic"], 1).parts.local
    assert (local.inner.epochs, local.inner.until.stops) == (1, (1,))


def test_a_visit_ends_when_it_is_told(federation: Federation, models: dict[str, fs.Model]) -> None:
    """By epoch, and by what was trained until then: for good."""
    model, data = models["logistic"], federation.data

    def make(name: str, model: fs.Model, *, at: float) -> fs.Algorithm:
        def until(w: fs.Variables, epoch: jax.Array, context: Any) -> jax.Array:
            trained = jnp.isfinite(w.params["Dense_0"]["Dense_0"]["bias"][0])
            return (epoch.astype(jnp.float32) == at) & trained

        return fs.fedavg(local_of(model, 4, until=until), clients_per_round=M).on(ONE["execution"])

    for at, epochs in ((-1.0, 4), (2.0, 2)):
        ours = play_numbers(make, "until", model, data, 2, {"at": at})
        theirs = play(
            fs.fedavg(local_of(model, epochs), clients_per_round=M).on(ONE["execution"]),
            model,
            data,
            2,
        )
        assert_trees(ours.servers, theirs.servers, rtol=1e-6, atol=1e-7)
        assert [int(m.steps) for m in ours.metrics] == [int(m.steps) for m in theirs.metrics]
    nothing = play_numbers(make, "until", model, data, 1, {"at": 0.0})
    start = model.init(jax.random.fold_in(jax.random.key(0), 0))
    assert_trees(nothing.servers[0], start)
    assert int(nothing.metrics[0].steps) == 0


def test_lanes_end_visits_as_well(federation: Federation, models: dict[str, fs.Model]) -> None:
    model, data = models["logistic"], federation.data
    beside = boosted(model, 6).on(fs.make_execution(devices=1, lanes=3))
    ours, theirs = play(beside, model, data, 4), rounds_of(6, M, model)
    assert_trees(ours.servers, theirs.servers[:4], rtol=2e-5, atol=1e-6)
    steps = [int(m.steps) for m in ours.metrics]
    assert steps == [int(m.steps) for m in theirs.metrics[:4]]
    assert steps[0] < max(steps)


def test_who_does_not_come_has_no_loss(federation: Federation, models: dict[str, fs.Model]) -> None:
    """The median is of those that came, finite ones; without any it stays."""
    local = boosted(models["logistic"], 4).parts.local
    start = local.shared_state(models["logistic"].init(jax.random.key(0)))
    median = start._replace(shared=jnp.float32(7))

    def after(sent: list[float], samples: list[int]) -> float:
        messages = (), (), jnp.array(sent, jnp.float32)
        mean: Any = None
        return float(local.reduce(median, messages, jnp.array(samples), 9, mean).shared)

    assert after([3, 1, 2, 9], [5, 5, 5, 0]) == 2
    assert after([3, 1, 2, 8], [5, 5, 5, 5]) == 2.5
    assert after([3, np.nan, np.inf, 8], [5, 5, 5, 0]) == 3
    assert after([3, 1, 2, 9], [0, 0, 0, 0]) == 7


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "half an epoch": (
        lambda model: boosted(model, 2.5),
        "epochs of local must be a whole number to be halved, got 2.5",
    ),
    "a server that would keep the median": (
        lambda model: fs.server.train_on_root(boosted(model, 4).parts.local).init(
            model.init(jax.random.key(0))
        ),
        "local must neither keep nor share anything",
    ),
}


test_what_does_not_fit_is_refused = rejects(REFUSED, "logistic")
