"""Draws with stated probabilities: they are drawn as stated, and weights by 1 / p are unbiased."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from composing import one_step
from conftest import SIZES, assert_trees, first_weights, make_federation
from fed import water_filled

import fedjax_sim as fs
from fedjax_sim.base import ClientData, Variables
from fedjax_sim.engine.chances import inclusion, systematic
from fedjax_sim.engine.streams import Round, stream

N, M, DRAWS = len(SIZES), 3, 20_000
KEYS = jax.random.split(jax.random.key(5), DRAWS)
SCORES = (0.4, 3.0, 0.7, 1.0, 9.0, 0.2, 2.0, 0.5)
P = np.array(SIZES) / np.sum(SIZES)
RNG = np.random.default_rng(1)
UPDATES = RNG.normal(size=(N, 4)).astype(np.float32)


@functools.cache
def data() -> ClientData:
    return jax.device_put(make_federation().data)


def score(variables: Variables, client: Any) -> jax.Array:
    return client.size.astype(jnp.float32)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether the mean of draws ``[DRAWS, ...]`` is within 5 standard errors."""
    error = found.std(axis=0) / math.sqrt(len(found)) + 1e-6
    return bool((np.abs(found.mean(axis=0) - wanted) < 5 * error).all())


# ---- probabilities ----


@pytest.mark.parametrize("total", [0.5, 1.0, 2.5, 4.0, 7.5])
def test_probabilities_are_proportional_up_to_1(total: float) -> None:
    scores = RNG.lognormal(0, 2, (50, N)).astype(np.float32)
    found = np.asarray(jax.vmap(inclusion, in_axes=(0, None))(jnp.asarray(scores), total))
    wanted = [water_filled(row.astype(np.float64), total) for row in scores]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("scores", "total", "wanted"),
    [
        ([1, 9, 3, 0], 2, [0.25, 1, 0.75, 0]),
        ([1, 9, 3, 0], 3, [1, 1, 1, 0]),  # no more than those with a score
        ([2, 2, 2], 1, [1 / 3, 1 / 3, 1 / 3]),
        ([5, 5, 1, 1], 3, [1, 1, 0.5, 0.5]),
        ([0, 0, 0], 2, [0, 0, 0]),
        ([4, 1], 9, [1, 1]),
    ],
)
def test_probabilities_by_hand(scores: list[float], total: float, wanted: list[float]) -> None:
    found = inclusion(jnp.array(scores, jnp.float32), total)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_systematic_draws_have_their_probabilities_and_size() -> None:
    """With equal probabilities all pairs are as likely: the order is random."""
    chances = inclusion(jnp.array(SCORES), M)
    draw = jax.jit(jax.vmap(systematic, in_axes=(0, None, None)), static_argnums=2)
    found = np.asarray(draw(KEYS, chances, M))
    assert (np.diff(np.sort(found), axis=1) > 0).all()
    assert close((found[..., None] == np.arange(N)).sum(axis=1), np.asarray(chances))
    pairs = np.asarray(draw(KEYS, jnp.full(N, 2 / N), 2))
    table = np.zeros((N, N))
    np.add.at(table, (pairs.min(axis=1), pairs.max(axis=1)), 1)
    share = table[np.triu_indices(N, 1)] / DRAWS
    assert (np.abs(share - 2 / (N * (N - 1))) < 5 * math.sqrt(2 / (N * (N - 1)) / DRAWS)).all()


# ---- selections ----

STATED = {
    "uniform": fs.selection.uniform(),
    "uniform, active": fs.selection.uniform(active=2),
    "everyone": fs.selection.everyone(),
    "with_replacement": fs.selection.with_replacement(),
    "importance, exact": fs.selection.importance(score, exact=True),
    "importance, exact, active": fs.selection.importance(score, exact=True, active=2),
    "poisson": fs.selection.poisson(2.5),
}


@pytest.mark.parametrize("name", STATED)
def test_clients_are_drawn_as_often_as_stated(name: str) -> None:
    """The sums of a_k Δ_k / π_k over 20,000 draws have the mean of all clients."""
    part = STATED[name]
    slots = N if name in ("everyone", "poisson") else M
    state = jnp.array(SCORES) if "importance" in name else ()
    none = jnp.zeros(slots, jnp.int32)

    def draw(key: jax.Array) -> jax.Array:
        return part.draw(key, state, data(), none, none == 0, none)[0]

    assert part.expected_visits is not None
    stated = np.asarray(part.expected_visits(state, data(), slots), np.float64)
    found = np.asarray(jax.jit(jax.vmap(draw))(KEYS))
    visits = (found[..., None] == np.arange(N)).sum(axis=1)
    assert close(visits, stated)
    share = np.array(SIZES) / np.sum(SIZES)
    sums = np.einsum("dk,k,kp->dp", visits, share / stated, UPDATES)
    assert close(sums, share @ UPDATES)


SILENT = [
    fs.selection.uniform(sticky=True),
    fs.selection.importance(score),
    fs.selection.shuffled(),
    fs.selection.cyclic(),
    fs.selection.power_of_choice(5, score),
]


@pytest.mark.parametrize("part", SILENT, ids=str)
def test_weights_by_unknown_probabilities_are_rejected(part: Any) -> None:
    """One line, which names both parts."""
    with pytest.raises(ValueError, match=r"^weighting unbiased\(.*, selection is ") as caught:
        composed(weighting=fs.weighting.unbiased(), selection=part)
    assert str(part) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# ---- rounds ----


def composed(**parts: Any) -> fs.Algorithm:
    given = {"clients_per_round": M, **parts}
    return fs.compose(one_step(), **given).on(fs.make_execution(devices=1))


def moved(algorithm: fs.Algorithm) -> tuple[np.ndarray, list[int], Any]:
    """The step of a round, its cohort and its metrics."""
    net = fs.models.logistic((6,), 3)
    start = first_weights(net)
    state = algorithm.init(jax.random.key(0), start, data())
    after, metrics = jax.jit(algorithm.step)(jax.random.key(3), state, data())
    leaves = jax.tree.leaves(fs.tree.subtract(after.server, start))
    step = np.concatenate([np.ravel(leaf) for leaf in leaves])
    return step, metrics.client.tolist(), metrics


def test_the_sum_is_over_the_weight_of_all_clients() -> None:
    """In place of the cohort's; summed as they finish, or held for a part that reads them."""
    plain, cohort, _ = moved(composed())
    sizes = np.array(SIZES)
    factor = N / M * sizes[cohort].sum() / sizes.sum()
    assert abs(factor - 1) > 0.1
    held = {"sending": (fs.sending.clip_norm(1e9),)}
    for parts in ({}, held):
        step, drawn, _ = moved(composed(weighting=fs.weighting.unbiased(), **parts))
        assert drawn == cohort
        np.testing.assert_allclose(step, factor * plain, rtol=1e-4, atol=1e-7)


EVERYONE = {"selection": fs.selection.everyone(), "clients_per_round": N}
DRAWN = {"selection": fs.selection.with_replacement(), "clients_per_round": 5}
UNBIASED, EQUAL = fs.weighting.unbiased(), fs.weighting.equal
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everyone": ({**EVERYONE, "weighting": UNBIASED}, EVERYONE),
    "equal weights": ({"weighting": fs.weighting.unbiased(EQUAL)}, {"weighting": EQUAL}),
    "with replacement": ({**DRAWN, "weighting": UNBIASED}, {**DRAWN, "weighting": EQUAL}),
    "all send": ({"sending": (fs.sending.by_norm(M),)}, {}),
    "all send, AOCS": ({"sending": (fs.sending.by_norm(99.0, 4),)}, {}),
}


@pytest.mark.parametrize("case", SAME)
def test_probabilities_of_1_or_alike_change_nothing(case: str) -> None:
    ours, plain = (moved(composed(**parts))[0] for parts in SAME[case])
    assert_trees(ours, plain, rtol=1e-4, atol=1e-7)


# ---- optimal client sampling ----


@pytest.mark.parametrize("iterations", [None, 6])
def test_updates_that_are_sent_are_an_unbiased_estimate(iterations: int | None) -> None:
    """Over 20,000 draws of who sends; a row that is absent may hold NaN."""
    updates = Variables(jnp.asarray(UPDATES).at[2].set(jnp.nan), ())
    weights, number = jnp.array(SIZES, jnp.float32), jnp.arange(N)
    sends = number != 2
    part = fs.sending.by_norm(2.5, iterations)
    choose = jax.vmap(part.choose, in_axes=(0, None, None, None, None))
    sent, chance = map(np.asarray, jax.jit(choose)(KEYS, updates, weights, number, sends))
    there, sizes = np.asarray(sends), np.array(SIZES, np.float64)
    norms = sizes * np.linalg.norm(UPDATES.astype(np.float64), axis=1)
    np.testing.assert_allclose(chance[0][there], water_filled(norms[there], 2.5), rtol=1e-4)
    assert not sent[:, 2].any()
    assert close(sent[:, there].astype(float), chance[0][there])
    share = np.where(there, sizes, 0) / sizes[there].sum()
    factor = np.where(there, share / np.where(there, chance[0], 1), 0)
    assert close(np.einsum("dk,k,kp->dp", sent, factor, UPDATES), share @ UPDATES)
    pairs = np.corrcoef(sent[:, there & (chance[0] < 1)].T) - np.eye((chance[0][there] < 1).sum())
    assert np.abs(pairs).max() < 5 / math.sqrt(DRAWS)  # independent


def test_clients_that_do_not_send_upload_a_number() -> None:
    for iterations, numbers in ((None, 1), (4, 9)):
        algorithm = composed(sending=(fs.sending.by_norm(1.5, iterations),))
        traffic = algorithm.traffic(first_weights(fs.models.logistic((6,), 3)), data())
        assert traffic.message == 4 * numbers
    _, _, metrics = moved(algorithm)
    assert int(metrics.uploads) < int(metrics.downloads) == M


def test_both_probabilities_divide_a_weight() -> None:
    """Clients drawn by size, each of whom sends by its coin: the sum in NumPy."""
    algorithm = composed(
        selection=fs.selection.with_replacement(),
        weighting=UNBIASED,
        sending=(fs.sending.by_norm(1.5),),
    )
    start = first_weights(fs.models.logistic((6,), 3))
    state = algorithm.init(jax.random.key(0), start, data())
    w = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)]).astype(np.float64)
    step, uploads = jax.jit(algorithm.step), set[int]()
    for seed in range(4):
        key = jax.random.key(seed)
        after, metrics = step(key, state, data())
        cohort = metrics.client.tolist()
        updates = np.array([-0.1 * (w - float(data().start[k])) for k in cohort])
        weights = np.array([SIZES[k] / (M * P[k]) for k in cohort])
        p = water_filled(weights * np.linalg.norm(updates, axis=1), 1.5)
        own = [jax.random.fold_in(stream(key, Round.SENDING), k) for k in cohort]
        sent = np.array([float(jax.random.uniform(k)) for k in own]) < p
        wanted = np.where(sent, weights / p, 0) @ updates / np.sum(SIZES)
        leaves = jax.tree.leaves(fs.tree.subtract(after.server, start))
        found = np.concatenate([np.ravel(leaf) for leaf in leaves])
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)
        assert int(metrics.uploads) == sent.sum()
        uploads.add(int(sent.sum()))
    assert len(uploads) > 1
