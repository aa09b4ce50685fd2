"""Augmentation against skew, data sharing, FedMix and mediators."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    context_of,
    known,
    largest_change,
    make_federation,
    play,
    rejects,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import augment, bench
from fedjax_sim.algorithms import astraea, fedmix
from fedjax_sim.base import Batch, ClientView
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.client import mixup
from fedjax_sim.client.motions import resampled
from fedjax_sim.data import (
    augmentation_level,
    fedaug,
    rebalance,
    share,
    shift_rows,
    take_clients,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import rows_at
from fedjax_sim.engine.clients import client_sizes, label_counts, visits
from fedjax_sim.engine.execution import make_execution
from fedjax_sim.engine.streams import Step, stream
from fedjax_sim.partition import emd, iid, label_table, limit_label
from fedjax_sim.partition.table import (
    Partition,
    load_partition,
    partition_from_lists,
    save_partition,
    validate_partition,
)
from fedjax_sim.plan import mediators
from fedjax_sim.run.ledger import setup_bytes

BALANCED = np.repeat(np.arange(10, dtype=np.int32), 400)
ONE = make_execution(1)


def own_emd(counts: np.ndarray) -> np.ndarray:
    """Each client's distance from the uniform distribution."""
    return np.abs(counts / counts.sum(axis=-1, keepdims=True) - 1 / counts.shape[-1]).sum(axis=-1)


def test_level_of_the_worked_example() -> None:
    counts = np.array([0.46] * 2 + [0.01] * 8)  # ll(2, 0.9)
    level = augmentation_level(counts, 0.4)
    raised = np.maximum(counts, level)
    assert level == pytest.approx(0.1725)
    assert (counts < level).sum() == 8
    assert counts.sum() / raised.sum() == pytest.approx(1 / 2.3)
    assert own_emd(raised) == pytest.approx(0.4)


def listing_4(counts: np.ndarray, target: float) -> float | None:
    """The thesis' Algorithm 4, class by class; None where it finds no level."""
    n, classes = np.sort(counts)[::-1], len(counts)
    for k in range(classes - 1, 0, -1):
        s = n[: classes - k].sum()
        below = 2 * k * classes + target * k * classes - 2 * k * k
        level = (2 * k * s - target * s * classes) / below
        if level >= n[classes - k]:
            return float(level)
    return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=12), st.floats(0, 1.9))
def test_level_reaches_the_target(counts: list[int], target: float) -> None:
    n = np.array(counts, float)
    if not n.any():
        return
    level = augmentation_level(n, target)
    if own_emd(n) <= target + 1e-9:
        assert level <= n.min() + 1e-6
        return
    raised = np.maximum(n, level)
    assert own_emd(raised) == pytest.approx(target, abs=1e-6)
    printed = listing_4(n, target)
    untouched = np.delete(n, np.flatnonzero(n < level))
    if printed is not None and (untouched >= raised.mean()).all():  # what the thesis supposes
        assert level == pytest.approx(printed, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def skewed() -> Partition:
    return limit_label(BALANCED, 10, labels_per_client=2, fraction=0.9, seed=0)


def test_fedaug_counts_and_emd(skewed: Partition) -> None:
    plan = fedaug(BALANCED, skewed, 0.4)
    before, after = (label_table(BALANCED, p, 10) for p in (skewed, plan.partition))
    np.testing.assert_allclose(plan.level, 0.1725 * skewed.sizes)
    assert (after == np.maximum(before, np.round(plan.level)[:, None])).all()
    np.testing.assert_allclose(own_emd(after), 0.4, atol=0.01)
    assert emd(after) == pytest.approx(0.4, abs=0.01)
    assert not plan.missing.any()
    for own, own_before in zip(plan.partition.lists, skewed.lists, strict=True):
        assert (own[: len(own_before)] == own_before).all()
        rows, often = np.unique(own[len(own_before) :] - len(BALANCED), return_counts=True)
        assert np.isin(rows, own_before).all()
        for label in np.unique(BALANCED[rows]):  # equally often, up to one
            assert np.ptp(often[BALANCED[rows] == label]) <= 1


def test_fedaug_leaves_a_mild_client_and_reports_a_missing_class(skewed: Partition) -> None:
    same = fedaug(BALANCED, skewed, 1.45)
    assert (same.partition.index == skewed.index).all()
    assert not same.level.any()
    lists = skewed.lists
    lists[0] = lists[0][BALANCED[lists[0]] != 7]
    plan = fedaug(BALANCED, partition_from_lists(lists), 0.4)
    assert np.argwhere(plan.missing).tolist() == [[0, 7]]
    assert not fedaug(BALANCED, partition_from_lists(lists), 1.5).missing.any()  # mild without 7
    distances = own_emd(label_table(BALANCED, plan.partition, 10))
    assert distances[0] > 0.41
    np.testing.assert_allclose(distances[1:], 0.4, atol=0.01)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_rebalance(alpha: float) -> None:
    y = np.repeat(np.arange(4), [300, 200, 80, 20])
    clients = iid(y, 7, seed=1)
    after = label_table(y, rebalance(y, clients, alpha), 4)
    rare = np.round([80 * (150 / 80) ** alpha, 20 * (150 / 20) ** alpha])
    assert after.sum(axis=0).tolist() == [300, 200, *rare]
    grown = after[:, 3] / label_table(y, clients, 4)[:, 3]
    np.testing.assert_allclose(grown, (150 / 20) ** alpha, atol=1)


def test_client_data_of_copies(skewed: Partition) -> None:
    x = np.arange(len(BALANCED), dtype=np.float32)[:, None]
    plans = [fedaug(BALANCED, skewed, target).partition for target in (0.4, 1.5)]
    one, plain = (fs.client_data(x, BALANCED, p) for p in plans)
    both = fs.client_data(x, BALANCED, plans)
    assert one.copies
    assert one.capacity == plans[0].sizes.max()
    assert plain.copies is False
    assert plain.budget is None
    assert known(both.budget).tolist() == [skewed.sizes.tolist()] * 2
    clients = jnp.array([3, 10])
    np.testing.assert_array_equal(client_sizes(jax.device_put(one), clients), [skewed.sizes[3], 0])
    visit = jax.tree.map(lambda a: a[0], visits(jax.device_put(one), clients))
    view = visit.view((jnp.asarray(x), jnp.asarray(BALANCED), jnp.asarray(one.index)), one)
    batch = rows_at(view, jnp.arange(one.capacity))
    copies = np.asarray(known(batch.copy) & batch.mask)
    assert copies.sum() == plans[0].sizes[3] - skewed.sizes[3]
    np.testing.assert_array_equal(batch.y, BALANCED[np.asarray(batch.x[:, 0], int)])


@pytest.mark.slow
def test_copies_change_neither_steps_nor_weights(models: dict[str, fs.Model]) -> None:
    """As many steps as without copies; the aggregate is weighted by the unaltered n_k."""
    federation = make_federation((12, 30, 7, 40))
    data, y = federation.data, np.asarray(federation.data.y)
    lists = [np.asarray(own) for own in np.split(data.index, data.start[1:-1])]
    sizes = federation.sizes
    plan = fedaug(y, partition_from_lists(lists), 0.05)
    altered = fs.client_data(np.asarray(data.x), y, plan.partition)
    assert altered.capacity > data.capacity
    model = models["logistic"]
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8, epochs=2)
    run = play(fs.fedavg(local, clients_per_round=4).on(ONE), model, altered, 1)
    assert int(run.metrics[0].steps) == 2 * int(np.ceil(sizes / 8).sum())
    # Slots outlive the round.
    kept = fs.phase_shift(local, clients_per_round=4, phases=4).on(ONE)
    after = play(kept, model, altered, 1)
    assert float(after.states[0].server_samples) in sizes
    rows = np.argsort(np.asarray(after.states[0].slots.client))
    trained = jax.tree.map(lambda a: np.asarray(a)[rows], after.states[0].slots.variables)
    mean = jax.tree.map(lambda a: np.average(a, axis=0, weights=sizes), trained)
    assert_trees(run.final, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("beta", "alpha"), [(0.1, 0.5), (0.05, 1.0)])
def test_sharing(skewed: Partition, beta: float, alpha: float) -> None:
    shared = share(BALANCED, skewed, beta, alpha, seed=3)
    before, after = (label_table(BALANCED, p, 10) for p in (skewed, shared))
    clients, part = len(before), int(alpha * beta * 400)
    held, often = np.unique(shared.index, return_counts=True)
    assert held.size >= (1 - beta) * len(BALANCED)
    assert (np.bincount(BALANCED[held[often > 1]]) <= beta * 400).all()
    assert after.sum() == (1 - beta) * len(BALANCED) + clients * 10 * part
    assert (after >= part).all()
    expected = (1 - beta) / (1 - beta + alpha * beta * clients) * emd(before)
    assert emd(after) == pytest.approx(expected, abs=0.02)
    again = share(BALANCED, skewed, beta, alpha, seed=3)
    assert (again.index == shared.index).all()
    data = fs.client_data(np.zeros((len(BALANCED), 1)), BALANCED, shared)
    assert data.budget is None  # shared samples are the client's own like any other


def test_sharing_is_traffic(tmp_path: Path, skewed: Partition) -> None:
    """Every client is sent its part of G, in each run another one."""
    runs = [share(BALANCED, skewed, beta, 0.5, seed=0) for beta in (0.05, 0.2)]
    assert [p.sent for p in runs] == [10 * 10, 10 * 40]
    x = np.zeros((len(BALANCED), 3, 2), np.uint8)
    model = fs.models.logistic((3, 2), 10)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=4)
    down = [10 * 100 * (6 + 4), 10 * 400 * (6 + 4)]  # 10 clients; 6 bytes and a label a sample
    both = setup_bytes(algorithm, model, fs.client_data(x, BALANCED, runs), 2)
    assert both.tolist() == [[0, 0], down]
    one = setup_bytes(algorithm, model, fs.client_data(x, BALANCED, runs[0]), 3)
    assert one.tolist() == [[0] * 3, [down[0]] * 3]
    plain = fs.client_data(x, BALANCED, skewed)
    assert plain.sent is None
    assert not setup_bytes(algorithm, model, plain, 2).any()
    # What is made of such a partition was sent too.
    save_partition(tmp_path / "p.npz", runs[0])
    made = (
        load_partition(tmp_path / "p.npz"),
        fedaug(BALANCED, runs[0], 0.4).partition,
        rebalance(BALANCED, runs[0]),
        take_clients(runs[0], [1, 2]),
        *shift_rows(runs[:1], len(BALANCED)),
    )
    assert {p.sent for p in made} == {100}


def test_traffic_of_sharing_by_hand() -> None:
    """MNIST at 40 clients, of which all train in 15 rounds: β = 5 % costs 1.90 times FedAvg's."""
    y = np.repeat(np.arange(10, dtype=np.int32), 6000)
    shared = share(y, iid(y, 40, seed=0), 0.05, seed=0)
    weights = jax.eval_shape(fs.models.mnist_cnn((28, 28, 1), 10).init, jax.random.key(0))
    fedavg = 2 * 15 * 40 * tree.num_bytes(weights)
    assert 1 + 40 * shared.sent * (28 * 28 + 4) / fedavg == pytest.approx(1.90, abs=0.005)


def test_repeats_are_checked_and_kept(tmp_path: Path) -> None:
    index, start = np.array([0, 1, 1, 3], np.int32), np.array([0, 2, 4], np.int32)
    with pytest.raises(ValueError, match="1 more than once"):
        validate_partition(Partition(index, start), 4)
    with pytest.raises(ValueError, match="must be in 0 to 1, got 3"):
        validate_partition(Partition(index[[0, 3]], np.array([0, 1, 2], np.int32)), 2)
    validate_partition(Partition(index, start, repeats=True), 2)
    with pytest.raises(ValueError, match="1 more than once"):
        validate_partition(Partition(index, np.array([0, 1, 4], np.int32), repeats=True), 2)
    with pytest.raises(ValueError, match="must be in 0 to 3, got 4"):
        validate_partition(Partition(index + 1, start, repeats=True), 2)
    save_partition(tmp_path / "p.npz", Partition(index, start, repeats=True))
    assert load_partition(tmp_path / "p.npz").repeats


IMAGES = np.random.default_rng(0).integers(0, 256, (6, 9, 9, 3)).astype(np.uint8)


def altered(transform: Any, x: np.ndarray, copy: np.ndarray, seed: int = 0) -> np.ndarray:
    rows = len(x)
    batch = Batch(
        jnp.asarray(x), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool), jnp.asarray(copy)
    )
    out = jax.jit(lambda key, batch: transform(key, batch, None))(jax.random.key(seed), batch)
    assert out.x.dtype == jnp.uint8
    return np.asarray(out.x)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_only_copies_are_altered(channels: int) -> None:
    x, copy = IMAGES[..., :channels], np.arange(6) % 2 == 0
    transform: Any = augment.fedaug_augmentations(x.shape[1:])
    batch = Batch(jnp.asarray(x), jnp.zeros(6, jnp.int32), jnp.ones(6, bool), jnp.asarray(copy))
    keys = jax.random.split(jax.random.key(0), 8)
    outs = np.asarray(jax.jit(jax.vmap(lambda key: transform(key, batch, None).x))(keys))
    for out in outs:
        np.testing.assert_array_equal(out[~copy], x[~copy])
    moved = np.mean([(out[copy] != x[copy]).any(axis=(1, 2, 3)) for out in outs])
    assert moved > 0.7  # 15/16 of grey images
    assert len({out.tobytes() for out in outs}) == 8
    own = outs[0][copy].astype(int) - x[copy]
    assert (own[0] != own[1]).any()  # each image is drawn for itself


def test_motions() -> None:
    every = np.ones(6, bool)
    still = altered(augment.altered_copies([augment.warped(augment.rotation(0.0))]), IMAGES, every)
    np.testing.assert_array_equal(still, IMAGES)
    flipped = altered(augment.altered_copies([augment.warped(augment.flip)]), IMAGES, every)
    np.testing.assert_array_equal(flipped, IMAGES[:, :, ::-1])

    def quarter(key: jax.Array, matrices: jax.Array) -> jax.Array:
        return matrices @ jnp.array([[[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])

    turned = altered(augment.altered_copies([augment.warped(quarter)]), IMAGES, every)
    np.testing.assert_array_equal(turned, np.rot90(IMAGES, -1, axes=(1, 2)))
    # The middle stays, a ramp stays linear along a tilt's axis, and what leaves the image is black.
    ramp = np.broadcast_to(np.arange(9.0)[:, None, None], (1, 9, 9, 1)) / 9
    tilt = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.25, 1.0]]])
    out = jax.jit(resampled)(jnp.asarray(ramp, jnp.float32), tilt)[0, :, 4, 0]
    v = (np.arange(9) - 4) / 4
    source = v / (1 + 0.25 * v) * 4 + 4
    np.testing.assert_allclose(out[1:], source[1:] / 9, atol=1e-5)
    assert out[0] == 0  # from above the image


def test_crops() -> None:
    """Every image, be it a copy or not, is cut out at one of 25 places."""
    x, rows = jnp.asarray(IMAGES), len(IMAGES)
    batch = Batch(x, jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool), jnp.zeros(rows, bool))
    crop: Any = augment.altered([augment.crop(2)])
    keys = jax.random.split(jax.random.key(0), 40)
    cuts = np.asarray(jax.jit(jax.vmap(lambda key: crop(key, batch, None).x))(keys))
    whole = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(whole, IMAGES.shape[1:3], axis=(1, 2))
    there = np.moveaxis(windows, 3, -1)  # [rows, 5, 5, H, W, C]
    equal = (cuts[:, :, None, None] == there).all(axis=(-3, -2, -1))  # [keys, rows, 5, 5]
    assert (equal.sum(axis=(-2, -1)) == 1).all()  # the images are noise: no two cuts are equal
    assert equal.any(axis=(0, 1)).all()


def test_colours() -> None:
    images = jnp.asarray(IMAGES, jnp.float32) / 255
    grey = np.asarray(jax.jit(augment.greyscale)(jax.random.key(0), images))
    np.testing.assert_allclose(grey, np.repeat(grey[..., :1], 3, axis=-1))
    jitter = jax.jit(augment.colour_jitter(0.0, 0.0, 0.0, 0.0))(jax.random.key(0), images)
    np.testing.assert_allclose(jitter, images, atol=1e-5)
    noisy = augment.noise(0.1)(jax.random.key(0), jnp.full((50, 9, 9, 3), 0.5))
    assert float(jnp.std(noisy)) == pytest.approx(0.1, rel=0.03)


def peer_view(
    federation: Federation, client: int, starts: Any = None
) -> tuple[ClientView, np.ndarray]:
    data, start = federation.data, np.asarray(federation.data.start)
    given = jnp.asarray(start if starts is None else starts)
    view = ClientView(
        jnp.asarray(data.x),
        jnp.asarray(data.y),
        jnp.asarray(data.index),
        jnp.int32(start[client]),
        jnp.int32(start[client + 1] - start[client]),
        data.capacity,
        starts=given,
    )
    return view, start


def test_peer_means_are_the_blocks_of_others(federation: Federation) -> None:
    """Every mean is a block of another client, and blocks are drawn by their size."""
    view, start = peer_view(federation, 4)
    x, y = (np.asarray(a)[federation.data.index] for a in (federation.data.x, federation.data.y))
    blocks = [
        (k, first, min(first + 4, start[k + 1]))
        for k in range(8)
        for first in range(start[k], start[k + 1], 4)
    ]
    means = np.array([x[a:b].mean(axis=0) for _, a, b in blocks])
    transform = mixup.peer_means(4)
    batch = Batch(view.x[:2], view.y[:2], jnp.ones(2, bool))
    keys = jax.random.split(jax.random.key(0), 4000)
    peers = jax.jit(jax.vmap(lambda key: transform(key, batch, view).peer))(keys)
    gaps = np.abs(np.asarray(peers.x)[:, None] - means[None]).max(axis=2)
    which = gaps.argmin(axis=1)
    assert gaps.min(axis=1).max() < 1e-5
    for i in (0, 1, 2):
        _, a, b = blocks[which[i]]
        assert np.asarray(peers.y)[i][np.asarray(peers.mask)[i]].tolist() == y[a:b].tolist()
    drawn = np.bincount(which, minlength=len(blocks)) / 4000
    size = np.array([0 if k == 4 else b - a for k, a, b in blocks])
    assert drawn[size == 0].sum() == 0
    np.testing.assert_allclose(drawn, size / size.sum(), atol=0.02)


def mixed_batch(federation: Federation) -> Batch:
    x, y = (jnp.asarray(a)[:5] for a in (federation.data.x, federation.data.y))
    peer = mixup.Peer(jnp.linspace(-1.0, 2.0, 6), jnp.array([0, 2, 2, 1]), jnp.arange(4) < 3)
    return Batch(x, y, jnp.arange(5) < 4, peer=peer)


def test_fedmix_objective(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Against eq. 4 in NumPy, the derivative by hand; gradients by finite differences."""
    model, lam = models["mlp"], 0.3
    variables = model.init(jax.random.key(3))
    layers = oracle.layers_of(variables)
    batch = mixed_batch(federation)
    objective = mixup.mixed_objective(fs.empirical_risk(model), lam)

    def value(params: Any) -> jax.Array:
        return objective(params, variables.state, batch, context_of(params))[0]

    x, y = np.asarray(batch.x, np.float64)[:4], np.asarray(batch.y)[:4]
    peer = np.asarray(batch.peer.x, np.float64)

    def eq_4(layers: list[np.ndarray]) -> float:
        def loss(x: np.ndarray, y: np.ndarray) -> float:
            return oracle.loss_and_gradient(layers, x, y)[0]

        own = loss((1 - lam) * x, y)
        theirs = np.mean([loss((1 - lam) * x, np.full(4, label)) for label in (0, 2, 2)])
        h = 1e-6
        slope = (loss((1 - lam) * x + h * peer, y) - loss((1 - lam) * x - h * peer, y)) / (2 * h)
        return float((1 - lam) * own + lam * theirs + lam * slope)

    assert float(jax.jit(value)(variables.params)) == pytest.approx(eq_4(layers), rel=1e-5)
    gradient = oracle.layers_of(fs.Variables(jax.jit(jax.grad(value))(variables.params), {}))
    rng = np.random.default_rng(0)
    for layer in range(len(layers)):
        step = rng.normal(size=layers[layer].shape)
        h = 1e-4
        ends = [
            eq_4([a + sign * h * step if i == layer else a for i, a in enumerate(layers)])
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * h)
        assert np.vdot(gradient[layer], step) == pytest.approx(slope, rel=1e-3, abs=1e-4)


@dataclasses.dataclass
class Mixing(oracle.Oracle):
    """FedMix's clients, eq. 4 with a block of another client."""

    ratio: float = 0.0
    each: int = 1

    def minibatch(
        self, layers: oracle.Layers, client: int, mine: np.ndarray, key: Any
    ) -> tuple[float, oracle.Layers]:
        blocks = []  # of every sample of the others, the one that it is in
        for k in range(len(self.sizes)):
            rows = self.rows(k)
            for i in range(len(rows) if k != client else 0):
                first = i - i % self.each
                blocks.append(rows[first : first + self.each])
        chosen = blocks[int(jax.random.randint(stream(key, Step.TRANSFORM), (), 0, len(blocks)))]
        mean = self.data.x[chosen].astype(np.float64).mean(axis=0)
        x, y = (1 - self.ratio) * self.data.x[mine].astype(np.float64), self.data.y[mine]
        loss, grads = 0.0, oracle.zeros(layers)

        def add(weight: float, x: np.ndarray, y: np.ndarray) -> None:
            nonlocal loss, grads
            part, slopes = oracle.loss_and_gradient(layers, x, y)
            loss, grads = loss + weight * part, oracle.plus(grads, slopes, weight)

        add(1 - self.ratio, x, y)
        for label in self.data.y[chosen]:
            add(self.ratio / len(chosen), x, np.full_like(y, label))
        h = 1e-5  # the derivative along the mean, of the loss and of its gradient
        add(self.ratio / (2 * h), x + h * mean, y)
        add(-self.ratio / (2 * h), x - h * mean, y)
        return loss, grads


def slow(kind: Any, data: Any, model: fs.Model, **own: Any) -> Any:
    """The oracle of the runs below."""
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    return kind(data, initial, 0.05, 0.5, 8, 2, **own)


def agree(
    clients: oracle.Oracle, theirs: tuple[list[oracle.Layers], oracle.Layers], ours: Play
) -> None:
    """Servers of all rounds, the final model, and what the clients reported."""
    models = [*zip(theirs[0], ours.servers, strict=True), (theirs[1], ours.final)]
    for layers, variables in models:
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert clients.visited == sum(int(m.samples) for m in ours.metrics)
    assert clients.steps == sum(int(m.steps) for m in ours.metrics)
    losses = sum(float(m.loss) * int(m.samples) for m in ours.metrics)
    np.testing.assert_allclose(losses, clients.loss, rtol=1e-4)


def test_fedmix_against_numpy(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Blocks of 7, of clients with 1 to 40 samples: most have a shorter last one."""
    risk = fs.empirical_risk(models["mlp"])
    local = fs.local_sgd(risk, optax.sgd(0.05, momentum=0.5), batch_size=8, epochs=2)
    algorithm = fedmix(local, objective=risk, clients_per_round=5, mix_ratio=0.2, mix_samples=7).on(
        ONE
    )
    clients = slow(Mixing, federation.data, models["mlp"], ratio=0.2, each=7)
    theirs = oracle.fedavg(clients, 4, 5)
    agree(clients, theirs, play(algorithm, models["mlp"], federation.data, 4))
    plain = oracle.fedavg(slow(oracle.Oracle, federation.data, models["mlp"]), 4, 5)
    assert largest_change(plain[1], theirs[1]) > 0.01


@pytest.mark.slow
def test_means_are_counted_for_each_run(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Two runs whose clients differ: means of 3, with 6 floats and the labels."""
    data, samples = federation.data, len(federation.data.index)
    cuts = [[4, 10, samples], [6, 12, samples]]
    partitions = [partition_from_lists(np.split(data.index, c[:2])) for c in cuts]
    clients = fs.client_data(data.x, data.y, partitions)
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.05), max_steps=1)
    algorithm = fedmix(
        local, objective=fs.empirical_risk(models["logistic"]), clients_per_round=1, mix_samples=3,
        ).on(ONE)  # fmt: skip
    out = fs.simulate(
        algorithm,
        models["logistic"],
        clients,
        federation.test,
        rounds=2,
        classes=3,
        seeds=(0, 1),
    )
    rest = -(-(samples - 10) // 3), -(-(samples - 12) // 3)
    means = np.array([2 + 2 + rest[0], 2 + 2 + rest[1]]) * 6 * 4 + samples * 4
    assert means[0] != means[1]
    for t, evaluation in enumerate(out.evaluations, 1):
        np.testing.assert_array_equal(evaluation.bytes_up, means + t * out.model_bytes)
        np.testing.assert_array_equal(evaluation.bytes_down, 2 * means + t * out.model_bytes)


@pytest.mark.slow
def test_fedmix_passes_the_convolutions_of_the_package() -> None:
    images = make_federation((6, 9), (8, 8, 1), tests=4)
    model = fs.models.fashion_cnn((8, 8, 1), 3)
    risk = fs.empirical_risk(model)
    local = fs.local_sgd(risk, optax.sgd(0.05), batch_size=4)
    algorithm = fedmix(local, objective=risk, clients_per_round=2).on(ONE)
    data = jax.device_put(images.data)

    def go(key: Any) -> Any:
        return algorithm.step(key, algorithm.init(key, model.init(key), data), data)[0].server

    trained = jax.eval_shape(go, jax.random.key(0))  # which differentiates twice
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(
        jnp.shape, jax.eval_shape(model.init, jax.random.key(0))
    )


def greedy(counts: np.ndarray, cohort: list[int], each: int) -> list[list[int]]:
    """The grouping of Astraea, client by client."""
    left, groups = list(cohort), []
    while left:
        group: list[int] = []
        while len(group) < each:
            kl = []
            for k in left:
                p = counts[[*group, k]].sum(axis=0) / counts[[*group, k]].sum()
                kl.append(sum(q * np.log(q * len(p)) for q in p if q > 0))
            group.append(left.pop(int(np.argmin(np.round(kl, 5)))))
        groups.append(group)
    return groups


@pytest.mark.parametrize("each", [1, 3, 6])
def test_greedy_groups(each: int) -> None:
    grouped = jax.jit(mediators.balanced_groups, static_argnums=2)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 30, (20, 4)) * rng.integers(0, 2, (20, 4)) + rng.integers(1, 9)
        cohort = np.sort(rng.permutation(20)[:12])
        ours = grouped(jnp.asarray(counts, jnp.int32), jnp.asarray(cohort, jnp.int32), each)
        assert ours.tolist() == greedy(counts, cohort.tolist(), each)


def test_label_counts_of_one_run_among_others(federation: Federation) -> None:
    data = federation.data
    two = np.concatenate([data.index, data.index])
    starts = np.stack([data.start, data.start + data.start[-1]])
    shared = altered_data(data, index=two, start=starts)
    axes = fs.ClientData(None, None, None, 0, data.capacity)  # type: ignore[arg-type]
    counts = jax.vmap(lambda d: label_counts(d, 3), in_axes=(axes,))(jax.device_put(shared))
    table = label_table(data.y, federation.partition, 3)
    np.testing.assert_array_equal(counts, [table, table])


def in_turn(
    clients: oracle.Oracle, counts: np.ndarray, rounds: int, slots: int, each: int, epochs: int
) -> tuple[list[oracle.Layers], oracle.Layers]:
    """Astraea, mediator by mediator: the server after every round, and the final mean."""
    server, servers = oracle.layers_of(clients.initial), []
    groups: list[list[int]] = []
    models: list[oracle.Layers] = []
    visits = 0
    for t in range(rounds):
        if t % (each * epochs) == 0:
            drawn = jax.random.permutation(clients.key(t, 0), len(clients.sizes))
            groups = greedy(counts, sorted(drawn[: slots * each].tolist()), each)
            models, visits = [server] * slots, 0
        now = [group[visits % each] for group in groups]
        models = [clients.train(t, k, w) for k, w in zip(now, models, strict=True)]
        visits += 1
        if visits == each * epochs:
            samples = [float(clients.sizes[group].sum()) for group in groups]
            server = oracle.average(models, samples)
        servers.append(server)
    seen = [float(sum(clients.sizes[g[i % each]] for i in range(visits))) for g in groups]
    return servers, oracle.average(models, seen)


def test_astraea_against_numpy(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Two flights of 6 visits; the third is cut short, with models of unequal clients."""
    local = fs.local_sgd(
        fs.empirical_risk(models["mlp"]), optax.sgd(0.05, momentum=0.5), batch_size=8, epochs=2
    )
    algorithm = astraea(local, clients_per_round=6, classes=3, mediator_size=3, mediator_epochs=2)
    assert algorithm.round_factor == 3
    clients = slow(oracle.Oracle, federation.data, models["mlp"])
    counts = label_table(federation.data.y, federation.partition, 3)
    theirs = in_turn(clients, counts, rounds=16, slots=2, each=3, epochs=2)
    agree(clients, theirs, play(algorithm, models["mlp"], federation.data, 16))


@pytest.mark.slow
def test_one_client_a_mediator_is_fedavg_of_everyone(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    model = models["logistic"]
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=8)
    mediated = astraea(local, clients_per_round=8, classes=3, mediator_size=1)
    one, plain = (
        play(made.on(ONE), model, federation.data, 2)
        for made in (mediated, fs.fedavg(local, clients_per_round=8))
    )
    assert_trees(one.final, plain.final, rtol=1e-5, atol=1e-6)


def risk() -> Any:
    return fs.empirical_risk(fs.models.logistic((6,), 3))


NONE: Any = None  # where a part does not look


def local_update() -> Any:
    return fs.local_sgd(risk(), optax.sgd(0.1))


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "emd": (lambda: augmentation_level([1, 2], -0.1), "emd must be at least 0, got -0.1"),
    "nan": (lambda: augmentation_level([1, 2], float("nan")), "emd must be at least 0, got nan"),
    "power": (lambda: rebalance([0], partition_from_lists([[0]]), -1), "alpha must be at least 0"),
    "beta": (lambda: share([0], partition_from_lists([[0]]), 0, seed=0), "beta must be above 0"),
    "labels": (
        lambda: share([0, -1], partition_from_lists([[0, 1]]), 0.5, seed=0),
        "labels must be in 0 … M - 1, got -1 … 0",
    ),
    "labels of fedaug": (
        lambda: fedaug([-1, 0], partition_from_lists([[0, 1]]), 1.0),
        "labels must be in 0 … M - 1, got -1 … 0",
    ),
    "copies": (
        lambda: rebalance([0] * 9 + [1], partition_from_lists([range(10)]), 50),
        "alpha must make at most 2,147,483,647 copies, got 50",
    ),
    "labels of rebalance": (
        lambda: rebalance([0.0, 1.0], partition_from_lists([[0, 1]])),
        "labels must be integers [2], got float64 [2]",
    ),
    "part": (
        lambda: share([0], partition_from_lists([[0]]), 0.5, 2, seed=0),
        "alpha must be above 0 and at most 1, got 2",
    ),
    "rare": (
        lambda: share([0, 0, 0, 1], partition_from_lists([range(4)]), 0.9, seed=0),
        "beta must take at most the 1 samples of class 1, got 0.9, which takes 2 of each class",
    ),
    "shape": (
        lambda: augment.fedaug_augmentations((54,)),
        "augmentations are for images [H, W, 1] or [H, W, 3], got [54]",
    ),
    "floats": (
        lambda: altered(augment.fedaug_augmentations((9, 9, 3)), IMAGES / 255, np.ones(6, bool)),
        "augmentations are for images, uint8 [B, H, W, C], got float32 [6, 9, 9, 3]",
    ),
    "alone": (
        lambda: mixup.peer_means(2)(
            jax.random.key(0),
            mixed_batch(make_federation((9,))),
            peer_view(make_federation((9,)), 0)[0],
        ),
        "FedMix needs the samples of other clients: peers=True, and at least 2 clients",
    ),
    "no peer": (
        lambda: mixup.mixed_objective(risk(), 0.1)(
            {}, {}, Batch(jnp.zeros((1, 6)), jnp.zeros(1, jnp.int32), jnp.ones(1, bool)), NONE
        ),
        "FedMix's objective needs Batch.peer: add peer_means to transforms",
    ),
    "mediators": (
        lambda: astraea(local_update(), clients_per_round=8, classes=3, mediator_size=3),
        "mediator_size must divide the 8 clients_per_round: one of [1, 2, 4, 8], got 3",
    ),
    "few": (
        lambda: mediators.mediators(3, 3, 3).init(NONE, make_federation().data, NONE),
        "clients_per_round must be at most the 8 clients, got 9",
    ),
}


test_errors = rejects(ERRORS)


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_two_phase_fedaug_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2P-FedAug: two phases, E 4 to 3, FedAug to 0.8; on the clients that data sharing gave."""
    flags = ["--algo", "phase_shift", "--phases", "2", "--mode", "epochs", "--fedaug", "0.8"]
    flags += ["--share-beta", "0.02", "--share-alpha", "0.5", "--emd", "1.4", "--epochs", "4"]
    flags += ["--rounds", "1", "--clients", "20", "--seeds", "1", "--model", "logistic"]
    flags += ["--compare", "none", "--no-cache", "--devices", "1", "--out", str(tmp_path / "o")]
    assert bench.main(flags) == 0
    found = re.search(
        r"clients train at EMD (\S+): (\d+) % of their samples are copies", capsys.readouterr().out
    )
    assert found is not None
    assert float(found[1]) == pytest.approx(0.8, abs=0.08)  # 72 samples each: L is rounded
    assert int(found[2]) > 10
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (config["fedaug"], config["share_beta"], config["share_alpha"]) == (0.8, 0.02, 0.5)
    assert config["rebalance"] is None
    setup = build(parse(flags))
    data, (partition,) = setup.problem.data, setup.partitions
    assert data.copies
    own = [np.isin(a[a < len(data.y)], b).sum() for a, b in zip(
        setup.problem.trained[0].lists, partition.lists, strict=True
    )]  # fmt: skip
    assert (np.array(own) < data.budget).all()  # each has samples of the common set
    assert setup.algorithms["phase_shift"].round_factor == pytest.approx(4 / 3)


COMMAND_ERRORS = {
    "table": (
        ["--fedaug", "0.8", "--dataset", "synthetic(0, 0)", "--partition", "iid"],
        "--fedaug is for images, uint8",
    ),
    "emd": (["--fedaug", "2"], "--fedaug: must be a number at least 0 and below 2, got '2'"),
    "alpha": (["--share-alpha", "0.5"], "--share-alpha is for --share-beta"),
    "too much": (["--share-beta", "0.999"], "got 0.999, which takes 144 of each class"),
    "power": (["--rebalance", "-1"], "--rebalance: must be a number at least 0, got '-1'"),
}


@pytest.mark.parametrize("case", COMMAND_ERRORS)
def test_command_errors(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, message = COMMAND_ERRORS[case]
    base = ["--rounds", "1", "--seeds", "1", "--clients", "10", "--no-cache"]
    assert bench.main([*base, *argv, "--out", str(tmp_path / "o")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "o").exists()
