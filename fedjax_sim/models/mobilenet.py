"""MobileNetV2 with a frozen pretrained trunk: only the last layers train and are sent.

The trunk is not among a model's variables: all clients, slots and seeds share the same constants.
Its BatchNorms use pretraining statistics, so the trunk's output for an image never changes and can
be computed once for a whole data set: :func:`fedjax_sim.models.mobilenet_v2_trunk`,
:func:`fedjax_sim.models.mobilenet_v2_tail`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fedjax_sim.base import Array, Model, Variables
from fedjax_sim.base.files import read_npz
from fedjax_sim.models.adapters import from_linen
from fedjax_sim.models.convolutions import conv, depthwise
from fedjax_sim.models.layers import BatchNorm, Dense, fan_in_uniform
from fedjax_sim.models.wrappers import with_inputs

Weights = str | os.PathLike[str] | Mapping[str, ArrayLike] | None
"""An .npz file, or its arrays, of any width, by their Keras names
(``keras.applications.MobileNetV2(include_top=False)``); None for the only .npz file in the folder
``mobilenet_v2`` of FEDJAX_SIM_DATA_DIR."""

Layer = Callable[[str, Array], Array]
"""``(name, x) -> y``: applies the convolution of that name and its BatchNorm."""

EPSILON = 1e-3  # in every BatchNorm
FROZEN = ("expanded_conv", *(f"block_{i}" for i in range(1, 16)))
LAST = "block_16"
NARROWING = ("block_1", "block_3", "block_6", "block_13")  # stride 2, like Conv1
TRAINED = (*(f"{LAST}_{part}" for part in ("expand", "depthwise", "project")), "Conv_1")


def mobilenet_v2(
    shape: Sequence[int],
    classes: int,
    weights: Weights = None,
    size: int = 224,
    fresh_tail: bool = False,
) -> Model:
    """Returns MobileNetV2 on raw images; the last bottleneck and all later layers train.

    The model itself scales images to -1 … 1, as in pretraining, and resizes them. Trained
    BatchNorms use the statistics of the minibatch's real rows; their running statistics, for
    evaluation, are part of the model that is sent. RADFed's code also crops and flips images,
    scales them by the mean and deviation of CIFAR-10, applies dropout before the classifier, and
    uses minibatch statistics in the frozen BatchNorms.

    Args:
        shape: ``(H, W, 3)`` of an image; values are in 0 … 255.
        classes: M, the number of classes.
        weights: pretrained weights: an .npz file or its arrays, of any width, by their Keras names;
            None for the only .npz file in the folder ``mobilenet_v2`` of FEDJAX_SIM_DATA_DIR.
        size: side of the square to which images are resized (bilinear), a multiple of 32.
        fresh_tail: initialise the trained layers at random, as in RADFed's code, instead of with
            pretrained weights.

    Returns:
        A model with ``f32[B, M]`` logits.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if shape, size or weights do not fit.

    Source: Sandler, Howard, Zhu, Zhmoginov, Chen 2018 <https://arxiv.org/abs/1801.04381>; Xue,
    Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B (what trains); the authors'
    code, <https://github.com/yxsub/RADFed>; Keras for the names of the weights, Chollet et al. 2015
    <https://keras.io>.
    """
    _check_shape("shape", shape, 3)
    arrays = load_weights(weights)
    trunk, channels = _trunk(arrays, size)
    tail = mobilenet_v2_tail((size // 32, size // 32, channels), classes, arrays, fresh_tail)

    def maps(variables: Variables, x: Array) -> Array:
        # The trunk computes in float32.
        return trunk(x).astype(jax.tree.leaves(variables.params)[0].dtype)

    return with_inputs(tail, maps)


def mobilenet_v2_trunk(
    weights: Weights = None, size: int = 224
) -> Callable[[ArrayLike], NDArray[np.float32]]:
    """Returns the frozen part of :func:`fedjax_sim.models.mobilenet_v2`, for whole data sets.

    Args:
        weights: pretrained weights, as in ``mobilenet_v2``.
        size: side of the resized images, as in ``mobilenet_v2``.

    Returns:
        ``f(images [n, H, W, 3]) -> f32[n, size / 32, size / 32, C]``, on all devices of this
        process. At size 224 and width 0.35 (C = 56), an image takes 11 KB.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if size or weights do not fit.
    """
    trunk, _ = _trunk(load_weights(weights), size)
    mesh = Mesh(np.array(jax.local_devices()), ("images",))  # each process computes all images
    split = PartitionSpec("images")
    program = jax.jit(jax.shard_map(trunk, mesh=mesh, in_specs=split, out_specs=split))
    rows = 64 * mesh.size

    def features(images: ArrayLike) -> NDArray[np.float32]:
        images = np.asarray(images)
        _check_shape("an image", images.shape[1:], 3)
        done = []
        for begin in range(0, len(images), rows):
            x = images[begin : begin + rows]
            padding = [(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)]
            done.append(np.asarray(program(np.pad(x, padding)))[: len(x)])
        return np.concatenate(done)

    return features


def mobilenet_v2_tail(
    shape: Sequence[int], classes: int, weights: Weights = None, fresh_tail: bool = False
) -> Model:
    """Returns the trained part of :func:`fedjax_sim.models.mobilenet_v2`.

    Args:
        shape: ``(h, w, C)`` of the trunk's output.
        classes: M, the number of classes.
        weights: pretrained weights, as in ``mobilenet_v2``.
        fresh_tail: initialise at random, as in ``mobilenet_v2``.

    Returns:
        A model with ``f32[B, M]`` logits.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if shape or weights do not fit.
    """
    arrays = load_weights(weights)
    features = {name: _kernel(arrays, name).shape[-1] for name in TRAINED}
    channels = _kernel(arrays, TRAINED[0]).shape[0]
    _check_shape("shape", shape, channels)
    model = from_linen(_Tail(features, classes), shape)
    params, stats = {}, {}
    for name in TRAINED:
        gamma, beta, mean, var = _norm(arrays, name)
        norm = {"scale": gamma, "bias": beta}
        params[name] = {"kernel": _kernel(arrays, name), "BatchNorm_0": norm}
        stats[name] = {"BatchNorm_0": {"mean": mean, "var": var}}

    def init(key: Array) -> Variables:
        drawn = model.init(key)
        if fresh_tail:
            return drawn
        pretrained = Variables({**drawn.params, **params}, {"batch_stats": stats})
        return jax.tree.map(jnp.asarray, pretrained)

    return model._replace(init=init)


def _check_shape(name: str, shape: Sequence[int], channels: int) -> None:
    if len(shape) != 3 or shape[-1] != channels:
        raise ValueError(f"{name} must be (height, width, {channels}), got {tuple(shape)}")


def load_weights(weights: Weights) -> Mapping[str, NDArray[np.float32]]:
    """Reads the arrays of a pretrained MobileNetV2, see :data:`Weights`.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if it is not a .npz file.
    """
    if isinstance(weights, Mapping):
        return {name: np.asarray(a, np.float32) for name, a in weights.items()}
    path = _default_file() if weights is None else Path(weights).expanduser()
    return read_npz(path)


def _default_file() -> Path:
    root = os.environ.get("FEDJAX_SIM_DATA_DIR")
    folder = Path(root or "").expanduser() / "mobilenet_v2"
    files = sorted(folder.glob("*.npz")) if root else []
    if len(files) == 1:
        return files[0]
    found = f"{folder} holds {len(files)}" if root else "which is not set"
    raise FileNotFoundError(
        "mobilenet_v2 needs pretrained weights: put one .npz file (Keras' arrays, by name) into "
        f"the folder mobilenet_v2 of FEDJAX_SIM_DATA_DIR ({found}), or pass weights=FILE"
    )


def _array(arrays: Mapping[str, NDArray[np.float32]], name: str) -> NDArray[np.float32]:
    if name not in arrays:
        raise ValueError(
            f"weights must hold the arrays of keras.applications.MobileNetV2(include_top=False) "
            f"by name; {name!r} is missing"
        )
    return arrays[name]


def _kernel(arrays: Mapping[str, NDArray[np.float32]], name: str) -> NDArray[np.float32]:
    """Returns a kernel: ``[C, O]``, or depthwise ``[3, 3, C]``, or Conv1's ``[3, 3, 3, O]``."""
    if name.endswith("depthwise"):
        return _array(arrays, f"{name}/depthwise_kernel")[..., 0]
    kernel = _array(arrays, f"{name}/kernel")
    return kernel if name == "Conv1" else kernel[0, 0]


def _norm(arrays: Mapping[str, NDArray[np.float32]], name: str) -> list[NDArray[np.float32]]:
    """Returns γ, β, μ and σ² of the BatchNorm after a convolution."""
    norm = {"Conv1": "bn_Conv1", "Conv_1": "Conv_1_bn"}.get(name, f"{name}_BN")
    leaves = ("gamma", "beta", "moving_mean", "moving_variance")
    return [_array(arrays, f"{norm}/{leaf}") for leaf in leaves]


def _bottleneck(layer: Layer, block: str, x: Array) -> Array:
    y = x if block == FROZEN[0] else jax.nn.relu6(layer(f"{block}_expand", x))
    y = jax.nn.relu6(layer(f"{block}_depthwise", y))
    y = layer(f"{block}_project", y)
    return x + y if x.shape == y.shape else y


def _trunk(
    arrays: Mapping[str, NDArray[np.float32]], size: int
) -> tuple[Callable[[Array], Array], int]:
    """Returns ``f(images [B, H, W, 3]) -> f32[B, size / 32, size / 32, C]``, and C."""
    if size < 32 or size % 32:
        raise ValueError(f"size must be a multiple of 32, got {size}")
    parts = [f"{b}_{part}" for b in FROZEN for part in ("expand", "depthwise", "project")]
    parts.remove(f"{FROZEN[0]}_expand")
    # A BatchNorm with fixed statistics is an affine map, folded into the preceding convolution.
    folded = {}
    for name in ("Conv1", *parts):
        gamma, beta, mean, var = _norm(arrays, name)
        factor = gamma / np.sqrt(var + EPSILON)
        bias = (beta - mean * factor).reshape(1, 1, 1, -1)
        folded[name] = _kernel(arrays, name) * factor, bias

    def layer(name: str, x: Array) -> Array:
        kernel, bias = folded[name]
        stride = 2 if name == "Conv1" or name.removesuffix("_depthwise") in NARROWING else 1
        padding = ((0, 1), (0, 1)) if stride == 2 else ((1, 1), (1, 1))
        if name == "Conv1":  # "direct", as all clients share its kernel
            return conv(x, jnp.asarray(kernel), padding, "direct", stride=stride) + bias
        if name.endswith("depthwise"):
            return depthwise(x, jnp.asarray(kernel), padding, stride=stride) + bias
        return x @ kernel + bias

    def forward(images: Array) -> Array:
        x = images.astype(jnp.float32) / 127.5 - 1
        x = jax.image.resize(x, (len(x), size, size, 3), "bilinear")
        x = jax.nn.relu6(layer("Conv1", x))
        for block in FROZEN:
            x = _bottleneck(layer, block, x)
        return x

    def in_pairs(images: Array) -> Array:
        return jax.lax.map(lambda image: forward(image[None])[0], images, batch_size=2)

    def trunk(images: Array) -> Array:
        # Two images at a time fit in a CPU's cache: 1.3 to 1.5 times as fast as ten.
        maps: Array = jax.lax.platform_dependent(images, cpu=in_pairs, default=forward)
        return maps

    return trunk, folded[parts[-1]][0].shape[-1]


class _ConvNorm(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        c = x.shape[-1]
        if self.name is not None and self.name.endswith("depthwise"):
            kernel = self.param("kernel", fan_in_uniform(9), (3, 3, c))
            x = depthwise(x, kernel, ((1, 1), (1, 1)))
        else:
            x = x @ self.param("kernel", fan_in_uniform(c), (c, self.features))
        return BatchNorm(EPSILON)(x, train=train)


class _Tail(nn.Module):
    features: Mapping[str, int]
    classes: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        def layer(name: str, x: Array) -> Any:
            return _ConvNorm(self.features[name], name=name)(x, train=train)

        x = jax.nn.relu6(layer("Conv_1", _bottleneck(layer, LAST, x)))
        return Dense(self.classes)(jnp.mean(x, axis=(1, 2)))
