"""The EMD that a sampler's settings give, and the settings that give an EMD.

All formulas are for balanced labels, p(y) = 1/M, and count no sampling noise: with few samples per
client any partition looks more skewed than its sampler.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

CELLS = 2**14
ALPHAS = (1e-6, 1e6)


def expected_none(classes: int, clients: int, **_: Any) -> float:
    """EMD of samplers that do not look at the labels: 0."""
    return 0.0


def expected_target(classes: int, clients: int, *, emd: float, **_: Any) -> float:
    """EMD of samplers that are given one: up to 2 - 2/M."""
    _check("emd", emd, 0, 2 - 2 / classes + 1e-9, classes)
    return emd


def expected_ll(
    classes: int,
    clients: int,
    *,
    labels_per_client: int,
    fraction: float = 1.0,
    min_per_class: int = 0,
) -> float | None:
    """EMD of ll(t, f), :math:`2f - 2tf/M`; None with min_per_class, as it then depends on the n_y.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.6b.
    """
    _check("labels_per_client", labels_per_client, 1, classes, classes)
    _check("fraction", fraction, 0, 1, classes)
    return None if min_per_class else 2 * fraction * (1 - labels_per_client / classes)


def expected_q(classes: int, clients: int, *, q: float) -> float:
    r"""EMD of the q-sampler, :math:`2 \lvert q - 1/M \rvert`.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.8.
    """
    return expected_ll_q(classes, clients, labels_per_client=1, q=q)


def expected_ll_q(classes: int, clients: int, *, labels_per_client: int, q: float) -> float:
    r"""EMD of ll_q(t, q), :math:`2 \lvert q - t/M \rvert`.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.13.
    """
    _check("labels_per_client", labels_per_client, 1, classes - 1, classes)
    _check("q", q, 0, 1, classes)
    return 2 * abs(q - labels_per_client / classes)


def expected_dirichlet(
    classes: int, clients: int, *, alpha: float, min_size: int = 1, balanced: bool = False
) -> float | None:
    r"""Mean EMD of :math:`p_y \sim Dir_K(\alpha)`; None with options that change the law.

    Client k holds :math:`S_k = \sum_y p_{y,k}` parts of the data, so that its share of the samples
    is :math:`S_k/M` and :math:`p_k(y) = p_{y,k}/S_k`, and

    .. math:: E[EMD] = \frac1M \sum_k \sum_y E \lvert p_{y,k} - S_k/M \rvert
              = K\, E \lvert X_1 - (X_1 + \dots + X_M)/M \rvert

    with independent :math:`X_i \sim Beta(\alpha, (K - 1)\alpha)`, a share's marginal law. The law
    of the sum of M - 1 of them comes from an FFT over 16,384 cells of a share (fewer beyond 128
    classes). The error is below 0.001 for up to 100 clients and 0.003 for 1000. An α beyond 1e-6 …
    1e6 counts as the nearer end.
    """
    if min_size > 1 or balanced:
        return None
    if min(classes, clients) == 1:
        return 0.0
    from scipy import fft, special  # a fifth of a second, which only this is worth

    a = float(np.clip(alpha, *ALPHAS))
    b, others = (clients - 1) * a, classes - 1
    top = special.betaincinv(a, b, 1 - 1e-12)  # no cells are spent on parts without mass
    count = min(CELLS, 128 * CELLS // classes)  # the sum has at most 128·CELLS
    cells = np.diff(special.betainc(a, b, np.linspace(0, top, count + 1)))
    length = others * (count - 1) + 1
    size = fft.next_fast_len(length, real=True)
    total = fft.irfft(fft.rfft(cells, size) ** others, size)[:length]
    # E|others·X - Y| over all pairs of cells by running sums: |x - y| = (x - y)(2[y <= x] - 1).
    below, moment = np.cumsum(total), np.cumsum(total * np.arange(length))
    x = others * np.arange(count)
    gaps = x * (2 * below[x] - below[-1]) + moment[-1] - 2 * moment[x]
    return float(clients / classes * top / count * (cells @ gaps))


def ll_settings(emd: float, classes: int, clients: int | None = None) -> list[tuple[int, float]]:
    r"""All settings (t, f) of the limit-label sampler with a given EMD on balanced labels.

    They solve :math:`EMD = 2f - 2tf/M`, which gives :math:`f = EMD \cdot M / (2M - 2t)`, for every
    t < M with 0 < f ≤ 1.

    Args:
        emd: the target, in 0 < EMD ≤ 2 - 2/M.
        classes: M, at least 2.
        clients: K; if given, only t with Kt divisible by M.

    Returns:
        The settings, t ascending; at least one.

    Raises:
        ValueError: if no setting reaches that EMD; the message says what can be reached.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.3 and table 4.3 (which prints 0.86 for
    7/8).

    Example:
        >>> [(t, round(f, 4)) for t, f in ll_settings(1.4, 10)]
        [(1, 0.7778), (2, 0.875), (3, 1.0)]
    """
    labels_per_client = _labels_per_client("ll(t, f)", emd, classes, clients)
    return _up_to_one((t, emd * classes / (2 * (classes - t))) for t in labels_per_client)


def ll_q_settings(emd: float, classes: int, clients: int | None = None) -> list[tuple[int, float]]:
    """All settings (t, q) of the limit-label-q sampler with a given EMD on balanced labels.

    They solve :math:`EMD = 2q - 2t/M`, which gives :math:`q = EMD/2 + t/M`, for every t < M with q
    ≤ 1.

    Args:
        emd: the target, in 0 < EMD ≤ 2 - 2/M.
        classes: M, at least 2.
        clients: K; if given, only t with Kt divisible by M.

    Returns:
        The settings, t ascending; at least one.

    Raises:
        ValueError: if no setting reaches that EMD; the message says what can be reached.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.3.

    Example:
        >>> [(t, round(q, 4)) for t, q in ll_q_settings(1.4, 10)]
        [(1, 0.8), (2, 0.9), (3, 1.0)]
    """
    labels_per_client = _labels_per_client("ll_q(t, q)", emd, classes, clients)
    return _up_to_one((t, emd / 2 + t / classes) for t in labels_per_client)


def q_setting(emd: float, classes: int) -> float:
    """The q of the q-sampler with a given EMD on balanced labels, :math:`q = EMD/2 + 1/M`.

    Args:
        emd: the target, in 0 < EMD ≤ 2 - 2/M.
        classes: M, at least 2.

    Returns:
        q, in 1/M … 1.

    Raises:
        ValueError: if no q reaches that EMD; the message says what can be reached.

    Example:
        >>> round(q_setting(1.4, 10), 4)
        0.8
    """
    _labels_per_client("q(q)", emd, classes, None)
    return min(emd / 2 + 1 / classes, 1.0)


def dirichlet_alpha(emd: float, classes: int, clients: int) -> float:
    r"""The α of :func:`fedjax_sim.partition.dirichlet` with a given mean EMD on balanced labels.

    It is the root of :math:`E[EMD](\alpha) - EMD`, which falls in α, to 1e-4 of α; the mean EMD at
    it is off by that of the formula (0.001 for up to 100 clients). Single draws spread around the
    mean: by 0.06 for M = K = 10 and α = 0.5.

    Args:
        emd: the target, between those of α = 1e6 and 1e-6 (nearly 0 to 2(1 - 1/M)(1 - 1/K)).
        classes: M.
        clients: K.

    Returns:
        α.

    Raises:
        ValueError: if no α reaches that EMD; the message says what can be reached.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.3, which takes the mean of many draws
    for E[EMD].

    Example:
        >>> round(dirichlet_alpha(0.86, 10, 10), 2)
        0.5
    """

    def excess(log_alpha: float) -> float:
        return (expected_dirichlet(classes, clients, alpha=math.exp(log_alpha)) or 0.0) - emd

    low, high = map(math.log, ALPHAS)
    most, least = excess(low) + emd, excess(high) + emd
    if not least <= emd <= most:
        raise ValueError(
            f"emd must be in {least:.2g} to {most:.4g} for dirichlet(alpha) with {classes} classes "
            f"and {clients} clients, got {emd}"
        )
    from scipy.optimize import brentq  # a fifth of a second, which only this is worth

    return math.exp(brentq(excess, low, high, xtol=1e-4))


def _check(name: str, value: float, least: float, most: float, classes: int) -> None:
    """Checks that a sampler with this setting exists."""
    if not least <= value <= most:
        raise ValueError(
            f"{name} must be in {least:g} to {most:g} with {classes} classes, got {value}"
        )


def _up_to_one(settings: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those with a share of 1 at most; the margin takes 1.0000000000000002 for the 1 that it is."""
    return [(t, min(share, 1.0)) for t, share in settings if share <= 1 + 1e-9]


def _labels_per_client(form: str, emd: float, classes: int, clients: int | None) -> range:
    """The t < M with Kt divisible by M, if one of them reaches the EMD: it is 2 - 2t/M at most."""
    if classes < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    step = 1 if clients is None else classes // math.gcd(clients, classes)
    if step == classes:
        raise ValueError(
            f"clients must share a factor with {classes}, the number of classes, got {clients}: "
            f"no {form} has skew; use a multiple of {classes}"
        )
    largest = 2 - 2 * step / classes
    if not 0 < emd <= largest + 1e-9:
        limit = "" if clients is None else f" and {clients} clients"
        raise ValueError(
            f"emd must be above 0 (that is iid) and at most {largest:g} for {form} with {classes} "
            f"classes{limit}, got {emd}"
        )
    return range(step, classes, step)
