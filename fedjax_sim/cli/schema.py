"""The schema of a run's folder: what its files must have, and the kinds of their values."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal

SETTINGS: Mapping[str, Any] = {
    "algo": str,
    "compare": list[str],
    "options": dict[str, dict[str, Any]],
    "arguments": list[str],
    "dataset": str,
    "partition": str,
    "clients": int,
    "split": str,
    "folds": int | None,
    "test_clients": tuple[str, ...] | None,
    "adapt": float | None,
    "test_fraction": float | None,
    "validation": float | None,
    "standardise": str | None,
    "seeds": tuple[int, ...],
    "rounds": int,
    "programs": list[tuple[str, ...]],
    "partitions": tuple[str | None, ...],
    "partition_hashes": tuple[str, ...],
    "task": str,
    "score": str,
    "metric": {"best": Literal["highest", "lowest"], "percent": bool},
    "jax": dict[str, bool | str],
}
"""Schema of ``config.json``; all keys are required. A tuple is a list of at least one value."""

METHOD: Mapping[str, Any] = {
    "score": str,
    "score_last_per_run": list[float | None],
    "diverged": str,
    "rounds": int,
    "rounds_planned": int,
    "traffic_ratio": float | None,
    "skipped": int,
    "attack_success_last": float | None,
    "attack_success_last_std": float | None,
    "target": float,
    "target_rounds_per_run": list[float | None],
    "target_bytes_per_run": list[float | None],
    "epsilon": float,
    "epsilon_unknown": str,
    "delta": float,
    "client_epsilon_min": float,
    "client_epsilon_median": float,
    "client_epsilon_max": float,
    "client_epsilon_protects": str,
    "client_epsilon_unknown": str,
    "client_delta": float,
    "mu_first": float,
    "mu_last": float,
    "seconds": float,
    "idle_share": float,
    "asleep": float,
    "lost": float,
    "late": float,
    "watt_hours": float,
    "target_seconds_per_run": list[float | None],
}
"""Schema of a method's entry in ``summary.json``; all keys are optional."""

RECORD: Mapping[str, Any] = {
    "algorithm": str,
    "seed": int,
    "round": int,
    "test_loss": float | None,
    "bytes_up": int,
    "bytes_down": int,
}
"""Schema of a line of ``metrics.jsonl``; all keys are required."""

CLIENTS: Mapping[str, Any] = {"algorithm": str, "seed": int}
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

RUN: Mapping[str, Any] = {
    "date": str,
    "command": str,
    "commit": str | None,
    "dirty": bool | None,
    "versions": dict[str, Any],
    "jax": dict[str, bool | str],
    "xla_flags": str,
    "machine": dict[str, Any],
    "devices": list[str],
}
"""Schema of the other entries of ``summary.json``."""


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Checks ``config.json``."""
    _check(f"{path}", settings, SETTINGS, needed=True)


def check_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Checks ``summary.json``."""
    _check(f"{path}", summary, RUN)
    for name in summary.keys() - RUN.keys():
        _check(f"{path}", summary, {name: dict[str, Any]})
        where, found = f"{path}, {name}", summary[name]
        _check(where, found, METHOD)
        for names in TOGETHER:
            if names & found.keys() and (lacking := names - found.keys()):
                raise ValueError(f"{where} is damaged: it lacks {', '.join(sorted(lacking))}")
        if "diverged" not in found and "rounds" not in found:
            raise ValueError(f"{where} is damaged, or of another version: it lacks rounds")


def check_rows(path: Path, rows: Iterable[Mapping[str, Any]], needed: Mapping[str, Any]) -> None:
    """Checks ``metrics.jsonl`` or ``clients.jsonl``."""
    for i, row in enumerate(rows, 1):
        _check(f"{path}, line {i}", row, needed, needed=True)
        _check(f"{path}, line {i}", row, {"fold": int | None})


def validated(path: Path, row: Mapping[str, Any], score: str) -> float | None:
    """Returns the validation score of a line of ``metrics.jsonl``, the clients' mean if known."""
    found: Any = row.get("validation")
    found = found.get(f"client_{score}", found.get(score, {})) if isinstance(found, dict) else {}
    found = found.get("mean", {}) if isinstance(found, dict) else found
    if not _fits(found, float | None):
        raise ValueError(
            f"{path} is damaged: validation of {row['algorithm']} in round {row['round']} must "
            f"have a number or null as {score}, got {str(row.get('validation'))[:40]!r}"
        )
    return None if found is None else float(found)


def _check(
    where: str, found: Mapping[str, Any], kinds: Mapping[str, Any], *, needed: bool = False
) -> None:
    for name, kind in kinds.items():
        if needed and name not in found:
            raise ValueError(f"{where} is damaged, or of another version: it lacks {name}")
        if name in found and not _fits(found[name], kind):
            raise ValueError(f"{where} is damaged: {name} cannot be {str(found[name])[:40]!r}")


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a value is of a type; numbers must be finite, whole ones fit in an int64."""
    if isinstance(kind, dict):
        known = isinstance(value, dict) and value.keys() == kind.keys()
        return known and all(_fits(value[key], kind[key]) for key in kind)
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is UnionType:
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return value in members
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, members[1]) for one in value.values())
    if origin in (list, tuple):
        fits = isinstance(value, list) and all(_fits(one, members[0]) for one in value)
        return fits and (origin is list or bool(value))
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    if kind in (int, float) and isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, kind) and (kind is not float or math.isfinite(value))
