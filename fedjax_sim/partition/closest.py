"""The table with given sums that is closest to a target, by an interior-point method."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS = 100  # 15 to 30 are typical
TOLERANCE = 1e-9  # of the gap, relative to the optimum or to the squared mean of a cell
PROXIMAL = 1e-5  # curvature where the QP has none; shortens steps without moving the optimum
CHUNK = 1 << 22  # elements of a temporary array

Array = NDArray[np.float64]


def closest_table(
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    target: NDArray[np.float64],
    groups: NDArray[np.int64],
) -> NDArray[np.float64]:
    r"""Solves (1) or (2) for the table with given sums whose groups are closest to a target.

    .. math:: \min_{\alpha \ge 0} \sum_t \sum_g
              \Bigl( \sum_{u \in g} \alpha_{tu} - \tau_{tg} \Bigr)^2, \qquad
              \sum_u \alpha_{tu} = n_t, \quad \sum_t \alpha_{tu} = B_u

    (1) has one group for each column and a unique solution. (2) may have several; the
    interior-point method returns one in the middle. Rows are coupled only by the column sums: a
    step solves a system of G equations for each row and one of U equations for all, which takes
    :math:`O(K (G^3 + G U^2))`, linear in the number of clients.

    Takes n, B, τ and ``int64[U, F]``, the groups, in 0 … G - 1, of each column. Returns α,
    ``f64[K, U]``; the sums hold up to floating-point error.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, eq. 1 and 2; Mehrotra's
    predictor-corrector method, 1992 <https://doi.org/10.1137/0802028>.
    """
    if sizes.sum() != counts.sum():
        raise ValueError(f"sizes must sum to {counts.sum()}, as counts do, got {sizes.sum()}")
    clients, columns = len(target), counts.size
    unit = sizes.sum() / (clients * columns)  # scales cells to a mean of 1
    member = np.zeros((target.shape[1], columns))
    member[groups.T, np.arange(columns)] = 1.0
    goal = target / unit
    # Under (1) GᵀG = 1 is part of the diagonal, and the cells of a row are not coupled.
    separable = groups.shape == (target.shape[1], 1)
    diagonal, coupling = (1.0, member[:0]) if separable else (PROXIMAL, member)

    # The same mix for all rows satisfies the sums without zeros.
    table = np.outer(sizes, counts) / (sizes.sum() * unit)
    rows, free = np.zeros(clients), np.zeros(columns)  # multipliers of the sums; free[-1] stays 0
    misfit = table @ member.T - goal
    price = max(1.0, float(np.abs(misfit).mean())) / np.maximum(table, 1e-6)  # of α >= 0
    for _ in range(STEPS):
        misfit = table @ member.T - goal
        slope = misfit @ member - rows[:, None] - free - price
        gap = float((table * price).sum())
        excess = table.sum(axis=1) - sizes / unit, table.sum(axis=0) - counts / unit
        worst = max(np.abs(excess[0]).max(), np.abs(excess[1]).max())
        wanted = TOLERANCE * max(1.0, 0.5 * float(np.square(misfit).sum()))
        if gap < wanted and np.abs(slope).max() < 1e-7 and worst < 1e-9 * columns:
            return np.maximum(table, 0.0) * unit
        system = _factor(1 / (price / table + diagonal), coupling)
        # Predictor: the step to the optimum of the linearised problem, from which the centring and
        # the second-order correction follow.
        predictor, *_ = system.solve(-slope - price, excess)
        predictor_price = -price - price / table * predictor
        length = min(_longest(table, predictor), _longest(price, predictor_price))
        ahead = (table + length * predictor) * (price + length * predictor_price)
        after = ahead.sum() / gap
        centre = after**3 * gap / table.size
        correction = (centre - predictor * predictor_price) / table
        step, row_step, free_step = system.solve(-slope - price + correction, excess)
        step_price = -price - price / table * step + correction
        length = 0.995 * min(_longest(table, step), _longest(price, step_price))
        table = table + length * step
        rows, free = rows + length * row_step, free + length * free_step
        price = price + length * step_price
    raise RuntimeError(
        f"no closest table for {clients} clients and {columns} columns: the gap is {gap:.1e} after "
        f"{STEPS} steps, wanted {wanted:.1e}"
    )


class _System(NamedTuple):
    """Inverse of the matrices H_t = diag(1/d_t) + GᵀG of the rows, and the Schur complement.

    Attributes:
        scale: d, ``f64[K, U]``.
        member: G, ``f64[G, U]``.
        inner: the inverses of 1 + G diag(d_t) Gᵀ, ``f64[K, G, G]``.
        ones: H_t⁻¹ 1, ``f64[K, U]``.
        schur: sum over t of H_t⁻¹ with the row sums eliminated, ``f64[U - 1, U - 1]``.
    """

    scale: Array
    member: Array
    inner: Array
    ones: Array
    schur: Array

    def solve(self, right: Array, excess: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Solves H_t Δ_t - Δrows_t - Δfree = right_t for the step that removes the excess."""
        factors = self.scale, self.member, self.inner
        plain, total = _inverse(*factors, right), self.ones.sum(axis=1)
        rows = (-excess[0] - plain.sum(axis=1)) / total
        lacking = -excess[1] - (plain + self.ones * rows[:, None]).sum(axis=0)
        free = np.append(np.linalg.solve(self.schur, lacking[:-1]), 0.0)
        rows = rows - self.ones @ free / total
        return plain + _inverse(*factors, rows[:, None] + free), rows, free


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
    """Computes (diag(1/d) + GᵀG)⁻¹ r for each row by Woodbury's identity."""
    grouped = (scale * right) @ member.T
    solution: Array = scale * (right - (inner @ grouped[..., None])[..., 0] @ member)
    return solution


def _longest(values: Array, change: Array) -> float:
    """Returns the longest step, at most 1, along which positive values stay positive."""
    falling = change < 0
    return float(min(1.0, np.min(values[falling] / -change[falling], initial=np.inf)))
