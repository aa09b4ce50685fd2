"""FedAvg whose clients send sketches of their updates."""

from __future__ import annotations

from fedjax_sim import compression
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedavg_sketched(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    share: float = 0.25,
    bits: int = 2,
    rotate: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with uploads of a random share of the entries, rotated and quantised.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} C(\Delta_k), \qquad
              \mathbb{E}\,C(\Delta_k) = \Delta_k

    where C keeps a share s of the entries, scaled by 1/s, and of these, after a random rotation,
    b bits for each: see :func:`fedjax_sim.compression.random_mask`,
    :func:`fedjax_sim.compression.rotated` and :func:`fedjax_sim.compression.uniform_quantisation`.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        share: s, the share of an update's entries that is sent; 1 is all.
        bits: b, for each of them.
        rotate: whether they are rotated before they are quantised, at random.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down; m messages up of b bits for each of s n
        entries, of which a rotation makes a power of two.

    Raises:
        ValueError: if share is not in (0, 1] or bits not in 1..16.

    Source: Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, "Federated learning: strategies for
    improving communication efficiency", 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    Note:
        The entries of all layers are one vector here, and there is one pair of ends for them.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedavg_sketched(local, clients_per_round=5, share=0.5)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    levels = compression.uniform_quantisation(bits)
    code = compression.random_mask(share, compression.rotated(levels) if rotate else levels)
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=(compression.compressed(code, feedback=False),),
        execution=execution,
    )
