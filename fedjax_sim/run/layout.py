"""Where the state of a run lies: what clients keep is split over the devices, the rest is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from fedjax_sim.base import FedState, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.order import AXIS
from fedjax_sim.run.stages import Run

KEPT = ("client_state", "own", "sending")
"""The fields of :class:`fedjax_sim.base.FedState` that have a row for each client."""


class Layout(NamedTuple):
    """The layout of a run between two programs.

    What clients keep, ``[R, N, *]``, is what grows with their number: the devices of a process have
    equal parts of it, and a round gathers the rows of its cohort. So that parts are equal there may
    be rows of padding after the last client, which only programs see. Each process has all rows,
    and can save a run without the others.

    Models in flight stay whole on every device: each may move anywhere in every round, so that
    split ones would have to be made whole for it.

    Attributes:
        execution: the devices.
        clients: N.
    """

    execution: Execution
    clients: int

    @property
    def shardings(self) -> Any:
        """Of a run, as a prefix."""
        whole = self.execution.replicated
        fields: Any = (self.split if name in KEPT else whole for name in FedState._fields)
        return Run(whole, FedState(*fields))  # type: ignore[arg-type]

    @property
    def split(self) -> NamedSharding:
        """Of what clients keep."""
        return NamedSharding(self._mesh, PartitionSpec(None, AXIS))

    @property
    def parts(self) -> int:
        """The devices that share what clients keep."""
        return self._mesh.shape[AXIS]

    def padded(self, run: Run) -> Run:
        """The run as programs hand it on."""
        return self._changed(run, lambda a: tree.longer(a, self._padding, axis=1))

    def stripped(self, run: Run) -> Run:
        """The run as rounds know it."""
        return self._changed(run, lambda a: a[:, : self.clients])

    def told(self, run: Run) -> Run:
        """The run as users and checkpoints know it, of arrays that this process can read."""
        if jax.process_count() > 1:  # no program: each tells when it wants to
            return self.stripped(changed(run, read))
        return jax.jit(self.stripped)(run) if self._padding else run

    def like(self, run: Run) -> Run:
        """The shapes of a run as it is told, by those of one on the devices."""
        shapes: Run = jax.eval_shape(self.stripped, run)
        return shapes

    def put(self, run: Run) -> Run:
        """A run of which this process has the arrays, as programs hand it on."""
        run = self._changed(run, lambda a: tree.longer(np.asarray(a), self._padding, axis=1))
        on_devices: Run = jax.tree.map(put, self.shardings, run)
        return on_devices

    def _changed(self, run: Run, change: Callable[[Any], Any]) -> Run:
        return changed(run, change) if self._padding else run

    @property
    def _mesh(self) -> Mesh:
        """The devices, by process."""
        devices = self.execution.devices
        groups = groups_of([device.process_index for device in devices])
        return Mesh(np.array(devices).reshape(groups, -1), ("processes", AXIS))

    @property
    def _padding(self) -> int:
        """The rows after the last client."""
        return -self.clients % self.parts


def groups_of(processes: Sequence[int]) -> int:
    """How many groups have all rows: one for each process, or each device where that is uneven.

    Args:
        processes: of each device.

    >>> groups_of([0, 0, 1, 1]), groups_of([0, 1, 0, 1]), groups_of([0, 0, 1])
    (2, 4, 3)
    """
    count = len(set(processes))
    if len(processes) % count:
        return len(processes)
    rows = np.reshape(processes, (count, -1))
    return count if (rows == rows[:, :1]).all() else len(processes)


def kept_of(run: Run) -> dict[str, PyTree]:
    """What clients keep, by the fields of a state."""
    return {name: getattr(run.state, name) for name in KEPT}


def with_kept(run: Run, kept: dict[str, PyTree]) -> Run:
    """The run with this in place of what clients keep."""
    return run._replace(state=run.state._replace(**kept))


def bare(run: Run) -> Run:
    """The run without what clients keep."""
    return with_kept(run, dict.fromkeys(KEPT, ()))


def changed(run: Run, change: Callable[[Any], Any]) -> Run:
    """The run with other arrays of what clients keep."""
    return with_kept(run, jax.tree.map(change, kept_of(run)))


def shapes_for(clients: int, found: PyTree) -> PyTree:
    """The shapes ``[R, N, *]`` of all clients', by those of some clients' ``found``."""

    def of_all(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((a.shape[0], clients, *a.shape[2:]), a.dtype)

    return jax.tree.map(of_all, found)


def read(a: jax.Array) -> NDArray[Any]:
    """An array of which this process has all parts."""
    out = np.empty(a.shape, a.dtype)
    for shard in a.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out


def put(sharding: Sharding, values: PyTree) -> PyTree:
    """Arrays of which this process has all parts, on devices of several."""

    def one(a: Any) -> jax.Array:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(a)))
        host = np.asarray(a)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, values)
