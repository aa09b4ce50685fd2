"""Requirements of one part on another, checked by ``compose``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """A requirement of one part on another.

    ``met`` asks what the other part promises, never how it is called: a user's part that makes the
    same promise fits as well.

    Attributes:
        role: the role of the other part, as a keyword of ``compose``.
        what: the requirement in words: "the plain mean".
        met: whether the parts (:class:`fedjax_sim.round.Parts`) meet it.
        instead: what to write instead: "aggregator=mean".
    """

    role: str
    what: str
    met: Callable[[Any], bool]
    instead: str
