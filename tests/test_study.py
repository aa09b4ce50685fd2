"""Studies: a file means commands, validation clients choose, and nothing is lost."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedjax_sim as fs
from benchmarks.reproduce import common, fedaug, phase_shift
from fedjax_sim import bench, study
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.studies.asked import parse_study
from fedjax_sim.cli.studies.plan import read_study
from fedjax_sim.run.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
RUN = """
[run]
dataset = "digits"
model = "logistic"
split = "clients"
folds = 3
clients = 12
seeds = 2
rounds = 2
"""
STUDY = f"""
baseline = "weak"
{RUN}
[grid]
emd = [0.5, 1.4]

[methods]
"FedProx & µ_k" = "fedprox(mu=0.1|30, lr=0.1)"
weak = "fedprox(mu=0, lr=0.001|0.1)"
"""
ROWS = ("FedProx & µ_k", "weak")
pytestmark = pytest.mark.usefixtures("bare_commands")


def written(folder: Path, text: str) -> Path:
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return path


def lines_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that has run, each cell of it one program on one device."""
    folder = tmp_path_factory.mktemp("study")
    out = folder / "out"
    argv = [str(written(folder, STUDY)), "--devices", "1", "--out", str(out)]
    assert study.main(argv) == 0
    return out


@pytest.mark.slow
def test_a_cell_is_a_run_of_the_command(done: Path, tmp_path: Path) -> None:
    """With the settings that the file says, to the byte."""
    (_, cell) = read_study(done / "study.toml").cells
    assert cell.name == "emd=1.4"
    flags = "--model logistic --split clients --folds 3 --clients 12 --seeds 2 --rounds 2"
    methods = ["--algo", "fedprox(mu=0.1|30, lr=0.1)", "--compare", "fedprox(mu=0, lr=0.001|0.1)"]
    argv = [*flags.split(), "--emd", "1.4", *methods, "--devices", "1"]
    assert cell.config.record() == {**parse(argv).record(), "devices": None}
    assert bench.main([*argv, "--out", str(tmp_path / "run")]) == 0
    ours, theirs = done / "cells" / cell.name, tmp_path / "run"
    assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()
    assert fs.load_run(ours).summary["devices"] == fs.load_run(theirs).summary["devices"]


@pytest.mark.slow
def test_validation_clients_choose_and_test_clients_are_told(done: Path) -> None:
    found = lines_of(done)
    assert len(found) == 2 * len(ROWS) * 6
    plan = read_study(done / "study.toml")
    for cell in plan.cells:
        records = fs.load_run(done / "cells" / cell.name).records
        for method, texts in plan.rows.items():
            scores = {}
            for text in texts:
                runs: dict[Any, list[Any]] = {}
                for row in records:
                    if row["algorithm"] == text:
                        runs.setdefault((row["seed"], row["fold"]), []).append(row)
                picked = [
                    max(rows, key=lambda row: row["validation"]["client_accuracy"]["mean"])
                    for rows in runs.values()
                ]
                scores[text] = (
                    [row["validation"]["client_accuracy"]["mean"] for row in picked],
                    [row["client_accuracy"]["mean"] for row in picked],
                )
            best = max(scores, key=lambda text: np.mean(scores[text][0]))
            mine = [
                line
                for line in found
                if line["method"] == method and line["emd"] == str(cell.settings["emd"])
            ]
            assert {line["setting"] for line in mine} == {best}
            got = [[float(line[key]) for line in mine] for key in ("validation", "test")]
            np.testing.assert_allclose(got, scores[best], rtol=1e-6)
            assert [(int(line["seed"]), int(line["fold"])) for line in mine] == [*runs]


@pytest.mark.slow
def test_a_table_has_a_column_for_each_value(done: Path) -> None:
    """With the numbers of the lines; the setting has the name and the values of the file."""
    found = lines_of(done)
    head, _, *rows = (done / "table.md").read_text(encoding="utf-8").splitlines()[:4]
    assert head == "| method | 0.5 | 1.4 | average rank |"
    for row, line in zip(ROWS, rows, strict=True):
        cells = [re.sub(r"[*†\\]", "", cell).strip() for cell in line.strip("|").split("|")]
        wanted = [row]
        for emd in ("0.5", "1.4"):
            scores = [float(e["test"]) for e in found if (e["method"], e["emd"]) == (row, emd)]
            wanted.append(f"{100 * np.mean(scores):.2f} ± {100 * np.std(scores):.2f}")
        assert cells[:3] == wanted
    tex = (done / "table.tex").read_text(encoding="utf-8")
    assert sum(line.count("**") for line in rows) == 2 * tex.count(r"\textbf{")
    assert r"FedProx \& µ\_k" in tex
    assert json.loads((done / "study.json").read_text())["columns"] == "emd"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mirror = true", []),
        ("mirror = false\nfedaug = 0.5", ["--no-mirror", "--fedaug=0.5"]),
        ("stop_at_target = false", []),
        ("stop_at_target = true\ntarget = 0.5", ["--stop-at-target", "--target=0.5"]),
        ("emd = 1", ["--emd=1"]),
    ],
)
def test_settings_are_flags(given: str, words: list[str], tmp_path: Path) -> None:
    (cell,) = read_study(written(tmp_path, f'methods = ["fedavg"]\n[run]\n{given}')).cells
    assert [*cell.argv] == [*words, "--algo", "fedavg", "--compare", "none"]


@pytest.mark.slow
def test_what_is_done_is_not_done_again(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (done / "cells").rglob("*") if p.is_file()}
    table = (done / "table.md").read_bytes()
    assert study.main(["--resume", str(done)]) == 0
    assert capsys.readouterr().out.count("done before") == 2
    assert before == {p: p.stat().st_mtime_ns for p in (done / "cells").rglob("*") if p.is_file()}
    assert table == (done / "table.md").read_bytes()


def test_a_shard_is_every_nth_cell() -> None:
    assert parse_study(["a.toml", "--shard", "2/3"]).shard == (2, 3)
    for text in ("0/3", "4/3", "2", "2/0"):
        with pytest.raises(ValueError, match="--shard: must be I/N with 1 <= I <= N"):
            parse_study(["a.toml", "--shard", text])
    with pytest.raises(ValueError, match="--merge is for a new folder, not for --shard"):
        parse_study(["a.toml", "--shard", "1/2", "--merge", "."])


def test_a_stopped_shard_goes_on_as_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedjax_sim.bench.main", lambda argv: 130)
    out = tmp_path / "part"
    argv = [str(written(tmp_path, STUDY)), "--out", str(out), "--shard", "2/2"]
    assert study.main(argv) == 130
    # With the modules that other tests of this process trusted.
    resumed = rf"fedjax_sim\.study --resume {re.escape(str(out))}( --trust \S+)* --shard 2/2\n"
    assert re.search(resumed, capsys.readouterr().err)


@pytest.mark.slow
def test_shards_are_merged(done: Path, tmp_path: Path) -> None:
    """One of them lacks its cell, which runs then."""
    shards = [tmp_path / name for name in "ab"]
    file = str(written(tmp_path, STUDY))
    argv = [file, "--devices", "1", "--out", str(shards[0]), "--shard", "1/2"]
    assert study.main(argv) == 0
    assert not (shards[0] / "results.csv").exists()
    shutil.copytree(shards[0], shards[1])
    shutil.rmtree(shards[1] / "cells")
    out = tmp_path / "out"
    assert study.main(["--merge", *map(str, shards), "--devices", "1", "--out", str(out)]) == 0
    for name in ("results.csv", "table.md", "study.json"):
        assert (out / name).read_bytes() == (done / name).read_bytes()
    for cell in (out / "cells").iterdir():
        theirs = done / "cells" / cell.name / "metrics.jsonl"
        assert (cell / "metrics.jsonl").read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_cell_with_fewer_rounds_goes_on(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, asked = shutil.copytree(done, tmp_path / "copy"), []
    more = written(tmp_path, STUDY.replace("rounds = 2", "rounds = 3"))

    def stopped(argv: list[str]) -> int:
        asked.append(argv[-3:])
        return 2

    monkeypatch.setattr("fedjax_sim.bench.main", stopped)
    assert study.main([str(more), "--resume", str(copy)]) == 2
    cells = (str(copy / "cells" / f"emd={emd}") for emd in (0.5, 1.4))
    assert asked == [["--out", cell, "--or-resume"] for cell in cells]


@pytest.mark.slow
def test_a_damaged_cell_is_named_before_anything_runs(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(done, tmp_path / "copy")
    (copy / "cells" / "emd=1.4" / "summary.json").write_text("{")
    assert study.main(["--resume", str(copy)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "emd=1.4/summary.json is damaged" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_another_study_is_refused(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = written(tmp_path, STUDY.replace("clients = 12", "clients = 15"))
    before = sorted((p, p.stat().st_mtime_ns) for p in done.rglob("*"))
    assert study.main([str(other), "--resume", str(done)]) == 2
    assert "--clients is 15, and 12 in the run in" in capsys.readouterr().err
    fewer = written(tmp_path, STUDY.replace("clients = 12", ""))
    assert study.main([str(fewer), "--resume", str(done)]) == 2
    assert "--clients is not given, and 12 in the run in" in capsys.readouterr().err
    assert before == sorted((p, p.stat().st_mtime_ns) for p in done.rglob("*"))
    assert study.main([str(other), "--out", str(done)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_dry_run_tells_the_commands_and_runs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert study.main([str(written(tmp_path, STUDY)), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 methods with 4 settings, 2 cells: 48 runs\n")
    assert out.count("python -m fedjax_sim.bench --dataset=digits") == 2
    assert study.main([str(tmp_path / "ours.toml"), "--dry-run", "--shard", "2/2"]) == 0
    ran = out.rpartition("\n\n")[2]  # the second cell alone
    assert capsys.readouterr().out == out.partition("\n\n")[0] + "\n\n" + ran
    assert [p.name for p in tmp_path.iterdir()] == ["ours.toml"]


def test_too_few_seeds_for_a_test_are_told_before_anything_runs(tmp_path: Path) -> None:
    """Holm's correction multiplies the smallest p-value by the comparisons of a wide table."""

    def plan(seeds: int, more: str = "") -> str:
        text = f"""
        methods = ["fedavg", "fedprox", "scaffold", "moon"]
        [run]
        seeds = {seeds}
        {more}
        [grid]
        partition = ["ll(2)", "iid", "shards"]
        """
        return str(read_study(written(tmp_path, text)))

    assert plan(8).endswith("with 8 seeds: Wilcoxon's test needs 9 for 9 comparisons")
    for told in (plan(9), plan(2, 'split = "clients"')):
        assert "\n" not in told


def test_settings_that_go_together(tmp_path: Path) -> None:
    text = """
    methods = ["fedavg"]
    run = {rounds = 3}
    grid = {lr = [0.1, 1]}
    [[cells]]
    dataset = "digits"
    emd = 0.5
    [[cells]]
    dataset = "diabetes"
    partition = "iid"
    """
    plan = read_study(written(tmp_path, "\ufeff" + text))  # as Windows' editors begin a file
    assert [cell.settings for cell in plan.cells] == [
        {**one, "lr": lr}
        for one in (
            {"dataset": "digits", "emd": 0.5},
            {"dataset": "diabetes", "partition": "iid"},
        )
        for lr in (0.1, 1)
    ]
    assert plan.columns == ("dataset", "emd", "lr", "partition")
    assert plan.cells[2].config.experiment.partition == "iid"
    assert {cell.config.experiment.rounds for cell in plan.cells} == {3}


@pytest.mark.slow
def test_scores_of_several_kinds_are_named(tmp_path: Path) -> None:
    text = """
    run = {rounds = 1, seeds = 1, clients = 5}
    methods = ["fedavg(lr=0.01)", "fedavg(lr=0.001)"]
    [[cells]]
    dataset = "digits"
    model = "logistic"
    [[cells]]
    dataset = "diabetes"
    model = "linear"
    partition = "iid"
    """
    out = tmp_path / "out"
    argv = [str(written(tmp_path, text)), "--devices", "1", "--out", str(out)]
    assert study.main(argv) == 0
    table = (out / "table.md").read_text(encoding="utf-8").replace("\\", "")
    head, _, *rows = table.splitlines()[:4]
    assert head == "| method | digits (accuracy) | diabetes (mse) | average rank |"
    losses = [float(line["test"]) for line in lines_of(out) if line["dataset"] == "diabetes"]
    bold = [line.split("|")[3].strip().startswith("**") for line in rows]
    assert bold == [loss == min(losses) for loss in losses]


@pytest.mark.slow
def test_a_method_that_diverges_is_said_to(tmp_path: Path) -> None:
    text = (
        RUN.replace("seeds = 2", "seeds = 1")
        + '[methods]\nmethods = "fedavg(lr=1e38)"\nother = "fedavg(lr=1e38|0.1)"'
    )
    argv = [str(written(tmp_path, text)), "--devices", "1", "--out", str(tmp_path / "out")]
    assert study.main(argv) == 1
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "| methods | diverged |" in table
    results = (tmp_path / "out" / "results.csv").read_text(encoding="utf-8")
    assert "other,fedavg(lr=0.1)," in results
    assert "nan" not in table + results


def test_a_cell_in_which_all_methods_diverge_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise fs.DivergedError("the loss became nan in round 1 (seed 0)")

    monkeypatch.setattr(Experiment, "run", run)
    text = RUN + '[grid]\nrounds = [3, 4]\n[methods]\nA = "fedavg"\nB = "scaffold"'
    text = text.replace("rounds = 2\n", "")
    assert study.main([str(written(tmp_path, text)), "--out", str(tmp_path / "out")]) == 1
    rows = (tmp_path / "out" / "table.md").read_text(encoding="utf-8").splitlines()[2:4]
    assert rows == [f"| {method} | diverged | diverged | 1.50 |" for method in "AB"]


BAD = {
    "no TOML": ("a = = 1", "is not TOML"),
    "nothing": ("", "methods must have a row at least"),
    "unknown table": ('[method]\nA = "fedavg"', "method is not a setting; did you mean methods?"),
    "unknown key": ("[run]\nround = 3", "run.round is not a setting; did you mean rounds?"),
    "of the machine": ("[run]\ndevices = 3", "give --devices to the command"),
    "of methods": ('[run]\nalgo = "fedavg"', "run.algo: list the methods to run in methods"),
    "a list": ("[run]\nseeds = [1, 2]", "run.seeds must be a number or a text, got [1, 2]; sev"),
    "no list": ("[grid]\nrounds = 3", "grid.rounds must be a list of values, got 3"),
    "twice in a list": ("[grid]\nrounds = [3, 3]", "grid.rounds must have each value once"),
    "twice": (
        "[run]\nrounds = 2\n[grid]\nrounds = [3]",
        "rounds is in run and in grid: leave it",
    ),
    "in a cell and the grid": (
        "[grid]\nseeds = [2]\n[[cells]]\nseeds = 3",
        "seeds is in grid and",
    ),
    "unknown in a cell": (
        "[[cells]]\nseed = 3",
        "cells.seed is not a setting; did you mean seeds?",
    ),
    "no cells": ("cells = 3", "cells must be an array of tables, [[cells]], got 3"),
    "none of the cells": ("cells = []", "cells must have a table at least, or be left out"),
    "equal cells": ("[[cells]]\nseeds = 3\n[[cells]]\nseeds = 3", "cells must differ from each"),
    "out of range": ("[run]\nrounds = 0", "--rounds: must be a whole number at least 1, got '0'"),
    "out of range in the grid": ("[grid]\nrounds = [2, 0]", "at rounds = 0: --rounds: must be"),
    "a switch": ("[run]\nmirror = 3", "run.mirror must be true or false, got 3"),
    "no switch": ("[run]\nrounds = true", "run.rounds must be a number or a text, got True"),
    "unknown method": (
        '[methods]\nA = "fedavgg"',
        "methods.A: unknown algorithm 'fedavgg'; did you",
    ),
    "bad setting": ('[methods]\nA = "fedprox(mu=x)"', "methods.A: fedprox(mu=x): mu: must be"),
    "no text": (
        "[methods]\nA = 3",
        "methods.A must be a text as --algo takes it, such as 'fedprox(mu=0.01|0.1)', got 3",
    ),
    "no baseline": ('baseline = "B"\n[methods]\nA = "fedavg"', "baseline must be one of A, got"),
    "no table": ('table = "partition"', "table must be a table, [table], with columns = "),
    "no column": ("[table]\nrows = 3", "table.rows is not a setting; known are columns"),
    "a column of nothing": (
        '[table]\ncolumns = "lr"\n[grid]\nrounds = [2, 3]',
        "table.columns must be a setting of grid or cells (rounds), got 'lr'",
    ),
    "chosen by tests": (
        '[methods]\nA = "fedavg(lr=0.1|1)"',
        "methods.A has 2 settings to choose among, which needs validation scores: add",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_files(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = BAD[case]
    if "methods" not in text and case != "nothing":
        text = f'{text}\n[methods]\nA = "fedavg"'
    path, out = written(tmp_path, text), tmp_path / "out"
    assert study.main([str(path), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fedjax_sim.study: error: {path}: ")
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_files_that_we_show_are_studies(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "runs.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    plan = read_study(written(tmp_path, shown))
    assert str(plan) == "3 methods with 18 settings, 2 cells: 540 runs"
    for path in sorted((ROOT / "benchmarks").glob("**/*.toml")):
        assert read_study(path, ["benchmarks"]).cells


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "name a study file"),
        ("none.toml", "none.toml: No such file"),
        ("--resume none", "none has no study: it lacks study.toml"),
        ("a.toml --distributed auto", "unrecognized arguments: --distributed"),
        ("a.toml --no-checkpoints", "unrecognized arguments: --no-checkpoints"),
        ("a.toml --round 3", "unrecognized arguments: --round"),
        (
            "--rounds 3 a.toml",
            "--rounds is a setting of the study: write it into the file, run",
        ),
        ("a.toml --out b --resume c", "--out is for a new study"),
    ],
)
def test_bad_commands(
    argv: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert study.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["4_2", "6_1"])
def test_studies_of_the_thesis_give_the_numbers_of_its_scripts(
    figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On digits, with a logistic model and 2 seeds; not FedAug, for which white is 255 there.

    Of Figure 4.2 the last cell runs, and the others have the rounds of the script.
    """
    one = fs.make_execution(1)
    monkeypatch.setattr("fedjax_sim.round.algorithm.make_execution", lambda: one)
    digits = fs.load_dataset("digits")
    mean, std = (np.asarray(v) / 255 for v in (digits.mean, digits.std))
    monkeypatch.setitem(common.NETWORKS, "digits", (fs.models.logistic, mean, std))
    text = (ROOT / "benchmarks" / "reproduce" / f"thesis_{figure}.toml").read_text()
    if figure == "4_2":
        model = common.thesis_model("digits", digits)
        arms = phase_shift.doubled(common.thesis_update(model, 1, 0.01), phase_shift.SMALL)
        asked = [
            (cell.config.training.epochs, cell.config.experiment)
            for cell in read_study(written(tmp_path, text), ["benchmarks"]).cells
        ]
        assert [(f"E = {e:g}", its.rounds, its.eval_every) for e, its in asked] == [
            (name, arm.rounds, arm.eval_every) for name, arm in arms.items()
        ]
        problem = common.dealt(digits, "emd(1.0, in_turn, 1)", 20, 2)
        theirs = common.run({"E = 16": arms["E = 16"]}, model, problem, 10)
        text = text.replace("[[cells]]\nepochs = 1\nrounds = 64\neval_every = 4\n", "")
        text = text.replace("[[cells]]\nepochs = 4\nrounds = 16\n", "")
    else:
        names = ("FedAvg", "FedNova", "two phases")
        run = common.run
        some = lambda arms, *of: run({n: arms[n] for n in names if n in arms}, *of)  # noqa: E731
        monkeypatch.setattr(fedaug, "run", some)
        theirs = fedaug.combined(digits, "digits", argparse.Namespace(seeds=2, size=fedaug.SMALL))[
            1
        ]
        text = text.replace("[[cells]]\nfedaug = 0.8\n", "")
        text = text.replace('FedProx = "fedprox(adaptive=True)"\n', "")
    text = text.replace("benchmarks.reproduce.common:mnist_small", "digits")
    text = text.replace("mnist_cnn", "logistic").replace("[run]", "[run]\nseeds = 2")
    out = tmp_path / "out"
    argv = [str(written(tmp_path, text)), "--devices", "1", "--out", str(out)]
    assert study.main(argv) == 0
    ours = np.array([float(line["test"]) for line in lines_of(out)]).reshape(-1, 2)
    np.testing.assert_allclose(100 * ours, [c.accuracy[-1] for c in theirs.values()])
