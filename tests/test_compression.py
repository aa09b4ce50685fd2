"""Codes against plain NumPy, error feedback, bytes counted by hand, and mixes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, Play, assert_trees, largest_change, play, rejects
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import compression, flight, redistribution, selection, server, weighting
from fedjax_sim.algorithms import fedavg_sketched, fedavg_top_k, stc
from fedjax_sim.base import LocalUpdate

few = settings(max_examples=60, deadline=None, derandomize=True)
KEY = jax.random.key(0)
SIZE = 23
LR, MOMENTUM = 0.05, 0.9
ONE = fs.make_execution(devices=1)


def kept(x: np.ndarray, count: int) -> np.ndarray:
    """The entries of largest magnitude, the first of equal ones."""
    chosen = np.zeros(len(x), bool)
    chosen[np.lexsort((np.arange(len(x)), -np.abs(x)))[:count]] = True
    return chosen


def literal(kind: str, x: np.ndarray, count: int) -> np.ndarray:
    """Ternary or top-k, in the dtype of ``x``."""
    chosen = kept(x, count)
    if kind == "top_k":
        return np.where(chosen, x, 0)
    return np.where(chosen, np.abs(x)[chosen].mean() * np.sign(x), 0)


SPARSE = {"ternary": compression.ternary, "top_k": compression.top_k}
JITTED = {
    (kind, share): jax.jit(make(share).compress)
    for kind, make in SPARSE.items()
    for share in (0.01, 0.3, 1)
}


@pytest.mark.parametrize("case", JITTED)
@few
@given(
    st.lists(
        st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]),
            st.floats(-9, 9, width=32, allow_nan=False, allow_subnormal=False),
        ),
        min_size=SIZE,
        max_size=SIZE,
    )
)
def test_sparse_code(case: tuple[str, float], entries: list[float]) -> None:
    kind, share = case
    x = np.array(entries, np.float32)
    count = {0.01: 1, 0.3: 7, 1: SIZE}[share]  # max(1, round(0.23)), round(6.9)
    got = np.asarray(JITTED[case](KEY, jnp.asarray(x)))
    np.testing.assert_allclose(got, literal(kind, x, count), rtol=1e-6, atol=1e-30)


def test_ternary_sends_one_magnitude() -> None:
    x = jax.random.normal(KEY, (10_000,))
    got = np.asarray(compression.ternary(0.01).compress(KEY, x))
    assert (got != 0).sum() == 100
    assert len(np.unique(np.abs(got[got != 0]))) == 1


def rice(positions: np.ndarray, fixed: int) -> int:
    """Bits of sorted positions as gaps: a quotient in unary, ``fixed`` bits of remainder."""
    gaps = np.diff(positions, prepend=-1) - 1
    return int((gaps // 2**fixed + 1 + fixed).sum())


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.02, 1 / 400])
def test_positions_take_the_bits_of_a_real_encoder(share: float) -> None:
    rng = np.random.default_rng(0)
    positions = np.flatnonzero(rng.random(2_000_000) < share)
    best = min(rice(positions, fixed) for fixed in range(16)) / len(positions)
    assert compression.position_bits(share) == pytest.approx(best, rel=0.01)


def test_message_sizes() -> None:
    n, k, bits = 10_000, 100, 6 + 1 / (1 - 0.99**64)
    assert compression.ternary(0.01).bytes(n) == math.ceil((k * (bits + 1) + 32) / 8)
    assert compression.top_k(0.01).bytes(n) == math.ceil(k * (bits + 32) / 8)
    assert compression.top_k(1).bytes(n) == 4 * n
    assert compression.ternary(1).bytes(n) == n / 8 + 4
    assert compression.stochastic_quantisation(1).bytes(n) == 2 * n / 8 + 4
    assert compression.stochastic_quantisation(127).bytes(n) == n + 4
    assert compression.stochastic_quantisation(128).bytes(n) == math.ceil(9 * n / 8) + 4


def test_qsgd_codes_updates_of_any_size() -> None:
    """The square of a norm of 1.8e19 is beyond floats, that of 1e-30 below them."""
    code, x = jax.jit(compression.stochastic_quantisation(7).compress), jnp.arange(1.0, 60.0)
    wanted = np.asarray(code(jax.random.key(0), x))
    assert len(np.unique(wanted)) == 3
    for unit in (2.0**100, 2.0**-110):
        found = np.asarray(code(jax.random.key(0), x * jnp.float32(unit)))
        np.testing.assert_array_equal(found, wanted * np.float32(unit))


def test_quantisation_is_unbiased() -> None:
    x = jnp.array([0.0, 3.0, -4.0, 0.01])
    code, draws = compression.stochastic_quantisation(3), 20_000
    got = np.asarray(jax.jit(jax.vmap(code.compress, (0, None)))(jax.random.split(KEY, draws), x))
    norm = float(jnp.linalg.norm(x))
    units = got * 3 / norm
    np.testing.assert_allclose(units, np.round(units), atol=1e-5)
    np.testing.assert_allclose(got.mean(axis=0), x, atol=5 * norm / 3 / 2 / math.sqrt(draws))
    assert (np.abs(got - np.asarray(x)).max(axis=0) <= norm / 3).all()
    assert np.asarray(code.compress(KEY, jnp.zeros(4))).tolist() == [0, 0, 0, 0]


def walsh(size: int) -> np.ndarray:
    """Sylvester's matrix, of rows of length 1."""
    out = np.ones((1, 1))
    while len(out) < size:
        out = np.kron(np.array([[1, 1], [1, -1]]), out)
    return out / math.sqrt(size)


class one_entry(compression.Compressor):
    """A code that keeps entry j."""

    j: int

    def compress(self, key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[self.j].set(x[self.j])

    def bytes(self, n: int) -> int:
        return 8


def test_a_rotation_is_undone_and_leaves_the_code_its_entries() -> None:
    """Of a code that keeps entry j, R^T e_j e_j^T R; R is orthogonal, drawn by the key."""
    x, found = jax.random.normal(KEY, (23,)), []
    for j in (0, 5, 31):
        found.append(np.asarray(jax.jit(compression.rotated(one_entry(j)).compress)(KEY, x)))
    signs = np.asarray(jax.random.rademacher(jax.random.split(KEY)[0], (32,), jnp.float32))
    rotation = (walsh(32) * signs)[:, :23]
    np.testing.assert_allclose(walsh(32) @ walsh(32), np.eye(32), atol=1e-12)
    for j, got in zip((0, 5, 31), found, strict=True):
        np.testing.assert_allclose(got, rotation[j] * (rotation[j] @ np.asarray(x)), atol=1e-5)
    back = compression.rotated(compression.top_k(1)).compress(KEY, x)
    np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 3])
def test_levels_lie_between_the_ends(bits: int) -> None:
    x, draws = jnp.array([-2.0, 5.0, 0.3, 4.9]), 20_000
    code = compression.uniform_quantisation(bits)
    got = np.asarray(jax.jit(jax.vmap(code.compress, (0, None)))(jax.random.split(KEY, draws), x))
    units = (got + 2) / 7 * (2**bits - 1)
    np.testing.assert_allclose(units, np.round(units), atol=1e-4)
    assert np.ptp(got[:, :2], axis=0).tolist() == [0, 0]
    np.testing.assert_allclose(got.mean(axis=0), x, atol=5 * 7 / 2 / math.sqrt(draws))
    assert (np.abs(got - np.asarray(x)).max(axis=0) <= 7 / (2**bits - 1) + 1e-5).all()
    assert code.compress(KEY, jnp.full(3, 2.5)).tolist() == [2.5] * 3


def test_a_mask_is_random_and_what_it_keeps_has_a_code_of_its_own() -> None:
    x, draws = jnp.arange(1.0, 11), 4000
    keys = jax.random.split(KEY, draws)
    for scaled in (True, False):
        mask = compression.random_mask(0.3, scaled=scaled)
        got = np.asarray(jax.jit(jax.vmap(mask.compress, (0, None)))(keys, x))
        assert ((got != 0).sum(axis=1) == 3).all()
        wanted = np.asarray(x) * (10 / 3 if scaled else 1)
        assert (np.isclose(got, wanted, rtol=1e-6) | (got == 0)).all()
        np.testing.assert_allclose((got != 0).mean(axis=0), 0.3, atol=0.04)
    inner = compression.rotated(compression.uniform_quantisation(4))
    both = compression.random_mask(0.3, inner)
    got = np.asarray(jax.jit(jax.vmap(both.compress, (0, None)))(keys, x))
    assert ((got != 0).sum(axis=1) == 3).all()
    np.testing.assert_allclose(got.mean(axis=0), x, rtol=0.15)
    assert_trees(compression.random_mask(1.0).compress(KEY, x), x)


def test_sketched_messages_by_hand() -> None:
    """A seed is 8 bytes, the ends of a quantiser as many; 250 entries are rotated among 256."""
    quantised = compression.uniform_quantisation(2)
    assert quantised.bytes(1000) == 250 + 8
    assert compression.rotated(quantised).bytes(1000) == 8 + 256 + 8
    assert compression.random_mask(0.25).bytes(1000) == 8 + 4 * 250
    assert compression.random_mask(1.0).bytes(1000) == 4000
    both = compression.random_mask(0.25, compression.rotated(quantised))
    assert both.bytes(1000) == 8 + 8 + 64 + 8
    count = compression.low_rank(3).bytes
    assert count is not None
    # The kernel is 20 by 7, its B 3 by 7; 2 by 3 is no longer than the rank.
    shapes = {"kernel": jnp.ones((5, 2, 2, 7)), "small": jnp.ones((2, 3)), "b": jnp.ones(7)}
    assert count(fs.Variables(shapes, jnp.ones(4))) == 8 + 4 * (3 * 7 + 6 + 7 + 4)


def test_a_low_rank_update_is_the_projection_of_the_whole() -> None:
    """Onto three dimensions, drawn for each matrix and message; and not smaller for it."""
    draw = np.random.default_rng(0).normal
    matrices = {"kernel": (5, 2, 2, 7), "other": (20, 7), "small": (2, 3), "b": (7,)}
    params = {name: jnp.asarray(draw(size=s), jnp.float32) for name, s in matrices.items()}
    update, send = fs.Variables(params, jnp.ones(2)), jax.jit(compression.low_rank(3).send)
    outs = [send(jax.random.key(seed), (), update, {}, jnp.int32(0)) for seed in (0, 1)]
    spaces = []
    for out in outs:
        assert out.message == {}
        assert_trees(out.update.state, update.state)
        for name in ("small", "b"):
            assert_trees(out.update.params[name], params[name])
        for name in ("kernel", "other"):
            got, whole = (np.asarray(p[name]).reshape(20, 7) for p in (out.update.params, params))
            assert np.linalg.matrix_rank(got, tol=1e-4) == 3
            np.testing.assert_allclose(got.T @ (whole - got), 0, atol=1e-4)
            spaces.append(np.linalg.svd(got)[0][:, :3])
    for i, a in enumerate(spaces):
        for b in spaces[:i]:
            assert np.linalg.norm(a.T @ b, 2) < 0.999


UPDATE = fs.Variables({"w": jnp.ones(12), "b": jnp.ones((2, 3))}, {"steps": jnp.float32(3)})


@pytest.mark.parametrize("kind", SPARSE)
def test_sent_and_residual_make_the_update(kind: str) -> None:
    part = compression.compressed(SPARSE[kind](0.2))
    send, residual = jax.jit(part.send), part.init(UPDATE, None)  # type: ignore[arg-type]
    sent = wanted = np.zeros(18)
    for t in range(6):
        key = jax.random.key(t)
        params = jax.tree.map(lambda a, key=key: jax.random.normal(key, a.shape), UPDATE.params)
        message = {"variate": params["w"]}
        out = send(key, residual, UPDATE._replace(params=params), message, jnp.int32(0))
        assert_trees((out.update.state, out.message), (UPDATE.state, message))  # they go whole
        flat, given = (jax.flatten_util.ravel_pytree(a)[0] for a in (out.update.params, params))
        assert np.count_nonzero(flat) == 4  # round(0.2 · 18)
        sent, wanted, residual = sent + flat, wanted + given, out.kept
    np.testing.assert_allclose(sent + residual, wanted, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(residual).max()) > 0.01


def test_without_feedback_nothing_is_kept() -> None:
    part = compression.compressed(compression.top_k(0.5), feedback=False)
    assert part.init(UPDATE, None) is None  # type: ignore[arg-type]
    out = part.send(KEY, None, UPDATE, (), jnp.int32(0))
    assert out.kept is None


def test_bytes_of_an_update() -> None:
    message = compression.ternary(0.5).bytes(18)  # 9 of 18 entries
    for code, size in ((compression.ternary(0.5), message), (compression.top_k(1), 18 * 4)):
        count = compression.compressed(code).bytes
        assert count is not None
        assert count(UPDATE) == size + 4  # the state whole


def test_server_feedback() -> None:
    """Two steps of the server by hand: the residual comes back."""
    code, old = compression.top_k(1 / 3), fs.Variables(jnp.zeros(3), jnp.float32(1))
    moved = compression.compress_server(server.optimizer(optax.sgd(1.0, momentum=0.5)), code)
    state: Any = moved.init(old)
    none: Any = None
    aggregate = fs.Variables(jnp.array([1.0, 3.0, -2.0]), jnp.float32(7))
    step, state = moved.update(KEY, aggregate, old, state, none)
    assert step.params.tolist() == [0, 3, 0]
    assert float(step.state) == 7
    assert state[1].tolist() == [1, 0, -2]
    # Momentum (0.5, 1.5, -1) and the aggregate (1, 0, -2), with the residual: (2.5, 1.5, -5).
    aggregate = aggregate._replace(params=jnp.array([1.0, 0.0, -2.0]))
    step, state = moved.update(KEY, aggregate, old, state, none)
    assert step.params.tolist() == [0, 0, -5]
    assert state[1].tolist() == [2.5, 1.5, 0]


@pytest.fixture(scope="module")
def local(models: dict[str, fs.Model]) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(LR, momentum=MOMENTUM))


ROUNDS, COHORT = 4, 3


def vector(layers: oracle.Layers) -> np.ndarray:
    """The oracle's W, b, W, b, ... in the package's order: b, W, b, W, ..."""
    pairs = zip(layers[1::2], layers[::2], strict=True)
    return np.concatenate([a.ravel() for pair in pairs for a in pair])


class Rounds:
    """What each round should do, from the state in which it began."""

    def __init__(self, federation: Federation, model: fs.Model, kind: str, share: float) -> None:
        self.initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
        self.slow = oracle.Oracle(federation.data, self.initial, LR, MOMENTUM, 16, 1)
        flat, self.unravel = jax.flatten_util.ravel_pytree(self.initial.params)
        self.start, self.kind, self.count = np.asarray(flat), kind, round(share * len(flat))

    def code(self, x: np.ndarray) -> np.ndarray:
        return literal(self.kind, x, self.count)

    def clients(
        self, t: int, w: np.ndarray, residuals: np.ndarray
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The cohort, what it sends, and all residuals afterwards."""
        layers = oracle.layers_of(fs.Variables(self.unravel(jnp.float32(w)), {}))
        cohort, arrived, residuals = self.slow.draw(t, COHORT, []), [], residuals.copy()
        for k in cohort:
            update = vector(self.slow.train(t, k, layers)) - w + residuals[k]
            arrived.append(self.code(update))
            residuals[k] = update - arrived[-1]
        return cohort, np.array(arrived), residuals


def close(ours: Any, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)


def test_top_k_against_numpy(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate
) -> None:
    method = fedavg_top_k(local, clients_per_round=COHORT, sparsity=0.3).on(ONE)
    ours = play(method, models["logistic"], federation.data, ROUNDS)
    rounds = Rounds(federation, models["logistic"], "top_k", 0.3)
    w, residuals = rounds.start, np.zeros((8, len(rounds.start)))
    for t, state in enumerate(ours.states):
        cohort, arrived, residuals = rounds.clients(t, w, residuals)
        w = w + np.average(arrived, axis=0, weights=federation.sizes[cohort])
        close(jax.flatten_util.ravel_pytree(state.server.params)[0], w)
        close(state.sending[0], residuals)


def test_stc_against_numpy(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate
) -> None:
    """Round by round: rounding decides among entries that tie at the server."""
    method = stc(local, clients_per_round=COHORT, sparsity=0.3).on(ONE)
    ours = play(method, models["logistic"], federation.data, ROUNDS)
    rounds = Rounds(federation, models["logistic"], "ternary", 0.3)
    w, behind = rounds.start, np.zeros(len(rounds.start))
    residuals = np.zeros((8, len(w)))
    for t, state in enumerate(ours.states):
        _, arrived, expected = rounds.clients(t, w, residuals)
        wanted = arrived.mean(axis=0) + behind
        after = np.asarray(jax.flatten_util.ravel_pytree(state.server.params)[0])
        step, w = after - w, after
        residuals, behind = np.asarray(state.sending[0]), np.asarray(state.opt_state[1])
        close(residuals, expected)
        close(step + behind, wanted)  # what was sent, and what is left
        sent = step != 0
        assert sent.sum() == rounds.count
        largest = np.abs(wanted)[sent]
        assert largest.min() >= np.abs(wanted)[~sent].max() - 1e-6
        close(step[sent], largest.mean() * np.sign(wanted[sent]))
    assert np.abs(behind).max() > 1e-3


def mix(name: str, local: LocalUpdate, code: compression.Compressor) -> fs.Algorithm:
    """Two methods with models that outlive a round, compressed both ways."""
    up = (compression.compressed(code),)
    down = compression.compress_server(server.replace(), code)
    if name == "radfed":  # four models wander, two of them train in each round
        return fs.compose(
            local,
            selection=selection.uniform(active=2),
            clients_per_round=4,
            flight=flight.delayed(2, redistribution=redistribution.permute),
            sending=up,
            weighting=weighting.equal,
            server=down,
        ).on(ONE)
    return fs.compose(
        local,
        selection=selection.uniform(sticky=True),
        clients_per_round=4,
        flight=flight.staggered(2, refresh=flight.drift_correction()),
        sending=up,
        server=down,
    ).on(ONE)


def two_runs(algorithm: fs.Algorithm, model: fs.Model, data: Any, rounds: int) -> Any:
    """Server models after every round of seeds 0 and 1, in one program."""
    roots = [jax.random.key(seed) for seed in (0, 1)]
    keys = jnp.stack([jax.random.fold_in(root, 1) for root in roots])
    variables = jax.vmap(lambda root: model.init(jax.random.fold_in(root, 0)))(jnp.stack(roots))
    data = jax.device_put(data)
    states = jax.vmap(algorithm.init, (0, 0, None))(keys, variables, data)

    def one_round(key: jax.Array, t: int, state: Any) -> Any:
        return algorithm.step(jax.random.fold_in(key, t), state, data)[0]

    step = jax.jit(jax.vmap(chex.assert_max_traces(one_round, n=1), (0, None, 0)))
    servers = []
    for t in range(rounds):
        states = step(keys, t, states)
        servers.append(states.server)
    return servers


def travelled(algorithm: fs.Algorithm, run: Play, data: Any) -> tuple[int, int]:
    """Bytes up and down of a whole run."""
    traffic = algorithm.traffic(run.final, data)
    ups = sum(int(m.uploads) for m in run.metrics) + run.final_uploads
    return ups * traffic.upload, sum(int(m.downloads) for m in run.metrics) * traffic.download


@pytest.mark.slow
@pytest.mark.parametrize("name", ["radfed", "phase_shift"])
def test_mixes(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate, name: str
) -> None:
    code, model = compression.top_k(0.1), models["logistic"]
    algorithm = mix(name, local, code)
    second = play(algorithm, model, federation.data, ROUNDS, seed=1)
    both = two_runs(algorithm, model, federation.data, ROUNDS)
    for ours, alone in zip(both, second.servers, strict=True):
        assert_trees(jax.tree.map(lambda a: a[1], ours), alone, rtol=1e-5, atol=1e-6)
    assert largest_change(both[-1], both[0]) > 1e-3
    size = sum(a.size for a in jax.tree.leaves(second.final))
    one, whole = code.bytes(size), 4 * size
    assert 2 * one < whole
    assert (
        travelled(algorithm, second, federation.data)
        == {
            # Two clients a round, each with a model that another had.
            "radfed": (8 * one, 8 * whole),
            # Two models a round and two at the end; four come down, to clients that were there
            # N/S = 2 rounds ago.
            "phase_shift": (10 * one, 16 * 2 * one),
        }[name]
    )
    if name == "radfed":
        check_idle(second)


def check_idle(run: Play) -> None:
    """Only the two clients that trained have another residual."""
    before = np.zeros_like(run.states[0].sending[0])
    for state in run.states:
        clients, after = np.asarray(state.slots.client), np.asarray(state.sending[0])
        visited = np.isin(np.arange(8), clients)
        assert visited.sum() == (clients == 8).sum() == 2
        np.testing.assert_array_equal((after != before).any(axis=1), visited)
        before = after


def test_stc_traffic(
    federation: Federation, models: dict[str, fs.Model], local: LocalUpdate
) -> None:
    algorithm = stc(local, clients_per_round=COHORT, sparsity=0.02)
    variables = models["logistic"].init(KEY)
    one = compression.ternary(0.02).bytes(sum(a.size for a in jax.tree.leaves(variables)))
    # A client comes back after 8/3 rounds: three messages.
    assert algorithm.traffic(variables, federation.data) == fs.base.Traffic(one, 3 * one, 0, 0)


def sgd() -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(fs.models.logistic((2,), 2)), optax.sgd(0.1))


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "bits": (
        lambda: fedavg_sketched(sgd(), clients_per_round=2, bits=17),
        "bits must be in 1..16, got 17",
    ),
    "noise that a message has no room for": (
        lambda: fedavg_top_k(sgd(), clients_per_round=2).replace(
            sending=(compression.compressed(compression.top_k(0.1)), fs.sending.noise(0.1))
        ),
        "sending noise(0.1) needs to come before codes, whose messages have no room for it, "
        "sending is (compressed(top_k(0.1)), noise(0.1)): use ",
    ),
}


test_errors = rejects(ERRORS)
