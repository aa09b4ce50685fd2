"""``--executor``: what runs the cells of a study, on this machine or on many.

An executor is a ``concurrent.futures.Executor``, and a cell is one task. The executors here open
those of other packages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import takes
from fedjax_sim.cli.flags import offering
from fedjax_sim.engine.cores import available_cores

Opens = Callable[[str], Executor]
"""``(text)``: an executor, by what stands between the parentheses of its flag."""


def processes(text: str) -> Executor:
    """Starts this many processes on this machine; by default one for each core."""
    context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
    count = int(text or available_cores())
    return ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)


def dask(address: str) -> Executor:
    """Uses the workers of a Dask scheduler; start each with ``dask worker --nthreads 1``."""
    from distributed import Client

    client: Any = Client
    executor: Executor = client(address, set_as_default=False).get_executor(pure=False)
    return executor


def mpi(text: str) -> Executor:
    """Uses the ranks of ``mpiexec -n N python -m mpi4py.futures -m fedjax_sim.study``."""
    from mpi4py.futures import MPIPoolExecutor

    executor: Executor = MPIPoolExecutor(int(text) if text else None)
    return executor


class _Ray(Executor):
    def __init__(self, address: str) -> None:
        import ray

        ray.init(address or None, log_to_driver=False)
        self._remote = ray.remote

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._remote(max_calls=1)(fn).remote(*args, **kwargs).future()


def ray(address: str) -> Executor:
    """Uses a Ray cluster; without an address this machine."""
    return _Ray(address)


class _Submitit(Executor):
    def __init__(self, **settings: str) -> None:
        import submitit

        self._executor = submitit.AutoExecutor(
            settings.pop("folder", "submitit"), settings.pop("cluster", None)
        )
        self._executor.update_parameters(
            **{key: int(v) if v.isdecimal() else v for key, v in settings.items()}
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._executor.submit(fn, *args, **kwargs)


def submitit(text: str) -> Executor:
    """Submits SLURM jobs with submitit's parameters: ``timeout_min=60, slurm_partition=gpu``."""
    return _Submitit(**dict(re.findall(r"(\w+)\s*=\s*([^,\s]+)", text)))


EXECUTORS: Registry[Opens] = Registry(
    "executor",
    wanted="a function (text) that returns a concurrent.futures.Executor",
    fits=lambda value: takes(value, ""),
    makes=lambda: (Executor,),
    own={"processes": processes, "dask": dask, "submitit": submitit, "ray": ray, "mpi": mpi},
)
"""Executors by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""


FORMS = ("processes(N)", "dask(tcp://HOST:PORT)", "submitit(NAME=VALUE, ...)", "ray", "mpi")
"""The texts of these executors, for messages."""


def known_executor(text: str) -> str:
    """Checks the text of an executor, for argparse."""
    try:
        _parts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parts(text: str) -> tuple[str, Opens, str]:
    """Returns the name of an executor, the function that opens it, and its argument."""
    found = re.fullmatch(r"([^()]+)(?:\((.*)\))?", text)
    if found is None:
        raise ValueError(f"must be one of {', '.join(FORMS)}, got {text!r}")
    try:
        key, opens = EXECUTORS.resolve(found[1].strip())
    except UnknownNameError as error:
        raise offering(error, FORMS) from error
    inside = (found[2] or "").strip()
    if key in ("processes", "mpi") and not re.fullmatch(r"0*[1-9]\d*|", inside):
        raise ValueError(f"{key}(N) must have a whole number N at least 1, or none, got {inside!r}")
    return key, opens, inside


def opened(text: str) -> Executor:
    """Opens the executor of a text such as ``processes(4)``.

    Raises:
        ValueError: if there is none, or it cannot be opened.
    """
    key, opens, inside = _parts(text)
    try:
        return opens(inside)
    except ImportError as error:
        package = {"dask": "distributed", "mpi": "mpi4py"}.get(key, key)
        raise ValueError(f"--executor {key} needs the package {package}: {error}") from error
    except Exception as error:  # no server at that address, say
        raise ValueError(f"--executor {text}: {error or type(error).__name__}") from error


def _end_with_parent() -> None:
    """Ends a worker with the study, which a signal may end at once."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
