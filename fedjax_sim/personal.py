"""The model that a client itself uses: the one it is sent, a fine-tuned one, one of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.base import (
    Array,
    ClientView,
    Done,
    Drift,
    LocalUpdate,
    Personal,
    PyTree,
    Trained,
    Variables,
)


def received() -> Personal:
    """The model that the client would start from: of several at the server, its own choice."""
    return lambda key, received, client, memory: received


def fine_tuned(local: LocalUpdate) -> Personal:
    r"""The model that the client would start from, trained on the client's own samples.

    Args:
        local: how; it starts as at a client's first visit, and nothing of it is kept.

    Returns:
        The personal model.

    Raises:
        ValueError: when it first tunes, if local compresses.

    Source: Wang et al., "Federated evaluation of on-device personalization", 2019.
    """

    def tune(key: Array, received: Variables, client: ClientView, memory: PyTree) -> Variables:
        _refuse_compressed(local, received)
        start = local.memory(received), local.shared(received)
        return local.train(key, received, client, *start).variables

    return tune


class Kept(NamedTuple):
    """What a client of :func:`ditto` keeps.

    Attributes:
        own: v_k.
        inner: what the local update inside keeps.
    """

    own: Variables
    inner: PyTree


def ditto(local: LocalUpdate, lam: float, own: LocalUpdate | None = None) -> LocalUpdate:
    r"""Beside the shared model every client trains one of its own, held near the shared one.

    .. math:: \min_{v_k} h_k(v_k; w_t) = F_k(v_k) + \frac{\lambda}{2} \lVert v_k - w_t \rVert^2

    At each visit v_k goes on from where it was, towards the w_t that the client has just received;
    w_k is trained, sent and reported as without it. v_k starts as the server's first model and
    never leaves the client. Wrap what changes the message (compression) around this. The terms that
    local adds to w_k's gradients against drift are no part of h_k and do not act on v_k.

    Args:
        local: trains w_k.
        lam: λ; 0 trains v_k on the client's samples alone.
        own: trains v_k, with drift terms of its own if it has any; None: as w_k, on the same
          minibatches, without w_k's drift terms. Its optimiser starts anew at each visit.

    Returns:
        The local update; its memory has a model for every client.

    Raises:
        ValueError: if lam is negative; when the state is initialised, if v_k would be compressed.

    Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
    personalization", ICML 2021, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((4,), 2)
        >>> local = ditto(local_sgd(empirical_risk(model), optax.sgd(0.1)), lam=0.1)
        >>> client = ClientView(jnp.ones((5, 4)), jnp.zeros(5, jnp.int32), jnp.arange(5),
        ...                     jnp.int32(0), jnp.int32(5), 5)
        >>> w = model.init(jax.random.key(0))
        >>> kept = local.train(jax.random.key(1), w, client, local.memory(w), ((), ())).memory
        >>> jax.tree.map(jnp.shape, kept.own.params)["Dense_0"]["Dense_0"]["kernel"]
        (4, 2)
    """
    if not lam >= 0:
        raise ValueError(f"lam must be at least 0, got {lam}")
    solver = (own or local.change(drift=None)).change(drift=(_towards_received(lam),))

    def memory(variables: Variables) -> Kept:
        _refuse_compressed(solver, variables)
        return Kept(variables, local.memory(variables))

    def train(
        key: Array, variables: Variables, client: ClientView, memory: Kept, shared: PyTree
    ) -> Trained:
        trained = local.train(key, variables, client, memory.inner, shared)
        # A memory that begins at the received model has it as the anchor of the drift term.
        start = solver.memory(variables), solver.shared(variables)
        moved = solver.train(key, memory.own, client, *start).variables
        return trained._replace(memory=Kept(moved, trained.memory))

    def change(**settings: Any) -> LocalUpdate:
        return ditto(local.change(**settings), lam, own and own.change(**settings))

    return local._replace(
        memory=memory,
        train=train,
        change=change,
        peers=local.peers or solver.peers,
    )


def kept() -> Personal:
    """The client's own model of :func:`ditto`, as its last visit left it."""

    def own(key: Array, received: Variables, client: ClientView, memory: PyTree) -> Variables:
        def is_kept(part: PyTree) -> bool:
            return isinstance(part, Kept)

        # Other wrappers may have put it deeper.
        found = [part for part in jax.tree.leaves(memory, is_leaf=is_kept) if is_kept(part)]
        if not found:
            raise ValueError("kept() needs a local update with a personal model; see ditto")
        return found[0].own

    return own


def _refuse_compressed(local: LocalUpdate, variables: Variables) -> None:
    if local.upload_bytes(variables, 1) < tree.num_bytes(variables):
        raise ValueError(
            "a personal model is never sent, so what trains it must not compress it: write "
            "compressed(ditto(local)), or fine_tuned(local) beside compressed(local)"
        )


def _towards_received(lam: float) -> Drift:
    """λ (v − w), with w the model that its memory began at."""

    def gradient(params: PyTree, start: PyTree, anchor: PyTree, shared: PyTree) -> PyTree:
        return jax.tree.map(lambda v, w: jnp.asarray(lam, v.dtype) * (v - w), params, anchor)

    def finish(
        params: PyTree, start: PyTree, anchor: PyTree, shared: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return anchor, ()

    return Drift(
        memory=lambda params: params,
        shared=lambda params: (),
        gradient=gradient,
        finish=finish,
        absorb=lambda shared, messages, samples, clients: shared,
    )
