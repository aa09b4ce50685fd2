"""Attacks against the direction in which the global model would move."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._together import Colluding, Seen, moments
from fedjax_sim.base import Aggregator, Array, Count, Need, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT

Knowledge = Literal["full", "partial"]
Values = Callable[[Array], Array]
"""Values in an interval of each entry of a leaf, by their place from 0 to 1, ``[*p]``."""


class fang_trim(Colluding):
    r"""Fang et al.'s attack on the trimmed mean: values beyond the extremes of the honest ones.

    With full knowledge the attackers know all updates,

    .. math:: \Delta_{k,j} \sim \begin{cases}
              U[\min\Delta_j - r\lvert \min\Delta_j \rvert, \min\Delta_j] & s_j > 0 \\
              U[\max\Delta_j, \max\Delta_j + r\lvert \max\Delta_j \rvert] & \text{else}
              \end{cases}, \qquad
              s = \operatorname{sign} \sum_i \Delta_i

    with minimum and maximum over the honest clients that send, and the sum over all true updates,
    the attackers' own included. r is b - 1 if that leads away from 0, and 1 - 1/b if it leads
    towards 0, where values keep their sign. With partial knowledge they only know their own
    updates, whose mean μ and standard deviation σ stand for all,

    .. math:: \Delta_{k,j} \sim \mu_j - s_j\, U[3, 4]\, \sigma_j, \qquad
              s = \operatorname{sign} \mu

    Each attacker draws its own values. With partial knowledge a single attacker of a round sends
    its own update: σ is 0. It is also the paper's attack on the coordinate median, and moves the
    mean.

    Args:
        malicious: ``bool[N]``.
        b: the largest factor between a forged value and the extreme, with full knowledge.
        knowledge: "full" or "partial".

    Raises:
        ValueError: if a setting is out of range.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 3.3, as written there. In
    the authors' code the extremes are over the attackers' true updates too, and a value towards 0
    is the extreme divided by U[1, b].
    """

    b: float = 2.0
    knowledge: Knowledge = "full"

    def __post_init__(self) -> None:
        if not 1 < self.b < math.inf:
            raise ValueError(f"b must be above 1 and finite, got {self.b}")

    @property
    def omniscient(self) -> bool:
        return self.knowledge == "full"

    def forge_each(self, key: Array, seen: Seen) -> PyTree:
        params = seen.updates.params
        if self.knowledge == "full":
            beyond = functools.partial(self._beyond, seen.honest)
            values = jax.tree.map(beyond, params, _direction(seen))
        else:
            values = jax.tree.map(_below, *moments(params, seen.hostile))
        leaves, structure = jax.tree.flatten(params)
        forged = [
            _drawn(jax.random.fold_in(key, i), seen.client, *leaf)
            for i, leaf in enumerate(zip(leaves, jax.tree.leaves(values), strict=True))
        ]
        return jax.tree.unflatten(structure, forged)

    def _beyond(self, who: Array, rows: Array, sign: Array) -> Values:
        """Returns the values of a leaf with full knowledge; ``who bool[P]`` are honest."""
        honest = tree.expand(who, rows)
        low = jnp.min(jnp.where(honest, rows, jnp.inf), axis=0)
        high = jnp.max(jnp.where(honest, rows, -jnp.inf), axis=0)
        extreme = jnp.where(sign > 0, low, high)
        towards_zero = sign * extreme > 0
        far = jnp.where(towards_zero, 1 / self.b, self.b).astype(rows.dtype)
        return lambda share: extreme * (1 + share * (far - 1))


def _below(mean: Array, deviation: Array) -> Values:
    """Returns the values of a leaf with partial knowledge."""
    return lambda share: mean - jnp.sign(mean) * (3 + share) * deviation


def _drawn(key: Array, clients: Array, rows: Array, values: Values) -> Array:
    """Returns the clients' random values of a leaf, ``[P, *p]``."""

    def own(client: Array) -> Array:
        own_key = jax.random.fold_in(key, client)
        return values(jax.random.uniform(own_key, rows.shape[1:], jnp.float32).astype(rows.dtype))

    return jax.vmap(own)(clients)


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

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 3.2, with full knowledge
    and all forged updates equal. The authors' code halves until λ is below 1e-5, and then sends the
    true updates.
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
