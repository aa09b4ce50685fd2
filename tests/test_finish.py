"""What is done after the last round: CCVR's head that learns from virtual features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Federation, assert_trees, known, play, rejects
from fed import COHORT, LR, ONE, STEPS, local_of
from oracle import Layers, average, layers_of, loss_and_gradient, plus

import fedjax_sim as fs
from fedjax_sim import algorithms, finish
from fedjax_sim.engine import streams
from fedjax_sim.server.finish import Moments, draw_features

ROUNDS = 3
CALIBRATION: dict[str, Any] = {
    "virtual_samples": 7, "calibration_steps": 4, "calibration_lr": 0.3,
}  # fmt: skip


def made(net: fs.Model, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {"clients_per_round": COHORT, "classes": 3} | CALIBRATION | options
    return algorithms.ccvr(local_of(net), model=net, **given).on(ONE)


def calibrated(layers: Layers, x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> Layers:
    """The head after steps on virtual features: those of every class, by NumPy's own moments."""
    z = np.maximum(x @ layers[0] + layers[1], 0)
    drawn, labels = [], []
    for c in range(3):
        mean, spread = z[y == c].mean(axis=0), np.cov(z[y == c].T)
        alive = np.ix_(*[np.flatnonzero(np.diag(spread))] * 2)  # some units never are
        root = np.zeros_like(spread)
        root[alive] = np.linalg.cholesky(spread[alive])
        drawn.append(mean + noise[c] @ root.T)
        labels += [c] * len(noise[c])
    head = layers[2:]
    for _ in range(CALIBRATION["calibration_steps"]):
        slope = loss_and_gradient(head, np.concatenate(drawn), np.array(labels))[1]
        head = plus(head, slope, -CALIBRATION["calibration_lr"])
    return [*layers[:2], *head]


def noise_of(rounds: int) -> np.ndarray:
    """What is drawn at the end of a run of seed 0."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), rounds)
    key = streams.stream(key, streams.Round.FINISH)
    return np.asarray(jax.random.normal(key, (3, CALIBRATION["virtual_samples"], 4)), np.float64)


def test_whole_runs_are_those_of_the_oracle(federation: Federation, net: fs.Model) -> None:
    """Three of eight unequal clients in a round; in the end all, of which some lack classes."""
    out = play(made(net), net, federation.data, ROUNDS)
    server = layers_of(net.init(jax.random.fold_in(jax.random.key(0), 0)))
    data = federation.data
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y)
    rows = [np.asarray(data.index[data.start[k] : data.start[k + 1]]) for k in range(8)]
    assert any(len(np.unique(y[mine])) < 3 for mine in rows)
    for state, metrics in zip(out.states, out.metrics, strict=True):
        ends = []
        for k in metrics.client.tolist():
            layers = server
            for _ in range(STEPS):
                layers = plus(layers, loss_and_gradient(layers, x[rows[k]], y[rows[k]])[1], -LR)
            ends.append(layers)
        server = average(ends, [float(len(rows[k])) for k in metrics.client.tolist()])
        assert_trees(layers_of(state.server), server, rtol=2e-4, atol=2e-5)
    everyone = np.concatenate(rows)
    wanted = calibrated(server, x[everyone], y[everyone], noise_of(ROUNDS))
    assert_trees(layers_of(out.final), wanted, rtol=1e-3, atol=1e-4)
    assert np.abs(wanted[2] - server[2]).max() > 0.05


def test_without_steps_it_is_fedavg(federation: Federation, net: fs.Model) -> None:
    ours = play(made(net, calibration_steps=0), net, federation.data, 2)
    plain = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
    theirs = play(plain, net, federation.data, 2)
    assert_trees(ours.servers, theirs.servers)
    assert_trees(ours.final, theirs.final)


@pytest.mark.slow
def test_it_is_the_last_model_that_is_calibrated_and_its_traffic_counts(
    federation: Federation, net: fs.Model
) -> None:
    """The models that phase shift leaves in flight are collected first; then all are sent one."""
    plain = algorithms.phase_shift(local_of(net), clients_per_round=4, phases=2).on(ONE)
    options = {"samples": 7, "steps": 4, "lr": 0.3}
    ours = plain.replace(finish=finish.calibrated(net, 3, **options))  # type: ignore[arg-type]
    collected = layers_of(play(plain, net, federation.data, ROUNDS).final)
    out = play(ours, net, federation.data, ROUNDS)
    assert out.final_uploads == 2
    data = federation.data
    x, y = (np.asarray(a)[np.asarray(data.index)] for a in (data.x, data.y))
    wanted = calibrated(collected, x.astype(np.float64), y, noise_of(ROUNDS))
    assert_trees(layers_of(out.final), wanted, rtol=1e-3, atol=1e-4)
    results = [
        fs.simulate(a, net, data, federation.test, rounds=ROUNDS, classes=3) for a in (plain, ours)
    ]
    before, after = (result.evaluations[-1] for result in results)
    size = results[0].model_bytes
    assert after.bytes_up - before.bytes_up == 8 * 4 * 3 * (4 * 4 + 4 + 1)
    assert after.bytes_down - before.bytes_down == 8 * size
    assert after.uploads - before.uploads == 0
    assert after.downloads - before.downloads == 8
    # Scored during the run as if there were no end.
    earlier = [[e.accuracy.tolist() for e in r.evaluations[:-1]] for r in results]
    assert earlier[0] == earlier[1]
    assert known(after.uncollected) == known(before.uncollected)


def test_features_have_the_moments_of_their_class() -> None:
    """Of a class of one sample all are that sample; of one that nobody has, finite."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, 3)) @ rng.normal(size=(3, 3)) + 2
    rows = [z, z[:1], z[:0]]
    moments = Moments(
        jnp.array([len(r) for r in rows]),
        jnp.array([r.sum(axis=0) for r in rows], jnp.float32),
        jnp.array([r.T @ r for r in rows], jnp.float32),
    )
    found = np.asarray(jax.jit(draw_features, static_argnums=2)(jax.random.key(0), moments, 20_000))
    np.testing.assert_allclose(found[0].mean(axis=0), z.mean(axis=0), atol=0.06)
    np.testing.assert_allclose(np.cov(found[0].T), np.cov(z.T), atol=0.15)
    np.testing.assert_allclose(found[1], np.broadcast_to(z[0], found[1].shape), atol=0.01)
    assert np.isfinite(found).all()


def test_a_class_that_nobody_has_does_not_count(net: fs.Model) -> None:
    """Its virtual features would be of nobody; an unknown class changes only what is certain."""
    part = finish.calibrated(net, 3, samples=5, steps=1, lr=1.0)
    server = net.init(jax.random.key(0))
    client = fs.base.ClientView(
        jnp.ones((4, 6)), jnp.array([0, 0, 2, 2]), jnp.arange(4), jnp.int32(0), jnp.int32(4), 4
    )
    told = part.tell(server, client)
    moved = part.move(jax.random.key(1), server, told)
    z = np.maximum(np.ones((1, 6)) @ layers_of(server)[0] + layers_of(server)[1], 0)
    head = layers_of(server)[2:]
    slope = loss_and_gradient(head, np.concatenate([z, z]), np.array([0, 2]))[1]
    assert_trees(layers_of(moved)[2:], plus(head, slope, -1.0), rtol=1e-3, atol=1e-3)
    assert_trees(moved.params["Dense_0"], server.params["Dense_0"])


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "an attack": (
        lambda net: made(net).replace(
            sending=(fs.sending.sign_flip(np.isin(np.arange(8), [1])),)
        ), "needs clients that send their updates unchanged, sending is (sign_flip(",
    ),
    "own heads": (
        lambda net: made(net).replace(exchange=fs.exchange.split(fs.leaves.head(net))),
        "needs an exchange of the whole model, exchange is split(",
    ),
    "clusters": (
        lambda net: made(net).replace(broadcast=fs.broadcast.ifca(2, fs.empirical_risk(net))),
        "needs the server's latest model for all, broadcast is ifca(2",
    ),
    "a mean in flight": (
        lambda net: made(net).replace(
            flight=fs.flight.delayed(2, evaluated="in_flight"),
        ), "needs the server's model to be the one that is evaluated, flight is delayed(2, ",
    ),
    "privacy": (
        lambda net: algorithms.dp_fedavg(local_of(net), clients_per_round=2).replace(
            finish=finish.calibrated(net, 3)
        ), "needs clients that send nothing after the last round, finish is calibrated(",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")
