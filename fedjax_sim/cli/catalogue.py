"""The named methods as a list: ``--list`` of the command, and rows for ``docs/algorithms.py``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.cli.flags import documented, flag, options

SECTIONS = ("Args", "Returns", "Raises", "Source", "Example", "Note")
LEGEND = """
m (--clients-per-round) of N clients train in a round; client k has n_k samples.
Flags are listed with their defaults, traffic per round. --help describes the flags;
docs/algorithms.md has formulas, parts and sources."""

PLAIN = (
    "0",
    "momentum of the clients' SGD (0.9 for other methods); the default --lr is then ten times the "
    "data set's",
)
"""The default momentum of a method that ``plain_sgd`` marks."""


class Method(NamedTuple):
    """The docstring of a method, in parts.

    Attributes:
        name: the key in ``ALGORITHMS``.
        summary: the docstring's first line.
        body: the paragraphs after it, with the mathematics.
        options: by flag, its default ("" for all clients) and its meaning.
        traffic: per round, a sentence.
        source: the paper.
        note: remarks, such as differences in other frameworks; "" for none.
        example: Python that trains it.
    """

    name: str
    summary: str
    body: str
    options: dict[str, tuple[str, str]]
    traffic: str
    source: str
    note: str
    example: str

    @property
    def paper(self) -> str:
        """Authors and year.

        >>> [describe_method(name).paper for name in ("phase_shift", "fedyogi", "robust")]
        ['Cornelis 2022', 'Reddi et al. 2021', 'Yin et al. 2018']
        """
        source = re.sub(r" ?<[^<>]*>", "", self.source)
        authors, *_ = re.split(r",? [\"(\d]", source, maxsplit=1)
        first, *others = authors.split(", ")
        if len(others) == 1 and "et al." not in first:
            first += f" and {others[0]}"
        elif others and "et al." not in first:
            first += " et al."
        return " ".join([first, *re.findall(r"\b(?:19|20)\d\d\b", source)[:1]])


def describe_method(name: str) -> Method:
    """Reads the docstring of a method, which may be a user's."""
    function = ALGORITHMS[name]
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n")
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):[ \n]", rest, flags=re.M)
    sections = dict(zip(pieces[1::2], map(textwrap.dedent, pieces[2::2]), strict=True))
    texts = {key: value.replace("%%", "%") for key, value in documented(function).items()}
    returns = " ".join(sections.get("Returns", "").split())
    own = options(function, without=COMMON)
    return Method(
        name=name,
        summary=summary,
        body=pieces[0].strip(),
        options={flag("clients_per_round"): ("", texts.get("clients_per_round", ""))}
        | {
            flag(key): ("needed" if p.default is p.empty else str(p.default), texts.get(key, ""))
            for key, p in own.items()
        }
        | ({"--momentum": PLAIN} if getattr(function, "plain_sgd", False) else {}),
        traffic=returns.partition("Traffic per round: ")[2].rstrip("."),
        source=" ".join(sections.get("Source", "").split()),
        note=sections.get("Note", "").strip(),
        example=_code(sections.get("Example", "")),
    )


def _code(example: str) -> str:
    """Returns the statements of a doctest."""
    return "\n".join(line[4:] for line in example.splitlines() if line[:3] in (">>>", "..."))


def listing(words: Sequence[str] = ()) -> str:
    """Returns the text of ``--list``: summary, paper, flags and traffic of each method.

    Entries that lack one of the words are omitted; case is ignored.
    """
    entries = [*map(_entry, ALGORITHMS)]
    for word in words:
        entries = [e for e in entries if word.lower() in " ".join(e.split()).lower()]
    if not entries:
        raise ValueError(f"--list: no entry has {' and '.join(map(repr, words))}; leave it out")
    return "\n".join([*entries, LEGEND])


def _entry(name: str) -> str:
    """Returns the lines of a method in the list; a user's may have no docstring."""
    try:
        m = describe_method(name)
    except ValueError as error:  # a registered function that the command cannot run
        return f"{name:20}no method of the command: {error}"
    flags = (f"{key} {default}" for key, (default, _) in m.options.items() if default)
    rows = {
        name: f"{m.summary} [{m.paper}]" if m.paper else m.summary or "-",
        "  flags": ", ".join(flags),
        "  traffic": re.sub(r":\w+:`~?|`", "", m.traffic),
    }
    return "\n".join(
        textwrap.fill(
            text, 100, initial_indent=f"{key:20}", subsequent_indent=20 * " ",
            break_on_hyphens=False,
        )
        for key, text in rows.items()
        if text
    )  # fmt: skip
