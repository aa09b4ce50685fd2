"""Measures against other definitions and libraries; the report's text, numbers and pictures."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score

from fedjax_sim.partition import (
    c_score,
    client_emds,
    client_jsds,
    client_kls,
    emd,
    jsd,
    kl,
    label_table,
    parse_sampler,
    partition_from_lists,
    partition_hash,
    size_statistics,
    skew_report,
)

BALANCED = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 600))


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    clients, classes = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cells = st.lists(st.integers(0, 9), min_size=classes, max_size=classes)
    rows = st.lists(cells.filter(any), min_size=clients, max_size=clients)
    return np.array(draw(rows))


@given(table=tables())
def test_divergences_are_scipys(table: np.ndarray) -> None:
    pooled = table.sum(axis=0)
    present = pooled > 0
    np.testing.assert_allclose(
        client_kls(table), [entropy(row[present], pooled[present]) for row in table], atol=1e-12
    )
    np.testing.assert_allclose(
        client_jsds(table), [jensenshannon(row, pooled) ** 2 for row in table], atol=1e-9
    )
    assert jsd(table) == pytest.approx(
        np.average(client_jsds(table), weights=table.sum(axis=1)), abs=1e-12
    )


@given(table=tables())
def test_pooled_kl_is_the_mutual_information_of_client_and_label(table: np.ndarray) -> None:
    client, label = (
        np.repeat(place, table.ravel()) for place in np.indices(table.shape).reshape(2, -1)
    )
    assert kl(table) == pytest.approx(mutual_info_score(client, label), abs=1e-9)


@given(table=tables(), seed=st.integers(0, 99))
def test_measures_ignore_order_and_vanish_without_skew(table: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, classes = table.shape
    shuffled = table[rng.permutation(clients)][:, rng.permutation(classes)]
    for measure in (emd, c_score, kl, jsd):
        assert measure(shuffled) == pytest.approx(measure(table), abs=1e-12)
        assert measure(np.outer([1, 2, 5], table[0])) == pytest.approx(0, abs=1e-12)
    # Pinsker: each distance bounds the other from one side.
    assert np.all(client_emds(table) ** 2 <= 2 * client_kls(table) + 1e-9)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_size_statistics_by_their_definitions(sizes: list[int]) -> None:
    n = np.array(sizes)
    found = size_statistics(sizes)
    assert found[:2] == (n.min(), n.max())
    assert found[2] == pytest.approx(n.mean())
    assert found.std == pytest.approx(np.sqrt(np.mean((n - n.mean()) ** 2)))
    gaps = np.abs(n[:, None] - n).sum()
    assert found.gini == pytest.approx(gaps / (2 * n.size**2 * n.mean()), abs=1e-12)


def test_size_statistics_refuse_what_has_no_mean() -> None:
    for sizes in ([], [0, 0], [-1, 3], [[1, 2]]):
        with pytest.raises(ValueError, match="sizes must be samples per client"):
            size_statistics(sizes)


def test_report_refuses_empty_clients() -> None:
    with pytest.raises(ValueError, match=r"every client a sample, got none for \[1\]"):
        skew_report([0, 1], partition_from_lists([[0, 1], []]), 2)
    with pytest.raises(ValueError, match=r"every client a sample with a label, got none for \[1\]"):
        skew_report([0, 1, -1], partition_from_lists([[0, 1], [2]]), 2)


def test_report_has_the_measures_of_its_table() -> None:
    partition = parse_sampler("dirichlet(0.3)")[1](BALANCED, 30, 0)
    report = skew_report(BALANCED, partition, 10)
    numbers = report.as_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    table = np.array(numbers["per_client"]["table"])
    assert np.array_equal(table, label_table(BALANCED, partition, 10))
    assert numbers["emd"] == emd(table)
    assert (
        numbers["c_score"] == c_score(table) == pytest.approx(np.mean(numbers["per_client"]["emd"]))
    )
    assert (numbers["kl"], numbers["jsd"]) == (kl(table), jsd(table))
    assert numbers["sizes"] == size_statistics(partition.sizes)._asdict()
    assert numbers["hash"] == partition_hash(partition)
    assert (numbers["clients"], numbers["classes"], numbers["samples"]) == (30, 10, 6000)
    assert numbers["expected_emd"] == pytest.approx(1.07, abs=0.02)


def test_report_text_is_one_aligned_table() -> None:
    partition = parse_sampler("ll(1, 7/9)")[1](BALANCED, 20, 0)
    report = skew_report(BALANCED, partition, 10)
    lines = report.text().splitlines()
    assert lines[0].startswith("ll(1, 0.777778): 6,000 samples of 10 classes at 20 clients, sha256")
    assert {len(line) for line in lines[1:7]} == {len(lines[1])}
    by_name = {line.split("  ")[0]: line.split() for line in lines[2:7]}
    assert by_name["EMD"][1] == f"{emd(report.table):.3f}"
    assert by_name["samples"][1:] == ["6,000", "300.0", "0.0", "300", "300", "300"]
    assert by_name["classes"][1:] == ["10", "10.0", "0.0", "10", "10", "10"]
    assert lines[-1] == "expected EMD 1.400 for balanced classes and many samples"


def test_report_expects_an_emd_only_where_the_name_has_a_formula() -> None:
    for text, expected in (("emd(1.4)", 1.4), ("iid", 0.0), ("dirichlet_classes(1)", None)):
        report = skew_report(BALANCED, parse_sampler(text)[1](BALANCED, 20, 2), 10)
        assert report.expected_emd == expected
    by_hand = partition_from_lists([[0, 1], [2]], "by hand")
    assert skew_report([0, 1, 0], by_hand, 2).expected_emd is None
    # The class that never occurs does not count as one that the sampler could deal.
    two_of_three = skew_report(
        np.arange(20) % 2, parse_sampler("q(1)")[1](np.arange(20) % 2, 2, 0), 3
    )
    assert two_of_three.expected_emd == emd(two_of_three.table) == 1.0


def test_without_classes_a_report_is_of_sizes_alone() -> None:
    report = skew_report([0] * 6, partition_from_lists([[0, 1], [2, 3, 4, 5]], "iid"), 1)
    lines = report.text().splitlines()
    assert lines[0].startswith("iid: 6 samples at 2 clients, sha256 ")
    assert [line.split()[:2] for line in lines[2:]] == [["samples", "6"], ["Gini", "of"]]
    numbers = report.as_dict()
    assert numbers.keys() == {"name", "hash", "clients", "samples", "sizes", "per_client"}
    assert numbers["per_client"] == {"table": [[2], [4]]}
