"""Flags of the commands, made from the signature and the docstring of a function."""

import argparse
import contextlib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Literal, NoReturn

import jax

from fedjax_sim.base.ranges import LARGEST
from fedjax_sim.base.signatures import keywords
from fedjax_sim.base.spelling import hint

PLAIN = (int, float, bool, str)


class _Lines(argparse.HelpFormatter):
    """A help formatter that keeps the line breaks of a flag's help."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        split = super()._split_lines
        return [part for line in text.split("\n") for part in split(line, width)]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors of one line, without the usage."""

    def __init__(self, **settings: Any) -> None:
        """Makes a parser without abbreviated flags."""
        import fedjax_sim  # here: it imports this module

        super().__init__(allow_abbrev=False, formatter_class=_Lines, **settings)
        self.add_argument(
            "--version",
            action="version",
            version=f"fedjax_sim {fedjax_sim.__version__}, JAX {jax.__version__}",
            help="print the version and exit",
        )

    def error(self, message: str) -> NoReturn:
        """Raises the error; for an unknown flag, with suggestions."""
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        end = hint(unknown[1], self._option_string_actions) if unknown else ""
        raise ValueError(message.removeprefix("argument ") + end)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Reads a value; a ValueError of its reader becomes the message."""
        reader: Any = action.type or str
        try:
            return reader(arg_string)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentError(action, str(error)) from error


def flag(name: str) -> str:
    """Returns the flag of a parameter.

    >>> flag("redistribution_rounds")
    '--redistribution-rounds'
    """
    return "--" + name.replace("_", "-")


def flagged(error: Exception, names: Iterable[str]) -> ValueError:
    """Returns the error, with the parameter at its start replaced by its flag.

    >>> flagged(ValueError("clients must be at least 1, got 0"), ["clients"])
    ValueError('--clients must be at least 1, got 0')
    """
    message = str(error)
    subject = next((name for name in names if re.match(rf"{name}\b", message)), None)
    return ValueError(message if subject is None else flag(subject) + message[len(subject) :])


def offering(error: Exception, known: Iterable[str]) -> ValueError:
    """Returns an error about an unknown name with the known ones, unless it has a suggestion.

    >>> offering(ValueError("unknown sink 'x'"), ["tensorboard", "wandb"])
    ValueError("unknown sink 'x'; use one of tensorboard, wandb")
    """
    message = str(error)
    return ValueError(
        message if message.endswith("?") else f"{message}; use one of {', '.join(known)}"
    )


@contextlib.contextmanager
def flagging(*names: str) -> Iterator[None]:
    """Converts a ValueError of the block by :func:`flagged`."""
    try:
        yield
    except ValueError as error:
        raise flagged(error, names) from error


@contextlib.contextmanager
def naming(where: str, kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Prefixes the message of an error of the block with a flag, a file or a method.

    >>> with naming("--lora 4"):
    ...     raise ValueError("no matrix to adapt")
    Traceback (most recent call last):
    ValueError: --lora 4: no matrix to adapt
    """
    try:
        yield
    except kinds as error:
        raise ValueError(f"{where}: {error}") from error


def options(
    function: Callable[..., Any], without: Container[str] = ()
) -> dict[str, inspect.Parameter]:
    """Returns the keyword parameters of a function that can be flags.

    >>> def mine(local, *, clients_per_round: int, rate: float, hook: object = None): ...
    >>> list(options(mine, without=["clients_per_round"]))
    ['rate']
    """
    found = {}
    for name, parameter in keywords(function, without).items():
        try:
            reader(parameter.annotation)
        except TypeError as error:
            if parameter.default is parameter.empty:
                raise ValueError(f"{name}: {error}") from error
        else:
            found[name] = parameter
    return found


def reader(hint: Any, **limits: float) -> Callable[[str], Any]:
    """Returns a function that reads a value of a type, see :func:`number`; readers are cached.

    >>> reader(int | None)("7"), reader(Literal[1, 2])("2"), reader(bool)("False")
    (7, 2, False)
    """
    hint = _member(hint)
    if choices := choices_of(hint):
        return _choice(*choices)
    if hint in (int, float):
        return number(hint, **limits)
    if hint in PLAIN:
        return _choice(True, False) if hint is bool else str
    raise TypeError(f"a parameter of type {hint} cannot be a flag: use int, float, bool or Literal")


def choices_of(hint: Any) -> tuple[Any, ...]:
    """Returns the choices of a parameter; () if it has none."""
    hint = _member(hint)
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def _member(hint: Any) -> Any:
    """Returns the type in a union that a command line can set; None is for an absent flag."""
    members = [h for h in typing.get_args(hint) if h in PLAIN or typing.get_origin(h) is Literal]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return members[0] if union and len(members) == 1 else hint


def kind(hint: Any, **limits: float) -> dict[str, Any]:
    """Returns argparse's keywords for a parameter of a type, see :func:`reader`."""
    read, hint = reader(hint, **limits), _member(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    choices = ",".join(map(str, choices_of(hint)))
    return {"type": read, "metavar": f"{{{choices}}}" if choices else "N" if hint is int else "X"}


@functools.lru_cache(maxsize=None, typed=True)  # 1 is not True
def _choice(*values: Any) -> Callable[[str], Any]:
    known = {str(value): value for value in values}
    wanted = f"one of {', '.join(known)}" if len(known) > 2 else " or ".join(known)

    def read(text: str) -> Any:
        if text not in known:
            raise ValueError(f"must be {wanted}, got {text!r}")
        return known[text]

    return read


def documented(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the entries of a docstring's "Args", by name.

    >>> from fedjax_sim.algorithms import robust
    >>> documented(robust)["aggregator"]
    'the rule, see fedjax_sim.aggregators'
    """
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(function) or "", re.M | re.S)
    entries = re.split(r"^ {2,4}(\w+): ", section[1], flags=re.M)[1:] if section else []
    pairs = zip(entries[::2], entries[1::2], strict=True)
    texts = {name: re.sub(r":\w+:(?=`)|`", "", " ".join(text.split())) for name, text in pairs}
    return {name: t.rstrip(".").replace("%", "%%") for name, t in texts.items()}  # for argparse


@functools.cache  # equal limits are one reader
def number(
    of: type[int] | type[float],
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> Callable[[str], float]:
    """Returns a function that reads a finite number within limits; whole ones fit in an int32.

    >>> number(int, at_least=1)("0")
    Traceback (most recent call last):
    ValueError: must be a whole number at least 1, got '0'
    """
    limits = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    within = " and ".join(f"{word} {x:g}" for word, x in limits.items() if math.isfinite(x))
    wanted = f"{'a whole' if of is int else 'a'} number {within or 'that is finite'}"

    least = max(at_least, -LARGEST) if of is int else at_least

    def convert(text: str) -> float:
        try:
            value = of(text)
        except ValueError:
            value = math.nan
        if of is int and value > LARGEST:
            raise ValueError(f"must be at most {LARGEST}, got {text[:20]}")
        if least <= value <= at_most and above < value < below:
            return value
        raise ValueError(f"must be {wanted}, got {text[:20]!r}")

    return convert
