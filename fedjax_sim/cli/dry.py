"""``--dry-run``: prints the plan of a run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.cli.build import Setup
from fedjax_sim.cli.report import aligned
from fedjax_sim.cli.running import title
from fedjax_sim.cli.training import client_sizes
from fedjax_sim.engine.memory import MB
from fedjax_sim.round import Algorithm
from fedjax_sim.round.traffic import share_of
from fedjax_sim.run.layout import client_axes, one_run

HEAD = (
    "algorithm", "program", "rounds", "models", "local steps", "kB up", "kB down"
)  # fmt: skip
NOTE = (
    "program: algorithms with the same number are compiled once and run together; models: trained "
    "per round; kB: one transfer of a model, or of the mean part that a client has, with its "
    "messages, without what a method sends besides, such as polls and further models"
)


def show_plan(setup: Setup) -> None:
    """Prints data, model and a line for each algorithm."""
    runs = len(setup.problem.runs)
    shapes = jax.eval_shape(setup.model.init, jax.random.key(0))
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    data = setup.problem.data
    clients, sizes = one_run(data, client_axes(data)), client_sizes(data).reshape(-1)
    print(
        f"{title(setup)}, {setup.model_name} of {weights:,} weights "
        f"({setup.model_bytes / MB:,.2f} MB); {runs} run{'s' * (runs > 1)} on "
        f"{setup.execution.described}\n{data.clients} clients train, with {sizes.min()} "
        f"to {sizes.max()} samples; score: {setup.score}, {setup.problem.scored}\n"
    )
    places = {name: i for i, group in enumerate(setup.programs, 1) for name in group}
    rows = [[*HEAD]]
    for name, algorithm in setup.algorithms.items():
        rounds = setup.rounds[name]
        steps = _steps(algorithm, sizes)
        traffic = algorithm.traffic(shapes, clients)
        everyone = jnp.arange(clients.clients, dtype=jnp.int32)
        part = share_of(algorithm.parts, shapes, everyone, jnp.int32(0), sent=True)
        mean = float(np.mean(part))
        up = mean * traffic.upload + traffic.message
        down = mean * traffic.download + traffic.shared_state
        several = f" ({steps.min()} to {steps.max()})" if steps.min() < steps.max() else ""
        rows.append(
            [name, str(places[name]), str(rounds), str(algorithm.slots),
             f"{steps.mean():.1f}{several}", f"{up / 1e3:,.1f}", f"{down / 1e3:,.1f}"]
        )  # fmt: skip
    print(f"{aligned(rows)}\n\n{NOTE}")


def _steps(algorithm: Algorithm, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the local steps of each client in a round."""
    some, place = np.unique(sizes, return_inverse=True)
    found = jax.vmap(algorithm.parts.local.steps_for)(jnp.asarray(some, jnp.int32))
    return np.asarray(found)[place]
