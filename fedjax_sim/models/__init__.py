"""Models: pairs of pure functions, the papers' networks, adapters for flax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedjax_sim.base import Model
from fedjax_sim.models.adapters import from_linen, from_nnx, with_scaling
from fedjax_sim.models.lstm import lstm
from fedjax_sim.models.mobilenet import mobilenet_v2, mobilenet_v2_tail, mobilenet_v2_trunk
from fedjax_sim.models.nets import cifar_cnn, fashion_cnn, ffn, logistic, mlp, mnist_cnn, two_conv
from fedjax_sim.models.resnet import resnet20

MODELS: Mapping[str, Callable[..., Model]] = MappingProxyType(
    {
        "logistic": logistic,
        "ffn": ffn,
        "mlp": mlp,
        "mnist_cnn": mnist_cnn,
        "fashion_cnn": fashion_cnn,
        "cifar_cnn": cifar_cnn,
        "two_conv": two_conv,
        "resnet20": resnet20,
        "mobilenet_v2": mobilenet_v2,
        "lstm": lstm,
    }
)

SCALES_ITSELF = frozenset({"mobilenet_v2"})
"""Those of MODELS that take inputs as they are stored; the others want them standardised."""

__all__ = [
    "MODELS",
    "SCALES_ITSELF",
    "Model",
    "cifar_cnn",
    "fashion_cnn",
    "ffn",
    "from_linen",
    "from_nnx",
    "logistic",
    "lstm",
    "mlp",
    "mnist_cnn",
    "mobilenet_v2",
    "mobilenet_v2_tail",
    "mobilenet_v2_trunk",
    "resnet20",
    "two_conv",
    "with_scaling",
]
