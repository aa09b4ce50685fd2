"""Moments of simulated time, and the seconds between them."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array, Now

MOST = 2**30
"""The most seconds added at once."""


def add_seconds(now: Now, seconds: Array) -> Now:
    """Returns the moment ``seconds f32[]`` later."""
    total = now.fraction + jnp.minimum(seconds, MOST)
    whole = jnp.floor(total)
    return Now(now.seconds + whole.astype(jnp.int32), total - whole)


def between(start: Now, end: Now) -> Array:
    """Returns the seconds from one moment to another, ``f32[]``."""
    return (end.seconds - start.seconds).astype(jnp.float32) + (end.fraction - start.fraction)


def same(a: Now, b: Now) -> Array:
    """Returns whether two moments are equal; any shapes that broadcast."""
    return (a.seconds == b.seconds) & (a.fraction == b.fraction)


def no_later(a: Now, b: Now) -> Array:
    """Returns whether ``a`` is before ``b`` or equal."""
    return (a.seconds < b.seconds) | ((a.seconds == b.seconds) & (a.fraction <= b.fraction))


def compute_and_transfer(
    down: Array, work: Array, age: Array, seconds: Array
) -> tuple[Array, Array]:
    """Splits the last seconds of a visit into computation and transfers; any shapes.

    After a download of ``down`` seconds come ``work`` seconds; the visit began ``age`` seconds ago.

    >>> [a.item() for a in compute_and_transfer(*map(jnp.float32, (2, 5, 6, 5)))]
    [4.0, 1.0]
    """
    age = jnp.maximum(age, 0)
    before = jnp.maximum(age - seconds, 0)
    computing = jnp.clip(age - down, 0, work) - jnp.clip(before - down, 0, work)
    return computing, age - before - computing
