"""Methods whose clients train narrower models."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Count, LocalUpdate, Model, Objective
from fedjax_sim.client import terms
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose

__all__ = ["fedrolex", "fjord", "heterofl"]

MOST_LEVELS = 32
"""The narrowest clients have one unit of any layer that fits in memory."""


@method
def heterofl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    levels: Count = 3,
    equal_weights: bool = True,
) -> Algorithm:
    r"""HeteroFL: weak clients train the first units of every hidden layer.

    .. math:: w_i \leftarrow w_i + \frac{\sum_k p_k m_{k,i} \Delta_{k,i}}{\sum_k p_k m_{k,i}},
              \qquad r_k = 2^{-(k \bmod L)}

    with m_k the weights between the units that client k has, a share r_k of each hidden layer. The
    paper's norms without running statistics, scaled activations and loss over the client's own
    classes are not part of it.

    Returns:
        The algorithm. Traffic per round: m models down, m up, each as wide as the client's.

    Raises:
        ValueError: if levels is above 32, or the model has no head, or layers that are neither
            dense nor convolutional; if the local update shares anything besides the model.

    Source: Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated
    learning for heterogeneous clients", ICLR 2021 <https://arxiv.org/abs/2010.01264>, section 3.
    """
    return _narrow(local, clients_per_round, equal_weights, model, levels, lambda i: 0.5**i)


@method
def fedrolex(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    levels: Count = 3,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedRolex: weak clients train a window of units that rolls over every hidden layer.

    .. math:: m_{k,i} = \bigl[\, (i - t) \bmod n < \lceil r_k n \rceil \,\bigr], \qquad
              r_k = 2^{-(k \bmod L)}

    for unit i of n in round t; the server averages as in HeteroFL. All units train equally often.

    Returns:
        The algorithm. Traffic per round: m models down, m up, each as wide as the client's.

    Raises:
        ValueError: if levels is above 32, or the model has no head, or layers that are neither
            dense nor convolutional; if the local update shares anything besides the model.

    Source: Alam, Liu, Yan, Zhang, "FedRolex: model-heterogeneous federated learning with rolling
    sub-model extraction", NeurIPS 2022 <https://arxiv.org/abs/2212.01548>, Algorithm 1.
    """
    return _narrow(
        local, clients_per_round, equal_weights, model, levels, lambda i: 0.5**i, rolling=True
    )


@method
def fjord(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    levels: Count = 3,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FjORD: ordered dropout: in every step, weak clients train a random number of first units.

    .. math:: w_k \leftarrow w_k - \eta\, \nabla F_b(m_p \odot w_k), \qquad
              p \sim \mathrm{uniform}\{\tfrac1L, \tfrac2L, \dots, r_k\}, \qquad
              r_k = 1 - \tfrac{k \bmod L}{L}

    with m_p the weights between the first share p of the units of each hidden layer; the server
    averages as in HeteroFL. On a clock, a step takes the time of the client's widest network. The
    paper's distillation from that network is not part of it.

    Returns:
        The algorithm, which reports the losses of the networks that were drawn. Traffic per round:
        m models down, m up, each as wide as the client's.

    Raises:
        ValueError: if levels is above 32, or the model has no head, or layers that are neither
            dense nor convolutional; if the local update shares anything besides the model.

    Source: Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: fair and accurate
    federated learning under heterogeneous targets with ordered dropout", NeurIPS 2021
    <https://arxiv.org/abs/2102.13451>, Algorithm 1.
    """
    changed = local.change(objective=terms.ordered_dropout(objective))
    return _narrow(
        changed, clients_per_round, equal_weights, model, levels, lambda i: (levels - i) / levels
    )


def _narrow(
    local: LocalUpdate,
    clients_per_round: int,
    equal_weights: bool,
    model: Model,
    levels: int,
    share: Callable[[int], float],
    *,
    rolling: bool = False,
) -> Algorithm:
    """Returns FedAvg whose clients have a share of the units of each layer, by their level."""
    if levels > MOST_LEVELS:
        raise ValueError(f"levels must be at most {MOST_LEVELS}, got {levels}")
    widths = exchange.widths(model, tuple(map(share, range(levels))), rolling=rolling)
    return compose(
        local,
        clients_per_round,
        exchange=exchange.split(covers=widths),
        weighting=client_weights(equal_weights),
    )
