"""Federated averaging with a robust aggregator."""

from __future__ import annotations

from typing import Literal

from fedjax_sim import aggregators, schedule, screens, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution

Rule = Literal[
    "mean", "coordinate_median", "trimmed_mean", "geometric_median", "krum", "multi_krum"
]


def robust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    aggregator: Rule = "coordinate_median",
    byzantine: float = 0.2,
    clip: float | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg that withstands malicious clients: a robust rule takes the place of the mean.

    .. math:: w_{t+1} = \mathrm{aggregate}\bigl(\{w_k : k \in U_t\}\bigr)

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        aggregator: the rule, see :mod:`fedjax_sim.aggregators`.
        byzantine: the part of the cohort that may be malicious: β of the trimmed mean, f/m of Krum
            and multi-Krum; the other rules need no such bound.
        clip: C, the largest norm of a client's change, which is scaled down to it; None: no limit.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the aggregator is unknown.

    Source: Yin et al. 2018 (coordinate_median, trimmed_mean); Pillutla et al. 2022
    (geometric_median); Blanchard et al. 2017 (krum, multi_krum); Sun et al. 2019 (clip).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> robust(local, clients_per_round=10, aggregator="krum").slots
        10
    """
    if not 0 <= byzantine < 0.5:
        raise ValueError(f"byzantine must be in [0, 0.5), got {byzantine}")
    rules = {
        "mean": aggregators.mean,
        "coordinate_median": aggregators.coordinate_median,
        "trimmed_mean": aggregators.trimmed_mean(byzantine),
        "geometric_median": aggregators.geometric_median(),
        "krum": aggregators.krum(byzantine),
        "multi_krum": aggregators.multi_krum(byzantine),
    }
    if aggregator not in rules:
        raise ValueError(f"aggregator must be one of {', '.join(rules)}, got {aggregator!r}")
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        screens=() if clip is None else (screens.clip_norm(clip),),
        aggregator=rules[aggregator],
        execution=execution,
    )
