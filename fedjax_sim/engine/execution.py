"""Runs tasks on many models: over devices, and on each device in chunks or lanes of a vmap.

This module does not depend on algorithms. It runs ``fn(constants, common, own, task)`` for a stack
of tasks. An outer vmap (over seeds, say) is merged into the same stack, so a device sees one flat
list of tasks for any axes that the user maps over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    Natural,
    Positive,
    PyTree,
    ranges,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import ran_in_chunks
from fedjax_sim.engine.clients import Visits, samples_of, visits
from fedjax_sim.engine.cores import default_device
from fedjax_sim.engine.device import TaskFn, Work, as_pool, balance, lanes_for, run_on_device
from fedjax_sim.engine.lanes import InSteps
from fedjax_sim.engine.mesh import DeviceMesh, check_groups
from fedjax_sim.engine.order import AXIS, device_sum
from fedjax_sim.engine.vmapped import merge_vmap_axes

_LIMITS = ranges.limits(
    [
        ("devices", int, {}),
        ("chunk", Natural, {}),
        ("lanes", Natural, {}),
        ("samples_mb", Positive, {}),
        ("client_state_mb", Positive, {}),
        ("model_devices", Count, {}),
    ]
)


@dataclasses.dataclass(frozen=True)
class Execution(DeviceMesh):
    """Devices and their batching; hashable, so that jitted code can close over it.

    Attributes:
        devices: the devices that share the tasks, on a mesh axis ``clients``.
        chunk: tasks that one device trains at once under vmap; None: all.
        lanes: as in :func:`make_execution`, like the other settings. None: as many as fit the
            clients' sizes, see :meth:`fitted`; until then no lanes.
        by_default: whether the devices were not chosen by the user; equal executions may differ in
          this.
    """

    devices: tuple[jax.Device, ...]
    chunk: int | None
    differentiable: bool = False
    lanes: int | None = 0
    samples_mb: float | None = None
    client_state_mb: float | None = None
    model_devices: int = 1
    by_default: bool = dataclasses.field(default=False, compare=False, repr=False)

    def gather(self, values: PyTree) -> PyTree:
        """Replicates many stacks of 32-bit numbers ``[P]`` in one collective."""
        if self.differentiable:  # bits have no derivatives
            return self.replicate(values)
        leaves, structure = jax.tree.flatten(values)
        bits = jnp.stack([jax.lax.bitcast_convert_type(a, jnp.int32) for a in leaves], axis=-1)
        columns = jnp.unstack(self.replicate(bits), axis=-1)
        restored = map(jax.lax.bitcast_convert_type, columns, (a.dtype for a in leaves))
        return jax.tree.unflatten(structure, restored)

    def rows(self, count: int) -> int:
        """Returns P, the rows of ``count`` tasks: as many on every group, with padding."""
        return -(-count // self.groups) * self.groups

    @property
    def rows_are_tasks(self) -> bool:
        """Whether rows need no dealing: one group, and no chunks of several tasks."""
        return self.groups == 1 and (self.chunk in (None, 1) or bool(self.lanes))

    def fitted(self, steps: NDArray[np.integer], tasks: int, price: float) -> Execution:
        """Returns the execution with as many lanes as fit.

        Args:
            steps: ``int[R, N]``, local steps of every client in each of R runs of one program.
            tasks: number of clients that each run draws.
            price: time of a step's launches in lanes, see :func:`lanes_for`.
        """
        return dataclasses.replace(self, lanes=lanes_for(steps, tasks, self.groups, price))

    def run(
        self,
        fn: TaskFn | InSteps,
        constants: PyTree,
        common: PyTree,
        own: PyTree,
        tasks: PyTree,
        *,
        cost: Array | None = None,
        summed: bool = False,
    ) -> PyTree:
        """Runs ``fn(constants, common, own, task)`` for every task; returns ``[T, ...]``.

        Args:
            fn: function to run. If it is :class:`InSteps`, this returns a pair: the result, and
                ``int32[T]``, the steps that the devices run or wait for each task.
            constants: values that all tasks share; vmap must not batch them.
            common: ``[*p]``, values that all tasks share, but a vmap may batch, such as a server
                model. Never copied T times.
            own: ``[T, *p]``, values of each task; () for none.
            tasks: ``[T, ...]``, small values: keys and integers; T is a multiple of the devices
                (see :meth:`rows`).
            cost: ``int32[T]``, estimated time of each task: lanes begin with the longest. None:
                equal.
            summed: whether ``fn`` returns a pair whose second value is an
                :class:`fedjax_sim.engine.chunks.Addend`. This then returns ``[T, ...]`` and the
                weighted sum ``[*p]`` of the values (in float32 at least); a device holds only the
                values of the tasks that it runs at once.
        """
        count = len(jax.tree.leaves(tasks)[0])
        none = jnp.zeros(count, jnp.int32)
        work = Work(none, own, tasks, none if cost is None else cost)
        one, pool = as_pool(fn, constants, common, own, tasks, lanes=bool(self.lanes))
        spread = functools.partial(self._spread, one, summed)
        # Reverse mode has no rule for a custom vmap.
        run = spread if self.differentiable else merge_vmap_axes(spread)
        out, sums, ran = run(constants, pool, work)
        out = (out, tree.take(sums, jnp.int32(0))) if summed else out
        return (out, ran) if isinstance(fn, InSteps) else out

    def per_client(
        self, fn: Callable[[PyTree, ClientView], PyTree], common: PyTree, data: ClientData
    ) -> PyTree:
        """Runs ``fn(common, client)`` for every client of ``data``; returns ``[N, ...]``."""
        count = data.clients
        clients = jnp.minimum(jnp.arange(self.rows(count), dtype=jnp.int32), count)

        def one(samples: PyTree, common: PyTree, _: PyTree, visit: Visits) -> PyTree:
            return fn(common, visit.view(samples, data))

        out = self.run(one, samples_of(data), common, (), visits(data, clients))
        return tree.take(out, jnp.arange(count, dtype=jnp.int32))

    def deal(self, cost: Array) -> Array:
        """Deals tasks to rows so that the devices have equal work.

        The longest task goes first, to the least loaded device with free rows; each device also
        runs the longest first, so that the tasks of a chunk are of similar length.

        Args:
            cost: ``int32[T]``, e.g. the clients' sizes.

        Returns:
            ``int32[P]``, the task of each of the :meth:`rows`; T for a padding row.

        >>> make_execution(devices=4).deal(jnp.array([1, 9, 2, 3, 3])).tolist()
        [1, 5, 3, 5, 4, 5, 2, 0]
        """
        n_devices, single = self.groups, self.chunk == 1

        @custom_vmap
        def dealt(cost: Array) -> Array:
            return balance(cost[None], n_devices, in_order=single)[0]

        @dealt.def_vmap
        def _(size: int, batched: bool, costs: Array) -> tuple[Array, bool]:
            del size, batched
            return balance(costs, n_devices, in_order=single), True

        return dealt(cost)

    def executed(self, steps: Array) -> Array:
        r"""Returns the devices' steps for each row, ``int32[P]``; their sum is the cost of a round.

        .. math:: \sum_i e_i = D \max_d \sum_{i \in d} \max_{j \in c(i)} T_j

        Each row runs as long as the longest of its chunk c(i), and a device that is done waits for
        the slowest of the D devices; the wait counts for its first row.

        Args:
            steps: ``int32[P]``, local steps T of each row.

        >>> make_execution(devices=4, chunk=1).executed(jnp.array([9, 3, 3, 2])).tolist()
        [9, 9, 9, 9]
        """

        def of_all(_: PyTree, __: PyTree, steps: Array) -> Array:
            blocks = steps.reshape(self.groups, -1)
            ran = jax.vmap(functools.partial(ran_in_chunks, chunk=self.chunk))(blocks)
            load = jnp.sum(ran, axis=1, dtype=jnp.int32)
            return ran.at[:, 0].add(jnp.max(load) - load).ravel()

        return merge_vmap_axes(of_all)((), (), steps)

    def _spread(
        self, fn: InSteps | TaskFn, summed: bool, constants: PyTree, pool: PyTree, work: Work
    ) -> tuple[PyTree, PyTree, Array]:
        """Runs T tasks on the devices in equal blocks: ``[T, ...]``, and the sums by entry."""
        count, n_devices = len(work.common), self.groups
        lanes = 0 if self.differentiable else self.lanes
        run = functools.partial(run_on_device, fn, chunk=self.chunk, lanes=lanes, summed=summed)
        if n_devices == 1:
            return run(constants, pool, work)
        if count % n_devices:
            raise ValueError(f"tasks must be a multiple of the {n_devices} devices, got {count}")
        block = count // n_devices

        def on_device(constants: PyTree, pool: PyTree, work: Work) -> tuple[PyTree, PyTree, Array]:
            # Each device takes its block of the whole list: sharding something so small would
            # cost a collective.
            mine = jax.lax.axis_index(AXIS) * block + jnp.arange(block, dtype=jnp.int32)
            small = tree.take((work.common, work.task, work.cost), mine)
            block_of = Work(small[0], work.own, *small[1:])
            out, sums, ran = run(constants, pool, block_of)
            load = jnp.sum(ran, dtype=jnp.int32)
            # The wait for the slowest device counts for the first task.
            ran = ran.at[0].add(jax.lax.pmax(load, AXIS) - load)
            return out, jax.tree.map(lambda a: a[None], sums), ran

        split, whole = PartitionSpec(AXIS), PartitionSpec()
        given: tuple[PyTree, PyTree, Array] = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(whole, whole, Work(whole, split, whole, whole)),  # type: ignore[arg-type]
            out_specs=(split, split, split),
            axis_names={AXIS},
            check_vma=False,
        )(constants, pool, work)
        out, sums, ran = given
        return out, device_sum(sums), ran


def make_execution(
    devices: int | Sequence[jax.Device] | None = None,
    chunk: int | None = None,
    backend: str | None = None,
    *,
    differentiable: bool = False,
    lanes: int | None = None,
    samples_mb: float | None = None,
    client_state_mb: float | None = None,
    model_devices: int = 1,
) -> Execution:
    """Returns the devices of all processes with the batching that is fastest on them.

    On CPU each device trains one model at a time: a stack of weights does not fit in the cache
    (24-76 k samples/s vmapped, 218-263 k mapped, on the 784-200-200-10 MLP), and XLA has no fast
    kernel for vmapped convolutions, which are grouped. On accelerators, as many lanes under one
    vmap as the clients' sizes keep busy: all clients of a cohort if they are equal.
    :func:`fedjax_sim.use_cores` makes CPU cores devices (the command line calls it); an experiment
    that runs on one CPU device by default warns.

    Args:
        devices: number of devices of each process, or the devices themselves, such as the result of
            :func:`fedjax_sim.engine.targets.devices_of`. None: ``jax_default_device`` if set, else
            all.
        chunk: models per device under vmap, one chunk after another; None: the backend's default,
            0: all.
        backend: "cpu", "gpu" or "tpu"; None: JAX's default.
        differentiable: whether :meth:`Algorithm.step <fedjax_sim.Algorithm.step>` can be
            differentiated by ``jax.grad``. Results are the same, but each client takes as many
            steps as the largest one, idle after its own, and a vmap over seeds is a plain vmap. In
            reverse mode, a round stores the weights (and the optimiser's state) before each step of
            each client of the cohort, and recomputes the rest. There are no lanes.
        lanes: models per device under vmap, each in a lane that takes the next client when its
            visit ends, in place of chunks; 0: no lanes. None: no lanes on CPU or with a ``chunk``,
            else as many as fit the clients' sizes if known, as in :func:`fedjax_sim.simulate`.
            Local updates that cannot stop between two steps have no lanes.
        samples_mb: MB of the clients' samples that a device holds. Other samples stay in host
            memory, or in the file of a ``numpy.memmap``: rounds run in blocks, and the samples of
            the next block are fetched while one trains; each has half of the MB. None: a device
            holds all samples. Only :func:`fedjax_sim.simulate` fetches;
            :meth:`step <fedjax_sim.Algorithm.step>` ignores this.
        client_state_mb: MB of per-client state that a device holds: control variates, personal
            models, compression residuals. If all clients need more, the state stays in host memory,
            and devices hold the state for the clients of a few rounds at a time. None: the devices
            hold all of it. Only :func:`fedjax_sim.simulate` uses this.
        model_devices: M, the devices that train each model together, for models larger than a
            device: see :mod:`fedjax_sim.engine.mesh`.

    Raises:
        ValueError: if there are too few devices, a setting is not a whole number or out of range,
          or model_devices does not divide the devices of each process.

    >>> make_execution(devices=1, chunk=8).chunk
    8
    """
    limits = {"samples_mb": samples_mb, "client_state_mb": client_state_mb}
    counts = {"chunk": chunk, "lanes": lanes, "model_devices": model_devices}
    number = None if isinstance(devices, Sequence) else devices
    ranges.check(_LIMITS, {"devices": number, **counts, **limits})
    by_default = False
    if isinstance(devices, Sequence):
        used = tuple(devices)
        if not used:
            raise ValueError("devices must have at least one device, got none")
    elif devices is None and backend is None and (chosen := default_device()) is not None:
        used = (chosen,)
    else:
        processes = range(jax.process_count())
        available = [jax.local_devices(process, backend) for process in processes]
        least = min(map(len, available))
        if devices is not None and not 1 <= devices <= least:
            raise ValueError(f"devices must be in 1..{least} on this machine, got {devices}")
        used = tuple(device for of_one in available for device in of_one[:devices])
        by_default = devices is None
    if lanes is None and (chunk is not None or used[0].platform == "cpu"):
        lanes = 0
    if chunk is None:
        chunk = 1 if used[0].platform == "cpu" else 0
    check_groups(used, model_devices)
    if model_devices > 1 and client_state_mb is not None:
        raise ValueError("client_state_mb keeps whole models on a device: leave out model_devices")
    return Execution(
        used, chunk or None, differentiable, lanes,
        model_devices=model_devices, **limits, by_default=by_default,
    )  # fmt: skip
