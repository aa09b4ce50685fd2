"""Common code of the commands `fedjax_sim.bench` and `fedjax_sim.partition`."""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fedjax_sim.base.files import remove_written
from fedjax_sim.base.registry import error_text
from fedjax_sim.cli.flags import number
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.cli.stopping import STOPPING, listen
from fedjax_sim.data import DATASETS, Dataset, parse_dataset
from fedjax_sim.data.sources import dataset_forms
from fedjax_sim.engine.cores import OneDeviceWarning
from fedjax_sim.partition import SAMPLERS
from fedjax_sim.partition.samplers import form_of, parse_form
from fedjax_sim.run import CheckpointWarning


def _dataset(text: str) -> str:
    key, _ = parse_dataset(text)
    return key if key in DATASETS else text


@dataclasses.dataclass(frozen=True)
class Source(Group):
    """The source of the data."""

    dataset: str = setting(
        "digits",
        lambda: f"one of {', '.join(dataset_forms(DATASETS))}",
        shown="digits, which needs no download",
        metavar="NAME",
        convert=_dataset,
    )
    data_dir: str | None = setting(
        None,
        "folder of the data",
        shown="$FEDJAX_SIM_DATA_DIR, else TFDS's own",
        metavar="DIR",
        place=True,
    )

    def load(self) -> Dataset:
        """Loads the data set."""
        key, load = parse_dataset(self.dataset)
        try:
            return load(self.data_dir)
        except Exception as error:  # a user's function may raise anything
            if not DATASETS.is_foreign(key):
                raise
            raise ValueError(f"--dataset {self.dataset}: {error_text(error)}") from error


def sampler_forms() -> str:
    """Returns the forms of all samplers, for the help."""
    forms = ", ".join(form_of(*named) for named in SAMPLERS.items())
    return f"{forms}; or package.module:function(name=value, ...)"


def sampler(text: str) -> str:
    """Returns the text of a sampler, after checking it."""
    parse_form(text)
    return text


BY_EMD = (
    "--emd",
    "label skew: earth mover's distance of the partition (default: 1.4, or 7/9 of the "
    "largest reachable EMD if that is less)",
    lambda text: f"emd({number(float, above=0)(text):g})",
)
"""The flag that stands for the sampler ``emd``."""


def default_folder(dataset: str, what: str) -> Path:
    """Returns the default of ``--out``: ``runs/<dataset>-<what>-<date>-<time>``.

    >>> default_folder("synthetic(0.5, 0.5)", "mine:fed").name[:27]
    'synthetic_0.5_0.5-mine_fed-'
    """
    plain = (re.sub(r"[^\w.]+", "_", text).strip("_") for text in (dataset, what))
    return Path("runs") / f"{'-'.join(plain)}-{time.strftime('%Y%m%d-%H%M%S')}"


def enter(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that a command returns.

    It is 141 if nobody reads the output, a shell's status for SIGPIPE.
    """
    STOPPING.leave = _leave
    listen()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no output lacks a letter, such as ε
    # Commands choose their devices.
    warnings.simplefilter("ignore", OneDeviceWarning)
    gc.freeze()  # what was imported lives to the end: the collector need not look at it again
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        status = 141
    sys.exit(status)


def _leave(status: int) -> None:
    """Ends the process at once, without half-written files."""
    remove_written()
    os._exit(status)


@contextmanager
def warnings_in_a_line(program: str) -> Iterator[None]:
    """Prints each warning of checkpoints once, as one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", CheckpointWarning)
        others = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, CheckpointWarning):
                complain(program, f"warning: {message}", 0)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def plain(error: Exception) -> str:
    """Returns the message of an exception; for an ``OSError``, the file and the cause.

    >>> plain(OSError(28, "No space left on device", "runs/mine/summary.json"))
    'runs/mine/summary.json: No space left on device'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def complain(program: str, message: str, status: int) -> int:
    """Prints one line to stderr and returns the exit status."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return status
