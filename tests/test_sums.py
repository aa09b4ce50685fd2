"""Updates that nobody reads are summed as the clients finish: the same mean, in constant memory."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, assert_trees, known, make_federation, play, promising

import fedjax_sim as fs
from fedjax_sim import broadcast, flight, preaggregation, selection, server
from fedjax_sim.base import Cohort, Diagnostic, Gathered, Sending, Server, Variables
from fedjax_sim.engine.chunks import Addend, run_in_chunks
from fedjax_sim.models import layers
from fedjax_sim.server.aggregators import coordinate_median


class reading(Diagnostic):
    def measure(
        self, key: Any, state: Any, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Any], Any]:
        return {}, state


class users_own(Server):
    def update(
        self, key: Any, step: Variables, server: Variables, state: Any, gathered: Gathered
    ) -> tuple[Variables, Any]:
        return step, state


class says_not(Server):
    reads_updates = False

    def update(
        self, key: Any, step: Variables, server: Variables, state: Any, gathered: Gathered
    ) -> tuple[Variables, Any]:
        return jax.tree.map(lambda a: a[0], gathered.updates.params), state


sent_as_it_is = Sending()
heavy = server.optimizer(optax.sgd(1.0, momentum=0.9))


class _Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: Any = None) -> jax.Array:
        normed: jax.Array = layers.BatchNorm()(x[:, None, None], train=train, mask=mask)[:, 0, 0]
        return nn.Dense(3)(normed)


NORMED = fs.models.from_linen(_Normed(), (6,))


def composed(model: fs.Model, **parts: Any) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=8)
    return fs.compose(local, **({"clients_per_round": 5} | parts))


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
def test_sums_are_those_of_numpy(chunk: int | None) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 3)).astype(np.float32)
    counts = rng.integers(0, 9, 7).astype(np.int32)
    weights = rng.uniform(1, 2, 7).astype(np.float32)
    entry = np.array([0, 2, 2, 0, 1, 0, 2], np.int32)
    wanted = [weights[entry == e] @ np.c_[values, counts][entry == e] for e in range(3)]
    weights[6], values[6] = 0, np.nan
    wanted[2] = weights[1:3] @ np.c_[values, counts][1:3]

    def fn(task: Any) -> tuple[Any, Addend]:
        weight, value, count = task
        return count + 1, Addend(weight, (value, count))

    out, (sums, whole) = jax.jit(
        lambda *tasks: run_in_chunks(fn, tasks, jnp.asarray(entry), 3, chunk)
    )(weights, values, counts)
    assert out.tolist() == (counts + 1).tolist()
    np.testing.assert_allclose(np.c_[sums, whole], wanted, rtol=1e-6)
    assert whole.dtype == jnp.float32  # a mean of whole numbers is none before it is rounded


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        ({}, False),
        ({"server": heavy}, False),
        ({"server": server.chain(heavy, server.mix(0.5))}, False),
        ({"server": server.chain(heavy, users_own())}, True),
        ({"server": users_own()}, True),
        ({"server": server.sign_agreement(2, heavy)}, True),
        ({"server": server.extrapolated()}, True),
        ({"broadcast": broadcast.stale(2)}, True),
        ({"aggregator": coordinate_median}, True),
        ({"preaggregation": (preaggregation.normalise(0.05),)}, True),
        ({"diagnostics": {"all": reading()}}, True),
        ({"sending": (sent_as_it_is,)}, True),
        ({"clients_per_round": 5, "flight": flight.delayed(2)}, True),
    ],
)
def test_who_reads_the_updates(
    models: dict[str, fs.Model], parts: dict[str, Any], held: bool
) -> None:
    assert composed(models["logistic"], **parts).parts.holds_updates == held


@functools.cache
def normed(devices: int, chunk: int, held: bool) -> Play:
    """With BatchNorm's statistics, which the mean takes too, and an optimiser that remembers."""
    algorithm = composed(
        NORMED,
        server=heavy,
        diagnostics={"all": reading()} if held else {},
    ).on(fs.make_execution(devices=devices, chunk=chunk))
    return play(algorithm, NORMED, make_federation().data, 3)


@pytest.mark.parametrize(("devices", "chunk"), [(1, 1), (3, 2)])
def test_the_mean_is_that_of_the_stack(devices: int, chunk: int) -> None:
    together, one_by_one = normed(1, 1, True), normed(devices, chunk, False)
    assert_trees(together.servers, one_by_one.servers, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_rate_for_each_run(federation: Federation, models: dict[str, fs.Model]) -> None:
    """The sums of runs that a vmap merges are kept apart."""
    model, data, key = models["logistic"], jax.device_put(federation.data), jax.random.key(0)

    def trained(lr: Any, seed: Any) -> Any:
        local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(lr), batch_size=8)
        algorithm = fs.fedavg(local, clients_per_round=4).on(fs.make_execution(devices=2, chunk=3))
        state = algorithm.init(key, model.init(key), data)
        return algorithm.step(jax.random.key(seed), state, data)[0].server

    rates, seeds = jnp.array([0.1, 0.3]), jnp.arange(2)
    over_seeds = jax.vmap(trained, in_axes=(None, 0))
    together = jax.jit(jax.vmap(over_seeds, in_axes=(0, None)))(rates, seeds)
    one = jax.jit(trained)
    for i, j in np.ndindex(2, 2):
        alone = jax.tree.map(lambda a, i=i, j=j: a[i, j], together)
        assert_trees(alone, one(rates[i], seeds[j]), rtol=2e-5, atol=2e-6)


def test_nobody_trains(federation: Federation, models: dict[str, fs.Model]) -> None:
    """An empty cohort, as Poisson sampling may draw one, moves nothing."""
    nobody = promising(
        selection.uniform(),
        draw=lambda self, key, state, data, clients, free, visits: (
            jnp.full_like(clients, data.clients),
            state,
        ),
    )
    execution = fs.make_execution(devices=1)
    run = play(composed(models["logistic"], selection=nobody).on(execution),
               models["logistic"], federation.data, 1)  # fmt: skip
    assert_trees(run.servers[0], models["logistic"].init(jax.random.fold_in(jax.random.key(0), 0)))


def temporaries(federation: Federation, model: fs.Model, cohort: int, **parts: Any) -> int:
    algorithm = composed(
        model, clients_per_round=cohort,
        **parts,
    ).on(fs.make_execution(devices=1, chunk=1))  # fmt: skip
    variables = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(algorithm.init, jax.random.key(0), variables, federation.data)
    program = jax.jit(algorithm.step).lower(jax.random.key(0), state, federation.data).compile()
    memory: Any = known(program.memory_analysis())
    return memory.temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_cohort() -> None:
    federation = make_federation(sizes=(2,) * 60, shape=(2000,), tests=1)
    model, size = fs.models.logistic((2000,), 3), 4 * (2000 * 3 + 3)
    assert temporaries(federation, model, 60) < 10 * size
    assert temporaries(federation, model, 60, diagnostics={"all": reading()}) > 55 * size


def test_what_is_not_held_cannot_be_read(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    with pytest.raises(AttributeError, match="params"):
        play(composed(models["logistic"], server=says_not()), models["logistic"],
             federation.data, 1)  # fmt: skip
