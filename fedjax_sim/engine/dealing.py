"""Which task runs on which row: equal work for every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array


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
