"""Methods whose clients keep some layers personal."""

from __future__ import annotations

from fedjax_sim import personal
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Leaves, LocalUpdate, Model
from fedjax_sim.client.turns import in_turn
from fedjax_sim.models import leaves
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose

__all__ = ["fedbabu", "fedbn", "fedper", "fedrep", "lg_fedavg"]


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

    Raises:
        ValueError: if the model has no head, or the local update shares anything besides the model.

    Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
    layers", 2019 <https://arxiv.org/abs/1912.00818>, Algorithms 1 and 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedper(local, clients_per_round=5, model=problem.model)
        >>> algorithm.parts.exchange
        split(own=head(<Model>))
    """
    return _with_personal_leaves(leaves.head(model), local, clients_per_round, equal_weights)


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

    Raises:
        ValueError: if the model has no head, or the local update shares anything besides the model.

    Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act
    globally: federated learning with local and global representations", 2020
    <https://arxiv.org/abs/2001.01523>, Algorithm 1.
    """
    body = leaves.all_but(leaves.head(model))
    return _with_personal_leaves(body, local, clients_per_round, equal_weights)


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

    Raises:
        ValueError: in the first round, if the model has no such layer; if the local update shares
            anything besides the model.

    Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local
    batch normalization", ICLR 2021 <https://arxiv.org/abs/2102.07623>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.fashion_cnn((8, 8, 1), 3)
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
        >>> fs.algorithms.fedbn(local, clients_per_round=5).parts.exchange
        split(own=named('*BatchNorm*'))
    """
    return _with_personal_leaves(leaves.named(norms), local, clients_per_round, equal_weights)


@method
def fedrep(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    head_epochs: float = 10.0,
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

    Raises:
        ValueError: if the model has no head, head_epochs is not positive, or the local update
            shares anything besides the model.

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
    both = in_turn(
        local.change(trained=head, epochs=head_epochs),
        local.change(trained=leaves.all_but(head)),
    )
    return _with_personal_leaves(head, both, clients_per_round, equal_weights)


@method
def fedbabu(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    fine_tuning_epochs: float = 1.0,
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

    Raises:
        ValueError: if the model has no head, or fine_tuning_epochs is not positive.

    Source: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image
    classification", ICLR 2022 <https://arxiv.org/abs/2106.06042>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedbabu(local, clients_per_round=5, model=problem.model)
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


def _with_personal_leaves(
    own: Leaves, local: LocalUpdate, clients_per_round: int, equal_weights: bool
) -> Algorithm:
    """Returns FedAvg of all leaves except ``own``, which clients keep."""
    return compose(
        local,
        clients_per_round,
        exchange=exchange.split(own=own),
        weighting=client_weights(equal_weights),
    )
