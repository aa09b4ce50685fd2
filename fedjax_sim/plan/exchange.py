"""What of a model travels: all of it, or without personal and frozen layers."""

from __future__ import annotations

from fedjax_sim.base import Exchange, Leaves, part
from fedjax_sim.engine.needs import NOTHING_SHARED


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
    return Exchange(own, frozen, needs=(NOTHING_SHARED,) if own is not None else ())
