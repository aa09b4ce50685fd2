"""Scores against rounds, bytes sent and samples visited, as a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_sim.base import Metric
from fedjax_sim.cli.report import UNITS, byte_unit, bytes_sent, digits, in_unit
from fedjax_sim.partition.pictures import WIDTH, line_style, literal, picture
from fedjax_sim.run import Result
from fedjax_sim.run.bands import draw_band
from fedjax_sim.tasks.sums import Floats, mean_known

LEGEND = 28
"""Characters of a name with which two stand side by side."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line: T evaluations of R runs.

    Attributes:
        name: the name in the legend.
        rounds: rounds done at each evaluation.
        sent: bytes up and down by then, the mean over runs, ``f64[T]``.
        scores: ``f64[T, R]``; the line stops where none is known.
        across: other horizontal axes, ``f64[T]`` by the title of the axis.
        end: text in the legend instead of the last score.
        style: colour and dashes of the line; None: chosen by its index among the curves.
    """

    name: str
    rounds: Sequence[int]
    sent: Floats
    scores: Floats
    across: Mapping[str, Floats] = dataclasses.field(default_factory=dict)
    end: str | None = None
    style: Mapping[str, Any] | None = None


def draw_curves(results: Mapping[str, Result], path: Path, score: str, title: str = "") -> None:
    """Draws a score, of the clients' own models if known, against rounds, bytes and seconds."""
    first = next(iter(results.values()))
    by_client = first.evaluations[-1].test.by_client is not None
    timed = first.evaluations[-1].seconds is not None  # then all are
    curves = []
    for name, result in results.items():
        own = result.evaluations[-1].personal is not None
        part: Literal["test", "personal"] = "personal" if own else "test"
        curves.append(
            Curve(
                f"{name}{', own models' * own}",
                [e.round for e in result.evaluations],
                np.array([bytes_sent(e) for e in result.evaluations]),
                result.series(score, by_client=by_client, part=part),
                {"simulated seconds": result.seconds.mean(axis=1)} if timed else {},
            )
        )
    shown = f"client_{score}" if by_client else score
    draw_series(curves, path, shown, first.task.metrics[score], title)


def draw_series(
    curves: Sequence[Curve], path: Path, score: str, metric: Metric, title: str = ""
) -> None:
    """Draws curves against rounds, bytes and all other common axes; the first is on top.

    A ``score`` that begins with "client_" is the mean over clients.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    scale = 100 if metric.percent else 1
    totals = [curve.sent[-1] for curve in curves if len(curve.sent)]
    size, axis_unit = byte_unit(totals), byte_unit([max(totals, default=0)])
    columns = 2 if max(len(curve.name) for curve in curves) <= LEGEND else 1
    others = [name for name in curves[0].across if all(name in curve.across for curve in curves)]
    panels = 2 + len(others)
    lines = math.ceil(len(curves) / columns)
    with picture(path, WIDTH * max(1, panels / 3), 3.0 + 0.16 * lines, title) as figure:
        axes = figure.subplots(1, panels, sharey=True)
        faint = 0.18 if len(curves) <= 4 else 0.09  # bands that lie on each other hide the lines
        for i, curve in enumerate(curves):
            values = scale * curve.scores
            mean = mean_known(values)
            sent = curve.sent / UNITS[axis_unit]
            end = curve.end
            if end is None:
                last = f"{mean[-1]:.1f} %" if metric.percent else digits(mean[-1])
                end = f"{last}, {in_unit(curve.sent[-1], size)} {size}"
            look = {**(curve.style or line_style(i)), "label": f"{literal(curve.name)}: {end}"}
            across = (curve.rounds, sent, *(curve.across[name] for name in others))
            for axis, x in zip(axes, across, strict=True):
                draw_band(axis, x, values, alpha=faint, zorder=3 - i / 100, **look)
        runs = max(curve.scores.shape[1] for curve in curves)
        plain = score.removeprefix("client_")
        label = f"test {plain}" + " (%)" * metric.percent
        label += ", mean over clients" * (plain != score)
        axes[0].set_ylabel(label + (f",\nmean ± std of {runs} runs" if runs > 1 else ""))
        axes[0].set_xlabel("rounds")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1].set_xlabel(f"{axis_unit} sent, up and down")
        for axis, name in zip(axes[2:], others, strict=True):
            axis.set_xlabel(name)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        for axis in axes:
            axis.grid()
            axis.set_xlim(left=0)
            axis.margins(y=0.03)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=4)
