"""Staleness: old models count less."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, PreAggregation, PyTree, Variables, part
from fedjax_sim.engine import tree

Decay = Literal["constant", "polynomial", "hinge"]
SLOPES: dict[Decay, float] = {"constant": 0.0, "polynomial": 0.5, "hinge": 10.0}


@part
def staleness(
    alpha: float, decay: Decay = "constant", slope: float | None = None, grace: float = 4
) -> PreAggregation:
    r"""Shrinks each model's update by a factor that falls with its staleness.

    .. math:: w_k \leftarrow (1 - \alpha s(d_k))\, w + \alpha s(d_k)\, w_k

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
        ValueError: if a setting is out of range; in the first round, if the broadcast gives no
            staleness.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, the adaptive mixing hyperparameter.

    Example:
        >>> w, k = Variables(jnp.zeros(1), ()), jnp.arange(3)
        >>> cohort = Cohort(w, None, k, k >= 0, k, None, jnp.array([0, 4, 5]), None)
        >>> rows = Variables(jnp.ones((3, 1)), ())
        >>> rows, *_ = staleness(0.5, "hinge", slope=3).apply(None, (), rows, jnp.ones(3), cohort)
        >>> rows.params[:, 0].tolist()  # of the last 1 / (3 · 1 + 1) of a half
        [0.5, 0.5, 0.125]
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if decay not in SLOPES:
        raise ValueError(f"decay must be one of {', '.join(SLOPES)}, got {decay!r}")
    a = SLOPES[decay] if slope is None else slope
    if not a >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}")
    if not grace >= 0:
        raise ValueError(f"grace must be at least 0, got {grace}")

    def share(tag: PyTree) -> Array:
        """α s(d)."""
        if not isinstance(tag, jax.Array):
            raise ValueError(f"broadcast must tag models with their staleness, it gives {tag!r}")
        d = tag.astype(jnp.float32)
        s = {
            "constant": lambda: jnp.ones_like(d),
            "polynomial": lambda: (d + 1) ** -a,
            "hinge": lambda: 1 / (a * jnp.maximum(d - grace, 0) + 1),
        }[decay]()
        return alpha * s

    def apply(
        key: Array, state: PyTree, models: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key
        part = jax.vmap(tree.interpolate, in_axes=(None, 0, 0))
        return part(cohort.server, models, share(cohort.tag)), weights, state

    return PreAggregation(init=lambda variables, data: (), apply=apply)
