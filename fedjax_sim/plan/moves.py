"""Moves of models between slots: by a permutation or a matrix, by edges (HierFAVG), by Dada."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    Count,
    LearnedRedistribution,
    Need,
    NonNegative,
    Positive,
    PyTree,
    Slots,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.needs import EQUAL_WEIGHTS, PLAIN_MEAN, SERVERLESS, STICKY, UNCHANGED
from fedjax_sim.engine.reading import two_weights


class Gather(NamedTuple):
    """A move in which every slot takes the model of one slot.

    Attributes:
        source: ``int32[S]``, the slot whose model slot i holds next.
    """

    source: Array

    def take(self, slots: Slots, order: Array) -> Slots:
        """Returns the slots ``order int32[P]`` after the move; any row for S and above."""
        moved: Slots = tree.take(slots, self.source[order])
        return moved

    def received(self) -> Array:
        """Returns the number of models that each slot receives from others, ``int32[S]``."""
        by_slot = jnp.arange(len(self.source), dtype=jnp.int32)
        return (self.source != by_slot).astype(jnp.int32)


class Mixing(NamedTuple):
    r"""A move in which every slot takes a mean of models; the rest of a slot is unchanged.

    Attributes:
        matrix: W, ``f32[S, S]``: slot i continues with :math:`\sum_j W_{ij} w_j`. Its rows sum to
            1, or its columns if the models have weights, which are mixed in the same way.
        seen: ``bool[S, S]``, whether slot i receives the model of slot j for comparison, even if it
          has no weight in the mean; None: no other models.
        relayed: ``bool[S]``, the slots that exchange models with a server: one model up, the mean
          down; None: slots receive models from each other.
    """

    matrix: Array
    seen: Array | None = None
    relayed: Array | None = None

    def take(self, slots: Slots, order: Array) -> Slots:
        """Returns the slots ``order int32[P]`` after the move; any row for S and above."""
        models, weights = tree.mix(self.matrix, (slots.variables, slots.weight))
        moved: Slots = tree.take(slots._replace(variables=models, weight=weights), order)
        return moved

    def received(self) -> Array:
        """Returns the number of models that each slot receives from others, ``int32[S]``."""
        if self.relayed is not None:
            return self.relayed.astype(jnp.int32)
        got = self.matrix != 0
        if self.seen is not None:
            got = got | self.seen
        others = ~jnp.eye(len(self.matrix), dtype=bool)
        return jnp.sum(got & others, axis=1, dtype=jnp.int32)


def _by_samples(weighting: Callable[..., Any]) -> bool:
    """Returns whether a weighting is proportional to the clients' samples."""
    given = two_weights(weighting, (2, 80))
    return given is None or bool(np.isclose(given[1], 40 * given[0]))


BY_SAMPLES = Need(
    "weighting",
    "clients that count by their samples",
    lambda parts: _by_samples(parts.weighting),
    "weighting=by_samples",
)


class edges(LearnedRedistribution):
    r"""Edge servers that each average the models of their own clients between two rounds.

    .. math:: w_k \leftarrow \sum_{j \in C_\ell} \frac{n_j}{\sum_{i \in C_\ell} n_i} w_j
              \quad \text{for } k \in C_\ell

    where :math:`C_\ell` are the clients of edge ℓ that train. Between two rounds each of them sends
    a model to its edge and receives one. When the models are due, each edge sends their mean to the
    cloud, one more upload; when new ones start, it receives one, a download.

    It needs slots that keep their clients, and the plain mean weighted by samples.

    Args:
        of: the number L of edges, for client k at edge k mod L; or the edge of each client, a
            sequence or an array of whole numbers.

    Raises:
        ValueError: if L is below 1 or an edge is not a whole number; in the first round, if ``of``
            has not one entry per client, or there are more edges than clients.

    Source: Liu et al. 2020 <https://arxiv.org/abs/1905.06641>, Algorithm 1.
    """

    of: int | Sequence[int]

    needs = (STICKY, PLAIN_MEAN, UNCHANGED, BY_SAMPLES)

    def __post_init__(self) -> None:
        given = np.asarray(self.of)
        if given.ndim > 1 or given.dtype.kind not in "iu":
            raise ValueError(f"edges must be a whole number, or one for each client, got {self.of}")
        if not given.ndim and given < 1:
            raise ValueError(f"edges must be at least 1, got {self.of}")
        object.__setattr__(self, "of", tuple(given.tolist()) if given.ndim else int(given))

    @property
    def relays(self) -> int:
        return self.of if isinstance(self.of, int) else len({*self.of})

    def init(self, slots: int, data: ClientData) -> PyTree:
        if isinstance(self.of, int):
            if self.of > data.clients:
                raise ValueError(f"edges must be at most the {data.clients} clients, got {self.of}")
        elif len(self.of) != data.clients:
            raise ValueError(
                f"edges must have one entry for each of the {data.clients} clients, got "
                f"{len(self.of)}"
            )
        return ()

    def move(self, key: Array, state: PyTree, slots: Slots) -> tuple[Mixing, PyTree]:
        if isinstance(self.of, int):
            edge = slots.client % self.of
        else:
            edge = jnp.asarray(np.asarray(self.of, np.int32))[slots.client]
        count = slots.samples_visited.astype(jnp.float32)
        weight = jnp.where(edge[:, None] == edge[None], count[None], 0)
        total = tree.row_sum(weight.T)[:, None]
        alone = jnp.eye(len(edge), dtype=jnp.float32)
        mean = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), alone)
        return Mixing(mean, relayed=slots.visits > 0), state


DELTA = 1e-6
"""δ, which makes the cost of a client without neighbours finite."""

HALVINGS = 40
"""Bisection steps, after which float32 has no finer interval."""


class learned(LearnedRedistribution):
    r"""Dada: clients learn a graph that joins similar models of clients with small losses.

    The weights of the edges and the models jointly minimise

    .. math:: J(w, \theta) = \sum_k d_k c_k L_k(\theta_k)
              + \frac{\mu_1}{2} \sum_{k<l} w_{kl} \lVert \theta_k - \theta_l \rVert^2
              + \mu_2 \Bigl( \lambda \sum_{k<l} w_{kl}^2 - \sum_k \log(d_k + \delta) \Bigr),
              \qquad d_k = \sum_l w_{kl}, \quad w \ge 0

    where :math:`L_k` is the client's loss at the model that it has trained and :math:`c_k = n_k /
    \max_l n_l`. Between two rounds the clients are paired at random κ times. One client of a pair
    sends its model, its loss and its degree; the other sets the weight of their edge to the minimum
    of J with all else fixed, and sends it back. Then every client takes a proximal step of rate η
    towards its neighbours:

    .. math:: \theta_k \leftarrow \frac{c_k \theta_k + \eta\mu_1 \sum_l w_{kl} \theta_l / d_k}
                                       {c_k + \eta\mu_1}

    There is no edge at first. The logarithm keeps every client connected; a smaller λ makes the
    graph sparser. The state is w, ``f32[S, S]``. Each model is sent with 12 bytes: a loss, a
    degree, and a weight in return.

    The paper's clients instead take a proximal gradient step on κ weights at once.

    It needs a flight without a server, slots that keep their clients, equal weighting, and
    clients that report ``final_loss`` (:func:`fedjax_sim.local.with_final_loss`).

    Args:
        mu_1: μ₁, the weight of distances between models.
        mu_2: μ₂, the weight of the terms of the graph itself.
        penalty: λ, the penalty on large weights.
        peers: κ, the number of pairings between two rounds; with an odd number of clients one is
            left out of each.
        lr: η; 0 moves no model.

    Source: Zantedeschi, Bellet, Tommasi 2020 <https://arxiv.org/abs/1901.08460>, equation 1; its
    authors' code 2020 <https://github.com/vzantedeschi/Dada>.
    """

    mu_1: NonNegative = 1.0
    mu_2: Positive = 0.5
    penalty: Positive = 1.0
    _: dataclasses.KW_ONLY
    peers: Count = 5
    lr: NonNegative = 0.5

    reads = ("final_loss",)
    beside = 3
    needs = (SERVERLESS, STICKY, EQUAL_WEIGHTS)

    def init(self, slots: int, data: ClientData) -> Array:
        return jnp.zeros((slots, slots), jnp.float32)

    def move(self, key: Array, graph: Array, slots: Slots) -> tuple[Mixing, Array]:
        trained = slots.visits > 0
        counts = slots.samples_visited.astype(jnp.float32)
        confidence = jnp.where(trained, counts / jnp.maximum(jnp.max(counts), 1), 1)
        loss = confidence * slots.info.extra["final_loss"]
        distance = tree.pairwise_squared_distances(slots.variables.params)

        def pair(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
            graph, seen = carry
            order, half = permutation(key, len(graph)), len(graph) // 2
            a, b = order[:half], order[half : 2 * half]
            old, degree = graph[a, b], jnp.sum(graph, axis=1) + DELTA
            cost = loss[a] + loss[b] + self.mu_1 / 2 * distance[a, b]
            best = _best_weight(cost / self.mu_2, self.penalty, degree[a] - old, degree[b] - old)
            new = jnp.where(trained[a] & trained[b], best, old)
            graph = graph.at[a, b].set(new).at[b, a].set(new)
            return (graph, seen.at[a, b].set(True)), None

        start = graph, jnp.zeros(graph.shape, bool)
        (graph, seen), _ = jax.lax.scan(pair, start, jax.random.split(key, self.peers))
        return Mixing(_proximal(graph, confidence, self.lr * self.mu_1), seen), graph


def _best_weight(cost: Array, penalty: float, one: Array, other: Array) -> Array:
    r"""Returns the :math:`w \ge 0` that minimises the terms of a pair in J, by bisection.

    .. math:: a w + \lambda w^2 - \log(p + w) - \log(q + w)

    The derivative increases with w and is positive from :math:`1 / \sqrt\lambda` on. Newton's
    method would need as many steps, because from 0 it only doubles w. p and q are δ plus the other
    weights of each client of the pair.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        slope = cost + 2 * penalty * middle - 1 / (one + middle) - 1 / (other + middle)
        return jnp.where(slope < 0, middle, low), jnp.where(slope < 0, high, middle)

    most = jnp.full_like(cost, 1) / jnp.sqrt(penalty)
    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(cost), most))
    alone = cost - 1 / one - 1 / other >= 0
    return jnp.where(alone, 0, (low + high) / 2)


def _proximal(graph: Array, confidence: Array, pull: float | Array) -> Array:
    """Returns the matrix ``f32[S, S]`` of a proximal step towards the neighbours."""
    degree = jnp.sum(graph, axis=1, keepdims=True)
    mean = graph / jnp.where(degree > 0, degree, 1)
    far = jnp.where(degree > 0, pull / (confidence[:, None] + pull), 0)
    return far * mean + (1 - far) * jnp.eye(len(graph), dtype=graph.dtype)
