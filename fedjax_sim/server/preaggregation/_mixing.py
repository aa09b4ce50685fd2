"""Mixing of rows before the aggregation, which brings honest rows closer together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, Count, Minority, Need, PreAggregation, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import ALL_DUE, ONE_MODEL, SYNCHRONOUS, WHOLE_MODEL
from fedjax_sim.server.aggregators._rows import enough, share_of, trainable


def _read_before(parts: Any) -> bool:
    """Returns whether no part reads clients' reports after a part has mixed the rows."""
    mixed = False
    for one in parts.preaggregation:
        if mixed and (one.reads or one.setup_traffic):
            return False
        mixed = mixed or one.mixes is not None
    return True


READ_BEFORE = Need(
    "preaggregation",
    "no part after it that reads single clients' reports",
    _read_before,
    "that part before it",
)
# Only updates of one model are measured from the same point.
MIXED = (ONE_MODEL, SYNCHRONOUS, ALL_DUE, WHOLE_MODEL, READ_BEFORE)


class nearest_neighbour_mixing(PreAggregation):
    r"""NNM: replaces every row by the mean of the rows nearest to it.

    .. math:: \Delta_k \leftarrow \frac{1}{n - f} \sum_{j \in N_k} \Delta_j

    with :math:`N_k` the n - f rows nearest to row k, including itself, n the present rows, :math:`f
    = \lfloor \text{byzantine} \cdot n \rfloor`. Distances are over the trainable parameters;
    BatchNorm statistics are mixed in the same way. Every present row counts once, whatever its
    weight, which is unchanged. Rows that tie for the last place share it, so the result does not
    depend on their order. A row without a finite norm is not a neighbour of any other and is
    unchanged.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious; pass the same to the
            aggregator.

    Raises:
        ValueError: if byzantine is not in [0, 0.5); by ``compose``, if byzantine of the models is
            less than one model.

    Source: Allouah et al. 2023 <https://arxiv.org/abs/2302.01772>, Algorithm 2.

    Example:
        >>> w, k = Variables(jnp.zeros(1), ()), jnp.arange(4)
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, None, (), None)
        >>> updates = Variables(jnp.array([[0.0], [1.0], [2.0], [90.0]]), ())
        >>> mixing = nearest_neighbour_mixing(0.25)
        >>> rows, *_ = mixing.apply(None, (), updates, jnp.ones(4), cohort)
        >>> rows.params[:, 0].tolist()
        [1.0, 1.0, 1.0, 31.0]
    """

    byzantine: Minority | Array = 0.2

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*MIXED, *enough("byzantine", self.byzantine, lambda f: 2 * f + 1))

    def mixes(self, rows: int) -> int:
        return rows

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        present = weights > 0
        finite = present & jnp.isfinite(tree.norms(updates.params))
        count = jnp.sum(present, dtype=jnp.int32)
        neighbours = count - share_of(count, self.byzantine, len(weights))
        distance = jnp.where(
            finite[None], tree.pairwise_squared_distances(trainable(updates)), jnp.inf
        )
        last = jnp.sort(distance, axis=1)[:, neighbours - 1, None]
        nearer, level = distance < last, (distance == last) & finite[None]
        left = neighbours - jnp.sum(nearer, axis=1, dtype=jnp.int32)
        each = left / jnp.maximum(jnp.sum(level, axis=1, dtype=jnp.int32), 1)
        matrix = jnp.where(nearer, 1, jnp.where(level, each[:, None], 0)).astype(jnp.float32)
        matrix = matrix / jnp.maximum(jnp.sum(matrix, axis=1, keepdims=True), 1)
        # 0 times infinity is NaN.
        rows = tree.select_rows(finite, updates, jax.tree.map(jnp.zeros_like, updates))
        return tree.select_rows(finite, tree.mix(matrix, rows), updates), weights, state


class bucketing(PreAggregation):
    r"""Assigns rows to random buckets, and replaces each bucket by its mean.

    .. math:: y_i = \frac{\sum_{k \in B_i} a_k \Delta_k}{\sum_{k \in B_i} a_k}, \qquad
              a_i = \sum_{k \in B_i} a_k

    for the :math:`\lceil n/s \rceil` buckets :math:`B_i` of a random order of the n present rows,
    with s rows in each but the last. The standard deviation of honest buckets is :math:`1/\sqrt{s}`
    of that of the rows, but f malicious rows can spoil f buckets, so the aggregator must withstand
    s times the share. The plain mean is unchanged. A malicious row spoils its whole bucket,
    whatever its weight.

    Args:
        size: s.

    Raises:
        ValueError: if size is less than 1.

    Source: Karimireddy et al. 2022 <https://arxiv.org/abs/2006.09365>, Algorithm 1.

    Example:
        >>> w, k = Variables(jnp.zeros(()), ()), jnp.arange(5)
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, None, (), None)
        >>> updates = Variables(jnp.arange(5.0), ())
        >>> rows, weights, _ = bucketing(2).apply(
        ...     jax.random.key(0), (), updates, jnp.ones(5), cohort
        ... )
        >>> weights.tolist().count(2.0), weights.tolist().count(1.0), weights.tolist().count(0.0)
        (2, 1, 2)
        >>> float(tree.mean(rows, weights).params)
        2.0
    """

    size: Count = 2

    needs = MIXED

    def mixes(self, rows: int) -> int:
        return -(-rows // self.size)

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        present, count = weights > 0, len(weights)
        # By client: the draws must not depend on the rows, which devices share out.
        keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(cohort.client)
        tickets = jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))(keys)
        order = jnp.argsort(jnp.where(present, tickets, jnp.inf))
        position = jnp.arange(count, dtype=jnp.int32)
        bucket = jnp.zeros(count, jnp.int32).at[order].set(position // self.size)
        total = jnp.zeros_like(weights).at[bucket].add(jnp.where(present, weights, 0))
        share = jnp.where(present, weights / jnp.where(total > 0, total, 1)[bucket], 0)

        # A sum for each bucket: in a product of matrices one NaN would spoil all.
        def leaf(rows: Array) -> Array:
            wide = rows if rows.dtype in (jnp.float32, jnp.float64) else rows.astype(jnp.float32)
            part = tree.expand(share, wide).astype(wide.dtype) * wide
            part = jnp.where(tree.expand(present, wide), part, 0)
            return tree.in_dtype(jnp.zeros_like(wide).at[bucket].add(part), rows.dtype)

        return jax.tree.map(leaf, updates), total, state
