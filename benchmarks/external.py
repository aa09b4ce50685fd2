"""The network of McMahan et al. (2017) for MNIST, for the study benchmarks/external.toml."""

from collections.abc import Sequence

import flax.linen as nn
import jax

import fedjax_sim as fs
from fedjax_sim.models.layers import Conv, Dense, max_pool


class _Cnn(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = jax.nn.relu(max_pool(Conv(features, size=5, padding=2)(x)))
        x = jax.nn.relu(Dense(512)(x.reshape(len(x), -1)))
        return Dense(self.classes)(x)


def cnn(shape: Sequence[int], classes: int) -> fs.Model:
    """Returns convolutions 5x5x32 and 5x5x64, each pooled, and 512 units: 1,663,370 parameters."""
    return fs.models.from_linen(_Cnn(classes), shape)
