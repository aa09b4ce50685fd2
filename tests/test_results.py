"""What users look for in a result: who took part, what was kept, what an exception leaves."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
from conftest import Federation, assert_trees, known, play

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.base import Array, ClientData, PyTree
from fedjax_sim.cli.loading import SavedRun
from fedjax_sim.run import experiment
from fedjax_sim.run.grids import Plan, Point, Sweep
from fedjax_sim.run.metrics import Scores, SetScores

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
    algorithm = fs.radfed(local, clients_per_round=4, redistribution_rounds=3).on(ONE)
    return run(
        federation, models["logistic"], algorithm, eval_every=2,
        record=lambda state: (state.round, state.server),
    )  # fmt: skip


@pytest.fixture(scope="module")
def fedavg(models: dict[str, fs.Model]) -> fs.Algorithm:
    """One object, which is compiled once."""
    return fs.fedavg(local_of(models["logistic"]), clients_per_round=4).on(ONE)


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
    algorithm = fs.radfed(local, clients_per_round=4, redistribution_rounds=3).on(ONE)
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


def test_evaluations_are_copied_and_sent_to_other_processes(radfed: fs.Result) -> None:
    one = radfed.evaluations[-1]
    for same in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert_trees(same, one)


def test_a_run_without_a_validation_score_has_no_best_round(radfed: fs.Result) -> None:
    """The AUC on samples of one class, say."""
    seen = [np.array([np.nan, 0.3]), np.array([np.nan, 0.2])]

    def validating(scores: list[Any]) -> fs.Result:
        sets = [SetScores(Scores({"accuracy": a, "loss": a}), None) for a in scores]
        given = zip(radfed.evaluations, sets, strict=True)
        return dataclasses.replace(
            radfed, evaluations=[e._replace(validation=found) for e, found in given]
        )

    result = validating(seen)
    found = result.validated("accuracy", by_client=False)
    np.testing.assert_array_equal(found, [np.nan, radfed.accuracy[0, 1]])
    table = result.table()
    assert np.isclose(table.loc["validation_accuracy"], [0.2, 0.0]).all()
    points = [Point({"rate": i}, (0, 5), validating([a + i for a in seen]), None) for i in range(2)]
    assert Sweep(tuple(points), Plan((), 2)).best().settings == {"rate": 1}
    none = validating([a * np.nan for a in seen])
    assert none.table().loc["validation_accuracy"].isna().all()
    with pytest.raises(ValueError, match="no point has the score accuracy on the validation set"):
        Sweep((Point({}, (0, 5), none, None),), Plan((), 2)).best()
    with pytest.raises(ValueError, match=r"part must be one of test, validation, .*, got 'train'"):
        result.series("accuracy", by_client=False, part="train")  # type: ignore[arg-type]


def test_a_task_with_classes_may_have_other_sums(radfed: fs.Result) -> None:
    """No counts by class, from which clients' scores could be expected."""
    plain = [e._replace(sums=e.sums._replace(own=np.zeros(2))) for e in radfed.evaluations]
    table = dataclasses.replace(radfed, evaluations=plain).to_pandas()
    usual = radfed.to_pandas()
    expected = [name for name in usual if name.startswith("client_accuracy.")]
    assert expected
    pandas.testing.assert_frame_equal(table, usual.drop(columns=expected))


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


def test_a_run_that_diverges_leaves_the_rounds_before(
    federation: Federation,
    models: dict[str, fs.Model],
    fedavg: fs.Algorithm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverged(local: Any, evaluation: fs.Evaluation, seeds: Any) -> None:
        if evaluation.round == 3:
            raise fs.DivergedError("the loss became nan")

    monkeypatch.setattr(experiment, "check_losses", diverged)
    with pytest.raises(fs.DivergedError) as raised:
        run(federation, models["logistic"], fedavg, rounds=5)
    partial = raised.value.result  # type: ignore[attr-defined]
    whole = run(federation, models["logistic"], fedavg, rounds=2)
    assert_trees(partial.metrics, whole.metrics)
    assert partial.samples == whole.samples
    assert partial.steps == whole.steps
    assert (len(partial.evaluations), partial.variables, partial.state) == (2, None, None)


def test_a_selection_that_gives_one_client_twice_is_refused(
    federation: Federation, models: dict[str, fs.Model], fedavg: fs.Algorithm
) -> None:
    class third(fs.base.Selection):
        def draw(
            self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
            visits: Array,
        ) -> tuple[Array, PyTree]:  # fmt: skip
            return jnp.full(4, 3, jnp.int32), state

    algorithm = fedavg.replace(selection=third())
    with pytest.raises(ValueError, match="in round 1 it gave 3 to two slots"):
        run(federation, models["logistic"], algorithm)


NAMES = tuple(f"client {i} <&> its name" for i in range(100))


def test_values_with_arrays_are_shown_on_a_screen(
    federation: Federation, radfed: fs.Result
) -> None:
    """``repr`` has kinds, shapes and last scores."""
    x, y = federation.data.x, federation.data.y
    owners = np.arange(len(x)) % len(NAMES)
    data = fs.data.from_arrays("<b>&", x, y, client=np.array(NAMES)[owners], class_names=NAMES[:3])
    points = tuple(
        Point({"lr": 0.1 * i, "rule": "x" * 100}, (0, 5), radfed, None if i else "in round 2")
        for i in range(100)
    )
    swept = fs.Sweep(points, Plan((tuple(p.settings for p in points),), 2))
    settings = {"algo": "fedavg", "compare": ["moon"] * 30, "score": "f1", "dataset": "digits"}
    summary = {"fedavg": {"score_last_per_run": [0.5, 0.7]}, "moon": {"diverged": "in round 2"}}
    saved = SavedRun(Path("runs/<a>"), settings, summary, [{"round": 1}] * 999, [])
    last, view = radfed.evaluations[-1], jax.tree.map(jnp.asarray, federation.data)
    first = base.ClientView(view.x, view.y, view.index, view.start[0], view.start[1], 9)
    report = fs.partition.skew_report(y, federation.partition, federation.classes)
    shown = [
        *(radfed, last, last.sums, last.test, radfed.state, radfed.metrics, radfed.variables),
        *(data, federation.data, first, base.Batch(x, y, y == 0), fs.data.eval_set(x, y)),
        *(federation.partition, report, swept, points[1], swept.plan, saved, fs.toy()),
    ]
    for value in shown:
        text = repr(value)
        assert text.startswith(f"{type(value).__name__}(")
        assert len(text) <= 600
        assert "rray(" not in text
    score = f"accuracy={np.mean(radfed.accuracy[-1]):.4g} ± "
    assert all(score in repr(value) for value in (radfed, last, points[1]))
    assert "accuracy=diverged" in repr(points[0])
    assert "fedavg=0.6 ± 0.1, moon=diverged" in repr(saved)
    assert "train_x=float32[" in repr(data)
    assert "clients=100" in repr(data)
