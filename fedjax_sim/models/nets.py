"""The papers' networks, as functions of the input shape and the number of classes.

Max pooling commutes with ReLU; applied first, it leaves ReLU a quarter of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Model
from fedjax_sim.models.adapters import from_linen
from fedjax_sim.models.convolutions import conv
from fedjax_sim.models.layers import BatchNorm, Conv, Dense, Dropout, max_pool


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


class _Dense(nn.Module):
    widths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = _flat(x)
        for width in self.widths:
            x = jax.nn.relu(Dense(width)(x))
        return Dense(self.classes)(x)


class _MnistCNN(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        x = jax.nn.relu(max_pool(Conv(10, size=5)(x)))
        x = jax.nn.relu(max_pool(Dropout()(Conv(20, size=5)(x), train=train)))
        x = Dropout()(jax.nn.relu(Dense(50)(_flat(x))), train=train)
        return Dense(self.classes)(x)


class _FashionCNN(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        for features in (16, 32):
            x = BatchNorm()(Conv(features, size=5, padding=2)(x), train=train)
            x = jax.nn.relu(max_pool(x))
        return Dense(self.classes)(_flat(x))


class _CifarCNN(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        for features in (32, 64, 128):
            x = BatchNorm()(Conv(features, padding=1)(x), train=train)
            x = Conv(features, padding=1)(jax.nn.relu(x))
            x = jax.nn.relu(max_pool(BatchNorm()(x, train=train)))
        return Dense(self.classes)(jax.nn.relu(Dense(128)(_flat(x))))


class _FltkCifarCNN(nn.Module):
    """The layers of :class:`_CifarCNN` in FLTK's order, with its dense layers and softmax."""

    classes: int

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        for features in (32, 64, 128):
            for _ in range(2):
                x = BatchNorm()(jax.nn.relu(Conv(features, padding=1)(x)), train=train)
            x = max_pool(x)
        return jax.nn.softmax(Dense(self.classes)(Dense(128)(_flat(x))))


class _TwoConv(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = jax.nn.relu(Conv(32)(x))
        x = jax.nn.relu(max_pool(Conv(64)(x)))
        return Dense(self.classes)(jax.nn.relu(Dense(128)(_flat(x))))


def logistic(shape: Sequence[int], classes: int) -> Model:
    """Returns multinomial logistic regression.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.
    """
    return from_linen(_Dense((), classes), shape)


def mlp(shape: Sequence[int], classes: int, widths: Sequence[int] = (200, 200)) -> Model:
    """Returns an MLP with two hidden layers of 200 ReLU units, 199,210 parameters on MNIST.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.
        widths: number of units of each hidden layer.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017 <https://arxiv.org/abs/1602.05629>.
    """
    return from_linen(_Dense(tuple(widths), classes), shape)


def ffn(shape: Sequence[int], classes: int) -> Model:
    """Returns RADFed's network for Covertype: two hidden layers of 64 ReLU units.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B.
    """
    return mlp(shape, classes, (64, 64))


def mnist_cnn(shape: Sequence[int], classes: int) -> Model:
    """Returns two convolutions and two dense layers with dropout, 21,840 parameters on MNIST.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: Cornelis 2022 <cornelis2022federated>, appendix A, listing 1.
    """
    return from_linen(_MnistCNN(classes), shape)


def fashion_cnn(shape: Sequence[int], classes: int) -> Model:
    """Returns two convolutions with BatchNorm and a dense layer, for Fashion-MNIST.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: Cornelis 2022 <cornelis2022federated>, appendix A, listing 2.
    """
    return from_linen(_FashionCNN(classes), shape)


def cifar_cnn(shape: Sequence[int], classes: int, *, as_fltk: bool = False) -> Model:
    """Returns six convolutions with BatchNorm and two dense layers, for CIFAR-10.

    The thesis lists the layers but not their connections. By default, each convolution is followed
    by BatchNorm and ReLU, with a ReLU between the dense layers, as is usual. FLTK, the code of the
    thesis, instead applies ReLU before BatchNorm, nothing between the dense layers, and a final
    softmax before a cross-entropy that includes a softmax itself. This bounds the gradients and
    slows down training.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.
        as_fltk: whether to connect the layers as FLTK does; the outputs are then probabilities, to
            be used as logits. FLTK also flips and crops CIFAR-10 images at random, which is not
            part of the model.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: Cornelis 2022 <cornelis2022federated>, appendix A, listing 3; Galjaard et al.
    <https://github.com/JMGaljaard/fltk-testbed>, ``fltk/nets/cifar_10_cnn.py`` (as_fltk).

    Example:
        >>> model = cifar_cnn((32, 32, 3), 10)
        >>> variables = jax.eval_shape(model.init, jax.random.key(0))
        >>> sum(weights.size for weights in jax.tree.leaves(variables.params))
        551466
    """
    return from_linen((_FltkCifarCNN if as_fltk else _CifarCNN)(classes), shape)


def two_conv(shape: Sequence[int], classes: int) -> Model:
    """Returns convolutions 3×3×32 and 3×3×64, max pooling and a dense layer of 128 units.

    Args:
        shape: shape of one input, without the batch axis.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: the benchmark network of pfl-research, Granqvist et al. 2024
    <https://arxiv.org/abs/2404.06430>, without dropout.
    """
    return from_linen(_TwoConv(classes), shape)


WIDTHS = (16, 32, 64)
"""Channels of the three stages."""


class _Bias(nn.Module):
    """A scalar bias, shared by all channels."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x + self.param("bias", nn.initializers.zeros, (), jnp.float32)


class _Conv(nn.Module):
    """3×3 convolution without bias."""

    features: int
    kernel_init: Any
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        return conv(x, kernel, ((1, 1), (1, 1)), stride=self.stride)


def _he(scale: float = 1.0) -> Any:
    """Returns an initialiser with variance ``2 scale² / fan_out``, normally distributed."""
    return nn.initializers.variance_scaling(2 * scale**2, "fan_out", "normal")


class FixupBlock(nn.Module):
    r"""A residual block, :math:`\max(0, s(x) + m\,F(x))` with two convolutions F, 0 at first.

    If the block reduces the image size, the shortcut s takes every second pixel and pads the new
    channels with zeros. The whole network has L branches.
    """

    features: int
    stride: int
    branches: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[B, H, W, C]`` -> ``[B, H / stride, W / stride, features]``."""
        # L^(-1/(2m-2)) with m = 2 layers per branch.
        first = _Conv(self.features, _he(1 / math.sqrt(self.branches)), self.stride)
        last = _Conv(self.features, nn.initializers.zeros)
        shifted = _Bias()(x)
        branch = jax.nn.relu(_Bias()(first(shifted)))
        branch = last(_Bias()(branch)) * self.param(
            "multiplier", nn.initializers.ones, (), jnp.float32
        )
        shortcut = x
        if self.stride > 1 or x.shape[-1] < self.features:
            shortcut = shifted[:, :: self.stride, :: self.stride]
            new = self.features - x.shape[-1]
            shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, new)))
        return jax.nn.relu(_Bias()(branch) + shortcut)


class FixupResNet(nn.Module):
    """A residual network of 6n + 2 layers for small images, with Fixup; n blocks per stage."""

    classes: int
    blocks: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[B, H, W, C]`` -> ``[B, classes]``."""
        x = jax.nn.relu(_Bias()(_Conv(WIDTHS[0], _he())(x)))
        for stage, features in enumerate(WIDTHS):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                x = FixupBlock(features, stride, self.blocks * len(WIDTHS))(x)
        x = _Bias()(jnp.mean(x, axis=(1, 2)))
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros)(x)


def resnet20(shape: Sequence[int], classes: int) -> Model:
    """Returns ResNet-20 with Fixup instead of BatchNorm, 268,393 parameters on CIFAR-10.

    Fixup: (1) the classifier and the last layer of each residual branch start at 0; (2) the other
    layers use the initialisation of He et al. 2015, scaled in branches by :math:`L^{-1/(2m-2)}`
    with L = 9 branches of m = 2 layers; (3) a scalar bias precedes each convolution, each
    activation and the classifier, and each branch has a scalar multiplier.

    Args:
        shape: ``(H, W, C)`` of an image.
        classes: M, the number of classes.

    Returns:
        A model with ``f32[B, M]`` logits.

    Source: He, Zhang, Ren, Sun 2016 <https://arxiv.org/abs/1512.03385>, section 4.2 (the network,
    0.27 M); He, Zhang, Ren, Sun, "Delving deep into rectifiers", 2015
    <https://arxiv.org/abs/1502.01852> (the initialisation); Zhang, Dauphin, Ma 2019
    <https://arxiv.org/abs/1901.09321>, section 3 (Fixup); the model of Ozdayi, Kantarcioglu, Iyer
    2020 <https://arxiv.org/abs/2010.15582>, section 4.1.
    """
    return from_linen(FixupResNet(classes, blocks=3), shape)
