"""The tables of a report: what stands in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_sim.base import Metric
from fedjax_sim.cli.report import byte_unit, digits, to_target
from fedjax_sim.cli.reporting.compare import (
    Difference,
    Group,
    Moment,
    Over,
    decisive,
    difference,
    over_runs,
    worst_tenth,
)
from fedjax_sim.cli.reporting.read import Floats, Trial

MOMENTS: tuple[Moment, ...] = ("final", "validated", "validation")


class Cell(NamedTuple):
    """What stands in a table.

    Attributes:
        text: plain.
        best: whether it is the best of its column.
    """

    text: str
    best: bool = False


class Table(NamedTuple):
    """A table.

    Attributes:
        head: the titles of its columns; the first is of names, the others of numbers.
        rows: of cells.
        words: whether other columns are of words too.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: bool = False


def number(value: float, metric: Metric, beside: float | None = None) -> str:
    """A score; of a spread, with as many places as the mean beside it.

    >>> number(0.9123, Metric(percent=True)), number(2903.416, Metric())
    ('91.23', '2,903')
    """
    return f"{100 * value:.2f}" if metric.percent else digits(value, beside)


def told(over: Over | None, metric: Metric) -> str:
    """A score over runs; in words if there is none.

    >>> told(Over(np.array([0.5, np.nan, 0.7])), Metric(percent=True))
    '60.00 ± 10.00 (2 of 3 runs)'
    """
    if over is None:
        return "-"
    known = int(np.isfinite(over.values).sum())
    if over.diverged or not known:
        return over.diverged or "not known"
    spread = f" ± {number(over.std, metric, over.mean)}" if len(over.values) > 1 else ""
    some = f" ({known} of {len(over.values)} runs)" if known < len(over.values) else ""
    return number(over.mean, metric) + spread + some


def scores(group: Group) -> Table:
    """Scores and traffic of a group's methods."""
    trials = group.trials
    metric = trials[0].metric
    overs = {m: [over_runs(t, m) for t in trials] for m in MOMENTS}
    moments = [m for m in MOMENTS if any(t.validation is not None for t in trials) or m == "final"]
    sent = [sent_bytes(t) for t in trials]
    size, unit = byte_unit(b for pair in sent for b in pair)
    places = 0 if size == "B" else 1
    percent = " %" * metric.percent
    head = ("method", "runs", *(m + percent for m in moments), "rounds", f"{size} up",
            f"{size} down", "traffic/FedAvg")  # fmt: skip
    best = {m: _best(overs[m], metric) for m in moments}
    rows = []
    for i, trial in enumerate(trials):
        ratio = trial.summary.get("traffic_ratio")
        rows.append(
            (
                Cell(group.label(trial)),
                Cell(str(trial.runs)),
                *(Cell(told(overs[m][i], metric), i in best[m]) for m in moments),
                Cell(str(trial.rounds[-1]) if len(trial.rounds) else "-"),
                *(Cell(f"{b / unit:,.{places}f}" if len(trial.rounds) else "-") for b in sent[i]),
                Cell("-" if ratio is None else f"{ratio:.3f}"),
            )
        )
    return Table(head, tuple(rows))


def _best(overs: Sequence[Over | None], metric: Metric) -> set[int]:
    """The best of several means; those that look alike are alike."""
    means = {i: o.mean for i, o in enumerate(overs) if o is not None and not math.isnan(o.mean)}
    if len(means) < 2:
        return set()
    best = (min if metric.best == "lowest" else max)(means.values())
    return {i for i, mean in means.items() if number(mean, metric) == number(best, metric)}


def sent_bytes(trial: Trial) -> tuple[float, float]:
    """Up and down in all rounds, the mean over runs."""
    if not len(trial.rounds):
        return 0.0, 0.0
    up, down = trial.sent[:, -1].mean(axis=1).tolist()
    return up, down


def differences(group: Group) -> dict[Trial, Difference]:
    """Of each method to the baseline, if the group has it and others."""
    if group.baseline is None:
        return {}
    moment = decisive(group.trials)
    others = (trial for trial in group.trials if trial is not group.baseline)
    return {trial: difference(trial, group.baseline, moment) for trial in others}


def compared(group: Group) -> Table:
    """The differences to the baseline; they need one."""
    metric = group.trials[0].metric
    points = " (points)" if metric.percent else ""
    head = ("method", "pairs", "of them equal", f"difference{points}", "p", "least p of so many")
    rows = []
    for trial, found in differences(group).items():
        n = len(found.values)
        over = Over(found.values) if n else None
        p = "-" if found.p is None else chance(found.p)
        least = "-" if found.p is None or found.least is None else chance(found.least)
        gain = "no pairs" if over is None else _signed(told(over, metric))
        for one, whose in ((trial, ""), (group.baseline, "baseline ")):
            if one is not None and one.diverged:
                gain = whose + told(over_runs(one, "final"), metric)
                break
        rows.append((group.label(trial), str(n), str(found.equal) if n else "-", gain, p, least))
    return Table(head, tuple(tuple(map(Cell, row)) for row in rows))


def _signed(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"


def chance(p: float) -> str:
    """A p-value.

    >>> chance(0.0625), chance(1), chance(1e-7)
    ('0.0625', '1', '< 0.0001')
    """
    return f"{p:.3g}" if p >= 1e-4 else "< 0.0001"


def by_client(group: Group) -> Table | None:
    """How the clients fare; None without scores of theirs."""
    metric = group.trials[0].metric
    rows = []
    for trial in group.trials:
        tenth = worst_tenth(trial)
        if tenth is not None:
            every = [of[~np.isnan(of)] for of in trial.by_client]
            worst = np.max if metric.best == "lowest" else np.min
            cells = (_over(every, np.mean), tenth, _over(every, worst), _over(every, np.std))
            rows.append((group.label(trial), *(told(cell, metric) for cell in cells)))
    percent = " %" * metric.percent
    head = ("method", *(f"{name}{percent}" for name in ("mean", "worst tenth", "worst", "std")))
    return Table(head, tuple(tuple(map(Cell, row)) for row in rows)) if rows else None


def _over(every: Sequence[Floats], of: Callable[[Floats], float]) -> Over:
    return Over(np.array([of(values) if len(values) else math.nan for values in every]))


def targets(group: Group) -> Table | None:
    """What it took to reach the targets; None without one."""
    metric = group.trials[0].metric
    size, unit = byte_unit(b for trial in group.trials for b in sent_bytes(trial))
    rows = []
    for trial in group.trials:
        if "target" in trial.summary:
            aim = trial.summary["target"]
            text = f"{100 * aim:g} %" if metric.percent else digits(aim)
            reached = to_target(trial.summary, unit, 0 if size == "B" else 1)
            rows.append((group.label(trial), text, *reached))
    head = ("method", "target", "rounds", size, "seconds")[: max(map(len, rows), default=0)]
    told = (map(Cell, (*row, *["-"] * (len(head) - len(row)))) for row in rows)
    return Table(head, tuple(map(tuple, told))) if rows else None


def combined(group: Group) -> Table:
    """Scores with the differences beside them, for a paper."""
    table, found = scores(group), differences(group)
    metric = group.trials[0].metric
    n = len(table.head)
    head = (*table.head[: n - 4], "difference", "p", *table.head[n - 4 :])
    rows = []
    for trial, row in zip(group.trials, table.rows, strict=True):
        one = found.get(trial)
        gain, p = "-", "-"
        if one is not None and len(one.values):
            gain = _signed(told(Over(one.values), metric))
            p = "-" if one.p is None else chance(one.p)
        rows.append((*row[: n - 4], Cell(gain), Cell(p), *row[n - 4 :]))
    return Table(head, tuple(rows))
