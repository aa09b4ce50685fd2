"""The command, called from Python."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from fedjax_sim.cli.build import build
from fedjax_sim.cli.config import GROUPS
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.machine import start_jax
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.running import open_folder, run
from fedjax_sim.cli.stopping import STOPPING
from fedjax_sim.cli.watching import bar, nobody
from fedjax_sim.run import DivergedError, Result
from fedjax_sim.run.progress import is_watched

PROGRAM = "fedjax_sim.bench"

ELSEWHERE = {"help", "version", "list", "dry_run", "distributed"}
"""Flags that print, or that belong to a process of its own."""

SWITCHES = {
    field.name: field.default
    for group in GROUPS.values()
    for field in dataclasses.fields(group)
    if isinstance(field.default, bool)
}
"""Settings that a flag without a value switches, with their defaults."""


def run_experiment(
    algo: str, *, progress: bool | None = None, **settings: Any
) -> dict[str, Result]:
    """Runs an experiment as ``python -m fedjax_sim.bench`` does.

    A setting has the name of its flag with ``_`` for ``-``, and the same default: without
    ``compare="none"``, FedAvg runs too. Texts, numbers and bools stand for the value of the flag, a
    list for several values.

    Args:
        algo: the method, with settings of its own in parentheses.
        progress: whether to show a progress bar for each program; None: in a terminal or a
            notebook.
        **settings: flags of the command; ``out="DIR"`` writes the run folder, else nothing is
            written.

    Returns:
        The results by the names of their methods.

    Raises:
        ValueError: if a setting is unknown, out of range, or contradicts another; names it.
        DivergedError: if the loss of a method is not finite; the others finish first, and are its
            ``results``.

    Example:
        >>> import fedjax_sim as fs
        >>> found = fs.run_experiment("fedavg", compare="fedprox(mu=0.1)", rounds=2, seeds=2,
        ...                           clients=6, model="logistic", emd=0.9)
        >>> [*found], found["fedavg"].accuracy.shape
        (['fedavg', 'fedprox(mu=0.1)'], (2, 2))
    """
    argv = [*words("algo", algo), *(w for name, v in settings.items() for w in words(name, v))]
    folder, shown = None, is_watched() if progress is None else progress
    try:
        with naming_arguments():
            config = parse(argv)
            start_jax(config.machine)
            setup = build(config)
            if config.machine.out is not None or config.machine.resume is not None:
                folder = open_folder(setup, argv)
        command = shlex.join(["python", "-m", PROGRAM, *argv])
        outcome = run(setup, folder, command, bar if shown else nobody)
    finally:
        STOPPING.patient = False
        if folder is not None:
            folder.close()
    results = {name: outcome.results[name] for name in outcome.summaries if name in outcome.results}
    if outcome.diverged:
        error: Any = DivergedError("; ".join(f"{n}: {m}" for n, m in outcome.diverged.items()))
        error.results = results
        raise error
    return results


def words(name: str, value: Any) -> list[str]:
    """Returns the words of a command line for a setting.

    >>> words("lr", 0.1), words("compare", ["fedavg", "moon"]), words("mirror", False)
    (['--lr=0.1'], ['--compare', 'fedavg', 'moon'], ['--no-mirror'])
    """
    if name in ELSEWHERE:
        raise ValueError(f"{name} is for the command alone: python -m {PROGRAM} {flag(name)}")
    if value is None or (name in SWITCHES and value is SWITCHES[name]):
        return []
    if isinstance(value, bool):
        return [flag(name if value else f"no_{name}")]
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return [flag(name), *value]
    if not isinstance(value, str | Real | Path):
        raise ValueError(
            f"{name} must be a text, a number, a bool or a list of texts, got {value!r}"
        )
    return [f"{flag(name)}={value}"]


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Replaces flags by settings in the message of a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r"--([a-z][a-z0-9-]*)", lambda m: m[1].replace("-", "_"), str(error))
        error.args = (text,)
        raise
