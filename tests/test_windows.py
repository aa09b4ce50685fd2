"""Samples that stay on the host: fetched in time, the same for every part, or refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, altered_data, assert_trees, some_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ahead import experiment_of

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.data.clients import in_host_memory
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import as_arrays, list_starts
from fedjax_sim.engine.memory import TooLargeError, peak_bytes
from fedjax_sim.partition import Partition, partition_from_lists
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.prefetch import PrefetchBlocks, StateRows

NETWORK = fs.models.logistic((6,), 3)
DEEPER = fs.models.mlp((6,), 3, widths=(5,))
"""Of two layers."""
SAMPLE = 6 * 4 + 4 + 4 + 4
"""Bytes of a sample of the federation: x, y, index, owner."""


def holding(samples: int) -> float:
    """MB of which half holds so many samples of the federation."""
    return 2 * samples * SAMPLE / 1e6


def repeating(lists: Sequence[Any]) -> Partition:
    """Of samples that may be several clients', or copies."""
    return dataclasses.replace(partition_from_lists(lists), repeats=True)


@st.composite
def populations(draw: st.DrawFn) -> tuple[fs.ClientData, np.ndarray, int, int]:
    """Clients of several partitions, with copies and the server's samples; cohorts; a stretch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    runs, clients, total = draw(st.integers(1, 3)), draw(st.integers(1, 6)), 40
    several, rooted, copied = (draw(st.booleans()) for _ in range(3))
    root = np.arange(36, 40) if rooted else None

    def partition() -> Partition:
        lists = [rng.choice(36, rng.integers(1, 9), replace=False) for _ in range(clients)]
        if copied:
            lists = [np.concatenate([own, own[:2] + total]) for own in lists]
        return repeating(lists)

    partitions = [partition() for _ in range(runs)] if several else partition()
    x = rng.normal(size=(total, 3)).astype(np.float32)
    data = fs.client_data(x, np.arange(total) % 5, partitions, root=root)
    cohorts = rng.integers(0, clients + 1, (runs, draw(st.integers(1, 9)), 3))
    most = int(max(np.diff(np.atleast_2d(data.start)).max(), 1))
    return data, cohorts, most * runs * 3 + 4 * runs, draw(st.integers(1, 4))


@given(populations(), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_every_client_of_a_round_is_there(
    population: tuple[fs.ClientData, np.ndarray, int, int], more: int
) -> None:
    data, cohorts, most, every = population
    each = 3 * 4 + 4 + 4 + 4
    windows = PrefetchBlocks(data, 2 * (most + more) * each / 1e6 + 1e-9)
    starts, total, n = np.atleast_2d(data.start), len(data.x), data.clients
    roots = np.reshape([] if data.root is None else data.root, (-1, 2))
    entries = np.asarray(data.index)
    done = 0
    for window in windows.split(cohorts, every):
        there = windows.fetched(window)
        assert len(there.x) == len(there.y) == len(there.index) == windows.capacity
        at = places(there)
        for r, t in itertools.product(range(len(cohorts)), range(done, done + window.rounds)):
            p = r % len(starts)
            for k in cohorts[r, t][cohorts[r, t] < n]:
                own = entries[starts[p, k] : starts[p, k + 1]]
                found = np.asarray(there.index)[at(p, k) : at(p, k) + len(own)]
                assert np.array_equal(found >= windows.capacity, own >= total)
                assert np.array_equal(there.x[found % windows.capacity], data.x[own % total])
                assert np.array_equal(there.y[found % windows.capacity], data.y[own % total])
        moved = np.reshape([] if there.root is None else there.root, (-1, 2))
        for old, new in zip(roots, moved, strict=True):
            rows = np.asarray(there.index)[slice(*new)]
            assert np.array_equal(there.x[rows], data.x[entries[slice(*old)]])
        assert done // every == (done + window.rounds - 1) // every
        done += window.rounds
    assert done == cohorts.shape[1]


def bytes_of_window(clients: int) -> int:
    """What the devices are sent for a window of two clients, states included."""
    own = in_host_memory(np.arange(clients + 1, dtype=np.int32))
    x = in_host_memory(np.zeros((clients, 1), np.float32))
    data = fs.ClientData(x, own[:-1], own[:-1], own, capacity=1)
    windows = PrefetchBlocks(data, 0.001, StateRows(3, 1, 4, 1.0))
    (window,) = windows.split(np.array([[[0, clients - 1]]]), 1)
    return tree.num_bytes(windows.changing(windows.fetched(window)))


def test_a_million_clients_cost_a_window_nothing() -> None:
    """Neither bytes nor a sort of them all, which took 20 seconds."""
    began = time.perf_counter()
    assert bytes_of_window(10**6) == bytes_of_window(10)
    assert time.perf_counter() - began < 2


def places(there: fs.ClientData) -> Callable[[int, int], int]:
    """Finds where the samples of client k of the p-th partition begin, without JAX."""
    owner, ends = known_array(there.owner), np.atleast_2d(known_array(there.at))

    def place(p: int, k: int) -> int:
        first, last = ends[p]
        return int(first + np.searchsorted(owner[first:last], k))

    return place


def test_the_first_entry_of_a_client_is_found() -> None:
    """Whatever the client, and in the entries of its partition alone."""
    rng = np.random.default_rng(1)
    owner = np.concatenate([np.sort(rng.integers(0, 9, n)) for n in (40, 20)]).astype(np.int32)
    clients = np.arange(10, dtype=np.int32)
    lists = partition_from_lists(np.split(np.arange(10), 10))
    data = fs.client_data(np.zeros((10, 1), np.float32), np.zeros(10), lists)
    for first, last in ((0, 40), (40, 60), (7, 7)):
        tables = {"owner": in_host_memory(owner), "at": in_host_memory([first, last], np.int32)}
        one = as_arrays(altered_data(data, **tables), differentiable=False)
        found = list_starts(one, jnp.asarray(clients))
        assert found.tolist() == (first + np.searchsorted(owner[first:last], clients)).tolist()


def known_array(value: Any) -> np.ndarray:
    assert value is not None
    return np.asarray(value)


def test_windows_are_as_long_as_they_may_be() -> None:
    lists = np.split(np.arange(12), 4)  # 3 samples each
    data = fs.client_data(np.zeros((12, 5), np.float32), np.zeros(12), partition_from_lists(lists))
    cohorts = np.array([[0, 1], [1, 0], [2, 4], [3, 2], [3, 3], [0, 1]])[None]
    cuts = {
        samples: [
            window.rounds for window in PrefetchBlocks(data, 2e-6 * samples * 32).split(cohorts, 9)
        ]
        for samples in (6, 9, 12)
    }
    assert cuts == {6: [2, 3, 1], 9: [3, 2, 1], 12: [6]}
    assert [w.rounds for w in PrefetchBlocks(data, 1).split(cohorts, 4)] == [4, 2]
    with pytest.raises(TooLargeError, match=re.escape(
        "samples_mb must be at least 0.01: half of it holds the clients of round 1, 6 samples"
    )):  # fmt: skip
        [*PrefetchBlocks(data, 2e-6 * 5 * 32).split(cohorts, 9)]
    with pytest.raises(TooLargeError, match=r"0\.01: half of it holds a sample, 1 sample,"):
        PrefetchBlocks(data, 1e-6)


def test_runs_of_a_partition_share_its_samples() -> None:
    """Two algorithms beside each other, say, on the same two partitions."""
    one, two = (partition_from_lists(np.split(np.arange(12)[::way], 4)) for way in (1, -1))
    x = np.zeros((12, 5), np.float32)
    data = fs.client_data(x, np.zeros(12), [one, two])
    data = altered_data(data, start=np.concatenate([data.start, data.start]))
    windows = PrefetchBlocks(data, 2e-6 * 12 * 32 + 1e-9)
    (window,) = windows.split(np.array([[[0, 1]], [[0, 2]], [[1, 0]], [[2, 4]]]), 9)
    assert len(window.clients) == 5  # client 4 is none
    there = windows.fetched(window)
    at = known_array(there.at)
    assert np.array_equal(at[:2], at[2:])
    assert known_array(there.owner).tolist() == [*np.repeat([0, 1, 0, 2], 3)]


def stages(name: str, federation: Federation, mb: float | None, devices: int = 1) -> Any:
    """The last stage of two runs, and the cohorts of all rounds."""
    network = DEEPER if name == "streaming_diloco" else NETWORK
    made = experiment_of(name, federation, network, devices=devices, chunk=1, samples_mb=mb)
    found = [stage for _, stage in made.intervals((0, 1), 5)]
    run = found[-1].run
    assert run is not None
    return made.exported(run).state, found[-1].collected, [stage.metrics for stage in found]


def test_a_run_is_where_its_algorithm_was_composed_or_where_it_is_told(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """With all that an execution says: of the samples of the clients, how many a device holds."""
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    given = models["logistic"], federation.data, federation.test
    here, there = fs.make_execution(2, samples_mb=0.01), fs.make_execution(1)
    algorithm = fs.fedavg(local, clients_per_round=3).on(here)
    composed = Experiment(algorithm, *given, classes=3).runner().programs
    told = Experiment(algorithm, *given, classes=3, execution=there).runner().programs
    for programs, execution in ((composed, here), (told, there)):
        assert programs.execution == execution
        assert programs.algorithm.parts.execution.devices == execution.devices
        assert (programs.blocks is None) == (execution.samples_mb is None)


def numbers(tree: Any) -> Any:
    """Keys as numbers."""

    def number(a: Any) -> Any:
        key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(a) if key else a)

    return jax.tree.map(number, tree)


SOME = ("scaffold",)
OTHERS = (
    "dada", "dp_fedavg", "fedasync", "fedcs", "feddf", "mime", "scaffnew", "streaming_diloco"
)  # fmt: skip
"""One of each kind: asks, polls, finishes, reads the server's samples, draws any number, ..."""
REFUSED = (
    "radfedi", "feddisco", "ccvr", "power_of_choice", "tifl", "oort", "favor", "fedmix", "astraea",
)  # fmt: skip


@pytest.mark.parametrize("name", some_slow([*SOME, *OTHERS], quick=len(SOME)))
def test_a_run_is_the_same_to_the_bit(name: str, federation: Federation) -> None:
    sizes, total = np.sort(federation.sizes), len(federation.data.x)
    # As little as the rounds of two runs may need, with what the server owns.
    most = min(2 * int(sizes[-4:].sum()), int(sizes.sum()) - 1)
    most = int(sizes.sum()) if name in ("scaffnew", "dp_fedavg") else most  # all may come
    mb = holding(most + total - int(sizes.sum()))
    devices = 2 if name == "scaffold" else 1
    theirs, ours = (stages(name, federation, held, devices) for held in (mb, None))
    assert_trees(*map(numbers, (theirs, ours)))


@pytest.mark.slow
def test_what_else_reads_samples_reads_the_same(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """A centralised twin, and samples that are streamed and have flipped labels."""
    model, data = models["logistic"], federation.data
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    algorithm = fs.fedavg(local, clients_per_round=3)
    algorithm = algorithm.replace(diagnostics={"": fs.diagnostics.central_divergence(local)})
    flipped = np.tile(np.arange(3, dtype=np.int32), (data.clients, 1))
    flipped[::2] = [2, 1, 0]
    data = fs.data.streamed(altered_data(data, relabel=flipped), 3)

    def go(mb: float | None) -> fs.Result:
        return fs.simulate(
            algorithm, model, data, federation.test, rounds=4, classes=3,
            execution=fs.make_execution(devices=1, samples_mb=mb),
        )  # fmt: skip

    ours, theirs = (go(mb) for mb in (holding(90), None))
    assert_trees(*(numbers((r.variables, r.metrics, r.state)) for r in (ours, theirs)))


@pytest.mark.parametrize("name", REFUSED)
def test_who_needs_samples_of_others_is_refused(name: str, federation: Federation) -> None:
    made = experiment_of(name, federation, NETWORK, samples_mb=1.0)
    with pytest.raises(ValueError, match=r"samples_mb needs (methods that read|cohorts that are)"):
        made.programs.check()


@pytest.mark.slow
def test_a_device_holds_no_more_than_it_may(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """A hundred times the samples, which it does not hold; a longer run compiles no more."""
    x, y = (np.concatenate([np.asarray(a)] * 100) for a in (federation.data.x, federation.data.y))
    given = fs.client_data(x, y, federation.partition)
    objective = fs.empirical_risk(models["logistic"])
    local = fs.local_sgd(objective, optax.sgd(0.1), batch_size=8)

    algorithm = fs.fedavg(local, clients_per_round=4)

    def go(rounds: int, mb: float | None) -> fs.Result:
        return fs.simulate(
            algorithm, models["logistic"], given, federation.test, rounds=rounds, classes=3,
            execution=fs.make_execution(devices=1, samples_mb=mb),
        )  # fmt: skip

    whole, short, long = go(1, None), go(2, holding(120)), go(6, holding(120))
    assert short.device_bytes < whole.device_bytes - x.nbytes + 240 * SAMPLE
    tested = sum(np.asarray(a).nbytes for a in federation.test)
    assert short.device_bytes > 240 * SAMPLE + tested
    assert long.xla_programs == 1  # which draws the cohorts of so many rounds


def test_what_waits_for_the_rounds_counts(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """The test set and the next window."""
    made = experiment_of("fedavg", federation, models["logistic"], samples_mb=holding(200))
    made._prepare(None)
    waits = made._bytes_during("rounds") - peak_bytes(made._compiled["rounds"])
    assert waits > 200 * SAMPLE + sum(np.asarray(a).nbytes for a in federation.test)


FILE_MODEL = fs.models.logistic((4,), 3)
LARGE = 7
"""A client with two more samples than others, which comes late."""


def problem(tmp_path: Path) -> tuple[fs.ClientData, Any]:
    """Clients whose samples lie in a file, some of them altered copies."""
    rng = np.random.default_rng(3)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (60, 4))
    x[:] = rng.normal(size=(60, 4))
    y = rng.integers(0, 3, 60)
    lists = [np.arange(k, 60, 12) for k in range(12)]
    lists = [np.concatenate([own, own[: 2 + 2 * (k == LARGE)] + 60]) for k, own in enumerate(lists)]
    return (
        fs.client_data(np.load(tmp_path / "x.npy", mmap_mode="r"), y, repeating(lists)),
        fs.data.eval_set(x, y, partition_from_lists([own[:5] for own in lists])),
    )


@functools.cache  # one is compiled once for each execution that it runs on
def of_copies(method: str) -> fs.Algorithm:
    """Trains on copies that are altered."""

    def shifted(key: Any, batch: fs.base.Batch, client: Any) -> fs.base.Batch:
        assert batch.copy is not None
        moved = batch.x + jax.random.normal(key, batch.x.shape)
        return batch._replace(x=jnp.where(batch.copy[:, None], moved, batch.x))

    objective = fs.empirical_risk(FILE_MODEL)
    local = fs.local_sgd(objective, optax.sgd(0.1), batch_size=4, transforms=[shifted])
    return ALGORITHMS[method](local, clients_per_round=3)


def holding_of_file(samples: int | None) -> fs.Execution:
    mb = None if samples is None else 2e-6 * samples * (16 + 12)
    return fs.make_execution(devices=1, samples_mb=mb)


def trained(tmp_path: Path, samples: int | None, rounds: int = 6, **changed: Any) -> fs.Result:
    data, test = problem(tmp_path)
    assert isinstance(np.asarray(data.x).base, np.memmap)
    return fs.simulate(
        of_copies("ditto"), FILE_MODEL, data, test, rounds=rounds, classes=3, eval_every=3,
        personal=True, execution=holding_of_file(samples), **changed,
    )  # fmt: skip


def all_of(result: fs.Result) -> Any:
    scores = [(e.test, e.personal) for e in result.evaluations]
    return numbers((result.variables, result.state, result.metrics, scores))


@pytest.mark.slow
def test_samples_may_lie_in_a_file_and_runs_go_on(tmp_path: Path) -> None:
    """With own models scored, copies altered, and resumed runs that fetch what others had."""
    whole = trained(tmp_path, None)
    some = trained(tmp_path, 21)
    assert_trees(all_of(some), all_of(whole))
    for before, after in ((21, None), (None, 21)):
        folder = tmp_path / f"saved{before}"
        trained(tmp_path, before, checkpoints=folder, rounds=3)
        assert_trees(all_of(trained(tmp_path, after, checkpoints=folder)), all_of(whole))
    told = (
        r"samples_mb must be at least 0\.01: half of it holds the clients of round \d+, 23 samples"
    )
    with pytest.raises(TooLargeError, match=told):
        trained(tmp_path, 21, rounds=30)


def test_who_reads_other_samples_is_refused(tmp_path: Path) -> None:
    made = Experiment(
        of_copies("fine_tuned"), FILE_MODEL, *problem(tmp_path), classes=3, personal=True,
        execution=holding_of_file(30),
    ).runner()  # fmt: skip
    with pytest.raises(ValueError, match="samples_mb needs methods that read a client's samples"):
        made.programs.check()
