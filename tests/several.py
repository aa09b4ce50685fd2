"""A small run of each method.

As a script, by one of several processes: where they meet, a file for what it found, the methods.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from numpy.typing import NDArray

import fedjax_sim as fs
from fedjax_sim.cli.processes import join, meeting

OPTIONS = {"phase_shift": {"phases": 3}, "radfed": {"redistribution_rounds": 2}}
HOSTED = {"ditto": 0.016}
"""MB of what its clients keep that a device holds, of 0.036 in all: three clients' in both runs."""

GROUPED = {"fedadam": 2}
"""Devices that train each model together: both of a process."""


def trained(method: str) -> list[NDArray[np.generic]]:
    """Weights, state and scores of three rounds on all devices, two seeds at once."""
    problem = fs.toy(clients=7, emd=0.9)
    local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
    execution = fs.make_execution(
        client_state_mb=HOSTED.get(method), model_devices=GROUPED.get(method, 1)
    )
    cohort = 2 if method in HOSTED else 6
    algorithm = fs.ALGORITHMS[method](
        local, clients_per_round=cohort, **OPTIONS.get(method, {})
    ).on(execution)
    result = fs.simulate(
        algorithm,
        problem.model,
        problem.data,
        problem.test,
        rounds=3,
        classes=10,
        seeds=(0, 1),
        eval_every=2,
        record=lambda state: state.server,
        execution=execution,
    )
    scores = [(e.test, e.train_loss, e.recorded) for e in result.evaluations]
    kept = result.variables, result.state, result.metrics, scores
    return [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]


def main(place: str, out: str, *methods: str) -> None:
    """Meets the others, trains and keeps what came of it."""
    jax.config.update("jax_num_cpu_devices", 2)
    join(meeting(place))

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("data went over the network")

    multihost_utils.assert_equal = refuse  # what jax.device_put calls on values of the host
    found = {f"{m}-{i:03}": leaf for m in methods for i, leaf in enumerate(trained(m))}
    np.savez(out, allow_pickle=False, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
