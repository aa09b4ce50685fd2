"""Methods whose server model is trained for adaptation by each client."""

from __future__ import annotations

import optax

from fedjax_sim import personal, server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective, concrete, plain_sgd
from fedjax_sim.client import adaptation, corrections
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@method
@plain_sgd
def per_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    alpha: float = 0.01,
    hessian: bool = False,
    fine_tuning_steps: int = 1,
    equal_weights: bool = True,
) -> Algorithm:
    r"""Per-FedAvg: FedAvg of the losses that clients would have after a step of their own.

    .. math:: \min_w \frac1N \sum_k F_k\bigl(w - \alpha \nabla F_k(w)\bigr), \qquad
              w_k \leftarrow w_k - \eta \bigl(I - \alpha \nabla^2 F_{b''}(w_k)\bigr)
              \nabla F_b\bigl(w_k - \alpha \nabla F_{b'}(w_k)\bigr)

    Without the Hessian it is Per-FedAvg (FO), with it (HF); see
    :func:`fedjax_sim.adaptation.after_a_step`. A client's own model is the server's after the
    steps of rate α on the client's minibatches; nothing of it is kept.

    Args:
        local: the local update, whose η is the paper's β.
        objective: F.
        alpha: α, the rate of a client's own steps; 0 is FedAvg.
        hessian: whether the gradient has the Hessian (HF); without it (FO) a step costs half.
        fine_tuning_steps: the steps of a client's own model.
        equal_weights: weigh clients equally, as the authors do, not by n_k.

    Returns:
        The algorithm, which reports the losses after the step. Traffic per round: m models down, m
        up.

    Raises:
        ValueError: if alpha is negative or fine_tuning_steps below 1.

    Source: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical
    guarantees: a model-agnostic meta-learning approach", NeurIPS 2020
    <https://arxiv.org/abs/2002.07948>, Algorithm 1.
    """
    if fine_tuning_steps < 1:
        raise ValueError(f"fine_tuning_steps must be at least 1, got {fine_tuning_steps}")
    changed = adaptation.after_a_step(objective, alpha, hessian=hessian)
    steps = _own_steps(local, objective, alpha).change(
        epochs=float(fine_tuning_steps),  # of one minibatch at least
        max_steps=fine_tuning_steps,
    )
    return compose(
        local.change(objective=changed),
        clients_per_round,
        weighting=weighting.equal if equal_weights else weighting.by_samples,
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
    beta: float = 1.0,
    fine_tuning_epochs: float = 1.0,
    equal_weights: bool = True,
) -> Algorithm:
    r"""pFedMe: FedAvg of the least losses that clients would have near the server's model.

    .. math:: \min_w \frac1N \sum_k \min_{\theta_k} F_k(\theta_k)
              + \frac{\lambda}{2} \lVert \theta_k - w \rVert^2

    .. math:: w_k \leftarrow w_k - \eta \lambda (w_k - \tilde\theta_b(w_k)), \qquad
              w_{t+1} = (1 - \beta) w_t + \beta \frac1m \sum_{k \in U} w_k

    θ̃_b is what K steps make of w_k on the minibatch; see
    :func:`fedjax_sim.adaptation.moreau_envelope`. A client's own model is θ_k of the server's
    model: that trained on all its samples, near the server's. Nothing of it is kept.

    Args:
        local: the local update, of w_k; its corrections are not for θ_k.
        objective: F.
        lam: λ, the pull of θ_k towards w.
        inner_steps: K.
        inner_lr: the rate of θ_k's steps, the paper's personalised learning rate.
        beta: β, the server's part of the way to the clients' mean; the authors take 1 or 2.
        fine_tuning_epochs: the epochs of a client's own model.
        equal_weights: weigh clients equally, as the authors do, not by n_k.

    Returns:
        The algorithm, which reports those least losses. Traffic per round: m models down, m up.

    Raises:
        ValueError: if lam, inner_lr, beta or fine_tuning_epochs is not positive, or inner_steps
            below 1.

    Source: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS
    2020 <https://arxiv.org/abs/2006.08848>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05))
        >>> algorithm = fs.algorithms.pfedme(
        ...     local, clients_per_round=5, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8  # of the shared model
        True
    """
    if concrete(beta) and not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    changed = adaptation.moreau_envelope(objective, lam, inner_steps=inner_steps, inner_lr=inner_lr)
    near = _own_steps(local, objective, inner_lr).change(
        corrections=(corrections.proximal(lam),), epochs=fine_tuning_epochs
    )
    return compose(
        local.change(objective=changed),
        clients_per_round,
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        server=server.optimizer(optax.sgd(beta)),
        personal=personal.fine_tuned(near),
    )


def _own_steps(local: LocalUpdate, objective: Objective, rate: float) -> LocalUpdate:
    """Plain steps of a client's own rate, on the minibatches of the local update."""
    return local.change(
        objective=objective,
        optimizer=optax.sgd(rate),
        optimizer_state="reset",
        corrections=None,
        rate_by_round=None,
    )
