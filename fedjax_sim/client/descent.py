"""One step of an optimiser, with corrections and a companion, and the state between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Accompanied,
    Array,
    Batch,
    ClientView,
    Companion,
    Context,
    Correction,
    Objective,
    PyTree,
    Survey,
    Transform,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.optimizers import accepted_arguments
from fedjax_sim.privacy import dp_sgd
from fedjax_sim.privacy._samples import Slope


class Common(NamedTuple):
    """The state that clients share through the server, and each client's message for it."""

    optimizer: PyTree
    corrections: tuple[PyTree, ...]
    shared: PyTree = ()


class Kept(NamedTuple):
    """The state that a client keeps between its visits."""

    optimizer: PyTree
    corrections: tuple[PyTree, ...]
    memory: PyTree = ()
    companion: Accompanied | tuple[()] = ()


class Visit(NamedTuple):
    """The arguments of :class:`fedjax_sim.base.Train`."""

    key: Array
    variables: Variables
    client: ClientView
    client_state: PyTree
    shared_state: PyTree

    def context(self) -> tuple[Context, PyTree]:
        """Returns the objective's context and the states of the corrections."""
        kept, common = Kept(*self.client_state), Common(*self.shared_state)
        context = Context(self.variables, self.client, self.key, kept.memory, common.shared)
        return context, (kept.corrections, common.corrections)


class Descent(NamedTuple):
    """A step: weights and optimiser after it, the loss and its own gradient before it."""

    weights: PyTree
    opt_state: PyTree
    loss: Array
    aux: PyTree
    gradient: PyTree


def descended(
    optimizer: optax.GradientTransformationExtraArgs,
    objective: Callable[[PyTree], tuple[Array, PyTree]],
    weights: PyTree,
    opt_state: PyTree,
    key: Array,
    *,
    corrected: Callable[[PyTree, PyTree], PyTree] = lambda gradient, weights: gradient,
    factor: Array | None = None,
    private: Slope | None = None,
) -> Descent:
    """Takes one step; with a ``private`` gradient the optimiser reads nothing else.

    ``corrected`` maps ``(gradient, weights)`` to the optimiser's gradient; ``factor`` multiplies
    the step.
    """
    if private is None:
        (loss, aux), gradient = jax.value_and_grad(objective, has_aux=True)(weights)
    else:
        loss, gradient, aux = private.loss, private.gradient, private.state

    # The extra arguments of optax's optimisers. The functions are traced only by those that call
    # them. A line search rejects arguments that value_fn does not name.
    def value_fn(
        weights: PyTree, key: Any = None, obj_fn: Any = None, grad_fn: Any = None
    ) -> Array:
        return objective(weights)[0]

    def grad_fn(weights: PyTree, step: Any = None) -> PyTree:
        return corrected(jax.grad(objective, has_aux=True)(weights)[0], weights)

    extra = {
        "value": loss,
        "grad": gradient,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": grad_fn,
        "key": key,
    }
    if private is not None:
        extra = {"key": key}
    updates, opt_state = optimizer.update(
        corrected(gradient, weights), opt_state, weights, **accepted_arguments(optimizer, extra)
    )
    if factor is not None:
        updates = tree.scale(factor, updates)
    return Descent(optax.apply_updates(weights, updates), opt_state, loss, aux, gradient)


def private_slope(
    mechanism: dp_sgd,
    objective: Objective,
    transform: Transform,
    batch_size: int,
    model: Variables,
    weights: PyTree,
    context: Context,
) -> Slope:
    """Returns the private gradient of ``weights``, the trained ones of a model without state."""

    def alone(some: PyTree, sample: Batch, key: Array) -> Array:
        sample = transform(key, sample, context.client)
        params = tree.filled(some, model.params)
        return objective(params, model.state, sample, context._replace(key=key))[0]

    slope = mechanism.slope(context.key, context.client, batch_size, alone, weights)
    return slope._replace(state=model.state)


def accompanied(
    companion: Companion,
    step: Callable[..., Descent],
    model: Variables,
    beside: tuple[Variables, PyTree],
    samples: Batch,
    context: Context,
) -> tuple[Variables, PyTree]:
    """Returns a companion and its optimiser's state after its own step on the same minibatch."""
    own, opt_state = beside

    def objective(params: PyTree) -> tuple[Array, PyTree]:
        used = companion.used(own._replace(params=params), model)
        return companion.objective(used.params, used.state, samples, context)

    taken = step(objective, own.params, opt_state)
    project = companion.project
    params = taken.weights if project is None else project(taken.weights)
    new = Variables(params, tree.typed_like(taken.aux, own.state))
    return new, tree.typed_like(taken.opt_state, opt_state)


def whole_gradient(
    objective: Objective, transform: Transform, batch_size: int, context: Context, params: PyTree
) -> PyTree:
    """Returns ∇F_k at ``params``, in training mode, from the received state in every minibatch."""
    client = context.client

    def add(carry: tuple[Array, PyTree], batch: Batch) -> tuple[Array, PyTree]:
        number, total = carry
        batch_key = jax.random.fold_in(context.key, number)
        samples = transform(batch_key, batch, client)
        grads, _ = jax.grad(objective, has_aux=True)(
            params, context.received.state, samples, context._replace(key=batch_key)
        )
        share = jnp.sum(samples.mask, dtype=jnp.int32) / jnp.maximum(client.size, 1)
        total = jax.tree.map(lambda t, g: t + share.astype(g.dtype) * g, total, grads)
        return number + 1, total

    start = (jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
    return sweep(client, batch_size, add, start)[1]


def corrected(
    corrections: Sequence[Correction],
    grads: PyTree,
    params: PyTree,
    context: Context,
    states: tuple[Sequence[PyTree], Sequence[PyTree]],
    start: Callable[[], PyTree],
) -> PyTree:
    """Applies corrections to a gradient, in order; it is 0 for entries that the client lacks.

    ``states`` are the client's and the shared states of the corrections; ``start()`` computes the
    gradient of the same samples at the received model.
    """
    for d, client_state, shared_state in zip(corrections, *states, strict=True):
        if d.anchored:
            grads = tree.subtract(grads, start())
        grads = d.direction(grads, params, context, client_state, shared_state)
    coverage, client = context.client.coverage, context.client
    if coverage is None:
        return grads
    assert client.id is not None
    assert client.round is not None  # it trains
    has = coverage(Variables(params, context.received.state), client.id, client.round).params
    return tree.masked(has, grads)


def survey_of(
    corrections: Sequence[Correction], whole: Callable[[Context], Callable[[PyTree], PyTree]]
) -> Survey | None:
    """Returns the exchange of all corrections before training; ``whole`` computes ∇F_k."""
    if all(d.ask is None for d in corrections):
        return None

    def ask(*given: Any) -> PyTree:
        visit = Visit(*given)
        context = visit.context()[0]
        gradient = functools.partial(whole(context), visit.variables.params)
        return tuple(() if d.ask is None else d.ask(gradient, context) for d in corrections)

    def tell(shared_state: PyTree, aggregate: PyTree) -> PyTree:
        common = Common(*shared_state)
        states = zip(corrections, common.corrections, aggregate, strict=True)
        terms = tuple(c if d.ask is None else d.tell(c, mean) for d, c, mean in states)
        return common._replace(corrections=terms)

    return Survey(ask, tell)


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
