"""Random numbers of local steps: ``local.change(steps=...)``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, DrawnSteps, Fraction, PyTree

_BITS = 23
"""The complement of a uniform float32 is 0 or at least 2 to the minus this."""


class geometric(DrawnSteps):
    r"""The number of steps until a coin comes up that is tossed after every step.

    .. math:: P(T = t) = p\,(1 - p)^{t - 1}, \qquad t = 1, 2, \dots

    All clients of a round toss the same coin, from the round's key, so that nothing travels. T is
    computed from one number in float32, and is therefore at most
    :math:`1 + 23 \log 2 / \log\frac{1}{1 - p}`; larger values have a probability of one in 8
    million.

    Args:
        p: the probability that the coin comes up; the mean of T is 1/p.

    Raises:
        ValueError: if p is out of range.

    Source: Mishchenko et al. 2022 <https://arxiv.org/abs/2202.09357>, Algorithm 2.

    Example:
        >>> steps = jax.vmap(lambda key: geometric(0.2).draw(key, ()))(
        ...     jax.random.split(jax.random.key(0), 2000)
        ... )
        >>> int(steps.min()), round(float(steps.mean()))
        (1, 5)
    """

    p: Fraction

    @property
    def _rate(self) -> float:
        return math.log1p(-self.p) if self.p < 1 else -math.inf

    @property
    def most(self) -> int:
        return 1 + math.floor(-_BITS * math.log(2) / self._rate)

    def draw(self, key: Array, shared: PyTree) -> Array:
        tails = jnp.log1p(-jax.random.uniform(key, dtype=jnp.float32)) / self._rate
        return jnp.minimum(1 + jnp.floor(tails).astype(jnp.int32), self.most)
