"""What the files of a run must have for a report: the kinds of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_sim.cli.loading import SavedRun

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def whole(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any) -> bool:
    """Whether it is a number."""
    return (whole(value) or isinstance(value, float)) and math.isfinite(value)


def table(value: Any) -> bool:
    """Whether it has values by name."""
    return isinstance(value, dict)


def metric(value: Any) -> bool:
    """Whether it says how a score is read."""
    return (
        table(value)
        and value.keys() == {"best", "percent"}
        and value["best"] in ("highest", "lowest")
        and isinstance(value["percent"], bool)
    )


def maybe(check: Check) -> Check:
    """The same, or null."""
    return lambda value: value is None or check(value)


def many(check: Check) -> Check:
    """A list of such values."""
    return lambda value: isinstance(value, list) and all(map(check, value))


SETTINGS: Mapping[str, Check] = {
    "algo": text,
    "compare": many(text),
    "options": table,
    "command": text,
    "dataset": text,
    "partition": text,
    "clients": whole,
    "split": text,
    "folds": maybe(whole),
    "test_fraction": maybe(number),
    "standardise": maybe(text),
    "seeds": many(whole),
    "partitions": many(maybe(text)),
    "partition_hashes": many(text),
    "task": text,
    "score": text,
    "metric": metric,
}
"""Of ``config.json``; all are needed."""

METHOD: Mapping[str, Check] = {
    "score": text,
    "diverged": text,
    "rounds": whole,
    "rounds_planned": whole,
    "traffic_ratio": maybe(number),
    "skipped": whole,
    "target": number,
    "target_rounds_per_run": many(maybe(number)),
    "target_bytes_per_run": many(maybe(number)),
    "epsilon": number,
    "epsilon_unknown": text,
    "delta": number,
    "mu_first": number,
    "mu_last": number,
    "seconds": number,
    "idle_share": number,
    "asleep": number,
    "lost": number,
    "late": number,
    "watt_hours": number,
    "target_seconds_per_run": many(maybe(number)),
}
"""Of a method in ``summary.json``; what is not there is not told."""

RECORD: Mapping[str, Check] = {
    "algorithm": text,
    "seed": whole,
    "round": whole,
    "test_loss": maybe(number),
    "bytes_up": whole,
    "bytes_down": whole,
}
"""Of a line of ``metrics.jsonl``; all are needed."""

CLIENTS: Mapping[str, Check] = {"algorithm": text, "seed": whole}
"""Of a line of ``clients.jsonl``; all are needed."""

TOGETHER = (
    {"target", "target_rounds_per_run", "target_bytes_per_run"},
    {"epsilon", "delta"},
    {"mu_first", "mu_last"},
    {"rounds", "score"},
    {"seconds", "idle_share", "asleep", "lost", "late"},
)
"""What a method's summary has all of, or nothing."""

RUN: Mapping[str, Check] = {"versions": table, "devices": many(text)}
"""Of ``summary.json`` itself."""


def check_run(saved: SavedRun) -> None:
    """Refuses a run whose settings or summary are not what the command writes.

    Raises:
        ValueError: names the file, the entry and what it is.
    """
    path = saved.folder / "config.json"
    _check(f"{path}", saved.settings, SETTINGS, needed=True)
    for name, own in saved.settings["options"].items():
        _check(f"{path}, options", {name: own}, {name: table})
    if not saved.settings["seeds"] or not saved.settings["partition_hashes"]:
        raise ValueError(f"{path} is damaged: it has no seeds, or no partitions")
    path = saved.folder / "summary.json"
    _check(f"{path}", saved.summary, RUN)
    for name in saved.algorithms:
        if name in saved.summary:
            _check(f"{path}", saved.summary, {name: table})
            _check_method(f"{path}, {name}", saved.summary[name])
    for file, rows, checks in (
        ("metrics.jsonl", saved.records, RECORD),
        ("clients.jsonl", saved.clients, CLIENTS),
    ):
        for i, row in enumerate(rows, 1):
            where = f"{saved.folder / file}, line {i}"
            _check(where, row, checks, needed=True)
            _check(where, row, {"fold": maybe(whole)})


def _check_method(where: str, found: Mapping[str, Any]) -> None:
    _check(where, found, METHOD)
    for names in TOGETHER:
        if 0 < len(names & found.keys()) < len(names):
            raise ValueError(
                f"{where} is damaged: it lacks {', '.join(sorted(names - found.keys()))}"
            )
    if "diverged" not in found and "rounds" not in found:
        raise ValueError(f"{where} is damaged, or of another version: it lacks rounds")


def _check(
    where: str, found: Mapping[str, Any], checks: Mapping[str, Check], *, needed: bool = False
) -> None:
    for name, check in checks.items():
        if needed and name not in found:
            raise ValueError(f"{where} is damaged, or of another version: it lacks {name}")
        if name in found and not check(found[name]):
            raise ValueError(f"{where} is damaged: {name} cannot be {str(found[name])[:40]!r}")
