"""The ε that a run spends: exact for Gaussian mechanisms, otherwise by dp-accounting."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Participation
from fedjax_sim.privacy._cohorts import epoch_rounds, slots_for

Sampling = Literal["poisson", "fixed"]
"""How a random cohort is drawn: every client independently, or a fixed number of clients."""


class UnknownEpsilonError(ValueError):
    """A composition has a part for which a mechanism's analysis may not hold."""


def epsilon(
    noise_multiplier: float,
    *,
    clients: int,
    clients_per_round: float,
    rounds: int,
    delta: float,
    sampling: Participation = "poisson",
    slots: int | None = None,
) -> float:
    """Computes ε of (ε, δ) client-level differential privacy if all server models are published.

    It holds if only updates leave the clients, see
    :class:`fedjax_sim.preaggregation.gaussian_mechanism`; :meth:`fedjax_sim.Algorithm.epsilon` also
    checks this.

    "poisson": neighbours differ in the presence of one client, with sensitivity C; computed from
    the privacy loss distribution of the truncated Poisson-subsampled Gaussian mechanism (tight up
    to its discretisation). "fixed": the cohort's size is public, so that neighbours replace one
    client, with sensitivity 2C, and the noise counts as z/2; a Rényi bound for sampling without
    replacement, which is not tight. "epochs" and "cyclic": cohorts are public, neighbours differ in
    one client, whose updates are zero in one of them, and its ⌈T / ⌊N/m⌋⌉ visits are as many
    Gaussian mechanisms; exact.

    Args:
        noise_multiplier: z, the noise's standard deviation divided by C; 0 gives infinity.
        clients: N.
        clients_per_round: m, expected or fixed.
        rounds: T.
        delta: δ; must be below 1/N to be meaningful.
        sampling: how clients take part, see :data:`fedjax_sim.base.Participation`.
        slots: the maximum size of a Poisson cohort; None: ``slots_for`` m.

    Returns:
        ε.

    Raises:
        ValueError: if a setting is out of range.
        ImportError: if cohorts are random and dp-accounting is not installed (extra ``privacy``).

    Source: Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>, for the subsampled Gaussian
    mechanism; Wang et al. 2019 <https://arxiv.org/abs/1808.00087>, for fixed cohorts; Google 2022
    <https://github.com/google/differential-privacy>, for dp-accounting, whose accountants are used:
    ``PLDAccountant`` for Poisson cohorts, ``RdpAccountant`` for fixed ones.

    Example:
        >>> spent = epsilon(1.0, clients=1000, clients_per_round=10, rounds=1000, delta=1e-5)
        >>> round(spent, 2)
        1.83
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    if sampling not in get_args(Participation):
        known = ", ".join(map(repr, get_args(Participation)))
        raise ValueError(f"sampling must be one of {known}, got {sampling!r}")
    if noise_multiplier == 0:
        return math.inf
    if sampling in ("epochs", "cyclic"):
        visits = math.ceil(rounds / epoch_rounds(clients, clients_per_round))
        return gaussian(math.sqrt(visits) / noise_multiplier, delta)
    dp_accounting, pld, rdp = accountants()
    if sampling == "poisson":
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=clients,
            sampling_probability=clients_per_round / clients,
            truncated_batch_size=min(clients, slots or slots_for(clients_per_round)),
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
    clients_per_round: float,
    rounds: int,
    delta: float,
) -> float:
    r"""Computes ε of (ε, δ) client-level differential privacy for :func:`tree_mechanism`, exactly.

    Neighbours differ in one client, whose updates are zero in one of them. A client that takes part
    in the first round of every epoch of n rounds is in :math:`\lfloor \log_2 n \rfloor + 1` nodes
    of each tree, and no client is in more: all rounds together are one Gaussian mechanism. Cohorts
    may be public. The arguments are those of :func:`epsilon`.

    Source: Kairouz et al. 2021 <https://arxiv.org/abs/2103.00039>, appendix D, for the nodes; Balle
    and Wang 2018 <https://arxiv.org/abs/1805.06530>, theorem 8, for ε.

    >>> spent = tree_epsilon(4.0, clients=1000, clients_per_round=50, rounds=40, delta=1e-4)
    >>> round(spent, 2)
    2.88
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    if noise_multiplier == 0:
        return math.inf
    whole, rest = divmod(rounds, length := epoch_rounds(clients, clients_per_round))
    nodes = whole * length.bit_length() + rest.bit_length()
    return gaussian(math.sqrt(nodes) / noise_multiplier, delta)


def banded_epsilon(
    noise_multiplier: float,
    *,
    bands: int,
    clients: int,
    clients_per_round: float,
    rounds: int,
    delta: float,
) -> float:
    r"""Computes the exact client-level ε of :func:`banded_mechanism` with b bands.

    Neighbours differ in one client, whose updates are zero in one of them. All rounds together are
    one Gaussian mechanism with noise multiplier z/s,

    .. math:: s^2 = \sum_i \sum_{j < \min(b,\, T - i \lfloor N/m \rfloor)} c_j^2

    summed over the visits i of a client that takes part in the first round and then as often as
    possible. The other arguments are those of :func:`epsilon`.

    Source: Choquette-Choo et al. 2023 <https://arxiv.org/abs/2306.08153>; Balle and Wang 2018
    <https://arxiv.org/abs/1805.06530>, theorem 8, for ε.

    >>> settings = {"clients": 1000, "clients_per_round": 50, "rounds": 40, "delta": 1e-4}
    >>> round(banded_epsilon(4.0, bands=20, **settings), 2)
    1.71
    """
    _check(noise_multiplier, clients, clients_per_round, rounds, delta)
    reach = sensitivity(bands, clients, clients_per_round, rounds)
    if noise_multiplier == 0:
        return math.inf
    return gaussian(reach / noise_multiplier, delta)


def gaussian(mu: float, delta: float) -> float:
    r"""Computes ε of a Gaussian mechanism whose sensitivity is μ standard deviations, exactly.

    .. math:: \delta = \Phi(\mu / 2 - \varepsilon / \mu)
              - e^\varepsilon \Phi(-\mu / 2 - \varepsilon / \mu)

    >>> round(gaussian(1.0, 1e-5), 4)
    4.3772
    """
    from scipy import optimize, special  # here, because the imports take half a second

    def excess(eps: float) -> float:
        near = special.log_ndtr(mu / 2 - eps / mu)
        far = eps + special.log_ndtr(-mu / 2 - eps / mu)
        return float(near + math.log(-math.expm1(far - near)) - math.log(delta))

    if math.erf(mu / math.sqrt(8)) <= delta:  # at ε = 0
        return 0.0
    most = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(optimize.brentq(excess, 0, most))


def coefficients(bands: int) -> NDArray[np.float64]:
    """Returns c_0 … c_{b-1}, the first coefficients of (1 - x)^(-1/2).

    >>> coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


def sensitivity(bands: int, clients: int, clients_per_round: float, rounds: int) -> float:
    """Returns the sensitivity of all rounds to one client whose updates have norm 1.

    The worst client takes part in the first round and then as often as possible. Its visits share
    no band; the bands of the last visits may extend beyond the last round.

    >>> sensitivity(2, clients=20, clients_per_round=5, rounds=5) ** 2  # 1 + 1/4, and then 1
    2.25
    """
    check_bands(bands, clients, clients_per_round)
    square = np.square(coefficients(bands))
    left = np.arange(rounds, 0, -epoch_rounds(clients, clients_per_round))
    return float(np.sqrt(sum(square[:n].sum() for n in left)))


def check_bands(bands: int, clients: int, clients_per_round: float) -> None:
    """Raises ValueError for more bands than rounds between two visits of a client."""
    most = epoch_rounds(clients, clients_per_round)
    if not 1 <= bands <= most:
        raise ValueError(
            f"bands must be in 1..{most}, the rounds between two visits of one of {clients} "
            f"clients with {clients_per_round} per round, got {bands}"
        )


def _check(
    noise_multiplier: float, clients: int, clients_per_round: float, rounds: int, delta: float
) -> None:
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
    if not 0 < clients_per_round <= clients:
        raise ValueError(f"clients_per_round must be in 1..{clients}, got {clients_per_round}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 < delta < 1 / max(clients, 2):
        raise ValueError(f"delta must be above 0 and below 1/N = {1 / clients:.3g}, got {delta}")


def accountants() -> tuple[Any, Any, Any]:
    """Returns dp-accounting and its modules of privacy loss distributions and Rényi divergences."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise ImportError("epsilon needs dp-accounting: pip install dp-accounting") from error
    return dp_accounting, pld, rdp
