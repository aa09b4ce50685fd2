"""How the server model moves, given the aggregate of the updates: from step to step."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    ClientData,
    Gathered,
    LocalUpdate,
    PyTree,
    Server,
    SetupTraffic,
    Trained,
    Variables,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import on_root, root_view
from fedjax_sim.engine.needs import ONE_MODEL, OWN_ROWS, WHOLE_MODEL
from fedjax_sim.engine.optimizers import check_optimizer, first_state


@part
def replace() -> Server:
    r"""The server model becomes the aggregate, :math:`w_{t+1} = w_t + \sum_k p_k \Delta_k`."""
    return Server(
        init=lambda variables: (),
        update=lambda key, step, server, state, gathered: (step, state),
        reads_updates=False,
        replaces=True,
    )


@part
def optimizer(transform: optax.GradientTransformation) -> Server:
    r"""An optax optimiser on the pseudo-gradient :math:`-\sum_k p_k \Delta_k`.

    The model's state (BatchNorm statistics) is replaced, never optimised.

    Args:
        transform: e.g. ``optax.sgd(1.0, momentum=0.9)`` for FedAvgM.

    Returns:
        A server.

    Raises:
        ValueError: if it is no optimiser, or needs more than a gradient and the parameters.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 1.

    >>> server = optimizer(optax.sgd(0.5))
    >>> w, step = Variables({"w": jnp.zeros(1)}, {}), Variables({"w": jnp.ones(1)}, {})
    >>> taken, _ = server.update(jax.random.key(0), step, w, server.init(w), None)
    >>> taken.params["w"].tolist()
    [0.5]
    """
    check_optimizer("transform", transform)

    def update(
        key: Array, step: Variables, server: Variables, opt: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        del key, gathered
        gradient = jax.tree.map(jnp.negative, step.params)
        updates, opt = transform.update(gradient, opt, server.params)
        return step._replace(params=updates), opt

    return Server(
        init=lambda variables: first_state(transform, variables.params),
        update=update,
        reads_updates=False,
    )


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

    >>> w, step = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> mix(0.25).update(None, step, w, (), None)[0].params.tolist()
    [0.25]
    """
    if concrete(alpha) and not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")

    def part_of(a: Array) -> Array:
        wide = a.astype(tree.wide(a.dtype))
        return tree.in_dtype(jnp.asarray(alpha, wide.dtype) * wide, a.dtype)

    return Server(
        init=lambda variables: (),
        update=lambda key, step, server, state, gathered: (jax.tree.map(part_of, step), state),
        reads_updates=False,
    )


@part
def sign_agreement(
    threshold: float, server: Server, *, literal: bool = False, backwards: bool = False
) -> Server:
    r"""A server's step, taken where enough clients agree on the sign of the update.

    .. math:: w_{t+1} = w_t + \eta_\theta \odot \mathrm{step}, \qquad
              \eta_{\theta,i} = \Bigl[\, \bigl| \textstyle\sum_k
              \operatorname{sgn}(\Delta_k)_i \bigr| \ge \theta \,\Bigr]

    It is a learning rate for each coordinate: momentum goes on in the server that is wrapped, but
    moves only what is agreed on. Every model counts once, however large its weight. The state
    (BatchNorm statistics) is left as it is. With ``backwards`` it is the robust learning rate, a
    defence against backdoors: where too few agree, :math:`\eta_{\theta,i}` is -1, not 0.

    Args:
        threshold: θ; as many as there are models, all must agree. 0 changes nothing, bit for bit.
        server: whose step it is.
        literal: as printed, without the absolute value: this also stops every coordinate in which
            the clients agree on a negative step. The paper's own source (robust learning rate) has
            the absolute value.
        backwards: where too few agree, take the step in the other direction.

    Returns:
        A server.

    Raises:
        ValueError: if threshold is negative, or literal and backwards are both set: the server
            would go up wherever all clients want to go down.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 3.4 and eq. 3; Ozdayi et
    al. 2021 <https://arxiv.org/abs/2007.03767>, eq. 3, for ``backwards``.

    Example:
        >>> w = Variables(jnp.zeros(3), ())
        >>> updates = Variables(jnp.array([[1.0, -1.0, 2.0], [3.0, -5.0, -2.0]]), ())
        >>> gathered = Gathered(updates, jnp.ones(2), None)
        >>> step = tree.mean(updates, jnp.ones(2))
        >>> agreed = sign_agreement(2, replace())
        >>> agreed.update(None, step, w, (), gathered)[0].params.tolist()
        [2.0, -3.0, 0.0]
    """
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    if literal and backwards:
        raise ValueError("backwards must be without literal: it reads the sum's absolute value")

    def update(
        key: Array, step: Variables, old: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        step, state = server.update(key, step, old, state, gathered)
        present = gathered.weights > 0

        def agreed(taken: Array, updates: Array) -> Array:
            signs = jnp.where(tree.expand(present, updates), jnp.sign(updates), 0)
            total = tree.row_sum(signs)
            enough = (total if literal else jnp.abs(total)) >= threshold
            return jnp.where(enough, taken, -taken if backwards else 0)

        params = jax.tree.map(agreed, step.params, gathered.updates.params)
        return step._replace(params=params), state

    return server._replace(
        update=update,
        needs=(ONE_MODEL, OWN_ROWS, *server.needs),
        reads_updates=True,
        replaces=False,
    )


@part
def chain(*servers: Server) -> Server:
    r"""Server updates in sequence: the step that one makes is the aggregate of the next.

    .. math:: s_0 = \sum_k p_k \Delta_k, \qquad s_i = \mathrm{server}_i(s_{i-1}, w_t), \qquad
              w_{t+1} = w_t + s_n

    The last one alone decides how a model is encoded on its way down: it has changed what an
    earlier one encoded.

    Args:
        servers: in order; without any it is :func:`replace`.

    Returns:
        A server.

    Raises:
        ValueError: if a server after the first follows what the clients keep, which they compute
            from their own updates.

    >>> w, step = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> half = chain(mix(0.5), mix(0.5))
    >>> half.update(jax.random.key(0), step, w, half.init(w), None)[0].params.tolist()
    [0.25]
    """
    for own in servers[1:]:
        if own.dual is not None:
            raise ValueError(
                f"chain must begin with {own}, which follows the clients' own updates, got "
                f"{servers[0]} before it"
            )

    def update(
        key: Array, step: Variables, server: Variables, states: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        after = []
        for i, (own, state) in enumerate(zip(servers, states, strict=True)):
            own_key = jax.random.fold_in(key, i)
            step, state = own.update(own_key, step, server, state, gathered)
            after.append(state)
        return step, tuple(after)

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        each = [own.setup_traffic(variables, data) for own in servers if own.setup_traffic]
        return SetupTraffic(sum(one.up for one in each), sum(one.down for one in each))

    return Server(
        init=lambda variables: tuple(own.init(variables) for own in servers),
        update=update,
        download_bytes=servers[-1].download_bytes if servers else None,
        needs=tuple(need for own in servers for need in own.needs),
        setup_traffic=setup_traffic if any(own.setup_traffic for own in servers) else None,
        reads_updates=any(own.reads_updates for own in servers),
        dual=servers[0].dual if servers else None,
    )


@part
def train_on_root(local: LocalUpdate) -> Server:
    r"""The server trains the aggregate on samples of its own.

    .. math:: w_{t+1} = \mathrm{train}\Bigl(w_t + \sum_k p_k \Delta_k,\, D_0\Bigr)

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
    init, train = _trained_on_root(local)

    def update(
        key: Array, step: Variables, server: Variables, kept: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        trained = train(key, tree.add(server, step), gathered.cohort.data, *kept).variables
        return tree.subtract(trained, server), kept

    return Server(init=init, update=update, needs=(WHOLE_MODEL,), reads_updates=False)


@part
def train_beside(local: LocalUpdate) -> Server:
    r"""The server trains as one client more, on samples that clients gave it.

    .. math:: w_{t+1} = w_t + \frac{n \sum_k p_k \Delta_k + n_0 (w_0 - w_t)}{n + n_0}, \qquad
              w_0 = \mathrm{train}(w_t, D_0), \qquad n = \sum_{k \in U_t} n_k

    Its n_0 samples go up once, before the first round. A round to which no model comes moves
    nothing, as everywhere.

    Args:
        local: the local update, as a client would run it on the server's samples; it starts afresh
            in every round.

    Returns:
        A server for data with ``root`` samples.

    Raises:
        ValueError: as by :func:`train_on_root`.

    Source: Yoshida et al. 2020 <https://arxiv.org/abs/1905.07210>.
    """
    init, train = _trained_on_root(local)

    def update(
        key: Array, step: Variables, server: Variables, kept: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        data, came = gathered.cohort.data, gathered.weights > 0
        own = tree.subtract(train(key, server, data, *kept).variables, server)
        n_0 = root_view(data).size.astype(jnp.float32)
        n = jnp.sum(jnp.where(came, gathered.cohort.samples, 0)).astype(jnp.float32)
        return tree.add(tree.scale(n / (n + n_0), step), tree.scale(n_0 / (n + n_0), own)), kept

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        return SetupTraffic(int(root_view(data).size) * data.sample_bytes, 0)

    needs = ONE_MODEL, WHOLE_MODEL
    return Server(init, update, needs=needs, setup_traffic=setup_traffic, reads_updates=False)


def _trained_on_root(
    local: LocalUpdate,
) -> tuple[Callable[[Variables], PyTree], Callable[..., Trained]]:
    """The state of a server that trains, and its training: ``(key, w, data, *state)``."""
    if local.peers:
        raise ValueError(
            "local must do without the other clients' samples to train on the server's, got "
            "peers=True"
        )

    def init(variables: Variables) -> PyTree:
        kept = local.client_state(variables), local.shared_state(variables)
        if jax.tree.leaves(kept):
            raise ValueError(
                "local must neither keep nor share anything between its visits to train on the "
                "server's samples: it has a correction or an optimizer_state that does"
            )
        return kept

    return init, on_root(local.train)
