"""Models as pairs of pure functions: the papers' networks, and adapters for flax modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedjax_sim.base import Model
from fedjax_sim.base.registry import Registry
from fedjax_sim.models._lstm import lstm
from fedjax_sim.models._transformer import transformer
from fedjax_sim.models.adapters import from_linen
from fedjax_sim.models.factories import WANTED, is_factory, made
from fedjax_sim.models.mobilenet import mobilenet_v2, mobilenet_v2_tail, mobilenet_v2_trunk
from fedjax_sim.models.nets import (
    cifar_cnn,
    fashion_cnn,
    ffn,
    logistic,
    mlp,
    mnist_cnn,
    resnet20,
    two_conv,
)
from fedjax_sim.models.weights import gpt2, load_weights, save_weights, starting_from
from fedjax_sim.models.wrappers import lora, with_compute_dtype, with_frozen, with_scaling

if TYPE_CHECKING:
    from fedjax_sim.models._nnx import from_nnx

_NETS = (
    *(logistic, ffn, mlp, mnist_cnn, fashion_cnn, cifar_cnn, two_conv),
    *(resnet20, mobilenet_v2, lstm, transformer, gpt2),
)

MODELS: Registry[Callable[..., Model]] = Registry(
    "model",
    wanted=WANTED,
    fits=is_factory,
    makes=made,
    own={net.__name__: net for net in _NETS} | {"linear": logistic},
)
"""Models by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""

SCALES_ITSELF = frozenset({"mobilenet_v2"})
"""Models that take raw inputs; all others expect standardised inputs."""

__all__ = [
    "MODELS",
    "cifar_cnn",
    "fashion_cnn",
    "ffn",
    "from_linen",
    "from_nnx",
    "gpt2",
    "load_weights",
    "logistic",
    "lora",
    "lstm",
    "mlp",
    "mnist_cnn",
    "mobilenet_v2",
    "mobilenet_v2_tail",
    "mobilenet_v2_trunk",
    "resnet20",
    "save_weights",
    "starting_from",
    "transformer",
    "two_conv",
    "with_compute_dtype",
    "with_frozen",
    "with_scaling",
]


def __getattr__(name: str) -> Any:
    if name != "from_nnx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedjax_sim.models import _nnx  # importing flax.nnx takes a third of a second

    return _nnx.from_nnx
