"""Pictures of which client holds which classes, and of how unequal the clients are."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.measures import client_emds, emd

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_partition(
    tables: Sequence[ArrayLike], path: str | os.PathLike[str], titles: Sequence[str]
) -> None:
    """Draws partitions side by side: a stacked bar for each client, a colour for each class.

    The length of a bar is n_k, to one scale in all panels, so that skewed labels and skewed sizes
    both show; sizes and EMD are in the titles. It reads well up to about 100 clients, 20 classes
    and 4 partitions.

    Args:
        tables: ``int[N, M]`` each, samples of each client and class, one for each seed; M is the
            same in all.
        path: the .png file; its folder is made.
        titles: one for each table.

    Raises:
        ValueError: if there is no table, another number of titles, or tables of different M.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_partition([[[3, 1], [0, 4]]], f"{folder}/p.png", ["seed 0"])
        ...     os.listdir(folder)
        ['p.png']
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    counts = _checked(tables, titles)
    if len({table.shape[1:] for table in counts}) != 1:
        raise ValueError(f"tables must have the same classes, got {[t.shape for t in counts]}")
    clients, classes = max(len(table) for table in counts), counts[0].shape[1]
    palette = colormaps["tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"]
    scale = max(classes - 1, 1)
    colours = [palette(c if classes <= 20 else c / scale) for c in range(classes)]

    height = float(np.clip(0.13 * clients, 2.2, 14)) + 1.3
    columns = 1 + (classes - 1) // 25  # of the legend
    width = max(3.4 * len(counts), 5.6) + 0.6 + 0.6 * columns
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)[0]
    for axis, table, title in zip(axes, counts, titles, strict=True):
        rows, sizes = np.arange(len(table)), table.sum(axis=1)
        left = np.cumsum(table, axis=1) - table
        for label in range(classes):
            axis.barh(rows, table[:, label], left=left[:, label], height=0.86, color=colours[label])
        shape = f"EMD {emd(table):.2f} · n_k {sizes.min():,} to {sizes.max():,}"
        axis.set_title(f"{title}\n{shape}", fontsize=9)
        axis.set_xlabel("samples", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
    axes[0].set_ylabel("client", fontsize=8)
    axes[0].set_ylim(clients - 0.4, -0.6)
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [Patch(color=colour) for colour in colours]
    names = [str(label) for label in range(classes)]
    figure.legend(
        handles,
        names,
        title="class",
        loc="outside right center",
        fontsize=7,
        title_fontsize=8,
        ncols=columns,
        frameon=False,
    )
    _write(figure, path)


def draw_skew(
    tables: Sequence[ArrayLike], path: str | os.PathLike[str], titles: Sequence[str]
) -> None:
    """Draws the spread over the clients, partitions side by side: sizes above, EMDs below.

    A box holds the middle half of the clients, its line is the median, the whiskers end at the last
    client within 1.5 boxes, and dots are single clients beyond. Sizes are n_k·N/Σn, so that 1 is an
    even part; a diamond is the EMD of the partition. Seeds of one sampler on the same data share a
    box if their tables are concatenated.

    Args:
        tables: ``int[N, M]`` each, samples of each client and class.
        path: the .png file; its folder is made.
        titles: one for each table, written below its boxes.

    Raises:
        ValueError: if there is no table, or another number of titles.

    Source: Cornelis 2022 <cornelis2022federated>, fig. 3.2 and 3.3.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_skew([[[3, 1], [0, 4]], [[4, 0], [0, 4]]], f"{folder}/p.png", ["a", "b"])
        ...     os.listdir(folder)
        ['p.png']
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = _checked(tables, titles)
    places = np.arange(len(counts))
    sizes = [table.sum(axis=1) * len(table) / table.sum() for table in counts]
    width = float(np.clip(0.55 * len(counts) + 1.2, 4.5, 16))
    figure = Figure(figsize=(width, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True)
    for axis, values, colour, name in (
        (axes[0], sizes, "tab:orange", "samples / even part"),
        (axes[1], [client_emds(table) for table in counts], "tab:blue", "client EMD (◆ pooled)"),
    ):
        axis.boxplot(
            values,
            positions=places,
            widths=0.6,
            patch_artist=True,
            boxprops={"facecolor": colour, "alpha": 0.45},
            medianprops={"color": "black"},
            flierprops={"marker": ".", "markersize": 4, "markeredgecolor": colour},
        )
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(0, 2)
    axes[1].plot(places, [emd(table) for table in counts], "D", color="tab:red", markersize=4)
    long = max(len(title) for title in titles) * len(titles) > 14 * width
    axes[1].set_xticks(places, titles, rotation=30 if long else 0, ha="right" if long else "center")
    _write(figure, path)


def _checked(tables: Sequence[ArrayLike], titles: Sequence[str]) -> list[NDArray[np.int64]]:
    counts = [np.asarray(table) for table in tables]
    if not counts or len(titles) != len(counts):
        raise ValueError(f"titles must be one for each of {len(counts)} tables, got {len(titles)}")
    return counts


def _write(figure: "Figure", path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
