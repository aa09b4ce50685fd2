"""The state of a visit of local SGD between two steps."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base import Array, PyTree, Variables
from fedjax_sim.engine import tree


class Plan(NamedTuple):
    """The values that are constant in a stretch of steps.

    Attributes:
        total: ``int32[]``, the number of steps of the visit.
        keys: ``[E]``, the keys of its epochs.
        solved: ``f32[]``, the norm of the gradient at which it stops; () for none.
        epoch: ``int32[]``, the number of the next epoch.
        key: the key of the current epoch.
        order: ``int32[capacity or more]``, the order of its samples.
        before: ``int32[]``, the steps taken before it.
    """

    total: Array
    keys: Array
    solved: PyTree
    epoch: Array
    key: Array
    order: Array
    before: Array


class Progress(NamedTuple):
    """The state of a visit between two steps.

    Attributes:
        variables: the model.
        opt_state: the optimiser's state.
        loss: ``f[]``, the sum of the losses of the samples seen.
        seen: ``int32[]``, the number of samples seen.
        path: ``[*p]``, the sum of the gradients; None if no correction reads it.
        companion: the companion and its optimiser's state; () for none.
        steps: ``int32[]``, the number of steps taken.
    """

    variables: Variables
    opt_state: PyTree
    loss: Array
    seen: Array
    path: PyTree
    companion: PyTree
    steps: Array


def widened(progress: Progress, received: Variables) -> Progress:
    """Returns the progress with weights in the dtypes of those received."""
    params = tree.typed_like(progress.variables.params, received.params)
    return progress._replace(variables=progress.variables._replace(params=params))
