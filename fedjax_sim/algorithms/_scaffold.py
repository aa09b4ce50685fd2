"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, concrete, part
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def scaffold(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    option: corrections.Option = 2,
    server_lr: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""SCAFFOLD: every local step is corrected by what the clients do on average.

    .. math:: w_k \leftarrow w_k - \eta\,(\nabla F_b(w_k) - c_k + c), \qquad
              w \leftarrow w + \frac{\eta_g}{m} \sum_{k \in U} (w_k - w), \qquad
              c \leftarrow c + \frac1N \sum_{k \in U} (c_k^+ - c_k)

    All clients count equally, as in the paper: since c is a plain mean, the method minimises the
    plain mean of the clients' losses under any weights.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        option: what a client's new control variate is: 1, its whole gradient at the model that it
          received; 2, the mean of the gradients along its steps (see
          :func:`fedjax_sim.corrections.scaffold`).
        server_lr: η_g, the server's learning rate.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models and m variates down, as many up: twice FedAvg's.

    Raises:
        ValueError: if the option is neither, or server_lr is not positive.

    Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled
    averaging for federated learning", ICML 2020 <https://arxiv.org/abs/1910.06378>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.scaffold(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    return compose(
        local.change(corrections=(corrections.scaffold(option),)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        server=server.optimizer(optax.sgd(server_lr)),
        execution=execution,
    )
