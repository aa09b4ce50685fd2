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
from conftest import Federation, assert_trees, make_federation
from numpy.typing import NDArray

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.data import eval_set
from fedjax_sim.partition import Partition
from fedjax_sim.run.inputs import forget


def method(name: str, model: fs.Model, **given: Any) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=8)
    given = {"execution": fs.make_execution(devices=1)} | given
    return ALGORITHMS[name](local, clients_per_round=4, **given)


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


def test_a_second_run_compiles_nothing(federation: Federation) -> None:
    """With other seeds, rounds and weights, and on other clients of the same sizes."""
    model = fs.models.logistic((6,), 3)  # which no other test has drawn and scored
    algorithm = radfed(model)
    first = run(algorithm, model, federation)
    assert first.xla_programs == 5
    elsewhere = make_federation(seed=7)
    weights = model.init(jax.random.key(9))
    changes: list[tuple[Federation, dict[str, Any]]] = [
        (federation, {"seeds": (5,)}),
        (federation, {"rounds": 7, "initial": weights}),
        (elsewhere, {}),
    ]
    for where, given in changes:
        second = run(algorithm, model, where, **given)
        assert second.xla_programs == 0
        assert second.device_bytes == first.device_bytes
        assert_same(second, run(radfed(model), model, where, **given))


def doubled(outputs: Any, y: Any) -> Any:
    return 2 * optax.softmax_cross_entropy_with_integer_labels(outputs, y)


def other_model() -> fs.Model:
    """Of the same shapes."""
    plain = fs.models.logistic((6,), 3)

    def apply(variables: fs.Variables, x: Any, **how: Any) -> Any:
        return plain.apply(variables, 3.0 * x, **how)

    return fs.Model(plain.init, apply)


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "more rounds at once": lambda: {"rounds": 5, "eval_every": 5},
    "more runs": lambda: {"seeds": (0, 1)},
    "other devices": lambda: {"execution": fs.make_execution(2)},
    "samples on the host": lambda: {"execution": fs.make_execution(samples_mb=0.02)},
}


@pytest.fixture(scope="module")
def fedavg(models: dict[str, fs.Model]) -> fs.Algorithm:
    return method("fedavg", models["logistic"])


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_heard(
    change: str, fedavg: fs.Algorithm, federation: Federation, models: dict[str, fs.Model]
) -> None:
    plain = models["logistic"]
    before = run(fedavg, plain, federation)
    given = CHANGES[change]()
    changed = run(fedavg, plain, federation, **given)
    assert changed.xla_programs > 0
    assert_same(changed, run(method("fedavg", plain), plain, federation, **given))
    draws = int(change == "samples on the host")  # the cohorts of so many rounds, each time
    assert run(fedavg, plain, federation, **given).xla_programs == draws
    again = run(fedavg, plain, federation)
    assert again.xla_programs == 0
    assert_same(before, again)


OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "a larger client": lambda: {"sizes": np.array([7, 1, 1, 1, 1, 1, 2, 2])},
    "another loss": lambda: {"loss": doubled},
    "another model": lambda: {"model": other_model()},
}


@pytest.fixture(scope="module")
def ditto(models: dict[str, fs.Model]) -> fs.Algorithm:
    return method("ditto", models["logistic"], lam=0.1)


@pytest.mark.parametrize("change", OWN)
def test_own_models_are_scored_as_asked(
    change: str, ditto: fs.Algorithm, federation: Federation, models: dict[str, fs.Model]
) -> None:
    usual: dict[str, Any] = {"sizes": np.full(8, 2), "model": models["logistic"]}

    def scored(algorithm: fs.Algorithm, sizes: NDArray[np.int64], **given: Any) -> fs.Result:
        start = np.cumsum([0, *sizes]).astype(np.int32)
        x, y = (a[: start[-1]] for a in federation.test)
        test = eval_set(x, y, Partition(np.arange(len(x), dtype=np.int32), start))
        return run(algorithm, federation=federation, test=test, personal=True, **given)

    given, fresh = usual | OWN[change](), method("ditto", models["logistic"], lam=0.1)
    before = scored(ditto, **usual)
    assert_same(scored(ditto, **given), scored(fresh, **given))
    assert_same(before, scored(ditto, **usual))


def test_padding_is_that_of_the_clients(models: dict[str, fs.Model]) -> None:
    """Eight clients have none on 4 devices, ten have."""
    scaffold, fresh = (
        method("scaffold", models["logistic"], execution=fs.make_execution(4)) for _ in range(2)
    )
    few, more = (make_federation(sizes) for sizes in ([9] * 8, [9] * 10))
    run(scaffold, models["logistic"], few)
    assert_same(run(scaffold, models["logistic"], more), run(fresh, models["logistic"], more))


def test_programs_live_as_long_as_their_algorithm(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    algorithm = method("fedavg", models["logistic"])
    run(algorithm, models["logistic"], federation)
    alive = weakref.ref(algorithm)
    del algorithm
    gc.collect()
    assert alive() is None


def test_what_is_forgotten_is_compiled_anew(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    algorithm = method("fedavg", models["logistic"])
    first = run(algorithm, models["logistic"], federation)
    forget(algorithm)
    again = run(algorithm, models["logistic"], federation)
    assert again.xla_programs == 2  # start and advance
    assert_same(first, again)
