"""Any two parts: refused in a line that names two, or each does something."""

from __future__ import annotations

import itertools
import random

import numpy as np
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


def check(*given: Part) -> bool:
    """Whether the parts fit together; then each that bears marks does something."""
    made = refusal(*given)
    if isinstance(made, str) or not any(map(bears_marks, given)) or apart(*given):
        return not isinstance(made, str)
    if not any({part.role, *part.beside} & {*LOCAL} for part in given):
        made = made.replace(local=one_step())  # less to trace
    try:
        found = at_work(made)
    except ValueError as error:
        if not str(error).startswith(AT_THE_START):
            raise
        return False
    for i, part in enumerate(given):
        assert f"part {i}" in found or not bears_marks(part), (part, "does nothing in", given)
    return True


def test_an_attack_on_no_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were not refused."""
    attack, nothing = part_named("sending alie"), part_named("exchange nothing")
    assert not check(attack, nothing)
    assert check(attack, part_named("exchange own"))
    monkeypatch.setattr("fedjax_sim.round.fit._derived", lambda parts: ())
    with pytest.raises(AssertionError, match="sending alie, 'does nothing in'"):
        check(attack, nothing)


@pytest.mark.parametrize("part", PART_LIST, ids=repr)
def test_every_part_fits_what_it_needs(part: Part) -> None:
    assert isinstance(refusal(part), fs.Algorithm)


SEED, SAMPLE, PIECES = 36, 200, 12


def test_some_pairs() -> None:
    fit = [check(*pair) for pair in random.Random(SEED).sample(PAIRS, SAMPLE)]
    assert 0.6 < np.mean(fit) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_pair(piece: int) -> None:
    """A quarter is refused."""
    fit = [check(*pair) for pair in PAIRS[piece::PIECES]]
    assert 0.6 < np.mean(fit) < 0.9
