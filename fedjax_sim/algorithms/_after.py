"""Methods in which the server trains or corrects the averaged model."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Model, concrete
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import finish, weighting


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
    r"""FedDF: the mean of the models learns what they say together of unlabelled samples.

    .. math:: q(x) = \sigma\Bigl(\frac{1}{m} \sum_{k \in U_t} f(w_k, x)\Bigr), \qquad
              w \leftarrow \sum_{k \in U_t} p_k w_k, \qquad
              w \leftarrow w - \eta_i\, \mathrm{Adam}\Bigl(\nabla \frac{1}{|b|} \sum_{x \in b}
              \mathrm{KL}\bigl(q(x) \,\|\, \sigma(f(w, x))\bigr)\Bigr)

    with :math:`p_k = n_k / \sum_j n_j`, the logits f of a model, and the softmax σ; b are
    minibatches of the server's own samples, of which the labels are not read. The rate η_i falls to
    0 along a cosine within a round.

    Args:
        distill_steps: minibatches by which the server learns in a round; 0 is FedAvg.
        distill_lr: Adam's rate in the first of them.
        distill_batch_size: samples of the server's in each.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a number is out of range.

    Source: Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated
    learning", NeurIPS 2020 <https://arxiv.org/abs/2006.07242>, Algorithm 1.

    Note:
        Adam, its rate and cosine, clipping and batch size are those of the authors' code. Its
        server learns longer, up to 10,000 steps, stops early and keeps the best model by accuracy
        on labelled validation samples; here it takes all steps. Its unlabelled samples come from
        another data set, those of ``--server-fraction`` from the clients' own, which is easier. All
        models are of one architecture here.
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
    r"""CCVR: FedAvg, and after the last round a head that learns from virtual features.

    .. math:: \tilde z \sim \mathcal N(\mu_j, \Sigma_j), \qquad
              (W, b) \leftarrow (W, b) - \eta_c \nabla \frac{1}{M V} \sum_{j, \tilde z}
              \ell(\tilde z W + b, j)

    μ_j and Σ_j are the mean and covariance of class j's features over the samples of all clients,
    which send the moments of their own; see :func:`fedjax_sim.finish.calibrated`. During the run
    FedAvg's model is evaluated, after the last round the calibrated one. Any method may end so:
    ``replace(finish=...)``.

    Args:
        model: the model that it trains, whose outputs are those of its head.
        classes: M.
        virtual_samples: V, the features that are drawn of each class.
        calibration_steps: the steps on all of them.
        calibration_lr: η_c.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples. The moments of a
          class are over its samples all the same.

    Returns:
        The algorithm. Traffic per round: m models down, m up; in the end N models down and from
        each client 4 M (D² + D + 1) bytes up, D the width of the head.

    Raises:
        ValueError: if the model has no features, its head is not a matrix and a bias at most, or a
            number is out of range.

    Source: Luo, Chen, Hu, Zhang, Liang, Feng, "No fear of heterogeneity: classifier calibration for
    federated learning with non-IID data", NeurIPS 2021 <https://arxiv.org/abs/2106.05001>,
    Algorithm 1.
    """
    return compose(
        local,
        clients_per_round,
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        finish=finish.calibrated(
            model, classes, samples=virtual_samples, steps=calibration_steps, lr=calibration_lr
        ),
    )


@method
def ozdayi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    threshold: float = 2.0,
    literal_signs: bool = False,
    backwards: bool = False,
    server_epochs: float = 1.0,
) -> Algorithm:
    r"""Sign agreement, momentum on the server, and training on the server's own samples.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} p_k \Delta_k, \qquad
              w \leftarrow \mathrm{train}(w + \eta\,\eta_\theta \odot v,\, D_0), \qquad
              \eta_{\theta,i} = \Bigl[\, \bigl| \textstyle\sum_k
              \operatorname{sgn}(\Delta_k)_i \bigr| \ge \theta \,\Bigr]

    with :math:`p_k = n_k / \sum_j n_j` and :math:`\Delta_k = w_k - w`. The paper's fourth
    technique, projected gradient descent with noise, is a part of the clients' optimiser
    (:func:`fedjax_sim.optimizers.project_l2_ball`). The defaults are the best of the paper's grid
    search, which had two clients. Sign agreement is the server's learning rate for each coordinate
    (eq. 3): v takes in all coordinates, w moves in those that the clients agree on. The authors'
    robust learning rate, against backdoors, goes backwards in the others: ``backwards``, where
    :math:`\eta_{\theta,i}` is -1 in place of 0, without momentum and epochs of the server's.

    Args:
        local: the local update, of the clients and of the server.
        server_lr: η, the server's learning rate.
        server_momentum: β, the server's momentum; 0 is none.
        threshold: θ; a coordinate moves if the signs of the clients' updates add up to θ or more in
          absolute value; 0 moves all.
        literal_signs: compare θ with the sum of signs itself, as printed, not with its absolute
          value; a coordinate that all agree to decrease then stops.
        backwards: where too few agree, go in the other direction, not nowhere.
        server_epochs: epochs on the server's own samples; 0 is none, and needs no such samples.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, local keeps something between its visits, or
            literal_signs and backwards are both set.

    Source: Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated learning in non-IID
    settings", 2020 <https://arxiv.org/abs/2010.15582>, sections 3.1, 3.3 and 3.4; Ozdayi,
    Kantarcioglu, Gel, "Defending against backdoors in federated learning with robust learning
    rate", AAAI 2021 <https://arxiv.org/abs/2007.03767>, eq. 3 (backwards).
    """
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    if not server_epochs >= 0:
        raise ValueError(f"server_epochs must be at least 0, got {server_epochs}")
    momentum = server.optimizer(optax.sgd(server_lr, momentum=server_momentum))
    signs = {"literal": literal_signs, "backwards": backwards}
    trained = [server.train_on_root(local.change(epochs=server_epochs))] if server_epochs else []
    return compose(
        local,
        clients_per_round,
        server=server.chain(server.sign_agreement(threshold, momentum, **signs), *trained),
    )
