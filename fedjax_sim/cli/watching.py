"""Who is told while programs run, and the progress bar, which is told if nobody else is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from fedjax_sim.cli.methods import name_of


class Tell(Protocol):
    """Takes how far some programs are."""

    def __call__(self, done: int, note: str, /) -> None:
        """So many rounds, and what is to be said of them."""


class Watch(Protocol):
    """Looks on while the algorithms of one program run."""

    def __call__(self, names: Sequence[str], rounds: int, /) -> AbstractContextManager[Tell]:
        """Their names, and the rounds of each; entered before they compile."""


def called(names: Sequence[str]) -> str:
    """The algorithms of one program.

    >>> called(["fedavg"]), called(["fedprox(mu=0.1)", "fedprox(mu=1)"])
    ('fedavg', 'fedprox, 2 settings')
    """
    return names[0] if len(names) == 1 else f"{name_of(names[0])}, {len(names)} settings"


@contextmanager
def bar(names: Sequence[str], rounds: int) -> Iterator[Tell]:
    """A progress bar on stderr; none if that is a file."""
    from tqdm import tqdm

    what = called(names)
    with tqdm(total=rounds, desc=what, unit="round", disable=None, postfix="compiling") as shown:

        def tell(done: int, note: str) -> None:
            shown.set_postfix_str(note, refresh=done == shown.n)
            shown.update(done - shown.n)

        yield tell


@contextmanager
def nobody(names: Sequence[str], rounds: int) -> Iterator[Tell]:
    """Tells nothing."""
    del names, rounds
    yield lambda done, note: None
