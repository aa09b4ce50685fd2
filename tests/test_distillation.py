"""FedDF: the server learns from its own samples what the clients' models say together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, altered_data, assert_trees, play, rejects
from oracle import Layers, Oracle, average, layers_of, logits, softmax, zeros

import fedjax_sim as fs
from fedjax_sim.algorithms import feddf
from fedjax_sim.base import ClientData, MissingRootError
from fedjax_sim.engine import streams
from fedjax_sim.engine.batches import root_view, shuffled
from fedjax_sim.privacy import poisson

LR, BATCH, COHORT, STEPS, RATE = 0.1, 8, 3, 4, 0.3
ONE = fs.make_execution(devices=1)
_shuffled = jax.jit(shuffled, static_argnums=2)


@pytest.fixture(scope="module")
def rooted(federation: Federation) -> ClientData:
    """70 samples that clients have too, and the five that none has: these are large."""
    data = federation.data
    free = np.setdiff1d(np.arange(len(data.x)), data.index)
    x = np.array(data.x)
    x[free] *= 60
    rows = np.concatenate([free, data.index[:70]]).astype(np.int32)
    edges = np.array([len(data.index), len(data.index) + len(rows)], np.int32)
    # More room than samples: some of it is padding.
    index, room = np.concatenate([data.index, rows]), len(rows) + 60
    return altered_data(data, x=x, index=index, root=edges, capacity=room)


def local_of(net: fs.Model) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(net), optax.sgd(LR), batch_size=BATCH)


def made(net: fs.Model, **options: Any) -> fs.Algorithm:
    given: dict[str, Any] = {"distill_steps": STEPS, "distill_lr": RATE, "distill_batch_size": 20}
    given |= {"clients_per_round": COHORT} | options
    return feddf(local_of(net), model=net, **given).on(ONE)


def gradient(w: Layers, x: np.ndarray, q: np.ndarray) -> Layers:
    """Of the mean divergence of q from what the model says."""
    h = np.maximum(x @ w[0] + w[1], 0)
    d = (softmax(logits(w, x)) - q) / len(x)
    back = (d @ w[2].T) * (h > 0)
    return [x.T @ back, back.sum(axis=0), h.T @ d, d.sum(axis=0)]


def distilled(
    mean: Layers, models: list[Layers], x: np.ndarray, key: Any, room: int, batch: int
) -> tuple[Layers, list[float]]:
    """The authors' loop: the mean of logits, clipped gradients, Adam, a cosine; and the norms."""
    q = softmax(np.mean([logits(w, x) for w in models], axis=0))
    w, first, second, norms = mean, zeros(mean), zeros(mean), []
    for i in range(STEPS):
        order_key = jax.random.split(jax.random.fold_in(key, i))[0]
        order = np.asarray(_shuffled(order_key, jnp.int32(len(x)), room))[: len(x)][:batch]
        g = gradient(w, x[order], q[order])
        norms.append(float(np.sqrt(sum((a**2).sum() for a in g))))
        g = [a * min(1, 5 / norms[-1]) for a in g]
        first = [0.9 * m + 0.1 * a for m, a in zip(first, g, strict=True)]
        second = [0.999 * v + 0.001 * a**2 for v, a in zip(second, g, strict=True)]
        rate = RATE * (1 + np.cos(np.pi * i / STEPS)) / 2
        w = [
            a - rate * (m / (1 - 0.9 ** (i + 1))) / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
            for a, m, v in zip(w, first, second, strict=True)
        ]
    return w, norms


def check(out: Play, net: fs.Model, data: ClientData, batch: int) -> list[float]:
    """Every round of the cohorts that came, in NumPy; returns the norms of the gradients."""
    initial = net.init(jax.random.fold_in(jax.random.key(0), 0))
    clients, w, norms = Oracle(data, initial, LR, 0.0, BATCH, 1), layers_of(initial), []
    assert data.root is not None
    rows = np.asarray(data.index)[data.root[0] : data.root[1]]
    x = np.asarray(data.x, np.float64)[rows]
    for t, (server, metrics) in enumerate(zip(out.servers, out.metrics, strict=True)):
        cohort = [k for k in metrics.client.tolist() if k < len(clients.sizes)]
        ends = [clients.train(t, k, w) for k in cohort]
        mean = average(ends, [float(clients.sizes[k]) for k in cohort])
        key = streams.stream(jax.random.fold_in(clients.run_key, t), streams.Round.SERVER)
        w, found = distilled(mean, ends, x, key, data.capacity, batch)
        norms += found
        assert_trees(layers_of(server), w, rtol=2e-3, atol=2e-4)
    return norms


@pytest.mark.parametrize("batch", [20, 500])
def test_whole_runs_are_those_of_the_oracle(rooted: ClientData, net: fs.Model, batch: int) -> None:
    """Three of eight unequal clients; minibatches of some samples, or of all and padding."""
    out = play(made(net, distill_batch_size=batch), net, rooted, 2)
    norms = check(out, net, rooted, batch)
    assert min(norms) < 5 < max(norms)  # some are clipped


@pytest.mark.slow
def test_who_does_not_come_does_not_teach(rooted: ClientData, net: fs.Model) -> None:
    """Two clients in three slots."""
    out = play(made(net).replace(selection=fs.selection.uniform(active=2)), net, rooted, 2)
    assert [int(m.visits) for m in out.metrics] == [2, 2]
    check(out, net, rooted, 20)


def test_without_teachers_the_server_stays(rooted: ClientData, net: fs.Model) -> None:
    out = play(made(net).replace(selection=poisson(1e-6)), net, rooted, 1)
    assert int(out.metrics[0].visits) == 0
    assert_trees(out.final, net.init(jax.random.fold_in(jax.random.key(0), 0)))


def test_without_steps_it_is_fedavg(rooted: ClientData, net: fs.Model) -> None:
    plain = fs.fedavg(local_of(net), clients_per_round=COHORT).on(ONE)
    ours, theirs = (play(a, net, rooted, 2) for a in (made(net, distill_steps=0), plain))
    assert_trees(ours.servers, theirs.servers)


def test_labels_of_the_servers_samples_are_not_read(rooted: ClientData, net: fs.Model) -> None:
    """They are of no class at all; the five that no client has are the server's here."""
    data, free = rooted, np.setdiff1d(np.arange(len(rooted.x)), rooted.index[: rooted.start[-1]])
    edges = np.array([rooted.start[-1], rooted.start[-1] + len(free)], np.int32)
    index = np.concatenate([rooted.index[: rooted.start[-1]], free]).astype(np.int32)
    data = altered_data(data, index=index, root=edges)
    view = root_view(data)
    assert int(view.size) == 5
    unknown = np.array(data.y)
    unknown[free] = -7
    algorithm, start = made(net), net.init(jax.random.key(0))

    @jax.jit
    def after_a_round(data: ClientData) -> fs.Variables:
        state = algorithm.init(jax.random.key(1), start, data)
        return algorithm.step(jax.random.key(2), state, data)[0].server

    ours, theirs = map(after_a_round, (data, altered_data(data, y=unknown)))
    assert_trees(ours, theirs)


def test_traffic_is_that_of_fedavg(rooted: ClientData, net: fs.Model) -> None:
    variables = net.init(jax.random.key(0))
    sizes = made(net).traffic(variables, rooted)
    plain = fs.fedavg(local_of(net), clients_per_round=COHORT)
    assert sizes == plain.traffic(variables, rooted)


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "in fragments": (
        lambda net: fs.algorithms.streaming_diloco(local_of(net), clients_per_round=4).replace(
            server=fs.server.chain(fs.server.distilled(net))
        ),
        "server chain(distilled(<Model>)) needs an exchange of the whole model",
    ),
}


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")


def test_a_server_without_samples_is_refused(federation: Federation, net: fs.Model) -> None:
    with pytest.raises(MissingRootError, match="root of the data must be the server's own samples"):
        play(made(net), net, federation.data, 1)
