"""Reads the JSON files of a run's or a study's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedjax_sim.base.files import open_text

STUDY, CELLS = "study.json", "cells"


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
