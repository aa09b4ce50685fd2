"""The parts of a named method, read from an algorithm that it makes."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.base import LocalUpdate, origin_of, shown, written_arguments
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli.flags import documented, flag
from fedjax_sim.cli.making import make
from fedjax_sim.cli.parts import MODULES, parts_in
from fedjax_sim.client.local import local_sgd
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.round import Algorithm


class Part(NamedTuple):
    """A part in a method's composition: its role in ``compose``, and the code that makes it."""

    role: str
    code: str
    meaning: str  # the first line of its docstring
    option: str = ""  # the flag and value that bring it in


def own_parts(name: str) -> dict[str, list[Part]]:
    """Returns the parts of a method by role, without roles whose parts are FedAvg's."""
    by_role: dict[str, list[Part]] = {}
    for part in parts_of(ALGORITHMS[name]):
        by_role.setdefault(part.role, []).append(part)
    plain = [] if name == "fedavg" else parts_of(ALGORITHMS["fedavg"])
    return {
        role: parts
        for role, parts in by_role.items()
        if parts != [part for part in plain if part.role == role and not part.option]
    }


def parts_of(method: Callable[..., Algorithm]) -> list[Part]:
    """Returns the parts of a method: of its defaults, then those that single options bring in."""
    rows = list(_rows(make(method)))
    known = {(row.role, row.code.partition("(")[0]) for row in rows}
    for name, parameter in keywords(method, without=COMMON).items():
        for value in _others(parameter):
            try:
                changed = make(method, **{name: value})
            except (ValueError, TypeError):  # this value needs another option beside it
                continue
            for row in _rows(changed):
                named = row.role, row.code.partition("(")[0]
                if named not in known:
                    known.add(named)
                    rows.append(row._replace(option=_given(name, value)))
    return rows


def _rows(algorithm: Algorithm) -> Iterator[Part]:
    parts = algorithm.parts.by_role()
    del parts["execution"], parts["clients_per_round"]
    for role, part in parts.items():
        if isinstance(part, LocalUpdate):
            yield from _local(part)
        elif isinstance(part, Mapping):
            yield from (_row(role, one) for one in part.values())
        elif type(part) is tuple:
            yield from (_row(role, one) for one in part)
        elif part is not None:
            yield _row(role, part)


def _row(role: str, part: Any) -> Part:
    origin = origin_of(part)
    assert origin is not None, (role, part)
    return Part(role, written(part), _summary(origin.factory))


def _local(local: LocalUpdate) -> Iterator[Part]:
    """Yields a wrapper of the user's local update, or each setting that the method changes."""
    settings = _changed(local)
    if settings is None:
        yield _row("local", local)
        return
    for name, value in settings.items():
        code = f"local.change({name}={written(value)})"
        first = origin_of(value[0] if type(value) is tuple else value)
        meaning = documented(local_sgd)[name] if first is None else _summary(first.factory)
        yield Part("local", code, meaning)


def _changed(local: LocalUpdate) -> dict[str, Any] | None:
    """Returns the settings that a method gave a local update; None for a wrapper."""
    if not isinstance(local, local_sgd):
        return None
    users = {"optimizer", "batch_size", "epochs"}
    if _is_plain(local.objective):
        users.add("objective")
    return {name: value for name, value in local.origin.settings.items() if name not in users}


def _is_plain(value: Any) -> bool:
    """Returns whether a value is the user's objective, without additions of a method."""
    return isinstance(value, empirical_risk) and value.adjust is None and value.term is None


def written(value: Any) -> str:
    """Returns a part as code; ``local``, ``objective`` are the user's, ``<optax>`` is optax's."""
    if isinstance(value, LocalUpdate):
        settings = _changed(value)
        if settings is not None:
            told = ", ".join(f"{name}={written(v)}" for name, v in settings.items())
            return f"local.change({told})" if told else "local"
    origin = origin_of(value)
    if origin is None:
        if type(value) in (list, tuple):
            return f"({', '.join(map(written, value))}{',' * (len(value) == 1)})"
        return shown(value)
    if _is_plain(value):
        return "objective"
    name = _public_names().get(origin.factory, origin.name)
    if isinstance(value, types.FunctionType) and "origin" not in vars(value):
        return name
    return f"{name}({', '.join(written_arguments(origin, written))})"


@functools.cache
def _public_names() -> dict[Any, str]:
    """Returns where users find each part, by the part."""
    return {value: f"{module}.{name}" for module in MODULES for name, value in parts_in(module)}


def _others(parameter: inspect.Parameter) -> list[Any]:
    """Values of an option, beside its default, that may bring in other parts."""
    hint = parameter.annotation
    members = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else (hint,)
    values: list[Any] = []
    for member in members or (hint,):
        if typing.get_origin(member) is typing.Literal:
            values += typing.get_args(member)
        elif member is bool:
            values += [True, False]
        elif member in (int, float) and not parameter.default:  # None, 0: off
            values += [member(1), 0.5]
    return [value for value in values if value != parameter.default]


def _given(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {value}" if isinstance(value, str) else flag(name)


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
