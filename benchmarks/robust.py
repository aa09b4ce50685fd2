"""Accuracy of robust rules under attacks by 20 % of the clients, beside the plain mean.

    python -m benchmarks.robust --data-dir DATA
    python -m benchmarks.robust --small

Every rule meets every attack on scikit-learn's digits and on MNIST (`--small`: digits alone), the
seeds of a cell in one batch. Prints tables in markdown; writes robust.json and robust.png. What
they show is told in `benchmarks/results/robust.md`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.script import use_all_cores, write_record
from fedjax_sim import (
    aggregators,
    attacks,
    models,
    partition,
    preaggregation,
    schedule,
    selection,
    sending,
)
from fedjax_sim.base import ClientData, LocalUpdate, Model, Sending
from fedjax_sim.client.local import local_sgd
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import Dataset, client_data, load_dataset
from fedjax_sim.round import compose
from fedjax_sim.run import DivergedError, simulate

RESULTS = Path(__file__).resolve().parent / "results" / "robust"
CLIENTS = 50  # all of them in every round
FRACTION = 0.2  # of them malicious, and what trimming and Krum are told
ROOT = 100  # samples of the server, for FLTrust, as in its paper
ROUNDS, BATCH, LR = 30, 10, 0.05
CLIP = {"digits": 0.15, "mnist": 0.6}  # the norm of an honest change, as measured
MOST = 12_000  # training samples; of MNIST a fifth
MALICIOUS = attacks.byzantine(CLIENTS, FRACTION)

ATTACKS: dict[str, tuple[Sending, ...]] = {
    "none": (),
    "sign flip": (attacks.sign_flip(MALICIOUS, 4.0),),
    "ALIE": (attacks.alie(MALICIOUS, 1.5),),
    "Gaussian": (attacks.gaussian(MALICIOUS, 1.0),),
    "label flip": (),  # the clients' data are poisoned, not what they send
}
RULES: dict[str, Callable[[LocalUpdate, float], dict[str, Any]]] = {
    "mean": lambda local, clip: {},
    "coordinate median": lambda local, clip: {"aggregator": aggregators.coordinate_median},
    "trimmed mean": lambda local, clip: {"aggregator": aggregators.trimmed_mean(FRACTION)},
    "geometric median": lambda local, clip: {"aggregator": aggregators.geometric_median()},
    "Krum": lambda local, clip: {"aggregator": aggregators.krum(FRACTION)},
    "multi-Krum": lambda local, clip: {"aggregator": aggregators.multi_krum(FRACTION)},
    "clip + mean": lambda local, clip: {"sending": [sending.clip_norm(clip)]},
    "FLTrust": lambda local, clip: {"preaggregation": [preaggregation.trust(local)]},
}

Table = dict[str, dict[str, NDArray[np.float64]]]
"""Accuracies by seed, by rule and attack; NaN where a seed diverged."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robust",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data-dir", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR, else TFDS's own)")
    add("--small", action="store_true", help="digits alone")
    add("--rules", nargs="+", choices=list(RULES), default=list(RULES), help="rows of the tables")
    add("--seeds", type=int, default=3, help="runs of each cell")
    add("--partition", default="iid", help="how samples are dealt, as for fedjax_sim.bench")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


def deal(dataset: Dataset, sampler: str, seeds: int) -> ClientData:
    """Clients of every seed; the server owns ROOT samples that no client has."""
    order = np.random.default_rng(0).permutation(len(dataset.train_y))[: MOST + ROOT]
    root, rest = np.sort(order[:ROOT]), np.sort(order[ROOT:])
    _, sample = partition.parse_sampler(sampler)
    parts = []
    for seed in range(seeds):
        part = sample(dataset.train_y[rest], CLIENTS, seed=seed)
        parts.append(dataclasses.replace(part, index=rest[part.index].astype(np.int32)))
    return client_data(dataset.train_x, dataset.train_y, parts, root=root)


def cell(
    dataset: Dataset, model: Model, data: ClientData, seeds: int, rule: str, attack: str
) -> NDArray[np.float64]:
    """Test accuracy after ROUNDS rounds, ``f64[seeds]``."""
    if attack == "label flip":
        data = attacks.label_flip(data, MALICIOUS, dataset.classes)
    honest = local_sgd(empirical_risk(model), optax.sgd(LR), batch_size=BATCH)
    parts = RULES[rule](honest, CLIP[dataset.name])
    algorithm = compose(
        honest,
        selection=selection.uniform(),
        schedule=schedule.every_round(CLIENTS),
        sending=[*ATTACKS[attack], *parts.pop("sending", [])],
        **parts,
    )
    try:
        result = simulate(
            algorithm,
            model,
            data,
            (dataset.test_x, dataset.test_y),
            rounds=ROUNDS,
            classes=dataset.classes,
            seeds=range(seeds),
            eval_every=ROUNDS,
        )
    except DivergedError:
        return np.full(seeds, np.nan)
    return result.accuracy[-1]


def measure(name: str, args: argparse.Namespace) -> Table:
    """All cells of one data set."""
    dataset = load_dataset(name, args.data_dir)
    data = deal(dataset, args.partition, args.seeds)
    assert dataset.mean is not None
    assert dataset.std is not None
    net = models.mlp(dataset.train_x.shape[1:], dataset.classes, (32,))
    model = models.with_scaling(net, dataset.mean, dataset.std)
    table: Table = {}
    for rule in args.rules:
        table[rule] = {}
        for attack in ATTACKS:
            began = time.perf_counter()
            found = table[rule][attack] = cell(dataset, model, data, args.seeds, rule, attack)
            print(
                f"{name}, {rule}, {attack}: {100 * found.mean():.1f} "
                f"({time.perf_counter() - began:.1f} s)",
                file=sys.stderr,
            )
    return table


def markdown(table: Table) -> str:
    """Percent, mean ± standard deviation over the seeds."""
    lines = [["", *ATTACKS], ["---"] * (len(ATTACKS) + 1)]
    for rule, row in table.items():
        cells = (
            "diverged" if np.isnan(a).any() else f"{100 * a.mean():.1f} ± {100 * a.std():.1f}"
            for a in row.values()
        )
        lines.append([rule, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(tables: dict[str, Table], path: Path) -> None:
    """A square for each cell, from chance (red) to all right (green)."""
    figure = Figure(figsize=(5.6 * len(tables) + 1, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axis, (name, table) in zip(axes, tables.items(), strict=True):
        values = 100 * np.array([[a.mean() for a in row.values()] for row in table.values()])
        axis.imshow(np.nan_to_num(values), cmap="RdYlGn", vmin=10, vmax=100, aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            text = "diverged" if np.isnan(value) else f"{value:.1f}"
            axis.text(x, y, text, ha="center", va="center", fontsize=9)
        axis.set_title(name)
        axis.set_xticks(range(len(ATTACKS)), list(ATTACKS))
        axis.set_yticks(range(len(table)), list(table))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle(
        f"Test accuracy in %, {100 * FRACTION:.0f} % of {CLIENTS} clients malicious", fontsize=11
    )
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every cell, print the tables, write the numbers and the picture."""
    args = parse(argv)
    use_all_cores()
    started = time.time()
    names = ["digits"] if args.small else ["digits", "mnist"]
    tables = {name: measure(name, args) for name in names}
    for name, table in tables.items():
        print(f"\n## {name}\n\n{markdown(table)}")
    seeds = {
        name: {rule: {k: a.tolist() for k, a in row.items()} for rule, row in table.items()}
        for name, table in tables.items()
    }
    record = {"partition": args.partition, "accuracy by seed": seeds}
    write_record(args.out / "robust.json", started, **record)
    draw(tables, args.out / "robust.png")
    print(f"\nnumbers and picture: {args.out}")


if __name__ == "__main__":
    main()
