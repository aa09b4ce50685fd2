"""The flags of local training: optimisers, weight decay, rates by the round.

What they compute is set beside plain NumPy; and each reaches the methods, or is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import play
from oracle import Layers, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import Setup, build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.training import Training, make_local, rounds_of, scheduled
from fedjax_sim.partition import partition_from_lists
from fedjax_sim.run.identity import digest
from fedjax_sim.run.programs import Programs

LR, ROUNDS, EPOCHS = 0.3, 5, 2


@pytest.fixture(autouse=True)
def _promoted() -> Iterator[None]:
    """Adam's bias correction in optax raises a float to an integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def problem() -> tuple[fs.Model, fs.ClientData]:
    """Two unequal clients; one minibatch has all samples of either."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(14, 4)).astype(np.float32)
    y = rng.integers(3, size=14).astype(np.int32)
    data = fs.client_data(x, y, partition_from_lists([[*range(5)], [*range(5, 14)]]))
    return fs.models.logistic((4,), 3), data


def cosine(end: float) -> Callable[[int], float]:
    return lambda r: end + (1 - end) * 0.5 * (1 + np.cos(np.pi * r / ROUNDS))


# What one step takes off the weights: (gradient, w, memory, number of the step from 1) -> step.
def sgd(decay: float, momentum: float, *, nesterov: bool = False) -> Any:
    def step(g: np.ndarray, w: np.ndarray, kept: dict[str, np.ndarray], t: int) -> np.ndarray:
        g = g + decay * w
        kept["v"] = momentum * kept.get("v", 0 * g) + g
        return LR * (g + momentum * kept["v"] if nesterov else kept["v"])

    return step


def adam(joined: float, apart: float) -> Any:
    def step(g: np.ndarray, w: np.ndarray, kept: dict[str, np.ndarray], t: int) -> np.ndarray:
        g = g + joined * w
        kept["m"] = 0.9 * kept.get("m", 0 * g) + 0.1 * g
        kept["v"] = 0.999 * kept.get("v", 0 * g) + 0.001 * g**2
        m, v = kept["m"] / (1 - 0.9**t), kept["v"] / (1 - 0.999**t)
        return LR * (m / (np.sqrt(v) + 1e-8) + apart * w)

    return step


ORACLES: dict[str, tuple[Training, Any, Callable[[int], float]]] = {
    "nesterov": (Training(optimizer="nesterov"), sgd(0, 0.9, nesterov=True), lambda r: 1),
    "adam": (Training(optimizer="adam", weight_decay=0.1), adam(0.1, 0), lambda r: 1),
    "adamw": (Training(optimizer="adamw", weight_decay=0.1), adam(0, 0.1), lambda r: 1),
    "decay, momentum and a schedule": (
        Training(lr_schedule="warmup(3) * cosine", weight_decay=0.1), sgd(0.1, 0.9),
        lambda r: min(1, (r + 1) / 3) * cosine(0)(r),
    ),
}  # fmt: skip


def algorithm_of(training: Training) -> fs.Algorithm:
    """FedAvg of both clients."""
    local = make_local(training, fs.empirical_risk(problem()[0]), ())
    one = fs.make_execution(1)
    return scheduled(
        training, local, ROUNDS, lambda made: fs.fedavg(made, clients_per_round=2).on(one)
    )


@pytest.mark.parametrize("case", ORACLES)
def test_settings_of_local_training_compute_what_they_say(case: str) -> None:
    given, step, factor = ORACLES[case]
    training = dataclasses.replace(given, lr=LR, epochs=EPOCHS, batch_size=16)
    model, data = problem()
    # Biases are 0 at the start, and a decay that left them out would be hard to see.
    initial = jax.tree.map(lambda a: np.asarray(a) + 0.5, model.init(jax.random.key(0)))
    raised = model._replace(init=lambda key: initial)
    servers = play(algorithm_of(training), raised, data, ROUNDS).servers

    x, y = np.asarray(data.x), np.asarray(data.y)
    server = layers_of(initial)
    for r, after in enumerate(servers):
        trained: list[Layers] = []
        for rows in (slice(0, 5), slice(5, 14)):
            layers, kept = [w.copy() for w in server], [{} for _ in server]  # type: ignore[var-annotated]
            for t in range(1, EPOCHS + 1):
                _, grads = loss_and_gradient(layers, x[rows], y[rows])
                parts = zip(layers, grads, kept, strict=True)
                layers = [w - factor(r) * step(g, w, own, t) for w, g, own in parts]
            trained.append(layers)
        server = [(5 * a + 9 * b) / 14 for a, b in zip(*trained, strict=True)]
        for a, b in zip(layers_of(after), server, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


FACTORS: dict[str, Callable[[int], float]] = {
    "cosine(0.1)": cosine(0.1),
    "linear": lambda r: 1 - r / ROUNDS,
    "exponential(0.7)": lambda r: 0.7**r,
    "step(0.1, 2, 4)": lambda r: 0.1 ** ((r >= 2) + (r >= 4)),
    "warmup(3) * cosine": lambda r: min(1, (r + 1) / 3) * cosine(0)(r),
}


@pytest.mark.parametrize("schedule", FACTORS)
def test_the_rate_of_a_round(schedule: str) -> None:
    """A run with one of them is above."""
    local = algorithm_of(Training(lr_schedule=schedule, lr=LR)).parts.local
    assert local.origin is not None
    rate = local.origin.arguments["rate_by_round"]
    told = [float(rate(jnp.int32(r))) for r in range(ROUNDS)]
    wanted = [FACTORS[schedule](r) for r in range(ROUNDS)]
    np.testing.assert_allclose(told, wanted, rtol=1e-5, atol=1e-6)


BASE = ["--devices", "1", "--compare", "none", "--rounds", "5", "--seeds", "1", "--clients", "8",
        "--model", "logistic", "--partition", "iid"]  # fmt: skip


def built(*argv: str) -> Setup:
    return build(parse([*BASE, *argv]))


def settings_of(*argv: str) -> str:
    (algorithm,) = built(*argv).algorithms.values()
    return digest(algorithm.parts.by_role())


def test_every_setting_reaches_the_method_also_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programs, "check", lambda self: None)  # that they fit is tested below
    own = {
        "--optimizer nesterov": "fedavg(optimizer=nesterov)",
        "--optimizer adam": "fedavg(optimizer=adam)",
        "--optimizer adagrad": "fedavg(optimizer=adagrad)",
        "--optimizer rmsprop": "fedavg(optimizer=rmsprop)",
        "--optimizer yogi": "fedavg(optimizer=yogi)",
        "--optimizer adamw --weight-decay 0.1": "fedavg(optimizer=adamw, weight_decay=0.1)",
        "--weight-decay 0.1": "fedavg(weight_decay=0.1)",
        "--momentum 0.5": "fedavg(momentum=0.5)",
        "--optimizer-state keep": "fedavg(optimizer_state=keep)",
        "--stragglers 0.5": "fedavg(stragglers=0.5)",
    }
    setup = built("--algo", "fedavg", "--compare", *own.values())
    found = {name: digest(a.parts.by_role()) for name, a in setup.algorithms.items()}
    assert len({*found.values()}) == len(found) == 1 + len(own)
    assert settings_of("--algo", "fedavg", "--lr-schedule", "cosine") not in found.values()
    for flags, text in own.items():
        by_flag = parse([*BASE, "--algo", "fedavg", *flags.split()]).training_of("fedavg")
        assert by_flag == parse([*BASE, "--algo", text]).training_of(text)
    for flags in ("--optimizer adamw --weight-decay 0.1", "--optimizer-state keep"):
        assert settings_of("--algo", "fedavg", *flags.split()) == found[own[flags]]
    # A momentum that is for the others is no mistake.
    config = parse([*BASE, "--momentum", "0.5", "--algo", "fedavg(optimizer=adam)"])
    assert config.training_of("fedavg(optimizer=adam)").momentum is None
    assert config.training.momentum == 0.5


PLAIN = "mimelite mime fedcm feddyn fedadmm fedsam fedlesam per_fedavg pfedme"


@pytest.mark.parametrize(
    ("argv", "momentum", "lr"),
    [
        (f"--algo fedavg --compare {PLAIN}", 0.0, 0.2),
        ("--algo mime --lr 0.05", 0.0, 0.05),
        ("--algo mime(lr=0.05)", 0.0, 0.05),
        ("--algo mime --momentum 0.5", 0.5, 0.02),
        ("--algo mime(momentum=0.5)", 0.5, 0.02),
        ("--algo mime --optimizer nesterov", 0.9, 0.02),
        ("--algo mime(optimizer=adam)", None, 0.02),
        ("--algo scaffold --compare fedprox phase_shift fedavgm", 0.9, 0.02),
    ],
)
def test_methods_with_a_momentum_of_their_own_have_no_other(
    argv: str, momentum: float | None, lr: float
) -> None:
    """Unless it is given; the digits' learning rate is for a momentum of 0.9."""
    config = parse([*argv.split(), "--dataset", "digits"])
    for name in set(config.algorithms) - {"fedavg"}:
        training = config.training_of(name)
        assert (training.momentum, training.lr) == (momentum, lr), name
    assert config.training.momentum in (0.9, 0.5)


def test_a_schedule_is_as_long_as_the_rounds_of_the_method() -> None:
    setup = built(
        "--algo", "phase_shift", "--phases", "4", "--mode", "epochs", "--lr-schedule", "linear"
    )
    (algorithm,) = setup.algorithms.values()
    rounds = rounds_of(algorithm, 5)
    assert rounds == 8
    (training,) = [parse([*BASE, "--lr-schedule", "linear"]).training]
    local = make_local(training, fs.empirical_risk(setup.model), ())
    told: list[Any] = []
    scheduled(training, local, 5, lambda one: told.append(one) or algorithm)  # type: ignore[func-returns-value]
    assert [one.origin.arguments.get("rate_by_round") is None for one in told] == [True, False]
    assert float(told[1].origin.arguments["rate_by_round"](4)) == 0.5  # of 8, not of 5


REFUSED = {
    "--optimizer adam --momentum 0.5": "--momentum is for --optimizer sgd or nesterov, not adam",
    "--optimizer nesterov --momentum 0": "--momentum must be above 0 for --optimizer nesterov",
    "--optimizer adamw": "--weight-decay must be above 0 for --optimizer adamw, or it is adam",
    "--algo fedavg(optimizer=adam,momentum=0.5)": (
        "fedavg(optimizer=adam, momentum=0.5): --momentum is for --optimizer sgd or nesterov"
    ),
    "--stragglers 0.5 --epochs 1": "--stragglers is for --epochs above 1, got 1",
    "--lora 2 --weight-decay 0.1": "--weight-decay is for models without --lora",
    "--lora 2 --algo fedavg(weight_decay=0.1)": "--weight-decay is for models without --lora",
    "--lr-schedule foo": "--lr-schedule: must be constant, or one of cosine(end), linear(end), ",
    "--lr-schedule cosine(1)": "--lr-schedule: cosine(1): end must be in [0, 1), got 1",
    "--lr-schedule warmup(1)": "--lr-schedule: warmup(1): rounds must be at least 2, got 1",
    "--lr-schedule step(0.1,4,2)": (
        "--lr-schedule: step(0.1,4,2): rounds must be in order, got 4, 2"
    ),
    "--lr-schedule step(0.1,5)": (
        "--lr-schedule step(0.1, 5): round 5 must be below the 5 rounds"
    ),
    "--algo fltrust --server-fraction 0.2 --lr-schedule cosine": (
        "fltrust: rate_by_round needs the round number"
    ),
    "--algo fednova --optimizer adam": "fednova: preaggregation normalise(",
    "--algo scaffnew(optimizer=yogi)": "scaffnew(optimizer=yogi): local ",
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_what_has_no_effect_or_no_meaning_is_refused_in_a_line(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[given])}") as raised:
        built(*given.split())
    assert "\n" not in str(raised.value)


def test_strong_weight_decay_is_no_other_optimiser() -> None:
    """It is part of what is minimised: FedNova counts steps, and needs SGD."""
    assert built("--algo", "fednova", "--weight-decay", "1").algorithms.keys() == {"fednova"}


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_more_rounds_are_no_other_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run may be longer, unless its rates are those of its length."""
    out, other = tmp_path / "run", tmp_path / "other"
    argv = [*BASE, "--algo", "fedavg", "--clients-per-round", "2"]
    argv += ["--lr-schedule", "exponential(0.5)"]
    assert bench.main([*argv, "--rounds", "2", "--out", str(out)]) == 0
    shutil.copytree(out, other)
    told = (out / "config.json").read_text()
    (other / "config.json").write_text(told.replace("exponential(0.5)", "cosine"))
    capsys.readouterr()
    assert bench.main(["--resume", str(out), "--rounds", "3"]) == 0
    assert bench.main(["--resume", str(other), "--rounds", "3"]) == 2
    assert "--lr-schedule cosine is of its length, got 3" in capsys.readouterr().err
