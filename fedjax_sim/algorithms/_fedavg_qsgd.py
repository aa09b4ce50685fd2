"""FedAvg whose clients send quantised updates."""

from __future__ import annotations

from fedjax_sim import compression
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedavg_qsgd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    levels: int = 127,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with uploads rounded at random, without bias, to s levels (QSGD, FedPAQ).

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} Q_s(\Delta_k), \qquad
              \mathbb{E}\,Q_s(\Delta_k) = \Delta_k

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        levels: s, the levels between 0 and the norm of an update; 127 take 8 bits with the sign.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m messages up of ⌈log2(2s + 1)⌉ bits for
        each entry.

    Raises:
        ValueError: if levels is out of range.

    Source: Reisizadeh, Mokhtari, Hassani, Jadbabaie, Pedarsani, "FedPAQ: a communication-efficient
    federated learning method with periodic averaging and quantization", AISTATS 2020
    <https://arxiv.org/abs/1909.13014>, Algorithm 1, where all n_k are equal; Alistarh, Grubic, Li,
    Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
    NeurIPS 2017 <https://arxiv.org/abs/1610.02132>, section 3.1, for the quantiser.

    Example:
        >>> import jax, optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedavg_qsgd(local, clients_per_round=5, levels=7)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
        >>> variables = jax.eval_shape(problem.model.init, jax.random.key(0))
        >>> traffic = algorithm.traffic(variables, problem.data)
        >>> traffic.download, traffic.upload  # bytes of a model and of a message: 4 bits an entry
        (2600, 329)
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=(
            compression.compressed(compression.stochastic_quantisation(levels), feedback=False),
        ),
        execution=execution,
    )
