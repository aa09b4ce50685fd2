"""B² and BCGV, the dissimilarity of clients' gradients, against plain NumPy."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, altered_data, make_federation, play
from fed import samples

import fedjax_sim as fs
from fedjax_sim.base import Cohort, Variables


@pytest.fixture(scope="module")
def model(models: dict[str, fs.Model]) -> fs.Model:
    return models["mlp"]


@pytest.fixture(scope="module")
def part(model: fs.Model) -> Any:
    """Minibatches of 5, so that most clients have several, and a smaller last one."""
    return fs.diagnostics.gradient_dissimilarity(fs.empirical_risk(model), batch_size=5)


def measured(part: Any, server: Variables, data: fs.ClientData) -> dict[str, float]:
    """The numbers of a round in which client 0 alone trained."""
    none, client = cast("Any", None), jnp.zeros(1, jnp.int32)
    cohort = Cohort(none, none, client, client == 0, none, none, (), jax.device_put(data))
    found, _ = jax.jit(part.measure)(jax.random.key(0), (), server, none, cohort)
    return {name: float(value) for name, value in found.items()}


def expected(server: Variables, data: fs.ClientData, sizes: np.ndarray) -> dict[str, float]:
    """The definitions, with p_k in proportion to ``sizes``."""
    layers = oracle.layers_of(server)
    some = np.flatnonzero(sizes)
    gradients = [oracle.loss_and_gradient(layers, *samples(data, int(k)))[1] for k in some]
    rows = np.array([np.concatenate([g.ravel() for g in gradient]) for gradient in gradients])
    p = sizes[some] / sizes.sum()
    mean = p @ rows
    return {
        "B2": p @ (rows**2).sum(axis=1) / (mean**2).sum(),
        "BCGV": p @ ((rows - mean) ** 2).sum(axis=1),
    }


def close(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


def test_the_definitions_on_unequal_clients(part: Any, model: fs.Model) -> None:
    """One has no samples; a budget, as FedAug sets it, is a client's n_k."""
    data = make_federation((12, 3, 33, 9, 1)).data
    data = altered_data(data, start=np.insert(data.start, 1, data.start[1]))
    server = model.init(jax.random.key(0))
    sizes = np.diff(data.start)
    found = measured(part, server, data)
    close(found, expected(server, data, sizes))
    assert found["B2"] > 1.05
    budget = np.where(sizes > 5, 4, sizes).astype(np.int32)
    close(
        measured(part, server, altered_data(data, budget=budget)),
        expected(server, data, budget),
    )


def test_equal_clients_are_not_dissimilar(part: Any, model: fs.Model) -> None:
    """Neither where their gradients are the same, nor where they are all 0."""
    data = make_federation((12,)).data
    index = np.tile(data.index, 4)
    start = np.arange(0, 60, 12, dtype=np.int32)
    data = altered_data(data, index=index, start=start)
    server = model.init(jax.random.key(0))
    found = measured(part, server, data)
    assert found == {"B2": 1, "BCGV": pytest.approx(0, abs=1e-12)}

    def flat(params: Any, state: Any, batch: Any, context: Any) -> Any:
        return 0 * sum(jnp.sum(w) for w in jax.tree.leaves(params)), state

    still = fs.diagnostics.gradient_dissimilarity(flat)
    assert measured(still, server, data) == {"B2": 1, "BCGV": 0}


def test_a_run_measures_all_clients_at_the_new_server_model(
    federation: Federation, part: Any, model: fs.Model
) -> None:
    """Of 8 clients 3 train; chunks and devices change rounding alone."""
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=5)
    algorithm = fs.fedavg(local, clients_per_round=3).replace(diagnostics={"skew": part})
    runs = [
        play(algorithm.on(execution), model, federation.data, 2)
        for execution in (fs.make_execution(1), fs.make_execution(4, chunk=2))
    ]
    sizes = np.diff(federation.data.start)
    for run in runs:
        for server, metrics in zip(run.servers, run.metrics, strict=True):
            found = {name: float(value) for name, value in metrics.diagnostics.items()}
            close(found, expected(server, federation.data, sizes))


def test_samples_of_other_clients_must_be_there(part: Any, model: fs.Model) -> None:
    """Of streamed samples only those of the clients that train are there."""
    data = fs.data.streamed(make_federation((12, 9)).data, 3)
    with pytest.raises(ValueError, match="samples_per_round needs methods that read a client"):
        measured(part, model.init(jax.random.key(0)), data)
