"""A user's table in one .csv file."""

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
from fedjax_sim.data import categories
from fedjax_sim.data.cells import GAPS, is_number, read_number, read_numbers
from fedjax_sim.data.dataset import Dataset, from_arrays, random_share
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import EVERY_TEXT, FIFTH, check_parts, in_test, split_options
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
    """What a user says of a .csv file.

    Attributes:
        file: its path; ``.gz`` is decompressed.
        y: the column of the classes, or of the numbers that are to be learnt.
        numbers: whether they are numbers.
        client: the column of the natural clients; None for none.
        test: the share of each class that is the test set, or the column that says which rows are.
        classes: M, if the labels are the numbers 0 … M - 1; None: they are texts.
        sep: what separates the cells of a line.
        encoding: of the text.
        categorical: the columns that are one-hot encoded; ("all",) for each that has a text.
        missing: what is done about a row with a missing cell.
    """

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


class _Read(NamedTuple):
    """The rows of a file.

    Attributes:
        x: ``f64[n, F]``, NaN if missing.
        names: of the F columns of x.
        roles: the texts of the columns that are not inputs.
        lines: where each row ended.
        notes: what was converted or dropped.
    """

    x: NDArray[np.float64]
    names: list[str]
    roles: Mapping[str, NDArray[np.str_]]
    lines: Sequence[int]
    notes: list[str]


def parse_table(text: str) -> Table:
    """Returns what ``FILE,label=COLUMN[,client=COLUMN][,test=FRACTION or COLUMN]...`` means.

    ``target=COLUMN``, or ``label=COLUMN,task=regression``, is a column of numbers: regression.

    Args:
        text: as above; a file or column with a comma in its name cannot be given.

    Returns:
        The file and its columns; the test set is a fifth of each class unless ``test`` is given.

    Raises:
        ValueError: if the text is none of this form.

    Example:
        >>> parse_table("iris.csv,label=species,test=0.5")[1:5]
        ('species', False, None, 0.5)
    """
    file, given = split_options("csv", text, OPTIONS, FORM)
    label, target, task = (given.pop(key, None) for key in ("label", "target", "task"))
    if not file or bool(label) == bool(target):
        raise ValueError(
            f"csv: must have a file and label=COLUMN or target=COLUMN, got {text!r}; its form is "
            f"{FORM}"
        )
    fitting = ("classification", "regression") if label else ("regression",)
    if task not in (None, *fitting):
        column = "label" if label else "target"
        raise ValueError(f"csv: {column}= must be of task={' or '.join(fitting)}, got task={task}")
    numbers = bool(target) or task == "regression"
    if numbers and "classes" in given:
        raise ValueError(f"csv: classes= is for labels, got {text!r}")
    made = Table(Path(file).expanduser(), label or target, numbers, **given)
    named = [*made.roles, *(c for c in made.categorical if c != EVERY_TEXT)]
    if len({*named}) < len(named):
        raise ValueError(f"csv: must have another column for each of its roles, got {text!r}")
    return made


def table(name: str, of: Table) -> Dataset:
    """Reads a table with a label or target from a .csv file with a line of names.

    Args:
        name: of the data set.
        of: the file and its columns; all that have no role are inputs: numbers, true or false, or
            categories if ``of`` names them. A column of the test set says 0 or 1, false or true,
            train or test.

    Returns:
        Inputs ``f32[n, F]``, of which those that are not 0 and 1 alone are ``numeric``; the columns
        of categories come last. Classes and clients are numbered in the order of their texts, or of
        their numbers if all are integers; ``class_names`` are the labels. Nothing is cached.

    Raises:
        DataNotFoundError: if there is no such file.
        ValueError: if it is no such table; names column, line and what is allowed.
    """
    x, columns, texts, lines, notes = _read(existing(name, of.file), of)
    names: list[str] = []
    strata = np.zeros(len(x), np.int32)
    y: NDArray[Any]
    if of.numbers or of.classes is not None:
        y = _targets(of, texts[of.y], lines)
    else:
        labels, y = np.unique(categories.numbers_or_texts(texts[of.y]), return_inverse=True)
        names = [str(label) for label in labels]
        if len(names) < 2:
            raise ValueError(f"column {of.y!r} must have two classes or more, got {names[0]} alone")
        categories.check_labels(of.y, names, len(y))
    if not of.numbers:
        strata = y.astype(np.int32)
    if isinstance(of.test, str):
        test = in_test(of.test, texts[of.test], [f"line {line}" for line in lines])
        words = f"the test rows of {of.test!r}"
    else:
        test = random_share(strata, of.test)
        words = f"a fixed random {100 * of.test:g} %" + " of each class" * (not of.numbers)
    check_parts(test, of.test, f"; column {of.y!r} has {len(names)} classes" if names else "")
    numeric = ~(np.isin(x, (0, 1)) | np.isnan(x)).all(axis=0)
    x, filled = categories.fill_means(x, ~test, columns)
    return from_arrays(
        name,
        x,
        y,
        test=test,
        client=None if of.client is None else categories.numbers_or_texts(texts[of.client]),
        numeric=numeric,
        classes=of.classes,
        class_names=names,
        column_names=columns,
        task=regression() if of.numbers else None,
        test_set=words,
        notes=[*notes, *filled],
    )


@contextmanager
def _rows(file: Path, of: Table) -> Iterator[Any]:
    """Opens the file; its errors become ValueErrors that say where."""
    with open_text(file, of.encoding) as text:
        rows = csv.reader(text, delimiter=of.sep, strict=True, skipinitialspace=of.sep == " ")
        try:
            yield rows
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num} must be csv, got: {error}") from error
        except UnicodeDecodeError as error:
            wanted = "UTF-8" if of.encoding == "utf-8-sig" else of.encoding
            raise ValueError(
                f"must be a text in {wanted}, got: {error}; another is given by encoding=, such as "
                "encoding=latin-1"
            ) from error


def _read(file: Path, of: Table) -> _Read:
    categorical = of.categorical
    if EVERY_TEXT in categorical:
        with _rows(file, of) as rows:
            categorical = _with_texts(rows, of)
    with _rows(file, of) as rows:
        return _columns(rows, of, categorical)


def _with_texts(rows: Any, of: Table) -> tuple[str, ...]:
    """The inputs that have a cell that is not a number."""
    header, features = _header(rows, of)
    found: set[int] = set()
    for row in _full(rows, len(header)):
        found.update(i for i in features if i not in found and not is_number(row[i]))
    return tuple(header[i] for i in sorted(found))


def _columns(rows: Any, of: Table, categorical: Sequence[str]) -> _Read:
    header, features = _header(rows, of, categorical)
    texts: dict[str, list[str]] = {column: [] for column in (*of.roles, *categorical)}
    places = {column: header.index(column) for column in texts}
    features = [i for i in features if header[i] not in texts]
    numbers, lines, dropped, booleans = array("d"), array("q"), 0, set[int]()
    for row in _full(rows, len(header)):
        try:
            values = read_numbers(row, features, booleans)
        except ValueError:
            raise _not_a_number(rows.line_num, header, row, features) from None
        cells = [row[i].strip() for i in places.values()]
        if any(map(math.isnan, values)) or not all(cells):
            if of.missing == "drop":
                dropped += 1
                continue
            _check_absent(rows.line_num, row, header, [*features, *places.values()], of)
        numbers.extend(values)
        for own, cell in zip(texts.values(), cells, strict=True):
            own.append(intern(cell))  # of millions of cells only thousands differ
        lines.append(rows.line_num)
    if not lines:
        rest = f", each of the {dropped} lacks a cell" if dropped else ""
        raise ValueError(f"must have rows below its line of column names, got none{rest}")
    x = np.frombuffer(numbers).reshape(len(lines), -1)
    bad = np.argwhere(np.abs(x) > LARGEST)
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"line {lines[row]}, column {header[features[column]]!r} must be a finite number in "
            f"float32, got {x[row, column]:g}: fill it in or leave the row out"
        )
    names, notes = [header[i] for i in features], []
    if dropped:
        notes.append(f"{dropped} of {dropped + len(lines)} rows lack a cell and are left out.")
    if booleans:
        told = shortened([header[i] for i in sorted(booleans)])
        notes.append(f"True and false are read as 1 and 0: {told}.")
    for cells in texts.values():
        check_memory(4 * len(cells) * max(map(len, cells)))  # NumPy keeps texts as long as one
    arrays = {column: np.array(cells) for column, cells in texts.items()}
    if categorical:
        block, more, made = categories.one_hot({column: arrays[column] for column in categorical})
        x, names, notes = np.concatenate([x, block], axis=1), names + more, notes + made
    return _Read(x, names, {role: arrays[role] for role in of.roles}, lines, notes)


def _check_absent(
    line: int, row: Sequence[str], header: Sequence[str], places: Sequence[int], of: Table
) -> None:
    """Raises ValueError unless the training mean takes the place of all missing cells."""
    for i in places:
        column, cell, role = header[i], row[i].strip(), header[i] in of.roles
        gap = cell.lower() in GAPS if column not in (*of.roles, *of.categorical) else not cell
        if gap and (role or of.missing == "refuse"):
            got = repr(cell) if cell else "an empty cell"
            ways = "missing=drop leaves such rows out"
            ways += "" if role else ", missing=mean fills in the training mean"
            raise ValueError(f"line {line}, column {column!r} must have a value, got {got}: {ways}")


def _full(rows: Any, width: int) -> Iterator[list[str]]:
    """The rows that are not empty, each with all its cells."""
    for row in rows:
        if row and len(row) != width:
            raise ValueError(
                f"line {rows.line_num} must have {width} cells, as many as columns, got {len(row)}"
            )
        if row:
            yield row


def _header(rows: Any, of: Table, categorical: Sequence[str] = ()) -> tuple[list[str], list[int]]:
    """The names of the columns, and the places of the inputs."""
    header = [cell.strip() for cell in next(rows, [])]
    if "" in header:
        raise ValueError(
            f"line 1 must name every column, got none for column {header.index('') + 1} (pandas "
            "writes its index so: use to_csv(index=False))"
        )
    repeated = [column for i, column in enumerate(header) if column in header[:i]]
    if repeated:
        raise ValueError(f"line 1 must have every column once, got {repeated[0]!r} again")
    for column in (*of.roles, *categorical):
        if column not in header:
            known = shortened(header, 20) + _apart(header)
            raise ValueError(f"has no column {column!r}; columns: {known}")
    features = [i for i, column in enumerate(header) if column not in of.roles]
    if not features:
        raise ValueError(f"must have a column of inputs too, got only {shortened(header, 20)}")
    return header, features


def _apart(header: Sequence[str]) -> str:
    """Advice, if another character than the comma separates the names."""
    found = [s for s in (";", "\t", "|", ",") if len(header) == 1 and s in header[0]]
    names = {"\t": "sep=tab", ",": "no sep="}
    way = names.get(found[0], f"sep={found[0]}") if found else ""
    return f"; {found[0]!r} seems to separate them: give {way}" if found else ""


def _not_a_number(
    line: int, header: Sequence[str], row: Sequence[str], features: Sequence[int]
) -> ValueError:
    i = next(i for i in features if not is_number(row[i]))
    return ValueError(
        f"line {line}, column {header[i]!r} must be a number, got {row[i]!r}: "
        f"categorical={header[i]} makes inputs of its categories, categorical=all those of all "
        "columns with texts"
    )


def _targets(of: Table, texts: NDArray[np.str_], lines: Sequence[int]) -> NDArray[np.float64]:
    """The numbers of the label or target, each finite in float32."""
    y = []
    for text, line in zip(texts, lines, strict=True):
        try:
            value = read_number(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= LARGEST:
            other = f"label={of.y}" + " without classes=" * (not of.numbers)
            raise ValueError(
                f"line {line}, column {of.y!r} must be a finite number, as it is the "
                f"{'target' if of.numbers else 'class by classes='}, got {str(text)!r}: classes by "
                f"name are given by {other}"
            )
        y.append(value)
    return np.array(y)
