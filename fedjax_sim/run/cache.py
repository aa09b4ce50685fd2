"""Jitted programs that experiments share, and a counter of compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ModelApply, Task, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.engine.targets import xla_option_probe
from fedjax_sim.run.layout import RunAxes
from fedjax_sim.run.metrics import Counts, evaluate

T = TypeVar("T")
Init = Callable[[Array], Variables]
_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def shared_program(owner: Any, key: Hashable, make: Callable[[Callable[..., Any]], T]) -> T:
    """Returns ``make``'s jitted function, made once for each ``key`` while the owner lives.

    JAX then compiles it once: a model's program for all algorithms that train the model, an
    algorithm's program for all its runs. The owner is an algorithm, or a function of a model, with
    which ``make`` is called.
    """
    try:
        of_owner = _programs.setdefault(owner, {})
        if key in of_owner:
            made: T = of_owner[key]
            return made
    except TypeError:  # not hashable: the program serves one experiment
        return make(owner)
    reference = weakref.ref(owner)  # else the entry would keep its own key alive

    def call_owner(*args: Any, **options: Any) -> Any:
        alive = reference()
        assert alive is not None
        return alive(*args, **options)

    return of_owner.setdefault(key, make(call_owner))


def forget_programs(owner: Any) -> None:
    """Frees the programs of an owner that will not run again, about 10 MB for a method."""
    _programs.pop(owner, None)


def weights_program(init: Init, execution: Execution) -> Any:
    """Returns the program that draws the weights of each run, ``uint32[R] -> [R, *p]``.

    As a part of each start program it took longer to compile than everything else. If a group of
    devices shares a model, no device ever holds all of its weights.
    """
    whole = execution.replicated

    def make(init: Init) -> Any:
        def draw(seed: Array) -> Variables:
            return init(stream(jax.random.key(seed), Seed.WEIGHTS))

        placed: Any = whole
        if execution.model_devices > 1:
            seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
            placed = execution.shardings(jax.eval_shape(jax.vmap(draw), seeds), None)
        return jax.jit(jax.vmap(draw), in_shardings=whole, out_shardings=placed)

    return shared_program(init, whole, make)


def evaluation_program(apply: ModelApply, task: Task, execution: Execution, axes: RunAxes) -> Any:
    """Returns the program that scores the models of each run, for any algorithm.

    Its arguments are the models ``[R, *p]`` and the sets; it returns the counts of each set,
    ``[R, ...]``.
    """
    # Evaluation sets are whole on the devices, and there is no per-client state.
    execution = dataclasses.replace(execution, samples_mb=None, client_state_mb=None)

    def make(apply: ModelApply) -> Any:
        score = functools.partial(evaluate, apply, task, execution)
        of_sets = [axes.map(score, in_axes=(0, axes_of_set)) for axes_of_set in axes.sets]

        def score_all(variables: Variables, sets: tuple[EvalSet, ...]) -> tuple[Counts, ...]:
            return tuple(
                of_set(variables, examples) for of_set, examples in zip(of_sets, sets, strict=True)
            )

        whole = execution.replicated
        placed = whole if execution.model_devices == 1 else None  # as they are given
        return jax.jit(score_all, in_shardings=(placed, whole), out_shardings=whole)

    return shared_program(apply, (task, execution, axes.runs, axes.sets), make)


class _Counter:
    """The number of programs that were compiled since it was made."""

    def __init__(self) -> None:
        self.compiled: list[None] = []  # one entry each: threads compile at once

    @property
    def programs(self) -> int:
        return len(self.compiled)


_counters: list[_Counter] = []


@functools.cache
def _listen() -> None:
    """Registers a listener permanently: not every supported JAX can remove one."""

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        probe = xla_option_probe.__name__ in about.get("fun_name", "")
        if not probe and event == "/jax/core/compile/backend_compile_duration":
            for counter in tuple(_counters):
                counter.compiled.append(None)

    jax.monitoring.register_event_duration_secs_listener(listen)


@contextmanager
def count_programs() -> Iterator[_Counter]:
    """Counts the programs that XLA compiles, including accidental ones."""
    _listen()
    counter = _Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
