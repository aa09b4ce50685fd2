"""What the programs of an experiment give, from one evaluation to the next."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base import Array, FedState, Metrics, PyTree, Variables
from fedjax_sim.run.metrics import Counts


class Run(NamedTuple):
    """A run between two programs: ``keys key[R]`` and the state of all R runs."""

    keys: Array
    state: FedState


class Scored(NamedTuple):
    """Counts of an evaluation; ``[R, ...]``.

    Attributes:
        sets: of the server model, for each evaluation set.
        personal: of each client's own model on the first set; None if there are none.
    """

    sets: tuple[Counts, ...]
    personal: Counts | None


class Unscored(NamedTuple):
    """What an evaluation scores; ``[R, ...]``.

    Attributes:
        variables: the models, for the evaluation sets.
        personal: as in :class:`Scored`: it takes the algorithm to know each client's own model.
    """

    variables: Variables
    personal: Counts | None


class Collected(NamedTuple):
    """What :meth:`Experiment.finish` gives; ``[R, ...]``.

    Attributes:
        variables: the final models.
        uploads: ``int32[R]``, models sent for it.
        counts: of the final models.
    """

    variables: Variables
    uploads: Array
    counts: Scored


class Stage(NamedTuple):
    """The rounds from one evaluation to the next, or those of them that are done.

    Attributes:
        rounds: how many.
        metrics: ``[R, rounds]``, NumPy.
        scored: of the models after them; None before the evaluation.
        variables: ``[R, *p]``, the server models after them and after ``collected``;
            None like ``run``.
        collected: after the last round, if anything was left to do; else None.
        run: after them; None of a stage that was restored and was not the last.
        recorded: what was to be kept of it.
        wall: seconds until its evaluation, of a stage that was restored.
    """

    rounds: int
    metrics: Metrics
    scored: Scored | None
    variables: Variables | None
    collected: Collected | None
    run: Run | None
    recorded: PyTree
    wall: float | None = None
