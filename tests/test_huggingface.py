"""Data sets of Hugging Face ``datasets`` by --dataset hf:NAME; all are written here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedjax_sim import bench, tasks
from fedjax_sim.data import DataNotFoundError, from_huggingface, load_dataset

datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets, the extra hf")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()


def table(rows: int = 20) -> dict[str, list[Any]]:
    """Numbers, flags, kinds, owners and parts."""
    return {
        "height": [0.5 * i for i in range(rows)],
        "old": [i % 3 == 0 for i in range(rows)],
        "legs": [i % 4 for i in range(rows)],
        "kind": [("cat", "dog", "ape")[i % 3] for i in range(rows)],
        "owner": [(10, 9, 2)[i % 7 % 3] for i in range(rows)],
        "held": [i % 5 == 1 for i in range(rows)],
    }


def pets(**columns: Any) -> Any:
    return datasets.Dataset.from_dict(table() | columns)


def classified(rows: Any, names: tuple[str, ...] = ("ape", "cat", "dog", "eel")) -> Any:
    return rows.cast_column("kind", datasets.ClassLabel(names=list(names)))


def same(a: Any, b: Any, but: tuple[str, ...] = ("name", "task", "test_set")) -> None:
    """Two data sets are equal in all other fields."""
    assert repr(a.task) == repr(b.task)
    for field in (f for f in a._fields if f not in but):
        one, other = getattr(a, field), getattr(b, field)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field
            assert np.array_equal(one, other), field
        else:
            assert one == other, field


@pytest.mark.parametrize("options", ["", ",test=0.5", ",test=held"])
def test_a_table_is_what_the_same_csv_is(options: str) -> None:
    rows = table()
    if options != ",test=held":
        del rows["held"]
    text = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    Path("pets.csv").write_text("\n".join(text).replace("True", "1").replace("False", "0"))
    datasets.Dataset.from_dict(rows).save_to_disk("pets")
    given = f",label=kind,client=owner{options}"
    ours = load_dataset(f"hf:pets{given}")
    same(ours, load_dataset(f"csv:pets.csv{given}"))
    assert ours.client_names == ("2", "9", "10")  # numbers, not texts
    assert ours.numeric is not None
    assert ours.numeric.tolist() == [True, False, True]
    if options == ",test=held":
        assert ours.test_x[:, 0].tolist() == [0.5, 3.0, 5.5, 8.0]


def test_every_place_says_the_same() -> None:
    rows = classified(pets()).remove_columns("held")
    rows.select(range(6)).save_to_disk("one")
    both = datasets.DatasetDict({"train": rows, "test": rows.select([4, 1, 9])})
    both.save_to_disk("saved")
    Path("shards/data").mkdir(parents=True)
    rows.select(range(12)).to_parquet("shards/data/train-00000-of-00002.parquet")
    rows.select(range(12, 20)).to_parquet("shards/data/train-00001-of-00002.parquet")
    rows.select([4, 1, 9]).to_parquet("shards/data/test-00000-of-00001.parquet")
    before = sorted(Path("shards").rglob("*"))
    saved, sharded = (load_dataset(f"hf:{name},client=owner") for name in ("saved", "shards"))
    assert sorted(Path("shards").rglob("*")) == before  # nothing is written to a user's folder
    same(saved, sharded)
    same(saved, from_huggingface("both", both, client="owner"))
    assert saved.test_set == "its split 'test'"
    assert saved.class_names == ("ape", "cat", "dog", "eel")  # of which there is no eel
    assert saved.train_y.tolist() == [(1, 2, 0)[i % 3] for i in range(20)]
    assert saved.test_y.tolist() == [2, 2, 1]
    assert saved.test_client is not None
    assert [saved.client_names[k] for k in saved.test_client] == ["9", "9", "2"]
    rows.to_parquet("pets.parquet")
    (arrow,) = Path("one").glob("*.arrow")
    for file, whole in (("pets.parquet", rows), (str(arrow), rows.select(range(6)))):
        name = f"hf:{file},client=owner,test=0.5"
        same(load_dataset(name), from_huggingface(name, whole, client="owner", test=0.5))
    rows.select(range(6)).to_parquet("pets.parquet")  # nothing old is served
    assert len(load_dataset("hf:pets.parquet,label=kind,test=0.5").train_y) == 3


def test_splits_by_name_and_shares() -> None:
    rows = pets()
    both = datasets.DatasetDict({"train": rows, "validation": rows.select([3]), "test": rows})
    data = from_huggingface("pets", both, label="kind", test="validation")
    assert (len(data.train_y), data.test_x[:, 0].tolist()) == (20, [1.5])
    data = from_huggingface("pets", both, label="kind", test=0.5)  # of train alone
    assert len(data.train_y) + len(data.test_y) == 20
    only = datasets.DatasetDict({"everything": rows})
    same(
        from_huggingface("pets", only, label="kind"),
        from_huggingface("pets", rows, label="kind", test=0.2),
    )


@pytest.mark.parametrize("grey", [True, False])
def test_images(grey: bool) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (9, 5, 4) if grey else (9, 5, 4, 3), np.uint8)
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["b", "a"]),
            "writer": datasets.Value("string"),
            "page": datasets.Value("int64"),  # images are the inputs, beside whatever
        }
    )
    rows = datasets.Dataset.from_dict(
        {
            "picture": [Image.fromarray(image) for image in pixels],
            "kind": [i % 2 for i in range(9)],
            "writer": list("xyz" * 3),
            "page": [0] * 9,
        },
        features=features,
    )
    rows = rows.select([8, *range(8)])  # rows that are not in the order of the file
    rows.set_format("numpy", columns=["page"])  # formats are of no account
    rows.save_to_disk("digits")
    data = load_dataset("hf:digits,client=writer,test=0.3")
    order = [8, *range(8)]
    held = np.isin(np.arange(9), _held(np.array(order) % 2))
    expected = pixels[order].reshape(9, 5, 4, -1)
    assert data.train_x.dtype == np.uint8
    assert np.array_equal(data.train_x, expected[~held])
    assert np.array_equal(data.test_x, expected[held])
    assert (data.class_names, data.client_names) == (("b", "a"), ("x", "y", "z"))
    assert data.train_y.tolist() == (np.array(order) % 2)[~held].tolist()
    assert data.train_client is not None
    assert data.train_client.tolist() == (np.array(order) % 3)[~held].tolist()


def _held(labels: Any) -> list[int]:
    """The places that the fixed draw holds out: 30 % of each class."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    return [i for mine in rows for i in mine[: round(0.3 * len(mine))]]


def test_other_tasks_and_inputs() -> None:
    rows = pets().select_columns(["height", "legs"])
    data = from_huggingface("pets", rows, target="legs")
    assert repr(data.task) == "regression()"
    assert sorted([*data.train_y, *data.test_y]) == sorted(i % 4 for i in range(20))
    flags = [[i % 2, 1] for i in range(20)]
    rows = pets(tags=flags).select_columns(["height", "tags"])
    data = from_huggingface("pets", rows, label="tags", test=0.25)
    assert repr(data.task) == "multi_label(2)"
    assert len(data.test_y) == 5
    assert {*map(tuple, data.train_y.tolist())} == {(True, True), (False, True)}
    lists = pets(tags=flags, words=flags).select_columns(["words", "tags"])
    assert from_huggingface("pets", lists, label="tags").train_x.shape == (16, 2)
    pairs = [[0.5 * i, 1.0] for i in range(20)]
    data = from_huggingface("pets", pets(pair=pairs), target="pair", input="height")
    assert repr(data.task) == repr(tasks.regression(2))
    assert data.train_x.shape == (16, 1)
    tokens = [[i, i + 1] for i in range(20)]
    data = from_huggingface("pets", pets(words=tokens), label="kind", input="words")
    assert data.train_x.dtype == np.int32
    assert data.mean is None
    assert {*map(tuple, [*data.train_x.tolist(), *data.test_x.tolist()])} == {*map(tuple, tokens)}
    grey = datasets.Array2D((2, 3), "uint8")
    scans = pets(scan=[np.full((2, 3), i, np.uint8) for i in range(20)]).cast_column("scan", grey)
    data = from_huggingface("pets", scans, label="old", input="scan")
    assert data.train_x.shape[1:] == (2, 3, 1)
    assert data.train_x.dtype == np.uint8
    assert data.class_names == ("False", "True")


def test_large_integers_stay_distinct_beside_gaps() -> None:
    owners = [[2**53, 2**53 + 1, None, 7][i % 4] for i in range(20)]
    data = from_huggingface(
        "pets", pets(owner=owners), label="kind", client="owner", missing="drop"
    )
    assert data.client_names == ("7", str(2**53), str(2**53 + 1))
    data = from_huggingface("pets", pets(legs=owners), label="kind", missing="mean")
    assert data.train_x.dtype == np.float32


def two(**splits: Any) -> Any:
    return datasets.DatasetDict(splits)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "stream": (lambda: pets().to_iterable_dataset(), {}, "which streaming=False loads, got Iter"),
    "empty": (lambda: pets().select([]), {"label": "kind"}, "must have rows"),
    "no train": (lambda: two(a=pets(), b=pets()), {}, "must have a split 'train', got a, b"),
    "missing": (pets, {"label": "sort"}, "has no column 'sort'; columns: height, old"),
    "missing in the test": (
        lambda: two(train=pets(), test=pets().remove_columns("owner")),
        {"label": "kind", "client": "owner"},
        "row 20, column 'owner' must have a value, got none",
    ),
    "other codes": (
        lambda: two(train=classified(pets()), test=classified(pets(), ("dog", "cat", "ape"))),
        {},
        r"column 'kind' must be alike in both splits, .*'eel'\]\) and ClassLabel",
    ),
    "no label": (pets, {"client": "owner"}, "label=COLUMN or target=.* as no column has class"),
    "test": (pets, {"label": "kind", "test": "later"}, "test must be a share, a .* got 'later'"),
    "share": (pets, {"label": "kind", "test": -0.5}, "test must be a share between 0 and 1"),
    "test rows": (pets, {"label": "kind", "test": "legs"}, "row 2, column 'legs' must be one of"),
    "text": (
        lambda: pets(said=["woof"] * 20),
        {"label": "kind"},
        "row 0, column 'said' must be a number, got 'woof': use categorical=said",
    ),
    "lists": (
        lambda: pets(walk=[[1, 2]] * 20),
        {"label": "kind"},
        "column 'walk' must be numbers or texts, .* use input=COLUMN",
    ),
    "hole": (
        lambda: pets(height=[0.0, None, *range(18)]),
        {"label": "kind"},
        "row 1, column 'height' must have a value, got none",
    ),
    "unlabelled": (
        lambda: classified(pets(kind=[-1, *[0, 1] * 9, 0])),
        {"label": "kind"},
        "row 0, column 'kind' must have a value, got none or the label -1: use missing=drop",
    ),
    "numbers": (pets, {"label": "height"}, "has 20 distinct numbers .* give target=height"),
    "texts": (pets, {"target": "kind"}, "must be a finite number.* use label=kind"),
    "ragged": (
        lambda: pets(walk=[[1] * (i + 1) for i in range(20)]),
        {"label": "kind", "input": "walk"},
        "column 'walk' must have lists of one length in all rows",
    ),
    "sound": (  # decoding would open the files that it names
        lambda: pets(said=["a.wav"] * 20).cast_column("said", datasets.Audio()),
        {"label": "kind", "input": "said"},
        r"column 'said' must be lists of numbers, got Audio\(",
    ),
    "infinite": (
        lambda: pets(height=[*range(19), np.inf]),
        {"target": "height"},
        "row 19, column 'height' must be a finite number, got 'inf'",
    ),
    "twice": (pets, {"label": "kind", "client": "kind"}, "its own column.* client=kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    make, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        from_huggingface("pets", make(), **options)
    assert "\n" not in str(caught.value)


def test_refuses_images_of_two_sizes_and_broken_ones() -> None:
    sizes = [np.zeros((2, 2 + (i == 3)), np.uint8) for i in range(6)]
    made: dict[str, list[Any]] = {
        "x": [Image.fromarray(image) for image in sizes],
        "y": ["a", "b"] * 3,
    }
    features = datasets.Features({"x": datasets.Image(), "y": datasets.Value("string")})
    rows = datasets.Dataset.from_dict(made, features=features)
    with pytest.raises(
        ValueError, match=r"row 3, .* must be 2 x 2 pixels, as row 0, .* is, got 3 x 2"
    ):
        from_huggingface("scans", rows, label="y")
    made["x"][1] = {"bytes": b"no image", "path": None}
    rows = datasets.Dataset.from_dict(made, features=features)
    with pytest.raises(ValueError, match="row 1, column 'x' must be an image that Pillow reads"):
        from_huggingface("scans", rows, label="y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:", "hf: must have a folder, file or name"),
        ("hf:pets,streaming=true", "hf: takes label=, target=, client=, .* got 'streaming=true'"),
        ("hf:pets,test=2", "hf: test must be a share between 0 and 1"),
    ],
)
def test_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(text)


def test_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dataset", "hf:nobody/pets,client=owner", "--rounds", "1", "--dry-run"]
    assert bench.main(argv) == 2  # a dry run does not connect
    error = capsys.readouterr().err
    assert "there is no folder or file nobody/pets, and as a name on the Hub it cannot" in error
    assert error.count("\n") == 1
    assert not datasets.config.HF_HUB_OFFLINE  # as it was
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataNotFoundError, match="pip install datasets"):
        load_dataset("hf:pets,label=kind")


def test_files_that_are_none() -> None:
    Path("pets.txt").write_text("cat")
    Path("pets.parquet").write_text("cat")
    for place, message in (
        ("pets.txt", r"a file must be \.parquet or \.arrow, got pets\.txt"),
        ("pets.parquet", "cannot be read: "),
    ):
        with pytest.raises(ValueError, match=f"^hf:{place},label=kind: {message}"):
            load_dataset(f"hf:{place},label=kind")
    with pytest.raises(ValueError, match="config=small is not for saved data"):
        load_dataset("hf:pets.parquet,label=kind,config=small")
