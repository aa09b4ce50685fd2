"""Loops of static length where all clients take as many steps; they change no bit."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation

import fedjax_sim as fs
from benchmarks.kernels import Program
from fedjax_sim.base import ClientView, LocalUpdate
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import programs_of
from fedjax_sim.run.experiment import Experiment

X = np.random.default_rng(0).integers(-1, 2, (40, 2)).astype(np.float32)
WEIGHTS = np.array([1, -2], np.float32)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], bool]] = {
    "equal": ((8, 8, 8), {"epochs": 2}, True),
    "as many minibatches": ((7, 8, 5), {"epochs": 2}, True),
    "refill": ((6, 6, 6), {"epochs": 2, "last_batch": "refill"}, True),
    "drop": ((9, 11, 8), {"epochs": 2, "last_batch": "drop"}, True),
    "none": ((3, 2, 1), {"last_batch": "drop"}, True),
    "a fraction of an epoch": ((16, 16, 16), {"epochs": 0.5}, True),
    "a shorter last epoch": ((8, 8, 8), {"epochs": 1.5}, True),
    "the first step": ((4, 12, 9), {"epochs": 2, "max_steps": 1}, True),
    "more than the epoch of some": ((4, 12, 9), {"epochs": 4, "max_steps": 2}, False),
    "unequal": ((4, 12, 9), {}, False),
    "own epochs": ((8, 8, 8), {"epochs": (1, 3, 2, 1)}, False),
    "until": ((8, 8, 8), {"epochs": 2, "until": lambda _, epoch, __: epoch > 0}, False),
}  # fmt: skip


def trained(sizes: tuple[int, ...], local: LocalUpdate, *, known: bool) -> Any:
    """A visit to each client under vmap, and to none; all numbers are small integers."""
    start = np.cumsum([0, *sizes])
    variables = fs.Variables({"w": jnp.asarray(WEIGHTS)}, ())
    states = local.client_state(variables), local.shared_state(variables)
    view = functools.partial(
        ClientView,
        jnp.asarray(X), jnp.zeros(40, jnp.int32), jnp.arange(40, dtype=jnp.int32),
        capacity=20, size_range=(min(sizes), max(sizes)) if known else None,
    )  # fmt: skip

    def one(start: jax.Array, size: jax.Array, client: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(5), start)
        return local.train(key, variables, view(start=start, size=size, id=client), *states)

    of_all = jax.vmap(one)
    count = jnp.arange(len(start), dtype=jnp.int32)
    clients = jnp.asarray(start, jnp.int32), jnp.asarray([*sizes, 0], jnp.int32), count
    return jax.jit(of_all)(*clients), jax.make_jaxpr(of_all)(*clients).jaxpr


def risk(params: Any, state: Any, batch: Any, context: Any) -> tuple[jax.Array, Any]:
    """Its gradient is integer, and momentum 2 makes the order of the samples count."""
    return jnp.sum(batch.x @ params["w"], where=batch.mask), state


def selects(jaxpr: Any) -> bool:
    """Whether a loop ends apart for each client: it selects the old or new carry in every step."""
    return any(
        e.primitive.name == "while" and e.params["cond_jaxpr"].out_avals[0].shape != ()
        for e in equations(jaxpr)
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs_of(equation):
            yield from equations(inner)


@pytest.mark.parametrize("name", CASES)
def test_known_steps_change_no_bit(name: str) -> None:
    sizes, settings, known = CASES[name]
    local = fs.local_sgd(risk, optax.sgd(1.0, momentum=2.0), **({"batch_size": 4} | settings))
    (out, found), (wanted, batched) = (trained(sizes, local, known=k) for k in (True, False))
    jax.tree.map(np.testing.assert_array_equal, out, wanted)
    assert out.info.steps[-1] == 0
    np.testing.assert_array_equal(out.variables.params["w"][-1], WEIGHTS)
    assert selects(batched)
    assert selects(found) != known
    endless = any(e.primitive.name == "while" for e in equations(found))
    assert endless == (not known or name == "a shorter last epoch")


def test_a_sweep_ends_where_it_did() -> None:
    """The fold doubles the sum at each minibatch, also at one without samples."""

    def folded(size: jax.Array, size_range: tuple[int, int] | None) -> jax.Array:
        client = ClientView(
            jnp.asarray(X), jnp.zeros(40), jnp.arange(40), jnp.int32(3), size, 20,
            size_range=size_range,
        )  # fmt: skip
        total: jax.Array = sweep(
            client, 2, lambda a, batch: 2 * a + jnp.sum(batch.x, where=batch.mask[:, None]),
            jnp.float32(1),
        )  # fmt: skip
        return total

    sizes = jnp.array([5, 6, 0], jnp.int32)
    for size_range in ((5, 6), (5, 8)):
        found, wanted = (jax.vmap(folded, (0, None))(sizes, k) for k in (size_range, None))
        np.testing.assert_array_equal(found, wanted)
    assert wanted[-1] == 1


def test_a_run_under_vmap_knows_the_sizes(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    model, device = models["logistic"], tuple(jax.devices()[:1])
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=4)

    def programs(data: Any, execution: Execution) -> Any:
        algorithm = fs.fedavg(local, clients_per_round=3)
        experiment = Experiment(
            algorithm, model, data, federation.test, classes=3, execution=execution
        )
        return experiment.runner().programs

    some = np.arange(15, dtype=np.int32).reshape(3, 5)
    x, y = np.asarray(federation.data.x), np.asarray(federation.data.y)
    even = fs.client_data(x, y, fs.partition.partition_from_lists([*some]))
    at_once = Execution(device, None)
    for data, known in ((even, True), (federation.data, False)):
        made = programs(data, at_once)
        sizes = np.diff(data.start)
        assert made.data.size_range == (sizes.min(), sizes.max())
        program = dict(made.lowered())["advance"].compile()
        assert Program(program.as_text()).step().known == known
    for other in (fs.make_execution(1), Execution(device, None, differentiable=True)):
        assert programs(even, other).data.size_range is None


def test_other_samples_are_another_range() -> None:
    """Views of other samples are made by ``part``; in lanes, clients that are not due have none."""
    found = [
        path.name
        for path in Path(fs.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclasses.replace"
        if any(argument.arg == "size" for argument in call.keywords)
    ]
    assert sorted(found) == ["data.py", "training.py"]


def test_cuda_selects_where_weights_share_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of steps that count; programs for CPUs and unique shapes have no select."""
    new = {"a": jnp.ones(3), "b": jnp.full(3, 2.0), "c": jnp.ones(4)}
    old = jax.tree.map(jnp.zeros_like, new)
    traced = jax.jit(tree.select_updated).trace(jnp.array(True), new, old)
    found = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert {p: text.count("stablehlo.select") for p, text in found.items()} == {"cpu": 0, "cuda": 2}

    def on_cuda(*args: Any, cuda: Any, default: Any) -> Any:
        return cuda(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", on_cuda)
    taken = {used: tree.select_updated(jnp.array(used), new, old) for used in (True, False)}
    assert jax.tree.all(jax.tree.map(jnp.array_equal, taken[True], new))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, taken[False], old | {"c": new["c"]}))
