"""A run that is killed goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import BARE, assert_trees, known, some_slow

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.base.files import DamagedError
from fedjax_sim.cli.folder import RunFolder
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.resuming import check_settings
from fedjax_sim.cli.stopping import STOPPING
from fedjax_sim.data import eval_set
from fedjax_sim.partition import Partition
from fedjax_sim.run import checkpoint_files, checkpoints, runner, simulate
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.identity import digest
from fedjax_sim.run.records import Evaluations

RUN = Experiment.run

TOY = fs.toy(7, 0.9)
STORED = (Path(__file__).parent / "folders" / "run" / "config.json").read_text(encoding="utf-8")
OPTIONS: dict[str, dict[str, Any]] = {
    "phase_shift": {"phases": 3},
    "radfedi": {"redistribution_rounds": 2, "objective": TOY.objective},
    "ccvr": {"model": TOY.model, "classes": 10},
    "dada": {"objective": TOY.objective},
    "fedproto": {"model": TOY.model, "objective": TOY.objective, "classes": 10},
}
SOME = (
    "stc",
    "fedasync",
    "radfedi",
    "phase_shift",
    "ditto",
    "diloco",
    "dp_ftrl",
    "ccvr",
    "fedproto",
    "dada",
)
FLAGS = ["--model", "logistic", "--clients", "8", "--clients-per-round", "4", "--seeds", "2"]
FLAGS += ["--algo", "fedprox", "--rounds", "6", "--eval-every", "2", "--devices", "1"]


def composed(name: str, devices: int = 1, rate: float = 0.05) -> fs.Algorithm:
    local = fs.local_sgd(TOY.objective, optax.sgd(rate, momentum=0.9))
    made = fs.ALGORITHMS[name](local, clients_per_round=6, **OPTIONS.get(name, {}))
    return made.on(fs.make_execution(devices))


algorithm = functools.cache(composed)  # one is compiled once, however often it runs


def run(method: fs.Algorithm, folder: Any = None, **changed: Any) -> fs.Result:
    settings: dict[str, Any] = {
        "rounds": 6,
        "classes": 10,
        "seeds": (0, 1),
        "eval_every": 2,
        "record": lambda state: (state.round, jax.tree.leaves(state.server)[0]),
    }
    settings |= {"test": TOY.test, **changed}
    return simulate(method, TOY.model, TOY.data, checkpoints=folder, **settings)


def bits(result: fs.Result) -> list[bytes]:
    """All that a run gives."""
    scores = [(e.test, e.personal, e.bytes_up, e.recorded) for e in result.evaluations]
    leaves = jax.tree.leaves((result.variables, result.state, result.metrics, scores))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def stopped_after(folder: Path, rounds: int) -> None:
    """Leaves what a run that was killed then would have left."""
    for path in checkpoint_files.checkpoint_paths(folder):
        if int(path.stem) > rounds:
            path.unlink()


def wait_for(folder: Path) -> Callable[[int], None]:
    """Waits after each call for its checkpoint: while one is written, no other is."""

    def wait(done: int) -> None:
        for _ in range(6000):
            if (folder / f"{done:08d}.npz").exists():
                return
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fs.Result]:
    """A folder with every checkpoint of a run, and its result."""
    folder = tmp_path_factory.mktemp("scaffold")
    saved = fs.Checkpoints(folder, seconds=0, keep=9)
    return folder, run(algorithm("scaffold"), saved, on_rounds=wait_for(folder))


CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "all on the device": ("scaffold", {}),
    "own models": ("ditto", {}),
    "models in flight": ("phase_shift", {}),
    "samples on the host": ("fedprox", {"samples_mb": 0.25}),
    "states on the host": ("scaffold", {"client_state_mb": 0.1}),
}


@pytest.mark.parametrize("shape", some_slow([*CUT]))
def test_it_does_not_matter_where_programs_are_cut(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where between two evaluations a run is killed."""
    name, places = CUT[shape]
    method = algorithm(name).on(fs.make_execution(1, **places))
    told: list[int] = []
    how: dict[str, Any] = {"eval_every": 4, "rounds": 7}
    if shape == "own models":
        x, y = TOY.test
        start = np.linspace(0, len(x), TOY.data.clients + 1, dtype=np.int32)
        dealt = Partition(np.arange(len(x), dtype=np.int32), start)
        how |= {"personal": True, "test": eval_set(x, y, dealt)}
    whole = run(method, **how, on_rounds=told.append)
    assert told == [1, 4, 7]  # the first round by itself: so long does one take
    monkeypatch.setattr(runner, "CALL_SECONDS", 0.0)
    told.clear()
    cut = run(method, fs.Checkpoints(tmp_path, seconds=0, keep=9), **how, on_rounds=told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7]
    assert bits(cut) == bits(whole)
    for done in (6, 4, 3, 1):
        stopped_after(tmp_path, done)
        told.clear()
        again = run(method, fs.Checkpoints(tmp_path, keep=9), **how, on_rounds=told.append)
        assert bits(again) == bits(whole)
        assert [evaluation.round for evaluation in again.evaluations] == [4, 7]
        assert told[-1] == 7


@pytest.mark.parametrize("rounds", [2, 6])
def test_goes_on_to_the_bit(scaffold: Any, tmp_path: Path, rounds: int) -> None:
    folder = shutil.copytree(scaffold[0], tmp_path / "run")
    stopped_after(folder, rounds)
    told: list[int] = []
    resumed = run(composed("scaffold"), folder, on_evaluation=lambda e: told.append(e.round))
    assert bits(resumed) == bits(scaffold[1])
    assert told == [2, 4, 6]
    wall = [[e.wall_seconds for e in result.evaluations] for result in (resumed, scaffold[1])]
    assert wall[0][: rounds // 2] == wall[1][: rounds // 2]
    assert wall[0] == sorted(wall[0])
    totals = resumed.samples, resumed.steps, resumed.executed
    assert totals == (scaffold[1].samples, scaffold[1].steps, scaffold[1].executed)


def test_a_longer_history_has_no_more_arrays(scaffold: Any) -> None:
    """In a checkpoint, but for what ``record`` gives, and in a result."""
    short, *_, long = (
        {name for name in checkpoint_files.read_arrays(path)[1] if ".recorded" not in name}
        for path in checkpoint_files.checkpoint_paths(scaffold[0])
        if int(path.stem) % 2 == 0  # after an evaluation
    )
    assert short == long
    evaluations = scaffold[1].evaluations
    assert isinstance(evaluations, Evaluations)
    assert np.shares_memory(evaluations[1].train_loss, evaluations.stacked().train_loss)


def test_evaluations_are_read_as_they_were_told() -> None:
    """Also the last, which has what was before its models in flight were collected."""
    told: list[fs.Evaluation] = []
    result = run(algorithm("phase_shift"), on_evaluation=told.append)
    assert [result.evaluations[i].round for i in (0, -2, -1)] == [2, 4, 6]
    assert result.evaluations[1:][0].round == told[1].round == 4
    assert told[-1].before is not None
    for found, before in zip(result.evaluations, told, strict=True):
        assert type(found.round) is int
        assert_trees(found, before)


KEPT = ["server-00000002.npz", "server-00000004.npz", "server-00000006.npz"]


def test_each_kept_model_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    where = fs.Checkpoints(tmp_path, seconds=10**9, weights=True)
    whole = run(algorithm("scaffold"), where, record=lambda state: state.server)
    assert sorted(path.name for path in tmp_path.glob("server*")) == KEPT
    shapes = jax.eval_shape(TOY.model.init, jax.random.key(0))
    newest = known(checkpoint_files.newest_checkpoint(tmp_path))
    for evaluation in whole.evaluations:
        assert_trees(
            checkpoint_files.server_model_at(newest, shapes, evaluation.round), evaluation.recorded
        )


def test_saving_changes_nothing(scaffold: Any) -> None:
    assert bits(run(algorithm("scaffold"))) == bits(scaffold[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_every_kind_of_state_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    """A method that is composed again is the same to the checkpoint."""
    whole = run(algorithm(name), fs.Checkpoints(tmp_path, seconds=0, keep=9), personal=False)
    stopped_after(tmp_path, 2)
    assert bits(run(algorithm(name), tmp_path)) == bits(whole)
    ours, again = (make(name).parts.by_role() for make in (algorithm, composed))
    assert digest(ours) == digest(again)
    if name in ("phase_shift", "stc"):  # models in flight, what their code left out
        stopped_after(tmp_path, 2)
        resumed = run(algorithm(name, devices=2), tmp_path)
        assert_trees(resumed.variables, whole.variables, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_goes_on_with_other_devices(scaffold: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(scaffold[0], tmp_path / "run")
    stopped_after(folder, 2)
    resumed = run(algorithm("scaffold", devices=4), folder)
    assert_trees(resumed.variables, scaffold[1].variables, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", some_slow(["scaffold", "phase_shift", "ccvr"]))
def test_more_rounds_are_run_on_top(name: str, tmp_path: Path) -> None:
    run(algorithm(name), tmp_path, rounds=2)
    assert bits(run(algorithm(name), tmp_path, rounds=4)) == bits(run(algorithm(name), rounds=4))


def test_a_run_may_end_at_a_checkpoint_of_a_longer_one(tmp_path: Path) -> None:
    """Models in flight, which the longer run had not collected yet, are collected then."""
    saved = fs.Checkpoints(tmp_path, seconds=0, keep=9)
    run(algorithm("phase_shift"), saved, rounds=4, on_rounds=wait_for(tmp_path))
    stopped_after(tmp_path, 2)
    again = [run(algorithm("phase_shift"), tmp_path, rounds=2) for _ in range(2)]
    assert bits(again[0]) == bits(again[1]) == bits(run(algorithm("phase_shift"), rounds=2))


def test_the_newest_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "every").mkdir()
    others = ["0_mine.npz", "2024.npz"]  # a user's, which look like the oldest and the newest
    for name in others:
        (tmp_path / "every" / name).write_text("")
    run(algorithm("scaffold"), fs.Checkpoints(tmp_path / "every", seconds=0))
    names = {path.name for path in (tmp_path / "every").iterdir()}
    # One of the first two: what comes while a file is written is left out.
    assert sorted(names - {*others})[1:] == ["00000006.npz"]
    assert len(names) == 4
    written: list[str] = []

    def note(path: Path, about: Any, arrays: Any) -> None:
        written.append(path.name)
        checkpoint_files.write_arrays(path, about, arrays)

    monkeypatch.setattr(checkpoints, "write_arrays", note)
    run(algorithm("scaffold"), tmp_path / "seldom")  # in no minute
    assert [path.name for path in (tmp_path / "seldom").iterdir()] == ["00000006.npz"] == written


def test_what_cannot_be_written_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "1.npz"
    checkpoint_files.write_arrays(path, {"done": 1}, {"a": np.arange(3)})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_files.write_arrays(path, {"done": 2}, {"a": np.zeros(3)})
    told, arrays = checkpoint_files.read_arrays(path)
    assert (told, arrays["a"].tolist()) == ({"done": 1}, [0, 1, 2])
    assert [*tmp_path.iterdir()] == [path]


def test_a_run_that_goes_on_keeps_its_folder(tmp_path: Path) -> None:
    """Stopped before its first record too; a new one leaves nothing then."""
    RunFolder(tmp_path / "run", {}).close()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    RunFolder(tmp_path / "run", {}, resumed=True).close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_what_is_written_late_is_what_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on while a slow disk takes its time."""
    later = threading.Event()

    def slowly(path: Path, about: Any, arrays: Any) -> None:
        later.wait(60)
        checkpoint_files.write_arrays(path, about, arrays)

    monkeypatch.setattr(checkpoints, "write_arrays", slowly)

    def tell(evaluation: fs.Evaluation) -> None:
        if evaluation.round == 6:
            later.set()

    whole = run(
        algorithm("scaffold"), fs.Checkpoints(tmp_path, seconds=0, keep=9), on_evaluation=tell
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001.npz", "00000006.npz"]
    stopped_after(tmp_path, 2)
    assert bits(run(algorithm("scaffold"), tmp_path)) == bits(whole)


def test_an_exception_is_saved_before(tmp_path: Path) -> None:
    def stop(evaluation: fs.Evaluation) -> None:
        if evaluation.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(algorithm("scaffold"), tmp_path, on_evaluation=stop)
    assert [path.name for path in checkpoint_files.checkpoint_paths(tmp_path)] == ["00000004.npz"]
    assert bits(run(algorithm("scaffold"), tmp_path)) == bits(run(algorithm("scaffold")))


def test_a_damaged_checkpoint_is_left_out(scaffold: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(scaffold[0], tmp_path / "run")
    last = checkpoint_files.checkpoint_paths(folder)[-1]
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    with pytest.warns(fs.run.CheckpointWarning, match=r"6.npz: .* before it"):
        assert bits(run(algorithm("scaffold"), folder)) == bits(scaffold[1])


def test_no_bit_of_a_file_can_change_unnoticed(tmp_path: Path) -> None:
    arrays = {"run.w": np.arange(2.0), "b": np.zeros((2, 1), np.int32)}
    path, about = tmp_path / "1.npz", {"done": 3}
    checkpoint_files.write_arrays(path, about, arrays)
    content, kept = path.read_bytes(), 0
    for i in range(0, 8 * len(content), 7):  # at least one of each byte
        changed = bytearray(content)
        changed[i // 8] ^= 1 << i % 8
        path.write_bytes(changed)
        try:
            told, found = checkpoint_files.read_arrays(path)
        except DamagedError:
            continue
        kept += 1  # a date, say
        assert told == about
        assert {name: a.tolist() for name, a in found.items()} == {
            name: a.tolist() for name, a in arrays.items()
        }
    assert 0 < kept < len(content)


def test_a_run_without_a_whole_checkpoint_begins_again(scaffold: Any, tmp_path: Path) -> None:
    (tmp_path / "00000004.npz").write_bytes(b"nothing")
    (tmp_path / ".00000006.npz.123.aside").write_bytes(b"half")
    with pytest.warns(fs.run.CheckpointWarning, match="or from the beginning"):
        assert bits(run(algorithm("scaffold"), tmp_path)) == bits(scaffold[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000004.npz", "00000006.npz"]


def test_a_full_disk_does_not_end_the_run(
    scaffold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    kept: list[list[str]] = []

    def note(_: Any) -> None:
        limit = time.monotonic() + 20
        while len(calls) <= len(kept) or any(path.name[0] == "." for path in tmp_path.iterdir()):
            assert time.monotonic() < limit  # the writer is still at work
            time.sleep(0.01)
        kept.append(sorted(path.name for path in tmp_path.iterdir()))

    with pytest.warns(fs.run.CheckpointWarning, match="No space left on device; the run continues"):
        result = run(
            algorithm("scaffold"), fs.Checkpoints(tmp_path, seconds=0, keep=1), on_rounds=note
        )
    assert bits(result) == bits(scaffold[1])
    assert kept[1] == ["00000001.npz"]
    assert [path.name for path in tmp_path.iterdir()] == ["00000006.npz"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seeds": (0, 2)}, r"a run with another seeds: \[0, 1\], not \[0, 2\]"),
        ({"eval_every": 3}, "a run with another eval_every: 2, not 3"),
        ({"rounds": 4}, "rounds must be at least 6, which .*06.npz has, got 4"),
        ({"initial": 0}, "a run with another initial$"),
        (
            {"loss": optax.softmax_cross_entropy_with_integer_labels},
            "a run with another loss$",
        ),
        ({"record": lambda state: state}, r"the checkpoint lacks 0.recorded"),
    ],
)
def test_refuses_another_run(scaffold: Any, changed: dict[str, Any], message: str) -> None:
    if "initial" in changed:
        changed = {"initial": jax.tree.map(lambda a: a[0], scaffold[1].variables)}
    with pytest.raises(fs.CheckpointError, match=message):
        run(algorithm("scaffold"), scaffold[0], **changed)


def test_refuses_another_method_or_rate(scaffold: Any) -> None:
    with pytest.raises(fs.CheckpointError, match="a run with another algorithm"):
        run(algorithm("fedavg"), scaffold[0])
    with pytest.raises(fs.CheckpointError, match=r"a run with another setting of the algorithm$"):
        run(algorithm("scaffold", rate=0.06), scaffold[0])


def test_refuses_more_rounds_after_a_short_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(algorithm("scaffold"), tmp_path, rounds=3)
    with pytest.raises(fs.CheckpointError, match=r"rounds cannot be 6 with an .* after 3$"):
        run(algorithm("scaffold"), tmp_path)

    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "CALL_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(algorithm("scaffold"), tmp_path / "cut", eval_every=4, on_rounds=stop)
    with pytest.raises(fs.CheckpointError, match=r"rounds cannot be 2 with an .* after 0$"):
        run(algorithm("scaffold"), tmp_path / "cut", eval_every=4, rounds=2)


def test_refuses_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(fs.CheckpointError, match="record must give arrays, to be saved, got "):
        run(algorithm("scaffold"), tmp_path, record=lambda state: [state.round, lambda: 0])
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.CheckpointError, match=r"checkpoints in .*file: File exists"):
        run(algorithm("scaffold"), tmp_path / "file")
    with pytest.raises(fs.CheckpointError, match="checkpoints must name a folder, got ''"):
        run(algorithm("scaffold"), "", rounds=2)
    with pytest.raises(ValueError, match="keep must be a whole number at least 1, got 0"):
        run(algorithm("scaffold"), fs.Checkpoints(tmp_path, keep=0))
    with pytest.raises(ValueError, match="seconds must be a number at least 0, got nan"):
        run(algorithm("scaffold"), fs.Checkpoints(tmp_path, seconds=float("nan")))


def test_refuses_other_random_numbers(scaffold: Any, tmp_path: Path) -> None:
    (path,) = scaffold[0].glob("*6.npz")
    about, arrays = checkpoint_files.read_arrays(path)
    about["identity"]["jax_enable_x64"] = True
    checkpoint_files.write_arrays(tmp_path / path.name, about, arrays)
    with pytest.raises(fs.CheckpointError, match="with another jax_enable_x64: True, not False"):
        run(algorithm("scaffold"), tmp_path)


def test_arrays_of_every_kind_come_back() -> None:
    tree: dict[str, Any] = {
        "half": jnp.arange(3.0, dtype=jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(1), 2),
        "none": None,
        "byte": np.uint8(3),
    }
    packed = checkpoint_files.pack("x", tree)
    shapes = jax.eval_shape(lambda: tree)
    again = checkpoint_files.unpack(packed, "x", shapes, exact=True)
    assert jax.tree.map(lambda a: a.dtype, again) == jax.tree.map(lambda a: a.dtype, tree)
    for one in (again, tree):
        one["keys"] = jax.random.key_data(one["keys"])
    assert_trees(again, tree)


def scaled(factor: float) -> Any:
    return lambda x: x * factor


def test_fingerprints() -> None:
    one, other = np.arange(3), np.arange(3)[::-1]
    different = [
        1, 1.0, "1", (1, 2), [1, 2], {"a": 1}, {"b": 1}, one, other, one.astype(np.int8), optax.sgd,
        optax.sgd(0.1), optax.sgd(0.2), optax.adam(0.1), scaled(1.0), scaled(2.0),
        lambda x: x + 1, lambda x: x + 2, fs.toy().model, fs.models.logistic((4,), 2),
        fs.models.mlp((4,), 2), jnp.bfloat16(1), jax.random.key(0), jax.random.key(1),
    ]  # fmt: skip
    assert len({digest(value) for value in different}) == len(different)
    for value in (scaled(2.0), optax.adam(0.1), {"a": 1, "b": 2}):
        assert digest(value) == digest(value)
    assert digest(scaled(2.0)) == digest(scaled(2.0))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    names = [np.array(["a", float(i)], object) for i in (1, 1, 2)]
    assert digest(names[0]) == digest(names[1]) != digest(names[2])
    assert digest(fs.make_execution(1)) == digest(fs.make_execution(4))

    def endless(n: int) -> int:
        return endless(n - 1)

    assert digest(endless) == digest(endless)


@pytest.mark.slow
def test_fingerprints_are_those_of_other_processes() -> None:
    """Nothing in them hangs on addresses or on the order of sets."""
    program = (
        "import optax, fedjax_sim as fs\n"
        "from fedjax_sim.run.identity import digest\n"
        "t = fs.toy()\n"
        "local = fs.local_sgd(t.objective, optax.adamw(optax.cosine_decay_schedule(0.1, 9)))\n"
        "parts = fs.algorithms.scaffold(local, clients_per_round=5).parts.by_role()\n"
        "rule = lambda stacked, weights: 'x' in {'x', 'y', 'z'}\n"
        "given = parts, t.model, t.data, fs.models.mlp((8, 8, 1), 10), rule\n"
        "told = digest(given)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", f"{program}print(told)"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "1"},
    ).stdout
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(program, here)
    assert told.strip() == str(here["told"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, bare_commands: None) -> Path:
    """The folder of a command that has come to its end, undisturbed."""
    del bare_commands
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert bench.main([*FLAGS, "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_a_signal_is_heard_and_the_command_goes_on(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes in either method, and goes on in the same."""
    folder = tmp_path / "a run"
    argv = [*FLAGS, "--out", str(folder)]
    for number, status, which, at, lines in (
        (signal.SIGTERM, 143, 1, 4, 4),
        (signal.SIGTERM, 143, 1, 2, 4),  # while the records of round 2 are written again
        (signal.SIGINT, 130, 2, 2, 8),
    ):
        begun = itertools.count(1)

        def signalled(
            *args: Any, on_evaluation: Any, count: Any = begun, when: Any = (number, which, at),
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            sent, this, last = when
            mine = next(count) == this

            def record(evaluation: Any) -> None:
                if mine and evaluation.round == last:
                    STOPPING.hear(sent)
                on_evaluation(evaluation)

            return RUN(*args, on_evaluation=record, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Experiment, "run", signalled)
            patch.setattr(STOPPING, "_asked", None)
            assert bench.main(argv) == status
        told = capsys.readouterr().err
        assert f"continue with: python -m fedjax_sim.bench --resume '{folder}'" in told
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == lines
        argv = ["--resume", str(folder)]
    assert bench.main(argv) == 0
    assert "\nresumed: run s includes compilation" in capsys.readouterr().out
    ours, theirs = ((f / "metrics.jsonl").read_text() for f in (folder, finished))
    assert ours == theirs


@pytest.mark.slow
def test_more_rounds_by_the_command(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    assert bench.main(["--resume", str(folder), "--rounds", "8"]) == 0
    assert bench.main([*FLAGS, "--rounds", "8", "--out", str(tmp_path / "other")]) == 0
    ours, theirs = ((tmp_path / f / "metrics.jsonl").read_text() for f in ("run", "other"))
    assert ours == theirs
    settings = json.loads((folder / "config.json").read_text())
    assert settings["rounds"] == 8
    assert settings["arguments"][-2:] == ["--rounds", "8"]
    assert bench.main(["--resume", str(folder)]) == 0  # nothing is left to do


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr", "0.3"], "--lr is 0.3, and 0.02 in the run in "),
        (["--compare", "none"], "--compare is none, and fedavg in the run in "),
        (["--rounds", "2"], "--rounds must be at least 6, as in the run in "),
        (["--out", "x"], "--out is for a new run; --resume "),
        (["--no-checkpoints"], "--no-checkpoints is for a new run, which nothing"),
    ],
)
def test_the_command_refuses_another_run(
    finished: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert bench.main(["--resume", str(finished), *argv]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("begun", "now", "message"),
    [
        ("--aggregator krum", "", "--aggregator is not given, and krum in the run in a b; only"),
        ("", "--aggregator krum", "--aggregator is krum, and not given in the run in a b; only"),
        ("--mu 1", "--mu 2", "--mu of fedprox is 2.0, and 1.0 in the run in a b; only --rounds"),
        ("--mu 1", "", "--mu of fedprox is not given, and 1.0 in the run in a b; only --rounds"),
    ],
)
def test_a_setting_of_another_run_is_called_by_its_flag(begun: str, now: str, message: str) -> None:
    configs = [parse(["--algo", "fedprox", *words.split()]) for words in (begun, now)]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_settings(Path("a b"), *configs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no run: it lacks config.json"),
        ("{", "config.json is damaged: "),
        ("{}", "config.json is of format None, and this fedjax_sim reads 2"),
        ("[1]", "config.json is damaged: it must be an object, got '[1]'"),
        (STORED.replace('"--rounds",', '"--lr", "no", "--rounds",'), "--lr"),
    ],
)
def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert bench.main(["--resume", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"error: --resume {tmp_path}: " in told
    assert message in told


@pytest.mark.slow
def test_the_command_refuses_data_that_have_changed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    settings = json.loads((folder / "config.json").read_text())
    settings["partition_hashes"][0] = "another"
    (folder / "config.json").write_text(json.dumps(settings))
    assert bench.main(["--resume", str(folder)]) == 2
    assert "partition_hashes is another now: the data have changed" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_is_saved_if_it_is_not_wanted(tmp_path: Path) -> None:
    flags = [*FLAGS, "--algo", "fedavg", "--compare", "none", "--rounds", "2", "--no-checkpoints"]
    assert bench.main([*flags, "--out", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    run = fs.load_run(tmp_path / "run")
    with pytest.raises(ValueError, match="has no checkpoint of fedavg"):
        run.variables("fedavg")


@pytest.mark.slow
def test_a_run_is_loaded(finished: Path) -> None:
    loaded = fs.load_run(finished)
    assert loaded.algorithms == ("fedprox", "fedavg")
    last = [r["accuracy"] for r in loaded.records if r["round"] == 6]
    for i, (name, seed) in enumerate((n, s) for n in loaded.algorithms for s in (0, 1)):
        weights = jax.tree.map(lambda a, seed=seed: a[seed], loaded.variables(name))
        logits, _ = loaded.model.apply(weights, loaded.test.x, train=False)
        hits = np.argmax(logits, axis=1) == loaded.test.y
        assert np.mean(hits[np.asarray(loaded.test.index)]) == pytest.approx(last[i], abs=1e-6)
    of_clients = {(r["algorithm"], r["seed"]): r for r in loaded.clients}
    for r in loaded.records:
        if r["round"] == 6:
            scores = of_clients.pop((r["algorithm"], r["seed"]))["client_accuracy"]
            assert (np.mean(scores), min(scores)) == pytest.approx(
                (r["client_accuracy"]["mean"], r["client_accuracy"]["min"])
            )
    assert not of_clients
    assert loaded.summary["fedavg"]["rounds"] == 6
    assert loaded.data.clients == 8
    with pytest.raises(ValueError, match="algorithm must be one of fedprox, fedavg, got 'x'"):
        loaded.variables("x")
    with pytest.raises(ValueError, match="has no run"):
        fs.load_run(finished / "checkpoints")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", '{"round": 1}\n{"round": ', "metrics.jsonl, line 2 is damaged"),
        ("clients.jsonl", "[1]\n", r"line 1 is damaged: it must be an object, got '\["),
        ("summary.json", "\xff", "summary.json cannot be read: 'utf-8'"),
        ("config.json", "{", "config.json is damaged"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(STORED)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=told):
        fs.load_run(tmp_path)


KILLS = int(os.environ.get("KILLS", "2"))
KILLED = ["none"]
if "KILLS" in os.environ:  # minutes
    KILLED = ["fedavg", "stc", "fedasync", "radfedi", "phase_shift", "ditto"]


@pytest.mark.slow
def test_the_command_survives_being_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL, while it compiles, trains, or writes: as often as KILLS says."""
    draw, kills = random.Random(KILLS), 0
    command = [sys.executable, "-c", BARE.format(command="bench")]
    begin = [*FLAGS, "--compare", *KILLED, "--checkpoint-every", "0", "--rounds", "100"]
    start = time.monotonic()  # what a run takes on this machine says when one can be killed
    subprocess.run([*command, *begin, "--out", str(tmp_path / "other")], check=True)
    whole = time.monotonic() - start
    theirs = fs.load_run(tmp_path / "other")
    while kills < KILLS:
        folder = tmp_path / f"run{kills}"
        while True:
            begun = (folder / "checkpoints").exists()
            if not begun:
                shutil.rmtree(folder, ignore_errors=True)
            argv = ["--resume", str(folder)] if begun else [*begin, "--out", str(folder)]
            process = subprocess.Popen([*command, *argv], stderr=subprocess.DEVNULL)
            try:
                limit = whole * (0.2 + 0.6 * draw.random()) if kills < KILLS else 300
                assert process.wait(limit) == 0
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
        ours = (folder / "metrics.jsonl").read_bytes()
        assert ours == (tmp_path / "other" / "metrics.jsonl").read_bytes()
        for name in theirs.algorithms:
            assert_trees(fs.load_run(folder).variables(name), theirs.variables(name))
