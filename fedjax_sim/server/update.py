"""Server updates: steps of the server model, given the aggregate of the clients' updates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    ClientData,
    DownloadBytes,
    Fraction,
    Gathered,
    Need,
    NonNegative,
    PyTree,
    Server,
    SetupTraffic,
    SetupTrafficOf,
    Variables,
    concrete,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import FROM_NEWEST
from fedjax_sim.engine.needs import ONE_MODEL, OWN_ROWS, SYNCHRONOUS, awaited
from fedjax_sim.engine.optimizers import check_optimizer


class replace(Server):
    r"""Replaces the server model by the aggregate: :math:`w_{t+1} = w_t + \sum_k p_k \Delta_k`."""

    reads_updates = False
    replaces = True

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        return step, state


class optimizer(Server):
    r"""Applies an optax optimiser to the pseudo-gradient :math:`-\sum_k p_k \Delta_k`.

    The model's state (BatchNorm statistics) is replaced, never optimised.

    Args:
        transform: the optimiser, e.g. ``optax.sgd(1.0, momentum=0.9)`` for FedAvgM.

    Raises:
        ValueError: if transform is not an optimiser, or needs more than a gradient and the
            parameters.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 1.

    >>> server = optimizer(optax.sgd(0.5))
    >>> w, step = Variables({"w": jnp.zeros(1)}, {}), Variables({"w": jnp.ones(1)}, {})
    >>> taken, _ = server.update(jax.random.key(0), step, w, server.init(w), None)
    >>> taken.params["w"].tolist()
    [0.5]
    """

    transform: optax.GradientTransformation

    reads_updates = False

    def __post_init__(self) -> None:
        check_optimizer("transform", self.transform)

    def init(self, variables: Variables) -> PyTree:
        return self.transform.init(variables.params)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        gradient = jax.tree.map(jnp.negative, step.params)
        updates, state = self.transform.update(gradient, state, server.params)
        return step._replace(params=updates), state


class mix(Server):
    r"""Moves the server model a fraction of the way to the aggregate.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \alpha \sum_k p_k w_k

    The model's state (BatchNorm statistics) takes the same step: it describes the weights, which
    stay near the old ones if α is small.

    Args:
        alpha: α, in (0, 1]; 1 is :func:`replace`, bit for bit.

    Raises:
        ValueError: if alpha is out of range.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2 line 14.

    >>> w, step = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> mix(0.25).update(None, step, w, (), None)[0].params.tolist()
    [0.25]
    """

    alpha: Fraction

    reads_updates = False

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        def scaled(a: Array) -> Array:
            wide = a.astype(tree.wide(a.dtype))
            return tree.in_dtype(jnp.asarray(self.alpha, wide.dtype) * wide, a.dtype)

        return jax.tree.map(scaled, step), state


class sign_agreement(Server):
    r"""Takes a server's step only where enough clients agree on the sign of the update.

    .. math:: w_{t+1} = w_t + \eta_\theta \odot \mathrm{step}, \qquad
              \eta_{\theta,i} = \Bigl[\, \bigl| \sum_k
              \operatorname{sgn}(\Delta_k)_i \bigr| \ge \theta \,\Bigr]

    :math:`\eta_\theta` is a learning rate for each coordinate: the momentum of the wrapped server
    is updated everywhere, but only moves the coordinates on which clients agree. Each model counts
    once, whatever its weight. The state (BatchNorm statistics) takes the wrapped server's step.
    With ``backwards`` it is the robust learning rate, a defence against backdoors:
    :math:`\eta_{\theta,i}` is -1 instead of 0 where too few clients agree.

    Args:
        threshold: θ; if it equals the number of models, all must agree. 0 changes nothing, bit for
            bit, unless ``literal``.
        server: the server that computes the step.
        literal: omit the absolute value, as printed: coordinates in which the clients agree on a
          negative step then stop too. The robust learning rate, from which the paper takes it, has
          the absolute value.
        backwards: take the step in the opposite direction where too few clients agree.

    Raises:
        ValueError: if threshold is negative, or literal and backwards are both set: the server
            would go up wherever all clients want to go down; by ``compose``, if it is more than the
            models that are aggregated together, which can never agree enough.

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

    threshold: NonNegative
    server: Server
    _: dataclasses.KW_ONLY
    literal: bool = False
    backwards: bool = False

    def __post_init__(self) -> None:
        if self.literal and self.backwards:
            raise ValueError("backwards must be without literal: it reads the sum's absolute value")

    @property
    def needs(self) -> tuple[Need, ...]:
        least = self.threshold
        enough = Need(
            "clients_per_round",
            f"at least {least} models that are aggregated together",
            lambda parts: not concrete(least) or least <= awaited(parts),
            "a larger cohort, or a smaller threshold",
        )
        return (ONE_MODEL, SYNCHRONOUS, FROM_NEWEST, OWN_ROWS, enough, *self.server.needs)

    @property
    def download_bytes(self) -> DownloadBytes | None:
        return self.server.download_bytes

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        return self.server.setup_traffic

    @property
    def dual(self) -> float | Array | None:
        return self.server.dual

    def init(self, variables: Variables) -> PyTree:
        return self.server.init(variables)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        step, state = self.server.update(key, step, server, state, gathered)
        present = gathered.weights > 0

        def filtered(taken: Array, updates: Array) -> Array:
            signs = jnp.where(tree.expand(present, updates), jnp.sign(updates), 0)
            total = tree.row_sum(signs)
            enough = (total if self.literal else jnp.abs(total)) >= self.threshold
            return jnp.where(enough, taken, -taken if self.backwards else 0)

        params = jax.tree.map(filtered, step.params, gathered.updates.params)
        return step._replace(params=params), state


class chain(Server):
    r"""Server updates in sequence: each one's step is the aggregate of the next.

    .. math:: s_0 = \sum_k p_k \Delta_k, \qquad s_i = \mathrm{server}_i(s_{i-1}, w_t), \qquad
              w_{t+1} = w_t + s_n

    Only the last one determines the encoding of downloads, because it changes the steps of the
    others.

    Args:
        servers: the server updates in order; without any it is :func:`replace`.

    Raises:
        ValueError: if a server after the first mirrors a state that clients compute from their own
            updates.

    >>> w, step = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    >>> half = chain(mix(0.5), mix(0.5))
    >>> half.update(jax.random.key(0), step, w, half.init(w), None)[0].params.tolist()
    [0.25]
    """

    servers: tuple[Server, ...]

    def __init__(self, *servers: Server) -> None:
        object.__setattr__(self, "servers", servers)
        for server in servers[1:]:
            if server.dual is not None:
                raise ValueError(
                    f"chain must begin with {server}, which follows the clients' own updates, got "
                    f"{servers[0]} before it"
                )

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(need for server in self.servers for need in server.needs)

    @property
    def reads_updates(self) -> bool:
        return any(server.reads_updates for server in self.servers)

    @property
    def download_bytes(self) -> DownloadBytes | None:
        return self.servers[-1].download_bytes if self.servers else None

    @property
    def dual(self) -> float | Array | None:
        return self.servers[0].dual if self.servers else None

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        counts = [s.setup_traffic for s in self.servers if s.setup_traffic is not None]

        def total(variables: Variables, data: ClientData) -> SetupTraffic:
            each = [count(variables, data) for count in counts]
            return SetupTraffic(sum(one.up for one in each), sum(one.down for one in each))

        return total if counts else None

    def init(self, variables: Variables) -> PyTree:
        return tuple(server.init(variables) for server in self.servers)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        after = []
        for i, (part, before) in enumerate(zip(self.servers, state, strict=True)):
            step, new = part.update(jax.random.fold_in(key, i), step, server, before, gathered)
            after.append(new)
        return step, tuple(after)
