"""Draws without replacement: exact, distinct, and never what is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import augment, redistribution
from fedjax_sim.base import Batch
from fedjax_sim.engine import draws
from fedjax_sim.engine.batches import shuffled
from fedjax_sim.engine.doubles import enable_x64

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

    def poor(key: jax.Array, shape: tuple[int, ...], low: int, high: int, dtype: Any) -> jax.Array:
        return jnp.where(jnp.arange(shape[0]) % 4 > 0, 7, plain(key, shape, low, high, dtype))

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


def matched(key: jax.Array) -> jax.Array:
    mixing: Any = redistribution.matchings(redistribution.ring(6), 0.5)(key, 6)
    return mixing.matrix


def augmented(key: jax.Array) -> jax.Array:
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3)), jnp.uint8)
    batch: Any = Batch(images, jnp.zeros(4, jnp.int32), jnp.ones(4, bool), jnp.ones(4, bool))
    change: Any = augment.altered([augment.crop(2)])
    every: Any = augment.fedaug_augmentations(images.shape[1:])
    return every(key, change(key, batch, None), None).x


START = np.cumsum([6, *SIZES]).astype(np.int32)
DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "permutation": lambda key: draws.permutation(key, 9),
    "signs": lambda key: draws.signs(key, (9,), jnp.float32),
    "distinct": lambda key: draws.distinct(key, 5, 11),
    "distinct, of many": lambda key: draws.distinct(key, 5, 10**6),
    "distinct, of some": lambda key: draws.distinct(key, 5, 11, allowed=lambda k: k > 3),
    "by size": lambda key: draws.by_size(key, 5, jnp.asarray(START)),
    "by size, of many": lambda key: draws.by_size(
        key, 5, jnp.arange(0, 3 * draws.SORTED, 2, dtype=jnp.int32)
    ),
    "another": lambda key: draws.draw_free(key, 11, jnp.array([2, 11, 0], jnp.int32)),
    "order of an epoch": lambda key: shuffled(key, jnp.int32(37), 100),
    "matchings": matched,
    "augmentation": augmented,
}


@pytest.mark.parametrize("name", DRAWS)
def test_x64_changes_no_draw(name: str) -> None:
    found = []
    for x64 in (False, True):
        with enable_x64(x64):
            found.append(jax.jit(DRAWS[name])(jax.random.key(0)))
    np.testing.assert_array_equal(found[0], found[1], strict=True)
