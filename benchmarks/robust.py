"""Heat maps of robust rules under attack: accuracy by rule, attack and share of the attackers.

    python -m benchmarks.robust --data-dir DATA
    python -m benchmarks.robust --small

Every rule meets every attack by every share of malicious clients, on scikit-learn's digits and on
MNIST (`--small`: digits alone). The rules are told the share. All cells of a data set and all seeds
are one XLA program, which takes the rule, the attack and the clients that are malicious as data.
Prints tables in markdown; writes robust.csv, robust.json and, as PDF and PNG, a heat map of each
data set. What they show is told in `benchmarks/results/robust.md`.
"""

import argparse
import csv
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.script import write_record
from fedjax_sim import (
    aggregators,
    attacks,
    models,
    partition,
    preaggregation,
    sending,
    weighting,
)
from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientData,
    Cohort,
    LocalUpdate,
    Model,
    PreAggregation,
    PyTree,
    Sending,
    Variables,
)
from fedjax_sim.client.local import local_sgd
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import Dataset, client_data, load_dataset
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.engine.execution import make_execution
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.round import compose
from fedjax_sim.run.layout import RunAxes

RESULTS = Path(__file__).resolve().parent / "results" / "robust"
ROOT = 100  # samples of the server, for FLTrust, as in its paper
BATCH, LR, HIDDEN = 10, 0.05, 16
EVALUATIONS = 10  # of the rule, by the attackers that optimise their strength, in each round
CLIP = {"digits": 0.35, "mnist": 0.45}  # the median norm of honest changes, as measured
LABEL_FLIP = "label flip"  # of the data, not of what is sent


class Defence(NamedTuple):
    """A row of the tables.

    Attributes:
        aggregator: of the share of malicious rows, ``f32[]``, which it is told.
        before: what is applied before it, of that share too; None: nothing.
        secret: whether attackers that know the rule do not know what is applied before it.
    """

    aggregator: Callable[[Array], Aggregator]
    before: Callable[[Array], PreAggregation] | None = None
    secret: bool = False


def spoilt(share: Array) -> Array:
    """The share of buckets of two that are malicious, of which a rule withstands less than half."""
    return jnp.minimum(2 * share, 0.49)


def defences(local: LocalUpdate, clip: float) -> dict[str, Defence]:
    """The rules by name."""
    nearest = preaggregation.nearest_neighbour_mixing

    def mean(share: Array) -> Aggregator:
        return aggregators.mean

    def median(share: Array) -> Aggregator:
        return aggregators.coordinate_median

    def far(share: Array) -> Aggregator:
        return aggregators.geometric_median()

    def pairs(share: Array) -> PreAggregation:
        return preaggregation.bucketing(2)

    return {
        "mean": Defence(mean),
        "clip + mean": Defence(mean, lambda share: clipped(clip)),
        "FLTrust": Defence(mean, lambda share: preaggregation.trust(local), secret=True),
        "coordinate median": Defence(median),
        "trimmed mean": Defence(aggregators.trimmed_mean),
        "geometric median": Defence(far),
        "Krum": Defence(aggregators.krum),
        "multi-Krum": Defence(aggregators.multi_krum),
        "CAF": Defence(aggregators.caf),
        "NNM + coordinate median": Defence(median, nearest),
        "NNM + trimmed mean": Defence(aggregators.trimmed_mean, nearest),
        "NNM + geometric median": Defence(far, nearest),
        "NNM + Krum": Defence(aggregators.krum, nearest),
        "buckets + coordinate median": Defence(median, pairs),
        "buckets + Krum": Defence(lambda share: aggregators.krum(spoilt(share)), pairs),
    }


RULES = tuple(defences(local_sgd(lambda *_: (jnp.float32(0), ()), optax.sgd(LR)), 1.0))
ATTACKS = (
    "none",
    "sign flip",
    "Gaussian",
    "ALIE",
    "IPM",
    "Mimic",
    "optimised ALIE",
    "optimised IPM",
    LABEL_FLIP,
)

Table = dict[tuple[str, str, float], NDArray[np.float64]]
"""Accuracies by seed, by rule, attack and share; NaN where a seed diverged."""


class clipped(PreAggregation):
    """Clipping by the server: the same as clipping each message."""

    limit: float

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        clip = sending.clip_norm(self.limit)

        def one(update: Variables) -> Variables:
            return clip.send(key, (), update, (), jnp.int32(0)).update

        return jax.vmap(one)(updates), weights, state


class one_of(PreAggregation):
    """The pre-aggregation of a traced number, all without state; None changes nothing."""

    number: Array
    parts: Sequence[PreAggregation | None]

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        def of(part: PreAggregation | None) -> Any:
            if part is None:
                return lambda updates, weights: (updates, weights)
            apply: Any = part.apply
            return lambda updates, weights: apply(key, (), updates, weights, cohort)[:2]

        branches = [of(part) for part in self.parts]
        return *jax.lax.switch(self.number, branches, updates, weights), state


class _AnyAttack(Sending):
    """The attack of a traced number, None for none: first client by client, then together."""

    number: Array
    parts: Sequence[Sending | None]

    def together(self, key: Array, updates: Variables, client: Array, sends: Array) -> Variables:
        branches = [self._sent(part) for part in self.parts]
        return jax.lax.switch(self.number, branches, key, updates, client, sends)

    def _sent(self, part: Sending | None) -> Any:
        def sent(key: Array, updates: Variables, client: Array, sends: Array) -> Variables:
            if part is None:
                return updates
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client)
            send: Any = part.send

            def alone(key: Array, update: Variables, client: Array) -> Variables:
                forged: Variables = send(key, (), update, (), client).update
                return forged

            updates = jax.vmap(alone)(keys, updates, client)
            return updates if part.together is None else part.together(key, updates, client, sends)

        return sent


def program(dataset: Dataset, model: Model, data: ClientData, args: argparse.Namespace) -> Any:
    """``(data, rule, attack, malicious bool[N], share) -> f32[seeds]``, a cell's accuracies."""
    honest = local_sgd(empirical_risk(model), optax.sgd(LR), batch_size=BATCH)
    rules = list(defences(honest, CLIP[dataset.name]).values())
    execution = make_execution()
    axes = RunAxes.of(data, (), args.seeds)
    x, y = jnp.asarray(dataset.test_x), jnp.asarray(dataset.test_y)

    def cell(data: ClientData, rule: Array, attack: Array, malicious: Any, share: Array) -> Array:
        def aggregator(stacked: PyTree, weights: Array, /) -> PyTree:
            return jax.lax.switch(rule, [r.aggregator(share) for r in rules], stacked, weights)

        before = [None if r.before is None else r.before(share) for r in rules]
        known = [None if r.secret else part for r, part in zip(rules, before, strict=True)]
        shown = (one_of(rule, known),)
        sent = [
            None,
            attacks.sign_flip(malicious, 4.0),
            attacks.gaussian(malicious, 1.0),
            attacks.alie(malicious, 1.5),
            attacks.ipm(malicious, 0.5),
            attacks.mimic(malicious),
            attacks.optimised(malicious, aggregator, shown, "spread", EVALUATIONS),
            attacks.optimised(malicious, aggregator, shown, "mean", EVALUATIONS),
            None,
        ]
        algorithm = compose(
            honest,
            args.clients,
            sending=(_AnyAttack(attack, sent),),
            weighting=weighting.equal,
            preaggregation=(one_of(rule, before),),
            aggregator=aggregator,
        ).on(execution)

        def run(seed: Array, data: ClientData) -> Array:
            key = jax.random.key(seed)
            rounds = stream(key, Seed.ROUNDS)
            state = algorithm.init(rounds, model.init(stream(key, Seed.WEIGHTS)), data)
            state = jax.lax.fori_loop(
                0,
                args.rounds,
                lambda t, s: algorithm.step(jax.random.fold_in(rounds, t), s, data)[0],
                state,
            )
            logits, _ = model.apply(state.server, x, train=False)
            right = jnp.mean((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))
            return jnp.where(jnp.all(jnp.isfinite(logits)), right, jnp.nan)

        seeds = jnp.arange(args.seeds, dtype=jnp.uint32)
        return axes.map(run, in_axes=(0, axes.data))(seeds, data)

    return jax.jit(cell, in_shardings=execution.replicated, out_shardings=execution.replicated)


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
    add("--rules", nargs="+", choices=RULES, default=RULES, help="rows of the tables")
    add("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, help="their columns")
    add("--shares", nargs="+", type=float, default=(0.1, 0.25, 0.4), help="of attackers")
    add("--clients", type=int, default=20, help="all of them in every round")
    add("--rounds", type=int, default=15, help="of a cell")
    add("--samples", type=int, default=2000, help="the clients' training samples, at most")
    add("--seeds", type=int, default=2, help="runs of each cell")
    add("--partition", default="dirichlet(1, 10, balanced)", help="as for fedjax_sim.bench")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


def deal(dataset: Dataset, args: argparse.Namespace) -> ClientData:
    """Clients of every seed; the server owns ROOT samples that no client has."""
    order = np.random.default_rng(0).permutation(len(dataset.train_y))[: args.samples + ROOT]
    root, rest = np.sort(order[:ROOT]), np.sort(order[ROOT:])
    _, sample = partition.parse_sampler(args.partition)
    parts = []
    for seed in range(args.seeds):
        part = sample(dataset.train_y[rest], args.clients, seed=seed)
        parts.append(dataclasses.replace(part, index=rest[part.index].astype(np.int32)))
    return client_data(dataset.train_x, dataset.train_y, parts, root=root)


def measure(name: str, args: argparse.Namespace) -> Table:
    """All cells of one data set."""
    dataset = load_dataset(name, args.data_dir)
    assert dataset.mean is not None
    assert dataset.std is not None
    net = models.mlp(dataset.train_x.shape[1:], dataset.classes, (HIDDEN,))
    model = models.with_scaling(net, dataset.mean, dataset.std)
    honest = np.zeros(args.clients, bool)
    data = attacks.label_flip(deal(dataset, args), honest, dataset.classes)  # of nobody
    run, table = program(dataset, model, data, args), {}
    for rule, share, attack in itertools.product(args.rules, args.shares, args.attacks):
        malicious = honest if attack == "none" else attacks.byzantine(args.clients, share)
        hostile = malicious if attack == LABEL_FLIP else honest
        seen = dataclasses.replace(data, relabel=None)
        began = time.perf_counter()
        found = run(
            attacks.label_flip(seen, hostile, dataset.classes),
            np.int32(RULES.index(rule)),
            np.int32(ATTACKS.index(attack)),
            malicious,
            np.float32(share),
        )
        table[rule, attack, share] = np.asarray(found, np.float64)
        print(
            f"{name}, {rule}, {attack} by {share:.0%}: {100 * np.mean(found):.1f} "
            f"({time.perf_counter() - began:.1f} s)",
            file=sys.stderr,
        )
    return table


def cell_text(found: NDArray[np.float64]) -> str:
    """Percent, mean ± standard deviation over the seeds."""
    if np.isnan(found).any():
        return "diverged"
    return f"{100 * found.mean():.1f} ± {100 * found.std():.1f}"


def worst(table: Table, rule: str, share: float) -> NDArray[np.float64]:
    """The accuracies by seed under the attack that leaves the least; what diverged is none."""
    rows = [row for (r, a, s), row in table.items() if (r, s) == (rule, share) and a != "none"]
    return min(rows, key=lambda row: float(np.nan_to_num(row).mean()))


def markdown(table: Table, args: argparse.Namespace, share: float) -> str:
    """Rules by attacks, and the worst of them."""
    lines = [["", *args.attacks, "worst"], ["---"] * (len(args.attacks) + 2)]
    for rule in args.rules:
        cells = [table[rule, attack, share] for attack in args.attacks]
        lines.append([rule, *map(cell_text, [*cells, worst(table, rule, share)])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_table(tables: dict[str, Table], path: Path) -> None:
    """A line for each cell and seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dataset", "rule", "attack", "share", "seed", "accuracy"])
        for name, table in tables.items():
            for cell, row in table.items():
                writer.writerows([name, *cell, seed, f"{a:.4f}"] for seed, a in enumerate(row))


def draw(name: str, table: Table, args: argparse.Namespace, path: Path) -> None:
    """A panel for each attack and one for the worst: rules by shares; as PDF and PNG.

    Cividis looks the same to those who do not see red or green, and its lightness alone tells.
    """
    panels = [*args.attacks, "worst"]
    columns = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(7.2, 0.8 + 0.34 * len(args.rules)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, columns, sharey=True, squeeze=False)
    for axis, attack in itertools.zip_longest(axes.flat, panels):
        if attack is None:
            axis.set_visible(False)
            continue
        cells = [
            [worst(table, r, s) if attack == "worst" else table[r, attack, s] for s in args.shares]
            for r in args.rules
        ]
        values = 100 * np.array(cells).mean(axis=-1)
        picture = axis.imshow(
            np.nan_to_num(values), cmap="cividis", vmin=0, vmax=100, aspect="auto"
        )
        for (y, x), value in np.ndenumerate(values):
            text = "–" if np.isnan(value) else f"{value:.0f}"
            colour = "black" if np.nan_to_num(value) > 55 else "white"
            axis.text(x, y, text, ha="center", va="center", fontsize=6, color=colour)
        axis.set_title(attack, fontsize=7, fontweight="bold" if attack == "worst" else None)
        axis.set_xticks(range(len(args.shares)), [f"{100 * s:.0f}" for s in args.shares])
        axis.set_yticks(range(len(args.rules)), args.rules)
        axis.tick_params(length=0, labelsize=6)
        axis.spines[:].set_visible(False)
    figure.supxlabel(f"attackers, % of {args.clients} clients", fontsize=7)
    bar = figure.colorbar(picture, ax=axes, aspect=40, pad=0.01)
    bar.set_label(f"test accuracy on {name}, %", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    for suffix in (".pdf", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=200)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every cell, print the tables, write the numbers and the pictures."""
    args = parse(argv)
    use_cores()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    names = ["digits"] if args.small else ["digits", "mnist"]
    settings = {key: value for key, value in vars(args).items() if key not in ("data_dir", "out")}
    tables: dict[str, Table] = {}
    for name in names:
        table = tables[name] = measure(name, args)
        for share in args.shares:
            print(
                f"\n## {name}, {share:.0%} malicious\n\n{markdown(table, args, share)}", flush=True
            )
        draw(name, table, args, args.out / name)
        write_table(tables, args.out / "robust.csv")
        write_record(args.out / "robust.json", started, settings=settings)
    print(f"\nnumbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
