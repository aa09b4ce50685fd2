"""The displacement by the steps of a client's optimiser."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim.base import Array, concrete


def response(optimizer: optax.GradientTransformationExtraArgs, steps: int) -> list[float | Array]:
    """Returns the displacement after 1, 2, ... ``steps`` steps of gradient -1.

    The optimiser sees a weight of 0: weight decay is part of the objective, not of the
    displacement.

    Returns:
        Numbers, or arrays if the rate is traced; NaN if it needs more than a gradient, or if a
        doubled gradient does not double the displacement.

    >>> response(optax.with_extra_args_support(optax.sgd(0.5, momentum=0.5)), 3)
    [0.5, 1.25, 2.125]
    >>> response(optax.with_extra_args_support(optax.adam(0.5)), 1)
    [nan]
    """
    try:
        once, twice = (_places(optimizer, steps, gradient) for gradient in (-1.0, -2.0))
    except (TypeError, ValueError):  # it needs the loss, say
        return [math.nan] * steps
    if not concrete(*once, *twice):
        return once
    near, far = [*map(float, once)], [*map(float, twice)]
    proportional = np.allclose(2 * np.array(near), far, rtol=1e-3, atol=0)
    return [*near] if proportional else [math.nan] * steps


def _places(
    optimizer: optax.GradientTransformationExtraArgs, steps: int, gradient: float
) -> list[float | Array]:
    start, places, key = jnp.float32(0), [], jax.random.key(0)
    opt_state, place = optimizer.init(start), start
    for _ in range(steps):
        update, opt_state = optimizer.update(jnp.float32(gradient), opt_state, start, key=key)
        place = place + update
        places.append(place)
    return places


def stateless(optimizer: optax.GradientTransformationExtraArgs) -> bool:
    """Returns whether an optimiser has no state from step to step.

    >>> stateless(optax.sgd(0.5)), stateless(optax.sgd(0.5, momentum=0.5))
    (True, False)
    """
    return not jax.tree.leaves(jax.eval_shape(optimizer.init, jnp.float32(0)))


def gradient_weight(steps: Array, momentum: float = 0.0) -> Array:
    r"""Returns the total weight ``f32`` of the gradients in T steps of SGD, T of any shape.

    .. math:: a = T, \qquad a = \frac{T - \rho\,(1 - \rho^T) / (1 - \rho)}{1 - \rho}

    without momentum, and with momentum ρ that starts from 0.

    >>> gradient_weight(jnp.array([1, 2, 3]), 0.5).tolist()  # 1, 1.5 more, 1.75 more
    [1.0, 2.5, 4.25]
    """
    count = steps.astype(jnp.float32)
    if momentum > 0:
        tail = momentum * (1 - momentum**count) / (1 - momentum)
        return (count - tail) / (1 - momentum)
    return count
