"""DP-SGD at the clients: a step by hand, its minibatches and noise by their laws, and ε."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_federation, rejects

import fedjax_sim as fs
from fedjax_sim import corrections, privacy, sending
from fedjax_sim.algorithms import dp_sgd
from fedjax_sim.base import Batch, ClientView, Variables
from fedjax_sim.cli.summary import client_privacy_spent, remarks
from fedjax_sim.run.provenance import client_privacy_of

KEY = jax.random.key(0)
N_K, CAPACITY, B, LR = 7, 9, 3, 0.1
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
X[4] *= 10  # client's third sample: far above any clip
Y = np.arange(12, dtype=np.float32) % 3
INDEX = np.array([11, 10, 9, 0, 4, 2, 3, 1, 5, 6, 7, 8], np.int32)
START = 2
W = {"a": jnp.array([0.5, -1.0]), "b": jnp.float32(0.25)}


def client(size: Any = N_K, x: Any = X) -> ClientView:
    return ClientView(
        jnp.asarray(x), jnp.asarray(Y), jnp.asarray(INDEX), jnp.int32(START), jnp.int32(size),
        CAPACITY,
    )  # fmt: skip


def loss(w: Any, batch: Batch, key: Any) -> jax.Array:
    """Of one sample alone; not a mean, so that a batch of more would show."""
    assert batch.mask.shape == (1,)
    return jnp.sum(0.5 * jnp.square(batch.x @ w["a"] + w["b"] - batch.y))


def gradients(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradients ``[n, 3]`` and losses of samples, by hand."""
    x, y = X[rows].astype(np.float64), Y[rows]
    gap = x @ np.array([0.5, -1.0]) + 0.25 - y
    return np.column_stack([gap[:, None] * x, gap]), gap**2 / 2


@jax.jit
def slope(key: Any, clip: Any, sigma: Any, size: Any = N_K, x: Any = X) -> tuple[Any, ...]:
    """All tests that do not draw many share this program; B is 3."""
    made = privacy.dp_sgd(clip, sigma).slope(key, client(size, x), B, loss, W)
    return jnp.append(made.gradient["a"], made.gradient["b"]), made.loss, made.samples


many = jax.jit(jax.vmap(slope, (0, None, None, None)))


def joined(x: np.ndarray, key: Any, size: int) -> np.ndarray:
    """Whose gradients are in a sum, found by a change of each sample."""
    before, moved = slope(key, 1.0, 0.0, size, x)[0], []
    for place in range(size):
        other = x.copy()
        other[INDEX[START + place]] += 1
        moved.append(bool((slope(key, 1.0, 0.0, size, other)[0] != before).any()))
    return np.flatnonzero(moved)


def test_a_step_is_the_sum_of_clipped_gradients_over_the_expected_size() -> None:
    factors: list[float] = []
    for seed in range(4):
        key, seen = jax.random.key(seed), joined(X, jax.random.key(seed), N_K)
        g, losses = gradients(INDEX[START + seen])
        for clip in (1e9, 2.0, 0.5):
            factor = np.minimum(1, clip / np.linalg.norm(g, axis=1))
            got, mean, samples = slope(key, clip, 0.0)
            np.testing.assert_allclose(got, (factor[:, None] * g).sum(axis=0) / B, rtol=1e-5)
            assert float(mean) == pytest.approx(losses.mean(), rel=1e-5)
            assert int(samples) == len(seen)
            factors += factor.tolist() if clip == 2 else []
    assert min(factors) < 0.2  # some are clipped, and some are not
    assert factors.count(1) > 2


def test_a_small_client_takes_all_its_samples() -> None:
    for size in (1, 2, 3):
        g = gradients(INDEX[START : START + size])[0]
        factor = np.minimum(1, 0.5 / np.linalg.norm(g, axis=1))
        got, _, samples = slope(KEY, 0.5, 0.0, size)
        np.testing.assert_allclose(got, (factor[:, None] * g).sum(axis=0) / size, rtol=1e-5)
        assert int(samples) == size
    nothing, mean, samples = slope(KEY, 0.5, 0.0, 0)
    assert (nothing.tolist(), float(mean), int(samples)) == ([0, 0, 0], 0, 0)


def test_a_gradient_that_is_not_finite_counts_as_0() -> None:
    for bad in (math.nan, math.inf):
        broken = X.copy()
        broken[INDEX[START]] = bad
        got = slope(KEY, 0.5, 0.0, 2, broken)[0]
        g = gradients(INDEX[START + 1 : START + 2])[0]
        np.testing.assert_allclose(got, g[0] * min(1, 0.5 / np.linalg.norm(g)) / 2, rtol=1e-5)


DRAWS = 4000


def test_minibatches_are_poisson_samples() -> None:
    sizes = np.asarray(many(jax.random.split(KEY, DRAWS), 1.0, 0.0, N_K)[2])
    q = B / N_K
    deviation = math.sqrt(N_K * q * (1 - q))
    assert sizes.max() == N_K  # more than twice B: none is dropped
    assert sizes.min() == 0
    assert abs(sizes.mean() - B) < 5 * deviation / math.sqrt(DRAWS)
    assert sizes.var() == pytest.approx(deviation**2, rel=0.1)
    assert abs(np.corrcoef(sizes[1:], sizes[:-1])[0, 1]) < 5 / math.sqrt(DRAWS)
    # One sample more or less does not change whether another joins.
    found = [joined(X, jax.random.key(seed), N_K) for seed in range(40)]
    counts = np.bincount(np.concatenate(found), minlength=N_K)
    assert (np.abs(counts - 40 * q) < 5 * math.sqrt(40 * q * (1 - q))).all()


def test_noise_has_its_deviation_and_is_independent() -> None:
    keys, (clip, sigma) = jax.random.split(KEY, DRAWS), (0.5, 1.5)
    noise = np.asarray(many(keys, clip, sigma, N_K)[0] - many(keys, clip, 0.0, N_K)[0])
    wanted = sigma * clip / B
    np.testing.assert_allclose(noise.std(axis=0), wanted, rtol=0.06)
    assert (np.abs(noise.mean(axis=0)) < 5 * wanted / math.sqrt(DRAWS)).all()
    columns = np.column_stack([noise[1:], noise[:-1]])  # other weights, and the step before
    assert (np.abs(np.corrcoef(columns.T) - np.eye(6)) < 5 / math.sqrt(DRAWS)).all()
    small = many(keys, clip, sigma, 2)[0] - many(keys, clip, 0.0, 2)[0]
    assert float(small.std()) == pytest.approx(sigma * clip / 2, rel=0.06)


# ---- in local training ----

SIZES = (12, 5, 9, 9)
FEDERATION = make_federation(SIZES)
DATA = FEDERATION.data
MODEL = fs.models.logistic((6,), 3)
START_AT = jax.jit(MODEL.init)(KEY)
RISK = fs.empirical_risk(MODEL, l2=0.1)


def local(**settings: Any) -> fs.local.local_sgd:
    return fs.local_sgd(RISK, optax.sgd(LR, momentum=0.9), batch_size=B, **settings)


PRIVATE = fs.local.dp_sgd(1.0, 1.1)


def visit(update: Any, number: int = 0) -> Any:
    start, size = int(DATA.start[number]), SIZES[number]
    view = ClientView(
        DATA.x, DATA.y, DATA.index, jnp.int32(start), jnp.int32(size), DATA.capacity,
        id=jnp.int32(number), round=jnp.int32(0), coin=KEY,
    )  # fmt: skip
    states = update.client_state(START_AT), update.shared_state(START_AT)
    return jax.jit(update.train)(KEY, START_AT, view, *states)


def test_without_noise_clip_and_sampling_it_is_full_batch_sgd() -> None:
    """Two epochs, with a correction, momentum and l2, of some leaves."""
    plain = local(epochs=2, corrections=(corrections.proximal(0.5),))
    plain = plain.change(batch_size=12, trained=fs.leaves.named("*kernel"))
    steps = fs.local.dp_sgd(math.inf, 0.0)
    one, other = visit(plain), visit(plain.change(private=steps))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_control_variate_is_made_of_private_gradients() -> None:
    """SCAFFOLD's option 2: all that a client sends follows from its noisy steps.

    The optimiser sees neither losses nor other gradients.
    """
    sgd, seen = optax.sgd(LR), set[str]()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.update(extra)
        return sgd.update(updates, state, params)

    optimizer = optax.GradientTransformationExtraArgs(sgd.init, update)
    terms = (corrections.scaffold(),)
    steps = fs.local.dp_sgd(1e-3, 0.1)
    private = fs.local_sgd(RISK, optimizer, batch_size=B, private=steps, corrections=terms)
    end = visit(private)
    assert seen == {"key"}
    assert int(end.info.steps) == 4
    moved = jax.tree.map(lambda w, v: (w - v) / (LR * 4), START_AT.params, end.variables.params)
    (variate,) = end.message.corrections
    assert 0 < float(fs.tree.norm(variate)) < 1e-3 * (12 / 3 + 1)  # all clipped, and some noise
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(variate), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6)


BIASED = fs.empirical_risk(MODEL, adjust=fs.terms.balanced(3))
AT = "with private=dp_sgd(1.0, 1.1), got "
FEDAVG: Any = {"clients_per_round": 2}


def with_steps(**settings: Any) -> fs.local.local_sgd:
    return local(private=PRIVATE, **settings)


def with_parts(**parts: Any) -> fs.Algorithm:
    return fs.compose(**{"local": with_steps(), **FEDAVG, **parts})


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no clip": (lambda: fs.local.dp_sgd(math.inf, 1.0), "clip must be finite if noise is added"),
    "no steps": (lambda: local(private=1.0), "private must be dp_sgd(clip, noise_multiplier), got"),
    "the last batch": (
        lambda: with_steps(last_batch="drop"), f"last_batch must be 'keep' {AT}'drop'",
    ),
    "label counts": (
        lambda: with_steps().change(objective=BIASED),
        f"objective must be an empirical_risk without adjust and term {AT}empirical_risk(",
    ),
    "drawn steps": (
        lambda: with_steps(steps=fs.local.geometric(0.2)),
        f"steps must be None {AT}geometric(0.2)",
    ),
    "whole gradients": (
        lambda: with_steps(inexactness=0.5), f"inexactness must be None {AT}0.5",
    ),
    "a loss that is sent": (
        lambda: with_steps(corrections=(corrections.adaptive_proximal(),)),
        "corrections must read a client's samples in its private gradients alone with private="
        "dp_sgd(1.0, 1.1), got adaptive_proximal()",
    ),
    "the whole gradient": (
        lambda: with_steps(corrections=(corrections.scaffold(1),)),
        "corrections must read a client's samples in its private gradients alone with private="
        "dp_sgd(1.0, 1.1), got scaffold(option=1)",
    ),
    "a personal model beside": (
        lambda: fs.algorithms.ditto(with_steps(), **FEDAVG),
        "needs local training that reads samples in its private steps alone, local is ditto(",
    ),
    "peers": (lambda: with_parts(local=with_steps(peers=True)), "needs clients that see no"),
    "a wrapper": (
        lambda: with_parts(local=fs.local.with_final_loss(with_steps(), RISK)),
        "needs local training that reads samples in its private steps alone, local is with_final",
    ),
    "turns": (
        lambda: with_parts(local=fs.local.in_turn(with_steps(), local())),
        "needs local training that reads samples in its private steps alone, local is in_turn(",
    ),
    "a choice by loss": (
        lambda: with_parts(broadcast=fs.broadcast.ifca(2, RISK)),
        "needs clients that choose no model by their samples, broadcast is ifca(",
    ),
    "a poll": (
        lambda: with_parts(selection=fs.selection.power_of_choice(3)),
        "needs clients that report no numbers, selection is power_of_choice(",
    ),
    "label counts that are sent": (
        lambda: fs.algorithms.feddisco(with_steps(), **FEDAVG, classes=3),
        "needs pre-aggregations for which clients send nothing before the first round",
    ),
    "copies": (
        lambda: PRIVATE.slope(KEY, dataclasses.replace(client(), copies=True), B, loss, W),
        "private dp_sgd(1.0, 1.1) needs data without copies",
    ),
    "statistics": (
        lambda: with_steps().client_state(Variables({}, {"mean": jnp.zeros(1)})),
        "model must have no non-trainable variables (BatchNorm) to be private",
    ),
}  # fmt: skip


test_what_reads_samples_without_noise_is_rejected = rejects(ERRORS)


# ---- ε ----

DELTA = 1e-3


def composed(sigma: float, q: float, steps: int, interval: float = 1e-3) -> float:
    """By dp-accounting, step by step."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    return float(accountant.compose(event, steps).get_epsilon(DELTA))


def test_epsilon_of_a_client_is_that_of_its_steps_in_all_visits() -> None:
    algorithm = dp_sgd(local(epochs=2), **FEDAVG, clip=0.5, noise_multiplier=1.5)
    visits = np.array([[3, 2, 0, 0], [1, 0, 0, 0]])
    spent = algorithm.client_epsilon(DATA, visits, DELTA)
    assert spent.shape == (2, 4)
    assert spent[0, 0] == pytest.approx(composed(1.5, 3 / 12, 3 * 2 * 4), rel=1e-6)
    assert spent[0, 1] == pytest.approx(composed(1.5, 3 / 5, 2 * 2 * 2), rel=1e-6)
    assert spent[1, 0] == pytest.approx(composed(1.5, 3 / 12, 2 * 4, 1e-4), rel=1e-3)
    assert (spent == 0).tolist() == (visits == 0).tolist()
    whole = privacy.sample_epsilon(1.5, samples=3, batch_size=8, steps=5, delta=DELTA)
    assert whole == pytest.approx(composed(1.5, 1.0, 5, 1e-4), rel=1e-3)  # no sampling
    nothing = dp_sgd(local(), **FEDAVG, noise_multiplier=0.0).client_epsilon(DATA, visits, DELTA)
    assert np.isinf(nothing[0, :2]).all()


NOISE = sending.clip_norm(0.5), sending.noise(3.0)


def test_epsilon_of_noisy_updates() -> None:
    """Two updates of norm C may be 2C apart: 1, in noise of 3."""
    algorithm = fs.fedavg(local(), **FEDAVG).replace(sending=NOISE)
    four, one, none, _ = algorithm.client_epsilon(DATA, np.array([4, 1, 0, 0]), DELTA)
    assert four == pytest.approx(composed(3.0, 1.0, 4, 1e-4), rel=1e-3)
    assert one == pytest.approx(composed(6.0, 1.0, 4, 1e-4), rel=1e-3)  # as half the noise
    assert none == 0


def normed() -> fs.Model:
    def init(key: Any) -> Variables:
        return Variables({"w": jnp.zeros(1)}, {"mean": jnp.zeros(1)})

    return fs.Model(init, lambda variables, x, **_: (x, variables.state))


NORMED = normed()


MEASURED = {"skew": fs.diagnostics.gradient_dissimilarity(local().objective)}
UNKNOWN: dict[str, tuple[Callable[[], fs.Algorithm], str]] = {
    "no noise": (lambda: fs.fedavg(local(), **FEDAVG), "unknown because clients add no noise"),
    "noise that is not bounded": (
        lambda: with_noise(sending=NOISE[::-1]), "unknown because clients add no noise",
    ),
    "a variate beside": (
        lambda: with_noise(local=local(corrections=(corrections.scaffold(),))),
        "unknown because of local local_sgd(",
    ),
    "momenta of some leaves beside": (
        lambda: with_noise(
            local=local(optimizer_state="average", trained=fs.leaves.named("Dense_0"))
        ),
        "unknown because of local local_sgd(",
    ),
    "gradients that are measured": (
        lambda: dp_sgd(local(), **FEDAVG).replace(diagnostics=MEASURED),
        "unknown because of diagnostics {'skew': gradient_dissimilarity(",
    ),
    "models that are measured": (
        lambda: with_noise(diagnostics=MEASURED), "unknown because of diagnostics {'skew': ",
    ),
    "label counts": (
        lambda: with_noise(preaggregation=(fs.preaggregation.discrepancy(3),)),
        "unknown because of preaggregation (discrepancy(",
    ),
    "silence": (
        lambda: with_noise(sending=(sending.relevant_only(0.5), *NOISE)),
        "unknown because of sending (relevant_only(0.5)",
    ),
    "statistics": (
        lambda: with_noise(local=fs.local_sgd(fs.empirical_risk(NORMED), optax.sgd(LR))),
        "unknown because of local local_sgd(empirical_risk(<Model>), <optax>): ε needs an "
        "empirical_risk of a model without BatchNorm",
    ),
}  # fmt: skip


def with_noise(**parts: Any) -> fs.Algorithm:
    return fs.fedavg(local(), **FEDAVG).replace(**{"sending": NOISE, **parts})


@pytest.mark.parametrize("case", UNKNOWN)
def test_epsilon_of_a_client_is_unknown_because_of_a_part(case: str) -> None:
    make, message = UNKNOWN[case]
    with pytest.raises(privacy.UnknownEpsilonError, match="^" + re.escape(message)):
        make().client_epsilon(DATA, np.ones(4, int), DELTA)


def finished(visits: np.ndarray, start: np.ndarray, algorithm: fs.Algorithm) -> Any:
    """What a summary reads of a result."""
    known = client_privacy_of(algorithm, dataclasses.replace(DATA, start=jnp.asarray(start)))
    origin = SimpleNamespace(start=start, client_privacy=known)
    return SimpleNamespace(visits=visits, provenance=origin)


def test_a_summary_has_the_least_the_median_and_the_largest() -> None:
    """Of the clients that trained, in two runs with other clients."""
    algorithm, start = dp_sgd(local(), **FEDAVG), np.array([[0, 12, 17, 26], [0, 9, 12, 26]])
    visits = np.array([[2, 1, 0], [1, 3, 4]])
    result = finished(visits, start, algorithm)
    told, data = (
        client_privacy_spent(result, DELTA),
        dataclasses.replace(DATA, start=jnp.asarray(start)),
    )
    spent = np.sort(algorithm.client_epsilon(data, visits, DELTA)[visits > 0])
    keys = ("client_epsilon_min", "client_epsilon_median", "client_epsilon_max")
    assert [told[key] for key in keys] == [spent[0], spent[2], spent[-1]]
    assert told["client_delta"] == DELTA
    assert [*remarks(told)] == [
        f"a run is (ε, δ)-private for each sample of a client, ε = {spent[0]:.3g} to "
        f"{spent[-1]:.3g}, median {spent[2]:.3g}, at δ = 0.001"
    ]
    too_large = client_privacy_spent(result, 0.5)["client_epsilon_unknown"]
    assert too_large.startswith("unknown: delta must be above 0 and below 1/n_k")
    by_default = client_privacy_spent(finished(visits, start, with_noise()))
    assert by_default["client_delta"] == 3**-1.1
    assert client_privacy_spent(finished(visits, start, fs.fedavg(local(), **FEDAVG))) == {}
    assert client_privacy_spent(finished(0 * visits, start, algorithm), DELTA) == {}


def test_settings_out_of_range() -> None:
    spend: dict[str, Any] = {"samples": 9, "batch_size": 3, "steps": 1, "delta": 1e-3}
    for change, message in (
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0, got -1.0"),
        ({"delta": 0.2}, "delta must be above 0 and below 1/n_k = 0.111, got 0.2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            privacy.sample_epsilon(**{"noise_multiplier": 1.0, **spend, **change})
    algorithm = dp_sgd(local(), **FEDAVG)
    for visits in (np.ones(4), np.ones(3, int)):
        with pytest.raises(ValueError, match=r"visits must be integers \[\.\.\., 4\], one for"):
            algorithm.client_epsilon(DATA, visits, DELTA)
    for changed in ({"samples_per_round": 2}, {"sent": np.int32(4)}):
        with pytest.raises(privacy.UnknownEpsilonError, match=r"^unknown because of samples that"):
            algorithm.client_epsilon(dataclasses.replace(DATA, **changed), np.ones(4, int), DELTA)
