"""FLTrust: the server's own samples tell how far each client is trusted."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation


@part
def fltrust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FLTrust: a client counts as far as its update agrees with one from the server's own samples.

    .. math:: w_{t+1} = w_t + \frac{1}{\sum_{j \in U_t} TS_j} \sum_{k \in U_t} TS_k
              \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k, \qquad
              TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0))

    where the server makes its update :math:`g_0` by the same local update on ``data.root``.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping", NDSS 2021 <https://arxiv.org/abs/2012.13995>, Algorithm 2, whose server learning
    rate α is 1 here.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fltrust(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        preaggregation=(preaggregation.trust(local),),
        execution=execution,
    )
