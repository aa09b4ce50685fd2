"""Staleness: old models count less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Cohort,
    Fraction,
    NonNegative,
    PreAggregation,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, STALENESS

StalenessDecay = Literal["constant", "polynomial", "hinge"]
SLOPES: dict[StalenessDecay, float] = {"constant": 0.0, "polynomial": 0.5, "hinge": 10.0}


class staleness(PreAggregation):
    r"""Shrinks each model's update by a factor that decreases with its staleness.

    .. math:: w + \Delta_k' = (1 - \alpha s(d_k))\, w + \alpha s(d_k)\, w_k

    with w the server's newest model and :math:`\Delta_k'` the new update, and

    .. math:: s(d) = 1, \qquad s(d) = (d+1)^{-a}, \qquad
              s(d) = \begin{cases} 1 & d \le b \\ \frac{1}{a (d-b) + 1} & d > b \end{cases}

    for the constant, polynomial and hinge decays. d is drawn (:func:`fedjax_sim.broadcast.stale`)
    or follows from a clock (:func:`fedjax_sim.flight.buffered`). The state (BatchNorm statistics)
    takes the same step. Several models are averaged afterwards with weights that ignore staleness:
    a factor in the weights would cancel if all were equally old.

    Three simulators use other hinges: FedLab :math:`1/(a(d-b+1))`, FLGo :math:`1/(a(d-b))`, and
    FedML always :math:`1/(1+d)`.

    Args:
        alpha: α, in (0, 1]; with the constant decay 1 changes nothing, up to rounding.
        decay: s: "constant", "polynomial" or "hinge".
        slope: a of the decay; None: 0.5 for the polynomial, 10 for the hinge. The constant
            ignores it.
        grace: b of the hinge, the largest staleness without decay.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, the adaptive mixing hyperparameter.

    Example:
        >>> w, k = Variables(jnp.zeros(1), ()), jnp.arange(3)
        >>> stale = tree.stack_copies(w, 1)
        >>> cohort = Cohort(w, stale, k, k >= 0, k, None, jnp.array([0, 4, 5]), None)
        >>> updates = Variables(jnp.ones((3, 1)), ())
        >>> hinge = staleness(0.5, "hinge", slope=3)
        >>> updates, *_ = hinge.apply(None, (), updates, jnp.ones(3), cohort)
        >>> updates.params[:, 0].tolist()  # of the last 1 / (3 · 1 + 1) of a half
        [0.5, 0.5, 0.125]
    """

    alpha: Fraction
    decay: StalenessDecay = "constant"
    slope: NonNegative | None = None
    grace: NonNegative = 4

    needs = (STALENESS, NO_FLIGHT)

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        def change(factor: Array, update: Array, behind: Array) -> Array:
            return self.alpha * factor * (update + behind)

        factors = _factors(cohort, self.decay, self.slope, self.grace)
        return _scaled(updates, factors, cohort, change), weights, state


class discounted(PreAggregation):
    r"""Adds each client's update to the server's newest model, scaled down if it is stale.

    .. math:: w + \Delta_k' = w + s(d_k)\, (w_k - w_{t-d_k})

    with s as in :func:`staleness`, which moves towards the client's model instead: here the
    server's own progress in the meantime is kept.

    Args:
        decay: s: "constant", "polynomial" or "hinge".
        slope: see :func:`staleness`.
        grace: see :func:`staleness`.

    Raises:
        ValueError: if a setting is out of range.

    Source: Nguyen et al. 2022 <https://arxiv.org/abs/2106.06639>, Algorithm 1 and section 5, whose
    s is the polynomial one with a = 0.5.

    Example:
        >>> w, k = Variables(jnp.zeros(1), ()), jnp.arange(2)
        >>> received = Variables(jnp.array([[0.0], [-3.0]]), ())  # the second of 3 updates ago
        >>> cohort = Cohort(w, received, k, k >= 0, k, None, jnp.array([0, 3]), None)
        >>> updates = Variables(jnp.ones((2, 1)), ())
        >>> updates, *_ = discounted().apply(None, (), updates, jnp.ones(2), cohort)
        >>> (updates.params + received.params)[:, 0].tolist()
        [1.0, 0.5]
    """

    decay: StalenessDecay = "polynomial"
    slope: NonNegative | None = None
    grace: NonNegative = 4

    needs = (STALENESS, NO_FLIGHT)

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        factors = _factors(cohort, self.decay, self.slope, self.grace)
        new = _scaled(updates, factors, cohort, lambda factor, update, behind: factor * update)
        return new, weights, state


def _scaled(
    updates: Variables,
    factors: Array,
    cohort: Cohort,
    change: Callable[[Array, Array, Array], Array],
) -> Variables:
    """Returns the updates ``[P, *p]`` that change the server's newest model as given.

    ``change`` maps ``(s, update, behind)`` to the change of the newest model, ``[P, *p]``, with the
    factors s ``f32[P]``; ``behind`` is the received model minus the newest.
    """

    def leaf(update: Array, received: Array, server: Array) -> Array:
        behind = received - server[None]
        factor = tree.expand(factors, update).astype(update.dtype)
        return change(factor, update, behind) - behind  # measured from the received model

    scaled: Variables = jax.tree.map(leaf, updates, cohort.received, cohort.server)
    return scaled


def _factors(cohort: Cohort, decay: StalenessDecay, slope: float | None, grace: float) -> Array:
    """Returns s(d) of each row, ``f32[P]``."""
    d, a = cohort.tag.astype(jnp.float32), SLOPES[decay] if slope is None else slope
    if decay == "constant":
        return jnp.ones_like(d)
    return (d + 1) ** -a if decay == "polynomial" else 1 / (a * jnp.maximum(d - grace, 0) + 1)
