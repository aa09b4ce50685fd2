"""What clients keep, in host memory: the same runs and less on a device, or refused in a line."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, some_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ahead import experiment_of
from test_windows import DEEPER, NETWORK, numbers, populations

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base.signatures import keywords
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import as_arrays, state_rows
from fedjax_sim.engine.memory import TooLargeError
from fedjax_sim.partition import partition_from_lists
from fedjax_sim.run import client_memory
from fedjax_sim.run.client_memory import ClientRows
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.layout import per_client_state
from fedjax_sim.run.prefetch import PrefetchBlocks, StateRows
from fedjax_sim.run.programs import Programs

FEATURES, CLASSES, CLIENTS = 60, 3, 100  # who keep more than all else that a run holds
MODEL = fs.models.logistic((FEATURES,), CLASSES)
ROW = 4 * CLASSES * (FEATURES + 1)
"""Bytes of a logistic regression."""

OTHERS = ("adaptive_steps", "apfl", "cmfl", "fedala", "fedper", "fedproto", "stc")
ELSEWHERE = ("ditto", "scaffold")
"""Methods of the other tests here."""
LAYERED = ("fedala", "fedper", "fedproto")
"""They tell the layers of a network apart."""
ALIKE = (
    "fd", "fedadmm", "fedavg_top_k", "fedbn", "feddyn", "fedlesam", "fedmd", "fedrep", "fedrod",
    "lg_fedavg", "moon",
)  # fmt: skip
"""Their clients keep other arrays by the same parts: what a round changes, leaves of the model."""


@functools.cache  # one is compiled once for each execution that it runs on
def algorithm_of(
    method: str, change: Callable[[fs.base.LocalUpdate], dict[str, Any]] | None
) -> fs.Algorithm:
    objective = fs.empirical_risk(MODEL)
    local = fs.local_sgd(objective, optax.sgd(0.1), batch_size=4)
    function = ALGORITHMS[method]
    common: dict[str, Any] = {"model": MODEL, "objective": objective}
    common |= {"phases": 3} if method == "phase_shift" else {}
    options = {name: part for name, part in common.items() if name in keywords(function)}
    algorithm = function(local, clients_per_round=3, **options)
    return algorithm if change is None else algorithm.replace(**change(local))


@functools.cache
def problem() -> tuple[fs.ClientData, fs.data.EvalSet]:
    """Clients of six samples each, on which they are tested too."""
    rng = np.random.default_rng(0)
    own = partition_from_lists(np.split(np.arange(6 * CLIENTS), CLIENTS))
    x = rng.normal(size=(6 * CLIENTS, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))
    return fs.client_data(x, y, own), fs.data.eval_set(x, y, own)


def holding(held: float | None, devices: int = 1, samples_mb: float | None = None) -> fs.Execution:
    """Devices that hold what so many clients keep of a logistic regression in two runs."""
    mb = None if held is None else 2 * held / devices * ROW / 1e6 + 1e-9
    return fs.make_execution(devices, samples_mb=samples_mb, client_state_mb=mb)


def trained(
    held: float | None,
    *,
    devices: int = 1,
    method: str = "scaffold",
    samples_mb: float | None = None,
    change: Callable[[fs.base.LocalUpdate], dict[str, Any]] | None = None,
    **changed: Any,
) -> fs.Result:
    """Two runs, and what was kept at each evaluation."""
    execution = holding(held, devices, samples_mb)
    given = {"rounds": 7, "eval_every": 3, "seeds": (3, 4), "execution": execution, **changed}
    return fs.simulate(
        algorithm_of(method, change), MODEL, *problem(), classes=CLASSES,
        **{"record": client_state, **given},
    )  # fmt: skip


def prepared(
    method: str,
    execution: fs.Execution,
    change: Callable[[fs.base.LocalUpdate], dict[str, Any]] | None = None,
) -> Programs:
    """What would be compiled for two runs."""
    return Experiment(
        algorithm_of(method, change), MODEL, *problem(), classes=CLASSES, seeds=(3, 4),
        execution=execution,
    ).runner().programs  # fmt: skip


@functools.cache
def whole(**given: Any) -> fs.Result:
    """The run whose devices hold what all clients keep."""
    return trained(None, **given)


def all_of(result: fs.Result) -> Any:
    """What a run gives."""
    scores = [(e.test, e.personal, e.recorded) for e in result.evaluations]
    return numbers((result.variables, result.state, result.metrics, scores))


def client_state(state: fs.base.FedState) -> Any:
    """To record it."""
    return state.client_state


@pytest.mark.parametrize("samples_mb", some_slow([0.03, None]))
def test_a_run_is_the_same_to_the_bit(samples_mb: float | None) -> None:
    """With what was kept at each evaluation; also beside samples that are fetched."""
    assert_trees(all_of(trained(6, samples_mb=samples_mb)), all_of(whole()))


class _FifthsSkipped(fs.base.Sending):
    """Skips every fifth client, whose state stays unchanged."""

    withholds = screens = True

    def send(self, key: Any, kept: Any, update: Any, message: Any, client: Any) -> fs.base.Sent:
        return fs.base.Sent(update, message, kept, client % 5 > 0)


def _screened(local: fs.base.LocalUpdate) -> dict[str, Any]:
    return {"sending": [_FifthsSkipped()]}


def _tuned_with_own_leaves(local: fs.base.LocalUpdate) -> dict[str, Any]:
    """The own models are made of the client's samples, in an order that its key says."""
    own = fs.exchange.split(own=fs.leaves.named("*bias"))
    return {"exchange": own, "personal": fs.personal.fine_tuned(local)}


DITTO: dict[str, Any] = {
    "method": "ditto", "change": _screened, "personal": True, "devices": 4,
}  # fmt: skip


@pytest.mark.slow
def test_own_models_are_scored_some_at_a_time() -> None:
    """Of six clients of a round the last device has none."""
    ours = trained(8, **DITTO)
    assert ours.evaluations[-1].personal is not None
    assert ours.metrics.skipped.any()
    assert_trees(all_of(ours), all_of(whole(**DITTO)))


@pytest.mark.slow
def test_what_ends_or_tunes_a_run_reads_what_its_clients_keep() -> None:
    """Own leaves when models in flight are collected, and own models that are tuned from them."""
    given: dict[str, Any] = {
        "method": "phase_shift", "change": _tuned_with_own_leaves, "personal": True,
    }  # fmt: skip
    held = 8 / (FEATURES + 1)  # eight clients keep a bias each
    assert prepared("phase_shift", holding(held), _tuned_with_own_leaves).hosted
    ours = trained(held, **given)
    assert ours.evaluations[-1].uncollected is not None
    assert_trees(all_of(ours), all_of(trained(None, **given)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_whatever_clients_keep_is_the_same_to_the_bit(name: str, federation: Federation) -> None:
    """Of 8 clients one device has what 7 keep."""

    def found(mb: float | None) -> tuple[Any, Any]:
        network = DEEPER if name in LAYERED else NETWORK
        made = experiment_of(name, federation, network, chunk=1, client_state_mb=mb)
        run = (stages := [stage for _, stage in made.intervals((0, 1), 5)])[-1].run
        assert run is not None
        return made.exported(run), (stages[-1].collected, [stage.metrics for stage in stages])

    theirs = found(None)
    size = tree.num_bytes(per_client_state(theirs[0]))
    assert_trees(numbers(found(7 / 8 * size / 1e6 + 1e-9)), numbers(theirs))


@pytest.mark.slow
def test_these_are_all_methods_whose_clients_keep_something(federation: Federation) -> None:
    keep = set()
    for name in ALGORITHMS:
        made = experiment_of(name, federation, DEEPER).programs
        kept = per_client_state(made._start_shapes(made._functions))
        if not jax.tree.leaves(kept):
            continue
        keep.add(name)
        if name in ALIKE:
            mb = 7 / 8 * tree.num_bytes(kept) / 1e6 + 1e-9
            some = experiment_of(name, federation, DEEPER, client_state_mb=mb).programs
            assert some.hosted
            for _ in some._traced(None):  # refuses it if a program but the rounds reads it
                pass
    known = {*OTHERS, *ELSEWHERE, *ALIKE}
    assert keep == known | {"scaffnew"}  # of which all clients train at once


@pytest.mark.slow
def test_a_device_holds_no_more_than_it_may() -> None:
    some = trained(6)
    assert some.device_bytes < whole().device_bytes - 0.9 * 2 * (CLIENTS - 6) * ROW
    longer = trained(6, rounds=9)
    assert longer.device_bytes == some.device_bytes
    assert longer.xla_programs == 1  # which draws the cohorts of so many rounds


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(8, None), (None, 8), (8, 8)])
def test_a_run_goes_on_with_more_or_less(
    before: int | None, after: int | None, tmp_path: Path
) -> None:
    """And a third time, when it is over."""
    trained(before, rounds=3, checkpoints=tmp_path, **DITTO)
    ours = [trained(after, checkpoints=tmp_path, **DITTO) for _ in range(2)]
    assert_trees([all_of(one) for one in ours], [all_of(whole(**DITTO))] * 2)


@pytest.mark.parametrize(("method", "held"), [("scaffold", CLIENTS), ("fedavg", 1)])
def test_what_fits_is_not_moved(method: str, held: int) -> None:
    """Nor is what nobody keeps."""
    made = prepared(method, holding(held))
    assert not made.hosted
    assert made.blocks is None
    assert made.layout.clients == CLIENTS


def test_an_exception_loses_nothing() -> None:
    def end(evaluation: fs.Evaluation) -> None:
        if evaluation.round == 6:
            raise KeyError

    with pytest.raises(KeyError) as caught:
        trained(6, on_evaluation=end)
    result: fs.Result = caught.value.result  # type: ignore[attr-defined]
    assert_trees(numbers(result.state), numbers(trained(None, rounds=6).state))


@given(populations(), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_every_client_of_a_round_has_a_row(
    population: tuple[fs.ClientData, np.ndarray, int, int], more: int
) -> None:
    data, cohorts, _, every = population
    n = data.clients
    most = max(len({*cohorts[:, t].ravel()} - {n}) for t in range(cohorts.shape[1]))
    windows = PrefetchBlocks(data, None, StateRows(max(most + more, 1), 1, 4, 1.0))
    done = 0
    for window in windows.split(cohorts, every):
        there = windows.fetched(window)
        assert there.held is not None
        assert there.x is data.x
        rows = np.asarray(state_rows(as_arrays(there, differentiable=False), jnp.arange(n + 1)))
        held = len(there.held.client)
        members = windows.clients(window)
        of_window = cohorts[:, done : done + window.rounds]
        assert {*members} == {*of_window.ravel()} - {n}
        assert rows[members].tolist() == list(range(len(members)))
        assert len(members) <= held
        assert np.all(np.delete(rows, members) == held)
        done += window.rounds
        if done < cohorts.shape[1] and done % every:  # else it would be longer
            assert len({*members, *cohorts[:, done].ravel()} - {n}) > held
    assert done == cohorts.shape[1]


def test_what_cannot_be_is_refused() -> None:
    told = "client_state_mb must be at least 0.01 to hold the state of "
    with pytest.raises(ValueError, match=re.escape(f"{told}a client")):
        trained(0.5)
    windows = prepared("scaffold", holding(2, devices=2)).blocks
    assert windows is not None
    told += "the clients of round 2, 5 in all, got 0.001464"
    with pytest.raises(ValueError, match=re.escape(told)):
        [*windows.split(np.array([[[0, 1, 100], [4, 9, 8]], [[1, 100, 0], [9, 3, 7]]]), 3)]


def test_models_that_are_collected_with_a_residual_are_refused() -> None:
    problem = fs.toy(20, 0.9)
    execution = fs.make_execution(1, client_state_mb=0.02)
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.phase_shift(local, clients_per_round=3, phases=3).on(execution)
    coded = algorithm.replace(sending=[fs.compression.compressed(fs.compression.top_k(0.1))])
    with pytest.raises(ValueError, match="no last step or upload of all clients"):
        fs.simulate(
            coded, problem.model, problem.data, problem.test, rounds=5, classes=10,
            execution=execution,
        )  # fmt: skip


def test_only_clients_that_are_drawn_have_a_row(tmp_path: Path) -> None:
    """In the result and in its checkpoint; a run that goes on adds the others that it draws."""

    def rows(result: fs.Result) -> tuple[ClientRows, set[int]]:
        assert result.state is not None
        kept = jax.tree.leaves(result.state.client_state)
        assert {(*known.shape[:2], known.dtype.name) for known in kept} == {(2, 100, "float32")}
        return kept[0], {*result.metrics.client.ravel().tolist()}

    folder = tmp_path / "some"
    for rounds in (3, 6):
        kept, drawn = rows(trained(6, rounds=rounds, record=None, checkpoints=folder))
        assert len(drawn) < 40
        assert {*kept.clients.tolist()} == drawn
        assert kept.rows.shape[1] == 1 + len(drawn)
    state = trained(None, rounds=6).state
    assert state is not None
    full = np.asarray(jax.tree.leaves(state.client_state)[0])
    someone = min(drawn)
    assert np.array_equal(kept[1, someone], full[1, someone])
    assert np.array_equal(kept[1:][0, [someone, 0]], full[1, [someone, 0]])
    assert np.array_equal(kept[:, :, 0], full[:, :, 0])
    assert (folder / "00000006.npz").stat().st_size < 2 * CLIENTS * ROW


def test_an_exported_run_stays_as_it_was() -> None:
    """While a checkpoint of it is written, the next rounds run."""
    made = Experiment(
        algorithm_of("scaffold", None), MODEL, *problem(), classes=CLASSES, seeds=(3, 4),
        execution=holding(6),
    ).runner()  # fmt: skip
    exports = []
    for _, stage in made.intervals((3, 4), 3):
        assert stage.run is not None
        exports.append(per_client_state(made.exported(stage.run)))
        exports.append(numbers(exports[-1]))
    assert_trees([numbers(kept) for kept in exports[::2]], exports[1::2])


@pytest.mark.parametrize("devices", [0, 2_000_000])
def test_a_machine_without_the_memory_says_so(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = len({*whole().metrics.client.ravel().tolist()})
    kept = 2 * (drawn + 1) * ROW  # of two runs; with a copy, or the devices' part twice
    needed = kept + max(kept, 2 * devices)
    monkeypatch.setattr(client_memory, "host_bytes_held", lambda *_: devices)
    monkeypatch.setattr(client_memory, "memory_of_host", lambda: needed)
    trained(6)
    monkeypatch.setattr(client_memory, "memory_of_host", lambda: needed - 1)
    told = (
        f"the state of {drawn} of 100 clients, 0 MB, needs {needed / 1e6:.0f} MB of this machine's"
    )
    with pytest.raises(TooLargeError, match=re.escape(told)):
        trained(6)


def coded(local: fs.base.LocalUpdate, *, clients_per_round: int) -> fs.Algorithm:
    """Phase shift whose clients keep what their code left out, for the command."""
    algorithm = fs.phase_shift(local, clients_per_round=clients_per_round, phases=2)
    return algorithm.replace(sending=[fs.compression.compressed(fs.compression.top_k(0.1))])


FLAGS = ["--model", "logistic", "--clients", "20", "--clients-per-round", "2", "--rounds", "4"]
FLAGS += ["--seeds", "2", "--compare", "none", "--no-cache", "--devices", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--algo", "scaffold", "--client-state-mb", "0.001"], "must be at least 0.01 to hold"),
        (["--algo", f"{__name__}:coded", "--client-state-mb", "0.02"], "needs methods that read"),
        (["--algo", "scaffold", "--client-state-mb", "0.006"], "must be at least 0.03 to hold"),
    ],
)
def test_the_command_refuses_in_a_line(
    more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*FLAGS, *more, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"--client-state-mb {told}" in error.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_the_command_says_the_same(tmp_path: Path) -> None:
    """With samples on the host too; and of own models that are loaded."""

    def told(name: str, *more: str) -> tuple[Any, float]:
        folder = tmp_path / name
        argv = [*FLAGS, "--algo", "ditto", *more, "--out", str(folder)]
        assert bench.main(argv) == 0
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        scores = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
        summary = json.loads((folder / "summary.json").read_text())
        own = fs.load_run(folder).personal("ditto")
        return (scores, own), summary["ditto"]["device_memory_mb"]

    (scores, held), (same, less) = (
        told("whole"), told("some", "--client-state-mb", "0.04", "--samples-mb", "0.1")
    )  # fmt: skip
    assert_trees(same, scores)
    assert less < held - 0.05
