"""What the programs of an experiment are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from fedjax_sim.base import Array, Variables
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.streams import Seed, stream

T = TypeVar("T")
Init = Callable[[Array], Variables]
_draws: weakref.WeakKeyDictionary[Init, dict[Sharding, Any]] = weakref.WeakKeyDictionary()


def drawing(init: Init, sharding: Sharding) -> Any:
    """What draws the weights of each run, ``uint32[R] -> [R, *p]``, jitted.

    As long as the model lives it is one function, so that JAX compiles it once, whatever algorithms
    train the model: within a program of each start it took more compiling than all the rest.

    Args:
        init: the model's.
        sharding: of the seeds and the weights.
    """
    try:
        of_model = _draws.setdefault(init, {})
    except TypeError:  # it cannot be a key, so that its program serves one experiment
        of_model = {}
    if sharding not in of_model:
        known = weakref.ref(init)  # else the entry would hold its own key

        def draw(seed: Array) -> Variables:
            alive = known()
            assert alive is not None
            return alive(stream(jax.random.key(seed), Seed.WEIGHTS))

        of_model[sharding] = jax.jit(jax.vmap(draw), in_shardings=sharding, out_shardings=sharding)
    return of_model[sharding]


def placed(given: T, execution: Execution) -> T:
    """Data and sets whole on every device, each array once however many hold it."""
    on_device: dict[int, Array] = {}
    whole = execution.replicated

    # Of several processes each has all data and fills its own devices; device_put would compare
    # them over the network.
    def put(a: Array) -> Array:
        if id(a) not in on_device:
            on_device[id(a)] = jax.make_array_from_process_local_data(whole, a)
        return on_device[id(a)]

    out: T = jax.tree.map(put, given)
    return out


def stacked(initial: Variables, shapes: Variables, runs: int) -> Variables:
    """The weights of each run, ``[R, *p]``.

    Args:
        initial: those of one model, or ``[R, *p]``.
        shapes: of the model.
        runs: R.

    Raises:
        ValueError: if they have other shapes.
    """
    got = jax.tree.map(np.shape, initial)
    one, each = (
        jax.tree.map(lambda a, axis=axis: (*axis, *a.shape), shapes) for axis in ((), (runs,))
    )
    if got not in (one, each):
        raise ValueError(
            f"initial must be weights of the model, for one or each of the {runs} runs, "
            f"got {got} for {one}"
        )
    return jax.tree.map(  # by NumPy, without a program for each shape
        lambda a, s: np.broadcast_to(np.asarray(a, s.dtype), (runs, *s.shape)), initial, shapes
    )
