"""Every sampler: random requests end well or say why not; the EMD is the formula's."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import betaln
from test_partition import check_complete, check_seeded

from fedjax_sim.partition import (
    Partition,
    client_emds,
    dirichlet,
    dirichlet_alpha,
    emd,
    expected_emd,
    label_sets,
    label_table,
    limit_label_q,
    ll_q_settings,
    ll_settings,
    natural,
    parse_sampler,
    power_law,
    q_sampler,
    quantity,
    robin_hood,
    shards,
    size_statistics,
)
from fedjax_sim.partition.samplers import SAMPLERS, form_of

BALANCED = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 2000))
ARGUMENTS = (
    *("clients", "labels", "labels_per_client", "fraction", "min_per_class", "q", "emd"),
    *("tolerance", "alpha", "min_size", "groups", "shards_per_client", "exponent"),
)

shares = st.sampled_from([0.5, 0.0, 1e-9, 0.3, 7 / 9, 1.0, 1.5])
emds = st.sampled_from([0.5, 0.05, 1.0, 0.0, 1.4, 1.9, 2.0])
alphas = st.sampled_from([0.1, 1e-300, 1e-3, 1.0, 1e3, 1e308, 0.0])
few = st.sampled_from([1, 2, 1, 2, 3, 4, 0])
many_of_each = st.lists(st.integers(8, 25), min_size=2, max_size=5)
few_of_each = st.lists(st.integers(1, 3), min_size=1, max_size=5)
REQUESTS: dict[str, st.SearchStrategy[str]] = {
    "iid": st.just("iid"),
    "ll": st.builds("ll({}, {}, {})".format, few, shares, st.integers(0, 2)),
    "ll_q": st.builds("ll_q({}, {})".format, few, shares),
    "q": st.builds("q({})".format, shares),
    "emd": st.builds("emd({}{})".format, emds, st.sampled_from(["", ", in_turn", ", in_turn, 1"])),
    "robin_hood": st.builds("robin_hood({}, {})".format, emds, st.sampled_from([0.05, 0.01, 0])),
    "dirichlet": st.builds(
        "dirichlet({}, {}{})".format, alphas, few, st.sampled_from(["", ", balanced"])
    ),
    "dirichlet_classes": st.builds("dirichlet_classes({})".format, alphas),
    "shards": st.builds("shards({})".format, few),
    "label_sets": st.builds("label_sets({})".format, few),
    "quantity": st.builds("quantity({})".format, alphas),
    "power_law": st.builds("power_law({})".format, alphas),
}


def table_of(text: str, clients: int, seed: int, labels: NDArray[np.int64] = BALANCED) -> Any:
    return label_table(labels, parse_sampler(text)[1](labels, clients, seed), 10)


def test_every_sampler_is_requested() -> None:
    assert {*REQUESTS, "natural", "matched"} >= {*SAMPLERS}


@pytest.mark.parametrize("name", REQUESTS)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_a_random_request_is_met_or_refused_by_name(
    name: str, data: st.DataObject, seed: int
) -> None:
    counts = data.draw(many_of_each | few_of_each)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    multiples = st.integers(1, 4).map(lambda groups: groups * len(counts))
    clients = data.draw(multiples | multiples | st.integers(1, labels.size + 1))
    text = data.draw(REQUESTS[name])
    found, sample = parse_sampler(text)
    assert found == name
    refusal = ""
    try:
        partition = sample(labels, clients, seed)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert re.match(rf"({'|'.join(ARGUMENTS)})\b", refusal), refusal
        return
    check_complete(partition, labels.size, clients)
    check_seeded(sample, labels, clients, seed)
    parse_sampler(partition.name.partition(":")[0])


@pytest.mark.parametrize("clients", [10, 20])
@pytest.mark.parametrize(
    "text",
    [
        *("ll(1, 7/9)", "ll(2, 0.875)", "ll(3, 1)", "emd(0.8)", "robin_hood(0.4, 1e-4)"),
        *("robin_hood(1.4, 1e-4)", "q(0.8)", "q(0)", "q(1)", "ll_q(2, 0.9)", "ll_q(5, 0.7)"),
    ],
)
def test_measured_emd_is_the_formulas(text: str, clients: int) -> None:
    expected = expected_emd(text, 10, clients)
    assert expected is not None
    measured = [emd(table_of(text, clients, seed)) for seed in range(5)]
    # 2|q - …| in 20,000 draws has a standard deviation of 2 sqrt(q(1 - q)/20000) <= 0.0071.
    assert np.mean(measured) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("text", ["iid", "q(0.1)", "ll_q(3, 0.3)", "quantity(20)"])
def test_without_skew_the_emd_is_sampling_noise(text: str) -> None:
    assert expected_emd(text, 10, 20) == pytest.approx(0, abs=1e-12)
    tables = [table_of(text, 20, seed) for seed in range(20)]
    # Mean absolute deviation of a share p = 0.1 from n_k of n samples without replacement.
    noise = [
        sum(10 * n * np.sqrt(2 * 0.09 / np.pi * (1 / n - 1 / 20000)) for n in table.sum(axis=1))
        for table in tables
    ]
    assert np.mean([emd(table) for table in tables]) == pytest.approx(
        np.mean(noise) / 20000, rel=0.05
    )


@pytest.mark.parametrize(
    ("alpha", "classes", "clients"), [(0.1, 10, 5), (0.5, 10, 10), (0.5, 4, 30), (5.0, 7, 12)]
)
def test_mean_emd_and_size_spread_of_dirichlet(alpha: float, classes: int, clients: int) -> None:
    labels = np.arange(2000 * classes) % classes
    tables = [
        label_table(labels, dirichlet(labels, clients, alpha=alpha, seed=s), classes)
        for s in range(100)
    ]
    emds = [emd(table) for table in tables]
    expected = expected_emd(f"dirichlet({alpha})", classes, clients)
    assert np.mean(emds) == pytest.approx(expected, abs=float(4 * np.std(emds) / 10 + 0.001))
    # n_k·K/n is the mean of M shares: Var = M (K/M)² Var Beta(alpha, (K - 1) alpha).
    sizes = np.array([table.sum(axis=1) / table.sum() * clients for table in tables])
    variance = (clients - 1) / (classes * (clients * alpha + 1))
    assert sizes.var() == pytest.approx(variance, rel=0.15)


def test_expected_emd_of_dirichlet_in_closed_form() -> None:
    assert expected_emd("dirichlet(1)", 2, 2) == pytest.approx(1 / 3, abs=1e-4)  # E|U - V|
    for classes, clients in ((10, 10), (3, 50), (40, 7)):
        # One owner per class.
        extreme = 2 * (1 - 1 / classes) * (1 - 1 / clients)
        assert expected_emd("dirichlet(1e-9)", classes, clients) == pytest.approx(extreme, abs=1e-3)
        assert expected_emd("dirichlet(1e9)", classes, clients) == pytest.approx(0, abs=0.01)
    for alpha in (0.1, 0.5, 2.0):
        # Many classes: K times the mean absolute deviation of Beta(a, b).
        a, b = alpha, 19 * alpha
        log_mad = a * np.log(a) + b * np.log(b) - betaln(a, b) - (a + b + 1) * np.log(a + b)
        assert expected_emd(f"dirichlet({alpha})", 500, 20) == pytest.approx(
            20 * 2 * np.exp(log_mad), rel=0.004
        )
    assert expected_emd("dirichlet(0.5)", 1, 10) == expected_emd("dirichlet(0.5)", 10, 1) == 0


def test_expected_emd_of_the_thesis() -> None:
    assert expected_emd("dirichlet(0.5)", 10, 10) == pytest.approx(0.86, abs=0.005)
    # Fig. 3.1: growing numbers of classes and clients raise it, little beyond M = 20, K = 15.
    for alpha in (0.1, 0.5, 1.0, 10.0):
        small, enough, large = (
            expected_emd(f"dirichlet({alpha})", classes, clients) or 0
            for classes, clients in ((5, 5), (20, 15), (100, 100))
        )
        assert small < 0.87 * enough
        assert enough < large < 1.07 * enough
    assert [round(f, 2) for _, f in ll_settings(1.6, 10)] == [0.89, 1.0]  # §3.4.2
    assert ll_q_settings(1.4, 10) == [(1, pytest.approx(0.8)), (2, pytest.approx(0.9)), (3, 1.0)]


def test_options_that_change_the_law_have_no_formula() -> None:
    for text in ("dirichlet(1, 5)", "dirichlet(1, 1, balanced)", "ll(2, 1, 1)", "natural"):
        assert expected_emd(text, 10, 10) is None
    with pytest.raises(ValueError, match="sampler 'some file' must be written iid or"):
        expected_emd("some file", 10, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ll(20, 1)", "labels_per_client must be in 1 to 10 with 10 classes, got 20"),
        ("ll_q(10, 0.5)", "labels_per_client must be in 1 to 9 with 10 classes, got 10"),
        ("robin_hood(-1)", "emd must be in 0 to 1.8 with 10 classes, got -1"),
    ],
)
def test_settings_that_no_sampler_has_have_no_emd(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_emd(text, 10, 10)


def test_dirichlet_clients_spread_as_in_the_thesis() -> None:
    """Fig. 3.2 and 3.3: smaller alpha, wider sizes; client EMDs are about 0.5 off the mean."""
    spread = []
    for alpha in (0.1, 0.5, 1.0):
        tables = [table_of(f"dirichlet({alpha})", 10, seed) for seed in range(20)]
        own = np.concatenate([client_emds(table) for table in tables])
        assert 0.3 < own.mean() - own.min() < 0.7
        assert 0.3 < own.max() - own.mean() < 0.7
        spread.append(np.mean([size_statistics(table.sum(axis=1)).gini for table in tables]))
    assert spread == sorted(spread, reverse=True)


@given(classes=st.integers(2, 30), data=st.data())
def test_ll_q_settings_solve_the_formula(classes: int, data: st.DataObject) -> None:
    target = data.draw(st.floats(0.001, 2 - 2 / classes))
    found = ll_q_settings(target, classes)
    assert [t for t, _ in found] == list(range(1, len(found) + 1))
    for t, q in found:
        assert t / classes < q <= 1
        assert expected_emd(f"ll_q({t}, {q!r})", classes, classes) == pytest.approx(target)


@given(classes=st.integers(2, 12), clients=st.integers(2, 50), share=st.floats(0.02, 0.98))
@settings(max_examples=6, deadline=None)
def test_dirichlet_alpha_inverts_the_mean_emd(classes: int, clients: int, share: float) -> None:
    target = share * 2 * (1 - 1 / classes) * (1 - 1 / clients)
    alpha = dirichlet_alpha(target, classes, clients)
    assert expected_emd(f"dirichlet({alpha!r})", classes, clients) == pytest.approx(
        target, abs=1e-3
    )


def test_q_one_is_a_pure_limit_label_and_q_zero_its_opposite() -> None:
    for t in (1, 3):
        for q, held in ((1.0, t), (0.0, 10 - t)):
            partition = limit_label_q(BALANCED, 20, labels_per_client=t, q=q, seed=2)
            table = label_table(BALANCED, partition, 10)
            assert np.all((table > 0).sum(axis=1) == held)
            assert np.all((table > 0).sum(axis=0) == 2 * held)


def test_q_shares_follow_the_probabilities_of_the_thesis() -> None:
    """Eq. 3.7 and 3.12: p_k(y) is q/t for own labels, (1 - q)/(M - t) for others."""
    table = table_of("ll_q(2, 0.6)", 10, 0)
    shares = np.sort(table / table.sum(axis=1, keepdims=True), axis=1)
    assert shares[:, -2:] == pytest.approx(0.3, abs=0.05)  # 4 sigma of 2000 draws: 0.04
    assert shares[:, :-2] == pytest.approx(0.05, abs=0.025)


@given(classes=st.integers(2, 6), groups=st.integers(1, 4), data=st.data())
def test_robin_hood_shifts_one_mix_round_the_clients(
    classes: int, groups: int, data: st.DataObject
) -> None:
    labels = np.arange(classes * groups * 50) % classes
    target = data.draw(st.floats(0, 2 - 2 / classes))
    seed = data.draw(st.integers(0, 999))
    partition = robin_hood(labels, classes * groups, emd=target, seed=seed)
    table = label_table(labels, partition, classes)
    assert np.ptp(partition.sizes) <= 2
    assert emd(table) == pytest.approx(target, abs=0.01 + classes / 50)
    shifted = [np.roll(table[0], s) for s in range(classes)]
    nearest = [min(int(np.abs(row - mix).max()) for mix in shifted) for row in table]
    assert max(nearest) <= 1


def test_robin_hood_ends_where_the_random_moves_do_not() -> None:
    for target in (0.3, 1.37):
        table = table_of(f"robin_hood({target}, 1e-15)", 20, 0)
        assert emd(table) == pytest.approx(target, abs=0.001)
        # A random mix as with any tolerance, not one rich class among poor ones that are alike.
        others = np.sort(table[0])[:-1]
        assert np.ptp(others[others > 0]) > 20
    mixes = {table_of("robin_hood(1.4)", 10, seed).max() for seed in range(5)}
    assert len(mixes) == 5
    # One class each, but a single sample of class 0 for its two clients.
    labels = np.repeat([0, 1, 2], [1, 200, 200])
    largest = 2 - 2 * float(np.square(np.array([1, 200, 200]) / 401).sum())
    partition = robin_hood(labels, 6, emd=largest, tolerance=1e-15, seed=0)
    check_complete(partition, labels.size, 6)


def test_min_size_is_reached_or_the_advice_works() -> None:
    partition = dirichlet(BALANCED, 20, alpha=0.3, min_size=100, seed=0)
    assert partition.sizes.min() >= 100
    assert partition.name == "dirichlet(0.3, 100)"
    with pytest.raises(ValueError, match=r"min_size must be .* got 900, which 100 draws") as caught:
        dirichlet(BALANCED, 20, alpha=0.3, min_size=900, seed=0)
    advice = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    again = dirichlet(BALANCED, 20, alpha=0.3, min_size=advice, seed=0)
    assert again.sizes.min() == advice


def test_balanced_leaves_out_who_has_an_even_part() -> None:
    for alpha in (1e-300, 0.1, 1.0):
        partition = dirichlet(BALANCED, 7, alpha=alpha, balanced=True, seed=3)
        table = label_table(BALANCED, partition, 10)
        check_complete(partition, BALANCED.size, 7)
        before = np.cumsum(table, axis=1) - table
        assert not np.any(table[before * 7 >= BALANCED.size])


def test_quantity_sizes_are_dirichlet() -> None:
    ginis = {}
    for alpha in (0.1, 1.0, 1e9):
        sizes = np.array([quantity(BALANCED, 10, alpha=alpha, seed=s).sizes for s in range(99)])
        assert sizes.min() >= 1
        # Var(p_k) of Dir_K(alpha) = (K - 1) / (K² (K alpha + 1)).
        spread = np.sqrt(9 / (100 * (10 * alpha + 1))) * BALANCED.size
        assert sizes.std() == pytest.approx(spread, rel=0.1, abs=1)
        ginis[alpha] = np.mean([size_statistics(row).gini for row in sizes])
    assert ginis[0.1] > ginis[1.0] > ginis[1e9]


@given(groups=st.lists(st.integers(-3, 5), min_size=1, max_size=50), least=st.integers(1, 5))
def test_natural_clients_are_the_groups(groups: list[int], least: int) -> None:
    kept = [g for g in sorted(set(groups)) if groups.count(g) >= least]
    if not kept:
        with pytest.raises(ValueError, match=f"min_size must be in 1 to .* got {least}"):
            natural(groups, min_size=least)
        return
    partition = natural(groups, min_size=least)
    assert [{groups[i] for i in own} for own in partition.lists] == [{g} for g in kept]
    assert partition.sizes.tolist() == [groups.count(g) for g in kept]


def test_natural_by_its_text_needs_groups_and_their_number() -> None:
    name, sample = parse_sampler("natural(2)")
    labels, groups = np.zeros(6, int), np.array([4, 4, 1, 9, 9, 9])
    for clients in (None, 2):
        partition = sample(labels, clients, 0, groups=groups, features={"unused": groups})
        assert (name, partition.name, partition.sizes.tolist()) == ("natural", "natural(2)", [2, 3])
    with pytest.raises(
        ValueError, match=r"clients must be 2, the number of natural groups .* got 5"
    ):
        sample(labels, 5, 0, groups=groups)
    with pytest.raises(ValueError, match="the data name no clients: use another sampler"):
        sample(labels, 2, 0)
    with pytest.raises(ValueError, match=r"each of the 6 samples, got shape \[5\]"):
        sample(labels, 2, 0, groups=groups[:5])
    for wrong in (np.array([0.5]), np.array(["a", None])):
        with pytest.raises(ValueError, match=r"groups must be .* texts \[n\], got (float|obj)"):
            natural(wrong)
    assert natural(np.array(["b", "a", "b"], object)).sizes.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda y: q_sampler(y, 6, q=0.5, seed=0),
            "clients must be a multiple of 4, .* got 6: use 4 or 8",
        ),
        (lambda y: q_sampler(y, 4, q=1.5, seed=0), "q must be in 0 to 1, got 1.5"),
        (
            lambda y: limit_label_q(y, 4, labels_per_client=4, q=0.5, seed=0),
            "labels_per_client must be in 1 to 3 with 4 classes, got 4",
        ),
        (
            lambda y: limit_label_q(y, 6, labels_per_client=1, q=0.5, seed=0),
            r"with t=1 use 4 or 8 clients, or with 6 clients use t in \[2\]",
        ),
        (lambda y: robin_hood(y, 6, emd=1, seed=0), "clients must be a multiple of 4, .* got 6"),
        (
            lambda y: robin_hood(y, 4, emd=1.6, seed=0),
            "emd must be in 0 to 1.5 with these 4 classes, got 1.6",
        ),
        (
            lambda y: robin_hood(y, 4, emd=1, tolerance=0, seed=0),
            "tolerance must be positive, got 0",
        ),
        (lambda y: quantity(y, 4, alpha=0, seed=0), "alpha must be positive and finite, got 0"),
        (lambda y: power_law(y, 4, exponent=-1, seed=0), "exponent must be at least 0 .* got -1"),
        (
            lambda y: shards(y, 4, shards_per_client=11, seed=0),
            "shards_per_client must be in 1 to 10 for 40 samples and 4 clients, got 11",
        ),
        (
            lambda y: label_sets(y, 2, labels_per_client=1, seed=0),
            "labels_per_client must be in 2 to 4 with 4 classes and 2 clients, got 1",
        ),
        (
            lambda y: label_sets(np.r_[y, 4], 15, labels_per_client=1, seed=0),
            "clients must all get samples, got 15, of which 2 are empty",
        ),
        (
            lambda y: dirichlet(y, 4, alpha=1, min_size=11, seed=0),
            "min_size must be in 1 to 10 for 4 clients and 40 samples, got 11",
        ),
        (
            lambda y: ll_q_settings(1.9, 10),
            r"emd must be .* at most 1.8 for ll_q\(t, q\) .* got 1.9",
        ),
        (lambda y: ll_q_settings(1.0, 10, 3), "got 3: no ll_q.* has skew; use a multiple of 10"),
        (lambda y: dirichlet_alpha(1.7, 10, 10), r"emd must be in .* to 1.62.* got 1.7"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(
    call: Callable[[NDArray[np.int64]], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.arange(40) % 4)


@pytest.mark.parametrize("text", ["q(0.5)", "robin_hood(1)", "ll_q(2, 0.5)", "ll(3, 0.5)"])
def test_the_clients_that_a_refusal_names_work(text: str) -> None:
    _, sample = parse_sampler(text)
    with pytest.raises(ValueError, match=r"^clients .* got 13") as caught:
        sample(BALANCED, 13, 0)
    found = re.search(r"use (\d+) or (\d+)", str(caught.value))
    assert found is not None
    for clients in map(int, found.groups()):
        check_complete(sample(BALANCED, clients, 0), BALANCED.size, clients)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ll_q(2, 9/10)", "ll_q(2, 0.9)"),
        (" ll(1,7/9) ", "ll(1, 0.777778)"),
        ("q(0.8)", "q(0.8)"),
        ("robin_hood(1.4)", "robin_hood(1.4, 0.01)"),
        ("robin_hood(1.4, 0.1)", "robin_hood(1.4, 0.1)"),
        ("dirichlet(0.5, 3)", "dirichlet(0.5, 3)"),
        ("dirichlet(0.5, 1, balanced)", "dirichlet(0.5, 1, balanced)"),
        ("quantity(0.5)", "quantity(0.5)"),
        ("power_law(3/2)", "power_law(1.5)"),
        ("shards(3)", "shards(3)"),
        ("label_sets(2)", "label_sets(2)"),
        ("ll(3, 1, 1)", "ll(3, 1, 1)"),
    ],
)
def test_parse_sampler_reads_the_name_that_the_partition_gets(text: str, name: str) -> None:
    first: Partition = parse_sampler(text)[1](BALANCED, 20, 0)
    assert first.name == name
    again = parse_sampler(name)[1](BALANCED, 20, 0)
    assert np.array_equal(first.index, again.index)
    assert np.array_equal(first.start, again.start)


@pytest.mark.parametrize(
    "text",
    ["dirichlet(0.5, 1, maybe)", "dirichlet(1, balanced)", "q", "natural(1, 2)", "q(0.5, 1)"],
)
def test_parse_sampler_refuses(text: str) -> None:
    name = text.partition("(")[0]
    form = form_of(name, SAMPLERS[name])
    with pytest.raises(ValueError, match=re.escape(f"sampler {text!r} must be written {form}")):
        parse_sampler(text)
