"""``--sink``: sends the scores of a run to a tracker as soon as they are known.

A sink is a function that opens a :class:`Sink` for each algorithm and seed. Ours were tested with
tensorboardX 2.6 and wandb 0.31 (offline).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fedjax_sim.base.registry import Registry, UnknownNameError, error_text
from fedjax_sim.base.signatures import takes
from fedjax_sim.cli.commands import complain
from fedjax_sim.cli.flags import offering

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What our sinks import."""

_PLACE = ("algorithm", "seed", "fold", "round")


class Sink(NamedTuple):
    """The receiver of the scores of one algorithm with one seed (and fold).

    Attributes:
        log: receives the scores of an evaluation by name, and its round; rounds ascend.
        close: is called at the end.
    """

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


Opens = Callable[[str, Mapping[str, Any], Path], Sink]
"""``(name, settings, folder)``: of the algorithm and seed, ``config.json``, and of the run."""


def tensorboard(name: str, settings: Mapping[str, Any], folder: Path) -> Sink:
    """Opens event files in ``tensorboard/`` of the run's folder, by tensorboardX."""
    from tensorboardX import SummaryWriter

    # A resumed run logs all of its rounds again, in place of the earlier entries.
    place = folder / "tensorboard" / quote(name, safe=" ,=()")
    writer = SummaryWriter(str(place), purge_step=0)
    writer.add_text("settings", json.dumps(settings, indent=2))

    def log(values: Mapping[str, float], round: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, round)
        writer.flush()

    return Sink(log, writer.close)


def wandb(name: str, settings: Mapping[str, Any], folder: Path) -> Sink:
    """Opens a run of Weights & Biases, in a group with the folder's name."""
    import wandb

    run = wandb.init(
        project="fedjax_sim",
        group=folder.name,
        name=name,
        config=dict(settings),
        dir=str(folder),
        reinit="create_new",
    )
    return Sink(lambda values, round: run.log(dict(values), step=round), run.finish)


SINKS: Registry[Opens] = Registry(
    "sink",
    wanted="a function (name, settings, folder) that returns a Sink",
    fits=lambda value: takes(value, "", {}, Path()),
    makes=lambda: (Sink,),
    own={"tensorboard": tensorboard, "wandb": wandb},
)
"""Sinks by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""


def check_sink(text: str) -> str:
    """Returns the name of a sink, after checking that it can be opened."""
    try:
        name, _ = SINKS.resolve(text)
    except UnknownNameError as error:
        raise offering(error, [*SINKS, "package.module:function"]) from error
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"{name} needs the package {package}: pip install {package}")
    return name


class Sending:
    """Sends the records of a run to a sink for each algorithm and seed, until that fails."""

    def __init__(self, name: str, settings: Mapping[str, Any], folder: Path) -> None:
        self._name, self._settings, self._folder = name, settings, folder
        self._opens = SINKS.resolve(name)[1]
        self._open: dict[tuple[Any, ...], Sink] = {}
        self._failed = False

    def log(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes the lines of ``metrics.jsonl`` of one evaluation."""
        for row in rows:
            if self._failed:
                return
            place = {key: row[key] for key in _PLACE if key in row}
            at, key = place.pop("round"), (*place.values(),)
            with self._guarded():
                if key not in self._open:
                    algorithm, *others = place.items()
                    name = ", ".join([algorithm[1], *(f"{what} {which}" for what, which in others)])
                    self._open[key] = self._opens(name, {**self._settings, **place}, self._folder)
                self._open[key].log(dict(flat(row)), at)

    def close(self) -> None:
        """Closes all open runs."""
        for sink in self._open.values():
            with self._guarded():
                sink.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Stops sending at the first error; the run continues."""
        try:
            yield
        except Exception as error:  # a tracker's network is no reason to lose a run
            if not self._failed:
                why = f"{error_text(error)}; the run continues without it"
                warning = f"warning: --sink {self._name}: {why}"
                complain("fedjax_sim.bench", warning, 0)
            self._failed = True


def flat(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Returns the numbers of a line of ``metrics.jsonl``, nested ones by path, without nulls.

    >>> flat({"seed": 1, "round": 2, "accuracy": 0.5, "validation": {"f1": 0.25, "auc": None}})
    [('accuracy', 0.5), ('validation/f1', 0.25)]
    """
    found: list[tuple[str, float]] = []
    for key, value in row.items():
        if key in _PLACE:
            continue
        if isinstance(value, Mapping):
            found += [(f"{key}/{inner}", number) for inner, number in flat(value)]
        elif value is not None:
            found.append((key, float(value)))
    return found
