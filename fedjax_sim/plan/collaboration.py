"""Dada: a graph of clients that is learned from their models and losses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Count,
    LearnedRedistribution,
    NonNegative,
    Positive,
    Slots,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.needs import EQUAL_WEIGHTS, SERVERLESS, STICKY
from fedjax_sim.plan.moves import Mixing

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
    \max_l n_l`. Between two rounds the clients are paired at random κ times. One of a pair sends
    its model, its loss and its degree; the other sets their weight to the minimum of J with all
    else fixed, and sends it back. Then every client takes a proximal step of rate η towards its
    neighbours:

    .. math:: \theta_k \leftarrow \frac{c_k \theta_k + \eta\mu_1 \sum_l w_{kl} \theta_l / d_k}
                                       {c_k + \eta\mu_1}

    There is no edge at first. The logarithm keeps every client connected; a smaller λ makes the
    graph sparser. The state is w, ``f32[S, S]``. Each model is sent with 12 bytes: a loss, a
    degree, and a weight in return.

    The paper's clients take a proximal gradient step on κ weights at once, whose length must
    decrease with the degrees; the authors' code determines it from the J of all clients. A single
    weight has one optimal value, and pairs that share no client can be optimised at the same time.

    It needs a flight without a server, slots that keep their clients, equal weighting, and
    clients that report ``final_loss`` (:func:`fedjax_sim.local.with_final_loss`).

    Args:
        mu_1: μ₁, the weight of distances between models.
        mu_2: μ₂, the weight of the terms of the graph itself.
        penalty: λ, the penalty on large weights.
        peers: κ, the number of pairings between two rounds; with an odd number of clients one is
            left out of each.
        lr: η; 0 moves no model.

    Raises:
        ValueError: if a number is out of range.

    Source: Zantedeschi, Bellet, Tommasi 2020 <https://arxiv.org/abs/1901.08460>, equation 1; its
    authors' code 2020 <https://github.com/vzantedeschi/Dada>.

    >>> learned(penalty=10.0, peers=2)
    learned(penalty=10.0, peers=2)
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
    method would need as many steps: from 0 it doubles w each time.

    Args:
        cost: a, ``f32[E]``, not negative.
        penalty: λ.
        one: p, ``f32[E]``, positive: δ plus the first client's other weights.
        other: q, ``f32[E]``, likewise for the second client.
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
