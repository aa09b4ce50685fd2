"""Pictures of the skew tables: ours in blue, the papers' numbers in red."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.patches import Patch

from benchmarks.reproduce import skew_radfed, skew_thesis
from benchmarks.reproduce.common import picture, plain
from benchmarks.reproduce.skew_thesis import (
    ALPHAS,
    BOXED,
    CLASSES,
    CLIENTS,
    FL_CLIENTS,
    MISPRINT,
    K,
    M,
)
from fedjax_sim.partition import emd

PAPER = {"color": "tab:red", "marker": "D", "linestyle": "none", "markersize": 6, "zorder": 5}
RING = PAPER | {"fillstyle": "none", "markeredgewidth": 1.5}
OURS = {"color": "tab:blue", "marker": "o", "linestyle": "none", "markersize": 5, "alpha": 0.55}


def draw_table_1(rows: Sequence[skew_radfed.Row], path: Path) -> None:
    """A line for each row: sizes relative to their mean, and C-scores, seed by seed."""
    figure = picture(11, 0.42 * len(rows) + 1.3)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, place, title in (
        (axes[0], 3, "std of the sizes / mean"),
        (axes[1], 1, "largest size / mean"),
        (axes[2], 4, "C-score"),
    ):
        for y, row in enumerate(rows):
            paper = skew_radfed.PAPER[row.name]
            means = row.values[:, 2] if place < 4 else 1.0
            values = row.values[:, place] / means
            axis.plot(values, np.full(len(values), y), label="ours, by seed", **OURS)
            axis.plot(paper[place] / (paper[2] if place < 4 else 1), y, label="RADFed", **PAPER)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(left=0)
    axes[0].set_yticks(range(len(rows)), [f"{row.name}\n{row.data}" for row in rows])
    axes[0].invert_yaxis()
    handles = axes[0].get_lines()[:2]
    figure.legend(handles, ["ours, one seed each", "RADFed, Table I"], loc="outside lower center",
                  ncols=2, frameon=False, fontsize=9)  # fmt: skip
    plain(axes)
    axes[0].tick_params(axis="y", labelsize=7)
    figure.savefig(path)


def draw_figure_3_1(draws: skew_thesis.Draws, path: Path) -> None:
    """EMD against α: lines by the formula, points are means of the draws ± std."""
    figure = picture(11, 4.4)
    axes = figure.subplots(1, 2, sharey=True)
    grid = np.geomspace(0.03, 30, 40)
    by_clients = [(M, k) for k in CLIENTS if k != 16]
    by_classes = [(m, K) for m in CLASSES]
    for axis, settings, name, fixed in (
        (axes[0], by_clients, "K", "M = 10 classes"),
        (axes[1], by_classes, "M", "K = 10 clients"),
    ):
        colours = colormaps["viridis"](np.linspace(0, 0.92, len(settings)))
        for (m, k), colour in zip(settings, colours, strict=True):
            label = f"{name} = {k if name == 'K' else m}"
            axis.plot(grid, [skew_thesis.formula(a, m, k) for a in grid], color=colour, label=label)
            emds = [[emd(t) for t in draws[m, k, a]] for a in ALPHAS]
            axis.errorbar(ALPHAS, np.mean(emds, 1), np.std(emds, 1), color=colour, fmt="o",
                          markersize=4, capsize=2)  # fmt: skip
        axis.errorbar(0.5, 0.86, 0.059, color="tab:red", marker="D", capsize=4, zorder=5,
                      label="thesis: M = K = 10", linestyle="none")  # fmt: skip
        axis.set_xscale("log")
        axis.set_xticks(ALPHAS, [f"{a:g}" for a in ALPHAS])
        axis.minorticks_off()
        axis.set_xlabel("α")
        axis.set_title(fixed, fontsize=10)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("EMD of Dir_K(α)")
    axes[0].set_ylim(0, 2)
    plain(axes)
    figure.savefig(path)


def draw_boxes(draws: skew_thesis.Draws, path: Path) -> None:
    """Figures 3.2 and 3.3: sizes and EMDs of the clients for each α and K."""
    figure = picture(11, 7)
    axes = figure.subplots(2, 1, sharex=True)
    colours = colormaps["viridis"](np.linspace(0.25, 0.92, len(BOXED)))
    for axis, part in zip(axes, (0, 1), strict=True):
        for j, (clients, colour) in enumerate(zip(BOXED, colours, strict=True)):
            values = [skew_thesis.sizes_and_emds(draws[M, clients, a])[part] for a in ALPHAS]
            axis.boxplot(
                values, positions=np.arange(len(ALPHAS)) + 0.2 * (j - 1.5), widths=0.16,
                patch_artist=True, manage_ticks=False, boxprops={"facecolor": colour},
                medianprops={"color": "black"},
                flierprops={"marker": ".", "markersize": 2, "markeredgecolor": colour},
            )  # fmt: skip
    means = [np.mean([emd(t) for k in BOXED for t in draws[M, k, a]]) for a in ALPHAS]
    axes[1].set_xticks(
        range(len(ALPHAS)),
        [f"α = {a:g}\nmean EMD {mean:.2f}" for a, mean in zip(ALPHAS, means, strict=True)],
    )
    axes[0].set_ylabel("samples / even part (Fig. 3.2)")
    axes[1].set_ylabel("client EMD (Fig. 3.3)")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(0, 2)
    handles = [Patch(facecolor=colour, edgecolor="black") for colour in colours]
    axes[0].legend(handles, [f"K = {k}" for k in BOXED], frameon=False, fontsize=9)
    plain(axes)
    figure.savefig(path)


def draw_limit_label(
    settings: Sequence[dict[str, Any]], shares: Sequence[dict[str, Any]], path: Path
) -> None:
    """Tables 4.3 and 5.1."""
    figure = picture(11, 4)
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.4])
    for x, row in enumerate(settings):
        left.plot(x, row["measured"], **OURS)
        left.plot(x, row["EMD of that f"], **RING)
    names = [f"ll({r['t']}, {r['f']:.4g})\nthesis: {r['thesis: f']:.2f}" for r in settings]
    left.set_xticks(range(len(settings)), names)
    left.set_ylim(1.3, 1.5)
    left.set_xlim(-0.5, len(settings) - 0.5)
    left.set_ylabel("EMD")
    left.set_title("Table 4.3: settings for EMD 1.4", fontsize=10)
    for x, row in enumerate(shares):
        right.plot(x, row["measured"], **OURS)
        right.plot(x, row["expected"], color="black", marker="_", markersize=16, linestyle="none")
        right.plot(x, row[MISPRINT], color="black", marker="x", markersize=6, linestyle="none")
        right.plot(x, row["thesis"], **RING)
    names = [f"t = {r['t']}\n→ {r['augmented EMD']:g}" for r in shares]
    right.set_xticks(range(len(shares)), names)
    right.set_ylim(0, 0.8)
    right.set_ylabel("real samples / all")
    right.set_title("Table 5.1: EMD 1.4 augmented to …", fontsize=10)
    labels = [
        f"ours, {FL_CLIENTS} clients",
        "expected",
        MISPRINT,
        "thesis",
    ]
    right.legend(right.get_lines()[:4], labels, frameon=False, fontsize=9)
    plain([left, right])
    figure.savefig(path)
