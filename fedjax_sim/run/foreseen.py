"""What can be computed before any sample is there: whom the coming rounds visit."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_sim.base import Array, ClientData, PyTree, shown
from fedjax_sim.round import Algorithm

Draw = Callable[[PyTree, ClientData], Array]


def foreseen(draw: Draw, algorithm: Algorithm, given: PyTree, data: ClientData) -> Draw:
    """``draw`` without what its result does not need: without training, say.

    Args:
        draw: ``(given, data)``, the clients of some rounds.
        algorithm: whose rounds they are.
        given: what the draw begins with, or its shapes.
        data: the clients, or their shapes.

    Raises:
        ValueError: if the result needs samples; names what decides who comes.
    """
    traced = jax.jit(draw).trace(given, data).jaxpr
    needed, used = dce_jaxpr(traced.jaxpr, [True])
    _, wanted = jax.tree.unflatten(jax.tree.structure((given, data)), used)
    if wanted.x or wanted.y or wanted.index:
        parts = algorithm.parts
        clock = "" if parts.clock is None else f" with clock {shown(parts.clock)}"
        raise ValueError(
            "samples_mb needs cohorts that are known before anyone trains, which those of "
            f"selection {shown(parts.selection)}{clock} are not"
        )
    plain = jax.jit(jaxpr_as_fun(ClosedJaxpr(needed, traced.consts)))

    def drawn(given: PyTree, data: ClientData) -> Array:
        leaves = jax.tree.leaves((given, data))
        out: Array = plain(*(a for a, need in zip(leaves, used, strict=True) if need))[0]
        return out

    return drawn
