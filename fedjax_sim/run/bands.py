"""Curves of scores: the mean over runs, and a band around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_sim.tasks.sums import Floats, mean_known

if TYPE_CHECKING:
    import matplotlib.axes


def draw_band(
    axes: matplotlib.axes.Axes,
    x: Any,
    values: Floats,
    *,
    alpha: float = 0.18,
    zorder: float = 3,
    **look: Any,
) -> None:
    """Draws the mean of R runs, and a band of ± one standard deviation.

    Args:
        axes: where to draw.
        x: horizontal places, ``[T]``.
        values: ``f64[T, R]``; the line stops where none is known.
        alpha: opacity of the band.
        zorder: order of the line and the band among others.
        **look: look of the line.
    """
    mean = mean_known(values)
    std = np.sqrt(mean_known((values - mean[:, None]) ** 2))
    (line,) = axes.plot(
        x, mean, marker="o", markersize=3, markevery=[-1], linewidth=1.4, zorder=zorder, **look
    )
    band: dict[str, Any] = {
        "color": line.get_color(),
        "alpha": alpha,
        "zorder": zorder,
        "linewidth": 0,
    }
    axes.fill_between(x, mean - std, mean + std, **band)
