"""FedMD: models that stay, and logits on public samples that travel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, play
from fed import ONE, local_of, samples
from oracle import Layers, layers_of, logits, loss_and_gradient, plus

import fedjax_sim as fs
from fedjax_sim import algorithms
from fedjax_sim.base import ClientData
from fedjax_sim.client import agreement
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import shuffled
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.engine.streams import Client, stream

LR, DIGEST, ROUNDS, COHORT, STEPS, EPOCHS = 0.3, 0.02, 4, 5, 2, 3


def made(model: fs.Model, clients: int = COHORT, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {
        "classes": 3, "public_samples": 9, "digest_epochs": EPOCHS, "digest_lr": DIGEST, **options,
    }  # fmt: skip
    return algorithms.fedmd(
        local_of(model, LR), clients_per_round=clients, model=model, **given
    ).on(ONE)


def digested(
    layers: Layers, x: np.ndarray, wanted: np.ndarray, batch: int, orders: list[np.ndarray]
) -> Layers:
    """Epochs of Adam on the mean absolute difference, each in its order."""
    m, v, t = [0 * a for a in layers], [0 * a for a in layers], 0
    for order in orders:
        for i in range(0, len(x), batch):
            rows = order[i : i + batch]
            d = np.sign(logits(layers, x[rows]) - wanted[rows]) / wanted[rows].size
            gradient, t = [x[rows].T @ d, d.sum(axis=0)], t + 1
            m = [0.9 * a + 0.1 * g for a, g in zip(m, gradient, strict=True)]
            v = [0.999 * a + 0.001 * g * g for a, g in zip(v, gradient, strict=True)]
            layers = [
                w - DIGEST * (a / (1 - 0.9**t)) / (np.sqrt(b / (1 - 0.999**t)) + 1e-8)
                for w, a, b in zip(layers, m, v, strict=True)
            ]
    return layers


@pytest.mark.parametrize(("cohort", "known"), [(COHORT, 9), (8, 3)])
def test_like_the_paper(
    cohort: int, known: int, rooted: ClientData, models: dict[str, fs.Model]
) -> None:
    """Unequal clients: digest, revisit, and say it; of more public samples than there are, all."""
    model = models["logistic"]
    out = play(made(model, cohort, public_samples=known), model, rooted, ROUNDS)
    start = layers_of(model.init(jax.random.fold_in(jax.random.key(0), 0)))
    assert rooted.root is not None
    rows = np.asarray(rooted.index)[rooted.root[0] : rooted.root[1]][:known]
    assert len(rows) == min(5, known)
    public = np.asarray(rooted.x, np.float64)[rows]
    own, told = [start] * rooted.clients, np.zeros(0)
    for metrics in out.metrics:
        said = []
        for k in metrics.client.tolist():
            if len(told):
                own[k] = digested(own[k], public, told, 128, [np.arange(len(rows))] * EPOCHS)
            for _ in range(STEPS):
                own[k] = plus(own[k], loss_and_gradient(own[k], *samples(rooted, k))[1], -LR)
            said.append(logits(own[k], public))
        told = np.mean(said, axis=0)
    kept = out.states[-1].own
    ours = [layers_of(jax.tree.map(lambda a, k=k: a[k], kept)) for k in range(rooted.clients)]
    assert_trees(ours, own, rtol=1e-3, atol=1e-4)
    shared = out.states[-1].shared_state.shared
    np.testing.assert_allclose(shared.logits[: len(rows)], told, rtol=1e-3, atol=1e-4)
    assert not np.asarray(shared.logits[len(rows) :]).any()
    assert_trees(layers_of(out.final), start, rtol=0, atol=1e-7)  # the server's is as it was


def test_minibatches_are_in_an_order_of_chance(
    rooted: ClientData, models: dict[str, fs.Model]
) -> None:
    """Of five samples in batches of two, the last one alone: each once in an epoch."""
    model, key = models["logistic"], jax.random.key(3)
    still = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.0))
    local = fs.local.fedmd(
        still, model, 3, samples=9, digest_epochs=EPOCHS, digest_lr=DIGEST, digest_batch_size=2
    )
    variables, data = model.init(jax.random.key(1)), jax.device_put(rooted)
    visit = tree.take(visits(data, jnp.array([2])), jnp.int32(0)).view(samples_of(data), data)
    wanted = jax.random.normal(jax.random.key(2), (9, 3))
    told = local.shared_state(variables)._replace(shared=agreement.Consensus(wanted, jnp.int32(2)))
    kept = local.client_state(variables)
    ours = jax.jit(lambda w: local.train(key, w, visit, kept, told).variables)(variables)
    own_key = stream(key, Client.AGREEMENT)
    order_of = jax.jit(shuffled, static_argnums=2)
    orders = [
        np.asarray(order_of(jax.random.fold_in(own_key, e), jnp.int32(5), 9))[:5]
        for e in range(EPOCHS)
    ]
    assert len({tuple(order) for order in orders}) > 1
    public = agreement.public(visit, 9)
    rows = np.asarray(data.index)[int(public.start) :][:5]
    x = np.asarray(data.x, np.float64)[rows]
    theirs = digested(layers_of(variables), x, np.asarray(wanted, np.float64)[:5], 2, orders)
    assert_trees(layers_of(ours), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_every_run_has_its_own_public_samples(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    model, x, y = models["logistic"], federation.data.x, np.asarray(federation.data.y)
    parts = [fs.partition.iid(y[:100], 6, seed=seed) for seed in (0, 1)]
    roots = [np.arange(100, 108), np.arange(104, 110)]
    assert len(y) >= 110

    def run(data: ClientData, seeds: list[int]) -> fs.Result:
        return fs.simulate(
            made(model), model, data, federation.test, rounds=3, classes=3, seeds=seeds
        )

    both = run(fs.client_data(x, y, parts, root=roots), [4, 5])
    alone = run(fs.client_data(x, y, parts[1], root=roots[1]), [5])
    second = jax.tree.map(lambda a: a[1:], both.metrics.loss)
    assert_trees(second, alone.metrics.loss, rtol=2e-5, atol=1e-6)


def test_if_nobody_comes_what_was_said_stays(models: dict[str, fs.Model]) -> None:
    """And rows of absent clients may be NaN."""
    shared = agreement.consensus(models["logistic"], 2, 1)
    last = agreement.Consensus(jnp.ones((1, 2)), jnp.int32(3))
    sent = jnp.array([[[1.0, 3.0]], [[jnp.nan, 0]], [[5.0, 1.0]]])
    new = shared.reduce(last, sent, jnp.array([9, 0, 1]), 3, fs.aggregators.mean)
    np.testing.assert_allclose(new.logits, np.array([[3.0, 2.0]]))
    assert int(new.clients) == 2
    assert_trees(shared.reduce(last, sent, jnp.zeros(3, int), 3, fs.aggregators.mean), last)


def test_it_needs_public_samples(federation: Federation, models: dict[str, fs.Model]) -> None:
    model = models["logistic"]
    with pytest.raises(ValueError, match="root of the data must be samples that all clients know"):
        play(made(model), model, federation.data, 1)
