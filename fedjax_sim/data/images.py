"""Image data sets of scikit-learn (digits) and TFDS."""

import importlib.util
import io
import math
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import check_memory
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.download import find_builder, prepared_builder, tfds_not_ready
from fedjax_sim.data.folder import DataDir, cache_dir, cached_arrays, quiet_logs
from fedjax_sim.data.standardise import statistics
from fedjax_sim.tasks import classification


def digits(data_dir: DataDir = None) -> Dataset:
    """Loads scikit-learn's digits: 1,797 images 8 x 8 x 1 with values in 0 … 16.

    Without an official split, the test set is a fixed random fifth of each class, rounded.

    Source: Pedregosa et al. 2011 <https://arxiv.org/abs/1201.0490>.
    """
    del data_dir
    table = _digits_table()
    x = table[:, :-1].astype(np.uint8).reshape(-1, 8, 8, 1)
    return from_arrays("digits", x, table[:, -1].astype(np.int64))


def _digits_table() -> NDArray[Any]:
    """Reads pixels and label of each image, ``[1797, 65]``."""
    # Importing scikit-learn takes 0.7 s, reading its file 4 ms.
    spec = importlib.util.find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).with_name("datasets") / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, np.uint8, delimiter=",")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    raw = load_digits()
    return np.column_stack([raw.data, raw.target])


def tfds_images(name: str, data_dir: DataDir = None, *, called: str | None = None) -> Dataset:
    """Loads an image classification data set of TFDS, decoded once into the cache.

    Examples must be pairs (image, label) with images of one shape, ``uint8[H, W, C]``. The training
    set is the official training split; the test set is the official test split, else the validation
    split, else a fixed random fifth of each class. ``called`` replaces the TFDS name.

    Raises:
        ValueError: if TFDS has no such data set, or its examples have another form.
        DataNotFoundError: if the data are not in the folder, or cannot be downloaded or read.
    """
    arrays = {}
    with quiet_logs():
        _check_kind(name, find_builder(name, data_dir).info)  # before a download that may be large
        builder = prepared_builder(name, data_dir)
        place = sha256(str(Path(builder.data_path).resolve()).encode()).hexdigest()[:12]
        splits = builder.info.splits
        if "train" not in splits:
            raise ValueError(
                f"name must be a data set with a split 'train', got 'tfds:{name}' with "
                f"{', '.join(splits)}"
            )
        test = next((split for split in ("test", "validation") if split in splits), None)
        for split in ["train"] if test is None else ["train", test]:
            info = splits[split]
            _check_size(builder, info)
            stem = f"{name}-{builder.info.version}-{split}-{info.num_examples}"
            file = f"{stem.replace('/', '-')}-{int(info.num_bytes)}-{place}.npz"
            try:
                arrays[split] = cached_arrays(
                    cache_dir() / "datasets" / file,
                    partial(_decode, builder, split),
                )
            except Exception as error:  # a file missing or cut, or records of another format
                raise tfds_not_ready(builder, name, error) from error
    label = builder.info.features["label"]
    (x, y), classes = (arrays["train"]["x"], arrays["train"]["y"]), label.num_classes
    names = tuple(map(label.int2str, range(classes)))
    if test is None:
        return from_arrays(called or name, x, y, classes=classes, class_names=names)
    test_x, test_y = arrays[test]["x"], arrays[test]["y"]
    return Dataset(
        called or name,
        *(x, y, test_x, test_y),
        classification(classes),
        *statistics(x),
        class_names=names,
        test_set=f"the official {test} set",
    )


def _check_kind(name: str, info: Any) -> None:
    """Raises ValueError unless the examples are images of one shape with a class label."""
    keys = info.supervised_keys
    if keys != ("image", "label") or not hasattr(info.features["label"], "num_classes"):
        raise ValueError(
            f"name must be an image classification set, got 'tfds:{name}', whose supervised keys "
            f"are {keys}, not ('image', 'label') with class labels"
        )
    image = info.features["image"]
    if None in image.shape or image.np_dtype != np.uint8:
        raise ValueError(
            f"name must be a set of images of one shape, in uint8, got 'tfds:{name}' of shape "
            f"{image.shape}, in {image.np_dtype.__name__}: resize them yourself and use from_arrays"
        )


def _check_size(builder: Any, split: Any) -> None:
    """Raises ValueError unless the declared size of a split fits into memory."""
    images = split.num_examples * math.prod(builder.info.features["image"].shape)
    try:
        check_memory(2 * images)  # as they are stored, and decoded
    except ValueError as error:
        raise ValueError(f"{builder.data_path}, split {split.name!r}: {error}") from error


def _decode(builder: Any, split: str) -> dict[str, NDArray[Any]]:
    """Decodes images ``uint8[n, H, W, C]`` and labels ``int32[n]`` of one split.

    Takes 5 to 10 s for 50,000 images. Each image is decoded only if it has the declared shape.
    """
    from PIL import Image
    from tensorflow_datasets import decode  # type: ignore[import-untyped, unused-ignore]

    source = builder.as_data_source(split=split, decoders={"image": decode.SkipDecoding()})
    examples = source.__getitems__(range(len(source)))  # iterating takes 2 to 3 times as long
    feature = builder.info.features["image"]
    height, width, _ = feature.shape
    x = np.empty((len(source), *feature.shape), np.uint8)
    for i, example in enumerate(examples):
        with Image.open(io.BytesIO(example["image"])) as image:
            if image.size != (width, height):
                raise ValueError(f"image {i} is of {image.size}, not {width} x {height} pixels")
        x[i] = feature.decode_example_np(example["image"])
    return {"x": x, "y": np.array([example["label"] for example in examples], np.int32)}
