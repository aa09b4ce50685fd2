"""Attacks against the direction in which the global model would move."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._together import Colluding, Seen
from fedjax_sim.base import Aggregator, Array, Count, Need, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT


class fang_trim(Colluding):
    r"""Fang et al.'s attack on the trimmed mean: values beyond the extremes of the honest ones.

    .. math:: \Delta_{k,j} \sim \begin{cases}
              U[\min\Delta_j - r\lvert \min\Delta_j \rvert, \min\Delta_j] & s_j > 0 \\
              U[\max\Delta_j, \max\Delta_j + r\lvert \max\Delta_j \rvert] & \text{else}
              \end{cases}, \qquad
              s = \operatorname{sign} \sum_i \Delta_i

    with minimum and maximum over the honest clients that send, and the sum over all true updates,
    the attackers' own included. r is b - 1 if that leads away from 0, and 1 - 1/b if it leads
    towards 0, where values keep their sign. Each attacker draws its own values. It is also the
    paper's attack on the coordinate median, and moves the mean.

    Args:
        malicious: ``bool[N]``.
        b: the largest factor between a forged value and the extreme.

    Raises:
        ValueError: if b is not above 1 and finite.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 3.3.
    """

    b: float = 2.0

    def __post_init__(self) -> None:
        if not 1 < self.b < math.inf:
            raise ValueError(f"b must be above 1 and finite, got {self.b}")

    def forge_each(self, key: Array, seen: Seen) -> PyTree:
        leaves, structure = jax.tree.flatten(seen.updates.params)
        signs = jax.tree.leaves(_direction(seen))
        forged = [
            self._beyond(jax.random.fold_in(key, i), seen, rows, sign)
            for i, (rows, sign) in enumerate(zip(leaves, signs, strict=True))
        ]
        return jax.tree.unflatten(structure, forged)

    def _beyond(self, key: Array, seen: Seen, rows: Array, sign: Array) -> Array:
        """Returns the attackers' values of a leaf, ``[P, *p]``."""
        honest = tree.expand(seen.honest, rows)
        low = jnp.min(jnp.where(honest, rows, jnp.inf), axis=0)
        high = jnp.max(jnp.where(honest, rows, -jnp.inf), axis=0)
        extreme = jnp.where(sign > 0, low, high)
        towards_zero = sign * extreme > 0
        far = jnp.where(towards_zero, 1 / self.b, self.b).astype(rows.dtype)

        def own(client: Array) -> Array:
            own_key = jax.random.fold_in(key, client)
            share = jax.random.uniform(own_key, extreme.shape, jnp.float32).astype(rows.dtype)
            return extreme * (1 + share * (far - 1))

        return jax.vmap(own)(seen.client)


class fang_krum(Colluding):
    r"""Fang et al.'s attack on Krum: the longest step backwards that the rule selects.

    .. math:: \Delta_k \leftarrow -\lambda s, \qquad s = \operatorname{sign} \sum_i \Delta_i

    The search begins with the upper bound that the paper derives for m clients, c of them
    malicious, and d parameters,

    .. math:: \lambda = \frac{1}{(m - 2c - 1)\sqrt{d}} \min_i \sum_{l \in \Gamma_i}
                 \lVert \Delta_l - \Delta_i \rVert
                 + \frac{1}{\sqrt{d}} \max_i \lVert \Delta_i \rVert

    over the honest clients i, with the m - c - 2 others :math:`\Gamma_i` that are nearest to i, and
    halves λ until the rule's aggregate is the forged update. Models must be aggregated in the round
    in which they are sent.

    Args:
        malicious: ``bool[N]``.
        rule: the server's aggregator, one that selects a row.
        evaluations: evaluations of the rule in each round, at most; if none selects the forged
            update, the attackers send the shortest one.

    Raises:
        ValueError: if a setting is out of range.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 3.2.
    """

    rule: Aggregator
    evaluations: Count = 20

    @property
    def needs(self) -> tuple[Need, ...]:
        return (NO_FLIGHT,)

    def forge(self, key: Array, seen: Seen) -> PyTree:
        direction = _direction(seen)
        weights = (seen.hostile | seen.honest).astype(jnp.float32)

        def forged(step: Array) -> PyTree:
            return jax.tree.map(lambda s: -step.astype(s.dtype) * s, direction)

        def selected(step: Array) -> Array:
            lie = forged(step)
            copies = tree.stack_copies(lie, len(seen.client))
            rows = tree.select_rows(seen.hostile, copies, seen.updates.params)
            found = self.rule(seen.updates._replace(params=rows), weights).params
            return tree.norm(tree.subtract(found, lie)) <= 1e-4 * tree.norm(lie)

        def halve(_: Array, search: tuple[Array, Array]) -> tuple[Array, Array]:
            step, done = search
            step = jnp.where(done, step, step / 2)
            return step, done | selected(step)

        first = _longest(seen)
        start = first, selected(first)
        return forged(jax.lax.fori_loop(0, self.evaluations - 1, halve, start)[0])


def _direction(seen: Seen) -> PyTree:
    """Returns the signs of the sum of all true updates, ``[*p]``."""
    sends = seen.hostile | seen.honest

    def sign(rows: Array) -> Array:
        return jnp.sign(jnp.sum(jnp.where(tree.expand(sends, rows), rows, 0), axis=0))

    return jax.tree.map(sign, seen.updates.params)


def _longest(seen: Seen) -> Array:
    """Returns the upper bound of λ, ``f32[]``."""
    params, honest = seen.updates.params, seen.honest
    count = sum(math.prod(rows.shape[1:]) for rows in jax.tree.leaves(params))
    c = jnp.sum(seen.hostile, dtype=jnp.int32)
    m = c + jnp.sum(honest, dtype=jnp.int32)
    pairs = honest[None] & ~jnp.eye(len(honest), dtype=bool)
    distance = jnp.sqrt(tree.pairwise_squared_distances(params))
    ascending = jnp.sort(jnp.where(pairs, distance, jnp.inf), axis=1)
    near = jnp.arange(len(honest), dtype=jnp.int32)[None] < m - c - 2
    sums = jnp.sum(jnp.where(near, ascending, 0), axis=1)
    nothing = jax.tree.map(lambda rows: jnp.zeros(rows.shape[1:], rows.dtype), params)
    length = jnp.sqrt(tree.squared_distances(params, nothing))
    spread = jnp.min(jnp.where(honest, sums, jnp.inf))
    spread /= jnp.maximum(m - 2 * c - 1, 1).astype(jnp.float32)
    return (spread + jnp.max(jnp.where(honest, length, 0))) / jnp.sqrt(jnp.float32(count))
