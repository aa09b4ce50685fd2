"""Changes of the final model by the server, after the last round."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Count,
    Finish,
    Model,
    Natural,
    Need,
    Positive,
    PyTree,
    Variables,
    for_classes,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import of_class, sweep
from fedjax_sim.engine.needs import AS_IT_IS, ONE_MODEL, WHOLE_MODEL
from fedjax_sim.models import leaves
from fedjax_sim.models.leaves import features_of, kernel_of
from fedjax_sim.tasks.losses import cross_entropy

__all__ = ["calibrated"]

AT_ONCE = 64  # samples of a client whose features are computed together
SERVER_EVALUATED = Need(
    "flight",
    "the server's model to be the one that is evaluated",
    lambda parts: parts.flight.evaluated == "server" and not parts.flight.serverless,
    "evaluated='server', and a flight with a server",
)


class Moments(NamedTuple):
    """Sums over the samples of each class, of one client or of all clients."""

    samples: Array  # int32[M], the number of samples
    first: Array  # [M, D], the sum of the features z
    second: Array  # [M, D, D], the sum of the products z zᵀ


@for_classes
class calibrated(Finish):
    r"""CCVR: trains the head on features drawn from a normal distribution for each class.

    .. math:: \mu_j = \frac1{n_j} \sum_{i : y_i = j} z_i, \qquad
              \Sigma_j = \frac{1}{n_j - 1} \sum_{i : y_i = j} (z_i - \mu_j) (z_i - \mu_j)^\top,
              \qquad \tilde z \sim \mathcal N(\mu_j, \Sigma_j)

    over the samples of all clients, who send the moments of their own samples; z are the features
    of the final model. Starting from its weights, the head takes steps of gradient descent on the
    mean cross-entropy of the drawn features, equally many for each class that any client has. The
    rest of the model is unchanged; its head must compute its outputs.

    Traffic: a model down to each client, 4 M (D² + D + 1) bytes up from each.

    Args:
        model: the model that is trained.
        classes: M.
        samples: the number of features drawn for each class.
        steps: steps of gradient descent, each on all drawn features; 0 changes nothing.
        lr: learning rate of these steps.

    Raises:
        ValueError: if the model has no features, its head has more than a matrix and a bias, or a
            number is out of range.

    Source: Luo et al. 2021 <https://arxiv.org/abs/2106.05001>, section 4.2 and Algorithm 1.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.finish.calibrated(fs.models.mlp((8, 8, 1), 10), 10, lr=0.5)
        calibrated(<Model>, 10, lr=0.5)
    """

    model: Model
    classes: Count
    _: dataclasses.KW_ONLY
    samples: Count = 200
    steps: Natural = 100
    lr: Positive = 0.1

    needs = (ONE_MODEL, WHOLE_MODEL, AS_IT_IS, SERVER_EVALUATED)

    def __post_init__(self) -> None:
        features_of(self.model), kernel_of(self.model)  # raise if it has none

    def tell(self, server: Variables, client: ClientView) -> Moments:
        features, kernel = features_of(self.model), kernel_of(self.model)
        dtype, width = kernel.dtype, kernel.shape[0]

        def add(sums: Moments, batch: Batch) -> Moments:
            (_, z), _ = features(server, batch.x, train=False, mask=batch.mask)
            member, z = of_class(batch, self.classes), z.astype(dtype)
            new = Moments(
                jnp.sum(member, axis=0).astype(jnp.int32),
                member.astype(dtype).T @ z,
                jnp.einsum("bm,bd,be->mde", member.astype(dtype), z, z),
            )
            return tree.sum_of(sums, new)

        zero = Moments(
            jnp.zeros(self.classes, jnp.int32),
            jnp.zeros((self.classes, width), dtype),
            jnp.zeros((self.classes, width, width), dtype),
        )
        return sweep(client, AT_ONCE, add, zero)

    def move(self, key: Array, server: Variables, total: Moments) -> Variables:
        z, known = draw_features(key, total, self.samples), total.samples > 0
        labels = jnp.repeat(jnp.arange(self.classes, dtype=jnp.int32), self.samples)

        def loss(head: PyTree) -> Array:
            losses = cross_entropy(outputs(head, z.reshape(-1, z.shape[-1])), labels)
            return jnp.mean(losses.reshape(self.classes, -1), where=known[:, None])

        def descend(_: Array, head: PyTree) -> PyTree:
            return tree.subtract(head, tree.scale(self.lr, jax.grad(loss)(head)))

        start = tree.only(leaves.head(self.model)(server).params, server.params)
        end = jax.lax.fori_loop(0, self.steps, descend, start)
        return server._replace(params=tree.filled(end, server.params))


def draw_features(key: Array, moments: Moments, samples: int) -> Array:
    """Draws features ``[M, samples, D]`` from the normal distribution of each class."""
    first, second = moments.first, moments.second
    n = jnp.maximum(moments.samples, 1).astype(first.dtype)[:, None]
    mean = first / n
    spread = second - n[..., None] * mean[:, :, None] * mean[:, None, :]
    root = cholesky(spread / jnp.maximum(n - 1, 1)[..., None])
    noise = jax.random.normal(key, (len(mean), samples, mean.shape[1]), first.dtype)
    return mean[:, None] + jnp.einsum("mve,mde->mvd", noise, root)


def cholesky(spread: Array) -> Array:
    """Returns the Cholesky factors ``L [M, D, D]`` of the covariances ``spread [M, D, D]``.

    Directions without variance, such as a unit that is never active, have a column of zeros.
    LAPACK's decompositions return NaN there, and hung in a program for two CPU devices (jax
    0.10.2).

    >>> cholesky(jnp.array([[[4.0, 0, 2], [0, 0, 0], [2, 0, 5]]]))[0].tolist()
    [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 2.0]]
    """
    variances = jnp.diagonal(spread, axis1=1, axis2=2)
    least = 1e-6 * jnp.max(variances, axis=1)

    def column(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, found = carry
        pivot = rest[:, j, j]
        some = pivot > least
        scale = jnp.where(some, jax.lax.rsqrt(jnp.where(some, pivot, 1)), 0)
        new = rest[:, :, j] * scale[:, None]
        return rest - new[:, :, None] * new[:, None, :], found.at[:, :, j].set(new)

    start = spread, jnp.zeros_like(spread)
    return jax.lax.fori_loop(0, spread.shape[-1], column, start)[1]


def outputs(head: PyTree, z: Array) -> Array:
    """Returns ``z W + b``, or ``z W`` if the head has no bias."""
    found = jax.tree.leaves(head)
    (kernel,), vectors = ([w for w in found if w.ndim == n] for n in (2, 1))
    return sum((b[None] for b in vectors), z @ kernel)
