"""Differentially private methods."""

from __future__ import annotations

from fedjax_sim import privacy
from fedjax_sim.algorithms._method import method, server_sgd
from fedjax_sim.base import Decay, Finite, LocalUpdate, Positive, PreAggregation, Share
from fedjax_sim.plan import selection
from fedjax_sim.privacy import Sampling
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["dp_fedavg", "dp_ftrl", "dp_sgd"]


@method
def dp_fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
    quantile: Share | None = None,
    clip_lr: Finite = 0.2,
    count_noise: float | None = None,
    sampling: Sampling = "poisson",
) -> Algorithm:
    r"""DP-FedAvg: clipped updates, Gaussian noise and a fixed denominator.

    .. math:: w_{t+1} = w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    All clients are weighted equally. :meth:`fedjax_sim.Algorithm.epsilon` computes the ε that a run
    spends, or names the part that makes it unknown. A model with BatchNorm is rejected, because its
    statistics would be sent without noise, as is a local update that sends more than the model.

    Args:
        clients_per_round: m: expected cohort size; exact if ``sampling`` is "fixed".
        clip: C: clipping norm (L2) of the clients' updates; with a quantile, in the first round.
        noise_multiplier: z: standard deviation of the noise divided by C; with a quantile, z of
          updates and count together.
        quantile: γ: fraction of updates to leave unclipped, which C adapts to. None: C is fixed.
        clip_lr: η_C: learning rate of C.
        count_noise: σ_b: standard deviation of the noise on the count of unclipped updates, with a
          quantile; None: m/20.
        sampling: "poisson": each client joins independently with probability m/N, as the usual
          analysis assumes; "fixed": m clients are drawn without replacement.

    Returns:
        The algorithm; without noise, with an infinite clip and a fixed cohort, it is FedAvg with
        equal weights, up to rounding. Traffic per round: m models down, m up (on average).

    Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language
    models", ICLR 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1; Andrew, Thakkar, McMahan,
    Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021
    <https://arxiv.org/abs/1905.03871>, Algorithm 1 (quantile).

    Example:
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
    if quantile is None and count_noise is not None:
        raise ValueError(f"count_noise must be None without a quantile, got {count_noise}")
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
        slots,
        selection=privacy.poisson(clients_per_round) if by_coin else selection.uniform(),
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
    server_lr: Positive = 1.0,
    server_momentum: Decay = 0.0,
    bands: int | None = None,
) -> Algorithm:
    r"""DP-FTRL: clients participate in turn; the noise of the summed updates grows only like log t.

    .. math:: w_t = w_0 + \frac{\eta}{m} \Bigl(\sum_{\tau \le t} \sum_{k \in U_\tau} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr)

    with the noise n_t of binary trees over the rounds, one per epoch of ⌊N/m⌋ rounds in which no
    client participates twice (:class:`fedjax_sim.preaggregation.tree_mechanism`); with momentum β,
    the increments of this sum enter :math:`v \leftarrow \beta v + \cdot`. All clients are weighted
    equally. ε and rejections are as for :func:`fedjax_sim.algorithms.dp_fedavg`.

    With bands it is DP-BandMF: the noise comes from
    :class:`fedjax_sim.preaggregation.banded_mechanism`, which spends less ε for the same amount of
    noise, and the order of the clients is fixed.

    Args:
        clients_per_round: m: clients per round.
        clip: C: clipping norm (L2) of the clients' updates.
        noise_multiplier: z: standard deviation of the noise of a tree node (of ξ with bands)
          divided by C.
        bands: b: rounds over which noise is correlated, at most ⌊N/m⌋; 1 makes it independent.
          None: trees.

    Returns:
        The algorithm; without noise, with an infinite clip and all clients in every round, it is
        FedAvg with equal weights, up to rounding. Traffic per round: m models down, m up.

    Source: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning
    without sampling or shuffling", ICML 2021 <https://arxiv.org/abs/2103.00039>, Algorithm 1;
    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu, "(Amplified) banded matrix
    factorization", NeurIPS 2023 <https://arxiv.org/abs/2306.08153>, for bands.
    """
    noise: PreAggregation = privacy.tree_mechanism(clip, noise_multiplier, clients_per_round)
    if bands is not None:
        noise = privacy.banded_mechanism(clip, noise_multiplier, clients_per_round, bands)
    return compose(
        local,
        clients_per_round,
        selection=selection.shuffled() if bands is None else selection.cyclic(),
        weighting=weighting.equal,
        preaggregation=(noise,),
        server=server_sgd(server_lr, server_momentum),
    )


@method
def dp_sgd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clip: Positive = 1.0,
    noise_multiplier: Finite = 1.0,
) -> Algorithm:
    r"""DP-SGD: clients clip the gradients of single samples and add noise in every step.

    .. math:: w_k \leftarrow w_k - \frac{\eta}{\min(B, n_k)} \Bigl(\sum_{i \in b} g_i \min\bigl(1,
              \tfrac{C}{\lVert g_i \rVert_2}\bigr) + \mathcal{N}(0, \sigma^2 C^2 I)\Bigr)

    FedAvg whose clients train in this way: g_i is the gradient of one sample, and each sample joins
    a minibatch b with probability min(1, B/n_k), see :class:`fedjax_sim.local.dp_sgd`. Unlike
    ``dp_fedavg`` it protects single samples and not whole clients, needs no trust in the server,
    and does not depend on the number of clients. :meth:`fedjax_sim.Algorithm.client_epsilon`
    computes the ε of each client, which depends on n_k and on its visits; the command prints the
    least, the median and the largest. A model with BatchNorm is rejected, as is a local update that
    reads samples without noise.

    Args:
        clip: C: clipping norm (L2) of the samples' gradients.
        noise_multiplier: σ: standard deviation of the noise of a step divided by C.

    Returns:
        The algorithm; without noise, with an infinite clip and B at least n_k, it is FedAvg, up to
        rounding. Traffic per round: m models down, m up.

    Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with
    differential privacy", CCS 2016 <https://arxiv.org/abs/1607.00133>, Algorithm 1, at each client.
    """
    steps = privacy.dp_sgd(clip, noise_multiplier)
    return compose(local.change(private=steps), clients_per_round)
