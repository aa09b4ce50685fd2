"""A picture of who holds which classes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.measures import emd


def draw_partition(
    tables: Sequence[ArrayLike], path: str | os.PathLike[str], titles: Sequence[str]
) -> None:
    """Draw partitions side by side: one stacked bar per client, one colour per class.

    The length of a bar is n_k, to one scale in all panels, so skewed labels and skewed sizes are
    both seen; sizes and EMD stand in the titles. Reads well up to about 100 clients, 20 classes
    and 4 partitions.

    Args:
        tables: Samples per client and class, int [N, M] each, one per seed; M the same in all.
        path: The .png file; its folder is made.
        titles: One per table.

    Raises:
        ValueError: No table, another number of titles, or different numbers of classes.

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

    counts = [np.asarray(table) for table in tables]
    if not counts or len(titles) != len(counts):
        raise ValueError(f"titles: {len(titles)} given for {len(counts)} tables; give one for each")
    if len({table.shape[1:] for table in counts}) != 1:
        raise ValueError(f"tables must have the same classes, got {[t.shape for t in counts]}")
    clients, classes = max(len(table) for table in counts), counts[0].shape[1]
    palette = colormaps["tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"]
    scale = max(classes - 1, 1)
    colours = [palette(c if classes <= 20 else c / scale) for c in range(classes)]

    height = float(np.clip(0.13 * clients, 2.2, 14)) + 1.3
    figure = Figure(figsize=(3.4 * len(counts) + 1.2, height), dpi=120, layout="constrained")
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
        ncols=1 + (classes - 1) // 25,
        frameon=False,
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
