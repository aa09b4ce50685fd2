"""Federated distillation: models that stay, and mean outputs by class that travel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, play, rejects
from fed import ONE, local_of, samples
from oracle import Layers, layers_of, logits, loss_and_gradient, plus, softmax

import fedjax_sim as fs
from fedjax_sim import algorithms, terms
from fedjax_sim.base import Batch, Context
from fedjax_sim.client.prototypes import Outputs, OwnOutputs

LR, ROUNDS, COHORT, STEPS, GAMMA, CLASSES = 0.3, 6, 5, 2, 1.5, 3


def made(model: fs.Model, clients: int = COHORT, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {"classes": CLASSES, "distill_weight": GAMMA} | options
    risk = fs.empirical_risk(model)
    return algorithms.fd(
        local_of(model, LR), clients_per_round=clients, model=model, objective=risk, **given,
    ).on(ONE)  # fmt: skip


def outputs(layers: Layers, x: np.ndarray) -> np.ndarray:
    return softmax(logits(layers, x))


def trained(layers: Layers, x: np.ndarray, y: np.ndarray, teacher: dict[int, np.ndarray]) -> Layers:
    """The cross-entropy with a teacher has the gradient of one with labels."""
    for _ in range(STEPS):
        _, (w, b) = loss_and_gradient(layers, x, y)
        said = outputs(layers, x)
        away = np.array([p - teacher.get(int(c), p) for p, c in zip(said, y, strict=True)])
        away *= GAMMA / len(x)
        layers = plus(layers, [w + x.T @ away, b + away.sum(axis=0)], -LR)
    return layers


@pytest.mark.parametrize("cohort", [COHORT, 8])
def test_like_the_paper(cohort: int, federation: Federation, models: dict[str, fs.Model]) -> None:
    """Unequal clients, some of which lack a class; what one told is not in its own teacher."""
    model, data = models["logistic"], federation.data
    out = play(made(model, cohort), model, data, ROUNDS)
    start = layers_of(model.init(jax.random.fold_in(jax.random.key(0), 0)))
    own, told, lone = [start] * data.clients, dict[int, dict[int, np.ndarray]](), 0
    for metrics in out.metrics:
        now: dict[int, dict[int, np.ndarray]] = {}
        for k in metrics.client.tolist():
            x, y = samples(data, k)
            teacher = {}
            for c in range(CLASSES):
                said = [rows[c] for j, rows in told.items() if j != k and c in rows]
                if said:
                    teacher[c] = np.mean(said, axis=0)
            lone += k in told
            own[k] = trained(own[k], x, y, teacher)
            p = outputs(own[k], x)
            now[k] = {int(c): p[y == c].mean(axis=0) for c in np.unique(y)}
        told = now
    assert lone > 2
    kept = out.states[-1].own
    ours = [layers_of(jax.tree.map(lambda a, k=k: a[k], kept)) for k in range(data.clients)]
    assert_trees(ours, own, rtol=2e-4, atol=2e-5)
    assert_trees(layers_of(out.final), start, rtol=0, atol=1e-7)  # the server's is as it was


def test_the_mean_is_of_those_that_came_and_have_the_class(models: dict[str, fs.Model]) -> None:
    """Rows of absent clients may be NaN; a median of each class guards the mean; none is kept."""
    shared = terms.class_outputs(models["logistic"], 2)
    last = Outputs(jnp.ones((2, 2)), jnp.array([3, 3]))
    rows = [[[0.2, 0.8], [0, 0]], [[0.5, 0.5], [0, 0]], [[np.nan, 1], [1, 0]], [[0.8, 0.2], [0, 0]]]
    sent, sizes = jnp.array(rows, jnp.float32), jnp.array([5.0, 1.0, 0.0, 2.0])
    mean = shared.reduce(last, sent, sizes, 4, fs.aggregators.mean)
    np.testing.assert_allclose(mean.mean, np.array([[0.5, 0.5], [0, 0]]), rtol=1e-6)
    assert mean.clients.tolist() == [3, 0]
    far = sent.at[0, 0].set(jnp.array([0.0, 1.0]))
    guarded = shared.reduce(last, far, sizes, 4, fs.aggregators.coordinate_median)
    np.testing.assert_allclose(guarded.mean, np.array([[0.5, 0.5], [0, 0]]), rtol=1e-6)


def test_nobody_learns_from_itself() -> None:
    """A robust mean of one client's outputs need not be its own."""
    told = Outputs(jnp.array([[0.5, 0.5]]), jnp.array([1]))
    own = OwnOutputs(jnp.array([[0.9, 0.1]]), jnp.int32(6))
    batch = Batch(jnp.zeros((1, 2)), jnp.array([0]), jnp.array([True]))
    logits, client = jnp.array([[1.0, 2.0]]), cast("Any", SimpleNamespace(round=jnp.int32(7)))
    unread: Any = None
    context = Context(unread, client, unread, own, told)
    assert float(terms.near_outputs()(logits, None, batch, context)) == 0
    earlier = context._replace(memory=own._replace(round=jnp.int32(5)))
    assert float(terms.near_outputs()(logits, None, batch, earlier)) > 0


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "objective": (
        lambda net: algorithms.fd(
            local_of(net), clients_per_round=2, model=net, classes=3,
            objective=lambda params, state, *_: (jnp.float32(0), state),
        ), "objective must be an empirical_risk",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "logistic")


def test_the_term_needs_what_is_shared(federation: Federation, models: dict[str, fs.Model]) -> None:
    model = models["logistic"]
    risk = fs.empirical_risk(model, term=terms.near_outputs())
    algorithm = fs.fedavg(fs.local_sgd(risk, optax.sgd(LR)), clients_per_round=2)
    with pytest.raises(ValueError, match=r"near_outputs needs shared=class_outputs\(\.\.\.\) and"):
        play(algorithm, model, federation.data, 1)
