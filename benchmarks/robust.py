"""Heat maps of robust rules under attack: accuracy by rule, attack and share of the attackers.

    python -m benchmarks.robust --data-dir DATA
    python -m benchmarks.robust --small
    python -m benchmarks.robust --small --backdoor

Every rule meets every attack by every share of malicious clients, on scikit-learn's digits and on
MNIST (`--small`: digits alone). The rules know the share. All cells of a data set and all seeds
are one XLA program, which takes the rule, the attack and the clients that are malicious as data.
Prints tables in markdown; writes robust.csv, robust.json and, as PDF and PNG, a heat map of each
data set. `--backdoor` compares the success of a backdoor with the accuracy, and writes
backdoor.csv, backdoor.json and a heat map. The page is `benchmarks/results/robust.md`.
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
from fedjax_sim.data.clients import EvalSet
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
LABEL_FLIP = "label flip"  # an attack on the data, not on messages
TARGET, POISONED, TRIGGER = 0, 0.5, 2  # the backdoor: class, share of samples, pixels


class Defence(NamedTuple):
    """A row of the tables.

    Attributes:
        aggregator: function of the share of malicious rows, ``f32[]``, to an aggregator.
        before: function of that share to the rule applied before it; None: nothing.
        secret: whether attackers that know the rule do not know what is applied before it.
    """

    aggregator: Callable[[Array], Aggregator]
    before: Callable[[Array], PreAggregation] | None = None
    secret: bool = False


def spoilt(share: Array) -> Array:
    """The share of buckets of two that are malicious; a rule withstands less than half of them."""
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
BACKDOORS = ("backdoor", "replacement")

Table = dict[tuple[str, str, float], NDArray[np.float64]]
"""Scores by seed, by rule, attack and share; NaN where a seed diverged."""


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


def program(
    dataset: Dataset, model: Model, data: ClientData, scored: EvalSet, args: argparse.Namespace
) -> Any:
    """``(data, rule, attack, malicious bool[N], share) -> f32[seeds, 2]``, a cell's scores.

    They are the accuracy and the success of a backdoor.
    """
    honest = local_sgd(empirical_risk(model), optax.sgd(LR), batch_size=BATCH)
    known = defences(honest, CLIP[dataset.name])
    rules = [known[name] for name in args.rules]
    execution = make_execution()
    axes = RunAxes.of(data, (), args.seeds)
    x, y = jnp.asarray(scored.x), jnp.asarray(scored.y)
    clean = y < dataset.classes

    def cell(data: ClientData, rule: Array, attack: Array, malicious: Any, share: Array) -> Array:
        def aggregator(stacked: PyTree, weights: Array, /) -> PyTree:
            return jax.lax.switch(rule, [r.aggregator(share) for r in rules], stacked, weights)

        before = [None if r.before is None else r.before(share) for r in rules]
        revealed = [None if r.secret else part for r, part in zip(rules, before, strict=True)]
        shown = (one_of(rule, revealed),)
        sent: dict[str, Sending] = {
            "sign flip": attacks.sign_flip(malicious, 4.0),
            "Gaussian": attacks.gaussian(malicious, 1.0),
            "ALIE": attacks.alie(malicious, 1.5),
            "IPM": attacks.ipm(malicious, 0.5),
            "Mimic": attacks.mimic(malicious),
            "optimised ALIE": attacks.optimised(
                malicious, aggregator, shown, "spread", EVALUATIONS
            ),
            "optimised IPM": attacks.optimised(malicious, aggregator, shown, "mean", EVALUATIONS),
            "replacement": attacks.scaling(malicious, 1 / share),
        }
        algorithm = compose(
            honest,
            args.clients,
            sending=(_AnyAttack(attack, [*map(sent.get, args.attacks)]),),
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
            right = (jnp.argmax(logits, axis=-1) == y % dataset.classes).astype(jnp.float32)
            found = jnp.stack([jnp.mean(right, where=clean), jnp.mean(right, where=~clean)])
            return jnp.where(jnp.all(jnp.isfinite(logits)), found, jnp.nan)

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
    add("--backdoor", action="store_true", help="the attacks none, backdoor and replacement")
    add("--rules", nargs="+", choices=RULES, default=RULES, help="rows of the tables")
    add("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, help="their columns")
    add("--shares", nargs="+", type=float, default=(0.1, 0.25, 0.4), help="of attackers")
    add("--clients", type=int, default=20, help="all of them in every round")
    add("--rounds", type=int, default=15, help="of a cell")
    add("--samples", type=int, default=2000, help="the clients' training samples, at most")
    add("--seeds", type=int, default=2, help="runs of each cell")
    add("--partition", default="dirichlet(1, 10, balanced)", help="as for fedjax_sim.bench")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if args.backdoor:
        args.attacks = ("none", *BACKDOORS)
    return args


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


def owners(data: ClientData, malicious: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each entry of ``index`` is a malicious client's; the server's are not."""
    sizes = np.diff(data.start, axis=1)
    known = np.repeat(np.tile(malicious, len(sizes)), sizes.ravel())
    return np.pad(known, (0, len(data.index) - len(known)))


def measure(name: str, args: argparse.Namespace) -> tuple[Table, Table]:
    """The accuracies of all cells of one data set, and the successes of the backdoor."""
    dataset = load_dataset(name, args.data_dir)
    assert dataset.mean is not None
    assert dataset.std is not None
    net = models.mlp(dataset.train_x.shape[1:], dataset.classes, (HIDDEN,))
    model = models.with_scaling(net, dataset.mean, dataset.std)
    honest, dealt = np.zeros(args.clients, bool), deal(dataset, args)
    # One program for all cells: the samples with the trigger are always there.
    data, scored = attacks.backdoor(
        dealt, (dataset.test_x, dataset.test_y), ~honest, dataset.classes, TARGET, POISONED, TRIGGER
    )
    relabelled = attacks.label_flip(data, honest, dataset.classes)  # of nobody
    run = program(dataset, model, relabelled, scored, args)
    accuracies: Table = {}
    successes: Table = {}
    for rule, share, attack in itertools.product(args.rules, args.shares, args.attacks):
        malicious = honest if attack == "none" else attacks.byzantine(args.clients, share)
        hostile = malicious if attack == LABEL_FLIP else honest
        opened = owners(dealt, malicious if attack in BACKDOORS else honest)
        index = np.where(opened, data.index, dealt.index)
        seen = dataclasses.replace(data, index=jnp.asarray(index))
        began = time.perf_counter()
        found = run(
            attacks.label_flip(seen, hostile, dataset.classes),
            np.int32(args.rules.index(rule)),
            np.int32(args.attacks.index(attack)),
            malicious,
            np.float32(share),
        )
        both = np.asarray(found, np.float64)
        accuracies[rule, attack, share], successes[rule, attack, share] = both.T
        print(
            f"{name}, {rule}, {attack} by {share:.0%}: {100 * both[:, 0].mean():.1f} "
            f"({time.perf_counter() - began:.1f} s)",
            file=sys.stderr,
        )
    return accuracies, successes


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


def backdoors(accuracies: Table, successes: Table, args: argparse.Namespace) -> str:
    """Rules by attacks and shares: the success, and in brackets the mean accuracy."""
    cells = [("none", args.shares[0]), *itertools.product(BACKDOORS, args.shares)]
    head = [f"{attack}, {share:.0%}" if attack != "none" else attack for attack, share in cells]
    lines = [["", *head], ["---"] * (len(cells) + 1)]
    for rule in args.rules:
        row = [rule]
        for cell in cells:
            mean = 100 * accuracies[rule, *cell].mean()
            row.append(f"{cell_text(successes[rule, *cell])} ({mean:.0f})")
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_table(tables: dict[str, Table], path: Path, score: str = "accuracy") -> None:
    """A line for each cell and seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dataset", "rule", "attack", "share", "seed", score])
        for name, table in tables.items():
            for cell, row in table.items():
                writer.writerows([name, *cell, seed, f"{a:.4f}"] for seed, a in enumerate(row))


def draw(
    name: str, table: Table, args: argparse.Namespace, path: Path, score: str = "test accuracy"
) -> None:
    """A panel for each attack and one for the worst accuracy: rules by shares; as PDF and PNG.

    Cividis is legible with red-green colour blindness, and by its lightness alone.
    """
    panels = [*args.attacks] if args.backdoor else [*args.attacks, "worst"]
    rows = 1 if args.backdoor else 2
    columns = math.ceil(len(panels) / rows)
    figure = Figure(figsize=(7.2, 0.8 + 0.17 * rows * len(args.rules)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
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
    bar.set_label(f"{score} on {name}, %", fontsize=7)
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
        accuracies, successes = measure(name, args)
        table = tables[name] = successes if args.backdoor else accuracies
        if args.backdoor:
            print(f"\n## {name}\n\n{backdoors(accuracies, successes, args)}", flush=True)
            draw(name, table, args, args.out / f"{name}_backdoor", "attack success")
            write_table(tables, args.out / "backdoor.csv", "attack_success")
            write_record(args.out / "backdoor.json", started, settings=settings)
            continue
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
