"""Weights of other types than float32, and 64-bit mode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import some_slow

import fedjax_sim as fs
from fedjax_sim import base, corrections
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.engine import rounding
from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.engine.memory import operations
from fedjax_sim.models import convolutions, layers, nets

IMAGE, CLASSES, SAMPLES = (16, 16, 3), 3, 7


class Small(nn.Module):
    """Convolution, BatchNorm, dropout and a dense layer: it compiles soon."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = layers.BatchNorm()(layers.Conv(2)(x), train=train)
        x = layers.Dropout()(jax.nn.relu(layers.max_pool(x)), train=train)
        return layers.Dense(CLASSES)(x.reshape(len(x), -1))


NETS: dict[str, tuple[Callable[[], fs.Model], tuple[int, ...]]] = {
    "small": (lambda: fs.models.from_linen(Small(), IMAGE), IMAGE),
    "resnet8": (
        lambda: fs.models.from_linen(nets.FixupResNet(CLASSES, blocks=1), IMAGE),
        IMAGE,
    ),
    "lstm": (lambda: fs.models.lstm((5,), CLASSES, units=4), (5,)),
}


def client_of(x: jax.Array, y: jax.Array) -> base.ClientView:
    index = jnp.arange(len(x), dtype=jnp.int32)
    return base.ClientView(x, y, index, jnp.int32(0), jnp.int32(len(x)), len(x))


def samples(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.integers(0, CLASSES, SAMPLES), jnp.int32)
    if shape == (5,):
        return jnp.asarray(rng.integers(0, CLASSES, (SAMPLES, *shape)), jnp.uint8), y
    return jnp.asarray(rng.normal(size=(SAMPLES, *shape)), dtype), y


def cast(tree: Any, dtype: Any) -> Any:
    """Arrays, or only their shapes and types."""

    def one(a: Any) -> Any:
        return a.update(dtype=dtype) if isinstance(a, jax.ShapeDtypeStruct) else a.astype(dtype)

    return jax.tree.map(one, tree)


def types(tree: Any) -> set[Any]:
    return {np.dtype(a.dtype) for a in jax.tree.leaves(tree)}


def local_of(model: fs.Model, **options: Any) -> base.LocalUpdate:
    optimizer = optax.sgd(0.1, momentum=0.9)
    return fs.local_sgd(
        fs.empirical_risk(model, l2=0.1), optimizer, batch_size=3, epochs=2, **options
    )


def train(local: base.LocalUpdate, variables: fs.Variables, x: Any, y: Any) -> base.Trained:
    states = local.client_state(variables), local.shared_state(variables)
    return local.train(jax.random.key(1), variables, client_of(x, y), *states)


@pytest.mark.parametrize(
    ("name", "weights", "x64"),
    some_slow(
        [
            *((name, "bfloat16", False) for name in ("small", "lstm")),
            *((name, "float32", True) for name in ("small", "lstm")),
            ("resnet8", "bfloat16", False),
            ("resnet8", "float32", True),
            ("lstm", "float64", True),
            ("small", "float64", True),
            ("lstm", "bfloat16", True),
            ("small", "bfloat16", True),
        ],
        quick=4,
    ),
)
def test_training_keeps_every_type(name: str, weights: str, x64: bool) -> None:
    """Of the weights and of BatchNorm's statistics, float32 at the start; the report is float32."""
    make, shape = NETS[name]
    corrected = (corrections.scaffold(1),)  # with a pass for the whole gradient
    with enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        model = make()
        local = local_of(model, corrections=corrected, inexactness=0.1)

        def run(key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
            start = model.init(key)
            assert types(start) == {np.dtype("float32")}
            start = start._replace(params=cast(start.params, weights))
            return start, train(local, start, x, y)

        start, out = jax.eval_shape(run, jax.random.key(0), *samples(shape, "float32"))
    assert jax.tree.map(lambda a: a.dtype, out.variables) == jax.tree.map(lambda a: a.dtype, start)
    assert out.info.loss.dtype == np.float32
    assert {out.info.steps.dtype, out.info.samples.dtype} == {np.dtype("int32")}


@pytest.mark.parametrize("weights", ["bfloat16", "float64"])
def test_a_model_cast_whole_stays_so(weights: str) -> None:
    """With the statistics too, where flax's own BatchNorm would hand back float32."""

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(CLASSES)(x))

    x, y = samples((6,), "float32")
    with enable_x64(weights == "float64"), jax.numpy_dtype_promotion("standard"):
        for model, at in (
            (fs.models.from_linen(Flax(), (6,)), x),
            (fs.models.from_linen(Small(), (6, 6, 1)), jnp.tile(x[:, :, None, None], (1, 1, 6, 1))),
        ):
            start = cast(jax.eval_shape(model.init, jax.random.key(0)), weights)
            out = jax.eval_shape(lambda s, at=at, m=model: train(local_of(m), s, at, y), start)
            assert types(out.variables) == {np.dtype(jnp.dtype(weights))}


def test_descent_in_float64_is_exact() -> None:
    """Logistic regression with L2 by whole batches, against NumPy: to 12 digits, not to 7."""
    with enable_x64(True):
        x, y = samples((4,), jnp.float64)
        model = fs.models.logistic((4,), CLASSES)
        local = fs.local_sgd(
            fs.empirical_risk(model, l2=0.3), optax.sgd(0.5), batch_size=SAMPLES, epochs=3
        )
        start = cast(model.init(jax.random.key(0)), jnp.float64)
        out = jax.jit(lambda s: train(local, s, x, y))(start)
        inputs, labels = np.asarray(x), np.eye(CLASSES)[np.asarray(y)]
        first = start.params["Dense_0"]["Dense_0"]
        last = jax.device_get(out.variables.params["Dense_0"]["Dense_0"])
        w, b = np.asarray(first["kernel"]), np.asarray(first["bias"])
    for _ in range(3):
        logits = inputs @ w + b
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        slope = (p - labels) / SAMPLES
        w, b = w - 0.5 * (inputs.T @ slope + 0.3 * w), b - 0.5 * slope.sum(axis=0)
    np.testing.assert_allclose(last["kernel"], w, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(last["bias"], b, rtol=1e-12, atol=1e-14)


def normalised(x: jax.Array, train: bool) -> Any:
    """BatchNorm of real rows 0 to 4, its new statistics, and its output."""
    norm, rng = layers.BatchNorm(), np.random.default_rng(1)
    drawn = rng.uniform(0.5, 2.0, (4, x.shape[-1])).astype(np.float32)
    scale, bias, mean, var = map(jnp.asarray, drawn)
    variables = {
        "params": {"scale": scale.astype(x.dtype), "bias": bias.astype(x.dtype)},
        "batch_stats": {"mean": mean, "var": var},
    }
    mask = jnp.arange(len(x)) < 5

    @jax.jit
    def run(x: jax.Array) -> Any:
        return norm.apply(variables, x, train=train, mask=mask, mutable=["batch_stats"])

    y, new = run(x)
    rows = np.asarray(x[:5], np.float64)
    mu, sigma2 = np.asarray(drawn[2:], np.float64)
    if train:
        mu, sigma2 = rows.mean(axis=(0, 1, 2)), rows.var(axis=(0, 1, 2))
    scaled, shifted = (np.asarray(variables["params"][n], np.float64) for n in ("scale", "bias"))
    wanted = (rows - mu) / np.sqrt(sigma2 + 1e-5) * scaled + shifted
    return y, wanted, new["batch_stats"], 0.9 * drawn[2] + 0.1 * mu


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_of_bfloat16_has_statistics_of_float32(train: bool) -> None:
    """3 + N(0, 1) in bf16: its own mean is off by some 1e-2."""
    x = 3 + jax.random.normal(jax.random.key(0), (SAMPLES, 4, 4, 2))
    y, wanted, stats, mean = normalised(x.astype(jnp.bfloat16), train)
    assert y.dtype == jnp.bfloat16
    assert types(stats) == {np.dtype("float32")}
    np.testing.assert_allclose(np.asarray(y[:5], np.float64), wanted, rtol=2**-8, atol=2**-8)
    if train:
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-6)


def test_losses_of_bfloat16_are_summed_in_float32() -> None:
    """300 steps of a loss of 1: bf16 would stop counting at 256."""

    def one(params: Any, state: Any, batch: Any, context: Any) -> Any:
        return (1 + 0 * jnp.sum(params)).astype(jnp.bfloat16), state

    local = fs.local_sgd(one, optax.sgd(0.1), batch_size=1, epochs=300 / SAMPLES)
    start = fs.Variables(jnp.zeros(2, jnp.bfloat16), ())
    out = jax.jit(lambda s: train(local, s, *samples((2,), jnp.bfloat16)))(start)
    assert float(out.info.loss) == 1
    assert int(out.info.steps) == 300


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_convolutions_take_the_wider_type(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5, 3)), jnp.float32)
    with enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
        kernel = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 3, 4)), dtype)
        pads = ((1, 1), (1, 1))
        wide = jnp.promote_types(dtype, jnp.float32)
        for way in convolutions.LOWERINGS:
            conv = functools.partial(convolutions.conv, padding=pads, lowering=way)
            out, wanted = jax.jit(
                lambda x, k, conv=conv: (conv(x, k), conv(x.astype(wide), k.astype(wide)))
            )(x, kernel)
            assert out.dtype == wide
            np.testing.assert_array_equal(out, wanted)
        assert convolutions.depthwise(x, kernel[..., 0], pads).dtype == wide


MIXED = {name: NETS[name] for name in ("small", "lstm")}


def products(jaxpr: Any) -> set[Any]:
    """Types of the results of all products of matrices and convolutions, nested ones included."""
    kinds = ("dot_general", "conv_general_dilated")
    of_kind: list[Any] = [e for e in operations(jaxpr) if e.primitive.name in kinds]
    return {equation.outvars[0].aval.dtype for equation in of_kind}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_network_may_compute_in_bfloat16(name: str) -> None:
    """All of its products, back and forth; weights, their gradients and the state as they were."""
    make, shape = MIXED[name]
    plain = make()
    mixed = fs.models.with_compute_dtype(plain, jnp.bfloat16)
    start = jax.jit(plain.init)(jax.random.key(0))
    x, y = samples(shape, "float32")
    found = {}
    for way, model in (("plain", plain), ("mixed", mixed)):
        slope = jax.grad(fs.empirical_risk(model, l2=0.1), has_aux=True)

        def step(start: fs.Variables, x: Any, y: Any, slope: Any = slope) -> Any:
            batch = base.Batch(x, y, jnp.ones(len(y), bool))
            context = base.Context(start, client_of(x, y), jax.random.key(1))
            return slope(start.params, start.state, batch, context)

        with jax.numpy_dtype_promotion("standard"):
            traced = jax.jit(step).trace(start, x, y)
            if way == "mixed":
                assert products(traced.jaxpr.jaxpr) == {jnp.dtype("bfloat16")}
            found[way] = traced.lower().compile()(start, x, y)
    assert types(found["mixed"]) == {np.dtype("float32")}
    plainly, mixedly = (
        np.concatenate([np.ravel(a) for a in jax.tree.leaves(found[way])]) for way in found
    )
    apart = np.linalg.norm(plainly - mixedly) / np.linalg.norm(plainly)
    assert 1e-4 < apart < 0.05
    logits = mixed.apply(start, x, train=False)[0]
    assert logits.dtype == np.float32


def sloped(params: Any, state: Any, batch: base.Batch, context: base.Context) -> Any:
    """Steps of 2**-11 at a rate of 1: a sixteenth of the gap to the bfloat16 above 1."""
    return -(2**-11) * jnp.sum(params["moves"]), state


def test_weights_in_bfloat16_move_by_steps_that_it_cannot_represent() -> None:
    leaf = fs.leaves.named("moves")
    settings: dict[str, Any] = {"batch_size": 1, "trained": leaf, "half_weights": True}
    local = fs.local_sgd(sloped, optax.sgd(1.0), **settings)
    one = jnp.full(10_000, 1 + 2**-20)
    received = fs.Variables({"moves": one, "still": one}, {})
    x, y = jnp.zeros((SAMPLES, 1)), jnp.zeros(SAMPLES, jnp.int32)
    trained = train(local, received, x, y).variables
    assert types(trained) == {np.dtype("float32")}
    np.testing.assert_array_equal(trained.params["still"], one)
    moved = np.asarray(trained.params["moves"] - one, np.float64)
    assert abs(moved.mean() / (SAMPLES * 2**-11) - 1) < 0.05
    states = local.client_state(received), local.shared_state(received)
    visit = jax.random.key(1), received, client_of(x, y), *states
    steps: Any = local.train
    plan, carry = steps.begin(*visit)
    plan, _ = steps.stretch(plan, carry, *visit)
    for at in (carry, steps.step(plan, carry, *visit)):
        assert types(at.variables) == {jnp.dtype("bfloat16")}


def test_random_rounding_leaves_what_is_not_finite_and_other_types() -> None:
    canonical = np.array([0x7FFFFFFF], np.uint32).view(np.float32)  # NaN on NVIDIA's GPUs
    values = np.concatenate([canonical, np.array([np.inf, -np.inf, -0.0], np.float32)])
    given = {"f32": jnp.asarray(values), "i32": jnp.arange(2), "f16": jnp.ones(2, jnp.float16)}
    found = rounding.rounded(jax.random.key(1), given)
    np.testing.assert_array_equal(found["f32"].astype(jnp.float32), values)
    assert found["f32"].dtype == jnp.bfloat16
    assert found["i32"] is given["i32"]
    assert found["f16"] is given["f16"]


def test_weights_in_bfloat16_have_no_derivative() -> None:
    model = fs.models.logistic((2,), CLASSES)
    local, variables = local_of(model, half_weights=True), model.init(jax.random.key(0))
    client = client_of(jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="half_weights must be False to differentiate, got True"):
        local.train(
            jax.random.key(1),
            variables,
            dataclasses.replace(client, differentiable=True),
            local.client_state(variables),
            local.shared_state(variables),
        )


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [("f32", "float32"), ("bf16", "bfloat16"), ("bf16_weights", "bfloat16")],
)
def test_the_command_has_a_precision(precision: str, wanted: str) -> None:
    setup = build(parse(["--precision", precision, "--model", "logistic"]))
    model, x = setup.model, setup.problem.data.x[:2]
    start = jax.eval_shape(model.init, jax.random.key(0))
    assert types(start) == {np.dtype("float32")}
    applied = jax.make_jaxpr(functools.partial(model.apply, train=False))(start, x)
    assert products(applied.jaxpr) == {jnp.dtype(wanted)}
    local: Any = setup.algorithms["phase_shift"].parts.local
    assert local.half_weights == (precision == "bf16_weights")


def test_a_network_that_computes_in_its_own_type_is_refused() -> None:
    class Stubborn(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(CLASSES, dtype=jnp.float32)(x)

    stubborn = fs.models.from_linen(Stubborn(), (6,))
    scaled = fs.models.with_scaling(fs.models.logistic((6,), CLASSES), jnp.zeros(6), jnp.ones(6))
    message = (
        "model must compute in bfloat16 if its weights and inputs are, got float32; apply "
        r"scaling outside: with_scaling\(with_compute_dtype\("
    )
    for model in (stubborn, scaled):
        mixed = fs.models.with_compute_dtype(model, jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=message):
            mixed.apply(model.init(jax.random.key(0)), jnp.ones((2, 6)), train=False)
    with pytest.raises(ValueError, match=r"dtype must be floating point, such as .*, got int8"):
        fs.models.with_compute_dtype(stubborn, jnp.int8)
