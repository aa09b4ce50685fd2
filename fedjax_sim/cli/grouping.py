"""Settings of one method that differ in numbers alone are runs of the same programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fedjax_sim.cli.build import Setup
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.ending import ends_early
from fedjax_sim.cli.methods import name_of
from fedjax_sim.run.candidates import Candidates, group_candidates


def programs(config: Config, setup: Setup) -> list[list[str]]:
    """Returns the algorithms by their programs, each group where its first stands.

    A rule that ends a run early ends all runs of a program: with one, each has its own.
    """
    alike: dict[Any, list[str]] = {}
    for label in config.algorithms:
        what = config.own(label)
        own = label if ends_early(config.ending) else ""
        alike.setdefault((name_of(label), tuple(what), own), []).append(label)
    found = []
    for labels in alike.values():
        if len(labels) == 1:
            found.append(labels)
            continue
        grouped = group_candidates(
            candidates(labels, config, setup), setup.model, setup.problem.data
        )
        found += [[labels[i] for i in group] for group in grouped]
    return sorted(found, key=lambda group: config.algorithms.index(group[0]))


def candidates(labels: Sequence[str], config: Config, setup: Setup) -> Candidates:
    """Returns the algorithms of one method with their settings."""
    return Candidates(
        functools.partial(setup.varied, labels[0]),
        [config.own(label) for label in labels],
        [setup.algorithms[label] for label in labels],
    )


def work_of(label: str, config: Config, setup: Setup) -> float:
    """Returns how much an algorithm has to do beside others: rounds times models times epochs."""
    return setup.rounds[label] * setup.algorithms[label].slots * config.training_of(label).epochs
