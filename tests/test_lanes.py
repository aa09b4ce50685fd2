"""Lanes: whoever is done makes room for the next client, and nothing else changes."""

from __future__ import annotations

import functools
import heapq
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, assert_trees, play

import fedjax_sim as fs
from fedjax_sim import personal
from fedjax_sim.base import LocalUpdate, Trained, TrainInSteps, Wrapper
from fedjax_sim.engine.chunks import Addend
from fedjax_sim.engine.device import lanes_for, launch_price
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.lanes import InSteps
from fedjax_sim.models import layers
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.programs import Programs

STRETCH = 3


class _Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: Any = None) -> jax.Array:
        normed: jax.Array = layers.BatchNorm()(x[:, None, None], train=train, mask=mask)[:, 0, 0]
        return nn.Dense(3)(normed)


NORMED = fs.models.from_linen(_Normed(), (6,))


def by_hand(steps: Any, lanes: int) -> int:
    """The last lane's end, if each in turn takes the longest task that is left."""
    ends = [0] * lanes
    for each in sorted(map(int, steps), reverse=True):
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def counting() -> InSteps:
    """From a start x0, each step of a task x <- (x + a) mod 97, in stretches of up to three.

    What it makes of a task that is not due is wrong, as it may be. Its sum is that of x, weighted
    by a.
    """

    def spoilt(due: Any, value: Any) -> Any:
        return jnp.where(due, value, jnp.nan)

    def begin(_: Any, x0: Any, own: Any, task: Any, due: Any) -> Any:
        return task[1] + jnp.where(due, 0, 50), spoilt(due, x0 + own)

    def stretch(_: Any, x0: Any, own: Any, task: Any, due: Any, left: Any, x: Any) -> Any:
        todo = jnp.minimum(left, STRETCH)
        return left - todo + jnp.where(due, 0, 50), jnp.where(due, todo, 0)

    def step(_: Any, x0: Any, own: Any, task: Any, left: Any, x: Any) -> Any:
        return (x + task[0].astype(jnp.float32)) % 97

    def end(_: Any, x0: Any, own: Any, task: Any, due: Any, left: Any, x: Any) -> Any:
        return (spoilt(due, x), task[1]), Addend(task[0].astype(jnp.float32), spoilt(due, x))

    def whole(_: Any, x0: Any, own: Any, task: Any) -> Any:
        x = (x0 + own + (task[0] * task[1]).astype(jnp.float32)) % 97
        x = jnp.where(task[1] > 0, x, x0 + own)
        return (x, task[1]), Addend(task[0].astype(jnp.float32), x)

    return InSteps(begin, stretch, step, end, whole, lambda out: out[1])


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("options", [{"lanes": 3}, {"chunk": 3}, {"chunk": 0}])
def test_tasks_share_what_the_server_sent(options: dict[str, Any], moves: bool) -> None:
    """Values of all tasks are nowhere stacked, if plans and carries only pass them on."""

    def begin(*given: Any) -> Any:
        _, sent, own, task, _ = given
        return (task, sent), (own, sent, sent)

    def stretch(_: Any, sent: Any, own: Any, task: Any, due: Any, plan: Any, carry: Any) -> Any:
        return (0 * plan[0], plan[1]), plan[0]

    def step(*given: Any) -> Any:
        *_, plan, carry = given
        return carry[0] + plan[1].sum() + carry[1].sum(), carry[1], carry[1] if moves else carry[2]

    def end(*given: Any) -> Any:
        return given[-1][0] + given[-1][2].sum(), given[3]

    def whole(_: Any, *given: Any) -> Any:
        plan, start = begin(_, *given, True)
        carry = jax.lax.fori_loop(0, given[2], lambda i, c: step(i, *given, plan, c), start)
        return end(_, *given, True, plan, carry)

    def run(sent: Any) -> Any:
        fn = InSteps(begin, stretch, step, end, whole, lambda out: out[1])
        given = (), sent, jnp.zeros(7), jnp.arange(7)
        return fs.make_execution(1, **options).run(fn, *given, cost=jnp.arange(7))[0][0]

    sent = jnp.ones(29)
    np.testing.assert_array_equal(run(sent), 29 * (1 + 2 * np.arange(7)))
    stacked = re.search(r"f32\[[37],29\]", str(jax.make_jaxpr(run)(sent))) is not None
    assert stacked == moves


def counted(execution: Execution, steps: Any, start: Any = 0.0) -> Any:
    """Results, sums and steps run of tasks of these lengths; their costs are their lengths."""
    count = np.shape(steps)[-1]
    own = jnp.arange(count, dtype=jnp.float32)

    def run(steps: Any, start: Any) -> Any:
        tasks = jnp.arange(1, count + 1, dtype=jnp.int32), steps
        return execution.run(counting(), (), start, own, tasks, cost=steps, summed=True)

    steps = jnp.asarray(steps, jnp.int32)
    if steps.ndim == 1:
        return run(steps, jnp.float32(start))
    return jax.jit(jax.vmap(run))(steps, jnp.asarray(start, jnp.float32))


@pytest.mark.parametrize(("devices", "lanes"), [(1, 1), (1, 3), (1, 11), (1, 12), (2, 2), (4, 3)])
def test_every_task_runs_once_in_the_lane_that_is_free_first(devices: int, lanes: int) -> None:
    """Of all indices of a vmap together; some tasks have no step."""
    rng = np.random.default_rng(lanes)
    steps = (rng.pareto(1, (3, 12)) * 4).astype(int) % 60
    steps[:, 5] = 0
    start = np.array([0, 10, 20], np.float32)
    execution = fs.make_execution(devices, lanes=lanes)
    ((x, n), total), ran = counted(execution, steps, start)
    factor = np.arange(1, 13)
    wanted = start[:, None] + np.arange(12) + factor * steps
    wanted = np.where(steps > 0, wanted % 97, wanted)
    np.testing.assert_array_equal(x, wanted)
    np.testing.assert_array_equal(n, steps)
    np.testing.assert_allclose(total, (factor * wanted).sum(axis=1), rtol=1e-6)
    # The tasks of a device: as many of each list, the first ones first.
    blocks = np.swapaxes(steps, 0, 1).reshape(devices, -1)
    used = min(lanes, blocks.shape[1])
    last = max(by_hand(block, used) for block in blocks)
    assert np.asarray(ran).sum() == devices * used * last
    assert (np.asarray(ran) >= steps).all()


def test_runs_of_steep_sizes_keep_their_lanes_busy() -> None:
    """15 runs, 10 of 100 clients: all at once, one step in ten trains; in lanes, 19 of 20 do."""
    rng = np.random.default_rng(3)
    sizes = 1 + rng.multinomial(9_900, rng.dirichlet(np.full(100, 0.1)))
    steps = -(-sizes // 16)
    drawn = np.stack([rng.choice(steps, 10, replace=False) for _ in range(15)])
    lanes = lanes_for(np.broadcast_to(steps, (15, 100)), 10, 1, price=2)
    executions = [fs.make_execution(1, lanes=n) for n in (lanes, 150)]
    ran = [np.asarray(counted(ours, drawn, np.zeros(15))[1]).sum() for ours in executions]
    busy, idle = (drawn.sum() / n for n in ran)
    assert busy >= 0.95
    assert idle < 0.2


def local_sgd(model: fs.Model, **options: Any) -> LocalUpdate:
    sgd = optax.sgd(0.05, momentum=0.9)
    settings = {"batch_size": 4, "epochs": 1.5} | options
    return fs.local_sgd(fs.empirical_risk(model), sgd, **settings)


def one_and_lanes(
    make: Any, model: fs.Model, data: fs.ClientData, devices: int, lanes: int, rounds: int = 3
) -> tuple[Play, Play]:
    one, other = (
        play(make().on(execution), model, data, rounds)
        for execution in (fs.make_execution(1, 1), fs.make_execution(devices, lanes=lanes))
    )
    assert_trees(one.servers, other.servers, rtol=2e-5, atol=2e-6)
    assert_trees(one.final, other.final, rtol=2e-5, atol=2e-6)
    assert [int(m.steps) for m in one.metrics] == [int(m.steps) for m in other.metrics]
    assert_trees(
        [(s.client_state, s.shared_state) for s in one.states],
        [(s.client_state, s.shared_state) for s in other.states],
        rtol=2e-5, atol=2e-6,
    )  # fmt: skip
    return one, other


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "options", "settings", "devices", "lanes"),
    [
        ("scaffold", {"clients_per_round": 6}, {}, 1, 2),
        SLOW(
            "phase_shift",
            {"clients_per_round": 6, "phases": 3},
            {"optimizer_state": "keep"},
            2,
            2,
        ),
        SLOW(
            "fedprox",
            {"clients_per_round": 5, "mu": 0.5},
            {"max_steps": 7, "last_batch": "refill"},
            4,
            1,
        ),
        SLOW("fedavg", {"clients_per_round": 8}, {"optimizer_state": "average"}, 1, 7),
        SLOW("dp_sgd", {"clients_per_round": 6}, {}, 1, 3),
    ],
)
def test_lanes_change_no_result(
    federation: Federation,
    models: dict[str, fs.Model],
    name: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    devices: int,
    lanes: int,
) -> None:
    """Nor does a second round compile anything: :func:`play` looks."""
    model = models["logistic"]
    make = functools.partial(fs.ALGORITHMS[name], local_sgd(model, **settings), **options)
    _, other = one_and_lanes(make, model, federation.data, devices, lanes)
    assert all(int(m.executed) >= int(m.steps) for m in other.metrics)
    assert any(int(m.executed) < 6 * int(m.steps) for m in other.metrics)


@pytest.mark.slow
def test_nor_do_statistics_of_batch_norm(federation: Federation) -> None:
    make = functools.partial(fs.fedavg, local_sgd(NORMED), clients_per_round=6)
    one_and_lanes(make, NORMED, federation.data, 1, 2)


@pytest.mark.slow
def test_runs_share_the_lanes(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Each run has its own rate, and its own model at the end."""
    model, data, key = models["logistic"], jax.device_put(federation.data), jax.random.key(0)

    def trained(execution: Execution, lr: Any, seed: Any) -> Any:
        local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(lr), batch_size=8)
        algorithm = fs.fedavg(local, clients_per_round=4).on(execution)
        state = algorithm.init(key, model.init(key), data)
        state, metrics = algorithm.step(jax.random.key(seed), state, data)
        return state.server, metrics.steps, metrics.executed

    rates, seeds = jnp.array([0.1, 0.3, 0.9]), jnp.arange(3)
    one, lanes = (
        jax.jit(jax.vmap(functools.partial(trained, execution)))(rates, seeds)
        for execution in (fs.make_execution(1, 1), fs.make_execution(1, lanes=2))
    )
    assert_trees(one[:2], lanes[:2], rtol=2e-5, atol=2e-6)
    assert np.asarray(lanes[2]).sum() <= 1.2 * np.asarray(lanes[1]).sum()


def test_what_can_stop_between_its_steps(models: dict[str, fs.Model]) -> None:
    local = local_sgd(models["logistic"])
    objective = fs.empirical_risk(models["logistic"])
    assert isinstance(local.train, TrainInSteps)
    assert isinstance(fs.local.with_initial_loss(local, objective).train, TrainInSteps)
    assert not isinstance(fs.local.fedadmm(local).train, TrainInSteps)
    assert not isinstance(personal.ditto(local, 0.1).train, TrainInSteps)


def test_a_wrapper_that_cannot_stop_trains_all_the_same(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    local = local_sgd(models["logistic"])

    class plain(Wrapper):
        def train(self, *visit: Any) -> Trained:
            return self.local.train(*visit)

    states = [
        play(
            fs.fedavg(update, clients_per_round=5).on(fs.make_execution(1, 1, lanes=lanes)),
            models["logistic"], federation.data, 1,
        )
        for update, lanes in ((local, 0), (plain(local), 2))
    ]  # fmt: skip
    assert_trees(states[0].servers, states[1].servers, rtol=2e-5, atol=2e-6)


def test_the_lanes_fit_the_sizes_and_the_model(federation: Federation) -> None:
    """A product a step: its launches take as long as the bytes of the weights and the outputs."""

    def apply(variables: fs.Variables, x: jax.Array, **_: Any) -> tuple[jax.Array, Any]:
        return jnp.asarray(x, jnp.float32) @ variables.params["w"], ()

    def init(_: jax.Array) -> fs.Variables:
        return fs.Variables({"w": jnp.zeros((6, 3))}, ())

    model, here = fs.Model(init, apply), jax.devices()[:1]
    open_ = Execution(tuple(here), None, lanes=None)
    x = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    forward = jax.make_jaxpr(lambda v, x: apply(v, x)[0])(init(jax.random.key(0)), x).jaxpr
    price = 10 * 2.2e-6 / ((6 * 4 * 6 * 3 + 2 * 4 * 4 * 3) / 3e12)
    assert launch_price(forward, 4 * 6 * 3) == pytest.approx(price)

    def programs(execution: Execution, runs: int) -> Programs:
        algorithm = fs.fedavg(local_sgd(model), clients_per_round=6).on(execution)
        return Experiment(
            algorithm, model, federation.data, federation.test, classes=3, seeds=range(runs),
            execution=execution,
        ).runner().programs  # fmt: skip

    steps = np.round(1.5 * -(-federation.sizes // 4)).astype(int)
    for runs in (1, 5):
        fitted = programs(open_, runs).algorithm.parts.execution
        assert fitted.lanes == lanes_for(np.tile(steps, (runs, 1)), 6, 1, price)
    of_price = [lanes_for(steps[None], 6, 1, c) for c in (0, 2, price)]
    assert of_price == sorted(set(of_price))
    assert of_price[0] == 1
    of_devices = [lanes_for(np.tile(steps, (2 * d, 1)), 6, d, 2) for d in (1, 2)]
    assert of_devices[0] == of_devices[1]
    given = programs(Execution(tuple(here), None, lanes=4), 1).algorithm.parts.execution
    assert given.lanes == 4


def test_a_cpu_has_no_lanes_unless_it_is_told() -> None:
    assert fs.make_execution(1).lanes == 0
    assert fs.make_execution(1, lanes=3).lanes == 3
    for wrong, message in (
        ({"lanes": -1}, "lanes must be at least 0, got -1"),
        ({"devices": 1.0}, "devices must be a whole number, got 1.0"),
        ({"devices": []}, "devices must have at least one device, got none"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            fs.make_execution(**wrong)
