"""CPU cores as devices."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax

from fedjax_sim.base import Count, ranges

_COUNTS = ranges.limits([("count", Count, {})])


class OneDeviceWarning(UserWarning):
    """All clients train on one CPU device although the machine has more cores."""


def available_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores(count: int | None = None) -> None:
    """Makes each core a CPU device, so that clients train in parallel.

    By default JAX has one CPU device, whose threads share each operation. An accelerator is not
    affected. This sets JAX's ``jax_num_cpu_devices``; the command line does so automatically.

    Args:
        count: number of devices; None: the number of cores that this process may use.

    Raises:
        ValueError: if count is not a whole number from 1.
        RuntimeError: if JAX has started with another number: call it before JAX computes anything.

    >>> use_cores(len(jax.devices("cpu")))  # the current number: nothing changes
    """
    ranges.check(_COUNTS, {"count": count})
    wanted = count or available_cores()
    settings: Any = jax.config  # untyped
    if settings.jax_num_cpu_devices == wanted:
        return  # JAX 0.7 raises once it has started, as when a notebook's cell runs twice
    try:
        settings.update("jax_num_cpu_devices", wanted)
    except RuntimeError as error:
        current = len(jax.devices("cpu"))
        raise RuntimeError(
            f"use_cores must come before JAX computes anything: it has started, with {current} CPU "
            f"device{'s' if current > 1 else ''}"
        ) from error


def default_device() -> jax.Device | None:
    """Returns the device that ``jax_default_device`` was set to; None if it was not."""
    settings: Any = jax.config  # untyped
    device = settings.jax_default_device
    return device if isinstance(device, jax.Device) else None


def warn_of_unused_cores(devices: tuple[jax.Device, ...]) -> None:
    """Warns if the default devices are one CPU device of a machine with more cores."""
    cores = available_cores()
    settings: Any = jax.config  # untyped
    chosen = settings.jax_num_cpu_devices > 0
    if len(devices) == 1 and devices[0].platform == "cpu" and cores > 1 and not chosen:
        warnings.warn(
            f"clients train on one CPU device of {cores} cores: call fedjax_sim.use_cores() before "
            "JAX computes anything, or pass execution=make_execution(devices=1)",
            OneDeviceWarning,
            stacklevel=2,
        )
