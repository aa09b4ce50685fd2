"""The local update: its settings, the update itself, and its number of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import optax
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, LocalUpdate, Objective, Transform, calls
from fedjax_sim.base.registry import UnknownNameError
from fedjax_sim.cli.defaults import MOMENTUM, by_dataset
from fedjax_sim.cli.flags import offering
from fedjax_sim.cli.rates import CONSTANT, TEXTS, factor_by_round, schedule
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.client.local import local_sgd
from fedjax_sim.models import MODELS
from fedjax_sim.round import Algorithm

LastBatch = Literal["keep", "drop", "refill"]
Precision = Literal["f32", "bf16", "bf16_weights"]
OptimizerState = Literal["reset", "keep"]
Optimizer = Literal["sgd", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "yogi"]
WITH_MOMENTUM = ("sgd", "nesterov")


@dataclasses.dataclass(frozen=True)
class Training(Group):
    """The local update, the same for all algorithms."""

    title: ClassVar[str] = "local training"

    model: str | None = by_dataset(
        "model",
        lambda: (
            f"one of {', '.join(MODELS)}, or package.module:factory with factory(shape, classes) "
            "-> Model or flax.linen module, factory(shape, classes, rngs) -> flax.nnx module; "
            "settings in parentheses, such as transformer(width=64)"
        ),
        metavar="NAME",
        convert=lambda text: _model(text),
    )
    epochs: float = by_dataset("epochs", "local epochs per round", above=0, at_most=10_000)
    stragglers: float = setting(
        0.0,
        "probability that a client does fewer epochs in a round: 1 to E - 1, each equally likely",
        at_least=0,
        at_most=1,
    )
    batch_size: int = setting(16, "samples in a minibatch", at_least=1)
    optimizer: Optimizer = setting("sgd", "optimiser of the clients, by its name in optax")
    optimizer_state: OptimizerState = setting(
        "reset",
        "client optimiser state at the start of local training: reset it, or keep it from the "
        "client's previous round; some methods fix this",
    )
    lr: float = by_dataset("lr", "learning rate of the clients; the defaults are for SGD", above=0)
    lr_schedule: str = setting(
        CONSTANT,
        f"factor of --lr by the round: {TEXTS}, or several joined by *; end is the factor after "
        "the last round",
        metavar="TEXT",
        convert=schedule,
    )
    momentum: float | None = setting(
        None,
        "momentum of sgd and nesterov",
        shown="0.9; with sgd 0 for methods that have a momentum or gradient of their own, and "
        "--lr is then ten times the data set's default",
        at_least=0,
        below=1,
    )
    weight_decay: float = setting(
        0.0,
        "add X times all weights to every gradient; with adamw, subtract X times the learning "
        "rate times the weights in every step. The reported loss does not include it",
        at_least=0,
    )
    l2: float = setting(
        0.0,
        "add X/2 times the squared norm of matrices and kernels to the loss; the reported loss "
        "includes it",
        at_least=0,
    )
    last_batch: LastBatch = setting("keep", "how to handle the last, smaller minibatch of an epoch")
    precision: Precision = setting(
        "f32",
        "precision of the network's computations; bf16 keeps weights in f32, bf16_weights rounds "
        "them at random after each local step; the server's stay in f32",
    )

    def __post_init__(self) -> None:
        """Rejects settings that the optimiser does not have."""
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
        """Returns the settings with a method's own, without momentum if its optimiser has none."""
        known = dict(own)
        if known.get("optimizer", self.optimizer) not in WITH_MOMENTUM:
            known.setdefault("momentum", None)
        return dataclasses.replace(self, **known)


def _model(text: str) -> str:
    """Returns the text of a model after checking its name; its settings need the data."""
    try:
        MODELS.resolve(calls.as_call(calls.parse(text), text).name)
    except UnknownNameError as error:
        raise offering(error, [*MODELS, "package.module:factory"]) from error
    return text


def make_local(
    training: Training, objective: Objective, transforms: tuple[Transform, ...]
) -> LocalUpdate:
    """Returns the local update of all algorithms."""
    if training.stragglers and training.epochs <= 1:
        raise ValueError(f"--stragglers is for --epochs above 1, got {training.epochs:g}")
    return local_sgd(
        objective,
        optimizer_of(training),
        training.batch_size,
        training.epochs,
        training.last_batch,
        optimizer_state=training.optimizer_state,
        transforms=transforms,
        stragglers=training.stragglers,
        half_weights=training.precision == "bf16_weights",
    )


def optimizer_of(training: Training) -> optax.GradientTransformation:
    """Returns the clients' optimiser.

    Weight decay adds λ w to the gradient, as in ``torch.optim.SGD``; AdamW subtracts η λ w in every
    step, outside of its moments.
    """
    lr, decay = training.lr, training.weight_decay
    if training.optimizer == "adamw":
        return optax.adamw(lr, weight_decay=decay)
    made: optax.GradientTransformation
    if training.optimizer in WITH_MOMENTUM:
        nesterov = training.optimizer == "nesterov"
        made = optax.sgd(lr, momentum=training.momentum or None, nesterov=nesterov)
    else:
        made = getattr(optax, training.optimizer)(lr)
    return optax.chain(optax.add_decayed_weights(decay), made) if decay else made


def scheduled(
    training: Training, local: LocalUpdate, rounds: int, make: Callable[[LocalUpdate], Algorithm]
) -> Algorithm:
    """Returns the algorithm of a local update whose rate follows ``--lr-schedule``.

    The schedule spans the algorithm's rounds for ``rounds`` rounds of FedAvg.
    """
    made = make(local)
    if training.lr_schedule == CONSTANT:
        return made
    factor = factor_by_round(training.lr_schedule, rounds_of(made, rounds))
    return make(local.change(rate_by_round=factor))


def rounds_of(algorithm: Algorithm, rounds: int) -> int:
    """Returns the rounds of an algorithm: some have fewer or more for the same budget."""
    return max(1, round(rounds * algorithm.round_factor))


def check_steps(training: Training, local: LocalUpdate, data: ClientData) -> None:
    """Raises ValueError if no client would take a step."""
    largest = int(np.max(np.diff(data.start) if data.budget is None else data.budget))
    # NumPy's: of JAX's, each operation would be a program of its own.
    samples = np.int32(min(largest, data.samples_per_round or largest))
    batches = int(local.change(epochs=1.0).steps_for(samples))
    if not batches:
        raise ValueError(
            f"--batch-size {training.batch_size} leaves --last-batch drop no minibatch: the "
            f"largest client has {largest} samples"
        )
    if not int(local.steps_for(samples)):
        raise ValueError(
            f"--epochs {training.epochs:g} is no step for any client: one of the largest client is "
            f"{1 / batches:.2g} epochs"
        )


def client_sizes(data: ClientData) -> NDArray[np.int64]:
    """Returns the number of samples of each client in a visit: of one run, or ``[R, N]``."""
    given = np.diff(np.asarray(data.start)) if data.budget is None else np.asarray(data.budget)
    return np.minimum(given, data.samples_per_round or data.capacity).astype(np.int64)
