"""The program that scores models on the evaluation sets, whatever algorithm trained them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from fedjax_sim.base import ModelApply, Task, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.run.axes import RunAxes
from fedjax_sim.run.inputs import shared
from fedjax_sim.run.metrics import Counts, evaluate


def scoring(apply: ModelApply, task: Task, execution: Execution, axes: RunAxes) -> Any:
    """What counts the answers of the models of each run, jitted.

    It takes the models ``[R, *p]`` and the sets, and gives the counts of each set, ``[R, ...]``.

    Args:
        apply: the model's.
        task: what is counted of its answers.
        execution: devices.
        axes: of the runs.
    """
    # Of evaluation sets all lies on the devices, and nobody keeps anything.
    execution = dataclasses.replace(execution, samples_mb=None, client_state_mb=None)

    def make(apply: ModelApply) -> Any:
        score = functools.partial(evaluate, apply, task, execution)
        of_sets = [axes.map(score, in_axes=(0, axes_of_set)) for axes_of_set in axes.sets]

        def score_all(variables: Variables, sets: tuple[EvalSet, ...]) -> tuple[Counts, ...]:
            return tuple(
                of_set(variables, examples) for of_set, examples in zip(of_sets, sets, strict=True)
            )

        whole = execution.replicated
        return jax.jit(score_all, in_shardings=whole, out_shardings=whole)

    return shared(apply, (task, execution, axes.runs, axes.sets), make)
