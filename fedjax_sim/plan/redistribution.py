"""Where models go between two local rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, Redistribution, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.memory import check_memory_for
from fedjax_sim.engine.needs import EQUAL_WEIGHTS, SERVERLESS, STICKY
from fedjax_sim.plan.collaboration import learned
from fedjax_sim.plan.moves import Gather, Mixing

__all__ = [
    "Gather",
    "Mixing",
    "complete",
    "keep",
    "learned",
    "matchings",
    "metropolis",
    "mix",
    "one_sided",
    "outgoing",
    "permute",
    "push",
    "ring",
]


def keep(key: Array, slots: int) -> Gather:
    """Every model stays in its slot.

    >>> keep(jax.random.key(0), 3).source.tolist()
    [0, 1, 2]
    """
    del key
    return Gather(jnp.arange(slots, dtype=jnp.int32))


def permute(key: Array, slots: int) -> Gather:
    """A uniformly random permutation.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 1, as lines 6 to 8 imply.

    >>> sorted(permute(jax.random.key(0), 4).source.tolist())
    [0, 1, 2, 3]
    """
    return Gather(permutation(key, slots))


@part
def mix(matrix: ArrayLike) -> Redistribution:
    r"""A fixed mixing matrix: slot i goes on with :math:`\sum_j W_{ij} w_j`.

    Args:
        matrix: W, ``[S, S]``, whose rows sum to 1. If its columns do too, as those of
          :func:`metropolis`, the mean of the models does not change.

    Returns:
        A redistribution.

    Raises:
        ValueError: if matrix is not square or has a row of another sum; in the first round, if it
          is not of the number of slots.

    Source: Lian et al. 2017 <https://arxiv.org/abs/1705.09056>, Algorithm 1.

    >>> mix([[0.5, 0.5], [0.25, 0.75]])(jax.random.key(0), 2).matrix.tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    return _fixed(_square(matrix, "row"))


@part
def push(matrix: ArrayLike) -> Redistribution:
    r"""Push-sum: slot j sends the share :math:`W_{ij}` of its model, and of a weight, to slot i.

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j, \qquad \omega_i \leftarrow \sum_j W_{ij} \omega_j,
              \qquad z_i = x_i / \omega_i

    The clients use :math:`z_i`, and :math:`x_i` moves as far as training moves it. All weights are
    1 at first. Only the columns of W sum to 1, so that a slot need not know who else sends to
    whom; the weights undo that some receive more than others. The mixing keeps the sum of the
    :math:`x_i`, and so the mean of the :math:`z_i` by their weights. If the rows sum to 1 too, all
    weights stay 1 and it is :func:`mix`.

    Needs a schedule without a server, slots that keep their clients, and equal weighting.

    Args:
        matrix: W, ``[S, S]``, whose columns sum to 1, such as those of :func:`outgoing`. Nothing in
          it is negative, its diagonal is positive, and every slot reaches every other.

    Returns:
        A redistribution; a weight is 4 bytes beside each model that is sent.

    Raises:
        ValueError: if matrix is not so; in the first round, if it is not of the number of slots.

    Source: He et al. 2019 <https://arxiv.org/abs/1910.04956>, Algorithm 1, with W transposed.

    >>> push([[0.5, 0.0], [0.5, 1.0]])
    Traceback (most recent call last):
    ValueError: matrix must let every slot reach every other, slot 1 does not reach slot 0
    """
    fixed = _square(matrix, "column")
    if (fixed < 0).any() or not (fixed.diagonal() > 0).all():
        raise ValueError("matrix must have a positive diagonal and nothing negative")
    # A slot that others do not reach would send its weight away until it is 0.
    reached = fixed > 0
    for _ in range(len(fixed).bit_length()):
        reached = reached @ reached
    if not reached.all():
        to, start = np.argwhere(~reached)[0].tolist()
        raise ValueError(
            f"matrix must let every slot reach every other, slot {start} does not reach slot {to}"
        )
    draw = _fixed(fixed)
    draw.weighted = True  # type: ignore[attr-defined]
    draw.needs = (SERVERLESS, STICKY, EQUAL_WEIGHTS)  # type: ignore[attr-defined]
    return draw


@part
def matchings(edges: NDArray[np.bool_], activity: float) -> Redistribution:
    """A graph whose edges are switched on at random, matching by matching.

    The edges are coloured so that no two of one colour share a node: such edges are a matching, and
    can be used at the same time. In a round each matching is on with probability ``activity``,
    independently, and W has the Metropolis weights of the edges that are on.

    MATCHA instead finds a probability for each matching, and one weight for all edges, by two
    convex programs on the spectrum of the graph's Laplacian.

    Args:
        edges: ``bool[S, S]``, the graph, e.g. :func:`ring`.
        activity: the probability; 1 is ``mix(metropolis(edges))`` in every round.

    Returns:
        A redistribution.

    Raises:
        ValueError: if activity is out of range, or edges is not an undirected graph; in the first
          round, if it is not of the number of slots.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1905.09435>.

    >>> matchings(ring(4), 0.0)(jax.random.key(0), 4).matrix.tolist()[0]
    [1.0, 0.0, 0.0, 0.0]
    """
    if not 0 <= activity <= 1:
        raise ValueError(f"activity must be in [0, 1], got {activity}")
    colour = _coloured(_graph(edges))

    def draw(key: Array, slots: int) -> Mixing:
        if slots != len(colour):
            raise ValueError(f"edges must join the {slots} slots, got a graph of {len(colour)}")
        count = int(colour.max(initial=-1)) + 1
        on = jax.random.uniform(key, (count,), jnp.float32) < activity
        return Mixing(_weights(jnp.append(on, False)[colour]))  # colour -1 (no edge) is the last

    return draw


def metropolis(edges: NDArray[np.bool_]) -> NDArray[np.float32]:
    r"""Symmetric weights for any undirected graph, with rows and columns that sum to 1.

    .. math:: W_{ij} = \frac{1}{1 + \max(\deg_i, \deg_j)} \text{ for an edge}, \qquad
              W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Args:
        edges: ``bool[S, S]``, symmetric, without loops.

    Returns:
        ``f32[S, S]``.

    Raises:
        ValueError: if edges is not such a matrix.

    Source: Xiao et al. 2007 <https://stanford.edu/~boyd/papers/lms_consensus.html>, section 3.

    >>> metropolis(ring(3)).round(3).tolist()[0]
    [0.3330000042915344, 0.3330000042915344, 0.3330000042915344]
    """
    return np.asarray(_weights(jnp.asarray(_graph(edges))))


def outgoing(edges: NDArray[np.bool_]) -> NDArray[np.float32]:
    r"""Equal shares for a slot itself and all to which it sends: columns that sum to 1.

    .. math:: W_{ij} = \frac{1}{1 + d_j} \text{ for } i = j \text{ and the } d_j
              \text{ slots to which } j \text{ sends}

    Args:
        edges: ``bool[S, S]``, whether slot j (the column) sends to slot i, e.g. :func:`one_sided`.

    Returns:
        ``f32[S, S]``.

    >>> outgoing(one_sided(3, 1)).tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    sends = np.asarray(edges, bool) | np.eye(len(edges), dtype=bool)
    return (sends / sends.sum(axis=0)).astype(np.float32)


def one_sided(slots: int, links: int, seed: int = 0) -> NDArray[np.bool_]:
    """A directed graph: each slot sends to the next one, and to others drawn at random.

    Args:
        slots: S.
        links: the slots to which each sends; how many send to it differs.
        seed: of the draw.

    Returns:
        ``bool[S, S]``, whether slot j (the column) sends to slot i; every slot reaches every other.

    Raises:
        ValueError: if links is not in 1 .. S - 1.

    >>> one_sided(3, 2).sum(axis=0).tolist()
    [2, 2, 2]
    """
    if not 1 <= links < slots:
        raise ValueError(f"links must be in 1..{slots - 1}, the other clients, got {links}")
    _check_graph(slots)
    rng = np.random.default_rng(seed)
    edges = np.zeros((slots, slots), bool)
    for sender in range(slots):
        others = (sender + 2 + rng.permutation(slots - 2)[: links - 1]) % slots
        edges[[(sender + 1) % slots, *others], sender] = True
    return edges


def ring(slots: int) -> NDArray[np.bool_]:
    """The graph that joins every slot with its two neighbours, ``bool[S, S]``.

    >>> ring(4)[0].tolist()
    [False, True, False, True]
    """
    _check_graph(slots)
    step = np.arange(slots)[:, None] - np.arange(slots)
    return ((step % slots == 1) | (-step % slots == 1)) & (step != 0)


def complete(slots: int) -> NDArray[np.bool_]:
    """The graph that joins every two slots, ``bool[S, S]``; its Metropolis weights are all 1/S.

    >>> complete(3)[0].tolist()
    [False, True, True]
    """
    _check_graph(slots)
    return ~np.eye(slots, dtype=bool)


def _check_graph(slots: int) -> None:
    """Raises TooLargeError for a graph whose weights this machine cannot hold."""
    check_memory_for(f"the graph of {slots:,} clients_per_round", 8 * slots**2)


def _graph(edges: ArrayLike) -> NDArray[np.bool_]:
    graph = np.asarray(edges, bool)
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"edges must be a square matrix, got one of shape {graph.shape}")
    if (graph != graph.T).any() or graph.diagonal().any():
        raise ValueError("edges must be symmetric and without loops")
    return graph


def _square(matrix: ArrayLike, line: str) -> NDArray[np.float32]:
    """A matrix of which each ``line``, a row or a column, sums to 1."""
    fixed = np.asarray(matrix, np.float32)
    if fixed.ndim != 2 or fixed.shape[0] != fixed.shape[1]:
        raise ValueError(f"matrix must be square, got one of shape {fixed.shape}")
    sums = fixed.sum(axis=int(line == "row"), dtype=np.float64)
    wrong = ~np.isclose(sums, 1, rtol=0, atol=1e-5)
    if wrong.any():
        worst = int(np.argmax(wrong))
        raise ValueError(f"matrix must have {line}s of sum 1, {line} {worst} has {sums[worst]:g}")
    return fixed


def _fixed(matrix: NDArray[np.float32]) -> Redistribution:
    def draw(key: Array, slots: int) -> Mixing:
        del key
        if slots != len(matrix):
            raise ValueError(f"matrix must mix the {slots} slots, got one of {len(matrix)}")
        return Mixing(jnp.asarray(matrix))

    return draw


def _weights(edges: Array) -> Array:
    """Metropolis weights of ``bool[S, S]``: ``f32[S, S]``."""
    degree = jnp.sum(edges, axis=1, dtype=jnp.int32)
    weight = 1 / (1 + jnp.maximum(degree[:, None], degree[None, :])).astype(jnp.float32)
    between = jnp.where(edges, weight, 0)
    return between + jnp.diag(1 - tree.row_sum(between))  # as many in a column as in a row


def _coloured(edges: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A colour for each edge, ``int32[S, S]``, different for edges that share a node; -1 for none.

    Edge by edge the first colour that is free at both ends, which takes at most twice the largest
    degree, less one.
    """
    colour = np.full(edges.shape, -1, np.int32)
    for i, j in np.argwhere(np.triu(edges)):
        used = {*colour[i].tolist(), *colour[j].tolist()}
        colour[i, j] = colour[j, i] = next(c for c in range(2 * len(edges)) if c not in used)
    return colour
