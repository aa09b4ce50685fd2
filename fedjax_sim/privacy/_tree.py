"""DP-FTRL's mechanism: the noise of the model is that of a tree over the rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Need,
    Participation,
    PreAggregation,
    PyTree,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.privacy._accounting import tree_epsilon
from fedjax_sim.privacy._clipped import (
    check_model,
    check_settings,
    cohorts_of,
    noisy_rows,
    private_needs,
)
from fedjax_sim.privacy._cohorts import epoch_rounds
from fedjax_sim.privacy._noise import normal


class Nodes(NamedTuple):
    """Where the tree stands.

    Attributes:
        key: ``uint32[2]``, that of its nodes' noise, as numbers.
        done: ``int32[]``, rounds of the epoch that have been added.
    """

    key: Array
    done: Array


@part
def tree_mechanism(clip: float, noise_multiplier: float, clients_per_round: int) -> PreAggregation:
    r"""Makes the *sum* of all rounds' clipped updates private, by noise that mostly cancels.

    .. math:: w_t = w_0 + \frac1m \Bigl(\sum_{\tau \le t} \sum_{k \in U_\tau} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr), \qquad
              n_t = \sum_{l :\, t_l = 1} \xi_{l,\, \lfloor t / 2^l \rfloor}, \quad
              \xi_{l,j} \sim \mathcal{N}(0, z^2 C^2 I)

    with t_l the binary digits of t: the noise of a model is that of at most :math:`\log_2 t + 1`
    nodes of a binary tree over the rounds, not that of t rounds. A round is given the difference
    n_t - n_{t-1}, so that any server optimiser may follow. The noise of a node is drawn when it is
    needed, by its place, and again when it is taken back: nothing of a model's size is kept.

    Every client takes part at most once in an epoch of ⌊N/m⌋ rounds, and every epoch has a tree of
    its own (:func:`fedjax_sim.selection.shuffled`). No cohort needs to be random or secret. Rows,
    what is refused and how noise is drawn are those of :func:`gaussian_mechanism`.

    Args:
        clip: C, the largest L2 norm of a client's update, which is scaled down to it.
        noise_multiplier: z, the standard deviation of a node's noise divided by C.
        clients_per_round: m, the cohort.

    Returns:
        A pre-aggregation; its state is the tree's key and the rounds that it holds.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables; by
            ``compose``, if clients could come twice in an epoch.

    Source: Kairouz et al. 2021 <https://arxiv.org/abs/2103.00039>, Algorithm 1, with restarts at
    every epoch (appendix D).
    """
    check_settings(clip, noise_multiplier, clients_per_round)
    deviation = noise_multiplier * clip / clients_per_round if noise_multiplier else 0.0

    def init(variables: Variables, data: ClientData) -> Nodes:
        del data
        check_model(variables)
        return Nodes(jax.random.key_data(jax.random.key(0)), jnp.int32(0))

    def apply(
        key: Array, nodes: Nodes, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Nodes]:
        # Each tree takes the key of its first round.
        own = jnp.where(nodes.done == 0, jax.random.key_data(key), nodes.key)
        now = nodes.done + 1
        drawn = _difference(jax.random.wrap_key_data(own), now, cohort.server.params, deviation)
        norms = tree.norms(updates.params)
        rows = noisy_rows(updates, weights, norms, clip, drawn, clients_per_round)
        return *rows, Nodes(own, now % epoch_rounds(cohort.data.clients, clients_per_round))

    once = Need(
        "selection",
        "clients that come once in an epoch",
        lambda parts: parts.selection.participation in ("epochs", "cyclic"),
        "selection=shuffled()",
    )
    needs = (*private_needs(apply, "tree_mechanism"), once, cohorts_of(clients_per_round))

    def spent(*, sampling: Participation, slots: int, **settings: Any) -> float:
        del sampling, slots  # the needs fix both
        return tree_epsilon(noise_multiplier, **settings)

    return PreAggregation(init, apply, epsilon=spent, needs=needs)


def _difference(key: Array, now: Array, like: PyTree, deviation: float) -> PyTree:
    """n_t - n_{t-1}: the node that t completes, less the nodes of t - 1 that it covers."""

    def node(level: Array, end: Array) -> PyTree:
        place = jax.random.fold_in(jax.random.fold_in(key, level), end >> level)
        return normal(place, like, deviation)

    def covered(level: Array, total: PyTree) -> PyTree:
        return tree.subtract(total, node(level, now - 1))

    # The zeros at the end of t are the digits that t - 1 has in their places.
    level = jnp.int32(jax.lax.population_count(now ^ (now - 1)) - 1)
    return jax.lax.fori_loop(0, level, covered, node(level, now))
