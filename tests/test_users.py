"""The same results again and again as users run it: no XLA flags, two CPU devices, large arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_sim.models import MODELS

ROOT = Path(__file__).parents[1]


def last_line(*args: str) -> str:
    """Returns the last line that tests/users.py prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "users.py"), *args],
        cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_rounds_in_one_program_are_rounds_one_by_one() -> None:
    assert last_line("rounds") == "1"


SAME_LAYERS = {
    "linear", "logistic", "ffn", "mnist_cnn", "fashion_cnn", "two_conv", "cifar_cnn", "gpt2",
}  # fmt: skip
"""Networks whose layers are those of mlp, transformer and the CNN above, in other sizes."""
DEEP = {"mobilenet_v2", "resnet20"}
"""Networks that compile for minutes; tests/test_pairs.py trains them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MODELS} - SAME_LAYERS - DEEP))
def test_a_command_gives_the_same_records_again(name: str) -> None:
    assert last_line("network", name).startswith("equal")
