"""Whole numbers at the ends of what is read: a line each, in no time and no memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fedjax_sim import bench
from fedjax_sim.cli.flags import number
from fedjax_sim.cli.parser import _TAKEN, _chosen, _parser, owners_of
from fedjax_sim.engine import memory, tree

RUN = "--model logistic --rounds 2 --clients 10 --clients-per-round 4 --seeds 1 --devices 1"
RUN += " --compare none --dry-run --no-cache"
BESIDE = {
    "--folds": "--split clients",
    "--patience": "--split clients",
    "--first": "--clock constant(1)",
    "--lora": "--model mlp",
    "feddf": "--server-fraction 0.1",
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
    "--bands": ("dp_ftrl", "--bands must be in 1..2, the rounds in which none of"),
    "--pace-rounds": ("oort", "a whole number is too large for the devices: "),
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
    with pytest.raises(Exception, match=r"^must be .*, got -?[12]\d{1,19}$"):
        number(int, at_least=1)(value)


def test_copies_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of_host", lambda: 4_000_000)
    monkeypatch.setattr(memory, "memory_of", lambda devices: None)
    one = {"w": np.zeros(250, np.float32)}
    assert tree.stack_copies(one, 4000)["w"].shape == (4000, 250)
    wanted = "4,001 copies of a model take 4 MB: more than the 4 MB of this machine"
    with pytest.raises(memory.TooLargeError, match=wanted):
        tree.stack_copies(one, 4001)
