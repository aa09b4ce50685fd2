"""The transformer: its mathematics by hand, causality, and a federated run of it."""

from __future__ import annotations

import functools
import math
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import assert_trees, largest_change, play

import fedjax_sim as fs
from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.defaults import model_for
from fedjax_sim.data import from_arrays
from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.models import transformer

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS = 10, 6, 16, 2, 2
SIZES, COHORT, ROUNDS, BATCH, LR = (1, 5, 2, 4, 3), 3, 3, 2, 0.1


@pytest.fixture(scope="module")
def model() -> fs.Model:
    return transformer((LENGTH,), VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS)


@pytest.fixture(scope="module")
def start(model: fs.Model) -> fs.Variables:
    """Weights of order one: at the initial ones all tokens are equally likely."""
    drawn = jax.jit(model.init)(jax.random.key(3))
    return jax.tree.map(lambda w: 10 * w if w.ndim == 2 else 1.5 * w, drawn)


def windows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (n, LENGTH)).astype(np.uint8)


def by_hand(params: Any, tokens: Any, xp: ModuleType = np) -> Any:
    """Logits ``[T, V]`` of one window: step by step and head by head."""
    p = params
    x = p["tokens"][tokens] + p["places"][: len(tokens)]

    def norm(x: Any, p: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / xp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"][None]
        return y + p["bias"][None] if "bias" in p else y

    def dense(x: Any, p: Any) -> Any:
        return x @ p["kernel"] + p["bias"][None] if "bias" in p else x @ p["kernel"]

    for number in range(LAYERS):
        layer = p[f"layer_{number}"]
        y = norm(x, layer["LayerNorm_0"])
        q, k, v = xp.split(dense(y, layer["qkv"]), 3, axis=-1)
        steps = []
        for t in range(len(tokens)):
            heads = []
            for at in (slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH)):
                scores = k[: t + 1, at] @ q[t, at] / math.sqrt(WIDTH // 2)
                weights = xp.exp(scores - scores.max())
                heads.append(weights @ v[: t + 1, at] / weights.sum())
            steps.append(xp.concatenate(heads))
        x = x + dense(xp.stack(steps), layer["out"])
        up = dense(norm(x, layer["LayerNorm_1"]), layer["up"])
        gelu = up / 2 * (1 + xp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + dense(gelu, layer["down"])
    return dense(norm(x, p["LayerNorm_0"]), p["next"])


def test_it_is_a_transformer(model: fs.Model, start: fs.Variables) -> None:
    x = windows(3)
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), start.params)
    wanted = np.stack([by_hand(params, window) for window in x])
    assert wanted.std() > 0.1
    found = jax.jit(lambda v, x: model.apply(v, x, train=True)[0])(start, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_later_token_changes_no_earlier_logit(model: fs.Model, start: fs.Variables) -> None:
    """To the bit; of a window that ends earlier, the logits are those of its first steps."""
    apply = jax.jit(lambda x: model.apply(start, x, train=False)[0])
    x = windows(1)
    whole = np.asarray(apply(x))
    for t in range(LENGTH):
        other = x.copy()
        other[0, t] = (other[0, t] + 1) % VOCABULARY
        changed = (np.asarray(apply(other)) != whole).any(axis=(0, 2))
        assert changed.tolist() == [step >= t for step in range(LENGTH)]
    np.testing.assert_allclose(apply(x[:, :4]), whole[:, :4], rtol=1e-4, atol=1e-6)


def test_it_computes_in_bfloat16_and_double(model: fs.Model, start: fs.Variables) -> None:
    x = jnp.asarray(windows(2))
    plain = functools.partial(model.apply, train=False)
    exact, _ = jax.jit(plain)(start, x)
    mixed = functools.partial(fs.models.with_compute_dtype(model, jnp.bfloat16).apply, train=False)
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", str(jax.make_jaxpr(mixed)(start, x)))
    assert set(products) == {"bf16"}
    half, _ = jax.jit(mixed)(start, x)
    assert half.dtype == jnp.float32
    gap = np.abs(half - exact).max() / np.abs(exact).max()
    assert 0 < gap < 0.05
    with enable_x64(True):
        wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), start)
        double, _ = jax.jit(plain)(wide, x)
        wanted = np.stack([by_hand(jax.tree.map(np.asarray, wide.params), w) for w in windows(2)])
        np.testing.assert_allclose(double, wanted, rtol=1e-12, atol=1e-13)


def test_remat_stores_less_for_the_same_gradient(model: fs.Model, start: fs.Variables) -> None:
    again, x = (
        transformer((LENGTH,), VOCABULARY, WIDTH, LAYERS, HEADS, remat=True),
        jnp.asarray(windows(3)),
    )

    def backward(model: fs.Model) -> Any:
        def outputs(params: Any) -> jax.Array:
            return jnp.sin(model.apply(fs.Variables(params, {}), x, train=True)[0])

        return jax.vjp(outputs, start.params)[1]

    ones, models = jnp.ones((3, LENGTH, VOCABULARY)), (model, again)
    plain, found = (jax.jit(lambda m=m: backward(m)(ones))() for m in models)
    assert float(jnp.abs(plain[0]["layer_0"]["qkv"]["kernel"]).max()) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), plain, found)
    stored = [jax.tree.leaves(jax.eval_shape(functools.partial(backward, m))) for m in models]
    sizes = [sum(a.size for a in leaves if a.shape[:1] == (3 * LENGTH,)) for leaves in stored]
    assert sizes[1] < sizes[0] / 2


def test_its_size_and_its_head(model: fs.Model) -> None:
    shapes = jax.eval_shape(transformer((80,), 64).init, jax.random.key(0))
    layer = 4 * 128**2 + 2 * 4 * 128**2 + 2 * 128
    size = sum(w.size for w in jax.tree.leaves(shapes))
    assert size == (64 + 80) * 128 + 4 * layer + 128 + 128 * 64 == 814_208
    own = fs.leaves.head(model)(jax.eval_shape(model.init, jax.random.key(0)))
    assert own.params["next"] == {"kernel": True}
    assert sum(jax.tree.leaves(own)) == 1


def test_initial_weights_are_those_of_gpt_2() -> None:
    params = jax.jit(transformer((80,), 64, layers=1).init)(jax.random.key(0)).params
    added = 0.02 / math.sqrt(2)
    for name, deviation in (("up", 0.02), ("qkv", 0.02), ("out", added), ("down", added)):
        kernel = params["layer_0"][name]["kernel"]
        assert float(kernel.std()) == pytest.approx(deviation, rel=0.03)
    assert float(params["tokens"].std()) == pytest.approx(0.02, rel=0.03)


def test_what_is_no_window_of_tokens_is_refused(model: fs.Model, start: fs.Variables) -> None:
    with pytest.raises(ValueError, match=r"shape must be \(tokens,\), .*, got \(8, 8, 3\)"):
        transformer((8, 8, 3), 10)
    with pytest.raises(ValueError, match=r"width and layers must .* 1, got \{'layers': 0\}"):
        transformer((8,), 10, layers=0)
    with pytest.raises(ValueError, match="heads must divide the width 16, got 3"):
        transformer((8,), 10, width=16, heads=3)
    with pytest.raises(TypeError, match="x must be integer tokens, got float32"):
        model.apply(start, jnp.zeros((2, LENGTH)), train=False)
    with pytest.raises(ValueError, match="x must have at most 6 tokens, got 7"):
        model.apply(start, jnp.zeros((2, 7), jnp.int32), train=False)


def test_the_command_takes_it_if_every_token_has_a_target() -> None:
    """If a window has one, it takes the LSTM."""
    x, task = windows(10), fs.tasks.next_token(VOCABULARY)
    each = from_arrays("mine", x, np.roll(x, -1, axis=1).astype(int), scale=False, task=task)
    assert model_for(each) == "transformer"
    load_model("transformer", each)
    with pytest.raises(ValueError, match=r"--model lstm: .* outputs \[batch, 6, 10\]"):
        load_model("lstm", each)
    one = from_arrays("mine", x, x[:, 0].astype(int), scale=False, classes=VOCABULARY)
    assert model_for(one) == "lstm"


class Plain(oracle.Oracle):
    """Clients whose model is a list of leaves, trained by JAX's gradient of what is by hand."""

    def minibatch(self, layers: Any, client: int, mine: np.ndarray, key: Any) -> tuple[float, Any]:
        del client, key
        each = [self.gradient(layers, self.data.x[row], self.data.y[row]) for row in mine]
        losses, grads = zip(*each, strict=True)
        means = [np.mean(leaves, axis=0) for leaves in zip(*grads, strict=True)]
        return float(np.mean(losses)), means

    @functools.cached_property
    def gradient(self) -> Any:
        def loss(leaves: Any, window: Any, targets: Any) -> Any:
            params = jax.tree.unflatten(jax.tree.structure(self.initial.params), leaves)
            logits = by_hand(params, window, jnp)
            surprise = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(LENGTH), targets]
            return jnp.mean(surprise, where=targets >= 0)

        return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
def test_fedavg_trains_it(model: fs.Model, start: fs.Variables) -> None:
    """Unequal clients, three of five in a round, padded windows: as a plain loop by hand."""
    text = np.random.default_rng(5).integers(0, VOCABULARY, (sum(SIZES), LENGTH + 1))
    x, y = text[:, :-1].astype(np.uint8), text[:, 1:].astype(np.int32)
    for row, real in ((2, 3), (7, 1), (14, 5)):
        y[row, real:] = -1
    owners = fs.partition.partition_from_lists(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1]))
    data = fs.client_data(x, y, owners)
    local = fs.local_sgd(
        fs.empirical_risk(model, fs.tasks.next_token(VOCABULARY).loss),
        optax.sgd(LR),
        batch_size=BATCH,
        epochs=2,
    )
    execution = fs.make_execution(devices=1)
    algorithm = fs.fedavg(local, clients_per_round=COHORT).on(execution)
    ours = play(algorithm, model._replace(init=lambda key: start), data, ROUNDS)
    slow = Plain(data, start, LR, 0.0, BATCH, 2)
    server = [np.asarray(w) for w in jax.tree.leaves(start.params)]
    for t, state in enumerate(ours.servers):
        cohort = slow.draw(t, COHORT, [])
        models = [slow.train(t, k, server) for k in cohort]
        server = oracle.average(models, [float(SIZES[k]) for k in cohort])
        assert_trees(jax.tree.leaves(state.params), server, rtol=1e-3, atol=2e-5)
    assert largest_change(ours.servers[-1], start) > 0.1
