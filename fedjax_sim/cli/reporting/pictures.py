"""The pictures of a report: curves, the clients' scores, ranks."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.cli.curves import Curve, draw_series
from fedjax_sim.cli.reporting.compare import Group, over_runs, worst_tenth
from fedjax_sim.cli.reporting.read import ACROSS, Trial
from fedjax_sim.cli.reporting.statistics import cliques
from fedjax_sim.partition.pictures import COLOURS, WIDTH, line_style, literal, picture

MOST = 12
"""Methods in one picture: more cannot be told apart."""

BINS = 20
CURVES = "The score by rounds and by what they cost; bands: ± std"

POINTS = 500
"""Evaluations that a curve shows at most, evenly spread."""


KINDS = ("svg", "pdf")
"""The files of a picture that a report draws; its pages show the first."""


class Picture(NamedTuple):
    """A picture of a report: the name of its file in the report's folder, and its description."""

    name: str
    caption: str


Styles = Mapping[str, Mapping[str, Any]]
"""By label, the colour and the dashes of a trial's line in all pictures of a page."""


def styles_of(groups: Iterable[Group]) -> Styles:
    """Returns a colour for each method, and tints with other dashes for its settings.

    If there is a single method, each setting has a colour. Names of methods are keys too, for
    pictures that do not distinguish their settings.
    """
    labels: dict[str, dict[str, None]] = {}
    for group in groups:
        for label, trial in zip(group.labels, group.trials, strict=True):
            labels.setdefault(trial.series, {})[label] = None
    if len(labels) == 1:
        ((series, settings),) = labels.items()
        return {series: line_style(0)} | {label: line_style(i) for i, label in enumerate(settings)}
    methods = {series: line_style(i) for i, series in enumerate(labels)}
    return methods | {
        label: line_style(method, setting, len(settings))
        for method, settings in enumerate(labels.values())
        for setting, label in enumerate(settings)
    }


def by_method(group: Group, styles: Styles) -> Styles:
    """Returns the styles of a group's trials: the methods' colours if no method has two trials."""
    series = [trial.series for trial in group.trials]
    if len({*series}) < len(series):
        return styles
    return {label: styles[of] for label, of in zip(group.labels, series, strict=True)}


def draw_curves(
    group: Group, folder: Path, mark: str, title: str, styles: Styles = MappingProxyType({})
) -> list[Picture]:
    """Draws the curves of a group; ``mark`` ends the names of the files.

    Styles come from :func:`styles_of`; a missing one is chosen by the index.
    """
    drawn = []
    for part, labels, trials in _parts(group):
        lines = [
            dataclasses.replace(_curve(label, trial), style=styles.get(label))
            for label, trial in zip(labels, trials, strict=True)
        ]
        lines = [line for line in lines if len(line.rounds)]
        if lines:
            score, metric, head = trials[0].score, trials[0].metric, _fit(title, 100)
            stem = f"curves{mark}{part}"
            for kind in KINDS:
                draw_series(lines, folder / f"{stem}.{kind}", score, metric, head)
            drawn.append(Picture(f"{stem}.svg", CURVES))
    return drawn


def draw_clients(
    group: Group, folder: Path, mark: str, title: str, styles: Styles = MappingProxyType({})
) -> list[Picture]:
    """Draws the scores of a group's clients; the arguments are as in :func:`draw_curves`."""
    drawn = []
    for part, labels, trials in _parts(group):
        shown = [(label, t) for label, t in zip(labels, trials, strict=True) if worst_tenth(t)]
        if shown:
            stem = f"clients{mark}{part}"
            for kind in KINDS:
                draw_histograms(shown, folder / f"{stem}.{kind}", _fit(title, 100), styles)
            drawn.append(Picture(f"{stem}.svg", "Clients by their score after the last round"))
    return drawn


def _parts(group: Group) -> Iterator[tuple[str, Sequence[str], Sequence[Trial]]]:
    """Splits a group into parts that are readable in one picture."""
    for i in range(0, len(group.trials), MOST):
        part = f"_{i // MOST + 1}" if len(group.trials) > MOST else ""
        yield part, group.labels[i : i + MOST], group.trials[i : i + MOST]


def _curve(label: str, trial: Trial) -> Curve:
    final = over_runs(trial, "final")
    steps = len(trial.rounds)
    # Each point weighs on the page nine times: a line and both edges of a band, in three panels.
    at = np.unique(np.linspace(0, steps - 1, min(steps, POINTS)).round().astype(int))
    sent, across = trial.sent.sum(axis=0), trial.across
    if steps:  # else it diverged in the first round
        sent = sent[at].mean(axis=1)
        across = {ACROSS[key]: found[at].mean(axis=1) for key, found in across.items()}
    return Curve(
        _fit(label, 60),
        trial.rounds[at].tolist(),
        sent,
        trial.scores[at],
        across,
        final.diverged if final is not None and final.diverged else None,
    )


def _fit(text: str, most: int) -> str:
    """Shortens a text in its middle."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 + 3 :]}"


def draw_histograms(
    shown: Sequence[tuple[str, Trial]],
    path: Path,
    title: str,
    styles: Styles = MappingProxyType({}),
) -> None:
    """Draws histograms of the clients' scores of all runs, with a common scale."""
    from matplotlib.ticker import PercentFormatter

    metric = shown[0][1].metric
    scale = 100 if metric.percent else 1
    every = [np.concatenate(trial.by_client) for _, trial in shown]
    values = [scale * scores[~np.isnan(scores)] for scores in every]
    edges = np.histogram_bin_edges(np.concatenate(values), BINS)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    with picture(path, WIDTH, 0.9 + 1.5 * rows, title) as figure:
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axis in axes.flat[len(shown) :]:
            axis.set_visible(False)
        for axis, found, (label, trial) in zip(axes.flat, values, shown, strict=False):
            colour = styles.get(label, {"color": COLOURS[0]})["color"]
            axis.hist(found, edges, weights=np.full(len(found), 1 / len(found)), color=colour)
            worst = worst_tenth(trial)
            if worst is not None:
                axis.axvline(scale * worst.mean, color="#000000", linestyle="--", linewidth=1.2)
            axis.set_title(textwrap.fill(literal(_fit(label, 90)), 34))
            axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axis.grid()
        named = client_score(shown[0][1])
        for axis in axes[:, 0]:
            axis.set_ylabel("clients")
        for axis in axes.flat[max(0, len(shown) - columns) : len(shown)]:
            axis.tick_params(labelbottom=True)
            axis.set_xlabel(named + " (%)" * metric.percent)


def client_score(trial: Trial) -> str:
    """Names the clients' scores.

    For clients without test samples they are expected scores, given their labels.
    """
    if trial.score.startswith("client_"):
        return f"test {trial.score.removeprefix('client_')} of a client"
    return "expected accuracy at a client"


def draw_ranks(
    averages: Mapping[str, float], distance: float, path: Path, title: str, styles: Styles
) -> None:
    """Draws a critical-difference diagram: bars join methods without a significant difference.

    Source: Demšar 2006 <https://jmlr.org/papers/v7/demsar06a.html>, figure 1.
    """
    order = sorted(averages, key=averages.__getitem__)
    ranked = np.array([averages[name] for name in order])
    bars, half = cliques(ranked, distance), math.ceil(len(order) / 2)
    last, first_line = len(order), 0.5 + 0.22 * len(bars)
    depth = first_line + 0.4 * half
    with picture(path, WIDTH * 0.8, 0.9 + 0.42 * depth, title) as figure:
        axis = figure.subplots()
        axis.set(xlim=(0.3 - 0.4 * last, 0.7 + 1.4 * last), ylim=(depth, -1.3))
        axis.axis("off")
        ink: dict[str, Any] = {"color": "#000000", "solid_capstyle": "butt"}
        axis.plot([1, last], [0, 0], linewidth=0.8, **ink)
        for rank in range(1, last + 1):
            axis.plot([rank, rank], [0, -0.12], linewidth=0.8, **ink)
            axis.text(rank, -0.2, str(rank), ha="center", va="bottom", fontsize=7)
        axis.plot([1, 1 + distance], [-0.8, -0.8], linewidth=1.6, **ink)
        axis.text(1, -0.87, f"critical difference {distance:.2f}", va="bottom", fontsize=7)
        for i, (low, high) in enumerate(bars):
            ends = [ranked[low] - 0.05, ranked[high] + 0.05]
            axis.plot(ends, [0.28 + 0.22 * i] * 2, linewidth=2.4, **ink)
        for i, name in enumerate(order):
            left = i < half
            y = first_line + 0.4 * (i if left else last - 1 - i)
            side = 0.7 if left else last + 0.3
            colour = styles.get(name, {"color": "#000000"})["color"]
            axis.plot([ranked[i], ranked[i], side], [0, y, y], color=colour, linewidth=1.4)
            text = f"{literal(_fit(name, 28))} ({ranked[i]:.2f})"
            axis.text(side + (-0.06 if left else 0.06), y, text, va="center",
                      ha="right" if left else "left", fontsize=7)  # fmt: skip
