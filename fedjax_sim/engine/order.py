"""Sums over rows on several devices, added in the order of the devices.

XLA does not define the order of a sum over devices. CPU devices of one process add in another order
than devices of several processes, so the same run would differ in bits. In code traced under
:func:`in_order`, :func:`device_sum` adds in a fixed order.
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
    """Makes results of code traced in it independent of how devices are split over processes.

    This is only needed on CPU, because accelerators of several processes are connected like those
    of one, and not for two addends. It is impossible if groups of devices train a model: XLA splits
    sums over them too.
    """
    if mesh.size <= 2 or len(mesh.shape) > 1 or mesh.devices.flat[0].platform != "cpu":
        return contextlib.nullcontext()
    traced: contextlib.AbstractContextManager[object]
    traced = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return traced


def ordered_devices() -> int:
    """Returns D, the devices of :func:`in_order`; 1 outside it, and in code of a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    shared = AXIS in mesh.axis_names and AXIS not in mesh.manual_axes
    return int(mesh.shape[AXIS]) if shared else 1


def blocks(rows: Array, devices: int) -> Array:
    """Splits rows, ``[S, *p] -> [D, S/D, *p]``; appends zeros if D does not divide S."""
    missing = -len(rows) % devices
    if missing:
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
    return rows.reshape(devices, -1, *rows.shape[1:])


def device_sum(parts: PyTree) -> PyTree:
    """Sums rows, one on each device: ``f[D, *p] -> f[*p]``, whole on all of them."""
    devices = ordered_devices()
    if devices == 1:
        return jax.tree.map(functools.partial(jnp.sum, axis=0), parts)
    leaves, structure = jax.tree.flatten(parts)
    sums: dict[int, Array] = {}
    # All arrays of a dtype at once: each collective makes all devices wait for the last.
    for dtype in dict.fromkeys(a.dtype for a in leaves):
        some = [i for i, a in enumerate(leaves) if a.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(devices, -1) for i in some], axis=1)
        ends = np.cumsum([leaves[i][0].size for i in some])
        for i, values in zip(some, jnp.split(_sum_parts(flat), ends[:-1]), strict=True):
            sums[i] = values.reshape(leaves[i].shape[1:])
    return jax.tree.unflatten(structure, [sums[i] for i in range(len(leaves))])


def keep_whole(values: PyTree) -> PyTree:
    """Keeps small arrays whole on every device, so that each adds all of them."""
    return values if ordered_devices() == 1 else jax.tree.map(_whole, values)


def _sum_parts(flat: Array) -> Array:
    """Sums ``f[D, n] -> f[n]``: each device adds a D-th of the numbers, which are then gathered.

    Gathering before the sum would need D models on each device.
    """
    devices, size = flat.shape
    # Explicit shardings: otherwise XLA computes the sums on all devices.
    flat = _split(flat, AXIS, None)
    flat = _split(jnp.pad(flat, ((0, 0), (0, -size % devices))), None, AXIS)
    return keep_whole(functools.reduce(operator.add, jnp.unstack(flat)))[:size]


def _split(values: Array, *by: str | None) -> Array:
    # With the mesh: JAX 0.7 does not look for an abstract one.
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*by))
    return jax.lax.with_sharding_constraint(values, sharding)


@custom_vmap
def _whole(values: Array) -> Array:
    return _split(values, *[None] * values.ndim)


@_whole.def_vmap
def _(size: int, batched: bool, values: Array) -> tuple[Array, bool]:
    """Repeats the constraint, which JAX loses in nested vmaps."""
    del size, batched
    return _whole(values), True
