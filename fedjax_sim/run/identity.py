"""Fingerprints of runs, to find out later whether two runs are the same."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base.parts import is_users
from fedjax_sim.engine.execution import Execution

_PLAIN = (bool, int, float, complex, str, bytes)


def digest(value: Any) -> str:
    """Returns a fingerprint of settings, functions and arrays; the same in another process.

    A function contributes its name, its constants and its closure: ``optax.sgd(0.1)`` is
    not ``optax.sgd(0.2)``. An unknown object contributes its type. So equal runs always have equal
    fingerprints, and different runs may too.

    >>> import optax
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.1))
    True
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.2))
    False
    """
    return _digest(value, {})


def random_settings() -> dict[str, Any]:
    """Returns the settings of JAX that decide which random numbers are drawn from a seed."""
    names = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")
    return {name: getattr(jax.config, name) for name in names}


def _digest(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Returns a fingerprint; ``known`` keeps seen objects alive, so that ids stay unique."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, "itself"  # for now: a function may close over itself
    found = hashlib.sha256(type(value).__qualname__.encode())
    of_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not of_objects:
        given: Any = value
        if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
            given = jax.random.key_data(given)
        array = np.asarray(given)
        found.update(f"{value.dtype}{array.shape}".encode())
        # Not tobytes(), which copies: this may be all samples.
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    else:
        for inside in _contents(value):
            found.update(f"{_digest(inside, known)},".encode())
    known[id(value)] = value, found.hexdigest()
    return found.hexdigest()


def _contents(value: Any) -> list[Any]:
    """Returns the contents of a value."""
    if isinstance(value, Execution):  # results do not depend on the devices
        return []
    if isinstance(value, types.FunctionType):
        code, cells = value.__code__, value.__closure__ or ()
        held = [cell.cell_contents for cell in cells if _filled(cell)]
        name = f"{value.__module__}.{value.__qualname__}"
        return [name, *_constants(code), value.__defaults__, value.__kwdefaults__, *held]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Mapping):
        return [item for key in sorted(value, key=str) for item in (str(key), value[key])]
    if isinstance(value, np.ndarray):  # of objects, whose bytes are addresses
        return [value.shape, *value.ravel().tolist()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # The parent of a flax module is the scope that it lives in; the devices decide the range.
        outside = ("parent", "origin", "size_range")
        fields = [f for f in dataclasses.fields(value) if f.name not in outside]
        given = ((f.metadata.get("added"), getattr(value, f.name, None)) for f in fields)
        # Older checkpoints lack the fields that were added since.
        return [held for added, held in given if not (added and held is None)]
    wrapped = getattr(value, "__wrapped__", None)  # a jitted function
    return [getattr(value, "__qualname__", ""), wrapped]


def _constants(code: types.CodeType) -> list[Any]:
    """Returns the constants of a function and of its inner functions."""
    return [
        item
        for constant in code.co_consts
        for item in (_constants(constant) if isinstance(constant, types.CodeType) else [constant])
    ]


def code_digests(value: Any) -> dict[str, str]:
    """Returns fingerprints of the code of all user functions that a value reaches, by name.

    Each covers instructions, constants, and values read from modules; functions and classes read
    from there have fingerprints of their own. They are the same in another process of the same
    Python version.
    """
    found: dict[str, list[str]] = {}
    known: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, _PLAIN) or id(one) in known:
            continue
        known[id(one)] = one
        kind = one if isinstance(one, type) else type(one)
        if isinstance(one, types.FunctionType) and is_users(one.__module__):
            read = _globals_read(one)
            values = {name: read.pop(name) for name in [*read] if not _has_code(read[name])}
            name = f"{one.__module__}.{one.__qualname__}"
            found.setdefault(name, []).append(digest((_instructions(one.__code__), values)))
            waiting += read.values()
        elif is_users(kind.__module__):
            waiting += _methods(kind)
        waiting += _contents(one)
    return {name: digest(sorted(each)) for name, each in sorted(found.items())}


def _methods(kind: type) -> list[types.FunctionType]:
    """Returns the methods and properties of a class and its bases in user code."""
    found = [f for c in kind.__mro__ if is_users(c.__module__) for f in vars(c).values()]
    functions = [getattr(f, "fget", getattr(f, "__func__", f)) for f in found]
    return [f for f in functions if isinstance(f, types.FunctionType)]


def _instructions(of: types.CodeType) -> list[Any]:
    """Returns instructions, names and constants of a function and of its inner functions."""
    inside = [_instructions(c) if isinstance(c, types.CodeType) else c for c in of.co_consts]
    return [of.co_code, of.co_names, inside]


def _globals_read(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function reads in its module and other user modules."""
    names, waiting = set[str](), [function.__code__]
    while waiting:
        one = waiting.pop()
        names |= {*one.co_names}
        waiting += [c for c in one.co_consts if isinstance(c, types.CodeType)]
    spaces = [function.__globals__]
    for name in sorted(names & {*function.__globals__}):
        module = function.__globals__[name]
        if isinstance(module, types.ModuleType) and is_users(module.__name__):
            spaces.append(vars(module))
    return {
        f"{space.get('__name__')}.{name}": space[name]
        for space in spaces
        for name in names & {*space}
        if not isinstance(space[name], types.ModuleType)
    }


def _has_code(value: Any) -> bool:
    """Returns whether a value is a function or a class, or an object of a user class."""
    if isinstance(value, types.FunctionType | type) or hasattr(value, "__wrapped__"):
        return True
    return not isinstance(value, _PLAIN) and is_users(type(value).__module__)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a function that is defined after this one
        return False
    return True
