"""Statistical tests of scores, as functions of arrays.

Sources: Demšar 2006 <https://jmlr.org/papers/v7/demsar06a.html>, for comparisons over several
problems; Holm 1979 <https://www.jstor.org/stable/4615733>; and :func:`paired`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.tasks.sums import Floats

LEVEL = 0.05
"""The level of significance, α."""

PLACES = 12
"""Significant digits of scores; rounding errors must not separate ties."""

OF_FOLDS = "corrected resampled t-test (Nadeau and Bengio), as folds share training clients"
OF_SEEDS = "Wilcoxon's signed-rank test"


def spread(runs: Iterable[int]) -> str:
    """Describes a mean ± a spread, given the numbers of runs R of the methods.

    >>> spread([3, 3])
    'Mean ± population standard deviation (divisor R) over R = 3 runs.'
    """
    counts = sorted({*runs})
    extent = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    words = "run" if extent == "1" else "runs"
    return f"Mean ± population standard deviation (divisor R) over R = {extent} {words}."


class Difference(NamedTuple):
    """Scores minus other scores, pair by pair.

    Attributes:
        values: ``f64[n]``, the difference of each pair.
        equal: pairs without a difference.
        p: two-sided, see :func:`paired`; None if all pairs are equal.
        least: the smallest p that this number of pairs can reach; None if there is no limit.
    """

    values: Floats
    equal: int
    p: float | None
    least: float | None


def paired(ours: Floats, theirs: Floats, folds: int | None = None) -> Difference:
    r"""Compares scores with other scores of the same runs, and tests the difference.

    The test is the two-sided Wilcoxon signed-rank test of ``scipy.stats``, without equal pairs.
    With n pairs p is at least 2^(1 - n): 0.0625 for five pairs.

    Folds share training clients, so their differences are not independent. All folds of all seeds
    are tested together by the corrected resampled t-test, with n - 1 degrees of freedom and n_test
    / n_train = 1 / (F - 2):

    .. math:: t = \frac{\bar d}{\sqrt{\bigl(\frac1n + \frac{n_{test}}{n_{train}}\bigr) s_d^2}}

    Args:
        ours: ``f64[n]``, the score of each run; NaN if unknown.
        theirs: ``f64[n]``, the scores of the baseline.
        folds: F; None if the runs are not folds.

    Source: Nadeau, Bengio 2003 <https://doi.org/10.1023/A:1024068626366>, section 3; Bouckaert,
    Frank 2004 <https://doi.org/10.1007/978-3-540-24775-3_3>, for repeated folds.

    >>> paired(np.arange(1.0, 7.0), np.zeros(6)).p
    0.03125
    >>> round(paired(np.arange(1.0, 7.0), np.zeros(6), folds=3).p, 3)
    0.144
    """
    from scipy import stats

    pairs = np.stack([ours, theirs], axis=1)
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    values = pairs[:, 0] - pairs[:, 1]
    ranked = _without_noise(values, pairs)
    ranked = ranked[ranked != 0]
    n = len(ranked)
    equal = len(values) - n
    if folds is not None:
        p = _resampled(values, 1 / max(folds - 2, 1)) if n else None
        return Difference(values, equal, p, None)
    if n < 2:
        return Difference(values, equal, 1.0 if n else None, 1.0)
    # Exact with ties as well, as scipy's default is only in newer versions.
    method: Any = stats.PermutationMethod(n_resamples=2**13) if n <= 13 else "auto"
    p = float(stats.wilcoxon(ranked, method=method).pvalue)
    return Difference(values, equal, p, 2.0 ** (1 - n))


def _without_noise(values: Floats, scale: Floats) -> Floats:
    return np.round(values / max(float(np.abs(scale).max(initial=0)), 1e-300), PLACES)


def _resampled(values: Floats, share: float) -> float:
    """Returns p of the corrected resampled t-test; ``share`` is n_test / n_train."""
    from scipy import stats

    n = len(values)
    error = math.sqrt((1 / n + share) * values.var(ddof=1)) if n > 1 else math.inf
    if error == 0:
        return 0.0
    return float(2 * stats.t.sf(abs(values.mean()) / error, max(n - 1, 1)))


def holm(p: Floats) -> Floats:
    """Corrects p-values ``f64[m]`` for their number m by Holm's step-down procedure.

    With m sorted values the i-th becomes the largest of min(1, (m - j + 1) p_j) with j up to i.

    >>> holm(np.array([0.5, 0.0625, 0.25])).tolist()
    [0.5, 0.1875, 0.5]
    """
    order = np.argsort(p)
    factors = np.arange(len(p), 0, -1)
    found = np.empty(len(p))
    found[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1)
    return found


def ranks(scores: Floats, *, lowest: bool = False) -> Floats:
    """Ranks k methods in each of N problems; ties have their mean rank.

    Args:
        scores: ``f64[N, k]``; NaN is the worst.
        lowest: whether low scores are good.

    Returns:
        Ranks from 1, the best, to k, ``f64[N, k]``.

    >>> ranks(np.array([[0.9, 0.5, 0.9], [0.1, np.nan, 0.3]])).tolist()
    [[1.5, 3.0, 1.5], [2.0, 3.0, 1.0]]
    """
    from scipy import stats

    signed = scores if lowest else -scores
    worst = np.where(np.isnan(signed), np.inf, _without_noise(signed, signed[np.isfinite(signed)]))
    found: Floats = stats.rankdata(worst, axis=1)
    return found


def friedman(ranked: Floats) -> Any:
    """Tests whether k methods have different :func:`ranks` ``f64[N, k]`` in N problems.

    Returns:
        The result of ``scipy.stats.friedmanchisquare``, χ² and its p-value; None with fewer than 3
        methods or 2 problems, or if all methods tie in all problems.
    """
    from scipy import stats

    if ranked.shape[0] < 2 or ranked.shape[1] < 3 or not np.ptp(ranked, axis=1).any():
        return None
    return stats.friedmanchisquare(*ranked.T)


def critical_difference(methods: int, problems: int) -> float:
    r"""Returns Nemenyi's critical difference of average ranks at the level α.

    .. math:: CD = \frac{q_{\alpha, k}}{\sqrt 2} \sqrt{\frac{k (k + 1)}{6 N}}

    q is the quantile of the studentized range of k means with infinitely many degrees of freedom.

    Args:
        methods: k.
        problems: N.

    >>> round(critical_difference(5, 30), 3)  # 2.728 sqrt(5 · 6 / (6 · 30))
    1.114
    """
    from scipy import stats

    q = stats.studentized_range.isf(LEVEL, methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(methods * (methods + 1) / (6 * problems)))


def cliques(averages: Floats, distance: float) -> list[tuple[int, int]]:
    """Returns the largest groups of at least two methods with average ranks within ``distance``.

    The ranks ``f64[k]`` ascend; a group is given by its first and its last index.

    >>> cliques(np.array([1.0, 1.5, 2.0, 4.0]), 0.6)
    [(0, 1), (1, 2)]
    """
    lasts = [int(np.flatnonzero(averages - first <= distance)[-1]) for first in averages]
    groups = [(i, last) for i, last in enumerate(lasts) if last > i]
    return [g for i, g in enumerate(groups) if i == 0 or g[1] > groups[i - 1][1]]
