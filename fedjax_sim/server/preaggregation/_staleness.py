"""Staleness: old models count less."""

from __future__ import annotations

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

    for the constant, polynomial and hinge decays. d is the tag of the broadcast
    (:func:`fedjax_sim.broadcast.stale`). The state (BatchNorm statistics) takes the same step.
    Several models are averaged afterwards by weights without staleness: in weights it would cancel
    if all were equally old.

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
    if decay not in SLOPES:
        raise ValueError(f"decay must be one of {', '.join(SLOPES)}, got {decay!r}")
    a = SLOPES[decay] if slope is None else slope
    if concrete(a) and not a >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}")
    if not grace >= 0:
        raise ValueError(f"grace must be at least 0, got {grace}")

    def share(tag: Array) -> Array:
        """α s(d)."""
        d = tag.astype(jnp.float32)
        s = {
            "constant": lambda: jnp.ones_like(d),
            "polynomial": lambda: (d + 1) ** -a,
            "hinge": lambda: 1 / (a * jnp.maximum(d - grace, 0) + 1),
        }[decay]()
        return alpha * s

    def apply(
        key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key
        by = share(cohort.tag)

        def shrunk(update: Array, received: Array, server: Array) -> Array:
            # What is left of w_k - w, measured from the older model that the client received.
            behind = received - server[None]
            part = tree.expand(by, update).astype(update.dtype)
            return part * (update + behind) - behind

        after = jax.tree.map(shrunk, updates, cohort.received, cohort.server)
        return after, weights, state

    return PreAggregation(
        init=lambda variables, data: (), apply=apply, needs=(STALENESS, NO_FLIGHT)
    )
