"""Clients in the json files of LEAF."""

import json
import string
from collections.abc import Mapping, Sequence
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
    first: tuple[str, Part] | None = None
    for which in ("train", "test"):
        users = _read_users(name, existing(name, folder / which, folder=True))
        everyone |= {user for _, user, _ in users}
        users = [entry for entry in users if len(entry[2].y)]
        active |= {user for _, user, _ in users}
        if not users:
            raise ValueError(f"{folder / which} must have samples, got none")
        for where, _, part in users:
            first = first or (where, part)
            _check_alike(where, part, *first)
        fields = zip(*(part for _, _, part in users), strict=True)
        parts.append(Part(*map(np.concatenate, fields)))
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


def _check_alike(where: str, part: Part, first: str, like: Part) -> None:
    """Raises ValueError if x or y of two users differ in shape or kind."""
    for key, values, wanted in (("x", part.x, like.x), ("y", part.y, like.y)):
        texts = [array.dtype.kind == "U" for array in (values, wanted)]
        if values.shape[1:] != wanted.shape[1:] or texts[0] != texts[1]:
            raise ValueError(
                f"{where}: {key} must be like {key} of {first}, {array_type(wanted)}, got "
                f"{array_type(values)}"
            )


def _tokenise(parts: Sequence[Part]) -> tuple[tuple[str, ...], list[Part]]:
    """Returns all characters in order, and the parts with characters as tokens."""
    codes = [array.view(np.uint32) for part in parts for array in (part.x, part.y)]
    known = np.unique(np.concatenate([np.unique(array) for array in codes]))
    dtype = np.uint8 if len(known) <= 256 else np.int32
    return tuple(map(chr, known)), [
        part._replace(x=np.searchsorted(known, part.x.view(np.uint32)).astype(dtype))
        for part in parts
    ]


def _read_users(name: str, folder: Path) -> list[tuple[str, str, Part]]:
    """Reads a description, the name and the samples of each user."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataNotFoundError(f"data set {name!r}: there is no .json file in {folder}")
    result = []
    for file in files:
        content = _read_json(file)
        for i, user in enumerate(content["users"]):
            where = f"{file}, user {user!r}"
            part = _parse_user(where, user, content["user_data"].get(user))
            sizes = content.get("num_samples")
            if sizes is not None and sizes[i] != len(part.y):
                raise ValueError(f"{where}: num_samples must be {len(part.y)}, got {sizes[i]}")
            result.append((where, user, part))
    return result


def _read_json(file: Path) -> Mapping[str, Any]:
    with open_text(file, "utf-8-sig") as text:
        try:
            content = json.load(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} must be json, got: {error}") from error
    users = content.get("users") if isinstance(content, dict) else None
    sizes = content.get("num_samples") if isinstance(content, dict) else None
    if (
        not isinstance(users, list)
        or not all(isinstance(user, str) for user in users)
        or not isinstance(content.get("user_data"), dict)
        or not (sizes is None or (isinstance(sizes, list) and len(sizes) == len(users)))
    ):
        raise ValueError(
            f'{file} must have "users", a list of names, "user_data" by name, and as many '
            '"num_samples" as users, if any'
        )
    return content


def _parse_user(where: str, user: str, data: Any) -> Part:
    if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
        raise ValueError(f'{where}: user_data must have "x" and "y"')
    try:
        x, y = np.asarray(data["x"]), np.asarray(data["y"])
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"{where}: x and y must be lists of one shape, got: {error}") from error
    if x.shape == y.shape == (0,):
        return Part(x, y, np.zeros(0, np.str_))
    if y.shape[:1] != x.shape[:1] or y.dtype.kind not in "biufU":
        raise ValueError(
            f"{where}: y must be {len(x)} numbers or texts, as many as x, got {array_type(y)}"
        )
    return Part(_check_inputs(where, data["x"], x, y), y, np.full(len(x), user))


def _check_inputs(where: str, lists: Any, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Returns numbers as they are, and texts of one length as ``<U1[n, T]``."""
    if x.dtype.kind in "biuf" and x.ndim > 1:
        return x
    letters = y.dtype == np.dtype("<U1") and all(y != "")
    if x.dtype.kind == "U" and x.ndim == 1 and letters and len({*map(len, lists)}) == 1:
        return x.view("<U1").reshape(len(x), -1)
    advice = "give tokens, the same number of integers for each text"
    if x.dtype.kind == "U" and str(x.flat[0]).lower().endswith((".jpg", ".jpeg", ".png")):
        advice = "give the pixels, or use folder:DIR for the files"
    raise ValueError(
        f"{where}: x must be numbers [n, ...], or texts of one length with the following character "
        f"as y, got {array_type(x)}: {advice}"
    )
