"""Federated averaging with differential privacy for clients."""

from __future__ import annotations

from fedjax_sim import privacy
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def dp_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
    quantile: float | None = None,
    clip_lr: float = 0.2,
    count_noise: float | None = None,
    sampling: privacy.Sampling = "poisson",
    execution: Execution | None = None,
) -> Algorithm:
    r"""DP-FedAvg: clipped updates, Gaussian noise, a fixed denominator.

    .. math:: w_{t+1} = w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    All clients count equally. :meth:`fedjax_sim.Algorithm.epsilon` computes the ε that a run
    spends, or names the part because of which it is unknown. A model with BatchNorm is refused,
    because its statistics would leave without noise; so is a local update that sends anything
    besides the model.

    Args:
        local: the local update.
        clients_per_round: m, the expected cohort; if ``sampling`` is "fixed", the cohort.
        clip: C, the largest L2 norm of a client's update, which is scaled down to it; with a
          quantile that of the first round.
        noise_multiplier: z, the noise's standard deviation divided by C; with a quantile that of
          updates and count together.
        quantile: γ, the share of the updates that is not to be clipped: C follows it. None: C
          stays.
        clip_lr: η_C, how fast C follows.
        count_noise: σ_b, the standard deviation of the noise in the count of updates that are not
          clipped; None: m/20.
        sampling: "poisson" lets every client join by its own coin, with probability m/N, which the
          usual analysis assumes; "fixed" draws m clients without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; without noise, with an infinite clip and a fixed cohort it is FedAvg with
        equal weights, to rounding. Traffic per round: m models down, m up (on average).

    Raises:
        ValueError: if a setting is out of range, the model has non-trainable variables, or local
          shares state through the server or needs the other clients' samples.

    Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language
    models", ICLR 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1; Andrew, Thakkar, McMahan,
    Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021
    <https://arxiv.org/abs/1905.03871>, Algorithm 1 (quantile).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.dp_fedavg(
        ...     local, clients_per_round=5, clip=2.0, noise_multiplier=0.1
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.7
        True
        >>> algorithm.slots  # a larger Poisson cohort is drawn once in a million rounds
        19
        >>> spent = fs.privacy.epsilon(  # more noise, and a larger federation
        ...     0.8, clients=2000, clients_per_round=20, rounds=100, delta=1e-4
        ... )
        >>> round(spent, 2)
        1.04
    """
    if sampling not in ("poisson", "fixed"):
        raise ValueError(f"sampling must be 'poisson' or 'fixed', got {sampling!r}")
    private = (
        privacy.gaussian_mechanism(clip, noise_multiplier, clients_per_round)
        if quantile is None
        else privacy.adaptive_mechanism(
            clip, noise_multiplier, clients_per_round, quantile,
            clip_lr=clip_lr, count_noise=count_noise,
        )
    )  # fmt: skip
    by_coin = sampling == "poisson"
    slots = privacy.slots_for(clients_per_round) if by_coin else clients_per_round
    return compose(
        local,
        selection=privacy.poisson(clients_per_round) if by_coin else selection.uniform(),
        schedule=schedule.every_round(slots),
        weighting=weighting.equal,
        preaggregation=(private,),
        execution=execution,
    )
