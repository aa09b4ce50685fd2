"""The contents of a report, from top to bottom, for every format."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.cli.reporting.compare import (
    Group,
    best_settings,
    decisive,
    differing,
)
from fedjax_sim.cli.reporting.formats import BOLD
from fedjax_sim.cli.reporting.pictures import (
    KINDS,
    Picture,
    Styles,
    by_method,
    client_score,
    draw_clients,
    draw_curves,
    draw_ranks,
    styles_of,
)
from fedjax_sim.cli.reporting.problems import score_text
from fedjax_sim.cli.reporting.read import NO_SETTINGS, Reading, no_score
from fedjax_sim.cli.reporting.statistics import OF_FOLDS, OF_SEEDS, spread
from fedjax_sim.cli.reporting.tables import (
    Table,
    by_client,
    by_title,
    compared,
    differences,
    scores,
    targets,
    with_holm,
)
from fedjax_sim.cli.reporting.wide import Wide
from fedjax_sim.cli.summary import remarks


class Section(NamedTuple):
    """A chapter of a report, level 2, or a section of one, level 3."""

    title: str
    level: int
    items: list[str | Table | Picture]


def sections(
    reading: Reading, groups: Sequence[Group], tables: Sequence[Wide], folder: Path
) -> list[Section]:
    """Returns all sections of a report, and draws its pictures."""
    found = [Section("What was run", 2, _opening(reading, groups))]
    styles = styles_of(groups)
    for i, wide in enumerate(tables, 1):
        found.append(_of_wide(wide, folder, f"_{i}" if len(tables) > 1 else "", styles))
    for i, (group, title) in enumerate(zip(groups, titles(groups), strict=True), 1):
        found += _of_group(group, title, folder, f"_{i}" if len(groups) > 1 else "", styles)
    found.append(Section("Partitions", 2, _partitions(reading, folder)))
    if len(reading.runs) > 1:
        found.append(Section("Settings that differ", 2, [_settings(reading)]))
    found.append(Section("How it was run", 2, _origin(reading)))
    return found


def _of_wide(wide: Wide, folder: Path, mark: str, styles: Styles) -> Section:
    title = f"Methods by {wide.setting}" + f", {wide.title}" * bool(wide.title)
    items: list[Any] = [wide.note, wide.table()]
    if wide.distance is not None:
        caption = "Average ranks; bars join methods without a significant difference (Nemenyi)"
        averages = dict(zip(wide.rows, wide.ranks.mean(axis=0).tolist(), strict=True))
        for kind in KINDS:
            draw_ranks(averages, wide.distance, folder / f"ranks{mark}.{kind}", title, styles)
        items.append(Picture(f"ranks{mark}.svg", caption))
    return Section(title, 2, items)


def titles(groups: Sequence[Group]) -> list[str]:
    """Returns the titles of the chapters, with their scores if these differ."""
    scored = len({group.problem.score for group in groups}) > 1
    return [group.problem.title(scored=scored) for group in groups]


def summaries(reading: Reading, groups: Sequence[Group]) -> list[tuple[str, Table, str]]:
    """Returns a table for each group of the best settings of its methods, with title and note."""
    note = f"{spread(trial.runs for trial in reading.trials)} {BOLD}"
    if reading.unscored:
        note += f" {no_score(reading.unscored)}"
    tables = [scores(best_settings(group) or group, with_differences=True) for group in groups]
    return [(title, table, note) for title, table in zip(titles(groups), tables, strict=True)]


def _opening(reading: Reading, groups: Sequence[Group]) -> list[Any]:
    score_lines = dict.fromkeys(
        f"Score: {score_text(trial.score)}; the {trial.metric.best} is best, in bold; with "
        "at least three methods the second best is underlined."
        for trial in reading.trials
    )
    lines: list[Any] = [" ".join([*score_lines, spread(trial.runs for trial in reading.trials)])]
    moments = {decisive(group.trials) for group in groups}
    if "validated" in moments:
        lines.append(
            "Final: test score after the last round. Validated: test score after the round with "
            "the best validation score, chosen for each run; validation: that validation score."
        )
    if "final" in moments:
        lines.append(
            "Scores after the last round: without a validation set, a round or a setting could "
            "only be chosen on the test set."
        )
    if reading.unscored:
        lines.append(no_score(reading.unscored))
    if reading.unfinished:
        lines.append(f"Not finished: {'; '.join(reading.unfinished)}.")
    return lines


def _of_group(whole: Group, title: str, folder: Path, mark: str, styles: Styles) -> list[Section]:
    """Returns the chapter of a problem; if settings are tuned, it starts with the best ones."""
    group = whole
    items: list[Any] = []
    if (chosen := best_settings(whole)) is not None:
        settings = {(trial.method, trial.run, trial.algorithm): None for trial in whole.trials}
        tried = Counter(method for method, *_ in settings)
        counts = ", ".join(f"{n} for {method}" for method, n in tried.items())
        items.append(
            "For each method, the settings that scored best on the validation set "
            f"(tried: {counts})."
        )
        group = chosen
    lines = by_method(group, styles)
    items += [scores(group), *_remarks(group), *draw_curves(group, folder, mark, title, lines)]
    found = [Section(title, 2, items)]
    if group.baseline is not None and len(group.trials) > 1:
        found.append(Section("Differences", 3, [*_on_differences(group), compared(group)]))
    fare = by_client(group)
    if fare is not None:
        note = (
            f"{client_score(group.trials[0]).capitalize()}, after the last round. Worst tenth: the "
            "mean over the tenth of the clients that fare worst, dashed in the picture."
        )
        pictures = draw_clients(group, folder, mark, title, lines)
        found.append(Section("Clients", 3, [note, fare, *pictures]))
    reached = targets(group)
    if reached is not None:
        found.append(Section("Rounds and traffic to a target", 3, [reached]))
    if group is not whole:
        curves = draw_curves(whole, folder, f"{mark}_all", title, styles)
        found.append(Section("All settings", 3, [scores(whole), *_remarks(whole), *curves]))
    return found


def _remarks(group: Group) -> list[str]:
    lines = []
    for label, trial in zip(group.labels, group.trials, strict=True):
        lines += [f"{label}: {line}." for line in remarks(trial.summary)]
    return [" ".join(lines)] if lines else []


def _on_differences(group: Group) -> list[str]:
    assert group.baseline is not None
    found = differences(group).values()
    moment = decisive(group.trials)
    folds = any(key.fold is not None for trial in group.trials for key in trial.keys)
    lines = [
        f"Each method minus {group.label(group.baseline)}, {moment} scores, in pairs of the same "
        f"seed, fold and partition. p: {OF_FOLDS if folds else OF_SEEDS}, two-sided; p, Holm: with "
        f"Holm's correction for the number of comparisons, {len(with_holm(differences(group)))}."
    ]
    if len({frozenset(t.keys) for t in group.trials if t.keys}) > 1:
        lines.append(
            "The methods have different runs: the means above are over each method's runs, the "
            "differences over the runs of both."
        )
    few = sorted({len(d.values) - d.equal for d in found if 0 < len(d.values) - d.equal < 6})
    if few and not folds:
        least = ", ".join(f"{n} no less than {2.0 ** (1 - n):.3g}" for n in few)
        lines.append(f"Fewer than 6 pairs that differ cannot reach p = 0.05: {least}.")
    return lines


def _partitions(reading: Reading, folder: Path) -> list[Any]:
    """Returns the hash of each partition, and the runs' pictures of them."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    drawn: dict[tuple[str, ...], Picture] = {}
    for name, run in reading.runs.items():
        settings, hashes = run.settings, run.settings["partition_hashes"]
        seeds = map(str, settings["seeds"]) if len(hashes) > 1 else ["all"]
        for key in zip(seeds, map(str, settings["partitions"]), hashes, strict=False):
            owners.setdefault(key, []).append(name)
        for path in run.folder.glob("clients.[ps][nv]g"):
            if tuple(hashes) not in drawn:
                copy = f"partition_{len(drawn) + 1}{path.suffix}"
                shutil.copy(path, folder / copy)
                drawn[tuple(hashes)] = Picture(copy, f"Clients and their samples, of {name}")
    rows = [
        ("all" if 1 < len(names) == len(reading.runs) else ", ".join(names), *key)
        for key, names in owners.items()
    ]
    return [Table(("run", "seed", "partition", "sha256"), rows, words=True), *drawn.values()]


def _settings(reading: Reading) -> Table | str:
    settings = {
        name: {k: v for k, v in run.settings.items() if k not in NO_SETTINGS}
        for name, run in reading.runs.items()
    }
    for name, run in reading.runs.items():
        settings[name]["methods"] = ", ".join(run.algorithms)
    names = differing([*settings.values()])
    if not names:
        return "None: the runs have the same settings."
    rows = [(name, *(_shown(of.get(key)) for key in names)) for name, of in settings.items()]
    return Table(("run", *names), rows, words=True)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _code(summary: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions of a run, and the commit of this package if known.

    >>> _code({"versions": {"jax": "0.10.2"}, "commit": "5eed" * 10, "dirty": True})
    {'jax': '0.10.2', 'commit': '5eed5eed5eed with changes'}
    """
    commit, changed = summary.get("commit"), " with changes" if summary.get("dirty") else ""
    code = {} if commit is None else {"commit": commit[:12] + changed}
    return {**summary.get("versions", {}), **code}


def _origin(reading: Reading) -> list[Any]:
    """Returns versions, devices and commands; versions that all runs share are one line."""
    versions = {
        name: ", ".join(f"{k} {v}" for k, v in _code(run.summary).items())
        for name, run in reading.runs.items()
    }
    same = len({*versions.values()}) == 1
    rows = []
    for name, run in reading.runs.items():
        devices = run.summary.get("devices", [])
        row = {"run": name, "devices": f"{len(devices)} x {devices[0]}" if devices else "-"}
        if not same:
            row["versions"] = versions[name]
        command = shlex.join(["python", "-m", "fedjax_sim.bench", *run.settings["arguments"]])
        row["command"] = "composed in Python" if run.settings.get("composed") else command
        rows.append(row)
    table = by_title(rows, words=True)
    return [f"Versions: {next(iter(versions.values()))}.", table] if same else [table]
