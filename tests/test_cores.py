"""CPU devices of cores: one alone that nobody chose is told of."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.engine import cores

COMPOSED = """toy = fs.toy()
local = fs.local_sgd(toy.objective, optax.sgd(0.1))
algorithm = fs.fedavg(local, clients_per_round=2)
"""
RUN = "fs.simulate(algorithm, toy.model, toy.data, toy.test, rounds=1, classes=10)\n"


def said(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What a fresh process prints, of a machine with three cores."""
    head = "import fedjax_sim as fs; from fedjax_sim.engine import cores\n"
    head += "cores.available_cores = lambda: 3\n"
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    argv = [sys.executable, *options, "-c", head + code]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=env | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_each_core_is_a_device() -> None:
    done = said("fs.use_cores(); print(len(fs.make_execution().devices))", "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.slow
def test_one_device_that_nobody_chose_is_told_of() -> None:
    """Once, and it is too late then."""
    code = "import optax, warnings\n"
    code += "with warnings.catch_warnings(action='error'): fs.make_execution(1)\n"
    code += COMPOSED
    code += "with warnings.catch_warnings(action='error'): toy.accuracy(algorithm, rounds=1)\n"
    code += RUN + RUN
    done = said(code + "fs.use_cores()")
    (warned,) = re.findall(r".*OneDeviceWarning.*", done.stderr)
    assert "OneDeviceWarning: clients train on one CPU device of 3 " in warned
    last = done.stderr.splitlines()[-1]
    assert last == (
        "RuntimeError: use_cores must come before JAX computes anything: it has started, with 1 "
        "CPU device"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_loading_a_run_does_not_tell_of_one_device(tmp_path: Path) -> None:
    """It trains nothing; what trains later is told of."""
    flags = "--algo fedavg --compare none --rounds 1 --seeds 1 --partition iid --model logistic"
    out = str(tmp_path / "run")
    assert bench.main([*flags.split(), "--out", out]) == 0
    code = f"run = fs.load_run({out!r}); print(run.test.x.shape, run.variables('fedavg') is None)\n"
    done = said(code + "import optax\n" + COMPOSED + RUN)
    assert done.stdout == "(359, 8, 8, 1) False\n"
    assert len(re.findall(r".*OneDeviceWarning.*", done.stderr)) == 1


def test_devices_that_someone_chose_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    one = tuple(jax.devices()[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cores.warn_of_unused_cores(one)  # of four that conftest has made
        monkeypatch.setattr(cores, "available_cores", lambda: 1)
        cores.warn_of_unused_cores(one)


def test_the_default_device_of_jax_is_ours() -> None:
    """Of all by count or by backend, it is not: a user asked for more."""
    second = jax.devices()[1]
    with jax.default_device(second):
        assert fs.make_execution().devices == (second,)
        assert len(fs.make_execution(backend="cpu").devices) == 4
        assert len(fs.make_execution(3).devices) == 3
    with jax.default_device(None):
        assert len(fs.make_execution().devices) == 4


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        fs.use_cores(0)
    with pytest.raises(ValueError, match="count must be a whole number at least 1, got"):
        fs.use_cores(1.5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=re.escape("it has started, with 4 CPU devices")):
        fs.use_cores(3)
    fs.use_cores(4)


def test_an_old_jax_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m`` prints it as one too; the version is also the lowest of pyproject.toml."""
    lowest = (0, 7, 2)
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 1))
    with pytest.raises(ImportError, match=r"^fedjax_sim needs JAX 0\.7\.2, got .*: pip install"):
        importlib.reload(fs)
    monkeypatch.setattr(jax, "__version_info__", lowest)
    importlib.reload(fs)
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"jax>={".".join(map(str, lowest))}"' in text
