"""One program scores all models of a kind, whatever trained them."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees

import fedjax_sim as fs
from fedjax_sim.data import eval_set
from fedjax_sim.engine.memory import peak_bytes
from fedjax_sim.run.cache import evaluation_program
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.layout import RunAxes

ONE = fs.make_execution(devices=1)


def local_of(model: fs.Model, rate: float = 0.1) -> Any:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(rate), batch_size=8)


def hinge(logits: jax.Array, y: jax.Array) -> jax.Array:
    right = jnp.take_along_axis(logits, y[:, None], axis=-1)
    wrong = jnp.arange(logits.shape[-1], dtype=y.dtype)[None] != y[:, None]
    return jnp.sum(jnp.where(wrong, jnp.maximum(1.0 + logits - right, 0.0), 0.0), axis=-1)


@pytest.mark.slow
def test_each_loss_has_its_own_scores(federation: Federation) -> None:
    """Of the same model, task and sets."""
    model = fs.models.logistic((6,), 3)
    algorithm = fs.fedavg(local_of(model), clients_per_round=4).on(ONE)

    def result(**options: Any) -> fs.Result:
        given = algorithm, model, federation.data, federation.test
        return fs.simulate(*given, rounds=1, classes=3, **options)

    plain, other, again = result(), result(loss=hinge), result()
    x, y = map(jnp.asarray, federation.test)
    variables = jax.tree.map(lambda a: jnp.asarray(a)[0], other.variables)
    expected = hinge(model.apply(variables, x, train=False)[0], y).mean()
    assert other.evaluations[-1].test.pooled.loss[0] == pytest.approx(float(expected), rel=1e-5)
    assert_trees(plain.evaluations[-1].test.pooled.loss, again.evaluations[-1].test.pooled.loss)
    assert again.xla_programs == 0


@pytest.mark.slow
def test_runs_with_sets_of_their_own_share_nothing_with_others(federation: Federation) -> None:
    model = fs.models.logistic((6,), 3)
    algorithm = fs.fedavg(local_of(model), clients_per_round=4).on(ONE)
    x, y = federation.test
    sizes = np.array([len(x[s::2]) for s in (0, 1)])
    halves = [
        fs.partition.Partition(
            np.arange(s, len(x), 2, dtype=np.int32), np.array([0, sizes[s]], np.int32)
        )
        for s in (0, 1)
    ]

    def accuracy(test: Any) -> Any:
        given = algorithm, model, federation.data, test
        return fs.simulate(*given, rounds=1, classes=3, seeds=(0, 0)).accuracy[-1]

    whole, own = accuracy((x, y)), accuracy(eval_set(x, y, halves))
    assert own @ sizes / len(x) == pytest.approx(whole[0])
    assert own[0] != own[1]


def test_a_device_holds_run_and_data_while_it_scores(federation: Federation) -> None:
    """A large test set, beside as large a data set."""
    x, y = (np.concatenate([np.asarray(a)] * 50) for a in (federation.data.x, federation.data.y))
    data = fs.client_data(x, y, federation.partition)
    model = fs.models.logistic((6,), 3)
    algorithm = fs.algorithms.scaffold(local_of(model), clients_per_round=4).on(ONE)
    made = Experiment(
        algorithm, model, data, (x.copy(), y.copy()), classes=3, execution=ONE
    ).runner()
    made.start((0,))
    kept = sum(a.nbytes for a in jax.tree.leaves(made.start((0,)).state.client_state))
    clients, tested = (
        sum(a.nbytes for a in jax.tree.leaves(of)) for of in (data, made.programs.sets)
    )
    assert min(kept, clients, tested) > 0
    for name, least in (("evaluate", clients + kept), ("advance", tested)):
        beside = made._bytes_during(name) - peak_bytes(made._compiled[name])
        assert least <= beside < 1.2 * least  # each array once
    assert made.device_bytes == max(made._bytes_during(name) for name in made._compiled)


@pytest.mark.slow
def test_a_model_may_be_applied_by_what_is_no_key(federation: Federation) -> None:
    @dataclasses.dataclass
    class Scaled:
        by: float

        def __call__(self, variables: Any, x: Any, **options: Any) -> Any:
            del options
            return x[:, :3] * (variables.params * self.by), ()

    def init(key: jax.Array) -> fs.Variables:
        del key
        return fs.Variables(jnp.float32(1.0), ())

    found = []
    for by in (1.0, -1.0):
        model = fs.Model(init, Scaled(by))
        algorithm = fs.fedavg(local_of(model, rate=0.0), clients_per_round=4).on(ONE)
        given = algorithm, model, federation.data, federation.test
        found.append(fs.simulate(*given, rounds=1, classes=3).accuracy[-1, 0])
    x, y = federation.test
    assert found == pytest.approx([np.mean(np.argmax(s * x[:, :3], 1) == y) for s in (1, -1)])


@pytest.mark.slow
def test_what_scores_goes_with_the_model(federation: Federation) -> None:
    """Or the trunks of all models of a session would stay."""
    model = fs.models.logistic((6,), 3)
    sets = (eval_set(*federation.test),)
    axes = RunAxes.of(federation.data, sets, 2)
    score = evaluation_program(model.apply, federation.task, ONE, axes)
    keys = jax.random.split(jax.random.key(0), 2)
    score.trace(jax.eval_shape(jax.vmap(model.init), keys), sets).lower().compile()
    gone = weakref.ref(model.apply), weakref.ref(score)
    del model, score
    gc.collect()
    assert [known() for known in gone] == [None, None]
