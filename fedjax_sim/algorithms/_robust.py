"""Federated averaging with a robust aggregator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedjax_sim.base import Aggregator, LocalUpdate, PreAggregation, part
from fedjax_sim.client import sending
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import aggregators, preaggregation, weighting

Rule = Literal[
    "mean", "coordinate_median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "caf"
]
Mixing = Literal["nearest", "buckets"]

SHARES = ("trimmed_mean", "krum", "multi_krum", "caf")
"""The rules that are told the share of the malicious."""


@part
def robust(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    aggregator: Rule = "coordinate_median",
    byzantine: float = 0.2,
    mixing: Mixing | None = None,
    bucket_size: int = 2,
    clip: float | None = None,
    equal_weights: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg that withstands malicious clients: a robust rule takes the place of the mean.

    .. math:: w_{t+1} = \mathrm{aggregate}\bigl(\{w_k : k \in U_t\}\bigr)

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        aggregator: the rule, see :mod:`fedjax_sim.aggregators`.
        byzantine: the share of the cohort that may be malicious: β of the trimmed mean, f/m of
          Krum, multi-Krum, CAF and nearest-neighbour mixing; the other rules need no such bound.
        mixing: what the rule is given in place of the updates: "nearest", each the mean of its
          nearest neighbours; "buckets", means of random buckets, and of these the rule must
          withstand bucket_size times the share. None: the updates.
        bucket_size: s, clients in a bucket.
        clip: C, the largest L2 norm of a client's update, which is scaled down to it. None: no
          limit.
        equal_weights: weigh clients equally, as in the papers, not by n_k, which clients claim
          themselves; only the mean, the geometric median and buckets weigh at all.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, the aggregator or the mixing is unknown, or the
          cohort is too small: byzantine of it is no client, or not fewer than Krum's proof asks
          for.

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
    <https://arxiv.org/abs/2006.09365>, for buckets (mixing); Sun, Kairouz, Suresh, McMahan,
    "Can you really backdoor federated learning?", 2019 <https://arxiv.org/abs/1911.07963>, section
    4 (clip).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.robust(
        ...     local, clients_per_round=10, aggregator="trimmed_mean", byzantine=0.2
        ... )
        >>> attack = fs.attacks.sign_flip(fs.attacks.byzantine(10, 0.2))
        >>> attacked = algorithm.replace(sending=(attack,))
        >>> problem.accuracy(attacked, rounds=3) > 0.8  # aggregated by the mean: 0.2
        True
    """
    if not 0 <= byzantine < 0.5:
        raise ValueError(f"byzantine must be in [0, 0.5), got {byzantine}")
    if mixing not in (None, "nearest", "buckets"):
        raise ValueError(f"mixing must be 'nearest', 'buckets' or None, got {mixing!r}")
    spoilt = byzantine
    if mixing == "buckets":
        spoilt = byzantine * bucket_size  # of the buckets
        if aggregator in SHARES and not spoilt < 0.5:
            raise ValueError(
                f"bucket_size must be less than 0.5 / byzantine = {0.5 / byzantine:g} for "
                f"{aggregator}, got {bucket_size}"
            )
    rules: dict[str, Callable[[], Aggregator]] = {
        "mean": lambda: aggregators.mean,
        "coordinate_median": lambda: aggregators.coordinate_median,
        "trimmed_mean": lambda: aggregators.trimmed_mean(spoilt),
        "geometric_median": aggregators.geometric_median,
        "krum": lambda: aggregators.krum(spoilt),
        "multi_krum": lambda: aggregators.multi_krum(spoilt),
        "caf": lambda: aggregators.caf(spoilt),
    }
    if aggregator not in rules:
        raise ValueError(f"aggregator must be one of {', '.join(rules)}, got {aggregator!r}")
    mixed: tuple[PreAggregation, ...] = ()
    if mixing == "nearest":
        mixed = (preaggregation.nearest_neighbour_mixing(byzantine),)
    if mixing == "buckets":
        mixed = (preaggregation.bucketing(bucket_size),)
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=() if clip is None else (sending.clip_norm(clip),),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        preaggregation=mixed,
        aggregator=rules[aggregator](),
        execution=execution,
    )
