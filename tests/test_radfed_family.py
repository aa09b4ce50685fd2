"""The RADFed family: importance, idle slots, RADFed+ against plain NumPy, and the divergences."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import (
    Federation,
    Play,
    altered_data,
    assert_trees,
    largest_change,
    make_federation,
    play,
    promising,
)
from scipy import stats

import fedjax_sim as fs
from fedjax_sim import diagnostics, flight, redistribution, selection, weighting
from fedjax_sim.algorithms import phase_shift, radfed, radfeda, radfedi, radfedm, radfedp
from fedjax_sim.base import (
    Batch,
    ClientData,
    ClientView,
    Cohort,
    LocalInfo,
    LocalUpdate,
    Variables,
)
from fedjax_sim.client.reports import Kind, squared_gradient, with_importance
from fedjax_sim.round import compose

LR, BATCH, EPOCHS = 0.1, 5, 2
ALL = {  # every option of RADFed+ at once
    "importance": "minibatch",
    "gamma": 0.7,
    "mu": 0.3,
    "alpha": 0.6,
    "server_optimizer": "adam",
    "server_lr": 0.2,
    "tau": 0.02,
    "v0": 0.01,
}


@pytest.fixture(scope="module")
def model(models: dict[str, fs.Model]) -> fs.Model:
    return models["logistic"]


def sgd(model: fs.Model, **options: Any) -> LocalUpdate:
    settings = {"batch_size": BATCH, "epochs": EPOCHS, **options}
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), **settings)


def view(federation: Federation, client: int) -> ClientView:
    data = federation.data
    start, end = data.start[client], data.start[client + 1]
    x, y, index, first, size = map(jnp.asarray, (data.x, data.y, data.index, start, end - start))
    return ClientView(x, y, index, first, size, data.capacity, id=jnp.int32(client))


# ---- NumPy ----


def rows_of(data: ClientData, client: int) -> np.ndarray:
    return np.asarray(data.index[data.start[client] : data.start[client + 1]])


def numpy_score(layers: oracle.Layers, data: ClientData, client: int, size: int) -> float:
    """Mean squared norm of the gradients of batches of ``size`` in the stored order."""
    rows = rows_of(data, client)
    norms = []
    for i in range(0, len(rows), size):
        batch = rows[i : i + size]
        _, grads = oracle.loss_and_gradient(layers, data.x[batch], data.y[batch])
        norms.append(sum(float((g**2).sum()) for g in grads))
    return float(np.mean(norms))


def numpy_train(
    key: Any, rows: np.ndarray, data: ClientData, received: oracle.Layers, mu: float = 0.0
) -> oracle.Layers:
    """Epochs of SGD on these rows, with a proximal term towards what was received."""
    layers, n = [a.copy() for a in received], len(rows)
    for e in range(EPOCHS):
        epoch_key = jax.random.fold_in(key, e)
        order = np.asarray(oracle._shuffled(epoch_key, jnp.int32(n), len(data.x)))[:n]
        for b in range(math.ceil(n / BATCH)):
            mine = rows[order[b * BATCH : (b + 1) * BATCH]]
            _, grads = oracle.loss_and_gradient(layers, data.x[mine], data.y[mine])
            layers = [
                w - LR * (g + mu * (w - w0))
                for w, g, w0 in zip(layers, grads, received, strict=True)
            ]
    return layers


class NumpyServer:
    """Mixing and the adaptive optimisers, coordinate by coordinate."""

    def __init__(self, layers: oracle.Layers, options: dict[str, Any]) -> None:
        self.w, self.options = layers, options
        self.m = [np.zeros_like(a) for a in layers]
        self.v = [np.full_like(a, options.get("v0", 0.0)) for a in layers]

    def take(self, slots: list[oracle.Layers]) -> None:
        kind, o = self.options.get("server_optimizer"), self.options
        mean = oracle.average(slots, [1.0] * len(slots))
        for i, target in enumerate(mean):
            delta = o.get("alpha", 1.0) * (target - self.w[i])
            if kind is None:
                self.w[i] = self.w[i] + delta
                continue
            self.m[i] = 0.9 * self.m[i] + 0.1 * delta
            square = delta**2
            if kind == "adagrad":
                self.v[i] = self.v[i] + square
            elif kind == "adam":
                self.v[i] = 0.99 * self.v[i] + 0.01 * square
            else:
                self.v[i] = self.v[i] - 0.01 * square * np.sign(self.v[i] - square)
            self.w[i] = self.w[i] + o["server_lr"] * self.m[i] / (np.sqrt(self.v[i]) + o["tau"])


def numpy_radfed(
    run: Play, initial: Variables, data: ClientData, m: int, inner: int, options: dict[str, Any]
) -> tuple[list[oracle.Layers], list[np.ndarray]]:
    """RADFed+, Algorithm 2, with the clients that were drawn: server models and p by round."""
    chance = oracle.Oracle(data, initial, LR, 0.0, BATCH, EPOCHS)
    server = NumpyServer(oracle.layers_of(initial), options)
    clients = len(data.start) - 1
    p = np.array([numpy_score(server.w, data, k, BATCH) for k in range(clients)])
    servers, scores = [], []
    slots: list[oracle.Layers] = []
    for t, state in enumerate(run.states):
        if t % inner == 0:
            slots, trained = [list(server.w)] * m, [False] * m
        else:
            order = chance.permutation(t, m)
            slots, trained = [slots[j] for j in order], [trained[j] for j in order]
        for i, k in enumerate(np.asarray(state.slots.client)):
            if k == clients:
                continue
            key = jax.random.fold_in(chance.key(t, 2), int(k))
            rows = rows_of(data, k)
            slots[i] = numpy_train(key, rows, data, slots[i], options.get("mu", 0.0))
            trained[i] = True
            gamma = options.get("gamma", 0.0)
            p[k] = (1 - gamma) * p[k] + gamma * numpy_score(slots[i], data, k, BATCH)
        if t % inner == inner - 1:
            server.take([w for w, seen in zip(slots, trained, strict=True) if seen])
        servers.append(list(server.w))
        scores.append(p.copy())
    return servers, scores


def make(model: fs.Model, m: int, inner: int, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {"objective": fs.empirical_risk(model)}
    made = radfed(sgd(model), clients_per_round=m, redistribution_rounds=inner, **given | options)
    return made.on(fs.make_execution(devices=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ALL | {"active_clients": 2},
        {"server_optimizer": "adagrad", "beta1": 0.9, "server_lr": 0.3, "tau": 0.1, "v0": 0.0},
        {"alpha": 0.3, "importance": "minibatch", "gamma": 0.4},
    ],
    ids=["all at once, idle slots", "adagrad", "mixing, importance"],
)
def test_against_numpy(federation: Federation, model: fs.Model, options: dict[str, Any]) -> None:
    m, inner, data = 3, 2, federation.data
    algorithm = make(model, m, inner, **options)
    if "active_clients" in options:
        algorithm = algorithm.on(fs.make_execution(devices=2))
    run = play(algorithm, model, data, 4)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    servers, scores = numpy_radfed(run, initial, data, m, inner, options)
    for state, layers, p in zip(run.states, servers, scores, strict=True):
        for ours, theirs in zip(oracle.layers_of(state.server), layers, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-5)
        if "importance" in options:
            np.testing.assert_allclose(state.selection, p, rtol=2e-3, atol=1e-5)


# ---- importance ----


@pytest.mark.parametrize("kind", ["minibatch", "sample"])
def test_score_at_the_trained_weights(federation: Federation, model: fs.Model, kind: Kind) -> None:
    score = squared_gradient(fs.empirical_risk(model), BATCH, kind)
    local = with_importance(sgd(model), score).change(epochs=1)  # the change keeps the wrapper
    variables = model.init(jax.random.key(3))
    train = jax.jit(lambda client: local.train(jax.random.key(1), variables, client, *NOTHING))
    for client in (3, 4):  # 17 and 40 samples: a short last batch, and none
        trained = train(view(federation, client))
        layers = oracle.layers_of(trained.variables)
        expected = numpy_score(layers, federation.data, client, BATCH if kind == "minibatch" else 1)
        np.testing.assert_allclose(trained.info.extra["importance"], expected, rtol=1e-4)
        before = numpy_score(oracle.layers_of(variables), federation.data, client, BATCH)
        assert abs(before - expected) > 1e-2 * expected
    none = dataclasses.replace(view(federation, 0), size=jnp.int32(0))
    assert float(train(none).info.extra["importance"]) == 0.0


NOTHING: Any = (((), ()), ((), ()))


def test_first_pass_scores_every_client(federation: Federation, model: fs.Model) -> None:
    """On 1 and on 4 devices, of 8 clients and of 7 (of whose 8 rows one is padding)."""
    score = squared_gradient(fs.empirical_risk(model), BATCH)
    variables = model.init(jax.random.key(0))
    for sizes in ((1, 3, 16, 17, 40, 5, 33, 8), (1, 3, 16, 17, 40, 5, 33)):
        data = make_federation(sizes).data
        layers = oracle.layers_of(variables)
        expected = [numpy_score(layers, data, k, BATCH) for k in range(len(sizes))]
        for devices in (1, 4):
            execution = fs.make_execution(devices)
            start = jax.jit(selection.importance(score).init, static_argnums=2)
            p = start(variables, jax.device_put(data, execution.replicated), execution)
            np.testing.assert_allclose(p, expected, rtol=1e-5)


def drawn(chosen: Any, p: jax.Array, slots: int, draws: int = 30_000) -> np.ndarray:
    """Clients of every slot, ``int32[draws, S]``."""
    data = make_federation((1,) * len(p)).data
    zeros, every = jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool)
    draw = jax.jit(jax.vmap(lambda key: chosen.draw(key, p, data, zeros, every, zeros)[0]))
    return np.asarray(draw(jax.random.split(jax.random.key(5), draws)))


def pairs_pvalue(cohorts: np.ndarray, p: np.ndarray) -> float:
    """Of a chi-square test that ordered pairs are drawn one after another, each ∝ p."""
    n, share = len(p), np.asarray(p, np.float64) / np.sum(p, dtype=np.float64)
    cells = [(i, j) for i in range(n) for j in range(n) if i != j and share[i] * share[j] > 0]
    expected = [share[i] * share[j] / (1 - share[i]) for i, j in cells]
    found = [np.sum((cohorts[:, 0] == i) & (cohorts[:, 1] == j)) for i, j in cells]
    assert sum(found) == len(cohorts)
    return float(stats.chisquare(found, np.array(expected) * len(cohorts)).pvalue)


def test_draws_are_proportional_to_p() -> None:
    p = np.array([0.1, 3.0, 0.5, 1.0, 2.0], np.float32)
    cohorts = drawn(selection.importance(no_score), jnp.asarray(p), 2)
    assert pairs_pvalue(cohorts, p) > 1e-3
    assert pairs_pvalue(cohorts, np.ones(5)) < 1e-9  # the test can tell


def test_no_update_from_ones_is_uniform() -> None:
    chosen = selection.importance(no_score, gamma=0.0, initial="ones")
    data = make_federation((1,) * 5).data
    nothing: Any = None
    p = chosen.init(nothing, data, nothing)
    p = chosen.update(p, jnp.array([0, 3]), reports(importance=jnp.array([9.0, 7.0])))
    assert pairs_pvalue(drawn(chosen, p, 2), np.ones(5)) > 1e-3


def reports(rows: int = 2, **extra: jax.Array) -> LocalInfo:
    none = jnp.zeros(rows, jnp.int32)
    return LocalInfo(jnp.zeros(rows), none, none, extra)


def test_clients_without_a_gradient_come_last() -> None:
    cohorts = drawn(selection.importance(no_score), jnp.array([0.0, 1.0, 0.0, 1.0]), 3, 200)
    assert set(cohorts[:, :2].ravel()) == {1, 3}
    assert set(cohorts[:, 2]) == {0, 2}  # either of them: no rank by number


def test_update_is_a_loop_over_who_trained() -> None:
    clients, scores = np.array([4, 6, 1, 6]), np.array([2.0, np.nan, 8.0, np.nan], np.float32)
    p = np.arange(1.0, 7.0, dtype=np.float32)
    expected = p.copy()
    for k, q in zip(clients, scores, strict=True):
        if k < len(p):  # 6 is no client
            expected[k] = 0.25 * p[k] + 0.75 * q
    info = reports(4, importance=jnp.asarray(scores))
    update = selection.importance(no_score, gamma=0.75).update
    np.testing.assert_array_equal(update(jnp.asarray(p), jnp.asarray(clients), info), expected)


def no_score(variables: Variables, client: ClientView) -> jax.Array:
    raise AssertionError("not asked for")


# ---- idle slots ----


@pytest.fixture(scope="module")
def partly_idle(federation: Federation, model: fs.Model) -> Play:
    """5 models, of which 2 train in a round; aggregated after 4 rounds."""
    return play(make(model, 5, 4, active_clients=2), model, federation.data, 8)


def test_visits_differ_by_at_most_one(partly_idle: Play) -> None:
    for t, state in enumerate(partly_idle.states):
        visits = np.asarray(state.slots.visits)
        assert visits.sum() == 2 * (t % 4 + 1)
        assert visits.max() - visits.min() <= 1
        metrics = partly_idle.metrics[t]
        assert int(metrics.visits) == int(metrics.uploads) == 2
        assert (np.asarray(state.slots.client) < 8).sum() == 2


def test_who_is_idle_is_random(partly_idle: Play) -> None:
    active = [tuple(np.flatnonzero(s.slots.client < 8).tolist()) for s in partly_idle.states]
    assert len(set(active)) > 2


def test_an_idle_model_stays(federation: Federation, partly_idle: Play) -> None:
    for t in (1, 2, 3):
        before, after = partly_idle.states[t - 1].slots, partly_idle.states[t].slots
        source = oracle.Oracle(federation.data, None, LR, 0.0, BATCH, EPOCHS).permutation(t, 5)
        for slot in np.flatnonzero(after.client == 8).tolist():
            old, new = (
                jax.tree.map(lambda a, i=i: a[i], s.variables)
                for s, i in ((before, source[slot]), (after, slot))
            )
            assert_trees(old, new)


def test_an_idle_model_keeps_its_last_report(federation: Federation, partly_idle: Play) -> None:
    """What the server knows of it when it is due."""
    reported = 0
    for t in (1, 2, 3):
        before, after = partly_idle.states[t - 1].slots, partly_idle.states[t].slots
        source = oracle.Oracle(federation.data, None, LR, 0.0, BATCH, EPOCHS).permutation(t, 5)
        for slot in np.flatnonzero(after.client == 8).tolist():
            last = jax.tree.map(lambda a, i=source[slot]: a[i], before.info)
            assert_trees(jax.tree.map(lambda a, i=slot: a[i], after.info), last)
            reported += int(last.samples) > 0
    assert reported > 3


def test_a_model_that_nobody_trained_does_not_count(
    federation: Federation, model: fs.Model
) -> None:
    """Of 5 models 2 train in each of 2 rounds: one is the server's own, and pulls nothing back.

    What is scored is the mean of those in flight, as by the authors.
    """
    algorithm = make(model, 5, 2, active_clients=2)
    run = play(algorithm, model, federation.data, 2)
    evaluated = jax.jit(algorithm.evaluated)
    for t, state in enumerate(run.states):
        trained = np.asarray(state.slots.visits) > 0
        assert trained.sum() == 2 * (t + 1)
        mean = jax.tree.map(lambda a, w=trained: np.asarray(a)[w].mean(0), state.slots.variables)
        scored = evaluated(jax.random.key(0), state, federation.data)
        assert_trees(scored, mean, 1e-5, 1e-6)
        if t == 1:
            assert_trees(state.server, mean, 1e-5, 1e-6)


def test_all_models_count_equally(partly_idle: Play) -> None:
    slots = partly_idle.states[3].slots
    chex.assert_axis_dimension(slots.client, 0, 5)
    mean = jax.tree.map(lambda a: np.asarray(a).mean(axis=0), slots.variables)
    assert_trees(partly_idle.servers[3], mean, 1e-6, 1e-7)


# ---- what is scored ----


@pytest.mark.slow
def test_the_mean_in_flight_is_scored_after_every_round(
    federation: Federation, model: fs.Model
) -> None:
    """Against a loop by hand, in which one model after another trains and is then averaged."""
    m, inner, rounds = 3, 3, 5
    x, y = federation.test
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    chance = oracle.Oracle(federation.data, initial, LR, 0.0, BATCH, EPOCHS)
    server = oracle.layers_of(initial)
    losses, stale = [], []
    slots: list[oracle.Layers] = []
    for t in range(rounds):
        cohort = sorted(chance.draw(t, m, []))
        if t % inner == 0:
            slots = [server] * m
        else:
            slots = [slots[j] for j in chance.permutation(t, m)]
            cohort = chance.dealt(t, cohort)
        slots = [chance.train(t, k, w) for k, w in zip(cohort, slots, strict=True)]
        now = oracle.average(slots, [1.0] * m)
        server = now if t % inner == inner - 1 else server
        losses.append(oracle.loss_and_gradient(now, x, y)[0])
        stale.append(oracle.loss_and_gradient(server, x, y)[0])
    execution = fs.make_execution(devices=1)
    result = fs.simulate(
        make(model, m, inner, evaluated="in_flight").on(execution), model, federation.data,
        federation.test, rounds=rounds, classes=3, execution=execution,
    )  # fmt: skip
    ours = [float(e.test_loss[0]) for e in result.evaluations]
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    assert np.abs(np.subtract(losses, stale))[:2].min() > 0.05  # the server model is another one


# ---- drift correction ----


@pytest.mark.slow
def test_drift_correction_weighs_by_samples_and_not_by_copies(
    federation: Federation, model: fs.Model
) -> None:
    """N_t / (n_k + N_t) of the server's, n_k without what FedAug added; nothing is trained here."""
    index, start = np.asarray(federation.data.index), np.asarray(federation.data.start)
    total = len(federation.data.x)
    lists = np.split(index, start[1:-1])
    copied = [np.append(rows, np.repeat(rows + total, k)) for k, rows in enumerate(lists)]
    data = altered_data(
        federation.data,
        index=np.concatenate(copied).astype(np.int32),
        start=np.cumsum([0, *map(len, copied)]).astype(np.int32),
        budget=federation.sizes.astype(np.int32),
        capacity=max(map(len, copied)),
        copies=True,
    )
    still = sgd(model).change(optimizer=optax.sgd(0.0), epochs=1)
    algorithm = phase_shift(still, clients_per_round=4, phases=2).on(fs.make_execution(devices=1))
    data, key = jax.device_put(data), jax.random.key(0)
    state = algorithm.init(key, model.init(key), data)
    state, _ = jax.jit(algorithm.step)(key, state, data)  # the first two are due
    far = jax.tree.map(lambda a: a + 4, state.server)
    state = state._replace(server=far, server_samples=jnp.float32(20))
    after, _ = jax.jit(algorithm.step)(jax.random.key(1), state, data)
    clients = np.asarray(after.slots.client)[2:]
    assert clients.tolist() == np.asarray(state.slots.client)[2:].tolist()
    assert (clients > 0).any()  # who has copies
    share = 20 / (20 + federation.sizes[clients])
    for new, old, w in zip(
        *(jax.tree.leaves(t) for t in (after.slots.variables, state.slots.variables, far)),
        strict=True,
    ):
        pull = share.reshape(-1, *[1] * (np.ndim(new) - 1))
        wanted = pull * np.asarray(w)[None] + (1 - pull) * np.asarray(old)[2:]
        np.testing.assert_allclose(new[2:], wanted, rtol=1e-5)


# ---- names ----


NAMED: dict[str, tuple[Callable[..., fs.Algorithm], dict[str, Any]]] = {
    "radfedi": (radfedi, {"importance": "minibatch"}),
    "radfedp": (radfedp, {"mu": 0.01}),
    "radfedm": (radfedm, {"alpha": 0.9}),
    "radfeda": (radfeda, {"server_optimizer": "adam"}),
}


@pytest.mark.parametrize("name", NAMED)
def test_names_are_options_of_radfed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter arrives; of the defaults only the method's own differ from radfed's."""
    monkeypatch.setattr(
        "fedjax_sim.algorithms._radfed_plus.radfed", lambda local, **options: (local, options)
    )
    function, own = NAMED[name]
    function = inspect.unwrap(function)  # what it returns here cannot have an origin
    parameters = inspect.signature(function).parameters
    given = {key: object() for key in parameters if key != "local"}
    local, found = object(), cast("Any", function)
    assert found(local, **given) == (local, given)
    of_radfed = inspect.signature(radfed).parameters
    assert own == {
        key: p.default
        for key, p in parameters.items()
        if key != "objective" and p.default != of_radfed[key].default
    }


@pytest.mark.slow
def test_options_switched_off_are_radfed(
    federation: Federation, model: fs.Model, watched: Play
) -> None:
    """To the bit, like the same parts with diagnostics, which only look."""
    on_all = fs.make_execution()
    off = make(model, 5, 4, mu=0.0, alpha=1.0, active_clients=5).on(on_all)
    run = play(off, model, federation.data, 5)
    assert_trees(run.servers, watched.servers[:5])


ERRORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no objective": (
        lambda local: radfed(local, clients_per_round=3, importance="sample"),
        "objective must be given for importance 'sample', got None",
    ),
    "active": (
        lambda local: radfed(local, clients_per_round=3, active_clients=4),
        "active_clients must be in 1..3, got 4",
    ),
    "peers": (
        lambda local: diagnostics.central_divergence(local.change(peers=True)),
        "local must do without the other clients' samples for the centralised twin",
    ),
    "sticky": (
        lambda _: selection.uniform(sticky=True, active=2),
        "active must be None if slots keep their clients, got 2",
    ),
    "slots": (
        lambda _: drawn(selection.uniform(active=3), jnp.ones(5), 2, 1),
        "active must be at most the 2 slots, got 3",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(model: fs.Model, case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make(sgd(model))


# ---- divergences ----


def stack(rows: int) -> Variables:
    keys = jax.random.split(jax.random.key(2))
    return Variables(
        {"a": jax.random.normal(keys[0], (rows, 3, 2)), "b": jax.random.normal(keys[1], (rows, 4))},
        {"mean": jnp.ones((rows, 4))},
    )


def cohort(clients: list[int], data: ClientData, server: Any = None) -> Cohort:
    client, none = jnp.array(clients, jnp.int32), cast("Any", None)
    return Cohort(server, none, client, client < data.clients, none, none, (), data)


@jax.jit
def divergence(models: Variables, where: Cohort) -> jax.Array:
    measure, server = diagnostics.model_divergence().measure, cast("Any", None)
    return measure(jax.random.key(0), (), server, models, where)[0]["DL"]


def test_model_divergence_is_the_mean_over_pairs(federation: Federation) -> None:
    data, models = jax.device_put(federation.data), stack(4)
    flat = np.concatenate([np.asarray(a).reshape(4, -1) for a in models.params.values()], axis=1)
    pairs = [
        1 - flat[i] @ flat[j] / (np.linalg.norm(flat[i]) * np.linalg.norm(flat[j]))
        for i in range(4)
        for j in range(i)
    ]
    ours = divergence(models, cohort([5, 0, 2, 7], data))
    np.testing.assert_allclose(ours, np.mean(pairs), rtol=1e-5)
    order = jnp.array([2, 0, 3, 1])
    shuffled = jax.tree.map(lambda a: a[order], models)
    np.testing.assert_allclose(divergence(shuffled, cohort([2, 5, 7, 0], data)), ours, rtol=1e-6)
    absent = jax.tree.map(lambda a: jnp.concatenate([a, a[:1] * jnp.nan]), models)
    padded = divergence(absent, cohort([5, 0, 2, 7, 8], data))
    np.testing.assert_allclose(padded, ours, rtol=1e-6)
    alone = divergence(models, cohort([8, 0, 8, 8], data))
    assert float(alone) < 1e-12
    near = jax.tree.map(lambda a: a[:1] + 1e-6 * a, models)
    flat = np.concatenate(
        [np.asarray(a, np.float64).reshape(4, -1) for a in near.params.values()], 1
    )
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    exact = np.sum((unit - unit.mean(axis=0)) ** 2) / 3
    np.testing.assert_allclose(divergence(near, cohort([0, 1, 2, 3], data)), exact, rtol=0.2)


def diagnosed(local: LocalUpdate, m: int, inner: int, **options: Any) -> fs.Algorithm:
    return compose(
        local,
        selection=selection.uniform(),
        clients_per_round=m,
        flight=flight.delayed(inner, redistribution=redistribution.permute),
        weighting=weighting.equal,
        diagnostics={
            "DL": diagnostics.model_divergence(),
            "DC": diagnostics.central_divergence(local),
        },
        **options,
    )


@pytest.fixture(scope="module")
def watched(federation: Federation, model: fs.Model) -> Play:
    """5 models, aggregated after 4 rounds, both diagnostics; 4 devices have 8 rows for them."""
    return play(diagnosed(sgd(model), 5, 4), model, federation.data, 16)


def test_divergence_is_a_saw_tooth(watched: Play) -> None:
    """Every aggregation lowers DL, and the round right after it has the least, over the cycles.

    The first cycle starts from a random model: its first round has no aggregation before it.
    """
    found = np.array([float(m.diagnostics["DL"]) for m in watched.metrics]).reshape(-1, 4)
    assert (found[1:, 0] < found[:-1, -1]).all()
    assert found[1:].mean(axis=0).argmin() == 0
    assert all(float(m.diagnostics["DC"]) > 0 for m in watched.metrics)


def flattened(layers: oracle.Layers) -> np.ndarray:
    return np.concatenate([a.ravel() for a in layers])


def test_central_divergence_against_numpy(
    federation: Federation, model: fs.Model, watched: Play
) -> None:
    data = federation.data
    chance = oracle.Oracle(data, None, LR, 0.0, BATCH, EPOCHS)
    twin = oracle.layers_of(model.init(jax.random.fold_in(jax.random.key(0), 0)))
    for t, state in enumerate(watched.states[:6]):
        cohort = sorted(np.asarray(state.slots.client).tolist())
        rows = np.concatenate([rows_of(data, k) for k in cohort])
        twin = numpy_train(chance.key(t, 7), rows, data, twin)  # DC is the second diagnostic
        federated = state.server
        if t != 3:  # no aggregation
            federated = jax.tree.map(lambda a: a.mean(axis=0), state.slots.variables)
        gap = flattened(oracle.layers_of(federated)) - flattened(twin)
        expected = np.linalg.norm(gap) / np.linalg.norm(flattened(twin))
        np.testing.assert_allclose(watched.metrics[t].diagnostics["DC"], expected, rtol=2e-3)


@pytest.mark.slow
def test_one_client_with_everything_does_not_diverge(model: fs.Model) -> None:
    """Full batches, so that the order of samples does not matter."""
    lone = make_federation((20,))
    run = play(diagnosed(sgd(model, batch_size=20), 1, 2), model, lone.data, 4)
    for metrics in run.metrics:
        assert float(metrics.diagnostics["DC"]) < 1e-6
        assert float(metrics.diagnostics["DL"]) < 1e-12  # a model alone


def test_the_twin_alters_copies_and_trains_within_the_budgets(
    federation: Federation, model: fs.Model
) -> None:
    """On the two clients' lists, one behind the other, as a client of its own would."""
    total = len(federation.data.x)
    data = dataclasses.replace(
        jax.device_put(federation.data),
        index=jnp.array([0, 1, 2, total + 1, total + 2, 3, 4, total + 3], jnp.int32),
        start=jnp.array([0, 5, 8], jnp.int32),
        budget=jnp.array([3, 2], jnp.int32),
        capacity=5,
        copies=True,
    )

    def negative(key: jax.Array, batch: Batch, client: ClientView) -> Batch:
        assert batch.copy is not None
        return batch._replace(x=jnp.where(batch.copy[:, None], -batch.x, batch.x))

    local, key = sgd(model, batch_size=2, transforms=(negative,)), jax.random.key(3)
    start = model.init(jax.random.key(0))
    models = jax.tree.map(lambda a: jnp.stack([a, a, a * jnp.nan]), start)
    here = cohort([1, 0, 2], data, start)
    diagnostic = diagnostics.central_divergence(local)
    _, twin = jax.jit(diagnostic.measure)(key, diagnostic.init(start, data), start, models, here)

    def trained(**fields: Any) -> Variables:
        own = {"start": jnp.int32(0), "size": jnp.int32(8), "capacity": 8, "copies": True}
        own |= {"budget": jnp.int32(5), **fields}
        client = ClientView(data.x, data.y, data.index, **own)
        kept = local.client_state(start), local.shared_state(start)
        return jax.jit(local.train)(key, start, client, *kept).variables

    assert_trees(twin.variables, trained())
    assert largest_change(twin.variables, trained(budget=None)) > 1e-3


def test_an_idle_slot_takes_no_correction() -> None:
    """Its client has no samples, and before the first aggregation nor has the server: 0 / 0."""
    easy = make_federation((12, 20, 16, 33, 9, 24, 18, 16))
    model = fs.models.logistic((6,), easy.classes)
    unasked = promising(flight.drift_correction(), needs=())  # it asks for slots that never rest
    algorithm = fs.compose(
        fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=8),
        selection=selection.uniform(active=3),
        clients_per_round=4,
        flight=flight.delayed(3, refresh=unasked),
        weighting=weighting.equal,
    )
    final = play(algorithm, model, easy.data, 4).final
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final))
