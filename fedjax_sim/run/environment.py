"""The provenance of a record of results: code, versions, settings, command, machine and date."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedjax_sim.base.files import memory_of_host
from fedjax_sim.engine.cores import available_cores
from fedjax_sim.run.identity import random_settings

PACKAGES = ("fedjax_sim", "jax", "jaxlib", "flax", "optax", "numpy")
OPTIONAL = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "torch")
"""Packages of accelerators and benchmarks, which are listed if they are installed."""


def environment(command: str | None = None, started: float | None = None) -> dict[str, Any]:
    """Returns how a record is made, for its JSON file; by default by this process, from now on.

    >>> list(environment("python -m fedjax_sim.bench"))
    ['date', 'command', 'commit', 'dirty', 'versions', 'jax', 'xla_flags', 'machine']
    """
    began = time.time() if started is None else started
    own, dirty = commit()
    return {
        "date": datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])
        if command is None
        else command,
        "commit": own,
        "dirty": dirty,
        "versions": versions(),
        "jax": random_settings(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "machine": machine(),
    }


@functools.cache
def commit() -> tuple[str | None, bool | None]:
    """Returns the git commit of this package, and whether Python or TOML files differ from it.

    The first call of a process counts. None if the package does not lie in its own repository.
    """
    here = Path(__file__)

    def git(*words: str) -> str:
        asked = ["git", "--no-optional-locks", "-C", str(here.parent), *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        if not git("ls-files", here.name):  # installed within another repository
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", ":/*.py", ":/*.toml"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Returns the CPU's model, the cores that this process may use, memory and NVIDIA GPUs."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        models = [line for line in lines if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    accelerators: list[str] = []
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=name", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False)
        accelerators = listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []
    memory = memory_of_host()
    return {
        "cpu": cpu,
        "cores": available_cores(),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "accelerators": accelerators,
    }
