"""The command: what it prints and writes, and what it says to bad input."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import known
from scipy import stats

import fedjax_sim as fs
from fedjax_sim import __main__ as door
from fedjax_sim import bench, models, privacy, study
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import Batch, Model, Variables
from fedjax_sim.cli.build import build
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.flags import documented
from fedjax_sim.cli.methods import parameters
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.partitioning import command
from fedjax_sim.cli.preparing import augmentations
from fedjax_sim.cli.reporting.command import main as report
from fedjax_sim.cli.summary import privacy_spent, remarks, show
from fedjax_sim.data import load_dataset
from fedjax_sim.engine.cores import available_cores
from fedjax_sim.engine.execution import make_execution
from fedjax_sim.partition import (
    emd,
    iid,
    label_table,
    limit_label_emd,
    partition_from_lists,
    partition_hash,
    save_partition,
)
from fedjax_sim.run import Result
from fedjax_sim.run.environment import environment
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.provenance import privacy_of

RUN = Experiment.run

BASE = ["--rounds", "2", "--clients", "8", "--seeds", "2", "--model", "logistic", "--no-cache",
        "--devices", "1"]  # fmt: skip
TINY = [*BASE, "--emd", "0.9"]
KEYS = {
    "accuracy_last", "accuracy_best", "accuracy_per_seed", "bytes_up", "bytes_down",
    "traffic_ratio", "samples_per_second", "compile_seconds", "run_seconds", "utilisation",
    "xla_programs", "rounds", "clients", "emd",
}  # fmt: skip
LOGISTIC_BYTES = (64 * 10 + 10) * 4


def nan_later(shape: Any, classes: int) -> Model:
    """Logistic regression that gives NaN from the 100th training step on."""
    inner = models.logistic(shape, classes)

    def init(key: jax.Array) -> Variables:
        return Variables(inner.init(key).params, {"steps": jnp.float32(0)})

    def apply(
        variables: Variables,
        x: jax.Array,
        *,
        train: bool,
        mask: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        steps = variables.state["steps"] + float(train)
        logits, _ = inner.apply(Variables(variables.params, {}), x, train=train)
        return jnp.where(steps > 100, jnp.nan, logits), {"steps": steps}

    return Model(init, apply)


def five_classes(shape: Any, classes: int) -> Model:
    return models.logistic(shape, 5)


def no_model(shape: Any, classes: int) -> Model:
    return "a model"  # type: ignore[return-value]


def errors(said: str) -> list[str]:
    """The lines of stderr that do not say how far the run is."""
    program = "fedjax_sim.bench: "
    return [s.removeprefix(program) for s in said.splitlines() if s.startswith(program)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Ran(NamedTuple):
    """A run of the command: its folder, what it said, and what it got of each algorithm."""

    folder: Path
    said: str
    results: dict[str, Result]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder, results = tmp_path_factory.mktemp("bench") / "run", list[Result]()

    def spy(*args: Any, **kwargs: Any) -> Result:
        results.append(RUN(*args, **kwargs))
        return results[-1]

    options = ["--rounds", "5", "--phases", "4", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(Experiment, "run", spy)
        assert bench.main([*TINY, *options]) == 0
    return Ran(folder, said.getvalue(), dict(zip(("phase_shift", "fedavg"), results, strict=True)))


@pytest.fixture
def finished(ran: Ran) -> Path:
    return ran.folder


def test_summary_is_complete_and_consistent(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary.keys() == {"phase_shift", "fedavg"} | environment("").keys() | {"devices"}
    assert "--phases 4" in summary["command"]
    for name in ("phase_shift", "fedavg"):
        s = summary[name]
        assert s.keys() >= KEYS
        assert (s["rounds"], s["clients"], s["emd"]) == (5, 8, pytest.approx(0.9, abs=0.1))
        lines = [r for r in records(finished) if r["algorithm"] == name]
        last = [r["accuracy"] for r in lines if r["round"] == 5]
        assert s["accuracy_per_seed"] == last
        assert s["accuracy_last"] == pytest.approx(np.mean(last))
        best = [max(r["accuracy"] for r in lines if r["seed"] == seed) for seed in (0, 1)]
        assert s["accuracy_best"] == pytest.approx(np.mean(best))
        assert {r["bytes_up"] for r in lines if r["round"] == 5} == {s["bytes_up"]}
        assert 0 < s["utilisation"] <= 1
        assert 1 <= s["xla_programs"] <= 5


def test_settings_have_the_fingerprint_of_each_partition(finished: Path) -> None:
    settings = json.loads((finished / "config.json").read_text())
    labels = load_dataset("digits").train_y
    made = [limit_label_emd(labels, 8, emd=0.9, seed=seed) for seed in (0, 1)]
    assert settings["partition_hashes"] == [partition_hash(p) for p in made]
    assert settings["partitions"] == [p.name for p in made]


def test_records_name_places_of_the_machine_in_the_command_alone(finished: Path) -> None:
    settings = json.loads((finished / "config.json").read_text())
    assert settings.keys().isdisjoint({"data_dir", "out"})
    for path in finished.glob("*.json*"):
        told = [line for line in path.read_text().splitlines() if str(finished) in line]
        outs = ('"command": ', f'"{finished}"')  # in summary.json, and among the arguments
        assert all(line.lstrip().startswith(outs) for line in told)


def test_traffic_is_that_counted_by_hand(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    fedavg, shift = summary["fedavg"], summary["phase_shift"]
    assert fedavg["bytes_up"] == fedavg["bytes_down"] == 5 * 8 * LOGISTIC_BYTES
    assert fedavg["traffic_ratio"] == 1
    # 8 clients in 4 groups of 2: one group up a round, the other three at the end; 8 down a round.
    assert shift["bytes_up"] == (5 * 2 + 6) * LOGISTIC_BYTES
    assert shift["bytes_down"] == 5 * 8 * LOGISTIC_BYTES
    assert shift["traffic_ratio"] == pytest.approx((16 + 40) / 80)


def test_one_line_for_each_evaluation_algorithm_and_seed(finished: Path) -> None:
    labels = load_dataset("digits").train_y
    sizes = [limit_label_emd(labels, 8, emd=0.9, seed=seed).sizes.sum() for seed in (0, 1)]
    found = [(r["algorithm"], r["round"], r["seed"]) for r in records(finished)]
    names = ("phase_shift", "fedavg")
    assert found == [(n, t, s) for n in names for t in range(1, 6) for s in (0, 1)]
    for r in records(finished):
        assert r["client_accuracy"].keys() == {"mean", "std", "min", "p10", "p90", "max", "clients"}
        assert r["samples"] == r["round"] * 2 * sizes[r["seed"]]  # two epochs of all clients
        # In-flight models are collected at the very end, in phase shift only.
        in_flight = r["algorithm"] == "phase_shift" and r["round"] == 5
        assert ("accuracy_uncollected" in r) == in_flight


def test_client_accuracy_uses_the_tables_of_its_own_seed(ran: Ran) -> None:
    labels = load_dataset("digits").train_y
    made = [limit_label_emd(labels, 8, emd=0.9, seed=seed) for seed in (0, 1)]
    tables = [label_table(labels, partition, 10) for partition in made]
    assert (tables[0] != tables[1]).any()
    for r in records(ran.folder):
        e = ran.results[r["algorithm"]].evaluations[r["round"] - 1]
        by_class = e.correct[r["seed"]] / e.total[r["seed"]]
        table = tables[r["seed"]]
        by_client = table / table.sum(axis=1, keepdims=True) @ by_class
        assert r["client_accuracy"]["min"] == pytest.approx(by_client.min())
        for name, share in (("p10", 0.1), ("p90", 0.9)):
            assert r["client_accuracy"][name] == pytest.approx(np.quantile(by_client, share))


def test_each_evaluation_has_its_wall_clock(finished: Path) -> None:
    """Apart from the records, which another run of the command has too."""
    assert "wall" not in (finished / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in (finished / "times.jsonl").read_text().splitlines()]
    for name in ("fedavg", "phase_shift"):
        mine = [line for line in lines if line["algorithm"] == name]
        assert [line["round"] for line in mine] == [1, 2, 3, 4, 5]
        seconds = [line["wall_seconds"] for line in mine]
        assert 0 < seconds[0] < 600
        assert seconds == sorted(seconds)


def test_no_file_is_left_aside(finished: Path) -> None:
    assert {p.name for p in finished.iterdir()} == {
        "config.json", "metrics.jsonl", "times.jsonl", "clients.jsonl", "summary.json",
        "curves.png", "clients.png", "checkpoints",
    }  # fmt: skip
    assert len(list(finished.rglob("checkpoints/*/*"))) == 2
    config = json.loads((finished / "config.json").read_text())
    assert config["clients_per_round"] == 8
    assert config["options"] == {"phase_shift": {"phases": 4}, "fedavg": {}}


def test_table_fits_and_names_every_algorithm(ran: Ran) -> None:
    out = ran.said
    assert max(map(len, out.splitlines()[:-1])) <= 110
    assert "score: accuracy, on a fixed random fifth of each class" in out
    for name in ("fedavg", "phase_shift"):
        assert sum(line.startswith(name) for line in out.splitlines()) == 2
    for title in ("last %", "kB up", "traffic/FedAvg", "samples/s", "utilisation", "peak MB"):
        assert title in out


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_epochs_mode_runs_longer_at_the_traffic_of_fedavg(tmp_path: Path) -> None:
    argv = [*TINY, "--rounds", "10", "--phases", "4", "--mode", "epochs", "--compare", "none"]
    assert bench.main([*argv, "--eval-every", "7", "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["phase_shift"]
    assert summary["rounds"] == 16
    # 16 rounds of 8 down and 2 up, and the last 6 up, over FedAvg's 10 of 8 and 8.
    assert summary["traffic_ratio"] == pytest.approx((16 * 10 + 6) / 160)
    assert sorted({r["round"] for r in records(tmp_path / "run")}) == [7, 14, 16]


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_every_algorithm_sees_the_same_partitions_and_weights(tmp_path: Path) -> None:
    argv = [*TINY, "--phases", "1", "--compare", "fedavg", "--out", str(tmp_path / "run")]
    assert bench.main(argv) == 0
    by_name = {
        name: [r["accuracy"] for r in records(tmp_path / "run") if r["algorithm"] == name]
        for name in ("phase_shift", "fedavg")
    }
    assert by_name["phase_shift"] == by_name["fedavg"]


def test_flags_are_the_parameters_of_the_algorithms() -> None:
    config = parse(["--algo", "fedavg", "--equal-weights", "--compare", "radfed", "--lr", "0.5"])
    assert isinstance(config, Config)
    assert config.options == {"fedavg": {"equal_weights": True}, "radfed": {}}
    assert (config.training.lr, config.training.epochs, config.training.model) == (0.5, 2, "mlp")
    assert config.experiment.rounds == 30
    config = parse(["--dataset", "cifar10", "--algo", "fedavg", "--seeds", "3"])
    assert config.algorithms == ("fedavg",)
    training, experiment = config.training, config.experiment
    assert (training.lr, training.epochs, training.model) == (0.001, 8, "cifar_cnn")
    assert (experiment.rounds, experiment.seeds) == (15, (0, 1, 2))


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        bench.main([*flags, "--help"])
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_is_of_the_methods_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys)
    assert text.startswith("usage: python -m fedjax_sim.bench [--algo NAME] [--compare NAME ...] [")
    assert "flags of phase_shift, fedavg, and their defaults there:" in text
    assert "--phases N n: number of groups; must divide clients_per_round." in text
    assert "--redistribution-rounds" not in text  # of a method that does not run
    assert "learning rate of the clients; the defaults are for SGD (default: digits 0.02" in text


def test_help_is_true_for_every_method_that_has_the_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each flag of each method, with that method's own words and default."""
    for name, method in ALGORITHMS.items():
        text = told(capsys, "--algo", name, "--compare", "none")
        for key, parameter in parameters(name).items():
            words = documented(method)[key].replace("%%", "%")
            assert f"{' '.join(words.split())} ({name} {parameter.default})" in text


def test_help_of_one_algorithm_has_its_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--algo", "dp_fedavg", "--compare", "robust")
    assert "flags of dp_fedavg, robust, and their defaults there:" in text
    assert "(dp_fedavg 1.0) C: clipping norm" in text  # the clip of either
    assert "None: no clipping (robust None)" in text
    assert "--phases N" not in text
    assert "--rounds N" in text
    assert "--mu" not in told(capsys, "--algo", "scaffold")


def test_list_has_the_entries_with_all_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--list", "PUSH-SUM", "directed"])
    assert stopped.value.code == 0
    entries, legend = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in entries.splitlines() if line[0] != " "] == ["push_sum"]
    assert legend.startswith("m (--clients-per-round)")


DOORS = {"bench": bench.main, "partition": command, "study": study.main, "report": report}


@pytest.mark.parametrize("command", [door.main, *DOORS.values()])
def test_every_command_has_a_version(
    command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fedjax_sim {fs.__version__}, JAX {jax.__version__}\n"


def test_the_package_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main([]) == door.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"python -m fedjax_sim.{name} " in shown for name in DOORS)
    assert door.main(["--algo", "fedavg"]) == 2
    assert "--algo fedavg: name a command, such as fedjax_sim.bench\n" in capsys.readouterr().err


BAD = {
    "weights in flight": (["--keep-weights", "--compare", "radfed"], "add --evaluated server"),
    "phases 3": (["--phases", "3"], "one of [1, 2, 4, 8]"),
    "algo": (["--algo", "nope"], "--algo: unknown algorithm 'nope'; --list shows all"),
    "close": (["--algo", "FedPro"], "did you mean fedprox or "),
    "other's flag": (["--redistribution-rounds", "3"], "--phases, --mode"),
    "redistribution": (
        ["--algo", "radfed", "--redistribution-rounds", "0"],
        "radfed: --redistribution-rounds must be at least 1, got 0",
    ),
    "no root": (["--algo", "fltrust"], "fltrust: --server-fraction must be given"),
    "no copies": (["--no-mirror"], "--no-mirror is for --fedaug or --rebalance"),
    "emd": (["--emd", "1.95"], "--emd must be"),
    "no limit": (
        ["--algo", "dynamic_clustering", "--cluster-by", "distance"],
        "--cluster-limit must be given if cluster_by is 'distance'",
    ),
    "emd and partition": (["--emd", "1", "--partition", "iid"], "--partition"),
    "sampler": (["--partition", "nope(3)"], "dirichlet(alpha"),
    "dataset": (["--dataset", "nope"], "--dataset"),
    "data_dir": (["--dataset", "mnist", "--model", "mlp", "--data-dir", "nowhere"], "mnist"),
    "model": (["--model", "nope"], "--model"),
    "five classes": (["--model", f"{__name__}:five_classes"], "[batch, 10]"),
    "no model": (["--model", f"{__name__}:no_model"], "str"),
    "small input": (
        ["--model", "mnist_cnn"],
        "an input this small may shrink to nothing in its layers",
    ),
    "cohort": (["--clients-per-round", "9"], "1..8"),
    # 1,438 / 8 samples in batches of 16 are 12 steps; half a step is rounded to none.
    "no step": (
        ["--partition", "iid", "--epochs", "0.04"],
        "--epochs 0.04 is no step for any client: one of the largest",
    ),
    "no batch": (
        ["--partition", "iid", "--last-batch", "drop", "--batch-size", "181"],
        "the largest client has 180 samp",
    ),
    "delta 1/N": (
        ["--algo", "dp_fedavg", "--delta", "0.125"],
        "--delta must be below 1/N = 0.125, or it promises nothing, got 0.125",
    ),
    "delta of none": (
        ["--compare", "fedavg", "--delta", "0.01"],
        "--delta is for private methods, such as dp_fedavg, not phase_shift and fedavg\n",
    ),
    "delta 1/n_k": (
        ["--partition", "iid", "--algo", "dp_sgd", "--delta", "0.1"],
        "--delta must be below 1/n_k = 0.00556 of the largest client for dp_sgd, or it promises "
        "nothing, got 0.1",
    ),
    "standardised images": (
        ["--split", "holdout", "--standardise", "global"],
        "--standardise='global' is for tables of numbers, not digits",
    ),
    "lr": (["--lr", "-1"], "--lr"),
    "momentum": (["--momentum", "1"], "--momentum"),
    "chunk": (["--chunk", "-1"], "--chunk"),
    "model devices": (["--model-devices", "3"], "--model-devices must divide the 1 devices of"),
    "no score": (["--score="], "--score must be one of accuracy, f1, auc, as the task is classif"),
    "no partition file": (["--partition", "p.npz"], "--partition: p.npz: No such file or dir"),
    "samples": (["--samples-mb", "0"], "--samples-mb: must be a number above 0"),
    "few samples": (
        ["--algo", "fedavg", "--compare", "none", "--samples-mb", "0.001"],
        "--samples-mb must be at least 0.",
    ),
    "all samples": (
        ["--samples-mb", "1", "--algo", "radfedi"],
        "radfedi: --samples-mb needs methods that read a client's samples only while",
    ),
    "mistyped": (["--round", "3"], "did you mean --rounds?\n"),
    "another word": (["--learning-rate", "0.1"], "did you mean --lr?\n"),
    "another word for a setting": (
        ["--algo", "fedprox(local_epochs=1)"],
        "local_epochs is not a setting of fedprox; did you mean epochs?",
    ),
    "another word for a sampler": (["--partition", "dir(0.1)"], "must be written dirichlet("),
    "nothing listed": (["--list", "fedavg", "qqqq"], "--list: no entry has 'fedavg' and 'qqqq'"),
    "no folder": (["--compare", "none", "--out", "/proc/nowhere/run"], "--out /proc/nowhere/run: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, wanted = BAD[case]
    monkeypatch.chdir(tmp_path)
    base = BASE if extra[0] == "--partition" else TINY
    assert bench.main([*base, "--out", str(tmp_path / "run"), *extra]) == 2
    captured = capsys.readouterr()
    assert "algorithm" not in captured.out  # no table; what is too large is found at the start
    *progress, error = captured.err.splitlines()
    assert [line.startswith("fedavg: compiling") for line in progress] in ([], [True])
    assert error.startswith("fedjax_sim.bench: error: ")
    assert wanted in f"{error}\n"
    assert list(tmp_path.iterdir()) == []


def test_method_that_does_not_use_samples_of_the_server_needs_none() -> None:
    config = parse([*TINY, "--algo", "ozdayi", "--server-epochs", "0", "--compare", "none"])
    assert build(config).algorithms.keys() == {"ozdayi"}


@pytest.mark.parametrize("flags", [[], ["--no-mirror"]])
def test_copies_are_mirrored_unless_told_not_to(flags: Any) -> None:
    """Images that are white on the left stay so, turned and tilted as they are."""
    config = parse(["--fedaug", "0.8", *flags])
    (transform,) = augmentations(config.preparation, load_dataset("digits"))
    x = np.zeros((64, 8, 8, 1), np.uint8)
    x[:, :, :4] = 16
    ones = jnp.ones(64, bool)
    batch = Batch(jnp.asarray(x), jnp.zeros(64, jnp.int32), ones, ones)
    nothing: Any = None
    altered = jax.jit(lambda b: transform(jax.random.key(0), b, nothing).x)(batch)
    out = np.asarray(altered).astype(int)
    left, right = out[:, :, :4].sum(axis=(1, 2, 3)), out[:, :, 4:].sum(axis=(1, 2, 3))
    mirrored = np.mean(left < right)
    assert mirrored == 0 if flags else 0.3 < mirrored < 0.7


@pytest.mark.parametrize("other", ["--dataset=synthetic(0, 0)", "--split=clients"])
def test_partition_of_other_samples_is_refused(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = load_dataset("digits").train_y
    save_partition(tmp_path / "p.npz", iid(labels, 5, seed=3), labels, "digits")
    argv = ["--partition", str(tmp_path / "p.npz"), other, "--out", str(tmp_path / "run")]
    assert bench.main(argv) == 2
    found = {"--dataset=synthetic(0, 0)": "4,833 of synthetic(0, 0) in --split official",
             "--split=clients": "1,797 of digits in --split clients"}[other]  # fmt: skip
    assert f"deals the 1,438 samples of digits, not the {found}\n" in capsys.readouterr().err


def test_clients_of_a_file_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_partition(tmp_path / "p.npz", iid(load_dataset("digits").train_y, 5, seed=3))
    argv = ["--algo", "fedavg", "--compare", "none", "--seeds", "1", "--model", "logistic"]
    argv += ["--partition", str(tmp_path / "p.npz")]
    assert build(parse(argv)).clients == build(parse([*argv, "--clients", "5"])).clients == 5
    assert bench.main([*argv, "--clients", "6"]) == 2
    assert "the file has 5 clients, --clients is 6" in capsys.readouterr().err


def test_each_data_set_says_what_its_test_set_is() -> None:
    alone = ["--algo", "fedavg", "--compare", "none", "--seeds", "1"]
    scored = {
        name: build(parse([*alone, "--dataset", name, "--model", "logistic"])).problem.scored
        for name in ("digits", "synthetic(0, 0)")
    }
    assert scored == {
        "digits": "on a fixed random fifth of each class",
        "synthetic(0, 0)": "mean over 30 clients, each on its own samples in the last tenth of "
        "each device's samples",
    }


def test_client_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_partition(tmp_path / "p.npz", partition_from_lists([[0, 1], [], [2]]))
    argv = [*BASE, "--partition", str(tmp_path / "p.npz"), "--phases", "3"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 2
    assert "clients 1 have no samples" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_used_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.txt").write_text("mine")
    argv = [*TINY, "--algo", "fedavg", "--compare", "none"]
    assert bench.main([*argv, "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["old.txt"]
    assert bench.main([*argv, "--out", str(tmp_path / "old.txt")]) == 2
    assert (tmp_path / "old.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_nan_stops_and_keeps_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*BASE, "--partition", "iid", "--model", f"{__name__}:nan_later"]
    argv += ["--rounds", "9", "--compare", "none"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 1
    (err,) = errors(capsys.readouterr().err)
    assert err.endswith(f"the records so far are in {tmp_path / 'run'}")
    # 1,438 / 8 samples in batches of 16 are 12 steps, twice a round: the 100th is in round 5.
    assert "round 5" in err
    assert [(r["round"], r["seed"]) for r in records(tmp_path / "run")] == [
        (t, s) for t in range(1, 5) for s in (0, 1)
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["phase_shift"].keys() == {"diverged"}


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_divergence_of_one_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--seeds", "1", "--algo", "fedadam", "--server-lr", "1e36"]
    assert bench.main([*argv, "--compare", "fedavg", "--out", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    (error,) = errors(err)
    assert error.startswith("error: fedadam: the loss became inf in round 1 (seed 0)")
    (first,) = (line.split() for line in out.splitlines() if line.startswith("fedadam"))
    assert (first[1], set(first[2:])) == ("diverged", {"-"})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["fedadam"].keys() == {"diverged"}
    assert summary["fedavg"]["rounds"] == 2
    assert [(r["algorithm"], r["round"]) for r in records(tmp_path / "run")] == [
        ("fedavg", 1), ("fedavg", 2)
    ]  # fmt: skip


def test_folder_without_a_record_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "run", stopped)
    assert bench.main([*TINY, "--compare", "none", "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err.endswith("; nothing was recorded\n")
    assert not [*tmp_path.iterdir()]


def spent_in_five(algo: str, config: Config) -> dict[str, Any]:
    setup = build(config)
    data = setup.problem.data
    privacy = privacy_of(setup.algorithms[algo], data)
    return privacy_spent(privacy, data.clients, 5, config.scores.delta)


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_differential_privacy_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every client in every round: T Gaussian mechanisms are one of noise z / sqrt(T)."""
    argv = [*TINY, "--seeds", "1", "--rounds", "4", "--algo", "dp_fedavg", "--compare", "none"]
    argv += ["--noise-multiplier", "3", "--eval-every", "4"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["dp_fedavg"]
    spent, noise = summary["epsilon"], 3 / np.sqrt(4)
    tail = stats.norm.sf
    delta = tail(spent * noise - 0.5 / noise) - np.exp(spent) * tail(spent * noise + 0.5 / noise)
    assert summary["delta"] == 8**-1.1
    assert delta == pytest.approx(8**-1.1, rel=1e-3)
    assert f"ε = {spent:.3g} at δ = 0.102 (1/N = 0.125)\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_privacy_follows_how_cohorts_are_drawn() -> None:
    flags = ["--sampling", "fixed", "--clients-per-round", "2", "--noise-multiplier", "0.7"]
    config = parse([*TINY, "--algo", "dp_fedavg", "--compare", "none", *flags, "--delta", "0.01"])
    wanted = privacy.epsilon(
        0.7, clients=8, clients_per_round=2, rounds=5, delta=0.01, sampling="fixed"
    )
    assert spent_in_five("dp_fedavg", config) == {"epsilon": wanted, "delta": 0.01}


def test_privacy_that_cannot_be_told_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    config = parse([*TINY, "--algo", "dp_fedavg", "--compare", "none"])
    told = spent_in_five("dp_fedavg", config)
    why = "unknown: epsilon needs dp-accounting: pip install dp-accounting"
    assert told == {"epsilon_unknown": why}
    assert [*remarks(told)] == [f"ε is {why}"]


@pytest.mark.parametrize(
    ("algo", "flags", "why"),
    [
        ("dp_fedavg", ["--clock", "simulated(constant(1), first=1)"], "clock simulated("),
        ("dp_ftrl", ["--share-beta", "0.2"], "samples that all clients are sent (--share-beta)"),
        ("dp_ftrl", ["--server-fraction", "0.1"], "the server's own samples"),
    ],
)
def test_privacy_that_other_flags_void_is_unknown(algo: str, flags: list[str], why: str) -> None:
    config = parse([*TINY, "--algo", algo, "--compare", "none", *flags])
    told = spent_in_five(algo, config)
    assert told["epsilon_unknown"].startswith(f"unknown because of {why}")
    assert [*remarks(told)] == [f"ε is {told['epsilon_unknown']}"]


def test_other_methods_spend_no_privacy() -> None:
    config = parse([*TINY, "--algo", "fedavg", "--compare", "none"])
    assert spent_in_five("fedavg", config) == {}


def shown(
    capsys: pytest.CaptureFixture[str],
    *flags: Any,
    numbers: Any = None,
    names: Sequence[str] = ("fedavg",),
) -> Any:
    base = BASE if "--partition" in flags else TINY
    config = parse([*base, "--algo", "fedavg", "--compare", "none", *flags])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "check", lambda self: None)  # nothing runs
        setup = build(config)
    known = {"score": "accuracy", "score_last_per_run": [0], "accuracy_last": 0, "bytes_up": 140,
               "bytes_down": 41_600, "traffic_ratio": 0, "rounds": 1, "samples_per_second": 0,
               "compile_seconds": 0, "run_seconds": 0, "utilisation": 1, "xla_programs": 1,
               "peak_memory_mb": 1}  # fmt: skip
    show(setup, {name: known | (numbers or {}) for name in names})
    return capsys.readouterr().out, setup


def test_what_became_of_the_samples_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    out, setup = shown(capsys, "--share-beta", "0.02", "--seeds", "1")
    (partition,) = setup.problem.trained
    reached = emd(label_table(load_dataset("digits").train_y, partition, 10))
    assert f"clients train at EMD {reached:.2f}: 0 % of their samples are copies\n" in out


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_scores_of_the_clients_own_models_are_there_without_asking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--seeds", "1", "--rounds", "1", "--algo", "ditto", "--compare", "none"]
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 0
    head, _, row = capsys.readouterr().out.split("\n\n")[1].splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["ditto"]
    assert "personal %" in re.split("  +", head)
    assert f"{100 * summary['personal_accuracy_last']:.2f}" in row.split()
    assert summary["personal_accuracy_last"] != summary["client_accuracy_last"]


def by_hand(steps: Any, devices: int, chunk: int) -> int:
    """Steps that the devices run: each in chunks, and until the last of them is done."""
    blocks = np.reshape(np.transpose(steps), (devices, -1))  # a share of every run on each
    chunk = chunk or blocks.shape[1]
    loads = [
        sum(max(own[i : i + chunk]) * len(own[i : i + chunk]) for i in range(0, len(own), chunk))
        for own in blocks
    ]
    return devices * int(max(loads))


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_utilisation_counts_devices_that_wait(devices: int, chunk: int) -> None:
    steps = np.random.default_rng(devices).integers(0, 30, (3, 8)).astype(np.int32)
    ours = make_execution(devices, chunk)
    executed = np.asarray(jax.jit(jax.vmap(ours.executed))(steps))
    assert executed.sum() == by_hand(steps, devices, chunk)  # the seeds share the devices
    assert (executed >= steps).all()


def test_one_large_client_keeps_the_other_devices_waiting() -> None:
    ours = make_execution(4, 1)
    rows = np.asarray(ours.deal(jnp.array([2, 90, 1, 3, 4])))
    steps = np.append([2, 90, 1, 3, 4], 0).astype(np.int32)[rows]
    assert steps.sum() / np.asarray(ours.executed(steps)).sum() == 100 / (4 * 90)


def test_small_traffic_has_a_small_unit(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys)
    head, _, row = out.split("\n\n")[1].splitlines()
    assert head.split() == ["algorithm", "last", "%", "B", "up", "B", "down", "traffic/FedAvg"]
    assert row.split() == ["fedavg", "0.00", "140", "41,600", "0.000"]


ENTRY = [sys.executable, "-m", "fedjax_sim.bench"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench --list", "study study.toml --dry-run"])
def test_reader_that_goes_away_is_no_error(command: str, tmp_path: Path) -> None:
    text = 'methods = {one = "fedavg"}\n[run]\ndataset = "digits"\n'
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    pipe = subprocess.PIPE
    argv = [sys.executable, "-m", *f"fedjax_sim.{command}".split()]
    with subprocess.Popen(argv, text=True, stdout=pipe, stderr=pipe, cwd=tmp_path) as process:
        known(process.stdout).close()
        assert known(process.stderr).read() == ""
    assert process.returncode == 141


@pytest.mark.slow
def test_more_devices_than_cores_are_refused_at_once(tmp_path: Path) -> None:
    cores = available_cores()
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    argv = [*ENTRY, *TINY, "--devices", "99", "--out", str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100, env=env)
    assert done.returncode == 2
    assert f"--devices must be in 1..{cores} on this machine, got 99" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_command_uses_several_devices_and_a_quiet_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    argv = [sys.executable, "-m", "fedjax_sim.bench", *TINY, "--devices", "2"]
    argv.remove("--no-cache")
    argv += ["--rounds", "1", "--seeds", "1", "--algo", "fedavg", "--compare", "none"]
    argv += ["--out", str(tmp_path / "run")]
    for _ in range(2):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
        lines = done.stderr.splitlines()
        assert (done.returncode, [e for e in lines if not e.startswith("fedavg")]) == (0, [])
        assert "2 x cpu" in done.stdout
    assert any((tmp_path / "cache" / "xla").iterdir())
