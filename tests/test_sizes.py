"""Whole numbers at the ends of what is read: a line each, in no time and no memory."""

from __future__ import annotations

import functools
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_federation, promising, with_root
from test_contracts import UNEQUAL, named, net, update

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli.flags import number
from fedjax_sim.cli.methods import owners_of
from fedjax_sim.cli.parser import _TAKEN, _chosen, _parser
from fedjax_sim.cli.partitioning import command as partition
from fedjax_sim.cli.studies.plan import read_study
from fedjax_sim.cli.written import labels_in
from fedjax_sim.engine import memory, tree
from fedjax_sim.run.checks import checked_seeds

RUN = "--model logistic --rounds 2 --clients 10 --clients-per-round 4 --seeds 1 --devices 1"
RUN += " --compare none --dry-run --no-cache"
BESIDE = {
    "--folds": "--split clients",
    "--patience": "--split clients",
    "--lora": "--model mlp",
    "feddf": "--server-fraction 0.1",
    "semifl": "--server-fraction 0.1",
    "fedmd": "--server-fraction 0.1",
    "zeno": "--server-fraction 0.1",
    "robust": "--mixing buckets",
    "tifl": "--clock constant(1)",
    "oort": "--clock constant(1)",
    "astraea": "--mediator-size 2",
}
"""What a flag or a method needs."""
ENDS = ("2147483647", "2147483648", f"1{400 * '0'}", f"-1{400 * '0'}")


def whole_numbers() -> Iterator[tuple[str, str]]:
    """Every flag that is a whole number, and a method that has it."""
    chosen = _chosen([])
    owners = owners_of(chosen.listed, chosen.names, _TAKEN)
    for action in _parser(chosen, owners)._actions:
        try:
            if action.type is not None:
                action.type("7.5")  # type: ignore[operator]
        except Exception as error:
            if "a whole number" in str(error):
                yield action.option_strings[0], owners.get(action.dest, ["fedavg"])[0]


def asked(flag: str, method: str, value: str) -> list[str]:
    beside = [BESIDE[key] for key in (flag, method) if key in BESIDE and flag not in BESIDE[key]]
    return [*RUN.split(), "--algo", method, *" ".join(beside).split(), f"{flag}={value}"]


SOME = {
    "--clusters": ("ifca", "2,147,483,647 copies of a model take "),
    "--max-staleness": ("fedasync", "2,147,483,648 copies of a model take "),
    "--public-samples": ("fedmd", "logits of 2,147,483,647 public samples take "),
    "--digest-epochs": ("fedmd", "epochs must be at most 1000, got"),
    "--fragments": ("streaming_diloco", "--fragments must be in 1..1000, got"),
    "--bands": ("dp_ftrl", "--bands must be in 1..2, the rounds between two visits of"),
    "--pace-rounds": ("oort", "window must be in 1..10000000, got 2147483647"),
}


@pytest.mark.parametrize("flag", SOME)
def test_what_would_fill_the_memory_is_priced_before(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    method, wanted = SOME[flag]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert bench.main(asked(flag, method, ENDS[0])) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert wanted in error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


@pytest.mark.slow
def test_no_flag_ends_in_a_traceback_or_never(capsys: pytest.CaptureFixture[str]) -> None:
    before, flags = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [*whole_numbers()]
    assert len(flags) > 45
    for flag, method in flags:
        for value in ENDS:
            began = time.perf_counter()
            status = bench.main(asked(flag, method, value))
            error = capsys.readouterr().err
            assert (status, error.count("\n")) in [(0, 0), (2, 1)], flag
            assert status == 2 or value == ENDS[0], flag
            assert len(error) < 500, flag
            assert time.perf_counter() - began < 30, flag
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000


@pytest.mark.parametrize("value", ENDS[1:])
def test_a_number_outside_is_cut_where_it_is_told(value: str) -> None:
    with pytest.raises(Exception, match=r"^must be .*, got '?-?[12]\d{1,19}'?$"):
        number(int, at_least=1)(value)


def test_what_multiplies_is_counted_before_it_is_made(tmp_path: Path) -> None:
    """Cells of a study, settings of a method, and runs: each of 10^9 and more."""
    (file := tmp_path / "s.toml").write_text(
        "methods = ['fedavg']\nrun = {dataset = 'digits', rounds = 1}\n[grid]\n"
        + "".join(f"{key} = {[*range(1, 1001)]}\n" for key in ("clients", "epochs", "batch_size"))
    )
    with pytest.raises(ValueError, match="grid must have at most 10,000 cells, got 1,000,000,000"):
        read_study(file)
    many = "|".join(map(str, range(1, 1001)))
    with pytest.raises(ValueError, match="stands for 1,000,000,000 texts: use at most 1,000"):
        labels_in(f"fedavg(epochs={many}, batch_size={many}, lr={many})")
    with pytest.raises(ValueError, match="seeds must be at most 100,000, got 1,000,000,000"):
        checked_seeds(range(10**9))


@pytest.mark.parametrize("number", [2**31, 10**400, -(10**400)])
def test_parts_take_whole_numbers_of_32_bits(number: int) -> None:
    objective = fs.toy(3).objective
    local = fs.local_sgd(objective, optax.sgd(0.1))
    tuned = functools.partial(fs.algorithms.per_fedavg, objective=objective, clients_per_round=2)
    for make in (
        lambda: fs.fedavg(local, clients_per_round=number),
        lambda: tuned(local, fine_tuning_steps=number),
        lambda: fs.server.broadcast.stale(number),
    ):
        with pytest.raises(ValueError, match=r"^\w+ must be within ±2147483647, got -?\d{1,20}$"):
            make()
    with pytest.raises(ValueError, match="clients_per_round must be at most 10000000, got"):
        fs.fedavg(local, clients_per_round=2**31 - 1)


CALLED = {
    "fewest_steps": "fewest",
    "fine_tuning_steps": "epochs",
    "public_samples": "public samples",
    "digest_epochs": "epochs",
    "tiers": "count",
    "sketch_size": "sketches",
    "pace_rounds": "window",
    "mediator_epochs": "rounds",
}
"""The arguments of methods that parts call otherwise."""
COUNTS = [
    (name, argument)
    for name in fs.ALGORITHMS
    for argument, kind in keywords(fs.ALGORITHMS[name]).items()
    if kind.annotation in (int, int | None)
]


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        case if case in (("phase_shift", "clients_per_round"), ("push_sum", "clients_per_round"),
                         ("oort", "pace_rounds"), ("fd", "classes"))
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in COUNTS
    ],
)  # fmt: skip
def test_no_whole_number_of_a_method_hangs_or_fills_the_memory(name: str, argument: str) -> None:
    """Made, priced and traced: a ValueError that names it and the number, or accepted."""
    data = with_root(make_federation(UNEQUAL).data, range(8))
    variables = jax.eval_shape(net().init, jax.random.key(0))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for value in (2**31 - 1, 2**31, 10**400):
        try:
            made = named(name, update(), **{argument: value})
            made.traffic(variables, data)
            state = jax.eval_shape(made.init, jax.random.key(0), variables, data)
            jax.eval_shape(made.step, jax.random.key(0), state, data)
        except ValueError as error:
            told = str(error).replace(",", "")
            assert argument in told or CALLED[argument] in told
            assert re.search(r"\d{10}", told)
            assert len(told) < 200
        else:
            assert value == 2**31 - 1
    assert time.perf_counter() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


def test_the_clients_of_a_graph_are_priced() -> None:
    local = fs.local_sgd(fs.toy(3).objective, optax.sgd(0.1))
    for method in (fs.algorithms.gossip, fs.algorithms.push_sum):
        with pytest.raises(memory.TooLargeError, match="graph of 9,999,999 clients_per_round take"):
            method(local, clients_per_round=9_999_999)


def test_a_number_that_no_part_rejects_is_a_line() -> None:
    problem = fs.toy(3)
    late = promising(fs.flight.every_round(), due=lambda self, t, slots: jnp.full(2, t >= 2**33))
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    algorithm = fs.compose(local, clients_per_round=2, flight=late)
    with pytest.raises(ValueError, match="a whole number is too large for the devices: "):
        problem.accuracy(algorithm, rounds=1)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["ll(2)", "--seeds", ENDS[0]], "--seeds: must be a whole number at least 1"),
        ([f"matched(3, 1, moves={ENDS[0]})"], "moves must be in 0 to 100000000, got 2147483647"),
    ],
)
def test_partitions_end_too(
    words: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dataset", "digits", "--clients", "10", "--out", str(tmp_path / "new")]
    assert partition([*argv, "--sampler", *words]) == 2
    assert wanted in capsys.readouterr().err


def test_copies_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of_host", lambda: 4_000_000)
    monkeypatch.setattr(memory, "memory_of", lambda devices: None)
    one = {"w": np.zeros(250, np.float32)}
    assert tree.stack_copies(one, 4000)["w"].shape == (4000, 250)
    wanted = "4,001 copies of a model take 4 MB: more than the 4 MB of this machine"
    with pytest.raises(memory.TooLargeError, match=wanted):
        tree.stack_copies(one, 4001)
