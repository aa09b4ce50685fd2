"""The federated work that every contestant of `speed.py` does: data, partition and cohorts.

Pixels, tokens, labels and frozen weights are random: the speed of a training step does not depend
on their values, and nothing has to be downloaded. All of it follows from `SEED`: every contestant
sees the same samples, the same clients and the same cohorts.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED = 2024
CLASSES = 10
VOCABULARY = 80  # of the LSTM: its tokens and its classes

Net = Literal["mlp", "logreg", "cnn", "bn_cnn", "lstm", "mobilenet", "mobilenet_tail"]

# MobileNetV2 of width 0.35: expansion, channels and stride of its bottlenecks; the last one and
# what follows it train, the others are frozen, their BatchNorms folded into the convolutions.
STEM, TOP, SIDE = 16, 1280, 128
BOTTLENECKS = (
    (1, 8, 1),
    *((6, 8, 2), (6, 8, 1)),
    *((6, 16, 2), (6, 16, 1), (6, 16, 1)),
    *((6, 24, 2), (6, 24, 1), (6, 24, 1), (6, 24, 1)),
    *((6, 32, 1), (6, 32, 1), (6, 32, 1)),
    *((6, 56, 2), (6, 56, 1), (6, 56, 1)),
    (6, 112, 1),
)


class Timing(NamedTuple):
    """What one call of a contestant reports.

    `compile_seconds` is everything that happens once, outside `seconds`: compiling a program or
    starting worker processes; 0 where the call found it done.
    """

    seconds: float
    samples: int
    compile_seconds: float
    note: str = ""


@dataclass(frozen=True)
class Federation:
    """Pooled samples and a ragged list of them: client k owns `index[start[k]:start[k + 1]]`."""

    x: NDArray[np.uint8]
    y: NDArray[np.int32]
    index: NDArray[np.int32]
    start: NDArray[np.int32]

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Number of samples of each client."""
        return np.diff(self.start)


@dataclass(frozen=True)
class Workload:
    """One epoch of local SGD per client and round, FedAvg weighted by sample counts.

    Attributes:
        alpha: Dirichlet concentration of the client sizes; None gives every client the same.
        max_rounds: rounds of one uninterrupted run; None leaves it to the length of a measurement.
    """

    name: str
    title: str
    net: Net
    shape: tuple[int, ...]
    samples: int
    clients: int
    cohort: int
    batch: int
    lr: float = 0.05
    momentum: float = 0.0
    alpha: float | None = None
    max_rounds: int | None = None

    def federation(self) -> Federation:
        """Data and partition, made once per process."""
        values, classes = (VOCABULARY,) * 2 if self.net == "lstm" else (256, CLASSES)
        return _federation(self.shape, self.samples, self.clients, self.alpha, values, classes)

    def cohorts(self, rounds: int) -> NDArray[np.int32]:
        """Clients of the first `rounds` rounds, `[rounds, cohort]`, drawn without replacement."""
        rng = np.random.default_rng([SEED, 1])
        rows = [rng.choice(self.clients, self.cohort, replace=False) for _ in range(rounds)]
        return np.stack(rows).astype(np.int32)


@lru_cache(maxsize=1)
def _federation(
    shape: tuple[int, ...],
    samples: int,
    clients: int,
    alpha: float | None,
    values: int,
    classes: int,
) -> Federation:
    rng = np.random.default_rng([SEED, 0])
    x = rng.integers(0, values, (samples, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, samples, dtype=np.int32)
    index = rng.permutation(samples).astype(np.int32)
    if alpha is None:
        sizes = np.full(clients, samples // clients)
    else:
        share = rng.dirichlet(np.full(clients, alpha))
        sizes = 1 + rng.multinomial(samples - clients, share)
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return Federation(x, y, index, start)


_ALL = (
    Workload(
        "W1",
        "MLP 784-200-200-10, 100 clients with sizes ~ Dirichlet(1), cohort 10, B=10",
        net="mlp",
        shape=(784,),
        samples=60_000,
        clients=100,
        cohort=10,
        batch=10,
        alpha=1.0,
    ),
    Workload(
        "W2",
        "CNN of 1.6 M parameters, 1000 clients x 50 CIFAR-shaped samples, cohort 50, B=10",
        net="cnn",
        shape=(32, 32, 3),
        samples=50_000,
        clients=1000,
        cohort=50,
        batch=10,
    ),
    Workload(
        "W3",
        "CIFAR CNN with BatchNorm, 40 clients x 160 samples, cohort 40, B=16, momentum",
        net="bn_cnn",
        shape=(32, 32, 3),
        samples=6_400,
        clients=40,
        cohort=40,
        batch=16,
        lr=0.001,
        momentum=0.9,
    ),
    Workload(
        "W4",
        "logistic regression 784-10, 1000 clients x 60 samples, cohort 10, B=10, 100 rounds a run",
        net="logreg",
        shape=(784,),
        samples=60_000,
        clients=1000,
        cohort=10,
        batch=10,
        max_rounds=100,
    ),
    Workload(
        "W5",
        "2-layer LSTM of 256 units, windows of 80 characters, 50 clients x 40, cohort 10, B=10",
        net="lstm",
        shape=(80,),
        samples=2_000,
        clients=50,
        cohort=10,
        batch=10,
    ),
    Workload(
        "W6",
        "MobileNetV2 0.35, frozen trunk at 128x128 in each step, 40 clients x 40, cohort 10, B=10",
        net="mobilenet",
        shape=(32, 32, 3),
        samples=1_600,
        clients=40,
        cohort=10,
        batch=10,
        lr=0.01,
    ),
    Workload(
        "W7",
        "the layers of W6 that train, on the trunk's output computed once before",
        net="mobilenet_tail",
        shape=(4, 4, 56),
        samples=1_600,
        clients=40,
        cohort=10,
        batch=10,
        lr=0.01,
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
