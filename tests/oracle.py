"""Federated learning client by client, in plain NumPy and float64.

All that it shares with the package is chance: initial weights, clients drawn, the permutation of
models, and the order of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import redistribution, selection
from fedjax_sim.engine.batches import shuffled

_shuffled = jax.jit(shuffled, static_argnums=2)
_draw = jax.jit(selection.uniform().draw)
_permute = jax.jit(redistribution.permute, static_argnums=1)
_fold_in = jax.jit(jax.random.fold_in)

Layers = list[np.ndarray]  # W_1, b_1, W_2, b_2, ...
Numbers = np.ndarray | jax.Array


def layers_of(variables: Any) -> Layers:
    """The package's dense network as a list W_1, b_1, W_2, b_2, ... in float64."""
    out = []
    for i in range(len(variables.params)):
        inner = variables.params[f"Dense_{i}"]["Dense_0"]
        out += [np.array(inner["kernel"], np.float64), np.array(inner["bias"], np.float64)]
    return out


def logits(layers: Layers, x: Numbers) -> np.ndarray:
    """Outputs of a ReLU network (none hidden: logistic regression)."""
    h = np.asarray(x, np.float64).reshape(len(x), -1)
    for w, b in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        h = np.maximum(h @ w + b, 0)
    return np.asarray(h @ layers[-2] + layers[-1])


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities of each row."""
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def loss_and_gradient(layers: Layers, x: Numbers, y: Numbers) -> tuple[float, Layers]:
    """Mean cross-entropy of a ReLU network (none hidden: logistic regression), by hand."""
    x, y = np.asarray(x), np.asarray(y)
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


class Visit(NamedTuple):
    """A client's model, its momentum, and the mean of its minibatch gradients, after T_k steps."""

    layers: Layers
    velocity: Layers
    path: Layers
    steps: int


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
        last = jnp.array([*busy, *[0] * count], jnp.int32)
        free = jnp.array([False] * len(busy) + [True] * count)
        visits = jnp.zeros(len(last), jnp.int32)
        clients, _ = _draw(self.key(t, 0), (), self.data, last, free, visits)
        return [int(c) for c in clients[len(busy) :]]

    def permutation(self, t: int, count: int) -> list[int]:
        return [int(i) for i in _permute(self.key(t, 1), count).source]

    def dealt(self, t: int, cohort: list[int]) -> list[int]:
        """The clients that models in flight meet: of a round in which no model is fresh."""
        luck = np.asarray(jax.random.uniform(self.key(t, 2**30), (len(cohort),)))
        return [cohort[i] for i in np.argsort(np.argsort(luck))]

    def rows(self, client: int) -> np.ndarray:
        return self.data.index[self.data.start[client] : self.data.start[client + 1]]

    def minibatch(
        self, layers: Layers, client: int, mine: np.ndarray, key: Any
    ) -> tuple[float, Layers]:
        """Loss and gradient of a step on the rows ``mine`` of x; ``key`` is the step's chance."""
        del client, key
        return loss_and_gradient(layers, self.data.x[mine], self.data.y[mine])

    def train(self, t: int, client: int, layers: Layers) -> Layers:
        return self.visit(t, client, layers).layers

    def visit(
        self,
        t: int,
        client: int,
        layers: Layers,
        term: Callable[[Layers], Layers] | None = None,
        velocity: Layers | None = None,
    ) -> Visit:
        """E epochs of heavy-ball SGD, minibatch by minibatch.

        ``term(w)`` is added to every gradient; ``velocity`` is the momentum to begin with.
        """
        n, b = int(self.sizes[client]), self.batch
        rows = self.rows(client)
        key = _fold_in(self.key(t, 2), client)
        per_epoch = n // b if self.last_batch == "drop" else math.ceil(n / b)
        budget = round(self.epochs * per_epoch)
        layers = [a.copy() for a in layers]
        velocity = zeros(layers) if velocity is None else velocity
        total, before = zeros(layers), self.steps
        for e in range(math.ceil(self.epochs)):
            epoch_key = _fold_in(key, e)
            order = np.asarray(_shuffled(epoch_key, jnp.int32(n), self.data.capacity))[:n].tolist()
            for i in range(per_epoch):
                if budget == 0:
                    break
                chosen = order[i * b : (i + 1) * b]
                while self.last_batch == "refill" and len(chosen) < b:
                    chosen = chosen + order[: b - len(chosen)]
                mine = rows[chosen]
                loss, grads = self.minibatch(layers, client, mine, _fold_in(epoch_key, i + 1))
                total = plus(total, grads)
                grads = plus(grads, term(layers)) if term else grads
                velocity = [self.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
                layers = [w - self.lr * v for w, v in zip(layers, velocity, strict=True)]
                self.loss += loss * len(chosen)
                self.visited += len(chosen)
                self.steps += 1
                budget -= 1
        steps = self.steps - before
        return Visit(layers, velocity, [a / max(steps, 1) for a in total], steps)


def zeros(layers: Layers) -> Layers:
    return [np.zeros_like(a) for a in layers]


def plus(a: Layers, b: Layers, scale: float = 1.0) -> Layers:
    """``a + scale b``."""
    return [u + scale * v for u, v in zip(a, b, strict=True)]


def average(models: list[Layers], weights: list[float]) -> Layers:
    """Weighted mean."""
    total = sum(weights)
    return [
        np.sum([a / total * m[i] for a, m in zip(weights, models, strict=True)], axis=0)
        for i in range(len(models[0]))
    ]


def fedavg(
    oracle: Oracle,
    rounds: int,
    m: int,
    visit: Callable[[int, int, Layers], Visit] | None = None,
    absorb: Callable[[Layers, list[int], list[Visit]], Layers] | None = None,
) -> tuple[list[Layers], Layers]:
    """McMahan et al., Algorithm 1: server models after every round, and the final one.

    ``visit(t, client, server)`` and ``absorb(server, cohort, visits)`` stand in for its two lines.
    """

    def mean(server: Layers, cohort: list[int], visits: list[Visit]) -> Layers:
        return average([v.layers for v in visits], [float(oracle.sizes[k]) for k in cohort])

    visit = visit or oracle.visit
    absorb = absorb or mean
    server, servers = layers_of(oracle.initial), []
    for t in range(rounds):
        cohort = oracle.draw(t, m, [])
        server = absorb(server, cohort, [visit(t, k, server) for k in cohort])
        servers.append(server)
    return servers, server


def fedprox(oracle: Oracle, rounds: int, m: int, mu: float) -> tuple[list[Layers], Layers]:
    """Li et al., Algorithm 2."""

    def visit(t: int, k: int, server: Layers) -> Visit:
        def pull(w: Layers) -> Layers:
            return [mu * a for a in plus(w, server, -1)]

        return oracle.visit(t, k, server, term=pull)

    return fedavg(oracle, rounds, m, visit)


def scaffold(oracle: Oracle, rounds: int, m: int, option: int) -> tuple[list[Layers], Layers]:
    """Karimireddy et al., Algorithm 1; option 2 as printed (plain SGD), or the path (momentum)."""
    c = zeros(layers_of(oracle.initial))
    own = [c] * len(oracle.sizes)

    def visit(t: int, k: int, server: Layers) -> Visit:
        correction = plus(c, own[k], -1)
        return oracle.visit(t, k, server, term=lambda w: correction)

    def absorb(server: Layers, cohort: list[int], visits: list[Visit]) -> Layers:
        nonlocal c
        before = c
        for k, v in zip(cohort, visits, strict=True):
            rows = oracle.rows(k)
            if option == 1:
                new = loss_and_gradient(server, oracle.data.x[rows], oracle.data.y[rows])[1]
            elif oracle.momentum:
                new = v.path
            else:
                moved = plus(server, v.layers, -1)
                new = plus(plus(own[k], before, -1), moved, 1 / (v.steps * oracle.lr))
            c = plus(c, plus(new, own[k], -1), 1 / len(oracle.sizes))
            own[k] = new
        return average([v.layers for v in visits], [1.0] * len(visits))

    return fedavg(oracle, rounds, m, visit, absorb)


def fednova(oracle: Oracle, rounds: int, m: int) -> tuple[list[Layers], Layers]:
    """Wang et al.: a_k by adding up what each of the T_k gradients came to count."""

    def absorb(server: Layers, cohort: list[int], visits: list[Visit]) -> Layers:
        p = [oracle.sizes[k] / sum(oracle.sizes[j] for j in cohort) for k in cohort]
        a = [
            sum(sum(oracle.momentum**j for j in range(v.steps - i)) for i in range(v.steps))
            for v in visits
        ]
        effective = sum(p_k * a_k for p_k, a_k in zip(p, a, strict=True))
        new = server
        for p_k, a_k, v in zip(p, a, visits, strict=True):
            new = plus(new, plus(v.layers, server, -1), effective * p_k / a_k)
        return new

    return fedavg(oracle, rounds, m, absorb=absorb)


def mfl(oracle: Oracle, rounds: int, m: int) -> tuple[list[Layers], Layers]:
    """Liu et al.: the momenta travel and are averaged like the models."""
    velocity = zeros(layers_of(oracle.initial))

    def absorb(server: Layers, cohort: list[int], visits: list[Visit]) -> Layers:
        nonlocal velocity
        weights = [float(oracle.sizes[k]) for k in cohort]
        velocity = average([v.velocity for v in visits], weights)
        return average([v.layers for v in visits], weights)

    return fedavg(
        oracle, rounds, m, lambda t, k, w: oracle.visit(t, k, w, velocity=velocity), absorb
    )


def kept(oracle: Oracle, rounds: int, m: int) -> tuple[list[Layers], Layers]:
    """FedAvg whose clients keep their own momentum between visits."""
    own: dict[int, Layers] = {}

    def visit(t: int, k: int, server: Layers) -> Visit:
        out = oracle.visit(t, k, server, velocity=own.get(k))
        own[k] = out.velocity
        return out

    return fedavg(oracle, rounds, m, visit)


def on_server(
    oracle: Oracle, rounds: int, m: int, step: Callable[[np.ndarray, dict[str, Any]], np.ndarray]
) -> tuple[list[Layers], Layers]:
    """FedAvg whose server moves by ``step(Δ, its own state)``, layer by layer."""
    states: list[dict[str, Any]] = [{} for _ in layers_of(oracle.initial)]

    def absorb(server: Layers, cohort: list[int], visits: list[Visit]) -> Layers:
        mean = average([v.layers for v in visits], [float(oracle.sizes[k]) for k in cohort])
        deltas = plus(mean, server, -1)
        return plus(server, [step(d, state) for d, state in zip(deltas, states, strict=True)])

    return fedavg(oracle, rounds, m, absorb=absorb)


def radfed(oracle: Oracle, rounds: int, m: int, inner: int) -> tuple[list[Layers], Layers]:
    """RADFed, Algorithm 1 (two nested loops there, one over local rounds here)."""
    server, servers = layers_of(oracle.initial), []
    slots: list[Layers] = []
    for t in range(rounds):
        slots = [server] * m if t % inner == 0 else [slots[j] for j in oracle.permutation(t, m)]
        cohort = sorted(oracle.draw(t, m, []))
        cohort = cohort if t % inner == 0 else oracle.dealt(t, cohort)
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
