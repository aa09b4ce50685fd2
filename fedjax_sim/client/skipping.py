"""Corrections and numbers of local steps for clients that skip communication rounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Context,
    Correction,
    Decay,
    Done,
    DrawnSteps,
    Fraction,
    Need,
    Positive,
    PyTree,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import sgd_of
from fedjax_sim.engine.needs import (
    AS_IT_IS,
    EVERYONE,
    MIRROR,
    NOBODY_LOST,
    PLAIN_MEAN,
    PLAIN_SERVER,
)


class Skipping(NamedTuple):
    """A client's state of :class:`scaffnew`: two vectors as large as the parameters.

    Attributes:
        h: its control variate before the last average.
        last: its weights before that average; at the start, the initial weights.
    """

    h: PyTree
    last: PyTree


class scaffnew(Correction):
    r"""Scaffnew's control variates, which follow the difference between a client and the average.

    .. math:: \hat x_k \leftarrow \hat x_k - \gamma\,(\nabla F_b(\hat x_k) - h_k), \qquad
              h_k \leftarrow h_k + \frac p\gamma\,(x - \hat x_k)

    x is the average that follows a client's last step; the client receives it at its next visit,
    and updates h_k then. All h_k are 0 at the start, and their sum stays 0.

    γ/p is the mean distance covered in a round if all gradients are 1. If the clients' SGD has
    momentum β, which restarts in every round, :math:`\gamma / (p\,(1 - \beta (1 - p)))` replaces
    it. A ``rate_by_round`` shortens the changes of h_k with the steps.

    Args:
        p: the inverse of the mean number of steps in a round.
        lr: γ of the clients' SGD.
        momentum: β of the clients' SGD, 0 in the paper.

    Source: Mishchenko et al. 2022 <https://arxiv.org/abs/2202.09357>, Algorithm 2.

    Example:
        >>> from fedjax_sim.base import Variables
        >>> average = Context(Variables(jnp.array([1.0]), {}), None, None)
        >>> own = Skipping(jnp.array([0.5]), jnp.array([3.0]))  # which is now 0.5 - 2 * 0.2 / 0.1
        >>> scaffnew(0.2, 0.1).direction(jnp.zeros(1), jnp.zeros(1), average, own, ()).tolist()
        [3.5]
    """

    p: Fraction
    lr: Positive
    momentum: Decay = 0.0

    reads_samples = False

    @property
    def needs(self) -> tuple[Need, ...]:
        optimizer = sgd_of("lr", self.lr, self.momentum)
        return (EVERYONE, NOBODY_LOST, AS_IT_IS, *MIRROR, PLAIN_MEAN, PLAIN_SERVER, optimizer)

    @property  # not cached: the settings may be traced
    def _length(self) -> float:
        return self.lr / (self.p * (1 - self.momentum * (1 - self.p)))

    def _variate(self, own: Skipping, context: Context) -> PyTree:
        pull = tree.subtract(context.received.params, own.last)
        return tree.sum_of(own.h, tree.scale(1 / self._length, pull))

    def client_state(self, params: PyTree) -> Skipping:
        return Skipping(jax.tree.map(jnp.zeros_like, params), params)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: Skipping, common: PyTree
    ) -> PyTree:
        return tree.subtract(gradient, self._variate(own, context))

    def finish(
        self, params: PyTree, context: Context, own: Skipping, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return Skipping(self._variate(own, context), params), ()


_BITS = 23
"""The complement of a uniform float32 is 0 or at least 2 to the minus this."""


class geometric(DrawnSteps):
    r"""The number of steps until a coin, tossed after every step, comes up heads.

    .. math:: P(T = t) = p\,(1 - p)^{t - 1}, \qquad t = 1, 2, \dots

    All clients of a round toss the same coin, from the round's key, so nothing is sent. T is
    computed from one number in float32, and is therefore at most :math:`1 + 23 \log 2 /
    \log\frac{1}{1 - p}`; larger values have a probability of one in 8 million.

    Args:
        p: the probability of heads; the mean of T is 1/p.

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
