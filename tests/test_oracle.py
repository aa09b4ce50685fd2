"""The package against a plain NumPy implementation, client by client."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, Play, play

import fedjax_sim as fs

LR, MOMENTUM, ROUNDS = 0.05, 0.9, 7


def both(
    federation: Federation,
    model: fs.Model,
    name: str,
    options: dict[str, Any],
    batch: int = 16,
    epochs: float = 2,
    last_batch: Any = "keep",
    rounds: int = ROUNDS,
) -> tuple[oracle.Oracle, tuple[list[oracle.Layers], oracle.Layers], Play]:
    optimizer = optax.sgd(LR, momentum=MOMENTUM)
    local = fs.local_sgd(fs.empirical_risk(model), optimizer, batch, epochs, last_batch)
    execution = fs.make_execution(devices=2)
    ours = play(fs.ALGORITHMS[name](local, **options).on(execution), model, federation.data, rounds)
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    slow = oracle.Oracle(federation.data, initial, LR, MOMENTUM, batch, epochs, last_batch)
    literal = {
        "fedavg": lambda: oracle.fedavg(slow, rounds, options["clients_per_round"]),
        "radfed": lambda: oracle.radfed(
            slow, rounds, options["clients_per_round"], options.get("redistribution_rounds", 5)
        ),
        "phase_shift": lambda: oracle.phase_shift(
            slow, rounds, options["clients_per_round"], options.get("phases", 2)
        ),
    }
    return slow, literal[name](), ours


def close(theirs: oracle.Layers, ours: Any) -> None:
    for a, b in zip(theirs, oracle.layers_of(ours), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


CASES = {
    "fedavg, 3 of 8": ("fedavg", {"clients_per_round": 3}),
    "radfed, 5 of 8": ("radfed", {"clients_per_round": 5, "redistribution_rounds": 3}),
    "phase shift, 6 of 8": ("phase_shift", {"clients_per_round": 6, "phases": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_server_of_every_round(
    federation: Federation, models: dict[str, fs.Model], case: str
) -> None:
    name, options = CASES[case]
    slow, (servers, final), ours = both(federation, models["logistic"], name, options)
    for theirs, mine in zip(servers, ours.servers, strict=True):
        close(theirs, mine)
    close(final, ours.final)
    assert slow.visited == sum(int(m.samples) for m in ours.metrics)
    assert slow.steps == sum(int(m.steps) for m in ours.metrics)
    losses = sum(float(m.loss) * int(m.samples) for m in ours.metrics)
    np.testing.assert_allclose(losses, slow.loss, rtol=1e-4)


@pytest.mark.parametrize(
    ("last_batch", "batch", "epochs"),
    [
        ("refill", 7, 1.5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("keep", 7, 1.5), ("drop", 7, 1.5),
                ("keep", 40, 2), ("drop", 40, 2), ("refill", 40, 2),
            )
        ),
    ],
)  # fmt: skip
def test_last_batch(
    federation: Federation, models: dict[str, fs.Model], last_batch: str, batch: int, epochs: float
) -> None:
    options = {"clients_per_round": 8}
    slow, (_, final), ours = both(
        federation, models["logistic"], "fedavg", options, batch, epochs, last_batch, rounds=3
    )
    close(final, ours.final)
    assert slow.visited == sum(int(m.samples) for m in ours.metrics)
    assert slow.steps == sum(int(m.steps) for m in ours.metrics)
    assert slow.steps > 0


def test_oracle_gradient_is_the_slope(federation: Federation, models: dict[str, fs.Model]) -> None:
    layers = oracle.layers_of(models["mlp"].init(jax.random.key(3)))
    x, y = federation.data.x[:9], federation.data.y[:9]
    grads = oracle.loss_and_gradient(layers, x, y)[1]
    for i, g in enumerate(grads):
        h = np.zeros_like(layers[i])
        h.flat[0] = 1e-6
        up = [*layers[:i], layers[i] + h, *layers[i + 1 :]]
        down = [*layers[:i], layers[i] - h, *layers[i + 1 :]]
        ends = [oracle.loss_and_gradient(w, x, y)[0] for w in (up, down)]
        assert g.flat[0] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9)
