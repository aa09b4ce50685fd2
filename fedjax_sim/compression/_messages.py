"""Updates and server steps sent in a lossy code, with error feedback."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_sim.base import (
    Array,
    ClientData,
    Gathered,
    Need,
    PyTree,
    Sending,
    Sent,
    Server,
    SetupTrafficOf,
    Variables,
)
from fedjax_sim.compression._codes import Compressor
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Client, stream


class compressed(Sending):
    r"""Sends updates in a lossy code.

    .. math:: \tilde\Delta_k = C(\Delta_k + r_k), \qquad
              r_k \leftarrow \Delta_k + r_k - \tilde\Delta_k

    The client keeps its residual :math:`r_k` (n floats) until it sends again. The receiver adds
    :math:`\tilde\Delta_k` to the model that it knows the client received. This also applies to a
    server that relays models (RADFed); a model that goes from client to client without a server
    (gossip) counts as a whole model. A client that keeps its model for several rounds (phase shift)
    sends one message, at the end. The other variables (BatchNorm statistics) and the message sent
    along with the model are not compressed.

    Args:
        compressor: the code C.
        feedback: whether to keep the residual; without it, what the code omits is lost.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2 (clients).

    >>> from fedjax_sim.compression import top_k
    >>> compressed(top_k(0.01)).bytes(Variables(jnp.zeros(10_000), {}))
    502
    """

    compressor: Compressor
    _: dataclasses.KW_ONLY
    feedback: bool = True

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        return _zero_residual(variables) if self.feedback else None

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        params, residual, size = _coded(self.compressor, key, update.params, kept)
        counted = size + tree.num_bytes(update.state)
        sent = jnp.asarray(counted, jnp.int32) if self.measured else None
        return Sent(update._replace(params=params), message, residual, bytes=sent)

    def bytes(self, variables: Variables) -> int:
        return _message_bytes(self.compressor, variables, 1)

    @property
    def measured(self) -> bool:
        return self.compressor.measured


class compress_server(Server):
    r"""A server that takes compressed steps, which it can send to clients instead of models.

    .. math:: \tilde\Delta = C(\Delta + r), \qquad r \leftarrow \Delta + r - \tilde\Delta, \qquad
              w_{t+1} = w_t + \tilde\Delta

    with Δ the step of the wrapped server. A client that returns after τ updates needs all τ
    messages, or the whole model if that is smaller. τ is taken as the mean number of updates
    between two downloads: N/m if m clients per round are sent the server model. If the numbers vary
    about this mean, the true traffic is at most the count. The initial model counts as known, since
    a seed determines it. A model that is not the server's (a redistributed model, a cluster's
    model) is sent whole.

    Args:
        server: the wrapped server.
        compressor: the code C, whose messages are of one size.
        feedback: whether to keep the residual r.

    Raises:
        ValueError: if the size of a message depends on the step.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2 (server), and its
    update caching for clients with partial participation, which sends a sum of τ messages, of at
    most τ times the bytes.

    >>> from fedjax_sim.compression import ternary
    >>> from fedjax_sim.server.update import replace
    >>> w = Variables(jnp.zeros(10_000), {})
    >>> server = compress_server(replace(), ternary(0.01))
    >>> [server.download_bytes(w, updates) for updates in (1, 5, 1000)]
    [118, 590, 40000]
    """

    server: Server
    compressor: Compressor
    _: dataclasses.KW_ONLY
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.compressor.measured:
            raise ValueError(
                f"compressor must have messages of one size at a server, got {self.compressor}: "
                "use it for uploads, sending=(compressed(...),), or a code such as top_k"
            )

    @property
    def needs(self) -> tuple[Need, ...]:
        return self.server.needs

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        return self.server.setup_traffic

    @property
    def reads_updates(self) -> bool:
        return self.server.reads_updates

    @property
    def dual(self) -> float | Array | None:
        return self.server.dual

    def init(self, variables: Variables) -> PyTree:
        return self.server.init(variables), _zero_residual(variables) if self.feedback else None

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        inner, residual = state
        step, inner = self.server.update(key, step, server, inner, gathered)
        params, residual, _ = _coded(self.compressor, key, step.params, residual)
        return step._replace(params=params), (inner, residual)

    def download_bytes(self, variables: Variables, updates: int) -> int:
        whole = tree.num_bytes(variables)
        return min(whole, _message_bytes(self.compressor, variables, updates))


def _coded(
    compressor: Compressor, key: Array, step: PyTree, residual: PyTree
) -> tuple[PyTree, PyTree, Array | int]:
    """Returns the decoded ``step``, the new residual and the bytes of the message."""
    flat, unravel = ravel_pytree(step)
    wide = flat.astype(jnp.float32)
    feedback = residual is not None
    wide = wide + residual if feedback else wide
    arrived, size = compressor.measure(stream(key, Client.COMPRESSION), wide)
    return unravel(arrived.astype(flat.dtype)), wide - arrived if feedback else None, size


def _zero_residual(variables: Variables) -> Array:
    return jnp.zeros(_entries(variables), jnp.float32)


def _entries(variables: Variables) -> int:
    return sum(a.size for a in jax.tree.leaves(variables.params))


def _message_bytes(compressor: Compressor, variables: Variables, messages: int) -> int:
    """Returns the bytes of several compressed steps and, once, of the other variables."""
    return messages * compressor.bytes(_entries(variables)) + tree.num_bytes(variables.state)
