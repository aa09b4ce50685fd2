"""Moves of models between slots."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.base import Array, Slots
from fedjax_sim.engine import tree


class Gather(NamedTuple):
    """A move in which every slot takes the model of one slot.

    Attributes:
        source: ``int32[S]``, the slot whose model slot i holds next.
    """

    source: Array

    def take(self, slots: Slots, order: Array) -> Slots:
        """Returns the slots ``order int32[P]`` after the move; any row for S and above."""
        moved: Slots = tree.take(slots, self.source[order])
        return moved

    def received(self) -> Array:
        """Returns the number of models that each slot receives from others, ``int32[S]``."""
        by_slot = jnp.arange(len(self.source), dtype=jnp.int32)
        return (self.source != by_slot).astype(jnp.int32)


class Mixing(NamedTuple):
    r"""A move in which every slot takes a mean of models; the rest of a slot is unchanged.

    Attributes:
        matrix: W, ``f32[S, S]``: slot i continues with :math:`\sum_j W_{ij} w_j`. Its rows sum to
            1, or its columns if the models have weights, which are mixed in the same way.
        seen: ``bool[S, S]``, whether slot i receives the model of slot j for comparison, even if it
            has no part in the mean; None for no others.
        relayed: ``bool[S]``, the slots that send their model to a server and receive the mean from
            it, as one model; None: slots receive models from each other.
    """

    matrix: Array
    seen: Array | None = None
    relayed: Array | None = None

    def take(self, slots: Slots, order: Array) -> Slots:
        """Returns the slots ``order int32[P]`` after the move; any row for S and above."""
        models, weights = tree.mix(self.matrix, (slots.variables, slots.weight))
        moved: Slots = tree.take(slots._replace(variables=models, weight=weights), order)
        return moved

    def received(self) -> Array:
        """Returns the number of models that each slot receives from others, ``int32[S]``."""
        if self.relayed is not None:
            return self.relayed.astype(jnp.int32)
        got = self.matrix != 0
        if self.seen is not None:
            got = got | self.seen
        others = ~jnp.eye(len(self.matrix), dtype=bool)
        return jnp.sum(got & others, axis=1, dtype=jnp.int32)
