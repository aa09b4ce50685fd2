"""How long the reproductions take: the seconds in the records of benchmarks/results."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.base.words import duration

RESULTS = Path(__file__).resolve().parents[1] / "results"
UNKNOWN = "not measured"


def time_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The time that some records took together, with the cores and the last day.

    >>> machine = {"cores": 2, "cpu": "AMD EPYC"}
    >>> time_of([{"seconds": 2000.0, "machine": machine, "date": "2026-11-23T18:25:32+00:00"}])
    'about 33 min on 2 cores of an AMD EPYC (2026-11-23)'
    """
    if not records:
        return UNKNOWN
    places = {(r["machine"]["cores"], r["machine"]["cpu"]) for r in records}
    where = " and ".join(f"{cores} cores of an {cpu}" for cores, cpu in sorted(places))
    day = max(r["date"] for r in records)[:10]
    return f"about {duration(sum(r['seconds'] for r in records))} on {where} ({day})"


def read(names: Sequence[str]) -> list[dict[str, Any]]:
    """Records by their paths within benchmarks/results."""
    return [json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in names]


def announce(what: str, name: str, **settings: Any) -> None:
    """Prints what begins, and how long it took when the record of that name was made.

    Args:
        what: a data set and a figure.
        name: path of the record within benchmarks/results.
        **settings: what the old record must contain, so that its time is for the same work; of a
            table, its keys.
    """
    record = read([name])[0] if (RESULTS / name).exists() else {}
    held = {key: [*v] if isinstance(v, dict) else v for key, v in record.items()}
    same = record and all(held.get(key) == value for key, value in settings.items())
    time = time_of([record]) if same else f"time {UNKNOWN}"
    print(f"{what}: {time}", file=sys.stderr, flush=True)
