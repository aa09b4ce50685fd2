"""How the server model moves."""

from __future__ import annotations

import jax
import optax

from fedjax_sim.base import PyTree, Server, Variables


def replace() -> Server:
    r"""The aggregate becomes the server model, :math:`w_{t+1} = \sum_k p_k w_k`."""
    return Server(init=lambda variables: (), update=lambda aggregate, server, opt: (aggregate, opt))


def optimizer(transform: optax.GradientTransformation) -> Server:
    r"""An optax optimiser on the pseudo-gradient :math:`w_t - \sum_k p_k w_k`.

    The model's state (BatchNorm statistics) is replaced, never optimised.

    Args:
        transform: e.g. ``optax.sgd(1.0, momentum=0.9)`` for FedAvgM.

    Source: Reddi et al. 2021, Algorithm 1.

    >>> import jax.numpy as jnp
    >>> server = optimizer(optax.sgd(0.5))
    >>> w, new = Variables({"w": jnp.zeros(1)}, {}), Variables({"w": jnp.ones(1)}, {})
    >>> moved, _ = server.update(new, w, server.init(w))
    >>> moved.params["w"].tolist()
    [0.5]
    """

    def update(aggregate: Variables, server: Variables, opt: PyTree) -> tuple[Variables, PyTree]:
        gradient = jax.tree.map(lambda w, a: w - a, server.params, aggregate.params)
        updates, opt = transform.update(gradient, opt, server.params)
        return Variables(optax.apply_updates(server.params, updates), aggregate.state), opt

    return Server(init=lambda variables: transform.init(variables.params), update=update)
