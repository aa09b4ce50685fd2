"""Rounding of a table of samples to whole numbers that keeps its row and column sums."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DUST = 1e-9  # a part this close to a whole number is one
FEW = 32  # cycles, for which a pass over all rows is not worth its time


def round_table(table: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    r"""Rounds every cell up or down at random, without bias and with row and column sums kept.

    The cells that are not whole join rows and columns to a graph without a node of degree one, as
    the sums are whole: there is a cycle. Its cells change by +d and -d in turn, which keeps all
    sums, until one is whole. Of the two ways round one is drawn, with the probabilities that keep
    the mean. So

    .. math:: E[\text{rounded}] = \text{table}, \qquad
              \lvert \text{rounded} - \text{table} \rvert < 1

    and a small client's classes are not lost to rounding down. Each cycle makes a cell whole: it
    ends after at most K·U of them. As long as many rows share two such columns, they are cycles of
    four cells, and all that do not touch are taken at once.

    Args:
        table: ``f64[K, U]``, samples of client k in column u, at least 0; row and column sums are
            whole numbers up to floating-point error.
        rng: chooses the ways.

    Returns:
        ``int64[K, U]``, at least 0.

    Source: Gandhi, Khuller, Parthasarathy, Srinivasan 2006
    <https://doi.org/10.1145/1147954.1147956>.

    Example:
        >>> round_table(np.array([[0.5, 1.5], [2.5, 0.5]]), np.random.default_rng(1)).tolist()
        [[0, 2], [3, 0]]
    """
    whole = np.floor(table + DUST)
    part = table - whole
    part[part < DUST] = 0.0
    _pair_rows(part, rng)
    rest = np.flatnonzero(((part > 0) & (part < 1)).any(axis=1))
    if rest.size:
        _make_whole(rows := part[rest].tolist(), rng)
        part[rest] = rows
    return (whole + part).astype(np.int64)


def _pair_rows(part: NDArray[np.float64], rng: np.random.Generator) -> None:
    """Takes cycles of two rows and two columns, in place, until few pairs of rows have one."""
    columns, active, idle = part.shape[1], np.arange(len(part)), 0
    while columns > 1 and idle < 2:
        partial = (part[active] > 0) & (part[active] < 1)
        several = partial.sum(axis=1) > 1
        active, partial = active[several], partial[several]
        # Rows that begin with the same two columns are neighbours; every other pass shifts them.
        key = np.argsort(~partial, axis=1, kind="stable")[:, :2] @ np.array([columns, 1])
        order = np.argsort(key, kind="stable")[idle:]
        one, other = order[: order.size // 2 * 2].reshape(-1, 2).T
        shared = partial[one] & partial[other]
        meet = np.flatnonzero(shared.sum(axis=1) > 1)
        idle = idle + 1 if meet.size < FEW else 0
        (j, j2) = np.argsort(~shared[meet], axis=1, kind="stable")[:, :2].T
        i, i2 = active[one[meet]], active[other[meet]]
        cells = (i, j), (i, j2), (i2, j2), (i2, j)
        a, b, c, d = (part[cell] for cell in cells)
        up = np.minimum.reduce([1 - a, b, 1 - c, d])
        down = np.minimum.reduce([a, 1 - b, c, 1 - d])
        change = np.where(rng.random(i.size) * (up + down) < down, up, -down)
        for cell, value, sign in zip(cells, (a, b, c, d), (1, -1, 1, -1), strict=True):
            moved = value + sign * change
            part[cell] = np.where(moved < DUST, 0.0, np.where(moved > 1 - DUST, 1.0, moved))


def _make_whole(parts: list[list[float]], rng: np.random.Generator) -> None:
    """Turns every part into 0.0 or 1.0, in place; nodes 0 … K - 1 are rows, the others columns."""
    clients, columns = len(parts), len(parts[0])
    near: list[list[int]] = [
        [clients + u for u, part in enumerate(row) if part] for row in parts
    ] + [[k for k in range(clients) if parts[k][u]] for u in range(columns)]

    def cell(a: int, b: int) -> tuple[int, int]:
        return (a, b - clients) if a < clients else (b, a - clients)

    def step(node: int, back: int) -> int:
        """A neighbour over a cell that is not whole, other than back, or -1."""
        for place in range(len(near[node]) - 1, -1, -1):
            k, u = cell(node, near[node][place])
            if parts[k][u] in (0.0, 1.0):
                del near[node][place]  # one cell at most stays behind it: O(1)
            elif near[node][place] != back:
                return near[node][place]
        return -1

    for start in range(clients):
        path, place = [start], {start: 0}
        while path:
            node, back = path[-1], path[-2] if len(path) > 1 else -1
            to = step(node, back)
            if to == -1:
                # The only cell that is left in a row or column is whole but for rounding error.
                if back >= 0:
                    k, u = cell(back, node)
                    parts[k][u] = float(round(parts[k][u]))
                del place[path.pop()]
            elif to not in place:
                place[to] = len(path)
                path.append(to)
            else:
                cycle = path[place[to] :]
                ends = [*cycle[1:], to]
                _shift(parts, [cell(a, b) for a, b in zip(cycle, ends, strict=True)], rng.random())
                for passed in cycle[1:]:
                    del place[passed]
                del path[place[to] + 1 :]


def _shift(parts: list[list[float]], cycle: Sequence[tuple[int, int]], chance: float) -> None:
    """Changes the cells of a cycle by +d and -d in turn, as far as all stay in 0 to 1."""
    values = [parts[k][u] for k, u in cycle]
    up = min(min(1 - p for p in values[::2]), min(values[1::2]))
    down = min(min(values[::2]), min(1 - p for p in values[1::2]))
    change = up if chance * (up + down) < down else -down
    for (k, u), value in zip(cycle, values, strict=True):
        value += change
        parts[k][u] = 0.0 if value < DUST else 1.0 if value > 1 - DUST else value
        change = -change
