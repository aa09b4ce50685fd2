"""What of a model travels: personal layers, frozen ones, and which weights are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    Federation,
    Play,
    altered_data,
    assert_trees,
    largest_change,
    make_federation,
    play,
    rejects,
    some_slow,
)
from oracle import Layers, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim.algorithms import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedjax_sim.base import LocalUpdate, Variables
from fedjax_sim.models.layers import BatchNorm

LR, ROUNDS, COHORT = 0.1, 4, 3
ONE, FOUR = fs.make_execution(devices=1), fs.make_execution(devices=4)
HEAD, BODY = (2, 3), (0, 1)  # of W_1, b_1, W_2, b_2


@pytest.fixture(scope="module")
def net() -> fs.Model:
    """One hidden layer."""
    return fs.models.mlp((6,), 3, widths=(5,))


def whole_batches(net: fs.Model, **options: Any) -> LocalUpdate:
    """Steps on all samples of a client: their order does not matter."""
    return fs.local_sgd(fs.empirical_risk(net), optax.sgd(LR), batch_size=40, **options)


METHODS: dict[str, Callable[..., fs.Algorithm]] = {
    "fedper": lambda net, **kw: fedper(whole_batches(net, epochs=2), model=net, **kw),
    "lg_fedavg": lambda net, **kw: lg_fedavg(whole_batches(net, epochs=2), model=net, **kw),
    "fedrep": lambda net, **kw: fedrep(whole_batches(net), model=net, head_epochs=3, **kw),
    "fedbabu": lambda net, **kw: fedbabu(whole_batches(net, epochs=2), model=net, **kw),
}
# (the layers that train, steps) one after another; what stays; what is frozen.
ALL = (*BODY, *HEAD)
PLAN: dict[str, tuple[Sequence[tuple[tuple[int, ...], int]], tuple[int, ...]]] = {
    "fedper": ([(ALL, 2)], HEAD),
    "fedrep": ([(HEAD, 3), (BODY, 1)], HEAD),
    "fedbabu": ([(BODY, 2)], ()),
}


@pytest.fixture(scope="module")
def plays(federation: Federation, net: fs.Model) -> dict[str, Play]:
    """On one device, and FedRep on four."""
    devices = dict.fromkeys(METHODS, ONE) | {"fedrep": FOUR}
    return {
        name: play(
            make(net, clients_per_round=COHORT).on(devices[name]),
            net, federation.data, ROUNDS,
        )
        for name, make in METHODS.items()
        if name in PLAN
    }  # fmt: skip


def start_of(net: fs.Model) -> Variables:
    return net.init(jax.random.fold_in(jax.random.key(0), 0))


def descended(layers: Layers, x: Any, y: Any, trained: Sequence[int], steps: int) -> Layers:
    for _ in range(steps):
        _, grads = loss_and_gradient(layers, x, y)
        layers = [
            w - LR * g if i in trained else w
            for i, (w, g) in enumerate(zip(layers, grads, strict=True))
        ]
    return layers


@pytest.mark.parametrize("name", PLAN)
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, net: fs.Model, plays: dict[str, Play], name: str
) -> None:
    """Unequal clients, three of eight in a round: server model and every client's own leaves."""
    data, (phases, mine) = federation.data, PLAN[name]
    server = layers_of(start_of(net))
    own = [[server[i] for i in mine] for _ in range(data.clients)]
    visited = set()
    for state, metrics in zip(plays[name].states, plays[name].metrics, strict=True):
        total, weight = [np.zeros_like(w) for w in server], 0
        for k in map(int, metrics.client):
            rows = data.index[data.start[k] : data.start[k + 1]]
            layers = list(server)
            for i, w in zip(mine, own[k], strict=True):
                layers[i] = w
            for trained, steps in phases:
                layers = descended(layers, data.x[rows], data.y[rows], trained, steps)
            own[k] = [layers[i] for i in mine]
            total = [a + len(rows) * w for a, w in zip(total, layers, strict=True)]
            weight += len(rows)
            visited.add(k)
        server = [
            w if i in mine else a / weight
            for i, (w, a) in enumerate(zip(server, total, strict=True))
        ]
        assert_trees(layers_of(state.server), server, rtol=1e-4, atol=1e-5)
    assert 3 < len(visited) < data.clients
    kept = plays[name].states[-1].own
    for k in range(data.clients if mine else 0):
        whole = fs.tree.filled(jax.tree.map(lambda a, k=k: a[k], kept), start_of(net))
        found = layers_of(whole)
        assert_trees([found[i] for i in mine], own[k], rtol=1e-4, atol=1e-5)
    assert (kept == ()) == (not mine)


BYTES = {  # 6·5 + 5 numbers in the body, 5·3 + 3 in the head, of four bytes
    "fedper": (4 * 35, 0),
    "lg_fedavg": (4 * 18, 0),
    "fedrep": (4 * 35, 0),
    "fedbabu": (4 * 35, 8 * 4 * 18),  # the head once to each of the eight
}


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_of_what_travels(federation: Federation, net: fs.Model, name: str) -> None:
    algorithm = METHODS[name](net, clients_per_round=COHORT)
    sizes = algorithm.traffic(start_of(net), federation.data)
    once = algorithm.setup_traffic(start_of(net), federation.data)
    each, down = BYTES[name]
    assert (sizes.upload, sizes.download, sizes.message, sizes.shared_state) == (each, each, 0, 0)
    assert (once.up, once.down) == (0, down)


def test_personal_scores_are_of_the_clients_own_layers(
    federation: Federation, net: fs.Model, plays: dict[str, Play]
) -> None:
    """The frame scores what was received with the client's leaves in it, before any visit too."""
    algorithm = METHODS["fedper"](net, clients_per_round=COHORT).on(ONE)
    data, state = jax.tree.map(jnp.asarray, federation.data), plays["fedper"].states[1]

    def score(_: Any, variables: Variables, x: jax.Array) -> jax.Array:
        return net.apply(variables, x, train=False)[0]

    @jax.jit
    def scored(state: Any, x: jax.Array) -> Any:
        return algorithm.score_personal(jax.random.key(0), state, data, score, (), x)

    x, alone = jnp.ones((data.clients, 1, 6)), jax.jit(score)
    found = scored(state, x)
    for k in range(data.clients):
        mine = jax.tree.map(lambda a, k=k: a[k], state.own)
        used = fs.tree.filled(mine, state.server)
        assert_trees(found[k], alone((), used, x[k]), rtol=1e-5, atol=1e-6)


class Normed(nn.Module):
    """A layer with BatchNorm behind it, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: Any = None) -> jax.Array:
        x = nn.Dense(4, use_bias=False)(x)[:, None, None]
        x = jax.nn.relu(BatchNorm()(x, train=train, mask=mask)[:, 0, 0])
        return nn.Dense(3)(x)


def test_fedbn_keeps_scales_offsets_and_statistics() -> None:
    few, net = make_federation((9, 5, 8)), fs.models.from_linen(Normed(), (6,))
    local = fs.local_sgd(fs.empirical_risk(net), optax.sgd(LR), batch_size=8)
    out = play(fedbn(local, clients_per_round=2).on(ONE), net, few.data, 3)
    start, end = start_of(net), out.servers[-1]
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.abs(a - b).max())
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(end), jax.tree.leaves(start), strict=True
        )
    }
    for name, change in names.items():
        assert (change == 0) == ("BatchNorm" in name), name
    kept = jax.tree_util.tree_leaves_with_path(out.states[-1].own)
    assert len(kept) == sum("BatchNorm" in name for name in names) == 4
    last = set(map(int, np.concatenate([m.client for m in out.metrics])))
    for path, rows in kept:
        for k in range(3):
            moved = float(np.abs(rows[k] - fs.tree.filled(None, dict(_flat(start))[path])).max())
            assert (moved > 0) == (k in last), path


def _flat(variables: Variables) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(variables)


# What meets a split.


def test_codes_and_attacks_act_on_what_travels(federation: Federation, net: fs.Model) -> None:
    """Top-k keeps its share of the body, and costs that; the head is not sent at all."""
    code = fs.compression.top_k(0.2)
    algorithm = (
        METHODS["fedper"](net, clients_per_round=COHORT)
        .on(ONE)
        .replace(sending=(fs.sending.compressed(code),))
    )
    out = play(algorithm, net, federation.data, 1)
    change = jax.tree.map(jnp.subtract, out.servers[0], start_of(net))
    body, head = (
        np.concatenate([np.ravel(layers_of(change)[i]) for i in at]) for at in (BODY, HEAD)
    )
    assert (head == 0).all()
    assert 0 < (body != 0).sum() <= COHORT * 7  # of 35, by each client
    whole = fs.fedavg(whole_batches(net), clients_per_round=COHORT).replace(
        sending=(fs.sending.compressed(code),)
    )
    ours, theirs = (a.traffic(start_of(net), federation.data).upload for a in (algorithm, whole))
    assert ours < theirs


def test_noise_for_privacy_is_of_what_travels(federation: Federation, net: fs.Model) -> None:
    """The body's noise is what was asked for; the head has none."""
    private = fs.algorithms.dp_fedavg(
        whole_batches(net), clients_per_round=COHORT, sampling="fixed", clip=1e-6,
        noise_multiplier=1e6, ).on(ONE)  # fmt: skip
    own = private.replace(exchange=fs.exchange.split(own=fs.leaves.head(net)))
    out = play(own, net, federation.data, 1)
    moved = layers_of(jax.tree.map(jnp.subtract, out.final, start_of(net)))
    noise = np.concatenate([np.ravel(moved[i]) for i in BODY])
    assert 0.7 < noise.std() * COHORT < 1.4
    assert all((moved[i] == 0).all() for i in HEAD)


@pytest.mark.parametrize("plan", some_slow(["delayed", "gossip"]))
def test_models_in_flight_meet_the_layers_of_each_client(
    federation: Federation, net: fs.Model, plan: str
) -> None:
    """A head never leaves its client, wherever the body goes: the server's stays as it was."""
    named = {
        "delayed": lambda local: fs.radfed(local, clients_per_round=4, redistribution_rounds=2),
        "gossip": lambda local: fs.algorithms.gossip(local, clients_per_round=4),
    }
    algorithm = (
        named[plan](whole_batches(net))
        .replace(exchange=fs.exchange.split(own=fs.leaves.head(net)))
        .on(ONE)
    )
    out = play(algorithm, net, federation.data, 4)
    start = layers_of(start_of(net))
    end = layers_of(out.final)
    for i in HEAD:
        np.testing.assert_allclose(end[i], start[i], rtol=1e-6, atol=1e-7)
    assert all(np.abs(end[i] - start[i]).max() > 1e-3 for i in BODY)
    visited = set(map(int, np.concatenate([m.client for m in out.metrics])))
    for k in range(federation.data.clients):
        mine = jax.tree.map(lambda a, k=k: a[k], out.states[-1].own)
        moved = largest_change(fs.tree.filled(mine, start_of(net)), start_of(net)) > 0
        assert moved == (k in visited)


def test_frozen_leaves_stay_even_if_they_are_trained(federation: Federation, net: fs.Model) -> None:
    algorithm = (
        fs.fedavg(whole_batches(net), clients_per_round=COHORT)
        .on(ONE)
        .replace(exchange=fs.exchange.split(frozen=fs.leaves.named("Dense_0")))
    )
    out = play(algorithm, net, federation.data, 2)
    start, end = layers_of(start_of(net)), layers_of(out.servers[-1])
    assert all((start[i] == end[i]).all() for i in BODY)
    assert all(np.abs(start[i] - end[i]).max() > 0 for i in HEAD)


@pytest.mark.parametrize("role", ["preaggregation", "server"])
def test_a_part_that_moves_what_does_not_travel_is_refused(net: fs.Model, role: str) -> None:
    """It was ignored: the residual of adapters that a server adds to the trunk, say."""

    def moved(model: Variables, *rows: int) -> Variables:
        trunk = start_of(net).params["Dense_0"]
        trunk = jax.tree.map(lambda w: jnp.ones((*rows, *w.shape), w.dtype), trunk)
        return model._replace(params={**model.params, "Dense_0": trunk})

    class Added(fs.base.PreAggregation):
        def apply(self, key: Any, state: Any, updates: Any, weights: Any, cohort: Any) -> Any:
            return moved(updates, len(weights)), weights, state

    class Moving(fs.base.Server):
        def update(self, key: Any, step: Any, server: Any, state: Any, gathered: Any) -> Any:
            return moved(step), state

    parts: dict[str, Any] = {
        "preaggregation": [Added()],
        "server": Moving(),
    }
    frozen = fs.exchange.split(frozen=fs.leaves.named("Dense_0"))
    algorithm = (
        fs.fedavg(whole_batches(net), clients_per_round=COHORT)
        .on(ONE)
        .replace(exchange=frozen, **{role: parts[role]})
    )
    with pytest.raises(ValueError, match=rf"{role} .*must return what .*'kernel': None"):
        play(algorithm, net, make_federation().data, 1)


def test_weights_that_are_not_trained_stay_through_momentum_and_decay(net: fs.Model) -> None:
    """The optimiser does not see them: decay would shrink what has no gradient."""
    data = make_federation((17,)).data
    decaying = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR, momentum=0.9))
    kernel = fs.leaves.named("Dense_1/*/kernel")
    local = fs.local_sgd(fs.empirical_risk(net), decaying, trained=kernel)
    out = play(fs.fedavg(local, clients_per_round=1).on(ONE), net, data, 2)
    start, end = layers_of(start_of(net)), layers_of(out.servers[-1])
    moved = [bool(np.abs(a - b).max() > 0) for a, b in zip(start, end, strict=True)]
    assert moved == [False, False, True, False]


def test_in_turn_is_one_local_update_after_another(net: fs.Model) -> None:
    data = make_federation((17,)).data
    first, second = whole_batches(net, epochs=1), whole_batches(net, epochs=2)
    both = fs.local.in_turn(first, second)
    out = play(fs.fedavg(both, clients_per_round=1).on(ONE), net, data, 1)
    rows, start = data.index, layers_of(start_of(net))
    at = [descended(start, data.x[rows], data.y[rows], ALL, steps) for steps in range(4)]
    losses = [loss_and_gradient(layers, data.x[rows], data.y[rows])[0] for layers in at[:3]]
    assert_trees(layers_of(out.servers[0]), at[3], rtol=1e-4, atol=1e-5)
    assert int(out.metrics[0].samples) == 3 * 17
    np.testing.assert_allclose(out.metrics[0].loss, np.mean(losses), rtol=1e-5)
    assert both.change(epochs=1).epochs == 2


# What an objective may know of its client.


def test_an_objective_sees_what_was_received_and_remembers(net: fs.Model) -> None:
    """A loss of 0 but for the memory: the number of a client's visits, started at 1."""
    data = make_federation((4, 3)).data

    class visits(fs.base.Memory):
        def init(self, variables: Any) -> Any:
            return jnp.float32(1)

        def keep(self, trained: Any, context: fs.base.Context) -> Any:
            return context.memory + 1

    def objective(params: Any, state: Any, batch: Any, context: fs.base.Context) -> Any:
        moved = jax.tree.map(jnp.subtract, params, context.received.params)
        far = sum(jnp.sum(jnp.abs(a)) for a in jax.tree.leaves(moved))
        return context.memory + far, state

    local = fs.local_sgd(objective, optax.sgd(0.0), batch_size=40, memory=visits())
    out = play(fs.fedavg(local, clients_per_round=2).on(ONE), net, data, 3)
    assert [float(m.loss) for m in out.metrics] == [1.0, 2.0, 3.0]
    assert out.states[-1].client_state.memory.tolist() == [4.0, 4.0]


def test_a_correction_may_take_the_gradients_place(net: fs.Model) -> None:
    """By its sign: signSGD."""
    data = make_federation((17,)).data

    class signs(fs.base.Correction):
        def direction(self, gradient: Any, *given: Any) -> Any:
            return jax.tree.map(jnp.sign, gradient)

    local = whole_batches(net).change(corrections=(signs(),))
    out = play(fs.fedavg(local, clients_per_round=1).on(ONE), net, data, 1)
    change = jax.tree.map(jnp.subtract, out.servers[0].params, start_of(net).params)
    for leaf in jax.tree.leaves(change):
        np.testing.assert_allclose(np.abs(leaf)[leaf != 0], LR, rtol=1e-4)


def test_features_are_the_heads_inputs(net: fs.Model) -> None:
    variables, x = start_of(net), jax.random.normal(jax.random.key(1), (4, 6))
    assert net.features is not None
    (logits, features), _ = net.features(variables, x, train=False)
    w1, b1, w2, b2 = layers_of(variables)
    hidden = np.maximum(np.asarray(x) @ w1 + b1, 0)
    np.testing.assert_allclose(features, hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits, hidden @ w2 + b2, rtol=1e-5, atol=1e-6)
    scaled = fs.models.with_scaling(net, np.full(6, 1.0), np.full(6, 2.0))
    assert scaled.features is not None
    (same, _), _ = scaled.features(variables, 2 * x + 1, train=False)
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-5)


def test_the_rate_follows_the_number_of_the_round(net: fs.Model) -> None:
    """One step a round of one client, half as long each time, also for a model in flight."""
    data = make_federation((17,)).data
    local = whole_batches(net).change(rate_by_round=lambda t: jnp.exp2(-t.astype(jnp.float32)))
    algorithm = fs.radfed(local, clients_per_round=1, redistribution_rounds=3).on(ONE)
    out = play(algorithm, net, data, 3)
    layers, rows = layers_of(start_of(net)), data.index
    for t in range(3):
        _, grads = loss_and_gradient(layers, data.x[rows], data.y[rows])
        layers = [w - LR * 0.5**t * g for w, g in zip(layers, grads, strict=True)]
    assert_trees(layers_of(out.servers[-1]), layers, rtol=1e-4, atol=1e-5)


# What is refused.


def first_state(exchange: Callable[[fs.Model], fs.base.Exchange]) -> Callable[[fs.Model], Any]:
    def begin(net: fs.Model) -> Any:
        algorithm = fs.fedavg(whole_batches(net), clients_per_round=2)
        algorithm = algorithm.replace(exchange=exchange(net))
        return algorithm.init(jax.random.key(0), start_of(net), make_federation().data)

    return begin


REFUSED: dict[str, tuple[Callable[[fs.Model], Any], str]] = {
    "nothing": (lambda net: fs.exchange.split(), "split needs own or frozen leaves"),
    "no name": (
        first_state(lambda net: fs.exchange.split(own=fs.leaves.named("Conv*"))),
        "named: 'Conv*' must match a leaf, the model has Dense_0/Dense_0/bias, ",
    ),
    "no patterns": (lambda net: fs.leaves.named(), "patterns must be names of layers or leaves"),
    "both": (
        first_state(lambda net: fs.exchange.split(fs.leaves.head(net), fs.leaves.named("Dense_1"))),
        "must not freeze what the clients train",
    ),
    "no head": (
        lambda net: fs.leaves.head(fs.Model(net.init, net.apply)),
        "model must declare its head",
    ),
    "a rate": (
        lambda net: whole_batches(net).change(rate_by_round=0.5),
        "rate_by_round must be an optax schedule, got 0.5",
    ),
    "a rate of the server's": (
        lambda net: play(
            fs.algorithms.ozdayi(
                whole_batches(net).change(rate_by_round=lambda t: 0.5), clients_per_round=2
            ),
            net,
            altered_data(make_federation().data, root=np.array([0, 3], np.int32)),
            1,
        ),
        "rate_by_round needs the round number",
    ),
    "none in turn": (lambda net: fs.local.in_turn(), "in_turn needs at least one local update"),
}


test_what_does_not_fit_is_refused = rejects(REFUSED, "net")
