"""A user's table in one .csv file."""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.dataset import Dataset, from_arrays, random_share
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import FIFTH, check_parts, in_test, share_or_name, split_options
from fedjax_sim.data.targets import of_each, strata
from fedjax_sim.tasks import classification, regression

FORM = "csv:FILE,label=COLUMN or target=COLUMN[,client=COLUMN][,test=FRACTION or COLUMN]"
OPTIONS = ("label", "target", "client", "test")
LARGEST = float(np.finfo(np.float32).max)


class Table(NamedTuple):
    """What a user says of a .csv file.

    Attributes:
        file: its path.
        y: the column of the classes, or of the numbers that are to be learnt.
        numbers: whether they are numbers.
        client: the column of the natural clients; None for none.
        test: the share of each class that is the test set, or the column that says which rows are.
    """

    file: Path
    y: str
    numbers: bool
    client: str | None
    test: float | str


class _Read(NamedTuple):
    """The rows of a file: numbers ``f64[n, F]``, the other columns by name, each row's line."""

    x: NDArray[np.float64]
    texts: Mapping[str, NDArray[np.str_]]
    lines: Sequence[int]


def parse_table(text: str) -> Table:
    """What ``FILE,label=COLUMN[,client=COLUMN][,test=FRACTION or COLUMN]`` means.

    ``target=COLUMN`` in place of ``label`` is a column of numbers: regression.

    Args:
        text: as above; a file or column with a comma in its name cannot be given.

    Returns:
        The file and its columns; the test set is a fifth of each class unless ``test`` is given.

    Raises:
        ValueError: if the text is none of this form.

    Example:
        >>> parse_table("iris.csv,label=species,test=0.5")[1:]
        ('species', False, None, 0.5)
    """
    file, given = split_options("csv", text, OPTIONS, FORM)
    label, target, client, test = given.values()
    if not file or bool(label) == bool(target):
        raise ValueError(
            f"csv: must have a file and label=COLUMN or target=COLUMN, got {text!r}; its form is "
            f"{FORM}"
        )
    roles = [column for column in given.values() if column]
    if len({*roles}) < len(roles):
        raise ValueError(f"csv: must have another column for each of its roles, got {text!r}")
    place, share = Path(file).expanduser(), share_or_name("csv", test or FIFTH)
    return Table(place, label or target, bool(target), client or None, share)


def table(name: str, of: Table) -> Dataset:
    """A table of numbers with a label or target, read from a .csv file with a line of names.

    Args:
        name: of the data set.
        of: the file and its columns; all that have no role are inputs, and must be numbers. A
            column of the test set says 0 or 1, false or true, train or test.

    Returns:
        Inputs ``f32[n, F]``, of which those that are not 0 and 1 alone are ``numeric``. Classes and
        clients are numbered in the order of their texts, or of their numbers if all are integers;
        ``class_names`` are the labels. Nothing is cached.

    Raises:
        DataNotFoundError: if there is no such file.
        ValueError: if it is no such table; names column, line and what is allowed.
    """
    x, texts, lines = _read(existing(name, of.file), of)
    names: list[str] = []
    y: NDArray[Any]
    if of.numbers:
        y = _targets(of.y, texts[of.y], lines)
        task = regression()
    else:
        labels, y = np.unique(_numbers_or_texts(texts[of.y]), return_inverse=True)
        if len(labels) < 2:
            raise ValueError(
                f"column {of.y!r} must have two classes or more, got {labels[0]} alone"
            )
        names = [str(label) for label in labels]
        _check_labels(of.y, names, len(y))
        task = classification(len(labels))
    if isinstance(of.test, str):
        test = in_test(of.test, texts[of.test], [f"line {line}" for line in lines])
        words = f"the test rows of {of.test!r}"
    else:
        test = random_share(strata(y, task), of.test)
        words = f"a fixed random {100 * of.test:g} %" + of_each(task)
    check_parts(test, of.test, f"; column {of.y!r} has {len(names)} classes" if names else "")
    return from_arrays(
        name,
        x,
        y,
        test=test,
        client=None if of.client is None else _numbers_or_texts(texts[of.client]),
        numeric=~np.isin(x, (0, 1)).all(axis=0),
        class_names=names,
        task=task,
        test_set=words,
    )


def _read(file: Path, of: Table) -> _Read:
    with file.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, strict=True)
        try:
            return _columns(rows, of)
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num} must be csv, got: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"must be a text in UTF-8, got: {error}") from error


def _columns(rows: Any, of: Table) -> _Read:
    header = [cell.strip() for cell in next(rows, [])]
    roles = [c for c in (of.y, of.client, of.test) if isinstance(c, str)]
    features = _features(header, roles)
    places = {column: header.index(column) for column in roles}
    numbers, lines = array("d"), array("q")
    texts: dict[str, list[str]] = {column: [] for column in roles}
    for row in _full(rows, len(header)):
        try:
            numbers.extend([float(row[i]) for i in features])
        except ValueError:
            raise _not_a_number(rows.line_num, header, row, features) from None
        for column, i in places.items():
            cell = row[i].strip()
            if not cell:
                raise ValueError(
                    f"line {rows.line_num}, column {column!r} must have a value, got an empty cell"
                )
            texts[column].append(intern(cell))  # of millions of cells only thousands differ
        lines.append(rows.line_num)
    if not lines:
        raise ValueError("must have rows below its line of column names, got none")
    x = np.frombuffer(numbers).reshape(len(lines), -1)
    bad = np.argwhere(~(np.abs(x) <= LARGEST))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"line {lines[row]}, column {header[features[column]]!r} must be a finite number in "
            f"float32, got {x[row, column]:g}: fill it in or leave the row out"
        )
    return _Read(x, {column: np.array(cells) for column, cells in texts.items()}, lines)


def _full(rows: Any, width: int) -> Iterator[list[str]]:
    """The rows that are not empty, each with all its cells."""
    for row in rows:
        if row and len(row) != width:
            raise ValueError(
                f"line {rows.line_num} must have {width} cells, as many as columns, got {len(row)}"
            )
        if row:
            yield row


def _features(header: Sequence[str], roles: Sequence[str]) -> list[int]:
    """The places of the columns without a role, if the columns are as they must be."""
    if "" in header:
        raise ValueError(
            f"line 1 must name every column, got none for column {header.index('') + 1} (pandas "
            "writes its index so: use to_csv(index=False))"
        )
    repeated = [column for i, column in enumerate(header) if column in header[:i]]
    if repeated:
        raise ValueError(f"line 1 must have every column once, got {repeated[0]!r} again")
    shown = ", ".join(header[:20]) + (f" and {len(header) - 20} more" if len(header) > 20 else "")
    for role in roles:
        if role not in header:
            raise ValueError(f"has no column {role!r}; those between its commas are: {shown}")
    features = [i for i, column in enumerate(header) if column not in roles]
    if not features:
        raise ValueError(f"must have a column of inputs too, got only {shown}")
    return features


def _not_a_number(
    line: int, header: Sequence[str], row: Sequence[str], features: Sequence[int]
) -> ValueError:
    for i in features:
        try:
            float(row[i])
        except ValueError:
            break
    got = (
        f"{row[i]!r}: all columns but label or target, client and test are inputs"
        if row[i].strip()
        else "an empty cell: fill it in or leave the row out"
    )
    return ValueError(f"line {line}, column {header[i]!r} must be a number, got {got}")


def _numbers_or_texts(texts: NDArray[np.str_]) -> NDArray[Any]:
    """Integers if all are written as such, so that 2 comes before 10."""
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(np.str_), texts) else texts


def _check_labels(column: str, names: Sequence[str], rows: int) -> None:
    """Refuses labels that look like the numbers of a regression: fractions that seldom repeat."""
    try:
        fractions = [name for name in names if not float(name).is_integer()]
    except (ValueError, OverflowError):  # texts, or inf
        return
    if fractions and 5 * len(names) > rows:
        raise ValueError(
            f"column {column!r} has {len(names)} different numbers in {rows} rows, such as "
            f"{fractions[0]}: give target={column} to predict numbers; classes must repeat"
        )


def _targets(column: str, texts: NDArray[np.str_], lines: Sequence[int]) -> NDArray[np.float64]:
    """The numbers of a column, each finite in float32."""
    for text, line in zip(texts, lines, strict=True):
        try:
            fits = abs(float(text)) <= LARGEST
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"line {line}, column {column!r} must be a finite number, as it is the target, got "
                f"{str(text)!r}: classes are given by label={column}"
            )
    return texts.astype(np.float64)
