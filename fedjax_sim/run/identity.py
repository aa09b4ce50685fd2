"""What a run is made of, as one short text: whether two runs are the same can be asked later."""

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

from fedjax_sim.engine.execution import Execution


def digest(value: Any) -> str:
    """A fingerprint of settings, functions and arrays; the same in another process.

    A function counts by its name, its constants and what it closes over: ``optax.sgd(0.1)`` is not
    ``optax.sgd(0.2)``. An object of which nothing is known counts by its type. So equal runs are
    never told apart, and unequal ones may be missed.

    >>> import optax
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.1))
    True
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.2))
    False
    """
    return _digest(value, {})


def _digest(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """``known`` are the objects met before, which stay alive so that no other has their id."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, "itself"  # until it is known: a function may close over itself
    found = hashlib.sha256(type(value).__qualname__.encode())
    of_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not of_objects:
        given: Any = value
        if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
            given = jax.random.key_data(given)
        array = np.asarray(given)
        found.update(f"{value.dtype}{array.shape}".encode())
        # Not tobytes(), which copies: these are all the samples.
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    else:
        for inside in _inside(value):
            found.update(f"{_digest(inside, known)},".encode())
    known[id(value)] = value, found.hexdigest()
    return found.hexdigest()


def _inside(value: Any) -> list[Any]:
    """What a value consists of."""
    if isinstance(value, Execution):  # the results are those of any devices
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
        # The parent of a flax module is the scope that it lives in.
        names = [f.name for f in dataclasses.fields(value) if f.name not in ("parent", "origin")]
        return [getattr(value, name, None) for name in names]
    wrapped = getattr(value, "__wrapped__", None)  # a jitted function
    return [getattr(value, "__qualname__", ""), wrapped]


def _constants(code: types.CodeType) -> list[Any]:
    """The constants of a function, and of those within it."""
    return [
        item
        for constant in code.co_consts
        for item in (_constants(constant) if isinstance(constant, types.CodeType) else [constant])
    ]


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a function that is defined after this one
        return False
    return True
