"""Mixup with means of samples that other clients have sent once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    Batch,
    ClientData,
    ClientView,
    Context,
    Count,
    Decay,
    Part,
    PyTree,
    SetupTraffic,
    Variables,
)
from fedjax_sim.base.arrays import one_array
from fedjax_sim.client.objective import ObjectiveWrapper
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import rows_at
from fedjax_sim.tasks.losses import masked_mean

__all__ = ["mixed_objective", "peer_means"]


class Peer(NamedTuple):
    r"""The mean of some samples of another client, with their labels.

    Attributes:
        x: ``f32[*feature]``, the mean input :math:`\bar x`, in the units of x.
        y: ``int32[K]``, the labels; :math:`\bar y` is the mean of their one-hot vectors.
        mask: ``bool[K]``, False for padding.
    """

    x: Array
    y: Array
    mask: Array


class peer_means(Part):
    r"""Adds a mean of another client's samples to every minibatch, as ``Batch.peer``.

    Each client divides its list into blocks of ``mix_samples``, the last one shorter, and sends the
    mean of each to all others before training starts:

    .. math:: \text{up} = 4 \sum_k \Bigl( d \Bigl\lceil \frac{n_k}{M_k} \Bigr\rceil + n_k \Bigr),
              \qquad \text{down} = (N - 1) \cdot \text{up}

    bytes for inputs of d numbers: a mean is sent as d floats, and its labels in 32 bits each, from
    which the mean label and the number of samples follow. A step takes the block of a sample that
    is drawn uniformly from all samples of other clients. The local update needs ``peers``.

    Args:
        mix_samples: M_k, the number of samples in a mean.

    Raises:
        ValueError: in the first step, if there is no other client, or x is a pytree: masks and
            tokens have no mean.

    Example:
        >>> start = np.array([0, 2, 7])
        >>> data = ClientData(np.zeros((7, 2)), np.zeros(7, int), np.arange(7), start, capacity=5)
        >>> peer_means(3).setup_traffic(None, data)  # 1 + 2 means of 2 floats each, 7 labels
        SetupTraffic(up=52, down=52)
    """

    mix_samples: Count

    for_classes = True

    def __call__(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        starts, count = client.starts, self.mix_samples
        if starts is None or len(starts) < 3:
            raise ValueError(
                "FedMix needs the samples of other clients: peers=True, and at least 2 clients"
            )
        others = starts[-1] - starts[0] - client.size
        drawn = starts[0] + jax.random.randint(key, (), 0, others, jnp.int32)
        entry = jnp.where(drawn < client.start, drawn, drawn + client.size)  # past the client's own
        owner = jnp.searchsorted(starts, entry, side="right").astype(jnp.int32) - 1
        first = starts[owner] + (entry - starts[owner]) // count * count
        relabel = None if client.relabels is None else client.relabels[owner]
        size = starts[owner + 1] - first
        block = client.part(first, size, relabel=relabel)
        rows = rows_at(block, jnp.arange(count, dtype=jnp.int32))
        x = one_array("x", rows.x, "FedMix: ")
        shown = jnp.where(tree.expand(rows.mask, x), x.astype(jnp.float32), 0)
        mean = jnp.sum(shown, axis=0) / jnp.sum(rows.mask).astype(jnp.float32)
        return batch._replace(peer=Peer(mean, rows.y, rows.mask))

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        """Counts the traffic of the means."""
        sizes = np.diff(np.asarray(data.start)).tolist()
        width = math.prod(one_array("x", data.x, "FedMix: ").shape[1:])
        up = 4 * sum(width * math.ceil(n / self.mix_samples) + n for n in sizes)
        return SetupTraffic(up, (len(sizes) - 1) * up)


class mixed_objective(ObjectiveWrapper):
    r"""Mixup with another client's mean, to first order in λ.

    .. math:: (1 - \lambda)\,\ell\bigl(f((1-\lambda)x), y\bigr)
              + \lambda\,\ell\bigl(f((1-\lambda)x), \bar y\bigr)
              + \lambda\,\frac{\partial \ell}{\partial x} \cdot \bar x

    averaged over the minibatch, with the derivative of :math:`\ell(f(x), y)` at
    :math:`(1-\lambda)x`. The last term is a directional derivative: its gradient costs a
    forward-mode pass over one gradient of the objective. Minibatches need a ``Peer``. Inputs become
    float32, in the units of x: raw pixels are scaled by 1 - λ before the model standardises them.

    Args:
        objective: the loss ℓ of a model f, linear in the label's distribution like the
          cross-entropy.
        mix_ratio: λ; with 0 it is the objective itself.

    Raises:
        ValueError: in the first step, if the minibatch has no peer.

    Source: Yoon et al. 2021 <https://arxiv.org/abs/2107.00233>, eq. 4.
    """

    mix_ratio: Decay

    for_classes = True

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        if batch.peer is None:
            raise ValueError("FedMix's objective needs Batch.peer: add peer_means to transforms")
        mix_ratio, peer = self.mix_ratio, batch.peer
        x = (1 - mix_ratio) * batch.x.astype(jnp.float32)

        def risk(params: PyTree, x: Array, y: Array) -> tuple[Array, PyTree]:
            return self.objective(params, state, batch._replace(x=x, y=y, peer=None), context)

        own, new_state = risk(params, x, batch.y)
        # One label for all samples at a time: the model, which sees no label, runs once.
        theirs = jax.vmap(lambda label: risk(params, x, jnp.full_like(batch.y, label))[0])(peer.y)
        slope = _slope(lambda w, x: risk(w, x, batch.y)[0], params, x, peer.x)
        others = masked_mean(theirs, peer.mask)
        return (1 - mix_ratio) * own + mix_ratio * others + mix_ratio * slope, new_state


def _slope(
    risk: Callable[[PyTree, Array], Array], params: PyTree, x: Array, direction: Array
) -> Array:
    r"""Returns the sum over samples of :math:`\partial\,\mathrm{risk} / \partial x_i \cdot \bar x`.

    Its gradient is forward-mode over reverse-mode. Reverse over reverse would transpose the
    convolutions' gradients, for which XLA has no fast kernel on CPU, and forward alone cannot pass
    their custom gradients.
    """
    along = jnp.broadcast_to(jnp.expand_dims(direction, 0), x.shape)

    @jax.custom_vjp
    def slope(params: PyTree) -> Array:
        return jnp.vdot(jax.grad(risk, argnums=1)(params, x), along)

    def forward(params: PyTree) -> tuple[Array, PyTree]:
        gradient = jax.value_and_grad(risk)
        return jax.jvp(lambda x: gradient(params, x), (x,), (along,))[1]

    def backward(gradient: PyTree, cotangent: Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: cotangent.astype(g.dtype) * g, gradient),)

    slope.defvjp(forward, backward)
    return slope(params)
