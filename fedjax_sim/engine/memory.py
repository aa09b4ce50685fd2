"""Memory of the devices, and whether a program fits in it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.stages import Compiled, Lowered

from fedjax_sim.base.files import memory_of_host

MB = 1e6

_HANDED_ON = {
    "device_put", "dynamic_update_slice", "reshape", "scatter", "scatter-add",
    "sharding_constraint", "squeeze",
}  # fmt: skip
"""What gives an array that it was given, all of it or but for a few entries."""

_ADVICE = "take fewer clients a round, fewer seeds at once, or train fewer models at a time (chunk)"


class TooLargeError(ValueError):
    """More than a device's memory holds."""


def compiled(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compiled:
    """The program, compiled by XLA, which on accelerators plans all of the memory.

    Args:
        lowered: the program.
        options: XLA's, for this program; None for those of the process.

    Raises:
        TooLargeError: if the memory of a device does not hold it; says both sizes.
    """
    try:
        return lowered.compile(None if options is None else dict(options))
    except jax.errors.JaxRuntimeError as error:
        told = str(error).partition("\n")[0]
        code, _, reason = told.partition(": ")
        if code != "RESOURCE_EXHAUSTED":
            raise
        raise TooLargeError(f"{reason.rstrip('.') or told}: {_ADVICE}") from error


def arguments(program: Compiled) -> int:
    """Bytes of what a program is given on one device; unused arguments do not count."""
    memory: Any = program.memory_analysis()
    return 0 if memory is None else int(memory.argument_size_in_bytes)


def needed(program: Compiled) -> int:
    """Bytes that a program holds on one device at most, what it is given and gives included."""
    memory: Any = program.memory_analysis()
    if memory is None:  # a backend that does not say
        return 0
    given, made = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return int(given + made - memory.alias_size_in_bytes + memory.temp_size_in_bytes)


def largest_made(jaxpr: Jaxpr) -> int:
    """Bytes of the largest array that operations of a program make, loops included.

    What is handed on does not count, nor what is changed in a few places.

    >>> import jax.numpy as jnp
    >>> made = jax.make_jaxpr(lambda a, i: a.at[i].add(a[i] * jnp.ones((8, 1))))
    >>> largest_made(made(jnp.zeros((1000, 2)), jnp.arange(8)).jaxpr)
    64
    """
    made = (e.outvars for e in operations(jaxpr) if not _hands_on(e))
    shapes: list[Any] = [out.aval for outs in made for out in outs]
    return max((a.size * a.dtype.itemsize for a in shapes), default=0)


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Those of a program and of the programs within it, such as the bodies of loops.

    >>> doubled = jax.make_jaxpr(jax.jit(lambda x: 2 * x))
    >>> [operation.primitive.name for operation in operations(doubled(1.0).jaxpr)]
    ['mul']
    """
    for equation in jaxpr.eqns:
        inner = programs_of(equation)
        for program in inner:
            yield from operations(program)
        if not inner:
            yield equation


def programs_of(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns the programs within an operation: a loop's body and condition, say."""
    params = jax.tree.leaves([*equation.params.values()], is_leaf=_is_program)
    return [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in params if _is_program(p)]


def _hands_on(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "broadcast_in_dim":  # with one more axis of length 1
        given: Any = equation.invars[0].aval
        made: Any = equation.outvars[0].aval
        return bool(given.size == made.size)
    return equation.primitive.name in _HANDED_ON


def _is_program(part: Any) -> bool:
    return isinstance(part, ClosedJaxpr | Jaxpr)


def memory_of(devices: Sequence[jax.Device]) -> int | None:
    """Bytes of one device; of several CPU devices, which share a machine, an equal part of its.

    Devices of other processes say nothing here, and are not asked.

    >>> one, two = memory_of(jax.devices()[:1]), memory_of(jax.devices()[:2])
    >>> one is None or one // 2 == two
    True
    """
    devices = _here(devices)
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    there = memory_of_host()
    return None if there is None else there // len(devices)


def _here(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of this process."""
    return [d for d in devices if d.process_index == jax.process_index()]


def held_of_host(size: int, devices: Sequence[jax.Device]) -> int:
    """Bytes of this machine's memory that its devices hold, ``size`` each: CPUs have no other.

    >>> held_of_host(5, jax.devices("cpu")[:2])
    10
    """
    here = _here(devices)
    return size * len(here) if here[0].platform == "cpu" else 0


def check_fits(size: int, devices: Sequence[jax.Device]) -> None:
    """Refuses a run that is larger than the memory of a device.

    Raises:
        TooLargeError: with both numbers.
    """
    there = memory_of(devices)
    if there is not None and size > there:
        count = len(devices)
        each = "the device, which has" if count == 1 else f"each of {count} devices, which have"
        raise TooLargeError(
            f"the run needs {size / MB:,.0f} MB on {each} {there / MB:,.0f} MB: {_ADVICE}"
        )


def check_room(what: str, size: int) -> None:
    """Refuses what no memory of this machine holds, before any of it is made.

    Args:
        what: with its number, as in "5 copies of the model".
        size: bytes.

    Raises:
        TooLargeError: with both numbers.

    >>> check_room("100 copies of the model", 10**18)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedjax_sim.engine.memory.TooLargeError: 100 copies of the model take 1,000,000,000,000 MB: ...
    """
    there = max(memory_of_host() or 0, memory_of(jax.local_devices()[:1]) or 0)
    if 0 < there < size:
        raise TooLargeError(
            f"{what} take {size / MB:,.0f} MB: more than the {there / MB:,.0f} MB of this machine"
        )


def trim() -> None:
    """Gives the system what programs that are over have freed.

    glibc keeps it for threads that never come back: compiling six small runs in turn held 839 MB,
    and 514 MB after this.
    """
    with suppress(OSError, AttributeError, TypeError):  # other systems have no such thing
        ctypes.CDLL(None).malloc_trim(0)
