"""Loops over a client's samples: their length is data, and JAX must differentiate them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientView, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.vmapped import everywhere


def repeat(
    client: ClientView,
    count: Array,
    most: int,
    body: Callable[[Array, PyTree, ClientView], PyTree],
    start: PyTree,
) -> PyTree:
    """``fori_loop(0, count, body, start)``, also as a loop that reverse mode can go back through.

    Reverse mode needs a length that is known when the loop is compiled. It keeps the carry before
    each of ``most`` steps, and computes the rest of a step again on its way back.

    Args:
        client: whose samples the steps read; if it is ``differentiable``, ``most`` steps are taken,
            idle from ``count`` on.
        count: ``int32[]``, the steps.
        most: ``count`` is at most this (static).
        body: ``(i, carry, client) -> carry``.
        start: the carry at the start.

    >>> client = ClientView(jnp.ones(5), jnp.zeros(5), jnp.arange(5), jnp.int32(0), jnp.int32(3), 5,
    ...                     differentiable=True)
    >>> def power(x):
    ...     return repeat(client, client.size, 5, lambda i, carry, _: carry * x, jnp.float32(1))
    >>> float(jax.grad(power)(2.0))  # of x³
    12.0
    """
    if not client.differentiable:
        return jax.lax.fori_loop(0, count, lambda i, carry: body(i, carry, client), start)
    step, closed = jax.closure_convert(body, jnp.int32(0), start, client)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(carry: PyTree, i: Array) -> tuple[PyTree, None]:
        runs = i < count

        def taken(carry: PyTree) -> PyTree:
            # Under vmap an idle step is computed too: its derivative may be infinite, and 0 times
            # that is NaN. (Not for the samples: a copy for each client would be made of them.)
            values = carry, closed
            held, fixed = tree.select(runs, values, jax.lax.stop_gradient(values))
            return tree.select(runs, step(i, held, client, *fixed), carry)

        # Under vmap this stays a branch, which all skip once the last of them is done.
        return jax.lax.cond(everywhere(~runs), lambda carry: carry, taken, carry), None

    return jax.lax.scan(one, start, jnp.arange(most, dtype=jnp.int32))[0]
