"""`python -m fedjax_sim.partition`: what it prints and writes, and what it says to bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli import partitioning
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import load_dataset, pooled
from fedjax_sim.partition import (
    SAMPLERS,
    emd,
    label_table,
    limit_label_emd,
    load_partition,
    matched,
    natural,
    parse_sampler,
    partition_hash,
)

BASE = ["--clients", "20"]
TEXTS = {
    "iid": "iid",
    "ll": "ll(2, 7/8)",
    "ll_q": "ll_q(2, 0.9)",
    "q": "q(0.8)",
    "emd": "emd(1.2, in_turn)",
    "robin_hood": "robin_hood(1.2, 0.1)",
    "dirichlet": "dirichlet(0.3, 2)",
    "dirichlet_classes": "dirichlet_classes(0.3)",
    "quantity": "quantity(0.3)",
    "matched": "matched(1, 0.1)",
    "natural": "natural(60)",
    "shards": "shards(3)",
    "label_sets": "label_sets(2)",
    "power_law": "power_law(3/2)",
}


def run(folder: Path, *argv: str) -> None:
    assert partitioning.command([*argv, "--out", str(folder)]) == 0


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_every_sampler_has_a_request_here() -> None:
    assert TEXTS.keys() == SAMPLERS.keys()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take their time."""
    for name in ("draw_partition", "draw_skew"):
        monkeypatch.setattr(partitioning, name, lambda *args, **settings: None)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", TEXTS)
def test_the_command_and_the_library_give_the_same_partition(name: str, tmp_path: Path) -> None:
    grouped = name == "natural"
    data = ["--dataset", "synthetic(0, 0)"] if grouped else BASE
    run(tmp_path / "run", *data, "--sampler", TEXTS[name])
    made = load_partition(tmp_path / "run" / "seed0.npz")
    dataset = load_dataset("synthetic(0, 0)" if grouped else "digits")
    clients = None if grouped else 20
    sample = parse_sampler(TEXTS[name])[1]
    library = sample(dataset.train_y, clients, 0, groups=dataset.train_client)
    assert partition_hash(made) == partition_hash(library)


def test_the_help_has_every_parameter_of_every_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        partitioning.command(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    functions: list[Any] = [*SAMPLERS.values(), matched, natural]
    for function in functions:
        for key in keywords(function, ("seed", "groups", "features", "ids")):
            assert key in text
    for word in ("--pool", "--seeds", "robin_hood(emd, tolerance=0.01)", "1.4, or 7/9"):
        assert word in text


def test_folder_holds_partitions_report_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread

    argv = ["--sampler", "dirichlet(0.5)", *BASE, "--seeds", "3"]
    run(tmp_path / "run", *argv)
    out = capsys.readouterr().out
    found = record(tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "seed0.npz", "seed1.npz", "seed2.npz", "report.json", "clients.png", "skew.png"
    }  # fmt: skip
    assert (found["sampler"], found["clients"], found["seeds"]) == ("dirichlet(0.5)", 20, 3)
    assert "--sampler 'dirichlet(0.5)'" in found["command"]
    assert found.keys().isdisjoint({"data_dir", "out"})  # the command tells where
    y = load_dataset("digits").train_y
    for seed, report in enumerate(found["reports"]):
        partition = load_partition(tmp_path / "run" / f"seed{seed}.npz")
        assert report["hash"] == partition_hash(partition)
        assert report["hash"][:12] in out
        table = label_table(y, partition, 10)
        assert report["emd"] == emd(table)
        assert report["per_client"]["table"] == table.tolist()
        np.testing.assert_array_equal(np.sort(partition.index), np.arange(y.size))
    assert len({report["hash"] for report in found["reports"]}) == 3
    assert f"{np.mean([r['emd'] for r in found['reports']]):.3f}" in out
    for name in ("clients.png", "skew.png"):
        assert min(imread(tmp_path / "run" / name).shape[:2]) > 300


@pytest.mark.usefixtures("undrawn")
def test_one_seed_prints_the_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", "--sampler", "ll(1, 0.6)", *BASE)
    out = capsys.readouterr().out
    for words in ("ll(1, 0.6): 1,438 samples of 10 classes at 20 clients", "KL [nats]",
                  "expected EMD 1.080", "digits, training samples"):  # fmt: skip
        assert words in out
    assert str(tmp_path / "run" / "seed0.npz") in out


def test_without_classes_it_speaks_of_sizes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dataset", "diabetes", "--sampler", "quantity(0.5)", "--clients", "8"]
    for seeds in ("1", "2"):
        run(tmp_path / seeds, *argv, "--seeds", seeds)
        out = capsys.readouterr().out
        assert "354 samples at 8 clients" in out
        for word in ("EMD", "C-score", "KL", "JSD", " class"):
            assert word not in out
    assert out.partition("\n\n")[2].splitlines()[1].split()[:2] == ["n_k", "min"]
    assert "emd" not in record(tmp_path / "2")["reports"][0]


@pytest.mark.usefixtures("undrawn")
def test_without_a_sampler_it_makes_what_the_bench_makes(tmp_path: Path) -> None:
    run(tmp_path / "plain")
    run(tmp_path / "target", "--emd", "1.0", *BASE)
    y = load_dataset("digits").train_y
    for name, clients, target in (("plain", 40, 1.4), ("target", 20, 1.0)):
        made = load_partition(tmp_path / name / "seed0.npz")
        assert partition_hash(made) == partition_hash(
            limit_label_emd(y, clients, emd=target, seed=0)
        )


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("pool", [False, True])
def test_the_bench_takes_the_file(
    pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--sampler", "quantity(1)", "--clients", "6"]
    run(tmp_path / "run", *argv, *(["--pool"] if pool else []))
    dataset = load_dataset("digits")
    samples = (pooled(dataset) if pool else dataset).train_y.size
    assert record(tmp_path / "run")["reports"][0]["samples"] == samples
    (line,) = (s for s in capsys.readouterr().out.splitlines() if s.startswith("train on it: "))
    words = line.removeprefix("train on it: python -m fedjax_sim.bench ").split()
    assert ("--split" in words) == pool
    setup = build(parse([*words, "--model", "logistic", "--no-cache"]))
    assert setup.clients == 6
    assert sum(table.sum() for table in setup.tables[:1]) == samples
    name = "digits (training and test)" if pool else "digits"
    with pytest.raises(
        ValueError, match=re.escape(f"deals the {samples:,} samples of {name}, not")
    ):
        build(parse([*words, "--dataset", "synthetic(0, 0)"]))


@pytest.mark.usefixtures("undrawn")
def test_features_reach_the_sampler_if_theta_is_given(tmp_path: Path, data_dir: str) -> None:
    argv = ["--dataset", "covertype", "--data-dir", data_dir, "--clients", "5"]
    dataset = load_dataset("covertype", data_dir)
    for name, theta, features in (("without", None, None), ("with", 0.1, dataset.features)):
        more = "" if theta is None else f", theta={theta}"
        run(tmp_path / name, *argv, "--sampler", f"matched(1, 1, burn_in=0, moves=0{more})")
        wanted = matched(
            dataset.train_y, 5, mu=1, lam=1, theta=theta, features=features, burn_in=0, moves=0,
            seed=0,
        )  # fmt: skip
        made = load_partition(tmp_path / name / "seed0.npz")
        assert partition_hash(made) == partition_hash(wanted)


BAD = {
    "unknown sampler": (
        ["--sampler", "nope"],
        "--sampler: sampler 'nope' must be written iid or ll(",
    ),
    "no values": (["--sampler", "iid(1)"], "--sampler: sampler 'iid(1)' must be written iid"),
    "twice": (["--sampler", "q(0.5)", "--emd", "1"], "--emd: not allowed with argument --sampler"),
    "range": (
        ["--sampler", "dirichlet(-1)"],
        "--sampler dirichlet(-1): alpha must be positive and finite, got -1.0",
    ),
    "out of reach": (
        ["--emd", "1.95"],
        "--emd must be at most 1.7999 for these labels and 40 clients",
    ),
    "not divisible": (
        ["--sampler", "q(0.5)", "--clients", "15"],
        "--clients must be a multiple of 10",
    ),
    "fewer samples": (["--clients", "5000"], "--clients must be in 1 to 1438"),
    "no groups": (["--sampler", "natural"], "--sampler natural: the data name no clients: use"),
    "no features": (["--sampler", "matched(1, 1, 0.1)"], "theta=0.1"),
    "data_dir": (["--dataset", "mnist", "--data-dir", "nowhere"], "mnist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, wanted = BAD[case]
    monkeypatch.chdir(tmp_path)
    assert partitioning.command([*extra, "--out", str(tmp_path / "deep" / "run")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedjax_sim.partition: error: ")
    assert captured.err.count("\n") == 1
    assert wanted in captured.err
    assert list(tmp_path.iterdir()) == []


def test_solver_that_gives_up_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*args: Any) -> None:
        raise RuntimeError("the solver stopped: MaxIterations")

    monkeypatch.setattr("fedjax_sim.partition._matched.closest_table", give_up)
    out = ["--out", str(tmp_path / "run")]
    assert partitioning.command(["--sampler", "matched(1, 0.1)", *BASE, *out]) == 2
    wanted = "--sampler matched(1, 0.1): RuntimeError: the solver stopped: MaxIterations"
    assert wanted in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    assert partitioning.command([*BASE, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"fedjax_sim.partition: error: {out}: ")


def test_used_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.txt").write_text("mine")
    assert partitioning.command([*BASE, "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["old.txt"]


def test_default_folder_is_new_and_named_after_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert partitioning.command(["--sampler", "iid", "--dataset", "synthetic(1, 1)"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("synthetic_1_1-iid-")


@pytest.mark.slow
def test_module_runs_by_name(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "fedjax_sim.partition", "--sampler", "iid"]
    argv += ["--out", str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n\niid: 1,438 samples of 10 classes at 40 clients" in done.stdout
