"""How work on many models runs: over devices, and on each device in chunks or lanes of a vmap.

This module knows no algorithm. It runs ``fn(constants, common, own, task)`` for a stack of tasks.
A vmap from outside (over seeds, say) is merged into the same stack, so that a device sees one flat
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, ClientView, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import ran_in_chunks
from fedjax_sim.engine.clients import Visits, samples_of, visits
from fedjax_sim.engine.cores import default_device, tell_of_others
from fedjax_sim.engine.dealing import balance, lanes_for
from fedjax_sim.engine.device import TaskFn, Work, pooled, run_on_device
from fedjax_sim.engine.lanes import InSteps
from fedjax_sim.engine.order import AXIS, device_sum
from fedjax_sim.engine.vmapped import flattened


@dataclasses.dataclass(frozen=True)
class Execution:
    """Devices and what they train at once; hashable, so that jitted code can close over it.

    Attributes:
        devices: the devices that share the tasks, on a mesh axis ``clients``.
        chunk: tasks that one device trains at once under vmap; 1 trains them one after another,
          None all together.
        differentiable: whether rounds can be differentiated in reverse, see :func:`make_execution`.
        lanes: clients that one device trains at once, each in a lane that takes the next one when
          its visit ends, in place of chunks; 0 for none. None: as many as fit the sizes, see
          :meth:`fitted`; until then none.
        samples_mb: MB of the clients' samples that a device holds; None: all of them.
        client_state_mb: likewise of what clients keep from visit to visit.
    """

    devices: tuple[jax.Device, ...]
    chunk: int | None
    differentiable: bool = False
    lanes: int | None = 0
    samples_mb: float | None = None
    client_state_mb: float | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh over ``devices``."""
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of everything that is not a stack of tasks."""
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, values: PyTree) -> PyTree:
        """Keeps small arrays whole on every device.

        Left to itself, XLA splits what meets a split stack later (a weight per slot, say) and pays
        a collective to make it whole again, several in every round.
        """
        if len(self.devices) == 1:
            return values
        return jax.lax.with_sharding_constraint(values, self.replicated)

    def place(self, values: PyTree) -> PyTree:
        """Puts values whole on every device; :meth:`replicate` would compile a program for each."""
        if len(self.devices) == 1:
            return values
        # One by one: a vmap refuses arrays together that it batches on different axes.
        return jax.tree.map(lambda a: jax.device_put(a, self.replicated), values)

    def gather(self, values: PyTree) -> PyTree:
        """:meth:`replicate` for many stacks of 32-bit numbers ``[P]``, in one collective.

        >>> ours = make_execution(devices=2)
        >>> values = jnp.array([0.5, 2.0]), jnp.array([-1, 7], jnp.int32)
        >>> [a.tolist() for a in jax.jit(ours.gather)(values)]
        [[0.5, 2.0], [-1, 7]]
        """
        if self.differentiable:  # bits have no derivatives
            return self.replicate(values)
        leaves, structure = jax.tree.flatten(values)
        bits = jnp.stack([jax.lax.bitcast_convert_type(a, jnp.int32) for a in leaves], axis=-1)
        columns = jnp.unstack(self.replicate(bits), axis=-1)
        back = map(jax.lax.bitcast_convert_type, columns, (a.dtype for a in leaves))
        return jax.tree.unflatten(structure, back)

    def rows(self, count: int) -> int:
        """P, the rows of ``count`` tasks: as many on every device, so that some may be padding."""
        return -(-count // len(self.devices)) * len(self.devices)

    @property
    def rows_are_tasks(self) -> bool:
        """Whether the rows need no dealing: one device, and no chunks that should be of a size."""
        return len(self.devices) == 1 and (self.chunk in (None, 1) or bool(self.lanes))

    def fitted(self, steps: NDArray[np.integer], tasks: int) -> Execution:
        """The same with as many lanes as fit, unless they are given; see :func:`lanes_for`.

        Args:
            steps: ``int[R, N]``, T of every client in each of R runs of one program.
            tasks: the clients that each run draws.
        """
        if self.lanes is not None:
            return self
        return dataclasses.replace(self, lanes=lanes_for(steps, tasks, len(self.devices)))

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
        """``fn(constants, common, own, task)`` for every task; returns ``[T, ...]``.

        Args:
            fn: what to do. If it is :class:`InSteps`, this returns a pair: what it else would, and
                ``int32[T]``, the steps that the devices run or wait on behalf of each task.
            constants: the same for all tasks; vmap must not batch it.
            common: ``[*p]``, the same for all tasks, but each index of a vmap may have its own: a
              server model. Never copied T times.
            own: ``[T, *p]``, one for each task; () for none.
            tasks: ``[T, ...]``, small: keys and integers; T a multiple of the devices (see
              :meth:`rows`).
            cost: ``int32[T]``, about how long each takes: lanes begin with the longest. None:
              equally long.
            summed: whether ``fn`` returns a pair, of which the second is an
              :class:`fedjax_sim.engine.chunks.Addend`. Then so does this: ``[T, ...]``, and the
              weighted sum ``[*p]`` of the values (in float32 at least), of which a device holds no
              more than it trains at once.
        """
        count = len(jax.tree.leaves(tasks)[0])
        none = jnp.zeros(count, jnp.int32)
        work = Work(none, own, tasks, none if cost is None else cost)
        one, pool = pooled(fn, constants, common, own, tasks, lanes=bool(self.lanes))
        spread = functools.partial(self._spread, one, summed)
        # Reverse mode has no rule for a custom vmap.
        run = spread if self.differentiable else flattened(spread)
        out, sums, ran = run(constants, pool, work)
        out = (out, tree.take(sums, jnp.int32(0))) if summed else out
        return (out, ran) if isinstance(fn, InSteps) else out

    def per_client(
        self, fn: Callable[[PyTree, ClientView], PyTree], common: PyTree, data: ClientData
    ) -> PyTree:
        """``fn(common, client)`` for every client of ``data``: ``[N, ...]``.

        Args:
            fn: what to do.
            common: ``[*p]``, the same for all clients: a server model.
            data: the population.

        >>> data = ClientData(jnp.arange(3.0), jnp.zeros(3, jnp.int32), jnp.array([2, 0, 1]),
        ...                   jnp.array([0, 1, 3]), capacity=2)
        >>> ours = make_execution(devices=1)
        >>> ours.per_client(lambda w, client: w * client.size, jnp.int32(10), data).tolist()
        [10, 20]
        """
        count = data.clients
        clients = jnp.minimum(jnp.arange(self.rows(count), dtype=jnp.int32), count)

        def one(samples: PyTree, common: PyTree, _: PyTree, visit: Visits) -> PyTree:
            return fn(common, visit.view(samples, data))

        out = self.run(one, samples_of(data), common, (), visits(data, clients))
        return tree.take(out, jnp.arange(count, dtype=jnp.int32))

    def deal(self, cost: Array) -> Array:
        """Deals tasks to rows so that the devices have equal work.

        Longest first to the least loaded device that still has rows; on a device longest first
        too, so that chunks are of a size.

        Args:
            cost: ``int32[T]``, e.g. the clients' sizes.

        Returns:
            ``int32[P]``, the task of each of the :meth:`rows`; T of a padding row.

        >>> make_execution(devices=4).deal(jnp.array([1, 9, 2, 3, 3])).tolist()
        [1, 5, 3, 5, 4, 5, 2, 0]
        """
        n_devices, single = len(self.devices), self.chunk == 1

        @custom_vmap
        def dealt(cost: Array) -> Array:
            return balance(cost[None], n_devices, in_order=single)[0]

        @dealt.def_vmap
        def _(size: int, batched: bool, costs: Array) -> tuple[Array, bool]:
            del size, batched
            return balance(costs, n_devices, in_order=single), True

        return dealt(cost)

    def executed(self, steps: Array) -> Array:
        r"""The devices' steps on behalf of each row, ``int32[P]``: their sum is what a round costs.

        .. math:: \sum_i e_i = D \max_d \sum_{i \in d} \max_{j \in c(i)} T_j

        A lane runs as long as the longest of its chunk c(i), and a device that is done waits for
        the one of D that has most; its first row bears the wait.

        Args:
            steps: ``int32[P]``, T of each row's local update.

        >>> make_execution(devices=4, chunk=1).executed(jnp.array([9, 3, 3, 2])).tolist()
        [9, 9, 9, 9]
        """

        def of_all(_: PyTree, __: PyTree, steps: Array) -> Array:
            blocks = steps.reshape(len(self.devices), -1)
            ran = jax.vmap(functools.partial(ran_in_chunks, chunk=self.chunk))(blocks)
            load = jnp.sum(ran, axis=1, dtype=jnp.int32)
            return ran.at[:, 0].add(jnp.max(load) - load).ravel()

        return flattened(of_all)((), (), steps)

    def _spread(
        self, fn: InSteps | TaskFn, summed: bool, constants: PyTree, pool: PyTree, work: Work
    ) -> tuple[PyTree, PyTree, Array]:
        """Deals T tasks to the devices in equal blocks: ``[T, ...]``, and the sums by entry."""
        count, n_devices = len(work.common), len(self.devices)
        lanes = 0 if self.differentiable else self.lanes
        run = functools.partial(run_on_device, fn, chunk=self.chunk, lanes=lanes, summed=summed)
        if n_devices == 1:
            return run(constants, pool, work)
        if count % n_devices:
            raise ValueError(f"tasks must be a multiple of the {n_devices} devices, got {count}")
        block = count // n_devices

        def on_device(constants: PyTree, pool: PyTree, work: Work) -> tuple[PyTree, PyTree, Array]:
            # Each device cuts its block out of the whole list: handing it a shard of something
            # so small would cost a collective.
            mine = jax.lax.axis_index(AXIS) * block + jnp.arange(block, dtype=jnp.int32)
            small = tree.take((work.common, work.task, work.cost), mine)
            block_of = Work(small[0], work.own, *small[1:])
            out, sums, ran = run(constants, pool, block_of)
            load = jnp.sum(ran, dtype=jnp.int32)
            # Its first task bears how long it waits for the last of the devices.
            ran = ran.at[0].add(jax.lax.pmax(load, AXIS) - load)
            return out, jax.tree.map(lambda a: a[None], sums), ran

        split, whole = PartitionSpec(AXIS), PartitionSpec()
        given: tuple[PyTree, PyTree, Array] = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(whole, whole, Work(whole, split, whole, whole)),  # type: ignore[arg-type]
            out_specs=(split, split, split),
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
) -> Execution:
    """The devices of all processes, and the batching that is fastest on them.

    On CPU one model at a time on each of several devices: a stack of weights leaves the cache
    (24-76 k samples/s vmapped, 218-263 k mapped, on the 784-200-200-10 MLP), and a vmapped
    convolution is grouped, for which XLA has no fast kernel there. On accelerators as many
    lanes under one vmap as the clients' sizes keep busy: all clients of a cohort if they are equal.
    CPU devices are made of cores by :func:`fedjax_sim.use_cores` (the command line does it); a
    warning says so if there is only one and nobody chose it.

    Args:
        devices: how many of each process to use, or the devices themselves, which may be those of
            :func:`fedjax_sim.engine.targets.devices_of`. None: the one of ``jax_default_device`` if
            that is set, else all.
        chunk: models per device under vmap, one chunk after another; None for the backend's
            default, 0 for all.
        backend: "cpu", "gpu" or "tpu"; None for JAX's default.
        differentiable: whether ``jax.grad`` and its like go through :meth:`Algorithm.step
            <fedjax_sim.Algorithm.step>`. Results are the same, but a client takes as many steps as
            the largest would, idle ones after its own, and a vmap over seeds is a plain one.
            Differentiated in reverse, a round keeps the weights (and the optimiser's state) before
            each step of each client of the cohort, and computes the rest again on its way back.
            There are no lanes then.
        lanes: models per device under vmap, each in a lane that takes the next client when its
            visit ends, in place of chunks; 0 for none. None: none on CPU or beside a ``chunk``,
            else as many as fit the sizes where they are known, as in :func:`fedjax_sim.simulate`.
            Local updates that cannot stop between two steps have no lanes.
        samples_mb: MB of the clients' samples that a device holds. The others stay in the host's
            memory, or in the file of a ``numpy.memmap``: rounds run in stretches, and the samples
            of the next cohorts are fetched while these train. Each has half of it. None: a device
            holds all samples. :func:`fedjax_sim.simulate` alone fetches; with the
            :meth:`step <fedjax_sim.Algorithm.step>` of an algorithm this does nothing.
        client_state_mb: MB that a device holds of what clients keep from visit to visit: control
            variates, own models, residuals of codes. If that of all is more, it stays in the host's
            memory, and the devices have that of the clients of a few rounds at a time. None: the
            devices hold all. For :func:`fedjax_sim.simulate` too.

    Raises:
        ValueError: if there are not so many devices, chunk or lanes is negative, or samples_mb or
            client_state_mb is not above 0.

    >>> make_execution(devices=1, chunk=8).chunk
    8
    """
    if isinstance(devices, Sequence):
        used = tuple(devices)
    elif devices is None and backend is None and (chosen := default_device()) is not None:
        used = (chosen,)
    else:
        processes = range(jax.process_count())
        available = [jax.local_devices(process, backend) for process in processes]
        least = min(map(len, available))
        if devices is not None and not 1 <= devices <= least:
            raise ValueError(f"devices must be in 1..{least} on this machine, got {devices}")
        used = tuple(device for of_one in available for device in of_one[:devices])
        if devices is None:
            tell_of_others(used)
    if chunk is not None and chunk < 0:
        raise ValueError(f"chunk must be at least 0, got {chunk}")
    if lanes is not None and lanes < 0:
        raise ValueError(f"lanes must be at least 0, got {lanes}")
    for name, mb in (("samples_mb", samples_mb), ("client_state_mb", client_state_mb)):
        if mb is not None and not mb > 0:
            raise ValueError(f"{name} must be above 0, got {mb}")
    if lanes is None and (chunk is not None or used[0].platform == "cpu"):
        lanes = 0
    if chunk is None:
        chunk = 1 if used[0].platform == "cpu" else 0
    return Execution(used, chunk or None, differentiable, lanes, samples_mb, client_state_mb)
