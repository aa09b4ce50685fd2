"""The numbers of a run as a summary, and as tables for the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Metric
from fedjax_sim.engine.memory import MB
from fedjax_sim.partition import SkewReport
from fedjax_sim.run import Evaluation, Result
from fedjax_sim.run.result import Set
from fedjax_sim.tasks.sums import SHARE, mean_known

UNITS = {"MB": MB, "kB": 1e3, "B": 1.0}


def bytes_sent(evaluation: Evaluation) -> float:
    """Returns the mean bytes sent so far up and down over runs."""
    return float(evaluation.bytes_up.mean() + evaluation.bytes_down.mean())


def byte_unit(sizes: Iterable[float]) -> str:
    """Returns the largest unit that is at most the smallest size above 0.

    >>> byte_unit([0, 41_600, 265e6])
    'kB'
    """
    smallest = min((size for size in sizes if size > 0), default=MB)
    return next((name for name, unit in UNITS.items() if smallest >= unit), "B")


def in_unit(size: float, unit: str) -> str:
    """Writes a number of bytes in one of ``UNITS``.

    >>> in_unit(41_600, "kB"), in_unit(12, "B")
    ('41.6', '12')
    """
    return f"{size / UNITS[unit]:,.{0 if unit == 'B' else 1}f}"


def measurements(
    result: Result, *, score: str, seeds: int, fedavg_bytes: float, clients: int, emd: float | None
) -> dict[str, Any]:
    """Returns the entry of one algorithm in ``summary.json``, see docs/run_folder.md.

    The R runs are seed by seed, folds inside; ``fedavg_bytes`` is what FedAvg would have sent, up
    and down, in one run.
    """
    last = result.evaluations[-1]
    by_client = last.test.by_client is not None
    views: dict[str, dict[str, Any]] = {"": {"by_client": False}}
    if by_client:
        views["client_"] = {"by_client": True}
    if last.personal is not None:
        views["personal_"] = {"by_client": by_client, "own": True}
    summary: dict[str, Any] = {}
    for prefix, view in views.items():
        for metric in last.test.metrics:
            name = prefix + metric
            for moment, values in _moments(result, metric, **view).items():
                known = values[~np.isnan(values)]
                summary[f"{name}_{moment}"] = float(known.mean()) if len(known) else math.nan
                summary[f"{name}_{moment}_std"] = float(known.std()) if len(known) else math.nan
    headline = f"client_{score}" if by_client else score
    summary["score"] = headline
    if last.test.by_client is not None:
        known = ~np.isnan(last.test.by_client[score])
        summary["scored_clients_per_run"] = known.sum(axis=1).tolist()
    best = np.fmin if result.lowest(score) else np.fmax
    for prefix in ("", "personal_") if last.personal is not None else ("",):
        own = bool(prefix)
        for moment, values in _moments(result, score, by_client=by_client, own=own).items():
            summary[f"{prefix}score_{moment}_per_run"] = values.tolist()
        part: Set = "personal_validation" if own else "validation"
        if (scored := getattr(last, part)) is not None:
            found = result.series(score, by_client=scored.by_client is not None, part=part)
            summary[f"{part}_best_per_run"] = best.reduce(found, axis=0).tolist()
    return summary | {
        f"{result.task.score}_per_seed": result.score[-1].reshape(seeds, -1).mean(axis=1).tolist(),
        "bytes_up": round(float(last.bytes_up.mean())),
        "bytes_down": round(float(last.bytes_down.mean())),
        "traffic_ratio": bytes_sent(last) / fedavg_bytes,
        "samples_per_second": result.samples / result.run_seconds,
        "compile_seconds": result.compile_seconds,
        "run_seconds": result.run_seconds,
        "utilisation": result.steps / max(result.executed, 1),
        "xla_programs": result.xla_programs,
        "peak_memory_mb": peak_memory_mb(),
        "device_memory_mb": result.device_bytes / MB,
        "rounds": last.round,
        "clients": clients,
        "emd": emd,
    }


def _moments(
    result: Result, metric: str, *, by_client: bool, own: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Returns a score's last, best and mean value of each run, ``f64[R]``.

    ``own`` is whether the clients' own models are scored, not the server's.
    """
    values = result.series(metric, by_client=by_client, part="personal" if own else "test")
    best = np.fmin if result.lowest(metric) else np.fmax
    moments = {
        "last": values[-1],
        "best": best.reduce(values, axis=0),
        "mean": mean_known(values.T),
    }
    last = result.evaluations[-1]
    if (last.personal_validation if own else last.validation) is not None:
        moments["validated"] = result.validated(metric, by_client=by_client, personal=own)
    return moments


def peak_memory_mb() -> float | None:
    """Returns the peak host memory of this process; None where Python cannot measure it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / MB


def digits(value: float, beside: float | None = None) -> str:
    """Formats a number with at least four digits, or with the decimals of ``beside``.

    >>> digits(2903.416), digits(0.0123456), digits(-1.5), digits(0), digits(math.nan)
    ('2,903', '0.01235', '-1.500', '0.000', 'nan')
    >>> digits(5.9, beside=2903.416)
    '6'
    """
    leading = value if beside is None else beside
    size = math.floor(math.log10(abs(leading))) if math.isfinite(leading) and leading else 0
    return f"{value:,.{max(0, 3 - size)}f}"


def number(value: float, metric: Metric, beside: float | None = None) -> str:
    """Formats a score, in percent if its metric is; a spread has the decimals of its mean.

    >>> number(0.9123, Metric(percent=True)), number(2903.416, Metric())
    ('91.23', '2,903')
    """
    return f"{100 * value:.2f}" if metric.percent else digits(value, beside)


def with_std(mean: float, std: float, metric: Metric) -> str:
    """Formats a mean score ± its standard deviation.

    >>> with_std(0.6, 0.1, Metric(percent=True))
    '60.00 ± 10.00'
    """
    return f"{number(mean, metric)} ± {number(std, metric, mean)}"


def target_text(target: float, metric: Metric) -> str:
    """Formats the target score."""
    return f"{100 * target:g} %" if metric.percent else digits(target)


def table(summaries: Mapping[str, Mapping[str, Any]], metric: Metric = SHARE) -> str:
    """Returns two aligned tables: score and traffic; speed and memory.

    The score of several runs is the mean ± the population standard deviation. At least one
    algorithm must not have diverged.
    """
    finished = {name: s for name, s in summaries.items() if "diverged" not in s}
    first = next(iter(finished.values()))
    moments = [m for m in ("last", "validated", "best", "mean") if f"{first['score']}_{m}" in first]
    unit = " %" * metric.percent
    columns = {f"{moment}{unit}": f"{first['score']}_{moment}" for moment in moments}
    own = f"personal_{first['score'].removeprefix('client_')}"
    whose = "adapted" if any("adapted" in s for s in finished.values()) else "personal"
    for title, key in ((whose, f"{own}_last"), (f"{whose} validated", f"{own}_validated")):
        if any(key in s for s in finished.values()):
            columns[f"{title}{unit}"] = key
    if "attack_success_last" in first and "attack_success" not in first["score"]:
        columns[f"attack success{unit}"] = "attack_success_last"
    size = byte_unit(s[way] for s in finished.values() for way in ("bytes_up", "bytes_down"))
    aims = dict.fromkeys(s["target"] for s in finished.values() if "target" in s)
    timed = any("seconds" in s for s in finished.values())

    def cell(s: Mapping[str, Any], name: str) -> str:
        if name not in s or (s.get("own_leaves") and not name.startswith("personal_")):
            return "-"
        if len(s["score_last_per_run"]) == 1:
            return number(s[name], metric)
        return with_std(s[name], s[f"{name}_std"], metric)

    def scores(s: Mapping[str, Any]) -> dict[str, str]:
        row = {title: cell(s, key) for title, key in columns.items()}
        row |= {f"{size} {way}": in_unit(s[f"bytes_{way}"], size) for way in ("up", "down")}
        row["traffic/FedAvg"] = f"{s['traffic_ratio']:.3f}"
        if timed:
            row["seconds"] = digits(s["seconds"])
        for aim in aims:
            text = target_text(aim, metric)
            row |= {f"{what} to {text}": found for what, found in to_target(s, size).items()}
        return row

    def speed(s: Mapping[str, Any]) -> dict[str, str]:
        peak = s["peak_memory_mb"]
        return {
            "rounds": str(s["rounds"]),
            "samples/s": f"{s['samples_per_second']:,.0f}",
            "compile s": f"{s['compile_seconds']:.1f}",
            "run s": f"{s['run_seconds']:.1f}",
            "utilisation": f"{s['utilisation']:.3f}",
            "XLA programs": str(s["xla_programs"] or "-"),
            "peak MB": "-" if peak is None else f"{peak:,.0f}",
        }

    head, *others = scores(first)
    lost = {head: "diverged", **dict.fromkeys(others, "-")}
    results = [
        {"algorithm": name} | (scores(s) if name in finished else lost)
        for name, s in summaries.items()
    ]
    speeds = [{"algorithm": name} | speed(s) for name, s in finished.items()]
    tables = ([[*rows[0]], *([*row.values()] for row in rows)] for rows in (results, speeds))
    return "\n\n".join(map(aligned, tables))


def to_target(summary: Mapping[str, Any], unit: str) -> dict[str, str]:
    """Returns rounds, traffic and seconds until runs reached the target, by title.

    >>> found = {"target_rounds_per_run": [4, None], "target_bytes_per_run": [2e6, None]}
    >>> to_target(found, "MB")
    {'rounds': '4.0 (1 of 2)', 'MB': '2.0 (1 of 2)'}
    """
    found = {
        title: summary[f"target_{key}_per_run"]
        for title, key in (("rounds", "rounds"), (unit, "bytes"), ("seconds", "seconds"))
        if f"target_{key}_per_run" in summary
    }
    runs = len(found["rounds"])
    places = {"rounds": int(runs > 1), unit: int(unit != "B"), "seconds": 1}
    written = {}
    for title, per_run in found.items():
        known = np.array([value for value in per_run if value is not None])
        if not len(known):
            written[title] = "not reached"
            continue
        known = known / UNITS.get(title, 1)
        spread = f" ± {known.std():,.{places[title]}f}" if len(known) > 1 else ""
        some = f" ({len(known)} of {runs})" if len(known) < runs else ""
        written[title] = f"{known.mean():,.{places[title]}f}{spread}{some}"
    return written


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns a table of texts; the first row is the header, the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Iterable[str]) -> str:
        first, *others = (
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    head, *body = map(line, rows)
    return "\n".join([head, "-" * len(head), *body])


def over_seeds(reports: Sequence[SkewReport]) -> str:
    """Returns a table with a line for each seed, their mean and their standard deviation."""
    forms = {"n_k min": ",.0f", "max": ",.0f", "mean": ",.1f", "std": ",.1f", "Gini": ".3f"}
    measured: tuple[str, ...] = ()
    if reports[0].table.shape[1] > 1:
        forms = {"EMD": ".3f", "C-score": ".3f", "KL": ".3f"} | forms
        measured = ("emd", "c_score", "kl")
    found = [report.as_dict() for report in reports]
    rows = np.array([[*(d[name] for name in measured), *d["sizes"].values()] for d in found])
    lines = {f"seed {i}": row for i, row in enumerate(rows)}
    lines |= {"mean": rows.mean(axis=0), "std": rows.std(axis=0)}
    names = [f"{r.hash[:12]}  {r.name}" for r in reports] + ["", ""]
    head = "".join(f"{title:>9}" for title in ("", *forms))
    table_lines = [reports[0].counted(), f"{head[2:]}  sha256        partition"]
    for (title, row), name in zip(lines.items(), names, strict=True):
        cells = (format(format(x, form), ">9") for x, form in zip(row, forms.values(), strict=True))
        table_lines.append(f"{title:7}{''.join(cells)}  {name}".rstrip())
    return "\n".join(table_lines)
