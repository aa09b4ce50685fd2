"""A small problem that trains in a second, for examples and first tries."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Model, Objective
from fedjax_sim.base.brief import brief
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import client_data, load_dataset
from fedjax_sim.engine.execution import make_execution
from fedjax_sim.models import logistic, with_scaling
from fedjax_sim.partition import limit_label_emd
from fedjax_sim.round import Algorithm
from fedjax_sim.run.simulation import simulate


class Toy(NamedTuple):
    """Handwritten digits on a few clients, and logistic regression.

    Attributes:
        model: model that takes the images as they are stored.
        objective: empirical risk of the model.
        data: the clients; the server has samples of its own.
        test: x and y of the test set.
        classes: M.
    """

    model: Model
    objective: Objective
    data: ClientData
    test: tuple[NDArray[Any], NDArray[np.int32]]
    classes: int

    def __repr__(self) -> str:
        return brief(
            self, {"clients": self.data.clients, "classes": self.classes, "x": self.data.x}
        )

    def accuracy(self, algorithm: Algorithm, rounds: int = 5, seed: int = 0) -> float:
        """Returns the accuracy on the test set after some rounds, on one device."""
        result = simulate(
            algorithm,
            self.model,
            self.data,
            self.test,
            rounds=rounds,
            classes=self.classes,
            seeds=(seed,),
            eval_every=rounds,
            execution=make_execution(devices=1),  # compiles faster than for several
        )
        return float(result.accuracy[-1, 0])


@functools.cache
def toy(clients: int = 10, emd: float = 0.5) -> Toy:
    """Returns scikit-learn's digits, split over clients with label skew; nothing is downloaded.

    Args:
        clients: N.
        emd: earth mover's distance of the partition; 0: no label skew.

    Returns:
        The problem.

    >>> import optax, fedjax_sim as fs
    >>> problem = toy()
    >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    >>> problem.accuracy(fs.fedavg(local, clients_per_round=5)) > 0.8
    True
    """
    digits = load_dataset("digits")
    assert digits.mean is not None
    assert digits.std is not None
    scaled = with_scaling(logistic((8, 8, 1), 10), digits.mean, digits.std)
    held = len(digits.train_y) // 20  # the server's own samples, from the end
    x, y = digits.train_x, digits.train_y
    partition = limit_label_emd(y[:-held], clients, emd=emd, seed=0)
    root = np.arange(len(y) - held, len(y), dtype=np.int32)
    data = client_data(x, y, partition, root=root)
    return Toy(scaled, empirical_risk(scaled), data, (digits.test_x, digits.test_y), 10)
