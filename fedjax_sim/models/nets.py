"""The papers' networks, as functions of the input shape and the number of classes.

Max pooling commutes with ReLU; applied first, it leaves ReLU a quarter of the entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_sim.base import Array, Model
from fedjax_sim.models.adapters import from_linen
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
