"""Fingerprints of runs, to compare runs later."""

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

_PLAIN = (bool, int, float, complex, str, bytes)


def digest(value: Any) -> str:
    """Returns a fingerprint of settings, functions and arrays; the same in another process.

    A function contributes its name, its constants and its closure: ``optax.sgd(0.1)`` is not
    ``optax.sgd(0.2)``. An unknown object contributes its type. Equal runs therefore always have
    equal fingerprints; different runs may too.

    >>> import optax
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.1))
    True
    >>> digest(optax.sgd(0.1)) == digest(optax.sgd(0.2))
    False
    """
    return _digest(value, {})


def random_settings() -> dict[str, Any]:
    """Returns the settings of JAX that determine the random numbers of a seed."""
    names = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")
    return {name: getattr(jax.config, name) for name in names}


def _digest(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Returns a fingerprint; ``known`` keeps visited objects alive, so ids stay unique."""
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


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a function that is defined after this one
        return False
    return True
