"""The folder of the user's data, and the error that says what is missing in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

DataDir = str | os.PathLike[str] | None


_DOWNLOADS: ContextVar[bool] = ContextVar("downloads", default=True)


@contextmanager
def downloading(allowed: bool) -> Iterator[None]:
    """Says whether a data set that is not there may be downloaded."""
    before = _DOWNLOADS.set(allowed)
    try:
        yield
    finally:
        _DOWNLOADS.reset(before)


def may_download() -> bool:
    """Whether a data set that is not there may be downloaded."""
    return _DOWNLOADS.get()


class DataNotFoundError(FileNotFoundError):
    """A data set is not in its place; the message says what is missing."""


def given_folder(data_dir: DataDir) -> Path | None:
    """The folder that argument or environment name; None if neither does.

    >>> given_folder("data").as_posix()
    'data'
    """
    given = data_dir or os.environ.get("FEDJAX_SIM_DATA_DIR")
    return Path(given).expanduser() if given else None


def find_file(name: str, data_dir: DataDir, relative: str, advice: str) -> Path:
    """A file of the data folder.

    Args:
        name: the data set that needs it.
        data_dir: as for :func:`given_folder`.
        relative: the path of the file in the folder.
        advice: what to do if it is missing.

    Returns:
        The path of the file, which exists.

    Raises:
        DataNotFoundError: if no folder is given, or the file is not in it.

    Example:
        >>> find_file("tides", "nowhere", "sea.csv", "put it there")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedjax_sim.data.folder.DataNotFoundError: data set 'tides' is not ready in nowhere (no ...
    """
    folder = given_folder(data_dir)
    if folder is None:
        raise DataNotFoundError(
            f"data set {name!r} is read from {relative} in a data folder, and none is given: set "
            f"FEDJAX_SIM_DATA_DIR; {advice}"
        )
    if not (folder / relative).is_file():
        raise DataNotFoundError(
            f"data set {name!r} is not ready in {folder} (no file {relative}); {advice}"
        )
    return folder / relative


def check_inside(folder: Path) -> None:
    """Raises ValueError for a link that leads out of a folder, or a special file in it."""
    root = folder.resolve()
    for place, folders, files in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ValueError(f"{path} is a link out of its folder: put the file itself there")
            if not path.is_dir() and not path.is_file():
                raise ValueError(f"{path} must be a regular file")


def existing(name: str, path: Path, *, folder: bool = False) -> Path:
    """A user's own file or folder, if it is there.

    Args:
        name: the data set that it is.
        path: its path.
        folder: whether it must be a folder.

    Raises:
        DataNotFoundError: if it is not there.

    Example:
        >>> existing("mine.npz", Path("mine.npz"))
        Traceback (most recent call last):
        fedjax_sim.data.folder.DataNotFoundError: data set 'mine.npz': there is no file mine.npz
    """
    if not (path.is_dir() if folder else path.is_file()):
        kind = "folder" if folder else "file"
        raise DataNotFoundError(f"data set {name!r}: there is no {kind} {path}")
    return path
