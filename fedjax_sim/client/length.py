"""How many steps the clients of a round take, if not E epochs: ``local.change(steps=...)``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, DrawnSteps, PyTree, part

_BITS = 23
"""Of a uniform float32: its complement is 0 or at least 2 to the minus this."""


@part
def geometric(p: float) -> DrawnSteps:
    r"""Steps until a coin comes up that all clients of a round toss together, after every step.

    .. math:: P(T = t) = p\,(1 - p)^{t - 1}, \qquad t = 1, 2, \dots

    The coins are those of the round's key, which all have: nothing travels. T is made of one number
    in float32, so that it is at most :math:`1 + 23 \log 2 / \log\frac{1}{1 - p}`, which a draw
    exceeds with a probability of one in 8 million.

    Args:
        p: the probability that the coin comes up; the mean of T is 1/p.

    Returns:
        The draw.

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
    if not 0 < p <= 1:
        raise ValueError(f"p must be in (0, 1], got {p}")
    rate = math.log1p(-p) if p < 1 else -math.inf
    most = 1 + math.floor(-_BITS * math.log(2) / rate)

    def draw(key: Array, shared: PyTree) -> Array:
        del shared
        tails = jnp.log1p(-jax.random.uniform(key, dtype=jnp.float32)) / rate
        return jnp.minimum(1 + jnp.floor(tails).astype(jnp.int32), most)

    return DrawnSteps(draw, most)
