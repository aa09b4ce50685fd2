"""Epochs, learning rates and minibatches of each client, stragglers, and data that drift."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, assert_trees, make_federation, play, rejects

import fedjax_sim as fs
from fedjax_sim import corrections, flight
from fedjax_sim.base import Batch, ClientView, LocalUpdate
from fedjax_sim.client import own_settings
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.round import placement, timing, traffic

LR, COHORT, ROUNDS, E, CHANCE = 0.05, 5, 4, 3, 0.5
EPOCHS = (1, 3, 2.5, 4, 1, 0.5, 3, 2)
WHOLE = (1, 3, 2, 4, 1, 5, 3, 2)
RATES = (1.0, 0.5, 2.0, 1.5, 0.25, 1.0, 3.0, 0.75)
BATCHES = (16, 3, 8, 16, 1, 7, 4, 12)
ONE = fs.make_execution(devices=1)
MODEL = fs.models.logistic((6,), 3)
CLOCK = fs.clock.simulated(1.0)  # a second for each step


def update(momentum: float | None = None, **settings: Any) -> LocalUpdate:
    optimizer = optax.sgd(LR, momentum=momentum)
    return fs.local_sgd(fs.empirical_risk(MODEL), optimizer, **settings)


def swapped(key: Any, batch: Batch, client: Any) -> Batch:
    return batch._replace(y=(batch.y + client.id) % 3)


def view(data: fs.ClientData, client: int) -> ClientView:
    task = visits(data, jnp.array([client], jnp.int32))
    return jax.tree.map(lambda a: a[0], task).view(samples_of(data), data)


OWN: dict[str, Any] = {
    "epochs": EPOCHS,
    "rate_by_client": RATES,
    "batch_by_client": BATCHES,
    "stragglers": CHANCE,
    "transforms": (fs.augment.drifting(swapped, lambda t: t >= 2),),
}


@functools.cache
def run_on(**options: Any) -> Any:
    made = fs.fedavg(update(0.9, **OWN), clients_per_round=COHORT).replace(clock=CLOCK)
    return play(made.on(fs.make_execution(**options)), MODEL, make_federation().data, ROUNDS)


def slow(federation: Federation, momentum: float) -> oracle.Oracle:
    initial = MODEL.init(jax.random.fold_in(jax.random.key(0), 0))
    return oracle.Oracle(federation.data, initial, LR, momentum, 16, 1)


class Drifted(oracle.Oracle):
    """From the third round on, client k sees class y as y + k."""

    round = 0

    def minibatch(self, layers: Any, client: int, mine: Any, key: Any) -> Any:
        y = self.data.y[mine]
        y = (y + client) % 3 if self.round >= 2 else y
        return oracle.loss_and_gradient(layers, self.data.x[mine], y)


def test_own_settings_against_numpy(federation: Federation) -> None:
    """Clients of 1 to 40 samples; chance alone is shared, that of stragglers too."""
    theirs = Drifted(**vars_of(slow(federation, 0.9)))
    straggled = []

    def visit(t: int, k: int, server: oracle.Layers) -> oracle.Visit:
        theirs.round, theirs.epochs, theirs.lr = t, EPOCHS[k], LR * RATES[k]
        theirs.batch = BATCHES[k]
        key = jax.random.fold_in(jax.random.fold_in(theirs.key(t, 2), k), 2**31 - 10)
        slows, part = np.asarray(jax.random.uniform(key, (2,)), np.float64)
        if slows < CHANCE:
            theirs.epochs = min(EPOCHS[k], 1 + math.floor(part * (math.ceil(EPOCHS[k]) - 1)))
            straggled.append(theirs.epochs < EPOCHS[k])
        return theirs.visit(t, k, server)

    taken: list[list[int]] = []

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        taken.append([v.steps for v in visits])
        return oracle.average([v.layers for v in visits], [float(theirs.sizes[k]) for k in cohort])

    servers, _ = oracle.fedavg(theirs, ROUNDS, COHORT, visit, absorb)
    ours = run_on(devices=1)
    assert any(straggled)
    for layers, state, report, steps in zip(
        servers, ours.servers, ours.metrics, taken, strict=True
    ):
        for u, v in zip(layers, oracle.layers_of(state), strict=True):
            np.testing.assert_allclose(v, u, rtol=1e-4, atol=1e-5)
        assert int(report.steps) == sum(steps)
        assert float(report.time.seconds) == max(steps)
    assert sum(int(report.samples) for report in ours.metrics) == theirs.visited


def vars_of(run: oracle.Oracle) -> dict[str, Any]:
    names = ("data", "initial", "lr", "momentum", "batch", "epochs")
    return {name: getattr(run, name) for name in names}


@pytest.mark.parametrize(
    "options",
    [{"devices": 1, "lanes": 2}, pytest.param({"devices": 2, "chunk": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_devices_chunks_and_lanes_change_nothing(options: dict[str, Any]) -> None:
    one, other = run_on(devices=1), run_on(**options)
    assert_trees(other.servers, one.servers, rtol=2e-5, atol=2e-6)
    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert (int(a.steps), int(a.samples)) == (int(b.steps), int(b.samples))


def test_fednova_counts_the_steps_of_each_client(federation: Federation) -> None:
    run = slow(federation, 0.0)

    class Unequal(oracle.Oracle):
        def visit(self, t: int, client: int, layers: Any, *args: Any, **kw: Any) -> Any:
            self.epochs = WHOLE[client]
            return super().visit(t, client, layers, *args, **kw)

    servers, _ = oracle.fednova(Unequal(**vars_of(run)), 2, COHORT)
    local = update(epochs=np.array(WHOLE))
    made = fs.algorithms.fednova(local, clients_per_round=COHORT, lr=LR, momentum=0)
    ours = play(made.on(ONE), MODEL, federation.data, 2)
    for layers, state in zip(servers, ours.servers, strict=True):
        for u, v in zip(layers, oracle.layers_of(state), strict=True):
            np.testing.assert_allclose(v, u, rtol=1e-4, atol=1e-5)


def text_of(local: LocalUpdate, data: fs.ClientData) -> str:
    """The program of a visit."""
    start = jax.eval_shape(MODEL.init, jax.random.key(0))
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), start)
    states = local.client_state(start), local.shared_state(start)
    return str(jax.make_jaxpr(local.train)(jax.random.key(0), start, view(data, 4), *states))


@pytest.mark.parametrize("epochs", [2, 2.5])
def test_equal_settings_are_the_same_program(federation: Federation, epochs: float) -> None:
    plain = text_of(update(epochs=epochs), federation.data)
    equal = update(epochs=[epochs] * 8, rate_by_client=[1] * 8, stragglers=0.0)
    assert text_of(equal, federation.data) == plain
    assert text_of(update(epochs=EPOCHS), federation.data) != plain
    whole, floats = (update(batch_by_client=[size] * 8) for size in (4, 4.0))
    assert text_of(floats, federation.data) == text_of(whole, federation.data)
    # FedCM needs a rate that all clients have.
    half = update(rate_by_client=[0.5] * 8, corrections=(corrections.client_momentum(0.5, LR / 2),))
    fs.fedavg(half, clients_per_round=COHORT)


def test_clocks_and_lanes_expect_the_steps_of_each_client(federation: Federation) -> None:
    local, data = update(epochs=EPOCHS, batch_by_client=BATCHES), jax.device_put(federation.data)
    own = zip(EPOCHS, BATCHES, federation.sizes, strict=True)
    wanted = [round(e * math.ceil(n / b)) for e, b, n in own]
    made = fs.fedavg(local, clients_per_round=COHORT).replace(clock=CLOCK)
    key = jax.random.key(0)
    assert placement.client_steps(made.parts, federation.data).tolist() == wanted
    variables = MODEL.init(key)
    outlook = timing.outlook(made.parts, key, made.init(key, variables, data), data)
    assert outlook is not None
    assert outlook.seconds(jnp.arange(8), 1).tolist() == wanted
    late = made.replace(flight=flight.buffered(2))
    state = late.init(key, variables, data)
    size = traffic.sizes(late.parts, variables, data)
    assert timing.forecast(late.parts, state, data, size, jnp.arange(8))[1].tolist() == wanted
    for samples in (16, np.int32(16)):  # the most epochs, the smallest batches
        assert int(local.steps_for(samples)) == 4 * 16
        assert int(update(epochs=2.5).steps_for(samples)) == 2
    both = fs.local.in_turn(update(epochs=EPOCHS), update(epochs=2))
    assert [int(both.steps_for(np.int32(17), np.int32(k))) for k in (0, 1)] == [2 + 4, 6 + 4]


@pytest.mark.parametrize("epochs", [5, 2.5, 1, 0.5])
def test_stragglers_do_any_smaller_number_of_epochs(epochs: float) -> None:
    at_rest = view(make_federation().data, 0)
    client = dataclasses.replace(at_rest, coin=jax.random.key(0))
    of = functools.partial(own_settings.epochs_of, epochs, 0.6)
    assert of(jax.random.key(0), at_rest) == epochs
    drawn = jax.vmap(lambda key: of(key, client))(jax.random.split(jax.random.key(1), 4000))
    most = math.ceil(epochs) - 1
    values, counts = np.unique(np.asarray(drawn), return_counts=True)
    shares: dict[float, float] = dict.fromkeys(range(1, most + 1), 0.6 / max(most, 1))
    shares[epochs] = 0.4 if most else 1.0
    assert values.tolist() == sorted(shares)
    assert counts / 4000 == pytest.approx([shares[v] for v in values], abs=0.03)


def test_a_share_of_the_samples_drifts() -> None:
    """Of a pytree, whole rows; the share is that of the round."""

    def moved(key: Any, batch: Batch, client: Any) -> Batch:
        return batch._replace(x=jax.tree.map(lambda a: a + 1, batch.x), y=batch.y + 1)

    x = {"a": jnp.zeros((2000, 3)), "b": jnp.zeros((2000, 2, 2), jnp.uint8)}
    batch: Any = Batch(x, jnp.zeros(2000, jnp.int32), jnp.ones(2000, bool))
    drift = fs.augment.drifting(moved, optax.linear_schedule(0.0, 1.0, 4))
    for t, share in ((0, 0), (1, 0.25), (4, 1)):
        at = dataclasses.replace(view(make_federation().data, 0), round=jnp.int32(t))
        new = drift(jax.random.key(t), batch, at)
        rows = [new.y, *(a.reshape(2000, -1) for a in new.x.values())]
        assert new.x["b"].dtype == jnp.uint8
        for row in rows[1:]:
            np.testing.assert_array_equal(row, np.broadcast_to(new.y[:, None], row.shape))
        assert float(np.mean(new.y)) == pytest.approx(share, abs=0.03 * (0 < share < 1))


REJECTED: dict[str, tuple[Callable[[], Any], str]] = {
    "no epoch": (
        lambda: update(epochs=[1, 0]),
        "epochs must be above 0 and at most 10000, got 0 for client 1",
    ),
    "negative": (lambda: update(epochs=[-1.5, 2]), "at most 10000, got -1.5 for client 0"),
    "nan": (lambda: update(epochs=[1, np.nan]), "at most 10000, got nan for client 1"),
    "a table": (
        lambda: update(epochs=[[1, 2]]),
        "epochs must be a list of a number for each client, got [[1, 2]]",
    ),
    "words": (lambda: update(rate_by_client=["a"]), "rate_by_client must be a list of a number"),
    "a word": (lambda: update(epochs="5"), "a number, or one for each client, got '5'"),
    "one rate": (lambda: update(rate_by_client=2.0), "a number for each client, got 2.0"),
    "no rate": (
        lambda: update(rate_by_client=[0, 1]),
        "rate_by_client must be above 0 and finite, got 0 for client 0",
    ),
    "other lengths": (
        lambda: update(epochs=[1, 2, 3], rate_by_client=[1, 2]),
        "epochs and rate_by_client must have as many numbers, got [3, 2]",
    ),
    "a large batch": (
        lambda: update(batch_by_client=[16, 17]),
        "batch_by_client must be above 0 and at most 16, got 17 for client 1",
    ),
    "half a sample": (
        lambda: update(batch_by_client=[1.5]),
        "batch_by_client must be whole numbers, got (1.5,)",
    ),
    "private batches": (
        lambda: update(batch_by_client=[1], private=fs.local.dp_sgd(1.0, 1.0)),
        "batch_by_client must be None with private=dp_sgd(",
    ),
    "other turns": (
        lambda: fs.local.in_turn(update(epochs=[1, 2]), update(epochs=[1, 2, 3])),
        "in_turn must be of local updates with settings for the same clients, got 2 and 3",
    ),
    "drawn steps": (
        lambda: update(steps=fs.local.geometric(0.5), stragglers=0.5),
        "stragglers must be 0 if steps are drawn, got 0.5",
    ),
    "drawn epochs": (
        lambda: update(steps=fs.local.geometric(0.5), epochs=[1, 2]),
        "epochs must be one number if steps are drawn, got (1, 2)",
    ),
    "halves": (
        lambda: fs.local.loadaboost(
            update(epochs=[1, 2]), fs.reports.mean_loss(fs.empirical_risk(MODEL))
        ),
        "epochs of local must be a whole number to be halved, got (1, 2)",
    ),
    "FedNova": (
        lambda: fs.algorithms.fednova(
            update(rate_by_client=[1, 0.5]), clients_per_round=2, lr=LR, momentum=0
        ),
        "needs the optimiser that its settings assume, optax.sgd(0.05)",
    ),
    "known steps": (
        lambda: fs.fedavg(update(stragglers=0.5), clients_per_round=4).replace(
            clock=CLOCK, flight=flight.buffered(2)
        ),
        "needs local updates whose number of steps is known in advance",
    ),
    "other clients": (
        lambda: fs.fedavg(update(epochs=[1, 2]), clients_per_round=2).init(
            jax.random.key(0), MODEL.init(jax.random.key(0)), make_federation().data
        ),
        "epochs, rate_by_client and batch_by_client must have a number for each of the 8 clients",
    ),
    "the server": (
        lambda: own_settings.of_client((1, 2), None),
        "epochs, rate_by_client and batch_by_client must be equal for all clients where the server",
    ),
    "a drift at the server": (
        lambda: text_of(update(transforms=OWN["transforms"]), make_federation().data),
        "drifting needs the round number, which only clients have",
    ),
}


test_what_does_not_fit_is_rejected = rejects(REJECTED)
