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
        (
            "--deadline 3",
            "unrecognized arguments: --deadline 3",
        ),
        ("--clock tiers()", "--clock: tiers(): tiers needs at least one value"),
        ("--clock tiers(1,-2)", "--clock: tiers(1,-2): values must be positive and finite, got -2"),
        ("--clock tiers(1,nan)", "--clock: tiers(1,nan): unknown clock 'nan'"),
        ("--clock tier(1)", "--clock: tier(1): unknown clock 'tier'; did you mean tiers?"),
        ("--clock constant", "--clock: constant: compute must be positive and finite, got the cl"),
        ("--clock krum(0.1)", "--clock: krum(0.1): unknown clock 'krum'"),
        (
            "--clock simulated(1,bandwidth(1))",
            "--clock: simulated(1,bandwidth(1)): bandwidth(1) mu",
        ),
        (
            "--clock simulated(1,deadlin=3)",
            "--clock: simulated(1,deadlin=3): deadlin is not an arg",
        ),
        (
            "--clock simulated(1,failures=1)",
            "--clock: simulated(1,failures=1): failures must be in",
        ),
        (
            "--clock simulated(tiers(1),first=9)",
            "fedavg: --clock simulated(tiers(1), first=9): clock simulated(tiers(1), first=9) need",
        ),
        (
            "--algo gossip --clock tiers(1)",
            "gossip: --clock simulated(tiers(1)): clock simulated(tiers(1)) needs models that",
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


@pytest.mark.parametrize("given", ["--flight buffered(2)", "--selection awake"])
def test_a_part_that_needs_a_clock_gets_that_of_the_command(given: str) -> None:
    clock = ["--clock", "simulated(1, None, bernoulli(1))"]
    made = build(parse([*BASE, "--algo", "fedavg", *given.split(), *clock])).algorithms["fedavg"]
    assert made.parts.clock is not None
    assert made.replaced == (given.split()[0].removeprefix("--"), "clock")


def test_a_clock_has_the_rules_of_its_text() -> None:
    text = "simulated(tiers(1, 2), first=3, deadline=9, late=partial)"
    made = timing.make_clock(parse([*BASE, "--clock", text]).timing)
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
    argv += ["--clock", "Simulated(Constant( 1/2 ), watts=2)", "--target", "0.3"]
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
    assert (
        json.loads((out / "config.json").read_text())["clock"]
        == "simulated(constant(0.5), watts=2)"
    )
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
    late = "simulated(constant(0.5), watts=2, deadline=0.25)"
    assert bench.main(["--resume", str(out), "--clock", late]) == 2
    told = f"--clock is {late.replace(', watts=2, deadline=0.25', ', deadline=0.25, watts=2')}, and"
    assert told in capsys.readouterr().err
    monkeypatch.setattr("fedjax_sim.cli.folder.draw_curves", lambda *args: None)
    argv[argv.index(str(out))] = str(tmp_path / "late")
    assert bench.main([*argv, "--clock", late]) == 0
    told = json.loads((tmp_path / "late" / "summary.json").read_text())["fedavg"]
    assert (told["seconds"], told["late"]) == (0.75, 24)
    assert told["target_seconds_per_run"] == [None, None]
