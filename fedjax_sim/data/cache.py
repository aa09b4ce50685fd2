"""The folder of derived files, and arrays that are computed once."""

import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

# What numpy and zipfile raise on a cut or altered .npz: directory, checksum, header, member; a
# lone array, which is no context manager, is a TypeError.
CORRUPT = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def cache_dir() -> Path:
    """The folder of everything that can be rebuilt: decoded data sets, compiled programs.

    Returns:
        ``$FEDJAX_SIM_CACHE_DIR``, else ``$XDG_CACHE_HOME/fedjax_sim``, else
        ``~/.cache/fedjax_sim``. The folder need not exist.

    Example:
        >>> os.environ["FEDJAX_SIM_CACHE_DIR"] = "/tmp/my_cache"
        >>> cache_dir().as_posix()
        '/tmp/my_cache'
        >>> del os.environ["FEDJAX_SIM_CACHE_DIR"]
    """
    own = os.environ.get("FEDJAX_SIM_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedjax_sim"


def cached_arrays(
    path: Path,
    make: Callable[[], Mapping[str, NDArray[Any]]],
    fits: Callable[[Mapping[str, NDArray[Any]]], bool] = lambda stored: True,
) -> dict[str, NDArray[Any]]:
    """Arrays stored at ``path``, made and stored first if the file is missing, corrupt or unfit.

    Args:
        path: the .npz file; its name must say all that the arrays depend on.
        make: computes the arrays by name; called at most once.
        fits: whether arrays are what ``make`` would give: it sees those of the file.

    Returns:
        The arrays by name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "squares.npz"
        ...     first = cached_arrays(file, lambda: {"y": np.arange(4) ** 2})
        ...     cached_arrays(file, lambda: {})["y"].tolist()
        [0, 1, 4, 9]
    """
    try:
        # Opened here: np.load leaves its own handle open when a file is cut short.
        with path.open("rb") as source, np.load(source, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if not fits(arrays):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise ValueError(f"it has other arrays: {shapes}")
        return arrays
    except OSError:  # not there, or not readable: computed below
        pass
    except CORRUPT as error:
        warnings.warn(f"rebuilding the corrupt cache file {path} ({error})", stacklevel=2)
    arrays = dict(make())
    # Written aside and renamed: another process sees the old file or the whole new one.
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            np.savez(file, **cast(Any, arrays))  # NumPy 2.1 would keep a flag as an array
        aside.replace(path)
    except OSError as error:  # a read-only or full disk costs the next run time, not this one
        with suppress(OSError):
            aside.unlink()
        warnings.warn(f"cannot cache {path} ({error}); set FEDJAX_SIM_CACHE_DIR", stacklevel=2)
    return arrays
