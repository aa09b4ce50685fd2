"""Reads the files of a run's or a study's folder as data: regular files, no links, JSON."""

from __future__ import annotations

import itertools
import json
import stat
from pathlib import Path
from typing import Any

from fedjax_sim.base.files import open_text
from fedjax_sim.cli.folder import CHECKPOINTS, FILES, PICTURES

STUDY, CELLS = "study.json", "cells"
READ = (*FILES, *(f"{name}.*" for name in PICTURES), "study.*", CELLS, f"{CELLS}/*", CHECKPOINTS)
"""What commands read in a folder, beside all that lies in ``CHECKPOINTS``."""


def check_entries(folder: Path) -> None:
    """Raises ValueError for a link or a special file among what commands read in a folder."""
    named = itertools.chain.from_iterable(folder.glob(pattern) for pattern in READ)
    for path in itertools.chain(named, (folder / CHECKPOINTS).rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            what = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise ValueError(f"{path} is {what}: put the file itself there")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object."""
    return _parsed(path, _text(path))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file with a JSON object in each line; an absent file has none."""
    lines = _text(path).splitlines() if path.exists() else []
    return [_parsed(f"{path}, line {i}", line) for i, line in enumerate(lines, 1)]


def _text(path: Path) -> str:
    try:
        with open_text(path) as text:
            return text.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _parsed(where: str | Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} is damaged: it must be an object, got {text[:40]!r}")
    return content
