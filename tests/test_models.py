"""The papers' networks: their sizes, their mathematics, and what must not change a result."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow_datasets as tfds
from conftest import assert_trees, context_of, largest_change
from flax import nnx

import fedjax_sim as fs
from fedjax_sim import tree
from fedjax_sim.base import Batch
from fedjax_sim.cli.build import load_model
from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.models import convolutions, layers, mobilenet, nets
from fedjax_sim.models._lstm import recurrence
from fedjax_sim.run import check_model

# Channels of a MobileNetV2 that no image side and no other tensor of these tests has.
NARROW = (17, *(18,) * 2, *(19,) * 3, *(20,) * 4, *(21,) * 3, *(22,) * 3)
LAST, TOP = 23, 40


def mobilenet_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """A MobileNetV2 of random weights, by Keras' names."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, norm: str, shape: tuple[int, ...]) -> None:
        leaf, out = "kernel", shape[-1]
        if name.endswith("depthwise"):
            leaf, out = "depthwise_kernel", shape[-2]
        fan_in = math.prod(shape[:-1]) / (out if leaf != "kernel" else 1)
        arrays[f"{name}/{leaf}"] = rng.normal(size=shape) * math.sqrt(2 / fan_in)
        for part in ("gamma", "moving_variance"):
            arrays[f"{norm}/{part}"] = rng.uniform(0.5, 1.5, out)
        for part in ("beta", "moving_mean"):
            arrays[f"{norm}/{part}"] = 0.3 * rng.normal(size=out)

    add("Conv1", "bn_Conv1", (3, 3, 3, 24))
    given = 24
    blocks = ["expanded_conv", *(f"block_{i}" for i in range(1, 17))]
    for block, out in zip(blocks, (*NARROW, LAST), strict=True):
        inner = given if block == "expanded_conv" else 6 * given
        if inner > given:
            add(f"{block}_expand", f"{block}_expand_BN", (1, 1, given, inner))
        add(f"{block}_depthwise", f"{block}_depthwise_BN", (3, 3, inner, 1))
        add(f"{block}_project", f"{block}_project_BN", (1, 1, inner, out))
        given = out
    add("Conv_1", "Conv_1_bn", (1, 1, LAST, TOP))
    return {name: a.astype(np.float32) for name, a in arrays.items()}


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiles in half the time."""

ARRAYS = mobilenet_arrays()
FEATURES = (1, 1, NARROW[-1])  # the trunk's output at size 32
IMAGE, CLASSES, TOKENS = (8, 8, 3), 5, (7,)


def resnet8(shape: Any, classes: int) -> fs.Model:
    """The network of one block a stage: resnet20's code, a third of its compile time."""
    return fs.models.from_linen(nets.FixupResNet(classes, blocks=1), shape)


SMALL: dict[str, tuple[Callable[[], fs.Model], tuple[int, ...]]] = {
    "ffn": (lambda: fs.models.ffn((6,), CLASSES), (6,)),
    "lstm": (lambda: fs.models.lstm(TOKENS, CLASSES, units=6), TOKENS),
    "resnet8": (lambda: resnet8(IMAGE, CLASSES), IMAGE),
    "tail": (lambda: fs.models.mobilenet_v2_tail((3, 3, 22), CLASSES, ARRAYS), (3, 3, 22)),
}


def inputs(name: str, shape: tuple[int, ...], n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if name in ("lstm", "mobilenet_v2"):
        values = CLASSES if name == "lstm" else 256
        return rng.integers(0, values, (n, *shape)).astype(np.uint8)
    return rng.normal(size=(n, *shape)).astype(np.float32)


def parameters(model: fs.Model) -> int:
    params = jax.eval_shape(lambda: model.init(jax.random.key(0))).params
    return sum(a.size for a in jax.tree.leaves(params))


def test_ffn_size() -> None:
    assert parameters(fs.models.ffn((49,), 2)) == 50 * 64 + 65 * 64 + 65 * 2


def test_lstm_size() -> None:
    layer = [(n + 256 + 1) * 4 * 256 for n in (8, 256)]
    size = parameters(fs.models.lstm((80,), 80))
    assert size == 80 * 8 + sum(layer) + 257 * 80 == 817_872


def test_resnet20_size() -> None:
    """He et al. print 0.27 M for the network; Fixup has 5 scalars a block, and 2."""
    convolutions = 9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
    size = parameters(fs.models.resnet20((32, 32, 3), 10))
    assert size == convolutions + 65 * 10 + 9 * 5 + 2 == 268_393
    assert round(size / 1e6, 2) == 0.27


def test_mobilenet_size() -> None:
    c, e = NARROW[-1], 6 * NARROW[-1]
    kernels = c * e + 9 * e + e * LAST + LAST * TOP
    norms = e + e + LAST + TOP
    model = fs.models.mobilenet_v2(IMAGE, CLASSES, ARRAYS, size=32)
    assert parameters(model) == kernels + 2 * norms + (TOP + 1) * CLASSES
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    assert tree.num_bytes(variables.state) == 4 * 2 * norms


@functools.cache
def problem(name: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """A small model at the start (in NumPy), its compiled loss and gradient, and 3 samples."""
    make, shape = SMALL[name]
    model = make()
    objective = fs.empirical_risk(model)

    @jit
    def gradient(variables: Any, x: Any, y: Any, mask: Any) -> Any:
        return jax.value_and_grad(objective, has_aux=True)(
            *variables, Batch(x, y, mask), context_of(variables.params)
        )

    batch = inputs(name, shape, 3), np.arange(3, dtype=np.int32), np.ones(3, bool)
    start = jax.device_get(jit(model.init)(jax.random.key(0)))
    return start, gradient, batch


@pytest.mark.parametrize("name", SMALL)
def test_padding_is_invisible_and_vmap_too(name: str) -> None:
    """Two clients of 3 rows and 2 of padding under one vmap, as each one alone and unpadded."""
    start, gradient, (x, y, mask) = problem(name)
    rng = np.random.default_rng(2)
    clients = [  # no initialisation leaves a leaf at zero
        jax.tree.map(lambda w: w + 0.05 * rng.normal(size=w.shape).astype(w.dtype), start)
        for _ in range(2)
    ]
    padding = np.full((2, *x.shape[1:]), 1 if name == "lstm" else 50, x.dtype)
    padded = np.concatenate([x, padding]), np.pad(y, (0, 2)), np.pad(mask, (0, 2))
    stacked = jax.tree.map(lambda *w: np.stack(w), *clients)
    both = jit(jax.vmap(gradient.__wrapped__, in_axes=(0, None, None, None)))
    together = jax.device_get(both(stacked, *padded))
    for i, client in enumerate(clients):
        mine = jax.tree.map(lambda a, i=i: a[i], together)
        assert_trees(gradient(client, x, y, mask), mine, rtol=2e-4, atol=2e-5)


def test_padding_of_nan_reaches_no_statistic_and_no_gradient_of_batch_norm() -> None:
    norm, rng = layers.BatchNorm(), np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 2, 2, 4)).astype(np.float32)
    start = dict(norm.init(jax.random.key(0), x, train=True))
    mask = np.array([True] * 3 + [False] * 2)

    @jax.jit
    def run(x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, new = norm.apply(
                start | {"params": params}, x, train=True, mask=mask, mutable=["batch_stats"]
            )
            return jnp.sum(y[:3] * weight), (y[:3], new)

        gradient, kept = jax.grad(loss, argnums=(0, 1), has_aux=True)(start["params"], x)
        return gradient[0], gradient[1][:3], kept

    fill = np.zeros((2, *x.shape[1:]), x.dtype)
    finite, broken = run(np.concatenate([x, fill + 7])), run(np.concatenate([x, fill + np.nan]))
    assert np.isfinite(finite[1]).all()
    assert_trees(finite, broken)
    np.testing.assert_allclose(
        finite[2][1]["batch_stats"]["mean"], 0.1 * x.mean(axis=(0, 1, 2)), rtol=1e-5
    )


@pytest.mark.parametrize("name", SMALL)
def test_a_step_lowers_the_loss(name: str) -> None:
    start, gradient, batch = problem(name)
    (before, _), slope = jax.device_get(gradient(start, *batch))
    params = jax.tree.map(lambda w, g: w - np.float32(1e-2) * g, start.params, slope)
    (after, _), _ = gradient(start._replace(params=params), *batch)
    assert after < before


@pytest.fixture
def weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command and ``weights=None`` look."""
    folder = tmp_path / "mobilenet_v2"
    folder.mkdir()
    np.savez(folder / "narrow.npz", **cast(Any, ARRAYS))
    monkeypatch.setenv("FEDJAX_SIM_DATA_DIR", str(tmp_path))
    return folder / "narrow.npz"


def test_names(weights_file: Path) -> None:
    """The command's models take their samples, padded or not, and give a logit for each class."""
    known = {"ffn": (6,), "lstm": TOKENS, "resnet20": IMAGE, "mobilenet_v2": IMAGE}
    for name, shape in known.items():
        model, y = fs.models.MODELS[name](shape, CLASSES), np.zeros(2, np.int32)
        check_model(model, inputs(name, shape, 2), y, fs.tasks.classification(CLASSES))


def test_a_scale_of_zero_is_refused() -> None:
    """A constant column of a table made all outputs NaN."""
    with pytest.raises(ValueError, match="std must be positive, got 0: give 1 for constant colum"):
        fs.models.with_scaling(fs.models.logistic((2,), 3), np.zeros(2), np.array([1.0, 0.0]))


def test_l2_is_over_kernels_alone() -> None:
    start, gradient, (x, y, mask) = problem("ffn")
    objective = fs.empirical_risk(fs.models.ffn((6,), CLASSES), l2=0.3)

    @jit
    def with_l2(params: Any) -> Any:
        batch, context = Batch(x, y, mask), context_of(params)
        return jax.grad(lambda p: objective(p, {}, batch, context)[0])(params)

    _, plain = jax.device_get(gradient(start, x, y, mask))
    wanted = jax.tree.map(lambda g, w: g + 0.3 * w if w.ndim == 2 else g, plain, start.params)
    assert_trees(with_l2(start.params), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"l2 must be at least 0, got -0\.1"):
        fs.empirical_risk(fs.models.ffn((6,), CLASSES), l2=-0.1)


def close_vjp(ours: Sequence[Any], plain: Any, *args: np.ndarray) -> None:
    """The same values, and the same gradients of all arguments, in one program."""

    @jit
    def all_of_them(*args: Any) -> Any:
        def one(f: Any) -> Any:
            out, back = jax.vjp(f, *args)
            return out, back(jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        return one(plain), [one(f) for f in ours]

    wanted, found = all_of_them(*args)
    for each in found:
        assert_trees(each, wanted, rtol=1e-4, atol=1e-4)


def numpy_lstm(params: Mapping[str, Any], tokens: np.ndarray, units: int) -> np.ndarray:
    """Token by token, gate by gate, in double precision."""

    def sigmoid(a: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-a))

    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    logits = []
    for window in tokens:
        steps = [p["embedding"][token] for token in window]
        for number in range(2):
            layer = p[f"_Layer_{number}"]
            h, c = np.zeros(units), np.zeros(units)
            for t, x in enumerate(steps):
                a = np.concatenate([x, h]) @ layer["kernel"] + layer["bias"]
                i, f, g, o = np.split(a, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                steps[t] = h = sigmoid(o) * np.tanh(c)
        logits.append(steps[-1] @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"])
    return np.stack(logits)


def test_lstm_is_an_lstm() -> None:
    model = fs.models.lstm(TOKENS, CLASSES, units=6)
    variables = jit(model.init)(jax.random.key(3))
    tokens = inputs("lstm", TOKENS, 4)
    ours = jit(lambda v: model.apply(v, jnp.asarray(tokens), train=True)[0])(variables)
    np.testing.assert_allclose(ours, numpy_lstm(variables.params, tokens, 6), rtol=1e-4, atol=1e-6)
    bias = np.asarray(variables.params["_Layer_0"]["bias"]).reshape(4, 6)
    np.testing.assert_array_equal(bias, np.eye(4)[1][:, None].repeat(6, axis=1))


@pytest.mark.parametrize(("steps", "batch", "units"), [(1, 1, 1), (5, 3, 4)])
def test_recurrence_gradient(steps: int, batch: int, units: int) -> None:
    """Against JAX's own differentiation of the literal recurrence."""

    def literal(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        h = c = jnp.zeros((batch, units))
        out = []
        for a in inputs:
            i, f, g, o = jnp.split(a + h @ kernel, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            out.append(h)
        return jnp.stack(out)

    rng = np.random.default_rng(units)
    shapes = [(steps, batch, 4 * units), (units, 4 * units)]
    close_vjp([recurrence], literal, *(rng.normal(size=s).astype(np.float32) for s in shapes))


def test_recurrence_unrolls_on_gpus_alone() -> None:
    """23 steps: one in a loop's body, or ten there and the three that are left after it."""
    traced = jax.jit(recurrence).trace(jnp.ones((23, 2, 12)), jnp.ones((3, 12)))
    steps = []
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        # Newer JAX calls a step, older writes its product out.
        steps.append(max(text.count("call @closed_call"), text.count("stablehlo.dot_general")))
    assert steps == [1, 1, 13]


def test_lstm_refuses_what_is_no_window_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"shape must be \(tokens,\), .*, got \(8, 8, 3\)"):
        fs.models.lstm(IMAGE, CLASSES)
    model = fs.models.lstm(TOKENS, CLASSES)
    with pytest.raises(TypeError, match="x must be integer tokens, got float32"):
        model.apply(fs.base.Variables({}, {}), jnp.zeros((2, *TOKENS)), train=False)


def test_fixup_starts_as_its_shortcuts() -> None:
    x = np.abs(inputs("resnet8", (8, 8, 16), 3))
    for features, stride in ((16, 1), (32, 2)):
        block = nets.FixupBlock(features, stride, branches=9)
        out, variables = jit(block.init_with_output)(jax.random.key(0), x)
        out = np.asarray(out)
        np.testing.assert_array_equal(out[..., :16], x[:, ::stride, ::stride])
        np.testing.assert_array_equal(out[..., 16:], 0)
        first, last = (np.asarray(variables["params"][f"_Conv_{i}"]["kernel"]) for i in (0, 1))
        np.testing.assert_array_equal(last, 0)
        # He's deviation by fan-out, times 9^(-1/2).
        assert first.std() == pytest.approx(math.sqrt(2 / (9 * features)) / 3, rel=0.05)


def test_fixup_starts_without_an_opinion() -> None:
    """Zhang et al.: every class is as likely; of the weights only the classifier's has a slope."""
    start, gradient, batch = problem("resnet8")

    def slopes(params: Any) -> tuple[float, set[str]]:
        (loss, _), slope = jax.device_get(gradient(start._replace(params=params), *batch))
        named = jax.tree_util.tree_leaves_with_path(slope)
        return loss, {
            jax.tree_util.keystr(p, simple=True, separator="/") for p, g in named if g.any()
        }

    loss, found = slopes(start.params)
    assert loss == pytest.approx(math.log(CLASSES))
    assert found == {"Dense_0/kernel", "Dense_0/bias"}

    # With a classifier, branches open from their last layer, whose zeros shield the first.
    classifier = {**start.params["Dense_0"], "kernel": np.eye(64, CLASSES, dtype=np.float32)}
    _, found = slopes({**start.params, "Dense_0": classifier})
    for block in range(3):
        assert f"FixupBlock_{block}/_Conv_1/kernel" in found
        assert f"FixupBlock_{block}/_Conv_0/kernel" not in found


WINDOWS = [  # image, zeros around it, stride, channels; from the second on an edge meets no window
    ((7, 6), ((1, 1), (1, 1)), 1, (4, 5)),
    ((8, 8), ((0, 1), (0, 1)), 2, (4, 5)),
    ((5, 9), ((2, 0), (1, 2)), 2, (4, 64)),  # from 64 maps on the kernel's gradient is another
    ((8, 8), ((0, 0), (0, 0)), 3, (3, 32)),  # the first layer that is padded to four channels
    ((8, 9), ((0, 1), (1, 2)), 2, (1, 4)),  # a first layer of one channel: by patches
]


@pytest.mark.parametrize(("size", "pads", "stride", "channels"), WINDOWS)
def test_strided_convolutions(size: Any, pads: Any, stride: int, channels: Any) -> None:
    numbers = ("NHWC", "HWIO", "NHWC")
    rng = np.random.default_rng(0)
    shapes = [(2, *size, channels[0]), (3, 2, *channels), (3, 3, channels[0])]
    x, dense, single = (rng.normal(size=s).astype(np.float32) for s in shapes)

    def lax(x: jax.Array, k: jax.Array, groups: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (stride,) * 2, pads, dimension_numbers=numbers, feature_group_count=groups
        )

    def ways(conv: Any, depthwise: Any) -> Any:
        return lambda x, k, d: jnp.concatenate([conv(x, k).ravel(), depthwise(x, d).ravel()])

    wanted = ways(lax, lambda x, k: lax(x, k[:, :, None], channels[0]))
    ours = [
        ways(
            lambda x, k, way=way: convolutions.conv(x, k, pads, way, stride=stride),
            lambda x, k: convolutions.depthwise(x, k, pads, stride=stride),
        )
        for way in ("lax", "direct", "im2col")
    ]
    close_vjp(ours, wanted, x, dense, single)


def test_the_tail_of_mobilenet_may_compute_in_bfloat16() -> None:
    """Behind a trunk that computes in float32."""
    model = fs.models.mobilenet_v2(IMAGE, CLASSES, ARRAYS, size=32)
    mixed = fs.models.with_compute_dtype(model, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, *IMAGE), jnp.uint8)
    outputs, state = jax.eval_shape(
        lambda x: mixed.apply(mixed.init(jax.random.key(0)), x, train=False), x
    )
    assert outputs.dtype == jnp.float32
    assert {a.dtype for a in jax.tree.leaves(state)} == {jnp.dtype("float32")}


TILED = [  # image, zeros around it: outputs that tiles of 4×4 fill, that they do not, and few
    ((8, 12), ((1, 1), (1, 1))),
    ((7, 10), ((0, 2), (3, 1))),
    ((3, 4), ((0, 0), (0, 1))),
]


@pytest.mark.parametrize(("size", "pads"), TILED)
def test_winograd_is_a_convolution(size: Any, pads: Any) -> None:
    """Within 1e-5 of the largest value, and so are its gradients; under a vmap over kernels too."""
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, *size, 17)), rng.normal(size=(3, 3, 17, 18))

    @functools.partial(jit, static_argnums=0)
    def mapped(way: Any, *args: Any) -> Any:
        def both(x: Any, k: Any) -> Any:
            y, back = jax.vjp(lambda x, k: convolutions.conv(x, k, pads, way), x, k)
            return y, back(jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

        return jax.vmap(both)(*args)

    with enable_x64(True):
        stacked = tuple(np.stack([a, 2 * a + 1]) for a in (x, kernel))
        exact = jax.device_get(mapped("lax", *stacked))
        assert_trees(jax.device_get(mapped("winograd", *stacked)), exact, rtol=1e-9, atol=1e-9)
    single = jax.device_get(mapped("winograd", *(a.astype(np.float32) for a in stacked)))
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(exact), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(
    ("size", "channels", "dtype", "fast"),
    [
        (16, (16, 16), "float32", True),
        (16, (15, 32), "float32", False),  # too few channels
        (16, (32, 15), "float32", False),
        (6, (16, 16), "float32", True),  # 36 outputs of 64
        (5, (16, 16), "float32", False),  # 25 outputs of 64
        (16, (16, 16), "bfloat16", False),
    ],
)
def test_cpus_compute_large_convolutions_by_winograd(
    size: int, channels: Any, dtype: str, fast: bool
) -> None:
    x = jnp.ones((1, size, size, channels[0]), dtype)
    kernel, pads = jnp.ones((3, 3, *channels), dtype), ((1, 1), (1, 1))
    wanted: convolutions.Lowering = "winograd" if fast else "direct"
    programs = [
        jax.jit(lambda x, k, way=way: convolutions.conv(x, k, pads, way)).lower(x, kernel)
        for way in (None, wanted)
    ]
    chosen, asked = (program.as_text().count("stablehlo.convolution") for program in programs)
    assert chosen == asked == (0 if fast else 1)


def test_winograd_is_refused_of_other_kernels() -> None:
    x, kernel, pads = jnp.ones((1, 8, 8, 16)), jnp.ones((5, 5, 16, 16)), ((0, 0), (0, 0))
    with pytest.raises(ValueError, match=r"stride 1, got 5×5 in float32 and stride 2$"):
        convolutions.conv(x, kernel, pads, "winograd", stride=2)


def test_an_unknown_lowering_is_refused() -> None:
    x, kernel, pads = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)), ((0, 0), (0, 0))
    known = "lowering must be one of lax, direct, winograd, im2col, got 'fft'"
    with pytest.raises(ValueError, match=known):
        convolutions.conv(x, kernel, pads, "fft")  # type: ignore[arg-type]


def keras_mobilenet(images: np.ndarray, size: int) -> jax.Array:
    """The whole network up to the mean, of lax's convolutions and unfolded BatchNorms."""

    def layer(name: str, norm: str, x: jax.Array, stride: int = 1) -> jax.Array:
        depth = name.endswith("depthwise")
        kernel = jnp.asarray(ARRAYS[f"{name}/{'depthwise_' if depth else ''}kernel"])
        groups = x.shape[-1] if depth else 1
        kernel = kernel.swapaxes(2, 3) if depth else kernel
        pad = {(3, 1): (1, 1), (3, 2): (0, 1)}.get((kernel.shape[0], stride), (0, 0))
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, (pad, pad), dimension_numbers=numbers,
            feature_group_count=groups,
        )  # fmt: skip
        g, b, m, v = (
            ARRAYS[f"{norm}/{leaf}"].reshape(1, 1, 1, -1)
            for leaf in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        return (x - m) / np.sqrt(v + 1e-3) * g + b

    def relu6(x: jax.Array) -> jax.Array:
        return jnp.clip(x, 0, 6)

    scaled = jax.image.resize(images.astype(np.float32), (len(images), size, size, 3), "bilinear")
    x = relu6(layer("Conv1", "bn_Conv1", scaled / 127.5 - 1, 2))
    for number in range(17):
        block = f"block_{number}" if number else "expanded_conv"
        stride = 2 if number in (1, 3, 6, 13) else 1
        y = relu6(layer(f"{block}_expand", f"{block}_expand_BN", x)) if number else x
        y = relu6(layer(f"{block}_depthwise", f"{block}_depthwise_BN", y, stride))
        y = layer(f"{block}_project", f"{block}_project_BN", y)
        x = x + y if stride == 1 and x.shape == y.shape else y
    return jnp.mean(relu6(layer("Conv_1", "Conv_1_bn", x)), axis=(1, 2))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)


@pytest.mark.slow
def test_mobilenet_is_keras(images: np.ndarray) -> None:
    """The trunk and the pretrained tail, against the network written out; sides 64 and 2."""
    features = fs.models.mobilenet_v2_trunk(ARRAYS, size=64)(images)
    assert features.shape == (5, 2, 2, NARROW[-1])
    tail = fs.models.mobilenet_v2_tail(features.shape[1:], TOP, ARRAYS)
    variables = jit(tail.init)(jax.random.key(0))
    identity = {"kernel": jnp.eye(TOP), "bias": jnp.zeros(TOP)}
    variables.params["Dense_0"] = {"Dense_0": identity}
    ours, _ = jit(lambda v, x: tail.apply(v, x, train=False))(variables, features)
    wanted = jit(keras_mobilenet, static_argnums=1)(images, 64)
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4)
    assert np.asarray(ours).std(axis=0).max() > 1e-2  # images differ


@pytest.mark.slow
def test_trunk_and_tail_are_the_whole(images: np.ndarray) -> None:
    whole = fs.models.mobilenet_v2(images.shape[1:], CLASSES, ARRAYS, size=32)
    tail = fs.models.mobilenet_v2_tail(FEATURES, CLASSES, ARRAYS)
    features = fs.models.mobilenet_v2_trunk(ARRAYS, size=32)(images)

    @functools.partial(jit, static_argnums=0)
    def both_ways(model: fs.Model, x: Any) -> Any:
        variables = model.init(jax.random.key(0))
        return variables, [model.apply(variables, x, train=train) for train in (True, False)]

    a, b = both_ways(whole, images), both_ways(tail, features)
    assert_trees(a, b, rtol=1e-4, atol=3e-5)
    (trained, state), (evaluated, _) = b[1]
    assert largest_change(trained, evaluated) > 1e-3
    assert largest_change(state, b[0].state) > 1e-3


def test_fresh_tail() -> None:
    """Drawn afresh, by the key; the pretrained one is not, but for the classifier."""

    def kernel(seed: int, fresh: bool) -> Any:
        tail = fs.models.mobilenet_v2_tail(FEATURES, CLASSES, ARRAYS, fresh_tail=fresh)
        kernel = jit(lambda key: tail.init(key).params["Conv_1"]["kernel"])
        return np.asarray(kernel(jax.random.key(seed)))

    np.testing.assert_array_equal(kernel(0, False), ARRAYS["Conv_1/kernel"][0, 0])
    np.testing.assert_array_equal(kernel(0, False), kernel(1, False))
    assert np.abs(kernel(0, True) - kernel(1, True)).max() > 1e-2


@pytest.mark.slow
def test_frozen_weights_are_held_once(images: np.ndarray) -> None:
    """8 clients under one vmap, 2 seeds: no tensor of the program stacks a frozen one."""
    model = fs.models.mobilenet_v2(images.shape[1:], CLASSES, ARRAYS, size=32)
    x, y = np.concatenate([images] * 4)[:16], np.arange(16) % CLASSES
    data = jax.device_put(fs.client_data(x, y, fs.partition.iid(y, 8, seed=0)))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=2)
    execution = fs.make_execution(devices=1, chunk=0)
    algorithm = fs.phase_shift(local, clients_per_round=8, phases=2).on(execution)

    keys = jax.random.split(jax.random.key(0), 2)
    begin = jax.vmap(lambda key: algorithm.init(key, model.init(key), data))
    state = jax.eval_shape(begin, keys)
    held = 9  # the server's model, and 8 in flight
    one = tree.num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    trunk = tree.num_bytes([a for n, a in ARRAYS.items() if n.startswith("block_15")])
    assert 2 * held * one <= tree.num_bytes(state) < 2 * held * one + trunk

    step = jax.vmap(lambda key, state: algorithm.step(key, state, data)[0])
    program = jax.jit(step).lower(keys, state).as_text()
    for frozen in ("17x102", "3x3x102", "18x108", "126x21"):
        assert f"tensor<{frozen}xf32>" in program
        assert not re.search(rf"tensor<((1|2|8|16)x)+{frozen}xf32>", program)
    assert f"tensor<16x{LAST}x{TOP}xf32>" in program  # the trained are stacked: 2 · 8 of them


def test_mobilenet_finds_its_weights(weights_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(fs.models.mobilenet_v2(IMAGE, CLASSES)) == parameters(
        fs.models.mobilenet_v2(IMAGE, CLASSES, ARRAYS)
    )
    assert mobilenet.load_weights(weights_file).keys() == ARRAYS.keys()
    weights_file.rename(weights_file.with_suffix(".old"))
    with pytest.raises(FileNotFoundError, match=r"mobilenet_v2 holds 0\), or pass weights=FILE"):
        fs.models.mobilenet_v2(IMAGE, CLASSES)
    monkeypatch.delenv("FEDJAX_SIM_DATA_DIR")
    with pytest.raises(FileNotFoundError, match=r"FEDJAX_SIM_DATA_DIR \(which is not set\)"):
        fs.models.mobilenet_v2(IMAGE, CLASSES)


def test_mobilenet_says_what_does_not_fit(tmp_path: Path) -> None:
    make = fs.models.mobilenet_v2
    with pytest.raises(ValueError, match=r"shape must be \(height, width, 3\), got \(8, 8, 1\)"):
        make((8, 8, 1), CLASSES, ARRAYS)
    for size in (0, 100):
        with pytest.raises(ValueError, match=rf"size must be a multiple of 32, got {size}"):
            make(IMAGE, CLASSES, ARRAYS, size=size)
    some = {name: a for name, a in ARRAYS.items() if name != "block_7_project_BN/beta"}
    with pytest.raises(ValueError, match=r"by name; 'block_7_project_BN/beta' is missing"):
        make(IMAGE, CLASSES, some)
    (tmp_path / "weights.h5").write_text("no zip")
    with pytest.raises(ValueError, match=r"weights\.h5: not a whole \.npz file"):
        make(IMAGE, CLASSES, tmp_path / "weights.h5")
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        make(IMAGE, CLASSES, tmp_path / "absent.npz")


@pytest.mark.slow
def test_command_takes_mobilenet_unscaled(weights_file: Path, images: np.ndarray) -> None:
    """Standardised inputs would be another network: -1 … 1 is what the trunk was trained on."""
    y = np.arange(5, dtype=np.int32)
    mean, std = np.full(3, 100.0, np.float32), np.full(3, 50.0, np.float32)
    digits = fs.load_dataset("digits")
    dataset = digits._replace(
        train_x=images, train_y=y, test_x=images, test_y=y, mean=mean, std=std,
        task=fs.tasks.classification(5),
    )  # fmt: skip
    found, plain = load_model("mobilenet_v2", dataset), fs.models.mobilenet_v2(IMAGE, 5)
    variables = jax.eval_shape(plain.init, jax.random.key(0))
    programs = [
        jax.make_jaxpr(lambda v, x, m=m: m.apply(v, x, train=False))(variables, images)
        for m in (found, plain)
    ]
    assert str(programs[0]) == str(programs[1])
    constants = [program.consts for program in programs]
    assert_trees(*constants)


@pytest.mark.slow
def test_pretrained_features_tell_classes_apart(data_dir: str) -> None:
    """Nearest class mean on real images: the trunk's output against one of shuffled weights."""
    folder = Path(data_dir) / "tfds"
    file = next(iter(sorted(Path(data_dir).glob("mobilenet_v2/*.npz"))), None)
    builder = tfds.builder("cifar10", data_dir=folder)
    if file is None or not builder.is_prepared():
        pytest.skip(f"no CIFAR-10 in {folder} or no weights in {data_dir}/mobilenet_v2")
    examples = builder.as_data_source(split="train").__getitems__(range(750))
    x, y = np.stack([e["image"] for e in examples]), np.array([e["label"] for e in examples])
    pretrained = mobilenet.load_weights(file)
    rng = np.random.default_rng(0)
    shuffled = {name: rng.permutation(a.ravel()).reshape(a.shape) for name, a in pretrained.items()}

    def accuracy(weights: Mapping[str, np.ndarray]) -> float:
        features = fs.models.mobilenet_v2_trunk(weights, size=96)(x).mean(axis=(1, 2))
        (fit, test), (fit_y, test_y) = (np.split(a, [500]) for a in (features, y))
        means = np.stack([fit[fit_y == label].mean(axis=0) for label in range(10)])
        nearest = ((test[:, None] - means) ** 2).sum(axis=-1).argmin(axis=1)
        return float((nearest == test_y).mean())

    assert accuracy(pretrained) > 0.5
    assert accuracy(shuffled) < 0.3


# From a user's module to a model.

FEATURE = 4


class LinenNorm(nn.Module):
    """Takes no mask; a BatchNorm in a block, to see that one inside is reached."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Sequential([nn.Dense(5), nn.BatchNorm(use_running_average=not train)])(x)
        return nn.Dense(CLASSES)(x)


class LinenMask(nn.Module):
    """Hands BatchNorm the mask as it got it, ``[B]``."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None = None) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x), mask=mask)
        return nn.Dense(CLASSES)(x)


class NnxNorm(nnx.Module):
    """BatchNorms as an attribute and in another module's list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(FEATURE, CLASSES, rngs=rngs)
        self.norm = nnx.BatchNorm(CLASSES, rngs=rngs)
        self.more = nnx.Sequential(nnx.BatchNorm(CLASSES, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.more(jax.nn.relu(self.norm(self.dense(x))))


USERS: dict[str, Callable[[], fs.Model]] = {
    "linen": lambda: fs.models.from_linen(LinenNorm(), (FEATURE,)),
    "linen with mask": lambda: fs.models.from_linen(LinenMask(), (FEATURE,)),
    "nnx": lambda: fs.models.from_nnx(NnxNorm),
}


@pytest.mark.parametrize("name", USERS)
def test_padding_does_not_enter_a_users_batch_norm(name: str) -> None:
    """The loss, the gradient and the new statistics of 5 rows, with 3 more of padding and without.

    5 rows of 5 features: a mask over the wrong axis would fit as well.
    """
    model, rng = USERS[name](), np.random.default_rng(0)
    objective, start = fs.empirical_risk(model), jit(model.init)(jax.random.key(0))
    x, y = rng.normal(size=(5, FEATURE)).astype(np.float32), np.arange(5) % CLASSES

    @jit
    def gradient(x: Any, y: Any, mask: Any) -> Any:
        return jax.value_and_grad(objective, has_aux=True)(
            *start, Batch(x, y, mask), context_of(start.params)
        )

    plain = gradient(x, y, np.ones(5, bool))
    far = np.full((3, FEATURE), 50, np.float32)
    padded = gradient(np.concatenate([x, far]), np.pad(y, (0, 3)), np.arange(8) < 5)
    assert_trees(padded, plain, rtol=1e-4, atol=1e-6)
    assert largest_change(plain[0][1], start.state) > 1e-3


class OffAxis(nn.Module):
    """A BatchNorm that sees pixels as rows."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 2))
        return nn.Dense(CLASSES)(x.reshape(-1, FEATURE))


class OwnState(nn.Module):
    """A mean of its own, which nobody hands a mask, and a constant."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = self.variable("stats", "mean", jnp.zeros, (FEATURE,))
        scale = self.variable("constants", "scale", jnp.ones, (FEATURE,))
        if train:
            mean.value = jnp.mean(x, axis=0)
        return nn.Dense(CLASSES)((x - mean.value[None]) * scale.value[None])


class OwnStateMasked(OwnState):
    """It says that it has seen to that."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: Any = None) -> jax.Array:
        return super().__call__(x, train)


class Constants(nn.Module):
    """State that training leaves alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.variable("constants", "scale", jnp.ones, (FEATURE,))
        return nn.Dense(CLASSES)(x * scale.value[None])


class OwnStateNnx(nnx.Module):
    """A mean of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(FEATURE, CLASSES, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(FEATURE))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = jnp.mean(x, axis=0)
        return self.dense(x)


def trained_on(model: fs.Model) -> Any:
    """The types of a step on a padded minibatch."""

    def step(key: jax.Array, x: jax.Array) -> Any:
        return model.apply(model.init(key), x, train=True, mask=jnp.arange(3) < 2, key=key)

    return jax.eval_shape(step, jax.random.key(0), jnp.zeros((3, FEATURE)))


def test_state_that_padding_would_enter_is_refused() -> None:
    linen = fs.models.from_linen
    with pytest.raises(ValueError, match=r"BatchNorm must see the 3 rows .*, got .* \(6, 2\)"):
        trained_on(linen(OffAxis(), (FEATURE,)))
    with pytest.raises(ValueError, match=r"module must take mask: .* state mean, but OwnState\."):
        trained_on(linen(OwnState(), (FEATURE,)))
    with pytest.raises(ValueError, match=r"state seen, but OwnStateNnx\.__call__ takes none"):
        trained_on(fs.models.from_nnx(OwnStateNnx))
    trained_on(linen(OwnStateMasked(), (FEATURE,)))
    trained_on(linen(Constants(), (FEATURE,)))


@pytest.mark.skipif(not hasattr(nnx, "SpectralNorm"), reason="flax.nnx has it since 0.12.1")
def test_padding_does_not_reach_a_spectral_norm() -> None:
    """Its state changes, but not by the minibatch."""

    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.SpectralNorm(nnx.Linear(FEATURE, CLASSES, rngs=rngs), rngs=rngs))

    trained_on(fs.models.from_nnx(build))


class Training(nn.Module):
    """In evaluation unless told."""

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        return nn.Dropout(0.5, deterministic=not training)(x)


class Deterministic(nn.Module):
    """The mode the other way round."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        return nn.Dropout(0.5, deterministic=deterministic)(x)


class DeterministicNnx(nnx.Module):
    """The same without a layer that has modes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return x if deterministic else x * jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fs.models.from_linen(Training(), (9,)),
        lambda: fs.models.from_linen(Deterministic(), (9,)),
        lambda: fs.models.from_nnx(DeterministicNnx),
    ],
)
def test_dropout_acts_in_training_alone(make: Callable[[], fs.Model]) -> None:
    model, x = make(), jnp.ones((3, 9))
    with jax.numpy_dtype_promotion("standard"):
        start, key = model.init(jax.random.key(0)), jax.random.key(1)
        assert (model.apply(start, x, train=True, key=key)[0] == 0).any()
        assert_trees(model.apply(start, x, train=False, key=key)[0], x)


class Noisy(nn.Module):
    """It asks for a stream of its own, whatever the mode."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.make_rng("noise"), x.shape, x.dtype)


class NoisyNnx(nnx.Module):
    """The same; the stream is asked for when the module is made."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.noise = rngs.noise.fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.noise(), x.shape, x.dtype)


@pytest.mark.parametrize(
    "make", [lambda: fs.models.from_linen(Noisy(), (9,)), lambda: fs.models.from_nnx(NoisyNnx)]
)
def test_every_random_stream_that_a_module_asks_for_has_a_key(
    make: Callable[[], fs.Model],
) -> None:
    model, x = make(), jnp.ones((3, 9))
    start = model.init(jax.random.key(0))
    one, other = (model.apply(start, x, train=True, key=jax.random.key(i))[0] for i in (1, 2))
    assert (one != other).all()
    first, again = (model.apply(start, x, train=False)[0] for _ in range(2))
    assert (first != x).all()
    assert_trees(first, again)


class TwoNames(nn.Module):
    """Two arguments for one thing."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, deterministic: bool) -> jax.Array:
        return x


class Fixed(nn.Module):
    """A layer whose mode nobody can set."""

    layer: Any

    @nn.compact
    def __call__(self, x: jax.Array, mode: str = "train") -> jax.Array:
        return self.layer()(x)


FIXED: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.5, deterministic=False),
    "BatchNorm": lambda: nn.BatchNorm(use_running_average=True),
    "MultiHead": lambda: nn.MultiHeadDotProductAttention(1, dropout_rate=0.1, deterministic=True),
}


def test_a_mode_that_cannot_be_set_is_refused() -> None:
    linen = fs.models.from_linen
    with pytest.raises(ValueError, match=r"one name; TwoNames\.__call__ has train and determinis"):
        linen(TwoNames(), (FEATURE,))
    for name, layer in FIXED.items():
        wanted = (
            rf"module must take train: bool by name, since it has {name}.*, got Fixed\.__call__\(x"
        )
        with pytest.raises(ValueError, match=wanted):
            linen(Fixed(layer), (2, FEATURE))
    for idle in (
        lambda: nn.Dropout(0.0, deterministic=True),
        lambda: nn.MultiHeadDotProductAttention(1),
    ):
        linen(Fixed(idle), (2, FEATURE))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a flax\.linen module, such as Net\(\), got <class .*Tw"):
        fs.models.from_linen(TwoNames, (FEATURE,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape must be .* input, such as \(5,\), got 5"):
        fs.models.logistic(5, 2)  # type: ignore[arg-type]
    made: Any = NnxNorm(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"build must be a function of nnx\.Rngs"):
        fs.models.from_nnx(made)


@pytest.mark.slow
def test_cifar_cnn_as_in_the_toolkit() -> None:
    """FLTK's forward written out: ReLU before BatchNorm, two dense layers in a row, a softmax."""
    fltk = fs.models.cifar_cnn((8, 8, 3), CLASSES, as_fltk=True)
    start = jit(fltk.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    start = jax.tree.map(lambda a: a + 0.05 * rng.normal(size=a.shape).astype(a.dtype), start)
    x = jnp.asarray(rng.normal(size=(2, 8, 8, 3)), jnp.float32)

    def literal(variables: fs.Variables, x: Any) -> jax.Array:
        params, stats = variables.params, variables.state["batch_stats"]
        for i in range(6):
            conv, norm = params[f"Conv_{i}"], params[f"BatchNorm_{i}"]
            x = jax.lax.conv_general_dilated(
                x, conv["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jnp.maximum(x + conv["bias"].reshape(1, 1, 1, -1), 0)
            mean, var, scale, bias = (
                a.reshape(1, 1, 1, -1)
                for a in (stats[f"BatchNorm_{i}"]["mean"], stats[f"BatchNorm_{i}"]["var"],
                          norm["scale"], norm["bias"])
            )  # fmt: skip
            x = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias
            if i % 2:
                x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for i in (1, 0):  # flax numbers them from the outside
            dense = params[f"Dense_{i}"]["Dense_0"]
            x = x @ dense["kernel"] + dense["bias"][None]
        return jnp.exp(x) / jnp.sum(jnp.exp(x), axis=-1, keepdims=True)

    ours, wanted = jit(lambda v: (fltk.apply(v, x, train=False)[0], literal(v, x)))(start)
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)
