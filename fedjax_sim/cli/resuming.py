"""``--resume DIR``: the settings of a run that stopped, and which of them may change."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.cli.config import Config
from fedjax_sim.cli.flags import Parser, flag
from fedjax_sim.cli.folder import FORMAT
from fedjax_sim.cli.machine import Machine, folder_name
from fedjax_sim.cli.rates import changes_with

HARMLESS = frozenset(field.name for field in dataclasses.fields(Machine))
"""Settings that are the machine's: the results are those of any."""


def written(folder: Path) -> dict[str, Any]:
    """The settings of a run, ``config.json``.

    Raises:
        ValueError: if there are none, or they cannot be read.
    """
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no run: it lacks config.json") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    its = found.get("format") if isinstance(found, dict) else None
    if its != FORMAT:
        raise ValueError(
            f"{path} is of format {its}, and this version of fedjax_sim reads {FORMAT}"
        )
    if "command" not in found:
        raise ValueError(f"{path} lacks the command of the run")
    return found


def arguments(folder: Path) -> list[str]:
    """The arguments of the command that began the run in a folder, without where it ran."""
    parser = Parser(add_help=False)
    for name in ("--distributed", "--out"):
        parser.add_argument(name)
    parser.add_argument("--or-resume", action="store_true")
    words = shlex.split(written(folder)["command"])[3:]  # after python -m fedjax_sim.bench
    return parser.parse_known_args(words)[1]


def asked(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that ``--resume`` names, and the other arguments."""
    parser = Parser(add_help=False)
    parser.add_argument("--resume", metavar="DIR", type=folder_name)
    given, others = parser.parse_known_args(argv)
    return (None if given.resume is None else Path(given.resume)), others


def check_settings(folder: Path, begun: Config, config: Config) -> None:
    """Refuses settings that would make another run of it.

    Args:
        folder: of the run.
        begun: as it was.
        config: as it is to go on.

    Raises:
        ValueError: if a setting differs; names its flag, what it is and what it was.
    """
    before, now = begun.record(), config.record()
    for name in before:
        if name in HARMLESS or before[name] == now[name]:
            continue
        if name != "rounds":
            raise ValueError(
                f"{flag(name)} is {_shown(now[name])}, and {_shown(before[name])} in the run in "
                f"{folder}; it may go on with other --rounds and settings of the machine alone"
            )
        form = changes_with(config.training.lr_schedule)
        if form is not None:
            raise ValueError(
                f"--rounds must be {before[name]}, as in the run in {folder}: --lr-schedule {form} "
                f"is of its length, got {now[name]}"
            )
        if now[name] < before[name]:
            raise ValueError(
                f"--rounds must be at least {before[name]}, as in the run in {folder}, got "
                f"{now[name]}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    return str(value)
