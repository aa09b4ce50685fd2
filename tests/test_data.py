"""Image data sets: known counts, the cache, and errors without network."""

import contextlib
import importlib.util
import io
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import known
from sklearn.datasets import load_digits

from fedjax_sim.data import (
    DataNotFoundError,
    cache_dir,
    cached_arrays,
    download_dataset,
    from_arrays,
    images,
    load_dataset,
)
from fedjax_sim.data.standardise import statistics

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
KNOWN = {  # image shape, training and test samples per class
    "mnist": ((28, 28, 1), MNIST_TRAIN, MNIST_TEST),
    "fashion_mnist": ((28, 28, 1), [6000] * 10, [1000] * 10),
    "cifar10": ((32, 32, 3), [5000] * 10, [1000] * 10),
}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_those_of_scikit_learn(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its file lies as where it does not."""
    if not found:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    digits, raw = load_dataset("digits"), load_digits()
    wanted = from_arrays("digits", raw.images.astype(np.uint8)[..., None], raw.target)
    for part in ("train_x", "train_y", "test_x", "test_y"):
        np.testing.assert_array_equal(getattr(digits, part), getattr(wanted, part), strict=True)


def test_digits() -> None:
    digits = load_dataset("digits")
    assert digits.train_x.shape == (1438, 8, 8, 1)
    assert digits.test_x.shape == (359, 8, 8, 1)
    assert digits.train_x.dtype == digits.test_x.dtype == np.uint8
    assert digits.train_y.dtype == digits.test_y.dtype == np.int32
    assert (digits.train_x.min(), digits.train_x.max(), digits.classes) == (0, 16, 10)
    train, test = np.bincount(digits.train_y), np.bincount(digits.test_y)
    assert np.array_equal(test, np.rint((train + test) / 5))
    again = load_dataset("digits")
    assert np.array_equal(again.test_x, digits.test_x)
    np.testing.assert_allclose(known(digits.mean), digits.train_x.mean(), rtol=1e-6)
    np.testing.assert_allclose(known(digits.std), digits.train_x.std(), rtol=1e-6)


@contextlib.contextmanager
def few_decoded(*splits: str) -> Iterator[None]:
    """Of these splits the first images alone, again and again: to decode all of them takes 15 s."""
    decode = images._decode

    def some(builder: Any, split: str) -> dict[str, np.ndarray]:
        if split not in splits:
            return decode(builder, split)
        n, few = builder.info.splits[split].num_examples, decode(builder, f"{split}[:50]")
        return {key: np.resize(array, (n, *array.shape[1:])) for key, array in few.items()}

    def uncached(path: Path, make: Callable[[], Any]) -> Any:
        return make() if splits else cached_arrays(path, make)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_decode", some)
        patch.setattr(images, "cached_arrays", uncached)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KNOWN))
def test_images_of_tfds(name: str, data_dir: str) -> None:
    """All of MNIST; of the others all test images, and few to train on."""
    whole = name == "mnist"
    with few_decoded(*(() if whole else ("train",))):
        dataset = load_dataset(name, data_dir)
    shape, train, test = KNOWN[name]
    assert dataset.train_x.shape == (sum(train), *shape)
    assert dataset.test_x.shape == (sum(test), *shape)
    assert dataset.train_x.dtype == dataset.test_x.dtype == np.uint8
    assert dataset.train_y.dtype == dataset.test_y.dtype == np.int32
    assert not whole or np.bincount(dataset.train_y).tolist() == train
    assert np.bincount(dataset.test_y).tolist() == test
    assert (dataset.name, dataset.classes, len(dataset.class_names)) == (name, 10, 10)
    for statistic in (known(dataset.mean), known(dataset.std)):
        assert statistic.shape == shape[-1:]
        assert statistic.dtype == np.float32


@pytest.mark.slow
def test_mnist_order_statistics_and_cache(data_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset("mnist", data_dir)
    assert first.train_y[:10].tolist() == [4, 1, 0, 7, 8, 1, 2, 7, 1, 6]
    statistics = np.concatenate([known(first.mean), known(first.std)])
    np.testing.assert_allclose(statistics, np.array([33.318, 78.567]), atol=1e-3)
    monkeypatch.setattr("fedjax_sim.data.images._decode", lambda *_: pytest.fail("decoded twice"))
    monkeypatch.setenv("FEDJAX_SIM_DATA_DIR", data_dir)
    second = load_dataset("mnist")  # the same data by the environment
    assert np.array_equal(first.train_x, second.train_x)
    tfds_itself = Path(data_dir) / "tfds"
    if tfds_itself.is_dir():
        load_dataset("mnist", tfds_itself)
    names = {path.name for path in (cache_dir() / "datasets").glob("mnist-*")}
    assert {name.rpartition("-")[0] for name in names} == {
        "mnist-3.0.1-train-60000-18693771",
        "mnist-3.0.1-test-10000-3120375",
    }
    assert len(names) == 2


def test_a_cache_holds_what_was_made_and_no_more(tmp_path: Path) -> None:
    made = cached_arrays(tmp_path / "x.npz", lambda: {"x": np.arange(3)})
    kept = cached_arrays(tmp_path / "x.npz", dict)
    assert made.keys() == kept.keys() == {"x"}


@pytest.mark.parametrize("content", ["cut", "flipped", "lone"])
def test_a_corrupt_cache_is_rebuilt(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.npz"
    cached_arrays(path, lambda: {"x": np.arange(1000)})
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    lone = io.BytesIO()
    np.save(lone, np.arange(3))
    broken = {"cut": whole[:-100], "flipped": bytes(flipped), "lone": lone.getvalue()}
    path.write_bytes(broken[content])
    with pytest.warns(UserWarning, match="rebuilding a file of the cache"):
        rebuilt = cached_arrays(path, lambda: {"x": np.arange(1000)})
    assert np.array_equal(rebuilt["x"], np.arange(1000))
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["x.npz"]  # nothing is left aside


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="set FEDJAX_SIM_CACHE_DIR"):
        arrays = cached_arrays(tmp_path / "file" / "x.npz", lambda: {"x": np.arange(3)})
    assert arrays["x"].tolist() == [0, 1, 2]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDJAX_SIM_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "fedjax_sim"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "fedjax_sim"
    monkeypatch.setenv("FEDJAX_SIM_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_statistics_of_images_are_exact() -> None:
    x = np.random.default_rng(0).integers(0, 256, (50, 4, 3, 3)).astype(np.uint8)
    mean, std = statistics(x)
    np.testing.assert_allclose(mean, x.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, x.std((0, 1, 2)), rtol=1e-6)


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.usefixtures("empty_cache", "no_network")
def test_a_missing_data_set_is_one_line_and_no_network(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDJAX_SIM_DATA_DIR", str(tmp_path / "there"))
    with pytest.raises(DataNotFoundError) as caught:
        load_dataset("mnist", tmp_path / "there" if by == "argument" else None)
    message = str(caught.value)
    assert "\n" not in message
    assert "'mnist'" in message
    assert f"d('mnist', '{tmp_path / 'there'}')" in message
    assert not (tmp_path / "there").exists()  # a folder that was given is never written to


@pytest.mark.usefixtures("empty_cache")
def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise OSError("no route to host\nmore lines")

    monkeypatch.delenv("FEDJAX_SIM_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("fedjax_sim.data.download.download_dataset", fail)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    with pytest.raises(DataNotFoundError, match=r"^[^\n]*\(no route to host\)[^\n]*$"):
        load_dataset("mnist")


@pytest.mark.usefixtures("empty_cache")
def test_an_unreadable_data_set_is_a_clear_error(data_dir: str, tmp_path: Path) -> None:
    root = Path(data_dir)
    source = (root / "tfds" if (root / "tfds").is_dir() else root) / "mnist" / "3.0.1"
    copy = tmp_path / "data" / "mnist" / "3.0.1"
    copy.mkdir(parents=True)
    for file in source.glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataNotFoundError, match="'mnist' is not ready"):
        load_dataset("mnist", tmp_path / "data")


class MadeUp(NamedTuple):
    """TFDS's own MNIST builder on 30 made-up images instead of the network."""

    folder: Path
    x: np.ndarray
    y: np.ndarray

    def download(self) -> Path:
        """Writes the data set; the folder of its version."""
        download_dataset("mnist", self.folder)
        return self.folder / "mnist" / "3.0.1"


@pytest.fixture
def made_up(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.image_classification import mnist

    del empty_cache
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (30, 28, 28, 1)).astype(np.uint8)
    y = rng.integers(0, 10, 30).astype(np.uint8)
    for part in ("train", "test"):
        (tmp_path / f"{part}_data").write_bytes(bytes(16) + x.tobytes())
        (tmp_path / f"{part}_labels").write_bytes(bytes(8) + y.tobytes())
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 30)
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", 30)
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        "download_and_extract",
        lambda self, urls: {key: str(tmp_path / key) for key in urls},
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    return MadeUp(tmp_path / "out", x, y)


def test_download_needs_no_tensorflow(made_up: MadeUp) -> None:
    made_up.download()
    dataset = load_dataset("mnist", made_up.folder)
    assert sorted(map(bytes, dataset.train_x)) == sorted(map(bytes, made_up.x))
    assert np.array_equal(np.bincount(dataset.test_y), np.bincount(made_up.y))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda version: (version / "dataset_info.json").write_text("garbage"),
    "gone": lambda version: (version / "dataset_info.json").unlink(),
    "records": lambda version: [
        file.write_bytes(file.read_bytes()[:100]) for file in version.glob("*array_record*")
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_advice_for_damaged_files_works(damage: str, made_up: MadeUp) -> None:
    DAMAGE[damage](made_up.download())
    with pytest.raises(
        DataNotFoundError, match=r"^data set 'mnist' is not ready in \S+ "
    ) as caught:
        load_dataset("mnist", made_up.folder)
    message = str(caught.value)
    assert "\n" not in message
    advice = known(re.search(r"; delete (\S+) and with internet run: python -c \"(.+?)\"", message))
    assert Path(advice[1]).is_relative_to(made_up.folder)
    shutil.rmtree(advice[1])
    exec(advice[2], {})
    assert len(load_dataset("mnist", made_up.folder).train_x) == 30


def test_a_copy_of_a_folder_is_not_read_from_the_cache_of_the_first(made_up: MadeUp) -> None:
    """It may be a stranger's, who says that it has the same name, version and sizes."""
    made_up.download()
    load_dataset("mnist", made_up.folder)
    copy = shutil.copytree(made_up.folder, made_up.folder.with_name("copy"))
    DAMAGE["records"](copy / "mnist" / "3.0.1")
    with pytest.raises(DataNotFoundError, match="data set 'mnist' is not ready in"):
        load_dataset("mnist", copy)
