"""Differentially private methods."""

from __future__ import annotations

import optax

from fedjax_sim import privacy, server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, PreAggregation
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@method
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
) -> Algorithm:
    r"""DP-FedAvg: clipped updates, Gaussian noise, a fixed denominator.

    .. math:: w_{t+1} = w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    All clients count equally. :meth:`fedjax_sim.Algorithm.epsilon` computes the ε that a run
    spends, or names the part because of which it is unknown. A model with BatchNorm is refused,
    because its statistics would leave without noise; so is a local update that sends anything
    besides the model.

    Args:
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
    )


@method
def dp_ftrl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    bands: int | None = None,
) -> Algorithm:
    r"""DP-FTRL: the clients come in turn, and the noise of the sum of all rounds grows like log t.

    .. math:: w_t = w_0 + \frac{\eta}{m} \Bigl(\sum_{\tau \le t} \sum_{k \in U_\tau} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr)

    with the noise n_t of binary trees over the rounds, one for each epoch of ⌊N/m⌋ rounds in which
    no client comes twice (:func:`fedjax_sim.privacy.tree_mechanism`); with momentum β the rounds'
    shares of this sum are what :math:`v \leftarrow \beta v + \cdot` adds up. All clients count
    equally. :meth:`fedjax_sim.Algorithm.epsilon` computes the ε that a run spends, or names the
    part because of which it is unknown. A model with BatchNorm is refused, because its statistics
    would leave without noise; so is a local update that sends anything besides the model.

    With bands it is DP-BandMF: the noise is that of
    :func:`fedjax_sim.privacy.banded_mechanism`, with less ε for as much of it, and the order of the
    clients stays.

    Args:
        clients_per_round: m, the cohort.
        clip: C, the largest L2 norm of a client's update, which is scaled down to it.
        noise_multiplier: z, the standard deviation of the noise of a tree's node, or of ξ with
          bands, divided by C.
        server_lr: η, the server's learning rate.
        server_momentum: β, the server's momentum; 0 is none.
        bands: b, at most ⌊N/m⌋, the rounds over which noise is correlated; 1 makes it independent.
          None for trees.

    Returns:
        The algorithm; without noise, with an infinite clip and all clients in every round it is
        FedAvg with equal weights, to rounding. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, the model has non-trainable variables, or local
          shares state through the server or needs the other clients' samples.

    Source: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning
    without sampling or shuffling", ICML 2021 <https://arxiv.org/abs/2103.00039>, Algorithm 1;
    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu, "(Amplified) banded matrix
    factorization", NeurIPS 2023 <https://arxiv.org/abs/2306.08153>, for bands.
    """
    if not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    noise: PreAggregation = privacy.tree_mechanism(clip, noise_multiplier, clients_per_round)
    if bands is not None:
        noise = privacy.banded_mechanism(clip, noise_multiplier, clients_per_round, bands)
    return compose(
        local,
        clients_per_round,
        selection=selection.shuffled() if bands is None else selection.cyclic(),
        weighting=weighting.equal,
        preaggregation=(noise,),
        server=server.optimizer(optax.sgd(server_lr, momentum=server_momentum)),
    )
