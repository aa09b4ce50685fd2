"""Any optax optimiser: the extra arguments of its update, and what they are."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees, context_of

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.engine.optimizers import EXTRA_ARGUMENTS

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
START = jnp.array([2.0, -1.0, 0.5])
STEPS = 4
Loss = Callable[[jax.Array, jax.Array], jax.Array]


@pytest.fixture(autouse=True)
def _promotion() -> Any:
    """Some of optax's optimisers mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def bowls(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of every sample: a bowl around it, and a wave that makes it no quadratic."""
    return 0.5 * jnp.sum(jnp.square(w[None] - x), axis=-1) + 0.3 * jnp.sum(
        jnp.sin(w[None] + x), axis=-1
    )


def objective_of(loss: Loss) -> base.Objective:
    def objective(params: Any, state: Any, batch: Any, context: Any) -> Any:
        del context
        return jnp.sum(jnp.where(batch.mask, loss(params, batch.x), 0)) / batch.mask.sum(), state

    return objective


def trained(optimizer: Any, objective: Any = None, start: Any = START, **options: Any) -> Any:
    """The weights after STEPS steps, each with all samples."""
    local = fs.local_sgd(
        objective_of(bowls) if objective is None else objective,
        optimizer,
        batch_size=len(X),
        **{"epochs": STEPS, **options},
    )
    y, index = jnp.zeros(len(X), jnp.int32), jnp.arange(len(X), dtype=jnp.int32)
    client = base.ClientView(jnp.asarray(X), y, index, jnp.int32(0), jnp.int32(len(X)), len(X))

    def run(start: jax.Array) -> jax.Array:
        variables = base.Variables(start, ())
        states = local.client_state(variables), local.shared_state(variables)
        return local.train(jax.random.key(0), variables, client, *states).variables.params

    return jax.jit(run)(start)


def sam(**options: Any) -> optax.GradientTransformationExtraArgs:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
    return optax.contrib.sam(optax.sgd(0.2), ascent, **options)


def searched() -> optax.GradientTransformationExtraArgs:
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=20)
    return optax.chain(optax.sgd(30.0), search)


# And the extra arguments that its documentation asks for.
OPTIMISERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sgd": (optax.sgd(0.1, momentum=0.9), ()),
    "polyak": (optax.polyak_sgd(f_min=-1.0), ("value",)),
    "plateau": (
        optax.chain(optax.sgd(0.9), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
        ("value",),
    ),
    "backtracking": (searched(), ("value", "grad", "value_fn")),
    "lbfgs": (optax.lbfgs(), ("value", "grad", "value_fn")),
    "sam": (sam(), ()),
    "opaque sam": (sam(opaque_mode=True), ("grad_fn",)),
    "sophia": (optax.contrib.sophia(0.1, update_interval=1), ("obj_fn",)),
}


SLOW = {"lbfgs"}  # to compile


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in OPTIMISERS]
)
def test_steps_are_those_of_a_plain_loop(name: str) -> None:
    optimizer, asked = OPTIMISERS[name]

    def mean(w: jax.Array) -> jax.Array:
        return jnp.mean(bowls(w, jnp.asarray(X)))

    @jax.jit
    def step(w: jax.Array, state: Any) -> Any:
        value, grad = jax.value_and_grad(mean)(w)
        extra = {
            "value": value,
            "grad": grad,
            "value_fn": mean,
            "obj_fn": mean,
            "grad_fn": lambda w, i: jax.grad(mean)(w),
        }
        updates, state = optimizer.update(grad, state, w, **{key: extra[key] for key in asked})
        return optax.apply_updates(w, updates), state

    w, state = START, optimizer.init(START)
    for _ in range(STEPS):
        w, state = step(w, state)
    assert np.abs(w - START).max() > 0.05
    np.testing.assert_allclose(trained(optimizer), w, rtol=1e-5, atol=1e-6)


def test_polyak_halves_a_bowl() -> None:
    """With f = ½ ‖w‖² with minimum 0: the step is f / ‖∇f‖² = ½."""
    bowl = objective_of(lambda w, x: 0.5 * jnp.sum(jnp.square(w)) + 0 * jnp.sum(x, axis=-1))
    np.testing.assert_allclose(trained(optax.polyak_sgd(), bowl), START / 2**STEPS, rtol=1e-6)


PUSH = jnp.array([0.5, 1.0, -2.0])


class pushed(base.Correction):
    """Adds PUSH to every gradient."""

    def direction(self, gradient: Any, *given: Any) -> Any:
        return gradient + PUSH


def test_sharpness_is_sought_along_the_corrected_gradient() -> None:
    """To w − η (w⁺ + c), w⁺ = w + ρ (w + c) / ‖w + c‖, for ½ ‖w‖² and a correction c."""
    bowl = objective_of(lambda w, x: 0.5 * jnp.sum(jnp.square(w)) + 0 * jnp.sum(x, axis=-1))
    out = trained(sam(opaque_mode=True), bowl, corrections=(pushed(),), epochs=1)
    slope = np.asarray(START + PUSH)
    above = START + 0.3 * slope / np.linalg.norm(slope)
    np.testing.assert_allclose(out, START - 0.2 * (above + PUSH), rtol=1e-5)


def asking(update: Callable[..., Any]) -> optax.GradientTransformationExtraArgs:
    """An optimiser that adds ``update(params, **extra)``."""
    return optax.GradientTransformationExtraArgs(
        lambda params: (),
        lambda updates, state, params=None, **extra: (update(params, **extra), ()),
    )


def test_value_and_grad_are_those_of_the_loss_alone() -> None:
    bowl = objective_of(bowls)
    batch = base.Batch(jnp.asarray(X), jnp.zeros(6, jnp.int32), jnp.ones(6, bool))
    value, slope = jax.value_and_grad(lambda w: bowl(w, (), batch, context_of(w))[0])(START)
    options: dict[str, Any] = {"corrections": (pushed(),), "epochs": 1}
    found = trained(asking(lambda w, grad, **_: grad), **options)
    np.testing.assert_allclose(found - START, slope, rtol=1e-5)
    found = trained(asking(lambda w, value, **_: jnp.full(3, value)), **options)
    np.testing.assert_allclose(found - START, np.full(3, value), rtol=1e-5)


def test_a_line_search_draws_what_the_gradient_drew() -> None:
    """Dropout and the like: value_fn at the weights is the value, to the bit."""

    def noisy(params: Any, state: Any, batch: Any, context: Any) -> Any:
        return jnp.sum(params * jax.random.normal(context.key, params.shape)), state

    out = trained(asking(lambda w, value, value_fn, **_: w * (value_fn(w) - value)), noisy)
    assert_trees(out, START)
    fresh = trained(asking(lambda w, value, **_: w * value), noisy)
    assert np.abs(fresh - START).max() > 0.1


def test_runs_under_vmap_are_each_alone() -> None:
    """A line search in a stack goes on until the last has ended."""
    starts, optimizer = jnp.stack([START, 20 * START]), searched()
    both = jax.vmap(lambda start: trained(optimizer, start=start))(starts)
    alone = trained(optimizer, start=starts[0])
    np.testing.assert_allclose(both[0], alone, rtol=1e-5, atol=1e-6)


def test_what_is_not_asked_for_is_not_computed() -> None:
    seen: list[int] = []

    def counted(w: jax.Array, x: jax.Array) -> jax.Array:
        seen.append(1)
        return bowls(w, x)

    def traced(optimizer: Any) -> int:
        seen.clear()
        trained(optimizer, objective_of(counted))
        return len(seen)

    assert traced(optax.sgd(0.1)) == traced(optax.polyak_sgd()) < traced(searched())


def test_an_optimiser_that_asks_for_more_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, rating: Any, **_: Any) -> Any:
        return updates, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    known = ", ".join(EXTRA_ARGUMENTS)
    wanted = f"optimizer must need no extra argument but {known}, got one that needs rat"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        fs.local_sgd(objective_of(bowls), optimizer)
    with pytest.raises(ValueError, match=r"transform must need no extra .*, got one that needs"):
        fs.server.optimizer(optax.scale_by_polyak())
    with pytest.raises(ValueError, match=r"transform must be an optax\.Grad.*, got 0\.1"):
        fs.server.optimizer(0.1)


OTHERS = {
    "sync_period": 2,
    "max_consecutive_errors": 2,
    "seed": 0,
    "should_transform_fn": lambda step: step > 0,
}
"""Values of arguments without a default, where they are not 0.1."""

INNER = {"inner", "optimizer", "adv_optimizer", "fast_optimizer", "base_optimizer", "opt"}
"""Names of the argument that is another optimiser."""

REJECTED = {
    "optax.lookahead": "has no attribute 'fast'",
    "optax.contrib.dpsgd": "expects `grads` to have a batch dimension",
}


def exported() -> dict[str, Any]:
    """The optimisers of optax: what takes a learning rate or another optimiser, made with it."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            takes = inspect.signature(make).parameters
            if name.startswith("_") or not {"learning_rate", *INNER} & takes.keys():
                continue
            needed = [
                n for n, p in takes.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD
            ]
            given = {n: optax.sgd(0.1) if n in INNER else OTHERS.get(n, 0.1) for n in needed}
            found[f"{module.__name__}.{name}"] = functools.partial(make, **given)
    return found


@pytest.mark.filterwarnings("ignore")  # optax's own, of what it will drop
def test_every_optimiser_of_optax_trains_or_is_rejected_in_a_line() -> None:
    model = fs.models.logistic((3,), 2)  # parameters by name, as those of users are
    y, index = jnp.zeros(len(X), jnp.int32), jnp.arange(len(X), dtype=jnp.int32)
    client = base.ClientView(jnp.asarray(X), y, index, jnp.int32(0), jnp.int32(len(X)), len(X))
    rejected = {}

    def visit(optimizer: Any) -> Any:
        local = fs.local_sgd(fs.empirical_risk(model), optimizer, batch_size=len(X))
        start = model.init(jax.random.key(0))
        states = local.client_state(start), local.shared_state(start)
        return local.train(jax.random.key(0), start, client, *states).variables

    tried = exported()
    for name, make in tried.items():
        try:
            jax.eval_shape(lambda make=make: visit(make()))
        except (AttributeError, ValueError) as error:
            rejected[name] = str(error)
    assert len(tried) > 40
    assert rejected.keys() == REJECTED.keys()
    for name, wanted in REJECTED.items():
        assert wanted in rejected[name]
        assert "\n" not in rejected[name]
