"""Methods with a personal model at every client."""

from __future__ import annotations

from fedjax_sim import personal
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Companion, LocalUpdate, Model, NonNegative, Objective, Positive
from fedjax_sim.client import corrections, terms
from fedjax_sim.models import leaves
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import broadcast

__all__ = ["apfl", "ditto", "fedala", "fedamp", "fedfomo", "fedrod", "fine_tuned"]


@method
def ditto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lam: float = 0.1,
    equal_weights: bool = False,
) -> Algorithm:
    r"""Ditto: FedAvg, plus a personal model per client that is pulled towards the server model.

    .. math:: v_k \leftarrow v_k - \eta \bigl( \nabla F_k(v_k) + \lambda (v_k - w_t) \bigr)

    for as many minibatch steps as w_k takes; see :class:`fedjax_sim.local.ditto`. The server
    model is FedAvg's, bit for bit. A client's personal model is v_k as of its last round.

    Args:
        local: the local update of w_k and, without its corrections, of v_k; it must not compress.
        lam: λ: pull towards the server model; 0 trains each v_k alone.

    Returns:
        The algorithm. Memory: one model per client. Traffic per round: m models down, m up.

    Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
    personalization", ICML 2021 <https://arxiv.org/abs/2012.04221>, Algorithm 1.
    """
    return compose(
        personal.ditto(local, lam),
        clients_per_round,
        weighting=client_weights(equal_weights),
        personal=personal.stored(),
    )


@method
def fine_tuned(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    fine_tuning_epochs: Positive = 1.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedAvg with fine-tuning: each client fine-tunes the server model on its own samples.

    .. math:: v_k = \mathrm{train}(w_t,\, k)

    The server model is FedAvg's, bit for bit. Fine-tuning is repeated at all N clients for each
    evaluation, and its result is not kept.

    Args:
        local: the local update, which must not compress; fine-tuning differs from it only in its
          epochs.

    Source: Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of on-device
    personalization", 2019 <https://arxiv.org/abs/1910.10252>.
    """
    return compose(
        local,
        clients_per_round,
        weighting=client_weights(equal_weights),
        personal=personal.fine_tuned(local.change(epochs=fine_tuning_epochs)),
    )


@method
def apfl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    alpha: float = 0.5,
    learned: bool = False,
    equal_weights: bool = True,
) -> Algorithm:
    r"""APFL: FedAvg, plus a personal interpolation of the server model and a local model.

    .. math:: w_k \leftarrow w_k - \eta \nabla F_b(w_k), \qquad
              v_k \leftarrow v_k - \eta \alpha_k \nabla F_b(\bar v_k), \qquad
              \bar v_k = \alpha_k v_k + (1 - \alpha_k) w_k

    on the same minibatches. The server model is FedAvg's, bit for bit. A client's personal model is
    v̄_k with its last v_k and the server's w; see :class:`fedjax_sim.personal.interpolated`.
    Clients are weighted equally by default, as in the authors' code.

    Args:
        local: the local update of w_k and, without its corrections, of v_k.
        alpha: α: value of all α_k, initial if learned; 0 is FedAvg, 1 trains each v_k alone.
        learned: let each client learn its α_k.

    Returns:
        The algorithm. Memory: one model per client. Traffic per round: m models down, m up.

    Source: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020
    <https://arxiv.org/abs/2003.13461>, Algorithm 1.
    """
    companion = personal.interpolated(objective, alpha, learned=learned)
    return _with_companion(companion, local, clients_per_round, equal_weights)


@method
def fedrod(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    gamma: float = 1.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedRoD: FedAvg with a balanced softmax, plus a personal head added to the shared one.

    .. math:: F_b^{bal}(w_k): \text{ logits } f_y + \gamma \log n_{k,y}, \qquad
              h_k \leftarrow h_k - \eta \nabla_h F_b(w_k + h_k)

    The shared model is trained as if all classes were equally frequent at all clients; h_k, which
    does not affect it, learns how frequent they are. The head is the last dense layer; see
    :class:`fedjax_sim.terms.balanced` and :class:`fedjax_sim.personal.added`. This is the paper's
    linear FedRoD, without a hypernetwork.

    Args:
        local: the local update of w_k and, without its corrections, of h_k.
        gamma: γ: strength of the balancing; 0 is FedAvg with an added head.

    Returns:
        The algorithm. Memory: one head per client. Traffic per round: m models down, m up.

    Source: Chen, Chao, "On bridging generic and personalized federated learning for image
    classification", ICLR 2022 <https://arxiv.org/abs/2107.00778>.
    """
    changed = terms.remade(objective, adjust=terms.balanced(gamma))
    companion = personal.added(objective, leaves.head(model))
    local = local.change(objective=changed)
    return _with_companion(companion, local, clients_per_round, equal_weights)


def _with_companion(
    companion: Companion, local: LocalUpdate, clients_per_round: int, equal_weights: bool
) -> Algorithm:
    """Returns FedAvg whose clients also train a companion, from which their model is made."""
    return compose(
        local.change(companion=companion),
        clients_per_round,
        weighting=client_weights(equal_weights),
        personal=personal.accompanied(companion),
    )


@method
def fedala(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    mix_lr: float = 1.0,
    mix_share: float = 0.8,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedALA: clients start from a learned mix of the received head and their previous one.

    .. math:: \hat w = \theta_k + W_k \odot (w_t - \theta_k), \qquad
              W_k \leftarrow \bigl[\, W_k - \eta_W \nabla_W F_b(\hat w) \,\bigr]_0^1

    Each weight of the head, the last dense layer, has its own mixing weight in W_k, which the
    client learns before it trains; all other layers are as received. A client's personal model is ŵ
    for the newest server model; see :class:`fedjax_sim.local.adaptive_start`.

    Args:
        mix_lr: η_W: learning rate of the mixing weights; 0 is FedAvg.
        mix_share: fraction of its samples on which a client learns the mixing weights.

    Returns:
        The algorithm. Memory: two heads per client. Traffic per round: m models down, m up.

    Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for
    personalized federated learning", AAAI 2023 <https://arxiv.org/abs/2212.01197>, Algorithm 1.
    """
    start = personal.adaptive_start(
        local, objective, leaves.head(model), mix_lr=mix_lr, mix_share=mix_share
    )
    return compose(
        start,
        clients_per_round,
        weighting=client_weights(equal_weights),
        personal=personal.adaptively_mixed(start),
    )


@method
def fedamp(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    alpha: Positive = 1.0,
    sigma: float = 100.0,
    lam: NonNegative = 1.0,
) -> Algorithm:
    r"""FedAMP: a personal model per client, trained near a mean of the models similar to it.

    .. math:: u_k = \Bigl( 1 - \sum_{j \ne k} \xi_{kj} \Bigr) w_k + \sum_{j \ne k} \xi_{kj} w_j,
              \qquad \xi_{kj} = \frac{\alpha}{\sigma} e^{-\lVert w_k - w_j \rVert^2 / \sigma},
              \qquad
              w_k \leftarrow \arg\min_w F_k(w) + \frac{\lambda}{2 \alpha} \lVert w - u_k \rVert^2

    The server computes u_k from the clients' last models; see
    :class:`fedjax_sim.broadcast.attentive`. The local update approximates the minimum from u_k. A
    client's personal model is w_k. Pooled scores evaluate the mean of the cohort's models.

    Args:
        alpha: α: step of the attention; σ/α is about the number of similar clients that outweighs
          the client's own model.
        sigma: σ: squared distance at which the attention has fallen to 1/e.
        lam: λ: λ/α is the weight of the proximal term.

    Returns:
        The algorithm. Memory: one model per client, at the server. Traffic per round: m models
        down, m up.

    Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on
    non-IID data", AAAI 2021 <https://arxiv.org/abs/2007.03797>, Algorithm 1.
    """
    return compose(
        local.change(corrections=(corrections.proximal(lam / alpha),)),
        clients_per_round,
        broadcast=broadcast.attentive(alpha, sigma),
        personal=personal.as_received(),
    )


@method
def fedfomo(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    downloads: int = 5,
    explore: float = 0.3,
) -> Algorithm:
    r"""FedFomo: clients download models of others and mix the ones that are better on their data.

    .. math:: \omega_{kj} =
              \frac{F_k(w_k^{old}) - F_k(w_j)}{\lVert w_j - w_k^{old} \rVert}, \qquad
              w_k \leftarrow \mathrm{train}\Bigl( \sum_j
              \frac{\max(\omega_{kj}, 0)}{\sum_i \max(\omega_{ki}, 0)} w_j,\, k \Bigr)

    over the client's own last model and M others, which the server chooses by the weights that the
    client gave them before; see :class:`fedjax_sim.broadcast.first_order`. A client's personal
    model is w_k. Pooled scores evaluate the mean of the cohort's models.

    Args:
        downloads: M: models of other clients that a client downloads.
        explore: ε: probability that a random model replaces one of the best M.

    Returns:
        The algorithm. Memory: two models per client. Traffic per round: M m models down, m up, and
        M numbers with each.

    Source: Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order
    model optimization", ICLR 2021 <https://arxiv.org/abs/2012.08565>, section 3.
    """
    return compose(
        local,
        clients_per_round,
        broadcast=broadcast.first_order(downloads, objective, explore),
        personal=personal.as_received(),
    )
