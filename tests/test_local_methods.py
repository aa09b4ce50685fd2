"""FedProx, SCAFFOLD, FedNova, MFL, the adaptive servers, and what they are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import (
    Federation,
    Play,
    assert_trees,
    largest_change,
    make_federation,
    play,
    rejects,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import augment, corrections, optimizers, preaggregation, tree
from fedjax_sim.algorithms import (
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fednova,
    fedprox,
    fedyogi,
    mfl,
    parallel_sgd,
    scaffold,
)
from fedjax_sim.base import Cohort, LocalInfo, LocalUpdate, Objective
from fedjax_sim.engine.clients import samples_of, visits

LR, COHORT, ROUNDS = 0.05, 5, 4
ONE = fs.make_execution(devices=1)


def local_sgd(model: fs.Model, momentum: float = 0.9, **options: Any) -> LocalUpdate:
    options = {"epochs": 2, **options}
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR, momentum=momentum), **options)


# Against the oracle.


def averaged_kept(local: LocalUpdate, **options: Any) -> fs.Algorithm:
    return fedavg(local.change(optimizer_state="keep"), **options)


def momentum_on_server(beta: float, lr: float) -> Callable[..., np.ndarray]:
    def step(delta: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        state["v"] = beta * state.get("v", 0) + delta
        return lr * state["v"]

    return step


Slow = Callable[[oracle.Oracle], tuple[list[oracle.Layers], oracle.Layers]]
CASES: dict[str, tuple[Callable[..., fs.Algorithm], dict[str, Any], float, Slow]] = {
    "fedprox": (fedprox, {"mu": 0.7}, 0.9, lambda o: oracle.fedprox(o, ROUNDS, COHORT, 0.7)),
    "scaffold 1": (scaffold, {"option": 1}, 0.0, lambda o: oracle.scaffold(o, ROUNDS, COHORT, 1)),
    "scaffold 2, momentum": (scaffold, {}, 0.9, lambda o: oracle.scaffold(o, ROUNDS, COHORT, 2)),
    "fednova, momentum": (
        fednova, {"lr": LR, "momentum": 0.9}, 0.9, lambda o: oracle.fednova(o, ROUNDS, COHORT),
    ),
    "mfl": (mfl, {}, 0.9, lambda o: oracle.mfl(o, ROUNDS, COHORT)),
    "kept momentum": (averaged_kept, {}, 0.9, lambda o: oracle.kept(o, ROUNDS, COHORT)),
    "fedavgm": (
        fedavgm, {"server_lr": 0.6, "server_momentum": 0.5}, 0.9,
        lambda o: oracle.on_server(o, ROUNDS, COHORT, momentum_on_server(0.5, 0.6)),
    ),
}  # fmt: skip


@functools.cache
def run_of(case: str, model: fs.Model) -> Play:
    method, options, momentum, _ = CASES[case]
    execution = fs.make_execution(devices=2) if case.startswith("fednova") else ONE
    made = method(local_sgd(model, momentum), clients_per_round=COHORT, **options).on(execution)
    return play(made, model, make_federation().data, ROUNDS)


@pytest.mark.parametrize("case", CASES)
def test_oracle(federation: Federation, models: dict[str, fs.Model], case: str) -> None:
    """Clients of 1 to 40 samples, so that T_k and the last batch differ."""
    _, _, momentum, slow = CASES[case]
    model = models["logistic"]
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    theirs, _ = slow(oracle.Oracle(federation.data, initial, LR, momentum, 16, 2))
    for a, b in zip(theirs, run_of(case, model).servers, strict=True):
        for u, v in zip(a, oracle.layers_of(b), strict=True):
            np.testing.assert_allclose(v, u, rtol=1e-4, atol=1e-5)


def test_scaffold_by_a_median_under_attack(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Both that leave a client are forged, and both are guarded: the model and the variate."""
    model, malicious = models["logistic"], np.arange(8) < 2
    algorithm = scaffold(
        local_sgd(model, 0.0), clients_per_round=COHORT
    ).on(ONE).replace(
        aggregator=fs.aggregators.coordinate_median,
        sending=(fs.attacks.sign_flip(malicious, 3.0),),
    )  # fmt: skip
    ours = play(algorithm, model, federation.data, ROUNDS)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    slow = oracle.Oracle(federation.data, initial, LR, 0.0, 16, 2)
    c = oracle.zeros(oracle.layers_of(initial))
    own, commons = [c] * 8, []

    def visit(t: int, k: int, server: oracle.Layers) -> oracle.Visit:
        correction = oracle.plus(c, own[k], -1)
        return slow.visit(t, k, server, term=lambda w: correction)

    def median(rows: list[oracle.Layers]) -> oracle.Layers:
        return [np.median([row[i] for row in rows], axis=0) for i in range(len(rows[0]))]

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        nonlocal c
        updates, changes = [], []
        for k, v in zip(cohort, visits, strict=True):
            forge = -3.0 if malicious[k] else 1.0
            nothing = oracle.zeros(w)
            updates.append(oracle.plus(nothing, oracle.plus(v.layers, w, -1), forge))
            changes.append(oracle.plus(nothing, oracle.plus(v.path, own[k], -1), forge))
            own[k] = v.path  # what the client keeps is honest: its next visit goes by it
        c = oracle.plus(c, median(changes), COHORT / 8)
        commons.append(c)
        return oracle.plus(w, median(updates))

    servers, _ = oracle.fedavg(slow, ROUNDS, COHORT, visit, absorb)
    for layers, variate, state in zip(servers, commons, ours.states, strict=True):
        common = fs.Variables(state.shared_state[1][0], ())
        for theirs, mine in ((layers, state.server), (variate, common)):
            for u, v in zip(theirs, oracle.layers_of(mine), strict=True):
                np.testing.assert_allclose(v, u, rtol=1e-4, atol=1e-5)
    drawn = [set(np.asarray(m.client).tolist()) for m in ours.metrics]
    assert any(cohort & {0, 1} for cohort in drawn)


def test_an_optimiser_that_adds_nothing_changes_nothing(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """To the bit: noise of 0, a ball that holds all, steps without end."""
    local = local_sgd(models["logistic"])
    nothing = local.change(
        optimizer=optax.chain(
            optimizers.gradient_noise(0.0),
            optax.sgd(LR, momentum=0.9),
            optimizers.project_l2_ball(1e6),
        ),
        max_steps=99,
    )
    ours, plain = (
        play(
            fedavg(each, clients_per_round=COHORT).on(ONE),
            models["logistic"], federation.data, 2,
        ).servers
        for each in (nothing, local)
    )  # fmt: skip
    assert_trees(ours, plain)
    assert largest_change(ours[1], ours[0]) > 1e-3


# Quadratic and linear losses, whose clients' paths are known.

CURVATURE = np.array([0.5, 1.0, 2.0, 4.0])
CENTRE = np.array([[4.0, 0.0], [0.0, 3.0], [-2.0, 1.0], [1.0, -5.0]])
SIZES = np.array([2, 5, 9, 4])
SHARE = SIZES / SIZES.sum()


def point(dim: int = 2) -> fs.Model:
    """A model that is nothing but its parameters."""
    return fs.Model(lambda key: fs.Variables(jnp.ones(dim), ()), lambda *_, **__: None)  # type: ignore[arg-type]


def quadratics() -> fs.ClientData:
    """n_k times the same sample (a_k, b_k), so that every minibatch has the whole gradient."""
    x = np.column_stack([CURVATURE, CENTRE]).astype(np.float32).repeat(SIZES, axis=0)
    start = np.cumsum([0, *SIZES]).astype(np.int32)
    index = np.arange(len(x), dtype=np.int32)
    return fs.client_data(x, np.zeros(len(x), np.int32), fs.partition.Partition(index, start))


def over_samples(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Objective:
    """The mean of ``loss(w, sample)`` over the real samples."""

    def objective(w: Any, state: Any, batch: Any, context: Any) -> tuple[Any, Any]:
        losses = jax.vmap(loss, (None, 0))(w, batch.x)
        return jnp.mean(losses, where=batch.mask), state

    return objective


def bowl(w: jax.Array, sample: jax.Array) -> jax.Array:
    return 0.5 * sample[0] * jnp.sum((w - sample[1:]) ** 2)


def slope(w: jax.Array, sample: jax.Array) -> jax.Array:
    return jnp.vdot(w, sample[1:])


def on_bowls(lr: float = 0.05, momentum: float = 0.0, loss: Any = bowl, **options: Any) -> Any:
    optimizer = optax.sgd(lr, momentum=momentum)
    return fs.local_sgd(over_samples(loss), optimizer, **{"batch_size": 2, **options})


STEPS = 3 * -(-SIZES // 2)  # of three epochs in batches of two


def descended(w: np.ndarray, lr: float) -> np.ndarray:
    """Where T_k steps on client k's bowl lead from w, [K, 2]."""
    shrink = ((1 - lr * CURVATURE) ** STEPS)[:, None]
    return CENTRE + shrink * (w - CENTRE)


def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    """Of the plain mean of the losses; FedAvg would stop at another, known, point."""
    data, local, lr = quadratics(), on_bowls(epochs=3), 0.05
    best = CURVATURE @ CENTRE / CURVATURE.sum()
    pull = 1 - (1 - lr * CURVATURE) ** STEPS
    stuck = pull @ CENTRE / pull.sum()
    assert np.abs(best - stuck).max() > 0.3
    out = play(scaffold(local, clients_per_round=2).on(ONE), point(), data, 150)
    np.testing.assert_allclose(out.final.params, best, atol=1e-3)
    own, common = out.states[-1].client_state[1][0], out.states[-1].shared_state[1][0]
    np.testing.assert_allclose(common, np.mean(own, axis=0), atol=1e-5)
    np.testing.assert_allclose(own, CURVATURE[:, None] * (best - CENTRE), rtol=1e-2, atol=1e-2)


def test_scaffolds_server_goes_a_part_of_the_way() -> None:
    """From zero variates: η_g times the plain mean of what the clients' steps lead to."""
    algorithm = scaffold(on_bowls(epochs=3), clients_per_round=4, server_lr=0.3).on(ONE)
    moved = play(algorithm, point(), quadratics(), 1).final.params - 1
    whole = np.mean(descended(np.ones(2), 0.05), axis=0) - 1
    np.testing.assert_allclose(moved, 0.3 * whole, rtol=1e-5)


@pytest.mark.parametrize(("momentum", "mu"), [(0.5, 0.0), (0.0, 0.8)])
def test_fednova_on_slopes(momentum: float, mu: float) -> None:
    """A constant gradient g_k moves a client by -η a_k g_k: all a_k must cancel."""
    local = on_bowls(0.1, momentum, slope, epochs=3)
    nova = fednova(local, clients_per_round=4, lr=0.1, momentum=momentum, mu=mu).on(ONE)
    moved = np.asarray(play(nova, point(), quadratics(), 1).final.params) - 1
    direction = -SHARE @ CENTRE
    a = [
        sum(sum(momentum**j for j in range(t - i)) for i in range(t))
        if mu == 0
        else sum((1 - 0.1 * mu) ** j for j in range(t))
        for t in STEPS
    ]
    np.testing.assert_allclose(moved, 0.1 * (SHARE @ a) * direction, rtol=1e-4)


def test_fednova_starts_momenta_afresh() -> None:
    """a_k counts on it: a momentum that lives on would go further than that."""
    local = on_bowls(0.05, 0.9, optimizer_state="keep")
    made = fednova(local, clients_per_round=4, lr=0.05, momentum=0.9).on(ONE)
    start = point().init(jax.random.key(0))
    kept = [each.client_state(start).optimizer for each in (local, made.parts.local)]
    assert [len(jax.tree.leaves(state)) for state in kept] == [1, 0]


def test_small_proximal_terms_do_not_cancel() -> None:
    """a_k at ημ = 1e-8, where 1 - (1 - ημ)^T is 0 in float32, is T_k."""
    rows = normalised([3, 5], [1.0, 1.0], lr=1e-3, mu=1e-5)
    np.testing.assert_allclose(rows[:, 0], [4 / 3, 4 / 5], rtol=1e-5)


def test_inexactness_stops_when_solved() -> None:
    """The gradient of h shrinks by (1 - η(a + μ)) a step."""
    gamma, mu, lr, epochs = 0.3, 1.0, 0.1, 12
    local = on_bowls(lr, epochs=epochs)
    out = play(
        fedprox(local, clients_per_round=4, mu=mu, inexactness=gamma).on(ONE),
        point(), quadratics(), 1,
    )  # fmt: skip
    per_epoch = -(-SIZES // 2)
    needed = np.log(gamma) / np.log(1 - lr * (CURVATURE + mu))
    took = np.minimum(np.ceil(needed / per_epoch), epochs) * per_epoch
    assert (took < epochs * per_epoch).all()
    assert int(out.metrics[0].steps) == took.sum()


def test_one_step_each() -> None:
    out = play(
        parallel_sgd(on_bowls(epochs=3), clients_per_round=4).on(ONE),
        point(), quadratics(), 2,
    )  # fmt: skip
    w = np.ones(2)
    for ours in out.servers:
        w = w - 0.05 * SHARE @ (CURVATURE[:, None] * (w - CENTRE))
        np.testing.assert_allclose(ours.params, w, rtol=1e-5, atol=1e-6)
    assert [int(m.steps) for m in out.metrics] == [4, 4]


# Control variates.


def one_client(data: fs.ClientData, k: int) -> Any:
    visit = jax.tree.map(lambda a: a[0], visits(data, jnp.array([k])))
    return visit.view(samples_of(data), data)


def test_option_two_is_the_printed_form(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """c_k - c + (w_recv - w_k) / (T_k η) for plain SGD, from variates that are not zero."""
    model, data = models["logistic"], jax.device_put(federation.data)
    local = local_sgd(model, momentum=0.0).change(corrections=(corrections.scaffold(2),))
    start = model.init(jax.random.key(4))
    own = jax.tree.map(lambda w: jnp.full_like(w, 0.2), start.params)
    common = jax.tree.map(lambda w: jnp.full_like(w, -0.1), start.params)
    states = ((), (own,)), ((), (common,))
    end = jax.jit(lambda w: local.train(jax.random.key(5), w, one_client(data, 4), *states))(start)
    steps = float(end.info.steps)
    assert steps == 6
    printed = jax.tree.map(
        lambda c_k, c, w, w_k: c_k - c + (w - w_k) / (steps * LR),
        own, common, start.params, end.variables.params,
    )  # fmt: skip
    assert_trees(end.client_state[1][0], printed, 1e-4, 1e-5)
    change = jax.tree.map(jnp.subtract, end.client_state[1][0], own)
    assert_trees(end.message[1][0], change)


@pytest.mark.parametrize("option", [1, 2])
def test_variates_of_clients_that_took_no_step(
    federation: Federation, models: dict[str, fs.Model], option: Any
) -> None:
    """Batches of 16 that are dropped if short: clients of 1, 3, 5 and 8 samples take none."""
    model, data = models["logistic"], jax.device_put(federation.data)
    local = local_sgd(model, last_batch="drop")
    algorithm = scaffold(local, clients_per_round=8, option=option).on(ONE)
    state = algorithm.init(jax.random.key(0), model.init(jax.random.key(1)), data)
    ones = jax.tree.map(jnp.ones_like, state.client_state)
    after, _ = jax.jit(algorithm.step)(jax.random.key(2), state._replace(client_state=ones), data)
    idle = federation.sizes < 16
    for c_k, c in zip(
        jax.tree.leaves(after.client_state), jax.tree.leaves(after.shared_state), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(c_k)[idle], 1)
        assert np.abs(np.asarray(c_k)[~idle] - 1).max() > 0.1
        np.testing.assert_allclose(c, np.sum(np.asarray(c_k) - 1, axis=0) / 8, rtol=1e-4, atol=1e-6)


def test_whole_gradient_sees_the_transforms(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Option 1's variate is of the samples as they are trained on."""
    model, data = models["logistic"], jax.device_put(federation.data)
    doubled = local_sgd(model).change(
        corrections=(corrections.scaffold(1),),
        transforms=(lambda key, batch, client: batch._replace(x=2 * batch.x),),
    )
    start = model.init(jax.random.key(4))
    empty = doubled.client_state(start), doubled.shared_state(start)
    end = jax.jit(lambda w: doubled.train(jax.random.key(5), w, one_client(data, 4), *empty))(start)
    rows = data.index[data.start[4] : data.start[5]]
    x, y = np.asarray(data.x)[rows], np.asarray(data.y)[rows]
    slow = oracle.loss_and_gradient(oracle.layers_of(start), 2 * x, y)[1]
    fast = oracle.layers_of(fs.Variables(end.client_state[1][0], ()))
    for a, b in zip(slow, fast, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_statistics_are_never_corrected() -> None:
    """A model with a state: its variates are of the parameters alone."""
    variables = fs.Variables({"w": jnp.ones(3)}, {"mean": jnp.zeros(3)})
    local = on_bowls().change(corrections=(corrections.scaffold(),))
    kept = local.client_state(variables)
    assert_trees(kept.corrections, ({"w": jnp.zeros(3)},))
    assert kept.optimizer == ()
    assert_trees(tuple(local.shared_state(variables)), ((), ({"w": jnp.zeros(3)},), ()))


@pytest.mark.parametrize("empty", [False, True])
def test_absent_rows_leave_the_servers_part_alone(empty: bool) -> None:
    """Of 10 clients two report 1 and 2; rows without samples hold NaN."""
    weights = jnp.array([0.0, 3.0, 0.0, 7.0]) * (0 if empty else 1)
    change = jnp.array([[jnp.nan], [1.0], [jnp.nan], [2.0]])
    c = corrections.scaffold().reduce(jnp.array([0.5]), change, weights, 10, tree.mean)
    np.testing.assert_allclose(c, 0.5 if empty else 0.8, rtol=1e-6)
    term = corrections.adaptive_proximal()
    last = corrections.Mu(jnp.float32(0.3), jnp.float32(1.0), jnp.int32(2))
    message = (jnp.array([jnp.nan, 4.0, jnp.nan, 3.0]), jnp.array([9, 3, 9, 7]))
    new = term.reduce(last, message, weights, 10, tree.mean)
    wanted = (0.3, 1.0, 2) if empty else (0.4, 3.3, 0)
    np.testing.assert_allclose(np.array([float(a) for a in new]), wanted, rtol=1e-6)
    local = on_bowls(momentum=0.9, optimizer_state="average")
    shared = local.shared_state(point(1).init(jax.random.key(0)))
    sent = jax.tree.map(lambda a: change, shared)
    (trace, _), *_ = local.reduce(shared, sent, weights, 10, tree.mean)
    np.testing.assert_allclose(trace.trace, 0.0 if empty else 1.7, rtol=1e-6)


@pytest.mark.parametrize("method", [scaffold, mfl])
def test_twice_the_traffic(
    federation: Federation, models: dict[str, fs.Model], method: Callable[..., fs.Algorithm]
) -> None:
    model = models["logistic"]
    variables = model.init(jax.random.key(0))
    size = sum(a.size * 4 for a in jax.tree.leaves(variables))
    traffic = method(local_sgd(model), clients_per_round=3).traffic(variables, federation.data)
    assert (traffic.upload, traffic.download) == (size, size)
    assert (traffic.message, traffic.shared_state) == (size, size)
    plain = fedavg(local_sgd(model), clients_per_round=3).traffic(variables, federation.data)
    assert (plain.message, plain.shared_state) == (0, 0)


# The μ that follows the loss.


def trajectory(losses: list[float], patience: int, step: float = 0.1) -> list[float]:
    mu, falls, out = 0.0, 0, []
    for i, loss in enumerate(losses):
        if i and loss > losses[i - 1]:
            mu, falls = mu + step, 0
        elif i and loss < losses[i - 1]:
            falls += 1
        else:
            falls = 0
        if falls == patience:
            mu, falls = max(mu - step, 0.0), 0
        out.append(mu)
    return out


_adaptive = {p: corrections.adaptive_proximal(patience=p) for p in (2, 5)}
_reduce = {p: jax.jit(d.reduce, static_argnums=(3, 4)) for p, d in _adaptive.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1, -1, 0, 1]), max_size=25), st.sampled_from([2, 5]))
@example([1] * 4 + [-1] * 9, 2)  # a row of falls is counted from 0 after each decrease
@example([1] + [-1] * 11, 5)  # the floor
def test_trajectory_of_mu(changes: list[int], patience: int) -> None:
    losses = np.cumsum([30, *changes])
    shared, ours = _adaptive[patience].shared_state(()), []
    for loss in losses:
        told = jnp.full(2, float(loss)), jnp.array([4, 6])
        shared = _reduce[patience](shared, told, jnp.array([2, 3]), 8, tree.mean)
        ours.append(float(shared.mu))
    np.testing.assert_allclose(ours, trajectory([float(x) for x in losses], patience), atol=1e-6)


@pytest.mark.slow
def test_mu_in_a_run(federation: Federation, models: dict[str, fs.Model]) -> None:
    """It follows the loss that rounds report, and the next round trains with it."""
    model, data = models["logistic"], federation.data
    local = local_sgd(model)
    options: dict[str, Any] = {"clients_per_round": 2}
    out = play(fedprox(local, adaptive=True, **options).on(ONE), model, data, 8)
    mus = [float(s.shared_state[1][0].mu) for s in out.states]
    np.testing.assert_allclose(mus, trajectory([float(m.loss) for m in out.metrics], 5), atol=1e-6)
    assert max(mus) > 0
    given_, fixed = (
        play(fedprox(local, mu=0.4, adaptive=flag, **options).on(ONE), model, data, 1).final
        for flag in (True, False)
    )
    assert_trees(given_, fixed, 1e-6, 1e-7)


# The ball and the noise.


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=5, max_size=5),
    st.lists(st.floats(-4, 4, width=32), min_size=5, max_size=5),
    st.floats(0.125, 8, width=32),
)
def test_projection(start: list[float], step: list[float], radius: float) -> None:
    w, u = ({"a": jnp.array(v[:2]), "b": jnp.array([v[2:]])} for v in (start, step))
    moved, _ = optimizers.project_l2_ball(radius).update(u, (), w)
    free = np.array(start, np.float32) + np.array(step, np.float32)
    norm = float(np.linalg.norm(free))
    new = np.concatenate([np.ravel(x) for x in jax.tree.leaves(optax.apply_updates(w, moved))])
    np.testing.assert_allclose(new, free * min(1, radius / max(norm, 1e-9)), rtol=1e-4, atol=2e-6)
    assert np.linalg.norm(new) <= max(radius, 0) * (1 + 1e-5) + 2e-6
    if norm < radius * 0.999:
        assert_trees(moved, u)


def test_noise_is_fresh() -> None:
    """A flat loss: T steps of noise add up to a standard deviation of η σ √T."""
    dim, sigma, lr, steps = 4000, 0.3, 0.5, 6

    def flat(w: jax.Array, sample: jax.Array) -> jax.Array:
        return 0 * jnp.sum(w)

    optimizer = optax.chain(optimizers.gradient_noise(sigma), optax.sgd(lr))
    local = fs.local_sgd(over_samples(flat), optimizer, batch_size=2, epochs=2)
    data, variables = jax.device_put(quadratics()), point(dim).init(jax.random.key(0))
    train = jax.jit(lambda key: local.train(key, variables, one_client(data, 1), *[((), ())] * 2))
    moves = np.stack([train(jax.random.key(i)).variables.params - 1 for i in range(2)])
    wanted = lr * sigma * math.sqrt(steps)
    np.testing.assert_allclose(moves.std(axis=1), wanted, rtol=0.05)
    assert np.abs(moves.mean(axis=1)).max() < 5 * wanted / math.sqrt(dim)
    assert abs(np.corrcoef(moves)[0, 1]) < 5 / math.sqrt(dim)


def test_leaves_get_noise_of_their_own() -> None:
    noise = optimizers.gradient_noise(2.0)
    zeros = {"a": jnp.zeros(4000), "b": jnp.zeros(4000)}
    out, _ = noise.update(zeros, noise.init(zeros), key=jax.random.key(3))
    assert abs(np.corrcoef(out["a"], out["b"])[0, 1]) < 5 / math.sqrt(4000)
    for leaf in out.values():
        assert float(leaf.std()) == pytest.approx(2.0, rel=0.05)


# The adaptive servers.

SECOND: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "adagrad": lambda v, d: v + d**2,
    "adam": lambda v, d: 0.95 * v + 0.05 * d**2,
    "yogi": lambda v, d: v - 0.05 * d**2 * np.sign(v - d**2),
}


@pytest.mark.parametrize("v0", [None, 0.0, 0.01])
@pytest.mark.parametrize("name", SECOND)
def test_adaptive_servers(name: str, v0: float | None) -> None:
    """Algorithm 2 of Reddi et al. in plain NumPy, through the server that the methods use."""
    options = {} if name == "adagrad" else {"beta2": 0.95}
    rule = getattr(optimizers, name)(0.3, beta1=0.8, tau=0.02, v0=v0, **options)
    server, rng = fs.server.optimizer(rule), np.random.default_rng(0)
    w, m, v = np.array([0.5, -1.0]), np.zeros(2), np.full(2, 0.02**2 if v0 is None else v0)
    ours = fs.Variables({"w": jnp.array(w, jnp.float32)}, ())
    state = server.init(ours)
    for _ in range(6):
        delta = rng.normal(size=2) * [0.01, 1.0]
        step = fs.Variables({"w": jnp.array(delta, jnp.float32)}, ())
        taken, state = server.update(jax.random.key(0), step, ours, state, None)  # type: ignore[arg-type]
        ours = tree.add(ours, taken)
        m = 0.8 * m + 0.2 * delta
        v = SECOND[name](v, delta)
        w = w + 0.3 * m / (np.sqrt(v) + 0.02)
        np.testing.assert_allclose(ours.params["w"], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "rule"),
    [
        (
            fedadagrad,
            {"beta1": 0.5, "v0": 0.3},
            optimizers.adagrad(0.2, beta1=0.5, tau=0.1, v0=0.3),
        ),
        (fedyogi, {"beta2": 0.7, "v0": 0.3}, optimizers.yogi(0.2, beta2=0.7, tau=0.1, v0=0.3)),
        (fedadam, {}, optimizers.adam(0.2, beta1=0.9, beta2=0.99, tau=0.1)),
        (fedadam, {"variant": "optax", "beta1": 0.5}, optax.adam(0.2, 0.5, 0.99, eps=0.1)),
        (fedadagrad, {"variant": "optax"}, optax.adagrad(0.2, eps=0.1)),
        (fedyogi, {"variant": "optax", "beta2": 0.7}, optax.yogi(0.2, 0.9, 0.7, eps=0.1)),
    ],
)
def test_adaptive_methods_take_the_named_rule(
    method: Callable[..., fs.Algorithm], options: dict[str, Any], rule: Any
) -> None:
    """The server that the method composes moves as that rule does."""
    made = method(on_bowls(), clients_per_round=4, server_lr=0.2, tau=0.1, **options)
    nothing: Any = None
    ends = []
    for server in (made.parts.server, fs.server.optimizer(rule)):
        w = fs.Variables(jnp.array([1.0, -2.0]), ())
        state = server.init(w)
        for delta in ([2.0, 3.0], [-1.0, -2.0]):
            step = fs.Variables(jnp.array(delta), ())
            with jax.numpy_dtype_promotion("standard"):  # optax's Yogi mixes
                taken, state = server.update(jax.random.key(0), step, w, state, nothing)
            w = tree.add(w, taken)
        ends.append(w)
    assert_trees(ends[0], ends[1])


# Normalisation.


def normalised(
    steps: list[int], weights: list[float], models: Any = None, **options: Any
) -> np.ndarray:
    """The rows of ``preaggregation.normalise`` for changes of 1 from 0, with a state of 7."""
    count = jnp.array(steps, jnp.int32)
    info, present = LocalInfo(jnp.zeros(len(steps)), count, count), jnp.ones(len(steps), bool)
    server, data = fs.Variables(jnp.zeros((1, 1)), jnp.zeros(1)), cast("Any", None)
    cohort = Cohort(server, tree.stack_copies(server, 1), count, present, count, info, (), data)
    rows = jnp.ones((len(steps), 1, 1)) if models is None else models
    stacked = fs.Variables(rows, jnp.full((len(steps), 1), 7.0))
    part = preaggregation.normalise(**{"lr": 0.1, **options})
    out, kept, _ = part.apply(jax.random.key(0), (), stacked, jnp.array(weights), cohort)
    np.testing.assert_array_equal(kept, np.array(weights, np.float32))
    np.testing.assert_array_equal(out.state, 7.0)
    return np.asarray(out.params)[:, :, 0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_make_fednova_fedavg(momentum: float) -> None:
    rows = normalised([7, 7, 7], [1.0, 5.0, 2.0], momentum=momentum)
    np.testing.assert_allclose(rows, 1, rtol=1e-6)


def test_normalised_rows() -> None:
    """τ_eff = (1·2 + 3·6) / 4 = 5; a client without steps stays; an absent row does not count."""
    rows = normalised([2, 6], [1.0, 3.0])
    np.testing.assert_allclose(rows[:, 0], [5 / 2, 5 / 6], rtol=1e-6)
    absent = jnp.ones((3, 1, 1)).at[1].set(jnp.nan)
    rows = normalised([2, 50, 6], [1.0, 0.0, 3.0], absent)
    np.testing.assert_allclose(rows[[0, 2], 0], [5 / 2, 5 / 6], rtol=1e-6)
    rows = normalised([0, 4], [1.0, 1.0])
    np.testing.assert_allclose(rows[:, 0], [1, 2 / 4], rtol=1e-6)
    np.testing.assert_allclose(normalised([0, 0], [1.0, 1.0])[:, 0], 1, rtol=1e-6)
    order = [2, 0, 1]
    steps, weights = [1, 4, 9], [5.0, 2.0, 1.0]
    rows, turned = (
        normalised([steps[i] for i in by], [weights[i] for i in by], momentum=0.9)
        for by in ([0, 1, 2], order)
    )
    np.testing.assert_allclose(turned, rows[order], rtol=1e-5)


# Settings.


def test_counters_are_averaged_to_whole_numbers() -> None:
    """Adam's count, averaged over equal clients, is theirs."""
    weights = np.array([1, 3, 16, 17, 40, 5, 33], np.float32)
    mean, mix = jax.jit(tree.mean), jax.jit(tree.mix)
    for count in range(1, 9):
        counts = np.full(7, count, np.int32)
        assert int(mean(counts, weights)) == count
        assert int(mix(weights[None] / np.sum(weights), counts)[0]) == count


def test_change_is_checked_like_a_new_one() -> None:
    local = on_bowls(epochs=3, corrections=(corrections.proximal(0.1),))
    changed = local.change(corrections=(corrections.scaffold(),), epochs=5)
    assert changed.epochs == 5
    assert len(changed.client_state(point().init(jax.random.key(0)))[1]) == 2
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        local.change(max_steps=0)
    with pytest.raises(TypeError, match="stride"):
        local.change(stride=2)


def test_corrections_are_dropped_by_none() -> None:
    local = on_bowls(corrections=(corrections.scaffold(),)).change(corrections=None)
    assert local.client_state(point().init(jax.random.key(0)))[1] == ()


def nova(**options: Any) -> Any:
    return preaggregation.normalise(**{"lr": 0.1, **options})


def told(local: Any, **options: Any) -> fs.Algorithm:
    """FedNova, told of an optimiser that ``local`` may not have."""
    return fednova(local, clients_per_round=4, **{"lr": 0.05, "momentum": 0.0, **options})


def corrected(*terms: Any) -> Any:
    return on_bowls(corrections=terms)


def by(optimizer: Any) -> Any:
    return on_bowls().change(optimizer=optimizer)


def on_the_go(local: Any = None, **parts: Any) -> fs.Algorithm:
    """Clients whose optimiser goes on where their last visit left it."""
    local = on_bowls(momentum=0.5) if local is None else local
    return fs.compose(
        local.change(optimizer_state="keep"),
        selection=fs.selection.uniform(),
        clients_per_round=2,
        **parts,
    )


SGD = "needs the optimiser that its settings assume, optax.sgd(0.05"


def test_fednova_takes_an_optimiser_that_remembers_nothing() -> None:
    plain = on_bowls().change(optimizer=optax.sgd(0.05))
    on_the_go(plain, preaggregation=(nova(lr=0.05),))


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "epochs": (
        lambda: on_bowls(epochs=math.inf),
        "above 0 and at most 10000, got inf",
    ),
    "hue": (lambda: augment.colour_jitter(hue=0.6), "hue must be in [0, 0.5], got 0.6"),
    "optimizer": (
        lambda: fs.local_sgd(over_samples(bowl), 0.1),
        "optimizer must be an optax.GradientTransformation, got 0.1",
    ),
    "a correction alone": (
        lambda: on_bowls(corrections=corrections.proximal(1.0)),
        "corrections must be a sequence of Correction, such as (scaffold(),), got proximal(1.0)",
    ),
    "a correction not called": (
        lambda: on_bowls().change(corrections=(corrections.scaffold,)),
        "corrections must be a sequence of Correction, such as (scaffold(),), got (<class",
    ),
    "a class of memories": (
        lambda: on_bowls(memory=fs.terms.last_model),
        "memory must be a part, got the class last_model: use last_model(...)",
    ),
    "a model beside": (
        lambda: on_bowls(companion=3),
        "companion must be a Companion, got 3",
    ),
    "a transform alone": (
        lambda: on_bowls().change(transforms=lambda key, batch, client: batch),
        "transforms must be a sequence of functions, got <function",
    ),
    "no transform": (
        lambda: on_bowls(transforms=(0.5,)),
        "transforms must be a sequence of functions, got (0.5,)",
    ),
    "radius": (lambda: optimizers.project_l2_ball(0), "radius must be positive, got 0"),
    "no params": (
        lambda: optimizers.project_l2_ball(1).update(jnp.ones(1), ()),
        "project_l2_ball needs the parameters",
    ),
    "sigma": (lambda: optimizers.gradient_noise(-1), "sigma must be at least 0, got -1"),
    "beta1": (lambda: optimizers.adagrad(0.1, beta1=1.0), "beta1 must be in [0, 1), got 1.0"),
    "beta2": (lambda: optimizers.adam(0.1, beta2=-0.1), "beta2 must be in [0, 1), got -0.1"),
    "beta2 of yogi": (lambda: optimizers.yogi(0.1, beta2=1), "beta2 must be in [0, 1), got 1"),
    "tau": (lambda: optimizers.yogi(0.1, tau=0), "tau must be positive, got 0"),
    "v0": (lambda: optimizers.yogi(0.1, v0=-1), "v0 must be at least 0, got -1"),
    "scaffold on scaffold": (
        lambda: scaffold(corrected(corrections.scaffold(1)), clients_per_round=4),
        "corrections must not correct twice, got scaffold and scaffold",
    ),
    "fedprox on proximal": (
        lambda: fedprox(corrected(corrections.proximal(0.1)), clients_per_round=4),
        "corrections must not correct twice, got proximal and proximal",
    ),
    "adaptive fedprox on itself": (
        lambda: fedprox(
            corrected(corrections.adaptive_proximal()), clients_per_round=4, adaptive=True
        ),
        "corrections must not correct twice, got adaptive_proximal and adaptive_proximal",
    ),
    "fednova with mu on proximal": (
        lambda: told(corrected(corrections.proximal(0.1)), mu=0.1),
        "corrections must not correct twice, got proximal and proximal",
    ),
    "fednova on proximal": (
        lambda: told(corrected(corrections.proximal(0.1))),
        "preaggregation normalise(0.05) needs the correction for which FedNova's a_k is known, "
        "none, local is local_sgd(",
    ),
    "fednova's screen with another mu": (
        lambda: told(on_bowls(), mu=0.1).replace(preaggregation=(nova(lr=0.05, mu=0.2),)),
        "preaggregation normalise(0.05, mu=0.2) needs the correction for which FedNova's a_k is "
        "known, proximal(0.2), local is",
    ),
    "fednova of another rate": (lambda: told(on_bowls(0.1)), f"{SGD}), local is local_sgd("),
    "fednova of heavy ball, untold": (lambda: told(on_bowls(momentum=0.5)), f"{SGD}), local is"),
    "fednova's screen with momentum that goes on": (
        lambda: on_the_go(preaggregation=(nova(lr=0.05, momentum=0.5),)),
        "preaggregation normalise(0.05, momentum=0.5) needs a local optimiser that is reset "
        "at every visit, local is local_sgd(",
    ),
    "fednova of Nesterov's momentum": (
        lambda: told(by(optax.sgd(0.05, momentum=0.5, nesterov=True)), momentum=0.5),
        f"{SGD}, momentum=0.5), local is local_sgd(",
    ),
    "fednova of Adam": (lambda: told(by(optax.adam(0.05))), f"{SGD}), local is local_sgd("),
    "fednova of a rate that falls": (
        lambda: told(by(optax.sgd(optax.exponential_decay(0.05, 1, 0.9)))),
        f"{SGD}), local is local_sgd(",
    ),
    "mu of nova": (lambda: nova(mu=10), "mu must be at least 0 and below 1 / lr = 10, got 10"),
    "both": (lambda: nova(mu=1, momentum=0.9), "mu must be 0 with momentum"),
    "v0 of optax": (
        lambda: fedyogi(on_bowls(), clients_per_round=1, variant="optax", v0=0.1),
        "v0 must be None with variant 'optax', got 0.1",
    ),
    "beta1 of optax": (
        lambda: fedadagrad(on_bowls(), clients_per_round=1, variant="optax", beta1=0.5),
        "beta1 must be 0 with variant 'optax', got 0.5",
    ),
}


test_setting_errors = rejects(ERRORS)
