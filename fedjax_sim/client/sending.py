"""What clients send in place of their updates: codes, clips, noise, attacks; in order.

An attack comes first: a code then encodes what is forged, and a clip bounds it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.attacks import alie, gaussian, ipm, mimic, optimised, sign_flip
from fedjax_sim.base import Array, ClientData, PyTree, Sending, Sent, Variables, concrete, part
from fedjax_sim.compression import compressed, low_rank
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_LOSS_READ, NOTHING_TOLD, ONE_MODEL, ONE_WITHHOLDS
from fedjax_sim.privacy import noise

__all__ = [
    "alie",
    "clip_norm",
    "compressed",
    "finite_only",
    "gaussian",
    "ipm",
    "low_rank",
    "mimic",
    "noise",
    "optimised",
    "relevant_only",
    "sign_flip",
]


class Heading(NamedTuple):
    """What a client of :func:`relevant_only` keeps.

    Attributes:
        last: the model that it received last; at the start, the initial one.
        signs: ``int8``, of the parameters' change from one received model to the next, the newest
            that changed anything; 0 before.
    """

    last: PyTree
    signs: PyTree


@part
def relevant_only(relevance: float) -> Sending:
    r"""Clients withhold updates of which too few signs are those of the server's last step.

    .. math:: k \text{ sends if } \frac1n \sum_{i=1}^n
              \bigl[ \operatorname{sgn}(\Delta_{k,i}) = \operatorname{sgn}(\bar u_i) \bigr]
              \ge v

    over the n parameters. :math:`\bar u` is the way from the model that the client received at its
    last visit to the one that it received now: nothing has to be sent for it. If all clients visit
    in every round it is the last global update, as in the paper. A client sends before it has seen
    the server move, and if it did not move of late (nobody sent), the step before counts. What is
    withheld is no upload.

    Args:
        relevance: v, the share of signs that must agree; 0 withholds nothing.

    Returns:
        A part of ``sending`` with :class:`Heading` on every client: a model and a quarter.

    Raises:
        ValueError: if relevance is not in [0, 1].

    Source: Wang, Wang, Li 2019 <https://doi.org/10.1109/ICDCS.2019.00099>.

    >>> part = relevant_only(0.6)
    >>> w = Variables(jnp.zeros(3), {})
    >>> kept = part.hear(part.init(w, None), Variables(jnp.array([1.0, -2.0, 0.5]), {}))
    >>> sends = lambda *u: part.send(None, kept, Variables(jnp.array(u), {}), (), None).present
    >>> bool(sends(0.1, -0.1, -9.0)), bool(sends(0.1, 0.1, -9.0))  # 2 of 3, 1 of 3
    (True, False)
    """
    if concrete(relevance) and not 0 <= relevance <= 1:
        raise ValueError(f"relevance must be in [0, 1], got {relevance}")

    def init(variables: Variables, data: ClientData) -> Heading:
        none = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.int8), variables.params)
        return Heading(variables.params, none)

    def hear(kept: Heading, received: Variables) -> Heading:
        moved = _signs(tree.subtract(received.params, kept.last))
        return Heading(received.params, tree.select(_any(moved), moved, kept.signs))

    def send(key: Array, kept: Heading, update: Variables, message: PyTree, client: Array) -> Sent:
        del key, client
        same = jax.tree.map(jnp.equal, _signs(update.params), kept.signs)
        size = sum(leaf.size for leaf in jax.tree.leaves(same))
        share = sum(jnp.sum(leaf, dtype=jnp.int32) for leaf in jax.tree.leaves(same)) / size
        return Sent(update, message, kept, ~_any(kept.signs) | (share >= relevance))

    needs = (ONE_MODEL,)
    return Sending(init=init, send=send, withholds=True, hear=hear, needs=needs)


def _signs(step: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.sign(a).astype(jnp.int8), step)


def _any(signs: PyTree) -> Array:
    """``bool[]``, whether any of them is not 0."""
    return jnp.any(jnp.stack([jnp.any(leaf) for leaf in jax.tree.leaves(signs)]))


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
