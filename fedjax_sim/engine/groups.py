"""Groups of rows in which every pair is near."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array


def smallest_groups(near: Array, present: Array) -> tuple[Array, Array]:
    r"""Computes the fewest groups in which every pair is near: a minimum clique cover.

    By dynamic programming over sets of rows: f(∅) = 0 and

    .. math:: f(X) = 1 + \min_{G \subseteq X,\ \max X \in G,\ G\text{ a clique}} f(X \setminus G)

    which takes 4ⁿ/3 steps.

    Args:
        near: ``bool[n, n]``, symmetric; the diagonal does not count. n is at most 15 or so.
        present: ``bool[n]``, the rows to group.

    Returns:
        ``int32[n]``, the group of each row, n for an absent one; ``int32[]``, the number of groups.

    Example:
        >>> path = jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4)[None]) <= 1  # 0 - 1 - 2 - 3
        >>> group, count = smallest_groups(path, jnp.ones(4, bool))
        >>> group.tolist(), int(count)
        ([1, 1, 0, 0], 2)
    """
    n = len(present)
    bit = 2 ** jnp.arange(n, dtype=jnp.int32)
    far = jnp.sum(jnp.where(near, 0, bit[None]), axis=1, dtype=jnp.int32)
    # For each set of the rows so far: whether it is a clique, f, and the rest of the set.
    clique, least, left = jnp.ones(1, bool), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    for i in range(n):
        lower = jnp.arange(2**i, dtype=jnp.int32)
        joins = clique & (lower & far[i] == 0)
        others, rest = lower[:, None], lower[None]  # X without row i, and X \ G
        allowed = (rest & ~others == 0) & joins[others ^ rest]
        f = jnp.where(allowed, least[None], n)
        clique = jnp.concatenate([clique, joins])
        least = jnp.concatenate([least, 1 + jnp.min(f, axis=1)])
        left = jnp.concatenate([left, jnp.argmin(f, axis=1).astype(jnp.int32)])

    def split(g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, group = carry
        return left[rows], jnp.where((rows ^ left[rows]) & bit > 0, g, group)

    everyone = jnp.sum(jnp.where(present, bit, 0), dtype=jnp.int32)
    count = least[everyone]
    group = jax.lax.fori_loop(0, count, split, (everyone, jnp.full(n, n, jnp.int32)))[1]
    return group, count


def first_fit(near: Array, present: Array) -> tuple[Array, Array]:
    """Computes groups in which every pair is near, few but not always the fewest.

    Rows, those with the fewest near rows first, join the first group whose rows are all near, or
    open a new group. If nearness is transitive, the groups are the fewest.

    Args:
        near: ``bool[n, n]``, symmetric; the diagonal does not count.
        present: ``bool[n]``, the rows to group.

    Returns:
        As in :func:`smallest_groups`.

    Source: Welsh, Powell 1967 <https://doi.org/10.1093/comjnl/10.1.85>, the greedy colouring, here
    of the complement graph.

    >>> path = jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4)[None]) <= 1  # 0 - 1 - 2 - 3
    >>> first_fit(path, jnp.array([True, True, False, True]))[0].tolist()
    [1, 1, 4, 0]
    """
    n = len(present)
    neighbours = jnp.sum(near & present[None], axis=1)
    order = jnp.argsort(neighbours, stable=True)

    def assign(i: Array, member: Array) -> Array:
        row = order[i]
        fits = jnp.all(near[row][None] | ~member, axis=1)  # an empty group fits
        return member.at[jnp.argmax(fits), row].set(present[row])

    member = jax.lax.fori_loop(0, n, assign, jnp.zeros((n, n), bool))
    group = jnp.where(present, jnp.argmax(member, axis=0).astype(jnp.int32), n)
    return group, jnp.sum(jnp.any(member, axis=1), dtype=jnp.int32)
