"""The clock of the command: flags, records, tables and pictures."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_sim import bench
from fedjax_sim.cli import timing
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.reporting.command import main as report

BASE = ["--compare", "none", "--clients", "8", "--model", "logistic", "--seeds", "2"]
BASE += ["--devices", "1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--deadline 3", "--deadline is for --clock"),
        ("--bandwidth own(1,2)", "--bandwidth is for --clock"),
        ("--clock tiers(1) --late drop", "--late is for --deadline"),
        ("--clock tiers()", "--clock: must be written tiers(seconds, ...), got 'tiers()'"),
        ("--clock tiers(1,-2)", "--clock: tiers(seconds, ...): values must be positive and finite"),
        (
            "--clock tiers(1,nan)",
            "--clock: tiers(seconds, ...): must be a number that is finite, got",
        ),
        ("--clock uniform(1)", "--clock: must be one of constant(seconds), lognormal(median, sig"),
        ("--clock tiers(1) --bandwidth own(1)", "--bandwidth: must be written own(up, down), got"),
        ("--clock tiers(1) --bandwidth own(0,1)", "--bandwidth: own(up, down): up must be positiv"),
        ("--clock tiers(1) --availability bernoulli(2)", "--availability: bernoulli(p): p must be"),
        ("--clock tiers(1) --deadline 0", "--deadline: must be a number above 0"),
        ("--first 3", "--first is for --clock"),
        ("--clock tiers(1) --first 0", "--first: must be a whole number at least 1"),
        (
            "--clock tiers(1) --first 9",
            "fedavg: --clock tiers(1): clock simulated(tiers(1.0), first=9) needs at least 9",
        ),
        ("--clock tiers(1) --failures 1", "--failures: must be a number at least 0 and below 1"),
        (
            "--algo gossip --clock tiers(1)",
            "gossip: --clock tiers(1): clock simulated(tiers(1.0)) needs models that clients",
        ),
        (
            "--algo fedasync --max-staleness 4 --clock tiers(1)",
            "fedasync: --max-staleness must be None with a clock, which determines the staleness",
        ),
    ],
)
def test_the_command_refuses(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        build(parse([*BASE, "--algo", "fedavg", *given.split()]))
    assert len(str(caught.value).splitlines()) == 1


def test_the_rules_of_a_round_are_those_of_the_flags() -> None:
    given = ["--clock", "tiers(1, 2)", "--first", "3", "--deadline", "9", "--late", "partial"]
    made = timing.made(parse([*BASE, *given]).timing)
    assert made is not None
    assert (made.first, made.deadline, made.late) == (3, 9, "partial")


@pytest.mark.slow
def test_the_command_tells_the_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of devices that are all alike, and of a deadline that comes before any of them is done."""
    from matplotlib.figure import Figure

    drawn, saved = [], Figure.savefig

    def save(figure: Figure, *args: Any, **settings: Any) -> None:
        drawn.append(figure)
        saved(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr("fedjax_sim.cli.running.draw_clients", lambda *args: None)
    monkeypatch.setattr("fedjax_sim.run.programs.Programs.check", lambda self: None)
    out = tmp_path / "run"
    argv = [*BASE, "--algo", "fedavg", "--rounds", "3", "--partition", "iid", "--out", str(out)]
    argv += ["--clock", "Constant( 0.5 )", "--watts", "2", "--target", "0.3"]
    assert bench.main(argv) == 0
    told = json.loads((out / "summary.json").read_text())["fedavg"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["round"]: row["seconds"] for row in rows}
    step = seconds[1] / 0.5
    assert step == int(step) > 0
    assert seconds == {t: 0.5 * step * t for t in (1, 2, 3)}
    assert told["seconds"] == seconds[3]
    assert told["target_seconds_per_run"] == [seconds[r] for r in told["target_rounds_per_run"]]
    # Eight clients with a sample more or less compute nearly all the time.
    assert 0 <= told["idle_share"] < 0.1
    full = 8 * told["seconds"] * 2 / 3600
    assert told["watt_hours"] == pytest.approx((1 - told["idle_share"]) * full)
    assert json.loads((out / "config.json").read_text())["clock"] == "constant(0.5)"
    shown = capsys.readouterr().out
    assert "seconds to 30 %" in shown
    assert "fedavg: clients waited" in shown
    curves = [figure for figure in drawn if len(figure.axes) == 3]
    assert [axis.get_xlabel() for axis in curves[0].axes][2] == "simulated seconds"
    lines = curves[0].axes[2].get_lines()
    assert np.asarray(lines[0].get_xdata()).tolist() == [seconds[t] for t in (1, 2, 3)]
    assert report([str(out)]) == 0
    page = (out / "report" / "report.md").read_text(encoding="utf-8")
    assert "| method | target | rounds | kB | seconds |" in page
    (table,) = csv.DictReader((out / "report" / "table.csv").read_text().splitlines())
    assert float(table["seconds"]) == seconds[3]
    assert bench.main(["--resume", str(out), "--deadline", "1"]) == 2
    assert "--deadline is 1.0, and None in the run in" in capsys.readouterr().err
    monkeypatch.setattr("fedjax_sim.cli.folder.draw_curves", lambda *args: None)
    argv[argv.index(str(out))] = str(tmp_path / "late")
    assert bench.main([*argv, "--deadline", "0.25"]) == 0
    told = json.loads((tmp_path / "late" / "summary.json").read_text())["fedavg"]
    assert (told["seconds"], told["late"]) == (0.75, 24)
    assert told["target_seconds_per_run"] == [None, None]
