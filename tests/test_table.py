"""Every kind of model, and the errors that settings can cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, rejects
from flax import nnx

import fedjax_sim as fs
from fedjax_sim.base import LocalUpdate
from fedjax_sim.run import check_model

ONE = fs.make_execution(1)


def run(model: fs.Model, federation: Federation, rounds: int, lr: float = 0.1) -> fs.Result:
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(lr), batch_size=8)
    return fs.simulate(
        fs.fedavg(local, clients_per_round=4).on(ONE),
        model,
        federation.data,
        federation.test,
        rounds=rounds,
        classes=federation.classes,
    )


def finite(result: fs.Result) -> bool:
    return all(bool(np.isfinite(a).all()) for a in jax.tree.leaves(result.variables))


PARAMETERS = {  # those of ffn, lstm, resnet20 and mobilenet_v2 are in test_models.py
    "logistic": ((28, 28, 1), 7_850),
    "mlp": ((28, 28, 1), 199_210),
    "mnist_cnn": ((28, 28, 1), 21_840),
    "fashion_cnn": ((28, 28, 1), 29_034),
    "cifar_cnn": ((32, 32, 3), 551_466),
    "two_conv": ((32, 32, 3), 1_626_442),
}


@pytest.mark.parametrize("net", sorted(PARAMETERS))
def test_parameter_count(net: str) -> None:
    shape, count = PARAMETERS[net]
    params = jax.eval_shape(fs.models.MODELS[net](shape, 10).init, jax.random.key(0)).params
    assert sum(a.size for a in jax.tree.leaves(params)) == count


class Linen(nn.Module):
    """BatchNorm and dropout of flax itself."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(8)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(x))


class Nnx(nnx.Module):
    """The same in flax.nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(self.norm(nnx.relu(self.first(x)))))


def handwritten() -> fs.Model:
    """A pair of functions and nothing else."""

    def init(key: jax.Array) -> fs.Variables:
        return fs.Variables(0.1 * jax.random.normal(key, (6, 3)), ())

    def apply(variables: fs.Variables, x: jax.Array, **_: Any) -> tuple[jax.Array, Any]:
        return x @ variables.params, variables.state

    return fs.Model(init, apply)


USERS: dict[str, Callable[[], fs.Model]] = {
    "linen": lambda: fs.models.from_linen(Linen(), (6,)),
    "nnx linear": lambda: fs.models.from_nnx(lambda rngs: nnx.Linear(6, 3, rngs=rngs)),
    "nnx": lambda: fs.models.from_nnx(lambda rngs: Nnx(rngs)),
    "pair": handwritten,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", USERS)
def test_users_model(federation: Federation, kind: str) -> None:
    model = USERS[kind]()
    result = run(model, federation, rounds=8)
    assert finite(result)
    assert result.evaluations[-1].test_loss[0] < result.evaluations[0].test_loss[0]
    start = jax.jit(model.init)(jax.random.key(0)).state
    moved = [
        float(jnp.abs(a[0] - b).max())
        for a, b in zip(
            jax.tree.leaves(result.variables.state), jax.tree.leaves(start), strict=True
        )
    ]
    assert all(m > 1e-3 for m in moved)  # running statistics, where there are any
    assert len(moved) == (2 if kind in ("linen", "nnx") else 0)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_dropout_draws_from_the_key_in_training_alone(kind: str) -> None:
    model = USERS[kind]()
    variables = jax.jit(model.init)(jax.random.key(0))
    x = jnp.ones((5, 6)) * jnp.arange(5.0)[:, None]
    apply = jax.jit(model.apply, static_argnames="train")

    def out(seed: int, train: bool) -> np.ndarray:
        return np.asarray(apply(variables, x, train=train, key=jax.random.key(seed))[0])

    np.testing.assert_array_equal(out(1, False), out(2, False))
    np.testing.assert_array_equal(out(1, True), out(1, True))
    assert np.abs(out(1, True) - out(2, True)).max() > 0


def local(**options: Any) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(handwritten()), optax.sgd(0.1), **options)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "epochs": (lambda: local(epochs=0), "above 0 and at most 10000, got 0"),
    "nan": (
        lambda: local(epochs=float("nan")),
        "above 0 and at most 10000, got nan",
    ),
    "endless": (
        lambda: local(epochs=float("inf")),
        "above 0 and at most 10000, got inf",
    ),
    "a model": (
        lambda: fs.local_sgd(handwritten(), optax.sgd(0.1)),  # type: ignore[arg-type]
        "objective must be a function: use empirical_risk(model), got Model",
    ),
    "phases": (
        lambda: fs.phase_shift(local(), clients_per_round=40, phases=7),
        "phases must divide the 40 active clients: one of [1, 2, 4, 5, 8, 10, 20, 40], got 7",
    ),
    "no phases": (lambda: fs.phase_shift(local(), clients_per_round=4, phases=0), "phases must"),
    "devices": (lambda: fs.make_execution(devices=99), "devices must be in 1..4 on this machine"),
    "no devices": (lambda: fs.make_execution(devices=0), "devices must be in 1..4"),
    "chunk": (lambda: fs.make_execution(chunk=-1), "chunk must be at least 0, got -1"),
}


test_setting_errors = rejects(ERRORS)


SIMULATE: dict[str, tuple[dict[str, Any], str]] = {
    "rounds": ({"rounds": 0}, "rounds must be a whole number at least 1, got 0"),
    "every": ({"eval_every": 0}, "eval_every must be a whole number at least 1, got 0"),
    "seeds": ({"seeds": ()}, "seeds must not be empty"),
    "one seed": ({"seeds": 3}, "seeds must be whole numbers from 0 to 2**32 - 1, one for each run"),
    "fraction": ({"seeds": (0.5,)}, "one for each run, got (0.5,)"),
    "negative": ({"seeds": (-1,)}, "one for each run, got (-1,)"),
    "labels": (
        {"test": np.ones((2, 6))},
        "test must be a pair (x, y) or made by eval_set, got nda",
    ),
    "one thing": ({"validation": (1,)}, "validation must be a pair (x, y) or made by eval_set"),
    "lengths": (
        {"validation": (np.ones((2, 6)), [0])},
        "validation: x and y must have as many rows, got 2 and 1",
    ),
    "classes": (
        {"classes": 4},
        "[batch, 4], as the task is classification(4) with y [n]; for a batch of 2 it returns "
        "[2, 3]",
    ),
    "cohort": ({"clients_per_round": 9}, "clients_per_round must be at most the 8 clients, got 9"),
    "shape": (
        {"model": fs.models.logistic((7,), 3)},
        "the model rejects inputs of shape (6,)",
    ),
}


@pytest.mark.parametrize("case", SIMULATE)
def test_simulate_errors(federation: Federation, case: str) -> None:
    change, message = SIMULATE[case]
    options: dict[str, Any] = {"rounds": 1, "classes": 3, **change}
    model, test = options.pop("model", handwritten()), options.pop("test", federation.test)
    algorithm = fs.fedavg(local(), clients_per_round=options.pop("clients_per_round", 4))
    with pytest.raises(ValueError, match=re.escape(message)):
        fs.simulate(algorithm, model, federation.data, test, **options)


def test_divergence_names_the_round(federation: Federation, models: dict[str, fs.Model]) -> None:
    with pytest.raises(fs.DivergedError, match=r"in round [1-6] \(seed 0\)") as caught:
        run(models["logistic"], federation, rounds=6, lr=3e38)
    assert "learning rate" in str(caught.value)


def test_pooled_arrays_cannot_be_batched() -> None:
    execution = fs.make_execution(devices=1)
    with pytest.raises(ValueError, match="pooled arrays cannot be batched"):
        jax.vmap(
            lambda sh: execution.run(lambda c, m, o, t: c * o * t, sh, (), jnp.ones(2), jnp.ones(2))
        )(jnp.ones(3))


def test_a_model_that_fails_only_in_training_is_refused_at_once() -> None:
    def apply(
        variables: Any, x: jax.Array, *, train: bool, mask: Any = None, key: Any = None
    ) -> Any:
        if train:
            raise TypeError("no training mode")
        return jnp.zeros((x.shape[0], 3)), {}

    model = fs.Model(lambda key: fs.Variables({}, {}), apply)
    x, y = np.zeros((4, 6), np.float32), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="no training mode"):
        check_model(model, x, y, fs.tasks.classification(3))
