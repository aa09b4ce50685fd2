"""Any two parts: refused in a line that names two, or each does something."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from composing import (
    LOCAL,
    PART_LIST,
    SEQUENCES,
    Part,
    at_work,
    bears_marks,
    one_step,
    part_named,
    refusal,
)

import fedjax_sim as fs

AT_THE_START = "clients_per_round must be all 8 clients for selection everyone(), got "
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(PART_LIST, 2)
    if one.role != other.role or one.role in SEQUENCES
]


ROWS = {"sending", "preaggregation", "weighting", "aggregator", "correction", "redistribution"}
"""Roles of which every part leaves rows to those of the others."""


AFTER = {"finish", "personal"}
"""Roles of parts that act after the rounds, in which nothing depends on them."""


def apart(*given: Part) -> bool:
    """Whether no part can take from another what it works on."""
    roles = {part.role for part in given}
    return len(given) == 2 and (roles <= ROWS or not roles.isdisjoint(AFTER))


def fits(*given: Part) -> fs.Algorithm | None:
    """The composition of parts, unless it is refused."""
    made = refusal(*given)
    return None if isinstance(made, str) else made


def traces(*given: Part) -> bool:
    """Whether a trace shows more of the parts than that they fit together."""
    return any(map(bears_marks, given)) and not apart(*given)


def check(made: fs.Algorithm, *given: Part) -> None:
    """Each part that bears marks does something."""
    if not any({part.role, *part.beside} & {*LOCAL} for part in given):
        made = made.replace(local=one_step())  # less to trace
    try:
        found = at_work(made)
    except ValueError as error:
        if not str(error).startswith(AT_THE_START):
            raise
        return
    for i, part in enumerate(given):
        assert f"part {i}" in found or not bears_marks(part), (part, "does nothing in", given)


def test_an_attack_on_no_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were not refused."""
    attack, nothing = part_named("sending alie"), part_named("exchange nothing")
    assert fits(attack, nothing) is None
    monkeypatch.setattr("fedjax_sim.round.fit._derived", lambda parts: ())
    made = fits(attack, nothing)
    assert made is not None
    with pytest.raises(AssertionError, match="sending alie, 'does nothing in'"):
        check(made, attack, nothing)


@pytest.mark.parametrize("part", PART_LIST, ids=repr)
def test_every_part_fits_what_it_needs(part: Part) -> None:
    assert fits(part)


SEED, SAMPLE = 36, 100


def test_some_pairs() -> None:
    """A quarter is refused."""
    refused = 0
    for pair in random.Random(SEED).sample(PAIRS, SAMPLE):
        made = fits(*pair)
        refused += made is None
        if made and traces(*pair):
            check(made, *pair)
    assert 0.1 < refused / SAMPLE < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("role", dict.fromkeys(one.role for one, _ in PAIRS))
def test_every_pair(role: str) -> None:
    """Each is composed; each part is traced with one that fits of every other role.

    ``EVERY_PAIR=1 pytest -m slow tests/test_compositions.py`` traces all that fit.
    """
    pairs = [pair for pair in PAIRS if pair[0].role == role]
    random.Random(SEED).shuffle(pairs)
    seen = set[str]()
    for one, other in pairs:
        made = fits(one, other)
        new = {f"{one} {other.role}", f"{other} {one.role}"} - seen
        if made and traces(one, other) and (new or "EVERY_PAIR" in os.environ):
            check(made, one, other)
            seen |= new
