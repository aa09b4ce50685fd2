"""Methods, data sets, models and partitions of users: imported or registered."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import rejects

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.spelling import OTHER_WORDS, did_you_mean, plain
from fedjax_sim.cli import partitioning
from fedjax_sim.cli.build import build, load_model
from fedjax_sim.cli.catalogue import listing
from fedjax_sim.cli.config import GROUPS
from fedjax_sim.cli.methods import parameters
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import DATASETS, load_dataset
from fedjax_sim.models import MODELS
from fedjax_sim.partition import SAMPLERS

MINE = '''
import flax.linen as nn
from flax import nnx
import numpy as np
import fedjax_sim as fs
from fedjax_sim import selection, server
from fedjax_sim.data import from_arrays
from fedjax_sim.partition import Partition, partition_from_lists


def fed(
    local, *, clients_per_round: int, rate: float = 0.5, label: str = "x", hook: object = None
) -> fs.Algorithm:
    """Mine: FedAvg whose server goes a part of the way.

    Args:
        local: the local update.
        clients_per_round: m.
        rate: how far the server goes; 1 % is little.
        label: its colour.
        hook: no flag.
    """
    if rate > 1:
        raise ValueError(f"rate must be at most 1, got {rate}")
    if label == "late":
        return fs.compose(local, clients_per_round, selection="mine")
    if label == "crash":
        return {}["nothing"]
    if label == "none":
        return "no algorithm"
    return fs.compose(
        local,
        selection=selection.uniform(),
        clients_per_round=clients_per_round,
        server=server.mix(rate),
    )


def needy(local, *, clients_per_round, level: int, rounds: int = 3) -> fs.Algorithm:
    return fed(local, clients_per_round=clients_per_round)


def blobs(folder) -> fs.data.Dataset:
    """Three classes of points."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return from_arrays("blobs", rng.normal(size=(60, 4)) + y[:, None], y)


def broken(folder) -> fs.data.Dataset:
    raise ZeroDivisionError("no data today")


def no_data(folder) -> fs.data.Dataset:
    return 3


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x.reshape(x.shape[0], -1))


def net(shape, classes) -> nn.Module:
    return Net(classes)


def bad_net(shape, classes) -> fs.Model:
    raise KeyError(shape)


class Linear(nnx.Linear):
    def __init__(self, shape, classes, rngs):
        super().__init__(*shape, classes, rngs=rngs)


def keyword_net(shape, classes, *, rngs) -> nnx.Module:
    return Linear(shape, classes, rngs)


def rngs_net(rngs) -> nnx.Module:
    return Linear((4,), 3, rngs)


def made_net(shape, classes) -> nnx.Module:
    return Linear(shape, classes, nnx.Rngs(0))


def slices(
    labels, clients, *, seed, each: int, turn: float = 0.0, mode: str = "plain"
) -> Partition:
    """Slices.

    Args:
        each: slices of a client.
        turn: how far they are turned.
        mode: "plain", or one that fails.
    """
    if mode == "fail":
        raise IndexError("no slice is left")
    if mode == "empty":
        return [1, 2]
    order = np.random.default_rng(seed).permutation(len(labels))
    return partition_from_lists(np.array_split(order, clients), f"slices({each}, {turn:g})")
'''
SMALL = ["--rounds", "1", "--clients", "4", "--seeds", "1", "--no-cache", "--devices", "1"]
TINY = [*SMALL, "--partition", "iid"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's module; what it registers is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Any]
    for registry in (ALGORITHMS, DATASETS, MODELS, SAMPLERS):
        monkeypatch.setattr(registry, "_values", dict(registry))
    yield importlib.import_module("mine")
    del sys.modules["mine"]


# The command, with what it imports


@pytest.mark.slow
def test_all_four_can_be_imported(mine: ModuleType, tmp_path: Path) -> None:
    argv = ["--algo", "mine:fed", "--rate", "0.25", "--dataset", "mine:blobs"]
    argv += ["--model", "mine:net", "--partition", "mine:slices(3, turn=1/2)"]
    argv += [*SMALL, "--out", str(tmp_path / "run")]
    assert bench.main(argv) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["options"] == {"mine:fed": {"rate": 0.25}, "fedavg": {}}
    assert (config["model"], config["partitions"]) == ("mine:net", ["slices(3, 0.5)"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"mine:fed", "fedavg"} <= summary.keys()
    assert np.isfinite(summary["mine:fed"]["accuracy_last"])


def test_a_method_may_leave_the_devices_to_the_command(mine: ModuleType) -> None:
    setup = build(parse(["--algo", "mine:fed", "--model", "logistic", *TINY]))
    assert setup.algorithms["mine:fed"].parts.execution is setup.execution


def test_a_data_set_has_a_model_by_its_shape(mine: ModuleType) -> None:
    config = parse(["--dataset", "mine:blobs", "--phases", "1", *TINY])
    assert (config.training.model, config.training.lr, config.experiment.rounds) == (None, 0.01, 1)
    assert build(config).model_name == "ffn"


def test_a_method_is_read_by_its_signature(
    mine: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--algo", "mine:fed", "--compare", "none", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--rate X how far the server goes; 1 % is little (mine:fed 0.5)" in text
    assert "--hook" not in text
    with pytest.raises(
        ValueError, match="--phases is not a flag of mine:fed, whose flags are: --ra"
    ):
        parse(["--algo", "mine:fed", "--compare", "none", "--phases", "2"])


@pytest.mark.slow
def test_a_module_beside_is_found(mine: ModuleType, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "fedjax_sim.bench", "--algo", "mine:fed", "--help"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "(mine:fed 0.5)" in done.stdout


def test_the_other_command_deals_by_a_sampler_too(mine: ModuleType, tmp_path: Path) -> None:
    argv = ["--clients", "4", "--out", str(tmp_path / "run"), "--sampler", "mine:slices(each=3)"]
    assert partitioning.command(argv) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["sampler"], report["clients"]) == ("mine:slices(each=3)", 4)


@pytest.mark.parametrize("name", ["Linear", "keyword_net", "rngs_net", "net"])
def test_a_factory_of_any_flax_module_is_a_model(name: str, mine: ModuleType) -> None:
    model = load_model(f"mine:{name}", mine.blobs(None))
    logits, _ = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 4)), train=False)
    assert logits.shape == (2, 3)


# Registered names


def register_all(mine: ModuleType) -> None:
    ALGORITHMS.register("fed_mine", mine.fed)
    DATASETS.register(mine.blobs)
    MODELS.register("net", mine.net)
    SAMPLERS.register(mine.slices)


@pytest.mark.slow
def test_registered_names_behave_like_ours(
    mine: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    register_all(mine)
    argv = ["--dataset", "Blobs", "--model", "net", "--partition", "slices(2)", *SMALL]
    config = parse(["--algo", "fedavg", "--compare", "Fed-Mine", "--rate", "1", *argv])
    assert config.options == {"fedavg": {}, "fed_mine": {"rate": 1.0}}
    setup = build(config)
    assert setup.model_name == "net"
    assert setup.partitions[0].name == "slices(2, 0)"
    assert setup.algorithms.keys() == {"fedavg", "fed_mine"}
    assert load_dataset("blobs").name == "blobs"
    with pytest.raises(SystemExit):
        bench.main(["--list"])
    assert "fed_mine            Mine: FedAvg whose server goes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--algo", "fed_mine", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("fed_mine, or package", "--rate X", "blobs, synthetic(", "net, or package",
                  "slices(each, turn=0.0, mode=plain)"):  # fmt: skip
        assert words in text
    with pytest.raises(ValueError, match="--rate is not a flag of fedavg"):
        parse(["--algo", "fedavg", "--compare", "none", "--rate", "1"])


def test_a_registered_method_that_the_command_cannot_run_does_no_harm(
    mine: ModuleType,
) -> None:
    ALGORITHMS.register(mine.needy)  # its rounds is a flag of the command
    assert parse(["--rounds", "7"]).experiment.rounds == 7
    assert listing(["needy"]).startswith("needy               -\n")  # without a docstring
    with pytest.raises(ValueError, match="needy cannot run here: --rounds is a flag"):
        parse(["--algo", "needy"])


REFUSED: dict[str, tuple[Callable[[ModuleType], Any], str]] = {
    "ours": (lambda m: ALGORITHMS.register("fedavg", m.fed), "'fedavg' is there already; choose"),
    "taken": (lambda m: [MODELS.register("a", f) for f in (m.net, m.bad_net)], "'a' is there alr"),
    "method": (lambda m: ALGORITHMS.register(m.net), r"net must be a function \(local, \*, clie"),
    "data": (lambda m: DATASETS.register(m.net), r"net must be .* data folder.*, got net\(shape"),
    "model": (lambda m: MODELS.register("x", 3), "x must be a function .* Model .*, got int"),
    "sampler": (lambda m: SAMPLERS.register(m.net), r"net must be a function \(labels, clients"),
    "a colon": (
        lambda m: MODELS.register("a:b", m.net),
        "name must be letters, digits.*, got 'a:b'",
    ),
    "none": (lambda m: ALGORITHMS.register("none", m.fed), "name must be letters.*, got 'none'"),
    "nameless": (
        lambda m: MODELS.register(m.Net(3)),
        "name must be given for what has no __name__, got Net",
    ),
    "imported": (lambda m: ALGORITHMS.resolve("mine:net"), r"mine:net must be a function \(local"),
}


test_what_is_refused = rejects(REFUSED, "mine", escape=False)


def test_a_function_that_is_defined_again_replaces_itself(mine: ModuleType) -> None:
    """As a notebook's cell does that runs twice."""
    MODELS.register(mine.net)
    again = importlib.reload(mine).net
    assert MODELS.register(again) is MODELS["net"] is again


def test_a_name_is_its_own_though_another_is_spelt_nearly_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's ``fed_avg`` is not what ``fedavg`` means, nor ``FedAvg``."""
    monkeypatch.setattr(ALGORITHMS, "_values", dict(ALGORITHMS))
    mine = ALGORITHMS.register("fed_avg", fs.algorithms.fedprox)
    assert ALGORITHMS.resolve("fed_avg") == ("fed_avg", mine)
    for text in ("fedavg", "FedAvg"):
        assert ALGORITHMS.resolve(text) == ("fedavg", fs.algorithms.fedavg)


def test_names_nearby_are_offered() -> None:
    with pytest.raises(
        UnknownNameError, match=r"^unknown algorithm 'fedavgg'; did you mean fedavg"
    ):
        ALGORITHMS.resolve("fedavgg")
    with pytest.raises(KeyError, match="did you mean logistic"):
        MODELS["logistics"]
    with pytest.raises(ValueError, match="did you mean fashion_mnist"):
        load_dataset("fashion_mist")


def test_other_words_are_for_names_that_exist_and_are_no_names_themselves() -> None:
    of_groups = {field.name for of in GROUPS.values() for field in dataclasses.fields(of)}
    of_methods = {key for name in ALGORITHMS.own for key in parameters(name)}
    flags = {*map(plain, of_groups | of_methods), "algo", "compare"}
    names = {plain(name) for of in (SAMPLERS.own, DATASETS.own, MODELS.own) for name in of}
    for name, words in OTHER_WORDS.items():
        assert plain(name) in flags | names, name
        same = flags if plain(name) in flags else names
        assert not {*map(plain, words.split())} & same, name


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--num-clients", "--clients"),
        ("n_rounds", "rounds"),
        ("number_of_clients", "clients"),
        ("Local-LR", "lr"),
        ("clientz", "clients"),
    ],
)
def test_a_word_of_the_field_means_one_name(word: str, meant: str) -> None:
    known = ["clients", "rounds", "lr", "equal_clients", "pace_rounds", "learned"]
    dashes = "--" * word.startswith("--")
    assert did_you_mean(word, [dashes + name for name in known])[0] == meant


# What fails is one line that names the flag


FAILS = {
    "import": (["--algo", "absent_module:fed"], "--algo: absent_module:fed: ModuleNotFoundError"),
    "range": (["--algo", "mine:fed", "--rate", "2"], "mine:fed: --rate must be at most 1"),
    "crash": (["--algo", "mine:fed", "--label", "crash"], "mine:fed: KeyError: 'nothing' ("),
    "no part": (["--algo", "mine:fed", "--label", "late"], "mine:fed: selection must"),
    "no method": (["--algo", "mine:fed", "--label", "none"], "must return an Algorithm, got str"),
    "taken": (["--algo", "mine:needy", "--level", "1"], "mine:needy cannot run here: --rounds is"),
    "data": (["--dataset", "mine:broken"], "--dataset mine:broken: ZeroDivisionError: no data tod"),
    "data line": (["--dataset", "mine:broken"], "(mine.py, line "),
    "no data": (["--dataset", "mine:no_data"], "mine:no_data must return a Dataset, got int"),
    "model": (["--model", "mine:bad_net"], "--model mine:bad_net: KeyErr"),
    "kind": (["--model", "mlp(widths=3)"], "--model mlp(widths=3): TypeError: 'int' object is not"),
    "setting": (["--model", "mlp(width=3)"], "--model mlp(width=3): width is not an argument of"),
    "weights": (["--model", "gpt2(folder=absent)"], "FileNotFoundError: absent lacks config.json"),
    "nnx": (["--dataset", "mine:blobs", "--model", "mine:made_net"], "got Linear; a function that"),
    "needs": (["--partition", "mine:slices"], "must be written mine:slices(each, turn"),
    "argument": (["--partition", "mine:slices(2, mood=3)"], "must be written mine:slices(each"),
    "sampler": (
        ["--partition", "mine:slices(2, mode=fail)"],
        "--partition mine:slices(2, mode=fail): IndexError: no slice is left (mine.py, line",
    ),
    "no partition": (
        ["--partition", "mine:slices(2, mode=empty)"],
        "--partition mine:slices(2, mode=empty): mine:slices must return a Partition, got list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILS)
def test_what_fails_is_one_line(
    case: str, mine: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, wanted = FAILS[case]
    out = str(tmp_path / "run")
    dealt = [] if "--partition" in argv else ["--partition", "iid"]
    assert bench.main(["--model", "logistic", *SMALL, *dealt, "--out", out, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedjax_sim.bench: error: ")
    assert captured.err.count("\n") == 1
    assert wanted in captured.err
    assert not (tmp_path / "run").exists()


def test_a_flag_that_is_needed(mine: ModuleType) -> None:
    def needs(local: Any, *, clients_per_round: int, level: int) -> Any: ...

    ALGORITHMS.register(needs)
    with pytest.raises(ValueError, match=r"^needs needs --level$"):
        parse(["--algo", "needs"])
    assert parse(["--algo", "needs", "--level", "3"]).options["needs"] == {"level": 3}


def test_a_flag_that_takes_other_values_for_another_method(mine: ModuleType) -> None:
    def other(local: Any, *, clients_per_round: int, rate: int = 1) -> Any: ...

    ALGORITHMS.register(other)
    assert parse(["--algo", "other", "--rate", "3"]).options["other"] == {"rate": 3}
    with pytest.raises(ValueError, match="--rate takes other values for mine:fed than for other"):
        parse(["--algo", "mine:fed", "--compare", "other"])
