"""Federated learning client by client, in plain NumPy and float64.

All that it shares with the package is chance: initial weights, clients drawn, the permutation of
models, and the order of samples.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import redistribution, selection
from fedjax_sim.batches import shuffled

_shuffled = jax.jit(shuffled, static_argnums=2)
_draw = jax.jit(selection.uniform().draw)
_permute = jax.jit(redistribution.permute, static_argnums=1)
_fold_in = jax.jit(jax.random.fold_in)

Layers = list[np.ndarray]  # W_1, b_1, W_2, b_2, ...


def layers_of(variables: Any) -> Layers:
    """The package's dense network as a list W_1, b_1, W_2, b_2, ... in float64."""
    out = []
    for i in range(len(variables.params)):
        inner = variables.params[f"Dense_{i}"]["Dense_0"]
        out += [np.array(inner["kernel"], np.float64), np.array(inner["bias"], np.float64)]
    return out


def loss_and_gradient(layers: Layers, x: np.ndarray, y: np.ndarray) -> tuple[float, Layers]:
    """Mean cross-entropy of a ReLU network (none hidden: logistic regression), by hand."""
    inputs, h = [], x.reshape(len(x), -1).astype(np.float64)
    depth = len(layers) // 2
    for i in range(depth):
        inputs.append(h)
        h = h @ layers[2 * i] + layers[2 * i + 1]
        if i < depth - 1:
            h = np.maximum(h, 0)
    h = h - h.max(axis=1, keepdims=True)
    p = np.exp(h) / np.exp(h).sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    d = p.copy()
    d[np.arange(len(y)), y] -= 1
    d /= len(y)
    grads: Layers = [np.zeros(0)] * len(layers)
    for i in reversed(range(depth)):
        grads[2 * i], grads[2 * i + 1] = inputs[i].T @ d, d.sum(axis=0)
        d = (d @ layers[2 * i].T) * (inputs[i] > 0)
    return float(loss), grads


@dataclasses.dataclass
class Oracle:
    """One run's data and settings, and what its clients have reported."""

    data: Any
    initial: Any
    lr: float
    momentum: float
    batch: int
    epochs: float
    last_batch: str = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        self.sizes = np.diff(self.data.start)
        self.run_key = jax.random.fold_in(jax.random.key(self.seed), 1)
        self.reset()

    def reset(self) -> None:
        """Forgets the losses reported so far."""
        self.loss, self.visited, self.steps = 0.0, 0, 0

    def key(self, t: int, use: int) -> Any:
        return _fold_in(_fold_in(self.run_key, t), use)

    def draw(self, t: int, count: int, busy: list[int]) -> list[int]:
        """``count`` clients that are not ``busy``, in the order in which they were drawn."""
        held = jnp.array([*busy, *[0] * count], jnp.int32)
        vacant = jnp.array([False] * len(busy) + [True] * count)
        visits = jnp.zeros(len(held), jnp.int32)
        clients, _ = _draw(self.key(t, 0), (), self.data, held, vacant, visits)
        return [int(c) for c in clients[len(busy) :]]

    def permutation(self, t: int, count: int) -> list[int]:
        return [int(i) for i in _permute(self.key(t, 1), count)]

    def train(self, t: int, client: int, layers: Layers) -> Layers:
        """E epochs of heavy-ball SGD, minibatch by minibatch."""
        n, b = int(self.sizes[client]), self.batch
        rows = self.data.index[self.data.start[client] : self.data.start[client + 1]]
        key = _fold_in(self.key(t, 2), client)
        per_epoch = n // b if self.last_batch == "drop" else math.ceil(n / b)
        budget = round(self.epochs * per_epoch)
        layers = [a.copy() for a in layers]
        velocity = [np.zeros_like(a) for a in layers]
        for e in range(math.ceil(self.epochs)):
            order = np.asarray(_shuffled(_fold_in(key, e), jnp.int32(n), self.data.capacity))[
                :n
            ].tolist()
            for i in range(per_epoch):
                if budget == 0:
                    break
                chosen = order[i * b : (i + 1) * b]
                while self.last_batch == "refill" and len(chosen) < b:
                    chosen = chosen + order[: b - len(chosen)]
                mine = rows[chosen]
                loss, grads = loss_and_gradient(layers, self.data.x[mine], self.data.y[mine])
                velocity = [self.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
                layers = [w - self.lr * v for w, v in zip(layers, velocity, strict=True)]
                self.loss += loss * len(chosen)
                self.visited += len(chosen)
                self.steps += 1
                budget -= 1
        return layers


def average(models: list[Layers], weights: list[float]) -> Layers:
    """Weighted mean."""
    total = sum(weights)
    return [
        sum(a / total * m[i] for a, m in zip(weights, models, strict=True))
        for i in range(len(models[0]))
    ]


def fedavg(oracle: Oracle, rounds: int, m: int) -> tuple[list[Layers], Layers]:
    """McMahan et al., Algorithm 1: server models after every round, and the final one."""
    server, servers = layers_of(oracle.initial), []
    for t in range(rounds):
        cohort = oracle.draw(t, m, [])
        local = [oracle.train(t, k, server) for k in cohort]
        server = average(local, [float(oracle.sizes[k]) for k in cohort])
        servers.append(server)
    return servers, server


def radfed(oracle: Oracle, rounds: int, m: int, inner: int) -> tuple[list[Layers], Layers]:
    """RADFed, Algorithm 1 (two nested loops there, one over local rounds here)."""
    server, servers = layers_of(oracle.initial), []
    slots: list[Layers] = []
    for t in range(rounds):
        slots = [server] * m if t % inner == 0 else [slots[j] for j in oracle.permutation(t, m)]
        cohort = sorted(oracle.draw(t, m, []))
        slots = [oracle.train(t, k, w) for k, w in zip(cohort, slots, strict=True)]
        if t % inner == inner - 1:
            server = average(slots, [1.0] * m)
        servers.append(server)
    return servers, average(slots, [1.0] * m) if rounds % inner else server


def phase_shift(oracle: Oracle, rounds: int, active: int, n: int) -> tuple[list[Layers], Layers]:
    """Cornelis, listings 2 and 3: a queue of groups, the oldest first."""
    size = active // n
    server, servers, samples = layers_of(oracle.initial), [], 0
    drawn = oracle.draw(0, active, [])
    queue = [dict.fromkeys(drawn[g * size : (g + 1) * size], server) for g in range(n)]
    finished: dict[int, Layers] = {}
    for t in range(rounds):
        if t > 0:
            busy = [k for group in queue for k in group]
            queue.append(dict.fromkeys(oracle.draw(t, size, busy), server))
        for position, group in enumerate(queue):
            for k, local in group.items():
                if t > 0 and position == len(queue) - 1:
                    received = server
                else:
                    n_k = int(oracle.sizes[k])
                    a, b = samples / (n_k + samples), n_k / (n_k + samples)
                    received = [a * w + b * v for w, v in zip(server, local, strict=True)]
                group[k] = oracle.train(t, k, received)
        finished = queue.pop(0)
        weights = [float(oracle.sizes[k]) for k in finished]
        server, samples = average(list(finished.values()), weights), int(sum(weights))
        servers.append(server)
    everyone = [finished, *queue]
    models = [w for group in everyone for w in group.values()]
    return servers, average(models, [float(oracle.sizes[k]) for group in everyone for k in group])
