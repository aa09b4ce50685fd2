"""What of a model travels: all of it, without personal and frozen layers, or in turn."""

from __future__ import annotations

import jax

from fedjax_sim.base import Exchange, Leaves, Need, Variables, part
from fedjax_sim.engine.needs import (
    AS_IT_IS,
    NO_FLIGHT,
    NO_WEIGHTS_SHARED,
    NOTHING_SHARED,
    ONE_MODEL,
    PLAIN_SERVER,
    UNCHANGED,
)

_IN_TURN = (
    ONE_MODEL,
    NOTHING_SHARED,
    Need(
        "schedule",
        "a server",
        lambda parts: not parts.schedule.serverless,
        "schedule=permanent(m)",
    ),
    Need(
        "selection",
        "models in flight that stay with their clients",
        lambda parts: not parts.models_travel,
        "selection=uniform(sticky=True) and redistribution=keep",
    ),
    Need(
        "refresh",
        "models in flight that take nothing but fragments from the server",
        lambda parts: parts.refresh.correct is None,
        "refresh=nothing()",
    ),
    AS_IT_IS,
    UNCHANGED,
)
_ALONE = NO_WEIGHTS_SHARED, ONE_MODEL, NO_FLIGHT, PLAIN_SERVER, UNCHANGED


@part
def everything() -> Exchange:
    """The whole model goes to the clients and back."""
    return Exchange()


@part
def split(own: Leaves | None = None, frozen: Leaves | None = None) -> Exchange:
    r"""A model in up to three parts, of which one travels: :math:`w = (u, v_k, f)`.

    The server aggregates u alone. Client k keeps v_k, with which it trains and is scored; before
    its first visit it is the initial model's. Nobody changes f. What the server evaluates has the
    initial v in place of the clients'. Norms, codes and bytes are those of u.

    Args:
        own: the leaves of v, see :mod:`fedjax_sim.leaves`; None for none.
        frozen: the leaves of f; they are sent to every client once, before the first round. Let
            ``local.change(trained=...)`` leave them out, to save their gradients.

    Returns:
        An exchange; with ``own``, the composition has personal models. Clusters, FLTrust and a
        server that trains need the whole model: they judge or change what clients would not use.

    Raises:
        ValueError: if nothing is split off; in the first round, if a leaf is both.

    Source: Pillutla et al. 2022 <https://arxiv.org/abs/2204.03809>, section 2.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.mlp((8, 8, 1), 10)
        >>> fs.exchange.split(own=fs.leaves.head(model))
        split(own=head(<Model>))
    """
    if own is None and frozen is None:
        raise ValueError("split needs own or frozen leaves: use everything() if all travel")
    return Exchange(own, frozen, needs=(NO_WEIGHTS_SHARED,) if own is not None else ())


@part
def nothing() -> Exchange:
    """No part of a model travels: every client trains its own, from the same initial weights.

    What the clients tell the server beside their models (``local.change(shared=...)``) is all that
    they learn of one another; without it each is alone, the baseline of personal models. What the
    server evaluates is the initial model.

    Returns:
        An exchange; the composition has personal models.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, section 3.
    """

    def every(variables: Variables) -> Variables:
        out: Variables = jax.tree.map(lambda leaf: True, variables)
        return out

    return Exchange(own=every, nothing=True, needs=_ALONE)


@part
def fragments(*leaves: Leaves) -> Exchange:
    r"""A model in fragments, of which the server collects one in every round.

    .. math:: p = t \bmod P, \qquad w^p \leftarrow w^p + \mathrm{server}_p\Bigl(\sum_k p_k (w_k^p -
              w^p)\Bigr), \qquad w_k^p \leftarrow w^p

    The schedule says how long a client keeps its slot; in every round all slots hand over the same
    fragment. Who stays takes the new one and trains on, with the other fragments as they are; who
    comes takes the whole model. Nothing else is uploaded, not even at the end of a run. Aggregator
    and server see a fragment alone, and the server keeps a state for each: any of them does.

    Args:
        leaves: those of each fragment, in turn; every leaf in one of them. See
            :func:`fedjax_sim.leaves.strided`.

    Returns:
        An exchange.

    Raises:
        ValueError: if there is no fragment; in the first round, if a leaf is in none or in two of
            them, or a fragment has no leaf.

    Source: Douillard et al. 2025 <https://arxiv.org/abs/2501.18512>, section 2.

    Example:
        >>> import fedjax_sim as fs
        >>> head = fs.leaves.named("Dense_1")
        >>> fs.exchange.fragments(head, fs.leaves.all_but(head))
        fragments(named('Dense_1'), all_but(named('Dense_1')))
    """
    if not leaves:
        raise ValueError("fragments needs at least one: use everything() if all travel together")
    return Exchange(fragments=leaves, needs=_IN_TURN)
