"""Texts such as ``krum(byzantine=0.3)``: literals and calls of names, read without evaluating code.

A text is a Python expression of literals, ``7/8``, tuples, lists and calls. A name may have dashes,
or be ``package.module:function``. In texts of methods ``0.1|1`` stands for one text with each.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LONGEST, DEEPEST, MOST = 20_000, 20, 1000
"""Limits of a text: characters, calls in one another, texts that ``|`` makes of it."""

_TOKENS = re.compile(
    r"""(?P<pattern>(?<==)[\w.*-]*\*[\w.*-]*)  # norms=*bias
    |(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<word>\w[\w.-]*(?::\w[\w.]*)?)""",
    re.VERBOSE,
)


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number, text, True, False or None.

    Attributes:
        value: the value.
        text: its spelling, which labels keep.
    """

    value: Any
    text: str

    def __str__(self) -> str:
        return self.text


class UnreadableError(ValueError):
    """A text that is not a value or a call."""


class Name(str):
    """A name that is not called: a choice, or a part that is a function."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        name: the name of the callee.
        args: the positional arguments.
        named: the keyword arguments.
    """

    name: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        words = [*map(write, self.args), *(f"{k}={write(v)}" for k, v in self.named.items())]
        return f"{self.name}({', '.join(words)})"


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Values with ``|`` or ``*`` between them."""

    values: tuple[Any, ...]
    by: str

    def __str__(self) -> str:
        return self.by.join(map(write, self.values))


Node = Any
"""A Literal, Name or Call; or a tuple or list of them."""


def parse(text: str) -> Node:
    """Parses a text into a tree.

    Raises:
        ValueError: if the text is not a value or a call, or is too long or too deeply nested.

    >>> str(parse("label-sets( 2, x=7 / 8)")), parse("iid")
    ('label-sets(2, x=7/8)', 'iid')
    """
    found = _parse(text)
    _single(text, found)
    return found


def alternatives(text: str) -> list[Node]:
    """Returns the trees that a text stands for, one for each combination of values joined by |.

    >>> [str(tree) for tree in alternatives("fedprox(mu=0.1|1)")]
    ['fedprox(mu=0.1)', 'fedprox(mu=1)']
    """
    found = _parse(text)
    if (count := _count(found)) > MOST:
        raise ValueError(f"{_brief(text)} stands for {count:,} texts: use at most {MOST:,}")
    trees = list(_expand(found))
    for tree in trees:
        _single(text, tree)
    return trees


def factors(text: str) -> tuple[Node, ...]:
    """Returns the trees of a product, such as ``warmup(5) * cosine(0.1)``."""
    found = _parse(text)
    product = isinstance(found, _Joined) and found.by == " * "
    trees = found.values if product else (found,)
    for tree in trees:
        _single(text, tree)
    return trees


def as_call(node: Node, text: str) -> Call:
    """Returns a name as a call without arguments, and a call as it is.

    Raises:
        ValueError: if it is a literal.
    """
    if isinstance(node, Name):
        return Call(str(node))
    if not isinstance(node, Call):
        raise _unreadable(text)
    return node


def names(node: Node) -> Iterator[str]:
    """Returns the names that a tree calls, and the names of functions to import."""
    if isinstance(node, Call) or (isinstance(node, Name) and ":" in node):
        yield node.name if isinstance(node, Call) else node
    for inner in _inner(node):
        yield from names(inner)


def write(node: Node) -> str:
    """Returns the text of a tree."""
    if isinstance(node, tuple):
        return f"({', '.join(map(write, node))}{',' * (len(node) == 1)})"
    return f"[{', '.join(map(write, node))}]" if isinstance(node, list) else str(node)


def unquoted(node: Node) -> Node:
    """Returns a text that can be read without quotes as a name."""
    text = node.value if isinstance(node, Literal) else None
    return Name(text) if isinstance(text, str) and re.fullmatch(r"[\w.*-]+", text) else node


def word(node: Node) -> str:
    """Returns an argument in the form of a flag's value: ``0.875`` for 7/8, no quotes."""
    return str(node.value) if isinstance(node, Literal) else write(node)


def _parse(text: str) -> Node:
    if len(text) > LONGEST:
        raise UnreadableError(f"a text must have at most {LONGEST} characters, got {len(text)}")
    words: list[str] = []

    def identifier(match: re.Match[str]) -> str:
        if match.lastgroup in ("text", "number") or match[0] in ("True", "False", "None"):
            return match[0]
        words.append(match[0])
        return f"_{len(words) - 1}"

    source = _TOKENS.sub(identifier, text.strip())
    try:
        return _Reader(source, words).node(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise _unreadable(text, f": {error}" if type(error) is ValueError else "") from error


class _Reader(NamedTuple):
    """Converts Python's syntax trees to ours; ``source`` has an identifier for each word."""

    source: str
    words: list[str]

    def node(self, tree: ast.expr, depth: int = 0) -> Node:
        if depth > DEEPEST:
            raise ValueError(f"at most {DEEPEST} values may stand in one another")

        def of(inner: ast.expr) -> Node:
            return self.node(inner, depth + 1)

        match tree:
            case ast.Constant(str() | int() | float() | None as value):  # a bool is an int
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError("numbers must be finite")
                return Literal(value, ast.get_source_segment(self.source, tree) or repr(value))
            case ast.UnaryOp(ast.USub(), operand):
                inner = _number(of(operand))
                return Literal(-inner.value, f"-{inner.text}")
            case ast.BinOp(left, ast.Div(), right):
                over, under = _number(of(left)), _number(of(right))
                return Literal(over.value / under.value, f"{over.text}/{under.text}")
            case ast.BinOp(_, (ast.BitOr() | ast.Mult()) as by, _):
                values = tuple(map(of, _operands(tree, type(by))))
                return _Joined(values, "|" if isinstance(by, ast.BitOr) else " * ")
            case ast.Tuple(items):
                return tuple(map(of, items))
            case ast.List(items):
                return [*map(of, items)]
            case ast.Name():
                return Name(self._word(tree))
            case ast.Call(function, args, keywords):
                given: dict[str, Node] = {}
                for keyword in keywords:
                    key = self.words[int(keyword.arg[1:])] if keyword.arg else ""
                    if not key or key in given:
                        raise ValueError(
                            f"{key} is given twice" if key else "** cannot stand there"
                        )
                    given[key] = of(keyword.value)
                return Call(self._word(function), tuple(map(of, args)), given)
        raise ValueError("only literals, 7/8, tuples, lists and calls of names can stand there")

    def _word(self, tree: ast.expr) -> str:
        if not isinstance(tree, ast.Name):
            raise ValueError("only names can be called")
        return self.words[int(tree.id[1:])]


def _number(node: Node) -> Literal:
    if isinstance(node, Literal) and type(node.value) in (int, float):
        return node
    raise ValueError(f"{write(node)} is not a number")


def _operands(tree: ast.expr, by: type[ast.operator]) -> list[ast.expr]:
    """Returns the operands of ``a | b | c`` in order."""
    found: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, by):
        found.append(tree.right)
        tree = tree.left
    return [tree, *reversed(found)]


def _inner(node: Node) -> tuple[Node, ...]:
    """Returns the direct children of a tree."""
    if isinstance(node, Call):
        return (*node.args, *node.named.values())
    if isinstance(node, _Joined):
        return node.values
    return tuple(node) if isinstance(node, tuple | list) else ()


def _count(node: Node) -> int:
    """Returns how many texts a tree stands for."""
    counts = [*map(_count, _inner(node))]
    return sum(counts) if isinstance(node, _Joined) else math.prod(counts)


def _expand(node: Node) -> Iterator[Node]:
    if isinstance(node, _Joined):
        for value in node.values:
            yield from _expand(value)
    elif isinstance(node, Call):
        for values in itertools.product(*map(_expand, _inner(node))):
            args, named = values[: len(node.args)], values[len(node.args) :]
            yield Call(node.name, args, dict(zip(node.named, named, strict=True)))
    elif isinstance(node, tuple | list):
        yield from map(type(node), itertools.product(*map(_expand, node)))
    else:
        yield node


def _single(text: str, node: Node) -> None:
    """Raises ValueError if a tree has joined values, where there can be only one."""
    if isinstance(node, _Joined):
        raise UnreadableError(f"{write(node)} cannot stand in {_brief(text)}: give one value")
    for inner in _inner(node):
        _single(text, inner)


def _unreadable(text: str, why: str = "") -> UnreadableError:
    form = "NAME or NAME(value, key=value, ...)"
    return UnreadableError(f"must be written {form}, got {_brief(text)}{why}")


def _brief(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
