"""Methods whose clients keep some layers personal, or train narrower models."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim import personal
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Count, Coverage, Leaves, LocalUpdate, Model, Objective, Positive
from fedjax_sim.client import terms
from fedjax_sim.client.turns import in_turn
from fedjax_sim.models import leaves
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose

__all__ = ["fedbabu", "fedbn", "fedper", "fedrep", "fedrolex", "fjord", "heterofl", "lg_fedavg"]


@method
def fedper(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedPer: FedAvg of the body; every client keeps a personal head.

    .. math:: \min_{u, v_1, \dots, v_N} \sum_k \frac{n_k}{n} F_k(u, v_k), \qquad
              u \leftarrow \sum_{k \in U} \frac{n_k}{\sum_j n_j} u_k

    Body u and head v_k train together. The head is the last dense layer. Pooled scores evaluate the
    initial head: use the personal scores.

    Returns:
        The algorithm. Memory: one head per client. Traffic per round: m bodies down, m up.

    Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
    layers", 2019 <https://arxiv.org/abs/1912.00818>, Algorithms 1 and 2.

    Example:
        >>> algorithm.parts.exchange
        split(own=head(<Model>))
    """
    return _split(local, clients_per_round, equal_weights, own=leaves.head(model))


@method
def lg_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    equal_weights: bool = False,
) -> Algorithm:
    r"""LG-FedAvg: FedAvg of the head; every client keeps a personal body, the representation.

    .. math:: \min_{v, u_1, \dots, u_N} \sum_k \frac{n_k}{n} F_k(u_k, v)

    The mirror image of FedPer: only the last dense layer is sent. BatchNorm statistics belong to
    the body. The authors start with rounds of FedAvg, whose weights ``simulate(initial=...)``
    accepts.

    Returns:
        The algorithm. Memory: one body per client. Traffic per round: m heads down, m up.

    Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act
    globally: federated learning with local and global representations", 2020
    <https://arxiv.org/abs/2001.01523>, Algorithm 1.
    """
    body = leaves.all_but(leaves.head(model))
    return _split(local, clients_per_round, equal_weights, own=body)


@method
def fedbn(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    norms: str = "*BatchNorm*",
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedBN: FedAvg of all layers except BatchNorm, which every client keeps.

    Scales, offsets and running statistics of these layers stay at the client.

    Args:
        norms: pattern of the layers that stay, see :class:`fedjax_sim.leaves.named`.

    Returns:
        The algorithm. Memory: the BatchNorm layers of every client. Traffic per round: m models
        without these layers down, m up.

    Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local
    batch normalization", ICLR 2021 <https://arxiv.org/abs/2102.07623>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.fashion_cnn((8, 8, 1), 3)
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
        >>> fs.algorithms.fedbn(local, clients_per_round=5).parts.exchange
        split(own=named('*BatchNorm*'))
    """
    return _split(local, clients_per_round, equal_weights, own=leaves.named(norms))


@method
def fedrep(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    head_epochs: Positive = 10.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedRep: clients first train a personal head on the shared body, then the body.

    .. math:: v_k \leftarrow v_k - \eta \nabla_v F_b(u, v_k) \text{ for some epochs, then }
              u_k \leftarrow u_k - \eta \nabla_u F_b(u_k, v_k) \text{ for } E

    The head is the last dense layer.

    Args:
        local: the local update; its E is for the body.
        head_epochs: epochs of the head per round.

    Returns:
        The algorithm. Memory: one head per client. Traffic per round: m bodies down, m up.

    Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for
    personalized federated learning", ICML 2021 <https://arxiv.org/abs/2102.07078>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1), epochs=1)
        >>> algorithm = fs.algorithms.fedrep(
        ...     local, clients_per_round=5, model=problem.model, head_epochs=4
        ... )
        >>> float(algorithm.parts.local.epochs)
        5.0
    """
    head = leaves.head(model)
    body = local.change(trained=leaves.all_but(head))
    both = in_turn(local.change(trained=head, epochs=head_epochs), body)
    return _split(both, clients_per_round, equal_weights, own=head)


@method
def fedbabu(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    fine_tuning_epochs: Positive = 1.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedBABU: trains the body under a fixed, random head; afterwards clients fine-tune both.

    .. math:: u \leftarrow \sum_{k \in U} \frac{n_k}{\sum_j n_j} \mathrm{train}_u(u, v_0;\, k),
              \qquad w_k = \mathrm{train}(u, v_0;\, k)

    The head v_0 is the last dense layer, the same at all clients. Clients fine-tune for each
    evaluation; the result is not kept.

    Args:
        local: the local update; it must not compress.

    Returns:
        The algorithm. Traffic per round: m bodies down, m up; the head once to every client.

    Source: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image
    classification", ICLR 2022 <https://arxiv.org/abs/2106.06042>, Algorithm 1.

    Example:
        >>> algorithm.parts.exchange
        split(frozen=head(<Model>))
    """
    head = leaves.head(model)
    return compose(
        local.change(trained=leaves.all_but(head)),
        clients_per_round,
        exchange=exchange.split(frozen=head),
        weighting=client_weights(equal_weights),
        personal=personal.fine_tuned(local.change(epochs=fine_tuning_epochs)),
    )


def _split(
    local: LocalUpdate,
    clients_per_round: int,
    equal_weights: bool,
    *,
    own: Leaves | None = None,
    covers: Coverage | None = None,
) -> Algorithm:
    """Returns FedAvg in which clients keep a part of the model, or lack one."""
    return compose(
        local,
        clients_per_round,
        exchange=exchange.split(own, covers=covers),
        weighting=client_weights(equal_weights),
    )


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

    with m_k the weights between the units of client k, a share r_k of each hidden layer; the model
    must have only dense and convolutional layers. The paper's norms without running statistics,
    scaled activations and loss over the client's own classes are not included.

    Returns:
        The algorithm. Traffic per round: m models down, m up, each as wide as the client's.

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
    paper's distillation from that network is not included.

    Returns:
        The algorithm, which reports the losses of the networks that were drawn. Traffic per round:
        m models down, m up, each as wide as the client's.

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
    return _split(local, clients_per_round, equal_weights, covers=widths)
