"""Rules that end a run before its last round, and what is told of a target."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse

CLASSES, REGRESSION = fs.tasks.classification(3), fs.tasks.regression()


def seen(*values: list[float], validation: bool = True, score: str = "accuracy") -> Any:
    """Evaluations with these scores of each run, and 10 bytes up and 5 down a round."""
    found = []
    for i, value in enumerate(values):
        scores = SimpleNamespace(reported={score: np.array(value)})
        found.append(
            SimpleNamespace(
                round=i + 1, test=scores, validation=scores if validation else None, before=None,
                bytes_up=10 * (i + 1) * np.ones(len(value)),
                bytes_down=5 * (i + 1) * np.ones(len(value)),
            )
        )  # fmt: skip
    return found


def history(rule: Any, evaluations: Any, task: Any = CLASSES) -> list[list[bool]]:
    """What a rule says of each beginning of a run."""
    return [rule.done(evaluations[: i + 1], task).tolist() for i in range(len(evaluations))]


def test_a_run_that_has_reached_its_target_stays_so() -> None:
    runs = seen([0.1, 0.7], [0.6, 0.2], [0.5, np.nan])
    said = history(fs.stop.target("accuracy", 0.6), runs)
    assert said == [[False, True], [True, True], [True, True]]
    losses = seen([3.0], [2.0], score="mse")
    assert history(fs.stop.target("mse", 2.0), losses, REGRESSION) == [[False], [True]]


def test_the_validation_set_decides_where_there_is_one() -> None:
    both = seen([0.9])
    both[0].validation = SimpleNamespace(reported={"accuracy": np.array([0.1])})
    assert history(fs.stop.target("accuracy", 0.5), both) == [[False]]
    assert history(fs.stop.target("accuracy", 0.5, on="test"), both) == [[True]]
    assert history(fs.stop.target("accuracy", 0.5), seen([0.9], validation=False)) == [[True]]


def test_patience_counts_evaluations_that_are_no_better() -> None:
    # Equal is no better; the second run gets better too late, the third in time.
    runs = seen([0.5, 0.5, 0.5], [0.5, 0.4, 0.4], [0.6, 0.4, 0.6], [0.6, 0.9, 0.5], [0.6, 1.0, 0.5])
    said = history(fs.stop.patience(2), runs)
    assert said == [
        [False, False, False], [False, False, False], [False, True, False],
        [False, True, False], [True, True, True],
    ]  # fmt: skip
    losses = seen([3.0], [2.0], [2.5], score="mse")
    assert history(fs.stop.patience(1), losses, REGRESSION) == [[False], [False], [True]]


@given(
    st.lists(st.sampled_from([0.1, 0.5, 0.5004, 0.51, 0.9]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_a_plateau_is_that_of_radfeds_authors(scores: list[float], window: int, times: int) -> None:
    best = before = flat = 0.0
    ends: list[bool] = []
    for i, score in enumerate(scores):
        best = max(best, score)
        if i >= window:
            before = max(before, scores[i - window])
            flat = flat + 1 if (best - before) / before <= 0.001 else 0
        ends.append((bool(ends) and ends[-1]) or flat >= times)
    rule = fs.stop.patience(times, window=window, threshold=0.001)
    assert history(rule, seen(*([s] for s in scores))) == [[end] for end in ends]


def test_a_budget_and_any_of_several() -> None:
    runs = seen([0.9, 0.1], [0.9, 0.1], [0.9, 0.1])
    assert history(fs.stop.budget(30), runs) == [[False] * 2, [True] * 2, [True] * 2]
    either = fs.stop.any_of(fs.stop.budget(45), fs.stop.target("accuracy", 0.9))
    assert history(either, runs) == [[True, False], [True, False], [True, True]]


METHODS = ("fedavg", "phase_shift")
TOY = fs.toy(8)


@functools.cache  # one is compiled once, however often it runs
def method(name: str) -> fs.Algorithm:
    """On a device; the one that collects nothing has a clock."""
    local, one = fs.local_sgd(TOY.objective, optax.sgd(0.05)), fs.make_execution(devices=1)
    if name == "phase_shift":
        return fs.phase_shift(local, clients_per_round=4, phases=2).on(one)
    algorithm = fs.fedavg(local, clients_per_round=4).on(one)
    return algorithm.replace(clock=fs.clock.simulated(fs.clock.lognormal(1.0, 1.0)))


def run(name: str, rounds: int = 6, **settings: Any) -> fs.Result:
    return fs.simulate(
        method(name), TOY.model, TOY.data, TOY.test, rounds=rounds, classes=10, seeds=(0, 1),
        **settings,
    )  # fmt: skip


def bits(result: fs.Result) -> list[Any]:
    last = result.evaluations[-1]
    told = (result.variables, last.test, last.bytes_up, last.bytes_down, last.uncollected)
    return [(np.asarray(a).tobytes()) for a in jax.tree.leaves((told, result.metrics))]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_an_early_end_is_that_of_a_shorter_run(name: str, tmp_path: Path) -> None:
    """Models in flight are collected; resumed, it is over; with other rules it goes on."""
    whole, short = run(name), run(name, 4)
    # Bytes are counted before the models in flight are collected.
    before = short.evaluations[-1].before or short.evaluations[-1]
    last = float((before.bytes_up + before.bytes_down).max())
    rule = fs.stop.budget(last)
    ended = run(name, stop=rule, checkpoints=tmp_path)
    assert [e.round for e in ended.evaluations] == [1, 2, 3, 4]
    assert bits(ended) == bits(short)
    assert (ended.evaluations[-1].uncollected is None) == (name == "fedavg")
    assert bits(run(name, stop=rule, checkpoints=tmp_path)) == bits(short)
    assert bits(run(name, checkpoints=tmp_path)) == bits(whole)
    with pytest.raises(fs.CheckpointError, match="saved after more rounds than this rule allows"):
        run(name, stop=fs.stop.budget(1), checkpoints=tmp_path)


def test_a_run_goes_on_until_all_seeds_are_done() -> None:
    whole = run("fedavg")
    values = whole.accuracy
    aim = float(np.sort(values.max(axis=0))[0])  # what the worse seed reaches at its best
    first = [int(np.argmax(values[:, r] >= aim)) + 1 for r in (0, 1)]
    assert first[0] != first[1]
    ended = run("fedavg", stop=fs.stop.target("accuracy", aim))
    assert ended.evaluations[-1].round == max(first)
    found = ended.reached("accuracy", aim)
    assert found.rounds == first
    each = whole.evaluations[0]
    assert found.bytes == [int(each.bytes_up[0] + each.bytes_down[0]) * r for r in first]
    best = float(values.max())
    some = whole.reached("accuracy", best).rounds
    assert sorted(r is None for r in some) == [False, True]
    assert whole.reached("accuracy", 1.1) == ([None, None], [None, None], [None, None])
    untimed = run("phase_shift")
    assert untimed.reached("accuracy", 1.1) == ([None, None], [None, None], None)
    # The lowest is the best of a loss.
    assert whole.reached("loss", float(whole.evaluations[2].test_loss.max())).rounds != [1, 1]


def test_simulated_seconds_end_a_run() -> None:
    """At the first evaluation at or after them, of the run that is the slowest to get there."""
    whole = run("fedavg")
    limit = float(whole.seconds[2].min())
    ended = run("fedavg", stop=fs.stop.seconds(limit))
    rounds = 1 + int(np.argmax((whole.seconds >= limit).all(axis=1)))
    assert len(ended.seconds) == rounds < 6
    assert ended.seconds.tolist() == whole.seconds[:rounds].tolist()


REFUSED: dict[str, tuple[Any, str]] = {
    "no clock": (lambda: fs.stop.seconds(1), "stop: seconds needs an algorithm with a clock"),
    "no time": (lambda: fs.stop.seconds(0), "limit must be positive, got 0"),
    "patience": (lambda: fs.stop.patience(2), "stop: patience needs simulate(validation=...)"),
    "personal": (
        lambda: fs.stop.target("accuracy", 0.5, on="personal"),
        "stop: on must be one of test, which are scored, got 'personal'",
    ),
    "score": (lambda: fs.stop.target("mse", 0.5), "stop: score must be one of accuracy, f1"),
    "in any_of": (
        lambda: fs.stop.any_of(fs.stop.budget(1), fs.stop.patience(1)), "stop: patience needs"
    ),
    "no rule": (lambda: 3, "stop must be a rule, such as fs.stop.budget(1e9), got 3"),
    "nan": (lambda: fs.stop.target("accuracy", np.nan), "value must be finite, got nan"),
    "zero": (lambda: fs.stop.patience(0), "evaluations must be a whole number at least 1, got 0"),
    "window": (
        lambda: fs.stop.patience(1, window=2.0),  # type: ignore[arg-type]
        "window must be a whole number at least 1, got 2.0",
    ),
    "threshold": (
        lambda: fs.stop.patience(1, threshold=-0.1),
        "threshold must be at least 0, got -0.1",
    ),
    "none": (lambda: fs.stop.any_of(), "any_of needs at least one rule"),
    "a list": (
        lambda: fs.stop.any_of([fs.stop.budget(1)]),  # type: ignore[arg-type]
        "stop must be a rule, such as fs.stop.budget(1e9), got [Stop(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_rule_that_never_acts_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run("phase_shift", stop=make())


BASE = ["--compare", "none", "--clients", "8", "--model", "logistic", "--seeds", "2"]
BASE += ["--devices", "1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--stop-at-target", "--stop-at-target is for --target"),
        (
            "--patience 2",
            "--patience needs scores that are not the test set's: add --validation 0.1",
        ),
        ("--patience 0 --split clients", "--patience: must be a whole number at least 1, got '0'"),
        ("--budget-mb 0", "--budget-mb: must be a number above 0"),
        (
            "--budget-seconds 9",
            "--budget-seconds is for --clock, which determines how long a round",
        ),
        ("--target 90", "--target must be a number above 0 and at most 1, as accuracy is a share"),
        ("--algo fedper --model mlp --split official --target 0.5", "--target of fedper is for "),
    ],
)
def test_the_command_refuses_what_has_nothing_to_go_by(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(parse([*BASE, "--algo", "fedavg", *given.split()]))


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_the_command_ends_at_a_target_and_says_who_never_reached_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = [*BASE, "--algo", "fedavg", "--rounds", "8", "--out", str(out)]
    assert bench.main([*argv, "--target", "0.5", "--stop-at-target"]) == 0
    told = json.loads((out / "summary.json").read_text())["fedavg"]
    rounds = told["target_rounds_per_run"]
    assert told["rounds"] == max(rounds) < told["rounds_planned"] == 8
    per_round = (told["bytes_up"] + told["bytes_down"]) // told["rounds"]
    assert told["target_bytes_per_run"] == [r * per_round for r in rounds]
    shown = capsys.readouterr().out
    assert "rounds to 50 %" in shown
    assert f"fedavg: ended after {max(rounds)} of 8 rounds" in shown
    # A run that is over is not begun again.
    assert bench.main(["--resume", str(out)]) == 0
    again = json.loads((out / "summary.json").read_text())["fedavg"]
    assert again["accuracy_last"] == told["accuracy_last"]
    assert again["rounds"] == told["rounds"]
    capsys.readouterr()
    argv[-1] = str(tmp_path / "never")
    assert bench.main([*argv, "--target", "1", "--budget-mb", "0.05"]) == 0
    told = json.loads((tmp_path / "never" / "summary.json").read_text())["fedavg"]
    assert told["target_rounds_per_run"] == [None, None]
    assert told["target_bytes_per_run"] == [None, None]
    assert told["rounds"] == -(-50_000 // per_round) < 8
    assert "not reached" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_the_command_waits_for_the_validation_clients(tmp_path: Path) -> None:
    argv = [*BASE, "--algo", "fedavg", "--split", "clients", "--folds", "3", "--partition", "iid"]
    out = ["--rounds", "30", "--out", str(tmp_path / "run")]
    assert bench.main([*argv, "--seeds", "1", *out, "--patience", "2", "--lr", "0.1"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    last = max(row["round"] for row in rows)
    assert last < 30
    waits = []
    for fold in range(3):
        scores = [
            row["validation"]["client_accuracy"]["mean"] for row in rows if row["fold"] == fold
        ]
        best, since, over = -1.0, 0, 0
        for i, score in enumerate(scores):
            best, since = (score, 0) if score > best else (best, since + 1)
            over = over or (i + 1 if since >= 2 else 0)
        waits.append(over)
    assert last == max(waits)
