"""A graph of clients that is learned of their models and losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, LearnedRedistribution, Slots, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.needs import EQUAL_WEIGHTS, SERVERLESS, STICKY
from fedjax_sim.plan.moves import Mixing

DELTA = 1e-6
"""δ, by which a client without neighbours has a finite cost."""

HALVINGS = 40
"""Of the interval of a weight, after which float32 has no finer one."""


@part
def learned(
    mu_1: float = 1.0, mu_2: float = 0.5, penalty: float = 1.0, *, peers: int = 5, lr: float = 0.5
) -> LearnedRedistribution:
    r"""Clients learn whom to listen to: models that are alike, of clients whose losses are small.

    The weights of the edges, and the models, minimise together

    .. math:: J(w, \theta) = \sum_k d_k c_k L_k(\theta_k)
              + \frac{\mu_1}{2} \sum_{k<l} w_{kl} \lVert \theta_k - \theta_l \rVert^2
              + \mu_2 \Bigl( \lambda \sum_{k<l} w_{kl}^2 - \sum_k \log(d_k + \delta) \Bigr),
              \qquad d_k = \sum_l w_{kl}, \quad w \ge 0

    where :math:`L_k` is the client's loss at the model that it has trained and :math:`c_k = n_k /
    \max_l n_l`. Between two rounds the clients meet in pairs, drawn at random anew κ times. Of a
    pair one sends its model, its loss and its degree; the other sets their weight to where J is
    least, all else fixed, and sends it back. Then everyone makes a proximal step of rate η towards
    its neighbours:

    .. math:: \theta_k \leftarrow \frac{c_k \theta_k + \eta\mu_1 \sum_l w_{kl} \theta_l / d_k}
                                       {c_k + \eta\mu_1}

    There is no edge at first. The logarithm lets nobody stay alone; a smaller λ makes the graph
    sparser.

    The paper's clients take a proximal gradient step on κ weights at once. Its length must fall as
    degrees do, which the authors' code finds out by the J of all clients. A weight alone has one
    best value, and pairs that share no client may take theirs at the same time.

    Needs a schedule without a server, slots that keep their clients, and equal weighting.

    Args:
        mu_1: μ₁, how much distances between models count.
        mu_2: μ₂, how much the graph's own shape counts.
        penalty: λ, how much large weights cost.
        peers: κ, the clients that each meets between two rounds; with an odd number one misses a
            meeting.
        lr: η; 0 moves no model.

    Returns:
        A redistribution that reads ``final_loss``
        (:func:`fedjax_sim.reports.with_final_loss`). Its state is w, ``f32[S, S]``. A model that is
        sent comes with 12 bytes: a loss, a degree, and a weight in return.

    Raises:
        ValueError: if a number is out of range.

    Source: Zantedeschi, Bellet, Tommasi 2020 <https://arxiv.org/abs/1901.08460>, equation 1; its
    authors' code 2020 <https://github.com/vzantedeschi/Dada>.

    >>> learned(penalty=10.0, peers=2)
    learned(penalty=10.0, peers=2)
    """
    for name, number in {"mu_2": mu_2, "penalty": penalty}.items():
        if not isinstance(number, Array) and not number > 0:
            raise ValueError(f"{name} must be positive, got {number}")
    for name, number in {"mu_1": mu_1, "lr": lr}.items():
        if not isinstance(number, Array) and not number >= 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    if peers < 1:
        raise ValueError(f"peers must be at least 1, got {peers}")

    def init(slots: int) -> Array:
        return jnp.zeros((slots, slots), jnp.float32)

    def move(key: Array, graph: Array, slots: Slots) -> tuple[Mixing, Array]:
        trained = slots.visits > 0
        counts = slots.samples_visited.astype(jnp.float32)
        confidence = jnp.where(trained, counts / jnp.maximum(jnp.max(counts), 1), 1)
        loss = confidence * slots.info.extra["final_loss"]
        distance = tree.pairwise_squared_distances(slots.variables.params)

        def meet(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
            graph, seen = carry
            order, half = permutation(key, len(graph)), len(graph) // 2
            a, b = order[:half], order[half : 2 * half]
            old, degree = graph[a, b], jnp.sum(graph, axis=1) + DELTA
            cost = loss[a] + loss[b] + mu_1 / 2 * distance[a, b]
            best = _least(cost / mu_2, penalty, degree[a] - old, degree[b] - old)
            new = jnp.where(trained[a] & trained[b], best, old)
            graph = graph.at[a, b].set(new).at[b, a].set(new)
            return (graph, seen.at[a, b].set(True)), None

        start = graph, jnp.zeros(graph.shape, bool)
        (graph, seen), _ = jax.lax.scan(meet, start, jax.random.split(key, peers))
        return Mixing(_pulled(graph, confidence, lr * mu_1), seen), graph

    return LearnedRedistribution(
        init, move, reads=("final_loss",), beside=3, needs=(SERVERLESS, STICKY, EQUAL_WEIGHTS)
    )


def _least(cost: Array, penalty: float, one: Array, other: Array) -> Array:
    r"""The :math:`w \ge 0` at which a pair's share of J is least, by halving.

    .. math:: a w + \lambda w^2 - \log(p + w) - \log(q + w)

    Its derivative rises with w and is positive from :math:`1 / \sqrt\lambda` on. Newton's method
    would need as many steps: from 0 it doubles w each time.

    Args:
        cost: a, ``f32[E]``, not negative.
        penalty: λ.
        one: p, ``f32[E]``, positive: δ and the first one's other weights.
        other: q, ``f32[E]``, the second one's.
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


def _pulled(graph: Array, confidence: Array, pull: float | Array) -> Array:
    """The matrix ``f32[S, S]`` of a proximal step of length ``pull`` towards the neighbours."""
    degree = jnp.sum(graph, axis=1, keepdims=True)
    mean = graph / jnp.where(degree > 0, degree, 1)
    far = jnp.where(degree > 0, pull / (confidence[:, None] + pull), 0)
    return far * mean + (1 - far) * jnp.eye(len(graph), dtype=graph.dtype)
