"""Writes a page for each public module, and lets references lead there.

Everything in ``fedjax_sim.__all__`` is described, and the public names of its modules, by the paths
that users write: ``fedjax_sim.selection.uniform``, whichever file it is in. What several modules
hand on is described once and listed by all.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import fedjax_sim

ROOT = fedjax_sim.__name__
log = logging.getLogger(__name__)


def public_modules() -> dict[str, ModuleType]:
    """The package and its public modules, by the paths that users write."""
    named = {f"{ROOT}.{name}": getattr(fedjax_sim, name) for name in sorted(fedjax_sim.__all__)}
    return {ROOT: fedjax_sim} | {p: value for p, value in named.items() if inspect.ismodule(value)}


def public_names(module: ModuleType) -> list[str]:
    """The names that a module promises: its ``__all__``, without modules."""
    return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]


def _within(module: ModuleType, value: Any) -> bool:
    return f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")


def _comments(module: ModuleType) -> dict[str, str]:
    """The docstrings of a module's data: the texts that stand below their assignments."""
    found = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
    return {name: "\n".join(lines).strip() for (owner, name), lines in found.items() if not owner}


def _is_data(value: Any) -> bool:
    """Whether a name stands for a value, or for a type of another package."""
    made_here = inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value))
    return not made_here or not _within(fedjax_sim, value)


def _docstring(name: str, value: Any) -> str:
    if not _is_data(value):
        return inspect.getdoc(value) or ""
    modules = [m for key, m in sys.modules.items() if key.partition(".")[0] == ROOT]
    texts = (_comments(m).get(name) for m in modules if vars(m).get(name) is value)
    return next(filter(None, texts), "")


def _homes() -> dict[int, str]:
    """Where each public object is described, by its id: in its module rather than the package."""
    modules = public_modules().items()
    return {
        id(getattr(m, name)): f"{path}.{name}" for path, m in modules for name in public_names(m)
    }


HOMES = _homes()


def write_pages(app: Sphinx) -> None:
    """``docs/api/``: a page for each module, and one that lists them."""
    folder = Path(app.confdir, "api")
    folder.mkdir(exist_ok=True)
    modules = public_modules()
    pages = {path: _page(path, module) for path, module in modules.items()}
    pages["index"] = _index(modules)
    for old in folder.iterdir():
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        page = folder / f"{name}.rst"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def _index(modules: Mapping[str, ModuleType]) -> str:
    rows = [(f":doc:`{_short(path)} <{path}>`", module.__doc__) for path, module in modules.items()]
    intro = "All public names, after ``import fedjax_sim as fs``."
    toctree = [".. toctree::", "   :hidden:", "", *(f"   {path}" for path in modules), ""]
    return "\n".join([*_title("Modules"), intro, "", *_table(rows), *toctree])


def _page(path: str, module: ModuleType) -> str:
    """The module's docstring, a table of its names, and those that are at home here."""
    values = {name: getattr(module, name) for name in public_names(module)}
    texts = {name: _docstring(name, value) for name, value in values.items()}
    rows = [(f":py:obj:`{n} <{HOMES[id(value)]}>`", texts[n]) for n, value in values.items()]
    lines = [*_title(_short(path)), f".. py:module:: {path}", "", inspect.getdoc(module) or "", ""]
    lines += _table(rows)
    for name, value in values.items():
        if not texts[name]:
            log.warning("%s.%s has no docstring", path, name)
        if HOMES[id(value)] == f"{path}.{name}":
            lines += _entry(name, value, texts[name])
    return "\n".join(lines)


def _short(path: str) -> str:
    return path.replace(ROOT, "fs", 1)


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _table(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    """Names, and the first paragraph of what is said of each."""
    lines = [".. list-table::", "   :widths: 25 75", ""]
    for name, text in rows:
        summary = " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())
        lines += [f"   * - {name}", f"     - {summary}"]
    return [*lines, ""]


def _entry(name: str, value: Any, text: str) -> list[str]:
    """The directive that describes a name."""
    if _is_data(value):
        return [f".. py:data:: {name}", "", indent(text, "   "), ""]
    if not inspect.isclass(value):
        return [f".. autofunction:: {name}", ""]
    kind = "exception" if issubclass(value, BaseException) else "class"
    called = ["   :special-members: __call__"] if "__call__" in vars(value) else []
    return [f".. auto{kind}:: {name}", "   :members:", *called, ""]


def mark_fields(
    app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]
) -> None:
    """Keeps from Napoleon and reST what they would misread, and drops what Python says itself."""

    def field(match: re.Match[str]) -> str:
        return f":{match[1]}: {indent(dedent(match[2]).strip(), '   ').strip()}\n\n"

    text = "\n".join(line for line in [*lines, ""] if line != "Call self as a function.")
    text = re.sub(r"^( +\w+: )(?=\w\.(?: |$))", r"\1\\", text, flags=re.M)  # "N." is not item N
    text = re.sub(r"^(Returns):\n((?:(?: .*)?\n)+)", field, text, flags=re.M)
    text = re.sub(r"^(Source): ((?:.+\n)+)", field, text, flags=re.M)
    # Nor is a property's text before a colon a type; an empty comment takes its place.
    lines[:] = [*(["..", ""] if what == "property" else []), *text.splitlines()]


def write_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: object, signature: str, returns: str
) -> tuple[str, str | None] | None:
    """Types and defaults by the names that the source has for them."""
    if not signature:
        return None
    if getattr(obj, "_is_protocol", False):
        return "", None  # no constructor: its ``__call__`` has the signature
    (found,) = ast.parse(dedent(inspect.getsource(inspect.unwrap(obj)))).body
    if isinstance(found, ast.ClassDef):  # of fields
        fields = (ast.unparse(line) for line in found.body if isinstance(line, ast.AnnAssign))
        return f"({', '.join(fields)})", None
    assert isinstance(found, ast.FunctionDef)
    if what == "method":
        del (found.args.posonlyargs or found.args.args)[0]  # self
    return f"({ast.unparse(found.args)})", ast.unparse(found.returns) if found.returns else None


def skip_field(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: object
) -> bool | None:
    """The fields of a NamedTuple are in its docstring's Attributes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Leads a reference to where its object is described.

    A name is looked up as Python would in the module of the docstring. What is there but not public
    is shown without a link, and what is not there is left to Sphinx, which warns.
    """
    if node.get("refdomain") != "py":
        return None
    first, *rest = node["reftarget"].split(".")
    try:
        scope = _scope(node)
        value = getattr(scope, first) if hasattr(scope, first) else import_module(first)
        path = HOMES.get(id(value), "")
        for name in rest:
            if inspect.ismodule(value) and not hasattr(value, name):
                import_module(f"{value.__name__}.{name}")
            value = getattr(value, name)
            path = HOMES.get(id(value), path and f"{path}.{name}")
    except (AttributeError, ImportError):
        return None
    if not path.endswith(f".{(rest or [first])[-1]}"):  # PyTree is Any, and Any is not PyTree
        return contnode
    domain = env.domains.python_domain
    found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)
    return found or contnode


def _scope(node: nodes.Node) -> ModuleType:
    """The module of the docstring, or of the signature, that a reference is in."""
    above: Any = node
    while above and not isinstance(above, desc):
        above = above.parent
    if not above:
        return fedjax_sim
    signature = above[0]
    return sys.modules[real_module(None, signature["module"], signature["fullname"])]


def real_module(app: Sphinx | None, module: str, attribute: str) -> str:
    """The module that defines what users know by another path."""
    value, found = fedjax_sim, ROOT
    for name in f"{module}.{attribute}".split(".")[1:]:
        value = getattr(value, name)
        found = getattr(value, "__module__", found)
    return found


def from_root(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """README's links start at the root, the pages that include it are in ``docs/``."""
    content[0] = re.sub(r"\]\((?!https?:|#)", "](../", content[0])


def keep_scores(app: Sphinx, name: str, source: list[str]) -> None:
    """Lets no cell of a Markdown table break beside its ±."""

    def kept(row: re.Match[str]) -> str:
        return row[0].replace(" ± ", "\u00a0±\u00a0")

    source[0] = re.sub(r"^\|.* ± .*$", kept, source[0], flags=re.M)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx asks of an extension."""
    app.connect("source-read", keep_scores)
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", mark_fields, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("missing-reference", resolve)
    app.connect("include-read", from_root)
    app.connect("viewcode-follow-imported", real_module)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
