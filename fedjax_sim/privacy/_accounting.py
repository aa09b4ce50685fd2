"""The privacy that a run spends, by dp-accounting."""

from __future__ import annotations

import math
from typing import Any, Literal

from fedjax_sim.privacy._banded import sensitivity
from fedjax_sim.privacy._cohorts import epoch_rounds, slots_for

Sampling = Literal["poisson", "fixed"]
"""How a cohort is drawn: each client by a coin of its own, or so many of them."""


def epsilon(
    noise_multiplier: float,
    *,
    clients: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
    sampling: Sampling = "poisson",
) -> float:
    """ε of (ε, δ) differential privacy for one client's data, if all models of a run are shown.

    It holds if nothing but updates leaves the clients, see :func:`gaussian_mechanism`.

    "poisson": neighbours differ by a client that is there or not, of sensitivity C; the privacy
    loss distribution of the truncated Poisson-subsampled Gaussian mechanism (tight up to its
    discretisation) with the slots of :func:`slots_for`. "fixed": the cohort's size is public, so
    neighbours replace a client, of sensitivity 2C, and the noise counts as z/2; a Rényi bound for
    sampling without replacement, which is not tight.

    Args:
        noise_multiplier: z, the noise's standard deviation divided by C; 0 gives infinity.
        clients: N.
        clients_per_round: m, expected or fixed.
        rounds: T.
        delta: δ; below 1/N, or it promises nothing.
        sampling: how cohorts are drawn.

    Returns:
        ε.

    Raises:
        ValueError: if a setting is out of range.
        ImportError: without dp-accounting, of the extra ``privacy``.

    Source: Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>, for the subsampled Gaussian
    mechanism; Wang et al. 2019 <https://arxiv.org/abs/1808.00087>, for fixed cohorts; Google 2022
    <https://github.com/google/differential-privacy>, dp-accounting, whose accountants compute it:
    ``PLDAccountant`` (privacy loss distributions), for fixed cohorts ``RdpAccountant``.

    Example:
        >>> spent = epsilon(1.0, clients=1000, clients_per_round=10, rounds=1000, delta=1e-5)
        >>> round(spent, 2)
        1.83
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    if sampling not in ("poisson", "fixed"):
        raise ValueError(f"sampling must be 'poisson' or 'fixed', got {sampling!r}")
    if noise_multiplier == 0:
        return math.inf
    dp_accounting, pld, rdp = _accountants("epsilon")
    if sampling == "poisson":
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=clients,
            sampling_probability=clients_per_round / clients,
            truncated_batch_size=min(clients, slots_for(clients_per_round)),
            noise_multiplier=noise_multiplier,
        )
    else:
        accountant = rdp.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            clients, clients_per_round, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        )
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def tree_epsilon(
    noise_multiplier: float,
    *,
    clients: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
) -> float:
    """ε of (ε, δ) differential privacy for one client's data, under :func:`tree_mechanism`.

    Neighbours differ in one client, whose updates are those of the one data set and zero in the
    other. An epoch of n rounds shows a client in at most ⌈log₂(n + 1)⌉ nodes of its tree; epochs
    compose. Which clients a round has needs no secrecy, and buys nothing.

    Args:
        noise_multiplier: z, the standard deviation of a node's noise divided by C; 0 gives
            infinity.
        clients: N.
        clients_per_round: m.
        rounds: T.
        delta: δ; below 1/N, or it promises nothing.

    Returns:
        ε, by Rényi divergences.

    Raises:
        ValueError: if a setting is out of range.
        ImportError: without dp-accounting, of the extra ``privacy``.

    Source: Kairouz et al. 2021 <https://arxiv.org/abs/2103.00039>, appendix D; Google 2022
    <https://github.com/google/differential-privacy>, dp-accounting, whose ``RdpAccountant``
    computes it.

    Example:
        >>> spent = tree_epsilon(4.0, clients=1000, clients_per_round=50, rounds=40, delta=1e-4)
        >>> round(spent, 2)
        3.18
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    if noise_multiplier == 0:
        return math.inf
    dp_accounting, _, rdp = _accountants("tree_epsilon")
    length = epoch_rounds(clients, clients_per_round)
    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    for rounds_of_tree, trees in ((length, rounds // length), (rounds % length, 1)):
        if rounds_of_tree and trees:
            event = dp_accounting.SingleEpochTreeAggregationDpEvent(
                noise_multiplier, rounds_of_tree
            )
            accountant.compose(event, trees)
    return float(accountant.get_epsilon(delta))


def banded_epsilon(
    noise_multiplier: float,
    *,
    bands: int,
    clients: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
) -> float:
    r"""ε of (ε, δ) differential privacy for one client's data, under :func:`banded_mechanism`.

    Neighbours differ in one client, whose updates are those of the one data set and zero in the
    other. All rounds together are one Gaussian mechanism of noise z/s, with

    .. math:: s^2 = \sum_i \sum_{j < \min(b,\, T - i \lfloor N/m \rfloor)} c_j^2

    over the visits i of a client that comes in the first round and whenever it can.

    Args:
        noise_multiplier: z, the standard deviation of ξ divided by C; 0 gives infinity.
        bands: b.
        clients: N.
        clients_per_round: m.
        rounds: T.
        delta: δ; below 1/N, or it promises nothing.

    Returns:
        ε.

    Raises:
        ValueError: if a setting is out of range.
        ImportError: without dp-accounting, of the extra ``privacy``.

    Source: Choquette-Choo et al. 2023 <https://arxiv.org/abs/2306.08153>; Google 2022
    <https://github.com/google/differential-privacy>, dp-accounting, whose ``PLDAccountant``
    computes it.

    Example:
        >>> settings = {"clients": 1000, "clients_per_round": 50, "rounds": 40, "delta": 1e-4}
        >>> round(banded_epsilon(4.0, bands=20, **settings), 2)
        1.71
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    reach = sensitivity(bands, clients, clients_per_round, rounds)
    if noise_multiplier == 0:
        return math.inf
    dp_accounting, pld, _ = _accountants("banded_epsilon")
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / reach))
    return float(accountant.get_epsilon(delta))


def _check(
    noise_multiplier: float, clients: int, clients_per_round: int, rounds: int, delta: float
) -> None:
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
    if not 1 <= clients_per_round <= clients:
        raise ValueError(f"clients_per_round must be in 1..{clients}, got {clients_per_round}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 < delta < 1 / max(clients, 2):
        raise ValueError(f"delta must be above 0 and below 1/N = {1 / clients:.3g}, got {delta}")


def _accountants(name: str) -> tuple[Any, Any, Any]:
    """dp-accounting, and its accountants of loss distributions and Rényi divergences."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise ImportError(f"{name} needs dp-accounting: pip install dp-accounting") from error
    return dp_accounting, pld, rdp
