"""Mechanisms whose noise is correlated over the rounds, and therefore mostly cancels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Cohort, Count, Need, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import slots_of
from fedjax_sim.privacy._accounting import (
    banded_epsilon,
    check_bands,
    coefficients,
    tree_epsilon,
)
from fedjax_sim.privacy._clipped import Mechanism, check_model
from fedjax_sim.privacy._cohorts import epoch_rounds
from fedjax_sim.privacy._noise import normal

ONCE = Need(
    "selection",
    "clients that take part at most once in an epoch",
    lambda parts: parts.selection.participation in ("epochs", "cyclic"),
    "selection=shuffled()",
)
CYCLIC = Need(
    "selection",
    "clients that wait at least as many rounds as it has bands",
    lambda parts: parts.selection.participation == "cyclic",
    "selection=cyclic()",
)


class _Correlated(Mechanism):
    """A mechanism that relies on the schedule of clients' visits, and on cohorts of fixed size."""

    clients_per_round: int

    participation = ONCE

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, self.participation, slots_of(self.clients_per_round))


class Nodes(NamedTuple):
    """The state of a tree."""

    key: Array  # uint32[2], the key data of its nodes' noise
    done: Array  # int32[], the rounds of the epoch that have been added


class tree_mechanism(_Correlated):
    r"""Makes the *sum* of all rounds' clipped updates private, by noise that mostly cancels.

    .. math:: w_t = w_0 + \frac1m \Bigl(\sum_{\tau \le t} \sum_{k \in U_\tau} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr), \qquad
              n_t = \sum_{l :\, t_l = 1} \xi_{l,\, \lfloor t / 2^l \rfloor}, \quad
              \xi_{l,j} \sim \mathcal{N}(0, z^2 C^2 I)

    with t_l the binary digits of t: a model has the noise of at most :math:`\log_2 t + 1` nodes of
    a binary tree over the rounds, instead of the noise of t rounds. Round t adds the difference n_t
    - n_{t-1}, so any server optimiser may follow. The noise of a node is determined by its position
    and redrawn when it is subtracted: the state is only the tree's key and the number of rounds,
    and holds no model.

    Every client must take part at most once in an epoch of ⌊N/m⌋ rounds, see
    :func:`fedjax_sim.selection.shuffled`, and every epoch has a new tree. Cohorts need not be
    random or secret. The rows, the rejected parts and the noise generator are as in
    :func:`gaussian_mechanism`.

    Args:
        clip: C; updates with a larger L2 norm are scaled down to it.
        noise_multiplier: z, the standard deviation of a node's noise divided by C.
        clients_per_round: m, the size of the cohort.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables; by
            ``compose``, if clients could take part twice in an epoch.

    Source: Kairouz et al. 2021 <https://arxiv.org/abs/2103.00039>, Algorithm 1, with a restart at
    every epoch (appendix D).
    """

    def init(self, variables: Variables, data: ClientData) -> Nodes:
        check_model(variables)
        return Nodes(jax.random.key_data(jax.random.key(0)), jnp.int32(0))

    def apply(
        self, key: Array, state: Nodes, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Nodes]:
        # A tree uses the key of its first round.
        data = jnp.where(state.done == 0, jax.random.key_data(key), state.key)
        now = state.done + 1
        like = cohort.server.params
        drawn = _difference(jax.random.wrap_key_data(data), now, like, self.deviation)
        length = epoch_rounds(cohort.data.clients, self.clients_per_round)
        return *self.noisy(updates, weights, drawn), Nodes(data, now % length)

    def epsilon(self, *, sampling: Any, slots: Any, **settings: Any) -> float:
        return tree_epsilon(self.noise_multiplier, **settings)  # the needs fix the others


def _difference(key: Array, now: Array, like: PyTree, deviation: float) -> PyTree:
    """Draws n_t - n_{t-1}: the node that t completes minus the nodes of t - 1 that it covers."""

    def node(level: Array, end: Array) -> PyTree:
        place = jax.random.fold_in(jax.random.fold_in(key, level), end >> level)
        return normal(place, like, deviation)

    def covered(level: Array, total: PyTree) -> PyTree:
        return tree.subtract(total, node(level, now - 1))

    # The trailing zeros of t are ones in t - 1.
    level = jnp.int32(jax.lax.population_count(now ^ (now - 1)) - 1)
    return jax.lax.fori_loop(0, level, covered, node(level, now))


class banded_mechanism(_Correlated):
    r"""Makes the clipped updates of all rounds private, by noise correlated over b rounds.

    .. math:: \frac1m \Bigl(\sum_{k \in U_t} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr), \qquad
              n_t = \xi_t - \sum_{j=1}^{b-1} c_j\, n_{t-j}, \quad
              \xi_t \sim \mathcal{N}(0, z^2 C^2 I)

    with :math:`\sum_j c_j x^j = (1 - x)^{-1/2}`. In the paper's notation, the noise is
    :math:`\mathbf{C}^{-1} \xi`, where **C** is the square root of the prefix-sum matrix, truncated
    to its first b diagonals. The noise of a model, a sum of n_t, grows far more slowly than a sum
    of independent noises. With b = 1 this is :func:`gaussian_mechanism` with a fixed cohort.

    Every client must wait at least ⌊N/m⌋ rounds between visits
    (:func:`fedjax_sim.selection.cyclic`), and b is at most ⌊N/m⌋: the visits then share no band,
    and their noises add up as if they were independent. Cohorts need not be random or secret. The
    rows, the rejected parts and the noise generator are as in :func:`gaussian_mechanism`. The state
    is the last b - 1 noises, each as large as the model.

    Args:
        clip: C; updates with a larger L2 norm are scaled down to it.
        noise_multiplier: z, the standard deviation of ξ divided by C. A client affects up to b of
            them: with the same z, more bands cost more ε, see ``banded_epsilon``.
        clients_per_round: m, the size of the cohort.
        bands: b.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables; when the
            state is initialised, if b is above ⌊N/m⌋; by ``compose``, if clients could
            return sooner.

    Source: Choquette-Choo et al. 2023 <https://arxiv.org/abs/2306.08153>; Kalinin,
    Lampert 2024 <https://arxiv.org/abs/2405.13763>, for the coefficients.
    """

    bands: Count

    participation = CYCLIC

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        check_model(variables)
        check_bands(self.bands, data.clients, self.clients_per_round)
        zeros = jax.tree.map(jnp.zeros_like, variables.params)
        return tree.stack_copies(zeros, self.bands - 1)

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        fresh = normal(key, cohort.server.params, self.deviation)
        earlier = coefficients(self.bands)[1:]

        def less(drawn: Array, last: Array) -> Array:
            return drawn - jnp.tensordot(jnp.asarray(earlier, drawn.dtype), last, axes=1)

        drawn = jax.tree.map(less, fresh, state) if self.bands > 1 else fresh
        newest_first = jax.tree.map(
            lambda new, last: jnp.concatenate([new[None], last])[: self.bands - 1], drawn, state
        )
        return *self.noisy(updates, weights, drawn), newest_first

    def epsilon(self, *, sampling: Any, slots: Any, **settings: Any) -> float:
        return banded_epsilon(self.noise_multiplier, bands=self.bands, **settings)
