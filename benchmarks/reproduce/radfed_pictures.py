"""Pictures of Table III and Figures 6 and 7 of RADFed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reproduce.common import draw_curve, picture, plain

COLOURS = {"FedAvg": "tab:orange", "FedAvg, equal weights": "tab:green", "RADFed": "tab:blue"}


def draw_table_3(
    scores: Mapping[str, Mapping[str, Mapping[str, Any]]],
    paper: Mapping[str, Sequence[float]],
    methods: Sequence[str],
    path: Path,
) -> None:
    """A panel for each data set: differences to FedAvg, the paper's in red, ours in blue."""
    figure = picture(11, 2.3 * -(-len(scores) // 2) + 0.8)
    axes = [*figure.subplots(-(-len(scores) // 2), 2, squeeze=False).flat]
    at = np.arange(len(methods) - 1)
    for axis, (name, found) in zip(axes, scores.items(), strict=False):
        base = found["FedAvg"]["best"]
        ours = [100 * (found[m]["best"] / base - 1) for m in methods[1:]]
        mean = [100 * (np.nanmean(found[m]["best"]) / np.nanmean(base) - 1) for m in methods[1:]]
        axis.axhline(0, color="black", linewidth=0.8)
        for position, runs in zip(at, ours, strict=True):
            axis.plot(np.full(len(runs), position - 0.12), runs, ".", color="tab:blue", alpha=0.4)
        axis.plot(at - 0.12, mean, "o", color="tab:blue", label="ours: runs, and their mean")
        axis.plot(at + 0.12, paper[name][1:], "D", color="tab:red", label="paper")
        axis.set_xticks(at, methods[1:])
        axis.set_title(
            f"{name}: FedAvg {np.nanmean(base):.1f}, paper {paper[name][0]:.1f}", fontsize=10
        )
        axis.set_ylabel("% of FedAvg")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    plain(axes[: len(scores)])
    for axis in axes[len(scores) :]:
        axis.set_axis_off()
    figure.savefig(path)


def draw_divergences(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """DC and DL by local round; grey lines are RADFed's aggregations."""
    figure = picture(11, 3.1 * len(found) + 0.4)
    rows = figure.subplots(len(found), 2, squeeze=False)
    for axes, (name, content) in zip(rows, found.items(), strict=True):
        for axis, key in zip(axes, ("DC", "DL"), strict=True):
            rounds = 1 + np.arange(len(content["curves"]["FedAvg"][key]))
            for aggregation in range(content["inner"], len(rounds) + 1, content["inner"]):
                axis.axvline(aggregation, color="0.85", linewidth=0.8, zorder=0)
            for method, curves in content["curves"].items():
                draw_curve(
                    axis, rounds, curves[key], color=COLOURS[method], label=method, linewidth=1.2
                )
            axis.set_ylim(bottom=0)
            axis.set_xlabel("local rounds")
            axis.set_title(f"{key}, {name}, S = {content['inner']}", fontsize=10)
        plain(axes)
    rows[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(path)
