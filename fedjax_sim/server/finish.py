"""What the server makes of the final model, after the last round."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Finish,
    Model,
    Need,
    PyTree,
    Variables,
    concrete,
    for_classes,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import of_class, sweep
from fedjax_sim.engine.needs import AS_IT_IS, ONE_MODEL, WHOLE_MODEL
from fedjax_sim.models import leaves
from fedjax_sim.models.heads import features_of, kernel_of
from fedjax_sim.tasks.losses import cross_entropy

AT_ONCE = 64  # samples of a client whose features are computed together
_NEEDS = (
    ONE_MODEL,
    WHOLE_MODEL,
    AS_IT_IS,
    Need(
        "evaluated",
        "the server's model to be the one that is evaluated",
        lambda parts: parts.evaluated == "server" and not parts.schedule.serverless,
        "evaluated='server', and a schedule with a server",
    ),
)


class Moments(NamedTuple):
    """Sums over the samples of each class, of one client or of all.

    Attributes:
        samples: ``int32[M]``, how many.
        first: ``[M, D]``, of the features z.
        second: ``[M, D, D]``, of the products z zᵀ.
    """

    samples: Array
    first: Array
    second: Array


@part
@for_classes
def calibrated(
    model: Model, classes: int, *, samples: int = 200, steps: int = 100, lr: float = 0.1
) -> Finish:
    r"""CCVR: the head learns from features drawn of a normal distribution for each class.

    .. math:: \mu_j = \frac1{n_j} \sum_{i : y_i = j} z_i, \qquad
              \Sigma_j = \frac{1}{n_j - 1} \sum_{i : y_i = j} (z_i - \mu_j) (z_i - \mu_j)^\top,
              \qquad \tilde z \sim \mathcal N(\mu_j, \Sigma_j)

    over the samples of all clients, of which each sends the moments of its own; z are the features
    by the final model. From its weights on, the head takes steps of gradient descent on the mean
    cross-entropy of the drawn features, as many of every class that anyone has. The rest of the
    model stays as it is; its outputs must be those of its head.

    Args:
        model: the model that trains.
        classes: M.
        samples: the features that are drawn of each class.
        steps: of gradient descent, on all of them; 0 changes nothing.
        lr: its rate.

    Returns:
        A finish. Traffic: a model down to each client, 4 M (D² + D + 1) bytes up from each.

    Raises:
        ValueError: if the model has no features, its head is not a matrix and a bias at most, or a
            number is out of range.

    Source: Luo et al. 2021 <https://arxiv.org/abs/2106.05001>, section 4.2 and Algorithm 1.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.finish.calibrated(fs.models.mlp((8, 8, 1), 10), 10, lr=0.5)
        calibrated(<Model>, 10, lr=0.5)
    """
    for name, number, least in (
        ("classes", classes, 1),
        ("samples", samples, 1),
        ("steps", steps, 0),
    ):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    features, head, kernel = features_of(model), leaves.head(model), kernel_of(model)
    dtype, width = kernel.dtype, kernel.shape[0]

    def tell(server: Variables, client: ClientView) -> Moments:
        def add(sums: Moments, batch: Batch) -> Moments:
            (_, z), _ = features(server, batch.x, train=False, mask=batch.mask)
            mine, z = of_class(batch, classes), z.astype(dtype)
            new = Moments(
                jnp.sum(mine, axis=0).astype(jnp.int32),
                mine.astype(dtype).T @ z,
                jnp.einsum("bm,bd,be->mde", mine.astype(dtype), z, z),
            )
            return tree.sum_of(sums, new)

        none = Moments(
            jnp.zeros(classes, jnp.int32),
            jnp.zeros((classes, width), dtype),
            jnp.zeros((classes, width, width), dtype),
        )
        return sweep(client, AT_ONCE, add, none)

    def move(key: Array, server: Variables, total: Moments) -> Variables:
        z, known = drawn(key, total, samples), total.samples > 0
        chosen = head(server).params

        def loss(some: PyTree) -> Array:
            logits = outputs(some, z.reshape(-1, width))
            losses = cross_entropy(
                logits, jnp.repeat(jnp.arange(classes, dtype=jnp.int32), samples)
            )
            return jnp.mean(losses.reshape(classes, samples), where=known[:, None])

        def descend(_: Array, some: PyTree) -> PyTree:
            return tree.subtract(some, tree.scale(lr, jax.grad(loss)(some)))

        end = jax.lax.fori_loop(0, steps, descend, tree.only(chosen, server.params))
        return server._replace(params=tree.filled(end, server.params))

    return Finish(tell, move, needs=_NEEDS)


def drawn(key: Array, moments: Moments, samples: int) -> Array:
    """Features ``[M, samples, D]`` of the normal distribution of each class."""
    first, second = moments.first, moments.second
    n = jnp.maximum(moments.samples, 1).astype(first.dtype)[:, None]
    mean = first / n
    spread = second - n[..., None] * mean[:, :, None] * mean[:, None, :]
    root = factors(spread / jnp.maximum(n - 1, 1)[..., None])
    noise = jax.random.normal(key, (len(mean), samples, mean.shape[1]), first.dtype)
    return mean[:, None] + jnp.einsum("mve,mde->mvd", noise, root)


def factors(spread: Array) -> Array:
    """``L [M, D, D]``, lower triangular, of which L Lᵀ is each ``spread [M, D, D]``.

    Directions without spread, as of a unit that is never active, have a column of zeros. LAPACK's
    decompositions give NaN there, and hung in a program for two CPU devices (jax 0.10.2).

    >>> factors(jnp.array([[[4.0, 0, 2], [0, 0, 0], [2, 0, 5]]]))[0].tolist()
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
    """``z W + b``, or ``z W`` of a head without a bias."""
    found = jax.tree.leaves(head)
    (kernel,), vectors = ([w for w in found if w.ndim == n] for n in (2, 1))
    return sum((b[None] for b in vectors), z @ kernel)
