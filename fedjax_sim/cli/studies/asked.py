"""The command line of a study."""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.cli.flags import Parser, flag
from fedjax_sim.cli.machine import Machine, folder_name
from fedjax_sim.cli.resuming import add_trust
from fedjax_sim.cli.studies.plan import SETTINGS

PROGRAM = "fedjax_sim.study"
FILE = "study.toml"
NOT_OF_A_STUDY = (
    "out", "or_resume", "resume", "distributed", "checkpoints", "dry_run"
)  # fmt: skip


class Asked(NamedTuple):
    """The settings of the command line.

    Attributes:
        file: the study file.
        folder: the folder of the study.
        resumed: whether the study is resumed.
        named: whether the user chose the name of a new folder; a default that is taken gets a
          suffix.
        dry_run: whether the command only prints its plan.
        trust: the modules from which names in the file and the folder may import.
        shard: I and N: every N-th cell runs, starting with the I-th.
        merged: folders whose cells are copied.
        machine: arguments of every run.
    """

    file: Path
    folder: Path
    resumed: bool
    named: bool
    dry_run: bool
    trust: tuple[str, ...]
    shard: tuple[int, int]
    merged: tuple[Path, ...]
    machine: tuple[str, ...]

    def to_resume(self, folder: Path) -> tuple[str, ...]:
        """Returns the arguments that resume a cell in its folder, after checking the folder."""
        trust = (f"--trust={module}" for module in self.trust)
        return (*trust, "--out", str(folder), "--or-resume")


def parse_study(argv: Sequence[str]) -> Asked:
    """Parses the arguments.

    Raises:
        ValueError: if they contradict each other; names the flag.
    """
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Runs a study file: methods, whose settings are selected on a validation set, "
        "for every combination of a grid. Prints a table and writes a folder: a run of "
        "fedjax_sim.bench for each cell, results.csv, table.md, table.tex.",
    )
    parser.add_argument("file", metavar="FILE.toml", nargs="?", help="the study file")
    folder_of: dict[str, Any] = {"metavar": "DIR", "type": folder_name}
    parser.add_argument(
        "--out",
        **folder_of,
        help="new folder (default: runs/study-<file>-<date>-<time>)",
    )
    parser.add_argument(
        "--resume",
        **folder_of,
        help="continue the study in this folder; with FILE.toml, which may have more cells or "
        "more rounds than before",
    )
    parser.add_argument(
        "--or-resume",
        action="store_true",
        help="if --out has this study already, continue it as --resume does",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        type=_shard,
        default=(1, 1),
        help="run only the cells I, I + N, I + 2 N, ..., in a separate folder: for job arrays, or "
        "several processes on one machine",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        **folder_of,
        help="copy the cells of these folders into a new one, run missing cells, and write the "
        "tables",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and exit")
    add_trust(parser)
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR)"
    )
    Machine.add_flags(parser.add_argument_group("every run"), helping=True, without=NOT_OF_A_STUDY)
    given, others = parser.parse_known_args(argv)
    for word in others:
        name = word.partition("=")[0]
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in SETTINGS:
            raise ValueError(f"{name} is a setting of the study: write it into the file, run.{key}")
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    merged = tuple(map(Path, given.merge or ()))
    if given.out is not None and given.resume is not None:
        raise ValueError(f"--out is for a new study; --resume {given.resume} writes to its folder")
    if given.or_resume and given.out is None:
        raise ValueError("--or-resume is for --out, which names the folder of the study")
    if merged and (given.resume is not None or given.shard != (1, 1)):
        other = "--resume" if given.resume is not None else "--shard"
        raise ValueError(f"--merge is for a new folder, not for {other}")
    begun = merged if given.resume is None else (Path(given.resume),)
    if given.file is None and not begun:
        raise ValueError("name a study file, or a folder to go on in: FILE.toml or --resume DIR")
    file = begun[0] / FILE if given.file is None else Path(given.file)
    stem = file.parent.name if given.file is None else file.stem
    new = given.out or f"runs/study-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(given.resume or new)
    if given.or_resume and (folder / FILE).exists():
        begun = (*begun, folder)
    for there in begun:
        if not (there / FILE).exists():
            name = "--merge" if merged else "--resume"
            raise ValueError(f"{name}: {there} has no study: it lacks {FILE}")
    resumed = folder in begun
    return Asked(
        file=file,
        folder=folder,
        resumed=resumed,
        named=given.out is not None,
        dry_run=given.dry_run,
        trust=tuple(given.trust),
        shard=given.shard,
        merged=merged,
        machine=_machine(vars(given)),
    )


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= (first := int(found[1])) <= (step := int(found[2])):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, as in 2/8, got {text!r}")
    return first, step


def _machine(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the flags of the machine, for all runs."""
    words = []
    for name in (*(field.name for field in dataclasses.fields(Machine)), "data_dir"):
        value = None if name in NOT_OF_A_STUDY else given.get(name)
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif value is not None:
            words.append(f"{flag(name)}={value}")
    return tuple(words)
