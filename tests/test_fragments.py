"""Models that travel in fragments, one a round: whole runs against NumPy, bytes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, make_federation, play, rejects
from oracle import Layers, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim import exchange, flight, leaves, selection, server
from fedjax_sim.algorithms import streaming_diloco
from fedjax_sim.base import Exchange, Fragment, LocalUpdate, Traffic
from fedjax_sim.run.ledger import sent_bytes

LR, BETA, ROUNDS, COHORT = 0.1, 0.5, 5, 3
ONE = fs.make_execution(devices=1)
FRAGMENTS = ((0, 1), (2, 3))  # of W_1, b_1, W_2, b_2
BODY, HEAD = 4 * (6 * 5 + 5), 4 * (5 * 3 + 3)


@pytest.fixture(scope="module")
def net() -> fs.Model:
    """One hidden layer."""
    return fs.models.mlp((6,), 3, widths=(5,))


def local_of(net: fs.Model) -> LocalUpdate:
    """Two steps on all samples of a client: their order does not matter."""
    sgd = optax.sgd(LR, momentum=BETA)
    return fs.local_sgd(fs.empirical_risk(net), sgd, batch_size=40, epochs=2)


def streaming(net: fs.Model, clients: int = COHORT, **options: Any) -> fs.Algorithm:
    return streaming_diloco(local_of(net), clients_per_round=clients, **options).on(ONE)


def nesterov(state: dict[str, Any], step: np.ndarray) -> np.ndarray:
    state["v"] = 0.9 * state.get("v", 0) + step
    return 0.7 * (0.9 * state["v"] + step)


def heavy_ball(state: dict[str, Any], step: np.ndarray) -> np.ndarray:
    state["v"] = 0.5 * state.get("v", 0) + step
    return 0.6 * state["v"]


MEDIAN = {
    "aggregator": fs.aggregators.coordinate_median,
    "server": server.optimizer(optax.sgd(0.6, momentum=0.5)),
}
# Other parts; after how many rounds a client leaves; the mean or another; the server's step.
CASES: dict[str, tuple[dict[str, Any], int, Any, Any]] = {
    "clients that stay": ({}, ROUNDS, np.mean, nesterov),
    "visits of three rounds": (
        {"flight": flight.delayed(3), **MEDIAN}, 3, np.median, heavy_ball,
    ),
    "visits of one round": (
        {"flight": flight.every_round(), "selection": selection.uniform()},
        1, np.mean, nesterov,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, net: fs.Model, case: str
) -> None:
    """Unequal clients, three of eight at once, each with a momentum of its own."""
    parts, stay, middle, step = CASES[case]
    data = federation.data
    out = play(streaming(net).replace(**parts), net, data, ROUNDS)
    w = layers_of(net.init(jax.random.fold_in(jax.random.key(0), 0)))
    states: list[dict[str, Any]] = [{} for _ in w]
    momenta: dict[int, Layers] = {}
    models: list[Layers] = []
    for t, (state, metrics) in enumerate(zip(out.states, out.metrics, strict=True)):
        fresh = t % stay == 0
        for i, k in enumerate(map(int, metrics.client)):
            models = [list(w) for _ in range(COHORT)] if fresh and i == 0 else models
            rows = data.index[data.start[k] : data.start[k + 1]]
            for _ in range(2):
                _, slope = loss_and_gradient(models[i], data.x[rows], data.y[rows])
                v = momenta.get(k, [np.zeros_like(a) for a in w])
                momenta[k] = [BETA * a + g for a, g in zip(v, slope, strict=True)]
                models[i] = [a - LR * b for a, b in zip(models[i], momenta[k], strict=True)]
        for j in FRAGMENTS[t % 2]:
            w[j] = w[j] + step(states[j], middle([m[j] - w[j] for m in models], axis=0))
            for model in models:
                model[j] = w[j]
        assert_trees(layers_of(state.server), w, rtol=1e-4, atol=1e-5)
        counts = [int(c) for c in (metrics.uploads, metrics.downloads, metrics.fragments)]
        assert counts == [COHORT, COHORT * fresh, COHORT * (not fresh)]
    assert out.final_uploads == 0
    assert_trees(out.final, out.servers[-1])
    cohorts = {tuple(map(int, m.client)) for m in out.metrics}
    assert len(cohorts) == {ROUNDS: 1, 3: 2, 1: ROUNDS}[stay]


class head(Exchange):
    """A user's."""

    fragments = (leaves.named("Dense_1"),)
    frozen = leaves.named("Dense_0")


def test_leaves_in_no_fragment_may_be_frozen(net: fs.Model) -> None:
    short = {"flight": flight.every_round(), "selection": selection.uniform()}
    found, wanted = (
        play(streaming(net).replace(exchange=part, **short), net, make_federation().data, 2)
        for part in (head(), exchange.split(frozen=leaves.named("Dense_0")))
    )
    assert_trees(found.final, wanted.final)


def test_bytes_are_those_of_the_fragment_whose_turn_it_is(net: fs.Model) -> None:
    data, start = make_federation().data, net.init(jax.random.key(0))
    found = streaming(net).traffic(start, data)
    fragments = (Fragment(BODY, BODY), Fragment(HEAD, HEAD))
    assert found == Traffic(BODY + HEAD, BODY + HEAD, 0, 0, fragments)
    coded = server.compress_server(server.replace(), fs.compression.top_k(0.1))
    some = streaming(net).replace(server=coded).traffic(start, data)
    assert coded.download_bytes is not None
    head = {name: w for name, w in start.params.items() if name == "Dense_1"}
    one = coded.download_bytes(fs.Variables(head, {}), 1)
    assert some.fragments[1] == Fragment(HEAD, one)
    assert one < HEAD
    # Rounds 2, 3 and 4 of one run: two slots stay, one is new in round 3.
    rows: Any = SimpleNamespace(
        uploads=np.array([[3, 3, 3]]), downloads=np.array([[0, 1, 0]]),
        fragments=np.array([[3, 2, 3]]), visits=np.array([[3, 3, 3]]), time=None,
        answers=np.zeros((1, 3), np.int32), bytes=None,
    )  # fmt: skip
    up, down = sent_bytes(found._replace(message=1, shared_state=10), rows, 5)
    assert up.tolist() == [3 * (2 * BODY + HEAD) + 9]
    assert down.tolist() == [BODY + HEAD + 6 * HEAD + 2 * BODY + 90]


def test_models_that_return_one_by_one_were_sent_whole(net: fs.Model) -> None:
    """Each upload is the fragment of the round, and nobody stays to receive the next."""
    flies = {"flight": flight.buffered(2), "selection": selection.uniform()}
    made = streaming(net).replace(**flies, clock=fs.clock.simulated(1.0))
    found = play(made, net, make_federation().data, 2).metrics
    assert [(int(m.uploads), int(m.fragments)) for m in found] == [(2, 0), (2, 0)]


def test_a_norm_and_its_statistics_are_one_layer() -> None:
    model = fs.models.fashion_cnn((8, 8, 1), 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def layers(mask: fs.Variables) -> set[str]:
        """Without the collection in which statistics lie."""
        found = jax.tree_util.tree_leaves_with_path(mask)
        names = [path[1 + (path[0].name == "state") : -1] for path, chosen in found if chosen]
        return {jax.tree_util.keystr(name, simple=True, separator="/") for name in names}

    first, second, third = (layers(leaves.strided(p, 3)(shapes)) for p in range(3))
    assert not first & second | second & third | third & first
    whole = layers(jax.tree.map(lambda leaf: True, shapes))
    assert first | second | third == whole
    assert any("BatchNorm" in name for name in whole)


def begun(parts: Exchange) -> Callable[[fs.Model], Any]:
    def begin(net: fs.Model) -> Any:
        algorithm = streaming(net).replace(exchange=parts)
        return algorithm.init(
            jax.random.key(0), net.init(jax.random.key(0)), make_federation().data
        )

    return begin


BOTH = exchange.fragments(leaves.named("Dense_0"), leaves.named("Dense_*"))
REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "none": (lambda net: exchange.fragments(), "fragments needs at least one"),
    "no fragments": (lambda net: streaming(net, fragments=0), "fragments must be in 1..1000, got"),
    "a leaf in two": (begun(BOTH), "must have every leaf that travels in exactly one fragment"),
    "a leaf in none": (
        begun(exchange.fragments(leaves.named("Dense_0"))), "must have every leaf that travels in",
    ),
    "an empty one": (
        begun(exchange.fragments(leaves.named("*"), leaves.all_but(leaves.named("*")))),
        "no empty fragment",
    ),
    "few layers": (
        lambda net: play(streaming(net, fragments=3), net, make_federation().data, 1),
        "strided(2, 3) needs a model with more layers than 2",
    ),
    "a first layer": (lambda net: leaves.strided(2, 2), "first must be at least 0 and below the"),
    "codes of a user's fragments": (
        lambda net: streaming(net).replace(
            exchange=head(), sending=(fs.sending.clip_norm(1.0),)
        ), "exchange head() needs clients that send their updates unchanged, sending is (clip_",
    ),
    "bytes that a clock knows too late": (
        lambda net: streaming(net).replace(
            flight=flight.buffered(2), selection=selection.uniform(),
            clock=fs.clock.simulated(1, fs.clock.bandwidth(10, 10)),
        ),
        "exchange fragments(strided(0, 2), strided(1, 2)) needs a clock without a link if models "
        "return one by one",
    ),
}  # fmt: skip


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")


def test_all_slots_meet_in_every_round(net: fs.Model) -> None:
    """Also those that leave out of phase: a rule for four has them."""
    algorithm = streaming(net, 4).replace(
        flight=flight.staggered(4), aggregator=fs.aggregators.trimmed_mean(0.25)
    )
    assert algorithm.slots == 4
