"""Methods that share statistics or outputs instead of models."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import Count, LocalUpdate, Model, NonNegative, Objective
from fedjax_sim.client import agreement, terms
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose

__all__ = ["fd", "fedmd", "fedproto"]


@method
def fedproto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    classes: int,
    lam: float = 1.0,
    equal_clients: bool = False,
) -> Algorithm:
    r"""FedProto: clients share class prototypes (mean features) instead of models.

    .. math:: F_b(w_k) + \frac{\lambda}{|b|} \sum_{i \in b} \frac1D \lVert z_i - \bar C_{y_i}
              \rVert^2, \qquad
              \bar C_j = \frac{\sum_{k \in U} n_{k,j} C_{k,j}}{\sum_{k \in U} n_{k,j}}

    The features z are the inputs of the model's last dense layer, and C_{k,j} their mean over the
    client's samples of class j; see :class:`fedjax_sim.terms.prototypes`. A client predicts with
    its own model. (The paper's clients predict the class of the nearest prototype; the authors'
    code reports both.) The server model keeps its initial weights: use the personal scores.

    Args:
        clients_per_round: m: clients per round, sampled without replacement; the authors use all.
        model: the model to train, the same architecture at all clients.
        lam: λ: pull towards the prototypes; 1 in the paper, 0.1 for CIFAR-10.
        equal_clients: weight clients equally in a prototype, as in the authors' code, instead of by
          their samples of its class.

    Returns:
        The algorithm. Memory: one model per client. Traffic per round: 4 M (D + 1) bytes down to
        each of m clients, as many up.

    Source: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across
    heterogeneous clients", AAAI 2022 <https://arxiv.org/abs/2105.00243>, Algorithm 1.

    Example:
        >>> algorithm.parts.exchange
        nothing()
    """
    changed = local.change(
        objective=terms.remade(objective, term=terms.near_prototypes(lam)),
        shared=terms.prototypes(model, classes, equal_clients=equal_clients),
    )
    return compose(changed, clients_per_round, exchange=exchange.nothing())


@method
def fd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    classes: int,
    distill_weight: NonNegative = 1.0,
) -> Algorithm:
    r"""FD (federated distillation): clients learn from the others' mean outputs for each class.

    .. math:: F_b(w_k) - \frac{\gamma}{|b|} \sum_{i \in b} \sum_c \hat q_{k,y_i}(c)
              \log \sigma(f(w_k, x_i))_c

    where :math:`\hat q_{k,j}` is the mean output for class j over the other clients of the last
    cohort that have it; see :class:`fedjax_sim.terms.near_outputs`. Clients keep their models. The
    server model keeps its initial weights: use the personal scores.

    Args:
        clients_per_round: m: clients per round, sampled without replacement; the paper uses all.
        model: the model to train, the same architecture at all clients.
        distill_weight: γ: weight of the distillation term; the paper does not state its value.

    Returns:
        The algorithm. Memory: one model per client. Traffic per round: 4 M (M + 1) bytes down to
        each of m clients, 4 M² up.

    Source: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device machine learning:
    federated distillation and augmentation under non-IID private data", 2018
    <https://arxiv.org/abs/1811.11479>, Algorithm 1.

    Example:
        >>> algorithm.parts.exchange
        nothing()
    """
    changed = local.change(
        objective=terms.remade(objective, term=terms.near_outputs(distill_weight)),
        shared=terms.class_outputs(model, classes),
        memory=terms.own_outputs(model, classes),
    )
    return compose(changed, clients_per_round, exchange=exchange.nothing())


@method
def fedmd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    classes: int,
    public_samples: Count = 200,
    digest_epochs: int = 1,
    digest_lr: float = 1e-3,
    digest_batch_size: int = 128,
) -> Algorithm:
    r"""FedMD: clients share logits on public samples instead of models, and learn from the mean.

    .. math:: \bar f(x_i) = \frac{1}{|U|} \sum_{k \in U} f(w_k, x_i), \qquad
              w_k \leftarrow \mathrm{train}\Bigl(\mathrm{Adam}\bigl(w_k,
              \tfrac{1}{M} \lVert f(w, x_i) - \bar f(x_i) \rVert_1,\, D_0\bigr),\, D_k\Bigr)

    See :class:`fedjax_sim.local.fedmd`. All clients have the same architecture here, different
    ones in the paper. The paper's clients first train on the labelled public samples; for this,
    pass the weights of such a run to ``--initial``. The public samples are the same in every round,
    whereas the authors' code draws 5,000 from a larger set each time. The server model keeps its
    initial weights: use the personal scores.

    Args:
        clients_per_round: m: clients per round, sampled without replacement; the paper uses all.
        model: the model to train, the same architecture at all clients.
        public_samples: n: public samples: the first n of the data's ``root``, or all if there are
          fewer.
        digest_epochs: epochs on the public samples per round; 0 trains each client alone.
        digest_lr: Adam's learning rate on the public samples.
        digest_batch_size: public samples per minibatch.

    Returns:
        The algorithm, for data with ``root`` samples. Memory: one model per client. Traffic per
        round: 4 n M + 4 bytes down to each of m clients, 4 n M up.

    Source: Li, Wang, "FedMD: heterogenous federated learning via model distillation", 2019
    <https://arxiv.org/abs/1910.03581>, Algorithm 1.

    Example:
        >>> algorithm.parts.exchange
        nothing()
    """
    return compose(
        agreement.fedmd(
            local,
            model,
            classes,
            samples=public_samples,
            digest_epochs=digest_epochs,
            digest_lr=digest_lr,
            digest_batch_size=digest_batch_size,
        ),
        clients_per_round,
        exchange=exchange.nothing(),
    )
