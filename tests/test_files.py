"""Files are read whole or rejected in one line, and written whole or not at all."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.base import files
from fedjax_sim.base.files import DamagedError, read_npz, write_npz, writing
from fedjax_sim.data import load_dataset
from fedjax_sim.models import load_weights, mobilenet, save_weights
from fedjax_sim.partition import Partition, load_partition, save_partition
from fedjax_sim.run import checkpoint_files
from fedjax_sim.run.identity import digest

READERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": checkpoint_files.read_arrays,
    "data": lambda path: load_dataset(str(path)),
    "mobilenet": mobilenet.load_weights,
    "partition": load_partition,
    "weights": lambda path: load_weights(path, fs.models.logistic((2,), 2)),
}


def member(content: bytes, size: int | None = None) -> Callable[[Path], None]:
    """Writes a zip file with one array's bytes, of which the directory declares another size."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", content)
            if size is not None:
                archive.infolist()[0].file_size = size

    return write


def header(shape: str, dtype: str = "<f8") -> bytes:
    """Returns an array's header in NumPy's format, version 1."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "no zip file": lambda path: path.write_bytes(b"nothing"),
    "no array": member(b"nothing"),
    "a huge shape": member(header(f"({10**15},)") + bytes(8)),
    "a shape below 0": member(header("(-1,)") + bytes(8)),
    "a shape of 4,000 digits": member(header(f"({'9' * 4000},)") + bytes(8)),
    "deep brackets": member(header("(" * 900 + ")" * 900)),
    "Python objects": member(header("(1,)", "|O") + bytes(8)),
    "no such dtype": member(header("(1,)", "<f7") + bytes(8)),
    "fewer bytes than declared": member(header("(9,)") + bytes(8), len(header("(9,)")) + 72),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line_that_names_the_file(case: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    DAMAGED[case](path)
    with pytest.raises(ValueError, match=r"mine\.npz") as caught:
        READERS[reader](path)
    assert "\n" not in str(caught.value)


def test_a_damaged_packed_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n0,x\n1,y\n" * 9)[:-9])
    with pytest.raises(DamagedError, match=r"a\.csv\.gz: not a whole \.gz file: "):
        load_dataset(f"csv:{path},label=b")


def test_no_flip_of_a_header_is_a_traceback_or_goes_unnoticed(tmp_path: Path) -> None:
    """Every third bit of the zip file's first 200 bytes: its own entry, and NumPy's header."""
    path, kept = tmp_path / "a.npz", 0
    write_npz(path, {"w": np.arange(3.0)})
    content = path.read_bytes()
    for bit in range(0, 8 * 200, 3):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found = read_npz(path)
        except DamagedError:
            continue
        kept += 1  # the time of the entry, say
        assert [(name, array.tolist()) for name, array in found.items()] == [("w", [0, 1, 2])]
    assert 0 < kept < 140


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, a block of zeros or noise, a block moved, or a byte more."""
    n = len(content)
    first, last = sorted(rng.integers(0, n, 2).tolist())
    block = content[first:last]
    return [
        lambda: content[:first],
        lambda: content[:first] + bytes(len(block)) + content[last:],
        lambda: content[:first] + rng.bytes(len(block)) + content[last:],
        lambda: content[:first] + content[last:] + block,
        lambda: content[:first] + b"\x00" + content[first:],
    ][rng.integers(5)]()


WHOLE: dict[str, Callable[[Path], Any]] = {
    "checkpoint": lambda path: checkpoint_files.write_arrays(
        path, {"version": 3}, {"w": np.arange(9.0)}
    ),
    "data": lambda path: write_npz(path, {name: np.ones((4, 2)) for name in ("x_train", "x_test")}
        | {name: np.arange(4) % 2 for name in ("y_train", "y_test")}),
    "partition": lambda path: save_partition(
        path, Partition(np.arange(4, dtype=np.int32), np.array([0, 2, 4], np.int32))
    ),
    "weights": lambda path: save_weights(
        path, fs.models.logistic((2,), 2).init(jax.random.key(0))
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("reader", WHOLE)
def test_no_damage_is_a_traceback_or_another_content(reader: str, tmp_path: Path) -> None:
    """All 1,024 flips of an array's header, and 500 other damages."""
    path, rng = tmp_path / "mine.npz", np.random.default_rng(0)
    WHOLE[reader](path)
    content, whole = path.read_bytes(), digest(READERS[reader](path))
    header = content.index(b"\x93NUMPY")
    flips = [content[: header + i // 8] + bytes([content[header + i // 8] ^ 1 << i % 8])
             + content[header + i // 8 + 1 :] for i in range(1024)]  # fmt: skip
    right = 0
    for changed in (*flips, *(damaged(content, rng) for _ in range(500))):
        path.write_bytes(changed)
        try:
            found = READERS[reader](path)
        except ValueError as error:
            right += "mine.npz" in str(error) and "\n" not in str(error)
        else:
            assert digest(found) == whole
            right += 1
    assert right == 1524


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    files.write_text(path, "ε")
    with suppress(KeyboardInterrupt), writing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == "ε".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
