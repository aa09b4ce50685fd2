"""FLTrust."""

from __future__ import annotations

from fedjax_sim import schedule, screens, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fltrust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FLTrust: a client counts as far as its change agrees with one made on the server's samples.

    .. math:: w_{t+1} = w_t + \frac{1}{\sum_{j \in U_t} TS_j} \sum_{k \in U_t} TS_k
              \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k, \qquad
              TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0))

    with the server's own change :math:`g_0` from the same local update on ``data.root``.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping", NDSS 2021, Algorithm 2 (whose server learning rate α is 1 here).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fltrust(local, clients_per_round=10).slots
        10
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        screens=(screens.trust(local),),
        execution=execution,
    )
