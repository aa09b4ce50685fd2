"""Data sets of text, tables and any arrays: known counts, closed forms, independent recounts."""

import csv
import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
import sklearn.linear_model
import tensorflow_datasets as tfds
from conftest import known
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.defaults import DEFAULTS, TABLE
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import (
    DATASETS,
    DataNotFoundError,
    Dataset,
    client_data,
    covertype,
    download_dataset,
    eicu,
    from_arrays,
    images,
    load_dataset,
    parse_dataset,
    pooled,
    shakespeare,
    shakespeare_tokens,
    synthetic,
    tiny_shakespeare,
    tiny_shakespeare_tokens,
)
from fedjax_sim.data.download import find_builder
from fedjax_sim.data.folder import downloading
from fedjax_sim.models import logistic
from fedjax_sim.partition import emd, iid, label_table, partition_from_lists
from fedjax_sim.tasks import regression


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDJAX_SIM_DATA_DIR", raising=False)


def sizes(data: Dataset) -> np.ndarray:
    """Samples of each natural client, both parts together."""
    return np.bincount(np.concatenate([data.train_client, data.test_client]))


# Any arrays


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=3, max_size=60), given_test=st.booleans())
def test_from_arrays_keeps_samples_together(labels: list[int], given_test: bool) -> None:
    n = np.arange(len(labels))
    test = n % 3 == 1 if given_test else None
    assume(not given_test or {*labels[1::3]} & {*labels[::3], *labels[2::3]})  # else it is refused
    city = np.array(["Gent", "Aalst", "Brugge"])[n % 3]
    features = {"shape": 10 * (n % 2), "city": city}
    x = np.stack([n, n**2], axis=1)
    data = from_arrays("mine", x, labels, test=test, client=city, features=features, classes=5)
    rows = [data.train_x[:, 0].astype(int), data.test_x[:, 0].astype(int)]
    assert all(np.all(np.diff(part) > 0) for part in rows)
    assert sorted(np.concatenate(rows)) == list(n)
    if given_test:
        assert np.array_equal(rows[1], n[test])
    else:
        held_out = np.bincount(np.array(labels)[rows[1]], minlength=5)
        assert np.array_equal(held_out, np.rint(np.bincount(labels, minlength=5) / 5))
    assert data.client_names == tuple(sorted(set(city)))
    for i, y, client, coded in (
        (rows[0], data.train_y, data.train_client, data.features),
        (rows[1], data.test_y, data.test_client, data.test_features),
    ):
        assert np.array_equal(y, np.array(labels)[i])
        owner = known(client)
        assert [data.client_names[c] for c in owner] == list(city[i])
        assert np.array_equal(coded["shape"], i % 2)
        assert np.array_equal(coded["city"], owner)
        assert all(values.dtype == np.int32 for values in (y, owner, *coded.values()))


def test_from_arrays_scales_numeric_columns_only() -> None:
    x = np.random.default_rng(0).normal(5, 3, (200, 4))
    x[:, 2] = 7
    y = np.arange(200) % 2
    numeric = np.array([True, False, True, False])
    data = from_arrays("mine", x, y, numeric=numeric)
    mean, std = known(data.mean), known(data.std)
    np.testing.assert_allclose(mean, [data.train_x[:, 0].mean(), 0, 7, 0], rtol=1e-5)
    np.testing.assert_allclose(std, [data.train_x[:, 0].std(), 1, 1, 1], rtol=1e-5)
    assert data.train_x.dtype == mean.dtype == std.dtype == np.float32
    tokens = from_arrays("mine", x.astype(int), y, scale=False)
    assert tokens.mean is None
    assert tokens.std is None
    assert tokens.train_x.dtype == np.int32
    images = from_arrays("mine", np.arange(200 * 12, dtype=np.uint8).reshape(-1, 2, 2, 3), y)
    assert images.train_x.dtype == np.uint8
    np.testing.assert_allclose(known(images.mean), images.train_x.mean((0, 1, 2)), rtol=1e-6)


X, Y = np.zeros((4, 2)), np.array([0, 1, 1, 0])
BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "flat x": ({"x": np.zeros(4)}, r"x must be numbers \[n, F\] or .* got float64 \[4\]"),
    "text x": ({"x": np.full((4, 2), "a")}, "x must be numbers"),
    "nan": ({"x": np.full((4, 2), np.nan)}, "x must be finite in float32, got NaN or inf"),
    "beyond int32": (
        {"x": np.array([[2**40, 0]] * 4), "scale": False},
        "x must be within int32, got 0 to 1099511627776",
    ),
    "channels first": ({"x": np.zeros((4, 3, 8, 8))}, r"x must be images.* got \[4, 3, 8, 8\]"),
    "short y": ({"y": Y[:3]}, r"y must have 4 rows, as x has, got int64 \[3\]"),
    "one-hot y": (
        {"y": np.eye(2, dtype=int)[Y]},
        "y must .*one-hot rows.* or task=multi",
    ),
    "a column of y": (
        {"y": Y[:, None]},
        "y must .*one column.* or task=regression",
    ),
    "an unknown task": ({"task": "ranking"}, "task must be a Task or one of classification, reg"),
    "classes of numbers": ({"task": "regression", "classes": 2}, "classes must not be given for"),
    "broken labels": ({"y": Y + 0.5, "task": "classification"}, r"y must be integers \[4\]"),
    "unknown name": ({"y": ["a", "b"] * 2, "class_names": ("a", "c")}, "y must be names .*, got b"),
    "names of other classes": ({"y": ["a", "b"] * 2, "classes": 3}, "classes must be 2, as y has"),
    "close y": (
        {"y": np.stack([1e9 + Y + 0.5, Y], axis=1)},
        "y must have .* in float32, got 1000000000.5 to 1000000001.5: .* such as 1000000001$",
    ),
    "float y": ({"y": Y.astype(float)}, "y must be of one task, got 2 different whole numbers"),
    "y NaN": ({"y": [0.5, np.nan, 1.5, 2.5]}, "y must be finite, got nan"),
    "y beyond float32": ({"y": [0.5, 1e300, 1.5, 2.5]}, "y must be finite, got 0.5 to inf"),
    "integers to predict": (
        {"y": Y - 9, "task": regression()},
        "y must be in -1 … M - 1, got -9 … -8; numbers to predict must be floats",
    ),
    "complex y": ({"y": Y + 1j}, "y must be .* got complex128"),
    "negative y": ({"y": Y - 1}, "y must be in 0 … M - 1, got -1 … 0"),
    "large y": ({"y": Y + 1, "classes": 2}, "y must be in 0 … 1, got 1 … 2"),
    "stray y": (
        {"y": np.array([0, 1, 2, 10**6])},
        "y must have every class from 0 to its largest, 1000000, got none of class 3",
    ),
    "y beyond int32": ({"y": Y + 2**40}, "y must be in 0 … M - 1, got 1099511627776 …"),
    "names": ({"class_names": ("no", "yes"), "classes": 3}, "class_names must be 3 texts"),
    "a text": ({"class_names": "ab"}, "class_names must be texts, got 'ab'"),
    "test as integers": ({"test": Y}, r"test must be bool \[4\]"),
    "all test": ({"test": Y >= 0}, "test must leave"),
    "other classes": ({"test": Y > 0}, "the test set must have classes .* set, 0, got 1: use"),
    "client": ({"client": [1, 2]}, r"client must have shape \[4\], got \[2\]"),
    "one unknown": ({"client": ["a", "b", None, "a"]}, "client must be .* got NoneType, str"),
    "client NaN": ({"client": [0, 1, np.nan, 1]}, "client must be .* got NaN"),
    "feature": ({"features": {"soil": [1]}}, "soil must have shape"),
    "numeric": ({"numeric": [True]}, r"numeric must be bool \[2\]"),
}


@pytest.mark.parametrize(
    ("y", "task", "wanted"),
    [
        (Y.astype(float), "classification", "classification(2)"),
        (Y[:, None], "classification", "classification(2)"),
        (np.eye(3)[Y], "classification", "classification(3)"),
        (np.array(["b", "a", "a", "b"]), None, "classification(2)"),
        (Y, "regression", "regression()"),
        (np.eye(3)[Y], "multi_label", "multi_label(3)"),
    ],
)
def test_a_task_says_what_ambiguous_targets_are(y: Any, task: str | None, wanted: str) -> None:
    data = from_arrays("mine", X, y, task=task, test=np.arange(4) == 3)
    assert repr(data.task) == wanted
    if wanted.startswith("classification"):
        assert data.train_y.tolist() == ([1, 0, 0] if task is None else [0, 1, 1])
    else:
        data.task.check("y", data.train_y)


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_from_arrays_names_the_bad_argument(case: str) -> None:
    arguments, message = BAD_ARRAYS[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        from_arrays("mine", **({"x": X, "y": Y} | arguments))


def test_from_arrays_counts_classes_by_their_names() -> None:
    two = from_arrays("mine", X, np.zeros(4, int), class_names=["no", "yes"])
    assert (two.classes, two.class_names) == (2, ("no", "yes"))
    owners = from_arrays("mine", X, Y, client=np.array(["b", "a", "b", "a"], object))
    assert owners.client_names == ("a", "b")


@pytest.mark.parametrize(
    ("client", "names"),
    [
        (np.array([3, 10, 3, 10], object), ("3", "10")),  # as of pandas
        (np.array([b"b", b"\xc3\xa4", b"b", b"\xff"]), ("b", "ä", r"\xff")),  # as of HDF5
    ],
)
def test_clients_of_other_arrays_have_plain_names(client: Any, names: tuple[str, ...]) -> None:
    data = from_arrays("mine", X, Y, client=client, test=np.arange(4) == 0)
    assert data.client_names == names
    assert known(data.train_client).tolist() == [1, 0, len(names) - 1]


def test_from_arrays_takes_signals_of_one_row() -> None:
    data = from_arrays("signals", np.ones((4, 1, 128, 9)), Y)
    assert known(data.mean).shape == (9,)
    small = from_arrays("small", np.ones((4, 3, 3, 3)), Y)  # channels last
    assert known(small.mean).shape == (3,)


def test_client_data_refuses_the_labels_that_from_arrays_refuses() -> None:
    arguments, message = BAD_ARRAYS["complex y"]
    with pytest.raises(ValueError, match=f"^{message}"):
        client_data(X, arguments["y"], iid(Y, 2, seed=0))


@pytest.mark.parametrize(
    ("partitions", "kinds"),
    [([[0, 1], [2, 3]], "list"), ([], "none"), ([iid(Y, 2, seed=0), None], "NoneType, Partition")],
)
def test_client_data_says_what_a_partition_is(partitions: Any, kinds: str) -> None:
    message = f"partitions must be a Partition or a list of them.*{kinds}.*partition_from_lists"
    with pytest.raises(ValueError, match=message):
        client_data(X, Y, partitions)


def test_pooled_has_all_samples_and_no_test_set() -> None:
    n = np.arange(40)
    x = np.stack([n, n % 2], axis=1)
    numeric = np.array([True, False])
    data = pooled(
        from_arrays("mine", x, n % 4, client=n % 5, features={"f": n % 8}, numeric=numeric)
    )
    i = data.train_x[:, 0].astype(int)
    assert sorted(i) == list(n)
    assert np.array_equal(data.train_y, i % 4)
    assert np.array_equal(known(data.train_client), i % 5)
    assert np.array_equal(data.features["f"], i % 8)
    assert len(data.test_x) == len(data.test_y) == len(known(data.test_client)) == 0
    assert len(data.test_features["f"]) == 0
    np.testing.assert_allclose(known(data.mean), [n.mean(), 0])
    np.testing.assert_allclose(known(data.std), [n.std(), 1], rtol=1e-6)
    digits = load_dataset("digits")
    assert pooled(digits).train_client is None
    assert pooled(digits).train_x.shape == (1797, 8, 8, 1)


# Names


def test_every_data_set_has_defaults() -> None:
    assert set(DEFAULTS) == {*DATASETS, "synthetic", "tfds", TABLE}


def test_text_forms() -> None:
    assert parse_dataset("mnist")[0] == "mnist"
    assert parse_dataset("tfds:emnist/balanced")[0] == "tfds"
    key, load = parse_dataset("synthetic( 1,2e-1 )")
    assert (key, load(None).name) == ("synthetic", "synthetic(1, 0.2)")
    assert np.array_equal(load(None).train_x, synthetic(1, 0.2).train_x)
    assert load_dataset("synthetic(iid)").name == "synthetic(iid)"
    assert parse(["--dataset", "synthetic(0.5, 0.5)"]).training.model == DEFAULTS["synthetic"].model


@pytest.mark.parametrize(
    "text",
    ["nothing", "synthetic", "synthetic()", "synthetic(1)", "synthetic(a, b)", "tfds:", "TFDS"],
)
def test_an_unknown_name_lists_all_forms(text: str) -> None:
    with pytest.raises(ValueError, match="name must be a data set, got") as caught:
        parse(["--dataset", text])
    for form in (*DATASETS, "--dataset", "synthetic(alpha, beta)", "synthetic(iid)", "tfds:NAME"):
        assert form in str(caught.value)


def test_a_mistyped_name_comes_with_the_name_that_is_meant() -> None:
    message = "--dataset: name must be a data set, got 'digit'; did you mean digits?"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(["--dataset", "digit"])


def test_inputs_without_statistics_reach_the_model_as_they_are() -> None:
    data = synthetic(0, 0)
    model, plain = load_model("logistic", data), logistic((60,), 10)
    weights = plain.init(jax.random.key(0))
    x = jnp.asarray(data.test_x[:5])
    expected = plain.apply(weights, x, train=False)[0]
    assert np.array_equal(model.apply(weights, x, train=False)[0], expected)


# Shakespeare


def write_plays(folder: Path, rows: Sequence[tuple[str, str, str]]) -> Path:
    file = folder / "shakespeare" / "plays_by_role.csv.gz"
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt", encoding="utf-8", newline="") as text:
        csv.writer(text).writerows([("play", "role", "text"), *rows])
    return folder


def windows(data: Dataset, client: int) -> tuple[list[str], list[str]]:
    """What the training and test samples of a client say, their 81 characters each."""
    parts = []
    for x, y, owner in (
        (data.train_x, data.train_y, data.train_client),
        (data.test_x, data.test_y, data.test_client),
    ):
        samples = np.concatenate([x, y[:, None]], axis=1)[owner == client]
        parts.append(["".join(data.class_names[t] for t in sample) for sample in samples])
    return parts[0], parts[1]


def test_windows_of_roles(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = {("Hamlet", "KING"): 181, ("Lear", "KING"): 85, ("Lear", "FOOL"): 81}
    said = {role: "".join(rng.choice(list("abcd é—"), n)) for role, n in lengths.items()}
    said["Lear", "MUTE"] = "z" * 79  # with the space between its lines one too short for a sample
    rows = [(*role, text[i : i + 40]) for i in (0, 40) for role, text in said.items()]
    rows += [(*role, text[80:]) for role, text in said.items() if text[80:]]  # spoken in turns
    data = shakespeare(write_plays(tmp_path, rows), roles=None)
    assert data.client_names == ("Hamlet: KING", "Lear: KING", "Lear: FOOL")
    assert set(data.class_names) == set("abcd é—z")
    assert data.classes == 8
    assert data.train_x.dtype == np.uint8
    assert data.mean is None
    assert data.std is None
    for client, (role, n) in enumerate(lengths.items()):
        text = " ".join([said[role][:40], said[role][40:80], said[role][80:]])
        samples = n + 2 - 80
        train, test = windows(data, client)
        assert train + test == [text[i : i + 81] for i in range(samples)]
        assert len(test) == samples // 5
    with pytest.raises(ValueError, match="roles must be in 1 to 3, or None for all, got 4"):
        shakespeare(tmp_path, roles=4)


def test_tables_of_roles_that_are_none(tmp_path: Path) -> None:
    place = write_plays(tmp_path, [("p", "A", "word " * 20)])
    file = place / "shakespeare" / "plays_by_role.csv.gz"
    for rows, message in (
        (
            "act,role,text\np,A,word\n",
            r"plays_by_role.csv.gz must have the columns play, role, text",
        ),
        ("", "must have the columns play, role, text, got none"),
        ("play,role,text\np,A\n", "shakespeare must have a role of more than 80 characters, got"),
    ):
        file.write_bytes(gzip.compress(rows.encode()))
        with pytest.raises(ValueError, match=message):
            shakespeare(place)


def test_roles_are_drawn_by_the_seed(tmp_path: Path) -> None:
    rows = [("Lear", f"ROLE {i}", chr(97 + i) * 90) for i in range(20)]
    folder = write_plays(tmp_path, rows)
    subset, again, other = (shakespeare(folder, roles=5, seed=s) for s in (3, 3, 4))
    assert subset.client_names == again.client_names != other.client_names
    assert len(subset.client_names) == 5
    whole = shakespeare(folder, roles=None)
    assert subset.class_names == whole.class_names  # one alphabet whatever is drawn
    for client, name in enumerate(subset.client_names):
        assert windows(subset, client) == windows(whole, whole.client_names.index(name))


def test_the_role_table(data_dir: str) -> None:
    whole = shakespeare(data_dir, roles=None)
    assert len(whole.client_names) == 1153
    assert len(whole.train_x) + len(whole.test_x) == 4_121_980
    counts = sizes(whole)
    assert (round(counts.mean()), np.median(counts), whole.classes) == (3575, 1079, 93)
    longest = whole.client_names[int(counts.argmax())]
    assert "hamlet" in longest.lower()
    papers = shakespeare(data_dir)
    assert len(papers.client_names) == 143
    assert papers.train_x.nbytes < 60e6


def test_tiny_shakespeare(data_dir: str) -> None:
    data = tiny_shakespeare(data_dir)
    raw = (Path(data_dir) / "shakespeare" / "tinyshakespeare.txt").read_text()
    said: dict[str, list[str]] = defaultdict(list)
    role, empty = "", True
    for line in raw.split("\n"):  # line by line: what follows an empty line is a name
        if line and empty:
            role = line[:-1]
        elif line:
            said[role].append(line)
        empty = not line
    assert len(said) == 299
    texts = {name: " ".join(lines) for name, lines in said.items()}
    expected = {name: len(text) - 80 for name, text in texts.items() if len(text) > 80}
    assert dict(zip(data.client_names, sizes(data), strict=True)) == expected
    client = data.client_names.index("ROMEO")
    train, test = windows(data, client)
    assert "".join([*(w[0] for w in train + test), test[-1][1:]]) == texts["ROMEO"]
    tokens = tiny_shakespeare_tokens(data_dir)
    assert tokens.client_names == data.client_names
    assert tokens.class_names == data.class_names == data.strata_names
    assert tokens.strata_names == ()  # its pictures are of sizes alone
    assert repr(tokens.task) == "next_token(64)"
    predicted = [(y >= 0).sum() for y in (tokens.train_y, tokens.test_y)]
    assert sum(predicted) == sum(len(texts[name]) - 1 for name in expected)
    assert said_by(tokens, client) == texts["ROMEO"]


def said_by(data: Dataset, client: int) -> str:
    """The text of a role: the first character, and all that are predicted."""
    first = data.train_x[data.train_client == client][0, 0]
    parts = ((data.train_y, data.train_client), (data.test_y, data.test_client))
    rest = np.concatenate([y[owner == client].ravel() for y, owner in parts])
    return "".join(data.class_names[t] for t in [first, *rest] if t >= 0)


def test_tokens_follow_each_other(tmp_path: Path) -> None:
    """Texts cut by hand: of 81 predictions 65 are for training, of 401 they are 321."""
    rng = np.random.default_rng(0)
    said = {name: "".join(rng.choice(list("abcd é—"), n)) for name, n in (("A", 82), ("B", 402))}
    rows = [("Lear", role, text) for role, text in said.items()] + [("Lear", "MUTE", "z" * 80)]
    data = shakespeare_tokens(write_plays(tmp_path, rows), roles=None)
    assert data.client_names == ("Lear: A", "Lear: B")
    assert set(data.class_names) == set("abcd é—z")
    alphabet = "".join(data.class_names)
    for (client, text), kept in zip(enumerate(said.values()), (65, 321), strict=True):
        for x, y, owner, part in (
            (data.train_x, data.train_y, data.train_client, text[: kept + 1]),
            (data.test_x, data.test_y, data.test_client, text[kept:]),
        ):
            expected = [part[i : i + 81] for i in range(0, len(part) - 1, 80)]
            assert owner is not None
            windows = list(zip(x[owner == client], y[owner == client], strict=True))
            assert len(windows) == len(expected)
            for (tokens, targets), wanted in zip(windows, expected, strict=True):
                real = len(wanted) - 1
                assert "".join(alphabet[t] for t in tokens[:real]) == wanted[:-1]
                assert "".join(alphabet[t] for t in targets[:real]) == wanted[1:]
                assert (targets[real:] == -1).all()
                assert len(tokens) == len(targets) == 80
    assert data.train_x.dtype == np.uint8
    assert data.train_y.dtype == np.int32


# Covertype


def test_covertype_of_the_first_rows(data_dir: str) -> None:
    data = covertype(data_dir)
    assert data.name == "covertype (first 20,000 rows)"
    assert len(data.train_x) + len(data.test_x) == 8964
    both = np.concatenate([data.train_y, data.test_y])
    assert np.bincount(both).tolist() == [2942, 6022]
    assert np.bincount(data.test_y).tolist() == [588, 1204]
    assert data.class_names == ("spruce/fir", "lodgepole pine")
    check_cover_columns(data)


def check_cover_columns(data: Dataset) -> None:
    assert data.train_x.shape[1] == 54
    mean, std = known(data.mean), known(data.std)
    assert np.flatnonzero(known(data.numeric)).tolist() == list(range(10))
    assert np.array_equal(mean[10:], np.zeros(44))
    assert np.array_equal(std[10:], np.ones(44))
    np.testing.assert_allclose(mean[:10], data.train_x[:, :10].mean(0, float), rtol=1e-6)
    areas, soils = data.train_x[:, 10:14], data.train_x[:, 14:]
    assert np.array_equal(areas.sum(axis=1), np.ones(len(areas)))
    # Equal categories have equal columns, and the other way round.
    for block, feature in ((areas, "wilderness"), (soils, "soil")):
        pairs = set(zip(block.argmax(axis=1), data.features[feature], strict=True))
        assert len(pairs) == len(set(data.features[feature])) == data.features[feature].max() + 1


@pytest.mark.usefixtures("no_folder")
def test_covertype_of_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    kind = rng.integers(1, 8, 700)
    hot = [np.eye(4)[rng.integers(0, 4, 700)], np.eye(40)[rng.integers(0, 40, 700)]]
    x = np.concatenate([rng.normal(2000, 300, (700, 10)), *hot], axis=1)
    asked = []

    def fetch(*, download_if_missing: bool, return_X_y: bool) -> Any:  # noqa: N803
        asked.append(download_if_missing)
        return x, kind

    monkeypatch.setattr(sklearn.datasets, "fetch_covtype", fetch)
    data = covertype()
    assert data.name == "covertype"
    counts = np.bincount(np.concatenate([data.train_y, data.test_y]))
    assert counts.tolist() == [np.sum(kind == 1), np.sum(kind == 2)]
    check_cover_columns(data)
    covertype(tmp_path)
    with downloading(False):  # --dry-run, --resume, load_run
        covertype()
    # no download into, or beside, a folder that was given
    assert asked == [True, False, False]


def test_covertype_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataNotFoundError, match=r"fetch_covtype as f; f\(\).*covtype\.20k\.data"):
        covertype(tmp_path)


# eICU

OUTCOMES = {"diedinhospital", "dischargelocation"}


def demo_rows(data_dir: str, table: str) -> Iterator[dict[str, str]]:
    file = Path(data_dir) / "eicu_demo" / f"{table}.csv.gz"
    with gzip.open(file, "rt", encoding="utf-8", newline="") as text:
        yield from csv.DictReader(text)


def test_the_eicu_demo(data_dir: str) -> None:
    stays = {r["patientunitstayid"]: r for r in demo_rows(data_dir, "patient") if r["age"]}
    died = {
        r["patientunitstayid"]: r["actualhospitalmortality"] == "EXPIRED"
        for r in demo_rows(data_dir, "apachePatientResult")
        if r["patientunitstayid"] in stays
    }
    assert len(died) == 1835  # of 1,838 with a result, three have no age
    hospitals: dict[str, list[bool]] = defaultdict(list)
    for stay, dead in died.items():
        hospitals[stays[stay]["hospitalid"]].append(dead)
    kept = {
        name: deaths
        for name, deaths in hospitals.items()
        if len(deaths) > 10 and sum(deaths) <= 0.2 * len(deaths)
    }
    data = load_dataset("eicu_demo", data_dir)
    assert dict(zip(data.client_names, sizes(data), strict=True)) == {
        name: len(deaths) for name, deaths in kept.items()
    }
    y = np.concatenate([data.train_y, data.test_y])
    assert y.sum() == sum(map(sum, kept.values()))
    numeric = known(data.numeric)
    assert data.train_x.shape[1] == len(numeric) == 52
    assert set(np.unique(data.train_x[:, ~numeric])) <= {-1, 0, 1}
    unknown = sum(r["ph"] == "-1" for r in demo_rows(data_dir, "apacheApsVar"))
    assert 0 < np.sum(pooled(data).train_x[:, 8] == -1) <= unknown
    everyone = eicu(Path(data_dir) / "eicu_demo", min_admissions=0, max_mortality=1)
    assert sizes(everyone).sum() == 1835
    ages = Counter(stays[stay]["age"] for stay in died)
    assert np.sum(pooled(everyone).train_x[:, 0] == 90) == ages["> 89"]


def write_eicu(folder: Path, **changed: Any) -> Path:
    """Tables of 12 stays in hospitals 7 and 40 (6 each); `changed` are values of the last stay."""
    from fedjax_sim.data._eicu import TABLES

    folder.mkdir(parents=True)
    for table, columns in TABLES.items():
        names = [*columns, *(OUTCOMES if table == "apachePredVar" else ())]
        with (folder / f"{table}.csv").open("w", newline="") as text:
            rows = csv.writer(text)
            rows.writerow(names)
            for stay in range(12):
                row = dict.fromkeys(names, 0) | {
                    "patientunitstayid": 100 + stay,
                    "age": 50,
                    "hospitalid": 40 if stay % 2 else 7,
                    "actualhospitalmortality": "EXPIRED" if stay == 1 else "ALIVE",
                    "admitdiagnosis": "CHF",
                }
                rows.writerow([(row | changed if stay == 11 else row)[name] for name in names])
    return folder


def last_stay(folder: Path, **options: Any) -> np.ndarray:
    data = pooled(eicu(folder, **{"min_admissions": 0, **options}))
    (row,) = data.train_x[data.train_x[:, 0] != 50]
    return row


def test_eicu_variables(tmp_path: Path) -> None:
    known = last_stay(write_eicu(tmp_path / "known", age="> 89", ph=7.1, meds=1, admitsource=3))
    assert known[0] == 90
    assert np.flatnonzero(known).tolist() == [0, 8, 26, 46]
    assert known[8] == np.float32(7.1)
    missing = dict.fromkeys(("ph", "meds", "admitsource", "heartrate"), -1)
    filled = last_stay(write_eicu(tmp_path / "filled", age=88, **missing))
    assert np.flatnonzero(filled).tolist() == [0, 6, 8, 26]
    assert filled[[0, 6, 8, 26]].tolist() == [88, -1, -1, -1]
    empty = last_stay(write_eicu(tmp_path / "empty", age=88, **dict.fromkeys(missing, "")))
    assert np.array_equal(empty, filled)
    outcomes = dict.fromkeys(OUTCOMES, 1)
    leaked = last_stay(write_eicu(tmp_path / "leaked", age=88, **missing, **outcomes))
    assert np.array_equal(leaked, filled)  # the outcome is no input


def test_eicu_hospitals(tmp_path: Path) -> None:
    folder = write_eicu(tmp_path / "eicu", age="")
    everyone = eicu(tmp_path, min_admissions=0)
    assert everyone.client_names == ("7", "40")  # in the order of their numbers
    assert sizes(everyone).tolist() == [6, 5]
    assert pooled(everyone).train_y.sum() == 1
    assert eicu(tmp_path, min_admissions=5).client_names == ("7",)
    assert eicu(folder, min_admissions=0, max_mortality=0.19).client_names == ("7",)
    with pytest.raises(
        ValueError, match=r"min_admissions .* got 100.*largest of 2 has 6 admissions"
    ):
        load_dataset("eicu", tmp_path)


def test_eicu_tables_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"no file patient\.csv or patient\.csv\.gz"):
        load_dataset("eicu", tmp_path)
    folder = write_eicu(tmp_path / "eicu")
    (folder / "apachePredVar.csv").rename(folder / "apachepredvar.txt")
    with pytest.raises(DataNotFoundError, match=r"no file apachePredVar\.csv"):
        load_dataset("eicu", folder)
    (folder / "apachePredVar.csv").write_text("patientunitstayid,gender\n1,0\n")
    with pytest.raises(ValueError, match=r"apachePredVar\.csv has no column bedcount, visit"):
        load_dataset("eicu", folder)


@pytest.mark.parametrize("name", ["shakespeare", "eicu", "eicu_demo"])
@pytest.mark.usefixtures("no_folder")
def test_data_that_only_the_user_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=f"^data set '{name}'.*FEDJAX_SIM_DATA_DIR"):
        load_dataset(name)
    with pytest.raises(DataNotFoundError, match=rf"^data set '{name}' is not ready in {tmp_path}"):
        load_dataset(name, tmp_path)


# Synthetic(α, β)


def test_synthetic_inputs_follow_their_law() -> None:
    """Device means have variance β² + 1/60 along the diagonal; inside, column j has j^-1.2."""
    data = pooled(synthetic(0, 2, clients=400, seed=1))
    x, owner = data.train_x.astype(float), known(data.train_client)
    counts = np.bincount(owner)
    means = np.stack([np.bincount(owner, x[:, j]) / counts for j in range(60)], axis=1)
    np.testing.assert_allclose(means.mean(axis=1).var(), 4 + 1 / 60, rtol=0.2)
    inside = (x - means[owner]).var(axis=0) * len(x) / (len(x) - 400)
    np.testing.assert_allclose(inside, np.arange(1, 61) ** -1.2, rtol=0.05)
    logs = np.log(counts - 49.5)
    assert counts.min() >= 50
    np.testing.assert_allclose([np.median(logs), logs.std()], [4, 2], rtol=0.12)


def test_synthetic_skew() -> None:
    def skew(data: Dataset) -> tuple[float, float]:
        """EMD of the labels, and the spread of the devices' mean inputs."""
        whole = pooled(data)
        lists = [np.flatnonzero(whole.train_client == k) for k in range(30)]
        table = label_table(whole.train_y, partition_from_lists(lists), 10)
        means = np.stack([whole.train_x[own].mean(axis=0) for own in lists])
        return emd(table), float(means.std(axis=0).mean())

    (even, close), (skewed, far), (_, farthest) = map(
        skew, (synthetic(iid=True), synthetic(0, 0), synthetic(0, 3))
    )
    assert even < 0.2 < 0.8 < skewed
    assert close < 0.1 < far < 0.5 * farthest
    plain, shifted = synthetic(0, 1), synthetic(5, 1)
    assert np.array_equal(plain.train_x, shifted.train_x)
    assert np.mean(plain.train_y == shifted.train_y) > 0.999  # α shifts all scores alike


def test_synthetic_devices_are_learnable_alone() -> None:
    """One device's labels are a linear function of its inputs, and not of another device's."""
    data = synthetic(0, 0)
    largest, second = np.argsort(-np.bincount(known(data.train_client)))[:2]
    x, y = data.train_x, data.train_y
    own = data.train_client == largest
    solver = sklearn.linear_model.LogisticRegression(C=1e4, max_iter=200)
    solver.fit(x[own], y[own])
    test = data.test_client == largest
    assert solver.score(data.test_x[test], data.test_y[test]) > 0.9
    assert solver.score(x[data.train_client == second], y[data.train_client == second]) < 0.5


def test_synthetic_split_and_seed() -> None:
    data, again, other = (synthetic(1, 1, clients=7, seed=s) for s in (2, 2, 3))
    assert np.array_equal(data.train_x, again.train_x)
    assert not np.array_equal(data.train_x[:50], other.train_x[:50])
    assert data.classes == 10
    train, test = (np.bincount(known(k)) for k in (data.train_client, data.test_client))
    assert np.array_equal(test, -(-(train + test) // 10))
    assert np.array_equal(sizes(synthetic(0, 9, clients=7, seed=2)), train + test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -1}, "alpha must be at least 0 and finite, got -1"),
        ({"beta": np.nan}, "beta must be at least 0 and finite, got nan"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"alpha": 1, "iid": True}, "alpha must be 0 if iid is True, got 1"),
    ],
)
def test_synthetic_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        synthetic(**arguments)


# Any data set of TFDS


def pictures(split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Thirty of them."""
    rng = np.random.default_rng(len(split))
    for i in range(30):
        yield i, {"image": rng.integers(0, 256, (4, 5, 3), np.uint8), "label": i % 2}


class Pictures(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]  # TFDS has no types
    """Builders of made-up pictures, as TFDS registers them: by their class's name."""

    VERSION = tfds.core.Version("1.0.0")
    SKIP_REGISTERING = True
    SHAPE: tuple[int | None, ...] = (4, 5, 3)
    SPLITS: tuple[str, ...] = ("train",)
    KEYS: tuple[str, str] | None = ("image", "label")

    def _info(self) -> Any:
        label = tfds.features.ClassLabel(names=["cat", "dog", "eel"])
        image = tfds.features.Image(shape=self.SHAPE)
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=self.KEYS, homepage="none"
        )

    def _split_generators(self, dl_manager: Any) -> Any:
        return {name: self._generate_examples(name) for name in self.SPLITS}

    def _generate_examples(self, name: str) -> Any:
        return pictures(name)


class TrainOnlyPictures(Pictures):
    """One split."""


class ValidatedPictures(Pictures):
    """Two splits, none of them called test."""

    SPLITS = ("train", "validation")


class UnevenPictures(Pictures):
    """Pictures of any size."""

    SHAPE = (None, None, 3)


class UnsupervisedPictures(Pictures):
    """Pictures without a target."""

    KEYS = None


class TestOnlyPictures(Pictures):
    """No training split."""

    __test__ = False
    SPLITS = ("test",)


def test_a_tfds_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    for name in ("train_only_pictures", "validated_pictures", "test_only_pictures"):
        download_dataset(name, tmp_path)
    data = load_dataset("tfds:train_only_pictures", tmp_path)
    assert (data.name, data.classes) == ("tfds:train_only_pictures", 3)
    assert data.class_names == ("cat", "dog", "eel")
    assert np.bincount(data.train_y).tolist() == [12, 12]
    assert data.test_x.shape == (6, 4, 5, 3)
    with monkeypatch.context() as patch:
        patch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "empty"))
        patch.setattr(TrainOnlyPictures, "SHAPE", (2, 5, 3))  # not that of the files
        with pytest.raises(DataNotFoundError, match=r"image 0 is of \(5, 4\), not 5 x 2 pixels"):
            load_dataset("tfds:train_only_pictures", tmp_path)
    data = load_dataset("tfds:validated_pictures", tmp_path)
    assert len(data.train_x) == len(data.test_x) == 30
    wanted = [x["image"] for _, x in pictures("validation")]
    assert sorted(map(bytes, data.test_x)) == sorted(map(bytes, wanted))
    with pytest.raises(ValueError, match="split 'train', got 'tfds:test_only_pictures' with test"):
        load_dataset("tfds:test_only_pictures", tmp_path)


@pytest.mark.parametrize(
    ("name", "at_tfds"),
    [("cifar100", "cifar100"), ("emnist", "emnist/balanced"), ("svhn", "svhn_cropped")],
)
def test_data_sets_that_tfds_names_otherwise(
    name: str, at_tfds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small set takes the place of the one that TFDS would download."""
    monkeypatch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    with pytest.raises(DataNotFoundError, match=f"data set '{at_tfds}' is not ready in "):
        load_dataset(name, tmp_path)
    download_dataset("validated_pictures", tmp_path)
    small = find_builder("validated_pictures", tmp_path)
    for function in ("find_builder", "prepared_builder"):
        monkeypatch.setattr(images, function, lambda asked, _: {at_tfds: small}[asked])
    data = load_dataset(name, tmp_path)
    assert (data.name, data.train_x.shape, data.classes) == (name, (30, 4, 5, 3), 3)


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("no_such_set", "a data set of TFDS", "its names are listed at"),
        ("mnist/no_such_config", "a data set of TFDS", "its names are listed at"),
        ("uneven_pictures", "images of one shape", r"shape \(None, None, 3\).*use from_arrays"),
        ("unsupervised_pictures", "image classification", r"are None, not \('image', 'label'\)"),
        ("tiny_shakespeare", "image classification", "supervised keys are"),
    ],
)
def test_a_tfds_set_of_another_kind(name: str, wanted: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"^name must be .*{wanted}.*, got 'tfds:{name}'.*{message}"
    ):
        load_dataset(f"tfds:{name}", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tiny_shakespeare_downloads_without_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TFDS's own builder on a made-up text instead of the network."""
    text = "".join(f"{name}:\n{chr(97 + i) * 70}\nand more\n\n" for i, name in enumerate("ABBA"))
    (tmp_path / "input.txt").write_text(text)
    monkeypatch.setattr(
        tfds.download.DownloadManager, "download", lambda *_: str(tmp_path / "input.txt")
    )
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    download_dataset("tiny_shakespeare", tmp_path / "out")
    data = load_dataset("tiny_shakespeare", tmp_path / "out")
    assert data.client_names == ("A", "B")
    assert sizes(data).tolist() == [2 * 79 + 1 - 80] * 2
