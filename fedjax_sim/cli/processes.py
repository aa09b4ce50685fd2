"""``--distributed``: one command in several processes, on one host or many.

Each loads the same data and runs the same programs; only results of devices use the network.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

PATIENCE = 60
"""Seconds in which all processes must have met."""

SILENCE = 30
"""Seconds without a sign of life after which a process counts as dead, and the others end."""


class Meeting(NamedTuple):
    """The address and number of the processes of a run; None: JAX reads them from the cluster."""

    address: str | None = None  # host:port of process 0
    processes: int | None = None
    number: int | None = None  # of this one, from 0


def meeting(text: str) -> Meeting:
    """Parses the flag.

    >>> meeting("localhost:1234,2,0")
    Meeting(address='localhost:1234', processes=2, number=0)
    >>> meeting("auto")
    Meeting(address=None, processes=None, number=None)
    """
    if text == "auto":
        return Meeting()
    found = re.fullmatch(r"([^\s,]+:(\d+)),(\d+),(\d+)", text)
    if found is not None:
        port, processes, number = map(int, found.groups()[1:])
        if 0 < port < 2**16 and number < processes:
            return Meeting(found[1], processes, number)
    raise ValueError(
        "must be auto or HOST:PORT,PROCESSES,INDEX with an index from 0 below the number of "
        f"processes, as in localhost:1234,2,0, got {text[:60]!r}"
    )


def join(where: Meeting) -> None:
    """Connects the processes: afterwards ``jax.devices()`` are the devices of all of them.

    Only process 0 prints to stdout; the others only print errors. JAX aborts a process that cannot
    connect within a minute.
    """
    # Else SIGTERM would no longer end a process.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *where,
            cluster_detection_method=None if where.address is None else "deactivate",
            initialization_timeout=PATIENCE,
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=SILENCE,
        )
    except (ValueError, RuntimeError) as error:
        known = "; auto is for SLURM, Open MPI, Kubernetes and TPU slices"
        hint = known if where.address is None else ""
        raise ValueError(f"--distributed: {str(error).rstrip('.')}{hint}") from error
    counts = Counter(device.process_index for device in jax.devices())
    if len({*counts.values()}) > 1:
        each = " and ".join(str(counts[process]) for process in sorted(counts))
        raise ValueError(f"--devices must be given: the processes have {each}")
    if not writes():
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def writes() -> bool:
    """Returns whether this process prints, draws and writes."""
    return jax.process_index() == 0


@contextmanager
def in_step() -> Iterator[list[Any]]:
    """Keeps processes in step: if one fails inside, all fail.

    Yields:
        A list for texts and pytrees of arrays that must be equal in all processes.

    Raises:
        ValueError: if they are not, or another process failed inside.
    """
    same: list[Any] = []
    if not jax.distributed.is_initialized():
        yield same
        return
    try:
        yield same
    except Exception:
        _gather(np.zeros(32, np.uint8))
        raise
    digests = _gather(_digest(same))
    failed = [i for i, digest in enumerate(digests) if not digest.any()]
    if failed:
        raise ValueError(f"--distributed: process {failed[0]} failed; see its error")
    others = [i for i, digest in enumerate(digests) if not np.array_equal(digest, digests[0])]
    if others:
        raise ValueError(
            "--distributed: all processes must have the same flags, versions, data and "
            f"checkpoints, process {others[0]} has others than process 0"
        )


def wait() -> None:
    """Waits for all processes, longer than JAX's own shutdown."""
    if jax.distributed.is_initialized():
        _gather(np.zeros(1, np.uint8))


def largest_of_all(number: int) -> int:
    """Returns the largest number of all processes, so a request to one applies to all."""
    if not jax.distributed.is_initialized():
        return number
    return int(_gather(np.array([number], np.uint8)).max())


def _gather(mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Gathers an array of every process, ``uint8[processes, n]``."""
    every: NDArray[np.uint8] = multihost_utils.process_allgather(mine)
    return every


def _digest(values: Any) -> NDArray[np.uint8]:
    """Returns the fingerprint ``uint8[32]`` of a pytree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(values):
        digest.update(leaf.encode() if isinstance(leaf, str) else np.asarray(leaf).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
