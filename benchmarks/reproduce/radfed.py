"""Table III, version 1's Table 2, and Figures 6 and 7 of RADFed (Xue, Klabjan, Luo).

    python -m benchmarks.reproduce.radfed --data-dir DATA
    python -m benchmarks.reproduce.radfed --data-dir DATA --small

Table III: RADFed and its variants, FedAvg, FedProx, FedAsync and FedAdapt, scored by client on five
folds: test score of the weights that scored best on the validation clients, as a difference to
FedAvg in percent of it. Figures 6 and 7: DC, the distance from a centralised twin, and DL, how far
the models in flight point apart. Prints tables in markdown; writes a JSON file and pictures.

Nothing is tuned here. Where the paper or the authors' published commands say it, S, γ, B, E, the
learning rate and the rounds are theirs; μ, α and the adaptive server's settings are fixed members
of the paper's grids. FedAsync moves its server for each of a round's clients, whose models are at
most as stale as the paper has it. As in the authors' code, RADFed is scored by the mean of the
models in flight, and logistic regression has an L2 term of 0.01. That code trains on Cifar10 in
ways that are not here: crops and flips of 224x224, dropout 0.2, the batch's own statistics in the
trunk, width 1.0, importance from the last layer's gradient alone. On all data its minibatches are
in the stored order in every epoch; here they are shuffled.

Figure 6 has FedAvg twice: with the weights n_k, and with equal ones as RADFed has.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax
from numpy.typing import NDArray
from scipy import stats

import fedjax_sim as fs
from benchmarks.reproduce import radfed_pictures
from benchmarks.reproduce.common import (
    Arm,
    markdown,
    parse_sized,
    parser,
    simulate,
    spread,
)
from benchmarks.reproduce.times import announce
from benchmarks.script import write_record
from fedjax_sim import diagnostics, flight, redistribution, weighting
from fedjax_sim.algorithms import fedadam, fedasync, fedprox, radfeda, radfedi, radfedm, radfedp
from fedjax_sim.base import LocalUpdate, Weighting
from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.dealing import deal_seeds
from fedjax_sim.cli.problem import Problem, by_clients, population
from fedjax_sim.cli.scoring import Standardise
from fedjax_sim.data import DataNotFoundError, Dataset, load_dataset
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.round import compose

METHODS = (
    "FedAvg", "FedProx", "FedAsync", "FedAdapt", "RADFed", "RADFedi", "RADFeda", "RADFedp",
    "RADFedm",
)  # fmt: skip
PAPER = {  # FedAvg's score in percent, then differences to it in percent of it
    "Cifar10": (82.88, 0.84, 2.11, 0.39, 2.74, 3.03, 2.20, 3.00, 2.28),
    "Shakespeare": (51.71, 0.33, 0.75, 0.54, 4.04, 4.51, 3.04, 3.83, 3.96),
    "COVFEAT-G": (87.61, 0.37, 0.34, -1.45, 3.23, 2.59, 2.49, 3.37, 1.96),
    "COVFEAT-L": (78.79, 1.29, 0.93, -1.50, 5.01, 4.28, 3.96, 4.78, 5.29),
    "COVCLS-G": (93.87, 0.03, -0.20, -0.26, 0.16, 0.23, 0.26, 0.26, 0.33),
    "COVCLS-L": (90.62, 0.38, 0.06, -0.23, 2.27, 0.09, 2.24, 2.16, 2.32),
    "MNIST-1": (97.29, 0.13, -0.05, 0.11, 0.16, 0.23, 0.23, 0.41, 0.47),
    "MNIST-0.1": (96.95, 0.15, -0.17, 0.10, 0.24, 0.29, 0.36, 0.20, 0.42),
    "eICU": (92.21, 0.00, 0.11, 0.05, 0.11, 0.08, 0.13, 0.11, 0.11),
}
ACTIVE = 0.1  # C, the part of the training clients in a round
FOLDS = 5
MU, ALPHA, MIX = 0.01, 0.9, 0.6  # of FedProx and FedAsync; of RADFedm; of FedAsync
STALENESS = {"mnist": 18, "cifar10": 19, "covertype": 18, "shakespeare": 28, "eicu": 31}
ADAPTIVE: dict[str, Any] = {"server_lr": 0.1, "tau": 0.01, "v0": 0.01}
DRAWN = ("COVFEAT-L", "MNIST-0.1", "Shakespeare")  # the paper draws the first and the last


class Training(NamedTuple):
    """How long and how a row trains.

    Attributes:
        batch: B.
        epochs: E.
        lr: of plain SGD.
        inner: S.
        inner_i: S of RADFedi.
        rounds: local rounds.
        gamma: γ.
        l2: λ of the loss.
    """

    batch: int
    epochs: float
    lr: float
    inner: int
    inner_i: int
    rounds: int
    gamma: float = 0.9
    l2: float = 0.0

    @property
    def eval_every(self) -> int:
        """The largest proper divisor of S: every aggregation is scored."""
        return max(d for d in range(1, self.inner) if self.inner % d == 0)


class Row(NamedTuple):
    """A row of Table III.

    Attributes:
        data: names to try, in order.
        model: key of `MODELS`.
        metric: the score.
        full: the paper's size; S and γ of its Table II. Learning rate and rounds come from the
            authors' published commands. There is none for eICU, for MNIST-1 (as many cycles as
            MNIST-0.1) and for COVCLS (as COVFEAT).
        small: the other size; None where it would not finish in minutes.
        sampler: deals 100 clients; natural clients are all there are.
        standardise: of a table's numeric columns.
    """

    data: tuple[str, ...]
    model: str
    metric: str
    full: Training
    small: Training | None
    sampler: str
    standardise: Standardise = "global"


MNIST = Training(10, 10, 0.002, 22, 22, 660), Training(10, 3, 0.02, 10, 10, 60)
COVCLS = Training(256, 1, 0.2, 22, 22, 20_000), Training(16, 1, 0.05, 10, 10, 200)
COVFEAT = Training(256, 1, 0.2, 20, 20, 20_000), COVCLS[1]
CLASSES, FEATURES = "matched(1, 0.1)", "matched(1, 0.1, 0.1)"
ROWS = {
    "Cifar10": Row(("cifar10",), "mobilenet_v2", "accuracy",
                   Training(16, 1, 0.2, 15, 100, 1500), None, CLASSES),
    "Shakespeare": Row(("shakespeare",), "lstm", "accuracy",
                       Training(256, 1, 0.5, 15, 100, 1500, 0.8), None, "natural"),
    "COVFEAT-G": Row(("covertype",), "ffn", "f1", *COVFEAT, FEATURES),
    "COVFEAT-L": Row(("covertype",), "ffn", "f1", *COVFEAT, FEATURES, "local"),
    "COVCLS-G": Row(("covertype",), "ffn", "f1", *COVCLS, CLASSES),
    "COVCLS-L": Row(("covertype",), "ffn", "f1", *COVCLS, CLASSES, "local"),
    "MNIST-1": Row(("mnist",), "mlp", "accuracy", *MNIST, "matched(1, 1)"),
    "MNIST-0.1": Row(("mnist",), "mlp", "accuracy",
                     MNIST[0]._replace(inner=15, inner_i=15, rounds=450), MNIST[1], CLASSES),
    "eICU": Row(("eicu", "eicu_demo"), "logistic", "auc",
                Training(256, 1, 0.2, 80, 80, 2000, l2=0.01),
                Training(16, 1, 0.05, 20, 20, 200, l2=0.01), "natural"),
}  # fmt: skip


class Size(NamedTuple):
    """What `--small` reduces in addition to each row's `Training`.

    Attributes:
        seeds: repetitions of the five folds.
        images: the most samples of an image data set.
    """

    seeds: int
    images: int | None


FULL, SMALL = Size(3, None), Size(4, 10_000)


class Built(NamedTuple):
    """What a row trains: the folds of all seeds are the runs of one batch."""

    problem: Problem
    model: fs.Model
    classes: int
    objective: Any
    local: LocalUpdate
    cohort: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "radfed")
    add = made.add_argument
    add("--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="NAME",
        help=f"of Table III, any of {', '.join(ROWS)} (default: all)")  # fmt: skip
    add("--figures", nargs="*", choices=DRAWN, default=list(DRAWN), metavar="NAME",
        help=f"data sets of Figures 6 and 7, of {', '.join(DRAWN)} (default: all)")  # fmt: skip
    left_out = ", ".join(name for name, row in ROWS.items() if row.small is None)
    reduced = f"fewer images, epochs and rounds, shorter S; without {left_out}"
    args = parse_sized(made, argv, FULL, SMALL, reduced)
    if args.small:
        args.rows, args.figures = ([n for n in names if ROWS[n].small] for names in
                                   (args.rows, args.figures))  # fmt: skip
    return args


def find(names: Sequence[str], data_dir: str | None) -> Dataset | None:
    """The first of these data sets that is there."""
    for name in names:
        try:
            return load_dataset(name, data_dir)
        except DataNotFoundError as error:
            print(f"not there: {error}", file=sys.stderr)
    return None


def build(row: Row, training: Training, args: argparse.Namespace) -> Built | None:
    """Clients, folds, model and local update; None without the data."""
    found = find(row.data, args.data_dir)
    if found is None:
        return None
    dataset = thinned(population(found, "clients"), args.size.images)
    clients = None if row.sampler == "natural" else 100
    dealt = deal_seeds(row.sampler, dataset, clients, range(args.seeds), origin=row.sampler)
    problem = by_clients(dataset, dealt, range(args.seeds), FOLDS, row.standardise)
    if problem.scaled:
        dataset = dataset._replace(mean=None, std=None)
    model = load_model(row.model, dataset)
    objective = fs.empirical_risk(model, l2=training.l2)
    local = fs.local_sgd(objective, optax.sgd(training.lr), training.batch, training.epochs)
    cohort = max(int(ACTIVE * problem.data.clients), 1)
    return Built(problem, model, dataset.classes, objective, local, cohort)


def thinned(dataset: Dataset, most: int | None) -> Dataset:
    """At most so many random images; tables and texts as they are."""
    n = len(dataset.train_y)
    if most is None or most >= n or dataset.train_x.ndim != 4:
        return dataset
    rows = np.sort(np.random.default_rng(0).choice(n, most, replace=False))
    return dataset._replace(train_x=dataset.train_x[rows], train_y=dataset.train_y[rows])


def methods(built: Built, training: Training, data: str) -> dict[str, fs.Algorithm]:
    """The columns of Table III."""
    local = built.local
    common: dict[str, Any] = {"clients_per_round": built.cohort}
    delayed = common | {"redistribution_rounds": training.inner}
    drawn = common | {"redistribution_rounds": training.inner_i, "gamma": training.gamma}
    redistributed = {
        "RADFed": fs.radfed(local, **delayed),
        "RADFedi": radfedi(local, objective=built.objective, **drawn),
        "RADFeda": radfeda(local, **delayed, **ADAPTIVE),
        "RADFedp": radfedp(local, mu=MU, **delayed),
        "RADFedm": radfedm(local, alpha=ALPHA, **delayed),
    }
    return {
        "FedAvg": fs.fedavg(local, **common),
        "FedProx": fedprox(local, mu=MU, **common),
        "FedAsync": fedasync(local, mu=MU, alpha=MIX, max_staleness=STALENESS[data], **common),
        "FedAdapt": fedadam(local, **common, **ADAPTIVE),
        **redistributed,
    }


def watched(built: Built, inner: int, weights: Weighting) -> fs.Algorithm:
    """RADFed with both diagnostics; FedAvg for S = 1."""
    return compose(
        built.local,
        built.cohort,
        flight=flight.delayed(inner, redistribution=redistribution.permute),
        weighting=weights,
        diagnostics={
            "DL": diagnostics.model_divergence(),
            "DC": diagnostics.central_divergence(built.local),
        },
    )


def table_row(name: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Scores of every method on one data set, in percent, [runs]; nothing without the data."""
    row = ROWS[name]
    training = row.small if args.small and row.small else row.full
    built = build(row, training, args)
    if built is None:
        return {}
    scores = {}
    for method, algorithm in methods(built, training, row.data[0]).items():
        began, each = time.perf_counter(), int(algorithm.round_factor)
        result = simulate(
            f"{name}, {method}",
            Arm(algorithm, each * training.rounds, each * training.eval_every),
            built.model,
            built.problem,
            built.classes,
            auc=row.metric == "auc",
        )
        scores[method] = {
            "best": 100 * result.validated(row.metric, by_client=True),
            "last": 100 * result.series(row.metric, by_client=True)[-1],
            "seconds": round(time.perf_counter() - began, 1),
        }
        print(f"{name}, {method}: {spread(scores[method]['best'])}, "
              f"{scores[method]['seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return {name: scores}


def relative(scores: NDArray[np.float64], base: NDArray[np.float64]) -> float:
    """Difference of the means, in percent of the second."""
    return float(100 * (np.nanmean(scores) / np.nanmean(base) - 1))


def table(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]], base: str = "FedAvg"
) -> list[dict[str, Any]]:
    """Lines for each data set: the paper's scores, ours, and ours after the last round.

    With FedAsync as the base it is Table 2 of RADFed's first version, which has the same scores.
    """
    rows, others = [], [m for m in METHODS if m != base]
    for name, scores in found.items():
        paper = dict(zip(METHODS, (0.0, *PAPER[name][1:]), strict=True))
        unit, ours = 1 + paper[base] / 100, scores[base]
        rows.append(
            {"": f"**{name}**, paper", base: f"({PAPER[name][0] * unit:.2f})"}
            | {m: f"{100 * ((1 + paper[m] / 100) / unit - 1):+.2f}" for m in others}
        )
        for line, key in (("ours", "best"), ("ours, last round", "last")):
            cells = {"": line, base: f"({spread(ours[key])})"}
            for m in others:
                cells[m] = f"{relative(scores[m][key], ours[key]):+.2f}"
                if key == "best":
                    cells[m] += f" (p {p_value(scores[m][key], ours[key]):.2f})"
            rows.append(cells)
    return rows


def p_value(scores: NDArray[np.float64], base: NDArray[np.float64]) -> float:
    """Of the Wilcoxon signed-rank test across the runs, two-sided; 1 where none differs."""
    if np.array_equal(scores, base):
        return 1.0
    return float(stats.wilcoxon(scores, base, method="exact").pvalue)


def divergences(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """DC and DL of FedAvg and RADFed on one data set, [rounds, runs]; nothing without the data."""
    row = ROWS[name]
    training = row.small if args.small and row.small else row.full
    built = build(row, training, args)
    if built is None:
        return {}
    rounds, curves = min(training.rounds, 10 * training.inner), {}
    for method, inner, weights in (
        ("FedAvg", 1, weighting.by_samples),
        ("FedAvg, equal weights", 1, weighting.equal),
        ("RADFed", training.inner, weighting.equal),
    ):
        arm = Arm(watched(built, inner, weights), rounds)
        result = simulate(
            f"{name}, {method}", arm, built.model, built.problem, built.classes, auc=False
        )
        curves[method] = {
            key: np.stack([e.diagnostics[key] for e in result.evaluations]) for key in ("DC", "DL")
        }
    return {name: {"inner": training.inner, "curves": curves}}


def divergence_table(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paper's statements about Figures 6 and 7, in numbers, without the first S rounds."""
    rows = []
    for name, content in found.items():
        inner, curves = content["inner"], content["curves"]
        dl = curves["RADFed"]["DL"][inner:].reshape(-1, inner, curves["RADFed"]["DL"].shape[1])
        dc = {m: c["DC"][2 * inner - 1 :: inner] for m, c in curves.items()}
        rows.append(
            {
                "": name,
                "S": inner,
                **{f"DC {method}": float(values.mean()) for method, values in dc.items()},
                "RADFed's below": f"{100 * np.mean(dc['RADFed'] < dc['FedAvg']):.0f} %",
                "below equal weights": "{:.0f} %".format(
                    100 * np.mean(dc["RADFed"] < dc["FedAvg, equal weights"])
                ),
                "DL RADFed, first of S": float(dl[:, 0].mean()),
                "last of S": float(dl[:, -1].mean()),
                "first is the least": f"{100 * np.mean(dl.argmin(axis=1) == 0):.0f} %",
                "DL FedAvg": float(curves["FedAvg"]["DL"][inner:].mean()),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Runs rows and figures, prints the tables, writes the numbers and the pictures."""
    args = parse(argv)
    use_cores()
    started, small, out = time.time(), "_small" if args.small else "", args.out
    path = out / f"radfed{small}.json"
    parts = {"Table III": args.rows, "Figures 6 and 7": args.figures}
    announce("everything", f"radfed/{path.name}", seeds=args.seeds, **parts)
    scores: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for names, part, found in (
        (args.rows, table_row, scores),
        (args.figures, divergences, curves),
    ):
        for name in names:
            found |= part(name, args)
            content = {"Table III": scores, "Figures 6 and 7": curves}
            write_record(path, started, seeds=args.seeds, folds=FOLDS, **content)
    if scores:
        print(f"\n## Table III\n\n{markdown(table(scores))}")
        print(f"\n## Table 2 of version 1\n\n{markdown(table(scores, 'FedAsync'))}")
        radfed_pictures.draw_table_3(scores, PAPER, METHODS, out / f"table_3{small}.png")
    if curves:
        print(f"\n## Figures 6 and 7\n\n{markdown(divergence_table(curves))}")
        radfed_pictures.draw_divergences(curves, out / f"figures_6_7{small}.png")
    print(f"\nnumbers and pictures: {out}")


if __name__ == "__main__":
    main()
