"""How the server model moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import Array, ClientData, PyTree, Server, Variables


def replace() -> Server:
    r"""The aggregate becomes the server model, :math:`w_{t+1} = \sum_k p_k w_k`."""
    return Server(
        init=lambda variables: (),
        update=lambda key, aggregate, server, state, data: (aggregate, state),
    )


def optimizer(transform: optax.GradientTransformation) -> Server:
    r"""An optax optimiser on the pseudo-gradient :math:`w_t - \sum_k p_k w_k`.

    The model's state (BatchNorm statistics) is replaced, never optimised.

    Args:
        transform: e.g. ``optax.sgd(1.0, momentum=0.9)`` for FedAvgM.

    Source: Reddi et al. 2021, Algorithm 1.

    >>> server = optimizer(optax.sgd(0.5))
    >>> w, new = Variables({"w": jnp.zeros(1)}, {}), Variables({"w": jnp.ones(1)}, {})
    >>> moved, _ = server.update(jax.random.key(0), new, w, server.init(w), None)
    >>> moved.params["w"].tolist()
    [0.5]
    """

    def update(
        key: Array, aggregate: Variables, server: Variables, opt: PyTree, data: ClientData
    ) -> tuple[Variables, PyTree]:
        del key, data
        gradient = jax.tree.map(jnp.subtract, server.params, aggregate.params)
        updates, opt = transform.update(gradient, opt, server.params)
        return Variables(optax.apply_updates(server.params, updates), aggregate.state), opt

    return Server(init=lambda variables: transform.init(variables.params), update=update)
