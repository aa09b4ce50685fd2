"""Parts of algorithms: frozen dataclasses that print as the call that makes them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
)

import numpy as np
import optax

from fedjax_sim.base import ranges
from fedjax_sim.base.words import as_given

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_EMPTY = inspect.Parameter.empty


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class Part:
    """A component of an algorithm.

    Every subclass is a frozen dataclass. Its fields are its settings: it prints as the call that
    makes it, compares and hashes by its settings, and can be pickled and cited. A class that is
    called like a function has a function's name, so that the text of a part is Python.

    >>> from fedjax_sim.plan import flight
    >>> flight.delayed(rounds=5)
    delayed(5)
    >>> flight.delayed(rounds=5) == flight.delayed(5)
    True
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes a frozen dataclass of every subclass."""
        super().__init_subclass__(**options)
        # A setting may have the name of a role's hook, which must not become its default.
        known = {*vars(cls), *getattr(cls, "__dataclass_fields__", ())}
        hidden = [n for n in inspect.get_annotations(cls) if n not in known and hasattr(cls, n)]
        for name in hidden:
            setattr(cls, name, dataclasses.field())
        # An ``__init__`` that is written by hand is also that of subclasses.
        cls._by_hand = cls._by_hand or "__init__" in vars(cls)
        dataclasses.dataclass(frozen=True, repr=False, eq=False, init=not cls._by_hand)(cls)
        for name in hidden:
            setattr(cls, name, _Setting(name))
        typed = {
            name: (annotation, vars(sys.modules.get(base.__module__, types)))
            for base in reversed(cls.__mro__)
            for name, annotation in inspect.get_annotations(base).items()
        }
        cls._limits = ranges.limits((field.name, *typed[field.name]) for field in _fields(cls))

    __match_args__: ClassVar[tuple[str, ...]] = ()  # the settings by position
    _limits: ClassVar[ranges.Limits] = {}
    _by_hand: ClassVar[bool] = False

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Rejects parts that are not called, and numbers out of range, see ``base.ranges``."""
        named = {} if cls._by_hand else dict(zip(cls.__match_args__, args, strict=False))
        ranges.check(cls._limits, named | settings)
        for name, value in (named | settings).items():
            if isinstance(value, type) and issubclass(value, Part):
                raise ValueError(f"{name} must be a part, got {as_given(value)}")
        return super().__new__(cls)

    @property
    def needs(self) -> tuple[Need, ...]:
        """The requirements of the part on other parts."""
        return ()

    @property
    def origin(self) -> Origin:
        """The call that makes the part."""
        return Origin(type(self), {f.name: getattr(self, f.name) for f in _fields(self)})

    def replace(self, **settings: Any) -> Self:
        """Returns the part with some of its settings replaced."""
        return dataclasses.replace(self, **settings)  # type: ignore[type-var]

    def __repr__(self) -> str:
        return shown(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(map(_same, _values(self), _values(other)))

    def __hash__(self) -> int:
        return hash((type(self), *map(_hashable, _values(self))))


class _Setting:
    """The class attribute of a setting without a default; its value is in the instance."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} has no {self._name}")


class Need(NamedTuple):
    """A requirement of one part on another.

    ``met`` tests the properties of the other part, never its name, so a user's part with the same
    properties fits too.

    Attributes:
        role: the role of the other part, as a keyword of ``compose``.
        what: the requirement in words: "the plain mean".
        met: whether the parts (:class:`fedjax_sim.round.Parts`) meet it.
        instead: what to write instead: "aggregator=mean".
    """

    role: str
    what: str
    met: Callable[[Any], bool]
    instead: str


class Origin(NamedTuple):
    """The call that makes a part.

    Attributes:
        factory: the class or function that is called.
        arguments: its arguments by name.
    """

    factory: Callable[..., Any]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the class or function, for example ``delayed``."""
        return self.factory.__name__

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that differ from the defaults."""
        parameters = inspect.signature(self.factory).parameters
        return {
            name: value
            for name, value in self.arguments.items()
            if name not in parameters or not _same(value, parameters[name].default)
        }


def part(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function whose result is not a ``Part``, to record its call.

    A dataclass keeps the call in its field ``origin``, a function in an attribute of that name. A
    part that is itself a plain function needs no decorator. Numbers out of range are rejected
    before the function is called.
    """
    parameters = inspect.signature(factory).parameters
    limits = ranges.limits(
        (name, p.annotation, getattr(factory, "__globals__", {})) for name, p in parameters.items()
    )
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    order = [name for name, p in parameters.items() if p.kind in positional]

    @functools.wraps(factory)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        named = dict(zip(order, args, strict=False)) | kwargs
        ranges.check(limits, named)
        value = factory(*args, **kwargs)  # first: its TypeError names the function, bind's does not
        bound = inspect.signature(factory).bind(*args, **kwargs)
        return with_origin(value, Origin(made, types.MappingProxyType(_flat(bound))))

    return made


def plain_sgd(method: _F) -> _F:
    """Marks a method with a momentum or gradient of its own; put it below ``@part``.

    The command then uses plain SGD at the clients unless a momentum is given.
    """
    method.plain_sgd = True  # type: ignore[attr-defined]
    return method


def with_origin(value: Any, origin: Origin) -> Any:
    """Returns the part with another origin."""
    if isinstance(value, types.FunctionType):
        value.origin = origin  # type: ignore[attr-defined]
        return value
    if isinstance(value, Part):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, origin=origin)
    return value._replace(origin=origin)


def origin_of(value: Any) -> Origin | None:
    """Returns the call that makes a part; for a plain function, the function without arguments."""
    found = getattr(value, "origin", None)
    if isinstance(found, Origin):
        return found
    return Origin(value, {}) if isinstance(value, types.FunctionType) else None


def origins(value: Any) -> Iterator[Origin]:
    """Yields the origins of a part and of the parts in its arguments, the outer one first."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from origins(item)
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for item in value:
            yield from origins(item)
    elif (found := origin_of(value)) is not None:
        yield found
        yield from origins(dict(found.arguments))


def is_users(module: str | None) -> bool:
    """Whether a module belongs to the user: not to this package, Python or an installed library."""
    root = (module or "").partition(".")[0]
    if root == "fedjax_sim" or root in sys.stdlib_module_names:
        return False
    if root == "__main__":  # also where a library's program runs the user's code
        return True
    place = Path(getattr(sys.modules.get(module or ""), "__file__", None) or "")
    return not {"site-packages", "dist-packages"} & {*place.parts}


def shown(value: Any) -> str:
    """Returns a part as the call that makes it, in one line; for other values, a short text.

    >>> shown(len), shown([1.0, None])
    ('len', '[1.0, None]')
    """
    value = _plain(value)
    found = origin_of(value)
    if found is not None:
        if isinstance(value, types.FunctionType) and "origin" not in vars(value):
            return "<lambda>" if found.name == "<lambda>" else found.name
        return f"{found.name}({', '.join(written_arguments(found, shown))})"
    if isinstance(value, optax.GradientTransformation):
        return "<optax>"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        inside = ", ".join(map(shown, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return f"<{type(value).__name__}>"


def check_kind(wanted: str, kind: type, part: Any) -> None:
    """Rejects a part of another kind, such as a class that was not called.

    >>> check_kind("server must be a", Part, Part)
    Traceback (most recent call last):
    ValueError: server must be a Part, got the class Part: use Part(...)
    """
    if not isinstance(part, kind):
        raise ValueError(f"{wanted} {kind.__name__}, got {as_given(part)}")


def written_arguments(origin: Origin, write: Callable[[Any], str]) -> Iterator[str]:
    """Yields the settings as a caller would write them; those without a default by position."""
    parameters = inspect.signature(origin.factory).parameters
    for name, value in origin.settings.items():
        known = parameters.get(name)
        if known is not None and known.kind is known.VAR_POSITIONAL:
            yield from map(write, value)
        elif known is not None and known.kind is not known.KEYWORD_ONLY and known.default is _EMPTY:
            yield write(value)
        else:
            yield f"{name}={write(value)}"


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns arguments by name; ``**settings`` are named like any other."""
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return flat


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    """Returns the fields that are settings; those by keyword alone last, as in a call."""
    return sorted((f for f in dataclasses.fields(value) if f.init), key=lambda f: bool(f.kw_only))


def _values(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in _fields(value)]


def _same(value: Any, other: Any) -> bool:
    """Whether two settings are equal; arrays only if they are the same array."""
    value, other = _plain(value), _plain(other)
    if value is other or hasattr(value, "shape"):
        return value is other
    return type(value) is type(other) and bool(value == other)


def _plain(value: Any) -> Any:
    """Returns Python's number for NumPy's."""
    return value.item() if isinstance(value, np.number) else value


def _hashable(value: Any) -> Any:
    value = _plain(value)
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value
