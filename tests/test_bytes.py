"""Messages whose bytes depend on the updates: codes, rounds and the clock against plain loops."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_compression import rice
from test_sending import LR, START, N, clients_data, local_sgd

import fedjax_sim as fs
from fedjax_sim import clock, compression
from fedjax_sim.base import Metrics, Sending, Sent, SlotBytes, Traffic, Variables
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round import traffic
from fedjax_sim.run.ledger import sent_bytes

KEY, COHORT, ROUNDS, SECONDS = jax.random.key(0), 4, 5, 0.25
MEASURE = jax.jit(lambda level, x: compression.hard_threshold(level).measure(KEY, x))
FIXED = [-math.expm1(math.log((math.sqrt(5) - 1) / 2) / 2**b) for b in range(31)]


def sparse_bytes(sent: np.ndarray) -> int:
    """Values, count and gaps of the entries ``sent``, or all entries."""
    count, n = int(sent.sum()), len(sent)
    fixed = sum(count / n <= share for share in FIXED)
    return min(4 * n, 4 + 4 * count + math.ceil(rice(np.flatnonzero(sent), fixed) / 8))


def entropy_bytes(values: np.ndarray, most: int) -> int:
    counts = np.unique(values, return_counts=True)[1]
    bits = float((counts * np.log2(len(values) / counts)).sum())
    return min(most, math.ceil(bits / 8 - 1e-9) + 8 * len(counts))


# ---- codes ----


def test_a_threshold_sends_what_is_large() -> None:
    """As many bytes as a real encoder writes; 0 sends all, and zeros too."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=3000) * rng.lognormal(size=3000)).astype(np.float32)
    x[:40] = 0
    levels = [0.0, 1e-4, 0.1, 0.5, float(np.abs(x[70])), 2.0, 9.0, 1e9]

    sizes = []
    for level in levels:
        got, size = MEASURE(level, x)
        sent = np.abs(x) >= np.float32(level)
        np.testing.assert_array_equal(got, np.where(sent, x, 0))
        assert int(size) == sparse_bytes(sent)
        sizes.append(int(size))
    assert sizes[0] == 4 * 3000
    assert sizes[-1] == 4  # nothing, of which the count tells


def test_a_threshold_takes_the_bytes_of_top_k_for_random_positions() -> None:
    """If positions are random, up to the count that only a threshold has to send."""
    x = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    for share in (0.3, 0.02):
        level = float(np.quantile(np.abs(x), 1 - share))
        size = MEASURE(level, x)[1]
        assert int(size) == pytest.approx(compression.top_k(share).bytes(len(x)), rel=4e-3)


QUANTISERS: dict[str, compression.Compressor] = {
    "levels": compression.stochastic_quantisation(7),
    "ternary": compression.ternary(0.3),
    "two": compression.uniform_quantisation(1),
    "clustered": compression.clustered(compression.top_k(0.3), 5),
    "no quantiser": compression.top_k(0.5),
}


@pytest.mark.parametrize("case", QUANTISERS)
def test_an_entropy_code_counts_values(case: str) -> None:
    code = QUANTISERS[case]
    coded = compression.entropy_coded(code)
    x = np.random.default_rng(2).standard_t(2, size=999).astype(np.float32)
    for scale in (np.float32(1), np.where(np.arange(999) < 900, 0, 1).astype(np.float32)):
        given, size = jax.jit(coded.measure)(KEY, scale * x)
        np.testing.assert_array_equal(given, jax.jit(code.compress)(KEY, scale * x))
        assert int(size) == entropy_bytes(np.asarray(given), code.bytes(999))


@pytest.mark.parametrize("n", [2, 13])
def test_a_table_that_is_too_long_is_not_sent(n: int) -> None:
    """Most values differ: the table alone takes more than the quantiser's own message."""
    code, x = compression.uniform_quantisation(16), jnp.sqrt(jnp.arange(1.0, n + 1))
    given, size = jax.jit(compression.entropy_coded(code).measure)(KEY, x)
    assert int(size) == entropy_bytes(np.asarray(given), code.bytes(n)) == code.bytes(n)


@pytest.mark.parametrize("levels", [1, 3, 8])
def test_clusters_are_those_of_lloyd(levels: int) -> None:
    x = np.random.default_rng(4).standard_t(3, size=500).astype(np.float32)
    kept = np.where(np.abs(x) >= np.sort(np.abs(x))[-150], x, 0).astype(np.float64)
    values = np.linspace(kept.min(), kept.max(), levels)
    for _ in range(10):
        place = np.abs(kept[:, None] - values).argmin(1)
        values = np.array([kept[place == v].mean() for v in range(levels)])
    wanted = values[np.abs(kept[:, None] - values).argmin(1)]
    code = compression.clustered(compression.top_k(0.3), levels)
    found = jax.jit(code.compress)(KEY, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert code.bytes(500) == {1: 4, 3: 125 + 12, 8: 188 + 32}[levels]
    assert not jax.jit(code.compress)(KEY, jnp.zeros(9)).any()


def test_codes_within_codes_count_the_inner_messages() -> None:
    """By hand: one value of 100 differs, the table has two; a seed takes 8 bytes."""
    inner = compression.entropy_coded(compression.uniform_quantisation(8))
    masked, turned = compression.random_mask(1.0, inner), compression.rotated(inner)
    x = jnp.zeros(100).at[3].set(1.0)
    found = jax.jit(lambda x: [code.measure(KEY, x) for code in (inner, masked, turned)])(x)
    bits = math.log2(100) + 99 * math.log2(100 / 99)
    assert int(found[0][1]) == int(found[1][1]) == math.ceil(bits / 8) + 16 < inner.bytes(100)
    # A spike that is turned has two levels, up and down, each in 64 of 128 entries.
    assert int(found[2][1]) == 8 + 128 / 8 + 16 < turned.bytes(100)
    assert masked.measured
    assert turned.measured
    for code in (compression.rotated(inner.code), compression.random_mask(0.5)):
        assert not code.measured


def test_codes_that_are_rejected() -> None:
    code = compression.hard_threshold(0.1)
    with pytest.raises(ValueError, match=r"^threshold must be at least 0, got -1"):
        compression.hard_threshold(-1)
    with pytest.raises(
        ValueError, match=r"^code must have .* one size, got hard_threshold\(0\.1\)"
    ):
        compression.entropy_coded(code)
    with pytest.raises(ValueError, match=r"^compressor must have messages of one size at a server"):
        compression.compress_server(fs.server.replace(), code)


def test_methods_take_the_codes() -> None:
    def sending(name: str, **settings: Any) -> Any:
        return fs.ALGORITHMS[name](local_sgd(), clients_per_round=COHORT, **settings).parts.sending

    assert sending("fedavg_top_k", threshold=0.5) == composed(0.5).parts.sending
    fedzip = compression.entropy_coded(compression.clustered(compression.top_k(0.3), 3))
    wanted = compression.compressed(fedzip, feedback=False)
    found = sending("fedavg_top_k", sparsity=0.3, clusters=3, feedback=False)
    assert found == (wanted,)
    code = compression.entropy_coded(compression.stochastic_quantisation(7))
    wanted = compression.compressed(code, feedback=False)
    assert sending("fedavg_qsgd", levels=7, entropy_coded=True) == (wanted,)


# ---- rounds ----

WIDTH = 40
DATA = clients_data(WIDTH)
WHOLE, DEADLINE, SLOW = 4 * WIDTH, 9.0, 4


def step_seconds(key: Any, client: Any, now: Any) -> Any:
    return jnp.where(client == SLOW, 20.0, SECONDS).astype(jnp.float32)


def luck(t: int, k: int) -> tuple[float, float]:
    """The two numbers by which a client is lost."""
    own = jax.random.fold_in(stream(jax.random.fold_in(KEY, t), Round.LOST), k)
    first, second = jax.random.uniform(own, (2,)).tolist()
    return first, second


class even_only(Sending):
    """Clients with odd numbers withhold their updates; all send a number."""

    withholds = True
    numbers = 1

    def send(self, key: Any, kept: Any, update: Any, message: Any, client: Any) -> Sent:
        return Sent(update, message, kept, client % 2 == 0)


def simulated(make: Any, levels: list[float], devices: int = 1) -> Any:
    """A run for each threshold, in one program: ``(states, metrics)`` of all rounds."""
    start = Variables({"w": jnp.zeros(WIDTH)}, {"count": jnp.float32(0)})
    data = jax.tree.map(jnp.asarray, DATA)
    execution = fs.make_execution(devices=devices)

    @jax.jit
    def go(levels: Any, data: fs.ClientData) -> Any:
        def one(level: Any) -> Any:
            algorithm = make(level).on(execution)
            first = algorithm.init(KEY, start, data)

            def step(state: Any, t: Any) -> Any:
                state, metrics = algorithm.step(jax.random.fold_in(KEY, t), state, data)
                return state, (state.server.params["w"], state.sending[-1], metrics)

            return jax.lax.scan(step, first, jnp.arange(ROUNDS))[1]

        return jax.lax.map(one, levels)

    return jax.device_get(go(jnp.array(levels, jnp.float32), data))


def composed(level: Any, *before: Sending, **parts: Any) -> fs.Algorithm:
    code = compression.compressed(compression.hard_threshold(level))
    plain = fs.fedavg(local_sgd(), clients_per_round=COHORT, equal_weights=True)
    return plain.replace(sending=(*before, code), **parts)


SAMPLES = np.split(np.asarray(DATA.x, np.float64), np.asarray(DATA.start[1:-1]))
CENTRES = [x.mean(axis=0) for x in SAMPLES]


def replayed(
    level: float,
    cohorts: np.ndarray,
    *,
    up: float,
    down: float,
    deadline: float = math.inf,
    shared: bool = False,
    evens: bool = False,
    failures: float = 0.0,
) -> dict[str, list[Any]]:
    """One run: the server, the residuals, the bytes and the seconds of each round."""
    w, kept = np.zeros(WIDTH), np.zeros((N, WIDTH))
    out: dict[str, list[Any]] = {n: [] for n in ("w", "kept", "bytes", "lost", "late", "time")}
    for t, cohort in enumerate(cohorts):
        lost = {k: share for k in cohort if (share := luck(t, k))[0] < failures}
        sends = [k for k in cohort if k in lost or not (evens and k % 2)]
        messages, rest, begun = {}, {}, set()
        for k in sends:
            wanted = -LR * (w - CENTRES[k]) + kept[k]
            sent = np.abs(wanted) >= level
            rest[k] = np.where(sent, 0, wanted)
            messages[k] = np.where(sent, wanted, 0), sparse_bytes(sent) + 4  # and the state
        end = {}
        for k in cohort:
            size = (messages[k][1] if k in messages else 0) + 4 * evens  # and the number
            users = max(len(sends), 1) if shared else 1
            work = (WHOLE + 4) / down + (20.0 if evens and k == SLOW else SECONDS)
            end[k] = work + size * users / up
            if k in lost:
                end[k] *= lost[k][1]
            elif k in messages and work < deadline:
                begun.add(k)
        late = [k for k in cohort if end[k] > deadline and k not in lost]
        taken = [k for k in begun if k not in late]
        for k in taken:
            kept[k] = rest[k]
        if taken:
            w = w + np.mean([messages[k][0] for k in taken], axis=0)
        out["w"].append(w)
        out["kept"].append(kept.copy())
        out["bytes"].append([messages[k][1] if k in begun else 0 for k in cohort])
        out["lost"].append(len(lost))
        out["late"].append(len(late))
        out["time"].append(min(max(end.values()), deadline))
    return out


def check(found: Any, level: float, **settings: Any) -> dict[str, list[Any]]:
    servers, kept, metrics = found
    wanted = replayed(level, metrics.client, **settings)
    np.testing.assert_allclose(servers, wanted["w"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kept, wanted["kept"], rtol=1e-4, atol=1e-5)
    assert metrics.bytes.up.tolist() == wanted["bytes"]
    assert metrics.bytes.down is None
    assert metrics.uploads.tolist() == [np.count_nonzero(sizes) for sizes in wanted["bytes"]]
    assert metrics.time.lost.tolist() == wanted["lost"]
    assert metrics.time.late.tolist() == wanted["late"]
    np.testing.assert_allclose(metrics.time.seconds, wanted["time"], rtol=1e-5)
    return wanted


def test_rounds_against_a_plain_loop() -> None:
    """With error feedback, bytes and seconds; a threshold of 0 is FedAvg, in its bytes too."""
    levels, link = [0.0, 0.3, 2.0], clock.bandwidth(50.0, 200.0)
    timed = clock.simulated(SECONDS, link)
    servers, kept, metrics = simulated(lambda level: composed(level, clock=timed), levels)
    sizes = set[int]()
    for i, level in enumerate(levels):
        one = jax.tree.map(lambda a, i=i: a[i], (servers, kept, metrics))
        wanted = check(one, float(np.float32(level)), up=50.0, down=200.0)
        sizes |= {size for of_round in wanted["bytes"] for size in of_round}
    assert (metrics.bytes.up[0] == WHOLE + 4).all()
    assert not kept[0].any()
    assert len(sizes) > 10
    assert min(sizes) < 40
    w = np.zeros(WIDTH)
    for cohort, server in zip(metrics.client[0], servers[0], strict=True):
        w = w + np.mean([-LR * (w - CENTRES[k]) for k in cohort], axis=0)
        np.testing.assert_allclose(server, w, rtol=1e-4, atol=1e-5)
    upload = composed(0.3).traffic(Variables({"w": jnp.zeros(WIDTH)}, {}), DATA).upload
    assert upload == WHOLE  # the most


def test_a_message_is_late_by_its_size() -> None:
    """Two devices; who withholds takes no time for a model, and none of the shared uplink.

    A client that still computes at the deadline has not begun its upload; others are lost.
    """
    levels = [0.3, 0.6]
    link = clock.bandwidth(50.0, 200.0, shared=True)
    timed = clock.simulated(step_seconds, link, deadline=DEADLINE, failures=0.2)
    found = simulated(lambda level: composed(level, even_only(), clock=timed), levels, devices=2)
    late: list[int] = []
    lost: list[int] = []
    for i, level in enumerate(levels):
        one = jax.tree.map(lambda a, i=i: a[i], found)
        given = {"up": 50.0, "down": 200.0, "deadline": DEADLINE, "shared": True, "evens": True}
        wanted = check(one, float(np.float32(level)), failures=0.2, **given)
        late, lost = late + wanted["late"], lost + wanted["lost"]
    assert 0 < sum(late) < COHORT * ROUNDS
    assert len(set(late)) > 2
    assert (found[2].client == SLOW).any()
    assert any(lost)


# ---- totals ----


def test_totals_are_exact_beyond_32_bits() -> None:
    """Three slots of nearly 2 GiB and a number from each of seven clients, in two rounds."""
    most, size = 2**31 - 1, Traffic(upload=9, download=2**31 - 1, message=4, shared_state=0)
    up: Any = np.full((1, 2, 3), most, np.int32)
    up[0, 1] = [5, 0, most]
    count, none, seven = (np.array([a], np.int32) for a in ([3, 2], [0, 0], [7, 7]))
    given: Any = (none, none, none, none, count, seven, none, seven, none, none, none, {})
    rows = Metrics(*given)._replace(bytes=SlotBytes(up, None))
    assert sent_bytes(size, rows, 2).tolist() == [[4 * most + 5 + 2 * 7 * 4], [14 * most]]
    assert sent_bytes(size, rows._replace(bytes=None), 2)[0].tolist() == [5 * 9 + 2 * 7 * 4]
    rows = rows._replace(bytes=SlotBytes(up, up))
    assert sent_bytes(size, rows, 2)[1].tolist() == [4 * most + 5]


def test_a_message_beyond_32_bits_is_rejected() -> None:
    parts = composed(0.1).parts
    large, fits = (
        Variables({"w": jax.ShapeDtypeStruct((n,), jnp.float32)}, {}) for n in (2**29, 2**29 - 1)
    )
    assert traffic.largest_upload(parts, fits) == 2**31 - 4
    with pytest.raises(ValueError, match=r"^sending compressed\(hard.* needs a model of less than"):
        traffic.largest_upload(parts, large)


class forgetful(Sending):
    """A part that measures, and does not say what."""

    measured = True


def test_a_part_that_measures_must_report() -> None:
    algorithm = fs.fedavg(local_sgd(), clients_per_round=COHORT).replace(sending=(forgetful(),))
    start = Variables({"w": jnp.asarray(START)}, {})
    with pytest.raises(ValueError, match=r"^sending forgetful\(\) must set Sent\.bytes if it is"):
        jax.eval_shape(
            lambda: algorithm.step(KEY, algorithm.init(KEY, start, clients_data()), clients_data())
        )
