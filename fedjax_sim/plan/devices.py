"""Devices: laws that give each client a number, links, and who is awake.

What a law gives depends on nothing but the clock's seed and the client's own number: a million
clients cost what the cohort costs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Availability, Law, Link, Now, part

DAY = 86400.0


@part
def constant(value: float) -> Law:
    """The same number for all clients.

    Args:
        value: in seconds of a step, or bytes per second.

    Returns:
        A law.

    Raises:
        ValueError: if value is not positive and finite.

    >>> constant(0.5)(jax.random.key(0), jnp.arange(2), Now(jnp.int32(0), jnp.float32(0))).tolist()
    [0.5, 0.5]
    """
    check_positive("value", value)

    def law(key: Array, client: Array, now: Now) -> Array:
        return jnp.full(client.shape, value, jnp.float32)

    return law


@part
def lognormal(median: float, sigma: float) -> Law:
    r"""Numbers of which the logarithms are normal: :math:`x_k = m\,e^{\sigma z_k}`.

    Args:
        median: m, in seconds of a step, or bytes per second.
        sigma: σ, of the logarithm.

    Returns:
        A law.

    Raises:
        ValueError: if median is not positive and finite, or sigma is not in [0, 10].
    """
    check_positive("median", median)
    if not 0 <= sigma <= 10:  # 10 is 6e22 times the median for one client in a million
        raise ValueError(f"sigma must be in [0, 10], got {sigma}")

    def law(key: Array, client: Array, now: Now) -> Array:
        z = jax.vmap(lambda own: jax.random.normal(own, (), jnp.float32))(_own(key, client))
        return jnp.float32(median) * jnp.exp(sigma * z)

    return law


@part
def pareto(least: float, alpha: float) -> Law:
    r"""Numbers with a heavy tail: :math:`P(x_k > x) = (x_0 / x)^\alpha` above :math:`x_0`.

    Args:
        least: x₀, in seconds of a step, or bytes per second.
        alpha: α; the mean is infinite up to 1.

    Returns:
        A law.

    Raises:
        ValueError: if least is not positive and finite, or alpha is below 0.5.
    """
    check_positive("least", least)
    if not 0.5 <= alpha < math.inf:  # below, one client in 2,000 is slower than a run can tell
        raise ValueError(f"alpha must be at least 0.5 and finite, got {alpha}")

    def law(key: Array, client: Array, now: Now) -> Array:
        return jnp.float32(least) * (1 - _uniform(_own(key, client))) ** jnp.float32(-1 / alpha)

    return law


@part
def tiers(*values: float) -> Law:
    """Tiers of devices: each client is in one of them, drawn with equal probability.

    Args:
        values: of each tier, in seconds of a step, or bytes per second.

    Returns:
        A law.

    Raises:
        ValueError: if there is none, or one is not positive and finite.

    >>> drawn = tiers(1, 2, 10)(
    ...     jax.random.key(0), jnp.arange(300), Now(jnp.int32(0), jnp.float32(0))
    ... )
    >>> sorted(set(drawn.tolist()))
    [1.0, 2.0, 10.0]
    """
    if not values:
        raise ValueError("tiers needs at least one value")
    for value in values:
        check_positive("values", value)

    def law(key: Array, client: Array, now: Now) -> Array:
        tier = jnp.floor(len(values) * _uniform(_own(key, client))).astype(jnp.int32)
        return jnp.array(values, jnp.float32)[jnp.minimum(tier, len(values) - 1)]

    return law


@part
def bandwidth(up: float | Law, down: float | Law, *, shared: bool = False) -> Link:
    r"""What travels how fast, in bytes per second.

    Args:
        up: of each client; if ``shared`` a number, of all clients together.
        down: of each client.
        shared: whether the n clients that upload in a round have an equal part of one uplink:
            B bytes take each of them :math:`B n / \mathrm{up}` seconds.

    Returns:
        A link.

    Raises:
        ValueError: if a number is not positive and finite, or a shared uplink is no number.
    """
    if shared and callable(up):
        raise ValueError("up must be a number for a shared uplink, which is one for all")
    return Link(as_law("up", up), as_law("down", down), shared)


@part
def bernoulli(p: float) -> Availability:
    """Every client is awake with a probability, in every round anew.

    Args:
        p: the probability.

    Returns:
        An availability.

    Raises:
        ValueError: if p is out of range.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must be in [0, 1], got {p}")

    def available(keys: Array, client: Array, now: Now) -> Array:
        return _uniform(keys) < p

    return available


@part
def diurnal(share: float, period: float = DAY, *, seed: int = 0) -> Availability:
    r"""Every client is awake for a part of each day, and each begins its day at another time.

    .. math:: (t / T + \varphi_k) \bmod 1 < s, \qquad \varphi_k \sim U(0, 1)

    Args:
        share: s, the part of a day.
        period: T, whole seconds of a day.
        seed: of the φ.

    Returns:
        An availability.

    Raises:
        ValueError: if share is out of range, or period is no whole number of seconds from 1 to
            2³¹ - 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    if period != int(period) or not 1 <= period < 2**31:
        raise ValueError(f"period must be a whole number of seconds from 1, got {period}")

    def available(keys: Array, client: Array, now: Now) -> Array:
        phase = _uniform(_own(jax.random.key(seed), client))
        second = (now.seconds % int(period)).astype(jnp.float32) + now.fraction
        return (second / period + phase) % 1 < share

    return available


def as_law(name: str, given: float | Law) -> Law:
    """A number as the law of all clients; ``name`` is the argument's."""
    if callable(given):
        return given
    check_positive(name, given)
    return constant(given)


def check_positive(name: str, value: float) -> None:
    """Refuses what is no positive finite number; ``name`` is the argument's."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _own(key: Array, client: Array) -> Array:
    """A key for each client, ``key[P]``."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client)


def _uniform(keys: Array) -> Array:
    return jax.vmap(lambda own: jax.random.uniform(own, (), jnp.float32))(keys)
