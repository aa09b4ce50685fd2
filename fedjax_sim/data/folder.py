"""The user's data folder and the cache of derived files."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedjax_sim.base.files import DamagedError, read_npz, write_npz

DataDir = str | os.PathLike[str] | None


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Hides TFDS's advice ("OpenCV is not installed"), and messages on retries, within a block."""
    with ExitStack() as stack:
        for name in ("absl", "urllib3", "huggingface_hub"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


_DOWNLOADS: ContextVar[bool] = ContextVar("downloads", default=True)


@contextmanager
def downloading(allowed: bool) -> Iterator[None]:
    """Sets whether missing data sets may be downloaded."""
    before = _DOWNLOADS.set(allowed)
    try:
        yield
    finally:
        _DOWNLOADS.reset(before)


def may_download() -> bool:
    """Returns whether missing data sets may be downloaded."""
    return _DOWNLOADS.get()


class DataNotFoundError(FileNotFoundError):
    """A missing data set; the message names the missing file."""


def given_folder(data_dir: DataDir) -> Path | None:
    """Returns the data folder of the argument, else of FEDJAX_SIM_DATA_DIR, else None."""
    folder = data_dir or os.environ.get("FEDJAX_SIM_DATA_DIR")
    return Path(folder).expanduser() if folder else None


def not_ready(name: str, folder: Path | None, reason: str, advice: str) -> DataNotFoundError:
    """Returns the error for a data set that is not in the data folder, or if none is given."""
    where = folder or "a data folder, as none is given: set FEDJAX_SIM_DATA_DIR"
    return DataNotFoundError(f"data set {name!r} is not ready in {where} ({reason}); {advice}")


def existing(name: str, path: Path, *, folder: bool = False) -> Path:
    """Returns the path of a user's file or folder; raises DataNotFoundError if it is missing."""
    if not (path.is_dir() if folder else path.is_file()):
        kind = "folder" if folder else "file"
        raise DataNotFoundError(f"data set {name!r}: there is no {kind} {path}")
    return path


def cache_dir() -> Path:
    """Returns the folder of files that can be rebuilt: decoded data sets, compiled programs.

    Returns:
        ``$FEDJAX_SIM_CACHE_DIR``, else ``$XDG_CACHE_HOME/fedjax_sim``, else
        ``~/.cache/fedjax_sim``. The folder need not exist.

    Example:
        >>> os.environ["FEDJAX_SIM_CACHE_DIR"] = "/tmp/my_cache"
        >>> cache_dir().as_posix()
        '/tmp/my_cache'
        >>> del os.environ["FEDJAX_SIM_CACHE_DIR"]
    """
    if folder := os.environ.get("FEDJAX_SIM_CACHE_DIR"):
        return Path(folder).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedjax_sim"


def cached_arrays(
    path: Path, make: Callable[[], Mapping[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Loads arrays from ``path``, after computing and storing them if they are missing or damaged.

    Args:
        path: a .npz file, whose name must identify everything that the arrays depend on.
        make: computes the arrays by name; called at most once.

    Returns:
        The arrays by name.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "squares.npz"
        ...     first = cached_arrays(file, lambda: {"y": np.arange(4) ** 2})
        ...     cached_arrays(file, lambda: {})["y"].tolist()
        [0, 1, 4, 9]
    """
    try:
        return read_npz(path)
    except OSError:  # missing or unreadable: computed below
        pass
    except DamagedError as error:
        warnings.warn(f"rebuilding a file of the cache: {error}", stacklevel=2)
    arrays = dict(make())
    try:
        write_npz(path, arrays)
    except OSError as error:  # a read-only or full disk costs the next run time, not this one
        warnings.warn(f"cannot cache {path} ({error}); set FEDJAX_SIM_CACHE_DIR", stacklevel=2)
    return arrays
