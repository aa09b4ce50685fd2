"""The matched Dirichlet sampler of RADFed: independent skew of sizes, classes and features."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.words import array_type
from fedjax_sim.partition._dirichlet import draw_dirichlet, draw_mixes, split_by_shares
from fedjax_sim.partition.closest import closest_table
from fedjax_sim.partition.deal import check_arguments, check_integer, deal
from fedjax_sim.partition.rectangles import random_table
from fedjax_sim.partition.table import Partition

MAX_MOVES = 100_000_000
"""Largest number of moves; takes minutes."""
DUST = 1e-9  # distance at which a value counts as an integer
FEW = 32  # number of cycles below which a vectorised pass over all rows does not pay off


def matched(
    labels: ArrayLike,
    clients: int,
    *,
    mu: float,
    lam: float,
    theta: float | Mapping[str, float] | None = None,
    features: Mapping[str, ArrayLike] | None = None,
    xi: float = 0.002,
    slack: float = 0.1,
    burn_in: int = 100_000,
    moves: int = 500_000,
    seed: int,
) -> Partition:
    r"""Draws sizes, class mixes and feature mixes independently, and deals the closest table.

    Sizes are :math:`n \sim Dir_K(\mu)`; client t has a mix of classes
    :math:`c_t \sim Dir(\lambda)` and a mix of the values of each feature
    :math:`f_t^j \sim Dir(\theta_j)`. With :math:`\alpha_{tu}` samples of configuration u (a class
    and a value of each feature) for client t, the closest table that uses each sample once solves

    .. math:: \min_{\alpha \ge 0} \sum_t \Bigl[
              \sum_k \Bigl( \sum_{u: u_1 = k} \alpha_{tu} - c_{tk} n_t \Bigr)^2
              + \sum_j \sum_i \Bigl( \sum_{u: u_{j+1} = i} \alpha_{tu} - f^j_{ti} n_t \Bigr)^2
              \Bigr], \qquad
              \sum_u \alpha_{tu} = n_t, \quad \sum_t \alpha_{tu} = B_u,

    the paper's (2), or (1) without features. Algorithm 3 walks from there to a random table nearby,
    which an unbiased random rounding makes integral; sizes and configurations stay exact.

    Two details follow the authors' code instead of the paper. A rectangle moves
    :math:`\varepsilon \sim U(0, \xi \min(a, a'))`, where the paper prints
    :math:`U(0, \min(a, a', \xi))`: ξ = 0.002 samples would move nothing, and ξ = 0.002 of all
    samples would remove the skew (C-score of MNIST-0.1: 0.8 instead of 1.29 in Table I). And the
    burn-in ends 10 % above the smallest distance from the targets, without which tables of few
    cells lose their skew (COVCLS: 0.35 instead of 0.79). With features their code differs from the
    paper and from this function: each column of a one-hot encoding is a feature of two values, and
    the solution of (2) is rounded without Algorithm 3 (``burn_in=0, moves=0``).

    Args:
        labels: ``int[n]``.
        clients: K.
        mu: μ, the concentration of the sizes, positive; each client has at least one sample.
        lam: λ, the concentration of the classes, positive; smaller is more skewed.
        theta: θ, the concentration of the values of all features, or of each feature by name.
        features: categorical features by name, ``int[n]`` each; needs theta.
        xi: ξ, the largest fraction of the smaller cell that one move takes, above 0 and at most 1.
        slack: the burn-in ends when the root of the sum above exceeds 1 + slack times its minimum;
            ``math.inf`` never ends it early.
        burn_in: P, the maximum number of burn-in moves. With burn_in=0 and moves=0 the rounded
            solution of the QP is dealt.
        moves: Q, the number of moves after the burn-in, whose best table is kept.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if an argument is out of range, or there are more clients than samples.
        RuntimeError: if the QP solver does not converge.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-A and Algorithm 3;
    the authors' code, <https://github.com/yxsub/RADFed>.

    Example:
        >>> p = matched(np.arange(600) % 10, 4, mu=1.0, lam=0.1, seed=0)
        >>> p.name, p.sizes.size, p.sizes.sum()
        ('matched(1, 0.1)', 4, np.int64(600))
    """
    y, _, rng = check_arguments(labels, clients, seed)
    thetas = _thetas(theta, features or {})
    named = {f"theta of feature {name!r}": value for name, value in thetas.items()}
    for name, value in {"mu": mu, "lam": lam, **named}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 < xi <= 1:
        raise ValueError(f"xi must be above 0 and at most 1, a fraction of a cell, got {xi}")
    if not slack >= 0:
        raise ValueError(f"slack must be at least 0, got {slack}")
    for name, value in {"burn_in": burn_in, "moves": moves}.items():
        check_integer(name, value, 0, MAX_MOVES)
    kinds = [y] + [_ranks(name, f, y.size) for name, f in (features or {}).items()]
    configuration, configurations, counts = _unique_rows(kinds)
    levels = configurations.max(axis=0) + 1
    groups = configurations + np.cumsum(levels) - levels

    sizes = 1 + split_by_shares(y.size - clients, draw_dirichlet(rng, mu, clients))
    mixes = [
        draw_mixes(rng, alpha, clients, int(size))
        for alpha, size in zip([lam, *thetas.values()], levels, strict=True)
    ]
    target = np.concatenate(mixes, axis=1) * sizes[:, None]
    table = closest_table(sizes, counts, target, groups)
    table = random_table(
        table, target, groups, xi=xi, slack=slack, burn_in=burn_in, moves=moves, rng=rng
    )
    shown = thetas.values() if isinstance(theta, Mapping) else [theta] if thetas else []
    text = f"matched({', '.join(f'{value:g}' for value in [mu, lam, *shown])})"
    return deal(configuration, round_table(table, rng), rng, text)


def _thetas(
    theta: float | Mapping[str, float] | None, features: Mapping[str, ArrayLike]
) -> dict[str, float]:
    """Returns θ of each feature, in their order."""
    if (theta is None) == bool(features):
        raise ValueError(
            "theta, the concentration of feature values, and features must be given together, got "
            f"theta={theta} and features={list(features)}; give neither for sizes and classes alone"
        )
    if theta is None:
        return {}
    if not isinstance(theta, Mapping):
        return dict.fromkeys(features, theta)
    if set(theta) != set(features):
        raise ValueError(f"theta must have the names {sorted(features)}, got {sorted(theta)}")
    return {name: theta[name] for name in features}


def _ranks(name: str, feature: ArrayLike, samples: int) -> NDArray[np.int64]:
    """Returns the rank of each value of a feature among its unique values, ``int64[n]``."""
    values = np.asarray(feature)
    if values.shape != (samples,) or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"features[{name!r}] must be int [{samples}], got {array_type(values)}")
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _unique_rows(
    kinds: list[NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns inverse indices, unique rows ``int64[U, F]`` and counts for F columns of ranks."""
    rank = kinds[0]
    for column in kinds[1:]:
        # One column at a time: np.unique over rows takes ten times as long.
        rank = np.unique(rank * (column.max() + 1) + column, return_inverse=True)[1]
    _, first, counts = np.unique(rank, return_index=True, return_counts=True)
    return rank, np.stack(kinds, axis=1)[first], counts


def round_table(table: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    r"""Rounds each cell up or down at random, without bias, keeping row and column sums.

    Rows and columns are nodes of a graph, and fractional cells its edges. As the sums are integers,
    no node has degree one, so that there is a cycle. Its cells change by +d and -d alternately,
    which keeps all sums, until one is an integer; the sign of d is drawn such that the mean is
    kept. So

    .. math:: E[\text{rounded}] = \text{table}, \qquad
              \lvert \text{rounded} - \text{table} \rvert < 1

    and a small client's classes are not lost to rounding down. Each cycle makes at least one cell
    an integer, so that there are at most K·U cycles. While many pairs of rows share two fractional
    columns, which are cycles of four cells, disjoint pairs are processed at once.

    Source: Gandhi, Khuller, Parthasarathy, Srinivasan 2006
    <https://doi.org/10.1145/1147954.1147956>.
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
    """Processes cycles of two rows and two columns, in place, until few pairs of rows have one."""
    columns, active, idle = part.shape[1], np.arange(len(part)), 0
    while columns > 1 and idle < 2:
        partial = (part[active] > 0) & (part[active] < 1)
        several = partial.sum(axis=1) > 1
        active, partial = active[several], partial[several]
        # Rows with the same first two columns are neighbours; every other pass shifts the pairing.
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
    """Rounds parts to 0.0 or 1.0, in place; nodes 0 … K - 1 are rows, the others columns."""
    clients, columns = len(parts), len(parts[0])
    near: list[list[int]] = [
        [clients + u for u, part in enumerate(row) if part] for row in parts
    ] + [[k for k in range(clients) if parts[k][u]] for u in range(columns)]

    def cell(a: int, b: int) -> tuple[int, int]:
        return (a, b - clients) if a < clients else (b, a - clients)

    def step(node: int, back: int) -> int:
        """Returns a neighbour across a fractional cell, other than back, or -1."""
        for place in range(len(near[node]) - 1, -1, -1):
            k, u = cell(node, near[node][place])
            if parts[k][u] in (0.0, 1.0):
                del near[node][place]  # at most one cell remains after it: O(1)
            elif near[node][place] != back:
                return near[node][place]
        return -1

    for start in range(clients):
        path, place = [start], {start: 0}
        while path:
            node, back = path[-1], path[-2] if len(path) > 1 else -1
            to = step(node, back)
            if to == -1:
                # The last cell of a row or column is an integer up to rounding error.
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
    """Changes the cells of a cycle by +d and -d alternately, with the largest d within 0 … 1."""
    values = [parts[k][u] for k, u in cycle]
    up = min(min(1 - p for p in values[::2]), min(values[1::2]))
    down = min(min(values[::2]), min(1 - p for p in values[1::2]))
    change = up if chance * (up + down) < down else -down
    for (k, u), value in zip(cycle, values, strict=True):
        value += change
        parts[k][u] = 0.0 if value < DUST else 1.0 if value > 1 - DUST else value
        change = -change
