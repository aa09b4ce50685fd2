"""An attack that is optimised against the server's rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._together import Colluding, Seen, moments, shifted
from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientData,
    Cohort,
    Count,
    Need,
    PreAggregation,
    PyTree,
    Variables,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT

Along = Literal["spread", "mean"]

FIRST, SHRINK = 10.0, 0.8
"""The first step of the search, and the factor for a step without success, as in ByzFL."""


class optimised(Colluding):
    r"""ALIE or IPM with the strength that moves the aggregate farthest.

    .. math:: \Delta_k \leftarrow \mu - \gamma \sigma \quad\text{or}\quad
              \Delta_k \leftarrow -\gamma \mu, \qquad
              \gamma = \arg\max_{\gamma \ge 0} \lVert \mathrm{rule}(\Delta_1, \dots, \Delta_n) - \mu
              \rVert

    with the mean μ and standard deviation σ of every coordinate over the honest clients that send.
    The attackers know these updates and the rule, and search along the line: from γ = 0 in steps
    that double as long as the distance grows, then in steps that shrink by a factor of 0.8. The
    distance is over the trainable parameters; all rows have the same weight. Where the server draws
    at random (the buckets of bucketing), the attackers draw independently. Models must be
    aggregated in the round in which they are sent.

    Args:
        malicious: ``bool[N]``.
        rule: the server's aggregator.
        preaggregation: the server's pre-aggregations, in order; they must be without state and read
            only updates, weights and client numbers.
        along: "spread" for ALIE's μ - γσ, "mean" for -γμ.
        evaluations: evaluations of the rule in each round.

    Raises:
        ValueError: if a setting is out of range; in the first round, if a pre-aggregation has state
            or reads more.

    Source: Shejwalkar, Houmansadr 2021
    <https://www.ndss-symposium.org/ndss-paper/manipulating-the-byzantine-optimizing-model-poisoning-attacks-and-defenses-for-federated-learning/>,
    section IV, for attacks whose strength follows the rule; Allouah et al. 2023
    <https://arxiv.org/abs/2302.01772>, whose library ByzFL has this search.

    Example:
        >>> import numpy as np, fedjax_sim as fs
        >>> malicious = np.arange(10) < 2
        >>> attack = optimised(malicious, fs.aggregators.coordinate_median, along="mean")
        >>> rows = jnp.linspace(0.5, 1.5, 10)[:, None]
        >>> sent = attack.together(
        ...     jax.random.key(0), Variables(rows, ()), jnp.arange(10), jnp.ones(10, bool)
        ... )
        >>> bool((sent.params[:2] < 0.7).all()), sent.params[2:].tolist() == rows[2:].tolist()
        (True, True)
    """

    rule: Aggregator
    preaggregation: Sequence[PreAggregation] = ()
    along: Along = "spread"
    evaluations: Count = 20

    @property
    def needs(self) -> tuple[Need, ...]:
        return (NO_FLIGHT,)

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        for before in self.preaggregation:
            if jax.tree.leaves(before.init(variables, data)):
                raise ValueError(
                    f"preaggregation of optimised must be without state, got {shown(before)}"
                )
        return super().init(variables, data)

    def forge(self, key: Array, seen: Seen) -> PyTree:
        updates = seen.updates
        mean, deviation = moments(updates.params, seen.honest)
        start, direction = mean, deviation
        if self.along == "mean":
            start, direction = jax.tree.map(jnp.zeros_like, mean), mean
        present = seen.hostile | seen.honest

        def distance(strength: Array) -> Array:
            forged = tree.stack_copies(shifted(start, strength, direction), len(seen.client))
            rows = updates._replace(params=tree.select_rows(seen.hostile, forged, updates.params))
            weights = present.astype(jnp.float32)
            for i, before in enumerate(self.preaggregation):
                cohort = cast("Cohort", _OnlyClients(before, seen.client, present))
                rows, weights, _ = before.apply(
                    jax.random.fold_in(key, i), (), rows, weights, cohort
                )
            return tree.norm(tree.subtract(self.rule(rows, weights).params, mean))

        return shifted(start, _farthest(distance, self.evaluations), direction)


class _OnlyClients:
    """A cohort of which nothing but the clients can be read."""

    def __init__(self, part: PreAggregation, client: Array, present: Array) -> None:
        self._part, self.client, self.present = part, client, present

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            "preaggregation of optimised must read only updates, weights and clients, "
            f"{shown(self._part)} reads cohort.{name}"
        )


def _farthest(distance: Any, evaluations: int) -> Array:
    """Returns the strength with the largest distance that the search finds, ``f32[]``."""

    def step(_: Array, search: tuple[Array, ...]) -> tuple[Array, ...]:
        best, reached, size, growing = search
        found = distance(best + size)
        better = found > reached
        best, reached = jnp.where(better, best + size, best), jnp.where(better, found, reached)
        growing = growing & better
        return best, reached, size * jnp.where(growing, 2, SHRINK).astype(size.dtype), growing

    start = jnp.float32(0)
    search = (start, distance(start), jnp.float32(FIRST), jnp.bool_(True))
    return jax.lax.fori_loop(0, evaluations - 1, step, search)[0]
