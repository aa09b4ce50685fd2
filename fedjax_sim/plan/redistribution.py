"""Where models go between two local rounds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, Redistribution, Slots, part
from fedjax_sim.engine import tree


class Gather(NamedTuple):
    """Every slot takes the whole model of one slot.

    Attributes:
        source: ``int32[S]``, the slot whose model slot i holds next.
    """

    source: Array

    def take(self, slots: Slots, order: Array) -> Slots:
        """See :class:`fedjax_sim.base.Moves`."""
        moved: Slots = tree.take(slots, self.source[order])
        return moved

    def received(self) -> Array:
        """See :class:`fedjax_sim.base.Moves`."""
        by_slot = jnp.arange(len(self.source), dtype=jnp.int32)
        return (self.source != by_slot).astype(jnp.int32)


class Mixing(NamedTuple):
    r"""Every slot takes a mean of models; everything else that is known of a slot stays.

    Attributes:
        matrix: W, ``f32[S, S]`` with rows that sum to 1: slot i goes on with
          :math:`\sum_j W_{ij} w_j`.
    """

    matrix: Array

    def take(self, slots: Slots, order: Array) -> Slots:
        """See :class:`fedjax_sim.base.Moves`."""
        mixed = slots._replace(variables=tree.mix(self.matrix, slots.variables))
        moved: Slots = tree.take(mixed, order)
        return moved

    def received(self) -> Array:
        """See :class:`fedjax_sim.base.Moves`."""
        others = ~jnp.eye(len(self.matrix), dtype=bool)
        return jnp.sum((self.matrix != 0) & others, axis=1, dtype=jnp.int32)


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
    return Gather(jax.random.permutation(key, slots).astype(jnp.int32))


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
    fixed = np.asarray(matrix, np.float32)
    if fixed.ndim != 2 or fixed.shape[0] != fixed.shape[1]:
        raise ValueError(f"matrix must be square, got one of shape {fixed.shape}")
    sums = fixed.sum(axis=1, dtype=np.float64)
    if not np.allclose(sums, 1, rtol=0, atol=1e-5):
        worst = int(np.argmax(~np.isclose(sums, 1, rtol=0, atol=1e-5)))
        raise ValueError(f"matrix must have rows of sum 1, row {worst} has {sums[worst]:g}")

    def draw(key: Array, slots: int) -> Mixing:
        del key
        if slots != len(fixed):
            raise ValueError(f"matrix must mix the {slots} slots, got one of {len(fixed)}")
        return Mixing(jnp.asarray(fixed))

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
        on = jax.random.bernoulli(key, activity, (int(colour.max(initial=-1)) + 1,))
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


def ring(slots: int) -> NDArray[np.bool_]:
    """The graph that joins every slot with its two neighbours, ``bool[S, S]``.

    >>> ring(4)[0].tolist()
    [False, True, False, True]
    """
    step = np.arange(slots)[:, None] - np.arange(slots)
    return ((step % slots == 1) | (-step % slots == 1)) & (step != 0)


def complete(slots: int) -> NDArray[np.bool_]:
    """The graph that joins every two slots, ``bool[S, S]``; its Metropolis weights are all 1/S.

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
    """A colour for each edge, ``int32[S, S]``, different for edges that share a node; -1 for none.

    Edge by edge the first colour that is free at both ends, which takes at most twice the largest
    degree, less one.
    """
    colour = np.full(edges.shape, -1, np.int32)
    for i, j in np.argwhere(np.triu(edges)):
        used = {*colour[i].tolist(), *colour[j].tolist()}
        colour[i, j] = colour[j, i] = next(c for c in range(2 * len(edges)) if c not in used)
    return colour
