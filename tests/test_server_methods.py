"""Server methods, asynchrony, gossip and fairness, against closed forms and plain NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import (
    Federation,
    Play,
    altered_data,
    assert_trees,
    largest_change,
    play,
    promising,
    rejects,
    with_root,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import (
    broadcast,
    clustering,
    corrections,
    flight,
    preaggregation,
    redistribution,
    selection,
    server,
    tree,
)
from fedjax_sim.algorithms import afl, fedasync, fltrust, gossip, ozdayi, qffl
from fedjax_sim.base import (
    ClientData,
    Cohort,
    Gathered,
    LocalInfo,
    LocalUpdate,
    PreAggregation,
    Redistribution,
    Server,
    Variables,
)
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.data import take_root
from fedjax_sim.engine.batches import root_view
from fedjax_sim.partition import label_table, partition_from_lists

LR, ROUNDS, BATCH = 0.1, 5, 8
ONE: dict[str, Any] = {"execution": fs.make_execution(devices=1)}  # compiles fastest
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def model(models: dict[str, fs.Model]) -> fs.Model:
    return models["logistic"]


@pytest.fixture(scope="module")
def local(model: fs.Model) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), batch_size=BATCH)


def slow(data: ClientData, model: fs.Model, momentum: float = 0.0) -> oracle.Oracle:
    initial = model.init(jax.random.fold_in(jax.random.key(0), 0))
    return oracle.Oracle(data, initial, LR, momentum, BATCH, 1)


def check(theirs: list[oracle.Layers], ours: list[Any]) -> None:
    for layers, variables in zip(theirs, ours, strict=True):
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


# --- how the server moves ---------------------------------------------------------------------


def pair(params: float, mean: float, count: int) -> Variables:
    return Variables({"w": jnp.full(2, params)}, {"mean": jnp.float32(mean), "count": count})


def moved(part: Server, to: Variables, start: Variables) -> Any:
    """Where the server goes from ``start``, given updates whose aggregate leads ``to`` there."""
    step, nothing = tree.subtract(to, start), cast("Any", None)
    taken, _ = part.update(jax.random.key(0), step, start, part.init(start), nothing)
    return tree.add(start, taken)


def test_mix_is_a_part_of_the_way_of_weights_and_state() -> None:
    out = moved(server.mix(0.25), pair(8.0, 4.0, jnp.int32(9)), pair(4.0, 0.0, jnp.int32(4)))
    assert out.params["w"].tolist() == [5.0, 5.0]
    assert float(out.state["mean"]) == 1.0
    assert int(out.state["count"]) == 5
    assert out.state["count"].dtype == jnp.int32


def test_an_optimiser_moves_the_weights_and_replaces_the_state() -> None:
    """BatchNorm statistics are neither kept from the old model nor scaled by the rate."""
    half = server.optimizer(optax.sgd(0.5))
    for part in (half, server.sign_agreement(0, half)):
        start, to = pair(4.0, 1.0, jnp.int32(4)), pair(8.0, 3.0, jnp.int32(9))
        step = tree.subtract(to, start)
        gathered = Gathered(tree.stack_copies(step, 2), jnp.ones(2), cast("Any", None))
        taken, _ = part.update(jax.random.key(0), step, start, part.init(start), gathered)
        out = tree.add(start, taken)
        assert out.params["w"].tolist() == [6.0, 6.0]
        assert float(out.state["mean"]) == 3.0
        assert int(out.state["count"]) == 9


def test_a_chain_hands_on_what_it_made() -> None:
    w, nothing = Variables(jnp.zeros(1), ()), cast("Any", None)
    steps = server.chain(server.optimizer(optax.sgd(0.5, momentum=0.5)), server.mix(0.5))
    state, velocity = steps.init(w), 0.0
    for step in (1.0, -2.0, 0.25):
        given_step = Variables(jnp.full(1, step), ())
        out, state = steps.update(jax.random.key(0), given_step, w, state, nothing)
        velocity = 0.5 * velocity + step
        np.testing.assert_allclose(out.params, 0.5 * 0.5 * velocity, rtol=1e-6)
    start, to = Variables(jnp.zeros(1), ()), Variables(jnp.ones(1), ())
    assert_trees(moved(server.chain(), to, start), to)


def test_only_the_last_of_a_chain_encodes() -> None:
    encoder = promising(server.replace(), download_bytes=lambda self, variables, updates: 7)
    after = server.chain(server.mix(0.5), encoder).download_bytes
    assert after is not None
    assert after(Variables((), ()), 1) == 7
    assert server.chain(encoder, server.mix(0.5)).download_bytes is None


@pytest.fixture(scope="module")
def rooted(federation: Federation) -> ClientData:
    """The five samples that no client owns, and some that clients own too."""
    free = np.setdiff1d(np.arange(len(federation.data.x)), federation.data.index)
    return with_root(federation.data, [*free.tolist(), *range(12)])


def test_ozdayi_against_numpy(rooted: ClientData, model: fs.Model, local: LocalUpdate) -> None:
    """By η η_θ ⊙ v, also for those not agreed on: v takes in all coordinates, w moves back."""
    beta, theta, rate, m = 0.5, 2.0, 0.8, 3

    class AtServer(oracle.Oracle):
        """The server's samples are client 1's: the second of the chain has the key's fold 1."""

        def key(self, t: int, use: int) -> Any:
            return super().key(t, 4 if use == 2 else use)

    assert rooted.root is not None
    edges = np.array([0, *np.asarray(rooted.root)], np.int32)
    own = altered_data(rooted, start=edges)
    clients = slow(rooted, model)
    at_server = AtServer(own, clients.initial, LR, 0.0, BATCH, 2)
    velocity = oracle.zeros(oracle.layers_of(clients.initial))
    rounds, stopped = iter(range(3)), []

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        nonlocal velocity
        changes = [oracle.plus(v.layers, w, -1) for v in visits]
        mean = oracle.average(changes, [float(clients.sizes[k]) for k in cohort])
        velocity = oracle.plus(mean, velocity, beta)
        totals = [sum(np.sign(c[i]) for c in changes) for i in range(len(w))]
        agreed = [np.abs(s) >= theta for s in totals]
        stopped.append(np.mean([1 - a.mean() for a in agreed]))
        rates = [np.where(a, 1, -1) for a in agreed]
        step = [r * v for r, v in zip(rates, velocity, strict=True)]
        return at_server.train(next(rounds), 1, oracle.plus(w, step, rate))

    servers, _ = oracle.fedavg(clients, 3, m, absorb=absorb)
    algorithm = ozdayi(
        local,
        clients_per_round=m,
        server_lr=rate,
        server_momentum=beta,
        threshold=theta,
        server_epochs=2,
        backwards=True,
    ).on(ONE["execution"])
    check(servers, play(algorithm, model, rooted, 3).servers)
    assert 0.1 < min(stopped) <= max(stopped) < 0.9  # both kinds of coordinates


# --- the server's own samples -----------------------------------------------------------------


@st.composite
def dealt(draw: Any) -> tuple[list[int], fs.partition.Partition, int, int]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    more = draw(st.integers(0, 3))
    labels = draw(
        st.lists(st.integers(0, 3), min_size=sum(sizes) + more, max_size=sum(sizes) + more)
    )
    order = draw(st.permutations(range(len(labels))))
    cuts = np.cumsum(sizes)
    lists = np.split(np.array(order)[: cuts[-1]], cuts[:-1])
    return (
        labels,
        partition_from_lists(lists),
        draw(st.integers(1, cuts[-1])),
        draw(st.integers(0, 5)),
    )


@quick
@given(dealt())
def test_take_root(case: Any) -> None:
    labels, before, size, seed = case
    y = np.array(labels)
    classes = np.unique(y[before.index])
    try:
        after, root = take_root(labels, before, size, seed=seed)
    except ValueError:
        # A class can lose at most one sample of each client to the rule that the last one stays.
        rarest = min(int(np.sum(y[before.index] == c)) for c in classes)
        assert rarest < -(-size // len(classes)) + len(before.sizes)
        return
    assert len(root) == size
    assert sorted([*after.index, *root]) == sorted(before.index)
    assert (after.sizes > 0).all()
    counts = [int(np.sum(y[root] == c)) for c in classes]
    assert max(counts) - min(counts) <= 1
    for kept, had in zip(after.lists, before.lists, strict=True):
        assert set(kept) == set(had) - set(root)
    data = fs.client_data(np.zeros((len(y), 2)), y, after, root=root)
    assert data.root is not None
    assert sorted(data.index[data.root[0] : data.root[1]]) == sorted(root)
    assert data.capacity == max(size, after.sizes.max())


def test_take_root_is_drawn_by_the_seed() -> None:
    y = np.arange(60) % 3
    p = partition_from_lists(np.split(np.arange(60), 6))
    roots = [take_root(y, p, 6, seed=s)[1].tolist() for s in (0, 0, 1)]
    assert roots[0] == roots[1] != roots[2]
    assert label_table(y, partition_from_lists([roots[2]]), 3).tolist() == [[2, 2, 2]]


@pytest.fixture(scope="module")
def two_roots(federation: Federation) -> tuple[Any, Any, list[Any], list[Any]]:
    x, y = federation.data.x, federation.data.y
    whole = partition_from_lists(np.split(np.arange(len(y)), [30, 50, 70]))
    both = [take_root(y, whole, 9, seed=s) for s in (0, 1)]
    return x, y, [p for p, _ in both], [r for _, r in both]


@pytest.mark.slow
def test_two_runs_with_their_own_roots_are_two_runs(
    federation: Federation, model: fs.Model, local: LocalUpdate, two_roots: Any
) -> None:
    x, y, partitions, roots = two_roots
    algorithm = ozdayi(local, clients_per_round=4).on(ONE["execution"])

    data = fs.client_data(x, y, partitions, root=roots)
    both = fs.simulate(
        algorithm, model, data, federation.test, rounds=2, classes=3, seeds=(5, 5), **ONE
    )
    assert both.xla_programs <= 4
    one, other = (jax.tree.map(lambda a, i=i: a[i], both.variables) for i in (0, 1))
    alone = fs.client_data(x, y, partitions[1], root=roots[1])
    assert_trees(other, play(algorithm, model, alone, 2, seed=5).final, rtol=1e-5, atol=1e-6)
    assert largest_change(one, other) > 1e-3


def test_one_root_for_all_runs(two_roots: Any) -> None:
    x, y, partitions, roots = two_roots
    data = fs.client_data(x, y, [partitions[0]] * 2, root=roots[0].tolist())
    assert data.root is not None
    assert data.root.shape == (2, 2)
    for start, end in np.asarray(data.root):
        assert data.index[start:end].tolist() == roots[0].tolist()


# --- sign agreement ---------------------------------------------------------------------------


def at_server(
    part: PreAggregation,
    start: Any,
    rows: Any,
    weights: Any,
    tag: Any = (),
    losses: Any = None,
    state: Any = (),
    client: Any = None,
    received: Any = None,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """A pre-aggregation applied to models of parameters alone: the models that it makes of them.

    The updates are measured from ``received``, of each row or of all; None: from ``start``.
    """
    count = len(weights)
    k = jnp.arange(count, dtype=jnp.int32) if client is None else jnp.asarray(client, jnp.int32)
    extra = {} if losses is None else {"initial_loss": jnp.asarray(losses, jnp.float32)}
    info = LocalInfo(
        jnp.zeros(count), jnp.ones(count, jnp.int32), jnp.ones(count, jnp.int32), extra
    )
    known = np.asarray(start)[None] if received is None else np.asarray(received)
    present, nothing = jnp.ones(count, bool), cast("Any", None)
    left_with = Variables(jnp.asarray(known), ())
    cohort = Cohort(Variables(jnp.asarray(start), ()), left_with, k, present, k, info, tag, nothing)
    updates = Variables(jnp.asarray(np.asarray(rows) - known), ())
    out, weights, state = part.apply(
        jax.random.key(0), state, updates, jnp.asarray(weights, jnp.float32), cohort
    )
    return known + np.asarray(out.params), np.asarray(weights), state


@pytest.mark.parametrize("signs", ["", "literal", "backwards"])
@pytest.mark.parametrize("theta", [0.0, 1.0, 2.5, 4.0])
def test_sign_agreement_by_brute_force(signs: str, theta: float) -> None:
    """The inner server's step, whatever it is, in the coordinates that enough clients agree on."""
    literal, elsewhere = signs == "literal", -1 if signs == "backwards" else 0
    rng = np.random.default_rng(0)
    updates = rng.integers(-1, 2, (6, 4, 5)).astype(np.float32)
    updates[2] = np.nan
    step = Variables(jnp.asarray(rng.normal(size=(4, 5)), jnp.float32), jnp.float32(7))
    weights = jnp.array([3, 1, 0, 7, 1, 0.5], jnp.float32)
    nothing: Any = None
    gathered = Gathered(Variables(jnp.asarray(updates), jnp.zeros(6)), weights, nothing)
    server_model = Variables(jnp.ones((4, 5)), jnp.float32(1))
    inner = server.optimizer(optax.sgd(2.0, momentum=0.5))
    backwards = signs == "backwards"
    part = server.sign_agreement(theta, inner, literal=literal, backwards=backwards)
    state = part.init(server_model)
    for velocity in (1.0, 1.5):  # the momentum goes on inside, agreed on or not
        taken, state = part.update(jax.random.key(0), step, server_model, state, gathered)
        assert float(taken.state) == 7  # replaced, whatever the signs
        for i, j in np.ndindex(4, 5):
            total = sum(np.sign(updates[k, i, j]) for k in (0, 1, 3, 4, 5))
            moves = (total if literal else abs(total)) >= theta
            wanted = 2 * velocity * step.params[i, j] * (1 if moves else elsewhere)
            assert taken.params[i, j] == pytest.approx(float(wanted), rel=1e-6)


def test_signs_that_do_not_matter_change_nothing() -> None:
    step = Variables(jax.random.normal(jax.random.key(0), (9,)), jnp.float32(2))
    nothing: Any = None
    gathered = Gathered(tree.stack_copies(step, 3), jnp.array([1.0, 0, 2]), nothing)
    part = server.sign_agreement(0, server.replace())
    assert_trees(part.update(jax.random.key(0), step, step, (), gathered)[0], step)


# --- asynchrony -------------------------------------------------------------------------------


def test_the_ring_holds_the_last_models() -> None:
    most, part = 3, broadcast.stale(3)
    nothing: Any = None
    state, versions = part.init(Variables(jnp.float32(0), ()), nothing), [0.0]
    once = chex.assert_max_traces(n=1)
    send = jax.jit(jax.vmap(once(part.send), in_axes=(0, None, None, None)))
    update = jax.jit(once(lambda state, w: part.update(state, w, nothing, nothing)))
    keys = jax.random.split(jax.random.key(1), 2000)
    for t in range(9):
        now = Variables(jnp.float32(versions[-1]), ())
        model, age = send(keys, state, now, None)
        allowed = versions[::-1][: most + 1]
        assert model.params.tolist() == [allowed[d] for d in age.tolist()]
        counts = np.bincount(age, minlength=len(allowed))
        share = 2000 / len(allowed)
        assert len(counts) == len(allowed)
        assert (np.abs(counts - share) < 5 * np.sqrt(share)).all()
        latest, no_age = part.send(None, state, now, nothing)
        assert (latest, int(no_age)) == (now, 0)
        versions.append(t + 1.5)
        state = update(state, Variables(jnp.float32(versions[-1]), ()))


@pytest.mark.parametrize(
    ("part", "s"),
    [
        (preaggregation.staleness(0.6), lambda d: 1.0),
        (preaggregation.staleness(0.6, "polynomial"), lambda d: (d + 1) ** -0.5),
        (preaggregation.staleness(0.6, "polynomial", 2), lambda d: (d + 1) ** -2.0),
        (
            preaggregation.staleness(0.6, "hinge"),
            lambda d: 1.0 if d <= 4 else 1 / (10 * (d - 4) + 1),
        ),
        (
            preaggregation.staleness(0.6, "hinge", 2, 1),
            lambda d: 1.0 if d <= 1 else 1 / (2 * (d - 1) + 1),
        ),
    ],
)
def test_staleness(part: PreAggregation, s: Callable[[int], float]) -> None:
    """A part of the way from the newest server model, whatever the client received."""
    ages = [0, 1, 4, 5, 30]
    rows = np.array([[5.0]] * 5 + [[np.nan]], np.float32)
    tag = jnp.array([*ages, 2], jnp.int32)
    received = np.array([[1.0], [0.5], [9.0], [1.0], [-2.0], [1.0]], np.float32)
    new, *_ = at_server(
        part, np.array([1.0], np.float32), rows, [1] * 5 + [0], tag, received=received
    )
    np.testing.assert_allclose(new[:5, 0], [1 + 4 * 0.6 * s(d) for d in ages], rtol=1e-5)


def test_staleness_shrinks_the_state_too() -> None:
    """BatchNorm statistics describe the weights, which stay near the server's."""
    w, k = Variables(jnp.float32(1), jnp.float32(1)), jnp.zeros(1, jnp.int32)
    received = Variables(jnp.float32([3]), jnp.float32([3]))
    nothing: Any = None
    cohort = Cohort(w, received, k, k == 0, k, nothing, k, nothing)
    updates = Variables(jnp.float32([2]), jnp.float32([2]))  # to 5
    out, *_ = preaggregation.staleness(0.5).apply(
        jax.random.key(0), (), updates, jnp.ones(1), cohort
    )
    assert_trees(tree.add(received, out), Variables(jnp.float32([3]), jnp.float32([3])))


def test_fedasync_against_numpy(
    federation: Federation, model: fs.Model, local: LocalUpdate
) -> None:
    """Two arrivals move the server by the mean of their moves."""
    alpha, most, a, b, mu, rounds, buffer = 0.6, 3, 2.0, 1.0, 0.3, 8, 2
    clients = slow(federation.data, model)
    versions, ages = [oracle.layers_of(clients.initial)], []

    def visit(t: int, k: int, w: oracle.Layers) -> oracle.Visit:
        key = jax.random.fold_in(jax.random.fold_in(clients.key(t, 2), k), 2**31 - 1)
        d = int(jax.random.randint(key, (), 0, min(most, t) + 1))
        old = versions[-1 - d]
        out = clients.visit(t, k, old, lambda v: [mu * e for e in oracle.plus(v, old, -1)])
        part = alpha * (1 if d <= b else 1 / (a * (d - b) + 1))
        ages.append(d)
        return out._replace(layers=oracle.plus(w, oracle.plus(out.layers, w, -1), part))

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        versions.append(oracle.average([v.layers for v in visits], [1.0] * len(visits)))
        return versions[-1]

    servers, _ = oracle.fedavg(clients, rounds, buffer, visit, absorb)
    algorithm = fedasync(
        local,
        clients_per_round=4,
        buffer_size=buffer,
        alpha=alpha,
        max_staleness=most,
        decay="hinge",
        slope=a,
        grace=b,
        mu=mu,
    ).on(ONE["execution"])
    assert algorithm.slots == buffer
    assert algorithm.round_factor == 4 / buffer  # as many visits as FedAvg in a user's round
    check(servers, play(algorithm, model, federation.data, rounds).servers)
    assert set(ages) == {0, 1, 2, 3}


# --- gossip -----------------------------------------------------------------------------------


def test_gossip_on_a_ring_against_numpy(
    federation: Federation, model: fs.Model, local: LocalUpdate
) -> None:
    clients = slow(federation.data, model)
    models = [oracle.layers_of(clients.initial)] * 8
    two = fs.make_execution(devices=2)
    ring = gossip(local, clients_per_round=8, topology="ring").on(two)
    ours = play(ring, model, federation.data, ROUNDS)
    for t in range(ROUNDS):
        near = [[models[i - 1], models[i], models[(i + 1) % 8]] for i in range(8)]
        models = [clients.train(t, k, oracle.average(near[k], [1.0] * 3)) for k in range(8)]
        slots = ours.states[t].slots
        order = np.argsort(slots.client)
        check(models, [jax.tree.map(lambda a, i=i: a[i], slots.variables) for i in order])
    mean = oracle.average(models, [1.0] * 8)
    check([mean], [ours.final])
    evaluated = jax.jit(ring.evaluated)(jax.random.key(0), ours.states[-1], federation.data)
    assert_trees(evaluated, ours.final, rtol=1e-6, atol=1e-7)
    assert_trees(ours.servers[-1], ours.servers[0])  # there is no server
    sent = [16] * (ROUNDS - 1)
    assert [int(m.uploads) for m in ours.metrics] == [0, *sent]
    assert [int(m.downloads) for m in ours.metrics] == [8, *sent]
    assert ours.final_uploads == 8


def test_models_agree_more_the_larger_the_spectral_gap() -> None:
    matrices: dict[str, np.ndarray] = {
        "complete": redistribution.metropolis(redistribution.complete(8)),
        "ring": redistribution.metropolis(redistribution.ring(8)),
        "alone": np.eye(8),
    }
    gaps = {n: 1 - np.sort(np.abs(np.linalg.eigvalsh(w)))[-2] for n, w in matrices.items()}
    assert gaps["complete"] > gaps["ring"] > gaps["alone"]
    # One mixing shrinks the distance by the second eigenvalue squared, or more.
    x = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    for name, w in matrices.items():
        mixed = np.asarray(tree.mix(jnp.asarray(w, jnp.float32), jnp.asarray(x)))
        np.testing.assert_allclose(mixed.mean(0), x.mean(0), atol=1e-5)
        shrunk = np.square(mixed - mixed.mean(0)).sum() / np.square(x - x.mean(0)).sum()
        assert shrunk <= (1 - gaps[name]) ** 2 + 1e-6


def matrix_of(part: Redistribution, key: jax.Array, slots: int) -> jax.Array:
    """W of a redistribution that mixes."""
    moves = part(key, slots)
    assert isinstance(moves, redistribution.Mixing)
    return moves.matrix


def test_gossip_has_the_activity_that_it_is_given(local: LocalUpdate) -> None:
    """A node has two neighbours on the ring, so that it gets twice the activity on average."""
    activity = 0.3
    redistribute: Any = gossip(
        local, clients_per_round=6, activity=activity
    ).parts.flight.redistribution
    keys = jax.random.split(jax.random.key(0), 500)
    received = jax.jit(jax.vmap(lambda key: redistribute(key, 6).received()))(keys)
    assert abs(float(jnp.mean(received.astype(jnp.float32))) - 2 * activity) < 0.1


@quick
@given(st.sampled_from([1, 5]), st.data())
def test_matchings(slots: int, data: Any) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=slots**2, max_size=slots**2))
    upper = np.triu(np.array(chosen).reshape(slots, slots), 1)
    edges = upper | upper.T
    colour = redistribution._colour_edges(edges)
    assert ((colour >= 0) == edges).all()
    for row in colour:
        used = row[row >= 0].tolist()
        assert len(set(used)) == len(used)  # no node twice: a matching
    assert colour.max() < max(1, 2 * edges.sum(0).max() - 1)
    base = redistribution.metropolis(edges)
    whole = matrix_of(redistribution.matchings(edges, 1.0), jax.random.key(0), slots)
    np.testing.assert_allclose(whole, base, atol=1e-6)
    seed = data.draw(st.integers(0, 99))
    w = np.asarray(matrix_of(redistribution.matchings(edges, 0.5), jax.random.key(seed), slots))
    on = (w > 0) & ~np.eye(slots, dtype=bool)
    for matrix in (w, base):
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-7)
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-6)
        assert (matrix >= 0).all()
    assert not (on & ~edges).any()
    for c in range(colour.max() + 1):
        assert on[colour == c].all() or not on[colour == c].any()


def test_a_matrix_mixes_as_given() -> None:
    w = np.array([[0.2, 0.8], [1.0, 0.0]])
    mixed = matrix_of(redistribution.mix(w), jax.random.key(0), 2)
    np.testing.assert_allclose(mixed, w, rtol=1e-6)
    for slots in (1, 2, 3, 7):
        ring, whole = redistribution.ring(slots), redistribution.complete(slots)
        assert ring.sum(1).tolist() == [min(slots - 1, 2)] * slots
        np.testing.assert_allclose(redistribution.metropolis(whole), 1 / slots, atol=1e-6)


# --- fairness ---------------------------------------------------------------------------------


def test_the_initial_loss_is_that_of_all_samples(
    federation: Federation, model: fs.Model, local: LocalUpdate
) -> None:
    wrapped = with_initial_loss(local, fs.empirical_risk(model)).change(epochs=2)
    plain = local.change(epochs=2)
    data, w = jax.device_put(federation.data), model.init(jax.random.key(2))
    execution = fs.make_execution(devices=1)
    key, empty = jax.random.key(7), ((), ())

    def both(w: Variables, client: Any) -> Any:
        return [u.train(key, w, client, empty, empty) for u in (wrapped, plain)]

    ours, theirs = jax.jit(lambda: execution.per_client(both, w, data))()
    assert_trees(ours.variables, theirs.variables)
    assert_trees(ours.info._replace(extra={}), theirs.info)
    for k, loss in enumerate(ours.info.extra["initial_loss"].tolist()):
        rows = federation.data.index[federation.data.start[k] : federation.data.start[k + 1]]
        x, y = federation.data.x[rows], federation.data.y[rows]
        expected, _ = oracle.loss_and_gradient(oracle.layers_of(w), x, y)
        assert loss == pytest.approx(expected, rel=1e-5)


def loss_at(clients: oracle.Oracle, k: int, w: oracle.Layers) -> float:
    rows = clients.rows(k)
    return oracle.loss_and_gradient(w, clients.data.x[rows], clients.data.y[rows])[0]


def test_qffl_against_numpy(federation: Federation, model: fs.Model) -> None:
    """With momentum ρ the η of the paper's Δ and of its 1/η is η / (1 - ρ)."""
    momentum, q = 0.9, 0.5
    clients = slow(federation.data, model, momentum)
    rate = LR / (1 - momentum)

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        top, bottom = oracle.zeros(w), 0.0
        for k, v in zip(cohort, visits, strict=True):
            loss = loss_at(clients, k, w)
            delta = [d / rate for d in oracle.plus(w, v.layers, -1)]
            top = oracle.plus(top, delta, loss**q)
            square = sum(float(np.square(d).sum()) for d in delta)
            bottom += q * loss ** (q - 1) * square + loss**q / rate
        return oracle.plus(w, top, -1 / bottom)

    servers, _ = oracle.fedavg(clients, ROUNDS, 4, absorb=absorb)
    risk = fs.empirical_risk(model)
    algorithm = qffl(
        fs.local_sgd(risk, optax.sgd(LR, momentum=momentum), batch_size=BATCH),
        clients_per_round=4, objective=risk, lr=LR, momentum=momentum, q=q,
    ).on(ONE["execution"])  # fmt: skip
    check(servers, play(algorithm, model, federation.data, ROUNDS).servers)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 4.0])
def test_q_fair_is_the_step_of_the_paper(q: float) -> None:
    rng, lr = np.random.default_rng(5), 0.3
    start, rows = rng.normal(size=6), rng.normal(size=(4, 6))
    losses, weights = rng.uniform(0.2, 4, 4), np.array([1, 2, 0, 0.5])
    new, after, _ = at_server(
        preaggregation.q_fair(q, lr), np.float32(start), np.float32(rows), weights, losses=losses
    )
    top, bottom = np.zeros(6), 0.0
    for a, loss, row in zip(weights, losses, rows, strict=True):
        delta = (start - row) / lr
        top += a * loss**q * delta
        bottom += a * (q * loss ** (q - 1) * delta @ delta + loss**q / lr)
    np.testing.assert_allclose(
        np.average(new, axis=0, weights=after), start - top / bottom, rtol=1e-4
    )


def test_q_fair_where_powers_leave_f32_and_where_a_loss_is_0() -> None:
    start, rows = np.zeros(1, np.float32), np.array([[1.0], [2.0], [np.nan]], np.float32)
    new, *_ = at_server(
        preaggregation.q_fair(20.0, 1.0), start, rows, [1, 1, 0], losses=[100.0, 1000.0, np.nan]
    )
    # F^20 of the second is 1e60, of the first 1e40.
    expected = 2 / (20 * 4 / 1000 + 1)
    assert float(np.mean(new[:2])) == pytest.approx(expected, rel=1e-5)
    new, *_ = at_server(
        preaggregation.q_fair(0.5, 1.0), start, rows, [1, 1, 0], losses=[0.0, 1.0, 1.0]
    )
    assert np.isfinite(new[:2]).all()


def projected(v: np.ndarray) -> np.ndarray:
    """Onto the simplex: the shift that makes the positive parts sum to 1, by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


@pytest.fixture(scope="module")
def agnostic(federation: Federation, model: fs.Model, local: LocalUpdate) -> Play:
    objective = fs.empirical_risk(model)
    algorithm = afl(local, clients_per_round=4, objective=objective, step=0.4).on(ONE["execution"])
    return play(algorithm, model, federation.data, 12)


def test_afl_against_numpy(federation: Federation, model: fs.Model, agnostic: Play) -> None:
    clients = slow(federation.data, model)
    lam, mixtures = np.full(8, 1 / 8), []

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        nonlocal lam
        own = [lam[k] for k in cohort]
        new = oracle.average([v.layers for v in visits], own) if sum(own) > 0 else w
        gradient = np.zeros(8)
        gradient[cohort] = [loss_at(clients, k, w) for k in cohort]
        lam = projected(lam + 0.4 * gradient)
        mixtures.append(lam)
        return new

    servers, _ = oracle.fedavg(clients, 12, 4, absorb=absorb)
    check(servers, agnostic.servers)
    ours = np.array([state.preaggregation[0] for state in agnostic.states])
    np.testing.assert_allclose(ours, mixtures, atol=1e-5)
    np.testing.assert_allclose(ours.sum(1), 1, atol=1e-6)
    assert (ours >= 0).all()
    assert (ours == 0).any()  # the projection had to cut


def test_afl_favours_the_worst_client() -> None:
    part = preaggregation.agnostic(0.05)
    data = ClientData(None, None, None, jnp.zeros(4, jnp.int32), 1)  # type: ignore[arg-type]
    lam = part.init(Variables((), ()), data)
    rows = np.array([[1.0], [2.0], [3.0], [np.nan]], np.float32)
    for _ in range(30):
        _, weights, lam = at_server(
            part, np.zeros(1, np.float32), rows, [1, 1, 1, 0],
            losses=[0.5, 2.0, 1.0, np.nan], state=lam, client=[0, 1, 2, 3],
        )  # fmt: skip
    np.testing.assert_allclose(lam, [0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(weights, [0, 1, 0, 0], atol=1e-6)


def test_afl_stays_where_no_client_has_weight() -> None:
    start, rows = np.array([5.0], np.float32), np.array([[1.0], [2.0], [np.nan]], np.float32)
    new, weights, lam = at_server(
        preaggregation.agnostic(0.0), start, rows, [1, 1, 0], losses=[1.0, 1.0, 1.0],
        state=jnp.array([0.0, 0.0, 1.0]), client=[0, 1, 3],
    )  # fmt: skip
    assert weights.tolist() == [1, 1, 0]
    assert new[:2].tolist() == [[5.0], [5.0]]
    np.testing.assert_allclose(lam, [0, 0, 1], atol=1e-7)


# --- FLTrust, with a state ---------------------------------------------------------------------


def drifting() -> tuple[fs.Model, fs.base.Objective]:
    """A point that is pulled along its client's x, and a statistic: the mean x of a minibatch."""

    def objective(w: Any, state: Any, batch: Any, context: Any) -> tuple[Any, Any]:
        mean = jnp.mean(batch.x, axis=0, where=batch.mask[:, None])
        return -jnp.vdot(w, mean), {"mean": mean}

    def init(key: Any) -> Variables:
        return Variables(jnp.zeros(2), {"mean": jnp.zeros(2)})

    return fs.Model(init, lambda *_, **__: None), objective  # type: ignore[arg-type]


def test_fltrust_averages_the_state_of_the_trusted() -> None:
    """By their scores; if nobody is trusted, the statistics stay, like the weights."""
    model, objective = drifting()
    local = fs.local_sgd(objective, optax.sgd(1.0), batch_size=1)
    algorithm = fltrust(local, clients_per_round=3).on(ONE["execution"])
    start, step_of = model.init(jax.random.key(0)), jax.jit(algorithm.step)
    clients = partition_from_lists([[0], [1], [2]])
    for root, state in (([0, 1], [3.0, 1.0]), ([-1, 0], [0.0, 0.0])):
        x = np.array([[4, 0], [3, 1], [0, -2], root], np.float32)  # three clients and the server
        data = jax.device_put(fs.client_data(x, np.zeros(4, np.int32), clients, root=[3]))
        first = algorithm.init(jax.random.key(0), start, data)
        end = step_of(jax.random.key(1), first, data)[0].server
        # With the server's x = (0, 1) only the second client has a positive cosine.
        np.testing.assert_allclose(end.state["mean"], state, atol=1e-6)
        step = np.array([3, 1]) / np.sqrt(10) if any(state) else np.zeros(2)
        np.testing.assert_allclose(end.params, step, rtol=1e-5, atol=1e-6)


# --- the order of rows, and mistakes ----------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        preaggregation.staleness(0.7, "polynomial"),
        preaggregation.q_fair(2.0, 0.1),
        preaggregation.agnostic(0.1),
    ],
)
def test_the_order_of_rows_and_absent_rows_do_not_matter(part: PreAggregation) -> None:
    rng = np.random.default_rng(3)
    start, rows = (rng.normal(size=s).astype(np.float32) for s in [(7,), (5, 7)])
    losses, ages = rng.uniform(0.1, 3, 5).astype(np.float32), np.arange(5, dtype=np.int32)
    client, weights = np.array([3, 0, 4, 1, 5]), np.array([1, 2, 1, 3, 0], np.float32)
    rows[4], losses[4] = np.nan, np.nan
    data = ClientData(None, None, None, jnp.zeros(6, jnp.int32), 1)  # type: ignore[arg-type]

    def mean(order: list[int]) -> np.ndarray:
        new, after, _ = at_server(
            part, start, rows[order], weights[order], tag=jnp.asarray(ages[order]),
            losses=losses[order], state=part.init(Variables((), ()), data), client=client[order],
        )  # fmt: skip
        return np.asarray(tree.mean(jnp.asarray(new), jnp.asarray(after)))

    first = mean([0, 1, 2, 3])
    assert np.isfinite(first).all()
    np.testing.assert_allclose(mean([4, 2, 0, 3, 1]), first, rtol=1e-5, atol=1e-6)


def any_local(**options: Any) -> LocalUpdate:
    risk = fs.empirical_risk(fs.models.logistic((6,), 3))
    return fs.local_sgd(risk, optax.sgd(0.1), **options)


def start_of(part: Server) -> Any:
    return part.init(fs.models.logistic((6,), 3).init(jax.random.key(0)))


def rootless() -> ClientData:
    return fs.client_data(np.zeros((4, 6)), np.zeros(4, int), partition_from_lists([[0], [1, 2]]))


def given_root(root: Any, partitions: Any = None) -> Any:
    owned = partition_from_lists([[0], [1, 2]]) if partitions is None else partitions
    return fs.client_data(np.zeros((6, 6)), np.zeros(6, int), owned, root=root)


# --- parts that do not fit ---


def together(local: LocalUpdate | None = None, slots: int = 6, **parts: Any) -> fs.Algorithm:
    """FedAvg's parts with others."""
    plain = {
        "selection": selection.uniform(),
        "clients_per_round": slots,
    }
    return fs.compose(local or any_local(), **{**plain, **parts}).on(ONE["execution"])


def of_sgd(*arguments: Any, **options: Any) -> LocalUpdate:
    return any_local().change(optimizer=optax.sgd(*arguments, **options))


NONE: Any = fs.empirical_risk(fs.models.logistic((6,), 3))
STICKY: dict[str, Any] = {
    "selection": selection.uniform(sticky=True), "flight": flight.serverless()
}  # fmt: skip
FOR_ALL = "needs the server's latest model for all, broadcast is "
IN_A_ROUND = "needs models that return in the round in which they left, flight is delayed(2)"
REPLACED = "needs a server model that is replaced by the aggregate, server is optimizer(<optax>)"
# By both parts: what is made, and a piece of the line that refuses it.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "the sums of q-FFL over several clusters": (
        lambda: together(
            broadcast=clustering.ifca(2, NONE), preaggregation=(preaggregation.q_fair(1, 0.1),)
        ),
        f"preaggregation q_fair(1, 0.1) {FOR_ALL}ifca(2, empirical_risk(<Model>)): use "
        "broadcast=latest()",
    ),
    "and inside a chain": (
        lambda: together(
            broadcast=broadcast.stale(2),
            server=server.chain(server.sign_agreement(2, server.replace())),
        ),
        f"server chain(sign_agreement(2, replace())) {FOR_ALL}stale(2)",
    ),
    "more signs than models": (
        lambda: together(server=server.sign_agreement(6.5, server.replace())),
        "server sign_agreement(6.5, replace()) needs at least 6.5 models that are aggregated "
        "together, clients_per_round is 6: use a larger cohort, or a smaller threshold",
    ),
    "a server's samples beside rows that are mixtures": (
        lambda: together(
            preaggregation=(preaggregation.bucketing(2),), server=server.train_beside(any_local())
        ),
        "needs one client's update in each row, preaggregation is (bucketing(),): use ",
    ),
    "IFCA with a server optimiser": (
        lambda: together(
            broadcast=clustering.ifca(2, NONE), server=server.optimizer(optax.sgd(1.0))
        ),
        f"broadcast ifca(2, empirical_risk(<Model>)) {REPLACED}: use server=replace()",
    ),
    "dynamic clusters of a part of the cohort": (
        lambda: together(
            broadcast=clustering.dynamic(90, "angle", 6, NONE),
            selection=STICKY["selection"], flight=flight.staggered(2),
        ),
        "needs all slots due together, flight is staggered(2): use flight=every_round()",
    ),
    "q-FFL by the last of several visits": (
        lambda: together(
            flight=flight.delayed(2), preaggregation=(preaggregation.q_fair(1, 0.1),)
        ),
        f"preaggregation q_fair(1, 0.1) {IN_A_ROUND}: use flight=every_round()",
    ),
    "staleness of models without": (
        lambda: together(preaggregation=(preaggregation.staleness(0.5),)),
        "preaggregation staleness(0.5) needs models tagged with their staleness, broadcast is "
        "latest(): use broadcast=stale(most)",
    ),
    "clusters taken where there are none": (
        lambda: together(diagnostics={"taken": clustering.models_taken()}),
        "diagnostics['taken'] models_taken() needs models tagged with their cluster, broadcast "
        "is latest(): use broadcast=ifca(clusters, objective)",
    ),
    "q-FFL told of another rate": (
        lambda: qffl(of_sgd(0.2), clients_per_round=6, objective=NONE, lr=0.1),
        "preaggregation q_fair(1.0, 0.1) needs the optimiser that its settings assume, "
        "optax.sgd(0.1), local is with_initial_loss(local_sgd(empirical_risk(<Model>), <optax>)",
    ),
    "q-FFL with Nesterov's momentum": (
        lambda: qffl(
            of_sgd(0.1, momentum=0.9, nesterov=True),
            clients_per_round=6, objective=NONE, lr=0.1, momentum=0.9,
        ),
        "needs the optimiser that its settings assume, optax.sgd(0.1, momentum=0.9), local is ",
    ),
    "variates that no server holds": (
        lambda: gossip(any_local(corrections=(corrections.scaffold(),)), clients_per_round=6),
        "needs no state shared through the server besides the model, local "
        "is local_sgd(empirical_risk(<Model>), <optax>, corrections=(scaffold(),)): use local_sgd",
    ),
    "a rule that no node follows": (
        lambda: together(**STICKY, aggregator=fs.aggregators.coordinate_median),
        "flight serverless() needs the plain mean, aggregator is coordinate_median",
    ),
    "a pre-aggregation that no node does": (
        lambda: together(**STICKY, preaggregation=(preaggregation.q_fair(1, 0.1),)),
        "flight serverless() needs no pre-aggregation, preaggregation is "
        "(q_fair(1, 0.1),): use preaggregation=()",
    ),
    "a server that is not there": (
        lambda: together(**STICKY, server=server.mix(0.5)),
        "flight serverless() needs a server model that is replaced by the aggregate, server is "
        "mix(0.5)",
    ),
}  # fmt: skip


test_parts_that_do_not_fit_are_refused = rejects(REFUSED)


FROM_THE_NEWEST: dict[str, Callable[[], dict[str, Any]]] = {
    "FLTrust": lambda: {"preaggregation": (preaggregation.trust(any_local()),)},
    "Zeno": lambda: {"preaggregation": (preaggregation.suspicion(NONE),)},
    "q-FFL": lambda: {"preaggregation": (preaggregation.q_fair(1, 0.1),)},
    "AFL": lambda: {"preaggregation": (preaggregation.agnostic(0.1),)},
    "FedNova": lambda: {"preaggregation": (preaggregation.normalise(0.1),)},
    "neighbours": lambda: {"preaggregation": (preaggregation.nearest_neighbour_mixing(0.0),)},
    "buckets": lambda: {"preaggregation": (preaggregation.bucketing(2),)},
    "signs": lambda: {"server": server.sign_agreement(2, server.replace())},
    "FedExP": lambda: {"server": server.extrapolated()},
}


@pytest.mark.parametrize("case", FROM_THE_NEWEST)
def test_updates_from_models_of_several_ages_are_refused(case: str) -> None:
    """Drawn ages and those of a clock are refused alike."""
    timed: dict[str, Any] = {"flight": flight.buffered(4), "clock": fs.clock.simulated(1.0)}
    together(**timed)
    parts, drawn = FROM_THE_NEWEST[case](), {"broadcast": broadcast.stale(2)}
    for ages, message in ((drawn, FOR_ALL), (timed, "needs no server update while clients train")):
        with pytest.raises(ValueError, match=message) as caught:
            together(**ages, **parts)
        assert len(str(caught.value).splitlines()) == 1


class unknown(fs.base.Wrapper):
    response = None


def test_parts_that_fit_are_not_refused() -> None:
    """The same parts, each beside what it needs."""
    heavy = of_sgd(0.1, momentum=0.9)
    qffl(heavy, clients_per_round=6, objective=NONE, lr=0.1, momentum=0.9)
    told = preaggregation.q_fair(1, 0.1)
    # An optimiser that is not known cannot be checked.
    together(unknown(heavy), preaggregation=(told,))
    together(preaggregation=(told, preaggregation.agnostic(0.1)))
    together(of_sgd(optax.constant_schedule(0.1)), preaggregation=(told,))
    together(**STICKY, sending=(fs.sending.clip_norm(1.0),))
    together(broadcast=broadcast.stale(2), server=server.optimizer(optax.sgd(1.0)))
    together(
        broadcast=clustering.ifca(2, NONE), flight=flight.delayed(2),
        server=server.replace(), diagnostics={"taken": clustering.models_taken()},
    )  # fmt: skip


@pytest.mark.parametrize("case", ["signs", "FedExP"])
def test_messages_of_groups_that_left_at_different_times_are_refused(case: str) -> None:
    """Without messages, the updates of staggered groups are computed from the newest model."""
    parts = FROM_THE_NEWEST[case]()
    apart: dict[str, Any] = {
        "selection": STICKY["selection"], "flight": flight.staggered(2),
    }  # fmt: skip
    together(**parts, **apart)
    sent: dict[str, Any] = {"sending": (fs.sending.clip_norm(1.0),)}
    with pytest.raises(ValueError, match="needs updates that are sent as changes of the newest"):
        together(**parts, **apart, **sent)
    follows = flight.staggered(2, refresh=flight.drift_correction())
    together(**parts, **sent, **apart | {"flight": follows})


# --- settings ---


p3 = partition_from_lists([[0, 1, 2], [3, 4, 5]])
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "peers": (lambda: server.train_on_root(any_local(peers=True)), "got peers=True"),
    "kept": (
        lambda: start_of(server.train_on_root(any_local(corrections=(corrections.scaffold(),)))),
        "local must neither keep nor share anything",
    ),
    "no root": (lambda: root_view(rootless()), "root of the data must be the server's own samples"),
    "owned": (
        lambda: given_root([3, 1]),
        "root must not contain rows of clients, got 1, such as row 1",
    ),
    "outside": (lambda: given_root([3, 6]), "root must be in 0 to 5, got 3 to 6"),
    "fractions": (lambda: given_root([3.5]), "root must be integers [n_0], got float64 [1]"),
    "twice": (lambda: given_root([3, 3]), "root must have each row once, got one more"),
    "empty": (lambda: given_root([]), "root must have at least one row"),
    "runs": (
        lambda: given_root([[3], [4]]),
        "root must be rows, or one list of rows for each of 1",
    ),
    "size": (lambda: take_root([0] * 6, p3, 0, seed=0), "size must be in 1..5, got 0"),
    "last": (lambda: take_root([0] * 6, p3, 5, seed=0), "got 5: class 0 lacks 1 samples"),
    "class": (
        lambda: take_root([0, 0, 0, 0, 0, 1], p3, 4, seed=0),
        "size must leave every client its last sample, got 4: class 1 lacks 1",
    ),
    "shared": (
        lambda: take_root([0] * 6, dataclasses.replace(p3, repeats=True), 2, seed=0),
        "partition must have every sample once",
    ),
    "signs both ways": (
        lambda: ozdayi(any_local(), clients_per_round=2, literal_signs=True, backwards=True),
        "backwards must be without literal: it reads the sum's absolute value",
    ),
    "sums": (
        lambda: redistribution.mix([[1.0, 0.0], [0.5, 0.4]]),
        "matrix must have rows of sum 1, row 1 has 0.9",
    ),
    "loops": (lambda: redistribution.metropolis(np.eye(2, dtype=bool)), "edges must be symmetric"),
    "graph": (
        lambda: redistribution.matchings(redistribution.ring(3), 1.0)(jax.random.key(0), 4),
        "edges must join the 4 slots, got a graph of 3",
    ),
    "buffer": (
        lambda: fedasync(any_local(), clients_per_round=4, buffer_size=5),
        "buffer_size must be in 1..4, the clients of a round, got 5",
    ),
}


test_errors = rejects(ERRORS)
