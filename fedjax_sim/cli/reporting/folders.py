"""The folders of runs and studies in a report, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.cli.reading import CELLS, STUDY, read_object


class StudyRecord(NamedTuple):
    """The contents of ``study.json``, with the names of the study file.

    Attributes:
        rows: the settings of each row.
        cells: the distinguishing settings of each cell, in order, by the name of its folder.
        baseline: the row with which the others are compared; None if unknown.
        columns: the setting whose values are the columns of the study's table, or None.
    """

    rows: Mapping[str, Sequence[str]]
    cells: Mapping[str, Mapping[str, Any]]
    baseline: str | None
    columns: str | None


def is_study(folder: Path) -> bool:
    """Returns whether a folder is the folder of a study."""
    return (folder / STUDY).exists()


def study_of(folder: Path) -> StudyRecord:
    """Reads the record of a study."""
    path = folder / STUDY
    found = read_object(path)
    try:
        names = [found.get(key) for key in ("baseline", "columns")]
        return StudyRecord(
            {row: [*map(str, texts)] for row, texts in found.get("rows", {}).items()},
            {Path(c["folder"]).name: dict(c["settings"]) for c in found.get("cells", [])},
            *(None if name is None else str(name) for name in names),
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def name_folders(
    folders: Sequence[Path], studies: Mapping[Path, StudyRecord]
) -> dict[str, tuple[Path, StudyRecord | None]]:
    """Returns run folders by their shortest names, with the record of their study if any.

    The cells of a study are those of its file, in that order; an earlier file may have had others.
    """
    found: dict[Path, tuple[str, ...]] = {}
    cells: dict[Path, StudyRecord] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        whole = folder.resolve()
        if folder not in studies:
            found[folder] = whole.parts
            continue
        for name in studies[folder].cells:
            if (inside := folder / CELLS / name).is_dir():
                found[inside], cells[inside] = (*whole.parts, name), studies[folder]
    distinct = {parts: folder for folder, parts in found.items()}  # one that is given twice is one
    shortest = {}
    for parts, folder in distinct.items():
        for length in range(1, len(parts) + 1):
            if sum(other[-length:] == parts[-length:] for other in distinct) == 1:
                break
        shortest["/".join(parts[-length:])] = folder, cells.get(folder)
    return shortest
