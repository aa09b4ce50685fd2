"""What the robust aggregators share: rows as floats, distances, a share of the present rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Aggregator, Array, Need, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import awaited, collected, meeting


def in_floats(reduce: Aggregator) -> Aggregator:
    """The same reduction, computed in float32 (or float64) alone; the dtypes are restored."""

    def wide(rows: Array) -> Array:
        return rows if rows.dtype in (jnp.float32, jnp.float64) else rows.astype(jnp.float32)

    @functools.wraps(reduce)  # for its docstring
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        reduced = reduce(jax.tree.map(wide, stacked), weights)
        return jax.tree.map(lambda a, rows: tree.in_dtype(a, rows.dtype), reduced, stacked)

    return aggregate


def needing(aggregate: Aggregator, *needs: Need) -> Aggregator:
    """The same aggregator, which ``compose`` refuses where its needs are not met."""
    aggregate.needs = needs  # type: ignore[attr-defined]
    return aggregate


def enough(name: str, share: float | Array, rows: Callable[[int], int]) -> tuple[Need, ...]:
    """What a rule that withstands a ``share`` of the models needs: enough of them.

    Clients that sleep, are lost or come late are not foreseen.

    Args:
        name: of the share.
        share: in [0, 0.5); 0 asks for nothing, and of a traced one nothing is known.
        rows: ``f -> n``, the fewest rows for f malicious ones.
    """
    if isinstance(share, Array):
        return ()
    known = share

    def suffice(n: int) -> bool:
        malicious = int(np.floor(known * n + 1e-9))
        return known == 0 or (malicious > 0 and n >= rows(malicious))

    least = next(n for n in itertools.count(1) if suffice(n))
    larger = Need(
        "schedule",
        f"a larger cohort, for {name}={share} of it",
        lambda parts: suffice(collected(parts)),
        f"schedule=every_round({least}), say",
    )
    all_awaited = Need(
        "clock",
        f"a server that waits for more clients, for {name}={share} of them",
        lambda parts: suffice(awaited(parts)),
        f"first={least}, say",
    )
    unmixed = Need(
        "preaggregation",
        f"{least} rows, say, for {name}={share} of them",
        lambda parts: suffice(meeting(parts)),
        "a larger cohort, or smaller buckets",
    )
    return (larger, all_awaited, unmixed)


def measured(model: PyTree) -> PyTree:
    """What distances are taken over: the trainable parameters, if the model tells them apart."""
    return model.params if isinstance(model, Variables) else model


def check_share(name: str, share: float | Array) -> None:
    """Refuses a share of malicious rows that no rule withstands.

    Raises:
        ValueError: if it is not in [0, 0.5).
    """
    if not isinstance(share, Array) and not 0 <= share < 0.5:
        raise ValueError(f"{name} must be in [0, 0.5), got {share}")


def counted(share: float | Array, rows: int) -> Callable[[Array], Array]:
    """``n int32[] -> int32[]``, a share of n present rows as a number of rows, rounded down.

    Args:
        share: in [0, 1], or traced.
        rows: the most that may be present.

    >>> counted(0.29, 100)(jnp.int32(100)).tolist()  # 0.29 * 100 is 28.999999999999996
    29
    """
    if isinstance(share, Array):
        # 1e-4 of a row is more than float32 loses, and less than a share may miss a row by.
        return lambda present: jnp.floor(share * present.astype(jnp.float32) + 1e-4).astype(
            jnp.int32
        )
    table = np.floor(share * np.arange(rows + 1) + 1e-9).astype(np.int32)
    return lambda present: jnp.asarray(table)[present]
