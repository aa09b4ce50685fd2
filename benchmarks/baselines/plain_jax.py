"""What a competent JAX user writes first: vmap over the cohort of a scan over padded steps.

Every client is padded to the largest client of the population, padded samples are masked out of the
loss and all-padding steps leave the model as it was. One device, one jitted call per round.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.workloads import (
    BOTTLENECKS,
    CLASSES,
    SEED,
    SIDE,
    STEM,
    TOP,
    VOCABULARY,
    Net,
    Timing,
    Workload,
)

Variables = Any


class Mlp(nn.Module):
    """Dense layers with ReLU between them; no hidden layer is logistic regression."""

    hidden: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of flat inputs."""
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


class Cnn(nn.Module):
    """Two VALID convolutions, one pooling, two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


class BatchNormCnn(nn.Module):
    """Three blocks of two conv-BatchNorm-relu and a pooling, two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images, normalised by the statistics of the batch."""
        for width in (32, 64, 128):
            for _ in range(2):
                x = nn.Conv(width, (3, 3))(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES)(x)


class Lstm(nn.Module):
    """Embedding, two LSTM layers, a dense layer on the last step."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of windows of tokens."""
        x = nn.Embed(VOCABULARY, 8)(x)
        for _ in range(2):
            hidden: Any = nn.RNN(nn.OptimizedLSTMCell(256))(x)  # with its carry, if asked for
            x = hidden
        return nn.Dense(VOCABULARY)(x[:, -1])


class MobileTrunk(nn.Module):
    """The layers of MobileNetV2 that are frozen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Features of a batch of images in [0, 1], enlarged."""
        x = jax.image.resize(2 * x - 1, (x.shape[0], SIDE, SIDE, 3), "bilinear")
        x = nn.relu6(nn.Conv(STEM, (3, 3), strides=2)(x))
        for expansion, channels, stride in BOTTLENECKS[:-1]:
            inner = expansion * x.shape[-1]
            y = x if expansion == 1 else nn.relu6(nn.Conv(inner, (1, 1))(x))
            y = nn.relu6(nn.Conv(inner, (3, 3), strides=stride, feature_group_count=inner)(y))
            y = nn.Conv(channels, (1, 1))(y)
            x = x + y if x.shape == y.shape else y
        return x


class MobileTail(nn.Module):
    """The layers of MobileNetV2 that train."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of the trunk's features."""

        def norm(x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

        inner, channels = 6 * x.shape[-1], BOTTLENECKS[-1][1]
        x = nn.relu6(norm(nn.Conv(inner, (1, 1), use_bias=False)(x)))
        x = nn.Conv(inner, (3, 3), feature_group_count=inner, use_bias=False)(x)
        x = norm(nn.Conv(channels, (1, 1), use_bias=False)(nn.relu6(norm(x))))
        x = nn.relu6(norm(nn.Conv(TOP, (1, 1), use_bias=False)(x)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


NETS: dict[Net, nn.Module] = {
    "mlp": Mlp((200, 200)),
    "logreg": Mlp(),
    "cnn": Cnn(),
    "bn_cnn": BatchNormCnn(),
    "lstm": Lstm(),
    "mobilenet": MobileTail(),
    "mobilenet_tail": MobileTail(),
}


def make_prepare(workload: Workload) -> Callable[[jax.Array], jax.Array]:
    """What becomes of the stored samples before they meet the layers that train."""
    if workload.net == "lstm":
        return lambda x: x.astype(jnp.int32)
    if workload.net != "mobilenet":
        return lambda x: x.astype(jnp.float32) / 255
    trunk, x = MobileTrunk(), jnp.zeros((1, *workload.shape))
    frozen = jax.jit(trunk.init)(jax.random.key(SEED), x)

    def features(x: jax.Array) -> jax.Array:
        out: Any = trunk.apply(frozen, x.astype(jnp.float32) / 255)
        return out

    return features


class Padded(NamedTuple):
    """Pooled samples and, per client, sample indices padded to the largest client `[N, T * B]`."""

    x: jax.Array
    y: jax.Array
    rows: jax.Array
    mask: jax.Array


def pad(workload: Workload) -> Padded:
    """Put the samples and the padded index of every client on the device."""
    data = workload.federation()
    width = -(-int(data.sizes.max()) // workload.batch) * workload.batch
    mask = np.arange(width) < data.sizes[:, None]
    index = np.zeros(mask.shape, np.int32)
    index[mask] = data.index  # row-major order of the mask is the order of the ragged list
    return Padded(*(jnp.asarray(a) for a in (data.x, data.y, index, mask)))


def make_round(workload: Workload) -> Callable[..., Variables]:
    """One round of FedAvg: `(variables, data, cohort, round) -> variables`."""
    net, prepare = NETS[workload.net], make_prepare(workload)
    sgd = optax.sgd(workload.lr, workload.momentum or None)

    def loss_of(
        params: Variables, state: Variables, x: jax.Array, y: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, Variables]:
        logits, state = net.apply({"params": params, **state}, x, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1), state

    def local(variables: Variables, data: Padded, client: jax.Array, key: jax.Array) -> Variables:
        index, mask = data.rows[client], data.mask[client]
        order = jnp.argsort(jnp.where(mask, jax.random.uniform(key, mask.shape), 2.0))

        def step(carry: Variables, batch: tuple[jax.Array, jax.Array]) -> tuple[Variables, None]:
            (params, state), opt_state = carry
            rows, real = batch
            x = prepare(data.x[rows])
            grad, new_state = jax.grad(loss_of, has_aux=True)(params, state, x, data.y[rows], real)
            updates, new_opt_state = sgd.update(grad, opt_state, params)
            new = (optax.apply_updates(params, updates), new_state), new_opt_state
            return jax.tree.map(lambda a, b: jnp.where(real.any(), a, b), new, carry), None

        steps = (index[order].reshape(-1, workload.batch), mask.reshape(-1, workload.batch))
        (variables, _), _ = jax.lax.scan(step, (variables, sgd.init(variables[0])), steps)
        return variables

    def one_round(
        variables: Variables, data: Padded, cohort: jax.Array, number: jax.Array
    ) -> Variables:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(SEED), number), len(cohort))
        trained = jax.vmap(local, (None, None, 0, 0))(variables, data, cohort, keys)
        sizes = data.mask[cohort].sum(1).astype(jnp.float32)
        return jax.tree.map(lambda a: jnp.tensordot(sizes / sizes.sum(), a, 1), trained)

    return one_round


@lru_cache(maxsize=1)
def _program(workload: Workload) -> tuple[Callable[..., Variables], Variables, Padded, float]:
    data = pad(workload)
    x = make_prepare(workload)(jnp.zeros((1, *workload.shape), jnp.uint8))
    state = dict(NETS[workload.net].init(jax.random.key(SEED), x))
    variables = (state.pop("params"), state)
    began = time.perf_counter()
    example = (variables, data, workload.cohorts(1)[0], np.int32(0))
    program = jax.jit(make_round(workload)).lower(*example).compile()
    return program, variables, data, time.perf_counter() - began


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Time `rounds` rounds from the initial model on one device; `devices` is not used."""
    del devices
    compiled_before = _program.cache_info().misses
    program, variables, data, compile_seconds = _program(workload)
    cohorts = workload.cohorts(rounds)
    began = time.perf_counter()
    for number, cohort in enumerate(cohorts):
        variables = program(variables, data, cohort, np.int32(number))
    jax.block_until_ready(variables)
    seconds = time.perf_counter() - began
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(variables)):
        raise FloatingPointError(f"{workload.name}: the trained model is not finite")
    fresh = _program.cache_info().misses > compiled_before
    samples = int(workload.federation().sizes[cohorts].sum())
    note = f"1 device, {jax.devices()[0].device_kind}"
    return Timing(seconds, samples, compile_seconds if fresh else 0.0, note)
