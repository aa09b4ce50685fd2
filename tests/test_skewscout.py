"""SkewScout against NumPy, its special case, its bytes and what it refuses."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, play
from oracle import Layers, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim import algorithms

LR, COHORT, ROUNDS, TRAVEL = 0.4, 4, 20, 2
BATCH = 64  # more than any client has: a step is one of gradient descent
SETTINGS: dict[str, Any] = {
    "fewest_steps": 2, "most_steps": 9, "travel_rounds": TRAVEL, "loss_weight": 1.0,
    "allowed_loss": 0.1, "traffic_weight": 0.5,
}  # fmt: skip


def made(model: fs.Model, batch: int = BATCH, **options: Any) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), batch_size=batch)
    given = {"clients_per_round": COHORT, "model": model, **SETTINGS, **options}
    return algorithms.skewscout(local, **given)


def samples_of(data: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.asarray(data.index)[data.start[k] : data.start[k + 1]]
    return np.asarray(data.x)[rows], np.asarray(data.y)[rows]


def accuracy(model: fs.Model, at: Any, data: Any, k: int) -> float:
    x, y = samples_of(data, k)
    logits, _ = model.apply(at, jnp.asarray(x), train=False)
    return float(np.mean(np.argmax(np.asarray(logits), axis=1) == y))


def trained(server: Layers, steps: int, data: Any, k: int) -> Layers:
    x, y = samples_of(data, k)
    for _ in range(steps):
        gradient = loss_and_gradient(server, x, y)[1]
        server = [a - LR * g for a, g in zip(server, gradient, strict=True)]
    return server


def test_like_the_paper(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Models travel, what they lose is measured where they are not at home, and τ climbs."""
    model, data = models["logistic"], federation.data
    played = play(made(model), model, data, ROUNDS)
    start = model.init(jax.random.fold_in(jax.random.key(0), 0))
    server, tau, way, last, lost = start, 2, 1, np.inf, list[float]()
    traveller: Any = None
    taus, owners, again = [], set(), 0
    for state, report in zip(played.states, played.metrics, strict=True):
        cohort = np.asarray(report.client).tolist()
        assert int(report.steps) == COHORT * tau
        if traveller is not None:
            owner, away_model, home = traveller
            others = [k for k in cohort if k != owner]
            again += len(others) < COHORT
            away = [accuracy(model, away_model, data, k) for k in others]
            lost.append(home - float(np.mean(away)))
        if len(lost) == TRAVEL:
            cost = max(0.0, float(np.mean(lost)) - 0.1) + 0.5 / tau
            way = -way if cost > last + 1e-6 else way
            if not 2 <= tau * 2.0**way <= 8:
                way = -way
            tau, last, lost = int(tau * 2.0**way), cost, []
        kept = state.shared_state.shared
        assert 2 * 2 ** int(kept.level) == tau
        if np.isfinite(last):
            assert float(kept.cost) == pytest.approx(last, abs=1e-5)
        taus.append(tau)
        assert float(kept.lost) == pytest.approx(sum(lost), abs=1e-5)
        owner = int(kept.owner)
        assert owner in cohort
        owners.add(owner)
        steps = int(report.steps) // COHORT
        wanted = trained(layers_of(server), steps, data, owner)
        for ours, theirs in zip(wanted, layers_of(kept.model), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-5)
        assert float(kept.home) == pytest.approx(accuracy(model, kept.model, data, owner))
        traveller, server = (owner, kept.model, float(kept.home)), state.server
    assert set(taus) == {2, 4, 8}
    assert any(a > b for a, b in itertools.pairwise(taus))
    assert len(owners) > 3
    assert again


def test_with_one_level_every_visit_has_one_step(models: dict[str, fs.Model]) -> None:
    """τ has nowhere to go, whatever was lost."""
    model = models["logistic"]
    local: Any = made(model, fewest_steps=1, most_steps=1).parts.local
    steps, shared = local.inner.steps, local.inner.shared
    climbed = jax.jit(shared._climbed)
    state = shared.init(model.init(jax.random.key(0)))._replace(measured=jnp.int32(TRAVEL))
    for lost in (0.0, 2.0, 0.5):
        state = climbed(state._replace(lost=jnp.float32(lost), measured=jnp.int32(TRAVEL)))
        assert int(state.measured) == 0
        assert int(steps.draw(jax.random.key(0), state)) == steps.most == 1


def test_traffic_alone_asks_for_the_most_steps(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """If lost accuracy costs nothing, τ stays at its most, but for tries of the next."""
    model = models["logistic"]
    played = play(made(model, travel_rounds=1, loss_weight=0.0), model, federation.data, 12)
    assert [int(m.steps) // COHORT for m in played.metrics] == [2, 2, *5 * [4, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fewest_steps": 0}, "fewest must be at least 1, got 0"),
        ({"most_steps": 1}, "most must be at least fewest, 2, got 1"),
        ({"travel_rounds": 0}, "rounds must be at least 1, got 0"),
        ({"loss_weight": -1.0}, "loss_weight must be at least 0 and finite, got -1.0"),
        ({"allowed_loss": float("inf")}, "allowed must be at least 0 and finite, got inf"),
    ],
)
def test_settings_out_of_range(models: dict[str, fs.Model], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(models["logistic"], **options)
