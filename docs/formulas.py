"""Writes formulas as MathML, which browsers show by themselves: no script, font or network."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

log = logging.getLogger(__name__)


def _mathml(text: str, node: nodes.Element, *, as_block: bool) -> str:
    try:
        # docutils lacks \dots
        return latex2mathml.tex2mathml(text.strip().replace(r"\dots", r"\ldots"), as_block=as_block)
    except MathError as error:
        log.warning("%s: %s", error, text, location=node)
        return ""


def equations(text: str) -> list[str]:
    r"""Splits a formula at ``\quad`` and ``\qquad``; aligned ones stay whole."""
    outside = re.sub(r"\\begin{(\w+)}.*?\\end{\1}", "", text, flags=re.DOTALL)
    return [text] if "&" in outside else re.split(r"\\q?quad\b", text)


def write_inline(page: HTML5Translator, node: nodes.math) -> None:
    """Writes a formula in a sentence."""
    page.body.append(_mathml(node.astext(), node, as_block=False))
    raise nodes.SkipNode


def write_block(page: HTML5Translator, node: nodes.math_block) -> None:
    """Writes a formula on lines of its own: as many of its equations on a line as fit."""
    written = (_mathml(part, node, as_block=True) for part in equations(node.astext()))
    page.body.append(f'<div class="equations">{"".join(written)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the renderer that ``html_math_renderer`` in conf.py names."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
