"""Files that are read whole or rejected, and written whole or not at all."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_MB = 1e6
_ASIDE = ".aside"
_written: set[Path] = set()


class DamagedError(ValueError):
    """A file whose content does not fit its name."""


def memory_of_host() -> int | None:
    """Returns the bytes of this machine's memory; None if the system does not report them."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_npz(path: Path) -> Arrays:
    """Reads the arrays of a ``.npz`` file by name, each checked against its checksum.

    Raises:
        OSError: if the file cannot be opened.
        DamagedError: if it is not a whole ``.npz`` file of arrays without Python objects.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.npz"
        >>> write_npz(file, {"w": np.arange(3), "b": np.zeros(2)})
        >>> read_npz(file)
        {'w': array([0, 1, 2]), 'b': array([0., 0.])}
    """
    check_regular(path)
    with path.open("rb") as file:
        # A header with a flipped bit raises anything from SyntaxError to MemoryError.
        try:
            with zipfile.ZipFile(file) as archive:
                members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
                return {name: _array(archive, info) for name, info in members.items()}
        except Exception as error:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise DamagedError(f"{path}: not a whole .npz file of arrays: {reason}") from error


def check_regular(path: Path) -> None:
    """Raises DamagedError for a folder or a special file, such as a named pipe."""
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path}: not a regular file")


def check_memory(size: int) -> None:
    """Raises ValueError if a declared size, in bytes, exceeds this machine's memory."""
    there = memory_of_host()
    if there is not None and size > there:
        raise ValueError(f"it needs {size / _MB:,.0f} MB, this machine has {there / _MB:,.0f}")


@contextmanager
def open_text(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """Opens a text with the line ends that it has; one in ``.gz`` is decompressed as it is read.

    Raises:
        OSError: if the file cannot be opened.
        DamagedError: if it is not a regular file; in the block, if a ``.gz`` file is damaged.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.csv.gz"
        >>> _ = file.write_bytes(gzip.compress(b"a,b"))
        >>> with open_text(file) as text:
        ...     text.read()
        'a,b'
    """
    check_regular(path)
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding=encoding, newline="") as text:
            yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedError(f"{path}: not a whole .gz file: {error}") from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as member:
        try:
            array = np.lib.format.read_array(member, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{info.filename}: {error}") from error
        if member.read(1):  # which also compares the checksum
            raise ValueError(f"{info.filename} is not as large as its header says")
    return array


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Replaces a file with the output of the block, atomically; not if the block raises.

    Other processes see either the old file or the new one, also after a crash. The folder is
    created.

    Raises:
        OSError: if it cannot be written; it names the file, and no temporary file is left.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "new" / "a.txt"
        >>> with writing(file) as out:
        ...     _ = out.write(b"whole")
        >>> file.read_bytes()
        b'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}")
    _written.add(aside)
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(aside)):
            error.filename = str(path)
        raise
    finally:
        _written.discard(aside)


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays as a ``.npz`` file by :func:`writing`."""
    with writing(path) as file:
        np.savez(file, **cast(Any, arrays))  # NumPy's stubs see allow_pickle


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8 by :func:`writing`."""
    with writing(path) as file:
        file.write(text.encode())


def remove_written() -> None:
    """Removes unfinished files of this process; for a process that ends at once."""
    for aside in tuple(_written):
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def remove_asides(folder: Path) -> None:
    """Removes the temporary files of processes that were killed in :func:`writing`.

    Raises:
        OSError: if that is not possible.
    """
    for path in folder.iterdir():
        if is_aside(path):
            path.unlink(missing_ok=True)


def is_aside(path: Path) -> bool:
    """Whether a file is a temporary file of :func:`writing`."""
    return path.name.startswith(".") and path.name.endswith(_ASIDE)


def append(file: io.FileIO, content: bytes) -> None:
    """Appends to an unbuffered file: all of the content, or nothing.

    Raises:
        OSError: if it cannot be written; it names the file.
    """
    end = file.tell()
    try:
        while content:
            content = content[file.write(content) :]
    except OSError as error:
        with suppress(OSError):
            file.truncate(end)
        error.filename = str(file.name)
        raise
