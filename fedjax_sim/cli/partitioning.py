"""``python -m fedjax_sim.partition``: draws partitions, describes them, and saves them."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_sim.cli import dealing
from fedjax_sim.cli.claims import check_free, make_folder
from fedjax_sim.cli.commands import (
    BY_EMD,
    Source,
    complain,
    default_folder,
    plain,
    sampler,
    sampler_forms,
)
from fedjax_sim.cli.flags import Parser
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
from fedjax_sim.partition.pictures import Format
from fedjax_sim.run.environment import environment

PROGRAM = "fedjax_sim.partition"
DRAWN = 4  # partitions that can still be read side by side


@dataclasses.dataclass(frozen=True)
class Request(Source):
    """The settings of the command."""

    pool: bool = setting(
        False,
        "partition the test samples too, as RADFed does; for bench --split clients or holdout",
    )
    clients: int | None = setting(
        None,
        "number of clients",
        shown="40; with natural clients all; with fewer than 80 samples half as many as samples",
        at_least=1,
    )
    seeds: int = setting(1, "number of partitions, with seeds 0 to N-1", at_least=1, at_most=10_000)
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
        lambda: f"one of {sampler_forms()}",
        shown="natural if the data name their clients; else --emd, or iid without classes",
        metavar="TEXT",
        convert=sampler,
        instead=BY_EMD,
    )


def command(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        request = Request.of(vars(_parser(argv).parse_args(argv)))
        if request.out is not None:
            check_free(Path(request.out))
        loaded = request.load()
        dataset = pooled(loaded) if request.pool else loaded
        seeds = range(request.seeds)
        deal = dealing.choose(request.sampler, request.clients, dataset, seeds, flag="--sampler")
        origin = deal.origin("--sampler")
        partitions = dealing.deal_seeds(deal.text, dataset, deal.clients, seeds, origin=origin)
        reports = [skew_report(dataset.strata, p, dataset.task.classes or 1) for p in partitions]
        STOPPING.patient = True  # to the end, which comes soon
        if request.out is None:
            out = make_folder(default_folder(request.dataset, deal.text))
        else:
            out = Path(request.out)
            out.mkdir(parents=True, exist_ok=True)
        write_folder(out, request, deal, dataset, partitions, reports, argv)
    except (ValueError, OSError, ImportError) as error:
        return complain(PROGRAM, f"error: {plain(error)}", 2)
    except KeyboardInterrupt:
        return complain(PROGRAM, "stopped", 130)
    met = deal._replace(text=reports[0].name or deal.text)
    about = summary(loaded)._replace(clients=dealing.describe(met, loaded, partitions[0]))
    print(f"{about.text()}\n")
    print(reports[0].text() if len(reports) == 1 else over_seeds(reports))
    part = "training and test" if request.pool else "training"
    print(f"\n{dataset.name}, {part} samples; partitions, report and pictures: {out}")
    print(f"train on it: {shlex.join(bench_command(request, out))}")
    return 0


def bench_command(request: Request, out: Path) -> list[str]:
    """Returns the command that trains FedAvg on the first partition."""
    words = ["python", "-m", "fedjax_sim.bench", "--algo", "fedavg"]
    words += ["--dataset", request.dataset, "--partition", str(out / "seed0.npz")]
    if request.data_dir is not None:
        words += ["--data-dir", request.data_dir]
    return [*words, "--split", "clients"] if request.pool else words


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Partitions a data set over clients with a chosen skew; prints a report and "
        "writes a folder with the partition of each seed (seed0.npz, ... for fedjax_sim.bench "
        "--partition), report.json, clients.png (classes of each client) and skew.png (sizes and "
        "EMDs of the clients); without classes they only show sizes.",
        epilog="Example: python -m fedjax_sim.partition --dataset digits --sampler "
        "'dirichlet(0.1)' --clients 20",
    )
    Request.add_flags(parser, helping=not {"-h", "--help"}.isdisjoint(argv))
    return parser


def write_folder(
    out: Path,
    request: Request,
    deal: dealing.Deal,
    dataset: Dataset,
    partitions: Sequence[Partition],
    reports: Sequence[SkewReport],
    argv: Sequence[str],
) -> None:
    """Writes partitions, report and pictures."""
    record = {
        **environment(shlex.join(["python", "-m", PROGRAM, *argv])),
        **request.record(),
        "sampler": deal.text,
        "clients": deal.clients,
        "reports": [report.as_dict() for report in reports],
    }
    tables, titles = [r.table for r in reports], [f"seed {i}" for i in range(len(reports))]
    name = f"{dataset.name} (training and test)" if request.pool else dataset.name
    # "emd(1.4): ll(2, 0.875)" is a target and what met it, which differs by seed.
    met = reports[0].name.partition(":")[0] or deal.text
    head = f"{name}, {met}, {len(tables[0]):,} clients"
    for i, partition in enumerate(partitions):
        save_partition(out / f"seed{i}.npz", partition, dataset.train_y, name)
    (out / "report.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    kind, classes = request.pictures, dataset.strata_names
    picture = out / f"clients.{kind}"
    draw_partition(tables[:DRAWN], picture, titles[:DRAWN], title=head, classes=classes)
    draw_skew(tables, out / f"skew.{kind}", titles, title=head)
