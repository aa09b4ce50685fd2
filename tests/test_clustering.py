"""Clustered methods: choices and means against NumPy, the fewest groups against brute force."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, assert_trees, known, make_federation, play, rejects
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Layers, Oracle, average, layers_of, loss_and_gradient

import fedjax_sim as fs
from fedjax_sim import clustering, flight, personal, selection, tree
from fedjax_sim.algorithms import dynamic_clustering, ifca
from fedjax_sim.base import ClientView, Cohort, Gathered
from fedjax_sim.clustering import EXACT, Models
from fedjax_sim.data import client_holdout, eval_set
from fedjax_sim.engine.groups import first_fit, smallest_groups

LR, BATCH = 0.1, 8
ROWS = 7

Groups = list[list[int]]


# The fewest groups.


def partitions(rows: list[int]) -> Iterator[Groups]:
    """All ways to split rows into groups."""
    if not rows:
        yield []
        return
    first, *rest = rows
    for others in partitions(rest):
        yield [[first], *others]
        for i in range(len(others)):
            yield [*others[:i], [first, *others[i]], *others[i + 1 :]]


def fits(near: np.ndarray, groups: Groups) -> bool:
    return all(near[a, b] for group in groups for a, b in itertools.combinations(group, 2))


def fewest(near: np.ndarray, rows: list[int]) -> list[Groups]:
    """Every smallest grouping, by looking at all of them."""
    good = [groups for groups in partitions(rows) if fits(near, groups)]
    least = min(map(len, good))
    return [groups for groups in good if len(groups) == least]


def as_groups(found: tuple[jax.Array, jax.Array], present: np.ndarray) -> Groups:
    """Row lists from the answer of the package, checked for form."""
    group, count = map(np.asarray, found)
    assert (group[~present] == len(present)).all()
    assert sorted(set(group[present].tolist())) == list(range(int(count)))
    return [np.flatnonzero(group == g).tolist() for g in range(int(count))]


exactly, greedily = jax.jit(smallest_groups), jax.jit(first_fit)
booleans = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(booleans, min_size=ROWS, max_size=ROWS), booleans)
def test_no_grouping_has_fewer_groups(edges: list[list[bool]], there: list[bool]) -> None:
    near, present = np.triu(edges, 1), np.array(there)
    near = near | near.T
    best = fewest(near, np.flatnonzero(present).tolist())
    found = as_groups(exactly(near, present), present)
    assert fits(near, found)
    assert len(found) == len(best[0])
    quick = as_groups(greedily(near, present), present)
    assert fits(near, quick)
    assert len(quick) >= len(best[0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), booleans)
def test_groups_that_are_plain_are_found_by_both(kinds: list[int], there: list[bool]) -> None:
    near, present = np.equal.outer(kinds, kinds), np.array(there)
    expected = {frozenset(np.flatnonzero(present & (np.array(kinds) == k))) for k in kinds}
    for search in (exactly, greedily):
        found = as_groups(search(near, present), present)
        assert set(map(frozenset, found)) == expected - {frozenset()}


def test_the_search_finds_two_groups_where_first_fit_opens_six() -> None:
    """A crown: 0 2 4 … and 1 3 5 … are cliques, and 2i is also near to 2i + 1."""
    row = np.arange(EXACT)
    near = (row[:, None] % 2 == row[None] % 2) | (row[:, None] // 2 == row[None] // 2)
    present = np.ones(EXACT, bool)
    assert len(as_groups(exactly(near, present), present)) == 2
    assert len(as_groups(greedily(near, present), present)) == 6


# What the server does with the models that meet.


def clusters(kind: str, slots: int = ROWS, limit: float | None = None) -> Any:
    def no_loss(*args: Any) -> Any:
        return jnp.float32(0), ()

    if kind == "ifca":
        return clustering.ifca(3, no_loss)
    limit = {"angle": 80.0, "distance": 3.2}[kind] if limit is None else limit
    return clustering.dynamic(limit, kind, slots, no_loss)  # type: ignore[arg-type]


@functools.cache
def updating(kind: str, slots: int = ROWS, limit: float | None = None) -> Callable[..., Models]:
    """``(state, models [P, 5], weights, tags, clients) -> state``.

    A client left with the model that its tag names. The server's own is far from all of them: it
    must not matter.
    """
    part, none = clusters(kind, slots, limit), cast("Any", None)
    server = fs.Variables(jnp.full(5, 3.0), ())

    def update(state: Models, models: Any, weights: Any, tag: Any, client: Any) -> Models:
        last = len(state.variables.params) - 1
        received = tree.take(state.variables, jnp.minimum(tag, last))
        cohort = Cohort(server, received, client, none, none, none, tag, none)
        updates = tree.subtract(fs.Variables(models, ()), received)
        return part.update(state, none, Gathered(updates, weights, cohort), tree.mean)

    return jax.jit(update)


@pytest.fixture(scope="module")
def meeting() -> tuple[Models, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.normal(size=(ROWS, 5)), jnp.float32)
    tag = rng.integers(0, 2, ROWS).astype(np.int32)
    models = np.asarray(old)[tag] + rng.normal(size=(ROWS, 5)).astype(np.float32)
    weights = rng.integers(1, 9, ROWS).astype(np.float32)
    client = rng.permutation(20)[:ROWS].astype(np.int32)
    return Models(fs.Variables(old, ()), jnp.int32(3)), models, weights, tag, client


def far_apart(kind: str, old: np.ndarray, models: np.ndarray, tag: np.ndarray) -> np.ndarray:
    """Angles of updates in degrees, or distances of weights, pair by pair in float64."""
    models = models.astype(np.float64)
    if kind == "distance":
        return np.linalg.norm(models[:, None] - models[None], axis=-1)
    updates = models - old.astype(np.float64)[tag]
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    return np.degrees(np.arccos(np.clip(updates @ updates.T, -1, 1)))


@pytest.mark.parametrize("kind", ["angle", "distance"])
def test_groups_become_their_means(meeting: Any, kind: str) -> None:
    state, models, weights, tag, client = meeting
    old = np.asarray(state.variables.params)
    limit = {"angle": 80.0, "distance": 3.2}[kind]
    near = far_apart(kind, old, models, tag) <= limit
    best = fewest(near, list(range(ROWS)))
    assert 1 < len(best[0]) < ROWS
    new = updating(kind)(state, models, weights, tag, client)
    found = np.asarray(new.variables.params)[: int(new.used)]
    matching = [
        groups
        for groups in best
        if np.allclose(
            np.sort(found, axis=0),
            np.sort([np.average(models[g], axis=0, weights=weights[g]) for g in groups], axis=0),
            rtol=1e-5,
            atol=1e-6,
        )
    ]
    assert len(matching) == 1


def test_a_model_that_no_client_chose_stays(meeting: Any) -> None:
    state, models, weights, tag, client = meeting
    new = updating("ifca")(
        state._replace(variables=jax.tree.map(lambda a: a[:3], state.variables)),
        models, weights, 2 * tag, client,
    ).variables.params  # fmt: skip
    for j in (0, 2):
        mine = 2 * tag == j
        mean = np.average(models[mine], axis=0, weights=weights[mine])
        np.testing.assert_allclose(new[j], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new[1], state.variables.params[1])


@pytest.mark.parametrize("kind", ["ifca", "angle", "distance"])
@pytest.mark.parametrize("many", [False, True])  # searched, and first-fit
def test_absent_rows_and_their_order_never_matter(meeting: Any, kind: str, many: bool) -> None:
    state, models, weights, tag, client = meeting
    slots = 13 if many else ROWS
    update = updating(kind, slots)
    state = Models(jax.tree.map(lambda a: jnp.resize(a, (slots, 5)), state.variables), state.used)
    if kind == "ifca":
        state = state._replace(variables=jax.tree.map(lambda a: a[:3], state.variables))
    rows = (models, weights, tag, client)
    nothing = (np.full((9, 5), np.nan, np.float32), np.zeros(9, np.float32),
               np.full(9, 99, np.int32), np.full(9, 20, np.int32))  # fmt: skip
    both = [np.concatenate(pair) for pair in zip(rows, nothing, strict=True)]
    alone = update(state, *(np.pad(a, [(0, 9)] + [(0, 0)] * (a.ndim - 1)) for a in rows))
    orders = (np.arange(16), np.random.default_rng(1).permutation(16), np.arange(16)[::-1])
    for order in orders:
        assert_trees(update(state, *(a[order] for a in both)), alone, rtol=1e-6, atol=1e-6)
    assert np.isfinite(alone.variables.params).all()


def test_a_client_that_did_not_move_agrees_with_all(meeting: Any) -> None:
    state, models, weights, tag, client = meeting
    models = np.asarray(state.variables.params)[tag] + 0 * models
    models[0] += 1.0
    assert int(updating("angle", limit=1e-3)(state, models, weights, tag, client).used) == 1


def test_small_distances_of_long_vectors_are_told_apart() -> None:
    models = np.full((ROWS, 5), 1000.0, np.float32)
    models[3:, 0] += 0.25
    state = Models(fs.Variables(jnp.zeros((ROWS, 5)), ()), jnp.int32(1))
    rows = (np.ones(ROWS, np.float32), np.zeros(ROWS, np.int32), np.arange(ROWS, dtype=np.int32))
    for limit, count in ((0.2, 2), (0.3, 1)):
        assert int(updating("distance", limit=limit)(state, models, *rows).used) == count


def test_batch_statistics_are_averaged_by_group_and_not_measured() -> None:
    """Of clients 0 and 1, and of 2 alone, by what they trained; the state takes no part in it."""
    part, none = clusters("distance", 3, 1.0), cast("Any", None)
    start = fs.Variables(jnp.zeros(1), jnp.zeros(1))
    received = tree.stack_copies(start, 3)
    updates = fs.Variables(jnp.float32([[0], [1], [9]]), jnp.float32([[50], [0], [7]]))
    client = jnp.arange(3)
    cohort = Cohort(start, received, client, none, none, none, client * 0, none)
    gathered = Gathered(updates, jnp.float32([1, 3, 1]), cohort)
    new = jax.jit(lambda state: part.update(state, none, gathered, tree.mean))(
        part.init(start, none)
    )
    assert int(new.used) == 2
    found = np.concatenate([new.variables.params[:2], new.variables.state[:2]], axis=1).tolist()
    assert sorted(found) == [[0.75, 12.5], [9.0, 7.0]]


# Which model a client takes.


@pytest.mark.parametrize("kind", ["ifca", "dynamic"])
def test_a_client_takes_the_model_with_the_lowest_loss_of_all_samples(kind: str) -> None:
    """Of every sample once, over several batches, the last of them short; the first of equals."""

    def squared_error(params: Any, state: Any, batch: Any, context: Any) -> Any:
        return jnp.mean((batch.x - params) ** 2, where=batch.mask), state

    part = (
        clustering.ifca(3, squared_error, batch_size=4)
        if kind == "ifca"
        else clustering.dynamic(1.0, "distance", 3, squared_error, batch_size=4)
    )
    rng = np.random.default_rng(0)
    x, size = rng.normal(size=(300, 11)).astype(np.float32), rng.integers(1, 12, 300)
    centres = np.array([-0.3, 0.0, 0.3, 0.05], np.float32)  # the last is not in use
    models = Models(fs.Variables(jnp.asarray(centres), ()), jnp.int32(3))
    zero, labels, order = jnp.int32(0), jnp.zeros(11, jnp.int32), jnp.arange(11)

    @jax.jit
    @jax.vmap
    def choice(x: Any, size: Any) -> tuple[Any, Any]:
        client = ClientView(x, labels, order, zero, size, 11)
        model, tag = part.send(None, models, fs.Variables(jnp.float32(0), ()), client)
        return model.params, tag

    model, tag = choice(jnp.asarray(x), jnp.asarray(size, jnp.int32))
    sums = [[np.square(a[:n].astype(np.float64) - c).sum() for c in centres[:3]]
            for a, n in zip(x, size, strict=True)]  # fmt: skip
    np.testing.assert_array_equal(tag, np.argmin(sums, axis=1))
    np.testing.assert_array_equal(model, centres[np.asarray(tag)])
    same = Models(fs.Variables(jnp.ones(3), ()), jnp.int32(3))
    client = ClientView(jnp.asarray(x[0]), labels, order, zero, zero + 9, 11)
    assert int(part.send(None, same, fs.Variables(jnp.float32(0), ()), client)[1]) == 0


# Whole runs against NumPy, client by client.


def lowest(models: list[Layers], oracle: Oracle, k: int) -> int:
    rows = oracle.data.index[oracle.data.start[k] : oracle.data.start[k + 1]]
    x, y = oracle.data.x[rows], oracle.data.y[rows]
    return int(np.argmin([loss_and_gradient(w, x, y)[0] for w in models]))


@pytest.fixture(scope="module")
def planted() -> Federation:
    """Ten clients; those with an odd number have the last two of three labels swapped."""
    made = make_federation((24, 30, 33, 24, 40, 28, 24, 31, 26, 30), seed=3)
    y = np.array(made.data.y)
    for k in range(1, 10, 2):
        mine = made.data.index[made.data.start[k] : made.data.start[k + 1]]
        y[mine] = np.array([0, 2, 1])[y[mine]]
    return made._replace(data=fs.client_data(made.data.x, y, made.partition))


METHODS: dict[str, Callable[..., fs.Algorithm]] = {
    "ifca": functools.partial(ifca, clusters=3),
    "angle": dynamic_clustering,
    "distance": functools.partial(dynamic_clustering, cluster_by="distance", cluster_limit=0.7),
}


def make(name: str, model: fs.Model, m: int = 6, **options: Any) -> fs.Algorithm:
    risk = fs.empirical_risk(model)
    local = fs.local_sgd(risk, optax.sgd(LR), batch_size=BATCH, epochs=2)
    method: Any = METHODS.get(name, fs.fedavg)
    given = {"objective": risk} if name in METHODS else {}
    # Devices other than one are for the runs with two seeds.
    return method(local, clients_per_round=m, **given, **options).on(fs.make_execution(devices=1))


@pytest.fixture(scope="module")
def played(planted: Federation, models: dict[str, fs.Model]) -> dict[str, Play]:
    model = models["logistic"]
    return {name: play(make(name, model), model, planted.data, 4) for name in METHODS}


def regrouped(name: str, start: list[Layers], trained: list[Layers]) -> Groups:
    """The smallest grouping of a cohort, which must be the only one."""
    flat = [np.concatenate([a.ravel() for a in w]) for w in (*start, *trained)]
    old, new = np.array(flat[: len(start)]), np.array(flat[len(start) :])
    apart = far_apart(name, old, new, np.arange(len(new)))
    best = fewest(apart <= {"angle": 90.0, "distance": 0.7}[name], list(range(len(new))))
    assert len(best) == 1
    return best[0]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_the_oracle(
    planted: Federation, models: dict[str, fs.Model], played: dict[str, Play], name: str
) -> None:
    initial = models["logistic"].init(jax.random.fold_in(jax.random.key(0), 0))
    oracle = Oracle(planted.data, initial, LR, 0.0, BATCH, 2)
    server = [layers_of(initial)]
    if name == "ifca":
        part = clustering.ifca(3, fs.empirical_risk(models["logistic"]))
        stack = part.init(initial, planted.data).variables
        server = [layers_of(jax.tree.map(lambda a, j=j: a[j], stack)) for j in range(3)]
    kinds = set()
    for t, state in enumerate(played[name].states):
        cohort, offered = sorted(oracle.draw(t, 6, [])), len(server)
        choice = [lowest(server, oracle, k) for k in cohort]
        start = [server[j] for j in choice]
        trained = [oracle.train(t, k, w) for k, w in zip(cohort, start, strict=True)]
        # IFCA weighs by n_k, Algorithm 4 of Vo, Rakotobe not at all.
        size = [float(oracle.sizes[k]) if name == "ifca" else 1.0 for k in cohort]
        everyone = average(trained, size)
        if name == "ifca":
            groups = [[i for i, c in enumerate(choice) if c == j] for j in range(3)]
        else:
            groups = regrouped(name, start, trained)
        means = [average([trained[i] for i in g], [size[i] for i in g]) if g else None
                 for g in groups]  # fmt: skip
        server = [w if w is not None else old for w, old in
                  itertools.zip_longest(means, server[: len(means)])]  # fmt: skip
        assert int(state.broadcast.used) == len(server)
        stack = jax.tree.map(np.asarray, state.broadcast.variables)
        ours = [layers_of(jax.tree.map(lambda a, j=j: a[j], stack)) for j in range(len(server))]
        # Groups have no order of their own.
        order = [min(range(len(ours)), key=lambda j: np.abs(ours[j][0] - w[0]).max())
                 for w in server]  # fmt: skip
        assert sorted(order) == list(range(len(server)))
        assert_trees([ours[j] for j in order], server, rtol=2e-4, atol=2e-5)
        assert_trees(layers_of(state.server), everyone, rtol=2e-4, atol=2e-5)
        server = ours  # ties are broken by the number in W
        kinds.add(len(set(choice)))
        taken = played[name].metrics[t].diagnostics["models_taken"]
        assert float(taken) == len(set(choice))
        # A client is sent the whole of W, as the round before left it, to choose from.
        assert int(played[name].metrics[t].downloads) == 6 * offered
        assert int(played[name].metrics[t].uploads) == 6
    assert max(kinds) > 1


@pytest.mark.slow
def test_other_starts_are_shuffles_of_the_first(models: dict[str, fs.Model]) -> None:
    first = models["mlp"].init(jax.random.key(7))
    stack = jax.jit(clusters("ifca").init)(first, None).variables
    for w, many in zip(jax.tree.leaves(first), jax.tree.leaves(stack), strict=True):
        np.testing.assert_array_equal(many[0], w)
        for other in many[1:]:
            np.testing.assert_array_equal(np.sort(other.ravel()), np.sort(w.ravel()))
    kernel = stack.params["Dense_0"]["Dense_0"]["kernel"]
    assert len(np.unique(np.asarray(kernel).reshape(3, -1), axis=0)) == 3


@pytest.fixture(scope="module")
def personal_runs(planted: Federation, models: dict[str, fs.Model]) -> dict[str, fs.Result]:
    """Seeds 0 and 1, each with its own held-out samples, of every method."""
    splits = [client_holdout(planted.partition, 0.25, seed=s) for s in (0, 1)]
    x, y = planted.data.x, planted.data.y
    runs = {}
    for name in ("fedavg", "ifca", "angle"):
        weights = {"equal_weights": False} if name == "angle" else {}  # as the others have them
        execution = fs.make_execution(devices=2 if name == "angle" else 1)
        for seeds in ((0, 1), (1,)) if name == "angle" else ((0, 1),):
            runs[name + str(seeds)] = fs.simulate(
                make(name, models["logistic"], **weights).on(execution),
                models["logistic"],
                fs.client_data(x, y, [splits[s][0] for s in seeds]),
                eval_set(x, y, [splits[s][1] for s in seeds]),
                rounds=10,
                classes=3,
                seeds=seeds,
                eval_every=5,
                personal=True,
                execution=execution,
            )
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ifca", "angle"])
def test_planted_clusters_are_found(personal_runs: dict[str, fs.Result], name: str) -> None:
    ours, fedavg = (personal_runs[n + "(0, 1)"] for n in (name, "fedavg"))
    own = ours.series("accuracy", by_client=True, part="personal")[-1]
    shared = fedavg.series("accuracy", by_client=True)[-1]
    assert (own > shared + 0.2).all()
    assert fedavg.evaluations[-1].personal is None
    assert ours.xla_programs <= 5


@pytest.mark.slow
def test_seeds_together_are_runs_apart(personal_runs: dict[str, fs.Result]) -> None:
    both, alone = personal_runs["angle(0, 1)"], personal_runs["angle(1,)"]
    second = jax.tree.map(lambda a: a[1:], both.variables)
    assert_trees(second, alone.variables, rtol=2e-5, atol=2e-6)
    for a, b in zip(both.evaluations, alone.evaluations, strict=True):
        assert a.downloads[1] == b.downloads[0]
        np.testing.assert_array_equal(
            known(known(a.personal).by_client).accuracy[1],
            known(known(b.personal).by_client).accuracy[0],
        )


@pytest.mark.slow
def test_clusters_and_wandering_models_compose(
    planted: Federation, models: dict[str, fs.Model]
) -> None:
    """A model that wanders for two rounds is taken by the cluster that it left from."""
    risk = fs.empirical_risk(models["logistic"])
    algorithm = fs.compose(
        fs.local_sgd(risk, optax.sgd(LR), batch_size=BATCH),
        selection=selection.uniform(),
        clients_per_round=6,
        flight=flight.delayed(2),
        broadcast=clustering.ifca(2, risk),
        personal=personal.as_received(),
    ).on(fs.make_execution(devices=1))
    out = play(algorithm, models["logistic"], planted.data, 4)
    np.testing.assert_array_equal(*(s.slots.tag for s in out.states[:2]))
    assert_trees(out.states[1].broadcast, out.states[2].broadcast)
    assert [int(m.downloads) for m in out.metrics] == [12, 6, 12, 6]


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "zero": (lambda: clusters("angle", limit=0), "above 0 and at most 180 degrees, got 0"),
    "wide": (lambda: clusters("angle", limit=181), "above 0 and at most 180 degrees, got 181"),
    "negative": (lambda: clusters("distance", limit=-1), "limit must be above 0, got -1"),
}


test_settings_out_of_range_are_refused = rejects(ERRORS)
