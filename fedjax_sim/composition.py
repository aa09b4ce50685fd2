"""The parts that a named method is composed of, read from its source for the catalogue."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fedjax_sim.flags import documented
from fedjax_sim.local import local_sgd

PARTS_OF_LOCAL = ("objective", "drift", "transforms")


class Part(NamedTuple):
    """A part in a method's composition.

    Attributes:
        role: the argument of ``compose`` that it is for; "local drift" and the like for what the
            local update is given.
        code: how it is made; ``...`` stands for a part that has a row of its own.
        meaning: the first line of its docstring.
        otherwise: whether an option chooses between it and the part before it.
    """

    role: str
    code: str
    meaning: str
    otherwise: bool = False


def parts_of(method: Callable[..., Any]) -> tuple[list[Part], Callable[..., Any] | None]:
    """The parts of the one ``compose`` in a method.

    Args:
        method: a function of :mod:`fedjax_sim.algorithms`.

    Returns:
        The parts in the order of the source, and None; or no parts, and the method that it calls
        instead.

    Raises:
        ValueError: if the method is not one composition.

    >>> from fedjax_sim.algorithms import fltrust
    >>> [part.code for part in parts_of(fltrust)[0]]
    ['selection.uniform()', 'schedule.every_round(clients_per_round)', 'screens.trust(local)']
    """
    reader = _Reader(method)
    calls = [
        (node, called)
        for node in ast.walk(reader.body)
        if isinstance(node, ast.Call)
        if (called := reader.function(node.func)) is not None
        if called.__name__ == "compose" or (_is_method(called) and called.__name__[0] != "_")
    ]
    if len(calls) != 1:
        raise ValueError(f"{method.__name__} must be one composition, it has {len(calls)}")
    ((call, called),) = calls
    if _is_method(called):
        return [], called
    given = [("local", call.args[0]), *((k.arg or "", k.value) for k in call.keywords)]
    return list(chain(*(reader.parts(value, role) for role, value in given))), None


class _Reader:
    """Finds the parts in a function's expressions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.scope = inspect.unwrap(function).__globals__
        self.own = inspect.unwrap(function).__code__.co_varnames
        (self.body,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(self.body, ast.FunctionDef)
        self.values = _assigned(self.body.body, {})

    def function(self, node: ast.AST) -> types.FunctionType | None:
        """The function of this package that a name stands for."""
        match node:
            case ast.Name(id=name) if name not in self.own:
                found = self.scope.get(name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module not in self.own:
                found = getattr(self.scope.get(module), name, None)
            case _:
                return None
        ours = isinstance(found, types.FunctionType) and found.__module__.startswith("fedjax_sim.")
        return found if ours else None

    def parts(self, node: ast.AST, role: str, seen: tuple[str, ...] = ()) -> list[Part]:
        """Those in an expression, an outer one first; ``seen`` names do not stand for a value."""
        named = self.function(node.func if isinstance(node, ast.Call) else node)
        match node:
            case ast.Name(id=name) if name in self.values and name not in seen:
                return self.parts(self.values[name], role, (*seen, name))
            case ast.IfExp(body=first, orelse=second):
                return _alternatives(self.parts(e, role, seen) for e in (first, second))
            case ast.Dict(values=values):
                return _alternatives(self.parts(e, role, seen) for e in values)
            case ast.Call() if named is not None and _is_method(named):  # a helper beside it
                helper = _Reader(named)
                returns = [n for n in ast.walk(helper.body) if isinstance(n, ast.Return)]
                returns.sort(key=lambda n: n.lineno)
                return _alternatives(helper.parts(r, role) for r in returns)
            case ast.Call() if named is not None:
                given = [*node.args, *node.keywords]
                inner = [self.parts(argument, role, seen) for argument in given]
                shown = zip(given, inner, strict=True)
                own = ["..." if parts else ast.unparse(argument) for argument, parts in shown]
                code = f"{self.path(node.func)}({', '.join(own)})"
                return [Part(role, code, _summary(named)), *chain(*inner)]
            case ast.Call(func=ast.Attribute(value=base, attr="change"), keywords=settings):
                changed = (self.setting(k, role, seen) for k in settings)
                return [*self.parts(base, role, seen), *chain(*changed)]
            case ast.Call(func=ast.Attribute(value=base)):
                inner = [self.parts(n, role, seen) for n in (base, *node.args, *node.keywords)]
                return list(chain(*inner))
            case ast.Name() | ast.Attribute():
                return [Part(role, self.path(node), _summary(named))] if named is not None else []
        return list(chain(*(self.parts(n, role, seen) for n in ast.iter_child_nodes(node))))

    def setting(self, given: ast.keyword, role: str, seen: tuple[str, ...]) -> list[Part]:
        """What the local update is given; of another one, such as fine-tuning's, only parts."""
        if role != "local" or given.arg is None:
            return self.parts(given.value, role, seen)
        if given.arg in PARTS_OF_LOCAL:
            return self.parts(given.value, f"local {given.arg}", seen)
        return [Part(role, f"local.change({ast.unparse(given)})", documented(local_sgd)[given.arg])]

    def path(self, node: ast.expr) -> str:
        """A part's name, with the module where a user finds it."""
        named = self.function(node)
        assert named is not None
        module = named.__module__
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.scope[node.value.id].__name__
        return f"{module.removeprefix('fedjax_sim.')}.{named.__name__}"


def _assigned(body: Sequence[ast.stmt], values: dict[str, ast.expr]) -> dict[str, ast.expr]:
    """What each name has at the end of some statements, given what it has before."""
    values = dict(values)
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case ast.If(test=test):
                one, other = _assigned(statement.body, values), _assigned(statement.orelse, values)
                for name in {**one, **other}:
                    first, second = (v.get(name, ast.Name(name)) for v in (one, other))
                    values[name] = first if first is second else ast.IfExp(test, first, second)
    return values


def _alternatives(choices: Iterable[list[Part]]) -> list[Part]:
    """All parts of all choices, the first of each but the first marked."""
    found: list[Part] = []
    for choice in choices:
        new = [part for part in choice if part not in found]
        if found and new:
            new[0] = new[0]._replace(otherwise=True)
        found += new
    return found


def _is_method(function: types.FunctionType) -> bool:
    return function.__module__.startswith("fedjax_sim.algorithms.")


def _summary(function: types.FunctionType) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
