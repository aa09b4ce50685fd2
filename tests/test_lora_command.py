"""Weights in files, and ``--initial`` and ``--lora`` of the command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.base import Variables
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.models.leaves import named

ARGV = ["--dataset", "digits", "--model", "logistic", "--clients", "4", "--rounds", "1"]
ARGV += ["--seeds", "2", "--partition", "iid", "--devices", "1", "--compare", "none", "--algo"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def logistic(seed: int = 7) -> tuple[fs.Model, Variables]:
    """What --model logistic is on digits without its scale, and weights that no run draws."""
    model = fs.models.logistic((8, 8, 1), 10)
    return model, model.init(jax.random.key(seed))


# Files


def test_weights_come_back_with_their_statistics() -> None:
    model = fs.models.resnet20((8, 8, 3), 4)
    normed = fs.models.cifar_cnn((32, 32, 3), 10)
    rng = np.random.default_rng(3)
    for net in (model, normed):
        net = net._replace(init=jax.jit(net.init))  # traced once
        weights = jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype),
            jax.eval_shape(net.init, jax.random.key(3)),
        )
        fs.save_weights("weights", weights)
        loaded = fs.load_weights("weights", net)
        assert_trees(loaded, weights)
    assert jax.tree.leaves(weights.state)  # the second one has statistics
    with np.load("weights") as stored:
        assert sum(name.startswith("batch_stats/") for name in stored) == len(
            jax.tree.leaves(weights.state)
        )


def test_short_floats_are_widened_and_cast_back() -> None:
    model, weights = logistic()
    short = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    fs.save_weights(Path("short.npz"), short)
    loaded = fs.load_weights("short.npz", model)
    assert_trees(loaded, jax.tree.map(lambda w: w.astype(jnp.float32), short))


def test_files_that_do_not_fit() -> None:
    model, weights = logistic()
    kernel = weights.params["Dense_0"]["Dense_0"]["kernel"]
    bias = weights.params["Dense_0"]["Dense_0"]["bias"]
    names = {"Dense_0/Dense_0/kernel": kernel, "Dense_0/Dense_0/bias": bias}
    for arrays, message in (
        ({"a": bias}, "it lacks Dense_0/Dense_0/bias, Dense_0/Dense_0/kernel and has a, which"),
        ({**names, "b": bias}, "it has b, which the model does not have"),
        ({**names, "Dense_0/Dense_0/bias": bias[:3]}, r"must have the shape \[10\], got \[3\]$"),
        ({**names, "Dense_0/Dense_0/kernel": kernel.T}, r"shape \[64, 10\], got \[10, 64\]$"),
        ({k: np.stack([v, v]) for k, v in names.items()}, "one of the 2 runs"),
        ({**names, "Dense_0/Dense_0/bias": bias.at[0].set(jnp.nan)}, "bias must be finite numb"),
        ({**names, "Dense_0/Dense_0/bias": np.arange(10)}, "numbers of float32, got int64"),
    ):
        np.savez("odd.npz", **arrays)
        with pytest.raises(ValueError, match=message) as caught:
            fs.load_weights("odd.npz", model)
        assert str(caught.value).startswith("odd.npz")
        assert "\n" not in str(caught.value)
    Path("odd.npz").write_text("weights")
    with pytest.raises(ValueError, match=r"odd\.npz: not a whole \.npz file of arrays"):
        fs.load_weights("odd.npz", model)
    with pytest.raises(FileNotFoundError, match=r"there is no file none\.npz"):
        fs.load_weights("none.npz", model)
    same = Variables({"w": bias}, {"w": bias})
    with pytest.raises(ValueError, match="got two with the same name"):
        fs.save_weights("two.npz", same)
    assert not Path("two.npz").exists()


# The command


def test_every_method_starts_from_the_file() -> None:
    _, weights = logistic()
    fs.save_weights("start.npz", weights)
    setup = build(parse([*ARGV, "fedprox", "--initial", "start.npz"]))
    for seed in range(2):
        assert_trees(setup.model.init(jax.random.key(seed)), weights)


VARIANTS: dict[str, dict[str, Any]] = {
    "fedit": {"trained": ("A", "B"), "frozen": ("trunk",)},
    "ffa": {"trained": ("B",), "frozen": ("trunk", "A")},
    "fedsa": {"trained": ("A", "B"), "own": ("B",), "frozen": ("trunk",)},
    "flora": {
        "trained": ("A", "B"),
        "frozen": ("trunk",),
        "server": fs.server.exact_lora(True, alpha=6.0),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_composition_in_python(variant: str) -> None:
    """Whose whole runs are those of NumPy, see test_lora."""
    net, weights = logistic()
    fs.save_weights("start.npz", weights)
    argv = [*ARGV, "fedavg", "--lora", "2", "--lora-alpha", "6", "--lora-variant", variant]
    setup = build(parse([*argv, "--initial", "start.npz"]))
    digits, choice = fs.load_dataset("digits"), VARIANTS[variant]
    assert digits.mean is not None
    assert digits.std is not None
    scaled = fs.models.starting_from(fs.models.with_scaling(net, digits.mean, digits.std), weights)
    model = fs.models.lora(scaled, 2, alpha=6.0)
    local = fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(0.02, momentum=0.9),
        epochs=2,
        trained=named(*choice["trained"]),
    )
    own = named(*choice["own"]) if "own" in choice else None
    exchange = fs.exchange.split(own=own, frozen=named(*choice["frozen"]))
    expected = fs.fedavg(local, clients_per_round=4).replace(
        exchange=exchange, server=choice.get("server", fs.server.replace())
    )
    assert repr(setup.algorithms["fedavg"]) == repr(expected)
    key, x = jax.random.key(5), jnp.asarray(digits.test_x[:9])
    start = setup.model.init(key)
    assert_trees(start, model.init(key))
    assert_trees(start.params["trunk"], weights.params)
    # Not by the same for all classes, which would be no slope of the variance below.
    start = start._replace(
        params=jax.tree.map(
            lambda w: w + jnp.linspace(0.1, 0.3, w.size).reshape(w.shape), start.params
        )
    )
    ours, theirs = (m.apply(start, x, train=False)[0] for m in (setup.model, model))
    assert_trees(ours, theirs)  # α is 6 in both
    assert_frozen(setup.model, start, choice["frozen"])
    assert setup.model_bytes == 4 * (64 * 10 + 10)  # FedAvg's, to whose traffic all is compared


def assert_frozen(model: fs.Model, start: Variables, frozen: tuple[str, ...]) -> None:
    """Nobody can move them: companions and adapted objectives take gradients of their own."""
    x = jnp.ones((2, 8, 8, 1))
    slopes = jax.grad(lambda p: model.apply(start._replace(params=p), x, train=True)[0].var())(
        start.params
    )
    for part in ("trunk", "A", "B"):
        assert any(bool(jnp.any(g)) for g in jax.tree.leaves(slopes[part])) == (part not in frozen)


@pytest.mark.slow
def test_a_run_with_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    _, weights = logistic()
    fs.save_weights("start.npz", weights)
    argv = [*ARGV, "fedavg", "--lora", "2", "--lora-variant", "fedsa", "--initial", "start.npz"]
    assert bench.main([*argv, "--out", "run", "--no-cache"]) == 0
    said = capsys.readouterr().out
    assert "lora: 148 of 798 weights train; the frozen trunk is that of start.npz" in said
    assert "on 20 % of its own samples" in said  # every client has a model of its own
    config = json.loads(Path("run/config.json").read_text())
    assert (config["lora"], config["lora_alpha"], config["lora_variant"]) == (2, 2.0, "fedsa")
    assert config["initial"] == "start.npz"
    digest = hashlib.sha256(Path("start.npz").read_bytes()).hexdigest()
    assert config["initial_sha256"] == digest
    assert Path("run/curves.png").stat().st_size
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    a = 4 * 64 * 2  # bytes of A
    assert rows[-1]["bytes_up"] == 4 * a
    trunk = 4 * (64 * 10 + 10)
    assert rows[-1]["bytes_down"] == 4 * (a + trunk)  # which every client gets once


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fedavg", "--lora-alpha", "2"], "--lora-alpha is for --lora"),
        (["fedavg", "--initial", "no.npz"], "--initial no.npz: there is no file no.npz"),
        (["fedavg", "--initial", "odd.npz"], "odd.npz must have the model's leaves: it lacks"),
        (
            ["fedadam", "--lora", "2", "--lora-variant", "fedex"],
            "fedadam: --lora 2: --lora-variant fedex is for methods whose server only averages",
        ),
        (["fedper", "--lora", "2"], "fedper: --lora 2 is for methods whose whole model travels"),
        (
            ["ifca", "--lora", "2"],
            "ifca: --lora 2: broadcast ifca(2, empirical_risk(<Model>)) needs an exchange of the",
        ),
        (
            ["fedavg", "--lora", "2", "--model", "test_lora_command:shift"],
            "--lora 2: named: '*kernel' must match a leaf, the model has b",
        ),
    ],
)
def test_refused_in_a_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("odd.npz", a=np.zeros(3))
    assert bench.main([*ARGV, *argv, "--no-cache"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in Path.cwd().iterdir()] == ["odd.npz"]


def shift(shape: Any, classes: int) -> fs.Model:
    """A model without matrices."""
    return fs.Model(
        init=lambda key: Variables({"b": jnp.zeros(classes)}, {}),
        apply=lambda v, x, **_: (jnp.zeros((len(x), 1)) + v.params["b"][None], v.state),
    )
