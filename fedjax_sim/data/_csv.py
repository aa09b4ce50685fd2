"""Tables in .csv files."""

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.base.files import open_text
from fedjax_sim.data._table import check_columns, from_table
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import EVERY_TEXT, FIFTH, check_roles, split_options

FORM = (
    "csv:FILE,label=COLUMN or target=COLUMN[,client=COLUMN][,test=FRACTION or COLUMN]"
    "[,classes=M][,sep=CHARACTER][,encoding=NAME][,categorical=COLUMN+COLUMN or all]"
    "[,missing=refuse, drop or mean]"
)
ROLES = ("label", "target", "client", "test")
OPTIONS = (*ROLES, "classes", "task", "sep", "encoding", "categorical", "missing")
GAPS = [
    *("", "?", "NA", "na", "N/A", "n/a", "<NA>", "nan", "NaN", "NAN", "-nan"),
    *("null", "NULL", "none", "None", "NONE"),
]
"""Markers of a missing number."""


def parse_table(text: str) -> tuple[Path, dict[str, Any]]:
    """Parses ``FILE,label=COLUMN[,client=COLUMN]...``, or raises ValueError."""
    file, options = split_options("csv", text, OPTIONS, FORM)
    label, task = options.get("label"), options.pop("task", None)
    if not file or bool(label) == bool(options.get("target")):
        raise ValueError(
            f"csv: must have a file and label=COLUMN or target=COLUMN, got {text!r}; its form is "
            f"{FORM}"
        )
    check_roles("csv", {key: value for key, value in options.items() if key in ROLES})
    allowed = ("classification", "regression") if label else ("regression",)
    if task not in (None, *allowed):
        column = "label" if label else "target"
        raise ValueError(f"csv: {column}= must be of task={' or '.join(allowed)}, got task={task}")
    if task == "regression" and label:
        options["target"] = options.pop("label")
    if "target" in options and "classes" in options:
        raise ValueError(f"csv: classes= is for labels, got {text!r}")
    return Path(file).expanduser(), options


def load_table(
    name: str, file: Path, *, sep: str = ",", encoding: str = "utf-8-sig", **options: Any
) -> Dataset:
    """Loads a .csv file with a line of column names, see :func:`fedjax_sim.data.load_dataset`.

    Columns without a role are inputs ``f32[n, F]``, of which categories come last. Classes and
    clients are numbered in the order of their texts, or of their numbers if all are integers.
    """
    categorical = [c for c in options.get("categorical", ()) if c != EVERY_TEXT]
    roles = [options[key] for key in ROLES if isinstance(options.get(key), str)]
    try:
        frame = _read(existing(name, file), sep, encoding, roles, categorical)
    except UnicodeDecodeError as error:
        wanted = "UTF-8" if encoding == "utf-8-sig" else encoding
        raise ValueError(
            f"must be text in {wanted}, got: {error}; use encoding= for another encoding, such as "
            "encoding=latin-1"
        ) from error
    return from_table(name, frame, **{"test": FIFTH} | options)


def _read(
    file: Path, sep: str, encoding: str, roles: Sequence[str], categorical: Sequence[str]
) -> Any:
    """Reads the frame: columns with a role and categories are texts; its index is the line."""
    import pandas as pd

    with open_text(file, encoding) as text:
        rows = csv.reader(text, delimiter=sep, skipinitialspace=True)
        header = [cell.strip() for cell in next(rows, [])]
    if "" in header:
        raise ValueError(
            f"line 1 must name every column, got none for column {header.index('') + 1} (if pandas "
            "wrote its index, use to_csv(index=False))"
        )
    repeated = [column for i, column in enumerate(header) if column in header[:i]]
    if repeated:
        raise ValueError(f"line 1 must have every column once, got {repeated[0]!r} again")
    check_columns(header, [*roles, *categorical], _separator_advice(header))
    texts = {*roles, *categorical}
    with open_text(file, encoding) as text, warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            frame = pd.read_csv(
                text,
                sep=sep,
                header=0,
                names=header,
                index_col=False,
                skipinitialspace=True,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values={column: [""] if column in texts else GAPS for column in header},
                dtype=dict.fromkeys(texts, str),
                low_memory=False,
            )
        except UnicodeDecodeError:
            raise
        except pd.errors.ParserWarning as error:
            raise ValueError(
                f"must have {len(header)} cells in every row, as many as columns, got more"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"must be csv with {len(header)} columns, got: {str(error).strip()}"
            ) from error
    frame.index = pd.RangeIndex(2, len(frame) + 2, name="line")
    frame = frame.dropna(how="all")
    for column in frame.select_dtypes(["object", "string"]):
        frame[column] = frame[column].map(
            lambda cell: cell.strip() if isinstance(cell, str) else cell
        )
    return frame


def _separator_advice(header: Sequence[str]) -> str:
    """Returns advice if another character than the given one seems to separate the names."""
    names = {";": "sep=;", "\t": "sep=tab", "|": "sep=|", ",": "no sep="}
    found = [s for s in names if len(header) == 1 and s in header[0]]
    return f"; {found[0]!r} seems to separate them: use {names[found[0]]}" if found else ""
