"""Samplers: each sample once, exact margins, known skew, and errors that name the argument."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition import (
    Partition,
    c_score,
    client_emds,
    client_jsds,
    client_kls,
    dirichlet,
    dirichlet_classes,
    draw_partition,
    draw_skew,
    emd,
    iid,
    jsd,
    kl,
    label_table,
    limit_label,
    limit_label_emd,
    ll_settings,
    load_partition,
    parse_sampler,
    partition_from_lists,
    partition_hash,
    save_partition,
    validate_partition,
)
from fedjax_sim.partition.deal import fill_empty

Sampler = Callable[[ArrayLike, int, int], Partition]
BALANCED = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 600))

seeds = st.integers(0, 2**32 - 1)
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60)
alphas = st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e3, 1e308])


def check_complete(partition: Partition, samples: int, clients: int) -> None:
    validate_partition(partition, samples)
    assert np.array_equal(np.sort(partition.index), np.arange(samples))
    assert partition.sizes.size == clients
    assert partition.sizes.min() >= 1
    assert partition.index.dtype == partition.start.dtype == np.int32
    for own in partition.lists:
        assert np.all(np.diff(own) > 0)


def check_seeded(sample: Sampler, labels: ArrayLike, clients: int, seed: int) -> None:
    first, again = sample(labels, clients, seed), sample(labels, clients, seed)
    assert partition_hash(first) == partition_hash(again)
    assert first.name == again.name


@given(labels=label_lists, data=st.data(), seed=seeds, alpha=alphas)
@settings(deadline=None)
def test_every_sample_once_and_no_empty_client(
    labels: list[int], data: st.DataObject, seed: int, alpha: float
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    for spec in ("iid", f"dirichlet({alpha})", f"dirichlet_classes({alpha})"):
        _, sample = parse_sampler(spec)
        partition = sample(labels, clients, seed)
        check_complete(partition, len(labels), clients)
        check_seeded(sample, labels, clients, seed)
        if spec != f"dirichlet({alpha})":
            assert np.ptp(partition.sizes) <= 1


@given(
    classes=st.integers(2, 7),
    t=st.integers(1, 7),
    groups=st.integers(1, 4),
    share=st.sampled_from([0, 0.25, 7 / 9, 1.0]),
    per_class=st.integers(0, 40),
    seed=seeds,
)
@settings(max_examples=200)
def test_limit_label_margins_are_exact(
    classes: int, t: int, groups: int, share: float, per_class: int, seed: int
) -> None:
    t = min(t, classes)
    clients = groups * classes
    owners = groups * t
    counts = owners + per_class + np.arange(classes)  # not balanced; round(f n_y) is checked too
    labels = np.repeat(np.arange(classes), counts)
    owned = np.rint(share * counts).astype(int)
    partition = limit_label(labels, clients, labels_per_client=t, fraction=share, seed=seed)
    check_complete(partition, labels.size, clients)
    table = label_table(labels, partition, classes)
    assert np.array_equal(table.sum(axis=0), counts)
    for y in range(classes):
        column = np.sort(table[:, y])[::-1]
        low, extra = divmod(int(counts[y] - owned[y]), clients)
        each, more = divmod(int(owned[y]), owners)
        # An owner has its part of the owned samples, plus an even part like everybody's.
        assert column[:owners].max() <= each + (more > 0) + low + (extra > 0)
        assert column[:owners].min() >= each + low
        assert np.all(np.isin(column[owners:], [low, low + 1]))
    if share == 1.0:
        assert np.all((table > 0).sum(axis=1) == t)
        assert np.all((table > 0).sum(axis=0) == owners)


@pytest.mark.parametrize(("t", "f"), [(1, 7 / 9), (2, 0.875), (3, 1.0), (5, 0.5), (10, 1.0)])
@pytest.mark.parametrize("clients", [10, 20, 100])
def test_limit_label_has_the_emd_of_the_formula(t: int, f: float, clients: int) -> None:
    partition = limit_label(BALANCED, clients, labels_per_client=t, fraction=f, seed=3)
    table = label_table(BALANCED, partition, 10)
    assert emd(table) == pytest.approx(2 * f - 2 * t * f / 10, abs=0.03)
    assert emd(table) == pytest.approx(c_score(table), abs=0.01)
    assert np.ptp(partition.sizes) <= t


def test_limit_label_owner_sets_depend_on_the_seed() -> None:
    tables = [
        label_table(BALANCED, limit_label(BALANCED, 20, labels_per_client=2, seed=s), 10) > 0
        for s in range(3)
    ]
    assert not np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[1], tables[2])


def test_min_per_class_gives_everybody_every_class_and_takes_it_from_the_owners() -> None:
    partition = limit_label(BALANCED, 20, labels_per_client=3, min_per_class=2, seed=0)
    table = label_table(BALANCED, partition, 10)
    check_complete(partition, BALANCED.size, 20)
    assert table.min() == 2
    assert np.all((table == 2).sum(axis=1) == 7)


def test_limit_label_counts_only_the_classes_that_occur() -> None:
    labels = np.repeat([3, 7, 9], 20)
    partition = limit_label(labels, 3, labels_per_client=1, seed=0)
    assert np.all((label_table(labels, partition, 10) > 0).sum(axis=1) == 1)


def test_settings_of_the_thesis() -> None:
    expected = [(1, pytest.approx(7 / 9)), (2, pytest.approx(7 / 8)), (3, 1.0)]
    assert ll_settings(1.4, 10) == expected
    assert ll_settings(1.4, 10, clients=20) == expected
    assert ll_settings(1.4, 10, clients=5) == expected[1:2]  # only t = 2, 4, … divides


@given(classes=st.integers(2, 30), data=st.data())
def test_ll_settings_solve_the_formula(classes: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(1, classes - 1))
    target = 2 - 2 * t / classes  # reached by ll(t, 1), whatever the rounding
    found = ll_settings(target, classes)
    assert (t, 1.0) in [(s, round(f, 9)) for s, f in found]
    for s, f in found:
        assert 0 < f <= 1
        assert 2 * f - 2 * s * f / classes == pytest.approx(target)


def test_dirichlet_has_the_emd_of_the_thesis() -> None:
    emds = [
        emd(label_table(BALANCED, dirichlet(BALANCED, 10, alpha=0.5, seed=s), 10))
        for s in range(200)
    ]
    assert np.mean(emds) == pytest.approx(0.86, abs=0.02)
    assert np.std(emds) == pytest.approx(0.059, abs=0.02)


@pytest.mark.parametrize("sampler", [dirichlet, dirichlet_classes])
def test_dirichlet_extremes(sampler: Callable[..., Partition]) -> None:
    for clients in (10, 100):
        skewed = sampler(BALANCED, clients, alpha=1e-3, seed=0)
        check_complete(skewed, BALANCED.size, clients)
        assert emd(label_table(BALANCED, skewed, 10)) > 1.2
        even = sampler(BALANCED, clients, alpha=1e3, seed=0)
        check_complete(even, BALANCED.size, clients)
        assert emd(label_table(BALANCED, even, 10)) < 0.4


def test_dirichlet_classes_draws_what_one_by_one_draws() -> None:
    """Two classes, two clients: the first client's mix has the law of Dir(1) clipped by stock."""
    labels = np.repeat([0, 1], 20)
    mixes = np.array(
        [
            label_table(labels, dirichlet_classes(labels, 2, alpha=1.0, seed=s), 2)[0, 0]
            for s in range(2000)
        ]
    )
    # Beta-binomial(20, 1, 1) is uniform on 0 … 20; a shuffled client 0 keeps it (20 - x is too).
    assert mixes.mean() == pytest.approx(10, abs=0.5)
    assert mixes.std() == pytest.approx(np.sqrt((21**2 - 1) / 12), abs=0.3)


def test_iid_is_close_to_no_skew() -> None:
    assert emd(label_table(BALANCED, iid(BALANCED, 10, seed=0), 10)) < 0.15


def test_measures_by_hand() -> None:
    table = np.array([[3, 1], [0, 4], [0, 8]])  # p = 3/16, 13/16
    assert client_emds(table).tolist() == [2 * (3 / 4 - 3 / 16), 2 * 3 / 16, 2 * 3 / 16]
    assert emd(table) == pytest.approx((4 * 1.125 + 12 * 0.375) / 16)
    assert c_score(table) == pytest.approx((1.125 + 0.375 + 0.375) / 3)


@pytest.mark.parametrize("measure", [client_emds, client_kls, client_jsds, emd, kl, jsd, c_score])
def test_measures_refuse_empty_clients(measure: Callable[[ArrayLike], object]) -> None:
    with pytest.raises(ValueError, match=r"every client a sample, got none for \[1\]"):
        measure([[1, 2], [0, 0]])
    with pytest.raises(ValueError, match=r"table must be counts"):
        measure([1, 2])


def test_save_load_hash_round_trip(tmp_path: Path) -> None:
    partition = iid(BALANCED, 7, seed=5)
    path = tmp_path / "new" / "folder" / "p.npz"
    save_partition(path, partition)
    save_partition(path, partition)  # over an old file
    loaded = load_partition(path)
    assert np.array_equal(loaded.index, partition.index)
    assert np.array_equal(loaded.start, partition.start)
    assert loaded.name == "iid"
    assert loaded.index.dtype == np.int32
    assert partition_hash(loaded) == partition_hash(partition)
    assert partition_hash(iid(BALANCED, 7, seed=6)) != partition_hash(partition)
    big_endian = Partition(partition.index.astype(">i4"), partition.start.astype(">i8"))
    assert partition_hash(big_endian) == partition_hash(partition)
    assert [p.name for p in path.parent.iterdir()] == ["p.npz"]  # nothing is left aside


def test_file_knows_its_labels(tmp_path: Path) -> None:
    partition, path = iid(BALANCED, 7, seed=5), tmp_path / "p.npz"
    other = np.roll(BALANCED, 1)
    save_partition(path, partition, BALANCED, "mine")
    assert partition_hash(load_partition(path, BALANCED.tolist())) == partition_hash(partition)
    load_partition(path)
    n = f"{len(BALANCED):,}"
    with pytest.raises(ValueError, match=f"deals the {n} samples of mine, not the {n} of yours"):
        load_partition(path, other, "yours")
    save_partition(path, partition)  # says nothing of its labels
    load_partition(path, other)
    np.savez(path, index=partition.index, start=partition.start, name="as of before")
    assert load_partition(path, other).name == "as of before"


def test_load_refuses_what_is_no_partition(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    with pytest.raises(FileNotFoundError):
        load_partition(path)
    for content in (b"", b"not a zip"):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"partition that save_partition wrote, got .*p\.npz.$"
        ):
            load_partition(path)
    texts = {"index": np.array(["0", "1"]), "start": np.array([0, 1, 2]), "name": "mine"}
    for arrays in ({"other": np.arange(3)}, texts):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="must be a partition that save_partition wrote"):
            load_partition(path)


def _partition(index: list[int], start: list[int]) -> Partition:
    return Partition(np.array(index, np.int32), np.array(start, np.int32))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (_partition([0, 1], [0, 1]), "partition.start must run from 0 to 2, got"),
        (_partition([0, 1], [0, 2, 1, 2]), "must not decrease"),
        (_partition([0, 5], [0, 1, 2]), "partition.index must be in 0 to 2, got 5"),
        (_partition([0, -1], [0, 1, 2]), "partition.index must be in 0 to 2, got -1"),
        (_partition([1, 1], [0, 1, 2]), "must have each sample once, got 1 more than once"),
        (_partition([0, 1], [0, 2, 2, 2]), "clients 1, 2 have no samples; use fewer clients"),
    ],
)
def test_validation_names_what_is_wrong(partition: Partition, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_partition(partition, samples=3)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0], [0.5]], r"lists must have integer positions .* got float64 \[1\] for client 1"),
        ([[[0]]], r"lists must have integer positions .* got int64 \[1, 1\] for client 0"),
    ],
)
def test_lists_that_are_no_positions(lists: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_from_lists(lists)


def test_copies_and_shared_samples_are_checked_client_by_client() -> None:
    def check(*lists: list[int]) -> None:
        made = partition_from_lists(lists)
        validate_partition(Partition(made.index, made.start, repeats=True), samples=3)

    check([0, 1, 3, 3], [1, 0])  # copies of 0, and samples that two clients have
    with pytest.raises(ValueError, match="must have each sample once, got 1, 2 more than once"):
        check([0, 1, 1], [0, 2, 2], [1, 1])


def test_the_largest_clients_give_to_the_empty_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = rng.multinomial(1, rng.dirichlet(np.full(36, 0.05)), 20).sum(0).reshape(12, 3)
        expected = table.copy()
        for empty in np.flatnonzero(~expected.any(axis=1)):
            giver = expected.sum(axis=1).argmax()
            label = expected[giver].argmax()
            expected[giver, label] -= 1
            expected[empty, label] += 1
        fill_empty(table)
        np.testing.assert_array_equal(table, expected)


def test_a_sample_may_stay_unused() -> None:
    validate_partition(partition_from_lists([[2], [0]]), samples=9)


def test_label_table_refuses_labels_out_of_range() -> None:
    with pytest.raises(ValueError, match="labels must be in 0 to 2, got 0 to 3"):
        label_table([0, 3], partition_from_lists([[0, 1]]), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: iid(y, 0, seed=0), "clients must be in 1 to 40, .*, got 0"),
        (lambda y: iid(y, 41, seed=0), "clients must be in 1 to 40, the number of samples, got 41"),
        (lambda y: iid(y, 4, seed=-1), "seed must be at least 0, got -1"),
        (
            lambda y: dirichlet(y * 0.5, 4, alpha=1, seed=0),
            r"labels must be classes, int \[n\], got float64 \[40\]",
        ),
        (lambda y: dirichlet(y, 4, alpha=0, seed=0), "alpha must be positive and finite, got 0"),
        (
            lambda y: limit_label(y, 4, labels_per_client=5, seed=0),
            "labels_per_client must be .* 5",
        ),
        (
            lambda y: limit_label(y, 4, labels_per_client=1, fraction=1.5, seed=0),
            "fraction must be in 0 to 1, got 1.5",
        ),
        (
            lambda y: limit_label(y, 6, labels_per_client=1, seed=0),
            r"with t=1 use 4 or 8 clients, or with 6 clients use t in \[2, 4\]",
        ),
        (
            lambda y: limit_label(y, 4, labels_per_client=1, min_per_class=3, seed=0),
            "min_per_class must be in 0 to 2 for 4 clients, as the rarest class has 10 .* got 3",
        ),
        (
            lambda y: limit_label(np.r_[y[:8], np.zeros(40, int)], 16, labels_per_client=1, seed=0),
            "clients must all get samples, got 16, of which 6 are empty .* use at most 8 clients",
        ),
        (
            lambda y: limit_label_emd(y, 4, emd=1.6, seed=0),
            r"emd must be at most 1.5 for these labels and 4 clients, by ll\(1, 1\), got 1.6",
        ),
        (lambda y: limit_label_emd(y, 4, emd=0, seed=0), "emd must be above 0 .* got 0"),
        (lambda y: limit_label_emd(y, 1, emd=1, seed=0), "clients must be at least 2 .* got 1"),
        (lambda y: ll_settings(0, 10), "emd must be above 0 .* at most 1.8 .* 10 classes, got 0"),
        (lambda y: ll_settings(1, 1), "classes must be at least 2, got 1"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(
    call: Callable[[NDArray[np.int64]], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.arange(40) % 4)


@pytest.mark.parametrize("argument", ["clients", "seed", "labels_per_client", "min_per_class"])
def test_a_number_that_is_no_integer_is_named(argument: str) -> None:
    arguments = {"clients": 4, "seed": 0, "labels_per_client": 1, "min_per_class": 0}
    with pytest.raises(TypeError, match=rf"{argument} must be an integer, got 1.5"):
        limit_label(np.arange(40) % 4, **(arguments | {argument: 1.5}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        *[(text, "iid or ll(") for text in ("", "0.5", "some file")],
        *[(text, "ll(labels_per_client, ") for text in ("lll(2, 1)", "ll", "ll(2.5, 1)")],
        *[(text, "ll(labels_per_client, ") for text in ("ll(2, 1/0)", "ll(2, x)", "ll(2,,1)")],
        *[(text, "dirichlet(alpha, ") for text in ("dirichlet", "dirichlet()", "DIR(0.1")],
        *[("iid iid", "iid"), ("iid(3)", "iid"), ("emd(1.4", "emd(emd, ")],
        *[("ll(2, 1, 1, 1)", "ll("), ("dirichlet(1, 2, 3)", "dirichlet(alpha, ")],
    ],
)
def test_a_mistyped_sampler_comes_with_its_form(text: str, form: str) -> None:
    message = re.escape(f"sampler {text!r} must be written {form}")
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_sampler(text)


@pytest.mark.parametrize("draw", [draw_partition, draw_skew])
def test_figures_are_written(draw: Callable[..., None], tmp_path: Path) -> None:
    tables = [label_table(BALANCED, iid(BALANCED, k, seed=0), 10) for k in (5, 30)]
    path = tmp_path / "pictures" / "p.png"
    draw(tables, path, ["a", "b"])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="titles must be one for each of 2 tables, got 1"):
        draw(tables, path, ["a"])


def test_tables_of_a_figure_have_the_same_classes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same classes"):
        draw_partition([np.ones((2, 3)), np.ones((2, 4))], tmp_path / "p.png", ["a", "b"])


@pytest.mark.slow
def test_import_loads_nothing_heavy() -> None:
    diagnostic = "import sys, fedjax_sim.data, fedjax_sim.partition; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", diagnostic], capture_output=True, text=True, check=True
    )
    assert not {"matplotlib", "sklearn", "tensorflow_datasets"} & set(run.stdout.split())
