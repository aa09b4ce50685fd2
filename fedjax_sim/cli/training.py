"""The settings of the local update."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fedjax_sim.base.registry import UnknownNameError
from fedjax_sim.cli.defaults import MOMENTUM, by_dataset
from fedjax_sim.cli.rates import CONSTANT, TEXTS, schedule
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.models import MODELS

LastBatch = Literal["keep", "drop", "refill"]
Precision = Literal["f32", "bf16"]
OptimizerState = Literal["reset", "keep"]
Optimizer = Literal["sgd", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "yogi"]
WITH_MOMENTUM = ("sgd", "nesterov")


@dataclasses.dataclass(frozen=True)
class Training(Group):
    """The local update, the same for all algorithms.

    Attributes:
        model: a name in ``MODELS``, or ``package.module:factory``; None for one by the shape of a
          sample.
        epochs: E.
        batch_size: B.
        optimizer: the clients', by optax's names.
        optimizer_state: see :func:`fedjax_sim.local.local_sgd`.
        lr: its η.
        lr_schedule: see :mod:`fedjax_sim.cli.rates`.
        momentum: of SGD; None of other optimisers.
        weight_decay: of all weights, see :func:`fedjax_sim.cli.local.optimizer_of`.
        l2: of :func:`fedjax_sim.objective.empirical_risk`.
        last_batch: see :func:`fedjax_sim.local.local_sgd`.
        precision: bf16: see :func:`fedjax_sim.models.with_compute_dtype`.
    """

    title: ClassVar[str] = "local training"

    model: str | None = by_dataset(
        "model",
        lambda: (
            f"one of {', '.join(MODELS)}, or package.module:factory with factory(shape, classes) "
            "-> Model or flax.linen module, factory(shape, classes, rngs) -> flax.nnx module"
        ),
        metavar="NAME",
        convert=lambda text: _model(text),
    )
    epochs: float = by_dataset("epochs", "local epochs a round", above=0, at_most=10_000)
    batch_size: int = setting(16, "samples in a minibatch", at_least=1)
    optimizer: Optimizer = setting("sgd", "the clients', by optax's names")
    optimizer_state: OptimizerState = setting(
        "reset",
        "its momentum and the like, at the start of a visit: reset; or keep: what the client had "
        "at the end of its last visit. Methods that are defined by one of them have that",
    )
    lr: float = by_dataset("lr", "learning rate; the defaults are for SGD", above=0)
    lr_schedule: str = setting(
        CONSTANT,
        f"factor of --lr by the round: {TEXTS}, or several joined by *; end is the factor at the "
        "last round",
        metavar="TEXT",
        convert=schedule,
    )
    momentum: float | None = setting(
        None,
        "of sgd and nesterov",
        shown="0.9; with sgd 0 for methods with a momentum or gradient of their own, whose --lr is "
        "ten times the data set's then",
        at_least=0,
        below=1,
    )
    weight_decay: float = setting(
        0.0,
        "X times the weights, all of them, joins every gradient; with adamw X times the rate times "
        "the weights is taken off every step. The loss that is told lacks it",
        at_least=0,
    )
    l2: float = setting(
        0.0,
        "regularisation: X/2 times the squared norm of matrices and kernels alone joins the loss, "
        "the one that is told too",
        at_least=0,
    )
    last_batch: LastBatch = setting("keep", "what becomes of an epoch's short last minibatch")
    precision: Precision = setting("f32", "what the network computes in; its weights are f32")

    def __post_init__(self) -> None:
        """Refuses settings that the optimiser does not have."""
        if self.optimizer in WITH_MOMENTUM:
            self._default("momentum", MOMENTUM)
        elif self.momentum is not None:
            raise ValueError(
                f"--momentum is for --optimizer {' or '.join(WITH_MOMENTUM)}, not {self.optimizer}"
            )
        if self.optimizer == "nesterov" and not self.momentum:
            raise ValueError("--momentum must be above 0 for --optimizer nesterov, or it is sgd")
        if self.optimizer == "adamw" and not self.weight_decay:
            raise ValueError("--weight-decay must be above 0 for --optimizer adamw, or it is adam")

    def with_own(self, own: Mapping[str, Any]) -> Training:
        """With a method's own settings; a momentum that its own optimiser lacks is left out."""
        known = dict(own)
        if known.get("optimizer", self.optimizer) not in WITH_MOMENTUM:
            known.setdefault("momentum", None)
        return dataclasses.replace(self, **known)


def _model(text: str) -> str:
    """Returns the text if it names a model."""
    try:
        MODELS.resolve(text)
    except UnknownNameError as error:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(
            f"{error}; use one of {known}, or package.module:factory"
        ) from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
