"""What users look for in a result: who took part, what was kept, what an exception leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known, play

import fedjax_sim as fs
from fedjax_sim.base import Array, ClientData, PyTree, Variables

ROUNDS = 3
ONE = fs.make_execution(1)


def local_of(model: fs.Model) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)


def run(
    federation: Federation, model: fs.Model, algorithm: fs.Algorithm, **settings: Any
) -> fs.Result:
    usual: dict[str, Any] = {"rounds": ROUNDS, "eval_every": 1, "seeds": (0, 5), "execution": ONE}
    return fs.simulate(
        algorithm, model, federation.data, federation.test, classes=federation.classes,
        **(usual | settings),
    )  # fmt: skip


@pytest.fixture(scope="module")
def radfed(federation: Federation, models: dict[str, fs.Model]) -> fs.Result:
    """RADFed with SCAFFOLD's variates, of which the server model is kept at each evaluation."""
    local = local_of(models["logistic"]).change(corrections=(fs.corrections.scaffold(),))
    algorithm = fs.radfed(local, clients_per_round=4, redistribution_rounds=3, execution=ONE)
    return run(
        federation, models["logistic"], algorithm, eval_every=2,
        record=lambda state: (state.round, state.server),
    )  # fmt: skip


@pytest.fixture(scope="module")
def fedavg(models: dict[str, fs.Model]) -> fs.Algorithm:
    """One object, which is compiled once."""
    return fs.fedavg(local_of(models["logistic"]), clients_per_round=4, execution=ONE)


def test_every_round_reports(federation: Federation, radfed: fs.Result) -> None:
    metrics = radfed.metrics
    client, source = metrics.client, metrics.source
    assert client.shape == source.shape == (2, ROUNDS, 4)
    assert (np.diff(np.sort(client, axis=-1), axis=-1) > 0).all()
    assert metrics.loss.shape == (2, ROUNDS)  # though only rounds 2 and 3 were evaluated
    np.testing.assert_array_equal(metrics.samples, federation.sizes[client].sum(axis=-1))
    assert (np.sort(source, axis=-1) == np.arange(4)).all()  # permutations
    assert (source[:, 1:] != np.arange(4)).any()


@pytest.mark.slow
def test_rounds_one_by_one_report_the_same(
    federation: Federation, models: dict[str, fs.Model], radfed: fs.Result
) -> None:
    local = local_of(models["logistic"]).change(corrections=(fs.corrections.scaffold(),))
    algorithm = fs.radfed(local, clients_per_round=4, redistribution_rounds=3, execution=ONE)
    alone = play(algorithm, models["logistic"], federation.data, ROUNDS, seed=5)
    for t, metrics in enumerate(alone.metrics):
        np.testing.assert_array_equal(metrics.client, radfed.metrics.client[1, t])
        np.testing.assert_array_equal(metrics.source, radfed.metrics.source[1, t])
    variates = jax.tree.map(lambda a: a[1], known(radfed.state).client_state)
    assert_trees(variates, alone.states[-1].client_state, rtol=1e-4, atol=1e-6)
    assert jax.tree.leaves(variates)  # SCAFFOLD's
    assert_trees(jax.tree.map(lambda a: a[1], radfed.variables), alone.final, rtol=1e-4, atol=1e-6)


def test_what_is_recorded_is_of_the_evaluation(radfed: fs.Result) -> None:
    assert [int(e.recorded[0]) for e in radfed.evaluations] == [2, 3]
    assert [e.round for e in radfed.evaluations] == [2, 3]
    kept = radfed.evaluations[-1].recorded[1]
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(kept))
    assert_trees(kept, jax.device_get(known(radfed.state).server))


@pytest.mark.slow
def test_initial_weights(
    federation: Federation, models: dict[str, fs.Model], fedavg: fs.Algorithm
) -> None:
    """A run that starts from the weights of another's end, for all runs or one for each."""
    model = models["logistic"]
    still = fedavg.replace(local=local_of(model).change(epochs=1e-9))  # takes no step
    end = run(federation, model, fedavg, rounds=1).variables
    one = jax.tree.map(lambda a: a[1], end)
    for given, wanted in ((end, end), (one, jax.tree.map(lambda a: jnp.stack([a, a]), one))):
        same = run(federation, model, still, rounds=1, initial=given).variables
        assert_trees(same, wanted)


def test_initial_weights_of_another_model(
    federation: Federation, models: dict[str, fs.Model], fedavg: fs.Algorithm
) -> None:
    other = models["mlp"].init(jax.random.key(0))
    with pytest.raises(ValueError, match="initial must be weights of the model"):
        run(federation, models["logistic"], fedavg, initial=other)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_loses_nothing(
    federation: Federation,
    models: dict[str, fs.Model],
    fedavg: fs.Algorithm,
    error: type[BaseException],
) -> None:
    def stop(evaluation: fs.Evaluation) -> None:
        if evaluation.round == 2:
            raise error("enough")

    with pytest.raises(error, match="enough") as raised:
        run(federation, models["logistic"], fedavg, rounds=5, on_evaluation=stop)
    partial = raised.value.result  # type: ignore[attr-defined]
    assert raised.value.__notes__ == ["the run up to round 2 is this exception's .result"]
    whole = run(federation, models["logistic"], fedavg, rounds=2)
    np.testing.assert_array_equal(partial.accuracy, whole.accuracy)
    np.testing.assert_array_equal(partial.metrics.client, whole.metrics.client)
    assert_trees(jax.device_get(partial.variables), jax.device_get(whole.variables))
    assert partial.samples == whole.samples


def test_a_selection_that_gives_one_client_twice_is_refused(
    federation: Federation, models: dict[str, fs.Model], fedavg: fs.Algorithm
) -> None:
    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        return jnp.full(4, 3, jnp.int32), state

    def init(variables: Variables, data: ClientData, execution: object) -> PyTree:
        return ()

    algorithm = fedavg.replace(selection=fs.base.Selection(init=init, draw=draw, sticky=False))
    with pytest.raises(ValueError, match="in round 1 it gave 3 to two slots"):
        run(federation, models["logistic"], algorithm)
