"""FedAsync: the server mixes in one model at a time, trained on an old one of its own."""

from __future__ import annotations

from fedjax_sim import dispatch, drift, schedule, screens, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution
from fedjax_sim.screens.staleness import Decay


def fedasync(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    alpha: float = 0.6,
    max_staleness: int = 16,
    decay: Decay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    mu: float = 0.005,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAsync: a model trained on the server model of d updates ago is mixed in by a part.

    .. math:: w_{t+1} = (1 - \alpha s(d))\, w_t + \alpha s(d)\, \mathrm{train}(w_{t-d}), \qquad
              d \sim U\{0, \dots, \min(d_{max}, t)\}

    .. math:: s(d) = 1, \quad (d+1)^{-a}, \quad \text{or}\quad
              1 \text{ if } d \le b \text{ else } \frac{1}{a (d-b) + 1}

    The client minimises :math:`F_k(w) + \frac{\mu}{2} \lVert w - w_{t-d} \rVert^2`. A round is one
    arrival in the paper: m = 1. With more, each arrival has a staleness of its own, and the server
    moves once, by the mean of what they would move it alone.

    Args:
        local: the local update.
        clients_per_round: m, the arrivals of a round; 1 in the paper.
        alpha: α, the part of the way to a fresh model that the server goes.
        max_staleness: the oldest that a model can be, in updates; the server keeps so many.
        decay: how the part falls with the staleness d: not at all, as (d + 1)^-a, or as a hinge, 1
          up to b and 1 / (a (d - b) + 1) from there.
        slope: a of the decay; None: 0.5 of the polynomial, 10 of the hinge. The constant has none.
        grace: b of the hinge, the staleness that is forgiven.
        mu: μ of the proximal term (ρ in the paper).
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019, Algorithm 1 and
    sections 5.2 and 6; Xue, Klabjan, Luo (RADFed), section IV-E, for a staleness of as many
    clients in parallel as in FedAvg: 18 to 31.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedasync(local, clients_per_round=1, decay="hinge").slots
        1
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
    return compose(
        local.change(drift=(drift.proximal(mu),)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        dispatch=dispatch.stale(max_staleness),
        weighting=weighting.equal,
        screens=(screens.staleness(alpha, decay, slope, grace),),
        execution=execution,
    )
