"""Clients with a part of the model; whole runs against NumPy are in test_drift."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, play
from fed import COHORT, ONE, Fed, local_of
from oracle import Layers, zeros

import fedjax_sim as fs
from fedjax_sim import bench

KEY = jax.random.key(0)


def narrow(model: fs.Model, *shares: float) -> fs.base.Exchange:
    return fs.exchange.split(covers=fs.exchange.widths(model, shares))


class Net(nn.Module):
    """Two convolutions, the second by channels, a flattened picture and a hidden dense layer."""

    channels: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.channels, (3, 3), name="stem")(x))
        x = nn.relu(nn.Conv(self.channels, (3, 3), feature_group_count=self.channels)(x))
        x = nn.relu(nn.Dense(self.hidden, name="after")(x.reshape(len(x), -1)))
        return nn.Dense(3, name="a_head")(x)


def test_a_part_of_a_convolutional_network_is_the_narrow_network() -> None:
    """Layers come in the order of their calls, not of their names."""
    whole, narrow = (fs.models.from_linen(Net(c, h), (4, 4, 2)) for c, h in ((6, 8), (3, 4)))
    weights = jax.jit(whole.init)(KEY)
    half = fs.exchange.widths(whole, (1.0, 0.5))(weights, jnp.int32(1), jnp.int32(0))
    part = jax.tree.map(lambda w, has: jnp.where(has, w, 0), weights, half)

    def cut(path: Any, w: jax.Array, has: jax.Array, small: jax.ShapeDtypeStruct) -> jax.Array:
        full = np.broadcast_to(has, w.shape)
        return jnp.asarray(np.asarray(w)[full].reshape(small.shape))

    shapes = jax.eval_shape(narrow.init, KEY)
    small = jax.tree_util.tree_map_with_path(cut, weights, half, shapes)
    x = jax.random.normal(KEY, (5, 4, 4, 2))
    outputs = (model.apply(w, x, train=False)[0] for model, w in ((whole, part), (narrow, small)))
    assert_trees(next(outputs), next(outputs), rtol=1e-5, atol=1e-6)


def test_on_a_clock_a_part_takes_its_share_of_seconds(federation: Federation) -> None:
    net = fs.models.mlp((6,), 3, widths=(4,))
    seconds, widths = {}, fs.exchange.widths(net, (1.0, 0.5))
    for k, share in enumerate((1.0, 0.5)):
        algorithm = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
        algorithm = algorithm.replace(
            exchange=fs.exchange.split(covers=lambda w, c, t, k=k: widths(w, jnp.int32(k), t)),
            clock=fs.clock.simulated(2.0, fs.clock.bandwidth(10.0, 40.0)),
        )
        out = play(algorithm, net, federation.data, 1)
        time: Any = out.metrics[0].time
        up, down = (np.asarray(a).tolist() for a in out.metrics[0].bytes)
        seconds[share] = float(time.seconds), up, down
    whole, half = 4 * (6 * 4 + 4 + 4 * 3 + 3), 4 * (6 * 2 + 2 + 2 * 3 + 3)
    assert seconds[1.0][1:] == ([whole] * COHORT, [whole] * COHORT)
    assert seconds[0.5][1:] == ([half] * COHORT, [half] * COHORT)
    assert seconds[0.5][0] == pytest.approx(seconds[1.0][0] * half / whole)


def test_a_dry_run_prints_the_mean_part(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--algo heterofl --levels 2 --dataset digits --model mlp --clients 8 --seeds 1 --dry-run"
    assert bench.main(argv.split()) == 0
    whole, half = (4 * (64 * n + n + n * n + n + n * 10 + 10) for n in (200, 100))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "heterofl  " in line)
    assert row.split()[-2:] == 2 * [f"{(whole + half) / 2e3:.1f}"]


def test_entries_that_nobody_has_stay_as_they_are(federation: Federation) -> None:
    net = fs.models.mlp((6,), 3, widths=(4,))
    algorithm = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
    half = fs.exchange.widths(net, (1.0, 0.5))
    covers = fs.exchange.split(covers=lambda w, client, t: half(w, jnp.int32(1), t))
    algorithm = algorithm.replace(exchange=covers)
    out = play(algorithm, net, federation.data, 2)
    start = net.init(jax.random.fold_in(KEY, 0))
    before, after = (v.params["Dense_0"]["Dense_0"]["kernel"] for v in (start, out.servers[-1]))
    assert_trees(after[:, 2:], before[:, 2:])
    assert float(jnp.abs(after[:, :2] - before[:, :2]).min()) > 0


class Residual(nn.Module):
    """Two linear residual blocks, whose biases have a gradient where a client lacks the block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(4, name="first")(x)
        for name in ("block_0", "block_1"):
            x = x + nn.Dense(4, name=name)(x)
        return nn.Dense(3, name="last")(x)


LAYERS = "first", "block_0", "block_1", "last"
BLOCKS = [fs.leaves.named(name) for name in LAYERS[1:3]]


class Depths(Fed):
    """Every second client has the first block alone; layers are W, b of first, blocks and last."""

    def begin(self, initial: Layers) -> None:
        self.has: list[list[bool]] = []

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        self.has.append([name != "block_1" or k % 2 == 0 for name in LAYERS for _ in range(2)])
        return super().visit(k, x, y)

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        w, b = layers[::2], layers[1::2]
        blocks, hidden = (1, 2)[: 2 - k % 2], [x, x @ w[0] + b[0]]
        for i in blocks:
            hidden.append(hidden[-1] + hidden[-1] @ w[i] + b[i])
        logits = hidden[-1] @ w[3] + b[3]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        d = (p / p.sum(axis=1, keepdims=True) - np.eye(3)[y]) / len(y)
        slopes, out = {3: (hidden[-1].T @ d, d.sum(axis=0))}, zeros(layers)
        d = d @ w[3].T
        for i in reversed(blocks):
            slopes[i] = hidden[i].T @ d, d.sum(axis=0)
            d = d + d @ w[i].T
        slopes[0] = x.T @ d, d.sum(axis=0)
        for i, (weights, bias) in slopes.items():
            out[2 * i], out[2 * i + 1] = weights, bias
        return out

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        count = [shares @ np.array(column, float) for column in zip(*self.has, strict=True)]
        self.has = []
        return [a / max(n, 1e-9) for a, n in zip(super().step(updates, shares), count, strict=True)]


def test_shallow_clients_train_their_blocks_alone(federation: Federation) -> None:
    net = fs.models.from_linen(Residual(), (6,))

    def layers(variables: fs.Variables) -> Layers:
        found = [variables.params[name][leaf] for name in LAYERS for leaf in ("kernel", "bias")]
        return [np.array(w, np.float64) for w in found]

    covers = fs.exchange.depths(BLOCKS, (1.0, 0.5))
    algorithm = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
    algorithm = algorithm.replace(exchange=fs.exchange.split(covers=covers))
    out = play(algorithm, net, federation.data, 3)
    oracle = Depths(federation.data, layers(net.init(jax.random.fold_in(KEY, 0))))
    for server, metrics in zip(out.servers, out.metrics, strict=True):
        cohort = [int(k) for k in metrics.client]
        assert_trees(layers(server), oracle.round(cohort), rtol=1e-4, atol=1e-5)
        sizes = [4 * (6 * 4 + 4 + (2 - k % 2) * (4 * 4 + 4) + 4 * 3 + 3) for k in cohort]
        assert [np.asarray(a).tolist() for a in metrics.bytes] == [sizes, sizes]
    assert len({k % 2 for metrics in out.metrics for k in metrics.client.tolist()}) == 2


def test_blocks_that_overlap_or_are_absent_are_rejected(federation: Federation) -> None:
    net = fs.models.from_linen(Residual(), (6,))
    weights = jax.eval_shape(net.init, KEY)
    with pytest.raises(ValueError, match=r"blocks must be leaves, .*named.*got none"):
        fs.exchange.depths([], (1.0,))
    with pytest.raises(ValueError, match=r"shares must be numbers above 0 and at most 1, got \(2"):
        fs.exchange.depths(BLOCKS, (2.0,))
    twice = fs.exchange.depths([*BLOCKS, fs.leaves.named("block_0/bias")], (1.0,))
    with pytest.raises(ValueError, match="blocks must have no leaf in common, got 0 and 2"):
        twice(weights, jnp.int32(0), jnp.int32(0))


def test_what_has_no_narrower_version_is_rejected(federation: Federation) -> None:
    net = fs.models.mlp((6,), 3, widths=(4,))
    with pytest.raises(ValueError, match=r"shares must be numbers above 0 and at most 1, got \(1"):
        fs.exchange.widths(net, (1.0, 0.0))
    with pytest.raises(ValueError, match=r"shares must have a 1, or no client .* \(0.5, 0.25\)"):
        fs.exchange.widths(net, (0.5, 0.25))
    fs.exchange.widths(net, (0.5, 0.25), rolling=True)
    base = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
    widths = narrow(net, 1.0, 0.5)
    heads = fs.models.from_linen(Heads(), (6,))
    one = base.replace(exchange=narrow(heads, 1.0, 0.5))
    one = one.replace(local=fs.local_sgd(fs.empirical_risk(heads), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"in sequence, got DenseGeneral_0/kernel \[6, 2, 3\]"):
        play(one, heads, federation.data, 1)
    adapted = fs.models.lora(net, 2)
    with pytest.raises(ValueError, match="widths needs a model without adapters"):
        play(base.replace(exchange=widths), adapted, federation.data, 1)
    large = fs.models.mlp((6,), 3, widths=(30_000, 30_000))
    weights = jax.eval_shape(large.init, KEY)
    wide = base.replace(exchange=narrow(large, 1.0, 0.5), local=local_of(large))
    state = jax.eval_shape(wide.init, KEY, weights, federation.data)
    with pytest.raises(ValueError, match=r"needs a model of less than 2 GiB, got 3,60"):
        jax.eval_shape(wide.step, KEY, state, federation.data)


class Heads(nn.Module):
    """Units in two heads."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.DenseGeneral((2, 3))(x)
        return nn.Dense(3)(x.reshape(len(x), -1))


def test_a_residual_network_has_narrower_versions() -> None:
    model = fs.models.resnet20((8, 8, 3), 4)
    weights = jax.eval_shape(model.init, KEY)
    half = fs.exchange.widths(model, (1.0, 0.5))(weights, jnp.int32(1), jnp.int32(0))
    sizes = [
        np.broadcast_to(has, w.shape).sum() / w.size
        for w, has in zip(jax.tree.leaves(weights), jax.tree.leaves(half), strict=True)
    ]
    assert set(sizes) <= {0.25, 0.5, 1.0}
    assert sizes.count(0.25) == 18  # the convolutions of blocks
