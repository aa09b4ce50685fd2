"""Groups of devices train one model together, up to the order in which products add."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees, known, make_federation, some_slow

import fedjax_sim as fs
from fedjax_sim.engine.mesh import MODEL

FEW = make_federation((1, 3, 16, 17, 40, 5, 8), shape=(8,))
SMALL = fs.models.mlp((8,), FEW.classes, widths=(6, 5))  # 2 devices cannot split the biases of 5
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-6}


def method(name: str, **options: Any) -> fs.Algorithm:
    momentum = None if name == "scaffold" else 0.5
    local = fs.local_sgd(fs.empirical_risk(SMALL), optax.sgd(0.05, momentum), batch_size=8)
    return fs.ALGORITHMS[name](local, clients_per_round=5, **options)


METHODS = {
    "phase_shift": lambda: method("phase_shift", phases=5),
    "radfed": lambda: method("radfed", redistribution_rounds=2),
    "scaffold": lambda: method("scaffold"),
    "fedadam": lambda: method("fedadam"),
}
GROUPS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "chunks": {"chunk": 2},
    "lanes": {"lanes": 2},
}


def run(algorithm: fs.Algorithm, devices: int, parts: int = 1, **settings: Any) -> fs.Result:
    how = {name: settings.pop(name) for name in ("chunk", "lanes") if name in settings}
    execution = fs.make_execution(devices, model_devices=parts, **how)
    given: dict[str, Any] = {"rounds": 3, "eval_every": 2, "seeds": (0, 1)} | settings
    return fs.simulate(
        algorithm, SMALL, FEW.data, FEW.test, classes=FEW.classes, execution=execution, **given
    )


@functools.cache
def alone(name: str) -> fs.Result:
    return run(METHODS[name](), 1)


@pytest.mark.parametrize(
    ("name", "how"),
    some_slow(
        [
            ("radfed", "lanes"),
            ("phase_shift", "chunks"),
            ("scaffold", "lanes"),
            ("fedadam", "one by one"),
        ]
    ),
)
def test_two_groups_of_two_devices_train_as_one_device(name: str, how: str) -> None:
    """A product whose terms are split adds them in another order: equal up to rounding."""
    found = run(METHODS[name](), 4, 2, **GROUPS[how])
    assert_trees(found.state, alone(name).state, **CLOSE)
    for ours, theirs in zip(found.evaluations, alone(name).evaluations, strict=True):
        np.testing.assert_allclose(ours.test.pooled.loss, theirs.test.pooled.loss, rtol=1e-5)


def test_every_array_of_a_model_that_can_be_is_split() -> None:
    """As are the server's optimiser and what clients keep."""
    state = known(run(METHODS["scaffold"](), 2, 2, rounds=1).state)
    for field in (state.server, state.client_state, state.shared_state):
        for leaf in jax.tree.leaves(field):
            own = leaf.shape[2:] if field is state.client_state else leaf.shape[1:]
            assert (MODEL in leaf.sharding.spec) == any(n % 2 == 0 for n in own), leaf.sharding


def test_a_device_holds_a_half_of_a_large_model() -> None:
    model = fs.models.mlp((8,), FEW.classes, widths=(3000, 200))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05, 0.9), batch_size=8)
    one, two = (
        fs.simulate(
            fs.algorithms.fedavg(local, clients_per_round=2), model, FEW.data, FEW.test,
            rounds=1, classes=FEW.classes,
            execution=fs.make_execution(2 * parts, model_devices=parts),
        )
        for parts in (1, 2)
    )  # fmt: skip
    assert two.device_bytes < 0.6 * one.device_bytes
    assert_trees(two.state, one.state, **CLOSE)


@pytest.mark.slow
def test_a_run_of_groups_goes_on_on_one_device_and_the_other_way_round(tmp_path: Path) -> None:
    for begins, goes_on in (((2, 2), (1, 1)), ((1, 1), (2, 2))):
        folder = tmp_path / str(begins)
        run(METHODS["scaffold"](), *begins, rounds=2, checkpoints=folder)
        with pytest.MonkeyPatch.context() as patch:  # it is not begun again
            patch.setattr("fedjax_sim.run.runner.Runner.start", None)
            found = run(METHODS["scaffold"](), *goes_on, checkpoints=folder)
        assert_trees(found.state, alone("scaffold").state, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2])
def test_convolutions_and_norms_are_split(chunk: int) -> None:
    """By each way that CPUs have, and grouped by vmap."""
    shape = (16, 16, 3)
    few = make_federation((9, 16, 5, 12), shape=shape)
    model = fs.models.cifar_cnn(shape, few.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=8)
    algorithm = fs.algorithms.fedavg(local, clients_per_round=4)
    one, groups = (
        fs.simulate(
            algorithm, model, few.data, few.test, rounds=1, classes=few.classes,
            execution=fs.make_execution(devices, chunk, model_devices=parts),
        )
        for devices, parts in ((1, 1), (4, 2))
    )  # fmt: skip
    assert_trees(groups.state, one.state, **CLOSE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"devices": 4, "model_devices": 3},
            "model_devices must divide the 4 devices of a process",
        ),
        ({"devices": 2, "model_devices": 2, "client_state_mb": 1}, "leave out model_devices"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.make_execution(**settings)
