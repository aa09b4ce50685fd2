"""Clients that never trained: they adapt on some of their samples and are scored on the others."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known
from oracle import Layers, layers_of, logits, loss_and_gradient, plus, zeros
from test_validation import domains, flags_of_domains, flat, rows_of_clients

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.problem import Problem, by_clients, by_names
from fedjax_sim.cli.reporting.compare import grouped
from fedjax_sim.cli.reporting.read import read_folders
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.partition import partition_from_lists

LR, STEPS, LAM, ALPHA = 0.2, 2, 0.7, 0.25
ADAPT: list[list[Any]] = [
    [range(0, 20), range(20, 25), [25, 26]],
    [range(100, 130), range(130, 137)],
]
SCORED: list[list[Any]] = [
    [range(60, 80), range(80, 83), range(83, 99)],
    [range(140, 150), range(150, 203)],
]


def set_of(x: np.ndarray, y: np.ndarray, *, adapts: bool = True, step: int = 1) -> EvalSet:
    """Two runs with three and two clients; with step -1 in the opposite order."""
    adapt, scored = (
        [partition_from_lists(lists[::step]) for lists in runs] for runs in (ADAPT, SCORED)
    )
    return eval_set(x, y, scored, adapt=adapt if adapts else None)


@functools.cache  # one is compiled once, however often it runs
def method_of(name: str, model: fs.Model) -> fs.Algorithm:
    """A visit is full gradient steps: the order of the samples does not matter."""
    objective = fs.empirical_risk(model)
    local = fs.local_sgd(objective, optax.sgd(LR), batch_size=53, epochs=STEPS)
    own: dict[str, dict[str, Any]] = {
        "fedavg": {},
        "ditto": {"lam": LAM},
        "apfl": {"alpha": ALPHA, "objective": objective},
        "fedrep": {"head_epochs": STEPS, "model": model},
        "fedproto": {"model": model, "objective": objective, "classes": 3},
        "late": {"fine_tuning_epochs": STEPS},
        "mixed": {},
        "fedamp": {},
        "dada": {"objective": objective, "peers": 2},
    }
    options = own[name]
    if name == "late":  # in training, but not when it is scored
        local, name = local.change(stragglers=1.0), "fine_tuned"
    if name == "mixed":  # by the means of other clients' samples
        local, name = local.change(transforms=(fs.mixup.peer_means(3),), peers=True), "fine_tuned"
    method: Any = getattr(fs.algorithms, name)
    return method(local, clients_per_round=3, **options)


def run(name: str, model: fs.Model, federation: Federation, test: EvalSet, **how: Any) -> fs.Result:
    given = {"execution": fs.make_execution(devices=1), "seeds": (4, 5), **how}
    return fs.simulate(
        method_of(name, model), model, federation.data, test, rounds=3, classes=3, eval_every=2,
        **given,
    )  # fmt: skip


def adapted_by_hand(name: str, received: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
    """The weights after the method's personal steps on all samples at once."""

    def mixed(own: Layers, shared: Layers) -> Layers:
        return [ALPHA * v + (1 - ALPHA) * s for v, s in zip(own, shared, strict=True)]

    own = shared = received
    for _ in range(STEPS):
        gradient = loss_and_gradient(mixed(own, shared) if name == "apfl" else own, x, y)[1]
        if name == "ditto":
            gradient = plus(gradient, plus(own, received, -1), LAM)
        if name == "fedrep":  # the head alone
            gradient = [*zeros(gradient[:-2]), *gradient[-2:]]
        shared = plus(shared, loss_and_gradient(shared, x, y)[1], -LR)
        own = plus(own, gradient, -LR * ALPHA if name == "apfl" else -LR)
    return mixed(own, received) if name == "apfl" else own


@pytest.mark.parametrize("name", ["late", "ditto", "apfl", "fedrep"])
def test_adapted_scores_are_those_of_plain_gradient_steps(
    name: str, federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Of the test set's own clients, whose numbers are also those of clients that train."""
    model, (x, y) = models["mlp"], federation.test
    result = run(name, model, federation, set_of(x, y))
    last = result.evaluations[-1]
    scores = known(known(last.personal).by_client)
    for r in range(2):
        server = layers_of(jax.tree.map(lambda a, r=r: a[r], result.variables))
        for k, (adapt, scored) in enumerate(zip(ADAPT[r], SCORED[r], strict=True)):
            mine, rows = np.array(adapt), np.array(scored)
            layers = adapted_by_hand(name, server, x[mine], y[mine])
            loss, _ = loss_and_gradient(layers, x[rows], y[rows])
            right = logits(layers, x[rows]).argmax(axis=1) == y[rows]
            assert scores.loss[r, k] == pytest.approx(loss, rel=1e-4)
            assert scores.accuracy[r, k] == pytest.approx(right.mean(), abs=1e-9)
    assert np.isnan(scores.loss[1, 2])  # the second run has two clients
    assert not np.allclose(scores.loss[0], known(last.test.by_client).loss[0], rtol=1e-3)


def test_samples_to_adapt_on_never_enter_training(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Only personal scores change with them, and the server's model is scored without them."""
    (x, y), model = federation.test, models["logistic"]
    mine = np.concatenate([[*rows] for lists in ADAPT for rows in lists])
    other = y.copy()
    other[mine] = (y[mine] + 1) % 3
    plain, first, second = (
        run("ditto", model, federation, test)
        for test in (set_of(x, y, adapts=False), set_of(x, y), set_of(x, other))
    )
    for result in (first, second):
        assert_trees((result.variables, result.state), (plain.variables, plain.state))
        for ours, theirs in zip(result.evaluations, plain.evaluations, strict=True):
            assert_trees(ours.test, theirs.test)
            assert_trees(ours.bytes_up, theirs.bytes_up)
    right, wrong = (known(e.evaluations[-1].personal).pooled.accuracy for e in (first, second))
    assert (right > wrong + 0.1).all()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"samples_mb": 0.01}, {"client_state_mb": 0.0012}, {"chunk": 2}])
def test_adapted_scores_do_not_depend_on_memory(
    limit: dict[str, Any], federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Whether the samples or the states of those that train are on the host."""
    test, model = set_of(*federation.test), models["logistic"]
    given = {"validation": set_of(*federation.test, step=-1)}
    ours, theirs = (
        run("ditto", model, federation, test, execution=fs.make_execution(1, **own), **given)
        for own in (limit, {})
    )
    last = ours.evaluations[-1]
    assert_trees(known(last.personal).pooled, known(theirs.evaluations[-1].personal).pooled)
    assert_trees(
        dict(known(last.personal_validation).pooled), dict(known(last.personal).pooled), rtol=1e-5
    )
    assert known(theirs.evaluations[-1].personal).pooled.accuracy.min() > 0.5


def test_a_method_without_personal_models_is_scored_without_them(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    last = run("fedavg", models["logistic"], federation, set_of(*federation.test)).evaluations[-1]
    assert last.personal is None


UNMADE = {
    "fedproto": r"exchange is nothing\(\)",
    "fedamp": r"broadcast is attentive\(1.0, 100.0\)",
    "dada": r"flight is serverless\(.*\)",
    "mixed": r"local is local_sgd\(.*peer_means\(3\).*\)",
}


@pytest.mark.parametrize("name", UNMADE)
def test_methods_without_a_model_for_new_clients_are_rejected(
    name: str, federation: Federation, models: dict[str, fs.Model]
) -> None:
    wanted = f"^clients that adapt need .* samples alone, {UNMADE[name]}: score clients that train$"
    with pytest.raises(ValueError, match=wanted):
        run(name, models["mlp"], federation, set_of(*federation.test))


def test_sets_that_do_not_fit_are_rejected(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    x, y = federation.test
    scored, two = partition_from_lists([[0, 1], [2]]), partition_from_lists([[3], [2]])
    wrong: dict[str, Any] = {
        "adapt must not contain samples that are scored, got 1, such as row 2": two,
        "adapt must have the 2 clients of partitions": partition_from_lists([[4]]),
        "partition must give every client a sample": partition_from_lists([[4], []]),
        "adapt must be 1 partitions": [two, two],
    }
    for message, adapt in wrong.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            eval_set(x, y, scored, adapt=adapt)
    adapting, plain = set_of(x, y), set_of(x, y, adapts=False)
    with pytest.raises(ValueError, match=r"^personal=True is for clients that train"):
        run("ditto", models["logistic"], federation, adapting, personal=True)
    with pytest.raises(ValueError, match=r"^validation has clients that adapt, test must"):
        run("ditto", models["logistic"], federation, plain, validation=adapting)


# The command.


@pytest.mark.parametrize("standardise", ["global", "local"])
@pytest.mark.parametrize("named", [True, False])
def test_nobody_adapts_on_what_is_scored_or_trains(named: bool, standardise: Any) -> None:
    def made(change: np.ndarray | float = 1.0) -> Problem:
        dataset, parts = domains(change)
        if not named:
            return by_clients(dataset, parts, (0, 1), 4, standardise, None, 0.25)
        names = ("photo", "art")
        return by_names(dataset, parts, (0, 1), names, standardise, None, 0.25, 0.25)

    problem = made()
    validation = known(problem.validation)
    for r in range(len(problem.runs)):
        pools = [problem.data, problem.test, problem.test.adapt, validation]
        train, test, mine, held = (flat(rows_of_clients(pool, r)) for pool in pools)
        to_validate = flat(rows_of_clients(validation.adapt, r))
        apart = [train, test, mine, held] + [to_validate] * (not named)
        assert len(set(flat(apart))) == sum(map(len, apart)) == 80
        clients = [{row % 80 // 20 for row in rows} for rows in (test, mine, held, to_validate)]
        assert clients[0] == clients[1]
        assert clients[2] == clients[3]
        assert len(mine) * 3 == len(test)
        assert len(to_validate) == (3 if named else 1 / 3) * len(held)
        # What is scored changes nothing that anyone trains or adapts on.
        change = np.ones((80, 1))
        change[np.array(test + held) % 80] = -50
        other = made(change)
        rows = train + mine + to_validate
        np.testing.assert_array_equal(other.data.x[rows], problem.data.x[rows])


@pytest.fixture(scope="module")
def domain_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a file of four domains, of which two train."""
    return flags_of_domains(tmp_path_factory.mktemp("domains"))


REFUSED: dict[str, str] = {
    "--algo ditto --adapt 0.5 --split holdout": "--adapt is for --split clients, not holdout",
    "--algo ditto --adapt 1 --split clients": "--adapt: must be a number above 0 and below 1",
    "--algo fedproto --adapt 0.5 --split clients --test-clients art --model mlp": (
        "fedproto: clients that adapt need a personal model made from the server's model"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_adapt_is_refused(flags: str, domain_flags: list[str]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[flags])}"):
        build(parse([*domain_flags, "--compare", "none", *flags.split()]))


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_run_whose_test_clients_adapt(
    domain_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = ["--algo", "ditto", "--compare", "fedavg", "--split", "clients", "--validation", "0.25"]
    argv += ["--test-clients", "photo,art", "--adapt", "0.25", "--out", str(out)]
    assert bench.main([*domain_flags, *argv]) == 0
    assert bench.main(["--resume", str(out), "--rounds", "3"]) == 0
    told = capsys.readouterr().out
    assert "  adapted %  adapted validated %  " in told
    assert "; test clients adapt personal models on 25 % of their samples" in " ".join(told.split())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ditto"]["adapted"]
    assert "adapted" not in summary["fedavg"]
    assert len(summary["ditto"]["personal_score_validated_per_run"]) == 2
    assert "personal_accuracy_last" not in summary["fedavg"]
    reading = read_folders([out])
    assert [trial.label for trial in reading.trials] == ["ditto", "ditto, adapted models", "fedavg"]
    (group,) = grouped(reading.trials, None)
    assert "25 % to adapt, 25 % to validate" in group.problem.title(scored=False)
    run = fs.load_run(out)
    assert run.settings["adapt"] == 0.25
    assert run.test.adapt is not None
