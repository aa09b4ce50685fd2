"""``--resume DIR``: the settings of a stopped run, some of which may change."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.base.registry import imported
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.flags import Parser, flag
from fedjax_sim.cli.folder import FORMAT
from fedjax_sim.cli.machine import Machine, folder_name
from fedjax_sim.cli.rates import changes_with
from fedjax_sim.cli.reading import read_object

HARMLESS = frozenset(field.name for field in dataclasses.fields(Machine))
"""Settings that are the machine's: the results are those of any."""


_STARTED = ("--resume", "--out", "--distributed")
"""Flags of a run's arguments that say where it was started, not what it is."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings of a run, ``config.json``."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} has no run: it lacks config.json")
    found = read_object(path)
    its = found.get("format")
    if type(its) is not int or its != FORMAT:
        raise ValueError(f"{path} is of format {its}, and this fedjax_sim reads {FORMAT}")
    return found


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Adds ``--trust``, the modules from which names in a file may import."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or package from which names package.module:function in a folder or a study "
        "file may be imported, which runs its code; repeat it for several (default: none)",
    )


def arguments(folder: Path) -> list[str]:
    """Reads the arguments that started the run in a folder, without its paths."""
    settings = read_settings(folder)
    if settings.get("composed"):
        raise ValueError(
            f"{folder} was saved from Python (fs.save_run), and no command can resume or rebuild "
            "it: for its weights give the model, fs.load_run(DIR, model=...).variables(NAME)"
        )
    given = settings["arguments"]
    parser = Parser(add_help=False)
    for name in _STARTED:
        parser.add_argument(name)
    parser.add_argument("--or-resume", action="store_true")
    add_trust(parser)
    return parser.parse_known_args(given)[1]


def to_go_on(program: str, folder: Path) -> str:
    """Returns the command that resumes a folder, with the trusted modules."""
    trust = (word for module in imported for word in ("--trust", module))
    return shlex.join(["python", "-m", program, "--resume", str(folder), *trust])


def split_arguments(argv: Sequence[str]) -> tuple[Path | None, list[str], list[str]]:
    """Returns ``--resume`` (None for a new run), ``--trust`` and the other arguments."""
    parser = Parser(add_help=False)
    parser.add_argument("--resume", metavar="DIR", type=folder_name)
    add_trust(parser)
    given, others = parser.parse_known_args(argv)
    return None if given.resume is None else Path(given.resume), given.trust, others


def check_settings(folder: Path, begun: Config, config: Config) -> None:
    """Rejects settings that would change the run."""
    before, now = _by_flag(begun), _by_flag(config)
    for name in before | now:
        if before.get(name) == now.get(name):
            continue
        ours, theirs = (_shown(of.get(name)) for of in (now, before))
        if name != "--rounds":
            raise ValueError(
                f"{name} is {ours}, and {theirs} in the run in {folder}; only "
                "--rounds and settings of the machine may change"
            )
        form = changes_with(config.training.lr_schedule)
        if form is not None:
            raise ValueError(
                f"--rounds must be {theirs}, as in the run in {folder}: --lr-schedule {form} is of "
                f"its length, got {ours}"
            )
        if now[name] < before[name]:
            raise ValueError(
                f"--rounds must be at least {theirs}, as in the run in {folder}, got {ours}"
            )


def _by_flag(config: Config) -> dict[str, Any]:
    """Returns the settings that change results by their flags, including settings of one method."""
    record = config.record()
    own = record.pop("options")
    found = {flag(name): value for name, value in record.items() if name not in HARMLESS}
    return found | {
        f"{flag(key)} of {name}": value for name, of in own.items() for key, value in of.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    return "not given" if value is None else str(value)
