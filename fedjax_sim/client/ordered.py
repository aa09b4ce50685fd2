"""Objectives of a random part of the model."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, Context, PyTree, Variables
from fedjax_sim.client.objective import ObjectiveWrapper
from fedjax_sim.engine.streams import Step, stream


class Nested(Protocol):
    """Coverage in which the smaller share of two is a part of the larger one."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of clients 0, 1 and so on."""

    def __call__(self, variables: Variables, client: Array, round: Array, /) -> PyTree:
        """See :class:`fedjax_sim.base.Coverage`."""


class ordered_dropout(ObjectiveWrapper):
    r"""The loss of a random narrower network in every step, at most as wide as the client's.

    .. math:: F_b(m_p \odot w), \qquad p \sim \mathrm{uniform}\{ s : s \le p_{max} \}

    m_p are the entries of a client with a share p of the units, p_max is the client's own share.
    The reported loss is the loss of that network.

    Args:
        objective: F_b.
        covers: m, whose shares are the s: :class:`fedjax_sim.exchange.widths` or ``ranks``.

    Raises:
        ValueError: in the first step, if the server trains on its own samples.

    Source: Horváth et al. 2021 <https://arxiv.org/abs/2102.13451>, Algorithm 1.
    """

    covers: Nested

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        client = context.client
        if client.id is None:
            raise ValueError(
                "ordered_dropout needs a client's number, which the server's own samples lack: use "
                f"{self.objective} there"
            )
        round = jnp.int32(0) if client.round is None else client.round
        shares = self.covers.shares
        widths = sorted({*shares})
        places = jnp.array([shares.index(p) for p in widths], jnp.int32)
        count = jnp.array([widths.index(p) + 1 for p in shares], jnp.int32)[client.id % len(shares)]
        drawn = jax.random.randint(stream(context.key, Step.WIDTH), (), 0, count, jnp.int32)
        has = self.covers(Variables(params, state), places[drawn], round).params
        part = jax.tree.map(lambda w, m: jnp.where(m, w, jnp.zeros((), w.dtype)), params, has)
        return self.objective(part, state, batch, context)
