"""What a part was made of: the call behind a value, for ``repr``, ``cite`` and the catalogue."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_NONE = inspect.Parameter.empty


LARGEST = 2**31 - 1
"""The largest whole number that parts and flags take."""


class Origin(NamedTuple):
    """The call that made a part.

    Attributes:
        factory: the function that was called.
        arguments: what it was given, by name.
    """

    factory: Callable[..., Any]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's name, ``delayed`` say."""
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
    """Decorates a function that makes a part, so that the part knows its origin.

    A part that is a NamedTuple or a dataclass keeps it in its field ``origin``, a function in an
    attribute of that name. A part that is itself a plain function needs no decorator: it is its own
    origin. Whole numbers beyond ``LARGEST`` are rejected before the function sees them.

    >>> from fedjax_sim.plan import schedule
    >>> schedule.delayed(10, rounds=5)
    delayed(10, 5)
    """
    parameters = inspect.signature(factory).parameters
    whole = {name for name, p in parameters.items() if p.annotation in ("int", "int | None")}

    @functools.wraps(factory)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = (*zip(parameters, args, strict=False), *kwargs.items())
        for name, number in given:
            if name in whole and isinstance(number, int) and abs(number) > LARGEST:
                raise ValueError(f"{name} must be within ±{LARGEST}, got {str(number)[:20]}")
        value = factory(*args, **kwargs)  # first: its TypeError names the function, bind's does not
        bound = inspect.signature(factory).bind(*args, **kwargs)
        return with_origin(value, Origin(made, types.MappingProxyType(_flat(bound))))

    return made


def plain_sgd(method: _F) -> _F:
    """Marks a method with a momentum or gradient of its own; put it below ``@part``.

    The command then takes no momentum for its clients' SGD unless one is given.
    """
    method.plain_sgd = True  # type: ignore[attr-defined]
    return method


def with_origin(value: Any, origin: Origin) -> Any:
    """The part with another origin."""
    if isinstance(value, types.FunctionType):
        value.origin = origin  # type: ignore[attr-defined]
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, origin=origin)
    return value._replace(origin=origin)


def origin_of(value: Any) -> Origin | None:
    """The call that made a part; of a plain function the function itself, called with nothing."""
    found = getattr(value, "origin", None)
    if isinstance(found, Origin):
        return found
    return Origin(value, {}) if isinstance(value, types.FunctionType) else None


def origins(value: Any) -> Iterator[Origin]:
    """The origins of a part and of the parts in its arguments, the outer one first."""
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
    """Whether a module is not one of this package, Python's or an installed library's."""
    root = (module or "").partition(".")[0]
    if root == "fedjax_sim" or root in sys.stdlib_module_names:
        return False
    if root == "__main__":  # also where a library's program runs the user's code
        return True
    place = Path(getattr(sys.modules.get(module or ""), "__file__", None) or "")
    return not {"site-packages", "dist-packages"} & {*place.parts}


def shown(value: Any) -> str:
    """A part as the call that made it, in one line; of other values something short.

    >>> shown(len), shown([1.0, None])
    ('len', '[1.0, None]')
    """
    found = origin_of(value)
    if found is not None:
        if isinstance(value, types.FunctionType) and "origin" not in vars(value):
            return "<lambda>" if found.name == "<lambda>" else found.name
        return f"{found.name}({', '.join(written_arguments(found, shown))})"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        inside = ", ".join(map(shown, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if hasattr(value, "init") and hasattr(value, "update"):
        return "<optax>"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return f"<{type(value).__name__}>"


def written_arguments(origin: Origin, write: Callable[[Any], str]) -> Iterator[str]:
    """The settings as a caller would write them; those without a default by position."""
    parameters = inspect.signature(origin.factory).parameters
    for name, value in origin.settings.items():
        known = parameters.get(name)
        if known is not None and known.kind is known.VAR_POSITIONAL:
            yield from map(write, value)
        elif known is not None and known.kind is not known.KEYWORD_ONLY and known.default is _NONE:
            yield write(value)
        else:
            yield f"{name}={write(value)}"


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name; ``**settings`` are named like any other."""
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return flat


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
