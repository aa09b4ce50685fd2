"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fedjax_sim.base import Metric
from fedjax_sim.cli.report import byte_unit, in_unit, number, target_text, to_target, with_std
from fedjax_sim.cli.reporting.compare import (
    Group,
    Moment,
    Over,
    decisive,
    difference,
    over_runs,
    worst_tenth,
)
from fedjax_sim.cli.reporting.read import Floats, Trial
from fedjax_sim.cli.reporting.statistics import Difference, holm
from fedjax_sim.tasks.sums import SHARE

T = TypeVar("T")
MOMENTS: tuple[Moment, ...] = ("final", "validated", "validation")


class Best(str):
    """The text of a cell that is the best of its column."""

    __slots__ = ()


class Second(str):
    """The text of a cell that is the second-best of its column."""

    __slots__ = ()


class Table(NamedTuple):
    """A table.

    Attributes:
        head: the titles of the columns; the first column has names, the others have numbers.
        rows: texts, see :class:`Best` and :class:`Second`.
        words: whether other columns also have words.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


def by_title(rows: Sequence[Mapping[str, str]], *, words: bool = False) -> Table:
    """Returns the table of rows whose cells are given by the titles of the columns."""
    head = tuple(dict.fromkeys(title for row in rows for title in row))
    return Table(head, [[row.get(title, "-") for title in head] for row in rows], words)


def over_text(over: Over | None, metric: Metric) -> str:
    """Formats a score over runs, or the reason why there is none.

    >>> over_text(Over(np.array([0.5, np.nan, 0.7])), Metric(percent=True))
    '60.00 ± 10.00 (2 of 3 runs)'
    """
    if over is None:
        return "-"
    runs, known = len(over.values), int(np.isfinite(over.values).sum())
    if over.diverged or not known:
        return over.diverged or "not known"
    score = with_std(over.mean, over.std, metric) if runs > 1 else number(over.mean, metric)
    return score + (f" ({known} of {runs} runs)" if known < runs else "")


def scores(group: Group, *, with_differences: bool = False) -> Table:
    """Returns the scores and the traffic of a group's methods, with differences for a paper."""
    trials, metric = group.trials, group.trials[0].metric
    moments = [m for m in MOMENTS if any(t.validation is not None for t in trials) or m == "final"]
    overs = {m: [over_runs(t, m) for t in trials] for m in moments}
    cells = {m: _scored(overs[m], metric) for m in moments}
    size = byte_unit(sent for trial in trials for sent in sent_bytes(trial))
    found = differences(group)
    rows = []
    for i, trial in enumerate(trials):
        row = {"method": group.label(trial), "runs": str(trial.runs)}
        for moment in moments:
            row[moment + " %" * metric.percent] = cells[moment][i]
        if with_differences:
            one = found.get(trial)
            known = one is not None and len(one.values) > 0
            row["difference"] = gain_text(one, metric) if one is not None and known else "-"
            row["p"] = chance(one.p) if one is not None and known else "-"
        attack = "personal_" * trial.own + "attack_success_last"
        success = trial.summary.get(attack)
        if success is not None and "attack_success" not in trial.score:
            std = trial.summary[f"{attack}_std"]
            several = trial.runs > 1
            row["attack success %"] = (
                with_std(success, std, SHARE) if several else number(success, SHARE)
            )
        began = len(trial.rounds) > 0
        ratio = trial.summary.get("traffic_ratio")
        row["rounds"] = str(trial.rounds[-1]) if began else "-"
        for way, sent in zip(("up", "down"), sent_bytes(trial), strict=True):
            row[f"{size} {way}"] = in_unit(sent, size) if began else "-"
        row["traffic/FedAvg"] = "-" if ratio is None else f"{ratio:.3f}"
        rows.append(row)
    return by_title(rows)


def _scored(overs: Sequence[Over | None], metric: Metric) -> list[str]:
    means = [math.nan if over is None else over.mean for over in overs]
    return mark_best([over_text(over, metric) for over in overs], means, metric)


def mark_best(
    texts: Sequence[str], means: Sequence[float], shown: Metric | Sequence[str]
) -> list[str]:
    """Marks the best and the second-best cells of a column, but none that is the worst.

    Args:
        texts: the cells.
        means: their numbers; NaN if unknown.
        shown: the metric of the means, or their texts (then the lowest is the best). Means with the
          same text are equal.

    >>> [type(cell).__name__ for cell in mark_best("abcd", [1, 2, 3, 1], Metric())]
    ['str', 'Second', 'Best', 'str']
    >>> [type(cell).__name__ for cell in mark_best("abc", [1.5, 1.5, 3], ["1.50", "1.50", "3.00"])]
    ['Best', 'Best', 'str']
    """
    lowest = not isinstance(shown, Metric) or shown.best == "lowest"
    written = [number(m, shown) for m in means] if isinstance(shown, Metric) else shown
    known = [i for i, mean in enumerate(means) if not math.isnan(mean)]
    known.sort(key=lambda i: means[i], reverse=not lowest)
    in_order = [*dict.fromkeys(written[i] for i in known)]
    better = in_order[:-1] if len(known) == len(texts) else in_order
    marks = dict(zip(better, (Best, Second), strict=False))
    return [
        marks[written[i]](text) if i in known and written[i] in marks else text
        for i, text in enumerate(texts)
    ]


def sent_bytes(trial: Trial) -> tuple[float, float]:
    """Returns the mean bytes up and down over runs, in all rounds."""
    if not len(trial.rounds):
        return 0.0, 0.0
    up, down = trial.sent[:, -1].mean(axis=1).tolist()
    return up, down


def differences(group: Group) -> dict[Trial, Difference]:
    """Returns the difference of each other method from the baseline; empty without a baseline."""
    if group.baseline is None:
        return {}
    moment = decisive(group.trials)
    others = (trial for trial in group.trials if trial is not group.baseline)
    return {trial: difference(trial, group.baseline, moment) for trial in others}


def compared(group: Group) -> Table:
    """Returns the differences to the baseline; the group must have one."""
    metric = group.trials[0].metric
    rows = []
    corrected = with_holm(differences(group))
    for trial, found in differences(group).items():
        n = len(found.values)
        gain = gain_text(found, metric) if n else "no pairs"
        for one, whose in ((trial, ""), (group.baseline, "baseline ")):
            if one is not None and one.diverged:
                gain = whose + over_text(over_runs(one, "final"), metric)
                break
        rows.append(
            {
                "method": group.label(trial),
                "pairs": str(n),
                "of them equal": str(found.equal) if n else "-",
                f"difference{' (points)' * metric.percent}": gain,
                "p": chance(found.p),
                "p, Holm": chance(corrected.get(trial)),
                "least p of so many": chance(None if found.p is None else found.least),
            }
        )
    return by_title(rows)


def with_holm(found: Mapping[T, Difference]) -> dict[T, float]:
    """Returns p corrected for the number of comparisons, without comparisons that have no pairs.

    Equal scores count as a comparison with p = 1.
    """
    known = {key: of for key, of in found.items() if len(of.values)}
    p = holm(np.array([1.0 if of.p is None else of.p for of in known.values()]))
    return dict(zip(known, p.tolist(), strict=True))


def gain_text(found: Difference, metric: Metric) -> str:
    """Formats a difference over runs, with its sign."""
    text = over_text(Over(found.values), metric)
    return text if text.startswith("-") else f"+{text}"


def chance(p: float | None) -> str:
    """Formats a p-value.

    >>> chance(0.0625), chance(1), chance(1e-7), chance(None)
    ('0.0625', '1', '< 0.0001', '-')
    """
    if p is None:
        return "-"
    return f"{p:.3g}" if p >= 1e-4 else "< 0.0001"


def by_client(group: Group) -> Table | None:
    """Returns statistics of the clients' scores; None if there are no such scores."""
    metric = group.trials[0].metric
    rows = []
    for trial in group.trials:
        tenth = worst_tenth(trial)
        if tenth is not None:
            every = [of[~np.isnan(of)] for of in trial.by_client]
            worst = np.max if metric.best == "lowest" else np.min
            cells = {
                "mean": _over(every, np.mean),
                "worst tenth": tenth,
                "worst": _over(every, worst),
                "std": _over(every, np.std),
            }
            percent = " %" * metric.percent
            texts = {f"{name}{percent}": over_text(of, metric) for name, of in cells.items()}
            rows.append({"method": group.label(trial)} | texts)
    return by_title(rows) if rows else None


def _over(every: Sequence[Floats], of: Callable[[Floats], float]) -> Over:
    return Over(np.array([of(values) if len(values) else math.nan for values in every]))


def targets(group: Group) -> Table | None:
    """Returns rounds, traffic and seconds until the targets; None if no method has a target.

    The summary has them for the server's model, or for the clients' own if that is not scored.
    """
    metric = group.trials[0].metric
    size = byte_unit(b for trial in group.trials for b in sent_bytes(trial))
    rows = [
        {"method": group.label(trial), "target": target_text(trial.summary["target"], metric)}
        | to_target(trial.summary, size)
        for trial in group.trials
        if "target" in trial.summary and trial.own == trial.summary.get("own_leaves", False)
    ]
    return by_title(rows) if rows else None
