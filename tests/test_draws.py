"""Draws without replacement: exact, distinct, and never what is taken."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim.engine import draws

TOTAL = 41  # above 8 (count + taken), so that numbers are skipped if nothing else asks for a sort


@pytest.mark.parametrize("sorted_up_to", [0, draws.SORTED])
def test_every_ordered_pair_is_as_likely(
    sorted_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SORTED", sorted_up_to)
    taken = jnp.array([5, TOTAL, 11], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 50_000)
    pairs = np.asarray(jax.jit(jax.vmap(lambda key: draws.distinct(key, 2, TOTAL, taken)))(keys))
    free = [k for k in range(TOTAL) if k not in (5, 11)]
    counts = np.zeros((TOTAL, TOTAL), int)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    possible = [counts[pair] for pair in itertools.permutations(free, 2)]
    assert sum(possible) == len(keys)  # no pair of equals, and nothing taken
    assert stats.chisquare(possible).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("count", "taken"), [(1, 0), (1, 40), (7, 1), (40, 0), (40, 40)])
def test_a_small_part_of_a_large_population(count: int, taken: int) -> None:
    """Of those that are taken, some are none."""
    total, seeds = 10**6, 50
    rng = np.random.default_rng(count)
    there = rng.integers(0, total, (seeds, taken)).astype(np.int32)
    there[rng.random(there.shape) < 0.3] = total
    draw = jax.vmap(lambda key, taken: draws.distinct(key, count, total, taken))
    drawn = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), seeds), there))
    for ours, others in zip(drawn.tolist(), there.tolist(), strict=True):
        assert len(set(ours) - set(others)) == count
    assert ((drawn >= 0) & (drawn < total)).all()


def test_a_draw_that_needs_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the candidates of a turn are the same number: what is missing is drawn again."""
    plain = jax.random.randint

    def poor(key: jax.Array, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
        return jnp.where(jnp.arange(shape[0]) % 4 > 0, 7, plain(key, shape, low, high))

    monkeypatch.setattr(jax.random, "randint", poor)
    drawn = draws.distinct(jax.random.key(0), 30, 10**5).tolist()
    assert len(set(drawn)) == 30
    assert drawn[1] == 7


SIZES = [3, 1, 0, 7, 2, 0, 12, 5, *27 * [1]]


@pytest.mark.parametrize("sorted_up_to", [0, draws.SORTED])
def test_every_ordered_pair_is_as_likely_as_its_samples(
    sorted_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "SORTED", sorted_up_to)
    start = jnp.asarray(np.cumsum([6, *SIZES]), jnp.int32)  # the samples of another run come before
    keys = jax.random.split(jax.random.key(0), 50_000)
    pairs = np.asarray(jax.jit(jax.vmap(lambda key: draws.by_size(key, 2, start)))(keys))
    assert pairs.min() >= 0
    counts = np.zeros((len(SIZES), len(SIZES)), int)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    p = np.array(SIZES) / sum(SIZES)
    expected = len(keys) * p[:, None] * p[None] / (1 - p[:, None])
    np.fill_diagonal(expected, 0)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 0.01
