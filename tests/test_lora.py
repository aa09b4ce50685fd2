"""Low-rank adapters on a frozen trunk: what they compute, what trains, what travels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, Play, assert_trees, play
from oracle import Layers, layers_of, loss_and_gradient, plus

import fedjax_sim as fs
from fedjax_sim.base import Variables
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.models.leaves import all_but, head, named

LR, ROUNDS, COHORT, STEPS, RANK, FACTOR = 0.5, 3, 3, 3, 2, 2.0
ONE = fs.make_execution(devices=1)


class Method(NamedTuple):
    """Which parts train, stay and are frozen; numbers sent up, down, once before; the server."""

    trained: tuple[str, ...]
    own: tuple[str, ...]
    frozen: tuple[str, ...]
    up: int
    down: int
    once: int
    server: fs.base.Server = fs.server.replace()
    shares: tuple[float, ...] = (1.0,)


A, B, W, BIASES = 6 * 2 + 5 * 2, 2 * 5 + 2 * 3, 6 * 5 + 5 * 3, 5 + 3
FEDEX = fs.server.exact_lora(alpha=RANK * FACTOR)
FLORA = fs.server.exact_lora(restart=True, alpha=RANK * FACTOR)
METHODS = {
    "fedit": Method(("A", "B"), (), ("trunk",), A + B, A + B, W + BIASES),
    "ffa": Method(("B",), (), ("trunk", "A"), B, B, W + BIASES + A),
    "fedsa": Method(("A", "B"), ("B",), ("trunk",), A, A, W + BIASES),
    "fedex": Method(("A", "B"), (), ("trunk",), A + B, A + B + W, BIASES, FEDEX),
    "flora": Method(("A", "B"), (), ("trunk",), A + B, A + B + W, BIASES, FLORA),
    "ranks": Method(("A", "B"), (), ("trunk",), A + B, A + B, W + BIASES, shares=(0.5, 1.0, 0.5)),
}


@pytest.fixture(scope="module")
def net() -> fs.Model:
    """One hidden layer."""
    return fs.models.mlp((6,), 3, widths=(5,))


@pytest.fixture(scope="module")
def adapted(net: fs.Model) -> fs.Model:
    return fs.models.lora(net, RANK, alpha=RANK * FACTOR)


def composed(model: fs.Model, name: str) -> fs.Algorithm:
    """Steps on all samples of a client: their order does not matter."""
    method = METHODS[name]
    local = fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(LR),
        batch_size=40,
        epochs=STEPS,
        trained=named(*method.trained),
    )
    own = named(*method.own) if method.own else None
    covers = None if method.shares == (1.0,) else fs.exchange.ranks(method.shares)
    exchange = fs.exchange.split(own=own, frozen=named(*method.frozen), covers=covers)
    base = fs.fedavg(local, clients_per_round=COHORT).on(ONE)
    return base.replace(exchange=exchange, server=method.server)


def ranked(parts: dict[str, Layers], share: float) -> dict[str, Layers]:
    """The first columns of A and rows of B; 0 elsewhere."""
    kept = (np.arange(RANK) < share * RANK).astype(float)
    return {"A": [a * kept for a in parts["A"]], "B": [b * kept[:, None] for b in parts["B"]]}


def parts_of(variables: Variables) -> tuple[Layers, dict[str, Layers]]:
    """The trunk as W_1, b_1, W_2, b_2, and A and B of both matrices, in float64."""
    params = variables.params
    trunk = layers_of(Variables(params["trunk"], {}))
    kernels = [f"Dense_{i}/Dense_0/kernel" for i in (0, 1)]
    return trunk, {
        part: [np.asarray(params[part][path], np.float64) for path in kernels] for part in "AB"
    }


def descended(
    trunk: Layers, parts: dict[str, Layers], x: Any, y: Any, trained: Sequence[str]
) -> dict[str, Layers]:
    for _ in range(STEPS):
        layers = list(trunk)
        for i, (a, b) in enumerate(zip(parts["A"], parts["B"], strict=True)):
            layers[2 * i] = trunk[2 * i] + FACTOR * a @ b
        _, (g1, _, g2, _) = loss_and_gradient(layers, x, y)
        grads = {
            "A": [FACTOR * g @ b.T for g, b in zip((g1, g2), parts["B"], strict=True)],
            "B": [FACTOR * a.T @ g for g, a in zip((g1, g2), parts["A"], strict=True)],
        }
        parts = {
            part: plus(w, grads[part], -LR) if part in trained else w for part, w in parts.items()
        }
    return parts


@pytest.mark.parametrize("name", METHODS)
def test_whole_runs_are_those_of_the_oracle(
    federation: Federation, adapted: fs.Model, name: str
) -> None:
    """Unequal clients, three of eight in a round: what is shared, and what each client keeps."""
    data, method = federation.data, METHODS[name]
    start = adapted.init(jax.random.fold_in(jax.random.key(0), 0))
    out: Play = play(composed(adapted, name), adapted, data, ROUNDS)
    trunk, server = parts_of(start)
    first = server
    own = [{part: server[part] for part in method.own} for _ in range(data.clients)]
    visited = set()
    for state, metrics in zip(out.states, out.metrics, strict=True):
        total = {part: [np.zeros_like(w) for w in server[part]] for part in "AB"}
        products = [np.zeros_like(w) for w in trunk[::2]]
        ones = {part: [np.ones_like(w) for w in server[part]] for part in "AB"}
        count = {part: [np.zeros_like(w) for w in server[part]] for part in "AB"}
        samples = 0
        for k in map(int, metrics.client):
            rows = data.index[data.start[k] : data.start[k + 1]]
            share = method.shares[k % len(method.shares)]
            mine = ranked(server | own[k], share)
            mine = descended(trunk, mine, data.x[rows], data.y[rows], method.trained)
            mine, has = ranked(mine, share), ranked(ones, share)
            count = {part: plus(count[part], has[part], len(rows)) for part in count}
            own[k] = {part: mine[part] for part in method.own}
            total = {part: plus(total[part], mine[part], len(rows)) for part in total}
            products = plus(
                products, [a @ b for a, b in zip(mine["A"], mine["B"], strict=True)], len(rows)
            )
            samples += len(rows)
            visited.add(k)
        mean = {
            part: [
                np.where(n > 0, w / np.maximum(n, 1), old)
                for w, n, old in zip(total[part], count[part], server[part], strict=True)
            ]
            for part in total
        }
        server = {part: server[part] if part in method.own else mean[part] for part in "AB"}
        found_trunk, found = parts_of(state.server)
        if method.server is FLORA:  # any new A
            bounds = [len(a) ** -0.5 for a in server["A"]]
            for new, old, bound in zip(found["A"], server["A"], bounds, strict=True):
                assert np.abs(new - old).max() > 0.1
                assert np.abs(new).max() <= bound
            server = {"A": found["A"], "B": [np.zeros_like(b) for b in server["B"]]}
        if method.server in (FEDEX, FLORA):
            for i, (a, b, product) in enumerate(zip(*server.values(), products, strict=True)):
                trunk[2 * i] = trunk[2 * i] + FACTOR * (product / samples - a @ b)
            assert_trees(found_trunk, trunk, rtol=1e-4, atol=1e-5)
        else:
            assert_trees(state.server.params["trunk"], start.params["trunk"])
        assert_trees(found, server, rtol=1e-4, atol=1e-5)
    for part in "AB":  # each as far as a bug would move it
        moved = max(np.abs(a - b).max() for a, b in zip(server[part], first[part], strict=True))
        moves = part in method.trained and part not in method.own
        assert (moved > 0.02) == (moves and (method.server, part) != (FLORA, "B"))
    moved = max(np.abs(a - b).max() for a, b in zip(trunk, parts_of(start)[0], strict=True))
    assert (moved > 0.004) == (method.server in (FEDEX, FLORA)), moved
    assert COHORT < len(visited) < data.clients
    for k in range(data.clients if method.own else 0):
        kept = jax.tree.map(lambda a, k=k: a[k], out.states[-1].own)
        found = parts_of(fs.tree.filled(kept, start))[1]
        assert_trees({part: found[part] for part in method.own}, own[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_of_what_travels(
    federation: Federation, adapted: fs.Model, name: str
) -> None:
    algorithm, start = composed(adapted, name), adapted.init(jax.random.key(0))
    sizes = algorithm.traffic(start, federation.data)
    once = algorithm.setup_traffic(start, federation.data)
    up, down = 4 * METHODS[name].up, 4 * METHODS[name].down
    assert (sizes.upload, sizes.download, sizes.message, sizes.shared_state) == (up, down, 0, 0)
    assert (once.up, once.down) == (0, 8 * 4 * METHODS[name].once)


def test_at_first_it_is_its_trunk(net: fs.Model, adapted: fs.Model) -> None:
    key, x = jax.random.key(3), jax.random.normal(jax.random.key(1), (4, 6))
    trunk, start = net.init(key), adapted.init(key)
    assert_trees(start.params["trunk"], trunk.params)
    outputs, _ = net.apply(trunk, x, train=False)
    same, _ = adapted.apply(start, x, train=False)
    assert_trees(same, outputs)
    assert adapted.features is not None
    assert net.features is not None
    assert_trees(adapted.features(start, x, train=False)[0], net.features(trunk, x, train=False)[0])
    a = start.params["A"]["Dense_0/Dense_0/kernel"]
    assert 0.2 < float(jnp.abs(a).max()) < 6**-0.5


@pytest.mark.slow
def test_of_full_rank_it_is_fedavg_on_the_matrices(federation: Federation, net: fs.Model) -> None:
    """With A the identity, a step on B is one on W."""
    full = fs.models.lora(net, 6)

    def with_identity(key: jax.Array) -> Variables:
        start = full.init(key)
        a = jax.tree.map(lambda w: jnp.eye(*w.shape), start.params["A"])
        return start._replace(params=start.params | {"A": a})

    ours = play(composed(full, "ffa"), full._replace(init=with_identity), federation.data, 2)
    local = fs.local_sgd(
        fs.empirical_risk(net), optax.sgd(LR), batch_size=40, epochs=STEPS, trained=named("*kernel")
    )
    fedavg = fs.fedavg(local, clients_per_round=COHORT).on(ONE)
    theirs = play(fedavg, net, federation.data, 2)
    trunk, parts = parts_of(ours.servers[-1])
    merged = [w + a @ b for w, a, b in zip(trunk[::2], parts["A"], parts["B"], strict=True)]
    assert_trees(merged, layers_of(theirs.servers[-1])[::2], rtol=1e-5, atol=1e-6)


class Attention(nn.Module):
    """Matrices whose leaves have three axes and four, and one of an embedding."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Embed(9, 12)(x)
        y = nn.MultiHeadDotProductAttention(num_heads=3)(y)
        y = nn.Conv(8, (3, 3))(y.reshape(*y.shape, 1))
        return nn.Dense(2)(y.reshape(y.shape[0], -1))


@pytest.mark.slow
def test_leaves_of_more_axes_are_cut_into_matrices() -> None:
    """Query, key and value [12, 3, 4], out [3, 4, 12], the convolution [3, 3, 1, 8]."""
    model = fs.models.from_linen(Attention(), (5,), jnp.int32)
    start = jax.eval_shape(fs.models.lora(model, 4).init, jax.random.key(0))
    sides = {
        path: (a.shape[0], start.params["B"][path].shape[1])
        for path, a in start.params["A"].items()
    }
    attention = "MultiHeadDotProductAttention_0"
    names = ("key", "out", "query", "value")
    assert sides == {
        "Conv_0/kernel": (9, 8),
        "Dense_0/kernel": (5 * 12 * 8, 2),
        **{f"{attention}/{name}/kernel": (12, 12) for name in names},
    }
    one = fs.models.lora(model, 4, named("*/out/kernel", "*/key/kernel"), alpha=8.0)
    variables = jax.jit(one.init)(jax.random.key(0))
    x = jnp.arange(10).reshape(2, 5) % 9
    a, b = variables.params["A"], jax.tree.map(jnp.ones_like, variables.params["B"])
    first, second = map(np.asarray, a.values())
    assert not np.isin(first, second).any()  # each is drawn on its own

    def beside(ab: Any) -> jax.Array:
        return one.apply(Variables({"trunk": trunk} | ab, {}), x, train=False)[0]

    def merged(ab: Any) -> jax.Array:
        params, products = dict(trunk), {k: 2 * ab["A"][k] @ ab["B"][k] for k in a}
        layers = {name: dict(params[attention][name]) for name in names}
        for name in ("out", "key"):
            w = layers[name]["kernel"]
            layers[name]["kernel"] = w + products[f"{attention}/{name}/kernel"].reshape(w.shape)
        params[attention] = layers
        return model.apply(Variables(params, {}), x, train=False)[0]

    trunk, some = variables.params["trunk"], {"A": a, "B": b}
    assert_trees(beside(some), merged(some), rtol=1e-5, atol=1e-6)
    slopes = [jax.grad(lambda ab, f=f: jnp.sin(f(ab)).sum())(some) for f in (beside, merged)]
    assert all(float(jnp.abs(g).max()) > 1e-4 for g in jax.tree.leaves(slopes[1]))
    assert_trees(slopes[0], slopes[1], rtol=1e-4, atol=1e-5)
    assert [holds(f, some, jnp.zeros(7), 12, 12) for f in (beside, merged)] == [False, True]


def holds(f: Any, some: Any, x: jax.Array, *shape: int) -> bool:
    """Whether the gradient for len(x) clients, each with its adapters, holds matrices of each."""
    clients = fs.tree.stack_copies(some, len(x))
    gradient = jax.vmap(jax.grad(lambda ab, x: jnp.sin(f(ab) + x.sum()).sum()))
    text = str(jax.jit(gradient).lower(clients, x).compile().as_text())
    return any(str([len(x), *sides]).replace(" ", "") in text for sides in (shape, shape[::-1]))


def test_clients_share_the_trunks_matrices(net: fs.Model, adapted: fs.Model) -> None:
    """Also if layers are computed again; a trunk that casts its weights is merged."""
    start, x = adapted.init(jax.random.key(0)), jnp.ones((4, 6))

    def outputs(model: fs.Model, ab: Any) -> jax.Array:
        return model.apply(start._replace(params=start.params | ab), x, train=True)[0]

    cast = fs.models.lora(fs.models.with_compute_dtype(net, jnp.bfloat16), RANK)
    some = {part: start.params[part] for part in "AB"}
    found = [
        holds(functools.partial(outputs, m), some, jnp.zeros(7), 6, 5) for m in (adapted, cast)
    ]
    assert found == [False, True]
    text = fs.models.lora(fs.models.transformer((4,), 9, 8, 1, 2, remat=True), RANK)
    start, x = text.init(jax.random.key(0)), jnp.ones((3, 4), jnp.int32)
    some = {part: start.params[part] for part in "AB"}
    assert not holds(functools.partial(outputs, text), some, jnp.zeros(7), 8, 32)


def test_the_command_shares_them_in_bfloat16() -> None:
    setup = build(parse(["--precision", "bf16", "--lora", "2", "--model", "logistic"]))
    model, x = setup.model, setup.problem.data.x[:4]
    start = model.init(jax.random.key(0))

    def outputs(ab: Any) -> jax.Array:
        return model.apply(start._replace(params=start.params | ab), x, train=True)[0]

    assert not holds(outputs, {part: start.params[part] for part in "AB"}, jnp.zeros(7), 64, 10)


def test_its_head_is_the_trunks_with_its_adapters(adapted: fs.Model) -> None:
    mask = head(adapted)(jax.eval_shape(adapted.init, jax.random.key(0)))
    chosen = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, here in jax.tree_util.tree_leaves_with_path(mask.params)
        if here
    }
    last = "Dense_1/Dense_0"
    trunk = {f"trunk/{last}/kernel", f"trunk/{last}/bias"}
    assert chosen == trunk | {f"A/{last}/kernel", f"B/{last}/kernel"}


def test_what_cannot_be_adapted_is_refused(net: fs.Model) -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        fs.models.lora(net, 0)
    for leaves in (named("Dense_0"), all_but(named("*kernel"))):
        wrong = fs.models.lora(net, 1, leaves)
        with pytest.raises(ValueError, match=r"leaves must be matrices, .* has the shape \(5,\)"):
            wrong.init(jax.random.key(0))
    nothing = fs.models.lora(fs.models.fashion_cnn((8, 8, 1), 2), 1, named("batch_stats"))
    with pytest.raises(ValueError, match="leaves must choose weights of the model, got none"):
        jax.eval_shape(nothing.init, jax.random.key(0))


def test_exact_products_need_a_frozen_trunk_and_no_other_server(
    federation: Federation, net: fs.Model, adapted: fs.Model
) -> None:
    base = composed(adapted, "fedex")
    for parts, message in (
        ({"exchange": fs.exchange.everything()}, "server exact_lora(.*) needs a frozen trunk"),
        ({"server": fs.server.chain(FEDEX)}, "needs to be the only server update"),
        ({"aggregator": fs.aggregators.coordinate_median}, "needs the plain mean"),
    ):
        with pytest.raises(ValueError, match=message):
            base.replace(**parts)
    alone = base.replace(exchange=fs.exchange.split(frozen=named("*bias")))
    with pytest.raises(ValueError, match=r"must freeze what server exact_lora"):
        play(alone, adapted, federation.data, 1)
    frozen = base.replace(exchange=fs.exchange.split(frozen=named("*kernel")))
    with pytest.raises(ValueError, match=r"exact_lora\(\) needs a model of fs.models.lora"):
        play(
            frozen.replace(local=fs.local_sgd(fs.empirical_risk(net), optax.sgd(LR))),
            net,
            federation.data,
            1,
        )
