"""The named methods as a list: ``--list`` of the command, and rows for ``docs/algorithms.py``.

Everything comes from the methods themselves: their docstrings, their parameters, and the parts of
the algorithms that they make.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.cli.composition import Part, parts_of
from fedjax_sim.cli.flags import documented, flag, options

SECTIONS = ("Args", "Returns", "Raises", "Source", "Example", "Note")
LEGEND = """
m (--clients-per-round) of N clients train in a round; client k has n_k samples.
Parts are listed where they differ from FedAvg's, flags with their defaults, traffic per round.
--help describes the flags; docs/algorithms.md has formulas and sources."""

PLAIN = (
    "0",
    "momentum of the clients' SGD (0.9 for other methods); the default --lr is then ten times the "
    "data set's",
)
"""The default momentum of a method that ``plain_sgd`` marks."""


class Method(NamedTuple):
    """A row of the catalogue.

    Attributes:
        name: the key in ``ALGORITHMS``.
        summary: the docstring's first line.
        body: the paragraphs after it, with the mathematics.
        parts: what ``compose`` is given.
        options: by flag, its default ("" for all clients) and what it is.
        traffic: per round, a sentence.
        source: the paper.
        note: what else should be known, such as what other frameworks compute; "" for nothing.
        example: Python that trains it.
    """

    name: str
    summary: str
    body: str
    parts: list[Part]
    options: dict[str, tuple[str, str]]
    traffic: str
    source: str
    note: str
    example: str

    @property
    def title(self) -> str:
        """The method's name in its paper.

        >>> [m.title for m in catalogue() if m.name in ("fedavg", "scaffnew")]
        ['FedAvg', 'Scaffnew (ProxSkip)']
        """
        return self.summary.partition(":")[0]

    @property
    def paper(self) -> str:
        """Authors and year.

        >>> [m.paper for m in catalogue() if m.name in ("phase_shift", "fedyogi", "robust")]
        ['Reddi et al. 2021', 'Cornelis 2022', 'Yin et al. 2018']
        """
        source = re.sub(r" ?<[^<>]*>", "", self.source)
        authors, *_ = re.split(r",? [\"(\d]", source, maxsplit=1)
        first, *others = authors.split(", ")
        if len(others) == 1 and "et al." not in first:
            first += f" and {others[0]}"
        elif others and "et al." not in first:
            first += " et al."
        return " ".join([first, *re.findall(r"\b(?:19|20)\d\d\b", source)[:1]])


@functools.cache  # it makes every method, with every option
def catalogue() -> tuple[Method, ...]:
    """Returns the package's named methods, in the order of ``ALGORITHMS``.

    >>> [m.parts[0].code for m in catalogue() if m.name == "fedavg"]
    ['selection.uniform()']
    """
    known = ALGORITHMS.items()
    return tuple(_method(*named) for named in known if named[0] in ALGORITHMS.own)


def listing(words: Sequence[str] = (), others: Sequence[str] = ()) -> str:
    """Returns the text of ``--list``: what each method does, its paper, parts, flags and traffic.

    Entries that lack one of the words are left out; case does not count.
    """

    def fits(entry: str) -> bool:
        text = " ".join(entry.split()).lower()
        return all(word.lower() in text for word in words)

    ours, theirs = (list(filter(fits, of)) for of in (map(_entry, catalogue()), others))
    if not ours and not theirs:
        raise ValueError(f"--list: no entry has {' and '.join(map(repr, words))}; leave it out")
    if theirs:
        theirs = ["", "registered:", *theirs]
    return "\n".join([*ours, LEGEND * bool(ours), *theirs])


def _entry(m: Method) -> str:
    """Returns the lines of a method in the list."""
    flags = (f"{name} {default}" for name, (default, _) in m.options.items() if default)
    rows = {
        m.name: f"{m.summary} [{m.paper}]",
        "  parts": "; ".join(map(_in_line, own_parts(m).values())),
        "  flags": ", ".join(flags),
        "  traffic": re.sub(r":\w+:`~?|`", "", m.traffic),
    }
    return "\n".join(line for key, text in rows.items() if text for line in _wrapped(key, text))


def _method(name: str, function: Callable[..., Any]) -> Method:
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n")
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):[ \n]", rest, flags=re.M)
    sections = dict(zip(pieces[1::2], map(textwrap.dedent, pieces[2::2]), strict=True))
    texts = {key: value.replace("%%", "%") for key, value in documented(function).items()}
    returns = " ".join(sections.get("Returns", "").split())
    own = options(function, without=COMMON)
    return Method(
        name=name,
        summary=summary,
        body=pieces[0].strip(),
        parts=parts_of(function, without=COMMON),
        options={flag("clients_per_round"): ("", texts["clients_per_round"])}
        | {flag(key): (str(p.default), texts[key]) for key, p in own.items()}
        | ({"--momentum": PLAIN} if getattr(function, "plain_sgd", False) else {}),
        traffic=returns.partition("Traffic per round: ")[2].rstrip("."),
        source=" ".join(sections.get("Source", "").split()),
        note=sections.get("Note", "").strip(),
        example=_code(sections.get("Example", "")),
    )


def _code(example: str) -> str:
    """Returns the statements of a doctest."""
    return "\n".join(line[4:] for line in example.splitlines() if line[:3] in (">>>", "..."))


def own_parts(method: Method) -> dict[str, list[Part]]:
    """Returns the parts by role, without roles whose parts are FedAvg's."""
    plain = [part for part in parts_of(ALGORITHMS["fedavg"], without=COMMON) if not part.option]
    if method.name == "fedavg":
        plain = []
    roles = dict.fromkeys(part.role for part in method.parts)
    by_role = {role: [part for part in method.parts if part.role == role] for role in roles}
    return {
        role: parts
        for role, parts in by_role.items()
        if parts != [part for part in plain if part.role == role]
    }


def _in_line(parts: Iterable[Part]) -> str:
    """Returns parts of one role as a phrase.

    >>> replace, mix = Part("", "server.replace()", ""), Part("", "server.mix(1)", "", "--mix")
    >>> _in_line([replace, mix])
    'server.replace or (--mix) server.mix'
    """
    words = (
        (f" or ({part.option}) " if part.option else ", ") + _short(part.code) for part in parts
    )
    return re.sub(r"^(, | or )", "", "".join(words))


def _short(code: str) -> str:
    """Returns a part without most of its arguments, except other parts.

    >>> _short("selection.uniform(sticky=True)"), _short("preaggregation.q_fair(1.0, 0.1)")
    ('selection.uniform(sticky=True)', 'preaggregation.q_fair')
    >>> _short("flight.delayed(5, redistribution=redistribution.permute)")
    'flight.delayed(redistribution.permute)'
    """
    name, _, arguments = code.partition("(")
    fixed = re.fullmatch(r"\w+=(True|False|\d+|'\w+')\)", arguments)
    if fixed or name == "local.change":
        return code
    inner = re.findall(r"[a-z_]+\.[a-z_]\w*", arguments)
    return f"{name}({', '.join(inner)})" if inner else name


def _wrapped(key: str, text: str) -> list[str]:
    """Wraps a row of the list within 100 columns."""
    return textwrap.wrap(
        text, 100, initial_indent=f"{key:20}", subsequent_indent=" " * 20, break_on_hyphens=False
    )
