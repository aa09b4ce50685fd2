"""What can be computed before any sample is there: whom the coming rounds visit."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedjax_sim.base import Array, ClientData, PyTree, shown
from fedjax_sim.base.data import ElsewhereError
from fedjax_sim.engine.reading import needed
from fedjax_sim.round import Algorithm

Draw = Callable[[PyTree, ClientData], Array]


def foreseen(
    draw: Draw, algorithm: Algorithm, given: PyTree, data: ClientData, setting: str
) -> Draw:
    """``draw`` without what its result does not need: without training, say.

    Args:
        draw: ``(given, data)``, the clients of some rounds.
        algorithm: whose rounds they are.
        given: what the draw begins with, or its shapes.
        data: the clients, or their shapes.
        setting: for which the draw must be known, by name.

    Raises:
        ElsewhereError: if the result needs samples; names what decides who comes.
    """
    traced = jax.jit(draw).trace(given, data).jaxpr
    rest, used = needed(traced.jaxpr, (given, data))
    _, wanted = used
    if wanted.x or wanted.y or wanted.index:
        parts = algorithm.parts
        clock = "" if parts.clock is None else f" with clock {shown(parts.clock)}"
        raise ElsewhereError(
            f"{setting} needs cohorts that are known before anyone trains, which those of "
            f"selection {shown(parts.selection)}{clock} are not"
        )
    plain = jax.jit(jaxpr_as_fun(ClosedJaxpr(rest, traced.consts)))
    needs = jax.tree.leaves(used)

    def drawn(given: PyTree, data: ClientData) -> Array:
        leaves = jax.tree.leaves((given, data))
        out: Array = plain(*(a for a, need in zip(leaves, needs, strict=True) if need))[0]
        return out

    return drawn
