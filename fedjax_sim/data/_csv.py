"""Tables in .csv files."""

import csv
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import check_memory, open_text
from fedjax_sim.base.words import shortened
from fedjax_sim.data.cells import (
    check_labels,
    fill_means,
    integers_or_texts,
    is_number,
    one_hot,
    read_number,
    read_numbers,
)
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import EVERY_TEXT, FIFTH, choose_test, split_options
from fedjax_sim.tasks import regression

FORM = (
    "csv:FILE,label=COLUMN or target=COLUMN[,client=COLUMN][,test=FRACTION or COLUMN]"
    "[,classes=M][,sep=CHARACTER][,encoding=NAME][,categorical=COLUMN+COLUMN or all]"
    "[,missing=refuse, drop or mean]"
)
ROLES = ("label", "target", "client", "test", "classes", "task")
OPTIONS = (*ROLES, "sep", "encoding", "categorical", "missing")
LARGEST = float(np.finfo(np.float32).max)


class Table(NamedTuple):
    """A parsed ``csv:`` text; ``numbers`` tells whether column ``y`` is numbers to predict."""

    file: Path
    y: str
    numbers: bool
    client: str | None = None
    test: float | str = FIFTH
    classes: int | None = None
    sep: str = ","
    encoding: str = "utf-8-sig"
    categorical: tuple[str, ...] = ()
    missing: str = "refuse"

    @property
    def roles(self) -> list[str]:
        """The columns that are not inputs."""
        return [c for c in (self.y, self.client, self.test) if isinstance(c, str)]


_Rows = tuple[
    NDArray[np.float64], list[str], Mapping[str, NDArray[np.str_]], Sequence[int], list[str]
]
"""Inputs ``f64[n, F]`` and their names; texts by role; the line of each row; notes."""


def parse_table(text: str) -> Table:
    """Parses ``FILE,label=COLUMN[,client=COLUMN]...``, or raises ValueError."""
    file, options = split_options("csv", text, OPTIONS, FORM)
    label, target, task = (options.pop(key, None) for key in ("label", "target", "task"))
    if not file or bool(label) == bool(target):
        raise ValueError(
            f"csv: must have a file and label=COLUMN or target=COLUMN, got {text!r}; its form is "
            f"{FORM}"
        )
    allowed = ("classification", "regression") if label else ("regression",)
    if task not in (None, *allowed):
        column = "label" if label else "target"
        raise ValueError(f"csv: {column}= must be of task={' or '.join(allowed)}, got task={task}")
    numbers = bool(target) or task == "regression"
    if numbers and "classes" in options:
        raise ValueError(f"csv: classes= is for labels, got {text!r}")
    table = Table(Path(file).expanduser(), label or target, numbers, **options)
    columns = [*table.roles, *(c for c in table.categorical if c != EVERY_TEXT)]
    if len({*columns}) < len(columns):
        raise ValueError(f"csv: each role must have its own column, got {text!r}")
    return table


def load_table(name: str, table: Table) -> Dataset:
    """Loads a .csv file with a line of column names.

    Columns without a role are inputs ``f32[n, F]``, of which categories come last. Classes and
    clients are numbered in the order of their texts, or of their numbers if all are integers.
    """
    x, columns, texts, lines, notes = _read_rows(existing(name, table.file), table)
    names: list[str] = []
    y: NDArray[Any]
    if table.numbers or table.classes is not None:
        y = _read_targets(table, texts[table.y], lines)
    else:
        labels, y = np.unique(integers_or_texts(texts[table.y]), return_inverse=True)
        names = [str(label) for label in labels]
        if len(names) < 2:
            raise ValueError(
                f"column {table.y!r} must have two classes or more, got {names[0]} alone"
            )
        check_labels(table.y, names, len(y))
    flags = texts[table.test] if isinstance(table.test, str) else None
    hint = f"; column {table.y!r} has {len(names)} classes" if names else ""
    rows = [f"line {line}" for line in lines]
    strata = np.zeros(len(y)) if table.numbers else y
    test, words = choose_test(table.test, strata, flags, rows, hint)
    x, numeric, fill_notes = fill_means(x, ~test, columns)
    return from_arrays(
        name,
        x,
        y,
        test=test,
        client=None if table.client is None else integers_or_texts(texts[table.client]),
        numeric=numeric,
        classes=table.classes,
        class_names=names,
        column_names=columns,
        task=regression() if table.numbers else None,
        test_set=words,
        notes=[*notes, *fill_notes],
    )


@contextmanager
def _open_rows(file: Path, table: Table) -> Iterator[Any]:
    """Opens the file; errors become ValueErrors that name the line."""
    with open_text(file, table.encoding) as text:
        rows = csv.reader(text, delimiter=table.sep, strict=True, skipinitialspace=table.sep == " ")
        try:
            yield rows
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num} must be csv, got: {error}") from error
        except UnicodeDecodeError as error:
            wanted = "UTF-8" if table.encoding == "utf-8-sig" else table.encoding
            raise ValueError(
                f"must be text in {wanted}, got: {error}; use encoding= for another encoding, such "
                "as encoding=latin-1"
            ) from error


def _read_rows(file: Path, table: Table) -> _Rows:
    categorical = table.categorical
    if EVERY_TEXT in categorical:
        with _open_rows(file, table) as rows:
            header, features = _read_header(rows, table)
            texts: set[int] = set()
            for row in _full_rows(rows, len(header)):
                texts.update(i for i in features if i not in texts and not is_number(row[i]))
        categorical = tuple(header[i] for i in sorted(texts))
    with _open_rows(file, table) as rows:
        return _read_columns(rows, table, categorical)


def _read_columns(rows: Any, table: Table, categorical: Sequence[str]) -> _Rows:
    header, features = _read_header(rows, table, categorical)
    texts: dict[str, list[str]] = {column: [] for column in (*table.roles, *categorical)}
    places = {column: header.index(column) for column in texts}
    features = [i for i in features if header[i] not in texts]
    numbers, lines, dropped, booleans = array("d"), array("q"), 0, set[int]()
    for row in _full_rows(rows, len(header)):
        try:
            values = read_numbers(row, features, booleans)
        except ValueError:
            i = next(i for i in features if not is_number(row[i]))
            raise ValueError(
                f"line {rows.line_num}, column {header[i]!r} must be a number, got {row[i]!r}: use "
                f"categorical={header[i]} to encode its categories, or categorical=all for all "
                "text columns"
            ) from None
        cells = [row[i].strip() for i in places.values()]
        if any(map(math.isnan, values)) or not all(cells):
            if table.missing == "drop":
                dropped += 1
                continue
            _check_gaps(rows.line_num, row, header, [*features, *places.values()], table)
        numbers.extend(values)
        for column, cell in zip(texts.values(), cells, strict=True):
            column.append(intern(cell))  # only thousands of millions of cells differ
        lines.append(rows.line_num)
    if not lines:
        reason = f"; all {dropped} rows lack a cell" if dropped else ""
        raise ValueError(f"must have rows below its line of column names, got none{reason}")
    x = np.frombuffer(numbers).reshape(len(lines), -1)
    bad = np.argwhere(np.abs(x) > LARGEST)
    if len(bad):
        i, j = bad[0]
        raise ValueError(
            f"line {lines[i]}, column {header[features[j]]!r} must be a finite number in float32, "
            f"got {x[i, j]:g}: correct it or leave the row out"
        )
    names, notes = [header[i] for i in features], []
    if dropped:
        notes.append(f"{dropped} of {dropped + len(lines)} rows lack a cell and were dropped.")
    if booleans:
        converted = shortened([header[i] for i in sorted(booleans)])
        notes.append(f"True and false are read as 1 and 0: {converted}.")
    for cells in texts.values():
        check_memory(4 * len(cells) * max(map(len, cells)))  # NumPy pads texts to the longest
    arrays = {column: np.array(cells) for column, cells in texts.items()}
    if categorical:
        block, block_names, block_notes = one_hot(
            {column: arrays[column] for column in categorical}
        )
        x, names = np.concatenate([x, block], axis=1), names + block_names
        notes += block_notes
    return x, names, {role: arrays[role] for role in table.roles}, lines, notes


def _check_gaps(
    line: int, row: Sequence[str], header: Sequence[str], places: Sequence[int], table: Table
) -> None:
    """Raises ValueError unless all missing cells can be filled with the training mean."""
    for i in places:
        column, cell, role = header[i], row[i].strip(), header[i] in table.roles
        text = column in (*table.roles, *table.categorical)
        gap = not cell if text else math.isnan(read_number(cell))
        if gap and (role or table.missing == "refuse"):
            got = repr(cell) if cell else "an empty cell"
            advice = "use missing=drop to drop such rows"
            advice += "" if role else ", or missing=mean to fill in the training mean"
            raise ValueError(
                f"line {line}, column {column!r} must have a value, got {got}: {advice}"
            )


def _full_rows(rows: Any, width: int) -> Iterator[list[str]]:
    """Yields the rows that are not empty; raises ValueError if one has too few or many cells."""
    for row in rows:
        if row and len(row) != width:
            raise ValueError(
                f"line {rows.line_num} must have {width} cells, as many as columns, got {len(row)}"
            )
        if row:
            yield row


def _read_header(
    rows: Any, table: Table, categorical: Sequence[str] = ()
) -> tuple[list[str], list[int]]:
    """Returns the column names, and the positions of the inputs."""
    header = [cell.strip() for cell in next(rows, [])]
    if "" in header:
        raise ValueError(
            f"line 1 must name every column, got none for column {header.index('') + 1} (if pandas "
            "wrote its index, use to_csv(index=False))"
        )
    repeated = [column for i, column in enumerate(header) if column in header[:i]]
    if repeated:
        raise ValueError(f"line 1 must have every column once, got {repeated[0]!r} again")
    for column in (*table.roles, *categorical):
        if column not in header:
            known = shortened(header, 20) + _separator_advice(header)
            raise ValueError(f"has no column {column!r}; columns: {known}")
    features = [i for i, column in enumerate(header) if column not in table.roles]
    if not features:
        raise ValueError(f"must have an input column too, got only {shortened(header, 20)}")
    return header, features


def _separator_advice(header: Sequence[str]) -> str:
    """Returns advice if another character than the given one seems to separate the names."""
    names = {";": "sep=;", "\t": "sep=tab", "|": "sep=|", ",": "no sep="}
    found = [s for s in names if len(header) == 1 and s in header[0]]
    return f"; {found[0]!r} seems to separate them: use {names[found[0]]}" if found else ""


def _read_targets(
    table: Table, texts: NDArray[np.str_], lines: Sequence[int]
) -> NDArray[np.float64]:
    """Reads the numbers of the label or target, which must be finite in float32."""
    y = []
    for text, line in zip(texts, lines, strict=True):
        try:
            value = read_number(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= LARGEST:
            other = f"label={table.y}" + " without classes=" * (not table.numbers)
            raise ValueError(
                f"line {line}, column {table.y!r} must be a finite number, as it is the "
                f"{'target' if table.numbers else 'class with classes='}, got {str(text)!r}: use "
                f"{other} for named classes"
            )
        y.append(value)
    return np.array(y)
