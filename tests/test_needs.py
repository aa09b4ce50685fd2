"""Needs of parts: which parts have each, and which break it, as ``needs.txt`` lists them.

``python tests/test_needs.py > tests/needs.txt`` writes the list anew.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from composing import LOCAL, PART_LIST, Part, composed, refusal

from fedjax_sim.base import Need
from fedjax_sim.round.fit import _derived

LIST = Path(__file__).with_name("needs.txt")


class Known(NamedTuple):
    """A need, the parts that have it, and those whose compositions break it."""

    need: Need
    had: list[Part]
    broken: list[Part]


@functools.cache
def known() -> dict[str, Known]:
    """The needs in words, each part in a composition with what it needs."""
    compositions = [(part, composed(part).parts) for part in PART_LIST]
    found: dict[str, Known] = {}
    for part, parts in compositions:
        made = parts.local if part.role in LOCAL else part.make()
        own = getattr(made, "needs", ())
        for need in (*own, *(need for _, _, need in _derived(parts))):
            known = found.setdefault(need.what, Known(need, [], []))
            if part not in known.had:
                known.had.append(part)
    for need, _, broken in found.values():
        broken += [part for part, parts in compositions if not _met(need, parts)]
    return found


def _met(need: Need, parts: Any) -> bool:
    try:
        return need.met(parts)
    except (AttributeError, IndexError):  # of a clock, or a pre-aggregation, that is not there
        return True


def names(parts: list[Part]) -> str:
    rest = [part for part in PART_LIST if part not in parts]
    short = ["all but", *map(repr, rest)] if len(rest) < len(parts) else list(map(repr, parts))
    return ", ".join(short).replace("all but,", "all but") or "no part here"


def listed() -> str:
    return "".join(
        f"{what}\n  needed by {names(had)}\n  broken by {names(broken)}\n"
        for what, (_, had, broken) in sorted(known().items())
    )


def test_no_need_is_lost() -> None:
    assert LIST.read_text(encoding="utf-8") == listed(), "python tests/test_needs.py > needs.txt"


def test_compose_asks_for_each() -> None:
    """Parts of a role take the place of those that fit; local updates are changed together."""
    for need, had, broken in known().values():
        pairs = [(a, b) for a in had for b in broken if b.role == need.role != a.role]
        if pairs and need.role not in LOCAL:
            assert any(isinstance(refusal(*pair), str) for pair in pairs), need.what


if __name__ == "__main__":
    print(listed(), end="")
