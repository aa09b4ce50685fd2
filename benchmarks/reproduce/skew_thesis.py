"""Figures 3.1 to 3.3 and Tables 4.3, 5.1, 5.2 and 5.3 of Cornelis' thesis."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.cbook import boxplot_stats
from numpy.typing import ArrayLike, NDArray

from benchmarks.reproduce.skew_radfed import Table, deal, spread
from fedjax_sim.partition import client_emds, emd, expected_emd, ll_settings

PER_CLASS = 5_000  # as in CIFAR-10; the thesis does not say
M = K = 10
ALPHAS = (0.1, 0.5, 1.0, 5.0, 10.0)
CLIENTS = (2, 5, 10, 15, 16, 20, 50, 100)
BOXED = (10, 20, 50, 100)  # clients of the box plots
CLASSES = (2, 5, 10, 20, 50, 100)
MANY = 1000  # clients or classes that stand for infinitely many

TARGET, FL_CLIENTS = 1.4, 20  # section 4.4
FRACTIONS = {1: 0.78, 2: 0.86, 3: 1.00}  # Table 4.3: f by t
AUGMENTED = (0.0, 0.4, 0.8)
RATIOS = {1: (0.13, 0.39, 0.64), 2: (0.24, 0.46, 0.68), 3: (0.30, 0.50, 0.70)}  # Table 5.1
# EMD -> augmented EMD -> what Tables 5.2 and 5.3 print
AVERAGES = {
    0.4: {0.0: (0.78, "0.6 ± 0.1")},
    0.8: {0.0: (0.45, "0.5 ± 0.1"), 0.4: (0.66, "0.7 ± 0.1")},
    1.2: {0.0: (0.29, "0.2 ± 0.1"), 0.4: (0.51, "0.5 ± 0.1"), 0.8: (0.72, "0.7 ± 0.1")},
    1.4: {0.0: (0.22, "0.2 ± 0.1"), 0.4: (0.45, "0.4 ± 0.1"), 0.8: (0.67, "0.6 ± 0.0")},
}
MISPRINT = "expected with s = f - t(1 - f)/M"

Draws = dict[tuple[int, int, float], list[Table]]
Record = dict[str, Any]


def balanced(classes: int) -> NDArray[np.int64]:
    """Labels with the same number of samples of each class."""
    return np.arange(classes * PER_CLASS) % classes


def dirichlet_draws(seeds: int) -> Draws:
    """Tables of Dir_K(α) on balanced labels, by (M, K, α)."""
    settings = {(M, k) for k in CLIENTS} | {(m, K) for m in CLASSES}
    return {
        (m, k, alpha): deal(balanced(m), f"dirichlet({alpha:g})", k, seeds)
        for m, k in sorted(settings)
        for alpha in ALPHAS
    }


def formula(alpha: float, classes: int, clients: int) -> float:
    """The mean EMD of Dir_K(α)."""
    found = expected_emd(f"dirichlet({alpha:g})", classes, clients)
    assert found is not None
    return found


def sizes_and_emds(tables: Sequence[Table]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Size (1 is an even part) and EMD of every client of every table."""
    sizes = [t.sum(axis=1) * len(t) / t.sum() for t in tables]
    return np.concatenate(sizes), np.concatenate([client_emds(t) for t in tables])


def printed(draws: Draws) -> list[Record]:
    """What the thesis prints of the EMD of Dir_K(α)."""
    rows: list[Record] = []
    for clients, alpha, published in ((10, 0.5, "0.86 ± 0.059"), (16, 0.1, "1.4")):
        emds = np.array([emd(t) for t in draws[M, clients, alpha]])
        rows.append(
            {
                "EMD": f"M = 10, K = {clients}, α = {alpha}",
                "thesis": published,
                "formula": f"{formula(alpha, M, clients):.3f}",
                f"{emds.size} draws": spread(emds, ".3f"),
            }
        )
    return rows


def stabilised() -> dict[str, float]:
    """The EMD where the thesis sees it stabilise, as a part of its limit, at α = 0.5."""
    return {
        "M = 20": formula(0.5, 20, K) / formula(0.5, MANY, K),
        "K = 15": formula(0.5, M, 15) / formula(0.5, M, MANY),
    }


def clients_of_dirichlet(draws: Draws) -> list[Record]:
    """What Figures 3.2 and 3.3 show, in numbers; all draws of a setting together."""
    rows: list[Record] = []
    for alpha in ALPHAS:
        for clients in (BOXED[0], BOXED[-1]):
            sizes, emds = sizes_and_emds(draws[M, clients, alpha])
            (box,) = boxplot_stats(emds)
            rows.append(
                {
                    "α": alpha,
                    "K": clients,
                    "EMD": float(np.mean([emd(t) for t in draws[M, clients, alpha]])),
                    "formula": formula(alpha, M, clients),
                    "sizes: std": float(sizes.std()),
                    "largest": float(sizes.max()),
                    "EMD_k: mean": float(emds.mean()),
                    "lower whisker": float(box["whislo"]),
                    "upper whisker": float(box["whishi"]),
                    "lowest": float(emds.min()),
                    "highest": float(emds.max()),
                    "r(size, EMD_k)": float(np.corrcoef(sizes, emds)[0, 1]),
                }
            )
    return rows


def limit_label(t: int, f: float, seeds: int) -> list[Table]:
    """Tables of ll(t, f); as in the thesis a client has a sample of every class where f = 1."""
    least = ", 1" if f == 1 else ""
    return deal(balanced(M), f"ll({t}, {f}{least})", FL_CLIENTS, seeds)


def table_4_3(seeds: int) -> list[Record]:
    """Settings of ll(t, f) with EMD 1.4, and the EMD of partitions made by them."""
    return [
        {
            "t": t,
            "thesis: f": FRACTIONS[t],
            "EMD of that f": 2 * FRACTIONS[t] * (1 - t / M),
            "f": f,
            "measured": float(np.mean([emd(table) for table in limit_label(t, f, seeds)])),
        }
        for t, f in ll_settings(TARGET, M, FL_CLIENTS)
    ]


def unaltered(counts: ArrayLike, target: float) -> float:
    """Share of real samples once a client's rare classes are raised to an EMD (FedAug).

        L = (2ks - EMD s M) / (2kM + EMD k M - 2k²),  s = Σ_{i <= M-k} n_i,  n_1 >= … >= n_M,

    with the k for which L lies between n_{M-k+1} and n_{M-k}; every class below L is raised to L.

    Args:
        counts: samples of each class, [M], or parts of them.
        target: EMD*, below the client's own.

    References:
        Cornelis, eq. 5.4 and 5.9, Algorithm 4 (which prints the order of the classes reversed).
    """
    n = np.sort(np.asarray(counts, float))[::-1]
    m = n.size
    for k in range(m - 1, 0, -1):
        s = n[: m - k].sum()
        level = s * (2 * k - target * m) / (k * (2 * m + target * m - 2 * k))
        if level >= n[m - k]:
            break
    return float(n.sum() / np.maximum(n, level).sum())


def expected_share(t: int, f: float, target: float) -> float:
    """Share of real samples of every client of ll(t, f) that is augmented to an EMD."""
    rest = (1 - f) / M
    return unaltered([f / t + rest] * t + [rest] * (M - t), target)


def table_5_1(seeds: int) -> list[Record]:
    """Shares of real samples: expected, and at partitions by the settings of Table 4.3.

    The last column has s = f - t(1 - f)/M in eq. 5.4, as the thesis' example prints it; a client's
    share of the classes that it owns is f + t(1 - f)/M.
    """
    rows: list[Record] = []
    for t, f in ll_settings(TARGET, M, FL_CLIENTS):
        rest, k = (1 - f) / M, M - t
        tables = limit_label(t, f, seeds)
        for target, published in zip(AUGMENTED, RATIOS[t], strict=True):
            level = (f - t * rest) * (2 * k - target * M) / (k * (2 * M + target * M - 2 * k))
            shares = [unaltered(client, target) for table in tables for client in table]
            rows.append(
                {
                    "t": t,
                    "f": f,
                    "augmented EMD": target,
                    "thesis": published,
                    "expected": expected_share(t, f, target),
                    "measured": float(np.mean(shares)),
                    MISPRINT: 1 / (1 + k * (level - rest)),
                }
            )
    return rows


def tables_5_2_and_5_3() -> list[Record]:
    """Shares of real samples by the EMD before and after: mean and spread over all ll(t, f)."""
    rows: list[Record] = []
    for before, published in AVERAGES.items():
        settings = ll_settings(before, M, FL_CLIENTS)
        for target, (average, measured) in published.items():
            shares = np.array([expected_share(t, f, target) for t, f in settings])
            rows.append(
                {
                    "EMD": before,
                    "augmented EMD": target,
                    "thesis, Table 5.2": average,
                    "thesis, Table 5.3": measured,
                    "settings": len(settings),
                    "expected": spread(shares, ".2f"),
                }
            )
    return rows
