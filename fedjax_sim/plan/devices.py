"""Devices: distributions of their properties over clients, links, and availability.

The properties of a client depend only on the clock's seed and the client's index: a million clients
cost no more than their cohort.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Count, FinitePositive, Law, Link, Now, Share
from fedjax_sim.base.parts import Part

DAY = 86400


class constant(Part):
    """The same value for all clients.

    Args:
        value: seconds per step, or bytes per second.

    >>> constant(0.5)(jax.random.key(0), jnp.arange(2), Now(jnp.int32(0), jnp.float32(0))).tolist()
    [0.5, 0.5]
    """

    value: FinitePositive

    def __call__(self, key: Array, client: Array, now: Now) -> Array:
        return jnp.full(client.shape, self.value, jnp.float32)


class lognormal(Part):
    r"""Log-normal values: :math:`x_k = m\,e^{\sigma z_k}`.

    Args:
        median: m, in seconds per step, or bytes per second.
        sigma: σ, the standard deviation of the logarithm.

    Raises:
        ValueError: if median is not positive and finite, or sigma is not in [0, 10].
    """

    median: FinitePositive
    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= 10:  # 10 is 6e22 times the median for one client in a million
            raise ValueError(f"sigma must be in [0, 10], got {self.sigma}")

    def __call__(self, key: Array, client: Array, now: Now) -> Array:
        z = jax.vmap(lambda k: jax.random.normal(k, (), jnp.float32))(_keys(key, client))
        return jnp.float32(self.median) * jnp.exp(self.sigma * z)


class pareto(Part):
    r"""Values with a heavy tail: :math:`P(x_k > x) = (x_0 / x)^\alpha` above :math:`x_0`.

    Args:
        least: x₀, in seconds per step, or bytes per second.
        alpha: α; the mean is infinite up to 1.

    Raises:
        ValueError: if least is not positive and finite, or alpha is below 0.5.
    """

    least: FinitePositive
    alpha: float

    def __post_init__(self) -> None:
        if not 0.5 <= self.alpha < math.inf:  # below, the slowest of 2,000 clients exceed any run
            raise ValueError(f"alpha must be at least 0.5 and finite, got {self.alpha}")

    def __call__(self, key: Array, client: Array, now: Now) -> Array:
        tail = (1 - _uniform(_keys(key, client))) ** jnp.float32(-1 / self.alpha)
        return jnp.float32(self.least) * tail


class tiers(Part):
    """Tiers of devices: each client belongs to one of them, drawn with equal probability.

    Args:
        values: the value of each tier, in seconds per step, or bytes per second.

    Raises:
        ValueError: if there is no value, or one is not positive and finite.

    >>> drawn = tiers(1, 2, 10)(
    ...     jax.random.key(0), jnp.arange(300), Now(jnp.int32(0), jnp.float32(0))
    ... )
    >>> sorted(set(drawn.tolist()))
    [1.0, 2.0, 10.0]
    """

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise ValueError("tiers needs at least one value")
        for value in values:
            if not 0 < value < math.inf:
                raise ValueError(f"values must be positive and finite, got {value}")

    def __call__(self, key: Array, client: Array, now: Now) -> Array:
        count = len(self.values)
        tier = jnp.floor(count * _uniform(_keys(key, client))).astype(jnp.int32)
        return jnp.array(self.values, jnp.float32)[jnp.minimum(tier, count - 1)]


class bandwidth(Link):
    r"""Transfer rates in bytes per second.

    Args:
        up: the uplink of each client; if ``shared``, one number for all clients together.
        down: the downlink of each client.
        shared: whether the n clients that upload in a round share one uplink equally: each needs
            :math:`B n / \mathrm{up}` seconds for B bytes.

    Raises:
        ValueError: if a number is not positive and finite, or a shared uplink is not a number.
    """

    up: FinitePositive | Law
    down: FinitePositive | Law
    _: dataclasses.KW_ONLY
    shared: bool = False

    def __post_init__(self) -> None:
        if self.shared and callable(self.up):
            raise ValueError("up must be a number for a shared uplink, which is one for all")


class bernoulli(Part):
    """Every client is awake with a probability, independently in every round.

    Args:
        p: the probability.
    """

    p: Share

    def __call__(self, keys: Array, client: Array, now: Now) -> Array:
        return _uniform(keys) < self.p


class diurnal(Part):
    r"""Every client is awake for a fraction of each day, which begins at a different time for each.

    .. math:: (t / T + \varphi_k) \bmod 1 < s, \qquad \varphi_k \sim U(0, 1)

    Args:
        share: s, the fraction of a day.
        period: T, the length of a day in whole seconds.
        seed: seed of the φ.
    """

    share: Share
    period: Count = DAY
    _: dataclasses.KW_ONLY
    seed: int = 0

    def __call__(self, keys: Array, client: Array, now: Now) -> Array:
        phase = _uniform(_keys(jax.random.key(self.seed), client))
        second = (now.seconds % self.period).astype(jnp.float32) + now.fraction
        return (second / self.period + phase) % 1 < self.share


def _keys(key: Array, client: Array) -> Array:
    """Returns a key for each client, ``key[P]``."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client)


def _uniform(keys: Array) -> Array:
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
