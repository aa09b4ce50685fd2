"""While it runs: progress bars and lines, the time left, and trackers that get the scores."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optax
import pytest

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli import watching
from fedjax_sim.cli.sinks import Sending, Sink
from fedjax_sim.cli.watching import Forecast
from fedjax_sim.run.progress import is_watched


def test_a_file_gets_a_line_a_tenth_and_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [
        (70.0, 0, "5 MB a device"), (80.0, 60, "a"), (90.0, 100, "b"), (100.0, 199, "c"),
        (151.0, 199, "d"), (152.0, 210, "e"), (200.0, 1000, "f"),
    ]  # fmt: skip
    clock = iter([0.0, *(seconds for seconds, _, _ in told)])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with watching.bar(["fedavg"], 1000) as tell:
        for _, done, note in told:
            tell(done, note)
    assert capsys.readouterr().err.splitlines() == [
        "fedavg: compiling, then 1,000 rounds",
        "fedavg: round 0 of 1,000, 70 s, 5 MB a device",
        "fedavg: round 100 of 1,000, 90 s, about 3 min left, b",  # 20 s for a tenth
        "fedavg: round 199 of 1,000, 151 s, about 5 min left, d",
        "fedavg: round 210 of 1,000, 152 s, about 5 min left, e",
        "fedavg: round 1,000 of 1,000, 200 s, f",
    ]


def test_rounds_of_a_checkpoint_take_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [(70.0, 60), (71.0, 20), (72.0, 60), (92.0, 70)]  # the records so far are told again
    clock = iter([0.0, *(seconds for seconds, _ in told)])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with watching.bar(["fedavg"], 100, 60) as tell:
        for _, done in told:
            tell(done, "")
    assert capsys.readouterr().err.splitlines() == [
        "fedavg: round 60 of 100 is done, compiling, then 40 rounds",
        "fedavg: round 60 of 100, 70 s",
        "fedavg: round 70 of 100, 92 s, about 60 s left",
    ]


def test_a_bar_begins_at_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as (_, shown):
        with watching.bar(["fedavg"], 100, 60) as tell:
            tell(20, "")
            assert "60/100 [00:00<?" in shown()[0]
            tell(80, "")
        assert "80/100" in shown()[0]


def test_methods_are_weighed_by_the_seconds_that_they_took() -> None:
    clock, fast = [0.0], ["fast(mu=1)", "fast(mu=2)"]
    work = {**dict.fromkeys(fast, 5.0), "slow": 10.0, "other": 10.0}
    forecast = Forecast(work, lambda: clock[0])
    assert forecast.seconds is None
    with forecast.program(["slow"], rounds=100, done=0) as advance:
        clock[0] += 60
        advance(0)  # compiled
        clock[0] += 90
        advance(50)  # 18 s a unit
    assert forecast.seconds == pytest.approx((5 + 2 * 5 + 10) * 18 + 3 * 60)
    with forecast.program(fast, rounds=100, done=20) as advance:
        advance(10)  # a round of the checkpoint
        clock[0] += 10
        advance(60)  # 2.5 s a unit; of the third method the mean
    rounds = 4 * 2.5 + 5 * 18 + 10 * (90 + 10) / (5 + 4)
    assert forecast.seconds == pytest.approx(rounds + 60 / 3)
    forecast.ended([*fast, "other"])  # by a rule, or they failed
    assert str(forecast) == "about 2 min left"


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A terminal of 60 columns in place of stdout and stderr, and what shows it."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((60, 24)))
    said = bytearray()

    def shown() -> list[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                said.extend(os.read(master, 65536))
        return screen(said.decode())

    with open(slave, "w", encoding="utf-8", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield stream, shown
    os.close(master)


def screen(said: str) -> list[str]:
    """The lines that a terminal of so many lines as it needs shows in the end."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|\r\n|[^\x1b\r\n]+", said):
        if part == "\r\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[J":
            lines = [*lines[:row], ""]
        elif part.startswith("\x1b"):
            row -= int(part[2:-1])
            assert row >= 0
        else:
            lines[row] += part
    return lines


def test_a_simulation_shows_a_bar_in_a_terminal_or_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = fs.toy()
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=5).on(fs.make_execution(1))

    def train(**options: Any) -> float:
        where = problem.model, problem.data, problem.test
        result = fs.simulate(algorithm, *where, rounds=2, classes=10, **options)
        return float(result.accuracy[-1, 0])

    score, rounds = train(), list[int]()
    assert capsys.readouterr().err == ""
    with terminal(monkeypatch) as (_, shown):
        assert train(on_rounds=rounds.append) == score
        before = shown()
        last = before[0].rpartition("fedavg: ")[2]  # it is drawn again and again in its line
        assert last.startswith("100%")
        assert "2/2" in last
        assert "accuracy 0." in last
        assert rounds == [1, 2]
        train(progress=False)
        assert shown() == before
    for app, watched in (("IPKernelApp", True), ("TerminalIPythonApp", False)):
        shell = types.SimpleNamespace(config={app: {}})
        module: Any = types.ModuleType("IPython")
        module.get_ipython = lambda shell=shell: shell
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert is_watched() == watched


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_study_in_a_terminal_hears_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    text = """
    run = {model = "logistic", clients = 6, rounds = 10, seeds = 1}
    grid = {emd = [0.5, 1.4]}
    methods = ["fedavg(lr=0.1)", "fedavg(lr=0.01)"]
    """
    (tmp_path / "ours.toml").write_text(text)
    out, command = str(tmp_path / "out"), [sys.executable, "-m", "fedjax_sim.study"]
    statuses: list[int] = []
    said: list[str] = []
    for argv in (["ours.toml", "--out", out], ["--resume", out]):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*command, *argv, "--devices", "1"], cwd=tmp_path, stdin=slave, stdout=slave,
            stderr=slave, env=os.environ | {"TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        heard, sent = b"", False
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(master, 65536):
                heard += part
                if not statuses and not sent and b"[2/2]" in heard:
                    process.send_signal(signal.SIGINT)
                    sent = True
        statuses.append(process.wait())
        said.append(heard.decode())
        os.close(master)
    assert statuses == [130, 0]
    assert f"stopped; continue with: python -m fedjax_sim.study --resume {out}" in said[0]
    lines = screen(said[1])
    assert any("done before" in line for line in lines)
    assert not any("cells done" in line for line in lines)
    assert lines[-2].startswith("a page: ")


ROWS = [
    {"algorithm": a, "seed": s, "round": r, "accuracy": r / 4 + s / 8, "f1": None,
     "validation": {"client_f1": {"mean": 0.5}}}
    for a in ("fedavg", "fedprox(mu=1)") for r in (2, 4) for s in (0, 1)
]  # fmt: skip
NAMES = [f"{a}, seed {s}" for a in ("fedavg", "fedprox(mu=1)") for s in (0, 1)]
TOLD = {
    (f"{r['algorithm']}, seed {r['seed']}", key, r["round"]): value
    for r in ROWS
    for key, value in (("accuracy", r["accuracy"]), ("validation/client_f1/mean", 0.5))
}


class Fake(types.ModuleType):
    """What our sinks call of a tracker's package: the names and arguments are those of the real."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.told: dict[tuple[str, str, int], float] = {}
        self.begun: list[str] = []
        self.settings: list[Any] = []
        self.closed: list[str] = []

    def one(self, name: str) -> Any:
        self.begun.append(name)

        def log(values: dict[str, float], step: int) -> None:
            assert name not in self.closed
            self.told |= {(name, key, step): value for key, value in values.items()}

        return types.SimpleNamespace(
            log=log,
            finish=lambda: self.closed.append(name),
            close=lambda: self.closed.append(name),
            flush=lambda: None,
            add_text=lambda tag, text: self.settings.append(json.loads(text)),
            add_scalar=lambda tag, value, step: log({tag: value}, step),
        )

    # tensorboardX
    def SummaryWriter(self, logdir: str, *, purge_step: int) -> Any:  # noqa: N802
        assert purge_step == 0
        return self.one(Path(logdir).name)

    # wandb
    def init(self, *, project: str, name: str, group: str, config: Any, **_: Any) -> Any:
        assert (project, group) == ("fedjax_sim", "run")
        self.settings.append(config)
        return self.one(name)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_get_every_score(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "tensorboardX" if name == "tensorboard" else name
    fake = Fake(package)
    monkeypatch.setitem(sys.modules, package, fake)
    sending = Sending(name, {"rounds": 4}, tmp_path / "run")
    for i in range(0, len(ROWS), 2):
        sending.log(ROWS[i : i + 2])
    sending.close()
    assert fake.told == TOLD
    assert sorted(fake.closed) == sorted(fake.begun) == NAMES
    assert {str(settings["rounds"]) for settings in fake.settings} == {"4"}
    assert [settings["algorithm"] for settings in fake.settings] == ["fedavg"] * 2 + [
        "fedprox(mu=1)"
    ] * 2


def test_a_tracker_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find(n, *a)
    )
    assert bench.main(["--sink", "wandb"]) == 2
    told = capsys.readouterr().err
    assert "--sink: wandb needs the package wandb: pip install wandb\n" in told


HEARD: dict[str, list[Any]] = {}


def ours(name: str, settings: Any, folder: Path) -> Sink:
    """A sink that fails from the second evaluation of the second algorithm on."""
    HEARD[name] = [settings["rounds"], folder.name]

    def log(values: Any, round: int) -> None:
        if name == "fedavg, seed 1" and round == 2:
            raise ConnectionError("no network")
        HEARD[name].append((round, values["accuracy"]))

    return Sink(log, lambda: HEARD[name].append("closed"))


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_sink_of_ones_own_that_fails_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--clients 6 --seeds 2 --model logistic --rounds 2 --algo fedsgd --compare fedavg"
    flags = flags.replace("fedsgd", "fedprox") + " --devices 1 --sink test_watching:ours"
    assert bench.main([*flags.split(), "--out", str(tmp_path / "run")]) == 0
    records = fs.load_run(tmp_path / "run").records
    assert len(records) == 8
    wanted = {
        f"{algorithm}, seed {seed}": [2, "run"]
        + [
            (r["round"], r["accuracy"])
            for r in records
            if (r["algorithm"], r["seed"]) == (algorithm, seed)
        ]
        for algorithm in ("fedprox", "fedavg")
        for seed in (0, 1)
    }
    wanted["fedavg, seed 1"].pop()
    assert {name: [*heard, "closed"] for name, heard in wanted.items()} == HEARD
    err = capsys.readouterr().err
    assert err.count("no network") == 1
    assert "warning: --sink test_watching:ours: ConnectionError: no network" in err
    assert "the run continues without it\n" in err
