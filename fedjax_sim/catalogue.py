"""The named methods as tables: ``--list`` of the command, and ``docs/algorithms.md``.

``python -m fedjax_sim.catalogue`` prints the page. Everything in it is read from the methods
themselves: the docstring, and the arguments of the one ``compose`` that each of them is.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.flags import documented, flag, keywords

SECTIONS = ("Args", "Returns", "Raises", "Source", "Example", "Note")


class Method(NamedTuple):
    """A row of the catalogue.

    Attributes:
        name: the key in ``ALGORITHMS``.
        summary: the docstring's first line.
        body: the paragraphs after it, with the mathematics.
        parts: what ``compose`` is given, by keyword, in Python; "local" where it is changed.
        traffic: per round, a sentence.
        options: by flag, what it is and its default.
        source: the paper.
        note: what else should be known, such as what other frameworks compute; "" for nothing.
    """

    name: str
    summary: str
    body: str
    parts: dict[str, str]
    traffic: str
    options: dict[str, str]
    source: str
    note: str

    @property
    def paper(self) -> str:
        """First author and year."""
        authors, *_ = re.split(r"[,“\"]", self.source, maxsplit=1)
        years = re.findall(r"\b(?:19|20)\d\d\b", self.source)
        return " ".join([authors.split(" (")[0].strip(), *years[:1]])


def catalogue() -> list[Method]:
    """All named methods, in the order of ``ALGORITHMS``.

    >>> [m.parts for m in catalogue() if m.name == "fedavg"][0]["selection"]
    'selection.uniform()'
    """
    return [_method(name, function) for name, function in ALGORITHMS.items()]


def listing() -> str:
    """The table of ``--list``: method, paper, parts, traffic per round."""
    plain = set(_method("fedavg", ALGORITHMS["fedavg"]).parts.values())
    rows = [("method", "paper", "traffic per round", "parts beside FedAvg's")]
    for m in catalogue():
        new = [_names(value) for value in m.parts.values() if value not in plain]
        traffic, *_ = re.split(r"[.;] ", m.traffic, maxsplit=1)
        rows.append((m.name, m.paper, traffic, ", ".join(dict.fromkeys(chain(*new)))))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def page() -> str:
    """``docs/algorithms.md``."""
    methods = catalogue()
    lines = [
        "# Methods",
        "",
        "Generated from the docstrings by `python -m fedjax_sim.catalogue > docs/algorithms.md`.",
        "Each method is one `compose(...)`; parts that are not named are FedAvg's.",
        "",
        "| method | paper | traffic per round |",
        "| --- | --- | --- |",
        *(f"| [`{m.name}`](#{m.name}) | {m.paper} | {_markdown(m.traffic)} |" for m in methods),
    ]
    for m in methods:
        lines += ["", f"## {m.name}", "", m.summary, "", _markdown(m.body)]
        lines += ["", "| part | |", "| --- | --- |"]
        lines += [f"| {part} | `{value}` |" for part, value in m.parts.items()]
        if m.options:
            lines += ["", "| option | |", "| --- | --- |"]
            lines += [f"| `{name}` | {text} |" for name, text in m.options.items()]
        lines += [
            "",
            f"Traffic per round: {_markdown(m.traffic)}.",
            "",
            f"Source: {_markdown(m.source)}",
        ]
        if m.note:
            lines += ["", _markdown(m.note)]
    return "\n".join(lines) + "\n"


def _method(name: str, function: Callable[..., Any]) -> Method:
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n")
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):[ \n]", rest, flags=re.M)
    sections = dict(zip(pieces[1::2], map(textwrap.dedent, pieces[2::2]), strict=True))
    texts = documented(function)
    returns = " ".join(sections.get("Returns", "").split())
    traffic = returns.partition("Traffic per round: ")[2].rstrip(".")
    return Method(
        name=name,
        summary=summary,
        body=pieces[0].strip(),
        parts=_parts(function),
        traffic=traffic,
        options={
            flag(key): f"{texts.get(key, '')} (default: {p.default})".replace("%%", "%")
            for key, p in keywords(function, without=COMMON).items()
        },
        source=" ".join(sections.get("Source", "").split()),
        note=sections.get("Note", "").strip(),
    )


def _parts(function: Callable[..., Any]) -> dict[str, str]:
    """The arguments of the function's ``compose``, as written; of another method that it calls."""
    source = _Inlined().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    calls = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "compose" or node.func.id in ALGORITHMS
    ]
    if len(calls) != 1:
        raise ValueError(f"{function.__name__} must be one composition, it has {len(calls)}")
    (call,) = calls
    assert isinstance(call.func, ast.Name)
    first = ast.unparse(call.args[0])
    given = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg is not None}
    parts = ({} if first == "local" else {"local": first}) | given
    if call.func.id in ALGORITHMS:
        parts = {"method": f"algorithms.{call.func.id}"} | parts
    return {part: value for part, value in parts.items() if part != "execution"}


class _Inlined(ast.NodeTransformer):
    """Writes an expression that has a name where the name is used."""

    def __init__(self) -> None:
        self.values: dict[str, ast.expr] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        match node.targets:
            case [ast.Name(id=name)]:
                self.values[name] = node.value
                return None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.values.get(node.id, node)


def _names(value: str) -> list[str]:
    """The parts that an expression names, and the settings of the local update that it changes.

    >>> _names("local.change(drift=(drift.proximal(mu),), max_steps=1)")
    ['max_steps=1', 'proximal']
    """
    nodes = list(ast.walk(ast.parse(value, mode="eval")))
    settings = [
        f"{n.arg}={n.value.value!r}"
        for n in nodes
        if isinstance(n, ast.keyword) and isinstance(n.value, ast.Constant)
    ]
    return settings + [
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        if n.value.id not in ("local", "jnp", "np", "optax")
    ]


def _markdown(text: str) -> str:
    """From the docstrings' reStructuredText."""
    blocks = re.split(r"\n{2,}", text)
    out = []
    for block in blocks:
        if block.lstrip().startswith(".. math::"):
            block = "$$\n" + textwrap.dedent(block.split("::", 1)[1]).strip() + "\n$$"
        block = re.sub(r":math:`([^`]*)`", r"$\1$", block)
        block = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", block)
        out.append(block.replace("``", "`"))
    return "\n\n".join(out)


if __name__ == "__main__":
    print(page(), end="")
