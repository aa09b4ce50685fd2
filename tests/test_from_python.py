"""From Python to a paper: results as tables, folders and comparisons, and the command as a call."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pandas
import pytest
from conftest import assert_trees
from matplotlib import pyplot, rc_context
from matplotlib.colors import to_rgb
from scipy import stats

import fedjax_sim as fs
from fedjax_sim import bench, study
from fedjax_sim.cli.reporting.command import main as report

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "eval_every": 2,
    "clients": 12,
    "seeds": 3,
    "emd": 1.2,
    "devices": 1,
}
SETTINGS |= {"model": "logistic", "cache": False}
FLAGS = "--rounds 3 --eval-every 2 --clients 12 --seeds 3 --emd 1.2 --devices 1 --model logistic"
NAMES = ["fedavg(lr=0.1)", "fedavg(lr=0.5)", "fedprox(mu=1.0)"]
pytestmark = pytest.mark.usefixtures("bare_commands")


@pytest.fixture(scope="module")
def results() -> dict[str, fs.Result]:
    return fs.run_experiment("fedavg(lr=0.1|0.5)", compare="fedprox(mu=1.0)", **SETTINGS)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command writes of the same run."""
    out = tmp_path_factory.mktemp("command") / "run"
    methods = ["--algo", "fedavg(lr=0.1|0.5)", "--compare", "fedprox(mu=1.0)", "--no-cache"]
    assert bench.main([*FLAGS.split(), *methods, "--out", str(out)]) == 0
    assert report([str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def saved(results: dict[str, fs.Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    fs.save_run(out, results, dataset="digits", partition="emd(1.2)")
    return out


def test_a_call_computes_what_the_command_computes(
    results: dict[str, fs.Result], command: Path
) -> None:
    summary = json.loads((command / "summary.json").read_text())
    assert [*results] == NAMES
    for name, result in results.items():
        assert summary[name]["score_last_per_run"] == result.accuracy[-1].tolist()
        assert summary[name]["score_mean_per_run"] == result.accuracy.mean(axis=0).tolist()


def test_a_saved_result_has_the_records_and_the_report_of_the_command(
    command: Path, saved: Path
) -> None:
    for name in ("metrics.jsonl", "clients.jsonl"):
        ours, theirs = ((of / name).read_text().splitlines() for of in (saved, command))
        assert sorted(ours) == sorted(theirs)  # methods that share a program take turns
    configs = [json.loads((of / "config.json").read_text()) for of in (saved, command)]
    for key in ("partition_hashes", "seeds", "clients", "rounds", "clients_per_round", "score"):
        assert configs[0][key] == configs[1][key], key
    assert report([str(saved)]) == 0
    for name in ("table.csv", "table.tex"):
        assert (saved / "report" / name).read_bytes() == (command / "report" / name).read_bytes()
    pages = [(of / "report" / "report.md").read_text() for of in (saved, command)]
    same = [page.partition("## Partitions")[0] for page in pages]  # their names, the commands
    assert same[0] == same[1]


def test_a_saved_result_has_its_weights_but_no_command(
    results: dict[str, fs.Result], saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fs.models.logistic((8, 8, 1), 10)
    run = fs.load_run(saved, model=model)
    for name, result in results.items():
        assert_trees(run.variables(name), jax.device_get(result.variables))
    assert "selection=uniform()" in run.settings["options"][NAMES[0]]["composition"]
    with pytest.raises(ValueError, match=r"saved from Python .*load_run\(DIR, model=\.\.\.\)"):
        fs.load_run(saved).variables(NAMES[0])
    with pytest.raises(fs.CheckpointError, match=r"another model: .*bias.* \[10\] is saved, \[7\]"):
        fs.load_run(saved, model=fs.models.logistic((8, 8, 1), 7)).variables(NAMES[0])
    assert bench.main(["--resume", str(saved)]) == 2
    assert "was saved from Python" in capsys.readouterr().err


def test_a_long_name_has_weights_too(results: dict[str, fs.Result], tmp_path: Path) -> None:
    names = [f"{'é' * 60} {i}" for i in range(2)]  # 6 bytes a letter in the name of a folder
    fs.save_run(tmp_path, dict(zip(names, results.values(), strict=False)))
    run = fs.load_run(tmp_path, model=fs.models.logistic((8, 8, 1), 10))
    for name, result in zip(names, results.values(), strict=False):
        assert_trees(run.variables(name), jax.device_get(result.variables))


def test_a_folder_of_another_is_left_alone(results: dict[str, fs.Result], saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"folder .* is not empty; name a new folder"):
        fs.save_run(saved, results)
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_rows_have_the_numbers_of_the_result(results: dict[str, fs.Result], command: Path) -> None:
    every = fs.load_run(command).to_pandas()
    for name, result in results.items():
        table = result.to_pandas()
        by_round = table.pivot(index="round", columns="seed", values="accuracy")
        np.testing.assert_array_equal(by_round.to_numpy(), result.accuracy)
        own = every[every["algorithm"] == name].drop(columns="algorithm").reset_index(drop=True)
        pandas.testing.assert_frame_equal(table, own, check_exact=True)
        last = result.table().loc["accuracy"]
        assert last["mean"] == pytest.approx(result.accuracy[-1].mean(), abs=1e-15)
        assert last["std"] == pytest.approx(result.accuracy[-1].std(), abs=1e-15)


def test_a_plot_shows_the_mean_and_a_band(results: dict[str, fs.Result]) -> None:
    with rc_context({"backend": "agg"}):
        axes = results[NAMES[0]].plot(label="first")
        assert results[NAMES[1]].plot(label="second", axes=axes) is axes
    first, second = axes.get_lines()
    assert to_rgb(first.get_color()) != to_rgb(second.get_color())
    for line, band, name in zip((first, second), axes.collections, NAMES[:2], strict=True):
        series = results[name].accuracy
        np.testing.assert_array_equal(line.get_xdata(), [2, 3])
        np.testing.assert_allclose(np.asarray(line.get_ydata()), series.mean(axis=1))
        edges = np.asarray(band.get_paths()[0].vertices)
        wanted = [
            series.mean(axis=1) - series.std(axis=1),
            series.mean(axis=1) + series.std(axis=1),
        ]
        for x, low, high in zip([2, 3], *wanted, strict=True):
            heights = edges[edges[:, 0] == x, 1]
            np.testing.assert_allclose([heights.min(), heights.max()], [float(low), float(high)])
    pyplot.close("all")
    with pytest.raises(ValueError, match="metric must be one of accuracy"):
        results[NAMES[0]].plot("mse")


def test_a_comparison_is_the_table_of_the_report(
    results: dict[str, fs.Result], command: Path, tmp_path: Path
) -> None:
    found = fs.compare(results)
    table = command / "report" / "table"
    assert found.to_latex() == table.with_suffix(".tex").read_text()
    ours, theirs = found.to_pandas(), pandas.read_csv(table.with_suffix(".csv"))
    own = ["run", "dataset", "partition"]
    pandas.testing.assert_frame_equal(ours.drop(columns=own), theirs.drop(columns=own))
    assert found._repr_html_().count("<tr>") == 1 + len(NAMES)
    for out in (tmp_path / "new", tmp_path / "new"):  # the second one replaces the first
        found.save(out)
    assert (tmp_path / "new" / "table.tex").read_text() == found.to_latex()
    with pytest.raises(ValueError, match=r"folder .* has other files, and no report"):
        found.save(command)


def test_a_saved_result_has_its_privacy(tmp_path: Path) -> None:
    problem = fs.toy()
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    private = fs.algorithms.dp_fedavg(
        local, clients_per_round=5, clip=1.0, noise_multiplier=2.0
    ).on(fs.make_execution(1))
    data = dataclasses.replace(problem.data, root=None)  # the server's own samples have no noise
    where = problem.model, data, problem.test
    result = fs.simulate(private, *where, rounds=2, classes=10, seeds=(0,))
    fs.save_run(tmp_path / "run", {"private": result})
    summary = fs.load_run(tmp_path / "run").summary["private"]
    assert summary["delta"] == 10**-1.1
    assert summary["epsilon"] == private.epsilon(data, 2, 10**-1.1)


def test_a_comparison_is_of_pairs_with_the_baseline(results: dict[str, fs.Result]) -> None:
    first, second = results[NAMES[0]], results[NAMES[1]]
    found = fs.compare({"A": first, "B (other)": second}, baseline="B (other)").to_pandas()
    gains = first.accuracy[-1] - second.accuracy[-1]
    row = found.set_index("method").loc["A"]
    assert (row["baseline"], row["pairs"]) == ("B (other)", 3)
    assert row["difference_mean"] == pytest.approx(gains.mean())
    assert row["p"] == pytest.approx(stats.wilcoxon(gains).pvalue)
    with pytest.raises(ValueError, match=r"^baseline must be one of A, B \(other\), got 'C'"):
        fs.compare({"A": first, "B (other)": second}, baseline="C")


def test_results_of_other_clients_are_not_compared(
    results: dict[str, fs.Result], tmp_path: Path
) -> None:
    problem = fs.toy()
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    other = fs.simulate(
        fs.fedavg(local, clients_per_round=5), problem.model, problem.data, problem.test,
        rounds=1, classes=10, seeds=(0, 1, 2), execution=fs.make_execution(devices=1),
    )  # fmt: skip
    both = {"mine": results[NAMES[0]], "other": other}
    with pytest.raises(ValueError, match="other has another partition than mine: save it"):
        fs.save_run(tmp_path / "both", both)
    assert not (tmp_path / "both").exists()
    fs.save_run(tmp_path / "other", {"other": other})
    assert len(fs.load_run(tmp_path / "other").settings["partition_hashes"]) == 1  # of all seeds
    found = fs.compare(both)
    assert [group.problem.clients for group in found.groups] == [12, 10]
    assert repr(found).count("traffic/FedAvg") == 2
    assert found.to_pandas()["p"].isna().all()
    fewer = dataclasses.replace(other, evaluations=[])
    for wrong, message in (
        ({}, "results must be results by name"),
        ({"a": 1}, "a must be a Result with an evaluation, got 1"),
        ({"a": fewer}, "a must be a Result with an evaluation"),
        ({1: other}, "names must be texts, got 1: use '1'"),
        ({0.1: {"a": other}}, "names must be texts, got 0.1: use '0.1'"),
        ({"date": other}, "'date' cannot name a result"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.compare(wrong)  # type: ignore[arg-type]


def test_results_by_column_are_a_table_of_methods_by_columns(
    results: dict[str, fs.Result], tmp_path: Path
) -> None:
    """Of a method with several settings, the row is the best one only if samples validate it."""
    half = {name: result.of_runs(slice(0, 2)) for name, result in results.items()}
    found = fs.compare({"all": results, "2": half}, baseline=NAMES[1])
    table = found.to_pandas().set_index("method")
    for name, result in results.items():
        last = result.accuracy[-1]
        wanted = [last.mean(), last.std(), last[:2].mean(), last[:2].std()]
        columns = ["all mean", "all std", "2 mean", "2 std"]
        np.testing.assert_allclose(table.loc[name, columns].astype(float), wanted)
    assert table["all p, Holm"].isna().tolist() == [False, True, False]
    assert r"\textbf" in found.to_latex()
    assert "<strong>" in found._repr_html_()
    assert "*: the best of a column" in repr(found)
    found.save(tmp_path / "report")
    assert (tmp_path / "report" / "wide.tex").read_text() == found.to_latex()
    with pytest.raises(ValueError, match=r"^score must be one of accuracy, f1, got 'mse'"):
        fs.compare(results, score="mse")
    first = {NAMES[0]: results[NAMES[0]]}
    for wrong, message in (
        ({"a": first | {"x": half[NAMES[1]]}}, "^column 'a': .* another seeds .* in a column of"),
        ({"a": first, "b": results[NAMES[0]]}, "^column 'b': results must be results by name"),
        ({"a": first, "b": {}}, "^column 'b': results must be results by name"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.compare(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_table_of_a_paper_is_the_same_from_a_file_and_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one file at natural and other clients, tuned on validation samples."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y, owner = rng.integers(3, size=480), rng.integers(8, size=480)
    x = np.column_stack([y + rng.normal(size=480), y % 2 + rng.normal(size=480), y, owner])
    np.savetxt("rows.csv", x, "%g", ",", header="a,b,label,client", comments="")
    lr = "lr=0.01|0.1"
    shared: dict[str, Any] = {
        "dataset": "csv:rows.csv,label=label,client=client",
        "split": "holdout",
        "validation": 0.1,
        "seeds": 2,
        "rounds": 3,
        "model": "logistic",
        "score": "f1",
    }
    Path("paper.toml").write_text(
        'table = { columns = "partition" }\n[run]\n'
        + "\n".join(f"{key} = {json.dumps(value)}" for key, value in shared.items())
        + '\n[grid]\npartition = ["natural", "dirichlet(0.5)"]\n'
        + f'[methods]\nfedavg = "fedavg({lr})"\nfedprox = "fedprox(mu=1, {lr})"\n'
    )
    assert study.main(["paper.toml", "--out", "study", "--no-cache", "--devices", "1"]) == 0
    results = {
        partition: fs.run_experiment(
            f"fedavg({lr})", compare=f"fedprox(mu=1, {lr})", partition=partition,
            cache=False, devices=1, **shared,
        )
        for partition in ("natural", "dirichlet(0.5)")
    }  # fmt: skip
    table = fs.compare(results, score="f1").to_latex()
    assert table == Path("study", "table.tex").read_text()
    assert re.findall(r"^\w+(?= &)", table, re.MULTILINE) == ["method", "fedavg", "fedprox"]


def test_runs_of_one_seed_are_its_folds(results: dict[str, fs.Result], tmp_path: Path) -> None:
    result = results[NAMES[0]].of_runs(slice(0, 2))

    def seeded(*seeds: int) -> fs.Result:
        origin = dataclasses.replace(result.provenance, seeds=seeds)
        return dataclasses.replace(result, provenance=origin)

    fs.save_run(tmp_path / "run", {"a": seeded(7, 7)})
    run = fs.load_run(tmp_path / "run")
    assert (run.settings["seeds"], run.settings["folds"]) == ([7], 2)
    assert [(row["seed"], row["fold"]) for row in run.records[:2]] == [(7, 0), (7, 1)]
    assert len(run.settings["partition_hashes"]) == 1
    four = dataclasses.replace(result.provenance, seeds=(1, 2, 1, 2))
    wrong = dataclasses.replace(result, provenance=dataclasses.replace(four, start=four.start[0]))
    with pytest.raises(ValueError, match="seeds must have equally many runs each"):
        fs.save_run(tmp_path / "other", {"a": wrong})


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "range": ({"rounds": 0}, "^rounds: must be a whole number at least 1, got '0'"),
    "unknown": ({"momentun": 0.9}, "^unrecognized arguments: momentun=0.9"),
    "data": ({"clients": 12, "clients_per_round": 13}, r"^clients_per_round must be in 1\.\.12"),
    "process": ({"dry_run": True}, "^dry_run is for the command alone"),
    "kind": ({"model": len}, "^model must be a text, a number, a bool or a list of texts"),
    "folder": ({"out": ""}, "^out: must name a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named(case: str) -> None:
    settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        fs.run_experiment("fedavg", compare="none", **settings)


@pytest.mark.slow
def test_a_call_writes_a_folder_that_the_command_resumes(
    command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = {**SETTINGS, "compare": "fedprox(mu=1.0)", "out": out}
    fs.run_experiment("fedavg(lr=0.1|0.5)", **settings)
    assert capsys.readouterr().out == ""
    assert (out / "metrics.jsonl").read_bytes() == (command / "metrics.jsonl").read_bytes()
    assert bench.main(["--resume", str(out)]) == 0
    with pytest.raises(ValueError, match=r"out .* is not empty"):
        fs.run_experiment("fedavg(lr=0.1|0.5)", **settings)


@pytest.mark.slow
def test_a_method_that_diverges_does_not_end_the_others() -> None:
    settings = {**SETTINGS, "seeds": 1, "compare": "fedavg(lr=1e38)"}
    with pytest.raises(fs.DivergedError, match=r"^fedavg\(lr=1e38\): .*round") as raised:
        fs.run_experiment("fedavg(lr=0.1)", **settings)
    assert [*raised.value.results] == ["fedavg(lr=0.1)"]  # type: ignore[attr-defined]
