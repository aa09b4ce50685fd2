"""What clients send in place of their updates: codes, clips, noise, attacks; in order.

An attack comes first: a code then encodes what is forged, and a clip bounds it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.attacks import alie, gaussian, ipm, mimic, optimised, sign_flip
from fedjax_sim.base import Array, PyTree, Sending, Sent, Variables, part
from fedjax_sim.compression import compressed
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_LOSS_READ, NOTHING_TOLD, ONE_WITHHOLDS
from fedjax_sim.privacy import noise

__all__ = [
    "alie",
    "clip_norm",
    "compressed",
    "finite_only",
    "gaussian",
    "ipm",
    "mimic",
    "noise",
    "optimised",
    "sign_flip",
]


@part
def finite_only() -> Sending:
    r"""Skips clients whose update has a number that is NaN or infinite.

    .. math:: S_t \leftarrow \{k \in S_t : \Delta_k \text{ is finite}\}

    Such a client sends nothing, weighs nothing, and keeps what it had before its visit; it is
    counted in ``Metrics.skipped`` and ``Evaluation.skipped``. The round's loss is that of the
    others; where nobody is left it is NaN, which ends the run. It stands before codes and clips.

    Returns:
        A part of ``sending`` without state.

    >>> update = Variables(jnp.array([3.0, jnp.nan]), ())
    >>> sent = finite_only().send(jax.random.key(0), (), update, (), jnp.int32(0))
    >>> bool(sent.present), sent.update.params.tolist()
    (False, [0.0, 0.0])
    """

    def send(key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array) -> Sent:
        del key, client
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(update)]
        present = jnp.all(jnp.stack(finite))
        nothing = jax.tree.map(jnp.zeros_like, update)  # 0 times NaN would be NaN
        return Sent(tree.select(present, update, nothing), message, kept, present)

    return Sending(
        init=lambda variables, data: (),
        send=send,
        withholds=True,
        screens=True,
        needs=(NOTHING_TOLD, NO_LOSS_READ, ONE_WITHHOLDS),
    )


@part
def clip_norm(limit: float) -> Sending:
    r"""Scales every update down to a norm.

    .. math:: \Delta_k \leftarrow \min\Bigl(1, \frac{C}{\lVert \Delta_k \rVert}\Bigr) \Delta_k

    As a defence, after an attack, it is what the receiver does: no message moves a model by more
    than C, in any hop. The norm is over the trainable parameters; the state (BatchNorm statistics)
    is left as it is. An update without a finite norm becomes 0.

    Args:
        limit: C.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if limit is not positive.

    Source: Sun et al. 2019 <https://arxiv.org/abs/1911.07963>, section 4.

    >>> update = Variables(jnp.array([3.0, 4.0]), ())
    >>> sent = clip_norm(1.0).send(jax.random.key(0), (), update, (), jnp.int32(0)).update
    >>> sent.params.round(3).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")

    def send(key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array) -> Sent:
        del key, client
        norm = tree.norm(update.params)
        factor = jnp.minimum(1, limit / norm)  # 1 for no update: C / 0 is infinite

        def clipped(delta: Array) -> Array:
            return jnp.where(jnp.isfinite(norm), factor.astype(delta.dtype) * delta, 0)

        return Sent(update._replace(params=jax.tree.map(clipped, update.params)), message, kept)

    return Sending(init=lambda variables, data: (), send=send)
