"""How the server model moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import Array, ClientData, LocalUpdate, PyTree, Server, Variables, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import on_root


@part
def replace() -> Server:
    r"""The aggregate becomes the server model, :math:`w_{t+1} = \sum_k p_k w_k`."""
    return Server(
        init=lambda variables: (),
        update=lambda key, aggregate, server, state, data: (aggregate, state),
    )


@part
def optimizer(transform: optax.GradientTransformation) -> Server:
    r"""An optax optimiser on the pseudo-gradient :math:`w_t - \sum_k p_k w_k`.

    The model's state (BatchNorm statistics) is replaced, never optimised.

    Args:
        transform: e.g. ``optax.sgd(1.0, momentum=0.9)`` for FedAvgM.

    Returns:
        A server.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 1.

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


@part
def mix(alpha: float) -> Server:
    r"""The server goes a part of the way to the aggregate.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \alpha \sum_k p_k w_k

    The model's state (BatchNorm statistics) takes the same step: it describes the weights, which
    stay near the old ones if α is small.

    Args:
        alpha: α, in (0, 1]; 1 is :func:`replace`, bit for bit.

    Returns:
        A server.

    Raises:
        ValueError: if alpha is out of range.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2 line 14.

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


@part
def chain(*servers: Server) -> Server:
    r"""Server updates in sequence: the model that one makes is the aggregate of the next.

    .. math:: a_0 = \sum_k p_k w_k, \qquad a_i = \mathrm{server}_i(a_{i-1}, w_t), \qquad
              w_{t+1} = a_n

    The last one alone decides how a model is encoded on its way down: it has changed what an
    earlier one encoded.

    Args:
        servers: in order; without any it is :func:`replace`.

    Returns:
        A server.

    >>> w, new = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> half = chain(mix(0.5), mix(0.5))
    >>> half.update(jax.random.key(0), new, w, half.init(w), None)[0].params.tolist()
    [0.25]
    """

    def update(
        key: Array, aggregate: Variables, server: Variables, states: PyTree, data: ClientData
    ) -> tuple[Variables, PyTree]:
        after = []
        for i, (own, state) in enumerate(zip(servers, states, strict=True)):
            own_key = jax.random.fold_in(key, i)
            aggregate, state = own.update(own_key, aggregate, server, state, data)
            after.append(state)
        return aggregate, tuple(after)

    return Server(
        init=lambda variables: tuple(own.init(variables) for own in servers),
        update=update,
        download_bytes=servers[-1].download_bytes if servers else None,
    )


@part
def train_on_root(local: LocalUpdate) -> Server:
    r"""The server trains the aggregate on samples of its own.

    .. math:: w_{t+1} = \mathrm{train}\Bigl(\sum_k p_k w_k,\, D_0\Bigr)

    Args:
        local: the local update, as a client would run it on the server's samples; it starts afresh
            in every round.

    Returns:
        A server for data with ``root`` samples.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if it
            keeps or shares anything between its visits; in the first round, if the data have no
            ``root``.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 3.1.
    """
    if local.peers:
        raise ValueError(
            "local must do without the other clients' samples to train on the server's, got "
            "peers=True"
        )

    train = on_root(local)

    def init(variables: Variables) -> PyTree:
        kept = local.client_state(variables), local.shared_state(variables)
        if jax.tree.leaves(kept):
            raise ValueError(
                "local must neither keep nor share anything between its visits to train on the "
                "server's samples: it has a correction, an optimizer_state or a compression that "
                "does"
            )
        return kept

    def update(
        key: Array, aggregate: Variables, server: Variables, kept: PyTree, data: ClientData
    ) -> tuple[Variables, PyTree]:
        del server
        return train(key, aggregate, data, *kept).variables, kept

    return Server(init=init, update=update)
