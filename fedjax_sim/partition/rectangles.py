"""Algorithm 3 of RADFed: a random walk from the optimal table to a table nearby."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.engine.doubles import enable_x64

BLOCK = 1 << 14  # moves that are drawn at once and run as one compiled loop


def random_table(
    table: NDArray[np.float64],
    target: NDArray[np.float64],
    groups: NDArray[np.int64],
    *,
    xi: float,
    slack: float,
    burn_in: int,
    moves: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    r"""Walks from a table by random rectangles, and returns the best table after a burn-in.

    Rows i ≠ i' and columns j ≠ j' are drawn uniformly, and

    .. math:: \varepsilon \sim U(0, \xi \min(a_{ij}, a_{i'j'})), \qquad
              a_{ij}, a_{i'j'} \text{ lose } \varepsilon, \quad
              a_{ij'}, a_{i'j} \text{ gain } \varepsilon

    so that row and column sums are kept. Every move is accepted. The loss

    .. math:: L = \sum_k \sum_g \Bigl( \sum_{u \in g} a_{ku} - \tau_{kg} \Bigr)^2

    is updated from the groups of these four cells, in O(F) a move. The burn-in moves the table away
    from the optimum and ends after ``burn_in`` moves, or as soon as √L exceeds 1 + slack times its
    initial value. Of the following ``moves`` moves, the table with the smallest L is returned; the
    last table of the burn-in counts too (unlike in the paper).

    Takes a, ``f64[K, U]``; τ, ``f64[K, G]``; and ``int64[U, F]``, the groups, in 0 … G - 1, of each
    column.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 3.
    """
    if min(table.shape) < 2:
        return table  # no rectangle exists
    state = start_state(table, target, groups)
    limit = (1 + slack) ** 2 * state.loss
    for done in range(0, burn_in, BLOCK):
        walk = take_moves(state, draw_moves(groups, target.shape, xi, rng))
        losses = walk.losses[: burn_in - done]
        over = bool((losses > limit).any())
        state = walk.after(int(np.argmax(losses > limit)) + 1 if over else losses.size)
        if over:
            break
    kept = state
    for done in range(0, moves, BLOCK):
        walk = take_moves(state, draw_moves(groups, target.shape, xi, rng))
        losses = walk.losses[: moves - done]
        least = int(np.argmin(losses))
        if losses[least] < kept.loss:
            kept = walk.after(least + 1)
        state = walk.end
    return kept.values[: table.size].reshape(table.shape)


class State(NamedTuple):
    """A table during the walk.

    Attributes:
        values: ``f64[...]``, the cells a_ku, then the excess of each group, (Σ_{u in g} a_ku) -
            τ_kg, then zeros up to a power of two, so that few lengths are compiled.
        loss: L.
    """

    values: NDArray[np.float64]
    loss: float


class Moves(NamedTuple):
    """A block of rectangles, as changes to the values of a state.

    Attributes:
        places: ``int32[BLOCK, 4 + 4F]``, the cells (i, j), (i', j'), (i, j'), (i', j), then the F
            groups of each cell.
        signs: ``f64[BLOCK, 4 + 4F]``, -1, -1, 1, 1 in the same order; for a group 0 if j and j'
            share it.
        shares: ``f64[BLOCK]``, ε as a fraction of the smaller of the first two cells.
    """

    places: NDArray[np.int32]
    signs: NDArray[np.float64]
    shares: NDArray[np.float64]


class Walk(NamedTuple):
    """A block of moves applied to a state.

    Attributes:
        start: state before the moves.
        end: state after the moves.
        moves: the moves.
        amounts: ``f64[BLOCK]``, ε of each move.
        losses: ``f64[BLOCK]``, L after each move.
    """

    start: State
    end: State
    moves: Moves
    amounts: NDArray[np.float64]
    losses: NDArray[np.float64]

    def after(self, number: int) -> State:
        """Returns the state after a number of moves, at least 1."""
        # The moves are repeated, as copying every new best table would cost K·U a move.
        values = self.start.values.copy()
        changes = self.amounts[:number, None] * self.moves.signs[:number]
        np.add.at(values, self.moves.places[:number], changes)
        return State(values, float(self.losses[number - 1]))


def start_state(
    table: NDArray[np.float64], target: NDArray[np.float64], groups: NDArray[np.int64]
) -> State:
    """Returns the state of a table; arguments as for :func:`random_table`."""
    sums = np.zeros(target.shape[::-1])
    for column in groups.T:
        np.add.at(sums, column, table.T)
    excess = sums.T - target
    values = np.concatenate([table.ravel(), excess.ravel()])
    padding = (1 << (values.size - 1).bit_length()) - values.size
    return State(np.pad(values, (0, padding)), float(np.square(excess).sum()))


def draw_moves(
    groups: NDArray[np.int64], shape: tuple[int, ...], xi: float, rng: np.random.Generator
) -> Moves:
    """Draws a block of moves; ``shape`` is (K, G)."""
    (clients, width), columns = shape, len(groups)

    def pair(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        one = rng.integers(size, size=BLOCK)
        return one, (one + rng.integers(1, size, size=BLOCK)) % size

    (i, i2), (j, j2) = pair(clients), pair(columns)
    rows, corners = np.stack([i, i2, i, i2], axis=1), np.stack([j, j2, j2, j], axis=1)
    signs = np.array([-1.0, -1.0, 1.0, 1.0])
    cells = rows * columns + corners
    sums = clients * columns + rows[:, :, None] * width + groups[corners]
    differ = (groups[j] != groups[j2])[:, None] * signs[:, None]
    return Moves(
        np.concatenate([cells, sums.reshape(BLOCK, -1)], axis=1).astype(np.int32),
        np.concatenate([np.tile(signs, (BLOCK, 1)), differ.reshape(BLOCK, -1)], axis=1),
        xi * rng.random(BLOCK),
    )


def take_moves(state: State, moves: Moves) -> Walk:
    """Applies a block of moves in order, compiled, in float64 on the CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    with enable_x64(True), jax.default_device(cpu):
        (values, loss), (amounts, losses) = jax.device_get(_scan(state, moves))
    return Walk(state, State(values, float(loss)), moves, amounts, losses)


@jax.jit
def _scan(state: State, moves: Moves) -> Any:
    def apply(state: Any, move: Any) -> Any:
        old = state.values[move.places]
        amount = move.shares * jnp.minimum(old[0], old[1])
        change = amount * move.signs
        # (x + c)² - x² = c (2x + c), over the groups.
        loss = state.loss + jnp.sum(change[4:] * (2 * old[4:] + change[4:]))
        return State(state.values.at[move.places].add(change), loss), (amount, loss)

    return jax.lax.scan(apply, state, moves)
