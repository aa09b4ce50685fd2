"""Robust aggregators against NumPy, attacks against their definitions, and each other."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import (
    Federation,
    altered_data,
    assert_trees,
    known,
    make_federation,
    play,
    play_numbers,
    rejects,
    with_root,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from test_contracts import PARTS

import fedjax_sim as fs
from fedjax_sim import (
    aggregators,
    attacks,
    flight,
    preaggregation,
    selection,
    sending,
    tree,
)
from fedjax_sim.algorithms import fltrust, robust, zeno
from fedjax_sim.base import ClientView, Cohort, FedState, LocalInfo, Sending, Variables
from fedjax_sim.engine.batches import root_view, rows_at
from fedjax_sim.engine.clients import samples_of, visits

ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}
few = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, WIDTH = 9, 4
RULES = {name: make() for name, make in PARTS["Aggregator"].items()}
ROBUST = sorted(RULES.keys() - {"mean"})


@functools.cache
def jitted(name: str, *settings: Any) -> Any:
    rule = getattr(aggregators, name)
    direct = name in ("mean", "coordinate_median")
    return jax.jit(rule if direct else rule(*settings))


@st.composite
def stacks(draw: st.DrawFn, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows and weights; absent rows are NaN."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = rng.uniform(0.5, 20, ROWS).astype(np.float32)
    absent = rng.permutation(ROWS)[: draw(st.integers(0, ROWS - least))]
    rows[absent], weights[absent] = np.nan, 0
    return rows, weights


def split(rows: np.ndarray) -> dict[str, np.ndarray]:
    """The same coordinates in two leaves."""
    return {"a": rows[:, :1], "b": rows[:, 1:].reshape(len(rows), 3, -1)}


def joined(model: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(a) for a in model.values()])


@few
@given(stacks())
def test_coordinate_median(stack: tuple[np.ndarray, np.ndarray]) -> None:
    rows, weights = stack
    ours = joined(jitted("coordinate_median")(split(rows), weights))
    np.testing.assert_allclose(ours, np.median(rows[weights > 0], axis=0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.2, 1 / 3, 0.49])
@few
@given(stacks())
def test_trimmed_mean(beta: float, stack: tuple[np.ndarray, np.ndarray]) -> None:
    rows, weights = stack
    ours = joined(jitted("trimmed_mean", beta)(split(rows), weights))
    present = rows[weights > 0].astype(np.float64)
    np.testing.assert_allclose(ours, stats.trim_mean(present, beta), rtol=1e-5, atol=1e-6)
    if beta == 0:
        equal = jitted("mean")(split(rows), (weights > 0).astype(np.float32))
        np.testing.assert_allclose(ours, joined(equal), rtol=1e-5, atol=1e-6)


def krum_scores(rows: np.ndarray, f: int) -> list[float]:
    """Blanchard et al., section 4, by loops."""
    scores = []
    for i, row in enumerate(rows):
        others = [float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i]
        scores.append(sum(sorted(others)[: max(len(rows) - f - 2, 1)]))
    return scores


@pytest.mark.parametrize(("byzantine", "keep"), [(0.0, 1), (0.3, 1), (0.2, 3), (0.2, None)])
@few
@given(stacks())
def test_krum(byzantine: float, keep: int | None, stack: tuple[np.ndarray, np.ndarray]) -> None:
    rows, weights = stack
    ours = joined(jitted("multi_krum", byzantine, keep)(split(rows), weights))
    present = rows[weights > 0].astype(np.float64)
    f = int(byzantine * len(present) + 1e-9)
    scores = np.array(krum_scores(present, f))
    last = np.sort(scores)[min(keep or len(present) - f, len(present)) - 1]
    chosen = present[scores <= last]
    np.testing.assert_allclose(ours, chosen.mean(axis=0), rtol=1e-5, atol=1e-6)
    if len(chosen) == 1:
        assert (rows == ours).all(axis=1).any()  # one of the rows, to the bit
    if keep == 1:
        single = jitted("krum", byzantine)(split(rows), weights)
        np.testing.assert_array_equal(joined(single), ours)


def filtered(rows: np.ndarray, f: int) -> np.ndarray:
    """CAF by the covariance matrix itself, which has a row for each coordinate."""
    c, best, least = np.ones(len(rows)), rows.mean(axis=0), np.inf
    while c.sum() > len(rows) - 2 * f:
        mean = c @ rows / c.sum()
        offset = rows - mean
        values, vectors = np.linalg.eigh(offset.T @ (c[:, None] * offset) / c.sum())
        if values[-1] < least:
            best, least = mean, values[-1]
        tau = (offset @ vectors[:, -1]) ** 2 * (c > 0)
        c = c * (1 - tau / tau.max())
    return best


@pytest.mark.parametrize("byzantine", [0.0, 0.2, 0.45])
@few
@given(stacks())
def test_caf(byzantine: float, stack: tuple[np.ndarray, np.ndarray]) -> None:
    rows, weights = stack
    rows[0] *= 30
    ours = joined(jitted("caf", byzantine)(split(rows), weights))
    present = rows[weights > 0].astype(np.float64)
    wanted = filtered(present, int(byzantine * len(present) + 1e-9))
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("far", [1e3, 1e6, 1e12, 3e18])
def test_caf_sees_the_others_beside_far_rows(far: float) -> None:
    """What is left is filtered as if the two far rows had never been there."""
    rows = np.random.default_rng(6).normal(size=(12, WIDTH)).astype(np.float32)
    rows[[3, 8]] = far * np.array([[1, 2, 3, 4], [4, -3, 2, 1]])
    wanted = filtered(rows.astype(np.float64), 3)
    ours = joined(jitted("caf", 0.25)(split(rows), np.ones(12, np.float32)))
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4)


@few
@given(stacks())
# The coordinate median is the middle point, and the geometric median is not (an angle of 100°).
@example((np.array([[0.0, 0], [1, 0.1], [1.05, 1.2]] + [[np.nan] * 2] * 6, np.float32),
          np.array([1.0, 1, 1, 0, 0, 0, 0, 0, 0], np.float32)))  # fmt: skip
def test_geometric_median(stack: tuple[np.ndarray, np.ndarray]) -> None:
    rows, weights = stack
    rows = np.pad(rows, ((0, 0), (0, WIDTH - rows.shape[1])))
    present, a = rows[weights > 0].astype(np.float64), weights[weights > 0]

    def total(z: np.ndarray) -> float:
        return float(a @ np.linalg.norm(present - z, axis=1))

    found = optimize.minimize(total, present.mean(axis=0), method="Nelder-Mead", tol=1e-9)
    least = min(found.fun, *map(total, present))
    settled, default = (
        joined(jitted("geometric_median", *n)(split(rows), weights)) for n in ((300,), ())
    )
    assert total(settled) <= least * (1 + 1e-4) + 1e-6
    assert total(default) <= least * 1.1 + 1e-6
    offsets = present - settled
    distance = np.linalg.norm(offsets, axis=1)
    if distance.min() > 0.1:  # the optimum is no row: a sum of unit vectors that vanishes
        assert np.linalg.norm((a / distance) @ offsets) < 2e-3 * a.sum()


@pytest.mark.parametrize("name", ROBUST)
def test_equal_rows_are_returned_to_the_bit(name: str) -> None:
    row = np.float32(np.random.default_rng(0).normal(size=(1, WIDTH)))
    seven = np.array([[7]], np.int32)
    model = Variables({"w": row, "h": jnp.asarray(row, jnp.bfloat16)}, {"n": seven})
    stack = jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a), ROWS, axis=0), model)
    out = jax.jit(RULES[name])(stack, jnp.array([3.0, 0, 1, 1, 1, 1, 7, 1, 1]))
    assert_trees(out, jax.tree.map(lambda a: jnp.asarray(a)[0], model))


@pytest.mark.parametrize("bad", [1e6, 1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", [*ROBUST, "mean"])
def test_a_minority_moves_it_boundedly(name: str, bad: float) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(10, WIDTH)).astype(np.float32)
    rows[[2, 7]] = bad * rng.choice([1.0, 2.0], (2, WIDTH))
    out = joined(_default(name)(split(rows), np.ones(10, np.float32)))
    honest = np.delete(rows, [2, 7], axis=0)
    inside = (out >= honest.min(axis=0)) & (out <= honest.max(axis=0))
    assert inside.all() == (name != "mean")


@functools.cache
def _default(name: str) -> Any:
    return jax.jit(RULES[name])


@pytest.mark.parametrize("name", ["krum", "multi_krum", "geometric_median"])
def test_batch_statistics_do_not_decide(name: str) -> None:
    """Distances are over the parameters; the statistics follow the rows that are chosen."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(6, 3)).astype(np.float32)
    rows[0] = 1e9
    state = np.array([[1e9], [1], [2], [3], [4], [5]], np.float32)
    weights = np.ones(6, np.float32)
    rule = _default(name)
    out, tilted = (rule(Variables(rows, s), weights) for s in (state, state[[0, 5, 4, 3, 2, 1]]))
    assert_trees(out.params, tilted.params)
    assert_trees(out.params, rule(rows, weights))
    assert 1 <= out.state[0] <= 5.001
    if name == "krum":
        assert out.state[0] == state[(rows == np.asarray(out.params)).all(axis=1)][0, 0]


CLIENTS = 8


def cohort_of(server: Any, visited: Any, data: Any) -> Cohort:
    client, count = jnp.asarray(visited, jnp.int32), len(visited)
    ones = jnp.ones(count, jnp.int32)
    info = LocalInfo(jnp.zeros(count), ones, ones)
    received = tree.stack_copies(server, 1)
    return Cohort(server, received, client, client < CLIENTS, ones, info, (), data)


@functools.cache
def mixer(name: str, setting: Any) -> Any:
    part = getattr(preaggregation, name)(setting)

    @jax.jit
    def apply(key: jax.Array, updates: Variables, weights: jax.Array, client: jax.Array) -> Any:
        info = LocalInfo(weights, client, client)
        cohort = Cohort(updates, updates, client, client >= 0, client, info, (), None)  # type: ignore[arg-type]
        return part.apply(key, (), updates, weights, cohort)[:2]

    return apply


def mixed(
    name: str, setting: Any, rows: np.ndarray, weights: np.ndarray, key: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and weights after a pre-aggregation; row k is client k's."""
    updates = Variables(split(rows), {"s": rows[:, 0]})
    client = np.arange(len(rows), dtype=np.int32)
    out, after = mixer(name, setting)(jax.random.key(key), updates, weights, client)
    flat = np.concatenate([out.params["a"], out.params["b"].reshape(len(rows), 3)], axis=1)
    kept = np.asarray(after) > 0
    np.testing.assert_allclose(out.state["s"][kept], flat[kept, 0], rtol=1e-6, atol=1e-6)
    return flat, np.asarray(after)


def neighbours_mixed(rows: np.ndarray, f: int) -> np.ndarray:
    """NNM by loops."""
    out = []
    for row in rows:
        near = np.argsort(((rows - row) ** 2).sum(axis=1), kind="stable")[: len(rows) - f]
        out.append(rows[near].mean(axis=0))
    return np.array(out)


@few
@given(stacks(), st.sampled_from([0.2, 0.45]))
def test_nearest_neighbour_mixing(stack: tuple[np.ndarray, np.ndarray], byzantine: float) -> None:
    rows, weights = stack
    found, after = mixed("nearest_neighbour_mixing", byzantine, rows, weights)
    present = rows[weights > 0].astype(np.float64)
    f = int(byzantine * len(present) + 1e-9)
    np.testing.assert_allclose(
        found[weights > 0], neighbours_mixed(present, f), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(after, weights)


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([0, 1, -1, 5], [0, 0, 0, 2]),  # three of four are as near as can be
        # For the last, 0 and half of each 1 share two places.
        ([0, 1, 1, -3], [2 / 3, 2 / 3, 2 / 3, (-3 + 0 + 1) / 3]),
    ],
)
def test_ties_share_the_last_place(places: list[int], wanted: list[float]) -> None:
    rows = np.repeat(np.array(places, np.float32)[:, None], WIDTH, axis=1)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        found, _ = mixed("nearest_neighbour_mixing", 0.25, rows[order], np.ones(4, np.float32))
        np.testing.assert_allclose(found[:, 0], np.array(wanted)[order], atol=1e-6)


@pytest.mark.parametrize("bad", [1e30, np.inf, np.nan])
def test_a_broken_row_is_nobodys_neighbour(bad: float) -> None:
    rows = np.random.default_rng(7).normal(size=(5, WIDTH)).astype(np.float32)
    rows[2] = bad
    found, _ = mixed("nearest_neighbour_mixing", 0.2, rows, np.ones(5, np.float32))
    honest = np.delete(rows, 2, axis=0)
    np.testing.assert_allclose(found[[0, 1, 3, 4]], [honest.mean(axis=0)] * 4, rtol=1e-5)
    np.testing.assert_array_equal(found[2], rows[2])


@few
@given(stacks(), st.sampled_from([2, 3]), st.integers(0, 9))
def test_buckets(stack: tuple[np.ndarray, np.ndarray], size: int, key: int) -> None:
    """Every present row is in one bucket, and a bucket is the mean of its rows."""
    rows, weights = stack
    found, after = mixed("bucketing", size, rows, weights, key)
    present = weights > 0
    unit = np.eye(ROWS, dtype=np.float32)[:, :WIDTH], np.eye(ROWS, dtype=np.float32)[:, -WIDTH:]
    inside = [mixed("bucketing", size, u, weights, key)[0] for u in unit]
    # Which rows are in a bucket, of the first four and the last four: the fifth is what is left.
    share = np.concatenate([inside[0], np.zeros((ROWS, 1)), inside[1]], axis=1)
    kept = after > 0
    share[kept, 4] = 1 - share[kept].sum(axis=1)
    members = share[kept] > 1e-5
    np.testing.assert_array_equal(members.sum(axis=0), present)
    assert sorted(members.sum(axis=1))[1:] == [size] * (kept.sum() - 1)
    assert kept.sum() == -(-present.sum() // size)
    for bucket, own, weight in zip(found[kept], members, after[kept], strict=True):
        np.testing.assert_allclose(weight, weights[own].sum(), rtol=1e-5)
        wanted = np.average(rows[own].astype(np.float64), axis=0, weights=weights[own])
        np.testing.assert_allclose(bucket, wanted, rtol=1e-4, atol=1e-5)


def test_buckets_are_drawn_by_client_and_anew() -> None:
    """Whatever the order of rows; each two of six meet in a fifth of the rounds. NaN stays."""
    draw = jax.jit(jax.vmap(mixer("bucketing", 2), in_axes=(0, None, None, None)))
    keys, places = (
        jax.random.split(jax.random.key(1), 2000),
        np.array([1, 10, 100, 0, 5, np.nan], np.float32),
    )
    drawn, turned = (
        np.asarray(
            draw(
                keys,
                Variables(places[order], ()),
                np.ones(6, np.float32),
                np.array(order, np.int32),
            )[0].params
        )
        for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4, 0, 2, 1])
    )
    np.testing.assert_allclose(np.sort(drawn), np.sort(turned), rtol=1e-6)
    assert (np.isnan(drawn).sum(axis=1) == 1).all()
    together = np.isclose(drawn, (1 + 10) / 2).any(axis=1).mean()
    assert abs(together - 1 / 5) < 5 * np.sqrt(0.16 / 2000)


MALICIOUS = np.isin(np.arange(CLIENTS), [1, 4, 6])
VISITED = np.array([4, 0, 1, 8, 7, 6, 2])  # 8 is no client
WEIGHTS = np.array([2, 1, 3, 0, 1, 0, 1], np.float32)  # of the malicious 4 and 1 are present


def sent_by(part: Sending, updates: Variables, present: Any, key: jax.Array) -> Variables:
    """What the clients VISITED send, each by itself and then together."""
    client = jnp.asarray(VISITED, jnp.int32)

    def alone(update: Variables, k: jax.Array) -> Variables:
        return part.send(jax.random.fold_in(key, k), (), update, (), k).update

    updates = jax.vmap(alone)(updates, client)
    if part.together is not None:
        updates = part.together(key, updates, client, present)
    return updates


def attacked(attack: Sending, rows: np.ndarray, key: int = 0) -> np.ndarray:
    updates = Variables({"w": jnp.asarray(rows)}, {"s": jnp.arange(len(rows), dtype=jnp.float32)})
    out = sent_by(attack, updates, jnp.asarray(WEIGHTS > 0), jax.random.key(key))
    assert_trees(out.state, updates.state)
    changed = np.asarray(out.params["w"])
    honest = ~np.isin(VISITED, np.flatnonzero(MALICIOUS))
    np.testing.assert_array_equal(changed[honest], rows[honest])
    return changed[[0, 2]]


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    out = np.random.default_rng(3).normal(size=(len(VISITED), 5)).astype(np.float32)
    out[[3, 5]] = np.nan
    return out


def test_sign_flip(rows: np.ndarray) -> None:
    forms: tuple[Any, ...] = (MALICIOUS, MALICIOUS.tolist(), MALICIOUS.astype(int))
    for malicious in forms:
        sent = attacked(attacks.sign_flip(malicious, 3.0), rows)
        np.testing.assert_allclose(sent, -3 * rows[[0, 2]], rtol=1e-6)


def test_gaussian(rows: np.ndarray) -> None:
    wide = np.repeat(rows, 400, axis=1)
    sent, other = (attacked(attacks.gaussian(MALICIOUS, 0.5), wide, k) for k in (0, 1))
    noise = sent / 0.5
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    assert abs(np.asarray(np.corrcoef(noise))[0, 1]) < 0.1
    assert (sent != other).all()


def test_alie(rows: np.ndarray) -> None:
    """The third attacker, 6, does not send: what it holds, NaN, is not known to the others."""
    mean, std = np.mean(rows[[0, 2]], axis=0), np.std(rows[[0, 2]], axis=0)
    sent = attacked(attacks.alie(MALICIOUS, 1.5), rows)
    np.testing.assert_allclose(sent, np.stack([mean - 1.5 * std] * 2), rtol=1e-5, atol=1e-6)


HONEST = [1, 4, 6]  # the rows of VISITED that are honest and send


def test_ipm(rows: np.ndarray) -> None:
    sent = attacked(attacks.ipm(MALICIOUS, 0.7), rows)
    np.testing.assert_allclose(sent, [-0.7 * rows[HONEST].mean(axis=0)] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("target", "copied"), [(0, 0), (2, 2), (3, 7), (4, 7), (7, 7)])
def test_mimic(rows: np.ndarray, target: int, copied: int) -> None:
    """The honest clients 0, 2 and 7 send: in place of others the next by number, 8 is none."""
    sent = attacked(attacks.mimic(MALICIOUS, target), rows)
    np.testing.assert_array_equal(sent, rows[[list(VISITED).index(copied)] * 2])


def test_after_the_last_client_mimic_takes_the_first(rows: np.ndarray) -> None:
    sends = jnp.asarray((WEIGHTS > 0) & (VISITED != 7))
    updates = Variables(jnp.asarray(rows), ())
    sent = sent_by(attacks.mimic(MALICIOUS, 3), updates, sends, jax.random.key(0))
    np.testing.assert_array_equal(sent.params[0], rows[list(VISITED).index(0)])


def test_without_honest_updates_there_is_nothing_to_forge(rows: np.ndarray) -> None:
    everyone = np.ones(CLIENTS, bool)
    updates = Variables({"w": jnp.asarray(rows)}, ())
    attack: Sending
    for attack in (
        attacks.ipm(everyone), attacks.mimic(everyone),
        attacks.optimised(everyone, aggregators.mean), attacks.fang_trim(everyone),
        attacks.fang_krum(everyone, aggregators.krum(0.1)),
    ):  # fmt: skip
        sent = sent_by(attack, updates, jnp.asarray(WEIGHTS > 0), jax.random.key(0))
        assert_trees(sent, updates)


def searched(distance: Callable[[float], float], evaluations: int) -> float:
    """ByzFL's line search as two loops: it grows, then it shrinks."""
    best, reached, size, left = 0.0, distance(0.0), 10.0, evaluations - 1
    while left and (found := distance(best + size)) > reached:
        best, reached, size, left = best + size, found, 2 * size, left - 1
    for _ in range(left - 1):
        size *= 0.8
        if (found := distance(best + size)) > reached:
            best, reached = best + size, found
    return best


@pytest.mark.parametrize("along", ["spread", "mean"])
@pytest.mark.parametrize("name", ["mean", "krum", "mixed"])
def test_optimised(along: Any, name: str) -> None:
    """Of ten clients in a round two attack; two more are not there."""
    rng = np.random.default_rng(8)
    rows = (0.3 + 0.5 * rng.normal(size=(12, WIDTH))).astype(np.float32)
    malicious, sends = np.isin(np.arange(CLIENTS * 2), [3, 7, 11]), np.ones(12, bool)
    sends[[5, 11]] = False
    rows[5] = np.nan
    hostile, honest = [3, 7], np.setdiff1d(np.flatnonzero(sends), [3, 7])
    mean, deviation = rows[honest].mean(axis=0), rows[honest].std(axis=0)

    def forged(strength: float) -> np.ndarray:
        return mean - strength * deviation if along == "spread" else -strength * mean

    def aggregate(present: np.ndarray) -> np.ndarray:
        if name == "mean":
            return np.asarray(present.mean(axis=0))
        if name == "krum":
            return np.asarray(present[np.argmin(krum_scores(present, 2))])
        return np.asarray(np.median(neighbours_mixed(present, 2), axis=0))

    def distance(strength: float) -> float:
        changed = rows.astype(np.float64)
        changed[hostile] = forged(strength)
        return float(np.linalg.norm(aggregate(changed[sends]) - mean))

    evaluations = 4 if name == "mean" else 20  # a mean is moved as far as one likes
    rule: Any = {"mean": aggregators.mean, "krum": aggregators.krum(0.2)}.get(
        name, aggregators.coordinate_median
    )
    before = [preaggregation.nearest_neighbour_mixing(0.2)] if name == "mixed" else []
    attack = attacks.optimised(malicious, rule, before, along, evaluations)
    assert attack.together is not None
    updates = Variables(jnp.asarray(rows), ())
    sent = jax.jit(attack.together)(
        jax.random.key(0), updates, jnp.arange(12, dtype=jnp.int32), jnp.asarray(sends)
    )
    strength, ours = searched(distance, evaluations), np.asarray(sent.params)
    assert strength > 0
    np.testing.assert_allclose(ours[hostile], [forged(strength)] * 2, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(ours[honest], rows[honest])


DOZEN = np.arange(12)
TRAITORS, SENDS = np.isin(DOZEN, [3, 7, 11]), ~np.isin(DOZEN, [5, 11])
HOSTILE, LOYAL = [3, 7], np.setdiff1d(np.flatnonzero(SENDS), [3, 7])


@pytest.fixture(scope="module")
def dozen() -> np.ndarray:
    """Updates of ten clients, of whom two attack; two more are not there."""
    out = (0.3 + 0.5 * np.random.default_rng(8).normal(size=(12, WIDTH))).astype(np.float32)
    out[[5, 11]] = np.nan
    return out


def directed(attack: Any, rows: np.ndarray, key: int = 0) -> np.ndarray:
    """What the two attackers send."""
    sent = jax.jit(attack.together)(
        jax.random.key(key), Variables(jnp.asarray(rows), ()), jnp.asarray(DOZEN, jnp.int32),
        jnp.asarray(SENDS),
    )  # fmt: skip
    ours = np.asarray(sent.params)
    np.testing.assert_array_equal(ours[LOYAL], rows[LOYAL])
    return ours[HOSTILE]


def test_fang_on_the_trimmed_mean(dozen: np.ndarray) -> None:
    """All four cases of sign and side, by the paper's intervals; uniform within them."""
    b, wide = 3.0, np.tile(dozen * [1, -1, 1, -1, 1][:WIDTH], 400)
    wide[:, ::3] += 3 * np.sign(np.nansum(wide[:, ::3], axis=0))  # extremes with the sum's sign
    wide[3, 7::11] = 99  # the attackers' own updates count in the sum
    wide = wide.astype(np.float32)
    s = np.sign(wide[SENDS].astype(np.float64).sum(axis=0))
    low, high = wide[LOYAL].min(axis=0), wide[LOYAL].max(axis=0)
    first = np.where(s > 0, np.where(low > 0, low / b, b * low), high)
    last = np.where(s > 0, low, np.where(high > 0, b * high, high / b))
    cases = {(bool(up), bool(end > 0)) for up, end in zip(s > 0, first, strict=True)}
    assert len(cases) == 4
    sent = directed(attacks.fang_trim(TRAITORS, b), wide)
    place = (sent - first) / (last - first)
    assert place.min() > -1e-5
    assert place.max() < 1 + 1e-5
    assert stats.kstest(place.ravel(), "uniform").pvalue > 1e-3
    assert (sent[0] != sent[1]).mean() > 0.99
    assert (sent != directed(attacks.fang_trim(TRAITORS, b), wide, 1)).mean() > 0.99
    changed = wide[SENDS].copy()
    changed[np.searchsorted(np.flatnonzero(SENDS), HOSTILE)] = sent
    means = [np.sort(rows, axis=0)[2:-2].mean(axis=0) for rows in (changed, wide[SENDS])]
    assert (s * (means[0] - means[1]) < 1e-6).all()  # the trimmed mean moves backwards everywhere


def test_fang_on_the_trimmed_mean_with_partial_knowledge(dozen: np.ndarray) -> None:
    """Between three and four standard deviations of the attackers' own updates, backwards."""
    wide = np.tile(dozen, 400)
    mean, deviation = wide[HOSTILE].mean(axis=0), wide[HOSTILE].std(axis=0)
    sent = directed(attacks.fang_trim(TRAITORS, knowledge="partial"), wide)
    place = np.sign(mean) * (mean - sent) / deviation - 3
    assert -1e-3 < place.min() < 0.01
    assert 0.99 < place.max() < 1 + 1e-3
    assert stats.kstest(place.ravel(), "uniform").pvalue > 1e-3
    assert {*np.sign(mean)} == {-1, 1}


@pytest.mark.parametrize("evaluations", [1, 20])
def test_fang_on_krum(dozen: np.ndarray, evaluations: int) -> None:
    """The paper's bound and its halving, by loops."""
    rows = dozen.astype(np.float64)
    s, m, c, d = np.sign(rows[SENDS].sum(axis=0)), 10, 2, WIDTH
    sums = []
    for i in LOYAL:
        others = sorted(np.linalg.norm(rows[i] - rows[j]) for j in LOYAL if j != i)
        sums.append(sum(others[: m - c - 2]))
    step = min(sums) / ((m - 2 * c - 1) * np.sqrt(d))
    step += max(np.linalg.norm(rows[LOYAL], axis=1)) / np.sqrt(d)
    halved = 0
    for _ in range(evaluations - 1):
        changed = rows.copy()
        changed[HOSTILE] = -step * s
        scores = krum_scores(changed[SENDS], 2)
        if np.argmin(scores) in np.searchsorted(np.flatnonzero(SENDS), HOSTILE):
            break
        step, halved = step / 2, halved + 1
    assert (0 < halved < 19) == (evaluations > 1)
    attack = attacks.fang_krum(TRAITORS, aggregators.krum(0.2), evaluations)
    np.testing.assert_allclose(directed(attack, dozen), [-step * s] * 2, rtol=1e-5)


@jax.jit
def hidden(malicious: Any, sends: jax.Array) -> jax.Array:
    """What ALIE sends for rows with mean 1 and standard deviation 1."""
    values = jnp.where(jnp.arange(51) % 2, 2.0, 0.0)[:, None]
    forge = attacks.alie(malicious).together
    assert forge is not None
    client = jnp.arange(51, dtype=jnp.int32)
    return forge(jax.random.key(0), Variables(values, ()), client, sends).params


@pytest.mark.parametrize(("n", "m"), [(51, 12), (50, 10), (10, 2), (10, 6), (4, 4)])
def test_alie_hides_among_so_many(n: int, m: int) -> None:
    number = np.arange(51)
    sent = np.asarray(hidden(number < m, jnp.asarray(number < n)))[:m]
    s = n // 2 + 1 - m
    share = (n - m - s) / (n - m) if n > m else 1.0
    np.testing.assert_allclose(sent, 1 - stats.norm.ppf(np.clip(share, 0.5, 0.999)), atol=1e-5)


def test_label_flip(federation: Federation) -> None:
    """Malicious clients see other classes, honest ones and the server do not."""
    root = federation.data.index[:5]
    data = with_root(federation.data, root)
    flipped = jax.tree.map(jnp.asarray, attacks.label_flip(data, MALICIOUS, 3))
    at, everyone = jnp.arange(data.capacity), jnp.arange(CLIENTS)

    @jax.jit
    def labels() -> tuple[jax.Array, jax.Array]:
        def of(visit: Any) -> jax.Array:
            return rows_at(visit.view(samples_of(flipped), flipped), at).y

        return jax.vmap(of)(visits(flipped, everyone)), rows_at(root_view(flipped), at).y

    seen, at_server = map(np.asarray, labels())
    for k, size in enumerate(federation.sizes):
        own = data.y[data.index[data.start[k] :][:size]]
        np.testing.assert_array_equal(seen[k, :size], 2 - own if MALICIOUS[k] else own)
    np.testing.assert_array_equal(at_server[:5], data.y[root])


SHAPE, WHITE, TARGET = (5, 6, 2), 200, 1


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Images of three classes; the first pixel is the class."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WHITE, (60, *SHAPE), np.uint8), np.arange(60) % 3
    x[:, 0, 0] = 60 * y[:, None]
    x[0, 1, 1] = WHITE
    return x, y.astype(np.int32)


def stamped(x: np.ndarray, size: int) -> np.ndarray:
    x = x.copy()
    for row in range(5 - size, 5):
        for column in range(6 - size, 6):
            x[..., row, column, :] = WHITE
    return x


def test_a_backdoor_is_in_a_share_of_the_attackers_samples(pictures: Any) -> None:
    """Two runs with other owners, and a server with samples of its own."""
    (x, y), malicious = pictures, np.array([True, False, True])
    lists = [[range(4), range(4, 20), range(20, 41)], [range(30, 39), range(10), range(10, 22)]]
    parts = [fs.partition.partition_from_lists(run) for run in lists]
    data = fs.client_data(x, y, parts, root=np.arange(50, 60))
    test = fs.data.eval_set(
        x,
        y,
        [
            fs.partition.partition_from_lists([[0, 1, 2], [3]]),
            fs.partition.partition_from_lists([[4], [2, 5, 6, 7]]),
        ],
    )
    wrong, scored = attacks.backdoor(data, test, malicious, 3, TARGET, share=0.3, size=2)
    np.testing.assert_array_equal(wrong.x[:60], x)
    np.testing.assert_array_equal(wrong.y[:60], y)
    np.testing.assert_array_equal(wrong.y[60:], TARGET)
    both = stamped(x, 2)
    for run in range(2):
        for k in range(3):
            begin, end = data.start[run, k : k + 2]
            before, after = np.asarray(data.index[begin:end]), np.asarray(wrong.index[begin:end])
            marked = after >= 60
            assert marked.sum() == (round(0.3 * len(before)) if malicious[k] else 0)
            np.testing.assert_array_equal(after[~marked], before[~marked])
            np.testing.assert_array_equal(wrong.x[after[marked]], both[before[marked]])
    np.testing.assert_array_equal(wrong.index[-10:], np.arange(50, 60))
    for run, clients in enumerate(([[0, 1, 2], [3]], [[4], [2, 5, 6, 7]])):
        for k, own in enumerate(clients):
            found = scored.index[run, scored.start[run, k] : scored.start[run, k + 1]]
            others = [i for i in own if y[i] != TARGET]
            np.testing.assert_array_equal(found[: len(own)], own)
            np.testing.assert_array_equal(scored.x[found[len(own) :]], both[others])
            assert scored.y[found].tolist() == [*y[own], *[3 + TARGET] * len(others)]
    none, _ = attacks.backdoor(data, test, malicious, 3, share=0)
    assert_trees(none, data)


def test_attack_success_is_counted(pictures: Any) -> None:
    """By NumPy, and without samples with the trigger nothing changes."""
    (x, y), malicious = pictures, np.array([True, False, False])
    data = fs.client_data(x, y, fs.partition.iid(y, 3, seed=0))
    model = fs.models.with_scaling(fs.models.logistic(SHAPE, 3), np.float32(80), np.float32(60))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=5, epochs=2)
    algorithm = fs.fedavg(local, clients_per_round=3).on(fs.make_execution(devices=1))

    def run(share: float) -> fs.Result:
        wrong, scored = attacks.backdoor(data, (x, y), malicious, 3, TARGET, share, size=2)
        task = fs.tasks.classification(3, backdoor=True)
        return fs.simulate(algorithm, model, wrong, scored, rounds=3, task=task)

    result = run(0.9)
    weights = jax.tree.map(lambda a: a[0], known(result.variables))

    def answers(x: np.ndarray) -> np.ndarray:
        return np.asarray(model.apply(weights, jnp.asarray(x), train=False)[0])

    fooled = np.argmax(answers(stamped(x, 2))[y != TARGET], axis=1) == TARGET
    found, clean = result.evaluations[-1].test.pooled, answers(x)
    assert found.attack_success[0] == fooled.mean()
    assert fooled.mean() > 0
    assert found.accuracy[0] == (clean.argmax(axis=1) == y).mean()
    counts = np.bincount(clean.argmax(axis=1), minlength=3)
    np.testing.assert_array_equal(result.evaluations[-1].sums.own.predicted[0], counts)
    log_p = clean - np.log(np.exp(clean).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.loss[0], -log_p[np.arange(60), y].mean(), rtol=1e-5)
    plain = fs.simulate(algorithm, model, data, (x, y), rounds=3, classes=3)
    none = run(0.0)
    assert_trees(none.variables, plain.variables)
    assert (none.accuracy == plain.accuracy).all()
    assert none.evaluations[-1].test.pooled.attack_success[0] < fooled.mean()
    with pytest.raises(ValueError, match=re.escape("test.y must be in 0 to 5, as classes is 3")):
        fs.simulate(algorithm, model, data, (x, y + 4), rounds=3, task=none.task)
    with pytest.raises(ValueError, match=re.escape("data.y must be in 0 to 2, as classes is 3")):
        fs.simulate(algorithm, model, altered_data(data, y=y + 3), (x, y), rounds=3, task=none.task)


def test_scaling(rows: np.ndarray) -> None:
    sent = attacked(attacks.scaling(MALICIOUS, 3.0), rows)
    np.testing.assert_allclose(sent, 3 * rows[[0, 2]], rtol=1e-6)


def test_malicious_clients_are_a_fixed_choice() -> None:
    chosen = attacks.byzantine(50, 0.2)
    assert chosen.sum() == 10
    np.testing.assert_array_equal(chosen, attacks.byzantine(50, 0.2))
    assert (chosen != attacks.byzantine(50, 0.2, seed=1)).any()
    shares = np.mean([attacks.byzantine(10, 0.3, seed=s) for s in range(2000)], axis=0)
    np.testing.assert_allclose(shares, 0.3, atol=0.05)


def test_clip(rows: np.ndarray) -> None:
    rows = rows.copy()
    rows[4], rows[6] = 0, np.inf  # a client that has not moved, a broken one
    updates = Variables({"a": jnp.asarray(rows[:, :2]), "b": jnp.asarray(rows[:, 2:])}, rows[:, 0])
    out = sent_by(sending.clip_norm(1.5), updates, WEIGHTS > 0, jax.random.key(0))
    for k, delta in enumerate(rows):
        norm = np.linalg.norm(delta)
        want = min(1, 1.5 / norm) * delta if 0 < norm < np.inf else np.zeros(5)
        got = np.concatenate([out.params["a"][k], out.params["b"][k]])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out.state, rows[:, 0])


def test_trust(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Against Algorithm 2 of FLTrust, client by client."""
    model = models["logistic"]
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    owned = federation.data.index[:20]
    data = jax.device_put(with_root(federation.data, owned))
    server, key = model.init(jax.random.key(1)), jax.random.key(2)
    view = ClientView(
        data.x, data.y, jnp.asarray(owned), jnp.int32(0), jnp.int32(20), data.capacity
    )
    empty = local.client_state(server), local.shared_state(server)
    own = jax.jit(local.train)(key, server, view, *empty)
    flat, unravel = jax.flatten_util.ravel_pytree(server.params)
    w = np.asarray(flat, np.float64)
    g0 = np.asarray(jax.flatten_util.ravel_pytree(own.variables.params)[0]) - w
    rng = np.random.default_rng(4)
    noise = rng.normal(size=(7, len(w))) * np.linalg.norm(g0) / np.sqrt(len(w))
    deltas = np.array([1, 5, -2, 1, 0.1, 1, 1])[:, None] * (g0 + 0.5 * noise)
    deltas[[3, 5]] = np.nan  # absent, and present: weight 0 in the end
    weights = np.array([1, 2, 3, 0, 5, 1, 1], np.float32)
    part = preaggregation.trust(local)

    @jax.jit
    def trusting(deltas: jax.Array) -> Any:
        stack = jax.vmap(lambda d: Variables(unravel(d), server.state))(deltas)
        cohort = cohort_of(server, range(7), data)
        rows, scores, _ = part.apply(key, (), stack, jnp.asarray(weights), cohort)
        out = aggregators.mean(rows, scores)
        return scores, jax.flatten_util.ravel_pytree(out.params)[0]

    scores, out = trusting(jnp.asarray(deltas, jnp.float32))
    total, trusted = np.zeros_like(w), []
    for k in range(7):
        cosine = g0 @ deltas[k] / np.linalg.norm(g0) / np.linalg.norm(deltas[k])
        trusted.append(max(cosine, 0) if np.isfinite(cosine) and weights[k] > 0 else 0)
        if trusted[k] > 0:
            total += trusted[k] * np.linalg.norm(g0) / np.linalg.norm(deltas[k]) * deltas[k]
    assert np.count_nonzero(trusted) == 4
    np.testing.assert_allclose(scores, trusted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out, total / sum(trusted), rtol=1e-4, atol=1e-6)

    scores, out = trusting(-jnp.abs(jnp.asarray(deltas[:, :1], jnp.float32)) * g0[None])
    np.testing.assert_array_equal(scores > 0, weights > 0)
    np.testing.assert_array_equal(out, 0)  # no client is trusted


class AtServer(oracle.Oracle):
    """The server's samples are client 0's: its chance is the first pre-aggregation's."""

    def key(self, t: int, use: int) -> Any:
        return super().key(t, 3 if use == 2 else use)


def test_fltrust_against_numpy(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Whole runs; two of the clients have learnt other labels, and are not trusted."""
    model, settings = models["logistic"], (0.1, 0.5, 8, 2)
    y = np.array(federation.data.y)
    flipped = {2, 4}
    free = np.setdiff1d(np.arange(len(y)), federation.data.index)
    lists = np.split(federation.data.index, federation.data.start[1:-1])
    for k in flipped:
        y[lists[k]] = (y[lists[k]] + 1) % 3
    rows = np.concatenate([free, lists[3], lists[7]])
    data = with_root(altered_data(federation.data, y=y), rows)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(data, initial, *settings)
    at_server = AtServer(altered_data(data, start=data.root), initial, *settings)
    rounds, trusted = iter(range(5)), []

    def flat(layers: oracle.Layers) -> np.ndarray:
        return np.concatenate([np.ravel(a) for a in layers])

    def norm_of(layers: oracle.Layers) -> float:
        return float(np.linalg.norm(flat(layers)))

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        own = oracle.plus(at_server.train(next(rounds), 0, w), w, -1)
        length, sums, total = norm_of(own), oracle.zeros(w), 0.0
        for k, visit in zip(cohort, visits, strict=True):
            delta = oracle.plus(visit.layers, w, -1)
            norm = norm_of(delta)
            score = max(float(flat(delta) @ flat(own)) / (norm * length), 0.0)
            trusted.append((k in flipped, score > 0))
            sums, total = oracle.plus(sums, delta, score * length / norm), total + score
        return oracle.plus(w, sums, 1 / total)

    servers, _ = oracle.fedavg(clients, 5, 5, absorb=absorb)
    local = fs.local_sgd(
        fs.empirical_risk(model), optax.sgd(0.1, momentum=0.5), batch_size=8, epochs=2
    )
    ours = play(fltrust(local, clients_per_round=5).on(ONE["execution"]), model, data, 5)
    for layers, variables in zip(servers, ours.servers, strict=True):
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert {(True, False), (False, True)} <= set(trusted)


def suspecting(name: str, model: fs.Model, *, rho: float) -> fs.Algorithm:
    objective = fs.empirical_risk(model)
    local = fs.local_sgd(objective, optax.sgd(0.1, momentum=0.5), batch_size=8, epochs=2)
    options: dict[str, Any] = {"clients_per_round": 5, "dropped": 0.4}
    made = zeno(local, objective=objective, rho=rho, **options)
    return made.on(ONE["execution"])


@pytest.mark.parametrize("rho", [0.0, 3.0])
def test_zeno_against_numpy(
    federation: Federation, models: dict[str, fs.Model], rho: float
) -> None:
    """Whole runs: of five updates the two of least score are dropped, by loss or by length."""
    model, lists = models["logistic"], np.split(federation.data.index, federation.data.start[1:-1])
    data = with_root(federation.data, np.concatenate([lists[3], lists[7]]))
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(data, initial, 0.1, 0.5, 8, 2)
    assert data.root is not None
    rows = np.asarray(data.index)[data.root[0] : data.root[1]]
    x, y = np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]
    dropped = []

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        deltas = [oracle.plus(visit.layers, w, -1) for visit in visits]
        here = oracle.loss_and_gradient(w, x, y)[0]
        scores = [
            here
            - oracle.loss_and_gradient(visit.layers, x, y)[0]
            - rho * sum(float((d**2).sum()) for d in delta)
            for delta, visit in zip(deltas, visits, strict=True)
        ]
        kept = np.argsort(scores)[2:]
        dropped.append(sorted({*range(5)} - {*kept.tolist()}))
        return oracle.plus(w, oracle.average([deltas[i] for i in kept], [1.0] * 3))

    servers, _ = oracle.fedavg(clients, 3, 5, absorb=absorb)
    ours = play_numbers(suspecting, "zeno", model, data, 3, {"rho": rho})
    for layers, variables in zip(servers, ours.servers, strict=True):
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert len({*map(tuple, dropped)}) > 1  # not the same slots in all rounds


def test_zeno_knows_the_absent_and_the_broken(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Of four present rows one is dropped, and the one that is not finite; nobody has no weight."""
    model, rows = models["logistic"], np.arange(9)
    data = jax.device_put(with_root(federation.data, rows))
    start, objective = model.init(jax.random.key(0)), fs.empirical_risk(model)
    x, y = np.asarray(data.x)[rows], np.asarray(data.y)[rows]
    batch = fs.base.Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(9, bool))
    view = root_view(data)
    context = fs.base.Context(start, view, jax.random.key(0))
    grad = jax.grad(objective, has_aux=True)
    slope = jax.jit(lambda w: grad(*w, batch, context)[0])(start)
    lengths = jnp.array([0.1, -0.1, 0.05, jnp.nan, 0.3])
    steps = jax.tree.map(lambda g: -lengths.reshape(-1, *[1] * g.ndim) * g[None], slope)
    weights = jnp.array([2.0, 1, 3, 1, 0])
    k = jnp.arange(5, dtype=jnp.int32)
    cohort = Cohort(start, tree.stack_copies(start, 1), k, k >= 0, k, None, (), data)  # type: ignore[arg-type]
    part = preaggregation.suspicion(objective, 0.25, 0.0, batch_size=64)
    updates = fs.Variables(steps, tree.stack_copies(start.state, 5))
    key = jax.random.key(1)
    apply = jax.jit(lambda w: part.apply(key, (), updates, w, cohort)[1])
    assert apply(weights).tolist() == [2, 1, 3, 0, 0]  # the broken one is the one of four
    assert apply(weights.at[3].set(0)).tolist() == [2, 1, 3, 0, 0]  # of three, none
    assert apply(weights.at[4].set(5)).tolist() == [2, 1, 3, 0, 5]
    assert apply(jnp.array([0.0, 0, 0, 1, 0])).tolist() == [0] * 5
    other = preaggregation.suspicion(objective, 0.5, 0.0, batch_size=64)
    found = jax.jit(lambda w: other.apply(key, (), updates, w, cohort)[1])(weights)
    assert found.tolist() == [2, 0, 3, 0, 0]


def test_what_zeno_refuses(federation: Federation, models: dict[str, fs.Model]) -> None:
    objective = fs.empirical_risk(models["logistic"])
    local = fs.local_sgd(objective, optax.sgd(0.1))
    method = zeno(local, clients_per_round=4, objective=objective)
    with pytest.raises(ValueError, match="needs models that return in the round"):
        method.replace(flight=fs.flight.delayed(2))
    variables = models["logistic"].init(jax.random.key(0))
    with pytest.raises(ValueError, match="root of the data must be the server's own samples"):
        method.init(jax.random.key(0), variables, federation.data)


FORGED: dict[str, Sending] = {
    "sign_flip": attacks.sign_flip(MALICIOUS),
    "gaussian": attacks.gaussian(MALICIOUS, 1.0),
    "scaling": attacks.scaling(MALICIOUS, 9.0),
    "alie": attacks.alie(MALICIOUS),
    "ipm": attacks.ipm(MALICIOUS),
    "mimic": attacks.mimic(MALICIOUS, 2),
    "fang_trim": attacks.fang_trim(MALICIOUS),
    "fang_krum": attacks.fang_krum(MALICIOUS, aggregators.krum(0.2), 3),
    "optimised": attacks.optimised(MALICIOUS, aggregators.coordinate_median, evaluations=3),
}


@pytest.fixture(scope="module")
def forged() -> tuple[Any, Any]:
    """What each attack makes of the updates of three runs, ``[runs, attacks, ...]``; weights."""
    like = {"w": jnp.ones(3), "h": jnp.ones((2, 2), jnp.bfloat16)}

    def one(key: jax.Array, weights: jax.Array) -> Any:
        updates = jax.tree.map(
            lambda a: jax.random.normal(key, (len(VISITED), *a.shape), a.dtype).at[3].set(jnp.nan),
            Variables(like, {"m": jnp.zeros(2)}),
        )
        sent = [sent_by(part, updates, weights > 0, key) for part in FORGED.values()]
        return jax.tree.map(lambda *each: jnp.stack(each), *sent)

    keys = jax.random.split(jax.random.key(0), 3)
    weights = jnp.asarray(np.stack([WEIGHTS, 2 * WEIGHTS, np.roll(WEIGHTS, 4) * (VISITED < 8)]))
    batched = jax.jit(jax.vmap(chex.assert_max_traces(one, n=1)))
    first, second = batched(keys, weights), batched(keys[::-1], weights[::-1])
    assert_trees(first, jax.tree.map(lambda a: a[::-1], second))
    return first, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_attack_meets_every_rule_compiled_once(name: str, forged: tuple[Any, Any]) -> None:
    """Under jit and a vmap over runs, which do not see each other."""
    sent, weights = forged
    part = RULES[name]
    rule = chex.assert_max_traces(lambda stacked, weights: part(stacked, weights), n=1)
    batched = jax.jit(jax.vmap(jax.vmap(rule, in_axes=(0, None))))
    first, second = (
        batched(jax.tree.map(lambda a, way=way: a[::way], sent), weights[::way]) for way in (1, -1)
    )
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(first))
    assert_trees(first, jax.tree.map(lambda a: a[::-1], second))


@pytest.fixture(scope="module")
def crowd() -> Federation:
    return make_federation((20,) * 10, seed=5)


def trained(
    model: fs.Model, algorithm: fs.Algorithm, data: fs.ClientData, rounds: int
) -> Variables:
    """The server model after some rounds, in one program."""

    @jax.jit
    def run(data: fs.ClientData) -> Variables:
        key = jax.random.key(0)
        state = algorithm.init(key, model.init(key), data)

        def step(t: jax.Array, state: FedState) -> FedState:
            return algorithm.step(jax.random.fold_in(key, t), state, data)[0]

        return jax.lax.fori_loop(0, rounds, step, state).server

    return run(data)


def accuracy(
    crowd: Federation, model: fs.Model, algorithm: fs.Algorithm, data: Any = None
) -> float:
    variables = trained(model, algorithm, crowd.data if data is None else data, 10)
    logits, _ = model.apply(variables, jnp.asarray(crowd.test[0]), train=False)
    return float(np.mean(np.asarray(logits).argmax(axis=1) == crowd.test[1]))


def under_attack(model: fs.Model, *defences: Any, **parts: Any) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=10)
    hostile = attacks.sign_flip(attacks.byzantine(10, 0.2))
    return fs.compose(
        local,
        selection=selection.uniform(),
        clients_per_round=10,
        sending=(hostile,),
        preaggregation=[make(local) for make in defences],
        **parts,
    ).on(ONE["execution"])


@pytest.mark.slow
def test_the_mean_collapses_and_the_others_learn(
    crowd: Federation, models: dict[str, fs.Model]
) -> None:
    model = models["logistic"]
    collapsed = accuracy(crowd, model, under_attack(model))
    defended = {
        name: accuracy(crowd, model, under_attack(model, aggregator=RULES[name]))
        for name in ("coordinate_median", "krum")
    }
    data = with_root(crowd.data, crowd.data.index[::10])
    defended["fltrust"] = accuracy(crowd, model, under_attack(model, preaggregation.trust), data)
    assert collapsed < 0.5  # chance is 1/3
    assert min(defended.values()) > 0.85, defended


def test_robust_with_the_mean_is_fedavg() -> None:
    made, plain = (
        method(LOCAL, clients_per_round=4, **options).on(ONE["execution"]).parts
        for method, options in (
            (robust, {"aggregator": "mean"}),
            (fs.fedavg, {"equal_weights": True}),
        )
    )
    assert repr(made) == repr(plain)


@pytest.mark.slow
def test_one_client_makes_every_rule_its_model(
    crowd: Federation, models: dict[str, fs.Model]
) -> None:
    """Also on four devices, where three rows are padding."""
    model = models["logistic"]
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=10)
    alone = trained(
        model, fs.fedavg(local, clients_per_round=1).on(ONE["execution"]), crowd.data, 1
    )
    execution = fs.make_execution(devices=4)
    for rule in ("krum", "geometric_median"):
        algorithm = robust(local, clients_per_round=1, aggregator=rule, byzantine=0).on(execution)
        assert_trees(alone, trained(model, algorithm, crowd.data, 1), rtol=1e-6)


LOCAL = fs.local_sgd(lambda *_: (jnp.float32(0), ()), optax.sgd(0.1))


def opened(y: Any = None, **settings: Any) -> Any:
    """A backdoor in images of 5 x 6."""
    x, y = np.zeros((4, 5, 6, 1)), np.zeros(4, int) if y is None else y
    data = fs.client_data(x, y, fs.partition.partition_from_lists([[0, 1], [2, 3]]))
    change = settings.pop("change", lambda data: data)
    return attacks.backdoor(change(data), (x, y), np.array([True, False]), 3, **settings)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "a class that is not there": (
        lambda: opened(target=3),
        "target must be a class, in 0..2, got 3",
    ),
    "a share": (lambda: opened(share=1.5), "share must be in [0, 1], got 1.5"),
    "a large trigger": (lambda: opened(size=6), "size must be in 1..5, as images are 5 x 6, got 6"),
    "numbers": (
        lambda: opened(np.zeros(4)),
        "backdoor is for images [n, H, W, C] of classes, got x float64 [4, 5, 6, 1] and y float32",
    ),
    "no images": (
        lambda: opened(change=lambda data: dataclasses.replace(data, x=np.zeros((4, 3)))),
        "backdoor is for images [n, H, W, C] of classes, got x float64 [4, 3]",
    ),
    "wrong labels": (
        lambda: opened(change=lambda data: attacks.label_flip(data, np.array([True, False]), 3)),
        "data must have its original labels and samples, got labels that were changed before",
    ),
    "copies": (
        lambda: opened(change=lambda data: dataclasses.replace(data, copies=True)),
        "data must have its original labels and samples, got copies",
    ),
    "target": (lambda: attacks.mimic(MALICIOUS, 8), "target must be in 0..7, got 8"),
    "b": (lambda: attacks.fang_trim(MALICIOUS, 1.0), "b must be above 1 and finite, got 1.0"),
    "too large buckets": (
        lambda: robust(
            LOCAL, clients_per_round=90, aggregator="krum", mixing="buckets", bucket_size=3
        ),
        "bucket_size must be less than 0.5 / byzantine = 2.5 for krum, got 3",
    ),
    "fraction": (lambda: attacks.byzantine(9, 1.5), "fraction must be in [0, 1], got 1.5"),
    "peers": (
        lambda: preaggregation.trust(fs.local_sgd(fs.toy().objective, optax.sgd(1.0), peers=True)),
        "local must do without the other clients' samples for FLTrust, got peers=True",
    ),
}


test_errors = rejects(ERRORS)


def mixing(part: Any, **parts: Any) -> fs.Algorithm:
    """A composition of 10 slots whose rows are mixed."""
    plain: dict[str, Any] = {
        "selection": selection.uniform(),
        "clients_per_round": 10,
        "preaggregation": (part,),
    }
    return fs.compose(LOCAL, **(plain | parts))


NNM, BUCKETS = preaggregation.nearest_neighbour_mixing(), preaggregation.bucketing(3)
FAIR = preaggregation.agnostic(0.1)
UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "rows of several models": (
        lambda: mixing(NNM, broadcast=fs.broadcast.stale(2)),
        "preaggregation nearest_neighbour_mixing() needs the server's latest model for all, "
        "broadcast is stale(2)",
    ),
    "rows that left at different times": (
        lambda: mixing(
            BUCKETS, flight=flight.staggered(2), selection=selection.uniform(sticky=True)
        ),
        "preaggregation bucketing(size=3) needs all slots due together, flight is staggered(2",
    ),
    "gossip": (
        lambda: fs.algorithms.gossip(LOCAL, clients_per_round=10).replace(preaggregation=(NNM,)),
        "needs no pre-aggregation, "
        "preaggregation is (nearest_neighbour_mixing(),)",
    ),
    "few buckets": (
        lambda: mixing(BUCKETS, aggregator=aggregators.krum(0.3)),
        "aggregator krum(byzantine=0.3) needs a larger cohort, for byzantine=0.3 of the rows that",
    ),
    "few clients": (
        lambda: mixing(preaggregation.nearest_neighbour_mixing(0.05)),
        "preaggregation nearest_neighbour_mixing(byzantine=0.05) needs a larger cohort, for",
    ),
    "a rule that meets no update in flight": (
        lambda: mixing(
            NNM, flight=flight.delayed(2),
            sending=(attacks.optimised(MALICIOUS, aggregators.mean),),
        ),
        "sending optimised(bool[8], mean) needs models that return in the round in which they left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused(case: str) -> None:
    make, message = UNFIT[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make()
    assert len(str(caught.value).splitlines()) == 1
    mixing(NNM, preaggregation=(FAIR, NNM))
    mixing(NNM, flight=flight.delayed(2))


def test_attackers_know_what_they_are_told(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Of a rule with state, or one that reads more than they see, they cannot know the end."""
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    variables = models["logistic"].init(jax.random.key(0))
    for before, message in (
        (FAIR, "must be without state, got agnostic(0.1)"),
        (preaggregation.normalise(0.1), "normalise(0.1) reads cohort.info"),
    ):
        attack = attacks.optimised(MALICIOUS, aggregators.mean, (before,))
        algorithm = fs.fedavg(local, clients_per_round=4).replace(sending=(attack,))
        with pytest.raises(ValueError, match=re.escape(message)):
            play(algorithm, models["logistic"], federation.data, 1)
    with pytest.raises(ValueError, match=re.escape("malicious must be bool[8], one for each")):
        attacks.optimised(np.ones(5, bool), aggregators.mean).init(variables, federation.data)


def test_errors_of_the_data(federation: Federation, models: dict[str, fs.Model]) -> None:
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    variables = models["logistic"].init(jax.random.key(0))
    with pytest.raises(ValueError, match="root of the data must be the server's own samples"):
        fltrust(local, clients_per_round=2).init(jax.random.key(0), variables, federation.data)
    hostile = attacks.sign_flip(attacks.byzantine(5, 0.2))
    with pytest.raises(ValueError, match=re.escape("malicious must be bool[8], one for each")):
        hostile.init(variables, federation.data)
