"""The objective of a random part of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, Context, PyTree, Variables
from fedjax_sim.client.objective import ObjectiveWrapper
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Step, stream


class ordered_dropout(ObjectiveWrapper):
    r"""The loss of a random smaller network in every step, at most as large as the client's.

    .. math:: F_b(m_p \odot w), \qquad p \sim \mathrm{uniform}\{ s : s \le p_{max} \}

    m_p are the entries of a client with the share p, s are the shares of all clients and p_max is
    the client's own, see :class:`fedjax_sim.exchange.widths`, ``depths`` and ``ranks``. The
    reported loss is the loss of that network; on a clock, a step takes the time of the client's.

    Args:
        objective: F_b.

    Raises:
        ValueError: in the first step, if the clients have no shares of the model.

    Source: Horváth et al. 2021 <https://arxiv.org/abs/2102.13451>, Algorithm 1.
    """

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        client = context.client
        covers, shares = client.coverage, getattr(client.coverage, "shares", None)
        if covers is None or shares is None or client.id is None or client.round is None:
            raise ValueError(
                "ordered_dropout needs clients that train shares of the model: use "
                "exchange=split(covers=widths(model, shares))"
            )
        sizes = sorted({*shares})
        places = jnp.array([shares.index(p) for p in sizes], jnp.int32)
        count = jnp.array([sizes.index(p) + 1 for p in shares], jnp.int32)[client.id % len(shares)]
        drawn = jax.random.randint(stream(context.key, Step.WIDTH), (), 0, count, jnp.int32)
        has = covers(Variables(params, state), places[drawn], client.round).params
        return self.objective(tree.masked(has, params), state, batch, context)
