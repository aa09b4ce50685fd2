"""Hybrid-FL: a server that trains beside the clients, on samples that they gave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, altered_data, assert_trees, largest_change, play

import fedjax_sim as fs
from fedjax_sim import compression, server
from fedjax_sim.base import ClientData, Cohort, Gathered, MissingRootError, Server

LR, BATCH, M, ROUNDS = 0.1, 8, 3, 3
CLOCK = fs.clock.simulated(fs.clock.tiers(1, 2, 10), deadline=1e9)


@pytest.fixture(scope="module")
def model(models: dict[str, fs.Model]) -> fs.Model:
    return models["logistic"]


@pytest.fixture(scope="module")
def local(model: fs.Model) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), batch_size=BATCH)


def test_it_is_the_mean_with_one_client_more(
    rooted: ClientData, model: fs.Model, local: fs.LocalUpdate
) -> None:
    """Against plain NumPy, on unequal clients: w_0 starts from w_t and counts n_0."""

    class AtServer(oracle.Oracle):
        """The server's samples are client 1's: the second of a chain has the key's fold 1."""

        def key(self, t: int, use: int) -> Any:
            return super().key(t, 4 if use == 2 else use)

    assert rooted.root is not None
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    clients = oracle.Oracle(rooted, initial, LR, 0.0, BATCH, 1)
    edges = np.array([0, *np.asarray(rooted.root)], np.int32)
    own = AtServer(altered_data(rooted, start=edges), initial, LR, 0.0, BATCH, 1)
    n_0, rounds = float(edges[2] - edges[1]), iter(range(ROUNDS))

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        models = [v.layers for v in visits] + [own.train(next(rounds), 1, w)]
        return oracle.average(models, [*(float(clients.sizes[k]) for k in cohort), n_0])

    theirs, _ = oracle.fedavg(clients, ROUNDS, M, absorb=absorb)
    algorithm = (
        fs.fedavg(local, clients_per_round=M)
        .replace(
            server=server.chain(server.replace(), server.train_beside(local)),
        )
        .on(fs.make_execution(devices=1))
    )
    for layers, ours in zip(theirs, play(algorithm, model, rooted, ROUNDS).servers, strict=True):
        for a, b in zip(layers, oracle.layers_of(ours), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_who_did_not_come_weighs_nothing(
    rooted: ClientData, model: fs.Model, local: fs.LocalUpdate
) -> None:
    part = server.train_beside(local)
    start, step = (model.init(jax.random.key(s)) for s in (0, 1))
    unread: Any = ()
    nothing: Any = dict.fromkeys(Cohort._fields)

    @jax.jit
    def moved(data: ClientData, weights: Any, samples: Any) -> Any:
        cohort = Cohort(**nothing | {"samples": samples, "data": data})
        gathered = Gathered(unread, weights, cohort)
        return part.update(jax.random.key(4), step, start, part.init(start), gathered)[0]

    data = jax.device_put(rooted)
    lost, alone, both = (
        moved(data, jnp.array(weights, jnp.float32), jnp.array(samples))
        for weights, samples in (([1, 0], [5, 70]), ([1, 1], [5, 0]), ([1, 1], [5, 70]))
    )
    assert_trees(lost, alone)
    assert largest_change(lost, both) > 1e-3


def test_without_its_server_it_is_fedcs(local: fs.LocalUpdate) -> None:
    given: dict[str, Any] = {"clients_per_round": M, "clock": CLOCK}
    hybrid = fs.algorithms.hybrid_fl(local, **given).replace(server=server.replace())
    fedcs = repr(fs.algorithms.fedcs(local, **given))
    assert repr(hybrid).removeprefix("hybrid_fl") == fedcs.removeprefix("fedcs")


WRAPPED: dict[str, Callable[[Server], Server]] = {
    "alone": lambda own: own,
    "first": lambda own: server.chain(own, server.replace()),
    "last": lambda own: server.chain(server.mix(0.5), own),
    "agreed on": lambda own: server.sign_agreement(2.0, own),
    "compressed": lambda own: compression.compress_server(own, compression.top_k(0.1)),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_the_samples_go_up_once(
    case: str, rooted: ClientData, model: fs.Model, local: fs.LocalUpdate
) -> None:
    """Six features as they are stored, and a label in 32 bits."""
    assert rooted.root is not None
    sample = 6 * rooted.x.dtype.itemsize + 4
    plain = fs.fedavg(local, clients_per_round=M)
    made = plain.replace(server=WRAPPED[case](server.train_beside(local)))
    start = jax.eval_shape(model.init, jax.random.key(0))
    n_0 = int(np.diff(rooted.root)[0])
    assert made.setup_traffic(start, rooted) == (n_0 * sample, 0)
    assert plain.setup_traffic(start, rooted) == (0, 0)
    assert made.traffic(start, rooted).upload == plain.traffic(start, rooted).upload


def test_it_needs_samples(federation: Federation, model: fs.Model, local: fs.LocalUpdate) -> None:
    made = fs.algorithms.hybrid_fl(local, clients_per_round=M, clock=CLOCK)
    with pytest.raises(MissingRootError, match="the server's own samples, got None"):
        made.setup_traffic(jax.eval_shape(model.init, jax.random.key(0)), federation.data)
