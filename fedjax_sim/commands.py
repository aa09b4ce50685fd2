"""What `fedjax_sim.bench` and `fedjax_sim.partition` share as commands."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedjax_sim.data import Dataset, parse_dataset
from fedjax_sim.data.sources import FORMS
from fedjax_sim.flags import flagged
from fedjax_sim.partition import Partition, Sample, validate_partition


def add_data_flags(add: Callable[..., Any]) -> None:
    """Adds ``--dataset`` and ``--data-dir`` by the ``add_argument`` of a parser or a group."""
    add(
        "--dataset", type=_dataset, default="digits", metavar="NAME",
        help=f"one of {', '.join(FORMS)} (default: digits, which needs no download)",
    )  # fmt: skip
    add(
        "--data-dir", metavar="DIR",
        help="folder of the data (default: $FEDJAX_SIM_DATA_DIR, else TFDS's own)",
    )  # fmt: skip


def _dataset(text: str) -> str:
    try:
        parse_dataset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def deal_seeds(
    sample: Sample,
    dataset: Dataset,
    clients: int | None,
    seeds: Iterable[int],
    *,
    origin: str,
    flags: Sequence[str],
) -> list[Partition]:
    """One partition of the training samples for each seed.

    Args:
        sample: a sampler with its settings.
        dataset: whose training samples are dealt.
        clients: N; None for all natural ones.
        seeds: of the sampler.
        origin: the flag that chose the sampler, with its value, for the message.
        flags: the sampler's parameters that have a flag of their own.

    Raises:
        ValueError: if the settings and the data allow none, or a solver gives up; begins with the
          flag.

    >>> from fedjax_sim.data import load_dataset
    >>> from fedjax_sim.partition import parse_sampler
    >>> _, q = parse_sampler("q(0.5)")
    >>> deal_seeds(q, load_dataset("digits"), 15, [0], origin="--emd 1", flags=["clients"])
    Traceback (most recent call last):
    ValueError: --clients=15 must be a multiple of 10, the number of classes: use 10 or 20
    """
    partitions = []
    for seed in seeds:
        try:
            partition = sample(
                dataset.train_y,
                clients,
                seed,
                groups=dataset.train_client,
                features=dataset.features,
            )
        except (ValueError, RuntimeError) as error:  # the second one where a solver gives up
            message = str(flagged(error, flags))
            where = "" if message.startswith("--") else f"{origin}: "
            raise ValueError(where + message) from error
        validate_partition(partition, len(dataset.train_y))
        partitions.append(partition)
    return partitions


def new_folder(dataset: str, what: str) -> Path:
    """The default of ``--out``: ``runs/<dataset>-<what>-<date>-<time>``.

    >>> new_folder("synthetic(0.5, 0.5)", "fedavg").name[:25]
    'synthetic_0.5_0.5-fedavg-'
    """
    plain = re.sub(r"[^\w.]+", "_", dataset).strip("_")
    return Path("runs") / f"{plain}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def enter(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that a command returns, or 141 if nobody reads its output.

    Args:
        main: the command.
    """
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        status = 141  # as a shell says of a process that SIGPIPE ended
    sys.exit(status)


def complain(program: str, message: str, status: int) -> int:
    """Prints one line to stderr and returns the exit status."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return status
