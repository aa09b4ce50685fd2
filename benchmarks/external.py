"""Data and networks of published experiments, for the studies benchmarks/external_*.toml."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax

import fedjax_sim as fs
from benchmarks.reproduce.common import thesis_data
from fedjax_sim.models.layers import Conv, Dense, max_pool

fashion_mnist = functools.partial(thesis_data, "fashion_mnist", None)
"""Fashion-MNIST with pixels in 0..1."""


class _Convolutions(nn.Module):
    """Two 5x5 convolutions, each pooled, and dense layers."""

    features: Sequence[int]
    padding: int
    widths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in self.features:
            x = jax.nn.relu(max_pool(Conv(features, size=5, padding=self.padding)(x)))
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = jax.nn.relu(Dense(width)(x))
        return Dense(self.classes)(x)


def cnn(shape: Sequence[int], classes: int) -> fs.Model:
    """Returns the CNN of McMahan et al. (2017): 1,663,370 parameters on MNIST."""
    return fs.models.from_linen(_Convolutions((32, 64), 2, (512,), classes), shape)


def lenet(shape: Sequence[int], classes: int) -> fs.Model:
    """Returns the LeNet of NIID-Bench: 44,426 parameters on MNIST."""
    return fs.models.from_linen(_Convolutions((6, 16), 0, (120, 84), classes), shape)
