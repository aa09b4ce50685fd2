"""Models that come back when they come back: FedAsync and FedBuff on a clock, and periods."""

from __future__ import annotations

import functools
import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import SIZES, assert_trees, known, make_federation, play, rejects, some_slow

import fedjax_sim as fs
from fedjax_sim.algorithms import fedasync, fedbuff
from fedjax_sim.base import Now, Traffic
from fedjax_sim.engine.streams import Dispatch, Round, stream
from fedjax_sim.round import arrivals, traffic

N, LR, BATCH = len(SIZES), 0.1, 8
clock = fs.clock
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


@functools.cache
def net() -> fs.Model:
    return fs.models.logistic((6,), 3)


@functools.cache
def federation(sizes: tuple[int, ...] = SIZES) -> Any:
    return make_federation(sizes)


def local(**settings: Any) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(net()), optax.sgd(LR), BATCH, **settings)


def composed(active: int, flight: fs.base.Flight, **parts: Any) -> fs.Algorithm:
    """FedAvg's parts on a flight."""
    made = fs.compose(local(), active, flight=flight, **parts)
    return made.on(ONE["execution"])


# ---- worlds against a heap of events ----

ROUNDS, TURNS, PEOPLE, WORLDS = 8, 160, 7, 60
SAMPLES = SIZES[:PEOPLE]
STEPS = [-(-n // BATCH) for n in SAMPLES]


class World(NamedTuple):
    """Devices, and the chance of a run; ``[N]`` each but for the last three."""

    step: Any
    up: Any
    down: Any
    phase: Any
    awake: Any
    idle: Any
    key: Any


def world(i: int, exact: bool) -> World:
    """A world of chance.

    If ``exact`` its times are sums of eighths, there are many ties, and clients sleep. Else clients
    are lost, at times that are rounded, so that a tie would be decided by the rounding.
    """
    rng = np.random.default_rng(i)
    spread = np.array([1, 1, 2, 4, 10]) / 8
    step = rng.choice(spread, PEOPLE) if exact else rng.lognormal(0, 0.8, PEOPLE)
    rate = 2.0 ** rng.integers(3, 7, (2, PEOPLE)) if exact else rng.uniform(5, 90, (2, PEOPLE))
    return World(
        step=step.astype(np.float32),
        up=rate[0].astype(np.float32),
        down=rate[1].astype(np.float32),
        phase=rng.integers(0, 32, PEOPLE).astype(np.int32),
        awake=np.int32(rng.choice([32, 24, 16]) if exact else 32),
        idle=np.float32(rng.choice([9.0, 25.0])),
        key=np.int32(i),
    )


def replay(
    here: World,
    places: int,
    size: int,
    period: float | None,
    failures: float,
    chance: Any,
) -> list[dict[str, Any]]:
    """One event after another, by a heap."""
    at_work: list[tuple[float, int, int]] = []  # back, client or N, place
    held: dict[int, dict[str, Any]] = {}  # by place
    idle, now, out = set(range(places)), 0.0, []
    luck, first = chance
    for t in range(ROUNDS):
        start, turn = now, 0
        found: list[tuple[int, int]] = []
        seen = {"sent": 0, "asleep": 0, "lost": 0, "waiting": 0.0}
        done: list[dict[str, Any]] = []
        while True:
            turn += 1
            here_now = bool(at_work) and at_work[0][0] == now
            busy = {v["client"] for v in held.values()} | {f[0] for f in found}
            refill = period is None or now == start
            if idle and len(busy) < PEOPLE and refill and not here_now:
                free = [k for k in range(PEOPLE) if k not in busy]
                client = free[int(first[t, turn, len(free)])]
                place = min(idle)
                idle.remove(place)
                second = math.floor(now)
                if (second + here.phase[client]) % 32 >= here.awake:
                    seen["asleep"] += 1
                    heapq.heappush(at_work, (now + float(here.idle), PEOPLE, place))
                    continue
                seen["sent"] += 1
                down, up = 96 / float(here.down[client]), 160 / float(here.up[client])
                work = STEPS[client] * float(here.step[client])
                length, lost = down + work + up, bool(luck[t, turn, 0] < failures)
                length = float(luck[t, turn, 1]) * length if lost else length
                computed = min(max(length - down, 0.0), work)
                held[place] = {"client": client, "lost": lost, "sent": t}
                held[place] |= {"visit": (now, now + length)}
                held[place] |= {"work": (now + down, now + down + computed)}
                heapq.heappush(at_work, (now + length, client, place))
                continue
            end = None if period is None else start + period
            if not at_work or (end is not None and at_work[0][0] > end):
                then = now if end is None else end
                seen["waiting"] += len(idle) * (then - now)
                now = then
                break
            then, client, place = heapq.heappop(at_work)
            seen["waiting"] += len(idle) * (then - now)
            now = then
            idle.add(place)
            if client == PEOPLE:
                for other in [e for e in at_work if e[0] == then and e[1] == PEOPLE]:
                    at_work.remove(other)
                    idle.add(other[2])
                heapq.heapify(at_work)
                if not held and period is None:
                    break
                continue
            visit = held.pop(place)
            done.append(visit)
            if visit["lost"]:
                seen["lost"] += 1
                continue
            found.append((client, t - visit["sent"]))
            if len(found) == size and period is None:
                break
        assert turn < TURNS
        for visit in (*done, *held.values()):  # of those still at work what is in this round
            within, worked = (
                max(0.0, min(end, now) - max(began, start))
                for began, end in (visit["visit"], visit["work"])
            )
            seen["computing"] = seen.get("computing", 0.0) + worked
            seen["link"] = seen.get("link", 0.0) + within - worked
        out.append({"found": sorted(found), "seconds": now - start, "now": now, **seen})
    return out


class Seen(NamedTuple):
    """Of a round, see :class:`arrivals.Arrivals`."""

    client: Any
    age: Any
    sent: Any
    now: Any
    elapsed: Any


def played(worlds: World, places: int, size: int, period: float | None, failures: float) -> Any:
    """``[worlds, rounds]`` by the package, all in one program."""
    data = jax.tree.map(jnp.asarray, federation(SAMPLES).data)
    buffered = period is None
    flight: fs.base.Flight = fs.flight.buffered(size)
    if not buffered:
        flight = fs.flight.periodic(known(period))
    base = composed(places, flight, clock=clock.simulated(1.0))

    sizes = Traffic(upload=160, download=96, message=0, shared_state=0)

    def run(here: World) -> Any:
        def of(table: Any) -> Any:
            return lambda key, client, now: table[client]

        def awake(keys: Any, client: Any, now: Now) -> Any:
            return (now.seconds + here.phase[client]) % 32 < here.awake

        link = clock.bandwidth(of(here.up), of(here.down))
        own = clock.simulated(of(here.step), link, awake, failures=failures, idle=here.idle)
        parts = base.replace(clock=own).parts
        state = base.init(jax.random.key(0), net().init(jax.random.key(0)), data)

        def one(state: Any, t: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(here.key), t)
            back = arrivals.next_arrivals(parts, key, state, data, sizes)
            state = state._replace(round=state.round + 1, clock=back.now, at_work=back.at_work)
            return state, Seen(back.client, back.age, back.sent, back.now, back.elapsed)

        return jax.lax.scan(one, state, jnp.arange(ROUNDS))[1]

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(worlds))


@functools.cache
def world_chance() -> Any:
    """``[worlds, ...]`` of each round and turn, which is behind all worlds of chance."""

    def chance(i: Any) -> Any:
        def turn(t: Any, i: Any) -> Any:
            own = jax.random.fold_in(stream(jax.random.fold_in(key, t), Round.DISPATCH), i)
            free, pick = jnp.arange(PEOPLE + 1), stream(own, Dispatch.CLIENT)
            first = jax.vmap(lambda n: jax.random.randint(pick, (), 0, jnp.maximum(n, 1)))(free)
            return jax.random.uniform(stream(own, Dispatch.LOST), (2,)), first

        key, rounds, turns = jax.random.key(i), jnp.arange(ROUNDS), jnp.arange(TURNS)
        return jax.vmap(lambda t: jax.vmap(lambda i: turn(t, i))(turns))(rounds)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(chance))(jnp.arange(WORLDS)))


@pytest.mark.parametrize(
    ("places", "size", "period", "exact"),
    some_slow(
        [
            (4, 2, None, True),
            (5, 5, 4.0, False),
            (3, 1, None, False),
            (7, 7, None, False),
            (5, 5, 4.0, True),
        ],
        quick=2,
    ),
)
def test_worlds_against_a_heap(places: int, size: int, period: float | None, exact: bool) -> None:
    """60 each: who comes back, how stale, when, and what was sent and lost on the way."""
    failures = 0.0 if exact else 0.3
    worlds, luck = [world(i, exact) for i in range(WORLDS)], world_chance()
    stacked = World(*(np.stack(each) for each in zip(*worlds, strict=True)))
    ours = played(stacked, places, size, period, failures)
    stale = lost = asleep = 0
    for i, here in enumerate(worlds):
        chance = tuple(a[i] for a in luck)
        for t, told in enumerate(replay(here, places, size, period, failures, chance)):
            present = ours.client[i, t] < PEOPLE
            found = list(
                zip(ours.client[i, t][present].tolist(), ours.age[i, t][present].tolist(),
                    strict=True)
            )  # fmt: skip
            assert found == told["found"], (i, t)
            now = float(ours.now.seconds[i, t]) + float(ours.now.fraction[i, t])
            assert now == pytest.approx(told["now"], rel=1e-6, abs=1e-5)
            for name in ("seconds", "computing", "link", "waiting"):
                mine = float(getattr(ours.elapsed, name)[i, t])
                assert mine == pytest.approx(told.get(name, 0.0), rel=1e-5, abs=1e-4), (i, t, name)
            for name in ("asleep", "lost"):
                assert int(getattr(ours.elapsed, name)[i, t]) == told[name], (i, t, name)
            assert int(ours.sent[i, t]) == told["sent"], (i, t)
            stale, lost = stale + sum(age > 0 for _, age in found), lost + told["lost"]
            asleep += told["asleep"]
    assert (stale > 20) == (places < PEOPLE)  # who is all there is has no newer model to miss
    assert (asleep > 20) == exact
    assert (lost > 20) != exact


# ---- what comes of them ----

MIXED = clock.simulated(clock.tiers(1, 2, 7), clock.bandwidth(50.0, 80.0))


@functools.cache
def who(places: int, size: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Clients and ages of each round on the clock ``MIXED``, which the heap above knows."""
    made = composed(places, fs.flight.buffered(size), clock=MIXED)
    data = jax.tree.map(jnp.asarray, federation().data)
    initial = net().init(jax.random.fold_in(jax.random.key(0), 0))
    state, out = made.init(jax.random.key(0), initial, data), []
    parts = made.parts
    sizes = traffic.sizes(parts, initial, data)
    move = jax.jit(lambda key, state: arrivals.next_arrivals(parts, key, state, data, sizes))
    for t in range(rounds):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), t)
        back = known(move(key, state))
        state = state._replace(round=state.round + 1, clock=back.now, at_work=back.at_work)
        out.append(list(zip(back.client.tolist(), back.age.tolist(), strict=True)))
    return out


def by_hand(places: int, size: int, rounds: int, pull: float, moved: Any) -> list[oracle.Layers]:
    """The servers of a run; ``moved(k, w, old, trained, age)`` is a client's move."""
    initial = net().init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(federation().data, initial, LR, 0.0, BATCH, 1)
    versions = [oracle.layers_of(initial)]
    for t, arrived in enumerate(who(places, size, rounds)):
        moves = []
        for k, age in arrived:
            old = versions[t - age]

            def drawn_back(v: oracle.Layers, old: oracle.Layers = old) -> oracle.Layers:
                return [pull * e for e in oracle.plus(v, old, -1)]

            trained = clients.visit(t, k, old, drawn_back).layers
            moves.append(moved(k, versions[-1], old, trained, age))
        step = oracle.average(moves, [1.0] * len(moves))
        versions.append(oracle.plus(versions[-1], step))
    assert max(age for arrived in who(places, size, rounds) for _, age in arrived) > 1
    return versions[1:]


def test_fedasync_against_numpy() -> None:
    """Each client trains from the model that it was sent, and the server moves towards its."""
    alpha, mu = 0.6, 0.3

    def moved(k: int, w: Any, old: Any, trained: Any, age: int) -> oracle.Layers:
        return [alpha * (age + 1) ** -0.5 * e for e in oracle.plus(trained, w, -1)]

    made = fedasync(local(), clients_per_round=5, buffer_size=2, mu=mu, clock=MIXED).on(
        ONE["execution"]
    )
    assert made.round_factor == 2.5
    check(by_hand(5, 2, 8, mu, moved), play(made, net(), federation().data, 8).servers)


def test_fedbuff_against_numpy() -> None:
    """The server adds the updates, each measured from the model that its client was sent.

    There codes and attacks act on it: a flipped sign mirrors the update at that model, and not at
    the server's.
    """
    flipped = np.arange(N) % 2 == 0

    def moved(k: int, w: Any, old: Any, trained: Any, age: int) -> oracle.Layers:
        sign = -1 if flipped[k] else 1
        return [0.7 * sign * (age + 1) ** -0.5 * e for e in oracle.plus(trained, old, -1)]

    made = (
        fedbuff(local(), clients_per_round=5, buffer_size=2, server_lr=0.7, clock=MIXED)
        .on(ONE["execution"])
        .replace(sending=(fs.attacks.sign_flip(flipped, 1.0),))
    )
    ours = play(made, net(), federation().data, 8)
    check(by_hand(5, 2, 8, 0.0, moved), ours.servers)
    sent = flipped[np.array([m.client for m in ours.metrics])]
    assert sent.any()
    assert not sent.all()


def check(theirs: list[oracle.Layers], ours: list[Any]) -> None:
    for layers, variables in zip(theirs, ours, strict=True):
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_a_period_takes_who_comes_back_in_it() -> None:
    """Nobody in the first second, all of those that take one and a half in the next."""
    made = composed(
        3,
        fs.flight.periodic(1.0),
        weighting=fs.weighting.equal,
        clock=clock.simulated(1.5),
    )
    found = play(made, net(), make_federation((8,) * 6).data, 4)
    assert [int((m.client < 6).sum()) for m in found.metrics] == [0, 3, 0, 3]
    assert [float(known(m.time).seconds) for m in found.metrics] == [1.0] * 4
    assert [float(known(m.time).waiting) for m in found.metrics] == [0.0, 1.5, 0.0, 1.5]
    assert_trees(found.servers[0], found.servers[1].__class__(*found.servers[0]))
    assert [int(m.downloads) for m in found.metrics] == [3, 0, 3, 0]


def test_if_nobody_wakes_rounds_pass() -> None:
    asleep = clock.simulated(1.0, available=clock.bernoulli(0.0), idle=7.0)
    made = fedbuff(local(), clients_per_round=4, buffer_size=2, clock=asleep).on(ONE["execution"])
    found = play(made, net(), federation().data, 3)
    assert [float(known(m.time).seconds) for m in found.metrics] == [7.0] * 3
    assert [int(known(m.time).asleep) for m in found.metrics] == [4] * 3
    assert sum(int(m.visits) + int(m.uploads) + int(m.downloads) for m in found.metrics) == 0
    assert_trees(found.servers[0], found.servers[2])


# ---- with other parts ----


def test_a_client_keeps_its_state_from_visit_to_visit() -> None:
    """The momentum of each is its own; who is at work has not trained yet."""
    made = fedbuff(local(optimizer_state="keep").change(), clients_per_round=4, clock=MIXED).on(
        ONE["execution"]
    )
    made = made.replace(local=fs.local_sgd(fs.empirical_risk(net()), optax.sgd(LR, momentum=0.9),
                                           BATCH, optimizer_state="keep"))  # fmt: skip
    found = play(made, net(), federation().data, 3)
    seen = {int(k) for m in found.metrics for k in m.client}
    kept = jax.tree.leaves(found.states[-1].client_state)
    for k in range(N):
        assert any(np.asarray(leaf[k]).any() for leaf in kept) == (k in seen)


@pytest.mark.slow
def test_models_at_work_are_not_copied() -> None:
    """A round writes one model among them, where it is."""
    many = make_federation(sizes=(2,) * 60, shape=(2000,), tests=1)
    model, size = fs.models.logistic((2000,), 3), 4 * (2000 * 3 + 3)
    train = fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), BATCH)
    keys = jax.random.split(jax.random.key(0), 1)  # a run beside others is a vmapped one

    made = fedasync(train, clients_per_round=50, clock=MIXED).on(ONE["execution"])

    def rounds(keys: Any, states: Any, data: Any) -> Any:
        step: Any = jax.vmap(lambda key, state: made.step(key, state, data)[0])
        return jax.lax.fori_loop(0, 9, lambda i, states: step(keys, states), states)

    begin = jax.vmap(lambda key: made.init(key, model.init(key), many.data))
    states = jax.eval_shape(begin, keys)
    program = jax.jit(rounds, donate_argnums=1).lower(keys, states, many.data)
    memory: Any = known(program.compile().memory_analysis())
    assert memory.temp_size_in_bytes < 15 * size  # as with ten at work


# ---- what is refused ----


class timing(fs.selection.uniform):
    """A user's selection, to which no round reports seconds here."""

    times = True


TIMED: dict[str, Any] = {"clients_per_round": 4, "buffer_size": 2, "clock": MIXED}
BAD: dict[str, tuple[Any, str]] = {
    "more than are at work": (
        lambda: composed(4, fs.flight.buffered(5), clock=MIXED),
        r"buffer_size must be in 1..4, the models that are at work at once, got 5",
    ),
    "no length": (lambda: fs.flight.periodic(0.0), "seconds must be positive"),
    "an age that is drawn": (
        lambda: fedbuff(local(), max_staleness=4, **TIMED),
        "max_staleness must be None with a clock, which determines the staleness, got 4",
    ),
    "a shared link": (
        lambda: fedasync(
            local(), clients_per_round=4,
            clock=clock.simulated(1, clock.bandwidth(10, 10, shared=True)),
        ),
        r"without a shared uplink, clock is simulated\(1, link=bandwidth",
    ),
    "an end that is not known": (
        lambda: fedbuff(local(inexactness=0.5), **TIMED),
        r"needs local updates whose number of steps is known in advance, local is local_sgd",
    ),
    "a selection that reads the seconds of rounds": (
        lambda: composed(4, fs.flight.buffered(2), clock=MIXED, selection=timing()),
        r"selection timing\(\) needs no server update while clients train, flight is buffered",
    ),
    "fewer clients": (
        lambda: play(
            fedbuff(local(), clients_per_round=9, clock=MIXED).on(ONE["execution"]),
            net(), federation().data, 1
        ),
        "clients_per_round must be at most the 8 clients, got 9",
    ),
}  # fmt: skip


test_what_is_refused = rejects(BAD, escape=False)
