"""Phase shift: groups of clients that upload out of phase."""

from __future__ import annotations

from typing import Literal

from fedjax_sim import receive, schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution

Mode = Literal["communication", "epochs"]


def phase_shift(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    phases: int = 2,
    mode: Mode = "communication",
    execution: Execution | None = None,
) -> Algorithm:
    r"""Phase shift: n groups train at once, one uploads per round, the others are corrected.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k, \qquad
              w_{t+1} = \sum_{k \in \text{oldest}} \frac{n_k}{N_{t+1}} w_k, \quad
              N_{t+1} = \sum_{k \in \text{oldest}} n_k

    A group lives n rounds; the one that uploaded is replaced by free clients, who start from the
    server model. At the end of a run every model in flight is uploaded and averaged.

    Args:
        local: the local update, with the E of the FedAvg that it is compared with.
        clients_per_round: n·m, the clients active at once; all of them for full participation.
        phases: n, the groups; must divide clients_per_round. 1 is FedAvg, bit for bit.
        mode: "communication" keeps the epochs E of a round and saves traffic; "epochs" keeps the
          traffic of FedAvg and runs E (n+1)/2n epochs for 2n/(n+1) times as many rounds
          (``tempo``), with n phases.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: n·m models down, m up, (n+1)/2n of FedAvg's.

    Raises:
        ValueError: if phases does not divide clients_per_round, or the mode is unknown.

    Source: Cornelis, "Federated learning from non-IID data", thesis, TU Delft 2022, chapter 4,
    listings 2 and 3; eq. 4.2 and 4.3 for the two modes.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16, epochs=8)
        >>> phase_shift(local, clients_per_round=40, phases=4, mode="epochs").tempo
        1.6
    """
    if mode not in ("communication", "epochs"):
        raise ValueError(f"mode must be 'communication' or 'epochs', got {mode!r}")
    stagger = schedule.staggered(clients_per_round, phases)
    tempo = 2 * phases / (phases + 1) if mode == "epochs" else 1.0
    return compose(
        local.change(epochs=local.epochs / tempo),
        selection=selection.uniform(held=True),
        schedule=stagger,
        receive=receive.drift_correction(),
        execution=execution,
    )._replace(tempo=tempo)
