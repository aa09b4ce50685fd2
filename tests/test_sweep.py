"""A grid of settings: its points are runs of one program, and each equals a run of its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, compiled_programs, known, make_federation, some_slow

import fedjax_sim as fs
from fedjax_sim.base import LocalUpdate
from fedjax_sim.data import eval_set
from fedjax_sim.run import Point, Sweep
from fedjax_sim.run.candidates import Candidates, group_candidates

Make = Callable[..., fs.Algorithm]
MODEL = fs.models.logistic((6,), 3)
OBJECTIVE = fs.empirical_risk(MODEL)
ONE = fs.make_execution(1)
SCALE: Any = {"classes": 3, "rounds": 4, "eval_every": 2}


def sgd(lr: float, **settings: Any) -> LocalUpdate:
    return fs.local_sgd(OBJECTIVE, optax.sgd(lr), batch_size=8, **settings)


def with_root(federation: Federation) -> fs.ClientData:
    """The clients, and the rows of nobody as the server's."""
    data = federation.data
    root = np.setdiff1d(np.arange(len(data.y)), data.index).astype(np.int32)
    return fs.client_data(data.x, data.y, federation.partition, root=root)


def alone(make: Make, point: Point, data: fs.ClientData, test: Any, **settings: Any) -> fs.Result:
    algorithm = make(**point.settings)
    return fs.simulate(algorithm, MODEL, data, test, seeds=point.seeds, **SCALE, **settings)


def assert_equal(point: Point, its: fs.Result) -> None:
    """Weights, states, scores and counts."""
    ours = point.result
    assert point.diverged is None
    assert_trees(ours.variables, its.variables, rtol=2e-5, atol=2e-6)
    assert_trees(ours.state, its.state, rtol=2e-5, atol=2e-6)
    # What devices waited for depends on who is beside.
    mine, other = (r.metrics._replace(executed=r.metrics.steps) for r in (ours, its))
    assert_trees(mine, other, rtol=2e-5, atol=2e-6)
    for here, there in zip(ours.evaluations, its.evaluations, strict=True):
        assert_trees(here.test, there.test, rtol=2e-5, atol=1e-6)
        for name in ("round", "uploads", "downloads", "bytes_up", "bytes_down"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    assert (ours.samples, ours.steps) == (its.samples, its.steps)


def scaffold_adam(tau: float, lr: float) -> fs.Algorithm:
    """Numbers of what clients keep and of the server's optimiser."""
    local = sgd(lr)
    adam = fs.algorithms.fedadam(local, clients_per_round=3, tau=tau).parts.server
    return fs.algorithms.scaffold(local, clients_per_round=3).replace(server=adam)


MAKERS: dict[str, tuple[Make, dict[str, list[Any]]]] = {
    "adam": (scaffold_adam, {"tau": [0.001, 0.1], "lr": [0.05, 0.2]}),
    "radfed": (
        lambda lr: fs.radfed(sgd(lr), clients_per_round=3, redistribution_rounds=2),
        {"lr": [0.05, 0.2]},
    ),
    "fedasync": (
        lambda alpha: fs.algorithms.fedasync(sgd(0.1), clients_per_round=4, alpha=alpha),
        {"alpha": [0.3, 0.9]},
    ),
    "fltrust": (
        lambda lr: fs.algorithms.fltrust(sgd(lr), clients_per_round=3),
        {"lr": [0.05, 0.2]},
    ),
    "ditto": (
        lambda lam: fs.algorithms.ditto(sgd(0.1), clients_per_round=3, lam=lam),
        {"lam": [0.1, 1.0]},
    ),
}


def on(execution: fs.Execution, make: Make) -> Make:
    """The same algorithms on these devices."""
    return lambda **settings: make(**settings).on(execution)


@pytest.mark.parametrize("name", some_slow(MAKERS))
def test_points_are_runs_of_one_program(name: str, federation: Federation) -> None:
    maker, grid = MAKERS[name]
    execution = fs.make_execution(4, chunk=0) if name == "radfed" else ONE
    make = on(execution, maker)
    data, test = with_root(federation), federation.test
    with compiled_programs() as programs:
        swept = fs.sweep(make, grid, MODEL, data, test, seeds=[0, 3], **SCALE)
    assert len(swept.plan.groups) == 1
    most = 4 + make(**swept.points[0].settings).ends
    assert len(programs) == most
    # compose tries a redistribution, by a program that JAX has not compiled if no test did before.
    tried = name == "radfed"
    assert {point.result.xla_programs for point in swept.points} <= {*range(2, most + tried + 1)}
    last = [point.result.score[-1].tolist() for point in swept.points]
    assert_equal(swept.points[-1], alone(make, swept.points[-1], data, test))
    assert last[0] != last[-1] or name == "ditto"  # the settings are not without effect


@pytest.mark.slow
def test_runs_have_their_own_clients_and_sets() -> None:
    """Folds: a partition, a test and a validation set for each seed."""
    federation = make_federation((20, 9, 14, 30, 11))
    y = np.asarray(federation.data.y)
    parts = [fs.partition.iid(y, 6, seed=seed) for seed in (0, 1)]
    data = fs.client_data(federation.data.x, y, parts)
    x, labels = federation.test
    test = eval_set(x, labels, [fs.partition.iid(labels, 2, seed=s) for s in (0, 1)])
    held = eval_set(x, labels, [fs.partition.iid(labels, 3, seed=s) for s in (2, 3)])

    def make(mu: float, lr: float) -> fs.Algorithm:
        return fs.algorithms.fedprox(sgd(lr), clients_per_round=3, mu=mu).on(ONE)

    told: list[str] = []
    swept = fs.sweep(
        make,
        {"mu": [0.01, 1.0], "lr": [0.05, 0.2]},
        MODEL,
        data,
        test,
        validation=held,
        seeds=[4, 5],
        on_plan=lambda plan: told.append(str(plan)),
        **SCALE,
    )
    assert told == ["4 points x 2 seeds = 8 runs, in 1 group of programs"]
    assert [dict(point.settings) for point in swept.points] == [
        {"mu": mu, "lr": lr} for mu in (0.01, 1.0) for lr in (0.05, 0.2)
    ]
    third = alone(make, swept.points[2], data, test, validation=held)
    assert_equal(swept.points[2], third)

    # The best point by the validation set, each run at its best round.
    results = [point.result for point in swept.points]
    scores = [np.mean(np.max(validated(result), axis=0)) for result in results]
    assert swept.best() is swept.points[int(np.argmax(scores))]
    losses = [
        np.mean(np.min(r.series("loss", by_client=True, part="validation"), axis=0))
        for r in results
    ]
    assert swept.best("loss") is swept.points[int(np.argmin(losses))]

    rows = swept.table()
    assert len(rows) == 4 * 2 * 2
    assert [rows[10][key] for key in ("mu", "lr", "seed", "round")] == [1.0, 0.05, 4, 4]
    last = third.evaluations[-1]
    assert rows[10]["accuracy"] == pytest.approx(last.test.reported.accuracy[0], abs=1e-6)
    wanted = known(last.validation).reported.accuracy[0]
    assert rows[10]["validation_accuracy"] == pytest.approx(wanted, abs=1e-6)
    assert rows[10]["bytes_up"] == last.bytes_up[0]


def validated(result: fs.Result) -> np.ndarray:
    return result.series("accuracy", by_client=True, part="validation")


def grouped(make: Make, grid: list[dict[str, Any]], data: fs.ClientData) -> list[list[int]]:
    """Which points are runs of the same programs."""
    return group_candidates(Candidates(make, grid, [make(**point) for point in grid]), MODEL, data)


def test_what_changes_shapes_is_another_program(federation: Federation) -> None:
    def make(epochs: int, lr: float) -> fs.Algorithm:
        return fs.fedavg(sgd(lr, epochs=epochs), clients_per_round=3).on(ONE)

    grid = [{"epochs": epochs, "lr": lr} for epochs in (1, 2) for lr in (0.05, 0.2)]
    assert grouped(make, grid, federation.data) == [[0, 1], [2, 3]]


def sparse(sparsity: float, lr: float) -> fs.Algorithm:
    """STC keeps a number of entries that is known when the round is compiled."""
    local = sgd(lr)
    return fs.algorithms.stc(local, clients_per_round=3, sparsity=sparsity).on(ONE)


@pytest.fixture(scope="module")
def in_turn(federation: Federation) -> Sweep:
    grid = {"sparsity": [0.2, 0.5], "lr": [0.1, 0.2]}
    return fs.sweep(sparse, grid, MODEL, federation.data, federation.test, **SCALE)


@pytest.mark.slow
def test_numbers_that_parts_branch_by_are_run_in_turn(
    in_turn: Sweep, federation: Federation
) -> None:
    plan = in_turn.plan
    assert [[p["sparsity"] for p in group] for group in plan.groups] == [[0.2] * 2, [0.5] * 2]
    assert str(plan) == "4 points x 1 seed = 4 runs, in 2 groups of programs, in turn"
    third = in_turn.points[2]
    assert_equal(third, alone(sparse, third, federation.data, federation.test))
    scores = [point.result.evaluations[-1] for point in in_turn.points]
    assert scores[0].bytes_up[0] == scores[1].bytes_up[0] < scores[2].bytes_up[0]
    assert len({float(score.test_loss[0]) for score in scores}) == 4


def test_messages_of_other_sizes_are_other_programs(federation: Federation) -> None:
    """A round is the same to trace, but bytes are counted on the host, once for a group."""

    class scaled(fs.base.Sending):
        share: float

        def send(self, key: Any, kept: Any, update: Any, message: Any, client: Any) -> fs.base.Sent:
            return fs.base.Sent(fs.tree.scale(self.share, update), message, kept)

        def bytes(self, variables: Any) -> int:
            return int(40 * self.share)

    def make(share: float) -> fs.Algorithm:
        return fs.compose(
            sgd(0.1),
            selection=fs.selection.uniform(),
            clients_per_round=3,
            sending=(scaled(share),),
        ).on(ONE)

    settings = [{"share": share} for share in (0.5, 1.0, 0.501)]
    assert grouped(make, settings, federation.data) == [[0, 2], [1]]


@pytest.fixture(scope="module")
def diverging(federation: Federation) -> Callable[[int], tuple[Make, Sweep]]:
    """A grid of which one point diverges, with so many models at once on each of two devices."""

    @functools.cache
    def run(chunk: int) -> tuple[Make, Sweep]:
        execution = fs.make_execution(2, chunk)

        def make(lr: float) -> fs.Algorithm:
            return fs.compose(
                sgd(lr),
                selection=fs.selection.uniform(),
                clients_per_round=3,
            ).on(execution)

        data, test = federation.data, federation.test
        sets: Any = {"validation": test, "execution": execution}
        grid = {"lr": [0.1, 3e38, 0.2]}
        return make, fs.sweep(make, grid, MODEL, data, test, **SCALE, **sets)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_point_that_diverges_is_told_and_takes_no_other_along(
    chunk: int, diverging: Callable[[int], tuple[Make, Sweep]], federation: Federation
) -> None:
    """One run alone is compared with the first grid, and that one with the second."""
    make, swept = diverging(chunk)
    test = federation.test
    assert len(swept.plan.groups) == 1
    lost = swept.points[1]
    first = 1 + np.flatnonzero(~np.isfinite(lost.result.metrics.loss[0]))[0]
    assert re.match(rf"the loss became \w+ in round {first} \(seed 0\)", known(lost.diverged))
    if chunk == 0:
        kept = swept.points[2]
        assert_equal(kept, alone(make, kept, federation.data, test, validation=test))
    else:
        for ours, theirs in zip(swept.points[::2], diverging(0)[1].points[::2], strict=True):
            assert_equal(ours, theirs.result)
    assert swept.points[0].diverged is None
    assert all(row["accuracy"] is None for row in swept.table() if row["lr"] == 3e38)
    assert all(row["loss"] is not None for row in swept.table() if row["lr"] < 1)
    assert swept.best().settings["lr"] < 1
    with pytest.raises(ValueError, match="all 2 points have diverged"):
        Sweep((lost, lost), swept.plan).best()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, r"grid must have values by setting, as \{'mu': \[0.1, 1\]\}, got \{\}"),
        ([("mu", [1.0])], "grid must have values by setting"),
        ({"mu": []}, r"grid must have values for mu, each once, got \[\]"),
        ({"mu": [0.1, 0.1]}, "each once"),
        ({"mu": 0.1}, "grid must have a list of values for mu, got 0.1"),
        ({"mu": "0.1"}, "grid must have a list of values for mu, got '0.1'"),
        ({"mu": [0.1, -1.0]}, "at mu=-1.0: mu must be .* got -1"),
    ],
)
def test_what_is_refused(grid: Any, message: str, federation: Federation) -> None:
    def make(mu: float) -> fs.Algorithm:
        return fs.algorithms.fedprox(sgd(0.1), clients_per_round=3, mu=mu).on(ONE)

    with pytest.raises(ValueError, match=message) as error:
        fs.sweep(make, grid, MODEL, federation.data, federation.test, **SCALE)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_sweep_goes_on_and_another_is_refused(federation: Federation, tmp_path: Path) -> None:
    def make(lr: float) -> fs.Algorithm:
        return fs.fedavg(sgd(lr), clients_per_round=3).on(ONE)

    def go(lrs: list[float], rounds: int, checkpoints: Path | None = tmp_path) -> Sweep:
        data, test = federation.data, federation.test
        return fs.sweep(
            make, {"lr": lrs}, MODEL, data, test, rounds=rounds, classes=3, checkpoints=checkpoints
        )

    go([0.05, 0.2], 2)
    on_top = go([0.05, 0.2], 4)
    assert [e.round for e in on_top.points[0].result.evaluations] == [1, 2, 3, 4]
    whole = go([0.05, 0.2], 4, None)
    assert on_top.table() == whole.table()
    for ours, theirs in zip(on_top.points, whole.points, strict=True):
        assert_trees(ours.result.state, theirs.result.state)
    with pytest.raises(fs.CheckpointError, match="points"):
        go([0.05, 0.3], 4)


@pytest.mark.slow
def test_nothing_is_chosen_by_the_test_set(in_turn: Sweep) -> None:
    with pytest.raises(ValueError, match="the run has no validation set"):
        in_turn.best()
