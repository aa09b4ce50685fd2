"""What must not change a result: order, padding, chunks, devices, batching; and the parts' laws."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    Federation,
    Play,
    altered_data,
    assert_trees,
    known,
    largest_change,
    play,
    some_slow,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from scipy import stats
from test_contracts import PARTS

import fedjax_sim as fs
from fedjax_sim import flight, redistribution, selection, tree, weighting
from fedjax_sim.base import LocalUpdate
from fedjax_sim.data import eval_set
from fedjax_sim.engine.batches import shuffled
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.engine.execution import Execution
from fedjax_sim.models import convolutions, layers
from fedjax_sim.run.cache import count_programs
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.runner import Runner

ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}
few = settings(max_examples=30, deadline=None, derandomize=True)


def local_sgd(model: fs.Model, **options: Any) -> LocalUpdate:
    return fs.local_sgd(
        fs.empirical_risk(model), optax.sgd(0.05, momentum=0.9), **{"epochs": 2, **options}
    )


class reordered(selection.uniform):
    """A uniform selection that reverses the clients that it draws, inside each group."""

    groups: int = 1

    def draw(
        self, key: Any, state: Any, data: Any, clients: Any, free: Any, visits: Any
    ) -> tuple[Any, Any]:
        drawn, state = super().draw(key, state, data, clients, free, visits)
        return drawn.reshape(self.groups, -1)[:, ::-1].reshape(-1), state


@pytest.mark.parametrize("kind", some_slow(["fedavg", "radfed", "phase_shift"]))
def test_cohort_order_is_invisible(
    federation: Federation, models: dict[str, fs.Model], kind: str
) -> None:
    groups = 3 if kind == "phase_shift" else 1
    compositions: dict[str, dict[str, Any]] = {
        "fedavg": {"clients_per_round": 6},
        "radfed": {
            "clients_per_round": 6,
            "flight": flight.delayed(2, redistribution=redistribution.permute),
            "weighting": weighting.equal,
        },
        "phase_shift": {
            "clients_per_round": 6,
            "flight": flight.staggered(3, refresh=flight.drift_correction()),
        },
    }
    execution = fs.make_execution() if kind == "fedavg" else ONE["execution"]
    sticky, model = kind == "phase_shift", models["logistic"]
    a, b = (
        play(
            fs.compose(local_sgd(model), selection=chosen, **compositions[kind]).on(execution),
            model,
            federation.data,
            4,
        )
        for chosen in (selection.uniform(sticky=sticky), reordered(groups=groups, sticky=sticky))
    )
    assert_trees(a.servers, b.servers)
    assert_trees(a.final, b.final)


def test_client_numbers_are_invisible(federation: Federation, models: dict[str, fs.Model]) -> None:
    data, model = federation.data, models["logistic"]
    lists = [data.index[data.start[k] : data.start[k + 1]] for k in (4, 2, 7, 0, 1, 6, 3, 5)]
    moved = altered_data(
        data,
        index=np.concatenate(lists),
        start=np.cumsum([0, *map(len, lists)]).astype(np.int32),
    )
    algorithm = fs.fedavg(local_sgd(model, batch_size=64, epochs=1), clients_per_round=8).on(
        ONE["execution"]
    )
    key, start = jax.random.key(0), model.init(jax.random.key(1))
    step = jax.jit(algorithm.step)

    def final(data: fs.ClientData) -> Any:
        state = algorithm.init(key, start, data)
        for t in range(3):
            state, _ = step(jax.random.fold_in(key, t), state, data)
        return state.server

    assert_trees(final(data), final(moved), rtol=1e-5, atol=1e-6)


def test_others_samples_never_leak(federation: Federation, models: dict[str, fs.Model]) -> None:
    """Everything but client 3's own samples is NaN; its short last minibatch is padded."""
    data, model = federation.data, models["logistic"]
    mine = data.index[data.start[3] : data.start[4]]
    x = np.full_like(data.x, np.nan)
    x[mine] = data.x[mine]
    variables, local = model.init(jax.random.key(0)), local_sgd(model)

    @jax.jit
    def train(d: fs.ClientData) -> Any:
        task = tree.take(visits(d, jnp.array([3])), jnp.int32(0))
        empty = ((), ())
        return local.train(
            jax.random.key(1), variables, task.view(samples_of(d), d), empty, empty
        ).variables

    a, b = train(data), train(altered_data(data, x=x))
    assert_trees(a, b)
    assert largest_change(a, variables) > 1e-3


@pytest.fixture(scope="module")
def reference(federation: Federation, models: dict[str, fs.Model]) -> Play:
    return on(federation, models, 1, 1)


def on(federation: Federation, models: dict[str, fs.Model], devices: int, chunk: int) -> Play:
    algorithm = fs.phase_shift(
        local_sgd(models["logistic"]),
        clients_per_round=8,
        phases=2,
    ).on(fs.make_execution(devices=devices, chunk=chunk))
    return play(algorithm, models["logistic"], federation.data, 4)


@pytest.mark.parametrize(("devices", "chunk"), some_slow([(3, 2), (1, 0)]))
def test_chunks_and_devices_are_invisible(
    federation: Federation,
    models: dict[str, fs.Model],
    reference: Play,
    devices: int,
    chunk: int,
) -> None:
    other = on(federation, models, devices, chunk)
    assert_trees(reference.servers, other.servers, rtol=2e-5, atol=2e-6)
    assert_trees(reference.final, other.final, rtol=2e-5, atol=2e-6)
    steps = [[int(m.steps) for m in p.metrics] for p in (reference, other)]
    assert steps[0] == steps[1]
    assert all(int(m.executed) >= int(m.steps) for m in other.metrics)


def test_advancing_again_compiles_nothing(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    algorithm = fs.fedavg(local_sgd(models["logistic"]), clients_per_round=4).on(ONE["execution"])
    sets = (eval_set(*federation.test),)
    programs = Programs(algorithm, models["logistic"], federation.task, federation.data, sets, 1, 3)
    experiment = Runner(programs)
    run = experiment.start((0,))
    run, _, _ = experiment.advance(run, 3)
    with count_programs() as counter:
        run, _, _ = experiment.advance(run, 3)
        run, _, _ = experiment.advance(run, 1)  # a shorter last stretch
        assert counter.programs == 0
        jax.jit(lambda x: x * 3.25)(np.ones(17)).block_until_ready()
        assert counter.programs == 1  # the counter does count
    assert int(run.state.round) == 7


def test_batch_norm_ignores_padding() -> None:
    norm = layers.BatchNorm()
    x = jax.random.normal(jax.random.key(0), (5, 4, 3, 2)) * 2 + 1
    padded = jnp.concatenate([x, jnp.full((3, 4, 3, 2), 77.0)])
    mask = jnp.arange(8) < 5
    variables = norm.init(jax.random.key(0), x, train=False)

    def loss(params: Any, x: jax.Array, mask: jax.Array | None) -> Any:
        out, state = norm.apply(
            {**variables, "params": params}, x, train=True, mask=mask, mutable=["batch_stats"]
        )
        weights = jnp.arange(5 * 24, dtype=jnp.float32).reshape(5, 4, 3, 2)
        return jnp.sum(jnp.sin(out[:5]) * weights), (out[:5], state)

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (a, aux), (dp, dx) = grad(variables["params"], x, None)
    (b, aux_pad), (dp_pad, dx_pad) = grad(variables["params"], padded, mask)
    assert_trees((a, aux, dp, dx), (b, aux_pad, dp_pad, dx_pad[:5]), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(dx_pad[5:]), 0)
    flat = np.asarray(x).reshape(-1, 2)
    np.testing.assert_allclose(
        aux_pad[1]["batch_stats"]["var"], 0.9 + 0.1 * flat.var(axis=0, ddof=1), rtol=1e-5
    )


@pytest.mark.slow
def test_dropout_is_off_in_evaluation() -> None:
    model = fs.models.mnist_cnn((16, 16, 1), 3)
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((2, 16, 16, 1), jnp.float32)
    variables = jax.eval_shape(model.init, key)
    for train in (True, False):
        apply = functools.partial(model.apply, train=train)
        program = str(
            jax.make_jaxpr(lambda v, x, key, f=apply: f(v, x, key=key))(variables, x, key)
        )
        assert ("random_bits" in program) == train


_shuffled = jax.jit(shuffled, static_argnums=2)


@few
@given(st.sampled_from([1, 32, 33, 300]), st.integers(0, 2**31), st.data())
def test_shuffled_is_a_permutation(capacity: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, capacity))
    order, larger = (
        np.asarray(_shuffled(jax.random.key(seed), jnp.int32(size), most))
        for most in (capacity, 400)
    )
    assert sorted(order[:size].tolist()) == list(range(size))
    assert order[:size].tolist() == larger[:size].tolist()  # whatever the largest client has
    assert (order[size:] >= size).all()
    assert len(order) >= capacity


@pytest.mark.parametrize(("size", "capacity"), [(7, 7), (7, 40), (33, 64)])
def test_shuffled_is_uniform(size: int, capacity: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    orders = np.asarray(jax.jit(jax.vmap(lambda k: shuffled(k, jnp.int32(size), capacity)))(keys))[
        :, :size
    ]
    table = np.stack([np.bincount(orders[:, p], minlength=size) for p in range(size)])
    chi = ((table - 4000 / size) ** 2 / (4000 / size)).sum()
    assert chi < stats.chi2.ppf(0.9999, (size - 1) ** 2)
    assert chi > stats.chi2.ppf(0.0001, (size - 1) ** 2)


@functools.cache
def _deal(devices: int, lists: int) -> Any:
    execution = Execution(tuple(jax.devices()[:devices]), None)
    return jax.jit(execution.deal if lists == 0 else jax.vmap(execution.deal))


def test_permutations_are_uniform() -> None:
    keys = jax.random.split(jax.random.key(0), 3000)
    drawn = jax.jit(jax.vmap(lambda key: redistribution.permute(key, 3).source))(keys)
    counts = np.unique(np.asarray(drawn), axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3


def test_what_stays_was_not_received() -> None:
    swap = redistribution.Gather(jnp.array([0, 2, 1, 3]))
    assert swap.received().tolist() == [0, 1, 1, 0]
    mixing = redistribution.Mixing(jnp.array([[0.5, 0.5, 0], [0, 1, 0], [0.2, 0.3, 0.5]]))
    assert mixing.received().tolist() == [1, 0, 2]


@few
@given(
    st.sampled_from([(1, 5), (4, 12), (3, 7)]),
    st.sampled_from([0, 3]),
    st.data(),
)
def test_deal(shape: tuple[int, int], lists: int, data: st.DataObject) -> None:
    """Every task once, padding rows elsewhere, loads within twice the best that could be."""
    devices, count = shape
    rows, block = max(lists, 1), -(-count // devices)
    costs = np.array(
        data.draw(st.lists(st.integers(1, 500), min_size=rows * count, max_size=rows * count)),
        np.int32,
    ).reshape(rows, count)
    out = np.asarray(_deal(devices, lists)(costs if lists else costs[0]))
    out = out.reshape(rows, devices * block)
    for row in out:
        assert sorted(row.tolist()) == [*range(count), *[count] * (devices * block - count)]
    if lists == 0:
        loads = np.append(costs[0], 0)[out[0]].reshape(devices, block).sum(axis=1)
        assert loads.max() <= 2 * max(costs.max(), -(-costs.sum() // devices))


@pytest.mark.parametrize(("devices", "runs"), [(2, 15), (4, 3)])
def test_runs_balance_over_all_devices(devices: int, runs: int) -> None:
    costs = np.random.default_rng(0).exponential(100, (runs, 8)).astype(np.int32)
    rows = np.asarray(_deal(devices, runs)(costs))
    assert (np.sort(rows, axis=1) == np.arange(8)).all()
    loads = np.take_along_axis(costs, rows, axis=1).reshape(runs, devices, -1).sum(axis=(0, 2))
    assert loads.max() <= 1.02 * loads.mean()


@pytest.mark.parametrize("pads", [((0, 0), (0, 0)), ((2, 2), (2, 2)), ((1, 0), (0, 2))])
def test_convolution(pads: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 7, 6, 2))
    kernel = jax.random.normal(keys[1], (3, 2, 2, 4))

    def plain(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    ways: dict[Any, Any] = {
        way: functools.partial(convolutions.conv, padding=pads, lowering=way)
        for way in (None, "lax", "direct", "im2col")
    }
    dy = jax.random.normal(keys[2], jax.eval_shape(plain, x, kernel).shape)

    @jax.jit
    def all_of_them() -> Any:
        pulled = [jax.vjp(f, x, kernel) for f in (plain, *ways.values())]
        return [(y, *back(dy)) for y, back in pulled]

    wanted, *found = all_of_them()
    for way, ours in zip(ways, found, strict=True):
        for a, b in zip(wanted, ours, strict=True):
            atol = 2e-5 * np.abs(a).max()
            np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=str(way))


def test_a_convolution_is_lowered_for_the_platform_it_is_compiled_for() -> None:
    """Of one grey image a CPU gathers the patches; other platforms get one convolution."""
    x, kernel = jnp.ones((2, 8, 8, 1)), jnp.ones((3, 3, 1, 4))
    conv = jax.jit(lambda x, k: convolutions.conv(x, k, ((1, 1), (1, 1))))
    for platform, patches in (("cpu", True), ("cuda", False), ("tpu", False)):
        text = str(export.export(conv, platforms=[platform])(x, kernel).mlir_module())
        assert ("stablehlo.dot_general" in text) == patches
        assert ("stablehlo.convolution" in text) == (not patches)
    assert "conditional" not in known(conv.lower(x, kernel).compile().as_text())


def test_one_mean_of_many_runs_is_taken_in_one_way() -> None:
    """Only where a row is absent in some run are all of them copied; NaN there harms none."""
    rows = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    weights = np.ones((3, 4), np.float32)
    weights[1, 2] = 0
    stack = rows.copy()
    stack[1, 2] = np.nan
    means = jax.vmap(tree.mean)(stack, jnp.asarray(weights))
    for mean, run, share in zip(means, rows, weights, strict=True):
        np.testing.assert_allclose(mean, np.average(run, axis=0, weights=share), rtol=1e-5)
    assert "cond[" in str(jax.make_jaxpr(jax.vmap(tree.mean))(stack, jnp.ones((3, 4))))


@pytest.mark.parametrize("shape", [(2, 6, 4, 3), (2, 7, 5, 3)])
def test_max_pool(shape: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(0), shape)

    @jax.jit
    def both() -> Any:
        a, back_a = jax.vjp(lambda x: nn.max_pool(x, (2, 2), (2, 2)), x)
        b, back_b = jax.vjp(layers.max_pool, x)
        dy = jax.random.normal(jax.random.key(1), a.shape)
        return (a, *back_a(dy)), (b, *back_b(dy))

    assert_trees(*both())


finite = st.floats(-100, 100, width=32)
weight = st.floats(0.125, 100, width=32)


@pytest.mark.parametrize("name", sorted(PARTS["Aggregator"]))
@few
@given(
    st.lists(finite, min_size=8, max_size=8),
    st.lists(weight, min_size=4, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 3),
)
def test_aggregator_contract(
    name: str, values: list[float], weights: list[float], order: list[int], absent: int
) -> None:
    aggregate = _aggregate(name)
    rows, w = np.array(values, np.float32).reshape(4, 2), np.array(weights, np.float32)

    def stack(rows: np.ndarray) -> Any:
        return {"a": rows, "b": rows[:, :1], "h": rows.astype(jnp.bfloat16)}

    out = aggregate(stack(rows), w)
    assert jax.tree.map(lambda a: (a.dtype, a.shape), out) == jax.tree.map(
        lambda a: (a.dtype, a.shape[1:]), stack(rows)
    )

    shuffle = np.array(order)
    again = aggregate(stack(rows[shuffle]), w[shuffle])
    assert_trees(out["a"], again["a"], rtol=1e-5, atol=1e-4)

    same = np.repeat(rows[:1], 4, axis=0)
    assert_trees(aggregate(stack(same), w)["a"], rows[0], rtol=1e-5, atol=1e-5)

    gone, poisoned = w.copy(), rows.copy()
    gone[absent], poisoned[absent] = 0, np.nan
    left = aggregate(stack(rows), gone)
    assert_trees(aggregate(stack(poisoned), gone)["a"], left["a"])


@functools.cache
def _aggregate(name: str) -> Any:
    return jax.jit(PARTS["Aggregator"][name]())
