"""Redistributions: moves of models between slots, between two local rounds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, Share
from fedjax_sim.base.parts import Part
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.memory import check_memory_for
from fedjax_sim.engine.needs import EQUAL_WEIGHTS, SERVERLESS, STICKY
from fedjax_sim.plan.moves import Gather, Mixing, edges, learned

__all__ = [
    "Gather",
    "Mixing",
    "complete",
    "edges",
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


def permute(key: Array, slots: int) -> Gather:
    """Permutes the models uniformly at random.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 1, as lines 6 to 8 imply.

    >>> sorted(permute(jax.random.key(0), 4).source.tolist())
    [0, 1, 2, 3]
    """
    return Gather(permutation(key, slots))


class _Fixed(Part):
    """A redistribution by the same matrix in every round."""

    matrix: ArrayLike

    line = "row"

    def __post_init__(self) -> None:
        _ = self._checked

    def __call__(self, key: Array, slots: int) -> Mixing:
        if slots != len(self._checked):
            raise ValueError(f"matrix must mix the {slots} slots, got one of {len(self._checked)}")
        return Mixing(jnp.asarray(self._checked))

    @functools.cached_property
    def _checked(self) -> NDArray[np.float32]:
        return _square(self.matrix, self.line)


class mix(_Fixed):
    r"""A fixed mixing matrix: slot i continues with :math:`\sum_j W_{ij} w_j`.

    Args:
        matrix: W, ``[S, S]``, whose rows sum to 1. If its columns do too, as for
            :func:`metropolis`, the mean of the models does not change.

    Raises:
        ValueError: if matrix is not square or has a row of another sum; in the first round, if its
            size is not the number of slots.

    Source: Lian et al. 2017 <https://arxiv.org/abs/1705.09056>, Algorithm 1.

    >>> mix([[0.5, 0.5], [0.25, 0.75]])(jax.random.key(0), 2).matrix.tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """


class push(_Fixed):
    r"""Push-sum: slot j sends the share :math:`W_{ij}` of its model, and of a weight, to slot i.

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j, \qquad \omega_i \leftarrow \sum_j W_{ij} \omega_j,
              \qquad z_i = x_i / \omega_i

    The clients use :math:`z_i`, and :math:`x_i` changes by the same amount in training. All weights
    are 1 at first. Only the columns of W need to sum to 1, so a slot need not know which others
    send to whom; the weights correct for slots that receive more than others. The mixing preserves
    the sum of the :math:`x_i`, and so the weighted mean of the :math:`z_i`. If the rows sum to 1
    too, all weights stay 1 and it is :func:`mix`. Each model is sent with its weight, 4 bytes.

    It needs a flight without a server, slots that keep their clients, and equal weighting.

    Args:
        matrix: W, ``[S, S]``, whose columns sum to 1, such as :func:`outgoing` returns. It has no
          negative entries and a positive diagonal, and every slot reaches every other.

    Raises:
        ValueError: if matrix is not such a matrix; in the first round, if its size is not the
            number of slots.

    Source: He et al. 2019 <https://arxiv.org/abs/1910.04956>, Algorithm 1, with W transposed.

    >>> push([[0.5, 0.0], [0.5, 1.0]])
    Traceback (most recent call last):
    ValueError: matrix must let every slot reach every other, slot 1 does not reach slot 0
    """

    line = "column"
    weighted = True
    needs = (SERVERLESS, STICKY, EQUAL_WEIGHTS)

    def __post_init__(self) -> None:
        fixed = self._checked
        if (fixed < 0).any() or not (fixed.diagonal() > 0).all():
            raise ValueError("matrix must have a positive diagonal and nothing negative")
        # A slot that others do not reach would send its weight away until it is 0.
        reached = fixed > 0
        for _ in range(len(fixed).bit_length()):
            reached = reached @ reached
        if not reached.all():
            to, start = np.argwhere(~reached)[0].tolist()
            raise ValueError(
                f"matrix must let every slot reach every other, slot {start} does not reach slot "
                f"{to}"
            )


class matchings(Part):
    """A graph whose edges are activated at random, matching by matching.

    The edges are coloured so that no two of one colour share a node: such edges are a matching, and
    can be used at the same time. In a round each matching is active with probability ``activity``,
    independently, and W has the Metropolis weights of the active edges.

    MATCHA instead computes a probability for each matching, and one weight for all edges, from two
    convex programs on the spectrum of the graph's Laplacian.

    Args:
        edges: ``bool[S, S]``, the graph, e.g. :func:`ring`.
        activity: the probability; 1 is ``mix(metropolis(edges))`` in every round.

    Raises:
        ValueError: if activity is out of range, or edges is not an undirected graph; in the first
            round, if its size is not the number of slots.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1905.09435>.

    >>> matchings(ring(4), 0.0)(jax.random.key(0), 4).matrix.tolist()[0]
    [1.0, 0.0, 0.0, 0.0]
    """

    edges: NDArray[np.bool_]
    activity: Share

    def __post_init__(self) -> None:
        _ = self._colour

    def __call__(self, key: Array, slots: int) -> Mixing:
        colour = self._colour
        if slots != len(colour):
            raise ValueError(f"edges must join the {slots} slots, got a graph of {len(colour)}")
        count = int(colour.max(initial=-1)) + 1
        active = jax.random.uniform(key, (count,), jnp.float32) < self.activity
        return Mixing(_weights(jnp.append(active, False)[colour]))  # colour -1 is the last

    @functools.cached_property
    def _colour(self) -> NDArray[np.int32]:
        return _colour_edges(_graph(self.edges))


def metropolis(edges: NDArray[np.bool_]) -> NDArray[np.float32]:
    r"""Returns the Metropolis weights of an undirected graph: rows and columns sum to 1.

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
    r"""Returns equal shares for a slot and all slots to which it sends: columns sum to 1.

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
    """Returns a random directed graph, in which each slot sends to the next one and to others.

    Args:
        slots: S.
        links: the number of slots to which each sends; the number from which it receives varies.
        seed: seed of the draw.

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
    """Returns the graph that joins every slot with its two neighbours, ``bool[S, S]``.

    >>> ring(4)[0].tolist()
    [False, True, False, True]
    """
    _check_graph(slots)
    step = np.arange(slots)[:, None] - np.arange(slots)
    return ((step % slots == 1) | (-step % slots == 1)) & (step != 0)


def complete(slots: int) -> NDArray[np.bool_]:
    """Returns the complete graph, ``bool[S, S]``, whose Metropolis weights are all 1/S.

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
    """Returns the matrix, after checking that each ``line``, row or column, sums to 1."""
    fixed = np.asarray(matrix, np.float32)
    if fixed.ndim != 2 or fixed.shape[0] != fixed.shape[1]:
        raise ValueError(f"matrix must be square, got one of shape {fixed.shape}")
    sums = fixed.sum(axis=int(line == "row"), dtype=np.float64)
    wrong = ~np.isclose(sums, 1, rtol=0, atol=1e-5)
    if wrong.any():
        worst = int(np.argmax(wrong))
        raise ValueError(f"matrix must have {line}s of sum 1, {line} {worst} has {sums[worst]:g}")
    return fixed


def _weights(edges: Array) -> Array:
    """Returns the Metropolis weights of ``bool[S, S]``: ``f32[S, S]``."""
    degree = jnp.sum(edges, axis=1, dtype=jnp.int32)
    weight = 1 / (1 + jnp.maximum(degree[:, None], degree[None, :])).astype(jnp.float32)
    between = jnp.where(edges, weight, 0)
    return between + jnp.diag(1 - tree.row_sum(between))  # the columns have the sums of the rows


def _colour_edges(edges: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Returns an edge colouring, ``int32[S, S]``, with -1 where there is no edge.

    Each edge in turn gets the first colour that is free at both ends, so there are at most 2 d - 1
    colours, where d is the largest degree.
    """
    colour = np.full(edges.shape, -1, np.int32)
    for i, j in np.argwhere(np.triu(edges)):
        used = {*colour[i].tolist(), *colour[j].tolist()}
        colour[i, j] = colour[j, i] = next(c for c in range(2 * len(edges)) if c not in used)
    return colour
