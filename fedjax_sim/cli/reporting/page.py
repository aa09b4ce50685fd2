"""A report as one self-contained HTML page, and as Markdown."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.cli.reporting.contents import Section
from fedjax_sim.cli.reporting.formats import markdown, plain
from fedjax_sim.cli.reporting.pictures import Picture
from fedjax_sim.cli.reporting.tables import Best, Second, Table

GENERATOR = "fedjax_sim.report"
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #5c6470; --rule: #d5d9de;
  --band: #f4f6f8; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #16181c; --faint: #a0a8b4; --rule: #3a3f47; --band: #1f2228; } }
body { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; padding-top: 0.75rem;
  border-top: 1px solid var(--rule); } h3 { font-size: 1.05rem; margin: 1.75rem 0 0.25rem; }
h1, h2, h3, p, figcaption { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
th:first-child, td:first-child { padding-left: 0.25rem; white-space: normal; min-width: 8rem; }
.said { white-space: normal; }
.words td { white-space: normal; } .words td:last-child { overflow-wrap: anywhere; }
thead th { border-bottom: 1px solid var(--faint); color: var(--faint); font-weight: 500; }
tbody tr:nth-child(even) { background: var(--band); }
figure { margin: 1.25rem 0; break-inside: avoid; }
figure img { display: block; max-width: 100%; background: #fff; border-radius: 4px; }
figcaption { color: var(--faint); font-size: 0.85rem; margin-top: 0.35rem; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; } tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  table { font-size: 8pt; } th { white-space: normal; } th, td { padding: 0.15rem 0.3rem; } }
"""
MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}


def html(title: str, sections: Sequence[Section], folder: Path) -> str:
    """Writes the page.

    A tree of elements escapes all text.
    """
    body = ET.Element("body")
    _add(body, "h1", title)
    for section in sections:
        _add(body, f"h{section.level}", section.title)
        for item in section.items:
            body.append(_item(item, folder))
    page = ET.Element("html", lang="en")
    head = _add(page, "head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "meta", name="generator", content=GENERATOR)
    _add(head, "title", title)
    _add(head, "style", STYLE)
    page.append(body)
    ET.indent(page)
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


def fragment(items: Iterable[str | Table]) -> str:
    """Writes paragraphs and tables as HTML, for a notebook."""
    return "".join(
        ET.tostring(_item(item, Path()), encoding="unicode", method="html") for item in items
    )


def _add(to: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = ET.SubElement(to, tag, attributes)
    element.text = text
    return element


def _item(item: str | Table | Picture, folder: Path) -> ET.Element:
    if isinstance(item, str):
        paragraph = ET.Element("p")
        paragraph.text = item
        return paragraph
    if isinstance(item, Table):
        return _table(item)
    figure = ET.Element("figure")
    path = folder / item.name
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{MEDIA[path.suffix]};base64,{content}"
    _add(figure, "img", src=source, alt=item.caption)
    _add(figure, "figcaption", item.caption)
    return figure


def _table(table: Table) -> ET.Element:
    around = ET.Element("div", {"class": "wide"})
    element = ET.SubElement(around, "table", {"class": "words"} if table.words else {})
    row = _add(_add(element, "thead"), "tr")
    for title in table.head:
        _add(row, "th", title, scope="col")
    rows = _add(element, "tbody")
    for cells in table.rows:
        row = _add(rows, "tr")
        for cell in cells:
            within = _add(row, "td")
            if cell is not cells[0] and cell[:1].isalpha():  # words may break into lines
                within.set("class", "said")
            if mark := {Best: "strong", Second: "u"}.get(type(cell)):
                _add(within, mark, cell)
            else:
                within.text = cell
    return around


def text(title: str, sections: Sequence[Section]) -> str:
    """Writes the report in Markdown; its pictures are separate files."""
    lines = [f"# {plain(title)}"]
    for section in sections:
        lines.append(f"{'#' * section.level} {plain(section.title)}")
        lines += [_markdown(item) for item in section.items]
    return "\n\n".join(lines) + "\n"


def _markdown(item: Any) -> str:
    if isinstance(item, str):
        return plain(item)
    if isinstance(item, Table):
        return markdown(item)
    return f"![{plain(item.caption)}]({item.name})"
