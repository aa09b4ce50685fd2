"""The local update that the settings mean, and whether it takes a step."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np
import optax
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, LocalUpdate, Objective, Transform
from fedjax_sim.cli.config import Preparation
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.rates import CONSTANT, factor_by_round
from fedjax_sim.cli.training import Training
from fedjax_sim.client.augment import fedaug_augmentations
from fedjax_sim.client.local import local_sgd
from fedjax_sim.data import Dataset
from fedjax_sim.engine import matching
from fedjax_sim.round import Algorithm


def make_local(
    training: Training, objective: Objective, transforms: tuple[Transform, ...]
) -> LocalUpdate:
    """The local update that all algorithms begin with."""
    return local_sgd(
        objective,
        optimizer_of(training),
        training.batch_size,
        training.epochs,
        training.last_batch,
        optimizer_state=training.optimizer_state,
        transforms=transforms,
    )


def optimizer_of(training: Training) -> optax.GradientTransformation:
    """The clients' optimiser.

    Weight decay joins the gradient, λ w, as in ``torch.optim.SGD``; that of AdamW stays apart from
    its moments, η λ w a step.
    """
    lr, decay = training.lr, training.weight_decay
    if training.optimizer == "adamw":
        return optax.adamw(lr, weight_decay=decay)
    momentum = training.momentum or None
    made: optax.GradientTransformation = {
        "sgd": lambda: optax.sgd(lr, momentum=momentum),
        "nesterov": lambda: optax.sgd(lr, momentum=momentum, nesterov=True),
        "adagrad": lambda: optax.adagrad(lr),
        "rmsprop": lambda: optax.rmsprop(lr),
        "adam": lambda: optax.adam(lr),
        "yogi": lambda: optax.yogi(lr),
    }[training.optimizer]()
    return optax.chain(optax.add_decayed_weights(decay), made) if decay else made


def scheduled(
    training: Training, local: LocalUpdate, rounds: int, make: Callable[[LocalUpdate], Algorithm]
) -> Algorithm:
    """The algorithm of a local update whose rate follows ``--lr-schedule``.

    Args:
        training: the settings.
        local: with a constant rate.
        rounds: of FedAvg; the schedule is of the algorithm's own.
        make: composes the algorithm.

    Raises:
        ValueError: if the schedule does nothing, or the algorithm cannot have one.
    """
    made = make(local)
    if training.lr_schedule == CONSTANT:
        return made
    factor = factor_by_round(training.lr_schedule, rounds_of(made, rounds))
    return make(local.change(rate_by_round=factor))


def optimised(error: Exception, training: Training) -> ValueError:
    """An error of a method that does not fit the optimiser or its schedule, with their flags.

    >>> optimised(ValueError("rate_by_round needs the number"), Training())
    ValueError('--lr-schedule constant: rate_by_round needs the number')
    """
    message = str(error)
    if "rate_by_round needs" in message:
        return ValueError(f"--lr-schedule {training.lr_schedule}: {message}")
    if matching.ASSUMED in message and training.optimizer != "sgd":
        return ValueError(f"--optimizer {training.optimizer}: {message}")
    return ValueError(message)


def rounds_of(algorithm: Algorithm, rounds: int) -> int:
    """The rounds of an algorithm: some have fewer or more for the same budget."""
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
    """Returns the samples of each client that a visit trains on: of one run, or ``[R, N]``."""
    given = np.diff(np.asarray(data.start)) if data.budget is None else np.asarray(data.budget)
    return np.minimum(given, data.samples_per_round or data.capacity).astype(np.int64)


def without_steps(local: LocalUpdate, data: ClientData) -> list[int]:
    """Counts the clients of each run that are too small to take a local step."""
    sizes = client_sizes(data).reshape(-1, data.clients)
    some = np.unique(sizes)
    # NumPy's: of JAX's, each operation would be a program of its own.
    first = bisect.bisect_left(some, 1, key=lambda n: int(local.steps_for(np.int32(n))))
    return np.isin(sizes, some[:first]).sum(axis=1).tolist()


def augmentations(preparation: Preparation, dataset: Dataset) -> tuple[Transform, ...]:
    """What alters the copies of FedAug and rebalancing.

    Raises:
        ValueError: if the data are no images; names the flag.
    """
    asked = [name for name in ("fedaug", "rebalance") if getattr(preparation, name) is not None]
    if not asked:
        return ()
    x = dataset.train_x
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise ValueError(
            f"{flag(asked[0])} is for images, uint8 [n, H, W, 1 or 3]; {dataset.name} has "
            f"{x.dtype} {list(x.shape)}"
        )
    white = float(x.max())
    return (fedaug_augmentations(x.shape[1:], white=white, mirror=preparation.mirror),)
