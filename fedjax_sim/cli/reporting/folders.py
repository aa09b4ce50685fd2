"""The folders of runs and studies that a report is of, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.cli.reading import CELLS, STUDY, read_object

Rows = Mapping[str, Sequence[str]]
"""The settings of each row of a study."""


def is_study(folder: Path) -> bool:
    """Returns whether a folder is the folder of a study."""
    return (folder / STUDY).exists()


def study_of(folder: Path) -> dict[str, Any]:
    """Reads the rows and the baseline of a study, with the names of the study file."""
    path = folder / STUDY
    found = read_object(path)
    try:
        rows = {row: [*map(str, texts)] for row, texts in found.get("rows", {}).items()}
        baseline = {"baseline": str(found["baseline"])} if "baseline" in found else {}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return {"rows": rows, **baseline}


def named(folders: Sequence[Path]) -> dict[str, tuple[Path, Rows | None]]:
    """Returns run folders by their shortest names, with the rows of their study if any."""
    found: dict[Path, tuple[str, ...]] = {}
    cells: dict[Path, Rows] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        whole = folder.resolve()
        if not is_study(folder):
            found[folder] = whole.parts
            continue
        inside = sorted(path for path in (folder / CELLS).glob("*") if path.is_dir())
        found |= {path: (*whole.parts, path.name) for path in inside}
        cells |= dict.fromkeys(inside, study_of(folder)["rows"])
    distinct = {parts: folder for folder, parts in found.items()}  # one that is given twice is one
    names = {}
    for parts, folder in distinct.items():
        for length in range(1, len(parts) + 1):
            if sum(other[-length:] == parts[-length:] for other in distinct) == 1:
                break
        names["/".join(parts[-length:])] = folder, cells.get(folder)
    return names
