"""Devices that are not there: XLA compiles for them on any machine."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
from jax.experimental import topologies

# What libtpu asks a TPU's host, told in advance: it waits for minutes for a host that is not there.
_HOSTLESS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once: none has a TPU
}
FORMS = "v5e:2x2, v6e:1x1 or another kind of TPU with the shape of its slice"


def devices_of(target: str) -> tuple[jax.Device, ...]:
    """The devices of a target, to compile for and not to run on.

    Args:
        target: a kind of TPU and the shape of a slice of it, ``v5e:2x2``; ``v5e:1x1`` is one chip,
            as in Colab.

    Returns:
        The devices, for :func:`fedjax_sim.make_execution`.

    Raises:
        ValueError: if there is no such target.
        ImportError: without libtpu, of the extra ``aot``.
    """
    if not re.fullmatch(r"v\d\w*:\d+(x\d+)+", target):
        raise ValueError(f"compile_for must be like {FORMS}, got {target!r}")
    try:
        import libtpu  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"compile_for {target} needs libtpu: pip install 'fedjax-sim[aot]'"
        ) from error
    for name, value in _HOSTLESS.items():
        os.environ.setdefault(name, value)
    # A host has four chips otherwise, of which a slice of one is no multiple.
    one = set(target.partition(":")[2].split("x")) == {"1"}
    bounds: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if one else {}
    try:
        description = topologies.get_topology_desc(target, "tpu", **bounds)
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"compile_for must be like {FORMS}, got {target!r} ({told})") from error
    return tuple(description.devices)
