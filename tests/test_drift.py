"""Methods against client drift: whole runs against NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    Federation,
    Rounds,
    assert_trees,
    context_of,
    first_weights,
    make_federation,
    play,
    play_numbers,
    rejects,
)
from fed import COHORT, LR, ONE, STEPS, Fed, local_of, samples, water_filled
from oracle import Layers, layers_of, loss_and_gradient, plus, zeros

import fedjax_sim as fs
from fedjax_sim import algorithms, terms
from fedjax_sim.base import Batch, ClientView, Gathered, LocalInfo
from fedjax_sim.engine.streams import Client, Epoch, Round, Step, stream

ROUNDS = 3
ALPHA, MU, TEMPERATURE, BETA, TAU, RHO, EPS = 0.3, 0.7, 0.4, 0.6, 0.8, 0.3, 1e-3


def forward(layers: Layers, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features."""
    hidden = np.maximum(x @ layers[0] + layers[1], 0)
    return hidden @ layers[2] + layers[3], hidden


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def risk(layers: Layers, x: np.ndarray, y: np.ndarray, shift: Any = 0.0) -> float:
    logits, _ = forward(layers, x)
    return float(-log_softmax(logits + shift)[np.arange(len(y)), y].mean())


def slope(loss: Callable[[Layers], float], layers: Layers, far: float = 1e-6) -> Layers:
    """By central differences."""
    out = [np.zeros_like(w) for w in layers]
    for w, g in zip(layers, out, strict=True):
        for at in np.ndindex(w.shape):
            before = w[at]
            w[at] = before + far
            above = loss(layers)
            w[at] = before - far
            g[at] = (above - loss(layers)) / (2 * far)
            w[at] = before
    return out


def norm(a: Layers) -> float:
    return float(np.sqrt(sum((v * v).sum() for v in a)))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = np.maximum((a * a).sum(axis=1) * (b * b).sum(axis=1), 1e-16)
    out: np.ndarray = (a * b).sum(axis=1) / np.sqrt(size)
    return out


class OfAnotherLoss(Fed):
    """Its gradients are central differences."""

    def loss(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> float:
        raise NotImplementedError

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        return slope(lambda w: self.loss(k, w, x, y), layers)


class FedDyn(Fed):
    """h_k at the clients, h at the server."""

    equal = True

    def begin(self, initial: Layers) -> None:
        self.h, self.kept = zeros(initial), [zeros(initial)] * self.data.clients

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        pulled = plus(super().direction(k, layers, x, y), self.kept[k], -1)
        return plus(pulled, plus(layers, self.server, -1), ALPHA)

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.kept[k] = plus(self.kept[k], plus(layers, self.server, -1), -ALPHA)

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        for update in updates:
            self.h = plus(self.h, update, -ALPHA / self.data.clients)
        return plus(super().step(updates, shares), self.h, -1 / ALPHA)


class FedADMM(Fed):
    """w_k and y_k at the clients; the server adds the changes of w_k + y_k / ρ."""

    equal = True
    rate = COHORT / 8  # of as many clients

    def begin(self, initial: Layers) -> None:
        self.kept = dict.fromkeys(range(self.data.clients), initial)
        self.dual = dict.fromkeys(range(self.data.clients), zeros(initial))
        self.sent: list[Layers] = []

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        pulled = plus(super().direction(k, layers, x, y), self.dual[k])
        return plus(pulled, plus(layers, self.server, -1), ALPHA)

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        dual = plus(self.dual[k], plus(layers, self.server, -1), ALPHA)
        changes = plus(layers, self.kept[k], -1), plus(dual, self.dual[k], -1)
        self.sent.append(plus(*changes, 1 / ALPHA))
        self.kept[k], self.dual[k] = layers, dual

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        sent, self.sent = self.sent, []
        return [self.rate * w for w in super().step(sent, shares)]


class FedProx(Fed):
    """Clients pull towards what they received, and count equally."""

    equal = True

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        return plus(super().direction(k, layers, x, y), plus(layers, self.server, -1), ALPHA)


class Moon(OfAnotherLoss):
    """Each client's last model."""

    def begin(self, initial: Layers) -> None:
        self.last = [initial] * self.data.clients

    def loss(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> float:
        (_, z), (_, near), (_, far) = (forward(w, x) for w in (layers, self.server, self.last[k]))
        to_near, to_far = (np.exp(cosine(z, other) / TEMPERATURE) for other in (near, far))
        contrast = -np.log(to_near / (to_near + to_far)).mean()
        return risk(layers, x, y) + MU * float(contrast)

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.last[k] = layers


class FedNTD(OfAnotherLoss):
    """The received model's word on the other classes."""

    def loss(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> float:
        own = np.eye(3, dtype=bool)[y]
        p, q = (
            log_softmax(np.where(own, -1e9, forward(w, x)[0] / TEMPERATURE))
            for w in (self.server, layers)
        )
        return risk(layers, x, y) + BETA * float((np.exp(p) * (p - q)).sum()) / len(y)


class FedGKD(OfAnotherLoss):
    """The mean of the last three server models, or what there is of them."""

    def begin(self, initial: Layers) -> None:
        self.past: list[Layers] = [initial]

    def loss(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> float:
        teacher = [np.mean(same, axis=0) for same in zip(*self.past, strict=True)]
        theirs, mine = (log_softmax(forward(w, x)[0] / TEMPERATURE) for w in (teacher, layers))
        divergence = (np.exp(theirs) * (theirs - mine)).sum(axis=1).mean()
        return risk(layers, x, y) + BETA * TEMPERATURE**2 * float(divergence)

    def round(self, cohort: list[int]) -> Layers:
        self.past = [*self.past, super().round(cohort)][-3:]
        return self.server


class FedLC(OfAnotherLoss):
    """Margins by the counts of the labels."""

    def loss(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> float:
        counts = np.maximum(np.bincount(y, minlength=3), 1e-8)
        return risk(layers, x, y, -TAU * counts**-0.25)


class FedSAM(Fed):
    """The gradient at the worst point nearby."""

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        here = super().direction(k, layers, x, y)
        return super().direction(k, plus(layers, here, RHO / norm(here)), x, y)


class FedDisco(Fed):
    """Shares of the samples, less a part of the labels' divergence from uniform."""

    kl, a, b = True, 1.1, 0.1  # which leaves one of them out

    def begin(self, initial: Layers) -> None:
        self.labels: list[np.ndarray] = []

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.labels.append(np.bincount(y, minlength=3) / len(y))

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        if self.kl:
            d = np.array([sum(p * np.log(3 * p) for p in q if p > 0) for q in self.labels])
            d = d / d.sum()
        else:
            d = np.array([np.sqrt(((q - 1 / 3) ** 2).sum()) for q in self.labels])
        self.labels = []
        wanted = np.maximum(shares - self.a * d + self.b, 0)
        return super().step(updates, wanted / wanted.sum())


class FedDiscoL2(FedDisco):
    """By the Euclidean distance."""

    kl, a, b = False, 0.5, 0.1


class FedLESAM(Fed):
    """The gradient at a point on the way back along the server's steps."""

    equal = True

    def begin(self, initial: Layers) -> None:
        self.last = [initial] * self.data.clients

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        back = plus(self.last[k], self.server, -1)
        far = RHO / norm(back) if norm(back) > 0 else 0
        return super().direction(k, plus(layers, back, far), x, y)

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.last[k] = self.server


class FedCM(Fed):
    """The cohort's last direction, in every step."""

    equal = True

    def begin(self, initial: Layers) -> None:
        self.delta: Layers = zeros(initial)

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        slope = super().direction(k, layers, x, y)
        return [ALPHA * g + (1 - ALPHA) * d for g, d in zip(slope, self.delta, strict=True)]

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        mean = super().step(updates, shares)
        self.delta = [-w / (LR * STEPS) for w in mean]
        return [0.7 * w for w in mean]


class FedExP(Fed):
    """A longer step of the server."""

    equal = True

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        mean = super().step(updates, shares)
        top = sum(norm(update) ** 2 for update in updates)
        rate = max(1.0, top / (2 * len(updates) * (norm(mean) ** 2 + EPS)))
        return [rate * w for w in mean]


class MimeLite(Fed):
    """The momentum of the server, in every step."""

    def begin(self, initial: Layers) -> None:
        self.momentum: Layers = zeros(initial)
        self.sent: list[tuple[int, Layers]] = []

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        slope = super().direction(k, layers, x, y)
        return [BETA * m + (1 - BETA) * g for m, g in zip(self.momentum, slope, strict=True)]

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.sent.append((len(y), loss_and_gradient(self.server, x, y)[1]))

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        total = sum(n for n, _ in self.sent)
        self.momentum = [BETA * m for m in self.momentum]
        for n, g in self.sent:
            self.momentum = plus(self.momentum, g, (1 - BETA) * n / total)
        self.sent = []
        return super().step(updates, shares)


class DiLoCo(Fed):
    """Nesterov's momentum on the server, heavy-ball momentum that stays with each client."""

    equal = True

    def begin(self, initial: Layers) -> None:
        self.outer: Layers = zeros(initial)
        self.inner = dict.fromkeys(range(self.data.clients), self.outer)

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        self.inner[k] = plus(super().direction(k, layers, x, y), self.inner[k], BETA)
        return self.inner[k]

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        mean = super().step(updates, shares)
        self.outer = plus(mean, self.outer, 0.9)
        return [0.7 * w for w in plus(mean, self.outer, 0.9)]


class CMFL(Fed):
    """Updates with the signs of the server's way since the client's last visit; who else sent."""

    relevance = 0.7

    def begin(self, initial: Layers) -> None:
        self.last = [initial] * self.data.clients
        self.way: dict[int, np.ndarray] = {}
        self.sends: list[bool] = []
        self.sent = 0

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        way, own = (
            np.sign(np.concatenate([a.ravel() for a in plus(w, b, -1)]))
            for w, b in ((self.server, self.last[k]), (layers, self.server))
        )
        if way.any():
            self.way[k] = way
        self.last[k] = self.server
        self.sends.append(k not in self.way or (own == self.way[k]).mean() >= self.relevance)

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        present, self.sends = np.array(self.sends), []
        self.sent = int(present.sum())
        return super().step(updates, shares * present / max((shares * present).sum(), 1e-9))


class OCS(Fed):
    """Clients that toss a coin for their updates, by the norms."""

    senders = 1.4

    def begin(self, initial: Layers) -> None:
        self.rounds = 0
        self.cohort: list[int] = []

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.cohort.append(k)

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        run_key = jax.random.fold_in(jax.random.key(0), 1)
        key = stream(jax.random.fold_in(run_key, self.rounds), Round.SENDING)
        coins = [float(jax.random.uniform(jax.random.fold_in(key, k))) for k in self.cohort]
        p = water_filled(shares * np.array([norm(update) for update in updates]), self.senders)
        self.rounds, self.cohort = self.rounds + 1, []
        return super().step(updates, np.where(np.array(coins) < p, shares / p, 0))


class ISFedAvg(Fed):
    """Updates of clients that are drawn by their gradients, over the probability of the draw."""

    equal, gamma = True, 0.6

    def begin(self, initial: Layers) -> None:
        own = [samples(self.data, k) for k in range(self.data.clients)]
        self.scores = np.array([self.score(x, y) for x, y in own])
        self.cohort: list[tuple[int, float]] = []

    def score(self, x: np.ndarray, y: np.ndarray) -> float:
        return norm(loss_and_gradient([w.copy() for w in self.server], x, y)[1])

    def end(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> None:
        self.cohort.append((k, self.score(x, y)))

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        numbers, scores = (np.array(a) for a in zip(*self.cohort, strict=True))
        pi = water_filled(self.scores, COHORT)[numbers]
        self.scores[numbers] = (1 - self.gamma) * self.scores[numbers] + self.gamma * scores
        self.cohort = []
        return super().step(updates, 1 / (self.data.clients * pi))


class HeteroFL(Fed):
    """Clients train networks of their own width, which are cut out of the server's."""

    equal = True

    def begin(self, initial: Layers) -> None:
        self.rounds = 0
        self.cuts: list[Layers] = []

    def share(self, k: int) -> float:
        return 0.5 ** (k % 3)

    def units(self, share: float, n: int) -> np.ndarray:
        return np.arange(math.ceil(share * n))

    def step_shares(self, k: int) -> list[float]:
        """The widths that the steps train."""
        return [self.share(k)] * STEPS

    def cut(self, share: float) -> tuple[Any, ...]:
        some = self.units(share, len(self.server[1]))
        return (slice(None), some), some, some, ...

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        whole, has = [w.copy() for w in self.server], zeros(self.server)
        for share in self.step_shares(k):
            cut = self.cut(share)
            narrow = [w[place] for w, place in zip(whole, cut, strict=True)]
            narrow = plus(narrow, loss_and_gradient(narrow, x, y)[1], -LR)
            for a, place, w in zip(whole, cut, narrow, strict=True):
                a[place] = w
        for m, place in zip(has, self.cut(self.share(k)), strict=True):
            m[place] = 1
        self.cuts.append(has)
        return whole

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        total, count = zeros(self.server), zeros(self.server)
        for update, has, share in zip(updates, self.cuts, shares, strict=True):
            total, count = plus(total, update, share), plus(count, has, share)
        self.cuts, self.rounds = [], self.rounds + 1
        return [a / np.where(b > 0, b, 1) for a, b in zip(total, count, strict=True)]


class FedRolex(HeteroFL):
    """The units roll."""

    equal = False

    def units(self, share: float, n: int) -> np.ndarray:
        return (super().units(share, n) + self.rounds) % n


class FjORD(HeteroFL):
    """Every step draws one of the widths up to the client's own."""

    equal = False

    def share(self, k: int) -> float:
        return (3 - k % 3) / 3

    def step_shares(self, k: int) -> list[float]:
        run_key = jax.random.fold_in(jax.random.key(0), 1)
        key = stream(jax.random.fold_in(run_key, self.rounds), Round.CLIENTS)
        epochs = [stream(jax.random.fold_in(key, k), Client.EPOCH, e) for e in range(STEPS)]
        keys = [stream(stream(epoch, Epoch.STEP), Step.WIDTH) for epoch in epochs]
        return [(1 + int(jax.random.randint(key, (), 0, 3 - k % 3))) / 3 for key in keys]


METHODS: dict[str, tuple[dict[str, Any], type[Fed]]] = {
    "feddyn": ({"alpha": ALPHA}, FedDyn),
    "fedadmm": ({"rho": ALPHA}, FedADMM),
    "moon": ({"mu": MU, "temperature": TEMPERATURE}, Moon),
    "fedntd": ({"beta": BETA, "temperature": TEMPERATURE}, FedNTD),
    "fedgkd": ({"gamma": BETA, "buffer": 3, "temperature": TEMPERATURE}, FedGKD),
    "fedlc": ({"tau": TAU}, FedLC),
    "fedsam": ({"rho": RHO}, FedSAM),
    "feddisco": ({"disco_a": 1.1, "disco_b": 0.1}, FedDisco),
    "feddisco, l2": ({"discrepancy": "l2"}, FedDiscoL2),
    "fedlesam": ({"rho": RHO}, FedLESAM),
    "fedexp": ({"eps": EPS}, FedExP),
    "cmfl": ({"relevance": CMFL.relevance}, CMFL),
    "ocs": ({"senders": OCS.senders}, OCS),
    "isfedavg": ({"gamma": ISFedAvg.gamma}, ISFedAvg),
    "fedcm": ({"alpha": ALPHA, "server_lr": 0.7}, FedCM),
    "mimelite": ({"beta": BETA}, MimeLite),
    "diloco": ({}, DiLoCo),
    "heterofl": ({}, HeteroFL),
    "fedrolex": ({}, FedRolex),
    "fjord": ({}, FjORD),
}


WITH_OBJECTIVE = (
    "moon", "fedntd", "fedgkd", "fedlc", "fedrs", "fedsam", "fedlesam", "isfedavg", "fjord"
)  # fmt: skip


def made(name: str, net: fs.Model, **options: Any) -> fs.Algorithm:
    name = name.partition(",")[0]
    method: Any = getattr(algorithms, name)
    if name in ("moon", "fedntd", "fedgkd", "heterofl", "fedrolex", "fjord"):
        options["model"] = net
    if name in WITH_OBJECTIVE:
        options["objective"] = fs.empirical_risk(net)
    if name == "feddisco":
        options["classes"] = 3
    if name == "fedcm":
        options = {"lr": LR, "momentum": 0.0} | options
    local = local_of(net)
    if name == "diloco":
        local = local.change(optimizer=optax.sgd(LR, momentum=BETA))
    return method(local, **{"clients_per_round": COHORT} | options).on(ONE)


def rounds_of(
    name: str, net: fs.Model, data: fs.ClientData, rounds: int = ROUNDS, **options: Any
) -> Rounds:
    """Of a method."""
    name, (given, _) = name.partition(",")[0], METHODS.get(name, ({}, None))
    return play_numbers(made, name, net, data, rounds, given | options)


@functools.cache
def plain_run(cohorts: tuple[tuple[int, ...], ...], net: fs.Model) -> Layers:
    """Where FedAvg gets with these."""
    plain = Fed(make_federation().data, start_of(net))
    for cohort in cohorts:
        plain.round([*cohort])
    return plain.server


def start_of(net: fs.Model) -> Layers:
    return layers_of(first_weights(net))


@pytest.mark.parametrize("name", METHODS)
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, net: fs.Model, name: str
) -> None:
    """Unequal clients, three of eight in a round; some come back, some lack a class."""
    out = rounds_of(name, net, federation.data)
    oracle = METHODS[name][1](federation.data, start_of(net))
    cohorts = [tuple(map(int, metrics.client)) for metrics in out.metrics]
    for server, cohort in zip(out.servers, cohorts, strict=True):
        assert_trees(layers_of(server), oracle.round([*cohort]), rtol=2e-4, atol=2e-5)
    assert norm(plus(plain_run(tuple(cohorts), net), oracle.server, -1)) > 1e-3  # not FedAvg


NOTHING: dict[str, dict[str, Any]] = {
    "moon": {"mu": 0.0},
    "fedntd": {"beta": 0.0},
    "fedgkd": {"gamma": 0.0},
    "fedlc": {"tau": 0.0},
    "fedrs": {"alpha": 1.0},
    "fedsam": {"rho": 0.0},
    "feddisco": {"disco_a": 0.0, "disco_b": 0.0},
    "feddisco, nobody": {"disco_a": 1e9, "disco_b": 0.1},  # then the samples count
    "fedlesam": {"rho": 0.0},
    "fedcm": {"alpha": 1.0, "server_lr": 1.0},
    "mimelite": {"beta": 0.0},
    "cmfl": {"relevance": 0.0},
    "ocs": {"senders": 3.0},
    "heterofl": {"levels": 1},
    "fedrolex": {"levels": 1},
    "fjord": {"levels": 1},
}
EQUAL = ("fedlesam", "fedcm", "heterofl")
"""Methods in which clients count equally."""


@pytest.mark.parametrize("name", NOTHING)
def test_without_its_term_it_is_fedavg(federation: Federation, net: fs.Model, name: str) -> None:
    ours = rounds_of(name, net, federation.data, **NOTHING[name])
    plain = rounds_of("fedavg", net, federation.data, equal_weights=name in EQUAL)
    assert_trees(ours.servers, plain.servers, rtol=1e-5, atol=1e-6)


def test_cmfl_uploads_what_is_relevant(federation: Federation, net: fs.Model) -> None:
    """Of those that have seen the server move; a step that nobody took is not the last one."""
    out = rounds_of("cmfl", net, federation.data, 7)
    oracle = CMFL(federation.data, start_of(net))
    sent = []
    for server, metrics in zip(out.servers, out.metrics, strict=True):
        wanted = oracle.round([int(k) for k in metrics.client])
        assert_trees(layers_of(server), wanted, rtol=1e-3, atol=1e-4)
        assert int(metrics.downloads) == COHORT
        assert int(metrics.skipped) == 0
        sent.append((int(metrics.uploads), oracle.sent))
    assert all(ours == theirs for ours, theirs in sent)
    assert {ours for ours, _ in sent} >= {1, 3}
    part = made("cmfl", net, relevance=CMFL.relevance).parts.sending[0]
    assert part.hear is not None
    start, moved = (fs.Variables(jnp.array(w), {}) for w in ([0.0, 0.0], [1.0, 0.0]))
    kept = part.hear(part.hear(part.init(start, federation.data), moved), moved)
    assert kept.signs.tolist() == [1, 0]
    assert kept.last.tolist() == [1.0, 0.0]


def test_feddyn_is_fedprox_in_its_first_round_but_for_the_servers_step(
    federation: Federation, net: fs.Model
) -> None:
    """h_k = 0: clients pull alike; then w - h / α adds m / N of the step."""
    dyn = rounds_of("feddyn", net, federation.data, 1)
    start = start_of(net)
    prox = FedProx(federation.data, start).round([int(k) for k in dyn.metrics[0].client])
    longer = 1 + COHORT / federation.data.clients
    wanted = plus(start, plus(prox, start, -1), longer)
    assert_trees(layers_of(dyn.servers[0]), wanted, rtol=1e-5, atol=1e-6)


def test_fedadmm_of_all_clients_is_feddyn(federation: Federation, net: fs.Model) -> None:
    """The server model is then the mean of w_k + y_k / ρ, by the programs that ours agree with."""
    start = start_of(net)
    dyn, admm = FedDyn(federation.data, start), FedADMM(federation.data, start)
    admm.rate = 1.0
    for _ in range(ROUNDS):
        assert_trees(admm.round([*range(8)]), dyn.round([*range(8)]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fedcms_momentum_is_the_mean_direction_of_a_step(momentum: float) -> None:
    """Of clients that take one step and three, under a gradient of 1: of length 1, but for NaN."""
    term = fs.corrections.client_momentum(ALPHA, LR, momentum)
    one = fs.local_sgd(lambda *_: (jnp.float32(0), {}), optax.sgd(LR, momentum=momentum))
    assert one.response is not None
    far = [-one.response(steps)[-1] for steps in (1, 3)]
    steps = jnp.array([1, 3, 9])
    info = LocalInfo(jnp.zeros(3), steps, steps)
    cohort: Any = SimpleNamespace(info=info)
    weights = jnp.array([2.0, 1.0, 0.0])
    mean = fs.Variables(jnp.array([(2 * far[0] + far[1]) / 3, jnp.nan]), {})
    follow: Any = term.follow
    found = follow(jnp.zeros(2), mean, Gathered(mean, weights, cohort))
    np.testing.assert_allclose(found, [1.0, np.nan], rtol=1e-6)
    cohort.info = info._replace(steps=0 * steps)  # nobody took one: it stays
    assert follow(jnp.ones(2), mean, Gathered(mean, weights, cohort)).tolist() == [1, 1]


def test_labels_are_counted_as_the_client_sees_them() -> None:
    y = jnp.array([0, 1, 2, 1, 1, 0], jnp.int32)
    client = ClientView(
        jnp.zeros((6, 1)), y, jnp.array([5, 4, 3, 2, 1, 0]), jnp.int32(1), jnp.int32(3), 4,
        relabel=jnp.array([0, 2, 1], jnp.int32),
    )  # fmt: skip
    context = context_of(())._replace(client=client)
    assert terms.label_counts(context, 3).tolist() == [0, 1, 2]  # 1, 1, 2 of the pool, swapped


ZERO = jnp.zeros(1)
WHOLE = ClientView(ZERO, ZERO, ZERO, jnp.int32(0), jnp.int32(1), 1)  # it trains the whole model
REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "teachers in turn": (
        lambda net: fs.local.in_turn(
            *(local_of(net).change(shared=terms.past_models()) for _ in range(2))
        ), "client_momentum, past_models and skewscout follow the server's step",
    ),
    "cm's optimiser": (
        lambda net: made("fedcm", net, lr=0.3), "needs the optimiser that its settings assume",
    ),
    "cm in turn": (
        lambda net: algorithms.fedcm(
            fs.local.in_turn(local_of(net), local_of(net)),
            clients_per_round=1, lr=LR, momentum=0.0,
        ), "in_turn must be of local updates that share what their clients send",
    ),
    "levels": (lambda net: made("fjord", net, levels=33), "levels must be at most 32, got 33"),
    "no shares": (
        lambda net: terms.ordered_dropout(fs.empirical_risk(net))(
            {}, {}, Batch(ZERO, ZERO, ZERO), context_of({})._replace(client=WHOLE)
        ), r"ordered_dropout needs clients that train shares of the model: use exchange=split(",
    ),
    "no last server": (
        lambda net: play(
            fs.fedavg(
                local_of(net).change(objective=terms.estimated_sharpness(fs.empirical_risk(net))),
                clients_per_round=1,
            ),
            net, make_federation((5,)).data, 1,
        ), "estimated_sharpness needs memory=last_received() in local_sgd",
    ),
    "no features": (
        lambda net: terms.model_contrast(fs.Model(net.init, net.apply)),
        "model must have features",
    ),
    "no memory": (
        lambda net: play(
            fs.fedavg(
                local_of(net).change(
                    objective=fs.empirical_risk(net, term=terms.model_contrast(net))
                ),
                clients_per_round=1,
            ),
            net, make_federation((5,)).data, 1,
        ),
        "model_contrast needs memory=last_model() in local_sgd",
    ),
    "another objective": (
        lambda net: algorithms.fedlc(
            local_of(net), clients_per_round=1, objective=lambda *_: (jnp.float32(0), {})
        ),
        "objective must be an empirical_risk",
    ),
    "another term": (
        lambda net: algorithms.fedlc(
            local_of(net), clients_per_round=1,
            objective=terms.sharpness_aware(fs.empirical_risk(net, adjust=terms.balanced())),
        ),
        "adjust of the objective must be one of balanced() and calibration(1.0): use "
        "objective.replace(adjust=None) for the second alone",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")
