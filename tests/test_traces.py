"""Traces: a clock whose devices are those of a file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SIZES, known, make_federation

import fedjax_sim as fs
from fedjax_sim.base import Now, evaluate_law
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse

N = len(SIZES)
HEAD = "client,seconds_per_step,up_bytes_per_second,down_bytes_per_second"
WINDOWS = f"""{HEAD},from,to
0,1,10,100,0,50
0,2,20,200,50,60
0,3,30,300,80,90
1,4,40,400,20,100
2,5,50,500,0,1
"""


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def at(clock: fs.base.Clock, second: int) -> list[tuple[float, ...] | None]:
    """Of clients 0 to 2: seconds of a step, bytes up and down; None for one that is asleep."""
    now, client = Now(jnp.int32(second), jnp.float32(0.5)), jnp.arange(3, dtype=jnp.int32)
    key = jax.random.key(0)
    link = known(clock.link)
    found = np.stack(
        [evaluate_law(law, key, client, now) for law in (clock.compute, link.up, link.down)]
    )
    awake = known(clock.available)(jax.random.split(key, 3), client, now)
    return [tuple(row) if a else None for row, a in zip(found.T.tolist(), awake, strict=True)]


def test_windows_are_followed(tmp_path: Path) -> None:
    """Second by second, against a look at all rows."""
    clock = fs.clock.traced(written(tmp_path, WINDOWS))
    rows = [[float(x) for x in line.split(",")] for line in WINDOWS.splitlines()[1:]]
    for second in (0, 1, 19, 20, 49, 50, 59, 60, 79, 80, 89, 90, 99, 100, 10**6):
        expected: list[Any] = [None] * 3
        for client, *speeds, begin, end in rows:
            if begin <= second < end:
                expected[int(client)] = tuple(speeds)
        assert at(clock, second) == expected


def test_a_period_brings_it_back(tmp_path: Path) -> None:
    file = written(tmp_path, WINDOWS)
    clock, again = fs.clock.traced(file), fs.clock.traced(file, period=120)
    for second in (0, 55, 85, 119):
        for turns in (0, 1, 1000):
            assert at(again, second + 120 * turns) == at(clock, second)


@pytest.mark.slow
def test_a_run_follows_a_trace(tmp_path: Path) -> None:
    """Rounds by hand: clients 0 to 3 wake one after another, and in the end all sleep."""
    lines = [f"{k},{k + 1},1000,1000,{10 * k},{10 * k + 80 * (k < 3)}" for k in range(4)]
    lines[3] = "3,4,1000,1000,0,1"
    file = written(tmp_path, "\n".join([f"{HEAD},from,to", *lines]) + "\n")
    data = make_federation([8] * 4)
    model = fs.models.logistic((6,), 3)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), 4)  # two steps
    clock = fs.clock.traced(file, idle=40.0)
    made = fs.fedavg(local, clients_per_round=4).replace(clock=clock)
    result = fs.simulate(made, model, data.data, data.test, rounds=30, classes=3)
    size, now, expected = 2 * 4 * 21 / 1000, 0.0, []
    for row in result.metrics.client[0]:
        there = [k for k in range(3) if 10 * k <= math.floor(now) < 10 * k + 80]
        there += [3] * (now < 1)
        assert sorted(k for k in row.tolist() if k < 4) == there
        expected.append(size + 2 * (there[-1] + 1) if there else 40.0)
        now += expected[-1]
    np.testing.assert_allclose(known(result.metrics.time).seconds[0], expected, rtol=1e-5)
    assert expected[0] > 8
    assert expected[-1] == 40


BAD = {
    "no rows": (f"{HEAD}\n", "has no rows"),
    "empty": ("", "lacks the column client"),
    "a column less": ("client,seconds_per_step\n0,1\n", "lacks the column up_bytes_per_second"),
    "a column more": (
        f"{HEAD},battery\n0,1,1,1,1\n",
        "has an unknown column battery: optional columns are from, to",
    ),
    "half a window": (f"{HEAD},from\n0,1,1,1,1\n", "must have both from and to"),
    "a value less": (f"{HEAD}\n0,1,1\n", "row 1 has 3 values, the header has 4"),
    "a word": (f"{HEAD}\n0,1,fast,1\n", "could not convert string to float: 'fast'"),
    "zero": (f"{HEAD}\n0,1,1,1\n1,0,1,1\n", "row 2: seconds_per_step must be positive and finite"),
    "NaN": (f"{HEAD}\n0,1,nan,1\n", "row 1: up_bytes_per_second must be positive and finite in f"),
    "0 in float32": (f"{HEAD}\n0,1,1e-50,1\n", "row 1: up_bytes_per_second must be positive and"),
    "inf in float32": (f"{HEAD}\n0,1,1,1e39\n", "row 1: down_bytes_per_second must be positiv"),
    "half a client": (f"{HEAD}\n0.5,1,1,1\n", "row 1: client must be a whole number from 0, got 0"),
    "half a second": (f"{HEAD},from,to\n0,1,1,1,0.5,2\n", "row 1: from must be a whole number fro"),
    "unsorted": (f"{HEAD}\n0,1,1,1\n2,1,1,1\n1,1,1,1\n", "row 3: clients must be in order, got cl"),
    "missing": (f"{HEAD}\n0,1,1,1\n2,1,1,1\n", "row 2: a client is missing before this row, got c"),
    "not the first": (f"{HEAD}\n1,1,1,1\n", "row 1: a client is missing before this row"),
    "twice": (f"{HEAD}\n0,1,1,1\n0,1,1,1\n", "row 2: a client has several rows, which need from"),
    "no time": (f"{HEAD},from,to\n0,1,1,1,3,3\n", "row 1: from must be below to, got 3 to 3"),
    "back": (
        f"{HEAD},from,to\n0,1,1,1,5,9\n0,1,1,1,1,2\n", "row 2: a client's windows must be in order",
    ),
    "overlap": (
        f"{HEAD},from,to\n0,1,1,1,1,9\n0,1,1,1,8,20\n", "row 2: a client's windows must be in ord",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_trace_is_refused(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        fs.clock.traced(written(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 1
    assert "trace.csv" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks\.csv: No such file"):
        fs.clock.traced(tmp_path / "lacks.csv")
    with pytest.raises(ValueError, match=r"trace\.txt must be a \.csv file"):
        fs.clock.traced(written(tmp_path, WINDOWS, "trace.txt"))
    with pytest.raises(ValueError, match="row 4: to must be at most 99, got 20 to 100"):
        fs.clock.traced(written(tmp_path, WINDOWS), period=99)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "fedavg: clock traced('{file}') must know the 8 clients"),
        ("--clock traced('{file}',link=1)", "--clock: traced('{file}',link=1): "),
        ("--clock lacks.csv", "--clock: lacks.csv: No such file or directory"),
    ],
)
def test_the_command_reads_a_trace(given: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, WINDOWS)
    argv = ["--clients", "8", "--seeds", "1", "--compare", "none", "--algo", "fedavg"]
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(file=file))}"):
        build(parse([*argv, "--clock", str(file), *given.format(file=file).split()]))
    build(
        parse(
            [
                "--clients",
                "3",
                *argv[2:],
                "--partition",
                "iid",
                "--model",
                "logistic",
                "--clock",
                str(file),
            ]
        )
    )
