"""Draws without replacement, at a cost that does not grow with the population."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_sim.base import Array

SORTED = 4096
"""Populations up to this size, or 8 times the draw, are shuffled: 0.5 ms on one core."""

MOST_PROPOSALS = 1000
"""Iteration limit of the search; failing to find a free index is a one-in-thousands event."""


def permutation(key: Array, total: int) -> Array:
    """Draws a permutation of 0 .. total - 1, ``int32[total]``, the same with and without x64."""
    return jax.random.permutation(key, jnp.arange(total, dtype=jnp.int32))


def signs(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Draws 1 or -1 for each entry, the same with and without x64.

    ``jax.random.rademacher`` draws from the default float for any dtype.

    >>> signs(jax.random.key(0), (4,), jnp.float32).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    up = jax.random.uniform(key, shape, jnp.float32) < 0.5
    return jnp.where(up, 1, -1).astype(dtype)


def distinct(
    key: Array,
    count: int,
    total: int,
    taken: Array | None = None,
    allowed: Callable[[Array], Array] | None = None,
) -> Array:
    """Draws ``count`` distinct numbers of 0 .. total - 1, uniformly and in the order of the draw.

    In a large population, numbers are drawn with replacement and repetitions skipped, which is
    uniform too and takes O(count log count). Sorting a million random numbers takes 500 ms on one
    core. (A sparse Fisher-Yates shuffle is as exact, but its sequential steps are slow on
    accelerators.)

    Args:
        key: PRNG key.
        count: at most the number of free numbers.
        total: N.
        taken: ``int32[T]``, numbers that must not be drawn; N for none.
        allowed: ``int32[K] -> bool[K]``, which numbers may be drawn; None: all.

    Returns:
        ``int32[count]``; N in place of missing numbers, if all others are not allowed.

    >>> drawn = distinct(jax.random.key(0), 3, 10**9, taken=jnp.array([7, 10**9]))
    >>> len({*drawn.tolist()} - {7})
    3
    """
    none = jnp.full((1,), total, jnp.int32)
    taken = none if taken is None else taken
    if total <= max(SORTED, 8 * (count + len(taken))):
        ticket = jax.random.uniform(key, (total,), jnp.float32)
        ticket = ticket.at[taken].set(2.0, mode="drop")
        if allowed is None:
            return jnp.argsort(ticket)[:count].astype(jnp.int32)
        ticket = jnp.where(allowed(jnp.arange(total, dtype=jnp.int32)), ticket, 2.0)
        first = jnp.argsort(ticket)[:count].astype(jnp.int32)
        return jnp.where(ticket[first] < 2, first, total)

    def propose(key: Array) -> Array:
        given = jax.random.randint(key, (2 * count,), 0, total, jnp.int32)
        return given if allowed is None else jnp.where(allowed(given), given, total)

    return _search(key, count, total, taken, propose)


def by_size(key: Array, count: int, start: Array) -> Array:
    """Draws ``count`` distinct clients one after another, in proportion to their samples.

    In a large population, the owners of random samples are drawn and repetitions skipped: an
    iteration takes O(count log N). Client k has the samples ``start[k]`` to ``start[k + 1] - 1``.
    N stands for each missing client, if all others have no samples.

    >>> by_size(jax.random.key(0), 3, jnp.array([0, 5, 5, 9])).tolist()[2]
    3
    """
    total = len(start) - 1
    if total <= max(SORTED, 8 * count):
        size = jnp.diff(start).astype(jnp.float32)
        ticket = jnp.log(size) + jax.random.gumbel(key, size.shape, jnp.float32)
        found, first = jax.lax.top_k(ticket, count)
        return jnp.where(found > -jnp.inf, first, total).astype(jnp.int32)

    def propose(key: Array) -> Array:
        sample = jax.random.randint(key, (2 * count,), start[0], start[-1], jnp.int32)
        return jnp.searchsorted(start, sample, side="right").astype(jnp.int32) - 1

    return _search(key, count, total, jnp.full((1,), total, jnp.int32), propose)


def _search(
    key: Array, count: int, total: int, taken: Array, propose: Callable[[Array], Array]
) -> Array:
    """Returns the first ``count`` distinct proposals; ``total`` in place of missing ones."""

    def draw(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        iteration, found, out = carry
        proposed = propose(jax.random.fold_in(key, iteration))
        # Missing numbers are ``total``, which is therefore never new.
        new = _first_occurrence(proposed) & ~is_in(proposed, jnp.concatenate([taken, out]))
        place = jnp.where(new, found + jnp.cumsum(new, dtype=jnp.int32) - 1, count)
        found = found + jnp.sum(new, dtype=jnp.int32)
        return iteration + 1, found, out.at[place].set(proposed, mode="drop")

    def incomplete(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[1] < count) & (carry[0] < MOST_PROPOSALS)

    start = jnp.int32(0), jnp.int32(0), jnp.full((count,), total, jnp.int32)
    return jax.lax.while_loop(incomplete, draw, start)[2]


def draw_free(key: Array, total: int, taken: Array) -> Array:
    """Draws a number of 0 .. total - 1 that is not in ``taken``, uniformly, in O(T log T).

    ``taken int32[T]`` has distinct numbers, not all; ``total`` and above stand for none.

    >>> sorted({int(draw_free(jax.random.key(i), 4, jnp.array([2, 4, 0]))) for i in range(9)})
    [1, 3]
    """
    taken = jnp.sort(taken)
    left = total - jnp.sum(taken < total, dtype=jnp.int32)
    given = jax.random.randint(key, (), 0, jnp.maximum(left, 1), jnp.int32)
    # The taken numbers below the given-th free one have at most so many free numbers below them.
    free_below = taken - jnp.arange(len(taken), dtype=jnp.int32)
    return given + jnp.sum((taken < total) & (free_below <= given), dtype=jnp.int32)


def _first_occurrence(values: Array) -> Array:
    """Returns where a value occurs for the first time, ``bool[K]``."""
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(new).at[order].set(new)


def is_in(values: Array, known: Array) -> Array:
    """Returns which of ``values [K]`` are in ``known``, ``bool[K]``."""
    known = jnp.sort(known)
    return known[jnp.minimum(jnp.searchsorted(known, values), len(known) - 1)] == values
