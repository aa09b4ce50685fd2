"""Sums over rows that several devices hold, added in the order of the devices.

XLA leaves the order of a sum over devices to who carries it. The CPU devices of one process add in
another order than those of several, so that the same run would end in other bits. In what
:func:`in_order` traces, :func:`device_sum` adds in an order of its own.
"""

from __future__ import annotations

import contextlib
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_sim.base import Array, PyTree

AXIS = "clients"


def in_order(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """What is traced in here gives the same bits however the devices are dealt to processes.

    On CPU alone: accelerators of several processes are connected as those of one are. Two
    addends have but one order.
    """
    if mesh.size <= 2 or mesh.devices.flat[0].platform != "cpu":
        return contextlib.nullcontext()
    traced: contextlib.AbstractContextManager[object]
    traced = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return traced


def sharers() -> int:
    """D, the devices of :func:`in_order`; 1 outside it, and in what one device traces alone."""
    mesh = jax.sharding.get_abstract_mesh()
    shared = AXIS in mesh.axis_names and AXIS not in mesh.manual_axes
    return int(mesh.shape[AXIS]) if shared else 1


def blocks(rows: Array, devices: int) -> Array:
    """``[S, *p] -> [D, S/D, *p]``; rows of zeros if D does not divide S."""
    missing = -len(rows) % devices
    if missing:
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
    return rows.reshape(devices, -1, *rows.shape[1:])


def device_sum(parts: PyTree) -> PyTree:
    """The sum of what each device holds a row of: ``f[D, *p] -> f[*p]``, whole on all of them.

    >>> device_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [4.0, 6.0]
    """
    devices = sharers()
    if devices == 1:
        return jax.tree.map(functools.partial(jnp.sum, axis=0), parts)
    leaves, structure = jax.tree.flatten(parts)
    added: dict[int, Array] = {}
    # All of a type at once: each collective makes all devices wait for the last.
    for dtype in dict.fromkeys(a.dtype for a in leaves):
        some = [i for i, a in enumerate(leaves) if a.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(devices, -1) for i in some], axis=1)
        ends = np.cumsum([leaves[i][0].size for i in some])
        for i, values in zip(some, jnp.split(_added(flat), ends[:-1]), strict=True):
            added[i] = values.reshape(leaves[i].shape[1:])
    return jax.tree.unflatten(structure, [added[i] for i in range(len(leaves))])


def whole(values: PyTree) -> PyTree:
    """Keeps small arrays whole on every device, so that each adds all of them."""
    return values if sharers() == 1 else jax.tree.map(_whole, values)


def _added(flat: Array) -> Array:
    """``f[D, n] -> f[n]``: each device adds a D-th of the numbers, which then go to all.

    Gathered whole before they are added, they would be D models on each device.
    """
    devices, size = flat.shape
    # Each says what it has, or XLA gives the sums that follow from it to all devices again.
    flat = _split(flat, AXIS, None)
    flat = _split(jnp.pad(flat, ((0, 0), (0, -size % devices))), None, AXIS)
    return whole(functools.reduce(operator.add, jnp.unstack(flat)))[:size]


def _split(values: Array, *by: str | None) -> Array:
    # Of its mesh too: JAX 0.7 does not look for an abstract one.
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*by))
    return jax.lax.with_sharding_constraint(values, sharding)


@custom_vmap
def _whole(values: Array) -> Array:
    return _split(values, *[None] * values.ndim)


@_whole.def_vmap
def _(size: int, batched: bool, values: Array) -> tuple[Array, bool]:
    """JAX forgets that an array is whole in a vmap within another."""
    del size, batched
    return _whole(values), True
