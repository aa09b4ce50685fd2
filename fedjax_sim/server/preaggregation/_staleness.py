"""Staleness: old models count less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, PreAggregation, PyTree, Variables, concrete, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, STALENESS

Decay = Literal["constant", "polynomial", "hinge"]
SLOPES: dict[Decay, float] = {"constant": 0.0, "polynomial": 0.5, "hinge": 10.0}


@part
def staleness(
    alpha: float, decay: Decay = "constant", slope: float | None = None, grace: float = 4
) -> PreAggregation:
    r"""Shrinks each model's update by a factor that falls with its staleness.

    .. math:: w + \Delta_k' = (1 - \alpha s(d_k))\, w + \alpha s(d_k)\, w_k

    with w the server's newest model and :math:`\Delta_k'` the update that goes on, and

    .. math:: s(d) = 1, \qquad s(d) = (d+1)^{-a}, \qquad
              s(d) = \begin{cases} 1 & d \le b \\ \frac{1}{a (d-b) + 1} & d > b \end{cases}

    for the constant, polynomial and hinge decays. d is drawn (:func:`fedjax_sim.broadcast.stale`)
    or what it is on a clock (:func:`fedjax_sim.schedule.buffered`). The state (BatchNorm
    statistics) takes the same step. Several models are averaged afterwards by weights without
    staleness: in weights it would cancel if all were equally old.

    Three simulators have three other hinges: FedLab :math:`1/(a(d-b+1))`, FLGo
    :math:`1/(a(d-b))`, and FedML's is always :math:`1/(1+d)`.

    Args:
        alpha: α, in (0, 1]; with the constant decay 1 changes nothing, bit for bit.
        decay: s: "constant", "polynomial" or "hinge".
        slope: a of the decay; None: 0.5 for the polynomial, 10 for the hinge. The constant has
          none.
        grace: b of the hinge, the staleness that is forgiven.

    Returns:
        A pre-aggregation without state.

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
    if concrete(alpha) and not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")

    def moved(part: Array, update: Array, behind: Array) -> Array:
        return alpha * part * (update + behind)

    return _by_age(_decay(decay, slope, grace), moved)


@part
def discounted(
    decay: Decay = "polynomial", slope: float | None = None, grace: float = 4
) -> PreAggregation:
    r"""Adds each client's own update to the server's newest model, less of it if it is stale.

    .. math:: w + \Delta_k' = w + s(d_k)\, (w_k - w_{t-d_k})

    with s as in :func:`staleness`, which moves towards the client's model instead: here nothing is
    taken back of the way that the server has gone meanwhile.

    Args:
        decay: s: "constant", "polynomial" or "hinge".
        slope: see :func:`staleness`.
        grace: see :func:`staleness`.

    Returns:
        A pre-aggregation without state.

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
    return _by_age(_decay(decay, slope, grace), lambda part, update, behind: part * update)


def _by_age(
    decayed: Callable[[Array], Array], moved: Callable[[Array, Array, Array], Array]
) -> PreAggregation:
    """Changes each update by its staleness.

    Args:
        decayed: s, ``f32[P] -> f32[P]``.
        moved: what the server is to be moved by, ``(s, update, behind) -> [P, *p]``: ``behind`` is
            how far the model that was received is from the server's.
    """

    def apply(
        key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key
        by = decayed(cohort.tag.astype(jnp.float32))

        def change(update: Array, received: Array, server: Array) -> Array:
            behind = received - server[None]
            part = tree.expand(by, update).astype(update.dtype)
            return moved(part, update, behind) - behind  # measured from what was received

        after = jax.tree.map(change, updates, cohort.received, cohort.server)
        return after, weights, state

    return PreAggregation(
        init=lambda variables, data: (), apply=apply, needs=(STALENESS, NO_FLIGHT)
    )


def _decay(decay: Decay, slope: float | None, grace: float) -> Callable[[Array], Array]:
    """s(d) of a staleness ``f32[P]``."""
    if decay not in SLOPES:
        raise ValueError(f"decay must be one of {', '.join(SLOPES)}, got {decay!r}")
    a = SLOPES[decay] if slope is None else slope
    if concrete(a) and not a >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}")
    if not grace >= 0:
        raise ValueError(f"grace must be at least 0, got {grace}")
    kinds: dict[Decay, Callable[[Array], Array]] = {
        "constant": jnp.ones_like,
        "polynomial": lambda d: (d + 1) ** -a,
        "hinge": lambda d: 1 / (a * jnp.maximum(d - grace, 0) + 1),
    }
    return kinds[decay]
