"""A target EMD on any labels, few labels a client, and skew of sizes and features."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_partition import check_complete

from fedjax_sim.data import standardise_global, standardise_local
from fedjax_sim.partition import (
    Partition,
    emd,
    feature_noise,
    feature_rotation,
    label_noise,
    label_sets,
    label_table,
    limit_label_emd,
    parse_sampler,
    partition_from_lists,
    power_law,
    robin_hood,
    shards,
)

# CIFAR-10-LT: 5000 · 100^(-y/9).
LONG_TAIL = np.repeat(np.arange(10), [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50])
LOPSIDED = np.repeat([0, 1], [9500, 500])
BALANCED = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 600))


def largest(labels: Any) -> float:
    """No partition exceeds it: EMD is convex, and these are clients of one label each."""
    return 2 - 2 * float(np.square(np.bincount(labels) / len(labels)).sum())


def labels_per_client(partition: Partition) -> int:
    """The t in its name."""
    return int(partition.name.split("ll(")[1].split(",")[0])


@pytest.mark.parametrize(
    ("labels", "target"), [(LONG_TAIL, 0.4), (LONG_TAIL, 0.97), (LONG_TAIL, 1.4), (LOPSIDED, 0.15)]
)
def test_the_target_is_met_on_unbalanced_labels(labels: Any, target: float) -> None:
    made = [limit_label_emd(labels, 20, emd=target, seed=seed) for seed in range(5)]
    for partition in made:
        check_complete(partition, labels.size, 20)
        assert emd(label_table(labels, partition, 10)) == pytest.approx(target, abs=3 / labels.size)
    # One kind of setting for all seeds.
    assert {labels_per_client(partition) for partition in made} == {1}
    for seed in range(5):
        drawn = robin_hood(labels, 20, emd=target, tolerance=0.005, seed=seed)
        assert emd(label_table(labels, drawn, 10)) == pytest.approx(target, abs=0.01)


@pytest.mark.parametrize(("labels", "target"), [(LONG_TAIL, 1.79), (LOPSIDED, 0.9)])
@pytest.mark.parametrize("sampler", [limit_label_emd, robin_hood])
def test_beyond_the_largest_emd_the_refusal_names_it(
    sampler: Any, labels: Any, target: float
) -> None:
    with pytest.raises(ValueError, match=rf"^emd must .* got {target}$") as caught:
        sampler(labels, 20, emd=target, seed=0)
    named = largest(labels) // 1e-4 / 1e4
    assert f" {named:g} " in str(caught.value)
    partition = sampler(labels, 20, emd=named, seed=0)
    assert emd(label_table(labels, partition, 10)) == pytest.approx(named, abs=0.01)


@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    clients=st.integers(2, 12),
    share=st.floats(0.05, 1.0),
    min_per_class=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_nearest_emd_or_the_bound(
    counts: list[int], clients: int, share: float, min_per_class: int, seed: int
) -> None:
    """Whatever the labels, and with any number of clients: no multiple of the classes is needed."""
    labels = np.repeat(np.arange(len(counts)), counts)
    clients, target = min(clients, labels.size), share * largest(labels)
    refusal = ""
    try:
        partition = limit_label_emd(
            labels, clients, emd=target, min_per_class=min_per_class, seed=seed
        )
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(("emd must be at ", "min_per_class must be in"))
        return
    check_complete(partition, labels.size, clients)
    table = label_table(labels, partition, len(counts))
    # A move of one sample changes the distance by 4/n, another one where it left a client empty.
    assert emd(table) == pytest.approx(target, abs=8 / labels.size)
    assert table.min() >= min_per_class


def test_few_whole_samples_bound_the_emd_from_below() -> None:
    labels = np.arange(40) % 4
    with pytest.raises(
        ValueError, match=r"emd must be at least (0\.\d+|1), .* 13 clients, got"
    ) as e:
        limit_label_emd(labels, 13, emd=0.01, seed=0)
    named = float(str(e.value).split("at least ")[1].split(",")[0])
    found = emd(label_table(labels, limit_label_emd(labels, 13, emd=named, seed=0), 4))
    assert found == pytest.approx(named, abs=4 / 40)


def test_in_turn_takes_the_settings_of_the_thesis() -> None:
    made = [limit_label_emd(BALANCED, 20, emd=1.4, in_turn=True, seed=s) for s in range(4)]
    assert [labels_per_client(partition) for partition in made] == [1, 2, 3, 1]
    assert made[2].name == "emd(1.4, in_turn): ll(3, 1)"
    for partition in made:
        assert emd(label_table(BALANCED, partition, 10)) == pytest.approx(1.4, abs=0.001)
    # One sample of every class each costs ll(3, 1) 2·7/300, more than it may fall short by.
    _, full = parse_sampler("emd(1.4, in_turn, 1)")
    assert [labels_per_client(full(BALANCED, 20, seed)) for seed in range(4)] == [1, 2, 1, 2]
    # On a long tail no second setting reaches 1.4.
    tail = [limit_label_emd(LONG_TAIL, 20, emd=1.4, in_turn=True, seed=s) for s in range(4)]
    assert [labels_per_client(partition) for partition in tail] == [1] * 4


def test_min_per_class_is_taken_only_if_asked_for() -> None:
    plain = limit_label_emd(BALANCED, 20, emd=1.8, seed=0)
    assert np.all((label_table(BALANCED, plain, 10) > 0).sum(axis=1) == 1)
    asked = limit_label_emd(BALANCED, 20, emd=1.7, min_per_class=1, seed=0)
    assert label_table(BALANCED, asked, 10).min() == 1
    assert asked.name.startswith("emd(1.7, min_per_class=1): ll(1, 0.9")
    assert asked.name.endswith(", 1)")


def test_shards_by_hand() -> None:
    """200 shards of 300 of 10 equal labels, as in McMahan et al., at a tenth of the size."""
    partition = shards(BALANCED, 100, seed=0)
    table = label_table(BALANCED, partition, 10)
    check_complete(partition, BALANCED.size, 100)
    assert np.all(np.isin(table, [0, 30, 60]))
    assert np.all(table.sum(axis=1) == 60)
    # A shard is no block of the data's order, and who has it depends on the seed.
    assert np.any(np.diff(partition.lists[0]) > 30)
    assert not np.array_equal(table, label_table(BALANCED, shards(BALANCED, 100, seed=1), 10))
    # Labels of 5 and 7 samples in 4 shards of 3: the second holds two of the one, one of the other.
    odd = np.repeat([0, 1], [5, 7])
    rows = label_table(odd, shards(odd, 4, shards_per_client=1, seed=0), 2).tolist()
    assert sorted(rows) == [[0, 3], [0, 3], [2, 1], [3, 0]]


@given(classes=st.integers(2, 7), clients=st.integers(1, 30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_label_sets_own_their_labels_and_no_others(
    classes: int, clients: int, data: st.DataObject
) -> None:
    t = data.draw(st.integers(-(-classes // clients), classes))
    labels = np.repeat(np.arange(classes), 40 + np.arange(classes))
    partition = label_sets(labels, clients, labels_per_client=t, seed=data.draw(st.integers(0, 9)))
    check_complete(partition, labels.size, clients)
    table = label_table(labels, partition, classes)
    assert np.all((table > 0).sum(axis=1) == t)
    for column in table.T:
        assert np.ptp(column[column > 0]) <= 1


def test_label_sets_are_random_but_for_one_label_in_turns() -> None:
    owners = np.array(
        [
            (label_table(BALANCED, label_sets(BALANCED, 20, labels_per_client=3, seed=s), 10) > 0)
            for s in range(40)
        ]
    ).sum(axis=1)
    assert owners.min() >= 2  # twenty clients take turns at ten labels
    assert owners.mean() == 6
    # Each of the other two labels is one of nine at 18 clients, and of 2 it is owned anyway.
    assert owners.var() == pytest.approx(18 * 2 / 9 * 7 / 9, rel=0.3)


def test_power_law_sizes() -> None:
    sizes = np.sort(power_law(BALANCED, 50, exponent=1.5, seed=0).sizes)[::-1]
    shares = np.arange(1, 51) ** -1.5
    assert sizes - 1 == pytest.approx(shares / shares.sum() * (6000 - 50), abs=1)
    even = power_law(BALANCED, 7, exponent=0, seed=0)
    assert np.ptp(even.sizes) <= 1
    first = [int(power_law(BALANCED, 50, exponent=1.5, seed=s).sizes.argmax()) for s in range(5)]
    assert len(set(first)) > 1


def test_feature_noise_grows_with_the_client() -> None:
    partition = partition_from_lists([range(k, 3000, 3) for k in range(3)])
    x = np.full((3001, 4), 100.0, np.float32)
    noisy = feature_noise(x, partition, sigma=2.0, seed=0)
    assert (noisy.dtype, noisy.shape) == (x.dtype, x.shape)
    spread = [(noisy[own] - 100).std() for own in partition.lists]
    assert spread == pytest.approx([0, 1, 2], rel=0.05)
    assert noisy[3000].tolist() == [100.0] * 4  # nobody's
    assert x.min() == x.max() == 100
    again, other = (feature_noise(x, partition, sigma=2.0, seed=s) for s in (0, 1))
    np.testing.assert_array_equal(again, noisy)
    assert np.any(other != noisy)
    image = feature_noise(x.astype(np.uint8), partition, sigma=2 / 255, seed=0)
    assert image.dtype == np.uint8
    assert image[partition.lists[2]].std() == pytest.approx(np.hypot(2, np.sqrt(1 / 12)), rel=0.05)
    bright = feature_noise(np.full((3000, 4), 255, np.uint8), partition, sigma=0.1, seed=0)
    assert bright.min() > 100  # clipped, not wrapped round


def test_feature_rotation_turns_whole_clients() -> None:
    x = np.random.default_rng(0).integers(0, 255, (11, 3, 3, 2), np.uint8)
    partition = partition_from_lists([[0, 5], [1, 9], [2], [3, 4], [6], [7]])
    turned = feature_rotation(x, partition)
    for client, own in enumerate(partition.lists):
        for i in own:
            np.testing.assert_array_equal(turned[i], np.rot90(x[i], client % 4))
    np.testing.assert_array_equal(turned[[8, 10]], x[[8, 10]])  # nobody's
    half = feature_rotation(x[:, :, :2], partition, groups=2)
    np.testing.assert_array_equal(half[1], x[1, ::-1, :2][:, ::-1])
    np.testing.assert_array_equal(half[2], x[2, :, :2])


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_labels_are_wrong_at_each_clients_rate(kind: Any) -> None:
    y = np.repeat(np.arange(4, dtype=np.int32), 6000)
    partition = partition_from_lists([range(k, 23_999, 3) for k in range(3)])
    rates = [0.0, 0.3, 1.0]
    noisy = label_noise(y, partition, rate=rates, classes=4, kind=kind, seed=0)
    assert (noisy.dtype, noisy[-1]) == (y.dtype, y[-1])  # the last sample is nobody's
    for own, rate in zip(partition.lists, rates, strict=True):
        steps = (noisy[own] - y[own]) % 4
        shares = np.bincount(steps, minlength=4) / len(own)
        wrong = [rate / 3] * 3 if kind == "symmetric" else [rate, 0, 0]
        assert shares == pytest.approx([1 - rate, *wrong], abs=0.02 * (rate > 0))
    again, other, same = (
        label_noise(y, partition, rate=rate, classes=4, kind=kind, seed=seed)
        for rate, seed in ((rates, 0), (rates, 1), (0.0, 0))
    )
    np.testing.assert_array_equal(again, noisy)
    assert np.any(other != noisy)
    np.testing.assert_array_equal(same, y)
    assert y.tolist() == sorted(y)


@pytest.mark.parametrize("kind", [jnp.asarray, np.ndarray.tolist])
def test_arrays_of_jax_and_lists_are_taken(kind: Any) -> None:
    """Which cannot be written to, and have no dtype."""
    clients = partition_from_lists([[0, 2], [1, 3]])
    x, y = np.arange(16, dtype=np.float32).reshape(4, 2, 2), np.array([0, 1, 2, 0])
    for change, plain in (
        (lambda x: feature_noise(x, clients, sigma=1.0, seed=0), x),
        (lambda x: feature_rotation(x, clients), x),
        (lambda y: label_noise(y, clients, rate=0.5, classes=3, seed=0), y),
        (lambda x: standardise_global(x, clients), x),
        (lambda x: standardise_local(x, clients), x),
    ):
        np.testing.assert_allclose(change(kind(plain)), change(plain), rtol=1e-6)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (1.5, "rate must be a number in .* got 1.5"),
        (np.array([0.1] * 3), "or one for each of 2 clients, got "),
        ({"kind": "none"}, "kind must be 'symmetric' or 'pair', got 'none'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"classes": 2}, r"y must be integers \[n\] in 0..1, got \[0 1 2 0\]"),
        ({"partition": Partition(np.arange(4, dtype=np.int32), np.array([0, 2, 4]), repeats=True)},
         "partition must have every sample once: share afterwards"),
    ],
)  # fmt: skip
def test_errors_of_label_noise(rate: Any, message: str) -> None:
    clients = partition_from_lists([[0, 1], [2, 3]])
    call: dict[str, Any] = {"partition": clients, "rate": 0.1, "classes": 3, "seed": 0}
    call |= rate if isinstance(rate, dict) else {"rate": rate}
    with pytest.raises(ValueError, match=message):
        label_noise(np.array([0, 1, 2, 0]), **call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, p: feature_noise(x, p, sigma=-1, seed=0), "sigma must be at least 0 .* got -1"),
        (
            lambda x, p: feature_noise(x.astype(int), p, sigma=1, seed=0),
            "x must be floating point or uint8, got int64",
        ),
        (
            lambda x, p: feature_noise(cast(Any, {"a": x, "b": x}), p, sigma=1, seed=0),
            r"x must be one array, got a pytree with x\['a'\], x\['b'\]",
        ),
        (lambda x, p: feature_rotation(x, p, groups=3), "groups must be 2 or 4, got 3"),
        (lambda x, p: feature_rotation(x, p), r"x must be square images .* got \[4, 2, 3\]"),
        (lambda x, p: feature_rotation(x[:1], p, groups=2), "partition.index must be in 0 to 0"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.zeros((4, 2, 3)), partition_from_lists([[0, 1], [2, 3]]))
