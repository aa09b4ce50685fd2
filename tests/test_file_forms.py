"""Files in the forms in which they are published: they load right, or are rejected with advice."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import known
from PIL import Image

from fedjax_sim.data import Dataset, from_huggingface, load_dataset, summary
from fedjax_sim.data.folder import DataNotFoundError

Facts = Callable[[Dataset], Any]


def leaf(train: tuple[Any, Any], test: tuple[Any, Any], encoding: str = "utf-8") -> None:
    """Users a and b, each with half of the samples."""
    for place, (x, y) in (("train", train), ("test", test)):
        Path("users", place).mkdir(parents=True)
        half = len(y) // 2
        users = {"a": {"x": x[:half], "y": y[:half]}, "b": {"x": x[half:], "y": y[half:]}}
        content = {"users": ["a", "b"], "num_samples": [half, len(y) - half], "user_data": users}
        Path("users", place, "data.json").write_text(json.dumps(content), encoding=encoding)


def femnist(labels: list[Any], encoding: str = "utf-8") -> None:
    pixels = [[1.0] * 784] * len(labels)
    leaf((pixels, labels), (pixels, labels), encoding)


def shakespeare() -> None:
    leaf((["to be or", "o be or "], [" ", "n"]), ([" be or n", "be or no"], ["o", "n"]))


def sent140() -> None:
    row = ["1467", "Mon Apr 06", "NO_QUERY", "ann", "so sad today", "training"]
    leaf(([row] * 2, [0, 1]), ([row] * 2, [0, 1]))


def celeba() -> None:
    leaf((["01.jpg", "02.jpg"], [0, 1]), (["03.jpg", "04.jpg"], [0, 1]))


def table(*lines: str, file: str = "mine.csv", encoding: str = "utf-8") -> None:
    raw = "\n".join(lines).encode(encoding)
    Path(file).write_bytes(gzip.compress(raw) if file.endswith(".gz") else raw)


def adult() -> None:
    """Categories, a gap as "?" and as an empty cell, and truth values."""
    rows = [
        "39, State-gov, ?, True, <=50K, 0",
        "50, Private, 7, false, >50K, 0",
        ", Private, 9, False, <=50K, 1",
        "28, , 13, TRUE, >50K, 1",
        "41, Local-gov, 8, true, >50K, 1",
        "60, Private, 5, false, <=50K, 0",
    ]
    table("years,work,education,native,income,test", *rows)


def owners() -> None:
    """Of two hospitals that are in both files, and one that is in the test file alone."""
    np.savez(
        "mine.npz",
        x_train=np.zeros((4, 2)),
        y_train=np.array(["ill", "well", "ill", "well"]),
        client_train=np.array(["gent", "gent", "aalst", "aalst"]),
        x_test=np.zeros((2, 2)),
        y_test=np.array(["well", "dead"]),
        client_test=np.array(["gent", "brugge"]),
    )


def pictures() -> None:
    """Classes 0, 2 and 10 without a test folder: RGB, grey and half transparent, of two sizes."""
    for name in ("10", "2", "0"):
        Path("images", name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (4 + i % 2, 4), "red").save(f"images/{name}/{i}.png")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save("images/0/0.png")
    Image.new("L", (4, 4), 9).save("images/0/1.png")


def y_of(data: Dataset) -> Any:
    return data.train_y.tolist(), data.test_y.tolist(), data.class_names


def x_of(data: Dataset) -> Any:
    return [*data.train_x.tolist(), *data.test_x.tolist()]


LOADED: dict[str, tuple[Callable[[], None], str, Facts, Any]] = {
    "LEAF's pixels, a class missing": (
        lambda: femnist([0, 1, 3, 0]),
        "leaf:users,classes=62",
        lambda d: (d.classes, d.client_names, d.train_x.shape),
        (62, ("a", "b"), (4, 784)),
    ),
    "LEAF's characters": (
        shakespeare,
        "leaf:users",
        lambda d: ("".join(d.class_names[k] for k in d.train_x[1]), *y_of(d)[:2], d.mean),
        ("o be or ", [0, 3], [4, 3], None),
    ),
    "FedProx's floats": (
        lambda: femnist([0.0, 1.0, 2.0, 0.0]),
        "leaf:users,task=classification",
        lambda d: (*y_of(d)[:2], d.classes),
        ([0, 1, 2, 0], [0, 1, 2, 0], 3),
    ),
    "a mark of the byte order": (
        lambda: femnist([0, 1, 1, 0], "utf-8-sig"),
        "leaf:users",
        lambda d: d.classes,
        2,
    ),
    "categories and gaps: means": (
        adult,
        "csv:mine.csv,label=income,test=test,categorical=work,missing=mean",
        lambda d: (d.test_x.tolist(), known(d.numeric).tolist(), d.notes[1:]),
        (
            [
                [pytest.approx(149 / 3), 9, 0, 0, 1, 0],
                [28, 13, 1, 0, pytest.approx(2 / 3), pytest.approx(1 / 3)],
                [41, 8, 1, 1, 0, 0],
            ],
            [True, True, False, False, False, False],
            (
                "3 of 6 rows have missing cells filled with the training mean: years, education, "
                "work.",
            ),
        ),
    ),
    "categories and gaps: rows without them": (
        adult,
        "csv:mine.csv,label=income,test=test,categorical=all,missing=drop",
        lambda d: (x_of(d), d.notes),
        (
            [[50, 7, 0, 0, 1], [60, 5, 0, 0, 1], [41, 8, 1, 1, 0]],
            (
                "3 of 6 rows lack a value and were dropped.",
                "Column 'work' is one-hot encoded: Local-gov, Private.",
            ),
        ),
    ),
    "a semicolon": (
        lambda: table("a;kind", "1;é", "2;a", "3;é", file="mine.csv.gz", encoding="latin-1"),
        "csv:mine.csv.gz,label=kind,sep=;,encoding=latin-1,test=0.5",
        lambda d: (d.class_names, sorted(x_of(d))),
        (("a", "é"), [[1], [2], [3]]),
    ),
    "numbered labels of a table": (
        lambda: table("a,kind", *(f"{i},{i % 2}" for i in range(8))),
        "csv:mine.csv,label=kind,classes=5,test=0.5",
        lambda d: (d.classes, d.class_names, np.bincount(d.test_y).tolist()),
        (5, (), [2, 2]),
    ),
    "owners in both files": (
        owners,
        "mine.npz",
        lambda d: (d.client_names, known(d.test_client).tolist(), y_of(d), summary(d).lone),
        (
            ("aalst", "brugge", "gent"),
            [2, 1],
            ([1, 2, 1, 2], [2, 0], ("dead", "ill", "well")),
            {"training": {"ill": 0.5}, "test": {"dead": 0.5}},
        ),
    ),
    "two classes": (
        lambda: table("a,kind", *(f"{i},{i % 2 == 0}" for i in range(10))),
        "csv:mine.csv,label=kind",
        lambda d: (d.class_names, np.bincount(d.test_y).tolist()),
        (("False", "True"), [1, 1]),
    ),
    "pictures of two sizes": (
        pictures,
        "folder:images,test=0.2,size=3x2",
        lambda d: (d.class_names, d.train_x.shape, d.test_x.shape, *d.notes),
        (
            ("0", "2", "10"),
            (12, 2, 3, 3),
            (3, 2, 3, 3),
            "1 of 15 images lose their transparency.",
        ),
    ),
}
REJECTED: dict[str, tuple[Callable[[], None], str, str]] = {
    "LEAF's pixels": (lambda: femnist([0, 1, 3, 0]), "leaf:users", "none of class 2: .*classes=4"),
    "FedProx's floats": (
        lambda: femnist([0.0, 1.0, 2.0, 0.0]),
        "leaf:users",
        "3 different whole numbers, .* give task=classification or task=regression",
    ),
    "LEAF's texts": (sent140, "leaf:users", "user 'a': x must be .*: give tokens, the same number"),
    "LEAF's names of files": (celeba, "leaf:users", "user 'a': x must be .* use folder:DIR"),
    "categories": (
        adult,
        "csv:mine.csv,label=income,missing=mean",
        "line 2, column 'work' must be a number, .*categorical=work .*categorical=all",
    ),
    "a gap": (
        adult,
        "csv:mine.csv,label=income,categorical=all",
        r"line 2, column 'education' must have a value, got none: use missing=drop .*missing=mean",
    ),
    "another encoding": (
        lambda: table("a,b", "1,é", encoding="latin-1"),
        "csv:mine.csv,label=b",
        "must be text in UTF-8.*encoding=latin-1",
    ),
    "labels that never match": (
        lambda: table("a,b,test", "1,<=50K,0", "2,>50K,0", "3,<=50K.,1", "4,>50K.,1"),
        "csv:mine.csv,label=b,test=test",
        r"classes of the training set, <=50K, >50K, got <=50K\., >50K\.: use",
    ),
    "pictures of two sizes": (pictures, "folder:images", "must be 4 x 4 .* use size=4x4"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("form", LOADED)
def test_loads(form: str) -> None:
    write, text, facts, wanted = LOADED[form]
    write()
    assert facts(load_dataset(text)) == wanted


def test_femnist(monkeypatch: pytest.MonkeyPatch) -> None:
    femnist([0, 61, 3, 0])
    Path("users").rename("femnist")
    data = load_dataset("femnist", ".")
    assert (data.name, data.classes, data.class_names[10:12]) == ("femnist", 62, ("A", "B"))
    assert data.train_x.shape == (4, 28, 28, 1)
    assert known(data.mean).tolist() == [1.0]
    monkeypatch.delenv("FEDJAX_SIM_DATA_DIR", raising=False)
    for folder in ("nowhere", None):
        with pytest.raises(
            DataNotFoundError, match=r"no folder femnist/train\).*or use hf:flwrlabs"
        ):
            load_dataset("femnist", folder)


def test_a_hugging_face_table_as_it_comes() -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets, the extra hf")
    rows = datasets.Dataset.from_dict(
        {
            "age": [1.0, None, 3.0, 4.0, 5.0, 6.0],
            "old": [True, False, None, True, True, False],
            "job": ["a", "b", None, None, "a", "b"],
            "kind": [0, 2, 2, None, 0, 2],
            "held": [0, 0, 0, 0, 1, 1],
        }
    )
    rows.save_to_disk("saved")
    text = "hf:saved,label=kind,test=held,classes=4,categorical=job"
    with pytest.raises(ValueError, match=r"row 3, column 'kind' must have a value, .*missing=drop"):
        load_dataset(f"{text},missing=mean")
    data = load_dataset(f"{text},missing=drop")
    assert (x_of(data), y_of(data), data.classes) == (
        [[1, 1, 1, 0], [5, 1, 1, 0], [6, 0, 0, 1]],
        ([0], [0, 2], ()),
        4,
    )
    assert data.notes[:2] == (
        "3 of 6 rows lack a value and were dropped.",
        "Column 'job' is one-hot encoded: a, b.",
    )
    rows = rows.select([0, 1, 2, 4, 5])
    coded = rows.cast_column("job", datasets.ClassLabel(names=["a", "b"]))
    for given, encoded in ((rows, ("all",)), (coded, ("all",)), (rows, "all"), (rows, "job")):
        data = from_huggingface(
            "mine", given, label="kind", test="held", categorical=encoded, missing="mean"
        )
        assert data.train_x.tolist() == [[1, 1, 1, 0], [2, 0, 0, 1], [3, 0.5, 0.5, 0.5]]


@pytest.mark.parametrize("form", REJECTED)
def test_is_rejected_with_a_way_on(form: str) -> None:
    write, text, message = REJECTED[form]
    write()
    with pytest.raises(ValueError, match=f"^{text.split(':')[0]}[^\n]*{message}[^\n]*$"):
        load_dataset(text)
