"""Updates and server steps that travel by a code, and what it leaves out, which is sent later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_sim.base import Array, Gathered, PyTree, Sending, Sent, Server, Variables, part
from fedjax_sim.compression._codes import Compressor
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Client, stream


@part
def compressed(compressor: Compressor, *, feedback: bool = True) -> Sending:
    r"""Sends updates by a lossy code.

    .. math:: \tilde\Delta_k = C(\Delta_k + r_k), \qquad
              r_k \leftarrow \Delta_k + r_k - \tilde\Delta_k

    The client keeps its residual :math:`r_k` (n floats) until it sends again. The receiver adds
    :math:`\tilde\Delta_k` to the model that it knows the client received: a server does, even one
    that passes models on (RADFed); a model that goes from client to client without a server
    (gossip) is counted whole. A client that keeps its model for several rounds (phase shift) sends
    one message, at the end. The other variables (BatchNorm statistics) go whole, and so does what
    is sent beside the model.

    Args:
        compressor: the code C.
        feedback: whether to keep the residual; without it, what the code leaves out is lost.

    Returns:
        A part of ``sending``.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2 (clients).

    >>> from fedjax_sim.compression import top_k
    >>> compressed(top_k(0.01)).bytes(Variables(jnp.zeros(10_000), {}))
    502
    """

    def send(
        key: Array, residual: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        del client
        params, residual = _coded(compressor, key, update.params, residual)
        return Sent(update._replace(params=params), message, residual)

    return Sending(
        init=lambda variables, data: _no_residual(variables, feedback=feedback),
        send=send,
        bytes=lambda variables: _message_bytes(compressor, variables, 1),
    )


@part
def compress_server(server: Server, compressor: Compressor, *, feedback: bool = True) -> Server:
    r"""A server that moves by a compressed step, so that clients can follow it by messages.

    .. math:: \tilde\Delta = C(\Delta + r), \qquad r \leftarrow \Delta + r - \tilde\Delta, \qquad
              w_{t+1} = w_t + \tilde\Delta

    with Δ the step of the wrapped server. A client that returns after τ updates needs all τ
    messages, or the model whole if that is less. τ is taken as the mean number of updates between
    two downloads: N/m if m clients a round are sent the server model. If the numbers vary about
    this mean, the traffic is at most what is counted. The initial model is taken as known, since a
    seed gives it. A model that is not the server's (redistributed, of a cluster) is sent whole.

    Args:
        server: what moves.
        compressor: the code C.
        feedback: whether to keep the residual r.

    Returns:
        A server.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2 (server), and its
    update caching for clients that take part now and then, which sends a sum of τ messages, of at
    most τ times the bytes.

    >>> from fedjax_sim.compression import ternary
    >>> from fedjax_sim.server.update import replace
    >>> w = Variables(jnp.zeros(10_000), {})
    >>> server = compress_server(replace(), ternary(0.01))
    >>> [server.download_bytes(w, updates) for updates in (1, 5, 1000)]
    [118, 590, 40000]
    """

    def init(variables: Variables) -> PyTree:
        return server.init(variables), _no_residual(variables, feedback=feedback)

    def update(
        key: Array, step: Variables, old: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        inner, residual = state
        step, inner = server.update(key, step, old, inner, gathered)
        params, residual = _coded(compressor, key, step.params, residual)
        return step._replace(params=params), (inner, residual)

    def download_bytes(variables: Variables, updates: int) -> int:
        return min(tree.num_bytes(variables), _message_bytes(compressor, variables, updates))

    return server._replace(init=init, update=update, download_bytes=download_bytes, replaces=False)


def _coded(
    compressor: Compressor, key: Array, step: PyTree, residual: PyTree
) -> tuple[PyTree, PyTree]:
    """What arrives of a ``step``, and the new residual."""
    flat, unravel = ravel_pytree(step)
    wide = flat.astype(jnp.float32)
    feedback = residual is not None
    wide = wide + residual if feedback else wide
    arrived = compressor.compress(stream(key, Client.COMPRESSION), wide)
    return unravel(arrived.astype(flat.dtype)), wide - arrived if feedback else None


def _no_residual(variables: Variables, *, feedback: bool) -> Array | None:
    size = sum(a.size for a in jax.tree.leaves(variables.params))
    return jnp.zeros(size, jnp.float32) if feedback else None


def _message_bytes(compressor: Compressor, variables: Variables, messages: int) -> int:
    """So many compressed steps, and the other variables once."""
    size = sum(a.size for a in jax.tree.leaves(variables.params))
    return messages * compressor.bytes(size) + tree.num_bytes(variables.state)
