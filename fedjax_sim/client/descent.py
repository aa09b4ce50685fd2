"""One step of an optimiser, with what it may ask for; a client's whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    Batch,
    Companion,
    Context,
    Objective,
    PyTree,
    Transform,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.optimizers import taken


class Descent(NamedTuple):
    """A step.

    Attributes:
        weights: after it.
        opt_state: the optimiser's state after it.
        loss: before it.
        aux: what the objective gave beside the loss.
        gradient: of the loss, as it was.
    """

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
) -> Descent:
    """Takes one step.

    Args:
        optimizer: whose step it is.
        objective: ``weights -> (loss, aux)``.
        weights: before the step.
        opt_state: the optimiser's state before it.
        key: for an optimiser that draws.
        corrected: ``(gradient, weights) -> gradient``, what the optimiser is given.
        factor: of the step's length; None: 1.
    """
    (loss, aux), gradient = jax.value_and_grad(objective, has_aux=True)(weights)

    # What optax's optimisers may ask for. The functions are traced only by those that call them. A
    # line search refuses arguments that it leaves and value_fn does not name.
    def value_fn(
        weights: PyTree, key: Any = None, obj_fn: Any = None, grad_fn: Any = None
    ) -> Array:
        del key, obj_fn, grad_fn
        return objective(weights)[0]

    def grad_fn(weights: PyTree, step: Any = None) -> PyTree:
        del step
        return corrected(jax.grad(objective, has_aux=True)(weights)[0], weights)

    extra = {
        "value": loss,
        "grad": gradient,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": grad_fn,
        "key": key,
    }
    updates, opt_state = optimizer.update(
        corrected(gradient, weights), opt_state, weights, **taken(optimizer, extra)
    )
    if factor is not None:
        updates = tree.scale(factor, updates)
    return Descent(optax.apply_updates(weights, updates), opt_state, loss, aux, gradient)


def accompanied(
    companion: Companion,
    step: Callable[..., Descent],
    model: Variables,
    beside: tuple[Variables, PyTree],
    samples: Batch,
    context: Context,
) -> tuple[Variables, PyTree]:
    """A companion and its optimiser's state after a step beside that of ``model``."""
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
    """∇F_k at ``params``, in training mode, with the received state before every minibatch."""
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
