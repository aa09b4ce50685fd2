"""Matched Dirichlet: optimal tables, moves that keep the sums, the paper's Table I."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.partition import (
    Partition,
    c_score,
    label_table,
    matched,
    parse_sampler,
    partition_hash,
    size_statistics,
    validate_partition,
)
from fedjax_sim.partition._matched import round_table
from fedjax_sim.partition.closest import closest_table
from fedjax_sim.partition.rectangles import (
    BLOCK,
    Moves,
    State,
    draw_moves,
    random_table,
    start_state,
    take_moves,
)

MNIST = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]  # train and test
# Columns: two classes x three values; the groups are the classes, then the values.
SIX = np.array([[k, 2 + v] for k in range(2) for v in range(3)])
concentrations = st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 30.0, 1e308])
seeds = st.integers(0, 2**32 - 1)


def whole_sums(
    rng: np.random.Generator, clients: int, columns: int, samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positive sizes and counts that add up to the same."""
    sizes = 1 + rng.multinomial(samples, rng.dirichlet(np.ones(clients)))
    counts = 1 + rng.multinomial(sizes.sum() - columns, rng.dirichlet(np.ones(columns)))
    return sizes, counts


def problem(seed: int, clients: int, groups: NDArray[np.int64]) -> tuple[Any, Any, Any]:
    """Sizes, counts and a target that no table meets."""
    rng = np.random.default_rng(seed)
    sizes, counts = whole_sums(rng, clients, len(groups), 60 * clients)
    mixes = [rng.dirichlet(np.full(np.ptp(kind) + 1, 0.3), clients) for kind in groups.T]
    return sizes, counts, sizes[:, None] * np.concatenate(mixes, axis=1)


def loss_of(table: Any, target: Any, groups: NDArray[np.int64]) -> float:
    """The sum of squares in (1) and (2), as it is written."""
    return float(
        sum(
            (table[t, (groups == g).any(axis=1)].sum() - target[t, g]) ** 2
            for t in range(len(table))
            for g in range(target.shape[1])
        )
    )


def check_sums(table: Any, sizes: Any, counts: Any, atol: float) -> None:
    assert table.min() >= 0
    np.testing.assert_allclose(table.sum(axis=1), sizes, rtol=0, atol=atol)
    np.testing.assert_allclose(table.sum(axis=0), counts, rtol=0, atol=atol)


# Requests.


def feature_set(rng: np.random.Generator, samples: int, number: int) -> dict[str, Any]:
    return {f"feature {j}": rng.integers(-1, 2 + j, samples) for j in range(number)}


@pytest.mark.slow
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=50),
    data=st.data(),
    mu=concentrations,
    lam=concentrations,
    theta=concentrations,
    features=st.sampled_from([0, 0, 1, 3]),
    walk=st.sampled_from([(0, 0), (0, 0), (0, 0), (9, 0), (0, 9), (9, 30)]),
    seed=seeds,
)
@settings(max_examples=300, deadline=None)
def test_every_request_is_met(
    labels: list[int],
    data: st.DataObject,
    mu: float,
    lam: float,
    theta: float,
    features: int,
    walk: tuple[int, int],
    seed: int,
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    options: dict[str, Any] = {"mu": mu, "lam": lam, "burn_in": walk[0], "moves": walk[1]}
    if features:
        options["features"] = feature_set(np.random.default_rng(seed), len(labels), features)
        options["theta"] = theta
    partition = matched(labels, clients, **options, seed=seed)
    validate_partition(partition, len(labels))
    assert np.array_equal(np.sort(partition.index), np.arange(len(labels)))
    assert partition.sizes.size == clients
    again = matched(labels, clients, **options, seed=seed)
    assert partition_hash(partition) == partition_hash(again)


def test_seeds_flags_and_devices() -> None:
    labels = np.arange(700) % 7

    def sample(seed: int) -> str:
        options: dict[str, Any] = {"features": {"f": labels % 3}, "theta": 0.3}
        return partition_hash(
            matched(labels, 9, mu=1.0, lam=0.3, moves=40_000, seed=seed, **options)
        )

    first = sample(0)
    assert first != sample(1)
    with enable_x64(True):
        assert sample(0) == first
    with jax.default_device(jax.devices()[1]), jax.default_matmul_precision("bfloat16"):
        assert sample(0) == first


def test_sizes_do_not_depend_on_the_mixes() -> None:
    labels = np.arange(2000) % 10
    none: dict[str, Any] = {"burn_in": 0, "moves": 0, "seed": 5}
    sizes = [matched(labels, 20, mu=1.0, lam=lam, **none).sizes for lam in (0.01, 1.0, 100.0)]
    assert np.array_equal(sizes[0], sizes[1])
    assert np.array_equal(sizes[0], sizes[2])
    assert np.ptp(matched(labels, 20, mu=1e6, lam=0.01, **none).sizes) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lam", "score", "spread"),
    [(1.0, 0.70, 667), (0.1, 1.29, 658)],
    ids=["MNIST-1", "MNIST-0.1"],
)
def test_table_1_of_radfed(lam: float, score: float, spread: float) -> None:
    labels = np.repeat(np.arange(10), MNIST)
    scores, spreads = [], []
    for seed in range(5):
        partition = matched(labels, 100, mu=1.0, lam=lam, seed=seed)
        table = label_table(labels, partition, 10)
        assert table.sum(axis=0).tolist() == MNIST
        assert size_statistics(partition.sizes).mean == 700
        scores.append(c_score(table))
        spreads.append(partition.sizes.std())
    assert np.mean(scores) == pytest.approx(score, rel=0.1)
    assert min(spreads) < spread < max(spreads)


def scores(partition: Partition, kinds: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: c_score(label_table(kind, partition, int(kind.max()) + 1))
        for name, kind in kinds.items()
    }


def test_each_kind_has_its_own_skew() -> None:
    rng = np.random.default_rng(0)
    kinds = {"label": rng.integers(0, 4, 9_000), "soil": rng.integers(0, 5, 9_000)}
    kinds["area"] = (kinds["soil"] + rng.integers(0, 2, 9_000)) % 3  # goes with the soil

    def skew(lam: float, theta: dict[str, float]) -> dict[str, float]:
        features = {name: kinds[name] for name in theta}
        partition = matched(
            kinds["label"], 40, mu=10.0, lam=lam, theta=theta, features=features, seed=1
        )
        return scores(partition, kinds)

    one = skew(0.2, {"soil": 1e4, "area": 1e4})
    assert one["label"] > 0.8
    assert max(one["soil"], one["area"]) < 0.1
    other = skew(1e4, {"soil": 0.2, "area": 1e4})
    assert other["soil"] > 0.7
    assert other["label"] < 0.1
    assert other["area"] < 0.5 * skew(1e4, {"soil": 0.2})["area"] + 0.1


def test_text_form() -> None:
    labels = np.arange(60) % 3
    features = {"f": labels % 2}
    name, sample = parse_sampler("matched(1, 1/10)")
    assert name == "matched"
    plain = sample(labels, 4, 7, features=features)  # the data set's features are there, not used
    assert plain.name == "matched(1, 0.1)"
    same = matched(labels, 4, mu=1.0, lam=0.1, seed=7)
    assert partition_hash(plain) == partition_hash(same)
    _, sample = parse_sampler("matched(1, 0.1, 0.3)")
    used = sample(labels, 4, 7, features=features)
    assert used.name == "matched(1, 0.1, 0.3)"
    same = matched(labels, 4, mu=1.0, lam=0.1, theta=0.3, features=features, seed=7)
    assert partition_hash(used) == partition_hash(same)
    with pytest.raises(ValueError, match=r"got theta=0\.3 and features=\[\]"):
        sample(labels, 4, 7)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "mu": ({"mu": 0.0}, "mu must be positive and finite, got 0.0"),
    "lam": ({"lam": math.inf}, "lam must be positive and finite, got inf"),
    "theta": (
        {"theta": -1.0, "features": {"f": [0] * 6}},
        "theta of feature 'f' must be positive and finite, got -1.0",
    ),
    "no theta": ({"features": {"f": [0] * 6}}, "got theta=None and features=['f']"),
    "names": (
        {"theta": {"g": 0.1}, "features": {"f": [0] * 6}},
        "theta must have the names ['f'], got ['g']",
    ),
    "shape": (
        {"theta": 0.1, "features": {"f": [0] * 5}},
        "features['f'] must be int [6], got int64 [5]",
    ),
    "xi": ({"xi": 1.5}, "xi must be above 0 and at most 1, a fraction of a cell, got 1.5"),
    "slack": ({"slack": -0.1}, "slack must be at least 0, got -0.1"),
    "burn_in": ({"burn_in": -1}, "burn_in must be in 0 to 100000000, got -1"),
    "clients": ({"clients": 7}, "clients must be in 1 to 6, the number of samples, got 7"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    change, message = ERRORS[case]
    options = {"clients": 2, "mu": 1.0, "lam": 1.0, "seed": 0, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        matched([0, 0, 0, 1, 1, 1], **options)


# The QPs.


@pytest.mark.parametrize("groups", [np.arange(5)[:, None], SIX], ids=["(1)", "(2)"])
@pytest.mark.parametrize("clients", [1, 2, 9])
@pytest.mark.parametrize("seed", range(4))
def test_no_feasible_table_is_closer(groups: NDArray[np.int64], clients: int, seed: int) -> None:
    sizes, counts, target = problem(seed, clients, groups)
    table = closest_table(sizes, counts, target, groups)
    check_sums(table, sizes, counts, 1e-7)
    # The loss is convex: L(a) - min L <= max over feasible b of <grad L(a), a - b>, a linear
    # programme that another solver takes.
    excess = np.array(
        [
            [row[(groups == g).any(axis=1)].sum() for g in range(target.shape[1])] - goal
            for row, goal in zip(table, target, strict=True)
        ]
    )
    slope = 2 * excess[:, groups].sum(axis=2)
    rows = np.kron(np.eye(clients), np.ones(len(groups)))
    columns = np.kron(np.ones(clients), np.eye(len(groups)))
    best = linprog(
        slope.ravel(),
        A_eq=np.concatenate([rows, columns]),
        b_eq=np.concatenate([sizes, counts]),
        method="highs",
    )
    assert best.status == 0
    gap = float((slope * table).sum()) - best.fun
    assert abs(gap) <= 1e-6 * max(1.0, loss_of(table, target, groups))


def test_a_target_that_fits_is_met() -> None:
    table = np.random.default_rng(0).integers(1, 9, (4, 5))
    found = closest_table(
        table.sum(axis=1), table.sum(axis=0), table.astype(float), np.arange(5)[:, None]
    )
    np.testing.assert_allclose(found, table, atol=1e-3)


def test_a_solver_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"sizes must sum to 6, as counts do, got 2"):
        closest_table(np.array([1, 1]), np.array([5, 1]), np.zeros((2, 2)), np.array([[0], [1]]))
    monkeypatch.setattr("fedjax_sim.partition.closest.STEPS", 2)
    with pytest.raises(RuntimeError, match=r"no closest table for 9 clients and 6 columns: "):
        closest_table(*problem(0, 9, SIX), SIX)


def test_many_clients_and_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks or at once, and with sizes over four orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = 1 + np.sort(rng.pareto(0.5, 300) * 10).astype(int) % 20_000
    counts = 1 + rng.multinomial(sizes.sum() - 6, rng.dirichlet(np.ones(6)))
    mixes = [rng.dirichlet(np.full(width, 0.05), 300) for width in (2, 3)]
    target = sizes[:, None] * np.concatenate(mixes, axis=1)
    table = closest_table(sizes, counts, target, SIX)
    check_sums(table, sizes, counts, 1e-6)
    monkeypatch.setattr("fedjax_sim.partition.closest.CHUNK", 1000)
    np.testing.assert_allclose(closest_table(sizes, counts, target, SIX), table, atol=1e-3)


# Algorithm 3.


def start(seed: int, groups: NDArray[np.int64]) -> tuple[Any, Any, np.random.Generator]:
    sizes, counts, target = problem(seed, 4, groups)
    return closest_table(sizes, counts, target, groups), target, np.random.default_rng(seed)


def table_in(state: State, shape: tuple[int, ...]) -> Any:
    return state.values[: math.prod(shape)].reshape(shape)


def by_hand(table: Any, moves: Moves, number: int) -> list[Any]:
    """The tables after each of the first moves, as the paper writes them."""
    tables = [table]
    for places, share in zip(moves.places[:number], moves.shares[:number], strict=True):
        (i, j), (i2, j2) = (divmod(int(place), table.shape[1]) for place in places[:2])
        assert i != i2
        assert j != j2
        new = tables[-1].copy()
        e = share * min(new[i, j], new[i2, j2])
        new[i, j] -= e
        new[i2, j2] -= e
        new[i, j2] += e
        new[i2, j] += e
        tables.append(new)
    return tables[1:]


@pytest.mark.parametrize("groups", [np.arange(6)[:, None], SIX], ids=["(1)", "(2)"])
def test_moves_keep_the_sums_and_know_their_loss(groups: NDArray[np.int64]) -> None:
    table, target, rng = start(3, groups)
    moves = draw_moves(groups, target.shape, 0.9, rng)
    assert 0 <= moves.shares.min() < moves.shares.max() < 0.9
    walk = take_moves(start_state(table, target, groups), moves)
    assert walk.losses.dtype == walk.end.values.dtype == np.float64
    for number, expected in enumerate(by_hand(table, moves, 300), start=1):
        found = table_in(walk.after(number), table.shape)
        np.testing.assert_allclose(found, expected, atol=1e-9)
        check_sums(found, table.sum(axis=1), table.sum(axis=0), 1e-9)
        assert walk.losses[number - 1] == pytest.approx(loss_of(found, target, groups), rel=1e-9)
    # Nothing has drifted after all moves.
    end = table_in(walk.end, table.shape)
    check_sums(end, table.sum(axis=1), table.sum(axis=0), 1e-9)
    fresh = start_state(end, target, groups)
    np.testing.assert_allclose(walk.end.values, fresh.values, atol=1e-9)
    assert walk.end.loss == pytest.approx(fresh.loss, rel=1e-9)
    np.testing.assert_array_equal(walk.after(BLOCK).values, walk.end.values)


def test_every_rectangle_is_drawn_as_often() -> None:
    moves = draw_moves(np.arange(3)[:, None], (4, 3), 0.5, np.random.default_rng(0))
    corners, counts = np.unique(moves.places[:, :2], axis=0, return_counts=True)
    assert len(corners) == 4 * 3 * 3 * 2
    expected = BLOCK / len(corners)
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)
    assert moves.shares.mean() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("slack", [0.05, math.inf])
@pytest.mark.parametrize(("burn_in", "moves"), [(0, 0), (70, 0), (0, 50), (70, 50)])
@pytest.mark.parametrize("groups", [np.arange(6)[:, None], SIX], ids=["(1)", "(2)"])
def test_the_best_table_after_the_burn_in_is_kept(
    groups: NDArray[np.int64], burn_in: int, moves: int, slack: float
) -> None:
    table, target, _ = start(5, groups)
    options: dict[str, Any] = {"xi": 0.3, "slack": slack, "burn_in": burn_in, "moves": moves}
    kept = random_table(table, target, groups, **options, rng=np.random.default_rng(1))

    rng, expected = np.random.default_rng(1), table
    if burn_in:
        way = by_hand(table, draw_moves(groups, target.shape, 0.3, rng), burn_in)
        limit = (1 + slack) ** 2 * loss_of(table, target, groups)
        passed = [n for n, a in enumerate(way) if loss_of(a, target, groups) > limit]
        assert bool(passed) == (slack == 0.05)
        expected = way[passed[0]] if passed else way[-1]
    if moves:
        way = by_hand(expected, draw_moves(groups, target.shape, 0.3, rng), moves)
        expected = min([expected, *way], key=lambda a: loss_of(a, target, groups))
    np.testing.assert_allclose(kept, expected, atol=1e-9)


def test_blocks_join_up() -> None:
    groups = np.arange(6)[:, None]
    table, target, _ = start(2, groups)
    options: dict[str, Any] = {"xi": 0.5, "slack": math.inf, "moves": 0}
    rng = np.random.default_rng(4)
    long = random_table(table, target, groups, burn_in=BLOCK + 10, rng=rng, **options)
    rng = np.random.default_rng(4)
    half = random_table(table, target, groups, burn_in=BLOCK, rng=rng, **options)
    both = random_table(half, target, groups, burn_in=10, rng=rng, **options)
    np.testing.assert_allclose(long, both, atol=1e-9)
    assert np.abs(long - half).max() > 1e-3


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_a_table_without_rectangles_stays(shape: tuple[int, int]) -> None:
    table = np.full(shape, 2.0)
    groups = np.arange(shape[1])[:, None]
    kept = random_table(
        table, table + 1, groups, xi=0.5, slack=0.1, burn_in=9, moves=9,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    np.testing.assert_array_equal(kept, table)


# Rounding.


@given(clients=st.integers(1, 12), columns=st.integers(1, 12), seed=seeds)
@settings(max_examples=200, deadline=None)
def test_rounding_keeps_the_sums(clients: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 2, (5, clients, columns))
    sums = tables[0].sum(axis=1), tables[0].sum(axis=0)
    # Shuffles of one table by swaps that keep its sums, and their mean with random weights.
    for table in tables[1:]:
        table[:] = tables[0]
        for _ in range(40):
            (i, i2), (j, j2) = rng.integers(clients, size=2), rng.integers(columns, size=2)
            square = table[np.ix_([i, i2], [j, j2])]
            if square[0, 0] == square[1, 1] != square[0, 1] == square[1, 0]:
                table[np.ix_([i, i2], [j, j2])] = 1 - square
    mean = np.tensordot(rng.dirichlet(np.ones(5)), tables, 1)
    rounded = round_table(mean, rng)
    check_sums(rounded, *sums, 0)
    assert np.abs(rounded - mean).max() < 1


def test_whole_tables_stay_and_rounding_errors_do_not_count() -> None:
    table = np.random.default_rng(0).integers(0, 50, (30, 20))
    noise = np.random.default_rng(1).uniform(-1e-10, 1e-10, table.shape)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(round_table(table.astype(float), rng), table)
    np.testing.assert_array_equal(round_table(table + noise, rng), table)


def test_rounding_has_no_bias() -> None:
    rng = np.random.default_rng(0)
    sizes, counts = whole_sums(rng, 6, 4, 30)
    table = np.outer(sizes, counts) / counts.sum()
    rounded = np.array([round_table(table, rng) for _ in range(2000)])
    part = table - np.floor(table)
    sigma = np.sqrt(part * (1 - part) / 2000)
    assert np.all(np.abs(rounded.mean(axis=0) - table) <= 5 * sigma + 1e-12)
    assert np.ptp(rounded, axis=0).max() == 1
