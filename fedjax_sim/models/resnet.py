"""Residual networks without normalisation."""

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
    channels with zeros.

    Attributes:
        features: number of output channels.
        stride: stride of the first convolution.
        branches: L, the number of residual branches in the whole network.
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
    """A residual network of 6n + 2 layers for small images, with Fixup.

    Attributes:
        classes: M, the number of classes.
        blocks: n, the number of blocks per stage.
    """

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
