"""Phase shift: groups of clients that upload out of phase."""

from __future__ import annotations

from typing import Literal

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import refresh

Mode = Literal["communication", "epochs"]


@part
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

    A group trains for n rounds. When it has uploaded, free clients replace it, which start from the
    server model. At the end of a run every model in flight is uploaded and averaged.

    Args:
        local: the local update, with the E of the FedAvg that it is compared with.
        clients_per_round: n·m, the clients active at once; all of them for full participation.
        phases: n, the groups; must divide clients_per_round. 1 is FedAvg, bit for bit.
        mode: "communication" keeps the epochs E of a round and saves traffic; "epochs" keeps the
          traffic of FedAvg and runs E (n+1)/2n epochs for 2n/(n+1) times as many rounds
          (``round_factor``), with n phases.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: n·m models down, m up, (n+1)/2n of FedAvg's.

    Raises:
        ValueError: if phases does not divide clients_per_round, or the mode is unknown.

    Source: Cornelis, "Federated learning from non-IID data", thesis, TU Delft 2022
    <cornelis2022federated>, chapter 4, Algorithms 2 and 3; eq. 4.2 and 4.3 for the two modes.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.phase_shift(local, clients_per_round=10, phases=2)
        >>> problem.accuracy(algorithm, rounds=4) > 0.8
        True
        >>> fs.algorithms.phase_shift(
        ...     local, clients_per_round=40, phases=4, mode="epochs"
        ... ).round_factor
        1.6
    """
    if mode not in ("communication", "epochs"):
        raise ValueError(f"mode must be 'communication' or 'epochs', got {mode!r}")
    stagger = schedule.staggered(clients_per_round, phases)
    round_factor = 2 * phases / (phases + 1) if mode == "epochs" else 1.0
    return compose(
        local.change(epochs=local.epochs / round_factor),
        selection=selection.uniform(sticky=True),
        schedule=stagger.replace(round_factor=round_factor),
        refresh=refresh.drift_correction(),
        execution=execution,
    )
