"""Methods whose clients train narrower models."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.algorithms._options import client_weights
from fedjax_sim.base import Count, LocalUpdate, Model
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose

__all__ = ["fedrolex", "heterofl"]

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

    Args:
        levels: L: number of widths; 1 is FedAvg.

    Returns:
        The algorithm. Traffic per round: m models down, m up, each as wide as the client's.

    Raises:
        ValueError: if levels is above 32, or the model has no head, or layers that are neither
            dense nor convolutional; if the local update shares anything besides the model.

    Source: Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated
    learning for heterogeneous clients", ICLR 2021 <https://arxiv.org/abs/2010.01264>, section 3.
    """
    return _narrow(local, clients_per_round, model, levels, equal_weights, rolling=False)


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

    Args:
        levels: L: number of widths; 1 is FedAvg.

    Returns:
        The algorithm. Traffic per round: m models down, m up, each as wide as the client's.

    Raises:
        ValueError: if levels is above 32, or the model has no head, or layers that are neither
            dense nor convolutional; if the local update shares anything besides the model.

    Source: Alam, Liu, Yan, Zhang, "FedRolex: model-heterogeneous federated learning with rolling
    sub-model extraction", NeurIPS 2022 <https://arxiv.org/abs/2212.01548>, Algorithm 1.
    """
    return _narrow(local, clients_per_round, model, levels, equal_weights, rolling=True)


def _narrow(
    local: LocalUpdate,
    clients_per_round: int,
    model: Model,
    levels: int,
    equal_weights: bool,
    *,
    rolling: bool,
) -> Algorithm:
    """Returns FedAvg whose clients have the whole width, a half of it, a quarter and so on."""
    if levels > MOST_LEVELS:
        raise ValueError(f"levels must be at most {MOST_LEVELS}, got {levels}")
    shares = tuple(0.5**level for level in range(levels))
    return compose(
        local,
        clients_per_round,
        exchange=exchange.split(covers=exchange.widths(model, shares, rolling=rolling)),
        weighting=client_weights(equal_weights),
    )
