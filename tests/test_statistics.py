"""Tests of methods over runs and problems: equal to scipy's, and to closed forms."""

from itertools import combinations
from typing import Literal

import numpy as np
import pytest
from conftest import known
from scipy import stats

from fedjax_sim.base import Metric
from fedjax_sim.cli.reporting.statistics import (
    cliques,
    critical_difference,
    friedman,
    holm,
    paired,
    ranks,
)
from fedjax_sim.cli.reporting.tables import Best, Second, mark_best

TABLES = range(6)


def random_table(seed: int) -> np.ndarray:
    """Scores of 3 to 7 methods in 4 to 12 problems, some of which tie."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 1, (rng.integers(4, 13), rng.integers(3, 8))).round(1 + seed % 2)


@pytest.mark.parametrize("seed", TABLES)
def test_friedman_is_that_of_scipy(seed: int) -> None:
    scores = random_table(seed)
    found, wanted = friedman(ranks(scores)), stats.friedmanchisquare(*scores.T)
    assert known(found) == pytest.approx((wanted.statistic, wanted.pvalue))
    np.testing.assert_allclose(ranks(scores), stats.rankdata(-scores, axis=1))
    np.testing.assert_array_equal(ranks(scores), ranks(-scores, lowest=True))


def test_friedman_needs_ranks_that_differ() -> None:
    assert friedman(np.full((4, 3), 2.0)) is None
    assert friedman(np.array([[1.0, 2.0, 3.0]])) is None
    assert friedman(np.array([[1.0, 2.0], [1.0, 2.0]])) is None


def test_rounding_errors_tie() -> None:
    np.testing.assert_array_equal(ranks(np.array([[0.1 + 0.2, 0.3, 0.2]])), [[1.5, 1.5, 3]])


@pytest.mark.parametrize("seed", TABLES)
def test_holm_is_the_closed_test_of_bonferroni(seed: int) -> None:
    """A hypothesis falls if each set of hypotheses with it falls by Bonferroni."""
    p = np.random.default_rng(seed).uniform(0, 0.3, 1 + seed % 7).round(2)
    sets = [s for n in range(1, len(p) + 1) for s in combinations(range(len(p)), n)]
    wanted = [max(min(1, len(s) * min(p[[*s]])) for s in sets if i in s) for i in range(len(p))]
    np.testing.assert_allclose(holm(p), wanted)


def test_the_critical_difference_is_that_of_tables() -> None:
    """Of q / sqrt(2) at 0.05 for 2 to 10 methods."""
    q = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    for k, value in enumerate(q, 2):
        wanted = value * np.sqrt(k * (k + 1) / (6 * 14))
        assert critical_difference(k, 14) == pytest.approx(wanted, rel=5e-4)


@pytest.mark.parametrize("seed", TABLES)
def test_cliques_are_the_largest_groups_that_are_close(seed: int) -> None:
    averages = np.sort(ranks(random_table(seed)).mean(axis=0))
    k, distance = len(averages), 0.7
    close = {(i, j) for i, j in combinations(range(k), 2) if averages[j] - averages[i] <= distance}
    within = {a for a in close for b in close if a != b and b[0] <= a[0] and a[1] <= b[1]}
    assert cliques(averages, distance) == sorted(close - within)


@pytest.mark.parametrize("seed", TABLES)
def test_paired_tests_are_those_of_scipy(seed: int) -> None:
    """Seeds by Wilcoxon; folds by a t-test whose variance is larger by what folds share."""
    ours, theirs = np.random.default_rng(seed).normal(
        np.array([[0.1], [0.0]]), 0.2, (2, 5 * (1 + seed % 3))
    )
    assert known(paired(ours, theirs).p) == pytest.approx(stats.wilcoxon(ours, theirs).pvalue)
    n = len(ours)
    t = stats.ttest_rel(ours, theirs).statistic / np.sqrt(1 + n / 3)  # 5 folds, of which 3 train
    p = paired(ours, theirs, folds=5).p
    assert known(p) == pytest.approx(2 * stats.t.sf(abs(t), n - 1))
    assert known(p) > stats.ttest_rel(ours, theirs).pvalue


@pytest.mark.parametrize("best", ["highest", "lowest"])
def test_the_best_and_the_second_best_are_marked(best: Literal["highest", "lowest"]) -> None:
    """By the texts of their means: the first two are equal in four digits."""
    means = [0.1, 0.1000001, 0.2, float("nan"), 0.3]
    if best == "highest":
        means = [1 - mean for mean in means]
    kinds = [type(cell) for cell in mark_best("abcde", means, Metric(best=best))]
    assert kinds == [Best, Best, Second, str, str]
    assert [type(cell) for cell in mark_best("ab", means[1:3], Metric(best=best))] == [Best, str]
    assert [type(cell) for cell in mark_best("a", means[:1], Metric(best=best))] == [str]
    three = mark_best("abc", means[:3], Metric(best=best))  # the worst is not marked
    assert [type(cell) for cell in three] == [Best, Best, str]
