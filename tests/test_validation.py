"""Validation samples: nobody trains on them, they choose, and the test set is only reported."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import Federation, known
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.problem import Problem, by_holdout, by_names, official
from fedjax_sim.cli.reporting.compare import best_settings, grouped, over_runs
from fedjax_sim.cli.reporting.read import read_folders
from fedjax_sim.cli.studies.plan import read_study
from fedjax_sim.cli.studies.results import select_setting
from fedjax_sim.data import Dataset, EvalSet, eval_set, from_arrays
from fedjax_sim.partition import Partition, partition_from_lists

ONE = fs.make_execution(devices=1)

# Who has which sample.


def rows_of_clients(pool: Any, run: int) -> list[list[int]]:
    """The samples of each client in a run."""
    starts, index = np.atleast_2d(pool.start), np.asarray(pool.index)
    start = starts[run if len(starts) > 1 else 0]
    mine = index[run] if index.ndim == 2 else index
    return [mine[a:b].tolist() for a, b in itertools.pairwise(start)]


def flat(lists: list[list[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(lists)]


def numbered(sizes: list[int], tests: int, *, owned: bool = False) -> tuple[Dataset, Partition]:
    """Samples that are their own numbers, of clients of these sizes; the last are the test set."""
    n = sum(sizes)
    x = np.arange(n + tests, dtype=np.float32)[:, None]
    client = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.arange(tests) % 2])
    dataset = from_arrays(
        "numbered", x, np.arange(n + tests) % 2, test=np.arange(n + tests) >= n, scale=False,
        client=client if owned else None,
    )  # fmt: skip
    ends = np.cumsum([0, *sizes])
    lists = [range(a, b) for a, b in itertools.pairwise(ends)]
    return dataset, partition_from_lists(lists)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=6).filter(lambda s: max(s) > 3),
    share=st.floats(0.01, 0.9),
    split=st.sampled_from(["pooled", "own", "holdout"]),
    one_for_all=st.booleans(),
)
def test_a_share_of_each_clients_training_samples(
    sizes: list[int], share: float, split: str, one_for_all: bool
) -> None:
    dataset, partition = numbered(sizes, 4, owned=split == "own")
    seeds, parts = (3, 5), [partition] * (1 if one_for_all else 2)

    def made(validation: float | None) -> Problem:
        if split == "holdout":
            return by_holdout(dataset, parts, seeds, 0.25, "global", None, validation)
        return official(dataset, parts, seeds, None, validation)

    found, again, plain = made(share), made(share), made(None)
    assert plain.validation is None
    validation = known(found.validation)
    assert validation.clients == (1 if split == "pooled" else len(sizes))
    for r in range(2):
        held, train = (rows_of_clients(pool, r) for pool in (validation, found.data))
        assert held == rows_of_clients(known(again.validation), r)
        assert rows_of_clients(found.test, r) == rows_of_clients(plain.test, r)
        before = rows_of_clients(plain.data, r)
        sought = [min(max(round(share * len(b)), 1), len(b) - 1) for b in before]
        assert [len(b) - len(t) for b, t in zip(before, train, strict=True)] == sought
        taken = [sorted(set(b) - set(t)) for b, t in zip(before, train, strict=True)]
        if split == "pooled":
            taken = [sorted(flat(taken))]
        assert [sorted(h) for h in held] == taken
        assert not {*flat(train)} & {*flat(held)}
        if split == "holdout":
            assert not {*flat(train), *flat(held)} & {*flat(rows_of_clients(found.test, r))}
    assert f"; validated on {100 * share:g} % of their training samples" in found.scored
    assert plain.scored == found.scored.partition("; validated")[0]


def test_neighbouring_tokens_stay_together() -> None:
    """The last of a client test, those before validate."""
    x, none = np.arange(40).reshape(20, 2), np.zeros(20, bool)
    text = from_arrays("text", x, np.zeros(20, int), test=none, scale=False)
    parts = [partition_from_lists([range(10), range(10, 20)])]
    problem = by_holdout(text, parts, (0, 1), 0.2, "global", None, 0.25)
    assert rows_of_clients(known(problem.validation), 1) == [[6, 7], [16, 17]]
    assert rows_of_clients(problem.test, 1) == [[8, 9], [18, 19]]


def test_the_scale_of_a_table_does_not_depend_on_validation_samples() -> None:
    rng = np.random.default_rng(0)
    x, parts = rng.normal(size=(40, 3)), [partition_from_lists([range(25), range(25, 40)])]

    def made(x: np.ndarray) -> Problem:
        table = from_arrays("table", x, np.arange(40) % 2, test=np.zeros(40, bool))
        return by_holdout(table, parts, (0,), 0.2, "global", None, 0.25)

    first = made(x)
    held = np.concatenate(rows_of_clients(known(first.validation), 0)).astype(int)
    trained = np.concatenate(rows_of_clients(first.data, 0)).astype(int)
    assert len(held) == 8
    other = x.copy()
    other[held] *= -50
    second = made(other)
    np.testing.assert_array_equal(first.data.x[trained], second.data.x[trained])
    assert (first.data.x[held] != second.data.x[held]).any()


BASE = ["--clients", "8", "--seeds", "2", "--rounds", "2", "--model", "logistic", "--emd", "0.9",
        "--devices", "1"]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    ["--share-beta 0.1", "--fedaug 0.5 --no-mirror", "--rebalance 0.5", "--server-fraction 0.05"],
)
def test_what_is_shared_copied_or_the_servers_is_none_of_them(flags: str) -> None:
    argv = [*BASE, *flags.split(), "--algo", "fedavg", "--compare", "none", "--validation", "0.2"]
    problem = build(parse(argv)).problem
    data, validation = problem.data, known(problem.validation)
    used = np.asarray(data.index) % len(data.y)  # a copy stands behind the samples
    for r in range(2):
        mine = used[data.start[r, 0] : data.start[r, -1]]
        root = used[slice(*data.root[r])] if data.root is not None else used[:0]
        held = np.concatenate(rows_of_clients(validation, r))
        assert len(held) > 250
        assert not np.intersect1d(np.concatenate([mine, root]), held).size


REFUSED: dict[str, str] = {
    "--split clients --validation 0.1": "--validation is for --split official and holdout, or",
    "--validation 1": "--validation: must be a number above 0 and below 1",
    "--clients 1438 --partition iid --validation 0.1": "--validation 0.1 needs a client with two",
    "--patience 2": "--patience needs scores that are not the test set's: add --validation 0.1",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_validate_is_refused(flags: str) -> None:
    base = [word for word in BASE if word not in ("--emd", "0.9")]
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[flags])}"):
        build(parse([*base, "--algo", "fedavg", "--compare", "none", *flags.split()]))


# Test clients by name.


def domains(change: np.ndarray | float = 1.0) -> tuple[Dataset, list[Partition]]:
    """A table of four domains of 20 samples; the samples times ``change``."""
    rng = np.random.default_rng(1)
    x, client = (
        rng.normal(size=(80, 3)) * change,
        np.repeat(["art", "cartoon", "photo", "sketch"], 20),
    )
    none = np.zeros(80, bool)
    dataset = from_arrays("domains", x, np.arange(80) % 2, test=none, client=client)
    return dataset, [fs.partition.natural(known(dataset.train_client))]


@pytest.mark.parametrize("names", [("photo",), ("sketch", "art")])
@pytest.mark.parametrize("standardise", ["global", "local"])
def test_named_clients_are_scored_and_the_others_train(
    names: tuple[str, ...], standardise: Any
) -> None:
    def made(change: np.ndarray | float = 1.0) -> Problem:
        dataset, parts = domains(change)
        return by_names(dataset, parts, (0, 1), names, standardise, None, 0.25)

    problem, places = made(), ["art", "cartoon", "photo", "sketch"]
    tested = sorted(places.index(name) for name in names)
    others = [k for k in range(4) if k not in tested]
    validation = known(problem.validation)
    assert problem.test.clients == len(names)
    assert validation.clients == (1 if len(names) == 1 else len(others))
    words = f"{len(others)} train; validated on 25 % of their training samples"
    assert problem.scored.endswith(words)
    if len(names) > 1:
        assert [*problem.names[0]] == [places[k] for k in tested]
    for r in range(2):
        wanted = [[80 * r + 20 * k + i for i in range(20)] for k in range(4)]
        assert rows_of_clients(problem.test, r) == [wanted[k] for k in tested]
        train, held = (rows_of_clients(pool, r) for pool in (problem.data, validation))
        assert [len(rows) for rows in train] == [15] * len(others)
        assert sorted(flat(train) + flat(held)) == flat([wanted[k] for k in others])
        # Neither test clients nor validation samples change what trains.
        change = np.ones((80, 1))
        change[np.array(flat(held) + flat([wanted[k] for k in tested])) - 80 * r] = -50
        other = made(change)
        np.testing.assert_array_equal(other.data.x[flat(train)], problem.data.x[flat(train)])


NO_CLIENT: dict[str, str] = {
    "--test-clients sketh": "--test-clients must be names of clients, got 'sketh'; did you mean",
    "--test-clients art,cartoon,photo,sketch": "--test-clients must leave a client to train",
    "--test-clients art --folds 3": "--test-clients replaces --folds: leave one of them",
    "--test-clients art --partition iid": "--test-clients is for natural clients with names: data",
    "--test-clients art --split holdout": "--test-clients is for --split clients, not holdout",
    "--test-clients art --patience 2": "--patience needs scores that are not the test set's: add",
}


def flags_of_domains(folder: Path) -> list[str]:
    """The flags of a short run on a file with them."""
    dataset, _ = domains()
    owners = [dataset.client_names[k] for k in known(dataset.train_client)]
    columns = zip(dataset.train_x.tolist(), dataset.train_y, owners, strict=True)
    lines = [f"{','.join(map(str, x))},c{y},{owner}" for x, y, owner in columns]
    path = folder / "domains.csv"
    path.write_text("\n".join(["a,b,c,label,domain", *lines]) + "\n")
    argv = ["--dataset", f"csv:{path},label=label,client=domain", "--rounds", "2", "--seeds", "2"]
    return [*argv, "--devices", "1"]


@pytest.fixture(scope="module")
def table_of_domains(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a file with them, split by client and without a comparison."""
    flags = flags_of_domains(tmp_path_factory.mktemp("domains"))
    return [*flags, "--split", "clients", "--compare", "none"]


@pytest.mark.parametrize("flags", NO_CLIENT)
def test_who_cannot_be_a_test_client(flags: str, table_of_domains: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(NO_CLIENT[flags])}"):
        build(parse([*table_of_domains, "--algo", "fedavg", *flags.split()]))


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_run_on_named_test_clients(table_of_domains: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    argv = ["--algo", "fedavg(lr=0.1|0.01)", "--test-clients", "photo,art", "--validation", "0.25"]
    assert bench.main([*table_of_domains, *argv, "--out", out]) == 0
    assert bench.main(["--resume", out, "--rounds", "3"]) == 0
    run = fs.load_run(out)
    assert run.settings["test_clients"] == ["photo", "art"]
    weights = run.variables("fedavg(lr=0.1)")
    for line in [line for line in run.clients if line["algorithm"] == "fedavg(lr=0.1)"]:
        assert (line["names"], line["round"]) == (["art", "photo"], 3)
        one = jax.tree.map(lambda a, seed=line["seed"]: a[seed], weights)
        for rows, score in zip(
            rows_of_clients(run.test, line["seed"]), line["client_accuracy"], strict=True
        ):
            outputs = run.model.apply(one, run.test.x[np.array(rows)], train=False)[0]
            right = np.asarray(outputs).argmax(axis=1) == run.test.y[np.array(rows)]
            assert score == pytest.approx(right.mean())
    (group,) = grouped(read_folders([tmp_path / "run"]).trials, None)
    assert "tested on photo, art, 25 % to validate" in group.problem.title(scored=False)
    assert known(best_settings(group)).trials


# Personal models.

LISTS = [[0, 1, 2], [3], [], [4, 5, 6, 7], [8, 9], [10, 11, 12], [13], [14, 15]]
HELD = [[20, 21], [22, 23, 24], [25], [], [26, 27, 28, 29], [30], [31, 32], [33]]


@pytest.fixture(scope="module")
def own_sets(federation: Federation) -> tuple[EvalSet, EvalSet]:
    """Test and validation samples of each client."""
    test, held = (eval_set(*federation.test, partition_from_lists(own)) for own in (LISTS, HELD))
    return test, held


def method_of(name: str, model: fs.Model, **options: float) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.3), batch_size=8)
    method: Any = getattr(fs.algorithms, name)
    return method(local, clients_per_round=3, **options).on(ONE)


def test_personal_scores_are_those_of_numpy(
    federation: Federation, models: dict[str, fs.Model], own_sets: tuple[EvalSet, EvalSet]
) -> None:
    model, (test, held) = models["logistic"], own_sets
    result = fs.simulate(
        method_of("ditto", model), model, federation.data, test, validation=held,
        rounds=3, classes=3, seeds=(0, 1), personal=True,
    )  # fmt: skip
    last, state = result.evaluations[-1], known(result.state)
    kernel, bias = sorted(jax.tree.leaves(state.client_state.own), key=lambda a: -a.ndim)
    x, y = (np.asarray(a) for a in federation.test)
    for lists, scores in ((LISTS, last.personal), (HELD, last.personal_validation)):
        for r in range(2):
            hits = []
            for k, rows in enumerate(lists):
                logits = x[rows] @ np.asarray(kernel)[r, k]
                hits.append((logits + np.asarray(bias)[r, k]).argmax(axis=1) == y[rows])
            wanted = [np.mean(own) if len(own) else np.nan for own in hits]
            found = known(known(scores).by_client).accuracy[r]
            np.testing.assert_allclose(found, wanted, atol=1e-7)
            pooled = known(scores).pooled.accuracy[r]
            assert pooled == pytest.approx(np.mean(np.concatenate(hits)))
    series = result.series("accuracy", by_client=True, part="personal_validation")
    tests = result.series("accuracy", by_client=True, part="personal")
    chosen = [tests[i, r] for r, i in enumerate(series.argmax(axis=0))]
    assert result.validated("accuracy", by_client=True, personal=True).tolist() == chosen


@pytest.mark.parametrize("name", ["fine_tuned", pytest.param("ditto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_validation_set_is_scored_as_a_test_set(
    federation: Federation,
    models: dict[str, fs.Model],
    own_sets: tuple[EvalSet, EvalSet],
    name: str,
    hosted: bool,
) -> None:
    """Also where a client trains to be scored, or its state is on the host."""
    model, (test, held) = models["logistic"], own_sets
    execution = fs.make_execution(1, client_state_mb=0.001) if hosted else ONE

    def run(test: EvalSet, validation: Any) -> Any:
        return fs.simulate(
            method_of(name, model), model, federation.data, test, validation=validation,
            rounds=2, eval_every=2, classes=3, seeds=(0, 1), personal=True, execution=execution,
        ).evaluations[-1]  # fmt: skip

    both, swapped, pooled = run(test, held), run(held, None), run(test, federation.test)
    for ours, theirs in (
        (both.personal_validation, swapped.personal),
        (both.personal, pooled.personal),
    ):
        for metric in ("accuracy", "loss"):
            np.testing.assert_allclose(
                ours.by_client[metric], theirs.by_client[metric], rtol=1e-5, equal_nan=True
            )
    assert swapped.personal_validation is pooled.personal_validation is None


def test_a_validation_set_of_other_clients_is_refused(
    federation: Federation, models: dict[str, fs.Model], own_sets: tuple[EvalSet, EvalSet]
) -> None:
    model, other = models["logistic"], eval_set(*federation.test, partition_from_lists(LISTS[:2]))
    with pytest.raises(ValueError, match="a validation set of the 8 clients that train"):
        fs.simulate(
            method_of("ditto", model), model, federation.data, own_sets[0], validation=other,
            rounds=1, classes=3, personal=True,
        )  # fmt: skip
    rule = fs.stop.patience(1, on="personal_validation")
    with pytest.raises(ValueError, match="on must be one of validation, which are scored"):
        fs.simulate(
            method_of("fedavg", model), model, federation.data, own_sets[0], stop=rule,
            validation=own_sets[1], rounds=1, classes=3, personal=True,
        )  # fmt: skip


def test_a_sweep_compares_personal_models(
    federation: Federation, models: dict[str, fs.Model], own_sets: tuple[EvalSet, EvalSet]
) -> None:
    model, (test, held) = models["logistic"], own_sets

    def make(lam: float) -> fs.Algorithm:
        return method_of("ditto", model, lam=lam)

    found = fs.sweep(
        make, {"lam": [0.0, 0.5, 20.0]}, model, federation.data, test, validation=held,
        rounds=3, classes=3, seeds=(0, 1), personal=True, execution=ONE,
    )  # fmt: skip
    scores = [
        p.result.series("loss", by_client=True, part="personal_validation").min(axis=0).mean()
        for p in found.points
    ]
    assert found.best("loss") is found.points[int(np.argmin(scores))]
    shared = [p.result.series("loss", by_client=True, part="validation") for p in found.points]
    np.testing.assert_allclose(shared[0], shared[2], rtol=1e-5)  # which could not choose
    row = found.table()[-1]
    last = found.points[-1].result.evaluations[-1]
    assert (
        row["personal_validation_accuracy"] == known(last.personal_validation).reported.accuracy[1]
    )


# The command.


def records_of(folder: Path, algorithm: str) -> dict[int, list[dict[str, Any]]]:
    """The records of each seed."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in fs.load_run(folder).records:
        if row["algorithm"] == algorithm:
            found.setdefault(row["seed"], []).append(row)
    return found


def best_rows(rows: dict[int, list[dict[str, Any]]], part: str) -> list[dict[str, Any]]:
    """The record of each seed with the best validation score."""
    return [max(of, key=lambda row: row[part]["client_accuracy"]["mean"]) for of in rows.values()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, bare_commands: None) -> Path:
    """A run of the command, resumed once, by the same share."""
    out = tmp_path_factory.mktemp("validation") / "run"
    argv = [*BASE, "--algo", "ditto(lam=0.01|1)", "--compare", "fedper", "--validation", "0.25"]
    assert bench.main([*argv, "--out", str(out)]) == 0
    assert bench.main(["--resume", str(out), "--rounds", "4"]) == 0
    return out


@pytest.mark.slow
def test_the_folder_has_the_share_and_its_scores(ran: Path) -> None:
    run = fs.load_run(ran)
    assert run.settings["validation"] == 0.25
    data, held = run.data, known(run.validation)
    for r in range(2):
        train, mine = rows_of_clients(data, r), rows_of_clients(held, r)
        sizes = [(len(m), len(m) + len(t)) for m, t in zip(mine, train, strict=True)]
        assert all(m == round(0.25 * n) for m, n in sizes)
    weights = run.variables("ditto(lam=1)")
    for r, rows in enumerate(records_of(ran, "ditto(lam=1)").values()):
        assert [row["round"] for row in rows] == [1, 2, 3, 4]
        one = jax.tree.map(lambda a, r=r: a[r], weights)
        found = flat(rows_of_clients(held, r))
        outputs = run.model.apply(one, held.x[np.array(found)], train=False)[0]
        right = np.asarray(outputs).argmax(axis=1) == held.y[np.array(found)]
        assert rows[-1]["validation"]["accuracy"] == pytest.approx(right.mean())
    for name in run.algorithms:
        summary = run.summary[name]
        for prefix, part, place in (
            ("", "validation", ()),
            ("personal_", "personal_validation", ("personal",)),
        ):
            best = best_rows(records_of(ran, name), part)
            assert summary[f"{part}_best_per_run"] == [
                row[part]["client_accuracy"]["mean"] for row in best
            ]
            tests = [row[place[0]] if place else row for row in best]
            told = [row["client_accuracy"]["mean"] for row in tests]
            assert summary[f"{prefix}score_validated_per_run"] == told
    with pytest.raises(ValueError, match=re.escape("--validation is 0.1, and 0.25 in the run")):
        parse(["--resume", str(ran), "--validation", "0.1"])


@pytest.mark.slow
def test_the_report_tunes_a_method_by_its_own_models(ran: Path) -> None:
    (group,) = grouped(read_folders([ran]).trials, None)
    chosen = {
        trial.own: trial for trial in known(best_settings(group)).trials if trial.plain == "ditto"
    }
    for own, part in ((False, "validation"), (True, "personal_validation")):
        means = {}
        for name in ("ditto(lam=0.01)", "ditto(lam=1)"):
            best = best_rows(records_of(ran, name), part)
            means[name] = np.mean([row[part]["client_accuracy"]["mean"] for row in best])
        assert chosen[own].algorithm == max(means, key=lambda name: means[name])


@pytest.mark.slow
def test_a_study_chooses_by_the_models_that_it_reports(ran: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[run]\nsplit = "holdout"\nvalidation = 0.25\n'
        '[methods]\nDitto = "ditto(lam=0.01|1)"\nFedPer = "fedper"\n'
    )
    plan = read_study(file)
    shutil.copytree(ran, tmp_path / "cells" / "all")
    cells = [{"folder": "cells/all", "settings": {}}]
    (tmp_path / "study.json").write_text(json.dumps({"rows": plan.rows, "cells": cells}))
    summary = fs.load_run(ran).summary
    trials = read_folders([tmp_path]).trials
    ditto, fedper = (
        known(select_setting([t for t in trials if t.row == row])) for row in plan.rows
    )
    found = {name: np.mean(summary[name]["personal_validation_best_per_run"]) for name in summary
             if name.startswith("ditto")}  # fmt: skip
    for trial, setting in ((ditto, max(found, key=lambda name: found[name])), (fedper, "fedper")):
        assert (trial.algorithm, trial.own) == (setting, True)
        scores = known(over_runs(trial, "validated")).values.tolist()
        assert scores == summary[setting]["personal_score_validated_per_run"]


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_patience_waits_for_validation_samples(tmp_path: Path) -> None:
    """Of own models where the server's is not trained."""
    argv = [*BASE, "--algo", "fedper", "--compare", "none", "--validation", "0.25"]
    argv += ["--rounds", "30", "--patience", "2", "--lr", "0.1", "--seeds", "1"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 0
    rows = records_of(tmp_path / "run", "fedper")[0]
    scores = [row["personal_validation"]["client_accuracy"]["mean"] for row in rows]
    assert 2 < len(scores) < 30
    assert int(np.argmax(scores)) == len(scores) - 3


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_official_samples_validate_as_one_set(tmp_path: Path) -> None:
    argv = [*BASE, "--algo", "fedavg(lr=0.001|0.1)", "--compare", "none", "--validation", "0.1"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 0
    summary = fs.load_run(tmp_path / "run").summary["fedavg(lr=0.1)"]
    rows = records_of(tmp_path / "run", "fedavg(lr=0.1)").values()
    best = [max(of, key=lambda row: row["validation"]["accuracy"]) for of in rows]
    assert summary["score_validated_per_run"] == [row["accuracy"] for row in best]
    assert summary["validation_best_per_run"] == [row["validation"]["accuracy"] for row in best]
