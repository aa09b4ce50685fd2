"""Methods that train the server model for adaptation at each client."""

from __future__ import annotations

import optax

from fedjax_sim import personal, server
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Count, LocalUpdate, Objective, Positive, plain_sgd
from fedjax_sim.client import adaptation, corrections
from fedjax_sim.round import Algorithm, compose

__all__ = ["per_fedavg", "pfedme"]


@method
@plain_sgd
def per_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    alpha: float = 0.01,
    hessian: bool = False,
    fine_tuning_steps: Count = 1,
    equal_weights: bool = True,
) -> Algorithm:
    r"""Per-FedAvg: meta-learns a model that adapts to each client in one gradient step.

    .. math:: \min_w \frac1N \sum_k F_k\bigl(w - \alpha \nabla F_k(w)\bigr), \qquad
              w_k \leftarrow w_k - \eta \bigl(I - \alpha \nabla^2 F_{b''}(w_k)\bigr)
              \nabla F_b\bigl(w_k - \alpha \nabla F_{b'}(w_k)\bigr)

    Without the Hessian this is Per-FedAvg (FO), with it Per-FedAvg (HF); see
    :class:`fedjax_sim.adaptation.after_a_step`. A client's personal model is the server model after
    steps with learning rate α on the client's minibatches; it is recomputed for each evaluation.
    Clients are weighted equally by default, as in the paper.

    Args:
        local: the local update; its η is the paper's β.
        alpha: α: learning rate of the adaptation steps; 0 is FedAvg.
        hessian: include the Hessian in the gradient (HF); without it (FO), a step costs half as
          much.
        fine_tuning_steps: adaptation steps of a client's personal model.

    Returns:
        The algorithm, which reports the losses after adaptation. Traffic per round: m models down,
        m up.

    Source: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical
    guarantees: a model-agnostic meta-learning approach", NeurIPS 2020
    <https://arxiv.org/abs/2002.07948>, Algorithm 1.
    """
    changed = adaptation.after_a_step(objective, alpha, hessian=hessian)
    steps = _plain_steps(local, objective, alpha).change(
        epochs=float(fine_tuning_steps),  # an epoch has at least one minibatch
        max_steps=fine_tuning_steps,
    )
    return compose(
        local.change(objective=changed),
        clients_per_round,
        weighting=client_weights(equal_weights),
        personal=personal.fine_tuned(steps),
    )


@method
@plain_sgd
def pfedme(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    lam: float = 15.0,
    inner_steps: int = 5,
    inner_lr: float = 0.09,
    beta: Positive = 1.0,
    fine_tuning_epochs: Positive = 1.0,
    equal_weights: bool = True,
) -> Algorithm:
    r"""pFedMe: FedAvg on the Moreau envelopes of the clients' losses.

    .. math:: \min_w \frac1N \sum_k \min_{\theta_k} F_k(\theta_k)
              + \frac{\lambda}{2} \lVert \theta_k - w \rVert^2

    .. math:: w_k \leftarrow w_k - \eta \lambda (w_k - \tilde\theta_b(w_k)), \qquad
              w_{t+1} = (1 - \beta) w_t + \beta \frac1m \sum_{k \in U} w_k

    where θ̃_b is the result of K steps from w_k on the minibatch; see
    :class:`fedjax_sim.adaptation.moreau_envelope`. A client's personal model is θ_k for the server
    model, trained on all of the client's samples; it is recomputed for each evaluation. Clients are
    weighted equally by default, as in the paper.

    Args:
        local: the local update of w_k; its corrections do not apply to θ_k.
        lam: λ: strength of the pull of θ_k towards w.
        inner_steps: K: steps of θ_k per minibatch.
        inner_lr: learning rate of θ_k, the paper's personalised learning rate.
        beta: β: server step towards the clients' average; the authors use 1 or 2.

    Returns:
        The algorithm, which reports the minimised losses. Traffic per round: m models down, m up.

    Source: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS
    2020 <https://arxiv.org/abs/2006.08848>, Algorithm 1.
    """
    changed = adaptation.moreau_envelope(objective, lam, inner_steps=inner_steps, inner_lr=inner_lr)
    near = _plain_steps(local, objective, inner_lr).change(
        corrections=(corrections.proximal(lam),), epochs=fine_tuning_epochs
    )
    return compose(
        local.change(objective=changed),
        clients_per_round,
        weighting=client_weights(equal_weights),
        server=server.optimizer(optax.sgd(beta)),
        personal=personal.fine_tuned(near),
    )


def _plain_steps(local: LocalUpdate, objective: Objective, rate: float) -> LocalUpdate:
    """Returns plain SGD steps with a learning rate, on the local update's minibatches."""
    return local.change(
        objective=objective,
        optimizer=optax.sgd(rate),
        optimizer_state="reset",
        corrections=None,
        rate_by_round=None,
        rate_by_client=None,
    )
