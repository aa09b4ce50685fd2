"""Exchanges: the leaves of a model that travel between clients and server."""

from __future__ import annotations

import jax

from fedjax_sim.base import Coverage, Exchange, Leaves, Need, Variables
from fedjax_sim.engine.needs import (
    AS_IT_IS,
    BYTES_KNOWN,
    NO_FLIGHT,
    NO_WEIGHTS_SHARED,
    NOTHING_SHARED,
    ONE_MODEL,
    PLAIN_SERVER,
    UNCHANGED,
)
from fedjax_sim.plan.coverage import COVERED, depths, ranks, widths

__all__ = ["depths", "everything", "fragments", "nothing", "ranks", "split", "widths"]

IN_TURN = (
    ONE_MODEL,
    NOTHING_SHARED,
    Need(
        "flight",
        "a server",
        lambda parts: not parts.flight.serverless,
        "flight=permanent()",
    ),
    Need(
        "selection",
        "models in flight that stay with their clients",
        lambda parts: not parts.models_travel,
        "selection=uniform(sticky=True) and redistribution=None",
    ),
    Need(
        "flight",
        "models in flight that take nothing but fragments from the server",
        lambda parts: parts.flight.refresh is None,
        "refresh=None",
    ),
    AS_IT_IS,
    UNCHANGED,
    BYTES_KNOWN,
)
ALONE = NO_WEIGHTS_SHARED, ONE_MODEL, NO_FLIGHT, PLAIN_SERVER, UNCHANGED


def needs_of(exchange: Exchange) -> tuple[Need, ...]:
    """Returns the needs of an exchange, the package's or a user's, by what it leaves out."""
    if exchange.nothing:
        return ALONE
    if exchange.coverage is not None:
        return COVERED
    if exchange.fragments:
        return IN_TURN
    return () if exchange.own is None else (NO_WEIGHTS_SHARED,)


class everything(Exchange):
    """Sends the whole model to the clients and back."""


class split(Exchange):
    r"""Splits a model into up to three parts, one of which travels: :math:`w = (u, v_k, f)`.

    The server only aggregates u. Client k keeps v_k, with which it trains and is evaluated; before
    its first visit it is the initial v. f is constant. The server evaluates u with the initial v.
    Norms, encodings and bytes are over u. With ``own``, the composition has personal models.
    Clusters, FLTrust and a server that trains need the whole model.

    Args:
        own: the leaves of v, see :mod:`fedjax_sim.leaves`; None for no leaf.
        frozen: the leaves of f; they are sent to every client once, before the first round. Exclude
            them from ``local.change(trained=...)`` to save their gradients.
        covers: the entries of u and f that each client has and trains,
            :class:`fedjax_sim.exchange.widths`, ``depths`` or ``ranks``; None for all entries.

    Raises:
        ValueError: if nothing is split off; in the first round, if a leaf is both own and frozen.

    Source: Pillutla et al. 2022 <https://arxiv.org/abs/2204.03809>, section 2.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.mlp((8, 8, 1), 10)
        >>> fs.exchange.split(own=fs.leaves.head(model))
        split(own=head(<Model>))
    """

    own: Leaves | None = None
    frozen: Leaves | None = None
    covers: Coverage | None = None

    def __post_init__(self) -> None:
        if self.own is None and self.frozen is None and self.covers is None:
            raise ValueError(
                "split needs own or frozen leaves, or covers: use everything() if all travel"
            )

    @property
    def coverage(self) -> Coverage | None:
        return self.covers


class nothing(Exchange):
    """Sends no part of a model: every client trains its own, from the same initial weights.

    Clients only exchange shared statistics (``local.change(shared=...)``); without any, each client
    trains alone, the baseline of personal models. The composition has personal models; the server
    evaluates the initial model.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, section 3.
    """

    nothing = True

    def own(self, variables: Variables) -> Variables:
        every: Variables = jax.tree.map(lambda leaf: True, variables)
        return every


class fragments(Exchange):
    r"""Splits a model into fragments, one of which the server collects in every round.

    .. math:: p = t \bmod P, \qquad w^p \leftarrow w^p + \mathrm{server}_p\Bigl(\sum_k p_k (w_k^p -
              w^p)\Bigr), \qquad w_k^p \leftarrow w^p

    The flight determines how long a client keeps its slot; in every round all slots send the same
    fragment. A client that keeps its slot receives the new fragment and continues with its other
    fragments unchanged; a new client receives the whole model. Nothing else is uploaded, not even
    at the end of a run. Aggregator and server only process one fragment, with a server state for
    each, so any of them can be used.

    Args:
        leaves: the leaves of each fragment, in turn; every leaf is in one of them. See
            :func:`fedjax_sim.leaves.strided`.

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

    leaves: tuple[Leaves, ...]

    def __init__(self, *leaves: Leaves) -> None:
        object.__setattr__(self, "leaves", leaves)
        if not leaves:
            raise ValueError(
                "fragments needs at least one: use everything() if all travel together"
            )

    @property
    def fragments(self) -> tuple[Leaves, ...]:
        return self.leaves
