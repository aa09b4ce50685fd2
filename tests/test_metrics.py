"""Scores against scikit-learn, and evaluation against a loop over samples and clients."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import sklearn
from conftest import Federation, assert_trees, known
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

import fedjax_sim as fs
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.partition import Partition, partition_from_lists
from fedjax_sim.run.metrics import (
    Counts,
    Scores,
    client_accuracy,
    evaluate,
    set_scores,
    spread,
)
from fedjax_sim.tasks.sums import WIN_BITS, mean_known, rank_wins, tally

CLIENTS, ROOM = 4, 40  # every case fits in one compiled program: the rest is padding
some = settings(max_examples=80, deadline=None, derandomize=True)
TIED = np.array([-2.0, -0.5, 0.0, 0.5, 3.0], np.float32)

given_logits = fs.Model(
    init=lambda key: fs.Variables((), ()),
    apply=lambda variables, x, *, train, mask=None, key=None: (x, ()),
)


ranked_pairs = jax.jit(functools.partial(rank_wins, groups=CLIENTS))


@functools.cache
def counter(classes: int) -> Any:
    execution = fs.make_execution(devices=2)
    task = fs.tasks.classification(classes, auc=True)
    apply = given_logits.apply
    return jax.jit(
        lambda examples: evaluate(apply, task, execution, fs.Variables((), ()), examples)
    )


def scored(logits: np.ndarray, labels: np.ndarray, sizes: list[int]) -> Any:
    """Scores of samples that lie client by client, in a buffer of fixed length."""
    n, classes = logits.shape
    x = np.concatenate([logits, np.full((ROOM - n, classes), 7, np.float32)])
    y = np.concatenate([labels, np.zeros(ROOM - n, int)])
    start = np.cumsum([0, *sizes]).astype(np.int32)
    examples = eval_set(x, y, Partition(np.arange(ROOM, dtype=np.int32), start))
    task = fs.tasks.classification(classes, auc=True)
    return set_scores(task, jax.tree.map(np.asarray, counter(classes)(examples)))


def auc_limits(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """By scikit-learn: of class 1 of two, else the mean over the classes that can be ranked.

    The rounding of log p decides whether scores of more than two classes tie: between the limits
    each pair that lies within it is lost, or won.
    """
    if logits.shape[1] == 2:
        columns, rounding = {1: logits[:, 1] - logits[:, 0]}, 0.0
    else:
        log_p = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
        columns, rounding = dict(enumerate(log_p.T)), 1e-5
    known = [
        [
            sk.roc_auc_score(labels == c, scores + sign * rounding * (labels == c))
            for sign in (-1, 1)
        ]
        for c, scores in columns.items()
        if 0 < (labels == c).sum() < len(labels)
    ]
    low, high = np.mean(known, axis=0) if known else (math.nan, math.nan)
    return low, high


def check(scores: Scores, logits: np.ndarray, labels: np.ndarray) -> None:
    """One group's scores against scikit-learn's."""
    if not len(labels):
        assert np.isnan(list(scores.values())).all()
        return
    p = scipy.special.softmax(logits.astype(np.float64), axis=1)
    answers = logits.argmax(axis=1)
    f1 = sk.f1_score(labels, answers, average="weighted", zero_division=0)
    loss = sk.log_loss(labels, p, labels=range(logits.shape[1]))
    assert scores.accuracy == pytest.approx(sk.accuracy_score(labels, answers), abs=1e-6)
    assert scores.f1 == pytest.approx(f1, abs=1e-6)
    assert scores.loss == pytest.approx(loss, rel=2e-6, abs=1e-6)
    low, high = auc_limits(logits, labels)
    auc = float(known(scores.auc))
    assert math.isnan(auc) == math.isnan(low)
    assert math.isnan(low) or low - 1e-6 <= auc <= high + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 5])
@some
@given(st.data())
def test_scores_are_those_of_scikit_learn(classes: int, data: st.DataObject) -> None:
    """Ties, groups of one class, classes that are never answered, clients without samples."""
    sizes = data.draw(st.lists(st.integers(0, 10), min_size=CLIENTS, max_size=CLIENTS))
    sizes[data.draw(st.integers(0, CLIENTS - 1))] = 1  # at least one sample, at most ROOM
    n = sum(sizes)
    present = data.draw(st.integers(1, classes))
    labels = np.array(data.draw(st.lists(st.integers(0, present - 1), min_size=n, max_size=n)))
    any_float = st.floats(-8, 8, width=32, allow_subnormal=False)
    value = data.draw(st.sampled_from([st.sampled_from(TIED.tolist()), any_float]))
    values = data.draw(st.lists(value, min_size=n * classes, max_size=n * classes))
    logits = np.array(values, np.float32).reshape(n, classes)

    out = scored(logits, labels, sizes)
    ends = np.cumsum(sizes)
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        check(out.pooled, logits, labels)
        for k, (first, last) in enumerate(zip(ends - sizes, ends, strict=True)):
            own = Scores({name: values[k] for name, values in out.by_client.items()})
            check(own, logits[first:last], labels[first:last])


@some
@given(st.data())
def test_pairs_in_order_are_those_of_scikit_learn(data: st.DataObject) -> None:
    """Any scores, exactly: of one group, of several, with ties."""
    size = st.integers(1, ROOM)
    value = data.draw(
        st.sampled_from([st.integers(-2, 2), st.floats(-1e3, 1e3, width=32, allow_subnormal=False)])
    )
    n = data.draw(size)
    score = np.zeros(ROOM, np.float32)
    score[:n] = data.draw(st.lists(value, min_size=n, max_size=n))
    positive = np.array(data.draw(st.lists(st.booleans(), min_size=ROOM, max_size=ROOM)))
    group = np.full(ROOM, CLIENTS, np.int32)  # padding
    group[:n] = data.draw(st.lists(st.integers(0, CLIENTS - 1), min_size=n, max_size=n))
    wins = np.asarray(ranked_pairs(score, positive, group), np.int64)
    for g in range(CLIENTS):
        own, hits = score[group == g], positive[group == g]
        pairs = hits.sum() * (~hits).sum()
        expected = sk.roc_auc_score(hits, own) * pairs if pairs else 0
        assert (wins[g, 0] + (wins[g, 1] << WIN_BITS)) / 2 == pytest.approx(expected, abs=1e-6)


def test_pairs_are_counted_exactly_past_32_bits() -> None:
    rng = np.random.default_rng(0)
    n = 300_000
    score = rng.integers(0, 1000, n).astype(np.float32)
    positive, group = rng.random(n) < 0.6, np.sort(rng.integers(0, 3, n)) // 2  # 200,000 in group 0
    out = jax.jit(lambda *a: rank_wins(*a, groups=2))(score, positive, group.astype(np.int32))
    assert out.dtype == jnp.uint32
    for g in range(2):
        own = group == g
        negatives = np.sort(score[own & ~positive])
        hits = score[own & positive]
        twice = sum(np.searchsorted(negatives, hits, side).sum() for side in ("left", "right"))
        low, high = np.asarray(out[g], np.int64)
        assert low + (high << WIN_BITS) == twice
    assert twice > 0
    assert np.asarray(out, np.int64)[0, 1] << WIN_BITS > 2**32


def test_counts_are_exact_where_float32_is_not() -> None:
    """2**24 + 1 samples of one cell: a float32 counter would stop one short."""
    n = 2**24 + 1
    labels = jnp.zeros(n, jnp.int32)
    t = jax.jit(lambda a: tally(a, a, a, groups=1, classes=1))(labels)
    assert (int(t.correct[0, 0]), int(t.predicted[0, 0]), int(t.total[0, 0])) == (n, n, n)


def numpy_scores(model: fs.Model, variables: Any, examples: EvalSet, run: int) -> Any:
    """Clients one by one, by scikit-learn."""
    index, start = np.atleast_2d(examples.index), np.atleast_2d(examples.start)
    index, start = index[run % len(index)], start[run % len(start)]
    found = []
    for first, last in itertools.pairwise(start):
        rows = index[first:last]
        if len(rows):
            logits, _ = model.apply(variables, jnp.asarray(examples.x)[rows], train=False)
            labels = np.asarray(examples.y)[rows]
            answers = np.asarray(logits).argmax(axis=1)
            f1 = sk.f1_score(labels, answers, average="weighted", zero_division=0)
            found.append((np.mean(labels == answers), f1))
        else:
            found.append((math.nan, math.nan))
    return np.array(found).T


@pytest.mark.slow
def test_by_client_is_a_loop_over_clients(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """Lists that are ragged over runs and clients; the test set of each run is its own."""
    x, y = federation.test
    lists: list[list[Any]] = [
        [range(0, 50), range(60, 61), range(70, 130)],
        [range(100, 203), range(0, 7)],
        [range(5, 30), range(30, 31), [2], range(40, 199)],
    ]
    examples = eval_set(x, y, [partition_from_lists(own) for own in lists])
    model = models["logistic"]
    execution = fs.make_execution(devices=4)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), epochs=2)
    algorithm = fs.fedavg(local, clients_per_round=4).on(execution)
    result = fs.simulate(
        algorithm, model, federation.data, examples,
        rounds=2, classes=3, seeds=(0, 1, 2), validation=federation.test, execution=execution,
    )  # fmt: skip
    last = result.evaluations[-1]
    for r in range(3):
        variables = jax.tree.map(lambda a, r=r: a[r], result.variables)
        accuracy, f1 = numpy_scores(model, variables, examples, r)
        by_client = known(last.test.by_client)
        np.testing.assert_allclose(by_client.accuracy[r], accuracy, atol=1e-12)
        np.testing.assert_allclose(by_client.f1[r], f1, atol=1e-6)
        assert np.isnan(by_client.accuracy[r]).sum() == 4 - len(lists[r])
        assert last.test.reported.accuracy[r] == pytest.approx(np.nanmean(accuracy))
        assert last.total[r].sum() == sum(map(len, lists[r]))
        logits, _ = model.apply(variables, jnp.asarray(x), train=False)
        right = np.mean(np.asarray(logits).argmax(axis=1) == y)
        assert known(last.validation).pooled.accuracy[r] == pytest.approx(right)
    assert known(last.validation).by_client is None
    assert "auc" not in last.test.pooled
    assert result.xla_programs <= 4


@pytest.mark.slow
def test_a_test_set_is_the_same_in_any_form(
    federation: Federation, models: dict[str, fs.Model]
) -> None:
    """(x, y); one list for all runs; one for each; by client."""
    x, y = federation.test
    n = len(y)
    index = np.arange(n, dtype=np.int32)
    whole, cut = (Partition(index, np.array(at, np.int32)) for at in ([0, n], [0, 9, 80, n]))
    model, execution = models["logistic"], fs.make_execution(devices=1)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05))
    algorithm = fs.fedavg(local, clients_per_round=4).on(execution)
    sets = (eval_set(x, y, form) for form in (whole, [whole, whole], cut))
    forms: list[Any] = [(x, y), *sets]
    pooled = []
    for test in forms:
        result = fs.simulate(
            algorithm, model, federation.data, test,
            rounds=1, classes=3, seeds=(0, 1), auc=True, execution=execution,
        )  # fmt: skip
        pooled.append(result.evaluations[0].test.pooled)
        assert (result.evaluations[0].test.by_client is None) == (test is not forms[-1])
    for other in pooled[1:]:
        assert_trees(dict(pooled[0]), dict(other), rtol=1e-6)
    assert np.isfinite(known(pooled[0].auc)).all()


@pytest.mark.slow
def test_validation_chooses_the_round(federation: Federation, models: dict[str, fs.Model]) -> None:
    x, y = federation.test
    half = np.arange(len(y)) < 100
    model, execution = models["logistic"], fs.make_execution(devices=1)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.3, momentum=0.9), batch_size=4)
    result = fs.simulate(
        fs.fedavg(local, clients_per_round=2).on(execution), model, federation.data,
        (x[half], y[half]), rounds=8, classes=3, seeds=np.arange(3),
        validation=(x[~half], y[~half]),
    )  # fmt: skip
    assert result.accuracy.shape == (8, 3)
    for r, score in enumerate(result.validated("f1", by_client=False)):
        validation = [known(e.validation).pooled.f1[r] for e in result.evaluations]
        assert score == result.evaluations[int(np.argmax(validation))].test.pooled.f1[r]
    assert (
        result.validated("f1", by_client=False) != result.series("f1", by_client=False)[-1]
    ).any()
    with pytest.raises(ValueError, match="no test set by client"):
        result.series("accuracy", by_client=True)
    with pytest.raises(ValueError, match=r"must be one of accuracy, f1, loss, .* got 'auc'"):
        result.series("auc", by_client=False)


def test_samples_of_data_and_sets_lie_on_a_device_once(federation: Federation) -> None:
    from fedjax_sim.run.programs import Programs
    from fedjax_sim.run.runner import Runner

    data = federation.data
    sets = tuple(eval_set(data.x, data.y, partition_from_lists([rows])) for rows in ([0, 1], [2]))
    execution = fs.make_execution(devices=1)
    model = fs.models.logistic((6,), 3)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
    algorithm = fs.fedavg(local, clients_per_round=1).on(execution)
    programs = Programs(algorithm, model, federation.task, data, sets, 1, 1)
    on_device, examples = Runner(programs)._inputs
    placed = [on_device.x, *(s.x for s in examples)]
    assert len({a.unsafe_buffer_pointer() for a in placed}) == 1


def test_means_leave_out_what_is_unknown() -> None:
    assert mean_known(np.array([[0.5, np.nan, 1.0]])).tolist() == [0.75]
    same = dict.fromkeys(("mean", "min", "p10", "p90", "max"), 2)
    unknown = spread(np.array([np.nan]))
    assert all(math.isnan(unknown[name]) for name in ("std", *same))
    assert spread(np.array([np.nan, 2.0])) == same | {"std": 0, "clients": 1}


def test_a_class_that_was_not_tested_is_unknown_and_not_wrong() -> None:
    correct, count = np.array([3, 0, 0]), np.array([4, 2, 0])
    table = np.array([[10, 0, 90], [1, 1, 0], [0, 5, 0], [0, 0, 7], [0, 0, 0]])
    expected = [3 / 4, 3 / 8, 0, math.nan, math.nan]
    np.testing.assert_allclose(client_accuracy(correct, count, table), expected, rtol=1e-12)


def test_counts_of_a_single_client_have_no_second_view() -> None:
    examples = eval_set(np.eye(3, dtype=np.float32), [0, 1, 2])
    counts: Counts = counter(3)(examples)
    assert counts.by_client is None
    assert counts.pooled.own.correct.tolist() == [1, 1, 1]


def test_labels_of_each_fold_are_its_own() -> None:
    none = Partition(np.zeros(0, np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="at least one sample"):
        eval_set(np.zeros((3, 2)), [0, 1, 0], [partition_from_lists([[0, 1]]), none])
    with pytest.raises(ValueError, match=r"partition.index must be in 0 to 2, got 3"):
        eval_set(np.zeros((3, 2)), [0, 1, 0], partition_from_lists([[3]]))
    with pytest.raises(ValueError, match="as many rows, got 3 and 2"):
        eval_set(np.zeros((3, 2)), [0, 1])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "test runs": (
        {"test": lambda x, y: eval_set(x, y, [partition_from_lists([[0]])] * 3)},
        r"test.start has 3 lists of clients, one for each run, but seeds has 2 runs",
    ),
    "validation runs": (
        {"validation": lambda x, y: eval_set(x, y, [partition_from_lists([[0]])])},
        r"validation.start has 1 lists",
    ),
    "test shape": (
        {"test": lambda x, y: (x[:, :5], y)},
        r"test.x must have samples of shape \(6,\) as the clients have, got \(5,\)",
    ),
    "no samples": ({"test": lambda x, y: (x[:0], y[:0])}, "at least one sample"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sets_are_refused(
    federation: Federation, models: dict[str, fs.Model], case: str
) -> None:
    change, message = BAD[case]
    sets = {"test": federation.test} | {k: make(*federation.test) for k, make in change.items()}
    local = fs.local_sgd(fs.empirical_risk(models["logistic"]), optax.sgd(0.1))
    with pytest.raises(ValueError, match=message):
        fs.simulate(
            fs.fedavg(local, clients_per_round=2), models["logistic"], federation.data,
            rounds=1, classes=3, seeds=(0, 1), **sets,
        )  # fmt: skip
