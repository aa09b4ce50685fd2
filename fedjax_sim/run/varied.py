"""Runs of one program that differ in settings of their algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array
from fedjax_sim.round import Algorithm


@dataclasses.dataclass(frozen=True)
class Varied:
    """The algorithm of each of R runs.

    Attributes:
        make: an algorithm of settings by name, which may be traced.
        settings: of each point, its own.
        point: ``int32[R]``, of each run.
    """

    make: Callable[..., Algorithm]
    settings: Sequence[Mapping[str, float]]
    point: NDArray[np.int32]

    def at(self, point: Array) -> Algorithm:
        """The algorithm of a run, by its ``point int32[]``, which is traced.

        >>> import jax
        >>> ours = Varied(dict, [{"mu": 0.0}, {"mu": 0.5}], np.array([0, 1], np.int32))
        >>> jax.vmap(ours.at)(ours.point)["mu"].tolist()
        [0.0, 0.5]
        """
        return self.make(**{name: self._value(name, point) for name in self.settings[0]})

    def _value(self, name: str, point: Array) -> Array:
        # A choice among Python's floats is as weakly typed as they are: it takes the weights'
        # dtype, as one of them would.
        value: Array = self.settings[0][name]  # type: ignore[assignment]
        for i, own in enumerate(self.settings[1:], 1):
            value = jnp.where(point == i, own[name], value)
        return value
