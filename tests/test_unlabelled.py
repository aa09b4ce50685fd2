"""Samples without a label: y = -1 in losses and scores, pseudo-labels and SemiFL against NumPy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from conftest import Federation, altered_data, assert_trees, context_of, play

import fedjax_sim as fs
from fedjax_sim.base import Batch, Context, Variables
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.running import draw_clients
from fedjax_sim.client.terms import label_counts as counts_of_client
from fedjax_sim.data import hide_labels
from fedjax_sim.engine.batches import rows_at
from fedjax_sim.engine.clients import label_counts
from fedjax_sim.tasks import classification

LR, BATCH, ROUNDS, SURE, WEIGHT, MIX, ALPHA = 0.1, 8, 3, 0.6, 0.5, 0.8, 0.75
ONE = fs.make_execution(devices=1)
STREAM = 2**31 - 7


def louder(key: jax.Array, batch: Batch, client: Any) -> Batch:
    """The stronger view."""
    return batch._replace(x=batch.x + 0.3 * jax.random.normal(key, batch.x.shape, jnp.float32))


@pytest.fixture(scope="module")
def model(models: dict[str, fs.Model]) -> fs.Model:
    return models["logistic"]


@pytest.fixture(scope="module")
def some(federation: Federation) -> fs.ClientData:
    """Client k has about k labels of 7; the first has one sample, without a label."""
    data, rng = federation.data, np.random.default_rng(0)
    owner = np.repeat(np.arange(8), federation.sizes)
    y = np.array(data.y)
    y[data.index[rng.random(len(owner)) >= owner / 7]] = -1
    return altered_data(data, y=y)


def softmax(layers: oracle.Layers, x: np.ndarray) -> np.ndarray:
    h = np.exp(x @ layers[0] + layers[1])
    shares: np.ndarray = h / h.sum(axis=1, keepdims=True)
    return shares


@dataclasses.dataclass
class Clients(oracle.Oracle):
    """A client whose loss is a sum of means over some of a minibatch's samples."""

    def parts(
        self, layers: oracle.Layers, x: np.ndarray, y: np.ndarray, keys: Any
    ) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """The weight of each mean, and its samples."""
        raise NotImplementedError

    def label(self, client: int, rows: np.ndarray) -> np.ndarray:
        labels: np.ndarray = self.data.y[rows]
        return labels

    def minibatch(
        self, layers: oracle.Layers, client: int, mine: np.ndarray, key: Any
    ) -> tuple[float, oracle.Layers]:
        loss, grads = 0.0, oracle.zeros(layers)
        keys = jax.random.fold_in(key, STREAM)
        x = self.data.x[mine].astype(np.float64)
        for weight, inputs, labels in self.parts(layers, x, self.label(client, mine), keys):
            if len(labels):
                part, slopes = oracle.loss_and_gradient(layers, inputs, labels)
                loss, grads = loss + weight * part, oracle.plus(grads, slopes, weight)
        return loss, grads


def louder_rows(key: Any, x: np.ndarray) -> np.ndarray:
    whole = 0.3 * np.asarray(jax.random.normal(key, (BATCH, x.shape[1]), jnp.float32))
    seen: np.ndarray = x + whole[: len(x)]
    return seen


@dataclasses.dataclass
class FixMatch(Clients):
    sure: int = 0
    unsure: int = 0

    def parts(self, layers: Any, x: Any, y: Any, keys: Any) -> Any:
        has, q = y >= 0, softmax(layers, x)
        sure = ~has & (q.max(axis=1) >= SURE)
        self.sure, self.unsure = self.sure + sum(sure), self.unsure + sum(~has & ~sure)
        strong = louder_rows(jax.random.split(keys)[0], x)
        share = sure.sum() / max((~has).sum(), 1)
        yield 1.0, x[has], y[has]
        yield WEIGHT * share, strong[sure], q.argmax(axis=1)[sure]


@dataclasses.dataclass
class SemiFL(Clients):
    hidden: Any = ()
    received: Any = None

    def label(self, client: int, rows: np.ndarray) -> np.ndarray:
        return np.full(len(rows), -1) if self.hidden[client] else super().label(client, rows)

    def visit(self, t: int, client: int, layers: oracle.Layers, *more: Any, **own: Any) -> Any:
        self.received = layers
        return super().visit(t, client, layers, *more, **own)

    def parts(self, layers: Any, x: Any, y: Any, keys: Any) -> Any:
        views, shares, others, _ = jax.random.split(keys, 4)
        q = softmax(self.received, x)
        every = np.where(y < 0, q.argmax(axis=1), y)
        kept = (y >= 0) | (q.max(axis=1) >= SURE)
        other = np.asarray(jax.random.randint(others, (BATCH,), 0, len(x), jnp.int32))[: len(x)]
        share = float(jax.random.beta(shares, ALPHA, ALPHA, (), jnp.float32))
        mixed = share * x + (1 - share) * x[other]
        yield 1.0, louder_rows(views, x)[kept], every[kept]
        yield MIX * share, mixed[kept], every[kept]
        yield MIX * (1 - share), mixed[kept], every[other][kept]


def agree(clients: oracle.Oracle, theirs: list[oracle.Layers], ours: Any) -> None:
    for layers, variables in zip(theirs, ours.servers, strict=True):
        for a, b in zip(layers, oracle.layers_of(variables), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    losses = sum(float(m.loss) * int(m.samples) for m in ours.metrics)
    np.testing.assert_allclose(losses, clients.loss, rtol=1e-4)


def start_of(model: fs.Model) -> Variables:
    return model.init(jax.random.fold_in(jax.random.key(0), 0))


def test_fixmatch_against_numpy(some: fs.ClientData, model: fs.Model) -> None:
    """Minibatches with few labels, none, or only labels; the last of a client is padded."""
    objective = fs.terms.pseudo_labels(fs.empirical_risk(model), model, SURE, louder, weight=WEIGHT)
    local = fs.local_sgd(objective, optax.sgd(LR), batch_size=BATCH)
    clients = FixMatch(some, start_of(model), LR, 0.0, BATCH, 1)
    theirs, _ = oracle.fedavg(clients, ROUNDS, 5)
    agree(clients, theirs, play(fs.fedavg(local, clients_per_round=5).on(ONE), model, some, ROUNDS))
    assert min(clients.sure, clients.unsure) > 20


def test_semifl_against_numpy(rooted: fs.ClientData, model: fs.Model) -> None:
    """Two clients have labels; the server trains on its own after a step with momentum."""
    hidden = np.arange(8) % 5 != 2

    class AtServer(oracle.Oracle):
        """The server's samples are client 1's: the second of the chain has the key's fold 1."""

        def key(self, t: int, use: int) -> Any:
            return super().key(t, 4 if use == 2 else use)

    assert rooted.root is not None
    edges = np.array([0, *np.asarray(rooted.root)], np.int32)
    start = start_of(model)
    clients = SemiFL(rooted, start, LR, 0.0, BATCH, 1, hidden=hidden)
    at_server = AtServer(altered_data(rooted, start=edges), start, LR, 0.0, BATCH, 1)
    velocity, rounds = oracle.zeros(oracle.layers_of(start)), iter(range(ROUNDS))

    def absorb(w: oracle.Layers, cohort: list[int], visits: list[oracle.Visit]) -> oracle.Layers:
        nonlocal velocity
        mean = oracle.average([oracle.plus(v.layers, w, -1) for v in visits], [1.0] * len(cohort))
        velocity = oracle.plus(mean, velocity, 0.5)
        return at_server.train(next(rounds), 1, oracle.plus(w, velocity))

    theirs, _ = oracle.fedavg(clients, ROUNDS, 5, absorb=absorb)
    risk = fs.empirical_risk(model)
    algorithm = fs.algorithms.semifl(
        fs.local_sgd(risk, optax.sgd(LR), batch_size=BATCH),
        clients_per_round=5, model=model, objective=risk, threshold=SURE, strong=louder, mix=MIX,
    )  # fmt: skip
    ours = play(algorithm.on(ONE), model, hide_labels(rooted, hidden, 3), ROUNDS)
    agree(clients, theirs, ours)


def values(objective: Any, params: Any, batch: Batch) -> Any:
    """The loss and its gradient at the received model."""

    def loss(params: Any) -> Any:
        return objective(params, {}, batch, context_of(params))[0]

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def batch(federation: Federation) -> Batch:
    """The third sample has no label, the last is padding."""
    data = federation.data
    y = jnp.asarray(data.y[:6]).at[2].set(-1)
    return Batch(jnp.asarray(data.x[:6]), y, jnp.arange(6) < 5)


def test_objectives_are_the_risk_of_the_labelled(model: fs.Model, batch: Batch) -> None:
    """If all have labels, if the unlabelled weigh nothing, and if nobody is sure."""
    params, risk = start_of(model).params, fs.empirical_risk(model)
    few = batch._replace(y=jnp.maximum(batch.y, 0), mask=batch.mask & (batch.y >= 0))
    assert_trees(values(risk, params, batch), values(risk, params, few))
    made = fs.terms.pseudo_labels, fs.terms.received_labels
    fix, semi = (make(risk, model, 1.0, louder) for make in made)
    assert_trees(values(fix, params, batch), values(risk, params, few))
    assert_trees(values(fix, params, few), values(risk, params, few))
    light = fix.replace(threshold=0.0, weight=0.0)
    assert_trees(values(light, params, batch), values(risk, params, batch))
    plain = semi.replace(strong=None, mix=0.0)
    assert_trees(values(plain, params, batch), values(risk, params, batch))
    none = batch._replace(y=jnp.full(6, -1, jnp.int32))
    for objective in (risk, fix, semi):
        assert_trees(values(objective, params, none), jax.tree.map(jnp.zeros_like, (0.0, params)))


def test_padding_counts_for_nothing(model: fs.Model, batch: Batch) -> None:
    params, other = start_of(model).params, batch.x.at[5].set(9.0)
    padded = batch._replace(x=other, y=batch.y.at[5].set(-1))
    for make in (fs.terms.pseudo_labels, fs.terms.received_labels):
        objective = make(fs.empirical_risk(model), model, 0.0, louder)
        assert_trees(values(objective, params, batch), values(objective, params, padded))


def test_scores_are_of_the_labelled() -> None:
    rng = np.random.default_rng(0)
    y, outputs = rng.integers(-1, 3, 40), jnp.asarray(rng.normal(size=(40, 3)), jnp.float32)
    group = jnp.asarray(rng.integers(0, 2, 40), jnp.int32)

    def sums(task: Any, rows: np.ndarray) -> Any:
        def total(outputs: jax.Array, y: jax.Array, group: jax.Array) -> Any:
            return task.sums(task.answers(outputs, y), y, group, 2)

        return jax.jit(total)(outputs[rows], jnp.asarray(y[rows], jnp.int32), group[rows])

    task = classification(3, auc=True)
    wanted = sums(task, np.flatnonzero(y >= 0))
    assert_trees(sums(task.replace(unlabelled=True), np.arange(40)), wanted)
    weight = task.replace(unlabelled=True).weight
    assert weight is not None
    assert weight(jnp.array([-1, 0, 2])).tolist() == [0, 1, 1]
    both = task.replace(unlabelled=True, backdoor=True).weight
    assert both is not None
    assert both(jnp.array([-1, 0, 3])).tolist() == [0, 1, 0]


def test_counts_leave_the_unlabelled_out(some: fs.ClientData) -> None:
    """By y and by relabel, of both tables of counts."""
    data = jax.device_put(hide_labels(some, np.arange(8) == 4, 3))
    counts = label_counts(data, 3)
    for k in (3, 4):
        rows = some.index[some.start[k] : some.start[k + 1]]
        labels = some.y[rows]
        wanted = [0 if k == 4 else int(np.sum(labels == c)) for c in range(3)]
        assert counts[k].tolist() == wanted
        assert data.relabel is not None
        client = fs.base.ClientView(
            data.x, data.y, data.index, data.start[k], data.start[k + 1] - data.start[k],
            data.capacity, relabel=data.relabel[k],
        )  # fmt: skip
        assert counts_of_client(Context(None, client, None), 3).tolist() == wanted  # type: ignore[arg-type]
        seen = rows_at(client, jnp.arange(9, dtype=jnp.int32)).y
        assert seen.tolist() == ([-1] * 9 if k == 4 else labels[:9].tolist())


def test_a_run_scores_the_labelled_and_is_saved(
    some: fs.ClientData, federation: Federation, model: fs.Model, tmp_path: Path
) -> None:
    """The first client has no label: it counts in no table of labels."""
    x, y = federation.test
    few = np.where(np.arange(len(y)) % 2, -1, y)
    algorithm = fs.fedavg(
        fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR)), clients_per_round=4
    )
    task = classification(3, unlabelled=True)
    result = fs.simulate(
        algorithm, model, some, (x, few), rounds=1, task=task, validation=(x[::2], y[::2]),
        execution=ONE,
    )  # fmt: skip
    last = result.evaluations[-1]
    assert last.validation is not None
    for name, value in last.validation.pooled.items():
        np.testing.assert_allclose(last.test.pooled[name], value, rtol=1e-6, err_msg=name)
    assert result.to_pandas()["client_accuracy.clients"].tolist() == [7]
    fs.save_run(tmp_path / "run", {"few labels": result})
    assert 0 < fs.load_run(tmp_path / "run", model=model).summary["few labels"]["emd"] < 2


def test_a_data_set_tells_how_many_have_no_label() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    y[:30] = -1
    task = classification(3, unlabelled=True)
    made = fs.data.from_arrays("mine", x, y, task=task, test=np.arange(60) % 10 == 0)
    assert "from 0 to 2; 27 of 54 training samples have no label (-1)" in fs.data.summary(
        made
    ).text().replace("\n ", "")
    clients = fs.partition.partition_from_lists([range(25), range(25, 54)])
    assert fs.partition.label_table(made.train_y, clients, 3).tolist() == [[0] * 3, [9] * 3]


ONE_WITHOUT = """
import numpy as np
import fedjax_sim as fs
def mine(folder) -> fs.data.Dataset:
    client = np.arange(60) % 5
    y = np.where(client == 0, -1, np.arange(60) % 3)
    task = fs.tasks.classification(3, unlabelled=True)
    return fs.data.from_arrays("mine", np.eye(60)[:, :4], y, task=task, client=client)
"""


def test_the_command_takes_clients_without_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The EMD of all clients, in the summary and on the picture, was a traceback."""
    (tmp_path / "one_without.py").write_text(ONE_WITHOUT)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--dataset", "one_without:mine", "--partition", "natural", "--compare", "none"]
    config = parse([*flags, "--model", "logistic", "--clients-per-round", "2", "--devices", "1"])
    setup = build(config)
    assert setup.tables[0][0].tolist() == [0, 0, 0]
    assert setup.emd == fs.partition.emd(setup.tables[0][1:])
    draw_clients(setup, tmp_path / "clients.svg")


def simulated(data: fs.ClientData, objective: Any, model: fs.Model, task: Any) -> Callable[[], Any]:
    algorithm = fs.fedavg(fs.local_sgd(objective, optax.sgd(LR)), clients_per_round=2)
    test = np.asarray(data.x[:4]), np.arange(4) % 3
    return lambda: fs.simulate(algorithm, model, data, test, rounds=1, task=task)


def test_mistakes(some: fs.ClientData, model: fs.Model) -> None:
    risk, open_task = fs.empirical_risk(model), classification(3, unlabelled=True)
    none = altered_data(some, y=np.full_like(some.y, -1))
    hidden, worse = hide_labels(some, np.ones(8, bool), 3), altered_data(some, y=some.y - 1)
    needs = "empirical_risk needs labels, and no client has one (y is -1): use fs.terms.pseudo_lab"
    for mistake, words in [
        (simulated(none, risk, model, open_task), needs),
        (simulated(hidden, fs.terms.sharpness_aware(risk), model, open_task), needs),
        (
            simulated(some, risk, model, classification(3)),
            "data.y must be in 0 to 2, as classes is 3, got -1 to 2; classification(3, unlabelled="
            "True) takes -1 for no label",
        ),
        (
            simulated(worse, risk, model, open_task),
            "data.y must be in -1 to 2, as classes is 3, got -2 to 1",
        ),
        (
            lambda: fs.data.from_arrays("mine", np.eye(3), [-1, 0, 1]),
            "y must be in 0 … M - 1, got -1 … 1; classification(M, unlabelled=True) takes -1 for",
        ),
        (lambda: fs.client_data(np.eye(2), [-2, 0], []), "y must be in -1 … M - 1, got -2 … 0"),
        (lambda: hide_labels(some, np.ones(7, bool), 3), "hidden must be bool [8], got bool [7]"),
        (lambda: hide_labels(some, np.ones(8, bool), 2), "data.y must be in -1 … 1, got -1 … 2"),
        (
            lambda: fs.terms.pseudo_labels(risk, model, 1.5),
            "threshold must be in [0, 1], got 1.5",
        ),
        (
            lambda: fs.terms.received_labels(risk, model, alpha=0.0),
            "alpha must be positive",
        ),
        (
            simulated(some, fs.terms.pseudo_labels(risk, model), model, fs.tasks.regression()),
            "data.y must be floats",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            mistake()


def test_the_command_hides_the_labels_of_clients() -> None:
    flags = ["--algo", "semifl", "--compare", "none", "--model", "logistic", "--clients", "20"]
    flags += ["--server-fraction", "0.05", "--devices", "1", "--labelled"]
    setup = build(parse([*flags, "0.25"]))
    relabel = setup.problem.data.relabel
    assert relabel is not None
    rows = np.asarray(relabel)
    assert sorted(rows.max(axis=1).tolist()) == [-1] * 15 + [9] * 5
    assert repr(setup.task) == "classification(10, unlabelled=True)"
    assert setup.about.clients.endswith("; 5 of 20 have labels")
    assert setup.emd is not None
    assert setup.emd > 1  # dealt by the true labels
    with pytest.raises(ValueError, match="--labelled is for classes, the task is regression"):
        build(parse(["--dataset", "diabetes", "--labelled", "0.5"]))
    with pytest.raises(ValueError, match="fedavg: empirical_risk needs labels"):
        build(parse(["--algo", "fedavg", *flags[2:], "0"]))
