"""Corrections for clients that skip averages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Context, Correction, Done, PyTree, concrete, part
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
    """What a client of :func:`scaffnew` keeps.

    Attributes:
        h: its control variate, as it was before the last average.
        last: its weights before that average; at the start, the initial ones.
    """

    h: PyTree
    last: PyTree


@part
def scaffnew(p: float, lr: float, momentum: float = 0.0) -> Correction:
    r"""Scaffnew's control variates, which the difference between a client and the average moves.

    .. math:: \hat x_k \leftarrow \hat x_k - \gamma\,(\nabla F_b(\hat x_k) - h_k), \qquad
              h_k \leftarrow h_k + \frac p\gamma\,(x - \hat x_k)

    where x is the average that follows a client's last step; a client knows it at its next visit,
    and moves h_k then. All h_k are 0 at the start, and their sum stays 0.

    γ/p is how far a round's steps lead, on average, under a gradient of 1. If the clients' SGD has
    momentum β, which restarts in every round, :math:`\gamma / (p\,(1 - \beta (1 - p)))` takes its
    place. A ``rate_by_round`` shortens the moves of h_k with the steps.

    Args:
        p: the inverse of the mean number of steps in a round.
        lr: γ of the clients' SGD.
        momentum: β of the clients' SGD; the paper's have none.

    Returns:
        A correction with :class:`Skipping` on every client: two vectors as large as the parameters.

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
    if not 0 < p <= 1:
        raise ValueError(f"p must be in (0, 1], got {p}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    length, told = lr / (p * (1 - momentum * (1 - p))), sgd_of("lr", lr, momentum)

    def variate(own: Skipping, context: Context) -> PyTree:
        pull = tree.subtract(context.received.params, own.last)
        return tree.sum_of(own.h, tree.scale(1 / length, pull))

    def finish(
        params: PyTree, context: Context, own: Skipping, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return Skipping(variate(own, context), params), ()

    return Correction(
        client_state=lambda params: Skipping(jax.tree.map(jnp.zeros_like, params), params),
        shared_state=lambda params: (),
        direction=lambda gradient, params, context, own, common: tree.subtract(
            gradient, variate(own, context)
        ),
        finish=finish,
        reduce=lambda shared_state, messages, weights, clients, aggregator: (),
        needs=(EVERYONE, NOBODY_LOST, AS_IT_IS, *MIRROR, PLAIN_MEAN, PLAIN_SERVER, told),
    )
