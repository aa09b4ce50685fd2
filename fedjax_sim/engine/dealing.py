"""Which task runs on which row, and in how many lanes: equal work for every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array

_DRAWS = 64
_STEP = 2
"""What a step costs whatever its lanes, in lanes: on accelerators, many small launches."""


def balance(cost: Array, n_devices: int, *, in_order: bool) -> Array:
    """Joint rows for R lists of tasks; what ``Execution.deal`` does.

    Every device has as many rows of each list: its tasks may then go to any of them.

    Args:
        cost: ``int32[R, T]``.
        n_devices: D.
        in_order: whether the tasks of a device may stay in their order, if there is only one.

    Returns:
        ``int32[R, P]``, the task of each row; T of a padding row.
    """
    lists, count = cost.shape
    block = -(-count // n_devices)
    size = block * n_devices  # P
    if n_devices == 1:
        order = jnp.arange(count, dtype=jnp.int32)
        if in_order:
            return jnp.broadcast_to(order, (lists, count))
        return jnp.argsort(-cost, axis=1, stable=True).astype(jnp.int32)
    flat = jnp.ravel(cost)
    longest_first = jnp.argsort(-flat, stable=True).astype(jnp.int32)

    def assign(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        load, used, rows = carry
        task = longest_first[i]
        list_ = task // count
        device = jnp.argmin(jnp.where(used[list_] < block, load, np.iinfo(np.int32).max))
        row = list_ * size + device * block + used[list_, device]
        return (
            load.at[device].add(flat[task]),
            used.at[list_, device].add(1),
            rows.at[row].set(task % count),
        )

    start = (
        jnp.zeros(n_devices, jnp.int32),
        jnp.zeros((lists, n_devices), jnp.int32),
        jnp.full(lists * size, count, jnp.int32),
    )
    return jax.lax.fori_loop(0, lists * count, assign, start)[2].reshape(lists, size)


def lanes_for(steps: NDArray[np.integer], tasks: int, devices: int) -> int:
    r"""The lanes of a device that do the tasks of a round in the least time, in the mean.

    .. math:: \min_L E\Big[\max\Big(\frac{\sum_k T_k}{D L}, \max_k T_k\Big)\Big] (L + 2)

    A step of L lanes is taken to cost as much as L + 2 lanes.

    Args:
        steps: ``int[R, N]``, T of every client in each of R runs.
        tasks: S, the clients that each run draws.
        devices: D.

    Returns:
        L; S R / D or more if all are best trained together.

    >>> lanes_for(np.array([[40, 1, 1, 1, 1, 1, 1, 1]]), tasks=8, devices=1)
    1
    >>> lanes_for(np.full((2, 8), 5), tasks=3, devices=1)
    6
    """
    rng = np.random.default_rng(0)
    runs, clients = steps.shape
    drawn = min(tasks, clients)
    total, longest = np.zeros(_DRAWS), np.zeros(_DRAWS)
    for i in range(_DRAWS):
        for own in steps:
            some = own[rng.choice(clients, drawn, replace=False, shuffle=False)]
            total[i] += some.sum()
            longest[i] = max(longest[i], some.max())
    lanes = np.arange(1, -(-runs * tasks // devices) + 1)
    lasts = np.maximum(total[:, None] / (devices * lanes), longest[:, None]).mean(axis=0)
    return int(lanes[np.argmin(lasts * (lanes + _STEP))])
