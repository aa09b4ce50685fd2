"""Common code of the robust aggregators: dtypes, distances, shares of the present rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Aggregator, Array, Need, PyTree, Variables
from fedjax_sim.base.parts import Part
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import meeting


def in_floats(reduce: Aggregator) -> Aggregator:
    """Returns the aggregator that computes in float32 or float64 and restores the dtypes."""

    def wide(rows: Array) -> Array:
        return rows if rows.dtype in (jnp.float32, jnp.float64) else rows.astype(jnp.float32)

    @functools.wraps(reduce)  # for its docstring
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        reduced = reduce(jax.tree.map(wide, stacked), weights)
        return jax.tree.map(lambda a, rows: tree.in_dtype(a, rows.dtype), reduced, stacked)

    return aggregate


class Rule(Part):
    """An aggregator with settings, which computes in float32 or float64."""

    def __call__(self, stacked: PyTree, weights: Array, /) -> PyTree:
        """Reduces the rows, and restores their dtypes."""
        return in_floats(self._reduce)(stacked, weights)

    def _reduce(self, stacked: PyTree, weights: Array, /) -> PyTree:
        raise NotImplementedError


def enough(name: str, share: float | Array, rows: Callable[[int], int]) -> tuple[Need, ...]:
    """Returns the needs of a rule that withstands a ``share`` of the models: enough models.

    ``rows`` maps f to the minimum number of rows for f malicious ones. There are no needs for a
    share of 0 or a traced one. Clients that sleep, are lost or arrive late are not accounted for.
    """
    if isinstance(share, Array) or share == 0:
        return ()
    known = share

    def suffice(n: int) -> bool:
        malicious = math.floor(known * n + 1e-9)
        return malicious > 0 and n >= rows(malicious)

    least = next(n for n in itertools.count(int(1 / known)) if suffice(n))
    larger = Need(
        "clients_per_round",
        f"a larger cohort, for {name}={share} of the rows that it gets",
        lambda parts: suffice(meeting(parts)),
        f"{least} rows, by more clients, a larger first of the clock, or smaller buckets",
    )
    return (larger,)


def trainable(model: PyTree) -> PyTree:
    """Returns the part that distances compare: the trainable parameters of ``Variables``."""
    return model.params if isinstance(model, Variables) else model


def share_of(present: Array, share: float | Array, rows: int) -> Array:
    """Returns a share of the ``present int32[]`` rows, at most ``rows``, rounded down: ``int32[]``.

    >>> share_of(jnp.int32(100), 0.29, 100).tolist()  # 0.29 * 100 is 28.999999999999996
    29
    """
    if isinstance(share, Array):
        # 1e-4 of a row is more than float32 loses, and less than a share may miss a row by.
        return jnp.floor(share * present.astype(jnp.float32) + 1e-4).astype(jnp.int32)
    table = np.floor(share * np.arange(rows + 1) + 1e-9).astype(np.int32)
    return jnp.asarray(table)[present]
