"""Draws without replacement, at a cost that does not grow with the population."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array

SORTED = 4096
"""Up to so many, or 8 times as many as are drawn, all are shuffled: 0.5 ms on one core."""


def distinct(key: Array, count: int, total: int, taken: Array | None = None) -> Array:
    """``count`` different numbers of 0 .. total - 1, uniform and in the order of the draw.

    Of a large population numbers are drawn with replacement until there are enough, and those that
    were drawn before are skipped: that is uniform too, and takes O(count log count). A sort of a
    million tickets takes 500 ms on one core. (A sparse Fisher-Yates shuffle is as exact, but its
    steps follow one another, which an accelerator pays for.)

    Args:
        key: for the draw.
        count: at most as many as are free.
        total: N.
        taken: ``int32[T]``, numbers that must not be drawn; N for none.

    Returns:
        ``int32[count]``.

    >>> drawn = distinct(jax.random.key(0), 3, 10**9, taken=jnp.array([7, 10**9]))
    >>> len({*drawn.tolist()} - {7})
    3
    """
    none = jnp.full((1,), total, jnp.int32)
    taken = none if taken is None else taken
    if total <= max(SORTED, 8 * (count + len(taken))):
        ticket = jax.random.uniform(key, (total,))
        ticket = ticket.at[taken].set(2.0, mode="drop")
        return jnp.argsort(ticket)[:count].astype(jnp.int32)

    def draw(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, found, out = carry
        given = jax.random.randint(jax.random.fold_in(key, turn), (2 * count,), 0, total)
        new = _first(given) & ~_among(given, jnp.concatenate([taken, out]))
        place = jnp.where(new, found + jnp.cumsum(new, dtype=jnp.int32) - 1, count)
        found = found + jnp.sum(new, dtype=jnp.int32)
        return turn + 1, found, out.at[place].set(given, mode="drop")

    def lacks(carry: tuple[Array, Array, Array]) -> Array:
        return carry[1] < count

    start = jnp.int32(0), jnp.int32(0), jnp.broadcast_to(none, (count,))
    return jax.lax.while_loop(lacks, draw, start)[2]


def another(key: Array, total: int, taken: Array) -> Array:
    """One number of 0 .. total - 1 that is not taken, uniform, in O(T log T).

    Args:
        key: for the draw.
        total: N.
        taken: ``int32[T]``, different ones, not all; ``total`` and above stand for none.

    Returns:
        ``int32[]``.

    >>> sorted({int(another(jax.random.key(i), 4, jnp.array([2, 4, 0]))) for i in range(9)})
    [1, 3]
    """
    taken = jnp.sort(taken)
    left = total - jnp.sum(taken < total, dtype=jnp.int32)
    given = jax.random.randint(key, (), 0, jnp.maximum(left, 1))
    # Below the given-th free number are those that have at most so many free ones below them.
    free_below = taken - jnp.arange(len(taken), dtype=jnp.int32)
    return given + jnp.sum((taken < total) & (free_below <= given), dtype=jnp.int32)


def _first(given: Array) -> Array:
    """Where a value stands for the first time: ``bool[K]``."""
    order = jnp.argsort(given, stable=True)
    ordered = given[order]
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(new).at[order].set(new)


def _among(given: Array, known: Array) -> Array:
    """Which of ``given [K]`` are in ``known``: ``bool[K]``."""
    known = jnp.sort(known)
    return known[jnp.minimum(jnp.searchsorted(known, given), len(known) - 1)] == given
