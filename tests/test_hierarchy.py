"""HierFAVG, against plain NumPy and against FedAvg."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, assert_trees, make_federation, play

import fedjax_sim as fs
from fedjax_sim import flight, redistribution, selection
from fedjax_sim.algorithms import fedavg, hierfavg

LR, BATCH, N = 0.1, 8, 8
MODEL = fs.models.logistic((6,), 3)
LOCAL = fs.local_sgd(fs.empirical_risk(MODEL), optax.sgd(LR), batch_size=BATCH)
OF = (0, 1, 0, 0, 2, 0, 1, 0)  # edges with five clients, two and one


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation((9, 20, 5, 14, 30, 3, 12, 7))


def staged(edges: Any, rounds: int, clients: int = N, **parts: Any) -> fs.Algorithm:
    made: dict[str, Any] = {
        "selection": selection.uniform(sticky=True),
        "flight": flight.delayed(rounds, redistribution=redistribution.edges(edges)),
    }
    return fs.compose(LOCAL, clients, **(made | parts))


def test_two_levels_against_numpy(federation: Federation) -> None:
    """Seven of eight unequal clients on four devices; the last round's models are collected."""
    rounds, clients, edges = 5, 7, 3
    method = staged([*OF], 3, clients).on(fs.make_execution(devices=4))
    ours = play(method, MODEL, federation.data, rounds)
    initial = MODEL.init(jax.random.fold_in(jax.random.key(0), 0))
    run = oracle.Oracle(federation.data, initial, LR, 0.0, BATCH, 1)
    server, models = oracle.layers_of(initial), {}
    for t, (state, report) in enumerate(zip(ours.states, ours.metrics, strict=True)):
        if t % 3 == 0:
            cohort = sorted(report.client.tolist())
            models = dict.fromkeys(cohort, server)
        else:
            models = {
                k: mean_of(run, models, [j for j in cohort if OF[j] == OF[k]]) for k in cohort
            }
        assert sorted(report.client.tolist()) == cohort
        models = {k: run.train(t, k, model) for k, model in models.items()}
        if t % 3 == 2:
            server = mean_of(run, models, cohort)
        close(state.server, server)
        assert report.uploads == clients * (t % 3 > 0) + (clients + edges) * (t % 3 == 2)
        assert report.downloads == clients + edges * (t % 3 == 0)
    assert ours.final_uploads == clients + edges
    close(ours.final, mean_of(run, models, cohort))


def mean_of(
    run: oracle.Oracle, models: dict[int, oracle.Layers], clients: list[int]
) -> oracle.Layers:
    return oracle.average([models[k] for k in clients], [float(run.sizes[k]) for k in clients])


def close(ours: Any, theirs: oracle.Layers) -> None:
    for a, b in zip(oracle.layers_of(ours), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_one_level_is_fedavg(federation: Federation) -> None:
    """To the bit if edges meet in every round; to rounding if all clients are at one edge."""
    one: dict[str, Any] = {"clients_per_round": N}
    plain = fs.make_execution(devices=1)
    wanted = play(fedavg(LOCAL, **one).on(plain), MODEL, federation.data, 3)
    often = play(
        hierfavg(LOCAL, **one, edges=3, edge_rounds=1).on(plain), MODEL, federation.data, 3
    )
    assert_trees(often.final, wanted.final)
    assert [int(report.uploads) for report in often.metrics] == [N + 3] * 3
    alone = play(
        hierfavg(LOCAL, **one, edges=1, edge_rounds=3).on(plain), MODEL, federation.data, 3
    )
    assert_trees(alone.final, wanted.final, rtol=1e-5, atol=1e-6)


def test_edges_are_any_sequence() -> None:
    given: list[Any] = [OF, [*OF], np.array(OF), jax.numpy.array(OF)]
    made = {redistribution.edges(of) for of in given}
    assert made == {redistribution.edges(OF)}
    assert [edges.relays for edges in made] == [3]


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "no edge": ({"edges": 0}, "edges must be at least 1, got 0"),
    "half an edge": ({"edges": 0.5}, "a whole number, or one for each client, got 0.5"),
    "half edges": ({"edges": [0.5, 1]}, "or one for each client, got [0.5, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_what_does_not_fit_is_rejected(case: str) -> None:
    options, message = REJECTED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        staged(rounds=2, **options)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((0, 1), "edges must have one entry for each of the 8 clients, got 2"),
        (9, "edges must be at most the 8 clients, got 9"),
    ],
)
def test_edges_are_those_of_the_clients(federation: Federation, edges: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        staged(edges, 2).init(jax.random.key(0), MODEL.init(jax.random.key(0)), federation.data)
