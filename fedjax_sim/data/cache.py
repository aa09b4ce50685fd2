"""The folder of derived files, and arrays that are computed once."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedjax_sim.base.files import DamagedError, read_npz, write_npz


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
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "squares.npz"
        ...     first = cached_arrays(file, lambda: {"y": np.arange(4) ** 2})
        ...     cached_arrays(file, lambda: {})["y"].tolist()
        [0, 1, 4, 9]
    """
    try:
        arrays = read_npz(path)
        if fits(arrays):
            return arrays
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise DamagedError(f"{path}: it has other arrays: {shapes}")
    except OSError:  # not there, or not readable: computed below
        pass
    except DamagedError as error:
        warnings.warn(f"rebuilding a file of the cache: {error}", stacklevel=2)
    arrays = dict(make())
    try:
        write_npz(path, arrays)
    except OSError as error:  # a read-only or full disk costs the next run time, not this one
        warnings.warn(f"cannot cache {path} ({error}); set FEDJAX_SIM_CACHE_DIR", stacklevel=2)
    return arrays
