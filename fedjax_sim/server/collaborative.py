"""Initial models for each client, mixed from the models of all clients (FedAMP, FedFomo)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Broadcast,
    ClientData,
    ClientView,
    Count,
    Gathered,
    Objective,
    Positive,
    PyTree,
    Share,
    Variables,
)
from fedjax_sim.clustering import loss_on
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, PLAIN_MEAN, PLAIN_SERVER, UNCHANGED, WHOLE_MODEL


class _Collaborative(Broadcast):
    """A broadcast whose state has the last model sent by each client, which is evaluated.

    The server model is the mean of the round's models and reaches no client.
    """

    several = True
    by_client = True
    needs = (NO_FLIGHT, PLAIN_MEAN, UNCHANGED, PLAIN_SERVER, WHOLE_MODEL)


class attentive(_Collaborative):
    r"""A mean of all clients' models, in which similar models count more (FedAMP).

    .. math:: u_k = \Bigl( 1 - \sum_{j \ne k} \xi_{kj} \Bigr) w_k + \sum_{j \ne k} \xi_{kj} w_j,
              \qquad \xi_{kj} = \alpha A'\bigl(\lVert w_k - w_j \rVert^2\bigr)
              = \frac{\alpha}{\sigma} e^{-\lVert w_k - w_j \rVert^2 / \sigma}

    This is a gradient step of size α on the sum of :math:`A(x) = 1 - e^{-x / \sigma}` over all
    pairs. Distances are over all weights, without BatchNorm statistics. A client that has not
    trained yet counts with the initial model. The state has a model for each client.

    Args:
        alpha: α; up to σ / (N - 1) all weights are in [0, 1], however near the models are.
        sigma: σ, the squared distance at which the attention has fallen to 1/e.

    Raises:
        ValueError: if a setting is out of range.

    Source: Huang et al. 2021 <https://arxiv.org/abs/2007.03797>, Algorithm 1.

    Example:
        >>> part, client = attentive(alpha=1.0, sigma=4.0), ClientView(*6 * [jnp.zeros(1)], id=0)
        >>> models = Variables(jnp.array([0.0, 2.0]), ())
        >>> float(part.send(jax.random.key(0), models, None, client)[0].params)  # 2 / (4 e)
        0.18393972516059875
    """

    alpha: Positive
    sigma: Positive

    def init(self, variables: Variables, data: ClientData) -> Variables:
        models: Variables = tree.stack_copies(variables, data.clients)
        return models

    def send(
        self, key: Array | None, state: Variables, server: Variables, client: ClientView
    ) -> tuple[Variables, PyTree]:
        assert client.id is not None
        own = tree.take(state, client.id)
        if key is None:
            return own, ()
        distance = tree.squared_distances(state.params, own.params)
        near = (self.alpha / self.sigma * jnp.exp(-distance / self.sigma)).at[client.id].set(0)
        return tree.mix(near.at[client.id].set(1 - jnp.sum(near)), state), ()

    def update(
        self, state: Variables, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Variables:
        received, updates = gathered.cohort.received, gathered.updates
        stored: Variables = _stored(state, gathered, tree.add(received, updates))
        return stored


class Collaborators(NamedTuple):
    """The state of :class:`first_order`."""

    models: Variables  # [N, *p], w_k
    starts: Variables  # [N, *p], the models from which the clients trained them
    affinity: Array  # f32[N, N], P


class first_order(_Collaborative):
    r"""A mean of the models that are better than the client's last start (FedFomo).

    .. math:: \omega_{kj} =
              \frac{F_k(w_k^{old}) - F_k(w_j)}{\lVert w_j - w_k^{old} \rVert}, \qquad
              u_k = \sum_j \frac{\max(\omega_{kj}, 0)}{\sum_i \max(\omega_{ki}, 0)} w_j

    over the client's own model and M others that it downloads; :math:`w_k^{old}` is the model from
    which it last trained. If no model is better, it continues with its own. The server adds the
    :math:`\omega_{kj}` to an affinity matrix P, which is 0 at first, and sends each client the M
    models of its largest entries. Each of them is replaced with probability ε by a random other
    one. The tag has the :math:`\omega_{kj}`, ``f32[N]``. The state has two models for each client.

    F_k is measured on the client's training samples, which favours its own model. The paper and
    PFLlib hold out 20 % of them; PFLlib draws no random models.

    Args:
        downloads: M.
        objective: F_k, the mean over all samples of the client, in training mode.
        explore: ε; 1 chooses at random.
        batch_size: the number of samples that are evaluated at once.

    Raises:
        ValueError: if a setting is out of range; in the first round, if there are fewer than M
            other clients.

    Source: Zhang et al. 2021 <https://arxiv.org/abs/2012.08565>, section 3;
    Zhang et al. 2025 <https://github.com/TsingZ0/PFLlib>.
    """

    downloads: Count
    objective: Objective
    explore: Share = 0.3
    batch_size: Count = 50

    tags = "weights"

    @property
    def numbers(self) -> int:
        return self.downloads

    def init(self, variables: Variables, data: ClientData) -> Collaborators:
        if self.downloads >= data.clients:
            raise ValueError(
                f"downloads must be at most the {data.clients - 1} other clients, got "
                f"{self.downloads}"
            )
        models = tree.stack_copies(variables, data.clients)
        zeros = jnp.zeros((data.clients, data.clients), jnp.float32)
        return Collaborators(models, models, zeros)

    def offered(self, state: Collaborators) -> Array:
        return jnp.int32(self.downloads)

    def send(
        self, key: Array | None, state: Collaborators, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        assert client.id is not None
        own, old = tree.take((state.models, state.starts), client.id)
        none = jnp.zeros(len(state.affinity), jnp.float32)
        if key is None:
            return own, none
        others = self._chosen(key, state.affinity[client.id], client.id)
        models = tree.take(state.models, jnp.append(client.id, others))
        total = loss_on(self.objective, self.batch_size, client)
        gain = total(old) - jax.lax.map(total, models)
        distance = jnp.sqrt(tree.squared_distances(models.params, old.params))
        count = jnp.maximum(client.size, 1).astype(jnp.float32)
        weight = jnp.where(distance > 0, gain, 0) / (count * jnp.where(distance > 0, distance, 1))
        better = jnp.maximum(weight, 0)
        any_better = jnp.any(better > 0)
        share = better / jnp.where(any_better, jnp.sum(better), 1)
        start = tree.select(any_better, tree.mix(share, models), own)
        return start, none.at[others].set(weight[1:])

    def _chosen(self, key: Array, affinity: Array, own: Array) -> Array:
        """Draws the M other clients whose models a client downloads, ``int32[M]``."""
        coins, luck = jax.random.split(key)
        coin = jax.random.uniform(coins, (self.downloads,), jnp.float32)
        kept = jnp.sum(coin >= self.explore, dtype=jnp.int32)
        luck = jax.random.uniform(luck, affinity.shape, jnp.float32)
        clients = jnp.arange(len(affinity), dtype=jnp.int32)
        best = jnp.lexsort((luck, -affinity, clients == own))
        rest = jnp.zeros_like(clients).at[best].set(clients) >= kept
        return jnp.lexsort((luck, rest, clients == own))[: self.downloads].astype(jnp.int32)

    def update(
        self, state: Collaborators, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Collaborators:
        cohort = gathered.cohort
        models = tree.add(cohort.received, gathered.updates)
        client = _senders(gathered, len(state.affinity))
        return Collaborators(
            _stored(state.models, gathered, models),
            _stored(state.starts, gathered, cohort.received),
            state.affinity.at[client].add(cohort.tag, mode="drop"),
        )


def _senders(gathered: Gathered, clients: int) -> Array:
    """Returns the client of each row, ``int32[P]``; N for an absent row."""
    return jnp.where(gathered.weights > 0, gathered.cohort.client, clients)


def _stored(stack: PyTree, gathered: Gathered, rows: PyTree) -> PyTree:
    """Returns the stack ``[N, *p]`` with the rows of the clients that sent an update."""
    client = _senders(gathered, len(jax.tree.leaves(stack)[0]))
    return jax.tree.map(lambda all_, new: all_.at[client].set(new, mode="drop"), stack, rows)
