"""The schema of a run's folder: what its files must have, and the kinds of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    """Returns whether a value is a text."""
    return isinstance(value, str)


def switch(value: Any) -> bool:
    """Returns whether a value is true or false."""
    return isinstance(value, bool)


def whole(value: Any) -> bool:
    """Returns whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def number(value: Any) -> bool:
    """Returns whether a value is a finite number."""
    return (whole(value) or isinstance(value, float)) and math.isfinite(value)


def table(value: Any) -> bool:
    """Returns whether a value has values by name."""
    return isinstance(value, dict)


def random(value: Any) -> bool:
    """Returns whether a value has JAX's settings of random numbers."""
    return table(value) and all(switch(one) or text(one) for one in value.values())


def tables(value: Any) -> bool:
    """Returns whether a value has tables by name."""
    return table(value) and all(map(table, value.values()))


def metric(value: Any) -> bool:
    """Returns whether a value describes how a score is read."""
    return (
        table(value)
        and value.keys() == {"best", "percent"}
        and value["best"] in ("highest", "lowest")
        and isinstance(value["percent"], bool)
    )


def maybe(check: Check) -> Check:
    """Returns a check for such a value or null."""
    return lambda value: value is None or check(value)


def many(check: Check) -> Check:
    """Returns a check for a list of such values."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def some(check: Check) -> Check:
    """Returns a check for a list of at least one such value."""
    return lambda value: many(check)(value) and bool(value)


SETTINGS: Mapping[str, Check] = {
    "algo": text,
    "compare": many(text),
    "options": tables,
    "arguments": many(text),
    "dataset": text,
    "partition": text,
    "clients": whole,
    "split": text,
    "folds": maybe(whole),
    "test_clients": maybe(some(text)),
    "adapt": maybe(number),
    "test_fraction": maybe(number),
    "validation": maybe(number),
    "standardise": maybe(text),
    "seeds": some(whole),
    "rounds": whole,
    "programs": many(some(text)),
    "partitions": some(maybe(text)),
    "partition_hashes": some(text),
    "task": text,
    "score": text,
    "metric": metric,
    "jax": random,
}
"""Schema of ``config.json``; all keys are required."""

METHOD: Mapping[str, Check] = {
    "score": text,
    "score_last_per_run": many(maybe(number)),
    "diverged": text,
    "rounds": whole,
    "rounds_planned": whole,
    "traffic_ratio": maybe(number),
    "skipped": whole,
    "attack_success_last": maybe(number),
    "attack_success_last_std": maybe(number),
    "target": number,
    "target_rounds_per_run": many(maybe(number)),
    "target_bytes_per_run": many(maybe(number)),
    "epsilon": number,
    "epsilon_unknown": text,
    "delta": number,
    "client_epsilon_min": number,
    "client_epsilon_median": number,
    "client_epsilon_max": number,
    "client_epsilon_protects": text,
    "client_epsilon_unknown": text,
    "client_delta": number,
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
"""Schema of a method's entry in ``summary.json``; all keys are optional."""

RECORD: Mapping[str, Check] = {
    "algorithm": text,
    "seed": whole,
    "round": whole,
    "test_loss": maybe(number),
    "bytes_up": whole,
    "bytes_down": whole,
}
"""Schema of a line of ``metrics.jsonl``; all keys are required."""

CLIENTS: Mapping[str, Check] = {"algorithm": text, "seed": whole}
"""Schema of a line of ``clients.jsonl``; all keys are required."""

TOGETHER = (
    {"target", "target_rounds_per_run", "target_bytes_per_run"},
    {"epsilon", "delta"},
    {
        *(f"client_epsilon_{what}" for what in ("min", "median", "max", "protects")),
        "client_delta",
    },
    {"mu_first", "mu_last"},
    {"rounds", "score"},
    {"attack_success_last", "attack_success_last_std"},
    {"seconds", "idle_share", "asleep", "lost", "late"},
)
"""Sets of keys that a method's summary has together or not at all."""

RUN: Mapping[str, Check] = {
    "date": text,
    "command": text,
    "commit": maybe(text),
    "dirty": maybe(switch),
    "versions": table,
    "jax": random,
    "xla_flags": text,
    "machine": table,
    "devices": many(text),
}
"""Schema of the other entries of ``summary.json``."""


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Checks ``config.json``.

    Raises:
        ValueError: if it is not as the command writes it; names the file, the entry and its value.
    """
    _check(f"{path}", settings, SETTINGS, needed=True)


def check_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Checks ``summary.json``, see :func:`check_settings`."""
    _check(f"{path}", summary, RUN)
    for name in summary.keys() - RUN.keys():
        _check(f"{path}", summary, {name: table})
        where, found = f"{path}, {name}", summary[name]
        _check(where, found, METHOD)
        for names in TOGETHER:
            if names & found.keys() and (lacking := names - found.keys()):
                raise ValueError(f"{where} is damaged: it lacks {', '.join(sorted(lacking))}")
        if "diverged" not in found and "rounds" not in found:
            raise ValueError(f"{where} is damaged, or of another version: it lacks rounds")


def check_rows(path: Path, rows: Iterable[Mapping[str, Any]], needed: Mapping[str, Check]) -> None:
    """Checks ``metrics.jsonl`` or ``clients.jsonl``, see :func:`check_settings`."""
    for i, row in enumerate(rows, 1):
        _check(f"{path}, line {i}", row, needed, needed=True)
        _check(f"{path}, line {i}", row, {"fold": maybe(whole)})


def validated(path: Path, row: Mapping[str, Any], score: str) -> float | None:
    """Returns the validation score of a line of ``metrics.jsonl``, the clients' mean if it has one.

    Raises:
        ValueError: if it has none that is a number or null; names the file and the line's round.
    """
    found: Any = row.get("validation")
    found = found.get(f"client_{score}", found.get(score, {})) if table(found) else {}
    found = found.get("mean", {}) if table(found) else found
    if not maybe(number)(found):
        raise ValueError(
            f"{path} is damaged: validation of {row['algorithm']} in round {row['round']} must "
            f"have a number or null as {score}, got {str(row.get('validation'))[:40]!r}"
        )
    return None if found is None else float(found)


def _check(
    where: str, found: Mapping[str, Any], checks: Mapping[str, Check], *, needed: bool = False
) -> None:
    for name, check in checks.items():
        if needed and name not in found:
            raise ValueError(f"{where} is damaged, or of another version: it lacks {name}")
        if name in found and not check(found[name]):
            raise ValueError(f"{where} is damaged: {name} cannot be {str(found[name])[:40]!r}")
