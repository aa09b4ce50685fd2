"""Sparse ternary compression, up and down."""

from __future__ import annotations

from fedjax_sim import compression, server
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def stc(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    sparsity: float = 1 / 400,
    equal_weights: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""STC: sparse ternary updates in both directions, with error feedback on both sides.

    .. math:: \tilde\Delta_k = \mathrm{STC}(\Delta_k + r_k), \quad
              r_k \leftarrow \Delta_k + r_k - \tilde\Delta_k, \qquad
              \tilde\Delta = \mathrm{STC}\Bigl(r + \frac1m \sum_{k \in U_t} \tilde\Delta_k\Bigr),
              \quad r \leftarrow r + \frac1m \sum_k \tilde\Delta_k - \tilde\Delta, \qquad
              w_{t+1} = w_t + \tilde\Delta

    The paper weighs clients equally and takes one minibatch between two messages: ``max_steps=1``
    of the local update.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        sparsity: p, the share of an update's entries that is sent.
        equal_weights: weigh clients equally, as in the paper, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m messages up; m times ⌈N/m⌉ messages down, or m models
        if that is less. Non-trainable variables go whole.

    Raises:
        ValueError: if sparsity is out of range.

    Source: Sattler, Wiedemann, Müller, Samek, "Robust and communication-efficient federated
    learning from non-i.i.d. data", 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2.

    Example:
        >>> import jax, optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.stc(local, clients_per_round=5, sparsity=0.05)
        >>> problem.accuracy(algorithm, rounds=10) > 0.8
        True
        >>> variables = jax.eval_shape(problem.model.init, jax.random.key(0))
        >>> traffic = algorithm.traffic(variables, problem.data)
        >>> traffic.download, traffic.upload  # bytes; a model has 2,600
        (64, 32)
    """
    code = compression.ternary(sparsity)
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=(compression.compressed(code),),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        server=compression.compress_server(server.replace(), code),
        execution=execution,
    )
