"""Files that are read whole or rejected, and written whole or not at all."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_MB = 1e6
_COPIES = 4
"""Bytes that a byte of a text takes once it is read: as characters, and as numbers."""
_OPENERS: Mapping[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open
}  # fmt: skip
_NOT_OPENED = (b"Rar!", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_LONGEST_HEADER = 1 << 16
_ASIDE = ".aside"
_written: set[Path] = set()
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class DamagedError(ValueError):
    """A file whose content does not fit its name, or that is larger than the memory."""


def memory_of_host() -> int | None:
    """Returns the bytes of this machine's memory; None if the system does not report them."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_npz(path: Path, names: Collection[str] | None = None) -> Arrays:
    """Reads the arrays of a ``.npz`` file by name, all or some, each checked against its checksum.

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
        raise ValueError(f"it needs {size / _MB:,.0f} MB, this machine has {there / _MB:,.0f}")


def open_text(path: Path, encoding: str = "utf-8") -> IO[str]:
    """Opens a text with the line ends that it has; one in ``.gz`` is decompressed as it is read.

    Reading raises :class:`DamagedError` where a ``.gz`` file is cut or damaged, or larger than this
    machine's memory.

    Raises:
        OSError: if the file cannot be opened.
        DamagedError: if it is not a regular file, or is larger than this machine's memory.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.csv.gz"
        >>> _ = file.write_bytes(gzip.compress(b"a,b"))
        >>> with open_text(file) as text:
        ...     text.read()
        'a,b'
    """
    check_regular(path)
    if path.suffix == ".gz":
        raw: Any = io.BufferedReader(_Unpacked(path, gzip.GzipFile(path), _COPIES))
        return io.TextIOWrapper(raw, encoding=encoding, newline="")
    _check_memory_of(path, _COPIES * path.stat().st_size)
    return path.open(encoding=encoding, newline="")


def check_archive(path: Path) -> None:
    """Raises DamagedError if a file is an archive whose content is larger than the memory.

    A compressed file is read through, as it does not say how large it is; an archive of a kind that
    Python does not read is rejected.
    """
    check_regular(path)
    with path.open("rb") as file:
        begin = file.read(512)
    if begin.startswith(_NOT_OPENED):
        raise DamagedError(f"{path}: unpack it, or pack it as .zip, .gz, .bz2, .xz or .tar")
    for magic, opened in _OPENERS.items():
        if begin.startswith(magic):
            with _Unpacked(path, opened(path), 1) as unpacked:
                while unpacked.read(1 << 20):
                    pass
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            _check_memory_of(path, sum(member.file_size for member in archive.infolist()))
    elif begin[257:262] == b"ustar":
        with tarfile.open(path) as members:
            _check_memory_of(path, sum(member.size for member in members))


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, as far as it fits into this machine's memory."""

    def __init__(self, path: Path, file: Any, copies: int) -> None:
        self._path, self._file, self._copies, self._size = path, file, copies, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._file.readinto(buffer)
        except (OSError, zlib.error, lzma.LZMAError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's; damage, in bz2 and gzip, has no number
            kind = self._path.suffix or "compressed"
            raise DamagedError(f"{self._path}: not a whole {kind} file: {error}") from error
        self._size += count
        _check_memory_of(self._path, self._copies * self._size)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _check_memory_of(path: Path, size: int) -> None:
    try:
        check_memory(size)
    except ValueError as error:
        raise DamagedError(f"{path}: {error}") from error


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

    Another process sees the old file or the new one, and so does the next start after a crash. The
    folder of the file is made.

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
    """Removes unfinished files of this process; for a process that ends at once."""
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
