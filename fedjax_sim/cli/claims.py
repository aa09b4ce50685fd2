"""Claims on folders: one process at a time writes to the folder of a run or of a study."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from fedjax_sim.base.files import is_aside, remove_asides

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


class Claim:
    """A lock on a folder, which the system releases when this process ends.

    If the file system has no locks, every process gets it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ValueError(f"{path} is in use by another process") from error
        except OSError:
            pass
        remove_asides(path)

    def release(self, *, remove: bool = False) -> None:
        """Ends the claim; ``remove`` deletes the folder if it is empty."""
        with suppress(OSError):
            (self.path / LOCK).unlink()
            if remove:
                self.path.rmdir()
        os.close(self._file)


def claim_new(path: Path, *, named: bool = True) -> Claim:
    """Makes a folder and claims it; a default name that is taken gets a suffix."""
    try:
        if not named:
            return Claim(make_folder(path))
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        return Claim(path)
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror or error}") from error


def claim_begun(path: Path) -> Claim:
    """Claims the folder of a run or a study that is resumed."""
    try:
        return Claim(path)
    except OSError as error:
        raise ValueError(f"--resume {path}: {error.strerror or error}") from error


def check_free(path: Path) -> None:
    """Raises ValueError unless ``path`` is new or an empty folder; names ``--out``."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file; name a new folder")
    if not is_free(path):
        raise ValueError(f"--out {path} is not empty; name a new folder")


def is_free(path: Path) -> bool:
    """Returns whether a folder is new, or empty except for the files of a killed start."""
    return not path.exists() or all(p.name == LOCK or is_aside(p) for p in path.iterdir())


def make_folder(path: Path) -> Path:
    """Makes a new folder of this name, or of the first free one of name-2, name-3, ..."""
    for number in itertools.count(1):
        chosen = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise AssertionError("unreachable")
