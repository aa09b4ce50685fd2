"""What the programs of an experiment are given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from fedjax_sim.base import Array, Variables
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.streams import Seed, stream

T = TypeVar("T")
Init = Callable[[Array], Variables]
_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def shared(owner: Any, key: Hashable, make: Callable[[Callable[..., Any]], T]) -> T:
    """What ``make`` jits, one for each ``key`` as long as the owner lives.

    JAX then compiles it once: of a model's function, whatever algorithms train the model; of an
    algorithm, however often it runs.

    Args:
        owner: a function of a model, or an algorithm.
        key: all that the program depends on besides.
        make: jits what calls the function that it is given: the owner, if that is one.
    """
    try:
        of_owner = _programs.setdefault(owner, {})
        if key in of_owner:
            made: T = of_owner[key]
            return made
    except TypeError:  # one of them cannot be a key: the program serves one experiment
        return make(owner)
    known = weakref.ref(owner)  # else the entry would hold its own key

    def of_the_owner(*args: Any, **options: Any) -> Any:
        alive = known()
        assert alive is not None
        return alive(*args, **options)

    return of_owner.setdefault(key, make(of_the_owner))


def forget(owner: Any) -> None:
    """Frees what is shared of an owner that nobody will ask for again, about 10 MB of a method."""
    _programs.pop(owner, None)


def drawing(init: Init, sharding: Sharding) -> Any:
    """What draws the weights of each run, ``uint32[R] -> [R, *p]``, jitted.

    Within a program of each start it took more compiling than all the rest.

    Args:
        init: the model's.
        sharding: of the seeds and the weights.
    """

    def make(init: Init) -> Any:
        def draw(seed: Array) -> Variables:
            return init(stream(jax.random.key(seed), Seed.WEIGHTS))

        return jax.jit(jax.vmap(draw), in_shardings=sharding, out_shardings=sharding)

    return shared(init, sharding, make)


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
