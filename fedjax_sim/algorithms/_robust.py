"""Methods that weight clients by their losses, or withstand malicious ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Aggregator, LocalUpdate, Minority, Objective, PreAggregation
from fedjax_sim.client import sending
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import aggregators, preaggregation, weighting

__all__ = ["afl", "fltrust", "qffl", "robust", "zeno"]


@method
def qffl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    lr: float,
    momentum: float = 0.0,
    q: float = 1.0,
) -> Algorithm:
    r"""q-FFL (q-FedAvg): weights clients by a power of their loss, for more uniform accuracy.

    .. math:: \min_w \sum_k \frac{1}{q+1} F_k^{q+1}(w), \qquad
              w \leftarrow w - \frac{\sum_k F_k^q \Delta_k}
              {\sum_k \bigl( q F_k^{q-1} \lVert \Delta_k \rVert^2 + \frac{1}{\eta} F_k^q \bigr)},
              \qquad \Delta_k = \frac{w - w_k}{\eta}

    With momentum ρ, both η are :math:`\eta / (1 - \rho)`, the effective learning rate of the local
    optimiser.

    Args:
        q: exponent of the losses; a larger q is fairer. 0 is FedAvg with equal weights.

    Returns:
        The algorithm. A local update costs one more forward pass. Traffic per round: m models down,
        m up, and one number with each.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020
    <https://arxiv.org/abs/1905.10497>, Algorithm 2.
    """
    return compose(
        with_initial_loss(local, objective),
        clients_per_round,
        weighting=weighting.equal,
        preaggregation=(preaggregation.q_fair(q, lr, momentum),),
    )


@method
def afl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    step: float = 0.01,
) -> Algorithm:
    r"""AFL: minimises the loss of the worst-case mixture of clients.

    .. math:: \min_w \max_{\lambda \in \Delta_N} \sum_k \lambda_k F_k(w), \qquad
              w \leftarrow \frac{\sum_k \lambda_k w_k}{\sum_k \lambda_k}, \qquad
              \lambda \leftarrow \Pi_\Delta (\lambda + \gamma \nabla_\lambda)

    See :class:`fedjax_sim.preaggregation.agnostic`. In the paper, w takes single stochastic
    gradient steps over the clients; here each client runs its local update, and with partial
    participation the mixture covers the cohort.

    Args:
        step: γ: step of the client weights λ per unit of loss; 0 keeps them equal.

    Returns:
        The algorithm; with ``step=0`` it is FedAvg with equal weights. A local update costs one
        more forward pass. Traffic per round: m models down, m up, and one number with each.

    Source: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019
    <https://arxiv.org/abs/1902.00146>, section 4.
    """
    return compose(
        with_initial_loss(local, objective),
        clients_per_round,
        weighting=weighting.equal,
        preaggregation=(preaggregation.agnostic(step),),
    )


Rule = Literal[
    "mean", "coordinate_median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "caf"
]


Mixing = Literal["nearest", "buckets"]


SHARES = ("trimmed_mean", "krum", "multi_krum", "caf")
"""Rules that need a bound on the fraction of malicious clients."""


@method
def robust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    aggregator: Rule = "coordinate_median",
    byzantine: Minority = 0.2,
    mixing: Mixing | None = None,
    bucket_size: int = 2,
    clip: float | None = None,
    equal_weights: bool = True,
) -> Algorithm:
    r"""Robust FedAvg: replaces the mean by a rule that tolerates malicious clients.

    .. math:: w_{t+1} = \mathrm{aggregate}\bigl(\{w_k : k \in U_t\}\bigr)

    Clients are weighted equally by default, as in the papers, since they report n_k themselves;
    weights only affect the mean, the geometric median and buckets.

    Args:
        aggregator: the rule, see :mod:`fedjax_sim.aggregators`.
        byzantine: fraction of the cohort that may be malicious: β of the trimmed mean, f/m of Krum,
          multi-Krum, CAF and nearest-neighbour mixing; unused by the other rules.
        mixing: replace updates before the rule: "nearest", by means of their nearest neighbours;
          "buckets", by means of random buckets, of which bucket_size times the fraction may be
          malicious. None: no mixing.
        bucket_size: s: clients per bucket.
        clip: C: clipping norm (L2) of the clients' updates; None: no clipping.

    Raises:
        ValueError: if a setting is out of range, the aggregator or the mixing is unknown, or the
            cohort is too small: byzantine times m is below one client, or violates the condition of
            Krum's proof.

    Source: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", ICML 2018 <https://arxiv.org/abs/1803.01498>, for the coordinate
    median and the trimmed mean (aggregator); Pillutla, Kakade, Harchaoui, "Robust aggregation for
    federated learning", IEEE Transactions on Signal Processing 2022
    <https://arxiv.org/abs/1912.13445>, for the geometric median (aggregator); Blanchard, El Mhamdi,
    Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient descent",
    NeurIPS 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, for
    Krum and multi-Krum (aggregator); Allouah, Guerraoui, Stephan, "Towards trustworthy federated
    learning with untrusted participants", ICML 2025 <https://arxiv.org/abs/2505.01874>, for CAF
    (aggregator); Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, "Fixing by mixing: a
    recipe for optimal Byzantine ML under heterogeneity", AISTATS 2023
    <https://arxiv.org/abs/2302.01772>, for nearest neighbours (mixing); Karimireddy, He, Jaggi,
    "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022
    <https://arxiv.org/abs/2006.09365>, for buckets (mixing); Sun, Kairouz, Suresh, McMahan, "Can
    you really backdoor federated learning?", 2019 <https://arxiv.org/abs/1911.07963>, section 4
    (clip).

    Example:
        >>> algorithm = fs.algorithms.robust(
        ...     local, clients_per_round=10, aggregator="trimmed_mean", byzantine=0.2
        ... )
        >>> attack = fs.sending.sign_flip(fs.attacks.byzantine(10, 0.2))
        >>> attacked = algorithm.replace(sending=(attack,))
        >>> problem.accuracy(attacked, rounds=3) > 0.8  # aggregated by the mean: 0.2
        True
    """
    malicious = byzantine
    if mixing == "buckets":
        malicious = byzantine * bucket_size  # of the buckets
        if aggregator in SHARES and not malicious < 0.5:
            raise ValueError(
                f"bucket_size must be less than 0.5 / byzantine = {0.5 / byzantine:g} for "
                f"{aggregator}, got {bucket_size}"
            )
    rules: dict[str, Callable[[], Aggregator]] = {
        "mean": lambda: aggregators.mean,
        "coordinate_median": lambda: aggregators.coordinate_median,
        "trimmed_mean": lambda: aggregators.trimmed_mean(malicious),
        "geometric_median": aggregators.geometric_median,
        "krum": lambda: aggregators.krum(malicious),
        "multi_krum": lambda: aggregators.multi_krum(malicious),
        "caf": lambda: aggregators.caf(malicious),
    }
    mixed: tuple[PreAggregation, ...] = ()
    if mixing == "nearest":
        mixed = (preaggregation.nearest_neighbour_mixing(byzantine),)
    if mixing == "buckets":
        mixed = (preaggregation.bucketing(bucket_size),)
    return compose(
        local,
        clients_per_round,
        sending=() if clip is None else (sending.clip_norm(clip),),
        weighting=client_weights(equal_weights),
        preaggregation=mixed,
        aggregator=rules[aggregator](),
    )


@method
def fltrust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
) -> Algorithm:
    r"""FLTrust: weights updates by their cosine similarity to the server's own update.

    .. math:: w_{t+1} = w_t + \frac{1}{\sum_{j \in U_t} TS_j} \sum_{k \in U_t} TS_k
              \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k, \qquad
              TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0))

    where the server computes its update :math:`g_0` with the same local update on ``data.root``.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping", NDSS 2021 <https://arxiv.org/abs/2012.13995>, Algorithm 2, whose server learning
    rate α is 1 here.
    """
    return compose(local, clients_per_round, preaggregation=(preaggregation.trust(local),))


@method
def zeno(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    dropped: float = 0.5,
    rho: float = 1e-3,
    zeno_batch_size: int = 128,
    equal_weights: bool = True,
) -> Algorithm:
    r"""Zeno: averages the updates that most reduce the loss on the server's own samples.

    .. math:: w \leftarrow w + \frac{1}{|R|} \sum_{k \in R} \Delta_k, \qquad
              R = \text{the largest } m - b \text{ of }
              s_k = F_r(w) - F_r(w + \Delta_k) - \rho \lVert \Delta_k \rVert^2

    where F_r is the loss on r of the server's samples, resampled in each round; see
    :class:`fedjax_sim.preaggregation.suspicion`. Clients are weighted equally by default, as in the
    paper, since they report n_k themselves.

    Args:
        dropped: b/m: fraction of the cohort that is dropped; 0 is FedAvg.
        rho: ρ: penalty on long updates.
        zeno_batch_size: r: server samples per round; all if there are fewer.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Source: Xie, Koyejo, Gupta, "Zeno: distributed stochastic gradient descent with suspicion-based
    fault-tolerance", ICML 2019 <https://arxiv.org/abs/1805.10032>, Algorithm 1.

    Note:
        The authors' clients send gradients of one minibatch (``max_steps=1`` of the local update),
        and their server uses 4 samples per round.

    Example:
        >>> algorithm = fs.algorithms.zeno(
        ...     local, clients_per_round=10, objective=problem.objective
        ... )
        >>> attack = fs.sending.sign_flip(fs.attacks.byzantine(10, 0.4))
        >>> problem.accuracy(algorithm.replace(sending=(attack,)), rounds=3) > 0.8
        True
    """
    screen = preaggregation.suspicion(objective, dropped, rho, batch_size=zeno_batch_size)
    return compose(
        local,
        clients_per_round,
        weighting=client_weights(equal_weights),
        preaggregation=(screen,),
    )
