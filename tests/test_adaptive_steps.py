"""Adaptive local steps against NumPy, their special case, their budget and what they refuse."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, play
from oracle import Layers, Oracle, average, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim import algorithms

LR, PHI, MOST, COHORT, ROUNDS = 0.2, 0.025, 30, 4, 6
BATCH = 64  # more than any client has: a step is one of gradient descent


def made(model: fs.Model, lr: float = LR, batch: int = BATCH, **options: Any) -> fs.Algorithm:
    objective = fs.empirical_risk(model)
    local = fs.local_sgd(objective, optax.sgd(LR), batch_size=batch)
    given: dict[str, Any] = {
        "resource_budget": 300.0,
        "step_cost": 2.0,
        "round_cost": 7.0,
        "phi": PHI,
    }
    given |= {"most_steps": MOST, "clients_per_round": COHORT} | options
    return algorithms.adaptive_steps(local, objective=objective, lr=lr, **given)


def flat(layers: Layers) -> np.ndarray:
    return np.concatenate([a.ravel() for a in layers])


def best(last: int, beta: float, delta: float, rho: float, budget: float) -> int:
    """Eq. 18 and line 20 of Algorithm 2, one τ after another."""
    found, least = 1, math.inf
    for tau in range(1, min(10 * last, MOST) + 1):
        h = delta / beta * ((LR * beta + 1) ** tau - 1) - LR * delta * tau
        each = (2.0 * tau + 7.0) / ((budget - 7.0 - 2.0) * tau)
        g = each / (2 * LR * PHI) + rho * h
        g += math.sqrt(each**2 / (4 * LR**2 * PHI**2) + rho * h / (LR * PHI * tau))
        if g < least - 1e-9:
            found, least = tau, g
    return found


def by_hand(
    oracle: Oracle, rounds: int, budget: float
) -> tuple[list[int], list[Layers], list[float]]:
    """τ and the models of the rounds, and what is left after each."""
    server, tau, left = layers_of(oracle.initial), 1, budget
    own: dict[int, Layers] = {}
    taus, models, lefts = [], [], []
    data = oracle.data
    for t in range(rounds):
        taus.append(tau)
        n, ends, grads = [], [], []
        betas, rhos, known = [], [], []
        for k in oracle.draw(t, COHORT, []):
            rows = np.asarray(data.index)[data.start[k] : data.start[k + 1]]
            x, y = np.asarray(data.x)[rows], np.asarray(data.y)[rows]
            loss, grad = loss_and_gradient(server, x, y)
            n.append(len(rows))
            grads.append(flat(grad))
            if k in own:
                there, slope = loss_and_gradient(own[k], x, y)
                away = np.linalg.norm(flat(own[k]) - flat(server))
                betas.append(np.linalg.norm(flat(slope) - flat(grad)) / away)
                rhos.append(abs(there - loss) / away)
                known.append(len(rows))
            w = server
            for _ in range(tau):
                w = [a - LR * g for a, g in zip(w, loss_and_gradient(w, x, y)[1], strict=True)]
            own[k] = w
            ends.append(w)
        server = average(ends, [float(size) for size in n]) if tau else server
        mean = np.average(grads, axis=0, weights=n)
        delta = np.average([np.linalg.norm(g - mean) for g in grads], weights=n)
        if tau:
            if known:
                rest = np.average(betas, weights=known), delta, np.average(rhos, weights=known)
                wanted = best(tau, *rest, budget)
            else:
                wanted = tau
            left -= 2.0 * tau + 7.0
            tau = max(0, min(wanted, MOST, math.floor((left - 7.0) / 2.0)))
        models.append(server)
        lefts.append(left)
    return taus, models, lefts


@pytest.mark.parametrize("budget", [250.0, 90.0])
def test_like_the_paper(federation: Federation, models: dict[str, fs.Model], budget: float) -> None:
    """Unequal clients, some of whom come for the first time late; the budget ends within."""
    model = models["logistic"]
    played = play(made(model, resource_budget=budget), model, federation.data, ROUNDS)
    oracle = Oracle(federation.data, start_of(model), LR, 0.0, BATCH, 1)
    taus, servers, lefts = by_hand(oracle, ROUNDS, budget)
    assert len(set(taus)) > 2
    assert (0 in taus) == (budget == 90.0)
    assert [int(m.steps) for m in played.metrics] == [COHORT * tau for tau in taus]
    for state, server, left in zip(played.states, servers, lefts, strict=True):
        assert float(state.shared_state.shared.left) == left >= 0
        np.testing.assert_allclose(flat(layers_of(state.server)), flat(server), rtol=0, atol=1e-5)


def start_of(model: fs.Model) -> Any:
    return model.init(jax.random.fold_in(jax.random.key(0), 0))


def test_at_most_one_step_is_one_step(models: dict[str, fs.Model]) -> None:
    """Whatever was measured."""
    local: Any = made(models["logistic"], most_steps=1).parts.local
    steps, shared = local.inner.steps, local.inner.shared
    plan = shared.init(start_of(models["logistic"]))
    assert int(steps.draw(jax.random.key(0), plan)) == steps.most == 1
    best = jax.jit(shared._best)
    for beta, delta, rho in ((0.0, 0.0, 0.0), (2.0, 0.0, 5.0), (1e-5, 3.0, 1e3)):
        measured = (jnp.float32(value) for value in (beta, delta, rho))
        assert int(best(plan.steps, *measured)) == 1


def test_clients_alike_train_on(federation: Federation, models: dict[str, fs.Model]) -> None:
    """With one client in the cohort δ is 0: nothing speaks for an average."""
    model = models["logistic"]
    played = play(made(model, clients_per_round=1, resource_budget=1e6), model, federation.data, 20)
    steps = [int(m.steps) for m in played.metrics]
    assert max(steps) == MOST
    assert all(new <= 10 * old for old, new in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phi": 0.0}, "phi must be positive and finite, got 0.0"),
        ({"lr": -1.0}, "lr must be positive and finite, got -1.0"),
        ({"step_cost": 0.0}, "step_cost must be positive and finite, got 0.0"),
        ({"round_cost": -1.0}, "round_cost must be at least 0 and finite, got -1.0"),
        ({"resource_budget": 9.0}, "budget must be more than a round of one step costs, 9.0, got"),
    ],
)
def test_settings_out_of_range(models: dict[str, fs.Model], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(models["logistic"], **options)


def test_what_does_not_fit_is_refused(models: dict[str, fs.Model]) -> None:
    algorithm = made(models["logistic"])
    with pytest.raises(
        ValueError, match="max_steps must be None, as adaptive_steps sets it, got 3"
    ):
        algorithm.parts.local.change(max_steps=3)
