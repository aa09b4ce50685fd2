"""Methods as texts with settings of their own, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedjax_sim import bench
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.cli.build import build
from fedjax_sim.cli.methods import parameters
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.written import TRAINED, labels_in, parse_label

TINY = ["--rounds", "2", "--clients", "8", "--seeds", "2", "--model", "logistic", "--emd", "0.9"]
TINY += ["--devices", "1"]


def test_each_has_its_own_settings_and_the_others_the_flags() -> None:
    config = parse(["--algo", "fedprox(mu=0.5|2)", "--compare", "FedProx", "scaffold", "--mu", "3"])
    assert config.algorithms == ("fedprox(mu=0.5)", "fedprox(mu=2)", "fedprox", "scaffold")
    assert [config.options[name].get("mu") for name in config.algorithms] == [0.5, 2.0, 3.0, None]
    assert config.record()["options"]["fedprox(mu=2)"] == {"mu": 2.0}


def test_a_grid_is_every_combination() -> None:
    labels = labels_in("fedprox(mu=0.1|1, lr=0.01|0.1|1, epochs=2)")
    assert len(set(labels)) == 6
    assert labels[:2] == (
        "fedprox(mu=0.1, lr=0.01, epochs=2)",
        "fedprox(mu=0.1, lr=0.1, epochs=2)",
    )
    assert parse_label(labels[-1]) == ("fedprox", {"mu": 1.0}, {"lr": 1.0, "epochs": 2.0}, {})
    assert parse(["--algo", "fedavg(lr=1|1)", "--compare", "none"]).algorithms == ("fedavg(lr=1)",)


def test_local_training_is_each_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedjax_sim.run.programs.Programs.check", lambda self: None)
    names = ["fedavg(epochs=4)", "fedavg(batch_size=8)", "parallel_sgd(lr=0.3, momentum=0)"]
    setup = build(parse([*TINY, "--algo", names[0], "--compare", *names[1:], "fedavg"]))
    steps = {n: int(a.parts.local.steps_for(32)) for n, a in setup.algorithms.items()}
    assert steps == {names[0]: 8, names[1]: 8, names[2]: 1, "fedavg": 4}


@pytest.mark.parametrize("name", sorted(ALGORITHMS.own))
def test_every_option_of_every_method_is_read(name: str) -> None:
    for key, parameter in parameters(name).items():
        default = parameter.default
        if isinstance(default, bool | int | float | str):
            options = parse_label(f"{name}({key}={default})").options
            assert options == {key: default}
            assert type(options[key]) in (type(default), float)
    assert not set(parameters(name)) & set(TRAINED)


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_text_is_the_same_run_as_flags(tmp_path: Path) -> None:
    found: list[list[Any]] = []
    flags = ["--mu", "0.5", "--lr", "0.05", "--epochs", "1", "--batch-size", "8"]
    text = "fedprox(mu=0.5, lr=0.05, epochs=1, batch_size=8)"
    for i, argv in enumerate((["--algo", text], ["--algo", "fedprox", *flags])):
        out = tmp_path / str(i)
        argv = [*TINY, "--seeds", "1", *argv, "--compare", "none", "--out", str(out)]
        assert bench.main(argv) == 0
        lines = (out / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line) | {"algorithm": ""} for line in lines])
    assert found[0] == found[1]
    assert text in json.loads((tmp_path / "0" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--algo", "fedprox(nu=1)"],
            "fedprox(nu=1): nu is not a setting of fedprox: use mu, ",
        ),
        (
            ["--algo", "fedprox(mu)"],
            "fedprox(mu=mu): mu: must be a number that is finite, got 'mu'",
        ),
        (["--algo", "fedprox(mu=1, mu=2)"], "mu is given twice"),
        (
            ["--algo", "fedprox(mu=1"],
            "must be written NAME or NAME(value, key=value, ...), got 'fedprox(mu=1'",
        ),
        (["--algo", "fedprox(1, False, 3, 4, 5, 6)"], "too many positional arguments"),
        (["--algo", "fedavg(server=mix(2))"], "fedavg(server=mix(2)): --server mix(2): alpha must"),
        (["--algo", "fedavg(server=mi(2))"], "server: unknown server 'mi'; did you mean mi"),
        (["--algo", "nix(mu=1)"], "unknown algorithm 'nix'"),
        (["--algo", "fedavg(batch_size=1.5)"], "batch_size: must be a whole number at least 1"),
        (["--algo", "fedprox(adaptive=1)"], "adaptive: must be True or False, got '1'"),
        (
            ["--compare", "fedavg(l2=1)"],
            "--compare: fedavg(l2=1): l2 is not a setting of fedavg: use ",
        ),
        (["--compare", "none(lr=1)"], "unknown algorithm 'none'"),
        (["--algo", "fedprox(mu=-1)"], "fedprox(mu=-1): --mu must be at least 0, got -1"),
        (["--algo", "fedprox(mu=1)", "--mu", "2"], "--mu has no effect next to fedprox(mu=1)"),
        (
            ["--algo", "fedavg(lr=1)", "--compare", "none", "--lr", "2"],
            "--lr has no effect next to fedavg(lr=1)",
        ),
        (["--algo", "fedavg(epochs=0.001)"], "fedavg(epochs=0.001): --epochs 0.001 is no step"),
    ],
)
def test_refusals(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*TINY, *argv, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()
