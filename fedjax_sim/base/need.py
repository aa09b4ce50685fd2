"""What a part needs of the others, so that ``compose`` can refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """What a part needs of another one.

    Attributes:
        role: of the other part, as a keyword of ``compose``.
        what: what it must be, in words: "the plain mean".
        met: whether the parts (:class:`fedjax_sim.round.Parts`) are so.
        instead: what would work, as it is written: "aggregator=mean".
    """

    role: str
    what: str
    met: Callable[[Any], bool]
    instead: str
