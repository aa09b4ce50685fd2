"""Folds of clients, hold-outs and standardisation: who sees what, and that runs do not mix."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees, known
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.problem import Problem, by_clients, by_holdout, official, population
from fedjax_sim.data import (
    EvalSet,
    client_folds,
    client_holdout,
    fedaug,
    from_arrays,
    shift_rows,
    standardise_global,
    standardise_local,
    take_clients,
)
from fedjax_sim.partition import Partition, partition_from_lists
from fedjax_sim.run.rows import row_of

some = settings(max_examples=200, deadline=None, derandomize=True)


@some
@given(st.integers(3, 60), st.integers(3, 12), st.integers(0, 5))
def test_folds_deal_every_client_to_every_role(clients: int, folds: int, seed: int) -> None:
    train = clients - 2 * -(-clients // folds)
    if clients < folds or train < 1:
        with pytest.raises(ValueError, match=f"clients must .* {folds} folds .*, got {clients}$"):
            client_folds(clients, folds, seed=seed)
        return
    made = client_folds(clients, folds, seed=seed)
    assert len(made) == folds
    assert sorted(np.concatenate([fold.test for fold in made])) == list(range(clients))
    for fold in made:
        assert sorted(np.concatenate(fold)) == list(range(clients))
        assert len(fold.train) == train
        assert 0 <= -(-clients // folds) - len(fold.test) <= 1
        assert 0 <= len(fold.validation) - len(fold.test) <= 2
    other = client_folds(clients, folds, seed=seed)
    assert all(np.array_equal(a, b) for one, two in zip(made, other, strict=True)
               for a, b in zip(one, two, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("clients", "sizes"), [(100, (60, 20, 20)), (143, (85, 29, 29)), (164, (98, 33, 33))]
)
def test_folds_have_the_sizes_of_the_paper(clients: int, sizes: tuple[int, ...]) -> None:
    assert tuple(map(len, client_folds(clients, seed=0)[0])) == sizes


def test_folds_differ_by_seed_and_need_three_roles() -> None:
    first, second = (client_folds(40, seed=seed)[0].test for seed in (0, 1))
    assert not np.array_equal(first, second)
    with pytest.raises(ValueError, match="folds must be at least 3"):
        client_folds(40, 2, seed=0)


lists = st.lists(st.integers(1, 30), min_size=1, max_size=8).map(
    lambda sizes: Partition(
        np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32),
        np.cumsum([0, *sizes]).astype(np.int32),
    )
)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([0, -1], r"clients must be integers \[K\] in 0 to 2, got \[ 0 -1\]"),
        ([0.0], "must be integers"),
        ([2, 0, 2], r"clients must have each client once, got \[2 0 2\]"),
    ],
)
def test_clients_that_cannot_be_taken(clients: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_clients(partition_from_lists([[0], [1, 2], [3]]), clients)


def test_copies_stay_copies_and_are_never_held_out() -> None:
    plan = fedaug([0, 0, 0, 1], partition_from_lists([[2], [0, 1, 3]]), 0.0).partition
    taken = take_clients(plan, [1])
    assert (taken.index.tolist(), taken.repeats) == ([0, 1, 3, 4 + 3], True)
    with pytest.raises(ValueError, match="hold out before sharing or augmenting"):
        client_holdout(plan, 0.5)
    copied = partition_from_lists([[0, 1, 5]])
    with pytest.raises(ValueError, match="partitions must have rows in 0 to 3, got 5"):
        shift_rows([copied], 4)


@some
@given(lists, st.floats(0.01, 0.99), st.sampled_from([None, 0, 3]))
def test_holdout_cuts_each_client(partition: Partition, fraction: float, seed: int | None) -> None:
    train, test = client_holdout(partition, fraction, seed=seed)
    for own, kept, held in zip(partition.lists, train.lists, test.lists, strict=True):
        n = len(own)
        assert sorted([*kept, *held]) == sorted(own)
        assert len(held) == (0 if n == 1 else min(max(round(fraction * n), 1), n - 1))
        if seed is None:
            assert sorted(held) == sorted(own[n - len(held) :])


def test_holdout_is_random_by_its_seed() -> None:
    partition = partition_from_lists([range(100)])
    held = [client_holdout(partition, 0.3, seed=seed)[1].index.tolist() for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]
    with pytest.raises(ValueError, match="fraction must be above 0 and below 1, got 1"):
        client_holdout(partition, 1)


def table(seed: int = 0) -> tuple[np.ndarray, Partition]:
    """Columns far from standard, the last one constant; seven clients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(90, 4)) * [1, 30, 0.01, 0] + [0, 1e4, -3, 5]
    cuts = np.array([0, 5, 6, 20, 41, 60, 77, 90])
    return x, Partition(rng.permutation(90).astype(np.int32), cuts.astype(np.int32))


NUMERIC = np.array([True, True, False, True])


def test_global_statistics_are_of_the_training_clients_alone() -> None:
    x, partition = table()
    train = take_clients(partition, [0, 2, 5])
    scaled = standardise_global(x, train, numeric=NUMERIC)
    own = scaled[train.index].astype(np.float64)
    np.testing.assert_allclose(own.mean(axis=0)[NUMERIC], 0, atol=1e-4)
    np.testing.assert_allclose(own.std(axis=0)[NUMERIC], [1, 1, 0], atol=1e-4)
    np.testing.assert_array_equal(scaled[:, 2], x[:, 2].astype(np.float32))
    others = np.setdiff1d(np.arange(90), train.index)
    changed = x.copy()
    changed[others] = np.nan
    np.testing.assert_array_equal(
        standardise_global(changed, train, numeric=NUMERIC)[train.index], scaled[train.index]
    )


BAD_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"x": np.full((4, 2), "a")}, r"x must be numbers \[n, ..., C\], got <U1 \[4, 2\]"),
    "NaN": (
        {"x": np.full((4, 2), np.nan)},
        "x must be finite where statistics are computed",
    ),
    "columns": ({"numeric": [1]}, r"numeric must be bool \[2\], got int64 \[1\]"),
    "rows": ({"rows": [[0, 4]]}, "{name} must have samples in 0 to 3, got 0 to 4"),
    "nobody": ({"rows": [[]]}, "{name} must have samples in 0 to 3, got none"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
@pytest.mark.parametrize("by", ["train", "clients"])
def test_tables_that_cannot_be_standardised(case: str, by: str) -> None:
    given, message = BAD_TABLES[case]
    given = {"x": np.eye(4)[:, :2], "numeric": None, "rows": [[0, 1], [2, 3]]} | given
    owners = partition_from_lists(given["rows"])
    standardise: Any = {"train": standardise_global, "clients": standardise_local}[by]
    with pytest.raises(ValueError, match=f"^{message.format(name=by)}"):
        standardise(given["x"], owners, numeric=given["numeric"])


def test_statistics_need_a_sample_of_every_client_and_of_no_other() -> None:
    x = np.array([[1.0], [3.0], [5.0]])
    fit = partition_from_lists([[0], []])
    with pytest.raises(ValueError, match=r"fit must have a sample of every client.* of client 1"):
        standardise_local(x, partition_from_lists([[0, 1], [2]]), fit=fit)
    alone = standardise_local(x, partition_from_lists([[0, 1], []]), fit=fit)
    assert alone.tolist() == [[0], [2], [5]]


def test_rounding_is_no_spread_and_close_values_stay_apart() -> None:
    """Column 0 is constant but for the rounding of its mean; float32 would merge column 1."""
    x = np.stack([np.full(30, 0.1), 1e9 + np.arange(30) % 3], axis=1)
    everyone, some = (partition_from_lists([range(rows)]) for rows in (30, 21))
    assert x[:21, 0].std() > 0
    wanted = np.stack([np.zeros(30), np.sqrt(1.5) * (np.arange(30) % 3 - 1)], axis=1)
    for scaled in (standardise_global(x, some), standardise_local(x, everyone, fit=some)):
        np.testing.assert_allclose(scaled, wanted, rtol=1e-6, atol=1e-12)


def test_local_statistics_are_each_clients_own() -> None:
    x, partition = table()
    scaled = standardise_local(x, partition, numeric=NUMERIC)
    for rows in partition.lists:
        alone = standardise_global(x, partition_from_lists([rows]), numeric=NUMERIC)
        np.testing.assert_array_equal(scaled[rows], alone[rows])
    kept, held = client_holdout(partition, 0.3, seed=0)
    fitted = standardise_local(x, partition, fit=kept, numeric=NUMERIC)
    changed = x.copy()
    changed[held.index] = np.nan
    np.testing.assert_array_equal(
        standardise_local(changed, partition, fit=kept, numeric=NUMERIC)[kept.index],
        fitted[kept.index],
    )
    with pytest.raises(ValueError, match="fit must have 7 clients, as clients has, got 2"):
        standardise_local(x, partition, fit=take_clients(partition, [0, 1]))


def rows_of(data: Any, run: int) -> list[list[int]]:
    """The samples of each client in one run."""
    start = np.atleast_2d(data.start)[run]
    index = np.atleast_2d(data.index)[run if data.index.ndim == 2 else 0]
    return [sorted(index[a:b].tolist()) for a, b in itertools.pairwise(start)]


def table_problem(standardise: Any, change: np.ndarray | float = 1.0) -> tuple[Any, Any, Problem]:
    """Two seeds of three folds over seven clients; the samples times ``change``."""
    x, partition = table()
    dataset = from_arrays("table", x, np.arange(90) % 2, numeric=NUMERIC)
    everyone = population(dataset, "clients")
    everyone = everyone._replace(train_x=(everyone.train_x * change).astype(np.float32))
    parts = [partition, table(1)[1]]
    return everyone, parts, by_clients(everyone, parts, (0, 1), 3, standardise)


def test_folds_of_all_seeds_are_one_batch() -> None:
    everyone, parts, problem = table_problem("global")
    assert problem.runs == [{"seed": s, "fold": f} for s in (0, 1) for f in range(3)]
    n = len(everyone.train_y)
    for r, run in enumerate(problem.runs):
        fold = client_folds(7, 3, seed=run["seed"])[run["fold"]]
        own = parts[run["seed"]].lists
        roles = (problem.data, problem.validation, problem.test)
        for role, clients in zip(roles, fold, strict=True):
            expected = [sorted((own[k] + r * n).tolist()) for k in clients]
            assert [rows for rows in rows_of(role, r) if rows] == expected
    np.testing.assert_array_equal(problem.data.y, np.tile(everyone.train_y, 6))
    assert problem.data.x is problem.test.x is known(problem.validation).x
    assert problem.scaled
    assert problem.scored.startswith("mean over test clients; 1 train, 3 validate, 3 test in each")


@pytest.mark.parametrize("standardise", ["global", "local"])
def test_what_trains_does_not_depend_on_test_clients(standardise: str) -> None:
    everyone, _, problem = table_problem(standardise)
    n = len(everyone.train_y)
    for r in range(len(problem.runs)):
        train = np.concatenate(rows_of(problem.data, r))
        held = np.concatenate([*rows_of(problem.test, r), *rows_of(problem.validation, r)])
        assert not np.intersect1d(train, held).size
        change = np.ones((n, 1))
        change[held.astype(int) - r * n] = -50
        other = table_problem(standardise, change)[2]
        np.testing.assert_array_equal(other.data.x[train], problem.data.x[train])
        assert (other.data.x[held.astype(int)] != problem.data.x[held.astype(int)]).any()


def test_images_and_tokens_are_taken_as_they_are() -> None:
    digits = fs.load_dataset("digits")
    everyone = population(digits, "clients")
    assert len(everyone.train_y) == 1797
    # Of the official training images.
    assert np.array_equal(known(everyone.mean), known(digits.mean))
    parts = [fs.partition.iid(everyone.train_y, 10, seed=0)]
    problem = by_clients(everyone, parts, (0, 1), 5)
    samples: object = problem.data.x
    assert samples is everyone.train_x
    assert not problem.scaled
    with pytest.raises(
        ValueError, match="standardise='local' is for tables of numbers, not digits"
    ):
        by_clients(everyone, parts, (0,), 5, "local")
    assert population(digits, "official") is digits
    tokens = from_arrays("text", np.arange(40).reshape(20, 2), np.zeros(20, int), scale=False)
    problem = by_holdout(tokens, [partition_from_lists([range(10), range(10, 16)])], (0, 1), 0.2)
    assert rows_of(problem.test, 1) == [[8, 9], [15]]  # neighbours overlap: the last of each


def federation_of(x: np.ndarray, y: np.ndarray, seeds: tuple[int, ...]) -> Problem:
    dataset = from_arrays("blobs", x, y, test=np.zeros(len(y), bool))
    parts = [fs.partition.dirichlet(y, 10, alpha=1.0, seed=s) for s in seeds]
    return by_clients(population(dataset, "clients"), parts, seeds, 3)


@pytest.mark.slow
def test_a_fold_in_a_batch_is_that_fold_alone() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    x = rng.normal(size=(300, 5)) + y[:, None]
    model = fs.models.logistic((5,), 2)
    algorithm = fs.fedavg(
        fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8),
        clients_per_round=2,
    ).on(fs.make_execution(1))

    def run(data: Any, sets: tuple[EvalSet, EvalSet], seeds: list[int]) -> fs.Result:
        test, validation = sets
        return fs.simulate(
            algorithm, model, data, test, rounds=4, classes=2, seeds=seeds, validation=validation
        )

    def lone(examples: EvalSet) -> EvalSet:
        return dataclasses.replace(examples, index=examples.index[r], start=examples.start[r])

    problem, r = federation_of(x, y, (0, 1)), 4  # seed 1, fold 1
    sets = (problem.test, known(problem.validation))
    together = run(problem.data, sets, [run["seed"] for run in problem.runs])
    assert together.xla_programs <= 4
    start = problem.data.start[r]
    data = dataclasses.replace(problem.data, start=start, capacity=int(np.diff(start).max()))
    alone = run(data, (lone(sets[0]), lone(sets[1])), [1])
    mine = jax.tree.map(lambda a: a[r : r + 1], together.variables)
    assert_trees(mine, alone.variables, rtol=2e-5, atol=2e-6)
    for metric in ("accuracy", "f1", "auc"):
        for part in ("test", "validation"):
            batch, single = (
                result.series(metric, by_client=True, part=part) for result in (together, alone)
            )
            np.testing.assert_allclose(batch[:, r], single[:, 0], atol=2e-3)
    assert len({tuple(v) for v in together.series("auc", by_client=True).T.tolist()}) == 6


def test_official_test_set_is_pooled() -> None:
    digits = fs.load_dataset("digits")
    parts = [fs.partition.iid(digits.train_y, 4, seed=s) for s in (0, 1)]
    problem = official(digits, parts, (0, 1))
    assert problem.test.clients == 1
    assert (len(problem.test.index), problem.validation) == (359, None)
    assert official(digits, parts[:1], (0, 1)).data.start.ndim == 1


TINY = ["--rounds", "3", "--clients", "10", "--seeds", "2", "--model", "logistic", "--no-cache",
        "--emd", "0.9", "--compare", "none", "--algo", "fedavg", "--devices", "1"]  # fmt: skip


def finished(folder: Path, extra: list[str]) -> tuple[Any, list[Any], Any]:
    assert bench.main([*TINY, *extra, "--out", str(folder)]) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    return (
        summary["fedavg"],
        [json.loads(line) for line in lines],
        json.loads((folder / "config.json").read_text()),
    )


def test_the_only_client_of_a_fold_has_the_score_of_its_samples() -> None:
    problem = fs.toy()
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=5).on(fs.make_execution(1))
    where = problem.model, problem.data, problem.test
    result = fs.simulate(algorithm, *where, rounds=1, classes=10, seeds=(0,))
    (table,) = result.provenance.tables(result.task)
    row, clients = row_of(result.evaluations[-1], 0, {}, table, result.task, ["A"])
    assert clients["names"] == ["A"]
    assert clients["client_accuracy"] == result.accuracy[-1]
    assert row["client_accuracy"]["clients"] == 1
    _, expected = row_of(result.evaluations[-1], 0, {}, table, result.task)
    assert len(expected["client_accuracy"]) == 10  # clients that train, by their labels


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_command_by_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, records, config = finished(tmp_path / "run", ["--split", "clients", "--folds", "3"])
    assert (config["split"], config["folds"], config["score"]) == ("clients", 3, "accuracy")
    assert (config["clients"], config["clients_per_round"]) == (10, 2)
    assert [(r["round"], r["seed"], r["fold"]) for r in records] == [
        (t, s, f) for t in (1, 2, 3) for s in (0, 1) for f in (0, 1, 2)
    ]
    last = [r["client_accuracy"]["mean"] for r in records[-6:]]
    assert summary["score"] == "client_accuracy"
    assert summary["score_last_per_run"] == last
    assert summary["client_accuracy_last"] == pytest.approx(np.mean(last))
    assert summary["accuracy_per_seed"] == pytest.approx(
        [np.mean([r["accuracy"] for r in records[-6:] if r["seed"] == s]) for s in (0, 1)]
    )
    for i, value in enumerate(summary["score_validated_per_run"]):
        own = records[i::6]
        best = max(own, key=lambda r: r["validation"]["client_accuracy"]["mean"])
        assert value == best["client_accuracy"]["mean"]
    out = capsys.readouterr().out
    assert "score: accuracy, mean over test clients; 2 train, 4 validate, 4 test" in out
    assert "validated %" in out
    assert f"{100 * summary['client_accuracy_last']:.2f} ±" in out


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_command_by_holdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--split", "holdout", "--test-fraction", "0.3", "--score", "f1"]
    summary, records, config = finished(tmp_path / "run", extra)
    assert (config["test_fraction"], config["folds"]) == (0.3, None)
    assert summary["score"] == "client_f1"
    assert not any(key.endswith("validated") for key in summary)
    assert all("validation" not in r and "fold" not in r for r in records)
    assert (
        "score: f1, mean over 10 clients, each on 30 % of its own samples"
        in capsys.readouterr().out
    )


def test_command_scores_tables_by_what_their_papers_report() -> None:
    assert parse(["--dataset", "covertype"]).scores.score == "f1"
    assert parse(["--dataset", "eicu_demo"]).scores.score == "auc"
    assert parse(["--dataset", "eicu_demo", "--score", "f1"]).scores.score == "f1"
    config = parse(["--split", "clients"]).scores
    assert (config.folds, config.test_fraction, config.score) == (5, None, "accuracy")
    assert parse([]).scores.folds is None


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_command_on_natural_clients_of_a_table(tmp_path: Path, data_dir: str) -> None:
    """The eICU demo: hospitals, AUC; a hospital whose patients all survive has none."""
    argv = ["--dataset", "eicu_demo", "--data-dir", data_dir, "--partition", "natural",
            "--split", "clients", "--standardise", "local", "--seeds", "1", "--rounds", "2",
            "--clients-per-round", "5", "--algo", "fedavg", "--compare", "none", "--no-cache",
            "--batch-size", "64", "--model", "logistic", "--devices", "1",
            "--out", str(tmp_path / "run")]  # fmt: skip
    assert bench.main(argv) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["fedavg"]
    assert summary["score"] == "client_auc"
    assert all(0 <= value <= 1 for value in summary["score_validated_per_run"])
    assert summary["clients"] > 20
    argv[argv.index("local")] = "global"
    problem = build(parse(argv)).problem
    assert problem.scaled
    x, rows = np.asarray(problem.data.x), [own for own in rows_of(problem.data, 0) if own]
    together = x[np.concatenate(rows)]
    numeric = (np.abs(together.mean(axis=0)) < 1e-3) & (np.abs(together.std(axis=0) - 1) < 1e-3)
    assert numeric.any()
    assert np.abs([x[own].mean(axis=0)[numeric] for own in rows]).max() > 0.1


BAD = {
    "folds 2": (["--split", "clients", "--folds", "2"], "--folds"),
    "folds of another split": (["--folds", "5"], "--folds is for --split clients, not official"),
    "too few": (
        ["--split", "clients", "--folds", "11"],
        "--clients must be enough for 11 folds with one left to train, got 10",
    ),
    "fraction": (["--split", "holdout", "--test-fraction", "1"], "--test-fraction"),
    "fraction of another split": (["--test-fraction", "0.5"], "--test-fraction is for --split"),
    "local": (["--standardise", "local"], "--standardise local is for --split clients or holdout"),
    "local images": (
        ["--split", "clients", "--standardise", "local"],
        "--standardise='local' is for tables of numbers",
    ),
    "split": (["--split", "nope"], "--split"),
    "score": (["--score", "nope"], "--score"),
    "cohort": (["--split", "clients", "--clients-per-round", "7"], "1..6, got 7"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_combination_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra, wanted = BAD[case]
    assert bench.main([*TINY, "--out", str(tmp_path / "run"), *extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedjax_sim.bench: error: ")
    assert captured.err.count("\n") == 1
    assert wanted in captured.err
    assert not (tmp_path / "run").exists()
