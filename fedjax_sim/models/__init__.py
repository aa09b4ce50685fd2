"""Models: pairs of pure functions, the papers' networks, adapters for flax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedjax_sim.base import Model
from fedjax_sim.models.adapters import from_linen, from_nnx, with_scaling
from fedjax_sim.models.nets import cifar_cnn, fashion_cnn, logistic, mlp, mnist_cnn, two_conv

MODELS: Mapping[str, Callable[..., Model]] = MappingProxyType(
    {
        "logistic": logistic,
        "mlp": mlp,
        "mnist_cnn": mnist_cnn,
        "fashion_cnn": fashion_cnn,
        "cifar_cnn": cifar_cnn,
        "two_conv": two_conv,
    }
)

__all__ = [
    "MODELS",
    "Model",
    "cifar_cnn",
    "fashion_cnn",
    "from_linen",
    "from_nnx",
    "logistic",
    "mlp",
    "mnist_cnn",
    "two_conv",
    "with_scaling",
]
