"""Memory of the devices, and the memory and work of programs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.stages import Compiled, Lowered

from fedjax_sim.base.files import memory_of_host

MB = 1e6

_ALIASING = {
    "device_put", "dynamic_update_slice", "reshape", "scatter", "scatter-add",
    "sharding_constraint", "squeeze",
}  # fmt: skip
"""Primitives whose output aliases their input, except for a few entries."""

_PRODUCTS = "dot_general", "conv_general_dilated"

_ADVICE = "take fewer clients a round, fewer seeds at once, or train fewer models at a time (chunk)"


class TooLargeError(ValueError):
    """Arrays that exceed the memory of a device or of this machine."""


def compile_program(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compiles a program; on accelerators XLA plans all of its memory.

    Raises:
        TooLargeError: if it does not fit in a device's memory; names both sizes.
    """
    try:
        return lowered.compile(None if options is None else dict(options))
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n")[0]
        code, _, reason = message.partition(": ")
        if code != "RESOURCE_EXHAUSTED":
            raise
        raise TooLargeError(f"{reason.rstrip('.') or message}: {_ADVICE}") from error


def argument_bytes(program: Compiled) -> int:
    """Returns the bytes of a program's arguments on one device; unused ones do not count."""
    memory: Any = program.memory_analysis()
    return 0 if memory is None else int(memory.argument_size_in_bytes)


def peak_bytes(program: Compiled) -> int:
    """Returns the peak memory of a program on one device in bytes, with arguments and results."""
    memory: Any = program.memory_analysis()
    if memory is None:  # unknown to this backend
        return 0
    given, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return int(given + results - memory.alias_size_in_bytes + memory.temp_size_in_bytes)


def largest_new_array(jaxpr: Jaxpr) -> int:
    """Returns the bytes of the largest array that a program makes, loops included.

    Arrays that are returned unchanged, or updated in a few places, do not count.

    >>> import jax.numpy as jnp
    >>> made = jax.make_jaxpr(lambda a, i: a.at[i].add(a[i] * jnp.ones((8, 1))))
    >>> largest_new_array(made(jnp.zeros((1000, 2)), jnp.arange(8)).jaxpr)
    64
    """
    made = (e.outvars for e in operations(jaxpr) if not _aliases_input(e))
    shapes: list[Any] = [out.aval for outs in made for out in outs]
    return max((a.size * a.dtype.itemsize for a in shapes), default=0)


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the operations of a program and of its inner programs, such as bodies of loops."""
    for equation in jaxpr.eqns:
        inner = programs_of(equation)
        for program in inner:
            yield from operations(program)
        if not inner:
            yield equation


def programs_of(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns the inner programs of an operation, such as a loop's body and condition."""
    params = jax.tree.leaves([*equation.params.values()], is_leaf=_is_program)
    return [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in params if _is_program(p)]


def step_flops(jaxpr: Jaxpr, loops: int = 2) -> float:
    """Returns the FLOPs of the matrix products and convolutions of a local step.

    A step is inside two loops of unknown length, over rounds and over steps; scans inside it count
    with their length. Work outside of steps does not count.

    >>> import jax.numpy as jnp
    >>> step = lambda _, x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]
    >>> visit = lambda x, n: (jax.lax.fori_loop(0, n, step, x), None)
    >>> round = lambda _, x: jax.lax.scan(visit, x @ x, jnp.arange(5))[0]
    >>> rounds = lambda n, x: jax.lax.fori_loop(0, n, round, x)
    >>> step_flops(jax.make_jaxpr(rounds)(9, jnp.ones((2, 2))).jaxpr)  # 3 products of 16 FLOPs
    48.0
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inside, times = loops - (name == "while"), 1
        if name == "scan" and loops <= 0:
            times = params["length"]
        total += times * sum(step_flops(program, inside) for program in programs_of(equation))
        if loops > 0 or name not in _PRODUCTS:
            continue
        numbers = params["dimension_numbers"]
        arrays: list[Any] = [a.aval for a in (*equation.invars, *equation.outvars)]
        left, right, out = arrays
        if name == "dot_general":
            terms = math.prod(left.shape[axis] for axis in numbers[0][0])
        else:
            terms = right.size // right.shape[numbers.rhs_spec[0]]
        total += 2.0 * terms * out.size
    return total


def forward_work(jaxpr: Jaxpr) -> tuple[int, int]:
    """Counts the matrix products and convolutions of a program, and the bytes that it computes.

    Scans count with their length. Of branches, the last one counts.

    >>> import jax.numpy as jnp
    >>> four = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=4)[0]
    >>> forward_work(jax.make_jaxpr(four)(jnp.ones((2, 2))).jaxpr)
    (4, 64)
    """
    products = computed = 0
    for equation in jaxpr.eqns:
        name, params, inner = equation.primitive.name, equation.params, programs_of(equation)
        times = params["length"] if name == "scan" else 1
        for program in inner[-1:] if name == "cond" else inner:
            inside = forward_work(program)
            products, computed = products + times * inside[0], computed + times * inside[1]
        if not inner:
            products += name in _PRODUCTS
            made: list[Any] = [out.aval for out in equation.outvars]
            computed += sum(a.size * a.dtype.itemsize for a in made)
    return products, computed


def _aliases_input(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "broadcast_in_dim":  # with one more axis of length 1
        given: Any = equation.invars[0].aval
        made: Any = equation.outvars[0].aval
        return bool(given.size == made.size)
    return equation.primitive.name in _ALIASING


def _is_program(part: Any) -> bool:
    return isinstance(part, ClosedJaxpr | Jaxpr)


def memory_of(devices: Sequence[jax.Device]) -> int | None:
    """Returns the memory of one device in bytes; CPU devices share the machine's equally.

    Only devices of this process are read.

    >>> one, two = memory_of(jax.devices()[:1]), memory_of(jax.devices()[:2])
    >>> one is None or one // 2 == two
    True
    """
    devices = _local(devices)
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    total = memory_of_host()
    return None if total is None else total // len(devices)


def _local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices of this process."""
    return [d for d in devices if d.process_index == jax.process_index()]


def host_bytes_held(size: int, devices: Sequence[jax.Device]) -> int:
    """Returns the bytes of host memory that CPU devices of this process hold, ``size`` each."""
    local = _local(devices)
    return size * len(local) if local[0].platform == "cpu" else 0


def check_fits(size: int, devices: Sequence[jax.Device]) -> None:
    """Rejects a run that is larger than the memory of a device."""
    available = memory_of(devices)
    if available is not None and size > available:
        count = len(devices)
        each = "the device, which has" if count == 1 else f"each of {count} devices, which have"
        raise TooLargeError(
            f"the run needs {size / MB:,.0f} MB on {each} {available / MB:,.0f} MB: {_ADVICE}"
        )


def check_memory_for(what: str, size: int) -> None:
    """Rejects arrays that do not fit in any memory of this machine, before they are made."""
    available = max(memory_of_host() or 0, memory_of(jax.local_devices()[:1]) or 0)
    if 0 < available < size:
        raise TooLargeError(
            f"{what} take {size / MB:,.0f} MB: more than the {available / MB:,.0f} MB of this "
            "machine"
        )


def trim() -> None:
    """Returns freed memory to the system.

    glibc keeps it for threads that have ended: compiling six small runs in turn held 839 MB, and
    514 MB after this.
    """
    with suppress(OSError, AttributeError, TypeError):  # not on other systems
        ctypes.CDLL(None).malloc_trim(0)
