"""Corrections by a momentum that the server keeps and all local steps follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Context,
    Correction,
    Decay,
    Done,
    Fraction,
    Gathered,
    Need,
    Positive,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import sgd_of
from fedjax_sim.engine.needs import FRESH, FROM_RECEIVED, NO_FLIGHT, ONE_MODEL, OWN_ROWS
from fedjax_sim.engine.reach import gradient_weight


class global_momentum(Correction):
    r"""MimeLite's server momentum, which is constant during local training.

    .. math:: \beta m + (1 - \beta) \nabla F_b(w), \qquad
              m \leftarrow \beta m + (1 - \beta) \sum_k p_k \nabla F_k(w_{recv})

    m starts at 0; p_k are the shares of the weights by which the updates are averaged. Clients send
    their whole gradients, each of which costs a pass over the client's samples; m travels with the
    model.

    Args:
        beta: β, in [0, 1); 0 leaves the gradient as it is, bit for bit.

    Source: Karimireddy et al. 2021 <https://arxiv.org/abs/2008.03606>, Algorithm 1 (MimeLite with
    momentum).
    """

    beta: Decay

    def shared_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return _mix(self.beta, common, gradient)

    def finish(
        self, params: PyTree, context: Context, own: PyTree, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return (), done.gradient()

    def reduce(
        self,
        momentum: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> PyTree:
        anyone = jnp.any(weights > 0)
        mean = aggregator(messages, jnp.where(anyone, weights, 1))
        return tree.select(anyone, _mix(self.beta, momentum, mean), momentum)


class MimeState(NamedTuple):
    """The state with which the clients of :class:`mime` train.

    Attributes:
        momentum: m.
        gradient: c.
    """

    momentum: PyTree
    gradient: PyTree


class mime(Correction):
    r"""Mime's server momentum, on gradients whose variance the cohort's mean gradient reduces.

    .. math:: \beta m + (1 - \beta) \bigl(\nabla F_b(w) - \nabla F_b(w_{recv}) + c\bigr), \qquad
              c = \sum_k p_k \nabla F_k(w_{recv}), \qquad m \leftarrow \beta m + (1 - \beta) c

    m starts at 0; p_k are the shares of the weights by which the updates are averaged. c needs an
    exchange before training: the clients of the round send their whole gradients, each of which
    costs a pass over the client's samples, and all receive the mean. A robust aggregator protects
    it too. m and c travel with the model. A step costs two gradients.

    Args:
        beta: β, in [0, 1); 0 leaves variance-reduced SGD (SVRG, with the cohort as its sum).

    Raises:
        ValueError: in training, if there was no exchange: outside a round.

    Source: Karimireddy et al. 2021 <https://arxiv.org/abs/2008.03606>, Algorithm 1 (Mime with
    momentum).

    Example:
        >>> state = MimeState(jnp.array([1.0]), jnp.array([5.0]))
        >>> mime(0.5).direction(jnp.array([-1.0]), jnp.zeros(1), None, (), state).tolist()
        [2.5]
    """

    beta: Decay

    anchored = True
    needs = (ONE_MODEL, NO_FLIGHT, FROM_RECEIVED)

    def shared_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def ask(self, gradient: Callable[[], PyTree], context: Context) -> PyTree:
        return gradient()

    def tell(self, momentum: PyTree, gradient: PyTree) -> MimeState:
        return MimeState(momentum, gradient)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        if not isinstance(common, MimeState):
            raise ValueError(
                "mime needs the exchange of gradients before training, which only rounds have"
            )
        return _mix(self.beta, common.momentum, tree.sum_of(gradient, common.gradient))

    def reduce(
        self,
        state: MimeState,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> PyTree:
        after = _mix(self.beta, state.momentum, state.gradient)
        return tree.select(jnp.any(weights > 0), after, state.momentum)


class client_momentum(Correction):
    r"""FedCM's momentum: every local step is mixed with the previous round's mean update.

    .. math:: \alpha \nabla F_b(w) + (1 - \alpha) \Delta_t, \qquad
              \Delta_{t+1} = -\frac{1}{\eta K} \sum_k p_k (w_k - w_t), \qquad
              K = \sum_k p_k T_k

    Δ starts at 0; p_k are the shares of the weights by which the updates are averaged. If the
    clients' SGD has momentum, the total weight of a client's gradients
    (:func:`fedjax_sim.preaggregation.normalise`) replaces T_k, so that Δ has the length of a
    gradient. The server computes Δ, which is as large as the parameters, from the updates, and
    sends it with the model; clients send nothing more. A ``rate_by_round`` shortens Δ with the
    steps.

    Args:
        alpha: α, in (0, 1]; 1 leaves the gradient as it is, bit for bit.
        lr: η of the clients' SGD.
        momentum: momentum of the clients' SGD.

    Source: Xu et al. 2021 <https://arxiv.org/abs/2106.10874>, Algorithm 1.
    """

    alpha: Fraction
    lr: Positive
    momentum: Decay = 0.0

    reads_samples = False

    @property
    def needs(self) -> tuple[Need, ...]:
        return (ONE_MODEL, NO_FLIGHT, OWN_ROWS, sgd_of("lr", self.lr, self.momentum), FRESH)

    def shared_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return _mix(1 - self.alpha, common, gradient)

    def follow(self, common: PyTree, step: Variables, gathered: Gathered) -> PyTree:
        weights = gathered.weights
        counts = gradient_weight(gathered.cohort.info.steps, self.momentum)
        share = weights / tree.row_sum(weights)
        steps = tree.row_sum(jnp.where(weights > 0, share * counts, 0))
        # If every last minibatch was dropped, no client took a step.
        length = jnp.where(steps > 0, self.lr * steps, 1)
        return tree.select(steps > 0, tree.scale(-1 / length, step.params), common)


def _mix(beta: float, momentum: PyTree, gradient: PyTree) -> PyTree:
    """Returns ``β m + (1 - β) g``."""
    return jax.tree.map(
        lambda m, g: jnp.asarray(beta, g.dtype) * m + jnp.asarray(1 - beta, g.dtype) * g,
        momentum,
        gradient,
    )
