"""``python -m fedjax_sim.partition``: ask for a skew, look at it, keep it for the bench."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.cli import dealing
from fedjax_sim.cli.claims import check_free, make_folder
from fedjax_sim.cli.commands import Source, complain, deal_seeds, default_folder
from fedjax_sim.cli.flags import Parser, flag, flagged, kind, options
from fedjax_sim.cli.methods import texts
from fedjax_sim.cli.report import over_seeds
from fedjax_sim.cli.settings import setting
from fedjax_sim.cli.stopping import STOPPING
from fedjax_sim.data import Dataset, pooled, summary
from fedjax_sim.partition import (
    Partition,
    SkewReport,
    draw_partition,
    draw_skew,
    save_partition,
    skew_report,
)
from fedjax_sim.partition.forms import DATA, form_of
from fedjax_sim.partition.pictures import Format
from fedjax_sim.partition.samplers import SAMPLERS, Sample, parse_form
from fedjax_sim.run.environment import environment

PROGRAM = "fedjax_sim.partition"
DRAWN = 4  # partitions that can still be read side by side


def _samplers() -> str:
    forms = ", ".join(form_of(name, sampler).text for name, sampler in SAMPLERS.items())
    return (
        f"a name, with its flags below: {', '.join(SAMPLERS)}; or a text: {forms}, "
        "package.module:function(name=value, ...)"
    )


@dataclasses.dataclass(frozen=True)
class Request(Source):
    """The data and the number of clients.

    Attributes:
        pool: whether the test set is dealt too.
        clients: N; None for all natural ones.
        seeds: how many partitions.
        out: the folder of the results, new or empty; None for a new one in ``runs/``.
        pictures: their format.
        sampler: the name or the text of a sampler; None for the default.
    """

    pool: bool = setting(
        False, "deal the test samples too, as RADFed does; for bench --split clients or holdout"
    )
    clients: int | None = setting(
        None,
        "how many",
        shown="40, of natural clients all; of fewer than 80 samples half of them",
        at_least=1,
    )
    seeds: int = setting(1, "how many partitions, of seeds 0 to N-1", at_least=1, at_most=10_000)
    out: str | None = setting(
        None,
        "new folder for the results",
        shown="runs/<dataset>-<sampler>-<date>-<time>",
        metavar="DIR",
        place=True,
    )
    pictures: Format = setting("png", "format of the pictures; pdf and svg are for papers")
    sampler: str | None = setting(
        None,
        _samplers,
        shown="natural if the data name their clients; else emd(1.4), or 7/9 of the EMD that the "
        "labels reach if that is less; or iid without classes",
        metavar="TEXT",
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """A request and its sampler.

    Attributes:
        request: settings of the command line.
        sampler: a name in ``SAMPLERS``, or the place of one to import; "" for the data's default.
        options: its keyword arguments.
        clients: N; None for all natural ones, or what is not known without the data.
        why: why the sampler is the default; "" if it was requested.
    """

    request: Request
    sampler: str
    options: dict[str, Any]
    clients: int | None
    why: str = ""

    @functools.cached_property
    def out(self) -> Path:
        """The folder of the results; the default one is made, so that nobody else takes it."""
        if self.request.out is not None:
            return Path(self.request.out)
        return make_folder(default_folder(self.request.dataset, self.sampler))


def command(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None: the arguments of this process.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        job = parse_job(argv)
        if job.request.out is not None:
            check_free(job.out)
        loaded = job.request.load()
        dataset = pooled(loaded) if job.request.pool else loaded
        job = completed(job, dataset)
        partitions = deal_job(job, dataset)
        reports = [skew_report(dataset.strata, p, dataset.task.classes or 1) for p in partitions]
        STOPPING.patient = True  # to the end, which comes soon
        try:
            write_folder(job, dataset, partitions, reports, argv)
        except OSError as error:
            if job.request.out is None:
                job.out.rmdir()
            raise ValueError(f"--out {job.out}: {error.strerror or error}") from error
    except (ValueError, OSError, ImportError) as error:
        return complain(PROGRAM, f"error: {error}", 2)
    except KeyboardInterrupt:
        return complain(PROGRAM, "stopped; nothing was written", 130)
    deal = dealing.Deal(reports[0].name or job.sampler, job.clients, job.why)
    about = summary(loaded)._replace(clients=dealing.told(deal, loaded, partitions[0]))
    print(f"{about.text()}\n")
    print(reports[0].text() if len(reports) == 1 else over_seeds(reports))
    part = "training and test" if job.request.pool else "training"
    print(f"\n{dataset.name}, {part} samples; partitions, report and pictures: {job.out}")
    print(f"train on it: {shlex.join(bench_command(job))}")
    return 0


def bench_command(job: Job) -> list[str]:
    """Returns the command that trains FedAvg on the first partition."""
    request = job.request
    words = ["python", "-m", "fedjax_sim.bench", "--algo", "fedavg"]
    words += ["--dataset", request.dataset, "--partition", str(job.out / "seed0.npz")]
    if request.data_dir is not None:
        words += ["--data-dir", request.data_dir]
    return [*words, "--split", "clients"] if request.pool else words


def parse_job(argv: Sequence[str]) -> Job:
    """Parses the command line.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The job; the ranges of a sampler's arguments are left to the sampler.

    Raises:
        ValueError: if an argument is unknown, missing or malformed; names the flag.

    >>> job = parse_job(["--sampler", "ll(2, 7/8)", "--clients", "20"])
    >>> job.sampler, job.options, job.clients
    ('ll', {'labels_per_client': 2, 'fraction': 0.875}, 20)
    """
    first = Parser(add_help=False)
    first.add_argument("-h", "--help", action="store_true")
    first.add_argument("--sampler")
    early, _ = first.parse_known_args(argv)
    named = None if early.sampler is None else _named(early.sampler)
    samplers = dict(SAMPLERS if early.help else SAMPLERS.known)
    if named is not None:
        # The one that is asked for comes first: its flags are read as it says.
        samplers = {named[0]: SAMPLERS.resolve(named[0])[1]} | samplers
    given = vars(_parser(samplers, helping=early.help).parse_args(argv))
    request = Request.of(given)
    name, chosen = named or ("emd", {} if "emd" in given else {"emd": dealing.EMD})
    found = _from_flags(name, chosen, given, samplers)
    if named is None and not found:
        return Job(request, "", {}, request.clients)
    return Job(request, name, chosen | found, request.clients)


def completed(job: Job, dataset: Dataset) -> Job:
    """Returns the job with its number of clients and, if it has no sampler, the data's default.

    Raises:
        ValueError: if the data have other clients than are asked for, or too few samples; names
          the flag.
    """
    seeds, text = range(job.request.seeds), job.sampler or None
    deal = dealing.choose(text, job.clients, dataset, seeds, flag="--sampler")
    if text is not None:
        return dataclasses.replace(job, clients=deal.clients)
    name, options = parse_form(deal.text)
    return dataclasses.replace(
        job, sampler=name, options=options, clients=deal.clients, why=deal.why
    )


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a sampler and the arguments that its text gives."""
    try:
        return parse_form(text, bare="(" not in text)
    except ValueError as error:
        message = str(flagged(error, ["sampler"]))
        where = "" if message.startswith("--") else "--sampler "
        raise ValueError(where + message) from error


def _from_flags(
    name: str,
    chosen: Mapping[str, Any],
    given: Mapping[str, Any],
    samplers: Mapping[str, Callable[..., Partition]],
) -> dict[str, Any]:
    """Returns the arguments of a sampler that flags give, in addition to its text."""
    own, found = options(samplers[name], DATA), {}
    for key in sorted(given.keys() & _owners(samplers).keys()):
        if key not in own:
            flags = ", ".join(map(flag, own)) or "none"
            raise ValueError(f"{flag(key)} is no flag of {name}, whose flags are: {flags}")
        if key in chosen:
            raise ValueError(f"{flag(key)} is given twice: --sampler {given['sampler']!r} has it")
        found[key] = given[key]
    missing = [k for k, p in own.items() if p.default is p.empty and k not in {*chosen, *found}]
    if missing:
        raise ValueError(f"--sampler {name} needs {' and '.join(map(flag, missing))}")
    return found


def _owners(samplers: Mapping[str, Callable[..., Partition]]) -> dict[str, list[str]]:
    """Returns the names of the samplers that have a parameter, by parameter."""
    taken = {field.name for field in dataclasses.fields(Request)}
    owners: dict[str, list[str]] = {}
    for name, sampler in samplers.items():
        for key in options(sampler, DATA):
            if key not in taken:
                owners.setdefault(key, []).append(name)
    return owners


def _parser(samplers: Mapping[str, Callable[..., Partition]], *, helping: bool) -> Parser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Deals a data set to clients with the skew that is asked for; prints a report "
        "and writes a folder with the partition of each seed (seed0.npz, ... for "
        "fedjax_sim.bench --partition), report.json, clients.png (clients by classes) and "
        "skew.png (sizes and EMDs of the clients); without classes all of it is of sizes alone.",
        epilog="Example: python -m fedjax_sim.partition --dataset digits --sampler dirichlet "
        "--alpha 0.1 --clients 20",
    )
    Request.add_flags(parser, helping=helping)
    group = parser.add_argument_group("flags of the samplers")
    for key, names in _owners(samplers).items():
        owners = {name: samplers[name] for name in names}
        group.add_argument(
            flag(key),
            default=argparse.SUPPRESS,
            help=_help(key, owners) if helping else None,
            **kind(options(samplers[names[0]], DATA)[key].annotation),
        )
    return parser


def _help(key: str, owners: Mapping[str, Callable[..., Partition]]) -> str:
    """Writes a line for each meaning of a parameter, with its default."""
    lines = []
    for text, names in texts(key, owners).items():
        defaults = {name: options(owners[name], DATA)[key].default for name in names}
        for default in dict.fromkeys(defaults.values()):
            whose = ", ".join(name for name in names if defaults[name] == default)
            told = "needed" if default is inspect.Parameter.empty else f"default: {default}"
            lines.append(f"{whose}: {text} ({told})")
    return "\n".join(lines)


def deal_job(job: Job, dataset: Dataset) -> list[Partition]:
    """Deals a partition of the training samples for each seed.

    Raises:
        ValueError: if the data allow none, or a user's sampler fails; names the flag.
    """
    from tqdm import tqdm

    return deal_seeds(
        Sample(job.sampler, job.options),
        dataset,
        job.clients,
        # disable=None: no bar where stderr is a file.
        tqdm(range(job.request.seeds), desc=job.sampler, unit="seed", disable=None),
        origin=f"{'the default ' * bool(job.why)}--sampler {job.sampler}",
        flags=["clients", *job.options],
        foreign=SAMPLERS.is_foreign(job.sampler),
    )


def write_folder(
    job: Job,
    dataset: Dataset,
    partitions: Sequence[Partition],
    reports: Sequence[SkewReport],
    argv: Sequence[str],
) -> None:
    """Writes the folder: whole, or not at all."""
    record = {
        **environment(shlex.join(["python", "-m", PROGRAM, *argv])),
        **job.request.record(),
        "sampler": job.sampler,
        "options": job.options,
        "clients": job.clients,
        "reports": [report.as_dict() for report in reports],
    }
    tables, titles = [r.table for r in reports], [f"seed {i}" for i in range(len(reports))]
    name = f"{dataset.name} (training and test)" if job.request.pool else dataset.name
    # "emd(1.4): ll(2, 0.875)" is a target and what met it, which differs by seed.
    sampler = reports[0].name.partition(":")[0] or job.sampler
    head = f"{name}, {sampler}, {len(tables[0]):,} clients"
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".") as aside:
        folder = Path(aside) / job.out.name
        folder.mkdir()
        for i, partition in enumerate(partitions):
            save_partition(folder / f"seed{i}.npz", partition, dataset.train_y, name)
        (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        kind, classes = job.request.pictures, dataset.strata_names
        picture = folder / f"clients.{kind}"
        draw_partition(tables[:DRAWN], picture, titles[:DRAWN], title=head, classes=classes)
        draw_skew(tables, folder / f"skew.{kind}", titles, title=head)
        if job.out.is_dir():
            job.out.rmdir()  # empty, as `check_free` has found
        folder.rename(job.out)
