"""``--attack`` and ``--attackers`` of the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from conftest import assert_trees, known

import fedjax_sim as fs
from fedjax_sim import attacks, bench
from fedjax_sim.cli.build import Setup, build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.report import measurements, table

N, COHORT, SHARE = 8, 5, 0.5
ARGV = ["--dataset", "digits", "--model", "logistic", "--clients", str(N), "--partition", "iid"]
ARGV += ["--clients-per-round", str(COHORT), "--rounds", "2", "--seeds", "2", "--epochs", "0.5"]
ARGV += ["--devices", "1", "--compare", "none"]


def built(*argv: str) -> Setup:
    return build(parse([*ARGV, "--attackers", str(SHARE), *argv]))


def robust(malicious: Any, attack: Any) -> tuple[fs.Model, fs.Algorithm]:
    """--algo robust under an attack, a function of the clients, composed by hand."""
    digits = fs.load_dataset("digits")
    assert digits.mean is not None
    assert digits.std is not None
    net = fs.models.logistic((8, 8, 1), 10)
    model = fs.models.with_scaling(net, digits.mean, digits.std)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.02, momentum=0.9), epochs=0.5)
    execution = fs.make_execution(devices=1)
    algorithm = fs.algorithms.robust(local, clients_per_round=COHORT).on(execution)
    sending = () if attack is None else (attack(malicious),)
    return model, algorithm.replace(sending=sending)


MEDIAN = fs.aggregators.coordinate_median
ATTACKS: dict[str, Any] = {
    "sign_flip": attacks.sign_flip,
    "sign_flip(2)": lambda m: attacks.sign_flip(m, 2.0),
    "gaussian(sigma=1/2)": lambda m: attacks.gaussian(m, 0.5),
    "alie": attacks.alie,
    "alie(z=1.5)": lambda m: attacks.alie(m, z=1.5),
    "ipm(epsilon=3)": lambda m: attacks.ipm(m, 3.0),
    "mimic(target=1)": lambda m: attacks.mimic(m, target=1),
    "fang_trim(b=3)": lambda m: attacks.fang_trim(m, b=3.0),
    "fang_trim(knowledge=partial)": lambda m: attacks.fang_trim(m, knowledge="partial"),
    "fang_krum": lambda m: attacks.fang_krum(m, rule=MEDIAN),
    "optimised": lambda m: attacks.optimised(m, rule=MEDIAN, preaggregation=()),
    "optimised(mean, evaluations=4)": lambda m: attacks.optimised(
        m, rule=MEDIAN, preaggregation=(), along="mean", evaluations=4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ATTACKS)
def test_it_is_the_composition_in_python(text: str) -> None:
    setup = built("--algo", "robust", "--attack", text)
    malicious = attacks.byzantine(N, SHARE)
    _, expected = robust(malicious, ATTACKS[text])
    (part,), (wanted,) = (a.parts.sending for a in (setup.algorithms["robust"], expected))
    assert part.origin is not None
    assert wanted.origin is not None
    assert part.origin.name == wanted.origin.name
    ours, theirs = dict(part.origin.arguments), dict(wanted.origin.arguments)
    assert np.array_equal(ours.pop("malicious"), theirs.pop("malicious"))
    assert ours == theirs


def test_wrong_labels_are_those_of_the_function_in_python() -> None:
    setup = built("--algo", "robust", "--attack", "label_flip")
    assert setup.algorithms["robust"].parts.sending == ()
    data = dataclasses.replace(setup.problem.data, relabel=None)
    wrong = attacks.label_flip(data, attacks.byzantine(N, SHARE), 10)
    assert setup.problem.data.relabel is not None
    assert np.array_equal(setup.problem.data.relabel, known(wrong.relabel))


def test_a_backdoor_is_that_of_the_function_in_python() -> None:
    text = "backdoor(share=1/4, target=3) * scaling(2)"
    setup = built("--algo", "robust", "--attack", text, "--validation", "0.2", "--score", "f1")
    malicious = attacks.byzantine(N, SHARE)
    plain = build(parse([*ARGV, "--algo", "robust", "--validation", "0.2"]))
    (part,) = setup.algorithms["robust"].parts.sending
    assert part.origin is not None
    assert (part.origin.name, part.origin.settings["factor"]) == ("scaling", 2)
    assert (repr(setup.task), setup.score) == ("classification(10, backdoor=True)", "f1")
    found, before = setup.problem, plain.problem
    assert before.validation is not None
    for name, examples in (("test", before.test), ("validation", before.validation)):
        both = attacks.backdoor(before.data, examples, malicious, 10, target=3, share=0.25)
        ours = found.data, getattr(found, name)
        assert_trees(ours, both)
        assert len(ours[1].y) > len(examples.y)


def test_its_success_stands_beside_the_score() -> None:
    problem = fs.toy()
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=10).on(fs.make_execution(devices=1))
    x, y = problem.test
    triggered = np.concatenate([x, x]), np.concatenate([y, np.full_like(y, problem.classes)])
    task = fs.tasks.classification(problem.classes, backdoor=True)
    result = fs.simulate(
        algorithm, problem.model, problem.data, triggered, rounds=1, task=task, seeds=(0, 1)
    )
    about: dict[str, Any] = {"seeds": 2, "fedavg_bytes": 1.0, "clients": 10, "emd": 0.5}
    summary = measurements(result, score="accuracy", **about)
    predicted = result.evaluations[-1].sums.own.predicted
    success = predicted[:, 0] / len(y)  # each sample stands there twice, with and without a label
    assert summary["attack_success_last"] == pytest.approx(success.mean())
    head, _, row, *_ = table({"fedavg": summary}).splitlines()
    assert "attack success %" in head
    assert f"{100 * success.mean():.2f} ± {100 * success.std():.2f}" in row
    other = table({"fedavg": measurements(result, score="attack_success", **about)})
    assert "attack success" not in other


def test_an_attack_comes_before_what_a_method_sends() -> None:
    setup = built("--algo", "fedavg_top_k", "--attack", "ipm")
    attack, code = setup.algorithms["fedavg_top_k"].parts.sending
    assert attack.origin is not None
    assert code.origin is not None
    assert (attack.origin.name, code.origin.name) == ("ipm", "compressed")


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_run_is_that_of_the_composition_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [*ARGV, "--algo", "robust", "--attack", "sign_flip(2)", "--attackers", str(SHARE)]
    assert bench.main([*argv, "--out", "run", "--no-cache"]) == 0
    assert "\nattack: sign_flip(2) by 4 of 8 clients" in capsys.readouterr().out
    malicious = attacks.byzantine(N, SHARE)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["attack"], config["attackers"]) == ("sign_flip(2)", SHARE)
    assert config["malicious"] == np.flatnonzero(malicious).tolist()
    summary = json.loads(Path("run/summary.json").read_text())["robust"]
    assert (summary["attack"], summary["attackers"]) == ("sign_flip(2)", 4)
    model, algorithm = robust(malicious, ATTACKS["sign_flip(2)"])
    digits = fs.load_dataset("digits")
    parts = [fs.partition.iid(digits.train_y, N, seed=seed) for seed in (0, 1)]
    data = fs.client_data(digits.train_x, digits.train_y, parts)
    test = (digits.test_x, digits.test_y)
    result = fs.simulate(algorithm, model, data, test, rounds=2, classes=10, seeds=(0, 1))
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["test_loss"] for row in rows if row["round"] == 2]
    np.testing.assert_allclose(losses, result.evaluations[-1].test_loss, rtol=1e-6)


LABEL_FLIP = ["--attack", "label_flip", "--attackers", "0.5"]
BACKDOOR = ["--attack", "backdoor", "--attackers", "0.5"]
REFUSED = {
    "no share": (["--attack", "ipm"], "--attack ipm needs --attackers, the share"),
    "no attack": (["--attackers", "0.5"], "--attackers is for --attack"),
    "unknown": (
        ["--attack", "flip", "--attackers", "0.5"],
        "--attack: must be one of sign_flip(scale=4.0), scaling(factor), gaussian(sigma), "
        "alie(z=None), ipm(epsilon=0.5), mimic(target=0), fang_trim(b=2.0, knowledge='full'), "
        "fang_krum(evaluations=20), optimised(along='spread', evaluations=20), label_flip, "
        "backdoor(target=0, share=0.5, size=3), or several joined by *, got 'flip'",
    ),
    "twice": (["--attack", "ipm * alie(1) * ipm", "--attackers", "0.5"], "ipm is given twice"),
    "two kinds of labels": (
        ["--attack", "label_flip * backdoor", "--attackers", "0.5"],
        "--attack label_flip * backdoor: data must have its original labels and samples, got",
    ),
    "no classes to open": (
        ["--dataset", "diabetes", "--model", "linear", *BACKDOOR],
        "--attack backdoor is for classes, the task is regression()",
    ),
    "nobody": (
        ["--attack", "ipm", "--attackers", "0.01"],
        "--attackers must be a share of 1 to 7 of the 8 clients, got 0.01, which is 0",
    ),
    "no shift": (
        ["--algo", "fedavg", "--attack", "alie", "--attackers", "0.25"],
        "--attack alie: the shift z is 0 for 2 of 8 clients, too few to sway a majority",
    ),
    "no spread": (
        ["--algo", "fedavg", "--attack", "alie(z=1.5)", "--attackers", "0.125"],
        "--attack alie(z=1.5): 1 of 8 clients knows no other update and sends its own: give more",
    ),
    "fragments": (
        ["--algo", "streaming_diloco", "--attack", "ipm", "--attackers", "0.5"],
        "streaming_diloco: --attack ipm: exchange fragments",
    ),
    "in flight": (
        ["--algo", "gossip", "--attack", "optimised", "--attackers", "0.5"],
        "gossip: --attack optimised: sending optimised(",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, message = REFUSED[case]
    assert bench.main([*ARGV, *argv, "--no-cache"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [*tmp_path.iterdir()] == []
