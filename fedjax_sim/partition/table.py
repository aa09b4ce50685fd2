"""Partitions: the training samples of each client, as one ragged (CSR) list of integers."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.brief import Text, brief
from fedjax_sim.base.files import read_npz, write_npz
from fedjax_sim.base.words import array_type, shortened

LABELS = ("labels", "samples", "dataset")  # entries of a file that identify its labels


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the pooled training arrays, grouped by client.

    Attributes:
        index: ``int32[nnz]``; client k holds ``index[start[k]:start[k + 1]]``, in ascending order.
        start: ``int32[N + 1]``, from 0 to nnz.
        name: text form of the sampler, such as "ll(2, 0.875)".
        repeats: whether a sample may occur more than once: at several clients (data sharing), or at
            one client as copies (augmentation). Position i + n is a copy of sample i, to be
            transformed when it is drawn; n is the length of the pooled arrays.
        sent: number of samples sent to each client before the first round (data sharing).
    """

    index: NDArray[np.int32]
    start: NDArray[np.int32]
    name: str = ""
    repeats: bool = False
    sent: int = 0

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of samples n_k of each client: ``int64[N]``."""
        return np.diff(self.start).astype(np.int64)

    @property
    def lists(self) -> list[NDArray[np.int32]]:
        """Positions of each client: N views ``int32[n_k]`` of ``index``."""
        return np.split(self.index, self.start[1:-1])

    def check_unshared(self, advice: str) -> None:
        """Raises ValueError if a sample may occur more than once."""
        if self.repeats:
            raise ValueError(f"partition must have every sample once: {advice}")

    def __repr__(self) -> str:
        sizes = self.sizes
        spread = Text(f"{sizes.min()} to {sizes.max()}") if len(sizes) else None
        known = {"name": self.name, "clients": len(sizes), "sizes": spread}
        return brief(self, known | {"repeats": self.repeats or None, "sent": self.sent or None})


def partition_from_lists(lists: Sequence[ArrayLike], name: str = "") -> Partition:
    """Makes a partition from a list of positions for each client.

    Args:
        lists: integer positions of each client's samples, in any order.
        name: name of the partition.

    Returns:
        The partition, with each client's positions in ascending order.

    Raises:
        ValueError: if a list is not integers; the message names the client.

    Example:
        >>> p = partition_from_lists([[3, 0], [1, 2, 4]])
        >>> p.index.tolist(), p.start.tolist(), p.sizes.tolist()
        ([0, 3, 1, 2, 4], [0, 2, 5], [2, 3])
    """
    arrays = [np.asarray(positions) for positions in lists]
    for client, own in enumerate(arrays):
        if own.ndim != 1 or (own.size and own.dtype.kind not in "iu"):
            raise ValueError(
                f"lists must have integer positions [n_k] for every client, got {array_type(own)} "
                f"for client {client}"
            )
    sizes = [own.size for own in arrays]
    index = np.concatenate([np.zeros(0, np.int32), *(own.astype(np.int32) for own in arrays)])
    order = np.lexsort((index, np.repeat(np.arange(len(arrays)), sizes)))
    return Partition(index[order], np.cumsum([0, *sizes]).astype(np.int32), name)


def partition_from_owners(owner: NDArray[np.int64], clients: int, name: str) -> Partition:
    """Makes a partition from the owner of each sample, ``int64[n]`` in 0 … N - 1."""
    start = np.cumsum(np.bincount(owner, minlength=clients))
    # A stable sort by owner keeps the positions of each client in ascending order.
    index = np.argsort(owner, kind="stable")
    return Partition(index.astype(np.int32), np.append(0, start).astype(np.int32), name)


def validate_partition(partition: Partition, samples: int) -> None:
    """Checks that every sample is used at most once and that no client is empty.

    With ``repeats``, checks that no client has a sample more than once, apart from copies.

    Raises:
        ValueError: if start is malformed, an index is out of range or repeated, or a client has no
            samples.

    Example:
        >>> validate_partition(partition_from_lists([[0, 1], []]), samples=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: partition must give every client a sample, but clients 1 have no samples; ...
    """
    index, start = partition.index, partition.start
    if start.ndim != 1 or start.size < 2 or start[0] != 0 or start[-1] != index.size:
        raise ValueError(f"partition.start must run from 0 to {index.size}, got {start}")
    if np.any(partition.sizes < 0):
        raise ValueError(f"partition.start must not decrease, got {start}")
    end = 2 * samples if partition.repeats else samples
    outside = index[(index < 0) | (index >= end)]
    if outside.size:
        raise ValueError(f"partition.index must be in 0 to {end - 1}, got {outside[0]}")
    if partition.repeats:
        client = np.repeat(np.arange(partition.sizes.size), partition.sizes)
        place, often = np.unique((client * end + index)[index < samples], return_counts=True)
        twice = np.unique(place[often > 1] % end)
    else:
        twice = np.flatnonzero(np.bincount(index, minlength=1) > 1)
    if twice.size:
        raise ValueError(
            "partition.index must have each sample once, got "
            f"{shortened([*map(str, twice)])} more than once"
        )
    empty = np.flatnonzero(partition.sizes == 0)
    if empty.size:
        raise ValueError(
            "partition must give every client a sample, but clients "
            f"{shortened([*map(str, empty)])} have no samples; use fewer clients, less skew or "
            "another seed"
        )


def label_table(labels: ArrayLike, partition: Partition, classes: int) -> NDArray[np.int64]:
    """Counts the samples of each client and class.

    Args:
        labels: ``int[n]``, the labels of the pooled training arrays, in 0 … M - 1; samples
            without a label, -1, are not counted.
        partition: the partition; copies are counted.
        classes: M.

    Returns:
        The counts, ``int64[N, M]``.

    Raises:
        ValueError: if a label is not in 0 … M - 1.

    Example:
        >>> label_table([0, 1, 1, 0], partition_from_lists([[0, 3], [1, 2]]), 2).tolist()
        [[2, 0], [0, 2]]
    """
    y = np.asarray(labels)
    dealt = y[partition.index % len(y)] if partition.repeats else y[partition.index]
    if dealt.size and not -1 <= dealt.min() <= dealt.max() < classes:
        raise ValueError(
            f"labels must be in 0 to {classes - 1}, got {dealt.min()} to {dealt.max()}"
        )
    clients = partition.sizes.size
    cell = np.repeat(np.arange(clients), partition.sizes) * classes + dealt
    return np.bincount(cell[dealt >= 0], minlength=clients * classes).reshape(clients, classes)


def save_partition(
    path: str | os.PathLike[str],
    partition: Partition,
    labels: ArrayLike | None = None,
    dataset: str = "",
) -> None:
    """Saves a partition as .npz, atomically.

    Args:
        path: path of the file, used as it is; its folder is created.
        partition: the partition.
        labels: ``int[n]``, labels of the pooled training arrays, which are checked on loading.
        dataset: name of the data set, for the message if the labels differ on loading.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_partition(f"{folder}/p.npz", partition_from_lists([[0], [1]], "iid"))
        ...     load_partition(f"{folder}/p.npz").name
        'iid'
    """
    arrays = {
        "index": partition.index,
        "start": partition.start,
        "name": np.array(partition.name),
        "repeats": np.array(partition.repeats),
        "sent": np.array(partition.sent),
        "labels": np.array("" if labels is None else _labels_hash(labels)),
        "samples": np.array(0 if labels is None else len(np.asarray(labels))),
        "dataset": np.array(dataset),
    }
    write_npz(Path(path), arrays)


def load_partition(
    path: str | os.PathLike[str], labels: ArrayLike | None = None, dataset: str = ""
) -> Partition:
    """Loads a partition that :func:`fedjax_sim.partition.save_partition` saved.

    Args:
        path: the .npz file.
        labels: ``int[n]``, labels of the pooled training arrays, which must match the labels that
            were saved, if any.
        dataset: name of the data set, for the message.

    Returns:
        The partition, bit for bit.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the file is not a partition, or its labels differ.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_partition(f"{folder}/p.npz", partition_from_lists([[0], [1]]), [5, 6], "mine")
        ...     load_partition(f"{folder}/p.npz", [5, 6, 5], "yours")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: path must be ... deals the 2 samples of mine, not the 3 of yours
    """
    try:
        stored = read_npz(Path(path))
        repeats = "repeats" in stored and bool(stored["repeats"])
        sent = int(stored["sent"]) if "sent" in stored else 0
        lists = stored["index"], stored["start"]
        if any(a.ndim != 1 or a.dtype.kind not in "iu" for a in lists):
            raise ValueError("index and start must be integers [n]")
        partition = Partition(*lists, str(stored["name"]), repeats, sent)
        fingerprint, samples, source = (str(stored[key]) if key in stored else "" for key in LABELS)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"path must be a partition that save_partition wrote, got {os.fspath(path)!r}"
        ) from error
    if labels is not None and fingerprint not in ("", _labels_hash(labels)):
        raise ValueError(
            f"path must be a partition of the same labels, got {os.fspath(path)!r}, which deals "
            f"the {int(samples):,} samples of {source or 'other data'}, not the "
            f"{len(np.asarray(labels)):,} of {dataset or 'these'}"
        )
    return partition


def _labels_hash(labels: ArrayLike) -> str:
    y = np.asarray(labels)
    whole = y.ndim == 1 and y.dtype.kind in "biu"  # however many bytes each has
    return hashlib.sha256(np.asarray(y, "<i4" if whole else "<f4").tobytes()).hexdigest()


def partition_hash(partition: Partition) -> str:
    """Computes a platform-independent hash of a partition, without its name.

    Args:
        partition: the partition.

    Returns:
        Hexadecimal SHA-256 of index and start as little-endian int32.

    Example:
        >>> partition_hash(partition_from_lists([[0, 1], [2]]))[:16]
        'fe78c65211dd0b56'
    """
    content = [np.asarray(a, "<i4").tobytes() for a in (partition.index, partition.start)]
    return hashlib.sha256(b"".join(content)).hexdigest()
