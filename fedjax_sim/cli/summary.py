"""The summary of a run: ``summary.json`` and the tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_sim.base import Clock
from fedjax_sim.base.words import counted, percent
from fedjax_sim.cli import adapting, attacking, ending, timing
from fedjax_sim.cli.build import Setup
from fedjax_sim.cli.defaults import OTHERS, defaults_of
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.report import measurements, table
from fedjax_sim.cli.written import parse_label
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import emd, label_table
from fedjax_sim.run import Result
from fedjax_sim.run.provenance import Privacy


def summarise(name: str, result: Result, setup: Setup, *, beside: int = 0) -> dict[str, Any]:
    """Returns the entry of one algorithm in ``summary.json``, with ε and δ if it has them.

    ``beside`` is the number of other algorithms in the same programs; seconds and speed include
    them.
    """
    config, experiment = setup.config, setup.config.experiment
    summary = entry_of(
        result,
        delta=config.scores.delta,
        clock=timing.make_clock(config.timing),
        score=setup.score,
        seeds=len(experiment.seeds),
        # FedAvg's cohort travels down and up once in each of its rounds.
        fedavg_bytes=2.0 * setup.clients_per_round * experiment.rounds * setup.model_bytes,
        clients=setup.clients,
        emd=setup.emd,
    )
    if beside:
        summary["settings_in_program"] = 1 + beside
        summary["samples_per_second"] *= 1 + beside
    if config.scores.adapt is not None and result.evaluations[-1].personal is not None:
        summary["adapted"] = True
    summary |= ending.target_entries(config.ending, result, setup.score, setup.algorithms[name])
    return summary | attacking.attack_entries(config.attack, setup.problem.data.clients)


def entry_of(
    result: Result, *, delta: float | None = None, clock: Clock | None = None, **about: Any
) -> dict[str, Any]:
    """Returns the part of an entry of ``summary.json`` that a result determines.

    ``about`` are the arguments of :func:`fedjax_sim.cli.report.measurements`.
    """
    origin, summary = result.provenance, measurements(result, **about)
    summary |= timing.time_entries(result, clock)
    summary["skipped"] = int(result.evaluations[-1].skipped.sum())
    if origin.own_leaves:
        summary["own_leaves"] = True
    if summary["rounds"] < origin.rounds:
        summary["rounds_planned"] = origin.rounds
    clients = origin.start.shape[-1] - 1
    summary |= privacy_spent(origin.privacy, clients, summary["rounds"], delta)
    return summary | client_privacy_spent(result, delta)


def privacy_spent(
    privacy: Privacy, clients: int, rounds: int, delta: float | None = None
) -> dict[str, Any]:
    """Returns ε and δ of one run of a private method, or why ε is unknown; {} for other methods."""
    if privacy is None:
        return {}
    if isinstance(privacy, str):
        return {"epsilon_unknown": privacy}
    delta = clients**-1.1 if delta is None else delta
    try:
        return {"epsilon": privacy(rounds=rounds, delta=delta), "delta": delta}
    except (ImportError, ValueError) as error:  # not installed; a single client has no δ below 1
        return {"epsilon_unknown": f"unknown: {error}"}


def client_privacy_spent(result: Result, delta: float | None = None) -> dict[str, Any]:
    """Returns the minimum, median and maximum ε of the clients that trained, over all runs."""
    privacy = result.provenance.client_privacy
    if privacy is None:
        return {}
    if isinstance(privacy, str):
        return {"client_epsilon_unknown": privacy}
    sizes, visits = np.broadcast_arrays(np.diff(result.provenance.start), result.visits)
    pairs = zip(sizes.ravel().tolist(), visits.ravel().tolist(), strict=True)
    ranked = sorted((privacy.order(n, v), n, v) for n, v in pairs if n and v)
    if not ranked:
        return {}
    delta = privacy.delta(sizes.shape[-1], int(sizes.max())) if delta is None else delta
    places = {"min": 0, "median": len(ranked) // 2, "max": -1}
    try:
        spent = {
            f"client_epsilon_{name}": privacy.epsilon(*ranked[place][1:], delta)
            for name, place in places.items()
        }
    except (ImportError, ValueError) as error:
        return {"client_epsilon_unknown": f"unknown: {error}"}
    return {**spent, "client_delta": delta, "client_epsilon_protects": privacy.protects}


def show(setup: Setup, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the title and the table."""
    config, experiment = setup.config, setup.config.experiment
    prepared = _prepared(setup) + adapting.describe(config.weights, setup.model)
    prepared += attacking.describe(config.attack, setup.problem.data.clients)
    skew = "" if setup.emd is None else f", EMD {setup.emd:.2f}"
    print(
        f"{experiment.dataset}, {setup.model_name}: {setup.clients} clients, "
        f"{setup.clients_per_round} a round{skew}; {experiment.rounds} rounds, "
        f"{config.training.epochs:g} epochs, {counted(len(experiment.seeds), 'seed')}; "
        f"{setup.execution.described}"
        f"\nscore: {setup.score}, {setup.problem.scored}{prepared}\n"
    )
    print(table(summaries, setup.task.metrics[setup.score]))
    shared = [name for name, s in summaries.items() if s.get("settings_in_program")]
    if shared:
        print(f"\none program for several settings, whose seconds are of all: {', '.join(shared)}")
    if config.machine.resume is not None:
        print("\nresumed: run s includes compilation by earlier processes, so samples/s is too low")
    names_by_remark: dict[str, list[str]] = {}  # once for all settings of a grid
    for name, s in summaries.items():
        for remark in remarks(s, setup.problem.data.clients):
            names_by_remark.setdefault(remark, []).append(name)
    for name in config.algorithms:
        by_itself = config.trained[name].items() - parse_label(name).training.items()
        if flags := " and ".join(f"{flag(key)} {value:g}" for key, value in sorted(by_itself)):
            remark = f"{flags} by default, as clients take plain steps of SGD"
            names_by_remark.setdefault(remark, []).append(name)
    for remark, names in names_by_remark.items():
        print(f"\n{', '.join(names)}: {remark}")
    if lacking := ", ".join(n for n, s in summaries.items() if s.get("own_leaves")):
        print(
            f"\nno score of the server's model: {lacking} train some leaves at the clients alone, "
            "and the server's are the initial ones"
        )
    rates = {config.trained[name].get("lr", config.training.lr) for name in config.algorithms}
    if defaults_of(experiment.dataset) is OTHERS and OTHERS.lr in rates:
        print(f"\nlr {OTHERS.lr} is the default for data of your own, not tuned to them: see --lr")
    personal = [n for n in config.algorithms if setup.algorithms[n].personal is not None]
    if personal and not setup.problem.scores_own:
        how = "--adapt 0.5" if config.scores.split == "clients" else "--split holdout"
        print(f"\n{how} also scores the clients' own models of {', '.join(personal)}")


def remarks(summary: Mapping[str, Any], clients: int | None = None) -> Iterator[str]:
    """Yields remarks on one algorithm, see :func:`summarise`, for the lines below the table.

    The number of ``clients`` that train, if it is known, is printed with δ.
    """
    s = summary
    if "epsilon" in s:
        beside = "" if clients is None else f" (1/N = {1 / clients:.3g})"
        yield (
            f"a run is (ε, δ)-private for each client, ε = {s['epsilon']:.3g} at "
            f"δ = {s['delta']:.3g}{beside}"
        )
    elif "epsilon_unknown" in s:
        yield f"ε is {s['epsilon_unknown']}"
    if "client_delta" in s:
        least, median, most = (s[f"client_epsilon_{name}"] for name in ("min", "median", "max"))
        yield (
            f"a run is (ε, δ)-private for {s['client_epsilon_protects']}, ε = {least:.3g} to "
            f"{most:.3g}, median {median:.3g}, at δ = {s['client_delta']:.3g}"
        )
    elif "client_epsilon_unknown" in s:
        yield f"ε of single clients is {s['client_epsilon_unknown']}"
    if s.get("skipped"):
        yield f"{s['skipped']} updates were not finite, and skipped (of all seeds)"
    if "seconds" in s:
        yield timing.describe(s)
    if "rounds_planned" in s:
        yield f"ended after {s['rounds']} of {s['rounds_planned']} rounds"


def _prepared(setup: Setup) -> str:
    """Describes the clients' training samples if they are shared or copied."""
    data, trained = setup.problem.data, setup.problem.trained
    if not any(p.repeats for p in trained):
        return ""
    tables = [
        label_table(strata(np.asarray(data.y), setup.task), p, setup.task.classes or 1)
        for p in trained
    ]
    copied = float(np.mean([np.mean(p.index >= len(data.y)) for p in trained]))
    reached = np.mean([emd(t) for t in tables])
    return f"\nclients train at EMD {reached:.2f}: {percent(copied)} of their samples are copies"
