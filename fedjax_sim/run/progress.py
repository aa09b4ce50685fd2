"""Progress bars of runs, in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedjax_sim.base.brief import over_runs
from fedjax_sim.run.evaluation import Evaluation

Report = Callable[[int, str], None]
"""Takes the number of rounds done, and a note."""


def is_watched() -> bool:
    """Returns whether stderr is a terminal or the output of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or "IPKernelApp" in getattr(shell, "config", ())


@contextmanager
def progress_bar(what: str, rounds: int, done: int = 0) -> Iterator[Report]:
    """Shows a progress bar on stderr; its speed excludes the first ``done`` rounds."""
    from tqdm import tqdm

    form: dict[str, Any] = {"desc": what, "unit": "round", "postfix": "compiling"}
    with tqdm(total=rounds, initial=done, **form) as bar:

        def report(done: int, note: str) -> None:
            bar.set_postfix_str(note, refresh=done == bar.n)
            bar.update(max(0, done - bar.n))

        yield report


def reporting(
    report: Report,
    on_evaluation: Callable[[Evaluation], None] | None,
    on_rounds: Callable[[int], None] | None,
) -> tuple[Callable[[Evaluation], None], Callable[[int], None]]:
    """Returns callbacks of a run that also report its rounds and its last score."""
    note = ""

    def evaluated(evaluation: Evaluation) -> None:
        nonlocal note
        score = evaluation.test.metrics[0]
        note = f"{score} {over_runs(evaluation.test.reported[score])}"
        if on_evaluation is not None:
            on_evaluation(evaluation)

    def advanced(done: int) -> None:
        report(done, note)
        if on_rounds is not None:
            on_rounds(done)

    return evaluated, advanced
