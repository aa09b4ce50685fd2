"""Mime against NumPy, minibatch by minibatch; the survey of its cohort; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known, make_federation, play, rejects
from oracle import Layers, Numbers, Oracle, average, layers_of, loss_and_gradient, plus, zeros

import fedjax_sim as fs
from fedjax_sim import algorithms, terms
from fedjax_sim.base import ClientView, LocalUpdate
from fedjax_sim.engine.clients import samples_of, visits

LR, BETA, ROUNDS, COHORT, BATCH = 0.2, 0.6, 3, 3, 8
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


def local_of(model: fs.Model, **options: Any) -> LocalUpdate:
    given = {"batch_size": BATCH, "epochs": 2} | options
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), **given)


def mime(model: fs.Model, **options: Any) -> fs.Algorithm:
    return algorithms.mime(local_of(model), clients_per_round=COHORT, beta=BETA, **options)


class Mime(Oracle):
    """Algorithm 1 with momentum."""

    momentum_of_server: Layers
    mean: Layers
    server: Layers

    def gradient(self, layers: Layers, rows: np.ndarray) -> Layers:
        return loss_and_gradient(layers, self.data.x[rows], self.data.y[rows])[1]

    def minibatch(
        self, layers: Layers, client: int, mine: np.ndarray, key: Any
    ) -> tuple[float, Layers]:
        loss, here = super().minibatch(layers, client, mine, key)
        moved = plus(plus(here, self.gradient(self.server, mine), -1), self.mean)
        scaled = [(1 - BETA) * g for g in moved]
        return loss, plus(scaled, self.momentum_of_server, BETA)

    def rounds(self, weight: Callable[[Numbers], float]) -> list[Layers]:
        self.server, servers = layers_of(self.initial), []
        self.momentum_of_server = zeros(self.server)
        for t in range(ROUNDS):
            cohort = self.draw(t, COHORT, [])
            weights = [weight(self.sizes[k]) for k in cohort]
            whole = [self.gradient(self.server, self.rows(k)) for k in cohort]
            self.mean = average(whole, weights)
            trained = [self.train(t, k, self.server) for k in cohort]
            self.server = average(trained, weights)
            scaled = [BETA * m for m in self.momentum_of_server]
            self.momentum_of_server = plus(scaled, self.mean, 1 - BETA)
            servers.append(self.server)
        return servers


@pytest.mark.parametrize("equal", [False, True])
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, models: dict[str, fs.Model], equal: bool
) -> None:
    """Three of eight unequal clients, of one to five minibatches; a step is anchored on its own."""
    model = models["mlp"]
    execution = fs.make_execution(devices=1 if equal else 2)
    algorithm = mime(model, equal_weights=equal).on(execution)
    out = play(algorithm, model, federation.data, ROUNDS)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    oracle = Mime(federation.data, initial, LR, 0.0, BATCH, 2)
    theirs = oracle.rounds(lambda n: 1.0 if equal else float(n))
    for ours, wanted in zip(out.servers, theirs, strict=True):
        assert_trees(layers_of(ours), wanted, rtol=2e-4, atol=2e-5)
    (momentum,) = out.states[-1].shared_state.corrections  # and no gradient, which is of a round
    kept = layers_of(fs.Variables(momentum, {}))
    assert_trees(kept, oracle.momentum_of_server, rtol=2e-4, atol=2e-5)


def test_the_aggregator_guards_what_is_told(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """After one whole step from the server's model, all clients have gone the median's way."""
    model = models["logistic"]
    local = local_of(model, batch_size=40, max_steps=1)
    algorithm = (
        algorithms.mime(local, clients_per_round=8, beta=BETA)
        .on(ONE["execution"])
        .replace(aggregator=fs.aggregators.coordinate_median)
    )
    out = play(algorithm, model, federation.data, 1)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    oracle = Mime(federation.data, initial, LR, 0.0, 40, 1)
    start = layers_of(initial)
    slopes = [oracle.gradient(start, oracle.rows(k)) for k in range(8)]
    median = [np.median(layer, axis=0) for layer in map(np.stack, zip(*slopes, strict=True))]
    wanted = plus(start, median, -LR * (1 - BETA))
    assert_trees(layers_of(out.servers[0]), wanted, rtol=1e-4, atol=1e-6)


def test_without_a_cohort_the_momentum_stays(models: dict[str, fs.Model]) -> None:
    """In a round of nobody: 8 clients come with a probability of 1 in 8,000 each."""
    model, data = models["logistic"], make_federation().data
    algorithm = mime(model).on(ONE["execution"]).replace(selection=fs.selection.poisson(0.001))
    state = algorithm.init(jax.random.key(0), model.init(jax.random.key(1)), data)
    ones = jax.tree.map(jnp.ones_like, state.shared_state)
    after, metrics = jax.jit(algorithm.step)(
        jax.random.key(2), state._replace(shared_state=ones), data
    )
    assert int(metrics.visits) == 0
    assert_trees((after.shared_state, after.server), (ones, state.server))


WRAPPERS: dict[str, Callable[[LocalUpdate, fs.Model], LocalUpdate]] = {
    "ditto": lambda local, model: fs.local.ditto(local, 0.1),
    "fedadmm": lambda local, model: fs.local.fedadmm(local),
    "adaptive_start": lambda local, model: fs.local.adaptive_start(
        local, fs.empirical_risk(model), fs.leaves.head(model)
    ),
    "a report": lambda local, model: fs.local.with_initial_loss(local, fs.empirical_risk(model)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_client_answers_as_it_would_alone(
    federation: Federation, models: dict[str, fs.Model], name: str
) -> None:
    """It finds what it remembers: the model of its last visit, to which its loss holds it."""
    model, data = models["logistic"], jax.device_put(federation.data)
    risk = fs.empirical_risk(model)

    def near(params: Any, state: Any, batch: Any, context: Any) -> Any:
        loss, state = risk(params, state, batch, context)
        far = jax.tree.map(jnp.subtract, params, context.memory.params)
        return loss + sum(jnp.vdot(w, w) for w in jax.tree.leaves(far)), state

    term = fs.corrections.mime(BETA)
    alone = local_of(model).change(objective=near, memory=terms.last_model(), corrections=(term,))
    start = model.init(jax.random.key(0))
    moved = jax.tree.map(lambda w: w + 1, start)
    wrapped = WRAPPERS[name](alone, model)
    client = jax.tree.map(lambda a: a[0], visits(data, jnp.array([3], jnp.int32)))
    view = client.view(samples_of(data), data)

    def answer(local: LocalUpdate) -> Any:
        ask = known(local.survey).ask
        return jax.jit(lambda w, own, common: ask(jax.random.key(1), w, view, own, common))(
            moved, local.client_state(start), local.shared_state(start)
        )

    assert_trees(answer(wrapped), answer(alone))


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "in turn": (
        lambda net: algorithms.mime(
            fs.local.in_turn(local_of(net), local_of(net)), clients_per_round=1
        ),
        "in_turn must be of local updates without a survey",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "logistic")


def test_the_server_has_no_cohort(models: dict[str, fs.Model]) -> None:
    """Where a model is trained outside of a round, nobody is asked."""
    local = local_of(models["logistic"]).change(corrections=(fs.corrections.mime(BETA),))
    samples = jnp.zeros((3, 6)), jnp.zeros(3, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    root = ClientView(*samples, jnp.int32(0), jnp.int32(3), 3)
    start = models["logistic"].init(jax.random.key(0))
    states = local.client_state(start), local.shared_state(start)
    with pytest.raises(ValueError, match="mime needs the exchange of gradients before training"):
        local.train(jax.random.key(0), start, root, *states)
