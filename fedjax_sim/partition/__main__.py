"""`python -m fedjax_sim.partition`: ask for a skew, look at it, keep it for `fedjax_sim.bench`."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.commands import add_data_flags, complain, deal_seeds, enter, new_folder
from fedjax_sim.data import Dataset, load_dataset, pooled
from fedjax_sim.flags import Parser, documented, flag, flagged, keywords, kind, number
from fedjax_sim.partition.draw import draw_partition, draw_skew
from fedjax_sim.partition.report import SkewReport, skew_report
from fedjax_sim.partition.samplers import FORMS, SAMPLERS, bind_sampler, parse_form
from fedjax_sim.partition.table import Partition, save_partition
from fedjax_sim.report import check_free, versions

PROGRAM = "fedjax_sim.partition"
DEFAULT = "emd(1.4)"
DRAWN = 4  # partitions that can still be read side by side
NO_FLAGS = ("seed", "groups", "features")


class Request(NamedTuple):
    """What the command line asks for.

    Attributes:
        dataset: What `load_dataset` takes.
        data_dir: A folder of data.
        pool: Whether the test set is dealt too.
        sampler: A key of `SAMPLERS`.
        options: Its keyword arguments.
        clients: N; None for all natural ones.
        seeds: How many partitions.
        out: The folder of the results, new or empty.
    """

    dataset: str
    data_dir: str | None
    pool: bool
    sampler: str
    options: dict[str, Any]
    clients: int | None
    seeds: int
    out: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None for those of this process.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        request = parse(argv)
        check_free(request.out)
        dataset = load_dataset(request.dataset, request.data_dir)
        if request.pool:
            dataset = pooled(dataset)
        partitions = make_partitions(request, dataset)
        reports = [skew_report(dataset.train_y, p, dataset.classes) for p in partitions]
        command = shlex.join(["python", "-m", PROGRAM, *argv])
        try:
            write_folder(request, dataset, partitions, reports, command)
        except OSError as error:
            raise ValueError(f"--out {request.out}: {error.strerror or error}") from error
    except (ValueError, OSError, ImportError) as error:
        return complain(PROGRAM, f"error: {error}", 2)
    except KeyboardInterrupt:
        return complain(PROGRAM, "stopped; nothing was written", 130)
    print(reports[0].text() if len(reports) == 1 else over_seeds(reports))
    part = "training and test" if request.pool else "training"
    print(f"\n{dataset.name}, {part} samples; partitions, report and pictures: {request.out}")
    print(f"train on it: {shlex.join(bench_command(request))}")
    return 0


def bench_command(request: Request) -> list[str]:
    """The command that trains FedAvg on the first partition."""
    command = ["python", "-m", "fedjax_sim.bench", "--algo", "fedavg"]
    command += ["--dataset", request.dataset, "--partition", str(request.out / "seed0.npz")]
    if request.data_dir is not None:
        command += ["--data-dir", request.data_dir]
    return [*command, "--split", "clients"] if request.pool else command


def parse(argv: Sequence[str]) -> Request:
    """Settings from the command line.

    Args:
        argv: The arguments, without the program's name.

    Returns:
        The settings; the ranges of a sampler's arguments are left to the sampler.

    Raises:
        ValueError: An argument is unknown, missing or malformed; names the flag.

    >>> parse(["--sampler", "ll(2, 7/8)", "--clients", "20"])[3:6]
    ('ll', {'labels_per_client': 2, 'fraction': 0.875}, 20)
    """
    given = vars(_parser().parse_args(argv))
    name, options = _sampler(given)
    clients, out = given["clients"], given["out"]
    return Request(
        dataset=given["dataset"],
        data_dir=given["data_dir"],
        pool=given["pool"],
        sampler=name,
        options=options,
        clients=40 if clients is None and name != "natural" else clients,
        seeds=given["seeds"],
        out=new_folder(given["dataset"], name) if out is None else Path(out),
    )


def _sampler(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of the sampler, and its arguments from its text form and from flags."""
    text = given["sampler"] or ("emd" if "emd" in given else DEFAULT)
    try:
        name, options = (text, {}) if text in SAMPLERS else parse_form(text)
    except ValueError as error:
        raise flagged(error, ["sampler"]) from error
    own = keywords(SAMPLERS[name], NO_FLAGS)
    for key in sorted(given.keys() & _users().keys()):
        if key not in own:
            flags = ", ".join(map(flag, own)) or "none"
            raise ValueError(f"{flag(key)} is no flag of {name}, whose flags are: {flags}")
        if key in options:
            raise ValueError(f"{flag(key)} is given twice: --sampler {text!r} has it too")
        options[key] = given[key]
    missing = [flag(k) for k, p in own.items() if p.default is p.empty and k not in options]
    if missing:
        raise ValueError(f"--sampler {name} needs {' and '.join(missing)}")
    return name, options


def _users() -> dict[str, list[str]]:
    """All parameters of samplers, and the samplers that each of them belongs to."""
    users: dict[str, list[str]] = {}
    for name, function in SAMPLERS.items():
        for key in keywords(function, NO_FLAGS):
            users.setdefault(key, []).append(name)
    return users


def _parser() -> Parser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Deals a data set to clients with the skew that is asked for; prints a report "
        "and writes a folder with the partition of each seed (seed0.npz, ... for "
        "fedjax_sim.bench --partition), report.json, clients.png (clients by classes) and "
        "skew.png (sizes and EMDs of the clients).",
        epilog="Example: python -m fedjax_sim.partition --dataset digits --sampler dirichlet "
        "--alpha 0.1 --clients 20",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_data_flags(add)
    add(
        "--pool", action="store_true",
        help="deal the test samples too, as RADFed does; for bench --split clients or holdout",
    )  # fmt: skip
    add(
        "--clients", type=number(int, at_least=1), metavar="N",
        help="how many (default: 40, of natural clients all)",
    )  # fmt: skip
    add(
        "--seeds", type=number(int, at_least=1), default=1, metavar="N",
        help="how many partitions, of seeds 0 to N-1 (default: 1)",
    )  # fmt: skip
    add(
        "--out", metavar="DIR",
        help="new folder for the results (default: runs/<dataset>-<sampler>-<date>-<time>)",
    )  # fmt: skip
    add(
        "--sampler", metavar="TEXT",
        help=f"a name, with its flags below: {', '.join(SAMPLERS)}; or a text: "
        f"{', '.join(form.text for form in FORMS.values())} (default: {DEFAULT})",
    )  # fmt: skip
    group = parser.add_argument_group("flags of the samplers")
    for key, names in _users().items():
        function = SAMPLERS[names[0]]
        parameter = keywords(function)[key]
        needed = parameter.default is parameter.empty
        default = "needed" if needed else f"default: {parameter.default}"
        group.add_argument(
            flag(key), default=argparse.SUPPRESS, **kind(parameter.annotation),
            help=f"{', '.join(names)}: {documented(function)[key]} ({default})",
        )  # fmt: skip
    return parser


def make_partitions(request: Request, dataset: Dataset) -> list[Partition]:
    """One partition of the training samples for each seed.

    Raises:
        ValueError: The data allow none; names the flag.
    """
    from tqdm import tqdm

    return deal_seeds(
        bind_sampler(request.sampler, request.options),
        dataset,
        request.clients,
        # disable=None: no bar where stderr is a file.
        tqdm(range(request.seeds), desc=request.sampler, unit="seed", disable=None),
        origin=f"--sampler {request.sampler}",
        flags=["clients", *request.options],
    )


def over_seeds(reports: Sequence[SkewReport]) -> str:
    """A table with a line for each seed, their mean and their standard deviation."""
    titles = ("EMD", "C-score", "KL", "n_k min", "max", "mean", "std", "Gini")
    forms = (".3f", ".3f", ".3f", ",.0f", ",.0f", ",.1f", ",.1f", ".3f")
    found = [report.as_dict() for report in reports]
    rows = np.array([[d["emd"], d["c_score"], d["kl"], *d["sizes"].values()] for d in found])

    def line(title: str, values: Sequence[float], name: str = "") -> str:
        cells = (format(format(x, form), ">9") for x, form in zip(values, forms, strict=True))
        return f"{title:7}{''.join(cells)}  {name}".rstrip()

    clients, classes = reports[0].table.shape
    head = f"{reports[0].table.sum():,} samples of {classes} classes at {clients:,} clients"
    return "\n".join(
        [
            head,
            f"{'':7}" + "".join(f"{title:>9}" for title in titles) + "  sha256        partition",
            *(
                line(f"seed {i}", row, f"{r.hash[:12]}  {r.name}")
                for i, (row, r) in enumerate(zip(rows, reports, strict=True))
            ),
            line("mean", rows.mean(axis=0)),
            line("std", rows.std(axis=0)),
        ]
    )


def write_folder(
    request: Request,
    dataset: Dataset,
    partitions: Sequence[Partition],
    reports: Sequence[SkewReport],
    command: str,
) -> None:
    """Write the folder: whole, or not at all."""
    settings = request._asdict()
    del settings["data_dir"], settings["out"]  # places on this machine say nothing of the run
    record = {
        "command": command,
        "versions": versions(),
        **settings,
        "reports": [report.as_dict() for report in reports],
    }
    tables, titles = [r.table for r in reports], [f"seed {i}" for i in range(len(reports))]
    name = f"{dataset.name} (training and test)" if request.pool else dataset.name
    request.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=request.out.parent, prefix=".") as aside:
        folder = Path(aside) / request.out.name
        folder.mkdir()
        for i, partition in enumerate(partitions):
            save_partition(folder / f"seed{i}.npz", partition, dataset.train_y, name)
        (folder / "report.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        draw_partition(tables[:DRAWN], folder / "clients.png", titles[:DRAWN])
        draw_skew(tables, folder / "skew.png", titles)
        if request.out.is_dir():
            request.out.rmdir()  # empty, as `check_free` has found
        folder.rename(request.out)


if __name__ == "__main__":
    enter(main)
