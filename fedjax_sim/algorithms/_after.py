"""Methods in which the server trains or corrects the averaged model."""

from __future__ import annotations

from fedjax_sim import server
from fedjax_sim.algorithms._method import client_weights, method, server_sgd
from fedjax_sim.base import (
    Decay,
    LocalUpdate,
    Model,
    NonNegative,
    Objective,
    Positive,
    Share,
    Transform,
)
from fedjax_sim.client import terms
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import finish, weighting

__all__ = ["ccvr", "feddf", "ozdayi", "semifl"]


@method
def feddf(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    distill_steps: int = 100,
    distill_lr: float = 1e-3,
    distill_batch_size: int = 128,
) -> Algorithm:
    r"""FedDF: distils the ensemble of client models into their average, on unlabelled samples.

    .. math:: q(x) = \sigma\Bigl(\frac{1}{m} \sum_{k \in U_t} f(w_k, x)\Bigr), \qquad
              w \leftarrow \sum_{k \in U_t} p_k w_k, \qquad
              w \leftarrow w - \eta_i\, \mathrm{Adam}\Bigl(\nabla \frac{1}{|b|} \sum_{x \in b}
              \mathrm{KL}\bigl(q(x) \,\|\, \sigma(f(w, x))\bigr)\Bigr)

    where :math:`p_k = n_k / \sum_j n_j`, f are a model's logits and σ is the softmax. The
    minibatches b come from the server's own samples, whose labels are not used. In each round, the
    learning rate η_i decays to 0 along a cosine.

    Args:
        distill_steps: distillation steps per round; 0 is FedAvg.
        distill_lr: Adam's learning rate in the first step of each round.
        distill_batch_size: server samples per distillation step.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated
    learning", NeurIPS 2020 <https://arxiv.org/abs/2006.07242>, Algorithm 1.

    Note:
        Adam, its learning rate and cosine decay, clipping and the batch size follow the authors'
        code. Their server takes up to 10,000 steps, stops early and keeps the model with the best
        accuracy on labelled validation samples; here it takes all steps. Their unlabelled samples
        come from another data set; ``--server-fraction`` takes samples of the clients, which is
        easier. All models have the same architecture here.
    """
    return compose(
        local,
        clients_per_round,
        server=server.distilled(model, distill_steps, distill_lr, batch_size=distill_batch_size),
    )


@method
def ccvr(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    classes: int,
    virtual_samples: int = 200,
    calibration_steps: int = 100,
    calibration_lr: float = 0.1,
    equal_weights: bool = False,
) -> Algorithm:
    r"""CCVR: FedAvg, then calibration of the classifier head on virtual features.

    .. math:: \tilde z \sim \mathcal N(\mu_j, \Sigma_j), \qquad
              (W, b) \leftarrow (W, b) - \eta_c \nabla \frac{1}{M V} \sum_{j, \tilde z}
              \ell(\tilde z W + b, j)

    where μ_j and Σ_j are the mean and covariance of the features of class j over all clients'
    samples, computed from moments that each client sends; see
    :class:`fedjax_sim.finish.calibrated`. They count every sample, whatever ``equal_weights`` is.
    Evaluations during the run use FedAvg's model; the one after the last round uses the calibrated
    model. Any method can end with a calibration: ``replace(finish=...)``.

    Args:
        model: the model to train; its head must be its output layer.
        virtual_samples: V: virtual features per class.
        calibration_steps: full-batch steps on the virtual features.
        calibration_lr: η_c: learning rate of the calibration.

    Returns:
        The algorithm. Traffic per round: m models down, m up; at the end, N models down and 4 M (D²
        + D + 1) bytes up from each client, where D is the width of the head.

    Source: Luo, Chen, Hu, Zhang, Liang, Feng, "No fear of heterogeneity: classifier calibration for
    federated learning with non-IID data", NeurIPS 2021 <https://arxiv.org/abs/2106.05001>,
    Algorithm 1.
    """
    return compose(
        local,
        clients_per_round,
        weighting=client_weights(equal_weights),
        finish=finish.calibrated(
            model, classes, samples=virtual_samples, steps=calibration_steps, lr=calibration_lr
        ),
    )


@method
def ozdayi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 1.0,
    server_momentum: Decay = 0.9,
    threshold: float = 2.0,
    literal_signs: bool = False,
    backwards: bool = False,
    server_epochs: NonNegative = 1.0,
) -> Algorithm:
    r"""Ozdayi et al.: sign agreement, server momentum and training on the server's own samples.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} p_k \Delta_k, \qquad
              w \leftarrow \mathrm{train}(w + \eta\,\eta_\theta \odot v,\, D_0), \qquad
              \eta_{\theta,i} = \Bigl[\, \bigl| \sum_k
              \operatorname{sgn}(\Delta_k)_i \bigr| \ge \theta \,\Bigr]

    where :math:`p_k = n_k / \sum_j n_j` and :math:`\Delta_k = w_k - w`. The paper's fourth
    technique, projected gradient descent with noise, belongs to the clients' optimiser
    (:func:`fedjax_sim.optimizers.project_l2_ball`). The defaults are the best settings of the
    paper's grid search, which had two clients. Sign agreement sets the server learning rate of each
    coordinate (eq. 3): v accumulates all coordinates, but w moves only in those on which the
    clients agree. The authors' robust learning rate, a defence against backdoors, reverses the
    other coordinates instead: ``backwards``, where :math:`\eta_{\theta,i}` is -1 rather than 0,
    without server momentum or server epochs.

    Args:
        local: the local update of the clients and of the server.
        threshold: θ: a coordinate moves if the absolute sum of the updates' signs is at least θ; 0
          moves all.
        literal_signs: compare θ with the signed sum, as printed; a coordinate that all clients
          decrease then stops.
        backwards: reverse coordinates without agreement instead of stopping them.
        server_epochs: epochs on the server's own samples per round; 0 skips them and needs no such
          samples.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated learning in non-IID
    settings", 2020 <https://arxiv.org/abs/2010.15582>, sections 3.1, 3.3 and 3.4; Ozdayi,
    Kantarcioglu, Gel, "Defending against backdoors in federated learning with robust learning
    rate", AAAI 2021 <https://arxiv.org/abs/2007.03767>, eq. 3 (backwards).
    """
    momentum = server_sgd(server_lr, server_momentum)
    signs = {"literal": literal_signs, "backwards": backwards}
    trained = [server.train_on_root(local.change(epochs=server_epochs))] if server_epochs else []
    return compose(
        local,
        clients_per_round,
        server=server.chain(server.sign_agreement(threshold, momentum, **signs), *trained),
    )


@method
def semifl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    threshold: Share = 0.95,
    strong: Transform | None = None,
    mix: NonNegative = 1.0,
    alpha: Positive = 0.75,
    server_momentum: Decay = 0.5,
) -> Algorithm:
    r"""SemiFL: clients without labels learn the labels that the received model predicts.

    .. math:: v \leftarrow \beta v + \frac1m \sum_{k \in U_t} (w_k - w), \qquad
              w \leftarrow \mathrm{train}(w + v,\, D_0), \qquad
              \hat y_i = \arg\max_c f_c(w, x_i)

    The server's own samples D_0 have labels; the clients' need none (y = -1): they learn confident
    labels :math:`\hat y_i`, see :class:`fedjax_sim.terms.received_labels`.

    Args:
        local: the local update of the clients and of the server.
        objective: the objective of the server, and of the clients with predicted labels.
        threshold: τ: smallest probability of a confident label.
        strong: changes a sample to its stronger view, such as :class:`fedjax_sim.augment.altered`,
          only in Python; None: no further change.
        mix: λ: weight of the loss of mixtures; 0 mixes nothing.
        alpha: α: the shares of a mixture are drawn from Beta(α, α).

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Diao, Ding, Tarokh, "SemiFL: semi-supervised federated learning for unlabeled clients
    with alternate training", NeurIPS 2022 <https://arxiv.org/abs/2106.01432>, Algorithm 1.

    Note:
        τ, α, λ, β and equal weights follow the authors' code. There a client labels its samples
        once per round, drops the others and leaves the round if none is left; here every minibatch
        is labelled, with the same labels up to the weak augmentation, and a client without
        confident samples returns the received model. BatchNorm statistics are averaged; theirs are
        recomputed over the samples of server and clients.
    """
    labelled = terms.received_labels(objective, model, threshold, strong, mix=mix, alpha=alpha)
    return compose(
        local.change(objective=labelled),
        clients_per_round,
        weighting=weighting.equal,
        server=server.chain(server_sgd(1.0, server_momentum), server.train_on_root(local)),
    )
