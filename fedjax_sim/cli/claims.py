"""Claims on folders: one process at a time writes to the folder of a run or of a study."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from fedjax_sim.base.files import is_aside, remove_asides
from fedjax_sim.cli.commands import complain

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


class Claim:
    """The right to write to a folder, which the system takes back when this process dies.

    A file system without ``flock`` cannot grant it to one process alone; a line says so.

    Args:
        path: the folder, which exists.
        made: whether this process has just made it.
    """

    def __init__(self, path: Path, *, made: bool = False) -> None:
        self.path, self._made = path, made
        try:
            self._file = _locked(path / LOCK)
            remove_asides(path)
        except OSError:
            if made:
                with suppress(OSError):
                    path.rmdir()
            raise

    def check(self) -> None:
        """Raises FileNotFoundError if the folder has been deleted, moved or replaced."""
        if not _is_at(self._file, self.path / LOCK):
            raise FileNotFoundError(f"{self.path} was deleted or moved")

    def release(self, *, remove: bool = False) -> None:
        """Ends the claim; ``remove`` deletes a folder that was made for it, if it is empty."""
        with suppress(OSError):
            self.check()
            (self.path / LOCK).unlink()
            if remove and self._made:
                self.path.rmdir()
        os.close(self._file)


def claim_new(path: Path, *, named: bool = True) -> Claim:
    """Makes a folder and claims it; a default name that is taken gets a suffix."""
    try:
        if not named:
            return Claim(make_folder(path), made=True)
        check_free(path)
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        claim = Claim(path, made=made)
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror or error}") from error
    try:
        check_free(path)  # again: another process may have run here since
    except ValueError:
        claim.release()
        raise
    return claim


def claim_begun(path: Path) -> Claim:
    """Claims the folder of a run or a study that goes on."""
    for entry in (*path.iterdir(), *path.glob("*/*")):
        if entry.is_symlink() and entry.is_dir():
            raise ValueError(
                f"--resume {path}: {entry} is a link to a folder; put the folder there"
            )
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
    """Returns whether a folder is new, or empty but for the files of a start that was killed."""
    return not path.exists() or all(p.name == LOCK or is_aside(p) for p in path.iterdir())


def make_folder(path: Path) -> Path:
    """Makes a new folder of this name, or of the first of name-2, name-3, ... that is not taken."""
    for number in itertools.count(1):
        chosen = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise AssertionError("unreachable")


def _locked(path: Path) -> int:
    """Locks a file and returns its descriptor."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is None:
                raise OSError
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise ValueError(f"{path.parent} is in use by another process") from error
        except OSError:
            complain(
                "fedjax_sim",
                f"warning: no locks where {path.parent} lies: start no second process in it",
                0,
            )
        if _is_at(file, path):
            return file
        os.close(file)  # its last holder has just deleted it


def _is_at(file: int, path: Path) -> bool:
    """Returns whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
