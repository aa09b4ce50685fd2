"""Methods that give every client a model of its own: whole runs against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    Federation,
    assert_trees,
    first_weights,
    make_federation,
    play_numbers,
    rejects,
)
from fed import COHORT, LR, ONE, STEPS, Fed, local_of, samples
from oracle import Layers, layers_of, loss_and_gradient, plus, zeros

import fedjax_sim as fs
from fedjax_sim import adaptation, algorithms
from fedjax_sim.base import LocalUpdate
from fedjax_sim.base.signatures import keywords
from fedjax_sim.engine import streams
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.server.collaborative import Collaborators

ROUNDS = 3
RATE = 0.3  # of a client's own steps
ALPHA, LAM, GAMMA, MIX_LR = 0.9, 1.3, 0.7, 20.0
AMP = {"alpha": 0.3, "sigma": 3.0, "lam": 0.2}
ENVELOPE = {"lam": LAM, "inner_steps": 3, "inner_lr": RATE}


def slope(layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
    return loss_and_gradient(layers, x, y)[1]


class PerFedAvg(Fed):
    """The gradient after a step, and what a client makes of the server's model."""

    equal, hessian, steps = True, False, 1

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        there = slope(plus(layers, slope(layers, x, y), -RATE), x, y)
        if not self.hessian:
            return there
        far = 1e-5
        above, below = (slope(plus(layers, there, s * far), x, y) for s in (1, -1))
        return plus(there, plus(above, below, -1), -RATE / (2 * far))

    def own(self, k: int) -> Layers:
        layers = self.server
        for _ in range(self.steps):
            layers = plus(layers, slope(layers, *samples(self.data, k)), -RATE)
        return layers


class PerFedAvgHF(PerFedAvg):
    """With the Hessian; three steps for a client's own model."""

    hessian, steps = True, 3


class PFedMe(Fed):
    """Gradients of Moreau envelopes, and a server that goes further than the mean."""

    equal = True

    def near(self, start: Layers, x: np.ndarray, y: np.ndarray, steps: int) -> Layers:
        theta = start
        for _ in range(steps):
            pulled = plus(slope(theta, x, y), plus(theta, start, -1), LAM)
            theta = plus(theta, pulled, -RATE)
        return theta

    def direction(self, k: int, layers: Layers, x: np.ndarray, y: np.ndarray) -> Layers:
        return [LAM * w for w in plus(layers, self.near(layers, x, y, 3), -1)]

    def step(self, updates: list[Layers], shares: np.ndarray) -> Layers:
        return [1.5 * w for w in super().step(updates, shares)]

    def own(self, k: int) -> Layers:
        return self.near(self.server, *samples(self.data, k), 4)


class APFL(Fed):
    """Two models in the same steps, and the one between them."""

    equal, learned = True, False

    def begin(self, initial: Layers) -> None:
        self.v = [initial] * self.data.clients
        self.alpha = [ALPHA] * self.data.clients

    def between(self, k: int, layers: Layers) -> Layers:
        return plus([self.alpha[k] * v for v in self.v[k]], layers, 1 - self.alpha[k])

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        layers = self.server
        for _ in range(STEPS):
            there = slope(self.between(k, layers), x, y)
            gap = plus(self.v[k], layers, -1)
            self.v[k] = plus(self.v[k], there, -LR * self.alpha[k])
            if self.learned:
                along = sum(float((a * b).sum()) for a, b in zip(gap, there, strict=True))
                self.alpha[k] = min(max(self.alpha[k] - LR * along, 0.0), 1.0)
            layers = plus(layers, slope(layers, x, y), -LR)
        return layers

    def own(self, k: int) -> Layers:
        return self.between(k, self.server)


class LearnedAPFL(APFL):
    """With α_k of their own."""

    learned = True

    def begin(self, initial: Layers) -> None:
        super().begin(initial)
        self.alpha = [0.99] * self.data.clients


class FedRoD(Fed):
    """Logits that expect the client's classes, and heads that are added."""

    def begin(self, initial: Layers) -> None:
        self.h = [zeros(initial)] * self.data.clients

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        layers = self.server
        expected = GAMMA * np.log(np.maximum(np.bincount(y, minlength=3), 1e-8))
        for _ in range(STEPS):
            *_, head, bias = slope(plus(layers, self.h[k]), x, y)
            self.h[k] = [*self.h[k][:2], self.h[k][2] - LR * head, self.h[k][3] - LR * bias]
            # Logits are shifted as by another bias.
            balanced = slope([*layers[:3], layers[3] + expected], x, y)
            layers = plus(layers, balanced, -LR)
        return layers

    def own(self, k: int) -> Layers:
        return plus(self.server, self.h[k])


class FedALA(Fed):
    """Heads between the received one and the own, by shares learned on half the samples."""

    t = 0

    def begin(self, initial: Layers) -> None:
        self.theta = [initial] * self.data.clients
        self.share = [[np.ones_like(w) for w in initial]] * self.data.clients

    def mixed(self, k: int, key: Any) -> tuple[Layers, Layers]:
        x, y = samples(self.data, k)
        count = max(len(y) // 2, 1)
        key = jax.random.fold_in(jax.random.fold_in(key, k), streams.Client.MIXING)
        first = int(jax.random.randint(key, (), 0, len(y) - count + 1))
        gap = plus(self.server, self.theta[k], -1)
        gap[:2] = np.zeros_like(gap[0]), np.zeros_like(gap[1])

        def start(share: Layers) -> Layers:
            moved = [(s - 1) * g for s, g in zip(share, gap, strict=True)]
            return plus(self.server, moved)

        slopes = slope(start(self.share[k]), x[first : first + count], y[first : first + count])
        share = [
            np.clip(s - MIX_LR * a * g, 0, 1)
            for s, a, g in zip(self.share[k], slopes, gap, strict=True)
        ]
        return start(share), share

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), self.t)
        layers, self.share[k] = self.mixed(k, jax.random.fold_in(key, streams.Round.CLIENTS))
        for _ in range(STEPS):
            layers = plus(layers, slope(layers, x, y), -LR)
        self.theta[k] = layers
        return layers

    def round(self, cohort: list[int]) -> Layers:
        server = super().round(cohort)
        self.t += 1
        return server

    def own(self, k: int) -> Layers:
        key = jax.random.fold_in(jax.random.key(0), streams.Round.PERSONAL)
        return self.mixed(k, key)[0]


class Apart(Fed):
    """Clients whose models stay apart, each started from a mixture of all."""

    def begin(self, initial: Layers) -> None:
        self.w = self.old = [initial] * self.data.clients

    def mixed(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        raise NotImplementedError

    def pull(self, layers: Layers, start: Layers) -> Layers:
        return zeros(layers)

    def visit(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        layers = start = self.mixed(k, x, y)
        for _ in range(STEPS):
            pulled = plus(slope(layers, x, y), self.pull(layers, start))
            layers = plus(layers, pulled, -LR)
        self.ends[k] = layers, start
        return layers

    def round(self, cohort: list[int]) -> Layers:
        self.ends: dict[int, tuple[Layers, Layers]] = {}
        server = super().round(cohort)
        for k, (end, start) in self.ends.items():  # nobody saw them in this round
            self.w, self.old = [*self.w], [*self.old]
            self.w[k], self.old[k] = end, start
        return server

    def own(self, k: int) -> Layers:
        return self.w[k]


def square(a: Layers, b: Layers) -> float:
    return sum(float(np.square(v - w).sum()) for v, w in zip(a, b, strict=True))


class FedAMP(Apart):
    """Means of near models, and a pull towards them."""

    def mixed(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        start = self.w[k]
        for w in self.w:
            near = AMP["alpha"] / AMP["sigma"] * np.exp(-square(w, self.w[k]) / AMP["sigma"])
            start = plus(start, plus(w, self.w[k], -1), near)
        return start

    def pull(self, layers: Layers, start: Layers) -> Layers:
        return [AMP["lam"] / AMP["alpha"] * w for w in plus(layers, start, -1)]


class Alone(FedAMP):
    """Clients that hear nothing of others, near their own last models."""

    def mixed(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        return self.w[k]


class FedFomo(Apart):
    """Means of all models that are better than the last start."""

    def mixed(self, k: int, x: np.ndarray, y: np.ndarray) -> Layers:
        def loss(layers: Layers) -> float:
            return loss_and_gradient(layers, x, y)[0]

        far = [np.sqrt(square(w, self.old[k])) for w in self.w]
        gains = [max(loss(self.old[k]) - loss(w), 0.0) for w in self.w]
        weights = [g / d if d else 0.0 for g, d in zip(gains, far, strict=True)]
        if not sum(weights):
            return self.w[k]
        start = zeros(self.server)
        for w, weight in zip(self.w, weights, strict=True):
            start = plus(start, w, weight / sum(weights))
        return start


METHODS: dict[str, tuple[str, dict[str, Any], type[Fed]]] = {
    "per_fedavg, FO": ("per_fedavg", {"alpha": RATE}, PerFedAvg),
    "per_fedavg, HF": (
        "per_fedavg", {"alpha": RATE, "hessian": True, "fine_tuning_steps": 3}, PerFedAvgHF,
    ),
    "pfedme": ("pfedme", ENVELOPE | {"beta": 1.5, "fine_tuning_epochs": 4}, PFedMe),
    "apfl": ("apfl", {"alpha": ALPHA}, APFL),
    "apfl, learned": ("apfl", {"alpha": 0.99, "learned": True}, LearnedAPFL),
    "fedrod": ("fedrod", {"gamma": GAMMA}, FedRoD),
    "fedala": ("fedala", {"mix_lr": MIX_LR, "mix_share": 0.5}, FedALA),
    "fedamp": ("fedamp", AMP, FedAMP),
    "fedamp, no attention": (
        "fedamp", {"alpha": 1e-6, "sigma": 3.0, "lam": 1e-6 * AMP["lam"] / AMP["alpha"]}, Alone,
    ),
    "fedfomo": ("fedfomo", {"downloads": 7}, FedFomo),  # all others, of eight clients
}  # fmt: skip


def made(name: str, net: fs.Model, local: LocalUpdate | None = None, **options: Any) -> Any:
    method: Any = getattr(algorithms, name)
    common = {"model": net, "objective": fs.empirical_risk(net)}
    given = {key: value for key, value in common.items() if key in keywords(method)}
    given |= {"clients_per_round": COHORT} | options
    return method(local or local_of(net), **given).on(ONE)


@functools.cache
def own_models(name: str, net: fs.Model, fixed: frozenset[tuple[str, Any]]) -> Any:
    """Each client's own, of a state."""

    def own(numbers: dict[str, Any], state: Any, data: fs.ClientData) -> Any:
        score: Any = lambda constants, variables, task: variables  # noqa: E731
        algorithm, tasks = made(name, net, **numbers, **dict(fixed)), jnp.zeros(data.clients)
        return algorithm.score_personal(jax.random.key(0), state, data, score, (), tasks)

    return jax.jit(own)


class Ran(NamedTuple):
    """The server's model after each round, who took part, and each client's own at the end."""

    servers: list[Any]
    cohorts: list[list[int]]
    own: list[Layers]


def rounds_of(
    name: str, net: fs.Model, data: fs.ClientData, own: bool = False, **options: Any
) -> Ran:
    """Of a method."""
    out = play_numbers(made, name, net, data, ROUNDS, options, concrete=("mix_share",))
    ran = Ran(out.servers, [report.client.tolist() for report in out.metrics], [])
    if own:
        data = jax.device_put(data)
        found = jax.device_get(own_models(name, net, out.fixed)(out.numbers, out.state, data))
        each = (jax.tree.map(lambda a, k=k: a[k], found) for k in range(data.clients))
        ran.own.extend(map(layers_of, each))
    return ran


@pytest.mark.parametrize("case", METHODS)
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, net: fs.Model, case: str
) -> None:
    """Unequal clients, three of eight in a round: server model and every client's own."""
    name, options, kind = METHODS[case]
    out = rounds_of(name, net, federation.data, own=True, **options)
    oracle = kind(federation.data, layers_of(first_weights(net)))
    visited = set()
    for server, cohort in zip(out.servers, out.cohorts, strict=True):
        oracle.round(cohort)
        assert_trees(layers_of(server), oracle.server, rtol=2e-4, atol=2e-5)
        visited |= {*cohort}
    assert COHORT < len(visited) < federation.data.clients  # some came back, some never came
    assert len(out.own) == federation.data.clients
    for k, found in enumerate(out.own):
        assert_trees(found, oracle.own(k), rtol=2e-4, atol=2e-5)


def test_a_client_mixes_the_models_that_are_better() -> None:
    """Weights by hand for a loss of w², of its own model and of the two that it is sent."""

    def risk(params: Any, state: Any, batch: Any, context: Any) -> Any:
        return jnp.square(params), state

    x, own = jnp.zeros(3), jnp.int32(1)
    client = fs.base.ClientView(x, x, jnp.arange(3), jnp.int32(0), jnp.int32(3), 3, id=own)
    models = fs.Variables(jnp.array([2.0, 1.0, -1.0, 5.0, 0.5]), ())
    affinity = jnp.zeros((5, 5)).at[1].set(jnp.array([5.0, 9.0, 1.0, 0.0, 7.0]))
    server, keys = fs.Variables(jnp.float32(0), ()), jax.random.split(jax.random.key(0), 400)

    def sent(old: float, explore: float) -> Any:
        part = fs.broadcast.first_order(2, risk, explore)
        starts = fs.Variables(jnp.full(5, old), ())
        state = Collaborators(models, starts, affinity)
        return state, jax.vmap(lambda key: part.send(key, state, server, client))(keys)

    state, (start, tag) = sent(3.0, 0.0)
    np.testing.assert_allclose(tag, [[5, 0, 0, 0, 3.5]] * 400, rtol=1e-6)
    np.testing.assert_allclose(start.params, (4 * 1 + 5 * 2 + 3.5 * 0.5) / 12.5, rtol=1e-6)
    kept, weights = sent(0.0, 0.0)[1]  # none is better than what it started from
    assert (kept.params == 1).all()
    assert (weights[:, [0, 4]] < 0).all()
    drawn = np.mean(sent(3.0, 1.0)[1][1] != 0, axis=0)
    assert drawn[1] == 0
    np.testing.assert_allclose(np.delete(drawn, 1), 0.5, atol=0.1)

    nothing: Any = None
    cohort = fs.base.Cohort(
        server, fs.Variables(jnp.array([3.0, 9.0]), ()), jnp.array([1, 3]), nothing, nothing,
        nothing, tag[:2], nothing,
    )  # fmt: skip
    gathered = fs.base.Gathered(
        fs.Variables(jnp.array([0.5, jnp.nan]), ()), jnp.array([1.0, 0.0]), cohort
    )
    part = fs.broadcast.first_order(2, risk)
    after = part.update(state, server, gathered, fs.aggregators.mean)
    assert after.models.params.tolist() == [2, 3.5, -1, 5, 0.5]
    assert after.starts.params.tolist() == [3, 3, 3, 3, 3]
    assert after.affinity[1].tolist() == [10, 9, 1, 0, 10.5]
    assert (after.affinity[0] == 0).all()


@pytest.mark.slow
def test_the_step_ahead_is_on_other_samples_of_the_client(net: fs.Model) -> None:
    """Of its own, as many as the minibatch has, drawn anew for each use and each step."""
    data = jax.tree.map(jnp.asarray, make_federation((3, 40)).data)
    client = fs.base.ClientView(data.x, data.y, data.index, data.start[1], jnp.int32(40), 40)
    seen: list[fs.base.Batch] = []

    def noted(params: Any, state: Any, batch: fs.base.Batch, context: Any) -> Any:
        seen.append(batch)
        return fs.empirical_risk(net)(params, state, batch, context)

    batch = fs.base.Batch(data.x[:8], data.y[:8], jnp.ones(8, bool))
    risk = adaptation.after_a_step(noted, RATE, hessian=True)
    for step in range(2):
        context = fs.base.Context(first_weights(net), client, jax.random.key(step))
        risk(*first_weights(net), batch, context)
    mine = np.asarray(data.x)[np.asarray(data.index)[data.start[1] : data.start[2]]]
    drawn = []
    for other in (seen[0], seen[1], seen[3], seen[4]):
        where = [int(np.flatnonzero((mine == row).all(axis=1))[0]) for row in np.asarray(other.x)]
        assert np.asarray(other.mask).all()
        assert len(set(where)) == 8
        drawn.append(tuple(where))
    assert len(set(drawn)) == 4
    assert seen[2] is batch


@pytest.mark.parametrize("name", ["per_fedavg", "pfedme"])
def test_own_rates_are_of_training_alone(federation: Federation, net: fs.Model, name: str) -> None:
    """A client adapts at the method's rate, whatever factor its steps of training have."""
    data, start = jax.device_put(federation.data), first_weights(net)
    task = visits(data, jnp.array([2], jnp.int32))
    client = jax.tree.map(lambda a: a[0], task).view(samples_of(data), data)
    plain, fast = (
        made(name, net, local_of(net).change(rate_by_client=rates)).parts.personal
        for rates in (None, [3.0] * data.clients)
    )
    key = jax.random.key(0)
    assert_trees(fast(key, start, client, ()), plain(key, start, client, ()), rtol=0, atol=0)


def test_settings_of_training_are_not_of_the_shares(federation: Federation, net: fs.Model) -> None:
    """FedALA's shares take whole steps of an epoch, in their own precision, within [0, 1]."""
    data, start, head = jax.device_put(federation.data), first_weights(net), fs.leaves.head(net)
    task = visits(data, jnp.array([2], jnp.int32))
    client = jax.tree.map(lambda a: a[0], task).view(samples_of(data), data)
    kept = fs.local.adaptive_start(local_of(net), fs.empirical_risk(net), head).client_state(start)
    kept = kept._replace(
        own=jax.tree.map(lambda w: w + 0.5, kept.own),
        share=jax.tree.map(lambda s: jnp.full_like(s, 0.999), kept.share),
    )
    found = []
    for settings in ({}, {"half_weights": True}, {"steps": fs.local.geometric(0.2)}):
        local = local_of(net).change(**settings)
        mix = fs.local.adaptive_start(local, fs.empirical_risk(net), head)
        found.append(mix.mixed(jax.random.key(0), start, client, kept)[1])
    assert any((share != 0.999).any() for share in jax.tree.leaves(found[0]))
    for share in found[1:]:
        assert_trees(share, found[0], rtol=0, atol=0)


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "more downloads than others": (
        lambda net: made("fedfomo", net, downloads=8).init(
            jax.random.key(0), first_weights(net), make_federation((3,) * 8).data
        ),
        "downloads must be at most the 7 other clients, got 8",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")
