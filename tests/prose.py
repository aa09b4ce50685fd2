"""Counts code, names and habits of the language: ``python tests/prose.py``.

The patterns are those that make English hard to read: pronouns in place of nouns ("those of"), and
people's verbs for programs ("says", "told"). tests/test_house.py holds the limits.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATTERNS = {
    "those of": r"\bthose (?:of|that|which|who|in|whose)\b",
    "that of": r"\b(?:is|are|was|than|as|to|by|of|and|or|,) that of\b",
    "what is": r"\bwhat (?:is|was|are|were|it|they|he|a|the|that|this|has|had|comes|came)\b",
    "of which": r"\bof (?:which|whom|whose)\b",
    "people's verbs": r"\b(?:says|tells|told|hears|asks|asked|knows|refuses|refused)\b",
    "beside": r"\bbeside\b",
    "none of": r"\b(?:is|are) none\b|\bis no (?!longer|op)",
}
"""Habits by name, as patterns of lower-case text."""

VERB = re.compile(r"^(?:Returns|Yields|Whether|Tests|[A-Z][a-z]+(?:s|es)\b)")
"""A docstring's first word that is a verb in the third person."""


def docstrings(folder: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yields the functions, classes and modules of a folder with their docstrings."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield node, text


def code_lines(path: Path) -> int:
    """Counts the lines of a file with code: no comment, blank line or docstring."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def habits(folder: Path) -> dict[str, float]:
    """Counts each pattern per 1,000 words of docstrings, without mathematics and examples."""
    words, found = 0, Counter[str]()
    for _, text in docstrings(folder):
        plain = re.sub(
            r"\.\. math::.*?(?=\n\n|\Z)|>>>.*|``.*?``", "", text, flags=re.S | re.M
        ).lower()
        words += len(plain.split())
        found.update({name: len(re.findall(p, plain)) for name, p in PATTERNS.items()})
    return {name: 1000 * found[name] / max(words, 1) for name in PATTERNS}


def verbs_first(folder: Path) -> float:
    """Returns the share of functions whose docstring begins with a verb (properties excluded)."""
    first = [
        bool(VERB.match(text))
        for node, text in docstrings(folder)
        if isinstance(node, ast.FunctionDef) and not _is_noun(node)
    ]
    return sum(first) / max(len(first), 1)


def _is_noun(node: ast.FunctionDef) -> bool:
    """Whether a function is described by a noun: a property, or a named method."""
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    return bool(marks & {"property", "functools.cached_property", "cached_property", "method"})


def counts() -> dict[str, Any]:
    """Returns the numbers by name."""
    package, tests = ROOT / "fedjax_sim", ROOT / "tests"
    files = sorted(package.rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return {
        "package: files": len(files),
        "package: lines": sum(lines.values()),
        "package: lines of code": sum(map(code_lines, files)),
        "package: longest module": max(lines.values()),
        "tests: lines": sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in tests.rglob("*.py")
        ),
        "docstrings that begin with a verb": round(verbs_first(package), 3),
        "habits per 1,000 words": {k: round(v, 2) for k, v in habits(package).items()},
    }


if __name__ == "__main__":
    for key, value in counts().items():
        print(f"{key}: {value}")
