"""How models move between slots."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.base import Array, Slots
from fedjax_sim.engine import tree


class Gather(NamedTuple):
    """Every slot takes the whole model of one slot.

    Attributes:
        source: ``int32[S]``, the slot whose model slot i holds next.
    """

    source: Array

    def take(self, slots: Slots, order: Array) -> Slots:
        """See :class:`fedjax_sim.base.Moves`."""
        moved: Slots = tree.take(slots, self.source[order])
        return moved

    def received(self) -> Array:
        """See :class:`fedjax_sim.base.Moves`."""
        by_slot = jnp.arange(len(self.source), dtype=jnp.int32)
        return (self.source != by_slot).astype(jnp.int32)


class Mixing(NamedTuple):
    r"""Every slot takes a mean of models; everything else that is known of a slot stays.

    Attributes:
        matrix: W, ``f32[S, S]``: slot i goes on with :math:`\sum_j W_{ij} w_j`. Its rows sum to
          1, or its columns if the models have weights, which are mixed as they are.
        seen: ``bool[S, S]``, the models that slot i gets of slot j to compare, whether it goes on
          with some of them or not; None for no others.
    """

    matrix: Array
    seen: Array | None = None

    def take(self, slots: Slots, order: Array) -> Slots:
        """See :class:`fedjax_sim.base.Moves`."""
        models, weights = tree.mix(self.matrix, (slots.variables, slots.weight))
        moved: Slots = tree.take(slots._replace(variables=models, weight=weights), order)
        return moved

    def received(self) -> Array:
        """See :class:`fedjax_sim.base.Moves`."""
        got = self.matrix != 0
        if self.seen is not None:
            got = got | self.seen
        others = ~jnp.eye(len(self.matrix), dtype=bool)
        return jnp.sum(got & others, axis=1, dtype=jnp.int32)
