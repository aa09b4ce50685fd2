"""Where models go between two local rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, Redistribution


def keep(key: Array, slots: int) -> Array:
    """Every model stays in its slot.

    >>> keep(jax.random.key(0), 3).tolist()
    [0, 1, 2]
    """
    del key
    return jnp.arange(slots, dtype=jnp.int32)


def permute(key: Array, slots: int) -> Array:
    """A uniformly random permutation: slot i takes the model of slot ``permute(...)[i]``.

    Source: RADFed, Algorithm 1 line 6.

    >>> sorted(permute(jax.random.key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    return jax.random.permutation(key, slots).astype(jnp.int32)


def mix(matrix: ArrayLike) -> Redistribution:
    r"""A fixed mixing matrix: slot i goes on with :math:`\sum_j W_{ij} w_j`.

    Args:
        matrix: W, ``[S, S]``, every row of sum 1. The mean of the models stays what it is if the
            columns have sum 1 too, as those of :func:`metropolis`.

    Raises:
        ValueError: if it is no such matrix; in the first round, if it is not that of the slots.

    Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform
    centralized algorithms?", NeurIPS 2017, Algorithm 1.

    >>> mix([[0.5, 0.5], [0.25, 0.75]])(jax.random.key(0), 2).tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    fixed = np.asarray(matrix, np.float32)
    if fixed.ndim != 2 or fixed.shape[0] != fixed.shape[1]:
        raise ValueError(f"matrix must be square, got one of shape {fixed.shape}")
    sums = fixed.sum(axis=1, dtype=np.float64)
    if not np.allclose(sums, 1, rtol=0, atol=1e-5):
        worst = int(np.argmax(~np.isclose(sums, 1, rtol=0, atol=1e-5)))
        raise ValueError(f"matrix must have rows of sum 1, row {worst} has {sums[worst]:g}")

    def draw(key: Array, slots: int) -> Array:
        del key
        if slots != len(fixed):
            raise ValueError(f"matrix must mix the {slots} slots, got one of {len(fixed)}")
        return jnp.asarray(fixed)

    return draw


def matchings(edges: NDArray[np.bool_], activity: float) -> Redistribution:
    r"""A graph whose edges are switched on at random, matching by matching.

    The edges are coloured so that those of a colour share no node: they are a matching, and can
    talk at the same time. Each matching is on with probability ``activity`` in a round,
    independently, and W has the Metropolis weights of the edges that are on.

    MATCHA finds for each matching a probability of its own, and one weight for all edges, by two
    convex programs on the spectrum of the graph's Laplacian; here all are alike.

    Args:
        edges: ``bool[S, S]``, the graph, e.g. :func:`ring`.
        activity: the probability; 1 is ``mix(metropolis(edges))`` in every round.

    Raises:
        ValueError: if activity is out of range, or edges is no undirected graph; in the first
            round, if it is not one of the slots.

    Source: Wang, Sahu, Yang, Joshi, Kar, "MATCHA: speeding up decentralized SGD via matching
    decomposition sampling", 2019.

    >>> matchings(ring(4), 0.0)(jax.random.key(0), 4).tolist()[0]
    [1.0, 0.0, 0.0, 0.0]
    """
    if not 0 <= activity <= 1:
        raise ValueError(f"activity must be in [0, 1], got {activity}")
    colour = _coloured(_graph(edges))

    def draw(key: Array, slots: int) -> Array:
        if slots != len(colour):
            raise ValueError(f"edges must join the {slots} slots, got a graph of {len(colour)}")
        on = jax.random.bernoulli(key, activity, (int(colour.max(initial=-1)) + 1,))
        return _weights(jnp.append(on, False)[colour])  # colour -1, no edge, is the last

    return draw


def metropolis(edges: NDArray[np.bool_]) -> NDArray[np.float32]:
    r"""Weights that are symmetric and of sum 1 in rows and columns, of any undirected graph.

    .. math:: W_{ij} = \frac{1}{1 + \max(\deg_i, \deg_j)} \text{ for an edge}, \qquad
              W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Args:
        edges: ``bool[S, S]``, symmetric, without loops.

    Returns:
        ``f32[S, S]``.

    Raises:
        ValueError: if edges is no such matrix.

    Source: Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation",
    2007, section 3.

    >>> metropolis(ring(3)).round(3).tolist()[0]
    [0.3330000042915344, 0.3330000042915344, 0.3330000042915344]
    """
    return np.asarray(_weights(jnp.asarray(_graph(edges))))


def ring(slots: int) -> NDArray[np.bool_]:
    """Every slot and its two neighbours, ``bool[S, S]``.

    >>> ring(4)[0].tolist()
    [False, True, False, True]
    """
    step = np.arange(slots)[:, None] - np.arange(slots)
    return ((step % slots == 1) | (-step % slots == 1)) & (step != 0)


def complete(slots: int) -> NDArray[np.bool_]:
    """Every slot and every other, ``bool[S, S]``; its Metropolis weights are all 1/S.

    >>> complete(3)[0].tolist()
    [False, True, True]
    """
    return ~np.eye(slots, dtype=bool)


def _graph(edges: ArrayLike) -> NDArray[np.bool_]:
    graph = np.asarray(edges, bool)
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"edges must be a square matrix, got one of shape {graph.shape}")
    if (graph != graph.T).any() or graph.diagonal().any():
        raise ValueError("edges must be symmetric and without loops")
    return graph


def _weights(edges: Array) -> Array:
    """Metropolis weights of ``bool[S, S]``: ``f32[S, S]``."""
    degree = jnp.sum(edges, axis=1, dtype=jnp.int32)
    weight = 1 / (1 + jnp.maximum(degree[:, None], degree[None, :])).astype(jnp.float32)
    between = jnp.where(edges, weight, 0)
    return between + jnp.diag(1 - jnp.sum(between, axis=1))


def _coloured(edges: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A colour for each edge, ``int32[S, S]``, that its two nodes have once; -1 where none is.

    Edge by edge the first colour that is free at both ends: at most twice the largest degree, less
    one.
    """
    colour = np.full(edges.shape, -1, np.int32)
    for i, j in np.argwhere(np.triu(edges)):
        used = {*colour[i].tolist(), *colour[j].tolist()}
        colour[i, j] = colour[j, i] = next(c for c in range(2 * len(edges)) if c not in used)
    return colour
