"""How the server model moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree
from fedjax_sim.base import Array, ClientData, LocalUpdate, PyTree, Server, Variables
from fedjax_sim.batches import on_root


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


def mix(alpha: float) -> Server:
    r"""The server goes a part of the way to the aggregate.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \alpha \sum_k p_k w_k

    The model's state (BatchNorm statistics) takes the same step: it describes the weights, which
    stay near the old ones where α is small.

    Args:
        alpha: α, in (0, 1]; 1 is :func:`replace`, bit for bit.

    Raises:
        ValueError: if alpha is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", Algorithm 2 line 14.

    >>> w, new = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> mix(0.25).update(None, new, w, (), None)[0].params.tolist()
    [0.25]
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    return Server(
        init=lambda variables: (),
        update=lambda key, aggregate, server, state, data: (
            tree.interpolate(server, aggregate, alpha),
            state,
        ),
    )


def chain(*servers: Server) -> Server:
    r"""One after another: each takes what the one before it made as its aggregate.

    .. math:: a_0 = \sum_k p_k w_k, \qquad a_i = \mathrm{server}_i(a_{i-1}, w_t), \qquad
              w_{t+1} = a_n

    Only the last one's way to encode a model on its way down counts: what follows an encoder has
    changed the model that it encoded.

    Args:
        servers: in order; none is :func:`replace`.

    >>> w, new = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> half = chain(mix(0.5), mix(0.5))
    >>> half.update(jax.random.key(0), new, w, half.init(w), None)[0].params.tolist()
    [0.25]
    """

    def update(
        key: Array, aggregate: Variables, server: Variables, states: PyTree, data: ClientData
    ) -> tuple[Variables, PyTree]:
        after = []
        for i, (part, state) in enumerate(zip(servers, states, strict=True)):
            own_key = jax.random.fold_in(key, i)
            aggregate, state = part.update(own_key, aggregate, server, state, data)
            after.append(state)
        return aggregate, tuple(after)

    return Server(
        init=lambda variables: tuple(part.init(variables) for part in servers),
        update=update,
        download_bytes=servers[-1].download_bytes if servers else None,
    )


def train_on_root(local: LocalUpdate) -> Server:
    r"""The server trains the aggregate on samples of its own.

    .. math:: w_{t+1} = \mathrm{train}\Bigl(\sum_k p_k w_k,\, D_0\Bigr)

    Args:
        local: the local update, as a client would run it on the server's samples; it begins anew
            in every round.

    Returns:
        A server for data with ``root`` samples.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if it
            keeps or shares anything between its visits; in the first round, if the data have no
            ``root``.

    Source: Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated learning in non-IID
    settings", 2020, section 3.1.
    """
    if local.peers:
        raise ValueError(
            "local must do without the other clients' samples to train on the server's, got "
            "peers=True"
        )

    train = on_root(local)

    def init(variables: Variables) -> PyTree:
        kept = local.memory(variables), local.shared(variables)
        if jax.tree.leaves(kept):
            raise ValueError(
                "local must neither keep nor share anything between its visits to train on the "
                "server's samples: it has a drift, an optimizer_state or a compression that does"
            )
        return kept

    def update(
        key: Array, aggregate: Variables, server: Variables, kept: PyTree, data: ClientData
    ) -> tuple[Variables, PyTree]:
        del server
        return train(key, aggregate, data, *kept).variables, kept

    return Server(init=init, update=update)
