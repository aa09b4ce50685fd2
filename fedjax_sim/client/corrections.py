"""Corrections of local gradients, mostly against client drift: ``change(corrections=...)``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Context,
    Correction,
    Count,
    Done,
    Need,
    NonNegative,
    Positive,
    PyTree,
)
from fedjax_sim.client.momentum import client_momentum, global_momentum, mime
from fedjax_sim.client.skipping import scaffnew
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import dual_server
from fedjax_sim.engine.needs import MIRROR

__all__ = [
    "adaptive_proximal",
    "client_momentum",
    "dynamic",
    "global_momentum",
    "mime",
    "proximal",
    "scaffnew",
    "scaffold",
]

Option = Literal[1, 2]
"""The formula of SCAFFOLD's new client control variate, by its number in the paper."""


class proximal(Correction):
    r"""The gradient of FedProx's proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_{recv} \rVert^2, \qquad
              \nabla h_k(w) = \nabla F_k(w) + \mu (w - w_{recv})

    The norm is over all trainable parameters; w_recv is the model that the client received in this
    round.

    Args:
        mu: μ of the proximal term; 0 changes nothing, bit for bit.

    Source: Li et al. 2020 <https://arxiv.org/abs/1812.06127>, eq. 2.

    Example:
        >>> from fedjax_sim.base import Variables
        >>> received = Context(Variables(jnp.array([1.0]), {}), None, None)
        >>> proximal(0.5).direction(jnp.zeros(1), jnp.array([3.0]), received, (), ()).tolist()
        [1.0]
    """

    mu: NonNegative

    kind = "proximal"
    reads_samples = False

    @property
    def pull(self) -> float:
        return self.mu

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return tree.sum_of(gradient, _pull(self.mu, params, context))


class Mu(NamedTuple):
    """The server's state of :class:`adaptive_proximal`.

    Attributes:
        mu: ``f32[]``, μ of the next round.
        loss: ``f32[]``, the last round's training loss; NaN before the first round.
        falls: ``int32[]``, consecutive rounds with a lower loss since μ last decreased.
    """

    mu: Array
    loss: Array
    falls: Array


class adaptive_proximal(Correction):
    r"""The proximal term with a μ that follows the training loss.

    .. math:: \mu_{t+1} = \begin{cases}
              \mu_t + s & L_t > L_{t-1} \\
              \max(\mu_t - s, 0) & \text{after } p \text{ falls in a row} \\
              \mu_t & \text{otherwise} \end{cases}

    L_t is the mean training loss, without the term, over all samples that the round's cohort
    visited. The count of falls restarts after μ has decreased, and after a round in which the loss
    did not fall. The server keeps ``Mu``.

    Args:
        start: μ of the first round; the paper takes 0 on skewed data, where μ should have to rise,
          and 1 on IID data.
        step: s, by which μ changes.
        patience: p.

    Source: Li et al. 2020 <https://arxiv.org/abs/1812.06127>, section 5.3, on the choice of μ.

    Example:
        >>> term = adaptive_proximal()
        >>> shared_state = term.shared_state(jnp.zeros(1))
        >>> for loss in (1.0, 2.0):
        ...     messages = (jnp.array([loss]), jnp.array([8]))
        ...     shared_state = term.reduce(shared_state, messages, jnp.array([8.0]), 1, tree.mean)
        >>> round(float(shared_state.mu), 6)
        0.1
    """

    start: NonNegative = 0.0
    step: Positive = 0.1
    patience: Count = 5

    kind = "proximal"

    def shared_state(self, params: PyTree) -> Mu:
        return Mu(jnp.float32(self.start), jnp.float32(jnp.nan), jnp.int32(0))

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: Mu
    ) -> PyTree:
        return tree.sum_of(gradient, _pull(common.mu, params, context))

    def finish(
        self, params: PyTree, context: Context, own: PyTree, common: Mu, done: Done
    ) -> tuple[PyTree, PyTree]:
        return (), (done.info.loss, done.info.samples)

    def reduce(
        self,
        last: Mu,
        messages: tuple[Array, Array],
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> Mu:
        losses, visited = messages
        seen = jnp.where(weights > 0, visited, 0).astype(jnp.float32)
        anyone = jnp.any(seen > 0)
        loss = aggregator(losses, jnp.where(anyone, seen, 1))
        falls = jnp.where(loss < last.loss, last.falls + 1, 0)
        relax = falls >= self.patience
        mu = jnp.where(loss > last.loss, last.mu + self.step, last.mu)
        mu = jnp.where(relax, jnp.maximum(mu - self.step, 0), mu)
        new = Mu(mu, loss, jnp.where(relax, 0, falls))
        # If no client visited a sample, there is no loss to follow.
        return tree.select(anyone, new, last)


class scaffold(Correction):
    r"""SCAFFOLD's control variates.

    .. math:: w_k \leftarrow w_k - \eta\,(\nabla F_b(w_k) - c_k + c), \qquad
              c \leftarrow c + \frac1N \sum_{k \in U} (c_k^+ - c_k)

    All variates are 0 at the start. The client's new variate is

    .. math:: c_k^+ = \nabla F_k(w_{recv}) \text{ (option 1)}, \qquad
              c_k^+ = \frac{1}{T_k} \sum_b \nabla F_b(w_k) \text{ (option 2)}

    Option 2's mean of the minibatch gradients along the client's own T_k steps is, for plain SGD,
    the paper's :math:`c_k - c + (w_{recv} - w_k) / (T_k \eta)`; unlike that form it needs no η and
    stays a gradient under momentum, another correction or a projection. A client that took no step
    keeps its variate. BatchNorm statistics are not parameters and are never corrected. The sum over
    U is m times the aggregate of the changes: a robust aggregator protects the variate too. c_k on
    every client and c on the server are as large as the parameters; both travel with the model.

    Args:
        option: 1 costs a pass over the client's samples; 2 costs nothing.

    Source: Karimireddy et al. 2020 <https://arxiv.org/abs/1910.06378>, Algorithm 1.

    Example:
        >>> own, common = jnp.array([1.0]), jnp.array([0.25])
        >>> scaffold().direction(jnp.zeros(1), jnp.zeros(1), None, own, common).tolist()
        [-0.75]
    """

    option: Option = 2

    @property
    def path(self) -> bool:
        return self.option == 2

    @property
    def reads_samples(self) -> bool:
        return self.option == 1

    def client_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def shared_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return tree.sum_of(gradient, tree.subtract(common, own))

    def finish(
        self, params: PyTree, context: Context, own: PyTree, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        new = done.gradient() if self.option == 1 else done.path
        new = tree.select(done.info.steps > 0, new, own)
        return new, tree.subtract(new, own)

    def reduce(
        self, common: PyTree, messages: PyTree, weights: Array, clients: int, aggregator: Aggregator
    ) -> PyTree:
        present = (weights > 0).astype(jnp.float32)
        share = tree.row_sum(present) / clients

        def moved(c: Array, change: Array) -> Array:
            return jnp.where(share > 0, c + share.astype(c.dtype) * change, c)

        return jax.tree.map(moved, common, aggregator(messages, present))


class dynamic(Correction):
    r"""FedDyn's dynamic regulariser at the clients.

    .. math:: \nabla F_b(w) - h_k + \alpha (w - w_{recv}), \qquad
              h_k \leftarrow h_k - \alpha (w_k - w_{recv})

    h_k starts at 0, is as large as the parameters, and stays with its client. The server's half is
    :class:`fedjax_sim.server.dynamic` with the same α; with :class:`fedjax_sim.local.fedadmm` in
    its place the method is FedADMM.

    Args:
        alpha: α.

    Source: Acar et al. 2021 <https://arxiv.org/abs/2111.04263>, Algorithm 1.

    Example:
        >>> from fedjax_sim.base import Variables
        >>> received = Context(Variables(jnp.array([1.0]), {}), None, None)
        >>> h = jnp.array([0.25])
        >>> dynamic(0.5).direction(jnp.zeros(1), jnp.array([3.0]), received, h, ()).tolist()
        [0.75]
    """

    alpha: Positive

    reads_samples = False

    @property
    def dual(self) -> float:
        return self.alpha

    @property
    def needs(self) -> tuple[Need, ...]:
        return (dual_server(self.alpha), *MIRROR)

    def client_state(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return tree.subtract(tree.sum_of(gradient, _pull(self.alpha, params, context)), own)

    def finish(
        self, params: PyTree, context: Context, own: PyTree, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return tree.subtract(own, _pull(self.alpha, params, context)), ()


def _pull(mu: float | Array, params: PyTree, context: Context) -> PyTree:
    """Returns ``μ (w - w_recv)``."""
    return jax.tree.map(
        lambda w, start: jnp.asarray(mu).astype(w.dtype) * (w - start),
        params,
        context.received.params,
    )
