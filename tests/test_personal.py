"""Clients' own models: how they are trained, and that their scores are those of a plain loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    Federation,
    Rounds,
    assert_trees,
    known,
    largest_change,
    play,
    play_numbers,
)
from oracle import layers_of, loss_and_gradient
from sklearn import metrics as sk

import fedjax_sim as fs
from fedjax_sim import bench, compression, corrections, flight, personal, selection, sending
from fedjax_sim.algorithms import ditto, fine_tuned
from fedjax_sim.base import ClientView, LocalUpdate
from fedjax_sim.cli import report
from fedjax_sim.cli.folder import RunFolder
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.partition import Partition, partition_from_lists

LR, LAM = 0.1, 0.7
ONE = fs.make_execution(devices=1)


def local_sgd(model: fs.Model, **options: Any) -> LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(LR), **{"batch_size": 8, **options})


# Ditto.


def made(name: str, model: fs.Model, **numbers: float) -> fs.Algorithm:
    """Two steps a visit, each on all samples of a client: their order does not matter."""
    local = local_sgd(model, batch_size=40, epochs=2)
    method: Any = {"fedavg": fs.fedavg, "ditto": ditto}[name]
    return method(local, clients_per_round=3, **numbers).on(ONE)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}), "alone": ("ditto", {"lam": 0.0}), "near": ("ditto", {"lam": LAM}),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_batches(federation: Federation, models: dict[str, fs.Model]) -> dict[str, Rounds]:
    return {
        case: play_numbers(made, name, models["logistic"], federation.data, 4, numbers)
        for case, (name, numbers) in RUNS.items()
    }


@pytest.mark.parametrize("name", ["alone", "near"])
def test_dittos_shared_model_is_that_of_fedavg(whole_batches: dict[str, Rounds], name: str) -> None:
    assert_trees(whole_batches[name].servers, whole_batches["fedavg"].servers)
    for a, b in zip(whole_batches[name].metrics, whole_batches["fedavg"].metrics, strict=True):
        assert_trees(a, b)


@pytest.mark.parametrize(("name", "lam"), [("alone", 0.0), ("near", LAM)])
def test_dittos_own_models_are_those_of_the_oracle(
    federation: Federation,
    models: dict[str, fs.Model],
    whole_batches: dict[str, Rounds],
    name: str,
    lam: float,
) -> None:
    data = federation.data
    initial = models["logistic"].init(jax.random.fold_in(jax.random.key(0), 0))
    clients = len(federation.sizes)
    own, server = [layers_of(initial)] * clients, layers_of(initial)
    visited = set()
    out = whole_batches[name]
    draw = jax.jit(selection.uniform().draw)
    for t, after in enumerate(out.servers):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), t)
        zeros = jnp.zeros(3, jnp.int32)
        cohort, _ = draw(jax.random.fold_in(key, 0), (), data, zeros, jnp.ones(3, bool), zeros)
        for k in map(int, cohort):
            rows = data.index[data.start[k] : data.start[k + 1]]
            for _ in range(2):
                _, grads = loss_and_gradient(own[k], data.x[rows], data.y[rows])
                own[k] = [
                    v - LR * (g + lam * (v - w))
                    for v, g, w in zip(own[k], grads, server, strict=True)
                ]
            visited.add(k)
        server = layers_of(after)  # which no test here is about
    kept = out.state.client_state.own
    for k in range(clients):
        mine = layers_of(jax.tree.map(lambda a, k=k: a[k], kept))
        assert_trees(mine, own[k], rtol=1e-4, atol=1e-5)
        assert (largest_change(mine, layers_of(initial)) > 1e-3) == (k in visited)
    assert 3 < len(visited) < clients  # some came back, some never came


def test_own_models_are_found_inside_another_wrapper(models: dict[str, fs.Model]) -> None:
    variables = models["logistic"].init(jax.random.key(0))
    inside = ditto_local(models["logistic"]).client_state(variables)
    nothing: Any = None
    found = personal.stored()(nothing, nothing, nothing, ("residual", (inside,)))
    assert_trees(found, variables)


def ditto_local(model: fs.Model, **options: Any) -> LocalUpdate:
    return personal.ditto(local_sgd(model, **options), 0.1)


def two_models(local: LocalUpdate, model: fs.Model) -> tuple[fs.Variables, fs.Variables]:
    """The model that a client sends, and its own, after a visit."""
    variables = model.init(jax.random.key(0))
    client = ClientView(
        jnp.ones((20, 6)), jnp.zeros(20, jnp.int32), jnp.arange(20, dtype=jnp.int32),
        jnp.int32(0), jnp.int32(20), 20, jnp.int32(0),
    )  # fmt: skip
    start = local.client_state(variables), local.shared_state(variables)
    out = jax.jit(local.train)(jax.random.key(1), variables, client, *start)
    nothing: Any = None
    return out.variables, personal.stored()(nothing, variables, nothing, out.client_state)


def test_changing_ditto_changes_both_models(models: dict[str, fs.Model]) -> None:
    model = models["logistic"]
    changed = two_models(ditto_local(model).change(epochs=2, batch_size=20), model)
    assert_trees(changed, two_models(ditto_local(model, epochs=2, batch_size=20), model))


def test_corrections_of_the_shared_model_do_not_move_the_own(
    models: dict[str, fs.Model],
) -> None:
    """h_k has the client's loss and the pull of λ, whatever holds w_k back."""
    model = models["logistic"]
    plain = local_sgd(model)
    held = local_sgd(model, corrections=(corrections.proximal(5.0),))
    sent, own = two_models(personal.ditto(plain, LAM), model)
    for local in (
        personal.ditto(held, LAM),
        personal.ditto(plain, LAM).change(corrections=(corrections.proximal(5.0),)),
    ):
        sent_held, own_held = two_models(local, model)
        assert_trees(own_held, own)
        assert largest_change(sent_held, sent) > 1e-3


def test_what_is_sent_does_not_touch_the_own(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """The opposite, by a code: a personal model never leaves its client."""
    model, (name, numbers) = models["logistic"], RUNS["near"]
    forged = made(name, model, **numbers).replace(
        sending=(
            sending.sign_flip(np.ones(8, bool)), sending.compressed(compression.top_k(0.1))
        ),
    )  # fmt: skip
    ours = play(forged, model, federation.data, 1)
    honest = play_numbers(made, name, model, federation.data, 1, numbers)
    assert_trees(ours.states[0].client_state.own, honest.state.client_state.own)
    assert largest_change(ours.servers[0], honest.servers[0]) > 1e-2


# Scores.

LISTS = [  # of two runs: who owns which test sample; a client may have none
    [range(0, 30), range(30, 31), [], range(40, 100), range(100, 109), [2], range(120, 170), [5]],
    [
        [7],
        range(60, 90),
        range(0, 50),
        [],
        range(90, 101),
        range(110, 150),
        [3, 4],
        range(150, 203),
    ],
]


@pytest.fixture(scope="module")
def two_partitions(federation: Federation) -> fs.ClientData:
    """The second run's clients own the samples in another order."""
    first = federation.partition
    parts = [first, Partition(first.index[::-1], first.start)]
    return fs.client_data(federation.data.x, federation.data.y, parts)


@pytest.fixture(scope="module")
def own_tests(federation: Federation) -> EvalSet:
    return eval_set(*federation.test, [partition_from_lists(own) for own in LISTS])


@pytest.fixture(scope="module")
def tuned(
    two_partitions: fs.ClientData, own_tests: EvalSet, models: dict[str, fs.Model]
) -> fs.Result:
    local = local_sgd(models["logistic"])
    return fs.simulate(
        fine_tuned(local, clients_per_round=3, fine_tuning_epochs=2).on(ONE),
        models["logistic"], two_partitions, own_tests,
        rounds=3, classes=3, seeds=(4, 5), eval_every=2, auc=True, personal=True,
    )  # fmt: skip


def test_fine_tuned_scores_are_those_of_a_loop_over_clients(
    federation: Federation,
    models: dict[str, fs.Model],
    two_partitions: fs.ClientData,
    tuned: fs.Result,
) -> None:
    model, data = models["logistic"], two_partitions
    local = local_sgd(model, epochs=2)
    tune = jax.jit(lambda key, w, client: local.train(key, w, client, ((), ()), ((), ())))
    answer = jax.jit(lambda w, x: model.apply(w, x, train=False)[0])
    last = tuned.evaluations[-1]
    scores = known(last.personal)
    found = known(scores.by_client)
    x, y = federation.test
    for r, seed in enumerate((4, 5)):
        server = jax.tree.map(lambda a, r=r: a[r], tuned.variables)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), 3)
        everyone = []
        for k, rows in enumerate(map(list, LISTS[r])):
            client = ClientView(
                data.x, data.y, data.index, jnp.int32(data.start[r, k]),
                jnp.int32(federation.sizes[k]), data.capacity, jnp.int32(k),
            )  # fmt: skip
            own = tune(jax.random.fold_in(jax.random.fold_in(key, 5), k), server, client).variables
            logits = np.asarray(answer(own, x))[rows].astype(np.float64)
            if not rows:
                assert math.isnan(found.accuracy[r, k])
                continue
            right = logits.argmax(axis=1) == y[rows]
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            loss = -log_p[np.arange(len(rows)), y[rows]]
            f1 = sk.f1_score(y[rows], logits.argmax(axis=1), average="weighted", zero_division=0)
            assert found.accuracy[r, k] == pytest.approx(right.mean(), abs=1e-9)
            assert found.f1[r, k] == pytest.approx(f1, abs=1e-6)
            assert found.loss[r, k] == pytest.approx(loss.mean(), rel=1e-4)
            everyone.append((right, loss))
        right, loss = map(np.concatenate, zip(*everyone, strict=True))
        assert scores.pooled.accuracy[r] == pytest.approx(right.mean(), abs=1e-9)
        assert scores.pooled.loss[r] == pytest.approx(loss.mean(), rel=1e-4)
    assert not np.array_equal(scores.pooled.loss, last.test.pooled.loss)
    assert tuned.xla_programs <= 4


@pytest.mark.slow
def test_fine_tuning_leaves_the_run_as_it_is(
    two_partitions: fs.ClientData,
    own_tests: EvalSet,
    models: dict[str, fs.Model],
    tuned: fs.Result,
) -> None:
    fedavg = fs.simulate(
        fs.fedavg(local_sgd(models["logistic"]), clients_per_round=3).on(ONE),
        models["logistic"], two_partitions, own_tests,
        rounds=3, classes=3, seeds=(4, 5), eval_every=2, auc=True,
    )  # fmt: skip
    assert_trees(fedavg.variables, tuned.variables)
    for a, b in zip(fedavg.evaluations, tuned.evaluations, strict=True):
        assert_trees(a.test, b.test)
        assert_trees(a.bytes_down, b.bytes_down)
        assert a.personal is None
    with pytest.raises(ValueError, match="the run has no personal models scored by client"):
        fedavg.series("accuracy", by_client=True, part="personal")


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_the_model_that_all_receive_scores_as_the_servers(
    federation: Federation,
    models: dict[str, fs.Model],
    two_partitions: fs.ClientData,
    own_tests: EvalSet,
    runs: int,
) -> None:
    """In AUC too, and after the models in flight were collected at the end."""
    algorithm = fs.compose(
        local_sgd(models["logistic"]),
        selection=selection.uniform(sticky=True),
        clients_per_round=4,
        flight=flight.staggered(2),
        personal=personal.as_received(),
    ).on(fs.make_execution(devices=1 if runs == 1 else 4))
    data, test = two_partitions, own_tests
    if runs == 1:
        data, test = federation.data, eval_set(*federation.test, partition_from_lists(LISTS[0]))
    result = fs.simulate(
        algorithm, models["logistic"], data, test,
        rounds=3, classes=3, seeds=(0, 1)[:runs], eval_every=2, auc=True, personal=True,
    )  # fmt: skip
    last = result.evaluations[-1]
    assert last.uncollected is not None
    for e in result.evaluations:
        own, servers = e.personal, e.test
        assert_trees(own, servers, rtol=1e-6)
    assert np.isfinite(known(known(last.personal).pooled.auc)).all()


def test_records_and_table_have_personal_scores(tuned: fs.Result, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", {})
    runs, tables = [{"seed": 4}, {"seed": 5}], [np.zeros((8, 2), np.int64)] * 2
    folder.log("fine_tuned", tuned.evaluations[-1], runs, tables, tuned.task, [(), ()])
    folder.close()
    lines = [json.loads(s) for s in (folder.path / "metrics.jsonl").read_text().splitlines()]
    own = known(tuned.evaluations[-1].personal)
    mean = np.nanmean(known(own.by_client).accuracy, axis=1)
    assert [s["personal"]["client_accuracy"]["mean"] for s in lines] == pytest.approx(mean)
    assert [s["personal"]["auc"] for s in lines] == pytest.approx(own.pooled.auc)
    about = {"score": "accuracy", "seeds": 2, "fedavg_bytes": 1.0, "clients": 8, "emd": 0.0}
    summary = report.measurements(tuned, **about)  # type: ignore[arg-type]
    assert summary["personal_accuracy_last"] == pytest.approx(mean.mean())
    assert summary["personal_accuracy_last_std"] == pytest.approx(mean.std())
    without = {k: v for k, v in summary.items() if not k.startswith("personal")}
    head, _, first, second, *_ = report.table({"fine": summary, "plain": without}).splitlines()
    assert "personal %" in head
    assert f"{100 * mean.mean():.2f} ± {100 * mean.std():.2f}" in first
    assert second.split("  ")[0].strip() == "plain"
    assert "-" in second
    assert "personal" not in report.table({"plain": without})
    split = report.table({"fedper": summary | {"own_leaves": True}}).splitlines()[2]
    assert split.split()[:5] == ["fedper", "-", "-", "-", f"{100 * mean.mean():.2f}"]


@pytest.mark.slow
def test_a_server_model_that_lacks_leaves_has_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedjax_sim.cli.running.draw_clients", lambda *args: None)
    monkeypatch.setattr("fedjax_sim.run.programs.Programs.check", lambda self: None)
    argv = ["--algo", "fedper", "--compare", "none", "--clients", "5", "--rounds", "1"]
    argv += ["--seeds", "1", "--epochs", "1", "--devices", "1", "--model", "mlp"]
    for split in ("holdout", "official"):
        out = tmp_path / split
        assert bench.main([*argv, "--split", split, "--out", str(out)]) == 0
        shown = capsys.readouterr().out
        assert "no score of the server's model: fedper train some leaves at the clients" in shown
        row = next(line.split() for line in shown.splitlines() if line.startswith("fedper  "))
        assert row[1:4] == ["-", "-", "-"]
        assert (out / "curves.png").exists() == (split == "holdout")
        assert json.loads((out / "summary.json").read_text())["fedper"]["own_leaves"]


def test_divergence_of_fine_tuning_names_the_round(
    federation: Federation, models: dict[str, fs.Model], own_tests: EvalSet
) -> None:
    def explode(key: Any, received: fs.Variables, client: Any, client_state: Any) -> fs.Variables:
        return jax.tree.map(lambda a: a * jnp.float32(jnp.inf), received)

    algorithm = fs.compose(
        local_sgd(models["logistic"]),
        selection=selection.uniform(),
        clients_per_round=2,
        personal=explode,
    ).on(ONE)
    test = eval_set(*federation.test, partition_from_lists(LISTS[0]))
    with pytest.raises(fs.DivergedError, match=r"in round 2 \(seed 0\)"):
        fs.simulate(
            algorithm, models["logistic"], federation.data, test,
            rounds=2, classes=3, eval_every=2, personal=True, execution=ONE,
        )  # fmt: skip


def test_a_test_set_of_other_clients_is_refused(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    algorithm = fine_tuned(local_sgd(models["logistic"]), clients_per_round=2)
    message = "personal=True needs a test set of the 8 clients that train, got one of 1"
    with pytest.raises(ValueError, match=message):
        fs.simulate(
            algorithm, models["logistic"], federation.data, federation.test,
            rounds=1, classes=3, personal=True,
        )  # fmt: skip
