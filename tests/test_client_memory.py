"""What clients keep, in host memory: the same runs and less on a device, or refused in a line."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ahead import experiment_of
from test_windows import numbers, populations

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base.signatures import keywords
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import TooLargeError
from fedjax_sim.partition import partition_from_lists
from fedjax_sim.run import client_memory
from fedjax_sim.run.layout import kept_of
from fedjax_sim.run.windows import Rows, Windows

FEATURES, CLASSES, CLIENTS = 6, 3, 20
MODEL = fs.models.logistic((FEATURES,), CLASSES)
ROW = 4 * CLASSES * (FEATURES + 1)
"""Bytes of a logistic regression."""

QUICK = ("cmfl", "ditto", "fedavg_top_k", "fedper")
OTHERS = (
    "adaptive_steps", "apfl", "fd", "fedadmm", "fedala", "fedbn", "feddyn", "fedlesam",
    "fedmd", "fedproto", "fedrep", "fedrod", "lg_fedavg", "moon", "scaffold", "stc",
)  # fmt: skip


@functools.lru_cache(maxsize=8)  # one is compiled once for each execution that it runs on
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


def trained(
    held: float | None,
    *,
    devices: int = 2,
    clients: int = CLIENTS,
    method: str = "scaffold",
    samples_mb: float | None = None,
    change: Callable[[fs.base.LocalUpdate], dict[str, Any]] | None = None,
    **changed: Any,
) -> fs.Result:
    """Two runs, of which the devices hold what so many clients keep of a logistic regression."""
    rng = np.random.default_rng(0)
    own = partition_from_lists(np.split(np.arange(6 * clients), clients))
    x = rng.normal(size=(6 * clients, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))
    mb = None if held is None else 2 * held / devices * ROW / 1e6 + 1e-9
    execution = fs.make_execution(devices, samples_mb=samples_mb, client_state_mb=mb)
    algorithm = algorithm_of(method, change)
    given = {"rounds": 7, "eval_every": 3, "seeds": (3, 4), "execution": execution, **changed}
    data, test = fs.client_data(x, y, own), fs.data.eval_set(x, y, own)
    return fs.simulate(algorithm, MODEL, data, test, classes=CLASSES, **given)


def all_of(result: fs.Result) -> Any:
    """What a run gives."""
    scores = [(e.test, e.personal, e.recorded) for e in result.evaluations]
    return numbers((result.variables, result.state, result.metrics, scores))


def client_state(state: fs.base.FedState) -> Any:
    """To record it."""
    return state.client_state


@pytest.mark.parametrize(("devices", "held"), [(1, 6), (1, 19), (2, 8), (4, 8)])
def test_a_run_is_the_same_to_the_bit(devices: int, held: int) -> None:
    """With what was kept at each evaluation."""
    ours, theirs = (trained(mb, devices=devices, record=client_state) for mb in (held, None))
    assert_trees(all_of(ours), all_of(theirs))


def test_so_it_is_beside_samples_that_are_fetched() -> None:
    assert_trees(all_of(trained(6, samples_mb=0.003)), all_of(trained(None)))


@pytest.mark.parametrize(
    ("method", "held", "changed"),
    [("ditto", 6, {}), ("ditto", 18, {"seeds": (3,)}), ("fedper", 8, {})],
)
def test_own_models_are_scored_some_at_a_time(method: str, held: int, changed: Any) -> None:
    ours, theirs = (trained(n, method=method, personal=True, **changed) for n in (held, None))
    assert ours.evaluations[-1].personal is not None
    assert_trees(all_of(ours), all_of(theirs))


def _tuned(local: fs.base.LocalUpdate) -> dict[str, Any]:
    """Own models that are made of the client's samples, in an order that its key says."""
    return {"personal": fs.personal.fine_tuned(local)}


def _some_leaves(local: fs.base.LocalUpdate) -> dict[str, Any]:
    del local
    return {"exchange": fs.exchange.split(own=fs.leaves.named("*bias"))}


def _screened(local: fs.base.LocalUpdate) -> dict[str, Any]:
    del local

    def send(key: Any, kept: Any, update: Any, message: Any, client: Any) -> fs.base.Sent:
        del key
        return fs.base.Sent(update, message, kept, client % 5 > 0)

    part = fs.base.Sending(lambda variables, data: (), send, withholds=True, screens=True)
    return {"sending": [part]}


@pytest.mark.parametrize(
    ("method", "held", "change"),
    [
        ("scaffold", 6, _tuned),
        ("phase_shift", 2, _some_leaves),
        ("ditto", 16, _screened),
    ],
)
def test_what_reads_or_restores_it_does_so_with_its_own(
    method: str, held: int, change: Any
) -> None:
    """Tuned own models, own leaves when models in flight are collected, skipped clients."""
    ours, theirs = (trained(n, method=method, change=change, personal=True) for n in (held, None))
    assert ours.metrics.skipped.any() == (change is _screened)
    assert_trees(all_of(ours), all_of(theirs))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_whatever_clients_keep_is_the_same_to_the_bit(
    name: str, federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Of 8 clients one device has what 7 keep."""

    def found(mb: float | None) -> tuple[Any, Any]:
        made = experiment_of(name, federation, models["mlp"], chunk=1, client_state_mb=mb)
        run = (stages := [stage for _, stage in made.stages((0, 1), 5)])[-1].run
        assert run is not None
        return made.told(run), (stages[-1].variables, [stage.metrics for stage in stages])

    whole = found(None)
    size = tree.num_bytes(kept_of(whole[0]))
    assert_trees(numbers(found(7 / 8 * size / 1e6 + 1e-9)), numbers(whole))


@pytest.mark.slow
def test_these_are_all_methods_whose_clients_keep_something(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    keep = set()
    for name in ALGORITHMS:
        made = experiment_of(name, federation, models["mlp"]).programs
        if jax.tree.leaves(kept_of(made._begun(made._functions))):
            keep.add(name)
    assert keep == {*QUICK, *OTHERS, "scaffnew"}  # of which all clients train at once


def test_a_device_holds_no_more_than_it_may() -> None:
    some, whole = (trained(held, clients=2000, rounds=2) for held in (8, None))
    assert some.device_bytes < whole.device_bytes - 0.9 * 2 * (2000 - 8) / 2 * ROW
    longer = trained(8, clients=2000, rounds=7)
    assert longer.device_bytes == some.device_bytes
    assert longer.xla_programs == 1  # which draws the cohorts of so many rounds


@pytest.mark.parametrize(("before", "after"), [(6, None), (None, 6), (6, 10)])
def test_a_run_goes_on_with_more_or_less(
    before: int | None, after: int | None, tmp_path: Path
) -> None:
    """And a third time, when it is over."""
    run = functools.partial(trained, method="ditto", personal=True)
    run(before, rounds=3, checkpoints=tmp_path)
    ours = [run(after, checkpoints=tmp_path) for _ in range(2)]
    assert_trees([all_of(one) for one in ours], [all_of(run(None))] * 2)


def test_what_fits_is_not_moved() -> None:
    """Nor is what nobody keeps."""
    assert trained(CLIENTS).device_bytes == trained(None).device_bytes
    some, whole = (trained(held, method="fedavg") for held in (1, None))
    assert some.device_bytes == whole.device_bytes


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
    windows = Windows(data, None, Rows(max(most + more, 1), 1, 4, 1.0))
    done = 0
    for window in windows.cut(cohorts, every):
        there = windows.fetched(window)
        assert there.held is not None
        assert there.x is data.x
        rows = np.asarray(there.held.row)
        members = windows.people(window)
        of_window = cohorts[:, done : done + window.rounds]
        assert {*members} == {*of_window.ravel()} - {n}
        assert rows[members].tolist() == list(range(len(members)))
        assert len(members) <= there.held.rows
        assert np.all(np.delete(rows, members) == there.held.rows)
        done += window.rounds
        if done < cohorts.shape[1] and done % every:  # else it would be longer
            assert len({*members, *cohorts[:, done].ravel()} - {n}) > there.held.rows
    assert done == cohorts.shape[1]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({"held": 0.5}, "client_state_mb must be at least 0.01: it holds what is kept by a client"),
        (
            {"held": 2},
            "client_state_mb must be at least 0.01: it holds what is kept by the clients of round "
            "1, 5 in all, got 0.000168",
        ),
    ],
)
def test_what_cannot_be_is_refused(case: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        trained(**case)


def test_models_that_are_collected_with_a_residual_are_refused() -> None:
    problem = fs.toy(20, 0.9)
    execution = fs.make_execution(1, client_state_mb=0.02)
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.phase_shift(local, clients_per_round=3, phases=3, execution=execution)
    coded = algorithm.replace(sending=[fs.compression.compressed(fs.compression.top_k(0.1))])
    with pytest.raises(ValueError, match="no last step or upload of all clients"):
        fs.simulate(
            coded, problem.model, problem.data, problem.test, rounds=5, classes=10,
            execution=execution,
        )  # fmt: skip


def test_a_machine_without_the_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_memory, "memory_of_host", lambda: 1000)
    with pytest.raises(TooLargeError, match=re.escape(
        "what 20 clients keep needs 0 MB of this machine's memory, which has 0 MB: take fewer"
    )):  # fmt: skip
        trained(6)


def coded(local: fs.base.LocalUpdate, *, clients_per_round: int) -> fs.Algorithm:
    """Phase shift whose clients keep what their code left out, for the command."""
    algorithm = fs.phase_shift(local, clients_per_round=clients_per_round, phases=2)
    return algorithm.replace(sending=[fs.compression.compressed(fs.compression.top_k(0.1))])


FLAGS = ["--model", "logistic", "--clients", "20", "--clients-per-round", "2", "--rounds", "4"]
FLAGS += ["--seeds", "2", "--compare", "none", "--no-cache"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--algo", "scaffold", "--client-state-mb", "0.001"], "must be at least 0.01: it holds"),
        (["--algo", f"{__name__}:coded", "--client-state-mb", "0.02"], "needs methods that read"),
    ],
)
def test_the_command_refuses_in_a_line(
    more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*FLAGS, *more, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"--client-state-mb {told}" in error.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_the_command_says_the_same(tmp_path: Path) -> None:
    counter = itertools.count()

    def scores(*more: str) -> list[Any]:
        folder = tmp_path / f"run{next(counter)}"
        assert bench.main([*FLAGS, "--json", "--algo", "ditto", *more, "--out", str(folder)]) == 0
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    assert scores() == scores("--client-state-mb", "0.02")
