"""Axes and places of a run's arrays: the axis of runs, and the split over the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, PyTree, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.mesh import MODEL, model_shardings
from fedjax_sim.engine.order import AXIS
from fedjax_sim.run.records import Run

T = TypeVar("T")

PER_CLIENT = ("client_state", "own", "sending")
"""Fields of :class:`fedjax_sim.base.FedState` that have a row for each client."""


@dataclasses.dataclass(frozen=True)
class RunAxes:
    """Which arrays have a leading axis of R runs (seeds, or seeds and folds), as vmap prefixes.

    Attributes:
        runs: R.
        data: prefix of the clients' data: all runs share the samples; the partition may differ.
        sets: prefix of each evaluation set.
        state: prefix of the state. All runs share the round number, so branches on it remain
          branches.
    """

    runs: int
    data: Any
    sets: tuple[Any, ...]
    state: FedState

    @classmethod
    def of(cls, data: ClientData, sets: tuple[EvalSet, ...], runs: int) -> RunAxes:
        """Returns the axes of these arrays for R runs."""
        axes: list[Any] = [0 if name != "round" else None for name in FedState._fields]
        return cls(runs, client_axes(data), tuple(map(set_axes, sets)), FedState(*axes))

    def map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """Applies vmap; not for a single run, where vmap would turn branches into selects."""
        if self.runs > 1:
            return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)

        def single(*args: Any) -> Any:
            inner = (one_run(x, a) for x, a in zip(args, in_axes, strict=True))
            return _map_runs(lambda a: a[None], fn(*inner), out_axes)

        return single


def one_run(arrays: Any, axes: Any, run: int = 0) -> Any:
    """Returns the arrays of one run; ``axes`` is their prefix."""
    return _map_runs(lambda a: a[run], arrays, axes)


def repeat_runs(arrays: Any, axes: Any, times: int) -> Any:
    """Repeats all runs, one whole list after another; ``axes`` is the prefix of the arrays."""
    return _map_runs(lambda a: np.concatenate([np.asarray(a)] * times), arrays, axes)


def set_axes(examples: EvalSet) -> Any:
    """Returns the prefix of an evaluation set."""
    adapt = None if examples.adapt is None else client_axes(examples.adapt)
    return _prefix(examples, index=_axis(examples.index), start=_axis(examples.start), adapt=adapt)


def client_axes(data: ClientData) -> Any:
    """Returns the prefix of the clients' data."""
    partition = _axis(data.start)
    of_each_run = data.relabel is not None and data.relabel.ndim == 3
    return _prefix(
        data,
        index=None,
        owner=None,
        start=partition,
        budget=partition,
        root=partition,
        sent=partition,
        relabel=0 if of_each_run else None,
        at=partition,
        held=None,
    )


def _prefix(arrays: Any, **axes: Any) -> Any:
    return dataclasses.replace(arrays, x=None, y=None, **axes)


def _axis(integers: Array) -> int | None:
    return None if integers.ndim == 1 else 0


def _map_runs(change: Callable[[Array], Any], tree: Any, axes: Any) -> Any:
    """Changes the leaves of ``tree`` whose entry in the prefix ``axes`` is 0."""

    def subtree(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(change, part)

    return jax.tree.map(subtree, axes, tree, is_leaf=lambda a: a is None)


class Layout(NamedTuple):
    """Layout of a run on the devices between two programs.

    Per-client state, ``[R, N, *]``, grows with the number of clients, so the devices of a process
    hold equal parts of it and each round gathers the rows of its cohort. Rows of padding after the
    last client make the parts equal; only programs see them. Each process holds all rows, and can
    save a run without the others.

    Models in flight are whole in every group of devices: any of them may move anywhere in each
    round.

    Attributes:
        execution: the devices.
        clients: N.
    """

    execution: Execution
    clients: int

    def shardings(self, run: Run | None) -> Any:
        """Returns the shardings of a run, as a prefix.

        Args:
            run: its arrays or shapes; None is enough if each model is on one device.
        """
        whole = self.execution.replicated
        if self.execution.model_devices == 1 or run is None:
            fields: Any = (self.split if name in PER_CLIENT else whole for name in FedState._fields)
            return Run(whole, FedState(*fields))  # type: ignore[arg-type]

        def of_field(name: str, values: PyTree) -> PyTree:
            if name in PER_CLIENT:
                return model_shardings(values, self._mesh, (None, AXIS))
            in_flight = (None,) if name in ("slots", "at_work") else ()
            return self.execution.shardings(values, None, *in_flight)

        state = {name: of_field(name, values) for name, values in run.state._asdict().items()}
        return Run(whole, run.state._replace(**state))  # type: ignore[arg-type]

    @property
    def split(self) -> NamedSharding:
        """Sharding of the per-client state, if each model is on one device."""
        return NamedSharding(self._mesh, PartitionSpec(None, AXIS))

    @property
    def parts(self) -> int:
        """Number of groups that share the per-client state."""
        return self._mesh.shape[AXIS]

    def padded(self, run: Run) -> Run:
        """Returns the run with padding, as programs return it."""
        return self._changed(run, lambda a: tree.longer(a, self._padding, axis=1))

    def stripped(self, run: Run) -> Run:
        """Returns the run without padding, as rounds take it."""
        return self._changed(run, lambda a: a[:, : self.clients])

    def exported(self, run: Run) -> Run:
        """Returns the run as users and checkpoints see it, in arrays that this process can read."""
        if jax.process_count() > 1:  # no program: each process exports when it wants to
            run = run._replace(state=readable(run.state, self.execution))
            return self.stripped(map_client_state(run, read_shards))
        strips = self._padding and jax.tree.leaves(per_client_state(run))
        return _stripped(self, run) if strips else run

    def exported_shapes(self, run: Run) -> Run:
        """Returns the shapes of :meth:`exported`, from the shapes of a run on the devices."""
        shapes: Run = jax.eval_shape(self.stripped, run)
        return shapes

    def restored(self, run: Run) -> Run:
        """Puts an :meth:`exported` run on the devices, with padding."""
        run = self._changed(run, lambda a: tree.longer(np.asarray(a), self._padding, axis=1))
        on_devices: Run = jax.tree.map(put_on_devices, self.shardings(run), run)
        return on_devices

    def _changed(self, run: Run, change: Callable[[Any], Any]) -> Run:
        return map_client_state(run, change) if self._padding else run

    @property
    def _mesh(self) -> Mesh:
        """The devices, grouped by process."""
        devices, parts = self.execution.devices, self.execution.model_devices
        copies = full_copies([device.process_index for device in devices[::parts]])
        if parts == 1:
            return Mesh(np.array(devices).reshape(copies, -1), ("processes", AXIS))
        return Mesh(np.array(devices).reshape(copies, -1, parts), ("processes", AXIS, MODEL))

    @property
    def _padding(self) -> int:
        """Number of rows after the last client."""
        return -self.clients % self.parts


_stripped = jax.jit(Layout.stripped, static_argnums=0)


def full_copies(processes: Sequence[int]) -> int:
    """Returns the groups of devices that hold all rows: one per process, or per device if uneven.

    >>> full_copies([0, 0, 1, 1]), full_copies([0, 1, 0, 1]), full_copies([0, 0, 1])
    (2, 4, 3)
    """
    count = len(set(processes))
    if len(processes) % count:
        return len(processes)
    rows = np.reshape(processes, (count, -1))
    return count if (rows == rows[:, :1]).all() else len(processes)


def per_client_state(run: Run) -> dict[str, PyTree]:
    """Returns the per-client state, by the names of its fields."""
    return {name: getattr(run.state, name) for name in PER_CLIENT}


def with_client_state(run: Run, state: dict[str, PyTree]) -> Run:
    """Returns the run with other per-client state."""
    return run._replace(state=run.state._replace(**state))


def without_client_state(run: Run) -> Run:
    """Returns the run without per-client state."""
    return with_client_state(run, dict.fromkeys(PER_CLIENT, ()))


def map_client_state(run: Run, change: Callable[[Any], Any]) -> Run:
    """Returns the run with each array of per-client state changed."""
    return with_client_state(run, jax.tree.map(change, per_client_state(run)))


def shapes_for(clients: int, some: PyTree) -> PyTree:
    """Returns shapes ``[R, N, *]`` for all clients, from the shapes of some clients' rows."""

    def of_all(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((a.shape[0], clients, *a.shape[2:]), a.dtype)

    return jax.tree.map(of_all, some)


def read_shards(a: jax.Array | NDArray[Any]) -> NDArray[Any]:
    """Reads an array whose parts are all in this process."""
    if isinstance(a, np.ndarray):
        return a
    out = np.empty(a.shape, a.dtype)
    for shard in a.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out


def readable(values: T, execution: Execution) -> T:
    """Returns arrays that this process can read, though groups of its devices share models."""
    if execution.model_devices == 1 or jax.process_count() == 1:
        return values
    out: T = jax.tree.map(read_shards, values)
    return out


def put_on_devices(sharding: Sharding, values: PyTree) -> PyTree:
    """Puts arrays of which this process has all parts on devices of several processes."""

    def put(a: Any) -> jax.Array:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(a)))
        host = np.asarray(a)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, values)


def replicated(values: T, execution: Execution) -> T:
    """Puts data and sets whole on every device, each array once even if several trees hold it."""
    on_device: dict[int, Array] = {}
    whole = execution.replicated

    # Each process has all data and fills its own devices; device_put would compare the data of
    # the processes over the network.
    def put(a: Array) -> Array:
        if id(a) not in on_device:
            on_device[id(a)] = jax.make_array_from_process_local_data(whole, a)
        return on_device[id(a)]

    out: T = jax.tree.map(put, values)
    return out


def weights_of_runs(initial: Variables, shapes: Variables, runs: int) -> Variables:
    """Returns the initial weights of each run, ``[R, *p]``, given weights of one model or of all.

    Raises:
        ValueError: if ``initial`` has other shapes.
    """
    got = jax.tree.map(np.shape, initial)
    one, each = (
        jax.tree.map(lambda a, axis=axis: (*axis, *a.shape), shapes) for axis in ((), (runs,))
    )
    if got not in (one, each):
        raise ValueError(
            f"initial must be weights of the model, for one or each of the {runs} runs, "
            f"got {got} for {one}"
        )
    return jax.tree.map(  # by NumPy, without a program for each shape
        lambda a, s: np.broadcast_to(np.asarray(a, s.dtype), (runs, *s.shape)), initial, shapes
    )
