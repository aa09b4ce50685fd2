"""Draws with stated probabilities, and the needs of weights that are divided by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Need
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.needs import (
    EQUAL_WEIGHTS,
    NO_FLIGHT,
    NOTHING_SHARED,
    ONE_MODEL,
    PLAIN_MEAN,
    SYNCHRONOUS,
    UNCHANGED,
    per_visit,
)
from fedjax_sim.engine.reading import moves_by_mean

EQUAL_OR_UNBIASED = Need(
    "weighting",
    "clients that count equally, or by their probabilities",
    lambda parts: per_visit(parts) or EQUAL_WEIGHTS.met(parts),
    "weighting=equal or unbiased()",
)
KNOWN_VISITS = Need(
    "selection",
    "a selection that states how often it visits each client",
    lambda parts: parts.selection.expected_visits is not None,
    "selection=uniform(), everyone(), poisson(m), with_replacement() or importance(score, "
    "exact=True)",
)
DIVIDED = (
    PLAIN_MEAN,
    UNCHANGED,
    NO_FLIGHT,
    SYNCHRONOUS,
    ONE_MODEL,
    NOTHING_SHARED,
    Need(
        "exchange",
        "clients that have all entries of the model",
        lambda parts: parts.exchange.coverage is None,
        "exchange without covers",
    ),
    Need(
        "server",
        "a server that moves by the aggregate alone",
        lambda parts: moves_by_mean(parts.server),
        "server=replace(), mix(alpha) or optimizer(transform)",
    ),
)
"""The needs of weights that are divided by probabilities: the aggregate is then a weighted sum
over a fixed weight, which is not the mean of the updates that were sent."""


def inclusion(scores: Array, expected: Array | float) -> Array:
    r"""Returns the probabilities of the expected number of draws, in proportion to scores below 1.

    .. math:: \pi_k = \min(1, c\, s_k), \qquad \sum_k \pi_k = m

    Of all probabilities with this sum, they minimise :math:`\sum_k s_k^2 / \pi_k`, the variance of
    a sum of independent draws that are divided by their probability. If at most m scores are
    positive, their probability is 1.

    Args:
        scores: ``f32[K]``, s_k at least 0; a score of 0 is never drawn.
        expected: m.

    Returns:
        ``f32[K]``.

    Source: Chen et al. 2022 <https://arxiv.org/abs/2010.13723>, equation 7.

    >>> inclusion(jnp.array([1.0, 9.0, 3.0, 0.0]), 2.0).tolist()  # of 1 and 3, one is drawn
    [0.25, 1.0, 0.75, 0.0]
    """
    falling = jnp.sort(scores, descending=True)
    # tail[c] is the sum without the c largest, whose probability is 1; rest[c] is left for the sum.
    tail = jnp.cumsum(falling[::-1])[::-1]
    rest = expected - jnp.arange(len(scores)).astype(jnp.float32)
    fits = rest * falling <= tail
    certain = jnp.argmax(fits)
    found = rest[certain] * scores / jnp.where(tail[certain] > 0, tail[certain], 1)
    chances = jnp.where(scores > falling[certain], 1, jnp.minimum(found, 1))
    few = ~jnp.any(fits) | (tail[certain] == 0)
    return jnp.where(few, (scores > 0).astype(jnp.float32), chances)


def systematic(key: Array, chances: Array, count: int) -> Array:
    """Draws ``count`` distinct numbers of 0 .. N - 1, each with its own probability.

    The numbers lie in a random order on a line, each as long as its probability, and the draw is
    the numbers at ``count`` points with equal distances; the first point is random.

    Args:
        key: PRNG key.
        chances: ``f32[N]``, in [0, 1]; their sum is ``count``.
        count: size of the draw.

    Returns:
        ``int32[count]``.

    Source: Madow 1949 <madow1949theory>, in a random order.

    >>> sorted(systematic(jax.random.key(0), jnp.array([1.0, 0.0, 0.5, 0.5, 1.0]), 3).tolist())
    [0, 2, 4]
    """
    order = permutation(jax.random.fold_in(key, 0), len(chances))
    # A cumulative sum in blocks may fall in the last bit.
    ends = jax.lax.cummax(jnp.cumsum(chances[order]))
    first = jax.random.uniform(jax.random.fold_in(key, 1), (), jnp.float32)
    points = (first + jnp.arange(count).astype(jnp.float32)) * (ends[-1] / count)
    place = jnp.searchsorted(ends, points, side="right")
    return order[jnp.minimum(place, len(chances) - 1)]
