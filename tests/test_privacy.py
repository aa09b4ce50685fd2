"""Clipping, noise and Poisson cohorts by their laws, and epsilon against closed forms."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import SIZES, Federation, Play, assert_trees, make_federation, play, rejects
from scipy import linalg, optimize, stats

import fedjax_sim as fs
from fedjax_sim import (
    broadcast,
    compression,
    corrections,
    flight,
    preaggregation,
    privacy,
    selection,
    sending,
    tree,
)
from fedjax_sim.algorithms import dp_fedavg, dp_ftrl
from fedjax_sim.base import Cohort, LocalInfo, LocalUpdate, Variables

KEY = jax.random.key(0)
LR = 0.05
ONE = fs.make_execution(devices=1)
N = len(SIZES)


def cohort_of(server: Any, rows: int) -> Cohort:
    none = jnp.zeros(rows, jnp.int32)
    info = LocalInfo(jnp.zeros(rows), none, none)
    w = Variables(server, {})
    present, data = jnp.ones(rows, bool), cast("Any", None)
    return Cohort(w, tree.stack_copies(w, 1), none, present, none, info, (), data)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def private_step(
    updates: Any, weights: Any, key: Any = KEY, clip: float = 1.0, z: float = 0.0, m: float = 2.0
) -> tuple[Any, Any]:
    """The mean of the updates, and the weights after the mechanism."""
    mechanism = privacy.gaussian_mechanism(clip, z, m)
    server = jax.tree.map(lambda a: jnp.full(a.shape[1:], 3.0), updates)
    rows, weights, _ = mechanism.apply(
        key, (), Variables(updates, {}), jnp.asarray(weights), cohort_of(server, len(weights))
    )
    return tree.mean(rows, weights).params, weights


def test_clipped_sum_over_a_fixed_denominator() -> None:
    steps = np.array([[3.0, 0.0, 4.0], [0.1, 0.2, 0.2], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]])
    updates = {"a": jnp.float32(steps[:, :2]), "b": jnp.float32(steps[:, 2:, None])}
    got, weights = private_step(updates, jnp.array([5.0, 1.0, 0.0, 2.0]))
    # The first is clipped from norm 5, the second (0.3) is not, the third is absent.
    wanted = (steps[0] / 5 + steps[1]) / 2
    np.testing.assert_allclose(got["a"], wanted[:2], rtol=1e-5)
    np.testing.assert_allclose(got["b"], wanted[2:, None], rtol=1e-5)
    assert weights.tolist() == [1, 1, 1, 1]


def test_absent_rows_and_order_are_invisible() -> None:
    updates = jax.random.normal(KEY, (4, 3))
    weights = jnp.array([1.0, 0.0, 1.0, 1.0])
    got, _ = private_step(updates, weights)
    absent, _ = private_step(updates.at[1].set(jnp.nan), weights)
    np.testing.assert_array_equal(absent, got)
    turned, _ = private_step(updates[::-1], weights[::-1])
    np.testing.assert_allclose(turned, got, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_no_client_moves_the_model_further_than_the_clip(bad: float) -> None:
    updates = 3 * jax.random.normal(KEY, (6, 50))
    everyone = jnp.ones(6)
    for rows in (updates, updates.at[3, 7].set(bad)):
        with_it, _ = private_step(rows, everyone, KEY, 0.7)
        without, _ = private_step(rows, everyone.at[3].set(0), KEY, 0.7)
        distance = float(jnp.linalg.norm(with_it - without))
        assert distance <= 0.7 / 2 + 1e-5
        if rows is updates:  # its norm is far above the clip, so that the bound is reached
            assert distance == pytest.approx(0.35, rel=1e-4)


def test_noise_has_its_deviation_and_is_independent() -> None:
    absent = {"a": jnp.full((3, 20_000), jnp.nan), "b": jnp.full((3, 100, 200), jnp.nan)}
    keys = map(jax.random.key, range(2))
    draws = [private_step(absent, jnp.zeros(3), key, 0.5, 1.2, 4.0)[0] for key in keys]
    flat = np.array([a.ravel() for draw in draws for a in jax.tree.leaves(draw)])
    check_noise(flat, 1.2 * 0.5 / 4)


def check_noise(flat: np.ndarray, deviation: float) -> None:
    """Rows of 20,000 independent numbers of one normal law, independent of each other."""
    np.testing.assert_allclose(flat.std(axis=1), deviation, rtol=0.03)
    assert (np.abs(flat.mean(axis=1)) < 5 * deviation / math.sqrt(20_000)).all()
    assert (np.abs(np.corrcoef(flat) - np.eye(len(flat))) < 5 / math.sqrt(20_000)).all()
    assert stats.kstest(flat[0] / deviation, "norm").pvalue > 1e-3


def test_a_clients_own_noise() -> None:
    """On every parameter alone, fresh for every client; nothing is added to what is not one."""

    class still(fs.base.Wrapper):
        def train(self, key: Any, variables: Any, *rest: Any) -> Any:
            return self.local.train(key, variables, *rest)._replace(variables=variables)

    model = Variables({"a": jnp.ones(20_000), "b": jnp.ones((100, 200))}, {"mean": jnp.ones(3)})
    part = privacy.noise(0.3)
    sent = [part.send(jax.random.key(i), (), model, ("told",), jnp.int32(i)) for i in range(2)]
    added = [np.ravel(a) - 1 for one in sent for a in jax.tree.leaves(one.update.params)]
    check_noise(np.array(added), 0.3)
    for one in sent:
        assert_trees(one.update.state, model.state)
        assert one.message == ("told",)
    assert_trees(privacy.noise(0.0).send(KEY, (), model, (), jnp.int32(0)).update, model)
    # In a run: of two clients that do not train, in two rounds: four draws, averaged by two.
    data = fs.client_data(
        np.zeros((2, 1)), np.zeros(2, int), fs.partition.partition_from_lists([[0], [1]])
    )
    algorithm = fs.fedavg(still(flat()), clients_per_round=2).on(ONE)
    wide = fs.Model(lambda key: Variables({"w": jnp.zeros(20_000)}, ()), lambda *_, **__: None)  # type: ignore[arg-type]
    out = play(algorithm.replace(sending=(part,)), wide, data, 2)
    first, second = (np.asarray(v.params["w"]) for v in out.servers)
    check_noise(np.array([first, second - first]), 0.3 / math.sqrt(2))


Z, BITS, LIMIT, M = 1.2, 0.9, 0.5, 4.0


def adapting(**settings: Any) -> fs.base.PreAggregation:
    plain = {"clip": LIMIT, "noise_multiplier": 0.0, "clients_per_round": M, "count_noise": 0.0}
    return privacy.adaptive_mechanism(**(plain | settings))


def after_a_round(
    part: fs.base.PreAggregation, updates: Any, weights: Any, clip: float = LIMIT, key: Any = KEY
) -> tuple[Any, float]:
    """The mean of the updates, and the clip that follows."""
    server = jax.tree.map(lambda a: a[0], updates)
    rows, after, limit = part.apply(
        key, jnp.float32(clip), Variables(updates, {}), jnp.asarray(weights),
        cohort_of(server, len(weights)),
    )  # fmt: skip
    return tree.mean(rows, after).params, limit


def test_two_noises_are_as_private_as_one_of_z() -> None:
    """1/z² = 1/z_Δ² + 1/(2σ_b)², with both as they are found in what leaves."""
    part = adapting(noise_multiplier=Z, count_noise=BITS, clip_lr=1.0)
    absent = jnp.full((3, 20_000), jnp.nan)
    two = jax.random.split(KEY, 2)
    drawn = jax.jit(lambda k: after_a_round(part, absent, jnp.zeros(3), key=k)[0])
    noise = np.array([drawn(k) for k in two])
    raised = float(noise[0].std()) * M / LIMIT
    check_noise(noise, raised * LIMIT / M)
    few = jnp.full((3, 1), jnp.nan)
    keys = jax.random.split(KEY, 20_000)
    clips = jax.jit(jax.vmap(lambda k: after_a_round(part, few, jnp.zeros(3), key=k)[1]))(keys)
    bits = -np.log(np.asarray(clips) / LIMIT) * M
    assert abs(bits.mean()) < 5 * BITS / math.sqrt(20_000)
    np.testing.assert_allclose(bits.std(), BITS, rtol=0.03)
    np.testing.assert_allclose(raised**-2 + (2 * BITS) ** -2, Z**-2, rtol=0.05)
    # The library composes them to the same, exactly.
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    exact = (Z**-2 - (2 * BITS) ** -2) ** -0.5
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(exact), dp.GaussianDpEvent(2 * BITS)])
    spent = [
        rdp.RdpAccountant().compose(dp.PoissonSampledDpEvent(0.1, event), 50).get_epsilon(1e-4)
        for event in (both, dp.GaussianDpEvent(Z))
    ]
    assert spent[0] == pytest.approx(spent[1], rel=1e-9)


@pytest.mark.parametrize("bad", [None, math.nan, 1e30])
def test_no_client_moves_sum_or_count_further(bad: float | None) -> None:
    """The sum by C, and the count, a half less for each, by a half, clipped or not."""
    part, updates = adapting(clip_lr=1.0), jax.random.normal(KEY, (6, 50))
    updates = updates.at[2].multiply(1e-3)
    if bad is not None:
        updates = updates.at[3, 7].set(bad)
    everyone, leave = jnp.ones(6), jax.jit(functools.partial(after_a_round, part))
    mean, clip = leave(updates, everyone)
    for k in range(6):
        without, other = leave(updates, everyone.at[k].set(0))
        assert float(jnp.linalg.norm(mean - without)) <= LIMIT / M + 1e-6
        assert abs(math.log(clip / other)) * M == pytest.approx(0.5, rel=1e-4)
        assert (clip < other) == (k == 2)  # which is not clipped, so that C falls


def test_the_clip_goes_to_the_quantile() -> None:
    """Of norms 1 to 9, of which a third is not clipped; by the formula in every round."""
    part = adapting(clients_per_round=9.0, quantile=1 / 3, clip_lr=0.3)
    norms = np.arange(1.0, 10.0)
    updates, limit = jnp.float32(norms[:, None] * [0.6, 0.8]), 30.0
    step = jax.jit(lambda clip: after_a_round(part, updates, jnp.ones(9), clip))
    for _ in range(60):
        mean, clip = step(limit)
        clipped = np.minimum(norms, limit)
        np.testing.assert_allclose(mean, clipped.sum() / 9 * np.array([0.6, 0.8]), rtol=1e-4)
        limit *= math.exp(-0.3 * ((norms <= limit).mean() - 1 / 3))
        assert float(clip) == pytest.approx(limit, rel=1e-4)
    assert 2.8 < limit < 4.2


TREE_ROUNDS = 7


@pytest.fixture(scope="module")
def tree_noise() -> np.ndarray:
    """n_t of two epochs of seven rounds, the second not at its end; of deviation 1."""
    width = 4000
    part = privacy.tree_mechanism(2.0, 1.5, 3)  # 23 clients: ⌊23/3⌋ = 7
    data = cast("Any", jax.tree.map(jnp.asarray, make_federation((1,) * 23).data))
    cohort = cohort_of(jnp.zeros(width), 4)._replace(data=data)
    absent, weights = Variables(jnp.full((4, width), jnp.nan), {}), jnp.zeros(4)

    @jax.jit
    def run() -> Any:
        def step(state: Any, t: Any) -> Any:
            rows, ones, state = part.apply(
                jax.random.fold_in(KEY, t), state, absent, weights, cohort
            )
            return state, tree.mean(rows, ones).params

        start = part.init(Variables(jnp.zeros(width), {}), data)
        return jax.lax.scan(step, start, jnp.arange(TREE_ROUNDS + 4))[1]

    return np.cumsum(run(), axis=0) / (2.0 * 1.5 / 3)


def nodes_of(t: int) -> set[tuple[int, int, int]]:
    """The nodes whose noise the model has after t rounds: epoch, level, place."""
    nodes = set()
    for epoch in range(2):
        done = min(max(t - epoch * TREE_ROUNDS, 0), TREE_ROUNDS)
        nodes |= {(epoch, level, done >> level) for level in range(5) if done >> level & 1}
    return nodes


def test_the_noise_of_a_model_is_that_of_its_nodes(tree_noise: np.ndarray) -> None:
    """All covariances of n_1 to n_11: as many as they have nodes in common."""
    rounds = len(tree_noise)
    known = [nodes_of(t + 1) for t in range(rounds)]
    wanted = np.array([[len(a & b) for b in known] for a in known])
    assert wanted.max() <= 6
    found = tree_noise @ tree_noise.T / tree_noise.shape[1]
    np.testing.assert_allclose(found, wanted, atol=6 * 6 / math.sqrt(tree_noise.shape[1]))
    assert stats.kstest(tree_noise[0], "norm").pvalue > 1e-3


def root_of_sums(rounds: int, bands: int) -> np.ndarray:
    """The square root of the matrix of sums, of which all but b diagonals are cut off."""
    root = np.asarray(linalg.sqrtm(np.tril(np.ones((rounds, rounds))) + 0j)).real
    return np.tril(np.triu(root, 1 - bands))


def test_banded_noise_is_that_of_the_dense_matrix() -> None:
    """All covariances of eleven rounds; their sum is far below that of independent noise."""
    width, rounds, bands = 4000, 11, 4
    part = privacy.banded_mechanism(2.0, 1.5, 3, bands=bands)
    data = cast("Any", jax.tree.map(jnp.asarray, make_federation((1,) * 23).data))
    cohort = cohort_of(jnp.zeros(width), 4)._replace(data=data)
    absent, weights = Variables(jnp.full((4, width), jnp.nan), {}), jnp.zeros(4)

    @jax.jit
    def run() -> Any:
        def step(state: Any, t: Any) -> Any:
            rows, ones, state = part.apply(
                jax.random.fold_in(KEY, t), state, absent, weights, cohort
            )
            return state, tree.mean(rows, ones).params

        start = part.init(Variables(jnp.zeros(width), {}), data)
        return jax.lax.scan(step, start, jnp.arange(rounds))[1]

    noise = np.asarray(run()) / (2.0 * 1.5 / 3)
    inverse = linalg.inv(root_of_sums(rounds, bands))
    error = 6 * 2 / math.sqrt(width)
    np.testing.assert_allclose(noise @ noise.T / width, inverse @ inverse.T, atol=error)
    assert np.cumsum(noise, axis=0)[-1].std() < 0.7 * math.sqrt(rounds)


def test_one_band_is_the_gaussian_mechanism() -> None:
    data = cast("Any", jax.tree.map(jnp.asarray, make_federation((1,) * 23).data))
    cohort = cohort_of(jnp.zeros(5), 4)._replace(data=data)
    updates = Variables(jax.random.normal(KEY, (4, 5)), {})
    banded = privacy.banded_mechanism(0.7, 1.5, 3, bands=1)
    state = banded.init(Variables(jnp.zeros(5), {}), data)
    assert state.size == 0
    ours = banded.apply(KEY, state, updates, jnp.ones(4), cohort)
    theirs = privacy.gaussian_mechanism(0.7, 1.5, 3).apply(KEY, (), updates, jnp.ones(4), cohort)
    np.testing.assert_array_equal(ours[0].params, theirs[0].params)


def test_cyclic_clients_all_come_and_wait(federation: Federation) -> None:
    part, none = privacy.cyclic(), jnp.zeros(3, jnp.int32)
    data = jax.tree.map(jnp.asarray, federation.data)
    draw = jax.jit(lambda key, state: part.draw(key, state, data, none, none == 0, none))
    start = part.init(Variables((), ()), data, ONE)
    state, turns, orders = start, [], set()
    for t in range(16):
        drawn, state = draw(jax.random.key(t), state)
        turns.append(np.asarray(drawn))
    for k in range(N):
        (visits,) = np.nonzero([k in cohort for cohort in turns])
        assert len(visits) == 6  # of 16 rounds of three of eight
        assert np.diff(visits).min() >= 2
    for seed in range(4):
        first, _ = draw(jax.random.key(seed), start)
        orders.add(tuple(np.asarray(first).tolist()))
    assert len(orders) == 4


def test_clients_come_once_in_an_epoch(federation: Federation) -> None:
    part, none = privacy.shuffled(), jnp.zeros(3, jnp.int32)

    @jax.jit
    def draws() -> Any:
        def step(state: Any, key: Any) -> Any:
            return part.draw(key, state, data, none, none == 0, none)[::-1]

        start = part.init(Variables((), ()), data, ONE)
        return jax.lax.scan(step, start, jax.random.split(KEY, 1200))[1]

    data = jax.tree.map(jnp.asarray, federation.data)
    epochs = np.asarray(draws()).reshape(600, 6)  # two rounds of three of eight clients
    assert (np.diff(np.sort(epochs, axis=1), axis=1) > 0).all()
    for place in range(6):
        counts = np.bincount(epochs[:, place], minlength=N)
        assert stats.chisquare(counts).pvalue > 1e-4


def drawn(data: Any, expected: float, slots: int, draws: int) -> np.ndarray:
    chance = privacy.poisson(expected)
    none = jnp.zeros(slots, jnp.int32)
    draw = jax.jit(jax.vmap(lambda k: chance.draw(k, (), data, none, none == 0, none)[0]))
    return np.asarray(draw(jax.random.split(KEY, draws)))


def test_every_client_joins_by_its_own_coin(federation: Federation) -> None:
    draws, q = 6000, 3 / N
    cohorts = drawn(federation.data, 3, 11, draws)  # more slots than clients
    joined = (cohorts[:, :, None] == np.arange(N)).sum(axis=1)
    assert joined.max() == 1
    assert ((cohorts == N).sum(axis=1) == 11 - joined.sum(axis=1)).all()
    deviation = math.sqrt(q * (1 - q) / draws)
    assert (np.abs(joined.mean(axis=0) - q) < 5 * deviation).all()
    assert (np.abs(np.corrcoef(joined.T) - np.eye(N)) < 5 / math.sqrt(draws)).all()
    sizes = np.bincount(joined.sum(axis=1), minlength=N + 1)
    wanted = draws * stats.binom.pmf(np.arange(N + 1), N, q)
    assert stats.chisquare(sizes, wanted).pvalue > 1e-3


def test_joiners_beyond_the_slots_are_dropped_at_random(federation: Federation) -> None:
    draws = 4000
    cohorts = drawn(federation.data, 6, 2, draws)
    share = np.array([(cohorts == k).mean() * 2 for k in range(N)])
    kept = np.minimum(2, np.arange(N + 1)) @ stats.binom.pmf(np.arange(N + 1), N, 6 / N) / N
    assert (np.abs(share - kept) < 5 * math.sqrt(kept * (1 - kept) / draws)).all()


def test_slots_for_a_cohort() -> None:
    for expected in (1, 20, 300):
        slots = privacy.slots_for(expected)
        assert stats.binom.sf(slots, 10_000, expected / 10_000) <= 1e-6
        assert stats.poisson.sf(slots - 1, expected) > 1e-6


@pytest.fixture(scope="module")
def local(models: dict[str, fs.Model]) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(LR))


def run(
    federation: Federation,
    models: dict[str, fs.Model],
    local: LocalUpdate,
    rounds: int = 3,
    **settings: Any,
) -> Play:
    return play(dp_fedavg(local, **settings).on(ONE), models["logistic"], federation.data, rounds)


@pytest.mark.parametrize("quantile", [None, 0.7])
def test_against_numpy(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate, quantile: float | None
) -> None:
    m, clip, rounds = 3, 0.2, 5
    adapts = {} if quantile is None else {"quantile": quantile, "clip_lr": 0.9, "count_noise": 0.0}
    ours = run(
        federation, models, local, rounds, clients_per_round=m, clip=clip, noise_multiplier=0.0,
        **adapts,
    )  # fmt: skip
    initial = models["logistic"].init(jax.random.fold_in(jax.random.key(0), 0))
    slow = oracle.Oracle(federation.data, initial, LR, 0.0, 16, 1)
    none = jnp.zeros(privacy.slots_for(m), jnp.int32)
    server, clipped, part = oracle.layers_of(initial), [], privacy.poisson(m)
    data = jax.device_put(federation.data)
    draw = jax.jit(lambda key: part.draw(key, (), data, none, none == 0, none)[0])
    for t, state in enumerate(ours.states):
        cohort = draw(slow.key(t, 0))
        total, below = [np.zeros_like(w) for w in server], 0.0
        for k in (int(k) for k in cohort if k < N):
            update = [a - w for a, w in zip(slow.train(t, k, server), server, strict=True)]
            norm = math.sqrt(sum((u**2).sum() for u in update))
            clipped.append(norm > clip)
            below += (norm <= clip) - 0.5
            total = [s + min(1, clip / norm) * u for s, u in zip(total, update, strict=True)]
        server = [w + s / m for w, s in zip(server, total, strict=True)]
        if quantile is not None:
            clip *= math.exp(-0.9 * (0.5 + below / m - quantile))
            assert float(state.preaggregation[0]) == pytest.approx(clip, rel=1e-4)
        for a, b in zip(server, oracle.layers_of(state.server), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
        assert int(ours.metrics[t].visits) == int((cohort < N).sum())
    assert True in clipped
    assert False in clipped


def test_a_round_without_clients_is_noise(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate
) -> None:
    algorithm = fs.compose(
        local,
        selection=privacy.poisson(1e-6),
        clients_per_round=2,
        preaggregation=(privacy.gaussian_mechanism(1.0, 0.1, 2),),
    ).on(ONE)
    out = play(algorithm, models["logistic"], federation.data, 2)
    assert [int(m.visits) for m in out.metrics] == [0, 0]
    assert [float(m.loss) for m in out.metrics] == [0, 0]
    start = models["logistic"].init(jax.random.fold_in(jax.random.key(0), 0))
    for before, after in zip([start, *out.servers], out.servers, strict=False):
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
        moved = np.concatenate([np.ravel(a - b) for a, b in pairs])
        assert moved.std() == pytest.approx(0.05, rel=5 / math.sqrt(2 * moved.size))


def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Exact: T Gaussian mechanisms are one, with μ = √T / z."""
    mu = math.sqrt(rounds) / noise

    def excess(eps: float) -> float:
        near = stats.norm.cdf(mu / 2 - eps / mu)
        return near - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu) - delta

    return optimize.brentq(excess, 0, 200)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (4.0, 20), (30.0, 900)])
def test_epsilon_where_all_take_part(noise: float, rounds: int) -> None:
    settings: dict[str, Any] = {"clients": 10, "clients_per_round": 10, "delta": 1e-5}
    exact = gaussian_epsilon(noise, rounds, 1e-5)
    by_coin = privacy.epsilon(noise, rounds=rounds, **settings)
    assert exact - 1e-6 <= by_coin <= exact + 0.01
    # A client replaced moves the sum by twice the clip. Rényi: α T / 2 (2/z)² + log(1/δ) / (α - 1).
    exact = gaussian_epsilon(noise / 2, rounds, 1e-5)
    fixed = privacy.epsilon(noise, rounds=rounds, sampling="fixed", **settings)
    rho = 2 * rounds / noise**2
    classic = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert exact < fixed < 1.01 * classic


def test_epsilon_of_the_literature() -> None:
    """Abadi et al. 2016, section 3: q = 0.01, σ = 4, T = 10000, δ = 1e-5 give 1.26 by moments.

    The central limit of Bu et al. 2020: a Gaussian mechanism with μ = q √(T (exp(1/σ²) - 1)).
    """
    spent = privacy.epsilon(4.0, clients=10_000, clients_per_round=100, rounds=10_000, delta=1e-5)
    assert spent < 1.26
    limit = 0.01 * math.sqrt(10_000 * math.expm1(1 / 16))
    assert spent == pytest.approx(gaussian_epsilon(1 / limit, 1, 1e-5), rel=0.03)


def test_tree_epsilon_is_that_of_the_worst_visits() -> None:
    """Of all visits, one an epoch, in the covariances of the models' noise: the worst."""
    rounds, worst = TREE_ROUNDS + 4, 0.0
    known = [nodes_of(t + 1) for t in range(rounds)]
    noise = np.array([[len(a & b) for b in known] for a in known], float)
    models = np.tril(np.ones((rounds, rounds)))  # an update is in all models after it
    for visits in itertools.product(range(TREE_ROUNDS), range(TREE_ROUNDS, rounds)):
        moved = models[:, visits].sum(axis=1)
        worst = max(worst, moved @ linalg.solve(noise, moved))
    assert worst == pytest.approx(3 + 3)  # in nodes of 1, 2 and 4 rounds of each
    settings: dict[str, Any] = {"clients": 23, "clients_per_round": 3, "delta": 1e-3}
    spent = privacy.tree_epsilon(3.0, rounds=rounds, **settings)
    assert spent == pytest.approx(gaussian_epsilon(3.0 / math.sqrt(worst), 1, 1e-3), rel=1e-9)
    assert math.isinf(privacy.tree_epsilon(0.0, rounds=rounds, **settings))


@pytest.mark.parametrize(("bands", "rounds"), [(1, 9), (3, 9), (4, 10), (4, 3)])
def test_banded_epsilon_is_that_of_the_worst_visits(bands: int, rounds: int) -> None:
    """Of all sets of rounds that lie four apart, in the dense matrix."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    root, worst = root_of_sums(rounds, bands), 0.0
    for number in range(1, rounds + 1):
        for visits in itertools.combinations(range(rounds), number):
            if (np.diff(visits) >= 4).all():
                worst = max(worst, float(np.linalg.norm(root[:, visits].sum(axis=1))))
    settings: dict[str, Any] = {"clients": 13, "clients_per_round": 3, "delta": 1e-3}
    spent = privacy.banded_epsilon(3.0, bands=bands, rounds=rounds, **settings)
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.GaussianDpEvent(3.0 / worst))
    assert spent == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert spent == pytest.approx(gaussian_epsilon(3.0 / worst, 1, 1e-3), rel=1e-9)
    assert math.isinf(privacy.banded_epsilon(0.0, bands=bands, rounds=rounds, **settings))


def test_epsilon_without_noise_is_infinite() -> None:
    for sampling in ("poisson", "fixed"):
        spent = privacy.epsilon(
            0.0, clients=9, clients_per_round=3, rounds=1, delta=1e-3, sampling=sampling
        )
        assert math.isinf(spent)


def test_epsilon_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="needs dp-accounting: pip install dp-accounting"):
        privacy.epsilon(1.0, clients=9, clients_per_round=3, rounds=1, delta=1e-3)


def spend(**change: Any) -> float:
    settings = {"clients": 9, "clients_per_round": 3, "rounds": 1, "delta": 1e-3, **change}
    return privacy.epsilon(settings.pop("noise_multiplier", 1.0), **settings)


def flat() -> LocalUpdate:
    return fs.local_sgd(lambda *_: (jnp.float32(0), ()), optax.sgd(0.1, momentum=0.9))


def private(local: LocalUpdate | None = None, **settings: Any) -> fs.Algorithm:
    return dp_fedavg(local or flat(), **{"clients_per_round": 3, **settings})


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "infinite": (lambda: private(clip=math.inf), "clip must be finite if noise is added"),
    "noise of no count": (
        lambda: private(count_noise=0.5),
        "count_noise must be None without a quantile, got 0.5",
    ),
    "count": (
        lambda: private(quantile=0.5, count_noise=0.5),
        "count_noise must be more than noise_multiplier / 2 = 0.5 and finite, got 0.5",
    ),
    "count by default": (
        lambda: private(quantile=0.5),
        "count_noise must be more than noise_multiplier / 2 = 0.5 and finite, got 0.15, m/20",
    ),
    "bands that meet": (
        lambda: dp_ftrl(flat(), clients_per_round=3, bands=4).init(
            KEY, Variables({"w": jnp.zeros(2)}, ()), make_federation((1,) * 9).data
        ),
        "bands must be in 1..3, the rounds between two visits of one of 9 clients with 3 per "
        "round, got 4",
    ),
    "spent noise": (
        lambda: spend(noise_multiplier=-1.0),
        "noise_multiplier must be at least 0, got -1.0",
    ),
    "cohort": (
        lambda: spend(clients_per_round=10),
        "clients_per_round must be in 1..9, got 10",
    ),
    "rounds": (lambda: spend(rounds=0), "rounds must be at least 1, got 0"),
    "delta": (lambda: spend(delta=1.0), "delta must be above 0 and below 1/N = 0.111, got 1.0"),
    "kind": (
        lambda: spend(sampling="all"),
        "sampling must be one of 'poisson', 'fixed', 'epochs', 'cyclic', got 'all'",
    ),
}


test_errors = rejects(ERRORS)


def test_statistics_are_refused(federation: Federation) -> None:
    model = Variables({"w": jnp.zeros(2)}, {"mean": jnp.zeros(2)})
    with pytest.raises(ValueError, match="model must have no non-trainable variables"):
        private().init(KEY, model, federation.data)


WEIGHTS = Variables({"w": jnp.zeros(2)}, ())


def mechanism() -> fs.base.PreAggregation:
    return privacy.gaussian_mechanism(1.0, 0.5, 6)


def with_noise(local: LocalUpdate | None = None, **parts: Any) -> fs.Algorithm:
    """A composition whose mean is made private, with other parts."""
    plain: dict[str, Any] = {
        "selection": selection.uniform(),
        "clients_per_round": 6,
        "preaggregation": (mechanism(),),
    }
    return fs.compose(local or flat(), **(plain | parts))


def risk(*_: Any) -> Any:
    raise AssertionError("not asked for")


STICKY = selection.uniform(sticky=True)
DP = "preaggregation gaussian_mechanism(1.0, 0.5, 6) needs "
SHARED = DP + "no state shared through the server besides the model, local is local_sgd("
FOR_ALL = DP + "the server's latest model for all, broadcast is "
ONE_VISIT = DP + "models that return in the round in which they left, flight is "
LAST = DP + "to be the last pre-aggregation, after parts that read no reports, preaggregation is ("
PEERS = DP + "clients that see no samples of others, local is local_sgd("
# What would leave the clients unclipped and without noise, or let a client take part twice.
VOID: dict[str, tuple[Callable[[], Any], str]] = {
    "a median": (
        lambda: with_noise(aggregator=fs.aggregators.coordinate_median),
        f"{DP}the plain mean, aggregator is coordinate_median: use aggregator=mean",
    ),
    "updates of older models": (
        lambda: with_noise(broadcast=broadcast.stale(3)),
        f"{FOR_ALL}stale(3): use broadcast=latest()",
    ),
    "models that visit several clients": (
        lambda: with_noise(
            flight=flight.delayed(2, redistribution=fs.redistribution.permute),
        ),
        f"{ONE_VISIT}delayed(2, redistribution=permute): use flight=every_round()",
    ),
    "gossip": (
        lambda: fs.algorithms.gossip(flat(), clients_per_round=6).replace(
            preaggregation=(mechanism(),)
        ),
        "needs no pre-aggregation, preaggregation is "
        "(gaussian_mechanism(1.0, 0.5, 6),)",
    ),
    "variates": (
        lambda: with_noise(flat().change(corrections=(corrections.scaffold(),))), SHARED,
    ),
    "momenta of some leaves": (
        lambda: with_noise(
            flat().change(optimizer_state="average", trained=fs.leaves.named("Dense_0"))
        ), SHARED,
    ),
    "a draw by reports": (
        lambda: with_noise(selection=selection.importance(risk, initial="ones")),
        f"{DP}clients that report no numbers, selection is importance(risk, initial='ones'): use "
        "selection=uniform()",
    ),
    "signs of single clients": (
        lambda: fs.algorithms.ozdayi(flat(), clients_per_round=6, server_epochs=0).replace(
            preaggregation=(mechanism(),)
        ),
        f"{DP}a server that sees nothing but the noisy mean, server is chain(sign_agreement(2.0, ",
    ),
    "weights by reports": (
        lambda: with_noise(preaggregation=(preaggregation.agnostic(0.1), mechanism())),
        f"{LAST}agnostic(0.1), gaussian_mechanism(1.0, 0.5, 6))",
    ),
    "a change of the noisy rows": (
        lambda: with_noise(preaggregation=(mechanism(), _Unchanged())),
        f"{LAST}gaussian_mechanism(1.0, 0.5, 6), ",
    ),
    "clients that come twice in an epoch": (
        lambda: dp_ftrl(flat(), clients_per_round=6).replace(selection=selection.uniform()),
        "preaggregation tree_mechanism(1.0, 1.0, 6) needs clients that take part at most once in "
        "an epoch, selection is uniform(): use selection=shuffled()",
    ),
    "clients that come before their bands end": (
        lambda: dp_ftrl(flat(), clients_per_round=6, bands=1).replace(
            selection=selection.shuffled()
        ),
        "preaggregation banded_mechanism(1.0, 1.0, 6, 1) needs clients that wait at least as "
        "many rounds as it has bands, selection is shuffled(): use selection=cyclic()",
    ),
    "a tree of other rounds": (
        lambda: dp_ftrl(flat(), clients_per_round=6).replace(clients_per_round=5),
        "preaggregation tree_mechanism(1.0, 1.0, 6) needs exactly 6 slots, clients_per_round "
        "is 5: use clients_per_round=6",
    ),
    "rows of many clients": (
        lambda: with_noise(preaggregation=(preaggregation.bucketing(), mechanism())),
        f"{DP}one client's update in each row, preaggregation is (bucketing(), gaussian_mechanism(",
    ),
    "copies of another client's update": (
        lambda: with_noise(sending=(sending.mimic(np.arange(N) < 2),)),
        f"{DP}messages that do not depend on other clients' messages, sending is (mimic(bool[8]),)",
    ),
    "other clients' samples": (lambda: with_noise(flat().change(peers=True)), PEERS),
    "what was exchanged before": (
        lambda: with_noise(
            flat().change(transforms=(fs.mixup.peer_means(3),))
        ), PEERS,
    ),
    "losses before the draw": (
        lambda: with_noise(selection=selection.power_of_choice(7, risk)),
        f"{DP}clients that report no numbers, selection is power_of_choice(7, score=risk)",
    ),
    "statistics after the last round": (
        lambda: with_noise(finish=fs.base.Finish()),
        f"{DP}clients that send nothing after the last round, finish is Finish()",
    ),
    "a server that was given samples": (
        lambda: with_noise(server=fs.server.chain(fs.server.train_beside(flat()))),
        f"{DP}a server that sees nothing but the noisy mean, server is chain(train_beside(",
    ),
}  # fmt: skip


class _Unchanged(fs.base.PreAggregation):
    """A pre-aggregation that reads nothing."""

    def apply(self, key: Any, state: Any, updates: Any, weights: Any, cohort: Any) -> Any:
        return updates, weights, state


test_what_would_make_epsilon_void_is_refused = rejects(VOID)
"""In one line that names both parts."""


def test_what_keeps_it_is_not_refused(federation: Federation) -> None:
    """State that stays at the client, codes, what acts on one update alone, a server optimiser."""
    local = flat().change(corrections=(corrections.proximal(0.1),), optimizer_state="keep")
    algorithm = private(local).replace(
        sending=(
            sending.clip_norm(2.0), sending.noise(0.1), sending.compressed(compression.top_k(0.5))
        ),
        server=fs.server.optimizer(optax.adam(0.1)),
        preaggregation=(_Unchanged(), mechanism()),
    )  # fmt: skip
    state = algorithm.init(KEY, WEIGHTS, federation.data)
    assert jax.tree.leaves(state.client_state)
    assert jax.tree.leaves(state.sending)
    assert not jax.tree.leaves(state.shared_state)


def test_too_few_clients_are_refused(federation: Federation) -> None:
    message = "clients_per_round must be at most the 8 clients, got 9"
    with pytest.raises(ValueError, match=message):
        private(clients_per_round=9).init(KEY, Variables(jnp.zeros(2), {}), federation.data)
