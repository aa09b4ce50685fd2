"""Parsing of the texts ``KIND:PLACE,option=value`` that name a user's data."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.dataset import random_share
from fedjax_sim.data.targets import KINDS

IN_TEST = {"0": False, "1": True, "false": False, "true": True, "train": False, "test": True}
FIFTH = 0.2
SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
MISSING = ("refuse", "drop", "mean")
EVERY_TEXT = "all"


def share_or_name(text: str) -> float | str:
    """Returns a share if the text is a number, else the text as the name of a column or split."""
    try:
        share = float(text)
    except ValueError:
        return text
    if not 0 < share < 1:
        raise ValueError(f"test must be a share between 0 and 1, or a name, got {text}")
    return share


def _classes(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"classes must be an integer of at least 2, got {text!r}")
    return int(text)


def one_of(option: str, known: Sequence[str]) -> Callable[[str], str]:
    """Returns a parser for an option with a fixed set of values."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {text!r}")
        return text

    return parse


def _separator(text: str) -> str:
    found = SEPARATORS.get(text, text)
    if len(found) != 1:
        raise ValueError(f"sep must be one character, tab or space, got {text!r}")
    return found


def _encoding(text: str) -> str:
    try:
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(
            f"encoding must be one that Python knows, such as latin-1, got {text!r}"
        ) from None
    return "utf-8-sig" if name == "utf-8" else name


def size_of(text: str) -> tuple[int, int]:
    """Returns the width and height of ``32`` or ``32x24``."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ValueError(f"size must be PIXELS or WIDTHxHEIGHT, such as 32 or 32x24, got {text!r}")
    return int(sides[0]), int(sides[-1])


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "test": share_or_name,
    "classes": _classes,
    "task": one_of("task", KINDS),
    "sep": _separator,
    "encoding": _encoding,
    "categorical": lambda text: tuple(text.split("+")),
    "missing": one_of("missing", MISSING),
    "size": size_of,
}
"""Parsers of the options that are not names, the same for every kind of data."""


def split_options(
    kind: str, text: str, known: Sequence[str], form: str
) -> tuple[str, dict[str, Any]]:
    """Splits ``PLACE,option=value`` into the place and the values of the options.

    ``known`` are the allowed options; ``kind`` and ``form`` are for messages.
    """
    place, *rest = text.split(",")
    given: dict[str, Any] = {}
    for option in rest:
        key, _, value = option.partition("=")
        if key not in known or not value.strip() or key in given:
            wanted = ", ".join(f"{key}=" for key in known)
            raise ValueError(
                f"{kind}: takes {wanted} once each, got {option!r}; its form is {form}"
            )
        try:
            given[key] = PARSERS.get(key, str)(value.strip())
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
    return place, given


def check_roles(kind: str, roles: Mapping[str, Any]) -> None:
    """Raises ValueError for a column with two roles, or for both a label and a target."""
    columns = [column for column in roles.values() if isinstance(column, str)]
    twice = [column for column in columns if columns.count(column) > 1]
    if twice or (roles.get("label") and roles.get("target")):
        given = ", ".join(f"{role}={column}" for role, column in roles.items() if column)
        raise ValueError(
            f"{kind}: each role must have its own column, and label or target be given, got {given}"
        )


def choose_test(
    test: float | str,
    strata: NDArray[Any],
    flags: NDArray[np.str_] | None,
    rows: Sequence[str],
    hint: str,
) -> tuple[NDArray[np.bool_], str]:
    """Chooses test rows by a column of flags, or draws a share ``test`` of each class.

    ``flags`` are the texts of the column ``test``, None for a share; ``strata`` the class of each
    row, all 0 without classes; ``rows`` and ``hint`` are for messages. Returns ``bool[n]``, and a
    description of the test set.
    """
    if flags is None:
        in_test = random_share(strata, float(test))
        words = f"a fixed random {100 * float(test):g} %" + " of each class" * bool(strata.any())
    else:
        for text, row in zip(flags, rows, strict=True):
            if text.lower() not in IN_TEST:
                raise ValueError(
                    f"{row}, column {test!r} must be one of {', '.join(IN_TEST)}, got {str(text)!r}"
                )
        in_test = np.array([IN_TEST[text.lower()] for text in flags])
        words = f"the test rows of {test!r}"
    check_parts(in_test, f"test={test}", hint)
    return in_test, words


def check_parts(test: NDArray[np.bool_], test_set: str, hint: str) -> None:
    """Raises ValueError if the test set has no rows or all rows."""
    if test.all() or not test.any():
        raise ValueError(
            f"{test_set} must leave training and test rows, got {test.sum()} of {len(test)} rows "
            f"for the test{hint}"
        )
