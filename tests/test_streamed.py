"""Samples that come in by the round, against plain NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, assert_trees, make_federation, play

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import ClientData, LocalUpdate
from fedjax_sim.bench import main
from fedjax_sim.data import streamed
from fedjax_sim.engine.clients import client_sizes, samples_of, visits

SIZES = (9, 20, 5, 14, 30, 3, 12, 7)
LR, EACH, ROUNDS, COHORT = 0.2, 4, 4, 5
MODEL = fs.models.logistic((6,), 3)
RISK = fs.empirical_risk(MODEL)
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation(SIZES)


def local(batch_size: int = EACH) -> LocalUpdate:
    return fs.local_sgd(RISK, optax.sgd(LR), batch_size=batch_size)


def arrived(data: ClientData, client: int, t: int) -> tuple[np.ndarray, np.ndarray]:
    """What comes in with a round."""
    first, end = np.asarray(data.start)[client : client + 2]
    rows = np.asarray(data.index)[first:end][t * EACH : (t + 1) * EACH]
    return np.asarray(data.x)[rows], np.asarray(data.y)[rows]


@pytest.mark.parametrize("equal", [False, True])
def test_fedavg_on_a_stream_against_numpy(federation: Federation, equal: bool) -> None:
    """A step on all that has come in; the loss is that of the model before it."""
    method = fs.fedavg(
        local(),
        clients_per_round=COHORT,
        equal_weights=equal,
    ).on(fs.make_execution(devices=2 if equal else 1))
    ours = play(method, MODEL, streamed(federation.data, EACH), ROUNDS)
    w = oracle.layers_of(MODEL.init(jax.random.fold_in(jax.random.key(0), 0)))
    missing = 0
    for t, metrics in enumerate(ours.metrics):
        clients = np.asarray(metrics.client)
        came = [arrived(federation.data, k, t) for k in clients]
        missing += sum(not len(y) for _, y in came)
        models, losses, seen = [], [], []
        for x, y in came:
            seen.append(len(y))
            if not len(y):
                models.append(w)
                continue
            loss, slope = oracle.loss_and_gradient(w, x, y)
            losses.append(loss * len(y))
            models.append([a - LR * g for a, g in zip(w, slope, strict=True)])
        w = oracle.average(models, [1.0 if equal else float(n) for n in seen])
        assert int(metrics.samples) == sum(seen)
        np.testing.assert_allclose(metrics.loss, sum(losses) / sum(seen), rtol=1e-5)
        for a, b in zip(oracle.layers_of(ours.servers[t]), w, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert missing  # some streams end before the run


def test_every_sample_comes_in_once(federation: Federation) -> None:
    """By two epochs in lanes as without; after the last of them nothing moves."""
    rounds = -(-max(SIZES) // 7) + 1
    data = streamed(federation.data, 7)
    twice = local(2).change(epochs=2.0)
    lanes = fs.make_execution(devices=1, lanes=3)
    ours, theirs = (
        play(fs.fedavg(twice, clients_per_round=8).on(e), MODEL, data, rounds)
        for e in (ONE["execution"], lanes)
    )
    assert sum(int(m.samples) for m in ours.metrics) == 2 * sum(SIZES)
    assert int(ours.metrics[-1].samples) == 0
    assert float(ours.metrics[-1].loss) == 0
    assert_trees(ours.servers[-1], ours.servers[-2])
    assert_trees(ours.final, theirs.final, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_stream_of_all_is_the_first_round(federation: Federation) -> None:
    """Personal models too are made of the samples that have come in, at the rate of that round."""
    method = fs.fedavg(local(), clients_per_round=COHORT).on(ONE["execution"])
    first = local().change(rate_by_round=lambda t: (t < 1).astype(np.float32))
    method = method.replace(personal=fs.personal.fine_tuned(first))
    stream = streamed(federation.data, max(SIZES))
    whole, once = play(method, MODEL, federation.data, 1), play(method, MODEL, stream, 2)
    for run in once.servers:
        assert_trees(run, whole.final)

    def own(state: Any, data: ClientData) -> Any:
        key, tasks = jax.random.key(0), np.zeros(len(SIZES), np.int32)
        return method.score_personal(key, state, data, lambda _, model, __: model, (), tasks)

    found = own(once.states[0], stream)
    assert_trees(found, own(whole.states[0], federation.data), rtol=1e-5, atol=1e-6)
    moved = fs.tree.norms(fs.tree.subtract(found, fs.tree.stack_copies(once.servers[0], 8)))
    assert (np.asarray(moved) > 0).all()


@pytest.mark.parametrize("each", [10**6, 7])
def test_streams_end_for_good(federation: Federation, each: int) -> None:
    """Rounds times samples may be beyond 32 bits."""
    data, clients = jax.tree.map(jnp.asarray, streamed(federation.data, each)), jnp.arange(8)
    sizes = [client_sizes(data, clients, jnp.int32(t)).tolist() for t in (1, 2148, 2**30)]
    assert sizes == [[max(min(n - each, each), 0) for n in SIZES], [0] * 8, [0] * 8]
    visit = fs.tree.take(visits(data, clients), jnp.int32(4))
    view = visit.view(samples_of(data), data, jnp.int32(2148))
    assert (int(view.start), int(view.size)) == (int(data.start[5]), 0)


def method_of(name: str, **options: Any) -> fs.Algorithm:
    return ALGORITHMS[name](local(), **({"clients_per_round": COHORT} | options))


REFUSED: dict[str, tuple[Callable[[], fs.Algorithm], str]] = {
    "a poll": (
        lambda: method_of("power_of_choice", objective=RISK, candidates=6),
        "samples_per_round needs methods that read a client's samples only while it trains",
    ),
    "peers": (
        lambda: method_of("fedmix", objective=RISK),
        "samples_per_round needs methods that read a client's samples only while it trains",
    ),
    "a finish": (
        lambda: method_of("ccvr", model=MODEL, classes=3),
        "samples_per_round needs methods that read a client's samples only while it trains",
    ),
    "models that return later": (
        lambda: method_of(
            "fedbuff", clients_per_round=4, buffer_size=2, clock=fs.clock.simulated(0.5)
        ),
        "samples_per_round needs models that return in the round in which they left, flight is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_see_more_is_refused(case: str, federation: Federation) -> None:
    make, message = REFUSED[case]
    data = streamed(federation.data, EACH)
    variables, method = MODEL.init(jax.random.key(0)), make()
    with pytest.raises(ValueError, match=re.escape(message)):
        method.traffic(variables, data)


def test_what_cannot_stream(federation: Federation) -> None:
    with pytest.raises(ValueError, match="samples_per_round must be at least 1, got 0"):
        streamed(federation.data, 0)
    with pytest.raises(ValueError, match=r"samples_per_round must be a whole number, got 1\.5"):
        streamed(federation.data, 1.5)  # type: ignore[arg-type]
    y = np.repeat(np.arange(2), [9, 1])
    copied = fs.data.fedaug(y, fs.partition.iid(y, 1, seed=0), 0.0).partition
    with pytest.raises(ValueError, match="samples_per_round needs clients without copies"):
        streamed(fs.client_data(np.zeros((10, 6)), y, copied), 2)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--dataset digits --model logistic --partition iid --clients 4 --rounds 2 --seeds 1"
    argv = [*tiny.split(), "--epochs", "1", "--algo", "fedavg"]
    main([*argv, "--samples-per-round", "3", "--dry-run"])
    dry = capsys.readouterr().out
    assert "1.0" in dry.split("fedavg", 1)[1].splitlines()[0]  # one step, of three samples
    assert main([*argv, "--samples-per-round", "3", "--fedaug", "0"]) == 2
    assert "--samples-per-round needs clients without copies" in capsys.readouterr().err
