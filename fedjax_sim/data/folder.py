"""The folder of the user's data, and the error that says what is missing in it."""

import os
from pathlib import Path

DataDir = str | os.PathLike[str] | None


class DataNotFoundError(FileNotFoundError):
    """A data set is not where it was looked for; the message says what to run."""


def given_folder(data_dir: DataDir) -> Path | None:
    """The folder that argument or environment name; None where neither does.

    >>> given_folder("data").as_posix()
    'data'
    """
    given = data_dir or os.environ.get("FEDJAX_SIM_DATA_DIR")
    return Path(given).expanduser() if given else None


def find_file(name: str, data_dir: DataDir, relative: str, advice: str) -> Path:
    """A file of the data folder.

    Args:
        name: The data set that needs it.
        data_dir: As `given_folder` takes it.
        relative: Where the file lies in the folder.
        advice: What to do where it is missing.

    Returns:
        The path of the file, which exists.

    Raises:
        DataNotFoundError: No folder is given, or the file is not in it.

    >>> find_file("tides", "nowhere", "tides/sea.csv", "put the table there")
    Traceback (most recent call last):
    fedjax_sim.data.folder.DataNotFoundError: data set 'tides' is not ready in nowhere (no file \
tides/sea.csv); put the table there
    """
    folder = given_folder(data_dir)
    if folder is None:
        raise DataNotFoundError(
            f"data set {name!r} is read from {relative} in a data folder, and none is given: set "
            f"FEDJAX_SIM_DATA_DIR; {advice}"
        )
    if not (folder / relative).is_file():
        raise DataNotFoundError(
            f"data set {name!r} is not ready in {folder} (no file {relative}); {advice}"
        )
    return folder / relative
