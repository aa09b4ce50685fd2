"""The mesh of the devices: one axis over the clients, and one over a model too large for a device.

Groups of devices form a mesh ``(clients, model)``. A program is written for whole models: XLA
splits each of its operations over the devices of a group, to match how the inputs are split. A
product may then add its terms in another order, so results agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_sim.base import PyTree
from fedjax_sim.engine.order import AXIS

MODEL = "model"
"""The mesh axis of the devices that train one model."""


def model_spec(shape: Sequence[int], parts: int, first: Sequence[str | None] = ()) -> PartitionSpec:
    """Returns how an array of a model is split: over its longest axis that ``parts`` divides.

    Its leading axes over the mesh axes ``first`` do not belong to the model.

    >>> tuple(model_spec((4, 128, 64), 2, ["clients"])), tuple(model_spec((3,), 2))
    (('clients', 'model', None), (None,))
    """
    axes = [*first, *[None] * len(shape)][: len(shape)]
    own = [i for i in range(len(first), len(shape)) if shape[i] and shape[i] % parts == 0]
    if own:
        axes[max(own, key=lambda i: shape[i])] = MODEL
    return PartitionSpec(*axes)


def model_shardings(values: PyTree, mesh: Mesh, first: Sequence[str | None] = ()) -> PyTree:
    """Returns the sharding of each array by :func:`model_spec`; takes arrays or shapes."""
    parts = mesh.shape[MODEL]
    return jax.tree.map(lambda a: NamedSharding(mesh, model_spec(a.shape, parts, first)), values)


class DeviceMesh:
    """Devices in groups, and the places of arrays on them.

    Attributes:
        devices: the devices, one group after another.
        model_devices: M, the devices of a group.
    """

    devices: tuple[jax.Device, ...]
    model_devices: int

    @property
    def mesh(self) -> Mesh:
        """The mesh over ``devices``."""
        if self.model_devices == 1:
            return Mesh(np.array(self.devices), (AXIS,))
        return Mesh(np.reshape(self.devices, (self.groups, -1)), (AXIS, MODEL))

    @property
    def groups(self) -> int:
        """Number of groups of devices; each group trains separate models."""
        return len(self.devices) // self.model_devices

    @property
    def described(self) -> str:
        """Number and kind of the devices, as in ``4 x cpu``, and how many train each model."""
        parts = self.model_devices
        together = "" if parts == 1 else f", {parts} for each model"
        return f"{len(self.devices)} x {self.devices[0].device_kind}{together}"

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of everything that is not a stack of tasks."""
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, values: PyTree) -> PyTree:
        """Keeps small arrays whole on every device.

        By default, XLA splits arrays that are later combined with a split stack (a weight per slot,
        say) and needs collectives to make them whole again, several in every round.
        """
        if len(self.devices) == 1:
            return values
        return jax.lax.with_sharding_constraint(values, self.replicated)

    def shardings(self, values: PyTree, *first: str | None) -> Any:
        """Returns shardings of models, as a prefix: whole on each device, or split over each group.

        Args:
            values: arrays or shapes.
            first: mesh axes of the leading axes that are not the model's.
        """
        if self.model_devices == 1:
            return self.replicated
        return model_shardings(values, self.mesh, first)

    def place(self, values: PyTree) -> PyTree:
        """Puts values whole on every device; :meth:`replicate` would compile a program for each.

        Arrays of models are split over the devices of each group.
        """
        if len(self.devices) == 1:
            return values
        if self.model_devices > 1:
            return jax.lax.with_sharding_constraint(values, self.shardings(values))
        # One by one: a vmap rejects a tuple of arrays that it batches on different axes.
        return jax.tree.map(lambda a: jax.device_put(a, self.replicated), values)


def check_groups(devices: Sequence[jax.Device], parts: int) -> None:
    """Rejects groups of ``parts`` devices if one is incomplete or spans two processes."""
    processes = [device.process_index for device in devices]
    for process in dict.fromkeys(processes):  # each saves its results without the others
        own = processes.count(process)
        if own % parts:
            raise ValueError(
                f"model_devices must divide the {own} devices of a process, got {parts}"
            )
