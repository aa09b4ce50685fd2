"""Federated averaging with differential privacy for clients."""

from __future__ import annotations

from fedjax_sim import privacy, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def dp_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
    sampling: privacy.Sampling = "poisson",
    execution: Execution | None = None,
) -> Algorithm:
    r"""DP-FedAvg: clipped updates, Gaussian noise, a fixed denominator.

    .. math:: w_{t+1} = w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    Clients weigh the same. :func:`fedjax_sim.privacy.epsilon` tells what a run spends. A model
    with BatchNorm is refused, its statistics would leave without noise; and so is a local update
    that sends anything beside the model.

    Args:
        local: the local update.
        clients_per_round: m, the expected cohort; the cohort where ``sampling`` is fixed.
        clip: C, the largest L2 norm of an update over all parameters.
        noise_multiplier: z, the noise's standard deviation over C; with 0 and an infinite clip a
            fixed cohort is FedAvg with equal weights, to rounding.
        sampling: "poisson" lets every client join by its own coin, with probability m/N, which the
            usual analysis assumes; "fixed" draws m clients without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up (on average).

    Raises:
        ValueError: if a setting is out of range, the model has non-trainable variables, or local
            shares state through the server or needs the other clients' samples.

    Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language
    models", ICLR 2018, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> algorithm = dp_fedavg(local, clients_per_round=20, clip=0.5, noise_multiplier=0.8)
        >>> algorithm.slots  # a larger Poisson cohort is drawn once in a million rounds
        45
        >>> spent = privacy.epsilon(0.8, clients=2000, clients_per_round=20, rounds=100,
        ...                         delta=1e-4)
        >>> round(spent, 2)
        1.04
    """
    if sampling not in ("poisson", "fixed"):
        raise ValueError(f"sampling must be 'poisson' or 'fixed', got {sampling!r}")
    private = privacy.gaussian_mechanism(clip, noise_multiplier, clients_per_round)
    by_coin = sampling == "poisson"
    slots = privacy.slots_for(clients_per_round) if by_coin else clients_per_round
    return compose(
        privacy.unshared(local),
        selection=privacy.poisson(clients_per_round) if by_coin else selection.uniform(),
        schedule=schedule.every_round(slots),
        weighting=weighting.equal,
        screens=(private,),
        execution=execution,
    )
