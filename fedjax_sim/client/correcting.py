"""Several corrections as one: of a gradient, and of what is asked before the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from fedjax_sim.base import (
    Array,
    ClientView,
    Context,
    Correction,
    PyTree,
    Survey,
    Variables,
)
from fedjax_sim.client.carried import Common, Kept
from fedjax_sim.engine import tree


def corrected(
    corrections: Sequence[Correction],
    grads: PyTree,
    params: PyTree,
    context: Context,
    states: tuple[Sequence[PyTree], Sequence[PyTree]],
    start: Callable[[], PyTree],
) -> PyTree:
    """What the corrections make of a gradient, in order.

    Args:
        corrections: in order.
        grads: the gradient.
        params: the weights at which it was taken.
        context: what the client knows.
        states: of each correction, the client's and the shared ones.
        start: the gradient of the same samples at the received model.
    """
    for d, client_state, shared_state in zip(corrections, *states, strict=True):
        if d.anchored:
            grads = tree.subtract(grads, start())
        grads = d.direction(grads, params, context, client_state, shared_state)
    return grads


def survey_of(
    corrections: Sequence[Correction],
    whole: Callable[[Context], Callable[[PyTree], PyTree]],
) -> Survey | None:
    """What the corrections ask before the training; None if none does.

    Args:
        corrections: in order.
        whole: the gradient of a client's whole loss, for what it knows.
    """
    asked = [d.survey for d in corrections]
    if not any(asked):
        return None

    def ask(
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
    ) -> PyTree:
        kept, common = Kept(*client_state), Common(*shared_state)
        context = Context(variables, client, key, kept.memory, common.shared)
        gradient = functools.partial(whole(context), variables.params)
        return tuple(() if s is None else s.ask(gradient, context) for s in asked)

    def tell(shared_state: PyTree, aggregate: PyTree) -> PyTree:
        common = Common(*shared_state)
        told = zip(asked, common.corrections, aggregate, strict=True)
        terms = tuple(c if s is None else s.tell(c, mean) for s, c, mean in told)
        return common._replace(corrections=terms)

    return Survey(ask, tell)
