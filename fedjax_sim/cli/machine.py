"""The settings of devices and output."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any, ClassVar

import jax

from fedjax_sim.cli.processes import Meeting, join, meeting
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.cli.sinks import SINKS, check_sink
from fedjax_sim.data import cache_dir
from fedjax_sim.engine.cores import available_cores, use_cores
from fedjax_sim.partition.pictures import Format

ON_HOST = ("samples_mb", "client_state_mb")
"""The settings that leave some of what a run holds in this machine's memory."""


def folder_name(text: str) -> str:
    """Returns the name of a folder; rejects the empty text of an unset shell variable."""
    if not text:
        raise ValueError("must name a folder, got ''")
    return text


@dataclasses.dataclass(frozen=True)
class Machine(Group):
    """Devices, and the place of results."""

    title: ClassVar[str] = "machine and output"

    devices: int | None = setting(
        None,
        "number of devices per process",
        shown="all; on CPU one for each core that this process may use",
        at_least=1,
    )
    model_devices: int = setting(
        1,
        "number of devices that train each model together, for models larger than a device; must "
        "divide the devices of each process",
        at_least=1,
    )
    distributed: Meeting | None = setting(
        None,
        "run on several processes, on one or more hosts: address of process 0, number of "
        "processes, index of this process from 0, for example localhost:1234,2,0; or auto on "
        "SLURM, Open MPI, Kubernetes or a TPU slice. Only process 0 writes files; see "
        "docs/devices.md",
        shown="one process", metavar="HOST:PORT,PROCESSES,INDEX", convert=meeting,
        place=True,
    )  # fmt: skip
    chunk: int | None = setting(
        None,
        "number of models that a device trains at once; 0: all",
        shown="1 on CPU, else 0",
        at_least=0,
    )
    lanes: int | None = setting(
        None,
        "number of models that a device trains at once, where a finished model is replaced by "
        "the next one; methods whose clients cannot stop between two steps have --chunk instead; "
        "0: no lanes",
        shown="none on CPU or with --chunk, else chosen by the clients' sizes",
        at_least=0,
    )
    samples_mb: float | None = setting(
        None,
        "MB of training samples that a device holds; other samples stay in host memory, and "
        "samples of the next cohorts are prefetched during training",
        shown="all samples",
        above=0,
    )
    client_state_mb: float | None = setting(
        None,
        "MB of per-client state that a device holds (control variates, personal models, "
        "residuals); the rest stays in host memory",
        shown="all of it",
        above=0,
    )
    out: str | None = setting(
        None,
        "new folder for the results",
        shown="runs/<dataset>-<algo>-<date>-<time>",
        metavar="DIR",
        convert=folder_name,
        place=True,
    )
    or_resume: bool = setting(
        False,
        "if --out has this run already, continue it as --resume does, or exit if it has "
        "finished: for schedulers that restart commands",
        place=True,
    )
    resume: str | None = setting(
        None,
        "continue the run in this folder from its newest checkpoints; its settings are read "
        "from the folder: only --rounds may be raised, and flags of this section may differ",
        shown="start a new run",
        metavar="DIR",
        convert=folder_name,
        place=True,
    )
    checkpoint_every: float = setting(
        60.0,
        "minimum number of seconds between checkpoints; 0: after every evaluation. The end of "
        "a run is always saved",
        metavar="SECONDS",
        at_least=0,
        place=True,
    )
    checkpoints: bool = setting(
        True, "write no checkpoints: the run cannot be resumed, nor its models loaded", place=True
    )
    keep_weights: bool = setting(
        False,
        "keep the server model of every evaluation in a file next to the checkpoints, not only "
        "the last one: for load_run(DIR).variables(NAME, at=...)",
        place=True,
    )
    sink: str | None = setting(
        None,
        lambda: "send the scores of every evaluation to a tracker as well: one of "
        f"{', '.join(SINKS)}, or package.module:function, see fedjax_sim.cli.sinks",
        shown="none", metavar="NAME", convert=check_sink, place=True,
    )  # fmt: skip
    dry_run: bool = setting(
        False,
        "print what would run (rounds, steps, bytes, programs) and exit; nothing is downloaded",
        place=True,
    )
    pictures: Format = setting("png", "format of pictures; use pdf or svg for papers")
    cache: bool = setting(True, "do not store compiled programs for later runs")

    def __post_init__(self) -> None:
        """Rejects folders and checkpoints that contradict each other."""
        if self.out is not None and self.resume is not None:
            raise ValueError(f"--out is for a new run; --resume {self.resume} writes to its folder")
        if self.or_resume and self.out is None and self.resume is None:
            raise ValueError("--or-resume is for --out, which names the folder of the run")
        if (self.resume is not None or self.or_resume) and not self.checkpoints:
            raise ValueError("--no-checkpoints is for a new run, which nothing resumes")
        timed = self.checkpoint_every != type(self).checkpoint_every
        if not self.checkpoints and (self.keep_weights or timed):
            name = "--keep-weights" if self.keep_weights else "--checkpoint-every"
            raise ValueError(f"{name} is for runs with checkpoints, not --no-checkpoints")


def start_jax(machine: Machine) -> None:
    """Applies the settings that JAX reads at its start; if it has started, nothing changes.

    There are at most as many devices as cores; more would wait for each other.
    """
    settings: Any = jax.config  # untyped
    cores = available_cores()
    with suppress(RuntimeError):
        use_cores(min(machine.devices or cores, cores))
    if machine.cache and settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if machine.distributed is not None:
        join(machine.distributed)
