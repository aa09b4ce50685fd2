"""Methods that are special cases of each other, and counts done by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, assert_trees, largest_change, make_federation, play

import fedjax_sim as fs
from fedjax_sim.base import ClientView, LocalUpdate

ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}


def local_sgd(model: fs.Model, **options: Any) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05, momentum=0.9), **options)


@pytest.fixture(scope="module")
def averaged(federation: Federation, models: dict[str, fs.Model]) -> Play:
    """Four rounds of FedAvg, weighted by n_k."""
    model = models["logistic"]
    return play(
        fs.fedavg(local_sgd(model), clients_per_round=3).on(ONE["execution"]),
        model,
        federation.data,
        4,
    )


def test_one_phase_is_fedavg(
    federation: Federation, models: dict[str, fs.Model], averaged: Play
) -> None:
    model = models["logistic"]
    shifted = fs.phase_shift(local_sgd(model), clients_per_round=3, phases=1).on(ONE["execution"])
    ours = play(shifted, model, federation.data, 4)
    assert_trees(averaged.servers, ours.servers)
    assert_trees(averaged.final, ours.final)
    assert largest_change(ours.servers[-1], ours.servers[0]) > 1e-3


def test_one_inner_round_is_fedavg(
    federation: Federation, models: dict[str, fs.Model], averaged: Play
) -> None:
    """With equal weights."""
    local, model = local_sgd(models["logistic"]), models["logistic"]
    plain = fs.fedavg(local, clients_per_round=3, equal_weights=True).on(ONE["execution"])
    equal = play(plain, model, federation.data, 4)
    one = fs.radfed(local, clients_per_round=3, redistribution_rounds=1).on(ONE["execution"])
    wandering = play(one, model, federation.data, 4)
    assert_trees(equal.servers, wandering.servers)
    assert largest_change(averaged.servers[-1], equal.servers[-1]) > 1e-3


def test_one_client_is_gradient_descent(models: dict[str, fs.Model]) -> None:
    lone, model = make_federation((20,)), models["logistic"]
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=20, epochs=3)
    ours = play(fs.fedavg(local, clients_per_round=1).on(ONE["execution"]), model, lone.data, 2)
    x, y = (jnp.asarray(a)[lone.data.index] for a in (lone.data.x, lone.data.y))

    @jax.jit
    @jax.grad
    def slope(params: Any) -> jax.Array:
        logits = model.apply(fs.Variables(params, {}), x, train=True)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = model.init(jax.random.fold_in(jax.random.key(0), 0)).params
    for _ in range(6):
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, slope(params))
    assert_trees(ours.final.params, params, rtol=1e-5, atol=1e-6)


STEPS: list[tuple[float, Any, dict[int, int]]] = [  # of so many samples, so many steps
    (2, "keep", {40: 6, 1: 2}),
    (2, "drop", {40: 4, 15: 0}),
    (2, "refill", {40: 6}),
    (0.5, "keep", {40: 2}),  # round(1.5) to even
    (1.5, "keep", {64: 6}),
    (0.25, "keep", {64: 1}),
    (2.4, "keep", {40: 7}),  # round(7.2)
]


@pytest.mark.parametrize(("epochs", "last_batch", "wanted"), STEPS)
def test_steps(epochs: float, last_batch: Any, wanted: dict[int, int]) -> None:
    """Of an objective that does not look at its batch."""
    local = fs.local_sgd(
        lambda params, state, *_: (params, state),
        optax.sgd(0.05),
        epochs=epochs,
        last_batch=last_batch,
    )
    x, y, rows = jnp.zeros((64, 6)), jnp.zeros(64, jnp.int32), jnp.arange(64, dtype=jnp.int32)
    variables, empty = fs.Variables(jnp.float32(0), ()), ((), ())

    @jax.jit
    def steps(size: jax.Array) -> jax.Array:
        view = ClientView(x, y, rows, jnp.int32(0), size, 64)
        return local.train(jax.random.key(1), variables, view, empty, empty).info.steps

    assert {size: int(steps(jnp.int32(size))) for size in wanted} == wanted


@pytest.mark.slow
def test_last_batch_is_moot_where_batches_fit(models: dict[str, fs.Model]) -> None:
    even, model = make_federation((8, 16, 24, 8)), models["logistic"]
    keep, drop, refill = (
        play(
            fs.fedavg(local_sgd(model, batch_size=8, last_batch=kind), clients_per_round=4).on(
                ONE["execution"]
            ),
            model,
            even.data,
            2,
        ).final
        for kind in ("keep", "drop", "refill")
    )
    for other in (drop, refill):
        assert_trees(keep, other, rtol=1e-6, atol=1e-7)


def test_dropping_every_batch_trains_nothing(models: dict[str, fs.Model]) -> None:
    small, model = make_federation((3, 5)), models["logistic"]
    local = local_sgd(model, batch_size=16, last_batch="drop")
    out = play(fs.fedavg(local, clients_per_round=2).on(ONE["execution"]), model, small.data, 1)
    assert_trees(out.final, model.init(jax.random.fold_in(jax.random.key(0), 0)), 1e-6)
    assert float(out.metrics[0].loss) == 0.0


@pytest.fixture(scope="module")
def forty() -> Federation:
    return make_federation(tuple(1 + k % 5 for k in range(44)))


def test_epochs_mode(forty: Federation, models: dict[str, fs.Model]) -> None:
    """E (n+1) / 2n epochs for 2n / (n+1) times the rounds: 8 epochs at n=4 become 5."""
    algorithm = fs.phase_shift(
        local_sgd(models["logistic"], batch_size=2, epochs=8),
        clients_per_round=44,
        phases=4,
        mode="epochs",
    ).on(ONE["execution"])
    out = play(algorithm, models["logistic"], forty.data, 1)
    assert algorithm.round_factor == pytest.approx(8 / 5)
    assert int(out.metrics[0].steps) == 5 * int(np.ceil(forty.sizes / 2).sum())
    assert int(out.metrics[0].samples) == 5 * forty.sizes.sum()
    one = fs.phase_shift(
        local_sgd(models["logistic"]), clients_per_round=4, phases=1, mode="epochs"
    )
    assert one.round_factor == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "up", "down", "last"),
    [
        ("fedavg", {"clients_per_round": 40}, 40, 40, 0),
        ("radfed", {"clients_per_round": 7, "redistribution_rounds": 3}, 7, 7, 0),
        ("phase_shift", {"clients_per_round": 40, "phases": 4}, 10, 40, 30),
    ],
)
def test_traffic(
    forty: Federation,
    models: dict[str, fs.Model],
    name: str,
    options: dict[str, int],
    up: int,
    down: int,
    last: int,
) -> None:
    rounds, model = 5, models["logistic"]
    algorithm = fs.ALGORITHMS[name](local_sgd(model), **options).on(ONE["execution"])
    result = fs.simulate(algorithm, model, forty.data, forty.test, rounds=rounds, classes=3, **ONE)
    uploads = [up * (t + 1) for t in range(rounds)]
    uploads[-1] += last
    assert [int(e.uploads[0]) for e in result.evaluations] == uploads
    assert [int(e.downloads[0]) for e in result.evaluations] == [
        down * (t + 1) for t in range(rounds)
    ]
    if options.get("phases") == 4:  # (n+1)/2n, and the full upload at the end
        total = uploads[-1] + down * rounds
        assert total / (80 * rounds) == pytest.approx(5 / 8 + 30 / (80 * rounds))


def test_first_group_uploads_after_one_round(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    model = models["logistic"]
    algorithm = fs.phase_shift(local_sgd(model), clients_per_round=8, phases=4).on(ONE["execution"])
    out = play(algorithm, model, federation.data, 2)
    start = model.init(jax.random.fold_in(jax.random.key(0), 0))
    assert largest_change(out.servers[0], start) > 1e-3
    for t, state in enumerate(out.states):
        mine = slice(2 * t, 2 * t + 2)
        sizes = federation.sizes[np.asarray(state.slots.client)]
        assert float(state.server_samples) == sizes[mine].sum()
        for w, w_k in zip(
            jax.tree.leaves(state.server), jax.tree.leaves(state.slots.variables), strict=True
        ):
            group = np.average(np.asarray(w_k)[mine], axis=0, weights=sizes[mine])
            np.testing.assert_allclose(w, group, rtol=1e-5, atol=1e-6)
