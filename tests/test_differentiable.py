"""Derivatives of rounds, against central differences and forward mode in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import altered_data, assert_trees, context_of, make_federation, some_slow

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.engine.doubles import enable_x64

COHORT, ROUNDS = 6, 3
Tree = Any
Make = Callable[[Tree, fs.Execution], fs.Algorithm]


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def clients() -> fs.ClientData:
    """Of 1 to 40 samples, in float64; the server has some of its own."""
    made = make_federation(classes=2)
    x, index = made.data.x.astype(np.float64), np.asarray(made.data.index)
    root = np.array([made.data.start[4], made.data.start[5]], np.int32)
    return altered_data(made.data, x=x, index=index, root=root)


def risk(params: Tree, state: Tree, batch: base.Batch, context: base.Context) -> Any:
    """Logistic regression, with a term that bends it; 0 without samples."""
    del context
    margin = batch.x @ params["w"] * jnp.where(batch.y > 0, 1.0, -1.0)
    count = jnp.maximum(jnp.sum(batch.mask), 1).astype(margin.dtype)
    each = jax.nn.softplus(-margin) + 0.01 * jnp.sum(params["w"] ** 4)
    return jnp.sum(jnp.where(batch.mask, each, 0)) / count, state


def settings() -> Tree:
    """What is differentiated by."""
    return {
        "client": jnp.array(0.2),
        "server": jnp.array(0.7),
        "power": jnp.array(0.6),
        "weights": jnp.linspace(0.5, 2.0, 8),
        "start": jnp.linspace(-0.3, 0.4, 6),
    }


def local_of(at: Tree, **options: Any) -> fs.LocalUpdate:
    return fs.local_sgd(risk, optax.sgd(at["client"], momentum=0.5), batch_size=4, **options)


class times(base.PreAggregation):
    """Multiplies weights by a number for each client."""

    factors: jax.Array

    def apply(
        self, key: Any, state: Tree, updates: Tree, weights: jax.Array, cohort: base.Cohort
    ) -> tuple[Tree, jax.Array, Tree]:
        clients = jnp.minimum(cohort.client, len(self.factors) - 1)
        return updates, weights * self.factors[clients], state


def weighed(at: Tree) -> dict[str, Any]:
    """Weights by a traced power of n_k, times a traced number for each client."""
    return {
        "weighting": lambda samples, visited: samples.astype(jnp.float64) ** at["power"],
        "preaggregation": (times(at["weights"]),),
    }


def fedavg(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    return fs.compose(
        local_of(at, epochs=1.5),
        selection=fs.selection.uniform(),
        clients_per_round=COHORT,
        server=fs.server.optimizer(optax.sgd(at["server"], momentum=0.5)),
        **weighed(at),
    ).on(execution)


def scaffold(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    made = fs.algorithms.scaffold(
        local_of(at),
        clients_per_round=COHORT,
        option=1,
        server_lr=at["server"],
    ).on(execution)
    return made.replace(**weighed(at))


def radfed(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    made = fs.radfed(local_of(at), clients_per_round=COHORT, redistribution_rounds=2).on(execution)
    return made.replace(server=fs.server.mix(at["server"]), **weighed(at))


def phase_shift(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    made = fs.phase_shift(local_of(at), clients_per_round=COHORT, phases=2).on(execution)
    return made.replace(server=fs.server.mix(at["server"]), **weighed(at))


def qffl(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    made = fs.algorithms.qffl(
        local_of(at), clients_per_round=COHORT, objective=risk, lr=at["client"], momentum=0.5,
        q=at["power"],
    )  # fmt: skip
    return made.on(execution)


def fltrust(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    return fs.algorithms.fltrust(local_of(at), clients_per_round=COHORT).on(execution)


def fednova(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    made = fs.algorithms.fednova(
        local_of(at), clients_per_round=COHORT, lr=at["client"], momentum=0.5
    )
    return made.on(execution)


def mime(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    local = fs.local_sgd(risk, optax.sgd(at["client"]), batch_size=4)
    return fs.algorithms.mime(local, clients_per_round=COHORT, beta=at["power"]).on(execution)


def scaffnew(at: Tree, execution: fs.Execution) -> fs.Algorithm:
    local = fs.local_sgd(risk, optax.sgd(at["client"]), batch_size=4, epochs=2)
    made = fs.algorithms.scaffnew(
        local, clients_per_round=8, lr=at["client"], momentum=0.0, coin=0.5
    )
    return made.on(execution)


def loss_of_all(server: fs.Variables, data: fs.ClientData) -> jax.Array:
    everything = base.Batch(data.x, data.y, jnp.ones(len(data.x), bool))
    return risk(server.params, (), everything, context_of(()))[0]


def loss_of(make: Make, data: fs.ClientData, place: str, differentiable: bool) -> Any:
    """The mean loss over all samples after some rounds; what was reported, and the last state."""
    devices, chunk = PLACES[place]
    execution = fs.make_execution(devices=devices, chunk=chunk, differentiable=differentiable)

    def after(at: Tree) -> Any:
        algorithm = make(at, execution)
        start = fs.Variables({"w": at["start"]}, ())

        def one(state: base.FedState, t: jax.Array) -> tuple[base.FedState, jax.Array]:
            state, metrics = algorithm.step(jax.random.fold_in(jax.random.key(3), t), state, data)
            return state, metrics.loss

        state = algorithm.init(jax.random.key(2), start, data)
        state, losses = jax.lax.scan(one, state, jnp.arange(ROUNDS))
        end = algorithm.evaluated(jax.random.key(2), state, data)
        return loss_of_all(end, data), (losses, state)

    return after


@functools.cache
def measured(make: Make) -> Any:
    """Plain rounds, which know nothing of gradients, on one device."""
    return jax.jit(loss_of(make, clients(), "one", differentiable=False))


@functools.cache
def differentiated(make: Make, place: str) -> Any:
    """``(at, share)``: of the last loss, and of ``share`` of what the last round reported."""
    after = loss_of(make, clients(), place, differentiable=True)

    def value(at: Tree, share: jax.Array) -> Any:
        loss, others = after(at)
        return (1 - share) * loss + share * others[0][-1], others

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def directions(at: Tree) -> Iterator[tuple[str, Tree]]:
    """One for each of the settings."""
    rng = np.random.default_rng(0)
    for name, value in at.items():
        zeros = jax.tree.map(jnp.zeros_like, at)
        yield name, zeros | {name: jnp.asarray(rng.uniform(0.5, 1.0, value.shape))}


def along(tree: Tree, direction: Tree) -> float:
    return float(sum(map(jnp.vdot, jax.tree.leaves(tree), jax.tree.leaves(direction))))


ALL = ("client", "server", "power", "weights", "start")
PLACES = {"one": (1, 1), "vmap": (1, 0), "devices": (4, 1), "both": (2, 2)}
CASES = some_slow(
    [
        (phase_shift, "one", ALL),
        (fedavg, "devices", ALL),
        (scaffold, "vmap", ALL),
        (radfed, "both", ALL),
        (qffl, "one", ("client", "power", "start")),  # these two divide by norms
        (fltrust, "one", ("client", "start")),
        (fednova, "devices", ("client", "start")),
        (mime, "vmap", ("client", "power", "start")),
        (scaffnew, "both", ("client", "start")),
    ]
)


@pytest.mark.parametrize(("make", "place", "by"), CASES)
def test_gradients_are_those_of_central_differences(
    make: Make, place: str, by: tuple[str, ...]
) -> None:
    """By rates, weights and the start; plain rounds are differenced, and reach the same state."""
    # Losses and norms that clients report are float32.
    step, rtol = (5e-3, 2e-3) if make in (qffl, fltrust) else (1e-4, 1e-5)
    at, measure = settings(), measured(make)
    (value, others), slopes = differentiated(make, place)(at, 0.0)
    assert_trees((value, others), measure(at), rtol=1e-6, atol=1e-12)
    for name, way in directions(at):
        ends = [
            float(measure(jax.tree.map(lambda a, d, s=s: a + s * step * d, at, way))[0])
            for s in (1, -1)
        ]
        wanted = (ends[0] - ends[1]) / (2 * step)
        assert (abs(wanted) > 1e-5) == (name in by)
        np.testing.assert_allclose(along(slopes, way), wanted, rtol=rtol, atol=1e-7)


@pytest.mark.slow
def test_the_reported_loss_has_a_gradient() -> None:
    """It crosses devices in the bits of a float32 otherwise."""
    at, step = settings(), 2e-3
    slope = differentiated(fedavg, "devices")(at, 1.0)[1]["client"]
    reports = [
        float(measured(fedavg)(at | {"client": at["client"] + s * step})[1][0][-1]) for s in (1, -1)
    ]
    np.testing.assert_allclose(slope, (reports[0] - reports[1]) / (2 * step), rtol=1e-2)


LOCALS: dict[str, Callable[[Tree], dict[str, Any]]] = {
    "drop, kept, inexact": lambda at: {
        "last_batch": "drop", "optimizer_state": "keep", "epochs": 3, "inexactness": 0.5,
    },
    "refill, proximal, fraction": lambda at: {
        "last_batch": "refill", "corrections": (fs.corrections.proximal(at["power"]),),
        "epochs": 1.6,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(LOCALS))
def test_a_local_update_has_the_gradient_of_forward_mode(name: str) -> None:
    """Of clients without samples to the largest, under vmap; the plain loop has forward mode."""
    data = jax.tree.map(jnp.asarray, clients())
    start, size = data.start[:-1], jnp.diff(data.start)
    starts, sizes = jnp.append(start, 0), jnp.append(size, 0)
    budget = sizes if "fraction" in name else None

    def trained(at: Tree, differentiable: bool) -> Tree:
        local = local_of(at, **LOCALS[name](at))
        variables = fs.Variables({"w": at["start"]}, ())
        states = local.client_state(variables), local.shared_state(variables)

        def one(start: jax.Array, size: jax.Array, budget: jax.Array | None) -> base.Trained:
            client = base.ClientView(
                data.x,
                data.y,
                data.index,
                start,
                size,
                data.capacity,
                budget=None if budget is None else (budget + 1) // 2,
                differentiable=differentiable,
            )
            return local.train(
                jax.random.fold_in(jax.random.key(5), start), variables, client, *states
            )

        return jax.vmap(one)(starts, sizes, budget)

    def value(at: Tree, differentiable: bool) -> tuple[jax.Array, Tree]:
        out = trained(at, differentiable)
        return jnp.sum(jnp.sin(3 * out.variables.params["w"])), out

    at = {name: settings()[name] for name in ("client", "power", "start")}
    both = jax.value_and_grad(functools.partial(value, differentiable=True), has_aux=True)
    (_, out), slopes = jax.jit(both)(at)
    plain = functools.partial(value, differentiable=False)
    forward = jax.jit(lambda way: jax.jvp(plain, (at,), (way,), has_aux=True))
    for _, way in directions(at):
        _, slope, plain_out = forward(way)
        assert_trees(out, plain_out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(along(slopes, way), slope, rtol=1e-9)


@pytest.mark.slow
def test_a_step_that_is_not_taken_has_no_part_in_the_gradient() -> None:
    """A root has no derivative at 0, which is the gradient of a client without samples."""
    data = jax.tree.map(jnp.asarray, clients())

    def after(at: Tree, sizes: tuple[int, ...]) -> jax.Array:
        def scaled(g: jax.Array) -> jax.Array:
            return -at["client"] * g / (0.1 + jnp.sqrt(g**2))

        optimizer = optax.stateless(lambda grads, _: jax.tree.map(scaled, grads))
        local = fs.local_sgd(risk, optimizer, batch_size=4)
        variables = fs.Variables({"w": at["start"]}, ())

        def one(size: jax.Array) -> jax.Array:
            client = base.ClientView(
                data.x, data.y, data.index, data.start[4], size, 40, differentiable=True
            )
            empty = ((), ()), ((), ())
            out = local.train(jax.random.key(5), variables, client, *empty)
            return jnp.sum(out.variables.params["w"] - at["start"])

        return jnp.sum(jax.vmap(one)(jnp.array(sizes, jnp.int32)))

    at = {name: settings()[name] for name in ("client", "start")}
    slopes = [jax.jit(jax.grad(lambda at, n=n: after(at, n)))(at) for n in ((0, 17), (17,))]
    assert_trees(slopes[0], slopes[1], rtol=1e-9)
