"""Corrections for clients that skip communication rounds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Context,
    Correction,
    Decay,
    Done,
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

    γ/p is the mean distance of a round's steps under a gradient of 1. If the clients' SGD has
    momentum β, which restarts in every round, :math:`\gamma / (p\,(1 - \beta (1 - p)))` replaces
    it. A ``rate_by_round`` shortens the changes of h_k with the steps.

    Args:
        p: the inverse of the mean number of steps in a round.
        lr: γ of the clients' SGD.
        momentum: β of the clients' SGD, 0 in the paper.

    Raises:
        ValueError: if a setting is out of range.

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
