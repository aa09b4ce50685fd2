"""The simulated clock: seconds, and what becomes of clients that sleep, are lost or come late."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    SIZES,
    altered_data,
    assert_trees,
    known,
    make_federation,
    play,
    rejects,
    some_slow,
)

import fedjax_sim as fs
from fedjax_sim.base import Now
from fedjax_sim.engine.streams import Device, Round, Seed, stream

N, B, EPOCHS = len(SIZES), 4, 2
STEPS = [EPOCHS * -(-n // B) for n in SIZES]
clock = fs.clock


@functools.cache
def net() -> fs.Model:
    return fs.models.logistic((6,), 3)


@functools.cache
def federation() -> Any:
    return make_federation()


SIZE = 4 * (6 * 3 + 3)  # of the model, in bytes
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


def local(**settings: Any) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(net()), optax.sgd(0.1), B, EPOCHS, **settings)


class endless(fs.base.Wrapper):
    stops = False


def method(name: str, slots: int = 4, devices: int = 1, **parts: Any) -> fs.Algorithm:
    """FedAvg, two phases of phase shift (or without its downloads), or RADFed with two rounds."""
    execution = fs.make_execution(devices=devices)
    if name == "phases":
        name, parts = "phase_shift", {"flight": fs.flight.staggered(2), **parts}
    options: dict[str, Any] = {"phase_shift": {"phases": 2}, "radfed": {"redistribution_rounds": 2}}
    made = fs.ALGORITHMS[name](local(), clients_per_round=slots, **options.get(name, {})).on(
        execution
    )
    return made.replace(**parts) if parts else made


def run(algorithm: fs.Algorithm, rounds: int = 4, seeds: tuple[int, ...] = (0, 1)) -> fs.Result:
    data, test, execution = federation().data, federation().test, algorithm.parts.execution
    return fs.simulate(
        algorithm, net(), data, test, rounds=rounds, classes=3, seeds=seeds, execution=execution
    )


def stepped(algorithm: fs.Algorithm, data: Any, key: Any, state: Any, rounds: int = 4) -> Any:
    """What every round of a run reports, and the last state, to be traced."""

    def one(state: Any, t: Any) -> tuple[Any, Any]:
        return algorithm.step(jax.random.fold_in(key, t), state, data)

    state, report = jax.lax.scan(one, state, jnp.arange(rounds))
    return report, state


def begun(algorithm: fs.Algorithm, data: Any, seed: int = 0) -> tuple[Any, Any]:
    """The key of a run, and its first state."""
    root = jax.random.key(seed)
    key = stream(root, Seed.ROUNDS)
    return key, algorithm.init(key, net().init(jax.random.fold_in(root, 0)), data)


def drawn(law: fs.base.Law, which: Device, seed: int = 0) -> np.ndarray:
    """A law's number of every client."""
    key = stream(jax.random.key(seed), which)
    start = Now(jnp.int32(0), jnp.float32(0))
    return np.asarray(law(key, jnp.arange(N, dtype=jnp.int32), start), np.float64)


# ---- a clock that only counts ----

COUNTING = clock.simulated(0.25)


class Reported(NamedTuple):
    """Four rounds of one seed: ``metrics`` has an axis of them."""

    variables: Any
    metrics: Any
    state: Any


def reported(algorithm: fs.Algorithm, data: fs.ClientData | None = None) -> Reported:
    """Without scores of models, which compile as long as the rounds."""
    out = play(algorithm, net(), federation().data if data is None else data, 4)
    metrics = jax.tree.map(lambda *each: np.stack(each), *out.metrics)
    return Reported(out.final, metrics, out.states[-1])


@pytest.mark.slow
def test_equal_devices_change_nothing_but_tell_the_seconds() -> None:
    plain, timed = (reported(method("phase_shift", clock=clock)) for clock in (None, COUNTING))
    assert_trees(plain.variables, timed.variables)
    assert_trees(plain.metrics, timed.metrics._replace(time=None))
    assert plain.metrics.time is None
    steps = np.array(STEPS)[plain.metrics.client]
    most, total, time = steps.max(axis=1), steps.sum(axis=1), known(timed.metrics.time)
    assert time.seconds.tolist() == (0.25 * most).tolist()
    assert time.computing.tolist() == (0.25 * total).tolist()
    assert time.waiting.tolist() == (0.25 * (4 * most - total)).tolist()
    for count in (time.asleep, time.lost, time.late, time.silent):
        assert not count.any()


def test_fragments_take_the_bytes_of_their_turn() -> None:
    """The bias and the kernel in turn, up; down goes what came up the round before."""
    bias = fs.leaves.named("*/bias")
    made = fs.compose(
        local(),
        selection=fs.selection.uniform(sticky=True),
        clients_per_round=4,
        flight=fs.flight.permanent(),
        exchange=fs.exchange.fragments(bias, fs.leaves.all_but(bias)),
        clock=clock.simulated(1e-9, clock.bandwidth(10.0, 40.0)),
    ).on(fs.make_execution(devices=1))
    small, large = 4 * 3, 4 * 6 * 3
    expected = [SIZE / 40 + small / 10, small / 40 + large / 10, large / 40 + small / 10,
                small / 40 + large / 10]  # fmt: skip
    times = known(reported(made).metrics.time)
    np.testing.assert_allclose(times.seconds, expected, rtol=1e-5)


@pytest.mark.slow
def test_seconds_to_a_target_and_what_a_lost_client_sends() -> None:
    """It sends neither its model nor its message; both are of one size here."""
    made = fs.algorithms.scaffold(local(), clients_per_round=4).on(ONE["execution"])
    result = run(made.replace(clock=clock.simulated(1.0, failures=0.5)))
    time, last = known(result.metrics.time), result.evaluations[-1]
    assert ((time.lost.sum(axis=1) > 0) & (time.lost < 4).any(axis=1)).all()
    assert (result.metrics.uploads + time.lost).tolist() == result.metrics.visits.tolist()
    assert last.bytes_up.tolist() == (2 * SIZE * last.uploads).tolist()
    assert last.bytes_down.tolist() == (2 * SIZE * result.metrics.visits.sum(axis=1)).tolist()
    elapsed = np.cumsum(time.seconds, axis=1).T
    np.testing.assert_allclose(result.seconds, elapsed, rtol=1e-6)
    aim = float(result.accuracy[2].min())
    found = result.reached("accuracy", aim)
    assert found.rounds != [None, None]
    assert found.seconds == [
        float(result.seconds[known(r) - 1, i]) for i, r in enumerate(found.rounds)
    ]
    untimed = [e._replace(seconds=None) for e in result.evaluations]
    plain = dataclasses.replace(result, evaluations=untimed)
    with pytest.raises(ValueError, match="the run has no seconds: compose it with a clock"):
        _ = plain.seconds


def test_a_long_run_keeps_its_seconds() -> None:
    """In float32, 2 to the 24 seconds and one more are as many."""
    algorithm = method("fedavg", clock=clock.simulated(1.0))
    data = jax.device_put(federation().data)
    state = algorithm.init(jax.random.key(0), net().init(jax.random.key(0)), data)
    late = state._replace(clock=Now(jnp.int32(2**24), jnp.float32(0.5)))
    new, metrics = jax.jit(algorithm.step)(jax.random.key(0), late, data)
    assert int(new.clock.seconds) == 2**24 + int(metrics.time.seconds)
    assert float(new.clock.fraction) == 0.5


# ---- against a plain program ----


WORLDS, WORLD_ROUNDS = 12, 8
FAR = clock.bandwidth(clock.tiers(10, 50), clock.lognormal(30.0, 0.5))
SHARED = clock.bandwidth(20.0, clock.lognormal(30.0, 0.5), shared=True)
SOME, DAYS = clock.bernoulli(0.6), clock.diurnal(0.5, 64, seed=1)
ROUGH, HEAVY = clock.lognormal(1.0, 1.0), clock.pareto(0.5, 1.2)
TIERS = clock.tiers(1, 2, 10)
PARTIAL: dict[str, Any] = {"deadline": 9.0, "late": "partial"}
DROP: dict[str, Any] = {"deadline": 9.0, "late": "drop"}
KINDS: dict[str, dict[str, Any]] = {
    "phases, drop": {
        "compute": TIERS, "link": SHARED, "available": SOME, "failures": 0.4, **DROP
    },
    "fedavg, first": {
        "compute": HEAVY, "link": FAR, "available": SOME, "failures": 0.3, "first": 2, **DROP
    },
    "phase_shift, partial": {"compute": ROUGH, "link": SHARED, "available": DAYS, **PARTIAL},
    "radfed, partial": {"compute": HEAVY, "available": DAYS, "failures": 0.2, **PARTIAL},
    "fedavg, partial": {
        "compute": TIERS, "link": SHARED, "available": DAYS, "failures": 0.3, "first": 3, **PARTIAL
    },
    "fedavg, all": {"compute": ROUGH, "link": FAR, "available": SOME, "failures": 0.2},
}  # fmt: skip
"""Methods and rules; the worlds of each have devices, deadlines and chances of their own."""


@functools.cache
def awake(available: fs.base.Availability) -> Any:
    """Who of all clients is, at some time."""
    return jax.jit(lambda keys, now: available(keys, jnp.arange(N, dtype=jnp.int32), now))


@functools.cache
def chance(seed: int) -> tuple[Any, np.ndarray]:
    """Of each round and client: its key for who is awake, and the two numbers of being lost."""

    def of(t: Any, k: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(stream(jax.random.key(seed), Seed.ROUNDS), t)
        own = jax.random.fold_in(stream(key, Round.LOST), k)
        return jax.random.fold_in(stream(key, Round.AWAKE), k), jax.random.uniform(own, (2,))

    of_round = jax.vmap(of, in_axes=(None, 0))
    rounds, clients = jnp.arange(WORLD_ROUNDS), jnp.arange(N)
    keys, luck = jax.jit(jax.vmap(of_round, in_axes=(0, None)))(rounds, clients)
    return keys, np.asarray(luck, np.float64)


SPENT = ("computing", "link", "waiting")


def replayed(
    name: str, given: dict[str, Any], devices: dict[str, np.ndarray], cohorts: np.ndarray, seed: int
) -> dict[str, Any]:
    """One run, client by client: ``cohorts int[rounds, S]`` are those that were drawn."""
    seconds, seen, bytes_up, bytes_down = 0.0, 0, 0, 0
    out: dict[str, Any] = {n: [] for n in ("seconds", "asleep", "lost", "late", *SPENT)}
    step, link, deadline = devices["step"], given.get("link"), given.get("deadline", math.inf)
    keys, luck = chance(seed)
    trained: dict[int, bool] = {}  # of a slot: whether a client has, since it left the server
    for t, cohort in enumerate(cohorts):
        fresh, due = {0, 1, 2, 3}, {0, 1, 2, 3}
        phased = name in ("phases", "phase_shift")
        if phased:
            due = {0, 1} if t % 2 == 0 else {2, 3}
            fresh = {0, 1, 2, 3} if t == 0 else {0, 1, 2, 3} - due
        for slot in fresh:
            trained[slot] = False
        there = list(range(len(cohort)))
        if (part := given.get("available")) is not None:
            now = Now(jnp.int32(math.floor(seconds)), jnp.float32(seconds % 1))
            up = np.asarray(awake(part)(keys[t], now))
            there = [slot for slot, k in enumerate(cohort) if up[k]]
        sends = [s for s in there if not phased or s in due]
        down = {s: 0 if name == "phases" and trained[s] else SIZE for s in there}
        visits = []
        lost, late, arrived = set(), set(), set()
        for s in there:
            k, steps = cohort[s], STEPS[cohort[s]]
            before = after = 0.0
            if link is not None:
                users = max(1, len(sends)) if link.shared else 1
                before = down[s] / devices["down"][k]
                after = SIZE * users / devices["up"][k] if s in sends else 0.0
            if given.get("late") == "partial":
                left = math.floor((deadline - before - after) / step[k])
                if left < 1:
                    late.add(s)
                steps = max(0, min(steps, left))
            work = steps * step[k]
            end = before + work + after
            coin, where = luck[t, k]
            if coin < given.get("failures", 0.0):
                lost.add(s)
                late.discard(s)
                end = where * end
            elif given.get("late") == "drop" and end > deadline:
                late.add(s)
            visits.append((end, k, s, before, work))
            if s not in lost | late:
                arrived.add(s)
        length = min(max((v[0] for v in visits), default=0.0), deadline)
        queue = sorted(v for v in visits if v[2] in arrived)
        if (count := given.get("first")) is not None and len(queue) >= count:
            length = queue[count - 1][0]
            late |= {v[2] for v in queue[count:]}
            arrived -= late
        length = length if there else given["idle"]
        for s in arrived:
            trained[s] = True
        # A client at work stops when the round is over: who then computes sends nothing.
        begun = {s for end, _, s, down_, work in visits if down_ + work < length or end <= length}
        idle_hands = {v[2] for v in visits if v[4] == 0}
        sent = arrived | ((late & begun) - idle_hands)
        bytes_up += SIZE * len([s for s in sends if s in sent])
        bytes_down += sum(down.values())
        seconds += length
        seen += len(there)
        out["seconds"].append(length)
        out["asleep"].append(len(cohort) - len(there))
        out["lost"].append(len(lost))
        out["late"].append(len(late))
        stops = [(min(v[0], length), *v[3:]) for v in visits]
        worked = [min(max(stop - before, 0.0), work) for stop, before, work in stops]
        out["computing"].append(sum(worked))
        out["link"].append(sum(stop for stop, *_ in stops) - sum(worked))
        out["waiting"].append(sum(length - stop for stop, *_ in stops))
    return out | {"bytes_up": [bytes_up], "bytes_down": [bytes_down], "visits": [seen]}


@functools.cache
def worlds(kind: str) -> tuple[Any, dict[str, np.ndarray], Any]:
    """Devices' seeds and deadlines ``[W]``, ``[W, N]`` of the devices, what rounds report."""
    settings, rng = KINDS[kind], np.random.default_rng(list(KINDS).index(kind))
    seeds = rng.integers(100, size=WORLDS).astype(np.int32)
    deadlines = rng.uniform(3, 25, WORLDS).astype(np.float32)
    given, data = clock.simulated(**settings, idle=7.5), jax.device_put(federation().data)
    base = method(kind.partition(",")[0], clock=given)
    link = settings.get("link")
    laws = {"step": (given.compute, Device.COMPUTE)}
    if link is not None:
        laws |= {"up": (link.up, Device.UP), "down": (link.down, Device.DOWN)}
    start, clients = Now(jnp.int32(0), jnp.float32(0)), jnp.arange(N, dtype=jnp.int32)
    first = jax.tree.map(lambda *each: jnp.stack(each), *(begun(base, data, s) for s in (0, 1)))

    def of(seed: Any, deadline: Any) -> Any:
        devices = {
            name: fs.base.evaluate_law(law, stream(jax.random.key(seed), which), clients, start)
            for name, (law, which) in laws.items()
        }
        own = given.replace(seed=seed)
        if given.deadline is not None:
            own = own.replace(deadline=deadline)
        timed = base.replace(clock=own)
        return devices, jax.lax.map(
            lambda run: stepped(timed, data, run[0], run[1], WORLD_ROUNDS)[0], first
        )

    # One after another: a program of vmapped rounds takes longer to compile than they to run.
    devices, report = jax.jit(lambda *each: jax.lax.map(lambda own: of(*own), each))(
        seeds, deadlines
    )
    of_world = {name: np.asarray(table, np.float64) for name, table in devices.items()}
    return deadlines.astype(np.float64), of_world, jax.device_get(report)


@pytest.mark.parametrize("kind", some_slow(KINDS))
def test_worlds_against_a_plain_program(kind: str) -> None:
    """Eight rounds each, of two seeds."""
    name = kind.partition(",")[0]
    plain = cohorts_of(name)
    deadlines, devices, report = worlds(kind)
    for w, deadline in enumerate(deadlines):
        settings = KINDS[kind] | {"idle": 7.5}
        if "deadline" in settings:
            settings["deadline"] = deadline
        own = {field: table[w] for field, table in devices.items()}
        for seed in (0, 1):
            expected = replayed(name, settings, own, plain[seed], seed)
            metrics = jax.tree.map(lambda a, w=w, s=seed: a[w, s], report)
            for field in ("seconds", *SPENT):
                found = getattr(metrics.time, field)
                np.testing.assert_allclose(found, expected[field], rtol=1e-5, atol=1e-4)
            there = np.sum(np.asarray(metrics.client) < N, axis=-1)
            held = metrics.time.seconds * there
            np.testing.assert_allclose(metrics.time.held, held, rtol=1e-5, atol=1e-4)
            for field in ("asleep", "lost", "late"):
                assert getattr(metrics.time, field).tolist() == expected[field], field
            assert metrics.visits.sum() == expected["visits"][0]
            assert SIZE * metrics.uploads.sum() == expected["bytes_up"][0]
            assert SIZE * metrics.downloads.sum() == expected["bytes_down"][0]


@functools.cache
def cohorts_of(name: str) -> np.ndarray:
    """``[2, rounds, S]``, whom the plain method draws."""
    data, plain = jax.device_put(federation().data), method(name)
    clients = jax.jit(lambda key, state: stepped(plain, data, key, state, WORLD_ROUNDS)[0].client)
    return np.stack([clients(*begun(plain, data, seed)) for seed in (0, 1)])


# ---- what is taken ----


class given_cohorts(fs.base.Selection):
    """Draws these in turn: ``int[rounds, S]``, N for an idle slot."""

    cohorts: Any

    def init(self, variables: Any, data: Any, execution: Any) -> Any:
        return jnp.int32(0)

    def draw(
        self, key: Any, state: Any, data: Any, clients: Any, free: Any, visits: Any
    ) -> tuple[Any, Any]:
        return jnp.asarray(self.cohorts, jnp.int32)[state], state + 1


BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "a chain": ("radfed", {"flight": fs.flight.delayed(2)}),
    # Attackers that work together look at those who come, and at nobody else.
    "attacks": (
        "fedavg",
        {
            "sending": (
                fs.attacks.alie(np.arange(N) < 5, z=2.0),
                fs.attacks.sign_flip(np.arange(N) == 6),
            )
        },
    ),
    "Krum": ("fedavg", {"aggregator": fs.aggregators.krum(0.2)}),
}


@pytest.mark.parametrize("case", some_slow(BESIDE))
def test_a_late_client_is_as_one_that_was_not_chosen(case: str) -> None:
    name, parts = BESIDE[case]
    law = clock.tiers(1, 2, 10)
    late = reported(method(name, 5, clock=clock.simulated(law, deadline=17.0), **parts))
    slow = np.array(STEPS) * drawn(law, Device.COMPUTE) > 17
    clients = late.metrics.client
    taken = np.where(slow[clients], N, clients)
    assert 0 < (taken == N).sum() < taken.size
    other = reported(method(name, 5, selection=given_cohorts(taken), **parts))
    assert_trees(late.variables, other.variables, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(late.metrics.loss, other.metrics.loss, rtol=1e-5)
    # It stopped when the round was over, and has sent nothing.
    assert late.metrics.uploads.tolist() == (taken < N).sum(axis=-1).tolist()
    assert late.metrics.downloads.tolist() == [5, 5, 5, 5]


def first_step(algorithm: fs.Algorithm) -> tuple[Any, Any]:
    """How far the first round moves the server, and what it reports."""
    start = net().init(jax.random.key(0))
    data = jax.device_put(federation().data)
    state = algorithm.init(jax.random.key(1), start, data)
    after, metrics = jax.jit(algorithm.step)(jax.random.key(2), state, data)
    return fs.tree.subtract(after.server, start), metrics


def test_privacy_does_not_tell_who_came() -> None:
    """A sum over those who did, divided by m."""
    private = fs.algorithms.dp_fedavg(
        local(), clients_per_round=6, clip=1e6, noise_multiplier=0.0, sampling="fixed",
        ).on(fs.make_execution(devices=1))  # fmt: skip
    timed = private.replace(clock=clock.simulated(clock.tiers(1, 2, 10), deadline=17.0))
    found, metrics = first_step(timed)
    slow = np.array(STEPS) * drawn(clock.tiers(1, 2, 10), Device.COMPUTE) > 17
    taken = np.where(slow[metrics.client], N, metrics.client)
    came = int((taken < N).sum())
    assert 1 < came < 6
    mean = method("fedavg", 6, selection=given_cohorts([taken]), weighting=fs.weighting.equal)
    expected = fs.tree.scale(came / 6, first_step(mean)[0])
    assert_trees(found, expected, rtol=1e-5, atol=1e-6)


def test_a_late_client_keeps_what_it_had() -> None:
    """Control variates too, its own and the common one. As large as the model, both travel too."""
    made = fs.algorithms.scaffold(local(optimizer_state="keep"), clients_per_round=4).on(
        ONE["execution"]
    )
    law, link = clock.tiers(1, 2, 10), clock.bandwidth(10.0, clock.constant(40.0))
    travel = 2 * SIZE / 40 + 2 * SIZE / 10
    result = reported(made.replace(clock=clock.simulated(law, link, deadline=17.0 + travel)))
    step = drawn(law, Device.COMPUTE)
    slow = {k for k in range(N) if STEPS[k] * step[k] > 17}
    seen = set(result.metrics.client.ravel().tolist())
    assert seen & slow
    assert seen - slow
    time, own = known(result.metrics.time), (np.array(STEPS) * step)[result.metrics.client]
    length = travel + np.minimum(own.max(axis=1), 17)
    np.testing.assert_allclose(time.seconds, length, rtol=1e-6)
    waiting = np.maximum(length[:, None] - travel - own, 0).sum(axis=1)
    np.testing.assert_allclose(time.waiting, waiting, rtol=1e-5)
    state = result.state
    for k in range(N):
        kept = [np.asarray(leaf)[k] for leaf in jax.tree.leaves(state.client_state)]
        assert any(leaf.any() for leaf in kept) == (k in seen - slow)
    # c is the sum of the changes of all c_k over N, and the c_k were 0.
    commons, owns = state.shared_state.corrections, state.client_state.corrections
    for common, own in zip(jax.tree.leaves(commons), jax.tree.leaves(owns), strict=True):
        np.testing.assert_allclose(common, own.mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_phase_loses_the_models_of_those_that_do_not_come() -> None:
    """The mean of the due slots that came; the others' models are as before the visit."""
    law = clock.tiers(1, 2, 10)
    timed = method("phases", clock=clock.simulated(law, deadline=17.0))
    out = play(timed, net(), federation().data, 6)
    step, sizes = drawn(law, Device.COMPUTE), np.array(SIZES)
    server = net().init(jax.random.fold_in(jax.random.key(0), 0))
    slots, kept = None, 0
    for t, (state, metrics) in enumerate(zip(out.states, out.metrics, strict=True)):
        due = {2 * (t % 2), 2 * (t % 2) + 1}
        fresh = {0, 1, 2, 3} if t == 0 else {0, 1, 2, 3} - due
        came = [s for s, k in enumerate(metrics.client.tolist()) if STEPS[k] * step[k] <= 17]
        for slot in {0, 1, 2, 3} - {*came}:
            old = server if slot in fresh else jax.tree.map(lambda a, s=slot: a[s], known(slots))
            assert_trees(jax.tree.map(lambda a, s=slot: a[s], state.slots.variables), old)
            kept += 1
        counted = [s for s in came if s in due]
        if counted:
            n = sizes[metrics.client[np.array(counted)]]
            server = jax.tree.map(
                lambda a, c=counted, n=n: np.average(np.asarray(a)[c], axis=0, weights=n),
                state.slots.variables,
            )
        assert_trees(state.server, server, rtol=1e-5, atol=1e-6)
        server, slots = state.server, state.slots.variables
    assert 0 < kept < 24


@pytest.mark.parametrize(
    ("name", "why"), [("fedavg", "asleep"), ("phases", "asleep"), ("radfed", "late")]
)
def test_a_round_of_nobody_keeps_the_model_and_ends(name: str, why: str) -> None:
    """It lasts until the deadline, or the time that is given for it."""
    given: dict[str, Any] = {"deadline": 0.5}
    if why == "asleep":
        given = {"available": clock.bernoulli(0.0), "idle": 3.0}
    algorithm = method(name, clock=clock.simulated(1.0, **given))
    out = play(algorithm, net(), federation().data, 3)
    begin = net().init(jax.random.fold_in(jax.random.key(0), 0))
    assert out.final_uploads == 0  # of models that no client has
    for server in (*out.servers, out.final):
        assert_trees(server, begin)
    assert [float(m.time.seconds) for m in out.metrics] == [3.0 if why == "asleep" else 0.5] * 3
    if why == "asleep":
        assert [int(m.uploads) + int(m.downloads) + int(m.visits) for m in out.metrics] == [0] * 3
        assert [int(m.time.asleep) for m in out.metrics] == [4] * 3


def test_a_slot_keeps_a_client_that_sleeps() -> None:
    """Of phase shift: it comes back to the same model, until that is due."""
    plain, (*_, report) = cohorts_of("phases"), worlds("phases, drop")
    for seen in report.client:
        assert (seen == N).any()
        assert (seen[seen < N] == plain[seen < N]).all()


class odd_only(fs.base.Sending):
    """Clients with even numbers withhold their updates."""

    withholds = True

    def send(self, key: Any, kept: Any, update: Any, message: Any, client: Any) -> fs.base.Sent:
        return fs.base.Sent(update, message, kept, client % 2 == 1)


def test_the_first_uploads_count() -> None:
    """Of equal clients that send, the first by number; the server does not wait for the others."""
    data = make_federation([8] * N).data
    fed = method("fedavg")
    timed = fed.replace(clock=clock.simulated(1.0, first=2), sending=(odd_only(),))
    result = reported(timed, data)
    sends = [sorted(k for k in row if k % 2) for row in result.metrics.client.tolist()]
    taken = [[*some[:2], N, N, N, N][:4] for some in sends]
    other = fed.replace(selection=given_cohorts(taken))
    assert_trees(result.variables, reported(other, data).variables, rtol=1e-5, atol=1e-6)
    time = known(result.metrics.time)
    assert time.late.tolist() == [max(len(some) - 2, 0) for some in sends]
    assert time.late.any()
    assert time.waiting.tolist() == [0, 0, 0, 0]
    # Those that the server does not wait for have sent theirs all the same.
    assert result.metrics.uploads.tolist() == [len(some) for some in sends]


def test_who_ends_with_the_deadline_is_in_time() -> None:
    """Of clients with one step of a second."""
    data = jax.device_put(make_federation([8] * N).data)
    timed = clock.simulated(1.0, deadline=1.0)
    fed = method("fedavg", local=local(max_steps=1), clock=timed)
    first = begun(fed, data)

    @jax.jit
    def late(deadline: Any) -> Any:
        own = fed.replace(clock=timed.replace(deadline=deadline))
        return stepped(own, data, *first, rounds=2)[0].time.late

    assert [late(end).tolist() for end in (1.0, 0.999)] == [[0, 0], [4, 4]]


# ---- partial work ----


def test_partial_work_is_what_the_deadline_leaves() -> None:
    """Every client takes as many steps as fit, as with max_steps."""
    law = clock.constant(1.0)
    link = clock.bandwidth(SIZE / 1.25, SIZE / 0.5)
    timed = method("fedavg", clock=clock.simulated(law, link, deadline=9.9, late="partial"))
    result = reported(timed)
    expected = reported(timed.replace(clock=None, local=local(max_steps=8)))
    assert_trees(result.variables, expected.variables, rtol=1e-5, atol=1e-6)
    steps = [sum(min(8, STEPS[k]) for k in row) for row in result.metrics.client]
    assert result.metrics.steps.tolist() == steps
    assert known(result.metrics.time).seconds.max() <= 9.9


@pytest.mark.slow
def test_partial_work_tells_fedavg_from_fednova() -> None:
    """Which are the same as long as all clients take equally many steps."""
    data = jax.device_put(make_federation([8] * N).data)
    timed = clock.simulated(clock.tiers(1, 2), deadline=3.0, late="partial")

    def trained(name: str) -> Any:
        """By the deadline."""
        own: dict[str, Any] = {"lr": 0.1, "momentum": 0.0} if name == "fednova" else {}
        made = (
            fs.ALGORITHMS[name](local(), clients_per_round=4, **own)
            .on(ONE["execution"])
            .replace(clock=timed)
        )
        first = begun(made, data)

        def server(end: Any) -> Any:
            ends = made.replace(clock=timed.replace(deadline=end))
            return stepped(ends, data, *first)[1].server

        return jax.jit(server)

    plain, nova = trained("fedavg"), trained("fednova")
    assert_trees(plain(99.0), nova(99.0), rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        assert_trees(plain(3.0), nova(3.0), rtol=1e-3)


def test_two_local_updates_share_the_steps_that_are_left() -> None:
    both = fs.local.in_turn(local(), local())
    timed = clock.simulated(1.0, deadline=5.0, late="partial")
    result = reported(
        fs.fedavg(both, clients_per_round=4).on(ONE["execution"]).replace(clock=timed)
    )
    steps = [sum(min(5, 2 * STEPS[k]) for k in row) for row in result.metrics.client]
    assert result.metrics.steps.tolist() == steps


# ---- where and how it runs ----


@pytest.mark.slow
def test_devices_and_chunks_tell_the_same_time() -> None:
    settings = clock.simulated(
        clock.lognormal(1.0, 1.0), clock.bandwidth(20.0, 30.0, shared=True),
        clock.bernoulli(0.8), failures=0.2, deadline=20.0,
    )  # fmt: skip
    one = method("radfed", clock=settings)
    a = reported(one)
    for devices, chunk in ((3, 2), (1, 0)):
        execution = fs.make_execution(devices=devices, chunk=chunk)
        b = reported(one.on(execution))
        assert_trees(a.metrics.time, b.metrics.time)
        assert_trees(a.variables, b.variables, rtol=1e-5, atol=1e-6)


def test_a_round_is_no_larger_for_many_clients() -> None:
    """No array has an axis of all clients but the lists of their samples."""
    many = 10**5
    data = federation().data
    start = jnp.zeros(many + 1, jnp.int32)
    crowd = jax.tree.map(jnp.asarray, altered_data(data, start=start))
    settings = clock.simulated(
        clock.pareto(1.0, 1.5), clock.bandwidth(clock.tiers(1, 2), 30.0),
        clock.diurnal(0.5), failures=0.2, deadline=20.0, first=2,
    )  # fmt: skip
    plain = method("fedavg")
    sizes = []
    for algorithm in (plain, plain.replace(clock=settings)):
        state = jax.eval_shape(algorithm.init, jax.random.key(0), net().init(jax.random.key(0)),
                               crowd)  # fmt: skip
        text = str(jax.make_jaxpr(algorithm.step)(jax.random.key(0), state, crowd))
        sizes.append(text.count("[100000") + text.count(",100000"))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_run_that_goes_on_knows_the_time(tmp_path: Path) -> None:
    made = method("fedavg", clock=clock.simulated(1.5, available=clock.diurnal(0.5, 64)))
    data, test = federation().data, federation().test

    def until(rounds: int, **settings: Any) -> fs.Result:
        return fs.simulate(
            made, net(), data, test, rounds=rounds, classes=3, seeds=(0, 1), eval_every=3,
            **ONE, **settings,
        )  # fmt: skip

    until(3, checkpoints=tmp_path)
    again, whole = until(6, checkpoints=tmp_path), until(6)
    assert_trees(again.variables, whole.variables)
    assert again.seconds.tolist() == whole.seconds.tolist()
    assert_trees(again.metrics.time, whole.metrics.time)


# ---- the laws ----


def test_laws_have_their_quantiles() -> None:
    key, start = jax.random.key(0), Now(jnp.int32(0), jnp.float32(0))
    client = jnp.arange(20_000, dtype=jnp.int32)

    def quantiles(law: fs.base.Law) -> list[float]:
        return np.quantile(np.asarray(law(key, client, start)), [0.25, 0.5, 0.9]).tolist()

    normal = [math.exp(0.5 * z) for z in (-0.6745, 0, 1.2816)]
    assert quantiles(clock.lognormal(3.0, 0.5)) == pytest.approx([3 * q for q in normal], rel=0.03)
    tail = [2 * (1 - q) ** (-1 / 1.5) for q in (0.25, 0.5, 0.9)]
    assert quantiles(clock.pareto(2.0, 1.5)) == pytest.approx(tail, rel=0.03)
    thirds = np.asarray(clock.tiers(1, 2, 10)(key, client, start))
    for value in (1, 2, 10):
        assert (thirds == value).mean() == pytest.approx(1 / 3, abs=0.02)


def test_devices_differ_by_the_seed_alone() -> None:
    a = drawn(clock.lognormal(1.0, 1.0), Device.COMPUTE, seed=0)
    assert (a == drawn(clock.lognormal(1.0, 1.0), Device.COMPUTE, seed=0)).all()
    assert (a != drawn(clock.lognormal(1.0, 1.0), Device.COMPUTE, seed=1)).all()
    assert (a != drawn(clock.lognormal(1.0, 1.0), Device.UP, seed=0)).all()


def test_days_go_by() -> None:
    """Each client is awake for its part of a day, and the day comes back."""
    part = clock.diurnal(0.25, 1000)
    client = jnp.arange(200, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(0), len(client))

    def awake(second: int) -> np.ndarray:
        return np.asarray(part(keys, client, Now(jnp.int32(second), jnp.float32(0))))

    days = np.stack([awake(s) for s in range(0, 1000, 50)])
    assert (days.sum(axis=0) == 5).mean() > 0.9  # of 20; a border may fall on a sample
    assert (awake(130) == awake(10**9 + 130)).all()
    assert 0.15 < awake(0).mean() < 0.35


# ---- what is refused ----

BAD: dict[str, tuple[Any, str]] = {
    "negative": (lambda: clock.tiers(1, -2), "values must be positive and finite, got -2"),
    "none": (clock.tiers, "tiers needs at least one value"),
    "sigma": (lambda: clock.lognormal(1, -1), r"sigma must be in \[0, 10\], got -1"),
    "alpha": (lambda: clock.pareto(1, 0.1), "alpha must be at least 0.5 and finite, got 0.1"),
    "shared": (
        lambda: clock.bandwidth(clock.tiers(1, 2), 1, shared=True),
        "up must be a number for a shared uplink",
    ),
    "late alone": (
        lambda: clock.simulated(1, late="partial"), "late='partial' needs a deadline",
    ),
    # With other parts.
    "first of a chain": (
        lambda: method("radfed", clock=clock.simulated(1, first=2)),
        r"clock simulated\(1, first=2\) needs models that return in the round in which they left",
    ),
    "first of too few": (
        lambda: method("fedavg", clock=clock.simulated(1, first=5)),
        r"clock simulated\(1, first=5\) needs at least 5 clients to wait for, clients_per_round is",
    ),
    "first of too few for Krum": (
        lambda: method("fedavg", 5, aggregator=fs.aggregators.krum(0.2),
                       clock=clock.simulated(1, first=4)),
        r"aggregator krum\(\) needs a larger cohort, for byzantine=0.2 of the rows that it gets",
    ),
    "first of too few for mixtures": (
        lambda: method("fedavg", 20, aggregator=fs.aggregators.krum(0.2),
                       preaggregation=(fs.preaggregation.bucketing(),),
                       clock=clock.simulated(1, first=8)),
        r"aggregator krum\(\) needs a larger cohort, for byzantine=0.2 of the rows that it gets",
    ),
    "an update that cannot stop": (
        lambda: method("fedavg", local=endless(local()),
                       clock=clock.simulated(1, deadline=3, late="partial")),
        r"needs an update that can stop early, local is endless\(",
    ),
}  # fmt: skip


test_what_is_refused = rejects(BAD, escape=False)
