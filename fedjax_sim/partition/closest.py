"""The table with given sums that is closest to a target: a large QP of simple structure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS = 100  # 15 to 30 are usual
TOLERANCE = 1e-9  # of the gap, as a part of the optimum or of a cell's mean squared
PROXIMAL = 1e-5  # curvature where the QP has none; it shortens steps and moves no optimum
CHUNK = 1 << 22  # numbers of a temporary array

Array = NDArray[np.float64]


def closest_table(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    target: NDArray[np.float64],
    groups: NDArray[np.int64],
) -> NDArray[np.float64]:
    r"""Solves (1) or (2): the table with given sums whose groups are closest to a target.

    .. math:: \min_{\alpha \ge 0} \sum_t \sum_g
              \Bigl( \sum_{u \in g} \alpha_{tu} - \tau_{tg} \Bigr)^2, \qquad
              \sum_u \alpha_{tu} = n_t, \quad \sum_t \alpha_{tu} = B_u

    (1) has one group for each column; there the solution is unique. Under (2) several tables may be
    equally close: an interior-point method gives one in the middle of them.

    Rows meet in the column sums alone. A step of the method solves a system of G equations for each
    row and one of U for all: :math:`O(K (G^3 + G U^2))`, linear in the clients.

    Args:
        sizes: n, ``int64[K]``, positive.
        counts: B, ``int64[U]``, positive; adds up to what sizes adds up to.
        target: τ, ``f64[K, G]``.
        groups: ``int64[U, F]``, the groups, in 0 … G - 1, to which column u belongs.

    Returns:
        α, ``f64[K, U]``, at least 0; the sums hold up to floating-point error.

    Raises:
        ValueError: if sizes and counts do not add up to the same.
        RuntimeError: if the method does not converge.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, eq. 1 and 2; the method is
    Mehrotra's predictor-corrector, 1992 <https://doi.org/10.1137/0802028>.

    Example:
        >>> target = np.array([[2.0, 0.0], [2.0, 0.0]])
        >>> table = closest_table(np.array([2, 2]), np.array([3, 1]), target, np.array([[0], [1]]))
        >>> np.round(table, 6).tolist()
        [[1.5, 0.5], [1.5, 0.5]]
    """
    if sizes.sum() != counts.sum():
        raise ValueError(f"sizes must add up to {counts.sum()}, as counts do, got {sizes.sum()}")
    clients, columns = len(target), counts.size
    unit = sizes.sum() / (clients * columns)  # of a mean of 1 in a cell, for every data set
    member = np.zeros((target.shape[1], columns))
    member[groups.T, np.arange(columns)] = 1.0
    goal = target / unit
    # Under (1) GᵀG = 1, which is part of the diagonal, and nothing couples the cells of a row.
    alone = groups.shape == (target.shape[1], 1)
    own, coupling = (1.0, member[:0]) if alone else (PROXIMAL, member)

    # The same mix for all keeps the sums, and no cell is 0.
    table = np.outer(sizes, counts) / (sizes.sum() * unit)
    rows, free = np.zeros(clients), np.zeros(columns)  # multipliers of the sums; free[-1] stays 0
    misfit = table @ member.T - goal
    price = max(1.0, float(np.abs(misfit).mean())) / np.maximum(table, 1e-6)  # of α >= 0
    for _ in range(STEPS):
        misfit = table @ member.T - goal
        slope = misfit @ member - rows[:, None] - free - price
        gap = float((table * price).sum())
        off = _Sums(table.sum(axis=1) - sizes / unit, table.sum(axis=0) - counts / unit)
        wanted = TOLERANCE * max(1.0, 0.5 * float(np.square(misfit).sum()))
        if gap < wanted and np.abs(slope).max() < 1e-7 and off.worst < 1e-9 * columns:
            return np.maximum(table, 0.0) * unit
        system = _factor(1 / (price / table + own), coupling)
        # Where the step to the optimum of the linearised problem would lead, to choose the centring
        # and to correct for what the linearisation leaves out.
        guess = system.solve(-slope - price, off)
        guess_price = -price - price / table * guess.table
        short = min(_longest(table, guess.table), _longest(price, guess_price))
        after = ((table + short * guess.table) * (price + short * guess_price)).sum() / gap
        centre = after**3 * gap / table.size
        bend = (centre - guess.table * guess_price) / table
        step = system.solve(-slope - price + bend, off)
        step_price = -price - price / table * step.table + bend
        length = 0.995 * min(_longest(table, step.table), _longest(price, step_price))
        table = table + length * step.table
        rows, free = rows + length * step.rows, free + length * step.free
        price = price + length * step_price
    raise RuntimeError(
        f"no closest table for {clients} clients and {columns} columns: the gap is {gap:.1e} after "
        f"{STEPS} steps, wanted {wanted:.1e}"
    )


class _Sums(NamedTuple):
    """What the sums of rows, ``f64[K]``, and of columns, ``f64[U]``, have too much."""

    rows: Array
    columns: Array

    @property
    def worst(self) -> float:
        return float(max(np.abs(self.rows).max(), np.abs(self.columns).max()))


class _Step(NamedTuple):
    """Changes of the table and of the multipliers of its sums."""

    table: Array
    rows: Array
    free: Array


class _System(NamedTuple):
    """The matrices H_t = diag(1/d_t) + GᵀG of the rows, inverted, and what is left of all rows.

    Attributes:
        scale: d, ``f64[K, U]``.
        member: G, ``f64[G, U]``.
        inner: the inverses of 1 + G diag(d_t) Gᵀ, ``f64[K, G, G]``.
        ones: H_t⁻¹ 1, ``f64[K, U]``.
        schur: Σ_t of H_t⁻¹ without the direction that the row's sum fixes, ``f64[U - 1, U - 1]``.
    """

    scale: Array
    member: Array
    inner: Array
    ones: Array
    schur: Array

    def inverse(self, right: Array) -> Array:
        """H_t⁻¹ r_t of every row."""
        return _inverse(self.scale, self.member, self.inner, right)

    def solve(self, right: Array, off: _Sums) -> _Step:
        """The step with H_t Δ_t - Δrows_t - Δfree = right_t that ends what the sums are off."""
        plain, total = self.inverse(right), self.ones.sum(axis=1)
        rows = (-off.rows - plain.sum(axis=1)) / total
        lacking = -off.columns - (plain + self.ones * rows[:, None]).sum(axis=0)
        free = np.append(np.linalg.solve(self.schur, lacking[:-1]), 0.0)
        rows = rows - self.ones @ free / total
        return _Step(plain + self.inverse(rows[:, None] + free), rows, free)


def _factor(scale: Array, member: Array) -> _System:
    width, columns = member.shape
    inner = np.empty((len(scale), width, width))
    ones, schur = np.empty_like(scale), np.diag(scale.sum(axis=0))
    block = max(1, CHUNK // (max(width, 1) * columns))
    for first in range(0, len(scale), block):
        part = slice(first, first + block)
        scaled = scale[part, None, :] * member  # G diag(d)
        inner[part] = np.linalg.inv(np.eye(width) + scaled @ member.T)
        flat = (len(scaled) * width, columns)
        schur -= scaled.reshape(flat).T @ (inner[part] @ scaled).reshape(flat)
        ones[part] = _inverse(scale[part], member, inner[part], np.ones_like(scale[part]))
    schur -= ones.T @ (ones / ones.sum(axis=1, keepdims=True))
    return _System(scale, member, inner, ones, schur[:-1, :-1])


def _inverse(scale: Array, member: Array, inner: Array, right: Array) -> Array:
    """(diag(1/d) + GᵀG)⁻¹ r by Woodbury's identity, for every row."""
    seen = (scale * right) @ member.T
    found: Array = scale * (right - (inner @ seen[..., None])[..., 0] @ member)
    return found


def _longest(values: Array, change: Array) -> float:
    """How far positive values can go by a change and stay so, at most 1."""
    falling = change < 0
    return float(min(1.0, np.min(values[falling] / -change[falling], initial=np.inf)))
