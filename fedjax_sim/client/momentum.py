"""Corrections by a momentum that the server keeps and all local steps follow."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Context,
    Correction,
    CorrectionSurvey,
    Gathered,
    PyTree,
    Variables,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import sgd_of
from fedjax_sim.engine.needs import FRESH, FROM_RECEIVED, NO_FLIGHT, ONE_MODEL
from fedjax_sim.engine.reach import accumulated


@part
def global_momentum(beta: float) -> Correction:
    r"""MimeLite's momentum of the server, which every local step follows and none moves.

    .. math:: \beta m + (1 - \beta) \nabla F_b(w), \qquad
              m \leftarrow \beta m + (1 - \beta) \sum_k p_k \nabla F_k(w_{recv})

    m starts at 0; p_k are the shares of the weights by which the updates are averaged.

    Args:
        beta: β, in [0, 1); 0 leaves the gradient as it is, bit for bit.

    Returns:
        A correction with m on the server. Clients send their whole gradients, which cost a pass
        over their samples each; m travels with the model.

    Raises:
        ValueError: if beta is out of range.

    Source: Karimireddy et al. 2021 <https://arxiv.org/abs/2008.03606>, Algorithm 1 (MimeLite with
    momentum).
    """
    _check_beta(beta)

    def reduce(
        momentum: PyTree, messages: PyTree, weights: Array, clients: int, aggregator: Aggregator
    ) -> PyTree:
        del clients
        anyone = jnp.any(weights > 0)
        mean = aggregator(messages, jnp.where(anyone, weights, 1))
        after = _mixed(beta, momentum, mean)
        return tree.select(anyone, after, momentum)

    return Correction(
        client_state=lambda params: (),
        shared_state=lambda params: jax.tree.map(jnp.zeros_like, params),
        direction=lambda gradient, params, context, own, common: _mixed(beta, common, gradient),
        finish=lambda params, context, own, common, done: ((), done.gradient()),
        reduce=reduce,
    )


class Told(NamedTuple):
    """What the clients of :func:`mime` train with.

    Attributes:
        momentum: m.
        gradient: c.
    """

    momentum: PyTree
    gradient: PyTree


@part
def mime(beta: float) -> Correction:
    r"""Mime's momentum of the server, and gradients of which the cohort's mean is the anchor.

    .. math:: \beta m + (1 - \beta) \bigl(\nabla F_b(w) - \nabla F_b(w_{recv}) + c\bigr), \qquad
              c = \sum_k p_k \nabla F_k(w_{recv}), \qquad m \leftarrow \beta m + (1 - \beta) c

    m starts at 0; p_k are the shares of the weights by which the updates are averaged. c needs an
    exchange before the training: the clients of the round send their whole gradients, and all are
    sent the mean. A robust aggregator guards it too.

    Args:
        beta: β, in [0, 1); 0 leaves variance-reduced SGD (SVRG, with the cohort as its sum).

    Returns:
        A correction with m on the server. Clients send their whole gradients, which cost a pass
        over their samples each; m and c travel with the model. A step costs two gradients.

    Raises:
        ValueError: if beta is out of range. In training, if the clients were not asked: outside of
            a round.

    Source: Karimireddy et al. 2021 <https://arxiv.org/abs/2008.03606>, Algorithm 1 (Mime with
    momentum).

    Example:
        >>> told = Told(jnp.array([1.0]), jnp.array([5.0]))
        >>> mime(0.5).direction(jnp.array([-1.0]), jnp.zeros(1), None, (), told).tolist()
        [2.5]
    """
    _check_beta(beta)

    def direction(
        gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        if not isinstance(common, Told):
            raise ValueError("mime needs a cohort whose gradients are asked for: it is for rounds")
        return _mixed(beta, common.momentum, tree.sum_of(gradient, common.gradient))

    def reduce(
        told: Told, messages: PyTree, weights: Array, clients: int, aggregator: Aggregator
    ) -> PyTree:
        after = _mixed(beta, told.momentum, told.gradient)
        return tree.select(jnp.any(weights > 0), after, told.momentum)

    return Correction(
        client_state=lambda params: (),
        shared_state=lambda params: jax.tree.map(jnp.zeros_like, params),
        direction=direction,
        finish=lambda params, context, own, common, done: ((), ()),
        reduce=reduce,
        survey=CorrectionSurvey(ask=lambda gradient, context: gradient(), tell=Told),
        anchored=True,
        needs=(ONE_MODEL, NO_FLIGHT, FROM_RECEIVED),
    )


@part
def client_momentum(alpha: float, lr: float, momentum: float = 0.0) -> Correction:
    r"""FedCM's momentum: every local step goes a part of the way of the cohort before.

    .. math:: \alpha \nabla F_b(w) + (1 - \alpha) \Delta_t, \qquad
              \Delta_{t+1} = -\frac{1}{\eta K} \sum_k p_k (w_k - w_t), \qquad
              K = \sum_k p_k T_k

    Δ starts at 0; p_k are the shares of the weights by which the updates are averaged. If the
    clients' SGD has momentum, the total weight of a client's gradients
    (:func:`fedjax_sim.preaggregation.normalise`) takes the place of T_k, so that Δ has the length
    of a gradient. The server knows Δ from the updates: clients send nothing besides. A
    ``rate_by_round`` shortens Δ with the steps.

    Args:
        alpha: α, in (0, 1]; 1 leaves the gradient as it is, bit for bit.
        lr: η of the clients' SGD.
        momentum: of the clients' SGD.

    Returns:
        A correction with Δ on the server, as large as the parameters; it travels with the model.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xu et al. 2021 <https://arxiv.org/abs/2106.10874>, Algorithm 1.
    """
    if concrete(alpha) and not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")

    def follow(common: PyTree, step: Variables, gathered: Gathered) -> PyTree:
        weights = gathered.weights
        counts = accumulated(gathered.cohort.info.steps, momentum)
        share = weights / tree.row_sum(weights)
        steps = tree.row_sum(jnp.where(weights > 0, share * counts, 0))
        # If every last minibatch was dropped, nobody took a step.
        length = jnp.where(steps > 0, lr * steps, 1)
        return tree.select(steps > 0, tree.scale(-1 / length, step.params), common)

    return Correction(
        client_state=lambda params: (),
        shared_state=lambda params: jax.tree.map(jnp.zeros_like, params),
        direction=lambda gradient, params, context, own, common: _mixed(
            1 - alpha, common, gradient
        ),
        finish=lambda params, context, own, common, done: ((), ()),
        reduce=lambda common, messages, weights, clients, aggregator: common,
        follow=follow,
        needs=(ONE_MODEL, NO_FLIGHT, sgd_of("lr", lr, momentum), FRESH),
    )


def _check_beta(beta: float) -> None:
    if concrete(beta) and not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}")


def _mixed(beta: float, momentum: PyTree, gradient: PyTree) -> PyTree:
    """``β m + (1 - β) g``."""
    return jax.tree.map(
        lambda m, g: jnp.asarray(beta, g.dtype) * m + jnp.asarray(1 - beta, g.dtype) * g,
        momentum,
        gradient,
    )
