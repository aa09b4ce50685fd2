"""Values of one kind by name: the package's own, and the ones that users register."""

from __future__ import annotations

import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

from fedjax_sim.base.signatures import returned
from fedjax_sim.base.spelling import hint, plain

T = TypeVar("T")
V = TypeVar("V")

_HERE = Path(__file__).parents[1]

_TRUSTED: ContextVar[Collection[str] | None] = ContextVar("trusted", default=None)
"""The modules that names may import; None for any."""


imported: dict[str, None] = {}
"""The modules that names have imported, in order, for a line that says how to go on."""


@contextmanager
def trusting(modules: Collection[str]) -> Iterator[None]:
    """Limits the imports of all registries while names from a file are resolved.

    Args:
        modules: the modules, and packages, that ``package.module:attribute`` may import.

    Example:
        >>> rules = Registry("rule", wanted="a float", fits=callable, makes=lambda: (float,))
        >>> with trusting(["math"]):
        ...     rules.resolve("os:system")
        Traceback (most recent call last):
        fedjax_sim.base.registry.UntrustedError: 'os:system' runs code of the module os, and a \
file names it: add --trust os, or trust=['os'] in Python, if you trust that code
    """
    before = _TRUSTED.set(modules)
    try:
        yield
    finally:
        _TRUSTED.reset(before)


class Registry(Mapping[str, T]):
    """Values of one kind by name, open to users: the package's own and registered ones.

    Args:
        kind: the kind of value, for messages.
        wanted: the requirement on a value, for messages.
        fits: whether a value meets the requirement.
        makes: the types that such a value has or returns; messages name the first one.
        own: the package's own values.

    Attributes:
        kind: as above.
        wanted: as above.
        own: the names of the package's own values.

    Example:
        >>> from fedjax_sim.base.signatures import takes
        >>> rules = Registry(
        ...     "rule",
        ...     wanted="a function (x) -> float",
        ...     fits=lambda f: takes(f, 0),
        ...     makes=lambda: (float,),
        ... )
        >>> @rules.register
        ... def halve(x):
        ...     return x / 2
        >>> rules["halve"](3)
        1.5
        >>> rules.resolve("math:sqrt")
        Traceback (most recent call last):
        ValueError: math:sqrt is not a declared rule: write its return type, -> float, or \
@RULES.register above it
        >>> rules.resolve("have")
        Traceback (most recent call last):
        fedjax_sim.base.registry.UnknownNameError: unknown rule 'have'; did you mean halve?
    """

    def __init__(
        self,
        kind: str,
        *,
        wanted: str,
        fits: Callable[[Any], bool],
        makes: Callable[[], tuple[type, ...]],
        own: Mapping[str, T] = MappingProxyType({}),
    ) -> None:
        self.kind, self.wanted = kind, wanted
        self._fits, self._makes = fits, makes
        self._values: dict[str, T] = dict(own)
        self.own = frozenset(own)

    def __repr__(self) -> str:
        return f"<registry of kind {self.kind!r}: {', '.join(self._values)}>"

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise KeyError(self._miss(name))
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def is_foreign(self, name: str) -> bool:
        """Whether a value was imported or registered by the user."""
        return ":" in name or (name in self._values and name not in self.own)

    @overload
    def register(self, name: str, value: V, /) -> V: ...
    @overload
    def register(self, value: V, /) -> V: ...
    def register(self, name: Any, value: Any = None, /) -> Any:
        """Adds a value: ``@register`` above a function, or ``register("name", value)``.

        Args:
            name: the name; or the value itself, to register it as its ``__name__``.
            value: the value.

        Returns:
            The value.

        Raises:
            ValueError: if the name is taken or invalid, or the value is of another kind. A function
              that is defined again, as by running a notebook cell twice, is replaced.
        """
        if value is not None:
            return self._add(name, value)
        if not hasattr(name, "__name__"):
            raise ValueError(f"name must be given for what has no __name__, got {_described(name)}")
        return self._add(name.__name__, name)

    def resolve(self, text: str) -> tuple[str, T]:
        """Resolves a name or an import path to a value.

        Args:
            text: a name, in any case and with dashes or underscores; or
              ``package.module:attribute``, which is imported.

        Returns:
            The name, or the text if it was imported, and the value.

        Raises:
            UnknownNameError: if the name is unknown; the message suggests similar names.
            UntrustedError: if a file names it, and the caller does not trust its module.
            ValueError: if it cannot be imported, is of another kind, or is not declared to be of
              this one, by its return type or by ``register``.
        """
        module, _, attribute = text.partition(":")
        if module and attribute:
            return text, self._imported(text, module, attribute)
        alike = (name for name in self._values if plain(name) == plain(text))
        name = text if text in self._values else next(alike, None)
        if name is None:
            raise UnknownNameError(self._miss(text))
        return name, self._values[name]

    def _add(self, name: str, value: Any) -> Any:
        if not re.fullmatch(r"\w[\w.-]*", name) or name == "none":
            raise ValueError(
                f"name must be letters, digits, '_', '-' or '.', and not 'none', got {name!r}"
            )
        taken = self._values.get(name)
        if taken is not None and (name in self.own or _place(taken) != _place(value)):
            raise ValueError(f"the {self.kind} {name!r} is there already; choose another name")
        self._check(name, value)
        self._values[name] = value
        return value

    def _check(self, name: str, value: Any) -> None:
        if not self._fits(value):
            raise ValueError(f"{name} must be {self.wanted}, got {_described(value)}")

    def _imported(self, text: str, module: str, attribute: str) -> T:
        trusted = _TRUSTED.get()
        if trusted is not None and not any(f"{module}.".startswith(f"{t}.") for t in trusted):
            raise UntrustedError(
                f"{text!r} runs code of the module {module}, and a file names it: add --trust "
                f"{module}, or trust=[{module!r}] in Python, if you trust that code"
            )
        try:
            value: Any = importlib.import_module(module)
            for part in attribute.split("."):
                value = getattr(value, part)
        except Exception as error:  # a module may raise anything
            raise ValueError(f"{text}: {error_text(error)}") from error
        self._check(text, value)
        if not self._is_declared(value):
            raise ValueError(
                f"{text} is not a declared {self.kind}: write its return type, "
                f"-> {self._makes()[0].__name__}, or @{self.kind.replace(' ', '').upper()}S"
                ".register above it"
            )
        imported[module] = None
        return value

    def _is_declared(self, value: Any) -> bool:
        """Whether a value is of this kind, returns one, or was registered as one."""
        makes = self._makes()
        if isinstance(value, makes) or any(value is known for known in self._values.values()):
            return True
        made = value if isinstance(value, type) else returned(value)
        return isinstance(made, type) and issubclass(made, makes)

    def _miss(self, text: str) -> str:
        return f"unknown {self.kind} {text!r}{hint(text, self._values)}"


class UnknownNameError(ValueError):
    """A name that a registry does not have."""


class UntrustedError(ValueError):
    """A name in a file that would run code which the caller does not trust."""


def error_text(error: Exception) -> str:
    """Returns a user's exception in words, with the line of the user's code that raised it.

    >>> error_text(ZeroDivisionError("division by zero")), error_text(ValueError("x must be 1"))
    ('ZeroDivisionError: division by zero', 'x must be 1')
    """
    others = [_HERE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(place) for place in others)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    # What a ValueError says is made to be read by itself.
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"


def _place(value: Any) -> tuple[Any, Any] | int:
    """Returns the module and name of a function; for other values, their identity."""
    name = getattr(value, "__qualname__", None)
    return id(value) if name is None else (getattr(value, "__module__", None), name)


def _described(value: Any) -> str:
    try:
        return f"{value.__name__}{inspect.signature(value)}"
    except (AttributeError, TypeError, ValueError):
        return f"{type(value).__name__}"
