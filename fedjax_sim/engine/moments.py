"""Moments of the simulated time, and the seconds between them."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array, Now

MOST = 2**30
"""The most seconds that are added at once."""


def plus(now: Now, seconds: Array) -> Now:
    """So many ``seconds f32[]`` later.

    >>> [a.item() for a in plus(Now(jnp.int32(2), jnp.float32(0.75)), jnp.float32(1.5))]
    [4, 0.25]
    """
    total = now.fraction + jnp.minimum(seconds, MOST)
    whole = jnp.floor(total)
    return Now(now.seconds + whole.astype(jnp.int32), total - whole)


def between(start: Now, end: Now) -> Array:
    """The seconds from one moment to another, ``f32[]``."""
    return (end.seconds - start.seconds).astype(jnp.float32) + (end.fraction - start.fraction)


def same(a: Now, b: Now) -> Array:
    """Whether two moments are one; any shapes that broadcast."""
    return (a.seconds == b.seconds) & (a.fraction == b.fraction)


def no_later(a: Now, b: Now) -> Array:
    """Whether ``a`` is before ``b``, or the same."""
    return (a.seconds < b.seconds) | ((a.seconds == b.seconds) & (a.fraction <= b.fraction))


def spent(down: Array, work: Array, age: Array, seconds: Array) -> tuple[Array, Array]:
    """The seconds that a visit computed, and those that it received or sent; any shapes.

    Args:
        down: of the download.
        work: of the computation after it.
        age: since the visit began.
        seconds: the last so many of them count.

    >>> [a.item() for a in spent(*map(jnp.float32, (2, 5, 6, 5)))]
    [4.0, 1.0]
    """
    age = jnp.maximum(age, 0)
    before = jnp.maximum(age - seconds, 0)
    computing = jnp.clip(age - down, 0, work) - jnp.clip(before - down, 0, work)
    return computing, age - before - computing
