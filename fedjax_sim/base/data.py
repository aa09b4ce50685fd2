"""The clients' samples, one client of them, and one minibatch of a client."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """The clients whose state a device holds; the states of the others stay on the host.

    Attributes:
        client: ``int32[rows]``, the client of each row, ascending; N for rows without one.
    """

    client: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """Pooled samples and a ragged (CSR) list of the samples that each client owns.

    Samples are stored once; a partition is only integers, so a batch of partitions (one per seed)
    shares ``x``, ``y`` and ``index`` and differs in ``start`` alone.

    Attributes:
        x: ``[n_total, *feature]``, any dtype; uint8 images stay uint8. Or a pytree of such arrays,
            if a sample has several: nodes and edges, an image and a text. Models receive the same
            pytree of minibatches.
        y: ``[n_total, *target]``: class labels, int32, or the targets of another task.
        index: ``int32[nnz]``, rows of ``x`` grouped by client.
        start: ``int32[N + 1]``; client k owns ``index[start[k]:start[k + 1]]``.
        capacity: the largest client's number of samples (static: it sizes the shuffle buffer).
        budget: ``int32[N]``, the number of samples in one epoch of client k, and its n_k in all
          weights; None: all that it owns. Copies (FedAug) do not count, so steps and weights are
          the same as without copies.
        root: ``int32[2]``, the server's own samples are ``index[root[0]:root[1]]``; None: it has no
          samples.
        copies: whether ``index`` may have entries from n_total on (static): such an entry is a copy
          of row ``entry - n_total``, to be altered in every step by the local update's transforms.
        relabel: ``int32[N, M]``, client k sees a sample of class y as one of ``relabel[k, y]``;
          None: all see the true classes, as the server does for its own samples.
        sent: ``int32[]``, the samples that every client was sent before the first round (data
          sharing); None: none. They count as traffic.
        differentiable: whether loops over a client's samples have a static length (static). An
          algorithm sets it from its execution.
        samples_per_round: the number of samples that each client receives per round, in the order
          of its list (static); None: all from the start. See :func:`fedjax_sim.data.streamed`.
        owner: ``int32[nnz]``, the client of each entry of ``index``, if only some clients' samples
          are on the device; None: all samples are. A run sets it, see ``samples_mb`` of
          :func:`fedjax_sim.make_execution`.
        at: ``int32[2]``, the range of ``owner`` that belongs to this partition, in which it
          ascends; None if ``owner`` is None.
        held: the clients whose state is on the device; None: all clients, client k in row k. A run
          sets it, see ``client_state_mb`` of :func:`fedjax_sim.make_execution`.
        size_range: the smallest and the largest n_k of clients with samples (static), which
          determine the length of loops; None: unknown. A run sets it where clients train under
          vmap.

    >>> import jax.numpy as jnp
    >>> data = ClientData(jnp.arange(3.0), jnp.zeros(3, jnp.int32), jnp.array([2, 0, 1]),
    ...                   jnp.array([0, 1, 3]), capacity=2)
    >>> data.clients
    2
    """

    x: PyTree
    y: Array
    index: Array
    start: Array
    capacity: int = dataclasses.field(metadata={"static": True})
    budget: Array | None = None
    root: Array | None = None
    copies: bool = dataclasses.field(default=False, metadata={"static": True})
    relabel: Array | None = None
    sent: Array | None = None
    differentiable: bool = dataclasses.field(default=False, metadata={"static": True})
    samples_per_round: int | None = dataclasses.field(default=None, metadata={"static": True})
    owner: Array | None = None
    at: Array | None = None
    held: Held | None = None
    size_range: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def clients(self) -> int:
        """N; as the number of a client it stands for no client, in idle slots and padding rows."""
        return self.start.shape[-1] - 1

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample that is sent: x as it is stored, the numbers of y in 32 bits."""
        inputs = (math.prod(a.shape[1:]) * a.dtype.itemsize for a in jax.tree.leaves(self.x))
        return sum(inputs) + 4 * math.prod(self.y.shape[1:])

    def __repr__(self) -> str:
        return brief_fields(self)


class MissingRootError(ValueError):
    """A method needs samples at the server, and the data have none."""


class ElsewhereError(ValueError):
    """A method needs data that stay on the host."""


class FetchedError(ElsewhereError):
    """A method reads the samples of clients that do not train, which stay on the host."""

    def __init__(self) -> None:
        super().__init__(
            "samples_mb needs methods that read a client's samples only while it trains: "
            "no poll, count, score or finish of all samples, and no peers"
        )


class HeldError(ElsewhereError):
    """A method reads the state of clients that do not train, which stays on the host."""

    def __init__(self) -> None:
        super().__init__(
            "client_state_mb needs methods that read a client's state only while it trains: "
            "no last step or upload of all clients that needs it"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientView:
    """One client: the pooled arrays of :class:`ClientData` and the place of its list in them.

    Attributes:
        x: ``[n_total, *feature]``, or a pytree of such arrays; like y and index None if the samples
            stay on the host.
        y: ``[n_total, *target]``.
        index: ``int32[nnz]``.
        start: ``int32[]``, the first entry of the client in ``index``.
        size: ``int32[]``, n_k.
        capacity: the largest client's n_k (static).
        id: ``int32[]``, k; None for the server's own samples.
        budget: ``int32[]``, the samples that count as one epoch; None: n_k.
        starts: ``int32[N + 1]``, see :class:`ClientData`, for a local update with ``peers``; else
          None.
        copies: see :class:`ClientData` (static).
        relabel: ``int32[M]``, the client's row of ``ClientData.relabel``; None: the true classes.
        relabels: ``int32[N, M]``, the rows of all clients, for a local update with ``peers``; else
          None.
        differentiable: see :class:`ClientData` (static).
        size_range: see :class:`ClientData` (static); None for a :meth:`part`.
        round: ``int32[]``, the number of the round, from 0; None at the server.
        coin: a key that all clients of a round share; None outside of training.
        limit: ``int32[]``, the maximum number of steps; None: no limit.
        public: ``int32[2]``, the data's ``root``, for methods in which clients also have these
          samples; None: no such samples.
        coverage: the entries of the model that it trains, see :class:`Coverage` (static); None for
          all, or outside of training.
    """

    x: PyTree
    y: Array
    index: Array
    start: Array
    size: Array
    capacity: int = dataclasses.field(metadata={"static": True})
    id: Array | None = None
    budget: Array | None = None
    starts: Array | None = None
    copies: bool = dataclasses.field(default=False, metadata={"static": True})
    relabel: Array | None = None
    relabels: Array | None = None
    round: Array | None = None
    coin: Array | None = None
    limit: Array | None = None
    public: Array | None = None
    differentiable: bool = dataclasses.field(default=False, metadata={"static": True})
    size_range: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    coverage: Callable[..., PyTree] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def part(self, start: Array, size: Array, **changes: Any) -> ClientView:
        """Returns a view of other samples, ``index[start:start + size]``.

        Unlike ``dataclasses.replace`` it drops ``size_range``, which would be wrong.

        >>> import jax.numpy as jnp
        >>> x, ends = jnp.arange(3), (jnp.int32(0), jnp.int32(3))
        >>> client = ClientView(x, x, x, *ends, capacity=3, size_range=(3, 3))
        >>> client.part(jnp.int32(1), jnp.int32(2)).size_range is None
        True
        """
        return dataclasses.replace(self, start=start, size=size, size_range=None, **changes)

    def __repr__(self) -> str:
        return brief_fields(self)


class Batch(NamedTuple):
    """A minibatch of one client.

    Attributes:
        x: ``[B, *feature]``, or a pytree of such arrays.
        y: ``[B, *target]``.
        mask: ``bool[B]``, False for padding.
        copy: ``bool[B]``, whether a row is one of the copies of :class:`ClientData`; None if the
          data have none.
        peer: the data of other clients for this step (FedMix: the means x̄ and ȳ); else None.
    """

    x: PyTree
    y: Array
    mask: Array
    copy: Array | None = None
    peer: PyTree = None

    def __repr__(self) -> str:
        return brief_fields(self)


class Transform(Protocol):
    """Changes a minibatch before the step: augmentation, poisoned labels, a peer's means.

    If it has a method ``setup_traffic``, see :class:`fedjax_sim.base.LocalUpdate`, it is counted.
    """

    def __call__(self, key: Array, batch: Batch, client: ClientView, /) -> Batch:
        """``key`` is the step's own."""
