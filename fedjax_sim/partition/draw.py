"""Figures of partitions: classes by client, and the spread of sizes and EMDs."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.measures import client_emds, emd, labelled_emd
from fedjax_sim.partition.pictures import COLOURS, WIDTH, literal, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counts = NDArray[np.int64]
MAX_BARS = 200  # clients; thinner bars are indistinguishable
CLASS_WIDTH = 0.1  # inches of a labelled class


def draw_partition(
    tables: Sequence[ArrayLike],
    path: str | os.PathLike[str],
    titles: Sequence[str],
    *,
    title: str = "",
    classes: Sequence[str] = (),
) -> None:
    """Draws the samples of each client and class, with partitions side by side.

    Up to 200 clients and 10 classes, each client is a stacked bar of length n_k with a colour for
    each class, on the same scale in all panels. Beyond that, each client is a row of a heat map of
    p_k(y), the share of class y in the client's samples, next to its n_k; clients are sorted by
    their largest class, the purest first.
    With a single class, or without classes, only sizes are drawn, one bar each. Titles show EMD and
    sizes. More than 4 partitions make the figure wider than a page.

    Args:
        tables: ``int[N, M]`` each, samples of each client and class; M is the same in all.
        path: a .png, .pdf or .svg file; its folder is created.
        titles: one for each table.
        title: title of the figure, such as the data set and the sampler.
        classes: names of the M classes; empty for their numbers.

    Raises:
        ValueError: if there are no tables, tables differ in M, the number of titles or class names
            is wrong, or the format is unsupported.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_partition([[[3, 1], [0, 4]]], f"{folder}/p.pdf", ["seed 0"])
        ...     os.listdir(folder)
        ['p.pdf']
    """
    counts = _checked_counts(tables, titles)
    if len({table.shape[1:] for table in counts}) != 1:
        raise ValueError(f"tables must have the same classes, got {[t.shape for t in counts]}")
    clients, m = max(len(table) for table in counts), counts[0].shape[1]
    if classes and len(classes) != m:
        raise ValueError(f"classes must be {m} names, got {len(classes)}")
    names = [literal(name) for name in classes] or [str(label) for label in range(m)]
    heads = [_head(table, name) for table, name in zip(counts, titles, strict=True)]
    bars = m == 1 or (clients <= MAX_BARS and m <= len(COLOURS))
    height = 1.4 + (float(np.clip(0.13 * clients, 1.6, 7.2)) if bars else 4.4)
    draw = _draw_bars if bars else _draw_heat
    width = max(4.8, WIDTH * max(len(counts), 3) / 4) if len(counts) < 4 else 1.8 * len(counts)
    with picture(path, width, height, title) as figure:
        draw(figure, counts, heads, names)


def _head(table: Counts, name: str) -> str:
    sizes = table.sum(axis=1)
    measured = labelled_emd([table]) if table.shape[1] > 1 else None
    skew = "" if measured is None else f"EMD {measured:.2f}\n"
    return f"{literal(name)}\n{skew}$n_k$ {sizes.min():,} to {sizes.max():,}"


def _draw_bars(
    figure: "Figure", counts: Sequence[Counts], heads: Sequence[str], names: Sequence[str]
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    clients = max(len(table) for table in counts)
    longest = max(int(table.sum(axis=1).max()) for table in counts)
    axes = figure.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)[0]
    for axis, table, head in zip(axes, counts, heads, strict=True):
        middle = np.arange(len(table))
        top, bottom = middle - 0.43, middle + 0.43
        ends = np.cumsum(table, axis=1)
        for colour, right, width in zip(COLOURS, ends.T, table.T, strict=False):
            left = right - width
            corners = np.stack([[left, left, right, right], [top, bottom, bottom, top]], axis=-1)
            boxes = corners.transpose(1, 0, 2)[width > 0]
            axis.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0))
        axis.set_title(head)
        axis.set_xlabel("samples")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0].set_xlim(0, 1.02 * longest)
    axes[0].set_ylim(clients - 0.4, -0.6)
    axes[0].set_ylabel("client")
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(names) > 1:
        handles = [Patch(color=colour) for colour in COLOURS[: len(names)]]
        figure.legend(handles, names, title="class", loc="outside right center")


def _draw_heat(
    figure: "Figure", counts: Sequence[Counts], heads: Sequence[str], names: Sequence[str]
) -> None:
    from matplotlib.ticker import MaxNLocator

    clients, m = max(len(table) for table in counts), len(names)
    lines = [_heat_rows(table) for table in counts]
    largest = max(float(share.max()) for share, _ in lines)
    longest = max(float(sizes.max()) for _, sizes in lines)
    panels = figure.subplots(
        1, 2 * len(counts), squeeze=False, sharey=True, width_ratios=[4, 1] * len(counts)
    )[0].reshape(-1, 2)
    for (heat, bars), (share, sizes), table, head in zip(panels, lines, counts, heads, strict=True):
        image = heat.imshow(
            share,
            aspect="auto",
            cmap="viridis",
            vmin=0,
            vmax=largest,
            interpolation="nearest",  # smoothing would mix classes
            extent=(-0.5, m - 0.5, len(table), 0),
        )
        if CLASS_WIDTH * m <= 0.6 * figure.get_figwidth() / len(counts):
            upright = max(map(len, names)) <= 1
            heat.set_xticks(range(m), names, rotation=0 if upright else 90)
        else:
            heat.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        heat.set_title(head)
        heat.set_xlabel("class")
        edges = np.arange(len(sizes) + 1)
        bars.fill_betweenx(edges, np.append(sizes, 0), step="post", color="0.45", linewidth=0)
        bars.set_xlabel("$n_k$")
        bars.set_xlim(0, 1.02 * longest)
        bars.xaxis.set_major_locator(MaxNLocator(1, integer=True))
        bars.tick_params(left=False)
    panels[0, 0].set_ylim(clients, 0)
    panels[0, 0].set_ylabel("clients, by their largest class")
    panels[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(
        image,
        ax=panels.ravel().tolist(),
        location="bottom",
        label="$p_k(y)$, share of the client's samples",
        aspect=40,
        shrink=0.6,
    )


def _heat_rows(table: Counts) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the rows of a heat map and their sizes, sorted by the largest class."""
    sizes = table.sum(axis=1)
    share = table / np.maximum(sizes, 1)[:, None]
    order = np.lexsort((-share.max(axis=1), share.argmax(axis=1)))
    return share[order], sizes[order]


def draw_skew(
    tables: Sequence[ArrayLike],
    path: str | os.PathLike[str],
    titles: Sequence[str],
    *,
    title: str = "",
) -> None:
    """Draws box plots of the client sizes and EMDs, with partitions side by side.

    Boxes span the quartiles, with whiskers up to 1.5 box lengths and dots for clients beyond. Sizes
    are n_k·N/Σn, so that 1 is an even part; a diamond is the EMD of the partition. With a single
    class, or without classes, only sizes are drawn. Concatenate the tables of several seeds to draw
    them as one box.

    Args:
        tables: ``int[N, M]`` each, samples of each client and class.
        path: a .png, .pdf or .svg file; its folder is created.
        titles: one for each table, below its boxes.
        title: title of the figure, such as the data set and the sampler.

    Raises:
        ValueError: if there are no tables, the number of titles is wrong, or the format is
            unsupported.

    Source: Cornelis 2022 <cornelis2022federated>, fig. 3.2 and 3.3.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_skew([[[3, 1], [0, 4]], [[4, 0], [0, 4]]], f"{folder}/p.png", ["a", "b"])
        ...     os.listdir(folder)
        ['p.png']
    """
    counts = _checked_counts(tables, titles)
    places = np.arange(len(counts))
    sizes = [table.sum(axis=1) * len(table) / table.sum() for table in counts]
    width = float(np.clip(0.55 * len(counts) + 1.2, 3.6, 16))
    panels = [(sizes, COLOURS[1], "samples / even part")]
    if any(table.shape[1] > 1 for table in counts):
        emds = [client_emds(table) for table in counts]
        panels.append((emds, COLOURS[0], "client EMD (◆ pooled)"))
    with picture(path, width, 0.6 + 2 * len(panels), title) as figure:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (values, colour, name) in zip(axes, panels, strict=True):
            axis.boxplot(
                values,
                positions=places,
                widths=0.6,
                patch_artist=True,
                boxprops={"facecolor": colour, "alpha": 0.6},
                medianprops={"color": "black"},
                flierprops={"marker": ".", "markersize": 3, "markeredgecolor": colour},
            )
            axis.set_ylabel(name)
            axis.grid(axis="y")
        axes[0].set_ylim(bottom=0)
        if len(panels) > 1:
            pooled = [emd(table) for table in counts]
            axes[1].set_ylim(0, 2)
            axes[1].plot(places, pooled, "D", color=COLOURS[2], markersize=4)
        long = max(map(len, titles)) * len(titles) > 14 * width
        slant = {"rotation": 30, "ha": "right"} if long else {}
        axes[-1].set_xticks(places, [literal(text) for text in titles], **slant)


def _checked_counts(tables: Sequence[ArrayLike], titles: Sequence[str]) -> list[Counts]:
    counts = [np.asarray(table) for table in tables]
    if not counts or len(titles) != len(counts):
        raise ValueError(f"titles must be one for each of {len(counts)} tables, got {len(titles)}")
    return counts
