"""Files that are read whole or rejected, and written whole or not at all."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_MB = 1e6
_LONGEST_HEADER = 1 << 16
_ASIDE = ".aside"
_written: set[Path] = set()
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class DamagedError(ValueError):
    """A file that cannot be what its name says, or is larger than the memory."""


def memory_of_host() -> int | None:
    """Returns the bytes of this machine's memory; None if the system does not report them."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_npz(path: Path, names: Collection[str] | None = None) -> Arrays:
    """Reads the arrays of a ``.npz`` file, each checked against its checksum.

    Args:
        path: the file.
        names: the arrays to read, as far as the file has them; None for all.

    Returns:
        The arrays by name, in the order of the file.

    Raises:
        OSError: if the file cannot be opened.
        DamagedError: if it is not a whole ``.npz`` file of arrays without Python objects, or is
            larger than this machine's memory.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.npz"
        >>> write_npz(file, {"w": np.arange(3), "b": np.zeros(2)})
        >>> read_npz(file, ["w"])
        {'w': array([0, 1, 2])}
    """
    check_regular(path)
    with path.open("rb") as file:
        # A header with a flipped bit raises anything from SyntaxError to MemoryError.
        try:
            with zipfile.ZipFile(file) as archive:
                members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
                chosen = {n: i for n, i in members.items() if names is None or n in names}
                check_memory(sum(info.file_size for info in chosen.values()))
                return {name: _array(archive, info) for name, info in chosen.items()}
        except Exception as error:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise DamagedError(f"{path}: not a whole .npz file of arrays: {reason}") from error


def check_regular(path: Path) -> None:
    """Raises DamagedError for a folder, or what waits for a writer, such as a named pipe."""
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path}: not a regular file")


def check_memory(size: int) -> None:
    """Raises ValueError if a declared size, in bytes, exceeds this machine's memory."""
    there = memory_of_host()
    if there is not None and size > there:
        raise ValueError(f"it declares {size / _MB:,.0f} MB, this machine has {there / _MB:,.0f}")


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    content = bytearray(info.file_size)
    with cast(zipfile.ZipExtFile, archive.open(info)) as member:
        view, filled = memoryview(content), 0
        while count := member.readinto(view[filled:]):  # the last one compares the checksum
            filled += count
    if filled != len(content):
        raise ValueError(f"{info.filename} is cut short")
    start = io.BytesIO(content[:_LONGEST_HEADER])
    shape, column_major, dtype = _HEADERS[np.lib.format.read_magic(start)](start)
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds Python objects")
    begin, count = start.tell(), math.prod(shape)
    if begin + count * dtype.itemsize != len(content):
        raise ValueError(f"{info.filename} is not as large as its header says")
    flat = np.frombuffer(content, dtype, count, begin) if count else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if column_major else "C")


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Replaces a file as a whole, with what the block writes; a block that raises changes nothing.

    Another process sees the old file or the new one, and so does the next start after a crash.

    Args:
        path: the file; its folder is made.

    Raises:
        OSError: if it cannot be written; it names the file, and nothing is left beside it.

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
    """Removes what this process is writing; for one that ends at once."""
    for aside in tuple(_written):
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def remove_asides(folder: Path) -> None:
    """Removes what processes that were killed in :func:`writing` left in a folder.

    Raises:
        OSError: if that is not possible.
    """
    for path in folder.iterdir():
        if is_aside(path):
            path.unlink(missing_ok=True)


def is_aside(path: Path) -> bool:
    """Whether a file is what :func:`writing` writes before it replaces another."""
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
