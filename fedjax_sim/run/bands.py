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
    """Draws the mean of R runs ``f64[T, R]`` at ``x [T]``, and a band of ± one standard deviation.

    The line stops where no value is known.
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
