"""FedProto: models that stay, and class means that travel in their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Federation, Play, assert_trees, play, rejects
from fed import COHORT, LR, ONE, STEPS, local_of, samples
from oracle import Layers, layers_of, loss_and_gradient, plus

import fedjax_sim as fs
from fedjax_sim import algorithms, exchange, terms
from fedjax_sim.client.prototypes import Prototypes

ROUNDS, LAM = 4, 1.7


def made(net: fs.Model, local: fs.LocalUpdate | None = None, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {"clients_per_round": COHORT, "classes": 3, "lam": LAM} | options
    risk = fs.empirical_risk(net)
    return algorithms.fedproto(local or local_of(net), model=net, objective=risk, **given).on(ONE)


def own_models(out: Play) -> list[Layers]:
    """The model that each client keeps."""
    kept = out.states[-1].own
    return [layers_of(jax.tree.map(lambda a, k=k: a[k], kept)) for k in range(8)]


def features(layers: Layers, x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.maximum(x @ layers[0] + layers[1], 0)
    return out


def slope(layers: Layers, x: np.ndarray, y: np.ndarray, known: dict[int, np.ndarray]) -> Layers:
    """Of the cross-entropy, and of λ times the mean square of the way to the class' prototype."""
    _, plain = loss_and_gradient(layers, x, y)
    z = features(layers, x)
    away = np.array([row - known.get(int(c), row) for row, c in zip(z, y, strict=True)])
    back = LAM * 2 * away / away.size * (z > 0)
    return [plain[0] + x.T @ back, plain[1] + back.sum(axis=0), *plain[2:]]


def oracle(
    data: fs.ClientData, initial: Layers, cohorts: list[list[int]], *, equal: bool
) -> tuple[list[Layers], dict[int, np.ndarray]]:
    """The clients' models and the prototypes, client by client."""
    models, known = [initial] * data.clients, dict[int, np.ndarray]()
    for cohort in cohorts:
        told: dict[int, list[tuple[np.ndarray, float]]] = {}
        for k in cohort:
            x, y = samples(data, k)
            for _ in range(STEPS):
                models[k] = plus(models[k], slope(models[k], x, y, known), -LR)
            z = features(models[k], x)
            for c in np.unique(y):
                weight = 1.0 if equal else float((y == c).sum())
                told.setdefault(int(c), []).append((z[y == c].mean(axis=0), weight))
        for c, rows in told.items():
            known[c] = np.average(
                [mean for mean, _ in rows], axis=0, weights=[weight for _, weight in rows]
            )
    return models, known


@pytest.mark.parametrize("equal", [False, True])
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, net: fs.Model, equal: bool
) -> None:
    """Unequal clients, three of eight in a round; some lack a class, some never come."""
    out = play(made(net, equal_clients=equal), net, federation.data, ROUNDS)
    start = layers_of(net.init(jax.random.fold_in(jax.random.key(0), 0)))
    cohorts = [m.client.tolist() for m in out.metrics]
    assert COHORT < len({k for cohort in cohorts for k in cohort}) < 8
    models, known = oracle(federation.data, start, cohorts, equal=equal)
    assert_trees(own_models(out), models, rtol=2e-4, atol=2e-5)
    kept = out.states[-1].shared_state.shared
    for c in range(3):
        np.testing.assert_allclose(kept.mean[c], known[c], rtol=2e-4, atol=2e-5)
    assert_trees(layers_of(out.final), start, rtol=0, atol=1e-7)  # the server's is as it was


def test_a_class_that_nobody_has_keeps_its_mean(net: fs.Model) -> None:
    """Rows of absent clients may be NaN; a median of each class guards the prototypes."""
    shared = terms.prototypes(net, 3)
    last = Prototypes(jnp.arange(12.0).reshape(3, 4), jnp.array([5, 0, 2]))
    sent = Prototypes(
        jnp.array([[[1.0] * 4, [0] * 4, [0] * 4], [[4] * 4, [2] * 4, [0] * 4],
                   [[jnp.nan] * 4] * 3, [[100] * 4, [3] * 4, [0] * 4]]),
        jnp.array([[1, 0, 0], [2, 1, 0], [9, 9, 9], [1, 1, 0]]),
    )  # fmt: skip
    sizes = jnp.array([1.0, 3.0, 0.0, 2.0])
    new = shared.reduce(last, sent, sizes, 4, fs.aggregators.mean)
    np.testing.assert_allclose(new.mean, np.array([[27.25] * 4, [2.5] * 4, [8, 9, 10, 11]]))
    np.testing.assert_allclose(new.samples, [4, 2, 2])
    guarded = shared.reduce(last, sent, sizes, 4, fs.aggregators.coordinate_median)
    np.testing.assert_allclose(guarded.mean, np.array([[4] * 4, [2.5] * 4, [8, 9, 10, 11]]))


def test_what_is_as_large_as_the_model_is_not_shared_beside_own_layers(net: fs.Model) -> None:
    """μ is a number that the server knows; it goes along with layers of the clients' own."""
    head = exchange.split(own=fs.leaves.head(net))
    adaptive = local_of(net).change(corrections=(fs.corrections.adaptive_proximal(),))
    algorithm = fs.fedavg(adaptive, clients_per_round=COHORT).replace(exchange=head)
    assert algorithm.parts.exchange is head


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "no matrix": (
        lambda net: terms.prototypes(net._replace(head=fs.leaves.named("Dense_1/*/bias")), 3),
        "model must have a head of one matrix and at most a bias, got [[3]]",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")


def test_a_term_without_prototypes_is_refused(federation: Federation, net: fs.Model) -> None:
    local = local_of(net).change(objective=fs.empirical_risk(net, term=terms.near_prototypes()))
    alone = fs.fedavg(local, clients_per_round=2)
    with pytest.raises(ValueError, match=re.escape("near_prototypes needs shared=prototypes(...)")):
        play(alone, net, federation.data, 1)
