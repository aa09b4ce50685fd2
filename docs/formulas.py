"""Writes formulas as MathML, which browsers show by themselves: no script, font or network."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

log = logging.getLogger(__name__)


def _write(page: HTML5Translator, node: nodes.Element, *, as_block: bool) -> None:
    text = node.astext().strip().replace(r"\dots", r"\ldots")  # docutils lacks \dots
    try:
        page.body.append(latex2mathml.tex2mathml(text, as_block=as_block))
    except MathError as error:
        log.warning("%s: %s", error, text, location=node)
    raise nodes.SkipNode


def write_inline(page: HTML5Translator, node: nodes.math) -> None:
    """Writes a formula in a sentence."""
    _write(page, node, as_block=False)


def write_block(page: HTML5Translator, node: nodes.math_block) -> None:
    """Writes a formula on lines of its own."""
    _write(page, node, as_block=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the renderer that ``html_math_renderer`` in conf.py names."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
