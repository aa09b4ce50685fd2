"""A study file, and its commands."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.base.registry import trusting
from fedjax_sim.base.spelling import hint
from fedjax_sim.base.words import counted
from fedjax_sim.cli.commands import Source
from fedjax_sim.cli.config import GROUPS, Config
from fedjax_sim.cli.flags import flag, naming
from fedjax_sim.cli.machine import Machine
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.reporting.statistics import LEVEL
from fedjax_sim.cli.written import labels_in

MOST_CELLS = 10_000
"""Cells of a study, each of which is a run with a folder of its own."""

TABLES = ("run", "grid", "methods")
KEYS = (*TABLES, "cells", "baseline", "table")
MACHINE = frozenset(field.name for field in dataclasses.fields(Machine)) | {
    field.name for field in dataclasses.fields(Source) if field.metadata["setting"].place
}
"""Settings that a file has not: they are those of the machine."""

_FIELDS = {
    field.name: field
    for group in GROUPS.values()
    for field in dataclasses.fields(group)
    if field.name not in MACHINE
}
SETTINGS = (*_FIELDS, "emd")
"""What a file may set, for all cells or by the cell."""


class Cell(NamedTuple):
    """All methods with one combination of settings: a run of ``python -m fedjax_sim.bench``.

    Attributes:
        name: the name of its folder.
        settings: the settings that distinguish it.
        argv: arguments of the command, without flags of the machine.
        config: the parsed arguments.
    """

    name: str
    settings: Mapping[str, Any]
    argv: tuple[str, ...]
    config: Config


class Study(NamedTuple):
    """The contents of a study file.

    Attributes:
        rows: the candidate settings of each row of the table.
        baseline: the row with which the others are compared.
        cells: one for each combination of the grid.
        across: the setting whose values are the columns of the table.
    """

    rows: Mapping[str, tuple[str, ...]]
    baseline: str
    cells: tuple[Cell, ...]
    across: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The settings that distinguish cells."""
        return tuple(dict.fromkeys(key for cell in self.cells for key in cell.settings))

    def __str__(self) -> str:
        settings = sum(map(len, self.rows.values()))
        runs = sum(_runs(cell.config) * len(cell.config.algorithms) for cell in self.cells)
        return (
            f"{counted(len(self.rows), 'method')} with {counted(settings, 'setting')}, "
            f"{counted(len(self.cells), 'cell')}: {counted(runs, 'run')}{self._few()}"
        )

    def _few(self) -> str:
        """Returns a remark if there are too few seeds for any significant difference; else none."""
        seeds = min(len(cell.config.experiment.seeds) for cell in self.cells)
        several = len(self.rows) > 1 and all(c.config.scores.folds is None for c in self.cells)
        columns = {repr(cell.settings.get(self.across)) for cell in self.cells}
        tests = (len(self.rows) - 1) * len(columns)
        needed = next(n for n in itertools.count(2) if tests * 2.0 ** (1 - n) < LEVEL)
        if not several or seeds >= needed:
            return ""
        return (
            f"\nno difference can be significant with {counted(seeds, 'seed')}: Wilcoxon's test "
            f"needs {needed} for {counted(tests, 'comparison')}"
        )


def read_study(path: Path, trust: Collection[str] = ()) -> Study:
    """Reads a study file and checks it as far as possible without data.

    It is a TOML file with the tables ``run`` (settings of the command), ``grid`` (settings with a
    list of values each) and ``methods`` (a text for each row, as ``--algo`` takes it, or a list of
    texts); with an array of tables ``cells`` (settings that go together), ``baseline``, a row, and
    ``table``, with ``columns``, a setting of ``grid`` or ``cells`` (by default the first one).

    Raises:
        ValueError: if the file cannot be read or is not a study; names the file and the key.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from error
    try:
        with trusting(trust):
            return _study(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _study(given: Mapping[str, Any]) -> Study:
    run, grid, cells = _tables(given)
    rows = _rows(given.get("methods", {}))
    baseline = given.get("baseline", next(iter(rows)))
    if not isinstance(baseline, str) or baseline not in rows:
        raise ValueError(f"baseline must be one of {', '.join(rows)}, got {baseline!r}")
    algo, *others = dict.fromkeys(text for labels in rows.values() for text in labels)
    methods = ["--algo", algo, "--compare", *(others or ["none"])]
    common = [word for key, value in run.items() for word in _words("run", key, value)]
    found = []
    for settings in ({**one, **point} for one in cells for point in _combinations(grid)):
        argv = [*common]
        for key, value in settings.items():
            argv += _words("grid" if key in grid else "cells", key, value)
        found.append(_cell(settings, [*argv, *methods], rows))
    if not found:
        raise ValueError("cells must have a table at least, or be left out")
    if len({cell.argv for cell in found}) < len(found):
        raise ValueError("cells must differ from each other")
    if len({cell.name for cell in found}) < len(found):  # they differ in signs that no name has
        found = [cell._replace(name=f"{i}-{cell.name}") for i, cell in enumerate(found, 1)]
    study = Study(rows, baseline, tuple(found), "dataset")
    if "table" in given:
        return study._replace(across=_across(given["table"], study.columns))
    every = (key for key in study.columns if all(key in cell.settings for cell in found))
    return study._replace(across=next(every, study.across))


def _tables(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], list[Any]]:
    """Returns the tables run, grid and cells, each setting in one of them."""
    _check_keys("", given, KEYS)
    for name in TABLES:
        listed = name == "methods" and isinstance(given.get(name), list)
        if not isinstance(given.get(name, {}), Mapping) and not listed:
            raise ValueError(f"{name} must be a table, [{name}], got {given[name]!r}")
    run, grid, cells = given.get("run", {}), given.get("grid", {}), given.get("cells", [{}])
    if not isinstance(cells, list) or not all(isinstance(one, Mapping) for one in cells):
        raise ValueError(f"cells must be an array of tables, [[cells]], got {cells!r}")
    places = {"run": run, "grid": grid, "cells": {k: v for one in cells for k, v in one.items()}}
    for name, table in places.items():
        _check_keys(f"{name}.", table, SETTINGS)
    for one, other in itertools.combinations(places, 2):
        if both := sorted(places[one].keys() & places[other].keys()):
            raise ValueError(f"{both[0]} is in {one} and in {other}: leave it in one of them")
    return run, grid, cells


def _cell(
    settings: Mapping[str, Any], argv: Sequence[str], rows: Mapping[str, tuple[str, ...]]
) -> Cell:
    point = ", ".join(f"{key} = {value}" for key, value in settings.items())
    where = f"at {point}: " if settings else ""
    try:
        config = parse(argv)
    except ValueError as error:
        raise ValueError(where + str(error)) from error
    _check_choice(rows, config, where)
    return Cell(_name(settings), settings, tuple(argv), config)


def _across(table: Any, known: Sequence[str]) -> str:
    if not isinstance(table, Mapping):
        raise ValueError(f'table must be a table, [table], with columns = "NAME", got {table!r}')
    _check_keys("table.", table, ("columns",))
    if (columns := table.get("columns")) not in known:
        allowed = ", ".join(known) or "none here: grid or cells must have one"
        raise ValueError(
            f"table.columns must be a setting of grid or cells ({allowed}), got {columns!r}"
        )
    return str(columns)


def _rows(given: Mapping[str, Any] | list[Any]) -> dict[str, tuple[str, ...]]:
    named = given if isinstance(given, Mapping) else {str(text): text for text in given}
    if not named:
        raise ValueError('methods must have a row at least, such as FedAvg = "fedavg(lr=0.01|0.1)"')
    rows = {}
    for row, text in named.items():
        if not isinstance(text, str):
            raise ValueError(
                f"methods.{row} must be a text as --algo takes it, such as "
                f"'fedprox(mu=0.01|0.1)', got {text!r}"
            )
        with naming(f"methods.{row}"):
            rows[row] = labels_in(text)
    return rows


def _check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key in known:
            continue
        if where and key in MACHINE:
            raise ValueError(f"{where}{key} is the machine's: give {flag(key)} to the command")
        if where and key in ("algo", "compare"):
            raise ValueError(f"{where}{key}: list the methods to run in methods")
        meant = hint(key, known) or f"; known are {', '.join(known)}"
        raise ValueError(f"{where}{key} is not a setting{meant}")


def _combinations(grid: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"grid.{key} must be a list of values, got {values!r}")
        if len({*map(repr, values)}) < len(values):
            raise ValueError(f"grid.{key} must have each value once, got {values!r}")
    if (count := math.prod(map(len, grid.values()))) > MOST_CELLS:
        raise ValueError(f"grid must have at most {MOST_CELLS:,} cells, got {count:,}")
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _words(where: str, key: str, value: Any) -> list[str]:
    """Returns the arguments of the command for a setting."""
    switch = key in _FIELDS and isinstance(_FIELDS[key].default, bool)
    if isinstance(value, bool) and switch:
        default = _FIELDS[key].default
        return [] if value == default else [flag(f"no_{key}" if default else key)]
    if switch or isinstance(value, bool) or not isinstance(value, int | float | str):
        allowed = "true or false" if switch else "a number or a text"
        several = "; several values stand in grid" if where == "run" else ""
        raise ValueError(f"{where}.{key} must be {allowed}, got {value!r}{several}")
    return [f"{flag(key)}={value}"]


def _check_choice(rows: Mapping[str, tuple[str, ...]], config: Config, where: str) -> None:
    for row, texts in rows.items():
        if len(texts) > 1 and not config.scores.validates:
            raise ValueError(
                f"{where}methods.{row} has {len(texts)} settings to choose among, which needs "
                'validation scores: add run.validation = 0.1, or run.split = "clients"; or give '
                "each setting a row"
            )


def _name(settings: Mapping[str, Any]) -> str:
    """Returns the name of a folder.

    >>> _name({"partition": "dirichlet(0.1)", "rounds": 20}), _name({})
    ('partition=dirichlet_0.1-rounds=20', 'all')
    """
    words = (f"{key}={value}" for key, value in settings.items())
    return "-".join(re.sub(r"[^\w.=]+", "_", text).strip("_.") for text in words)[:120] or "all"


def _runs(config: Config) -> int:
    return len(config.experiment.seeds) * (config.scores.folds or 1)
