"""A second run of an algorithm is neither traced nor compiled; what differs is not mixed up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known, make_federation
from numpy.typing import NDArray

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.data import eval_set
from fedjax_sim.partition import Partition
from fedjax_sim.run.functions import Functions
from fedjax_sim.run.inputs import forget
from fedjax_sim.run.simulation import experiment


def method(name: str, model: fs.Model, **given: Any) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    given |= {"model": model} if name == "fedper" else {}
    made = ALGORITHMS[name](local, clients_per_round=4, **given)
    return made.on(fs.make_execution(devices=1))


def radfed(model: fs.Model) -> fs.Algorithm:
    return method("radfed", model, redistribution_rounds=2)


def run(
    algorithm: fs.Algorithm, model: fs.Model, federation: Federation, **given: Any
) -> fs.Result:
    usual: dict[str, Any] = {"rounds": 3, "classes": 3, "seeds": (0,), "eval_every": 2}
    test = given.pop("test", federation.test)
    return fs.simulate(algorithm, model, federation.data, test, **usual | given)


def assert_same(mine: fs.Result, other: fs.Result) -> None:
    """To the bit."""
    assert_trees(mine.variables, other.variables)
    assert_trees(mine.metrics, other.metrics)
    for ours, its in zip(mine.evaluations, other.evaluations, strict=True):
        assert_trees(ours.test.pooled, its.test.pooled)
        assert (ours.personal is None) == (its.personal is None)
        if ours.personal is not None and its.personal is not None:
            assert_trees(ours.personal.pooled, its.personal.pooled)


@pytest.mark.slow
def test_a_second_run_compiles_nothing(federation: Federation) -> None:
    """With other seeds, rounds, evaluations and weights, and on other clients of the same sizes."""
    model = fs.models.logistic((6,), 3)  # which no other test has drawn and scored
    algorithm, other = radfed(model), radfed(model)
    first = run(algorithm, model, federation)
    assert first.xla_programs == 5
    elsewhere = make_federation(seed=7)
    seeds: dict[str, Any] = {"seeds": (5,)}
    longer: dict[str, Any] = {"rounds": 7, "initial": model.init(jax.random.key(9))}
    changes: list[tuple[Federation, dict[str, Any]]] = [
        (elsewhere, seeds | longer),
        (federation, seeds),
        (federation, longer),
        (federation, {"eval_every": 3}),
        (elsewhere, {}),
    ]
    for i, (where, given) in enumerate(changes):
        second = run(algorithm, model, where, **given)
        assert second.xla_programs == 0
        assert second.device_bytes == first.device_bytes
        # The first run of the other shares nothing with the first of this.
        its = run(other, model, where, **given)
        assert (its.xla_programs == 0) == (i > 0)
        assert_same(second, its)
    # Programs live as long as their algorithm.
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None


def doubled(outputs: Any, y: Any) -> Any:
    return 2 * optax.softmax_cross_entropy_with_integer_labels(outputs, y)


CHANGES: dict[str, dict[str, Any]] = {
    "more rounds at once": {"eval_every": 17},
    "more runs": {"seeds": (0, 1)},
    "other devices": {"execution": fs.make_execution(2)},
    "samples on the host": {"execution": fs.make_execution(1, samples_mb=0.02)},
}


@pytest.fixture(scope="module")
def fedavg(models: dict[str, fs.Model]) -> fs.Algorithm:
    return method("fedavg", models["logistic"])


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_heard(
    change: str, fedavg: fs.Algorithm, federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Each leaves the first run as it is, to rounding at most."""
    before = run(fedavg, models["logistic"], federation)
    changed = run(fedavg, models["logistic"], federation, **CHANGES[change])
    assert changed.xla_programs >= 2
    rounded = {"rtol": 2e-5, "atol": 1e-6} if change in ("more runs", "other devices") else {}
    trees = [(r.variables, r.metrics.client, r.metrics.loss) for r in (changed, before)]
    assert_trees(*(jax.tree.map(lambda a: a[:1], tree) for tree in trees), **rounded)
    assert len(changed.evaluations) == (1 if change == "more rounds at once" else 2)
    assert len(changed.accuracy[-1]) == (2 if change == "more runs" else 1)
    draws = int(change == "samples on the host")  # the cohorts of so many rounds, each time
    once_more = run(fedavg, models["logistic"], federation, **CHANGES[change])
    assert once_more.xla_programs == draws
    assert_same(once_more, changed)
    again = run(fedavg, models["logistic"], federation)
    assert again.xla_programs == 0
    assert_same(before, again)


OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "a larger client": lambda: {"sizes": np.array([7, 1, 1, 1, 1, 1, 2, 2])},
    "another loss": lambda: {"loss": doubled},
}


@pytest.fixture(scope="module")
def fedper(models: dict[str, fs.Model]) -> fs.Algorithm:
    return method("fedper", models["logistic"])


@pytest.mark.slow
@pytest.mark.parametrize("change", OWN)
def test_own_models_are_scored_as_asked(
    change: str, fedper: fs.Algorithm, federation: Federation, models: dict[str, fs.Model]
) -> None:
    usual: dict[str, Any] = {"sizes": np.full(8, 2), "model": models["logistic"]}

    def scored(algorithm: fs.Algorithm, sizes: NDArray[np.int64], **given: Any) -> fs.Result:
        start = np.cumsum([0, *sizes]).astype(np.int32)
        x, y = (a[: start[-1]] for a in federation.test)
        test = eval_set(x, y, Partition(np.arange(len(x), dtype=np.int32), start))
        return run(algorithm, federation=federation, test=test, personal=True, **given)

    before, given = scored(fedper, **usual), usual | OWN[change]()
    changed = scored(fedper, **given)
    if change == "another loss":
        for old, new in zip(before.evaluations, changed.evaluations, strict=True):
            ours, theirs = (known(e.personal).pooled for e in (new, old))
            assert ours.keys() == theirs.keys()
            for name, score in theirs.items():
                if name == "loss":
                    np.testing.assert_allclose(ours[name], 2 * score, rtol=1e-6)
                else:
                    np.testing.assert_array_equal(ours[name], score)
    else:
        assert_same(changed, scored(method("fedper", models["logistic"]), **given))
    assert_same(before, scored(fedper, **usual))


@pytest.mark.slow
def test_padding_is_that_of_the_clients(models: dict[str, fs.Model]) -> None:
    """Eight clients have none on 2 devices, nine have: neither fits the programs of the other."""
    scaffold = method("scaffold", models["logistic"]).on(fs.make_execution(2))
    shapes = []
    for clients in (8, 9):
        there = make_federation([9] * clients)
        made = experiment(scaffold, models["logistic"], there.data, there.test, classes=3)
        begun = made.programs._begun(made.programs._functions)
        told = made.programs._functions.layout.like(begun)
        shapes += [
            {leaf.shape[1] for leaf in jax.tree.leaves(run.state.client_state)}
            for run in (begun, told)
        ]
    assert shapes == [{8}, {8}, {10}, {9}]


def test_what_is_forgotten_is_made_anew(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    algorithm, plain = method("fedavg", models["logistic"]), models["logistic"]

    def functions() -> Functions:
        made = experiment(algorithm, plain, federation.data, federation.test, classes=3)
        return made.programs._functions

    first = functions()
    assert functions() is first
    forget(algorithm)
    assert functions() is not first
