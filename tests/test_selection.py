"""Selections that know losses, seconds and who is awake, against plain programs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SIZES, altered_data, make_federation, rejects, some_slow
from fed import Fed, local_of
from oracle import layers_of
from scipy import stats

import fedjax_sim as fs
from fedjax_sim.base import ClientData, FedState, Metrics
from fedjax_sim.client import reports
from fedjax_sim.engine import draws
from fedjax_sim.engine.streams import Device, Round, Seed, stream

N, B, EPOCHS, M = len(SIZES), 4, 2, 3
STEPS = np.array([EPOCHS * -(-n // B) for n in SIZES])
SIZE = 4 * (6 * 3 + 3)  # of the model, in bytes
ROUNDS = 4
UP = fs.clock.tiers(10, 30)
CLOCK = fs.clock.simulated(
    fs.clock.tiers(1, 2, 10), fs.clock.bandwidth(UP, 40.0), fs.clock.bernoulli(0.7)
)
ONE = fs.make_execution(devices=1)


def compose(*args: Any, **parts: Any) -> fs.Algorithm:
    return fs.compose(*args, **parts).on(ONE)


@functools.cache
def net() -> fs.Model:
    return fs.models.logistic((6,), 3)


@functools.cache
def data() -> ClientData:
    return jax.device_put(make_federation().data)


@functools.cache
def risk() -> fs.base.Objective:
    return fs.empirical_risk(net())


@functools.cache
def local() -> fs.LocalUpdate:
    return fs.local_sgd(risk(), optax.sgd(0.1), B, EPOCHS)


def algorithm(selection: fs.base.Selection, clock: fs.base.Clock | None, **parts: Any) -> Any:
    given = {"local": local(), "clients_per_round": M, **parts}
    return compose(selection=selection, clock=clock, **given)


def play(made: fs.Algorithm, rounds: int = ROUNDS) -> list[tuple[Any, FedState, Metrics, FedState]]:
    """The key of each round, the state before it, its report and the state after it."""
    state = made.init(jax.random.key(0), net().init(jax.random.key(1)), data())
    step, out = jax.jit(made.step), []
    for t in range(rounds):
        key = jax.random.fold_in(stream(jax.random.key(0), Seed.ROUNDS), t)
        after, metrics = step(key, state, data())
        out.append((key, state, metrics, after))
        state = after
    return out


def cohort(metrics: Metrics) -> set[int]:
    return set(np.asarray(metrics.client).tolist()) - {N}


def losses(server: Any, bias: Any = None) -> np.ndarray:
    """The mean cross entropy of each client at a model, in float64."""
    leaves = {leaf.ndim: np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(server)}
    x, y = np.asarray(data().x, np.float64), np.asarray(data().y)
    out = []
    for k in range(N):
        rows = np.asarray(data().index)[data().start[k] : data().start[k + 1]]
        b = leaves[1] if bias is None else np.asarray(bias, np.float64)[k]
        logits = x[rows] @ leaves[2] + b
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        out.append(-log_p[np.arange(len(rows)), y[rows]].mean())
    return np.array(out)


def drawn(law: float | fs.base.Law, which: Device) -> np.ndarray:
    key = stream(jax.random.key(0), which)
    start = fs.base.Now(jnp.int32(0), jnp.float32(0))
    return np.asarray(
        fs.base.evaluate_law(law, key, jnp.arange(N, dtype=jnp.int32), start), np.float64
    )


def there(clock: fs.base.Clock | None, key: Any, state: FedState) -> np.ndarray:
    """Who is awake in a round."""
    available: Any = None if clock is None else clock.available
    return (
        np.ones(N, bool) if available is None else np.asarray(_there(available)(key, state.clock))
    )


@functools.cache
def _there(available: Any) -> Any:
    def of_all(key: Any, now: fs.base.Now) -> Any:
        client = jnp.arange(N, dtype=jnp.int32)
        own = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream(key, Round.AWAKE), client)
        return available(own, client, now)

    return jax.jit(of_all)


_by_size = jax.jit(draws.by_size, static_argnums=1)
_distinct = jax.jit(draws.distinct, static_argnums=(1, 2))


# ---- power of choice ----


@pytest.mark.parametrize("own", some_slow([False, True]))
def test_the_largest_losses_of_those_asked(own: bool) -> None:
    """Candidates by their samples; they have the model, of which a bias may be their own.

    All of it takes less than a second: whoever sleeps takes no time at all.
    """
    d, up = 5, fs.clock.tiers(1e5, 3e5)
    clock = CLOCK.replace(
        compute=fs.clock.tiers(1e-4, 2e-4, 1e-3), link=fs.clock.bandwidth(up, 4e5)
    )
    part = {"exchange": fs.exchange.split(own=fs.leaves.named("*/bias"))} if own else {}
    score = reports.mean_loss(risk(), batch_size=3)
    made = algorithm(fs.selection.power_of_choice(d, score), clock, **part)
    size = made.traffic(net().init(jax.random.key(0)), data())
    assert (size.answer, size.upload) == (4, 4 * 6 * 3 if own else SIZE)
    step, up_rate = drawn(clock.compute, Device.COMPUTE), drawn(up, Device.UP)
    asleep = 0
    for key, state, metrics, _ in play(made):
        awake = there(clock, key, state)
        candidates = _by_size(stream(key, Round.POLL), d, data().start).tolist()
        assert len(set(candidates)) == d
        asked = [k for k in candidates if awake[k]]
        asleep += d - len(asked)
        mine = jax.tree.leaves(state.own)[0] if own else None
        loss = losses(state.server, mine)
        first = sorted(asked, key=lambda k: -loss[k])[:M]
        assert cohort(metrics) == set(first)
        assert metrics.answers is not None
        counts = (metrics.answers, metrics.downloads, metrics.uploads)
        assert [*map(int, counts)] == [len(asked), len(asked), len(first)]
        before = [
            size.download / 4e5 + -(-SIZES[k] // B) / 3 * step[k] + 4 / up_rate[k] for k in asked
        ]
        after = [STEPS[k] * step[k] + size.upload / up_rate[k] for k in first]
        assert metrics.time is not None
        assert float(metrics.time.seconds) == pytest.approx(max(before) + max(after), rel=1e-5)
        work = sum(-(-SIZES[k] // B) / 3 * step[k] for k in asked)
        work += sum(STEPS[k] * step[k] for k in first)
        assert float(metrics.time.computing) == pytest.approx(work, rel=1e-5)
    assert asleep > 0


def test_the_largest_losses_that_are_known() -> None:
    """Those of the last visits; clients without one come first."""
    made = algorithm(fs.selection.power_of_choice(5), None)
    known = np.full(N, np.inf)
    several = 0
    for key, state, metrics, after in play(made, 8):
        asked = np.asarray(_by_size(stream(key, Round.SELECTION), 5, data().start))
        np.testing.assert_array_equal(np.asarray(state.selection), known.astype(np.float32))
        chosen = cohort(metrics)
        left = set(asked.tolist()) - chosen
        assert chosen < set(asked.tolist())
        assert min(known[k] for k in chosen) >= max(known[k] for k in left)
        several += bool(np.isfinite(known[asked]).all())
        known = np.asarray(after.selection, np.float64).copy()
        assert set(np.flatnonzero(np.isfinite(known))) >= chosen
        assert metrics.answers is None
    assert several


def test_copies_do_not_count_as_samples() -> None:
    """Of clients with copies the budgets are the sizes."""
    budget = jnp.asarray([1, 1, 1, 10**6, 10**6, 10**6, 1, 1], jnp.int32)
    with_copies = altered_data(data(), budget=budget)
    part = fs.selection.power_of_choice(M)
    none = jnp.zeros(M, jnp.int32)
    state = part.init(net().init(jax.random.key(0)), with_copies, fs.make_execution(devices=1))
    found, _ = part.draw(jax.random.key(0), state, with_copies, none, none == 0, none)
    assert sorted(found.tolist()) == [3, 4, 5]


# ---- FedCS ----


@pytest.mark.parametrize("shared", some_slow([False, True]))
def test_as_many_as_meet_the_deadline(shared: bool) -> None:
    """No larger part of the candidates would, and nobody is late."""
    laws, up = fs.clock.lognormal(1.0, 1.0), 30.0 if shared else fs.clock.tiers(10, 50)
    link = fs.clock.bandwidth(up, fs.clock.tiers(20, 60), shared=shared)
    clock = fs.clock.simulated(laws, link, fs.clock.bernoulli(0.8), deadline=24.0)
    slots, asked_of = 4, 6
    made = algorithm(fs.selection.within_deadline(asked_of), clock, clients_per_round=slots)
    size = made.traffic(net().init(jax.random.key(0)), data())
    assert size.answer == 12
    step, down = drawn(laws, Device.COMPUTE), drawn(link.down, Device.DOWN)
    rate = drawn(link.up, Device.UP)
    counts = set()
    for key, state, metrics, _ in play(made, 6):
        awake = there(clock, key, state)
        asked = np.asarray(_distinct(stream(key, Round.POLL), asked_of, N)).tolist()
        asked = [k for k in asked if awake[k]]

        def seconds(some: tuple[int, ...]) -> float:
            users = len(some) if shared else 1
            each = [SIZE / down[k] + STEPS[k] * step[k] + SIZE * users / rate[k] for k in some]
            return max(each, default=0.0)

        sets = [s for n in range(slots + 1) for s in itertools.combinations(asked, n)]
        most = max(len(s) for s in sets if seconds(s) <= 24)
        chosen = cohort(metrics)
        assert chosen <= set(asked)
        assert len(chosen) == most
        assert seconds(tuple(chosen)) <= 24
        assert metrics.answers == len(asked)
        assert metrics.downloads == metrics.uploads == most
        assert metrics.time is not None
        assert int(metrics.time.late) == 0
        counts.add(most)
    assert len(counts) > 1


@pytest.mark.slow
def test_without_haste_all_candidates_train() -> None:
    """Then they are a uniform cohort."""
    clock = fs.clock.simulated(fs.clock.tiers(1, 2, 10), deadline=1e9)
    made = algorithm(fs.selection.within_deadline(M), clock)
    for key, _, metrics, _ in play(made, 3):
        assert cohort(metrics) == set(_distinct(stream(key, Round.POLL), M, N).tolist())


# ---- awake ----


def test_no_slot_idles_while_others_are_awake() -> None:
    asleep = 0
    for key, state, metrics, _ in play(algorithm(fs.selection.awake(), CLOCK), 6):
        awake = set(np.flatnonzero(there(CLOCK, key, state)).tolist())
        assert cohort(metrics) <= awake
        assert len(cohort(metrics)) == min(M, len(awake))
        assert metrics.time is not None
        assert int(metrics.time.asleep) == 0
        asleep += N - len(awake)
    assert asleep > 0


def test_all_awake_clients_are_as_likely() -> None:
    """Also if numbers are drawn until enough are awake, and no more than there are."""
    allowed: Callable[[Any], Any] = lambda k: k % 5 == 0  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 4000)
    for total in (40, 10**4):
        draw = functools.partial(draws.distinct, count=3, total=total, allowed=allowed)
        found = np.asarray(jax.jit(jax.vmap(draw))(keys))
        assert (found % 5 == 0).all()
        assert (np.sort(found)[:, 1:] != np.sort(found)[:, :-1]).all()
        counts = np.histogram(found, bins=8, range=(0, total))[0]
        assert (np.abs(counts - found.size / 8) < 5 * math.sqrt(found.size / 8)).all()
    few = draws.distinct(jax.random.key(0), 99, 10**4, allowed=lambda k: k % 1000 == 7)
    assert sorted(few.tolist()) == [*range(7, 10**4, 1000), *89 * [10**4]]


# ---- TiFL ----


def accuracies(server: Any) -> np.ndarray:
    """The right answers of each client at a model."""
    leaves = {leaf.ndim: np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(server)}
    right = np.argmax(np.asarray(data().x) @ leaves[2] + leaves[1], axis=1) == data().y
    index, start = np.asarray(data().index), np.asarray(data().start)
    return np.array([right[index[start[k] : start[k + 1]]].sum() for k in range(N)])


def test_tiers_take_turns_by_their_accuracy() -> None:
    """Two tiers, evaluated every other round; whoever sleeps is neither asked nor drawn."""
    made = algorithm(
        fs.selection.tiers(2, reports.accuracy(net(), 3), credit=6), CLOCK,
        clients_per_round=M,
    )  # fmt: skip
    size = made.traffic(net().init(jax.random.key(0)), data())
    assert size.answer == 4
    assert made.setup_traffic(net().init(jax.random.key(0)), data()) == (N * SIZE, N * SIZE)
    seconds = SIZE / 40 + STEPS * drawn(CLOCK.compute, Device.COMPUTE) + SIZE / drawn(UP, Device.UP)
    tier = np.zeros(N, int)
    tier[np.argsort(seconds, kind="stable")[N // 2 :]] = 1
    accuracy, chances, credits, last = np.full(2, np.nan), np.full(2, 0.5), np.full(2, 6), 0
    changed = 0
    for t, (key, state, metrics, after) in enumerate(play(made, 8)):
        awake = there(CLOCK, key, state)
        assert metrics.answers == (awake.sum() if t % 2 == 0 else 0)
        if t % 2 == 0:
            right, before = accuracies(state.server), accuracy.copy()
            for i in range(2):
                of = awake & (tier == i)
                if of.any():
                    accuracy[i] = right[of].sum() / np.array(SIZES)[of].sum()
            if accuracy[last] <= before[last]:
                rich = [i for i in np.argsort(accuracy, kind="stable") if credits[i] > 0]
                n, chances = len(rich), np.zeros(2)
                for rank, i in enumerate(rich):
                    chances[i] = 2 * (n - rank) / (n * (n + 1))
                changed += n == 2
        kept = after.selection
        np.testing.assert_array_equal(kept.tier, tier)
        np.testing.assert_allclose(kept.accuracy, accuracy, rtol=1e-6)
        np.testing.assert_allclose(kept.chances, chances, rtol=1e-6)
        last = int(kept.last)
        assert credits[last] > 0
        credits[last] -= 1
        assert kept.credits.tolist() == credits.tolist()
        of_tier = set(np.flatnonzero(awake & (tier == last)).tolist())
        assert cohort(metrics) <= of_tier
        assert len(cohort(metrics)) == min(M, len(of_tier))
        # Those who were asked have the model.
        asked = 0 if t % 2 else int(awake.sum())
        assert int(metrics.downloads) == (asked or len(cohort(metrics)))
    assert changed
    assert credits.sum() == 2 * 6 - 8


def outlook(seconds: Any) -> fs.base.Outlook:
    """Of clients that are all awake."""
    return fs.base.Outlook(
        lambda client, uploads: jnp.asarray(seconds, jnp.float32)[client],
        lambda client: jnp.ones(len(client), bool),
        math.inf,
    )


def many_draws(part: fs.base.Selection, slots: int) -> Callable[[Callable[[Any], Any]], np.ndarray]:
    """Which clients each of 4000 draws has, ``bool[4000, N]``, from a state that was changed."""
    start = part.init(net().init(jax.random.key(0)), data(), fs.make_execution(devices=1))
    none = jnp.zeros(slots, jnp.int32)
    timed = part.timed
    assert timed is not None

    @jax.jit
    def draw(state: Any, keys: Any) -> Any:
        seconds = outlook(np.arange(1, N + 1))

        def one(key: Any) -> Any:
            return timed(key, state, data(), none, none == 0, none, seconds)[0]

        return jax.vmap(one)(keys)

    def found(change: Callable[[Any], Any]) -> np.ndarray:
        clients = draw(change(start), jax.random.split(jax.random.key(0), 4000))
        return (np.asarray(clients)[:, :, None] == np.arange(N)).any(axis=1)

    return found


def test_one_tier_is_everyone() -> None:
    found = many_draws(fs.selection.tiers(1, reports.accuracy(net())), M)(lambda state: state)
    assert (found.sum(axis=1) == M).all()
    np.testing.assert_allclose(found.mean(axis=0), M / N, atol=5 * 0.5 / math.sqrt(4000))


def test_tiers_come_with_their_chances_while_they_have_credits() -> None:
    found = many_draws(fs.selection.tiers(4, reports.accuracy(net())), 1)

    def shares(credits: list[int]) -> np.ndarray:
        def change(state: Any) -> Any:
            return state._replace(
                chances=jnp.array([0.7, 0.2, 0.1, 0.0]), credits=jnp.array(credits, jnp.int32)
            )

        return found(change).mean(axis=0).reshape(4, 2).sum(axis=1)

    cases: dict[tuple[int, ...], list[float]] = {
        (9, 9, 9, 9): [0.7, 0.2, 0.1, 0],
        (0, 9, 9, 9): [0, 2 / 3, 1 / 3, 0],
        (0, 0, 0, 9): [0, 0, 0, 1],
        (0, 0, 0, 0): [0.7, 0.2, 0.1, 0],
    }
    for credits, expected in cases.items():
        np.testing.assert_allclose(shares([*credits]), expected, atol=0.04)


# ---- Oort ----


def utilities(server: Any) -> np.ndarray:
    """N times the root of the mean squared loss of each client."""
    leaves = {leaf.ndim: np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(server)}
    logits = np.asarray(data().x, np.float64) @ leaves[2] + leaves[1]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(len(logits)), np.asarray(data().y)]
    index, start = np.asarray(data().index), np.asarray(data().start)
    each = [loss[index[start[k] : start[k + 1]]] for k in range(N)]
    return np.array([len(a) * np.sqrt((a**2).mean()) for a in each])


def worth(known: list[int], u: np.ndarray, s: np.ndarray, last: np.ndarray, turn: int,
           share: float) -> dict[int, float]:  # fmt: skip
    """What each known client is worth, client by client."""
    clip = sorted(u[known])[min(int(0.95 * len(known)), len(known) - 1)]
    cut = {k: min(u[k], clip) for k in known}
    low, high = min(cut.values()), max(cut.values())
    visited = [k for k in range(N) if last[k] > 0]
    limit = sorted(s[visited])[min(int(share * len(visited)), len(visited) - 1)]
    out = {}
    for k in known:
        v = (cut[k] - low) / max(high - low, 1e-4) + math.sqrt(0.1 * math.log(turn) / last[k])
        out[k] = v * ((limit / s[k]) ** 2 if s[k] > limit else 1)
    return out


def test_utility_and_seconds_choose() -> None:
    """Some that are new, and of the known ones some of the best."""
    law = fs.clock.lognormal(1.0, 1.0)
    clock = fs.clock.simulated(law, available=fs.clock.bernoulli(0.8))
    made = algorithm(
        fs.selection.guided(explore=0.5, decay=0.9, least=0.3, share=0.5),
        clock,
        local=fs.local.with_utility(local(), risk()),
    )
    assert made.traffic(net().init(jax.random.key(0)), data()).message == 4
    step = drawn(law, Device.COMPUTE)
    u, s, last = np.zeros(N), np.zeros(N), np.zeros(N, int)
    sums, best = [0.0] * 40, 0
    for turn, (key, state, metrics, after) in enumerate(play(made, 10), start=1):
        awake = there(clock, key, state)
        known = [k for k in range(N) if awake[k] and last[k] > 0]
        new = {k for k in range(N) if awake[k] and last[k] == 0}
        wanted = math.floor((1 - max(0.5 * 0.9**turn, 0.3)) * M)
        explored = min(M - min(wanted, len(known)), len(new))
        exploited = min(M - explored, len(known))
        chosen = cohort(metrics)
        assert len(chosen & new) == explored
        assert len(chosen - new) == exploited
        if exploited:
            v = worth(known, u, s, last, turn, 0.5)
            ordered = sorted(v.values(), reverse=True)
            cut = 0.95 * ordered[exploited] if exploited < len(ordered) else 0
            assert all(v[k] >= cut * (1 - 1e-5) for k in chosen - new)
            best += exploited < len(known)
        now = utilities(state.server)
        for k in chosen:
            u[k], s[k], last[k] = now[k], STEPS[k] * step[k], turn
        sums = [*sums[1:], sum(now[k] for k in chosen)]
        kept = after.selection
        np.testing.assert_allclose(kept.utility, u, rtol=1e-4)
        np.testing.assert_allclose(kept.seconds, s, rtol=1e-5)
        np.testing.assert_allclose(kept.sums, sums, rtol=1e-4)
        assert kept.last.tolist() == last.tolist()
    assert best >= 3


def _seen(state: Any) -> Any:
    """Four clients are known, in the third round."""
    return state._replace(
        utility=jnp.array([4.0, 3.8, 1.0, 2.0, 0, 0, 0, 0]),
        seconds=jnp.array([1.0, 1.0, 9.0, 2.0, *4 * [0]]),
        last=jnp.array([1, 2, 1, 2, 0, 0, 0, 0], jnp.int32),
        round=jnp.int32(2),
    )


def test_the_known_are_drawn_by_value_and_the_new_by_speed() -> None:
    part = fs.selection.guided(explore=0.5, decay=1.0, share=0.5)
    found = many_draws(part, 2)(_seen)
    assert (found[:, :4].sum(axis=1) == 1).all()
    state: Any = _seen(part.init(net().init(jax.random.key(0)), data(), None))  # type: ignore[arg-type]
    u, s, last = (np.asarray(a, float) for a in (state.utility, state.seconds, state.last))
    v = worth([0, 1, 2, 3], u, s, last, 3, 0.5)
    ordered = sorted(v.values(), reverse=True)
    best = np.array([v[k] if v[k] >= 0.95 * ordered[1] else 0 for k in range(4)])
    np.testing.assert_allclose(found[:, :4].mean(axis=0), best / best.sum(), atol=0.04)
    speed = 1 / np.arange(5, 9)
    np.testing.assert_allclose(found[:, 4:].mean(axis=0), speed / speed.sum(), atol=0.04)


@pytest.mark.slow
def test_who_only_explores_meets_everyone_first() -> None:
    part = fs.selection.guided(explore=1.0, decay=1.0, least=1.0)
    clock = fs.clock.simulated(fs.clock.tiers(1, 2, 10))
    made = algorithm(part, clock, local=fs.local.with_utility(local(), risk()))
    rounds = [cohort(metrics) for _, _, metrics, _ in play(made, 3)]
    assert len(rounds[0] | rounds[1]) == 2 * M
    assert set.union(*rounds) == set(range(N))
    assert len(rounds[2]) == M


@functools.cache
def paced() -> Any:
    """What is known after a draw, of the sums of utilities and the round before it."""
    part, none = fs.selection.guided(window=2), jnp.zeros(M, jnp.int32)
    state: Any = _seen(part.init(net().init(jax.random.key(0)), data(), None))  # type: ignore[arg-type]
    timed, seconds = part.timed, outlook(np.arange(1, N + 1))
    assert timed is not None

    def after(sums: jax.Array, turn: jax.Array) -> Any:
        old = state._replace(sums=sums, round=turn)
        return timed(jax.random.key(0), old, data(), none, none == 0, none, seconds)[1]

    return jax.jit(after)


@pytest.mark.parametrize(("older", "rounds", "share"), [
    (3.0, 4, 0.35), (1.0, 4, 0.3), (2.0, 4, 0.3), (3.0, 5, 0.3), (3.0, 2, 0.3),
])  # fmt: skip
def test_the_pace_slows_if_the_utility_shrinks(older: float, rounds: int, share: float) -> None:
    after: Any = paced()(jnp.array([older, older, 2.0, 2.0], jnp.float32), jnp.int32(rounds))
    assert float(after.share) == pytest.approx(share)
    assert int(after.round) == rounds + 1


# ---- what they cost ----


def crowd() -> ClientData:
    start = jnp.zeros(10**5 + 1, jnp.int32)
    return jax.tree.map(jnp.asarray, altered_data(data(), start=start))


LARGE: dict[str, Callable[[], tuple[fs.base.Selection, fs.base.Clock | None]]] = {
    "power of choice": lambda: (
        fs.selection.power_of_choice(5, reports.mean_loss(risk())), CLOCK,
    ),
    "fedcs": lambda: (fs.selection.within_deadline(5), CLOCK.replace(deadline=9.0)),
    "awake": lambda: (fs.selection.awake(), CLOCK),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_round_is_no_larger_for_many_clients(name: str) -> None:
    """No array has an axis of all clients but the lists of their samples."""
    made, many = algorithm(*LARGE[name]()), crowd()
    state = jax.eval_shape(made.init, jax.random.key(0), net().init(jax.random.key(0)), many)
    text = str(jax.make_jaxpr(made.step)(jax.random.key(0), state, many))
    assert text.count("[100000") + text.count(",100000") == 0


# ---- what is refused ----


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "fewer than slots": (
        lambda: play(algorithm(fs.selection.power_of_choice(2), None), 1),
        "candidates must be at least the 3 slots, got 2",
    ),
    "fewer than a cohort": (
        lambda: fs.algorithms.power_of_choice(
            local(), clients_per_round=4, objective=risk(), candidates=3
        ),
        "candidates must be at least the 4 clients of a round, got 3",
    ),
    "more tiers than clients": (
        lambda: play(algorithm(fs.selection.tiers(9, reports.accuracy(net())), CLOCK), 1),
        "count must be at most the 8 clients, got 9",
    ),
    "window": (lambda: fs.selection.guided(window=0), "window must be in 1..10000000, got 0"),
    "nobody's utility": (
        lambda: play(algorithm(fs.selection.guided(), CLOCK), 1),
        r"selection guided\(\) needs clients that report utility, local is local_sgd",
    ),
}  # fmt: skip


test_what_is_refused = rejects(BAD, escape=False)


# ---- with replacement ----


@pytest.mark.parametrize("budget", [None, np.minimum(SIZES, 10).astype(np.int32)])
def test_slots_are_drawn_independently_by_size(budget: np.ndarray | None) -> None:
    """Each pair of clients with p_j p_k, also the same one twice: plain means are unbiased."""
    population = altered_data(data(), budget=budget)
    sizes, draws, none = np.array(SIZES if budget is None else budget), 50_000, jnp.zeros(2, int)
    draw = jax.vmap(fs.selection.with_replacement().draw, in_axes=(0, *5 * (None,)))
    keys = jax.random.split(jax.random.key(0), draws)
    found = np.asarray(jax.jit(draw)(keys, (), population, none, none == 0, none)[0])
    table = np.zeros((N, N))
    np.add.at(table, (found[:, 0], found[:, 1]), 1)
    p = sizes / sizes.sum()
    assert stats.chisquare(table.ravel(), draws * np.outer(p, p).ravel()).pvalue > 0.01


def test_a_client_drawn_twice_counts_twice() -> None:
    """The plain mean over the draw, on one device and on several."""
    for execution in (ONE, fs.make_execution(4)):
        algorithm = fs.compose(
            local_of(net()), clients_per_round=5, selection=fs.selection.with_replacement(),
            weighting=fs.weighting.equal,
        ).on(execution)  # fmt: skip
        found = fs.simulate(
            algorithm, net(), data(), make_federation().test, rounds=2, classes=3,
            execution=execution, record=lambda state: state.server,
        )  # fmt: skip
        plain = Fed(data(), layers_of(net().init(jax.random.fold_in(jax.random.key(0), 0))))
        plain.equal, none = True, jnp.zeros(5, jnp.int32)
        for t, evaluation in enumerate(found.evaluations):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), t)
            drawn, _ = algorithm.parts.selection.draw(
                stream(key, Round.SELECTION), (), data(), none, none == 0, none
            )
            assert len({*drawn.tolist()}) < 5
            server = jax.tree.map(lambda a: a[0], evaluation.recorded)
            for ours, theirs in zip(layers_of(server), plain.round(drawn.tolist()), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
