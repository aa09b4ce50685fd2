"""A run of a small network client by client in NumPy, for methods of which each changes a line.

Local steps are on all samples of a client, so that their order does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
from oracle import Layers, loss_and_gradient, plus, zeros

import fedjax_sim as fs

LR, STEPS, COHORT = 0.2, 2, 3
ONE = fs.make_execution(devices=1)


def local_of(net: fs.Model, lr: float = LR, **options: Any) -> fs.LocalUpdate:
    """Steps on all samples of a client."""
    given = {"batch_size": 40, "epochs": STEPS} | options
    return fs.local_sgd(fs.empirical_risk(net), optax.sgd(lr), **given)


def samples(data: fs.ClientData, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and labels of client k."""
    rows = np.asarray(data.index[data.start[k] : data.start[k + 1]])
    return np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]


def water_filled(scores: np.ndarray, total: float) -> np.ndarray:
    """Probabilities in proportion to scores, at most 1, with this sum."""
    low, high = 0.0, 1e6 / scores.min()
    for _ in range(200):
        middle = (low + high) / 2
        few = np.minimum(1, middle * scores).sum() < total
        low, high = (middle, high) if few else (low, middle)
    return np.minimum(1, high * scores)


class Fed:
    """FedAvg, whose lines methods change."""

    equal = False

    def __init__(self, data: Any, initial: Layers) -> None:
        self.data, self.server = data, initial
        self.begin(initial)

    def begin(self, initial: Layers) -> None:
        """What a method keeps."""

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        return loss_and_gradient(layers, x, y)[1]

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        """What a client keeps, or sends besides."""

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        layers = [w.copy() for w in self.server]  # which finite differences change in place
        for _ in range(STEPS):
            layers = plus(layers, self.direction(k, layers, x, y), -LR)
        self.end(k, layers, x, y)
        return layers

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        total = zeros(self.server)
        for update, share in zip(updates, shares, strict=True):
            total = plus(total, update, share)
        return total

    def round(self, cohort: list[int]) -> Layers:
        own = [samples(self.data, k) for k in cohort]
        ends = [self.visit(k, x, y) for k, (x, y) in zip(cohort, own, strict=True)]
        sizes = np.array([1 if self.equal else len(y) for _, y in own])
        updates = [plus(layers, self.server, -1) for layers in ends]
        self.server = plus(self.server, self.step(updates, sizes / sum(sizes)))
        return self.server

    def own(self, k: int) -> Layers:
        """The model that client k uses."""
        raise NotImplementedError
