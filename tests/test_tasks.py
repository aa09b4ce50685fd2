"""Tasks other than classes: runs against plain NumPy, scores against scikit-learn, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import known, some_slow
from sklearn import metrics as sk

import fedjax_sim as fs
from fedjax_sim import bench, tasks
from fedjax_sim.base import Sums
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import eval_set, load_dataset
from fedjax_sim.partition import Partition, partition_from_lists
from fedjax_sim.run.metrics import evaluate, set_scores

RATE, ROUNDS, F = 0.1, 3, 4
LISTS: list[Any] = [range(5), [5, 6], range(7, 20), [20]]
TESTS: list[Any] = [range(3), range(3, 10), [], [10, 11]]
X = np.random.default_rng(0).normal(size=(35, F)).astype(np.float32)


def targets(name: str) -> np.ndarray:
    """Of 35 samples; numbers far from 0, whose squares float32 could not add up."""
    rng = np.random.default_rng(1)
    signal = X @ rng.normal(size=(F, 2)) + rng.normal(size=(35, 2))
    made = {"regression": 1e3 + signal[:, 0], "two": signal, "multi-label": signal > 0.3}
    return made[name] if made[name].dtype == bool else made[name].astype(np.float32)


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def numpy_run(y: np.ndarray, slope: Any, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """FedAvg of a linear model from 0: a full-batch step of each client, n_k-weighted mean."""
    w, b = np.zeros((F, outputs)), np.zeros(outputs)
    y = y.reshape(len(y), -1).astype(np.float64)
    for _ in range(ROUNDS):
        sizes = np.array([len(rows) for rows in LISTS])
        moves = []
        for rows in LISTS:
            x, own = X[list(rows)].astype(np.float64), y[list(rows)]
            d = slope(x @ w + b, own) / (len(own) * outputs)
            moves.append((x.T @ d, d.sum(axis=0)))
        w = w - RATE * sum(n * m[0] for n, m in zip(sizes, moves, strict=True)) / sizes.sum()
        b = b - RATE * sum(n * m[1] for n, m in zip(sizes, moves, strict=True)) / sizes.sum()
    return w, b


def wanted(name: str, y: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
    """The scores of a group by scikit-learn."""
    if name == "multi-label":
        answers = outputs > 0
        f1 = {
            f"f1_{average}": sk.f1_score(y, answers, average=average, zero_division=0)
            for average in ("micro", "macro")
        }
        if not (y.any() or answers.any()):
            f1["f1_micro"] = np.nan  # 0 / 0, which scikit-learn counts as 0
        right = {"subset_accuracy": sk.accuracy_score(y, answers)}
        return f1 | right | {"label_accuracy": 1 - sk.hamming_loss(y, answers)}
    return {
        "mse": sk.mean_squared_error(y, outputs),
        "mae": sk.mean_absolute_error(y, outputs),
        "r2": sk.r2_score(y, outputs),
    }


SLOPES: dict[str, Any] = {
    "regression": lambda out, y: 2 * (out - y),
    "two": lambda out, y: 2 * (out - y),
    "multi-label": lambda out, y: sigmoid(out) - y,
}
TASKS = {
    "regression": tasks.regression(),
    "two": tasks.regression(2),
    "multi-label": tasks.multi_label(2),
}


@pytest.mark.parametrize("name", some_slow(["regression", "multi-label", "two"], quick=2))
def test_a_run_is_the_numpy_program(name: str) -> None:
    """Weights, and all scores, pooled and by client, of two runs.

    One client has no test sample, and two samples at the end are padding.
    """
    task, y = TASKS[name], targets(name)
    model = fs.models.logistic((F,), task.outputs)
    data = fs.client_data(X[:21], y[:21], partition_from_lists(LISTS))
    start = np.cumsum([0, *map(len, TESTS)]).astype(np.int32)
    test = eval_set(X[21:], y[21:], Partition(np.arange(14, dtype=np.int32), start))
    local = fs.local_sgd(fs.empirical_risk(model, task.loss), optax.sgd(RATE), batch_size=13)
    zeros = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    result = fs.simulate(
        fs.fedavg(local, clients_per_round=4), model, data, test,
        rounds=ROUNDS, task=task, seeds=(0, 1), eval_every=ROUNDS, initial=zeros,
        validation=(X[21:], y[21:]),
    )  # fmt: skip
    w, b = numpy_run(y[:21], SLOPES[name], task.outputs)
    layer = result.variables.params["Dense_0"]["Dense_0"]
    for run in (0, 1):
        np.testing.assert_allclose(layer["kernel"][run], w, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(layer["bias"][run], b, rtol=2e-5, atol=2e-5)
    outputs, true = X[21:] @ w + b, y[21:]
    shown = outputs[:, 0] if true.ndim == 1 else outputs
    last = result.evaluations[-1]
    for found, n in ((last.test.pooled, 12), (known(last.validation).pooled, 14)):
        for metric, value in wanted(name, true[:n], shown[:n]).items():
            np.testing.assert_allclose(found[metric], value, rtol=1e-4, err_msg=metric)
    by_client = known(last.test.by_client)
    for k, rows in enumerate(TESTS):
        here = wanted(name, true[list(rows)], shown[list(rows)]) if len(rows) else {}
        for metric in task.metrics:
            value = here.get(metric, np.nan)
            np.testing.assert_allclose(by_client[metric][:, k], value, rtol=1e-4, err_msg=metric)
    assert result.score.shape == (1, 2)
    np.testing.assert_array_equal(result.score[0], last.test.pooled[task.score])


def test_r2_of_equal_targets_is_unknown() -> None:
    """The mean of equal numbers is rounded: seven times 0.1 had R² = -1.8e16."""
    group = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 7)  # the last one is padding
    y = jnp.concatenate([jnp.full(7, 0.1), 1e6 + jnp.arange(7.0), jnp.full(7, 123.4), jnp.ones(7)])
    task = tasks.regression()
    sums = task.sums(task.answers(y[:, None] + 1, y), y, group, 3)
    found = task.scores(Sums(jnp.zeros(3), jnp.full(3, 7), sums))
    assert np.allclose(found["mse"], 1, atol=1e-5)
    np.testing.assert_allclose(found["r2"], [np.nan, 1 - 7 / 28, np.nan])


@pytest.mark.slow
def test_tokens_count_alike_however_long_their_sequences() -> None:
    """Padding is neither learnt nor counted, whatever the model says there."""
    task = tasks.next_token(3, ignore=0)
    y = np.array([[1, 2, 0], [2, 0, 0], [0, 0, 0], [1, 1, 2]])
    logits = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
    given = fs.Model(lambda key: fs.Variables((), ()), lambda v, x, **_: (x, ()))
    test = eval_set(logits, y, partition_from_lists([[0, 1], [2], [3]]))
    counts = evaluate(given.apply, task, fs.make_execution(devices=1), fs.Variables((), ()), test)
    found = set_scores(task, jax.tree.map(np.asarray, counts))
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for scores, rows in (
        (found.pooled, [0, 1, 3]),
        *((jax.tree.map(lambda a, k=k: a[k], dict(known(found.by_client))), rows)
          for k, rows in ((0, [0, 1]), (2, [3]))),
    ):  # fmt: skip
        real = [(i, t) for i in rows for t in range(3) if y[i, t]]
        loss = -np.mean([log_p[i, t, y[i, t]] for i, t in real])
        right = np.mean([log_p[i, t].argmax() == y[i, t] for i, t in real])
        assert scores["loss"] == pytest.approx(loss, rel=1e-6)
        assert scores["perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)
        assert scores["accuracy"] == pytest.approx(right)
    assert np.isnan(known(found.by_client).perplexity[1])
    assert np.isinf(task.scores(fs.tasks.Sums(np.array(1e4), 1, 0))["perplexity"])  # says nothing
    each = [-log_p[0, [0, 1], [1, 2]].mean(), -log_p[1, 0, 2], 0]
    np.testing.assert_allclose(task.loss(jnp.asarray(logits), jnp.asarray(y))[:3], each, rtol=1e-5)
    slope = jax.grad(lambda a: task.loss(a, jnp.asarray(y)).sum())(jnp.asarray(logits))
    assert not np.asarray(slope)[y == 0].any()


@pytest.mark.slow
def test_the_best_round_has_the_lowest_error() -> None:
    """A rate so high that the error rises after the first rounds."""
    y = targets("two")
    model = fs.models.logistic((F,), 2)
    data = fs.client_data(X[:21], y[:21], partition_from_lists(LISTS))
    local = fs.local_sgd(fs.empirical_risk(model, fs.losses.squared_error), optax.sgd(0.9))
    result = fs.simulate(
        fs.fedavg(local, clients_per_round=2), model, data, (X[21:28], y[21:28]),
        rounds=6, task=tasks.regression(2), validation=(X[28:], y[28:]), seeds=(0, 1, 2),
    )  # fmt: skip
    for metric, best in (("mse", np.argmin), ("r2", np.argmax)):
        chosen = result.validated(metric, by_client=False)
        for r in range(3):
            valid = [known(e.validation).pooled[metric][r] for e in result.evaluations]
            assert chosen[r] == result.evaluations[int(best(valid))].test.pooled[metric][r]
    with pytest.raises(
        ValueError, match=r"one of mse, mae, r2, loss, .*regression\(targets=2\).*'f1'"
    ):
        result.series("f1", by_client=False)


# What does not fit


def run(y: Any, *, test_y: Any = None, algorithm: Any = None, **options: Any) -> fs.Result:
    outputs = options.pop("outputs", 1)
    model = options.pop("model", fs.models.logistic((F,), outputs))
    y = np.asarray(y)
    data = fs.client_data(X[: len(y)], y, partition_from_lists([[0], [1, 2]]))
    data = options.pop("change", lambda d: d)(data)
    loss = getattr(options.get("task"), "loss", fs.losses.cross_entropy)
    local = fs.local_sgd(fs.empirical_risk(model, loss), optax.sgd(0.1))
    make = algorithm or (lambda local, model: fs.fedavg(local, clients_per_round=1))
    test = (X[: len(y)], y if test_y is None else np.asarray(test_y))
    return fs.simulate(make(local, model), model, data, test, rounds=1, **options)


def trained_on(loss: Any) -> Any:
    """FedAvg whose clients have a loss of their own."""
    return lambda local, model: fs.fedavg(
        local.change(objective=fs.empirical_risk(model, loss)), clients_per_round=1
    )


def linear(init: Any, state: Any) -> fs.Model:
    """A model of plain functions, whose weights are in ``init`` and which returns ``state``."""
    weights = jnp.zeros((F, 1))
    return fs.Model(lambda key: init(weights), lambda v, x, **_: state(x @ jax.tree.leaves(v)[0]))


FLOATS, REGRESSION = [0.5, 1.5, 2.0], tasks.regression()
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no task": (FLOATS, {}, r"task must be given, such as fs.tasks.regression\(\), or classes"),
    "auc": (FLOATS, {"task": REGRESSION, "auc": True}, "auc must be left out if there is a task"),
    "floats": (FLOATS, {"classes": 2}, r"data.y must be integers \[n\], .* got float32 \[3\]"),
    "integers": ([0, 1, 1], {"task": REGRESSION}, r"data.y must be floats .* got int32 \[3\]"),
    "NaN": ([0.5, np.nan, 1], {"task": REGRESSION}, "data.y must be finite, got nan"),
    "columns": (
        np.zeros((3, 2)) + 0.5,
        {"task": REGRESSION},
        r"data.y must be floats \[n\] or \[n, 1\], got float32 \[3, 2\]",
    ),
    "outputs": (
        FLOATS,
        {"task": REGRESSION, "outputs": 3},
        r"the model must return outputs \[batch, 1\], as the task is regression\(\) with y \[n\];"
        r" for a batch of 2 it returns \[2, 3\]",
    ),
    "labels": ([[0, 2], [1, 1], [0, 0]], {"task": tasks.multi_label(2)}, "0 or 1, got 0 to 2"),
    "tokens": (
        [[0, 5], [1, -1], [0, 0]],
        {"task": tasks.next_token(5)},
        "data.y must be in 0 to 4, or -1 for padding, got 5",
    ),
    "test": (
        FLOATS,
        {"task": REGRESSION, "test_y": [[0.5], [1.5], [2.0]]},
        r"test.y must have targets of shape \(\) as the clients have, got \(1,\)",
    ),
    "relabel": (
        FLOATS,
        {"task": REGRESSION, "change": lambda d: fs.attacks.label_flip(d, np.ones(2, bool), 2)},
        r"data.relabel is for class labels, the task is regression\(\)",
    ),
    "fedlc": (
        FLOATS,
        {
            "task": REGRESSION,
            "algorithm": lambda local, model: fs.algorithms.fedlc(
                local, clients_per_round=1, objective=fs.empirical_risk(model, REGRESSION.loss)
            ),
        },
        r"calibration needs class labels, the task is regression\(\)",
    ),
    "loss": (
        FLOATS,
        {"task": REGRESSION, "algorithm": trained_on(fs.losses.cross_entropy)},
        r"cross_entropy must have an integer for each row of logits .* got labels float32",
    ),
    "loss of a batch": (
        FLOATS,
        {"task": REGRESSION, "algorithm": trained_on(lambda o, y: jnp.mean((o[:, 0] - y) ** 2))},
        r"losses must be one per sample, \[16\], got float32 \[\]",
    ),
    "loss that broadcasts": (
        FLOATS,
        {"task": REGRESSION, "algorithm": trained_on(lambda o, y: (o - y[None]) ** 2)},
        r"losses must be one per sample, \[16\], got float32 \[16, 16\]: compare outputs and y",
    ),
    "loss of the scores": (
        FLOATS,
        {"task": REGRESSION, "loss": lambda o, y: (o - y[None]) ** 2},
        r"loss must return one value per sample, \[2\], got \[2, 2\]",
    ),
    "weights alone": (
        FLOATS,
        {"task": REGRESSION, "model": linear(lambda w: {"w": w}, lambda outputs: (outputs, {}))},
        r"init must return fs.Variables, got dict",
    ),
    "outputs alone": (
        FLOATS,
        {
            "task": REGRESSION,
            "model": linear(lambda w: fs.Variables(w, {}), lambda outputs: outputs),
        },
        r"apply must return \(outputs, state\), .* got float32 \[2, 1\]",
    ),
    "another state": (
        FLOATS,
        {
            "task": REGRESSION,
            "model": linear(lambda w: fs.Variables(w, {}), lambda outputs: (outputs, None)),
        },
        r"apply must return .* got \('float32 \[2, 1\]', None\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_task_is_refused(case: str) -> None:
    y, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        run(y, **options)
    assert "\n" not in str(caught.value)


def test_samplers_that_look_at_no_label_take_any_targets() -> None:
    y = targets("two")
    for name in ("iid", "quantity(1)", "power_law(1)", "natural"):
        _, sample = fs.partition.parse_sampler(name)
        made = sample(y, 5, 0, groups=np.arange(35) % 5)
        assert sorted(made.index) == list(range(35)), name
    with pytest.raises(ValueError, match=r"labels must be classes.*float32 \[35, 2\]: .* iid, "):
        fs.partition.limit_label(y, 5, labels_per_client=1, seed=0)


# Data sets and the command


def test_the_task_follows_from_the_targets() -> None:
    made = fs.data.from_arrays("mine", X, targets("regression"))
    assert repr(made.task) == "regression()"
    assert made.train_y.dtype == np.float32
    assert len(made.test_y) == 7
    with pytest.raises(ValueError, match=r"mine has no classes, its task is regression\(\)"):
        _ = made.classes
    assert repr(fs.data.from_arrays("mine", X, targets("two")).task) == "regression(targets=2)"
    assert repr(fs.data.from_arrays("mine", X, targets("multi-label")).task) == "multi_label(2)"
    number = fs.data.from_arrays("mine", X, np.ones(35), task=tasks.regression())
    assert repr(number.task) == "regression()"
    with pytest.raises(ValueError, match=r"y must be integers \[n\] for .* got int64 \[35, 2\]"):
        fs.data.from_arrays("mine", X, np.full((35, 2), 7))


SMALL = ["--rounds", "2", "--clients", "4", "--seeds", "2", "--no-cache", "--devices", "1"]


@pytest.mark.slow
def test_the_command_learns_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table in units of y, whose best is the lowest; records; pictures."""
    out = tmp_path / "run"
    argv = ["--algo", "fine_tuned", "--compare", "none", "--dataset", "diabetes", *SMALL]
    assert bench.main([*argv, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "score: mse, mean over " in shown
    assert "EMD" not in shown
    assert "%  " not in shown
    summary = json.loads((out / "summary.json").read_text())["fine_tuned"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    means = [line["client_mse"]["mean"] for line in lines]
    assert summary["score"] == "client_mse"
    assert summary["client_mse_best"] == pytest.approx(np.minimum(means[:2], means[2:]).mean())
    assert summary["personal_mse_last"] > 0
    assert {"mse", "mae", "r2", "client_r2", "personal"} <= lines[0].keys()
    config = json.loads((out / "config.json").read_text())
    assert (config["partition"], config["score"], config["model"]) == ("iid", "mse", "linear")
    assert (out / "curves.png").stat().st_size > 10_000


def test_owners_are_the_clients_of_every_task(tmp_path: Path) -> None:
    def dealt(name: str, y: np.ndarray, *flags: str) -> tuple[str, int]:
        owner = np.repeat([0, 1, 2], [5, 10, 15])
        parts: dict[str, Any] = {"x_train": X[:30], "y_train": y[:30]}
        if name == "owned":
            parts |= {"client_train": owner, "client_test": np.zeros(5, int)}
        np.savez(tmp_path / name, x_test=X[30:], y_test=y[30:], **parts)
        argv = ["--algo", "fedavg", "--compare", "none", "--seeds", "1", "--no-cache"]
        setup = build(parse([*argv, "--dataset", str(tmp_path / f"{name}.npz"), *flags]))
        assert (setup.emd is None) == (setup.task.classes is None)
        return setup.sampler, setup.clients

    numbers = targets("regression")
    assert dealt("owned", numbers) == ("natural", 3)
    assert dealt("owned", numbers, "--clients", "3") == ("natural", 3)
    with pytest.raises(
        ValueError, match="--clients must be 3, the number of natural clients, got 4"
    ):
        dealt("owned", numbers, "--clients", "4")
    assert dealt("plain", numbers, "--clients", "4") == ("iid", 4)
    labels = np.arange(35) % 5
    assert dealt("owned", labels) == ("natural", 3)
    assert dealt("owned", labels, "--clients", "5", "--emd", "1.4") == ("emd(1.4)", 5)


BAD = {
    "--score auc": "--score must be one of mse, mae, r2, as the task is regression(), got 'auc'",
    "--emd 1.4": "--partition emd(1.4): labels must be classes, int [n], got float32 [354]",
    "--fedaug 1": "--fedaug is for classes, diabetes is regression()",
    "--algo fedntd": "fedntd: not_true_distillation needs class labels, the task is regression()",
}


@pytest.mark.parametrize("flags", BAD)
def test_the_command_refuses_in_a_line(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = ["--dataset", "diabetes", *SMALL, "--out", str(out), *flags.split(" ")]
    assert bench.main(argv) == 2
    assert BAD[flags] in capsys.readouterr().err
    assert not out.exists()


def test_own_files_of_numbers_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{a},{b},{c}" for a, b, c in zip(range(10), range(10), range(5, 15), strict=True)]
    Path("houses.csv").write_text("\n".join(["size,age,price", *rows]))
    houses = load_dataset("csv:houses.csv,target=price")
    assert (repr(houses.task), houses.test_set) == ("regression()", "a fixed random 20 %")
    assert sorted([*houses.train_y, *houses.test_y]) == list(range(5, 15))
    Path("houses.csv").write_text("\n".join(["size,age,price", "1,2,cheap", "2,3,1"]))
    with pytest.raises(ValueError, match="line 2, column 'price' must be a finite number"):
        load_dataset("csv:houses.csv,target=price")
    with pytest.raises(ValueError, match="must have a file and label=COLUMN or target=COLUMN"):
        load_dataset("csv:houses.csv,target=price,label=age")
    many = targets("multi-label")
    np.savez("tags.npz", x_train=X[:30], y_train=many[:30], x_test=X[30:], y_test=many[30:])
    found = load_dataset("tags.npz")
    assert repr(found.task) == "multi_label(2)"
    assert found.train_y.dtype == bool
