"""Clients in the json files of LEAF."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import open_text
from fedjax_sim.base.words import array_type
from fedjax_sim.data._npz import Part, from_parts
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import DataDir, DataNotFoundError, existing, given_folder, not_ready
from fedjax_sim.data.standardise import statistics

CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
"""FEMNIST's classes in LEAF's order."""


def leaf(
    name: str, folder: Path, *, classes: int | None = None, task: str | None = None
) -> Dataset:
    """Loads LEAF's ``train/*.json`` and ``test/*.json``, see :func:`fedjax_sim.data.load_dataset`.

    Each file has "users", their names, and "user_data" with "x" and "y" of each user. Inputs are
    numbers of one shape, with integer labels from 0, texts, or the targets of ``task``; or texts of
    one length, each with the following character as label, as in LEAF's Shakespeare. Texts become
    tokens ``[n, T]``, numbered in the order of all characters, which are the classes. Users are
    natural clients in the order of their names; users without samples are dropped.

    Source: Caldas et al. 2018 <https://arxiv.org/abs/1812.01097>.
    """
    parts, everyone, active = [], set[str](), set[str]()
    for which in ("train", "test"):
        users = _read_users(name, existing(name, folder / which, folder=True))
        everyone |= {user for user, _, _ in users}
        users = [entry for entry in users if len(entry[2])]
        active |= {user for user, _, _ in users}
        if not users:
            raise ValueError(f"{folder / which} must have samples, got none")
        names, xs, ys = zip(*users, strict=True)
        try:
            x, y = np.concatenate(xs), np.concatenate(ys)
        except ValueError as error:
            raise ValueError(
                f"{folder / which}: x and y must have the same shape for all users: {error}"
            ) from error
        parts.append(Part(x, y, np.repeat(np.array(names), [*map(len, ys)])))
    empty = len(everyone - active)
    notes = [f"{empty} of {len(everyone)} users have no sample and were dropped."] if empty else []
    if parts[0].x.dtype.kind != "U":
        return from_parts(name, *parts, classes=classes, task=task, notes=notes)
    if task is not None or classes is not None:
        raise ValueError("must have numbers as x for task= or classes=, got texts")
    letters, (train, test) = _tokenise(parts)
    notes.append(f"Texts are tokens of {len(letters)} characters, which are the classes.")
    return from_parts(name, train, test, class_names=letters, scale=False, notes=notes)


def femnist(data_dir: DataDir = None) -> Dataset:
    """Loads LEAF's FEMNIST from ``femnist/train/*.json`` and ``femnist/test/*.json``.

    Args:
        data_dir: a folder with ``femnist``, the ``data`` folder that LEAF's preprocess.sh writes;
            defaults to the environment variable FEDJAX_SIM_DATA_DIR.

    Returns:
        Images ``f32[n, 28, 28, 1]`` in 0 … 1 (white) of 62 classes; writers are the natural
        clients.

    Raises:
        DataNotFoundError: if the files are missing.
        ValueError: if a file is malformed, or images do not have 784 pixels.

    Source: Caldas et al. 2018 <https://arxiv.org/abs/1812.01097>.
    """
    advice = (
        "run LEAF's preprocess.sh (https://github.com/TalwalkarLab/leaf) and put its folders train "
        "and test into femnist, or use hf:flwrlabs/femnist,client=writer_id,label=character"
    )
    folder = given_folder(data_dir)
    if folder is None or not (folder / "femnist" / "train").is_dir():
        raise not_ready("femnist", folder, "no folder femnist/train", advice)
    data = leaf("femnist", folder / "femnist", classes=len(CHARACTERS))
    if data.train_x.shape[1:] != (784,):
        raise ValueError(f"femnist: x must be [n, 784], got {list(data.train_x.shape)}")
    x, test_x = (values.reshape(-1, 28, 28, 1) for values in (data.train_x, data.test_x))
    mean, std = statistics(x)
    return data._replace(train_x=x, test_x=test_x, mean=mean, std=std, class_names=CHARACTERS)


def _tokenise(parts: Sequence[Part]) -> tuple[tuple[str, ...], list[Part]]:
    """Returns all characters in order, and the parts with characters as tokens."""
    codes = [array.view(np.uint32) for part in parts for array in (part.x, part.y)]
    known = np.unique(np.concatenate([np.unique(array) for array in codes]))
    dtype = np.uint8 if len(known) <= 256 else np.int32
    return tuple(map(chr, known)), [
        part._replace(x=np.searchsorted(known, part.x.view(np.uint32)).astype(dtype))
        for part in parts
    ]


def _read_users(name: str, folder: Path) -> list[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Reads the name, x and y of each user."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataNotFoundError(f"data set {name!r}: there is no .json file in {folder}")
    result = []
    for file in files:
        try:
            with open_text(file, "utf-8-sig") as text:
                content = json.load(text)
            data = {user: content["user_data"][user] for user in content["users"]}
            lists = [(user, given["x"], given["y"]) for user, given in data.items()]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f'{file} must be json with "users", and "x" and "y" of each in "user_data", got: '
                f"{error!r}"
            ) from error
        for user, x, y in lists:
            result.append((user, *_to_arrays(f"{file}, user {user!r}", x, y)))
    return result


def _to_arrays(where: str, x_list: Any, y_list: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns numbers as they are, and texts of one length as ``<U1[n, T]``."""
    try:
        x, y = np.asarray(x_list), np.asarray(y_list)
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"{where}: x and y must be lists of one shape, got: {error}") from error
    if y.shape[:1] != x.shape[:1] or y.dtype.kind not in "biufU":
        raise ValueError(
            f"{where}: y must be {len(x)} numbers or texts, as many as x, got {array_type(y)}"
        )
    if not len(x) or (x.dtype.kind in "biuf" and x.ndim > 1):
        return x, y
    letters = y.dtype == np.dtype("<U1") and all(y != "")
    if x.dtype.kind == "U" and x.ndim == 1 and letters and len({*map(len, x_list)}) == 1:
        return x.view("<U1").reshape(len(x), -1), y
    advice = "give tokens, the same number of integers for each text"
    if x.dtype.kind == "U" and str(x.flat[0]).lower().endswith((".jpg", ".jpeg", ".png")):
        advice = "give the pixels, or use folder:DIR for the files"
    raise ValueError(
        f"{where}: x must be numbers [n, ...], or texts of one length with the following character "
        f"as y, got {array_type(x)}: {advice}"
    )
