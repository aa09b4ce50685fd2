"""A user's arrays in one .npz file, named as Keras names those of MNIST."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import read_npz
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import existing
from fedjax_sim.data.parts import Part, from_parts

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
CLIENTS = ("client_train", "client_test")


def npz(name: str, file: Path, *, classes: int | None = None, task: str | None = None) -> Dataset:
    """Reads the arrays x_train, y_train, x_test and y_test of a .npz file, such as Keras'.

    Args:
        name: of the data set.
        file: has these arrays, and may have ``client_train`` or both that and ``client_test``: the
            natural client of every sample, numbers or texts. Others are not read. uint8
            ``[n, H, W]`` are grey images and get a channel; the rest is as in
            :func:`fedjax_sim.data.from_arrays`, and so is the task, if y says it.
        classes: as for :func:`fedjax_sim.data.from_arrays`.
        task: as there.

    Returns:
        The data set. Nothing is cached.

    Raises:
        DataNotFoundError: if there is no such file.
        ValueError: if it is no .npz, or an array is missing or does not fit; names the array.
    """
    arrays = _read(existing(name, file))
    train, test = (_part(arrays, which) for which in ("train", "test"))
    x, of_test = train.x, test.x
    if (x.shape[1:], x.dtype) != (of_test.shape[1:], of_test.dtype):
        raise ValueError(
            f"x_test must be like x_train, which is {x.dtype} {list(x.shape)}, got {of_test.dtype} "
            f"{list(of_test.shape)}"
        )
    if test.client is not None:
        if train.client is None:
            raise ValueError("client_test must come with client_train, got it alone")
        if train.client.dtype.kind != test.client.dtype.kind:
            raise ValueError(
                f"client_test must be {train.client.dtype}, as client_train, got "
                f"{test.client.dtype}"
            )
    return from_parts(name, train, test, classes=classes, task=task)


def _read(file: Path) -> dict[str, NDArray[Any]]:
    arrays = read_npz(file, (*ARRAYS, *CLIENTS))
    missing = [key for key in ARRAYS if key not in arrays]
    if missing:
        raise ValueError(
            f"must have the arrays {', '.join(ARRAYS)}, got {', '.join(arrays) or 'none'}: no "
            + " and no ".join(missing)
        )
    return arrays


def _part(arrays: dict[str, NDArray[Any]], which: str) -> Part:
    x, y, client = (arrays.get(f"{key}_{which}") for key in ("x", "y", "client"))
    assert x is not None and y is not None  # noqa: PT018
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(
            f"x_{which} must be numbers [n, ...] with n > 0, got {x.dtype} {list(x.shape)}"
        )
    if y.shape[:1] != x.shape[:1] or y.dtype.kind not in "biufU":
        raise ValueError(
            f"y_{which} must be numbers or texts, as many as x_{which}, got {y.dtype} "
            f"{list(y.shape)}"
        )
    if client is not None and client.shape != (len(x),):
        raise ValueError(f"client_{which} must have shape [{len(x)}], got {list(client.shape)}")
    return Part(x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x, y, client)
