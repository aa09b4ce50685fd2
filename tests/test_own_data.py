"""A user's own files by --dataset: what is read from them, and what is refused in a line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import known
from PIL import Image

from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import DataNotFoundError, load_dataset, parse_dataset

RNG = np.random.default_rng(0)


def check_refused(message: str, name: str) -> None:
    """load_dataset says so, in one line that begins with the name."""
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: [^\n]*$") as caught:
        load_dataset(name)
    said = str(caught.value).removeprefix(f"{name}: ")
    assert re.search(message, said), said


# .npz


def keras() -> dict[str, Any]:
    return {
        "x_train": RNG.integers(0, 256, (8, 3, 5), dtype=np.uint8),
        "y_train": np.arange(8, dtype=np.uint8) % 3,
        "x_test": RNG.integers(0, 256, (4, 3, 5), dtype=np.uint8),
        "y_test": np.array([2, 1, 0, 1], np.uint8),
    }


def test_npz_of_grey_images(tmp_path: Path) -> None:
    arrays, file = keras(), tmp_path / "mnist.npz"
    np.savez(file, **arrays)
    data = load_dataset(str(file), tmp_path / "no_such_folder")
    assert np.array_equal(data.train_x, arrays["x_train"][..., None])
    assert np.array_equal(data.test_x, arrays["x_test"][..., None])
    assert data.train_x.dtype == np.uint8
    assert data.train_y.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data.test_y.tolist() == [2, 1, 0, 1]
    assert data.train_y.dtype == data.test_y.dtype == np.int32
    assert (data.classes, data.class_names, data.train_client) == (3, (), None)
    np.testing.assert_allclose(known(data.mean), [arrays["x_train"].mean()], rtol=1e-6)
    np.savez(file, **arrays | {"y_test": np.zeros(4, int)})  # nothing old is served
    assert load_dataset(str(file)).test_y.tolist() == [0, 0, 0, 0]


def test_npz_of_signals_and_clients(tmp_path: Path) -> None:
    file = tmp_path / "signals.npz"
    arrays = keras() | {
        "x_train": RNG.normal(size=(8, 7, 2)),
        "x_test": RNG.normal(size=(4, 7, 2)),
        "client_train": np.array(list("bbddbbdd")),
    }
    np.savez(file, **arrays, more=[1])
    data = load_dataset(str(file))
    assert data.train_x.dtype == np.float32
    np.testing.assert_array_equal(data.train_x, arrays["x_train"].astype(np.float32))
    assert data.client_names == ("b", "d")
    assert known(data.train_client).tolist() == [0, 0, 1, 1] * 2
    assert data.test_client is None
    np.savez(file, **arrays, client_test=np.array(list("acda")))
    data = load_dataset(str(file))
    assert data.client_names == ("a", "b", "c", "d")
    assert known(data.train_client).tolist() == [1, 1, 3, 3] * 2
    assert known(data.test_client).tolist() == [0, 2, 3, 0]


BAD_NPZ: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (
        {"x_test": None, "y_test": None},
        "must have the arrays .* no x_test and no y_test",
    ),
    "objects": (
        {"y_test": np.array([None] * 4)},
        "not a whole .npz file of arrays: y_test.npy: Object arrays",
    ),
    "text": ({"x_train": np.full((8, 3), "a")}, r"x_train must be numbers .* got <U1 \[8, 3\]"),
    "empty": ({"x_test": np.zeros((0, 3, 5), np.uint8)}, "x_test must be numbers .* n > 0"),
    "columns": (
        {"y_train": np.zeros((8, 1), int)},
        r"y_test must be like y_train, .*\[8, 1\], got uint8 \[4\]",
    ),
    "one-hot": (
        {"y_test": np.zeros((4, 3))},
        r"y_test must be like y_train, .* got float64 \[4, 3\]",
    ),
    "shapes": ({"x_test": np.zeros((4, 5, 5), np.uint8)}, "x_test must be like x_train"),
    "dtypes": ({"x_test": np.zeros((4, 3, 5))}, "x_test must be like x_train"),
    "no class 2": ({"y_train": np.full(8, 4)}, "y must have every class"),
    "one class": ({"y_train": np.zeros(8, int), "y_test": np.zeros(4, int)}, "at least two"),
    "owners": ({"client_train": np.zeros(7)}, r"client_train must have shape \[8\], got \[7\]"),
    "owner alone": ({"client_test": np.zeros(4, int)}, "client_test needs client_train"),
    "owners beyond float64": (
        {"client_train": np.full(8, 2**53 + 1), "client_test": np.full(4, 2**53, np.uint64)},
        "client_test must be int64, as client_train, got uint64",
    ),
    "owner NaN": ({"client_train": np.full(8, np.nan)}, "client must be .* got NaN"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_npz_refuses(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changed, message = BAD_NPZ[case]
    arrays = keras() | changed
    np.savez("mine.npz", **{key: value for key, value in arrays.items() if value is not None})
    check_refused(message, "mine.npz")


def test_npz_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    with pytest.raises(DataNotFoundError, match=f"there is no file {file}$"):
        load_dataset(str(file))
    file.write_bytes(b"not a zip file")
    check_refused("not a whole .npz file", str(file))
    np.savez(file, **keras())
    file.write_bytes(file.read_bytes()[:-300])
    check_refused("not a whole .npz file", str(file))


# .csv

ROWS = [
    "height, ward,sex,kind,part",
    "1.5,10,0,dog,train",
    "-2e1,2,1,cat,TRAIN",
    "3,10,1,ant,0",
    "",
    '"4",2,0,dog,test',
    "5,30,0,cat,1",
]


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    monkeypatch.chdir(tmp_path)

    def write(rows: list[str]) -> None:
        Path("pets.csv").write_text("\n".join([*rows, ""]), encoding="utf-8-sig")

    write(ROWS)
    return write


PETS = "csv:pets.csv,label=kind,client=ward,test=part"


@pytest.mark.usefixtures("pets")
def test_csv() -> None:
    data = load_dataset(PETS)
    assert data.name == PETS
    assert data.train_x.tolist() == [[1.5, 0], [-20, 1], [3, 1]]
    assert data.test_x.tolist() == [[4, 0], [5, 0]]
    assert data.train_x.dtype == np.float32
    assert data.class_names == ("ant", "cat", "dog")
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([2, 1, 0], [2, 1])
    assert data.client_names == ("2", "10", "30")  # as numbers
    assert known(data.train_client).tolist() == [1, 0, 1]
    assert known(data.test_client).tolist() == [0, 2]
    assert known(data.numeric).tolist() == [True, False]  # 0 and 1 stay as they are
    height = np.array([1.5, -20, 3])
    np.testing.assert_allclose(known(data.mean), [height.mean(), 0], rtol=1e-6)
    np.testing.assert_allclose(known(data.std), [height.std(), 1], rtol=1e-6)
    assert data.test_set == "the test rows of 'part'"


def test_csv_holds_out_a_share_of_each_class(pets: Callable[[list[str]], None]) -> None:
    kinds = ["10"] * 20 + ["9"] * 40
    pets(["a,kind", *(f"{i},{kind}" for i, kind in enumerate(kinds))])
    fifth, half = (load_dataset(f"csv:pets.csv,label=kind{t}") for t in ("", ",test=0.5"))
    assert fifth.class_names == ("9", "10")
    assert np.bincount(fifth.test_y).tolist() == [8, 4]
    assert np.bincount(half.test_y).tolist() == [20, 10]
    assert fifth.train_client is None
    for data in (fifth, half):
        parts = [(data.train_x, data.train_y), (data.test_x, data.test_y)]
        rows = [
            (int(a), data.class_names[k]) for x, y in parts for (a,), k in zip(x, y, strict=True)
        ]
        assert sorted(rows) == list(enumerate(kinds))
    again = load_dataset("csv:pets.csv,label=kind")
    assert np.array_equal(again.test_x, fifth.test_x)
    pets(["a,kind", "1,a", "2,b", "3,a"])  # a file that has changed
    assert load_dataset("csv:pets.csv,label=kind,test=0.5").class_names == ("a", "b")


BAD_CSV: dict[str, tuple[int, str, str]] = {
    "no column": (0, ROWS[0].replace("kind", "race"), "has no column 'kind'; .* height, ward"),
    "unnamed": (0, ROWS[0].replace("height", ""), "line 1 must name .* column 1 .*index"),
    "text": (2, "tall,2,1,cat,train", "line 3, column 'height' must be a number, got 'tall'"),
    "empty cell": (
        6,
        "5,30, ,cat,1",
        "line 7, column 'sex' must have a value, got none: use missing=drop",
    ),
    "beyond float32": (5, "1e39,3,1,cat,1", "line 6, column 'height' must be a finite .*1e"),
    "repeated": (0, ROWS[0].replace("sex", "height"), "line 1 must have .* got 'height' again"),
    "no label": (6, "5,30,0,,1", "line 7, column 'kind' must have a value"),
    "part": (6, "5,30,0,cat,valid", "line 7, column 'part' must be one of 0, 1, .*'valid'"),
    "long": (3, "3,10,1,ant,0,", "must be csv with 5 columns, got: .* line 4, saw 6"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_csv_refuses(case: str, pets: Callable[[list[str]], None]) -> None:
    i, row, message = BAD_CSV[case]
    pets([*ROWS[:i], row, *ROWS[i + 1 :]])
    check_refused(f"^{message}", PETS)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("csv:pets.csv,label=b", ["a,b"], "must have rows, got none$"),
        ("csv:pets.csv,label=b,missing=drop", ["a,b", ",c"], "must have rows, got none; all lack"),
        ("csv:pets.csv,label=b", ["a,b", "1,c,", "2,d,3"], "must have 2 cells in every row"),
        ("csv:pets.csv,target=b", ["a,b", "1,2", "2,inf"], "line 3, column 'b' .* got 'inf'"),
        ("csv:pets.csv,label=b,categorical=b", ["a,b", "1,c"], "categorical must .* got 'b'"),
        ("csv:pets.csv,label=b", [], "has no column 'b'"),
        ("csv:pets.csv,label=b", ["b", "1", "2"], "must have an input column too"),
        (
            "csv:pets.csv,label=b",
            ["a;b", "1;2"],
            "has no column 'b'; columns: a;b; ';' seems .* use sep=;",
        ),
        ("csv:pets.csv,label=b", ["a,b", "1,c", "2,c"], "column 'b' must have two .* got c alone"),
        ("csv:pets.csv,label=b", ["a,b", "1,c", "2,d"], "test=0.2 must leave .* got 0 of 2 rows"),
        (
            "csv:pets.csv,label=b",
            ["a,b", "1,2.5", "2,3", "3,4.5", "4,2.5"],
            r"column 'b' has 3 distinct numbers in 4 rows, such as 2\.5: give target=b",
        ),
        (
            "csv:pets.csv,label=b,categorical=a,missing=mean",
            ["a,b", ",c", ",d"],
            "column 'a' must have a value, got none: remove the column",
        ),
    ],
)
def test_csv_refuses_a_table(
    name: str, rows: list[str], message: str, pets: Callable[[list[str]], None]
) -> None:
    pets(rows)
    check_refused(f"^{message}", name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("csv:", "csv: must have a file and label=COLUMN"),
        (
            "csv:pets.csv,lable=kind",
            "csv: takes label=, target=, client=, test=, .* once each, got 'lable=kind'",
        ),
        ("csv:pets.csv,label=a,client=a", "csv: each role must have its own column"),
        ("csv:pets.csv,label=a,test=1", "csv: test must be a share between 0 and 1, .* got 1"),
        ("csv:pets.csv,label=a,missing=skip", "csv: missing must be one of refuse, drop, mean"),
        ("csv:pets.csv,label=a,encoding=utf9", "csv: encoding must be one .* such as latin-1"),
        ("csv:pets.csv,label=a,sep=::", "csv: sep must be one character, tab or space, got '::'"),
        ("csv:pets.csv,target=a,classes=2", "csv: classes= is for labels"),
        ("csv:pets.csv,target=a,task=classification", "csv: target= must be of task=regression"),
        ("mine.npz,classes=1", "npz: classes must be an integer of at least 2, got '1'"),
        ("leaf:users,task=words", "leaf: task must be one of classification, regression, multi"),
        ("folder:images,size=0", "folder: size must be PIXELS or WIDTHxHEIGHT, .* got '0'"),
    ],
)
def test_csv_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_dataset(text)
    with pytest.raises(ValueError, match=f"--dataset: {message}"):
        parse(["--dataset", text])


def test_csv_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"there is no file pets\.csv$"):
        load_dataset(PETS)


# Images


def write_images(folder: Path, mode: str = "L") -> dict[str, np.ndarray]:
    channels = () if mode == "L" else (3,)
    images = {}
    for place in ("train/eel/b.png", "train/eel/a.PNG", "train/cat/c.png", "test/eel/z.png"):
        images[place] = RNG.integers(0, 256, (4, 6, *channels), dtype=np.uint8)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[place]).save(folder / place)
    (folder / "train/eel/.DS_Store").write_text("no image")
    (folder / "train/.hidden").mkdir()
    return images


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_folder_of_images(mode: str, tmp_path: Path) -> None:
    images = write_images(tmp_path, mode)
    data = load_dataset(f"folder:{tmp_path}")
    order = ("train/cat/c.png", "train/eel/a.PNG", "train/eel/b.png")
    channels = 1 if mode == "L" else 3
    wanted = np.stack([images[place] for place in order]).reshape(3, 4, 6, channels)
    assert np.array_equal(data.train_x, wanted)
    assert np.array_equal(data.test_x[0].squeeze(), images["test/eel/z.png"])
    assert data.train_x.dtype == data.test_x.dtype == np.uint8
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 1, 1], [1])
    assert (data.class_names, data.classes) == (("cat", "eel"), 2)
    np.testing.assert_allclose(known(data.mean), wanted.mean((0, 1, 2)), rtol=1e-6)


def test_a_grey_image_among_colours(tmp_path: Path) -> None:
    images = write_images(tmp_path)
    blue = np.full((4, 6, 3), (1, 2, 3), np.uint8)
    Image.fromarray(blue).save(tmp_path / "test/eel/z.png")
    Image.new("RGB", (6, 4)).save(tmp_path / "test/eel/zz.jpg")
    data = load_dataset(f"folder:{tmp_path}")
    assert np.array_equal(data.test_x, [blue, 0 * blue])
    grey = images["train/cat/c.png"]
    assert np.array_equal(data.train_x[0], np.stack([grey] * 3, axis=-1))


def test_folder_refuses(tmp_path: Path) -> None:
    name = f"folder:{tmp_path}"
    check_refused("must have a folder for each class, got none", name)
    write_images(tmp_path)
    with pytest.raises(DataNotFoundError, match=f"there is no folder {tmp_path / 'valid'}$"):
        load_dataset(f"{name},test=valid")
    bad = tmp_path / "test/eel/z.png"
    good = bad.read_bytes()
    Image.new("L", (5, 4)).save(bad)
    check_refused(r"z\.png must be 6 x 4 pixels, as \S+c\.png is, got 5 x 4: use size=6x4", name)
    Image.new("I;16", (6, 4)).save(bad)
    check_refused(r"z\.png must have 8 bits a channel, got mode I;16", name)
    for content in (b"no image", good[:60]):
        bad.write_bytes(content)
        check_refused(r"z\.png must be an image that Pillow reads", name)
    bad.unlink()
    check_refused(r"eel must have an image \(.png, .jpg, .jpeg\), got none", name)
    bad.parent.rmdir()
    check_refused("test must have folders of train's classes, cat, eel, got none", name)
    (tmp_path / "test/dog").mkdir()
    check_refused("test must have folders of train's classes, cat, eel, got dog", name)
    for file in (tmp_path / "train/eel").iterdir():
        file.unlink()
    (tmp_path / "train/eel").rmdir()
    check_refused("train must have a folder for each class", name)


# LEAF


def write_leaf(folder: Path, **changed: Any) -> None:
    """Users in two files of train; u9 has no sample, u1 none in training."""
    files: dict[str, dict[str, Any]] = {
        "train/a.json": {"u2": ([[1.0, 2.0], [3.0, 4.0]], [0, 2]), "u9": ([], [])},
        "train/b.json": {"u0": ([[5, 6]], [1])},
        "test/a.json": {"u2": ([[7.5, 8.0]], [2]), "u1": ([[9.0, 10.0]], [0])},
    }
    for place, users in files.items():
        content: dict[str, Any] = {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        }
        (folder / place).parent.mkdir(exist_ok=True)
        if place == "test/a.json":
            content["user_data"]["u1"] |= changed.pop("u1", {})
            content |= changed
        (folder / place).write_text(json.dumps(content))


def test_leaf(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    data = load_dataset(f"leaf:{tmp_path}")
    assert data.train_x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.test_x.tolist() == [[7.5, 8], [9, 10]]
    assert data.train_x.dtype == np.float32
    assert (data.train_y.tolist(), data.test_y.tolist(), data.classes) == ([0, 2, 1], [2, 0], 3)
    assert data.client_names == ("u0", "u1", "u2")
    assert known(data.train_client).tolist() == [2, 2, 0]
    assert known(data.test_client).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"users": None}, r'test/a\.json must be json with "users"'),
        ({"users": ["u2", "u5"]}, r"test/a\.json must be .* got: KeyError\('u5'\)"),
        ({"u1": {"x": [[1.0]]}}, "test: x and y must have the same shape for all users"),
        ({"u1": {"x": [[1.0], [2.0, 3.0]]}}, "user 'u1': x and y must be lists of one shape"),
        ({"u1": {"x": ["to be"]}}, "user 'u1': x must be numbers .* got <U5"),
        ({"u1": {"y": [0, 1]}}, r"user 'u1': y must be 1 numbers or texts, .* got int64 \[2\]"),
        (
            {"u1": {"y": [7]}},
            "y must have every class from 0 to its largest, 7, got none of class 3",
        ),
    ],
)
def test_leaf_refuses(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_leaf(tmp_path, **changed)
    check_refused(message, f"leaf:{tmp_path}")


def test_leaf_that_is_none(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    file = tmp_path / "test/a.json"
    file.write_text("{")
    check_refused(r"a\.json must be json with", f"leaf:{tmp_path}")
    file.unlink()
    with pytest.raises(DataNotFoundError, match=r"there is no \.json file in \S+test$"):
        load_dataset(f"leaf:{tmp_path}")


# The command


@pytest.mark.slow
def test_the_command_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("images", "users"):
        Path(name).mkdir()
    np.savez("mine.npz", **keras(), client_train=np.arange(8) % 4)
    Path("pets.csv").write_text(
        "\n".join(["a,kind,owner", *(f"{i},{i % 2},o{i % 4}" for i in range(40))])
    )
    write_images(Path("images"))
    write_leaf(Path("users"))
    pets = "csv:pets.csv,label=kind,client=owner"
    for name, partition, clients, model in (
        ("mine.npz", "natural", 4, "mlp"),
        (pets, "natural", 4, "ffn"),
        ("folder:images", "iid", 2, "mlp"),
        ("leaf:users", "natural", 2, "ffn"),
    ):
        argv = ["--dataset", name, "--partition", partition, "--clients", str(clients)]
        setup = build(parse([*argv, "--algo", "fedavg", "--compare", "none", "--seeds", "1"]))
        assert setup.model_name == model
        assert len(setup.partitions[0].sizes) == clients
    argv = ["--dataset", pets, "--partition", "natural", "--algo", "fedavg", "--split", "clients"]
    setup = build(parse([*argv, "--folds", "4", "--seeds", "1"]))
    assert setup.problem.scaled
    assert setup.partitions[0].sizes.tolist() == [10] * 4  # test rows too
