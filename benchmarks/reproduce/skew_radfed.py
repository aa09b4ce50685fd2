"""Table I of RADFed (Xue, Klabjan, Luo): sizes and C-scores of its federations."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from fedjax_sim.data import DataNotFoundError, Dataset, load_dataset, pooled, shakespeare
from fedjax_sim.partition import c_score, label_table, natural, parse_sampler, size_statistics

Table = NDArray[np.int64]

STATISTICS = ("min", "max", "mean", "std", "C-score")
# The second version's; the first has the same with more digits.
PAPER = {
    "Cifar10": (2, 2_850, 600, 605, 1.29),
    "MNIST-1": (3, 3_365, 700, 667, 0.70),
    "MNIST-0.1": (11, 3_327, 700, 658, 1.29),
    "COVCLS": (110, 33_300, 4_920, 5_110, 0.79),
    "COVFEAT": (372, 17_328, 4_920, 3_237, 0.68),
    "Shakespeare": (3, 41_305, 3_616, 6_808, 0.27),
    "eICU": (108, 5_683, 901, 925, 0.06),
}
DEALT = (
    ("Cifar10", "cifar10", "matched(1, 0.1)"),
    ("MNIST-1", "mnist", "matched(1, 1)"),
    ("MNIST-0.1", "mnist", "matched(1, 0.1)"),
    ("COVCLS", "covertype", "matched(1, 0.1)"),
    ("COVFEAT", "covertype", "matched(1, 0.1, 0.1)"),
)
CLIENTS = 100
PAPER_CLIENTS = dict.fromkeys(PAPER, CLIENTS) | {"Shakespeare": 143, "eICU": 164}
COVERTYPE_CLASSES = (211_840, 283_301)  # spruce/fir and lodgepole pine in the whole table (UCI)
ROLES = 143


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: key of `PAPER`.
        data: what was dealt here, and how.
        tables: samples per client and class, int64 [N, M], one for each seed.
    """

    name: str
    data: str
    tables: list[Table]

    @property
    def values(self) -> NDArray[np.float64]:
        """`STATISTICS` of every seed, float64 [seeds, 5]."""
        return np.array([[*size_statistics(t.sum(axis=1))[:4], c_score(t)] for t in self.tables])


def table_1(data_dir: str | None, seeds: int) -> list[Row]:
    """All lines of Table I for which there is data."""
    rows = []
    for name, source, sampler in DEALT:
        dataset = find(data_dir, source)
        if dataset is not None:
            tables = deal(dataset.train_y, sampler, CLIENTS, seeds, dataset.features)
            rows.append(Row(name, f"{dataset.name}, {sampler}", tables))
    # Without features the sampler looks at the class counts alone, and those are known.
    labels = np.repeat([0, 1], COVERTYPE_CLASSES)
    tables = deal(labels, "matched(1, 0.1)", CLIENTS, seeds)
    rows.append(Row("COVCLS", "the whole table's class counts, matched(1, 0.1)", tables))
    rows += roles(data_dir, seeds)
    hospitals = find(data_dir, "eicu", "eicu_demo")
    if hospitals is not None:
        assert hospitals.train_client is not None
        y, partition = hospitals.train_y, natural(hospitals.train_client)
        rows.append(Row("eICU", f"{hospitals.name}, natural", [label_table(y, partition, 2)]))
        shuffled = [np.random.default_rng(seed).permutation(y) for seed in range(seeds)]
        tables = [label_table(labels, partition, 2) for labels in shuffled]
        rows.append(Row("eICU", f"{hospitals.name}, natural, labels shuffled", tables))
    order = list(PAPER)
    return sorted(rows, key=lambda row: order.index(row.name))


def find(data_dir: str | None, *names: str) -> Dataset | None:
    """The first of these data sets that is there, training and test samples pooled."""
    for name in names:
        try:
            return pooled(load_dataset(name, data_dir))
        except DataNotFoundError as error:
            reason = error
    print(f"left out: {reason}", file=sys.stderr)
    return None


def deal(
    labels: NDArray[Any],
    sampler: str,
    clients: int,
    seeds: int,
    features: Mapping[str, ArrayLike] | None = None,
) -> list[Table]:
    """Samples per client and class, int64 [N, M], for each seed."""
    _, sample = parse_sampler(sampler)
    # disable=None: no bar where stderr is a file.
    bar = tqdm(range(seeds), f"{sampler} to {clients}", leave=False, unit="seed", disable=None)
    partitions = [sample(labels, clients, seed, features=features) for seed in bar]
    return [label_table(labels, p, int(labels.max()) + 1) for p in partitions]


def roles(data_dir: str | None, seeds: int) -> list[Row]:
    """Shakespeare's speaking roles: as many as in the paper, drawn for each seed; and all."""
    try:
        plays = shakespeare(data_dir, roles=None)
    except DataNotFoundError as error:
        print(f"left out: {error}", file=sys.stderr)
        return []
    groups = np.concatenate([plays.train_client, plays.test_client])
    labels = np.concatenate([plays.train_y, plays.test_y])
    table = label_table(labels, natural(groups), plays.classes)
    drawn = [
        table[np.random.default_rng(seed).choice(len(table), ROLES, replace=False)]
        for seed in range(seeds)
    ]
    return [
        Row("Shakespeare", f"37 plays, {ROLES} random roles", drawn),
        Row("Shakespeare", f"37 plays, all {len(table):,} roles", [table]),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The paper's numbers and ours in turn; ours are mean ± standard deviation over the seeds."""
    lines = [
        "| | data | clients | " + " | ".join(STATISTICS) + " | std/mean |",
        "| --- " * (4 + len(STATISTICS)) + "|",
    ]
    for i, row in enumerate(rows):
        if i == 0 or row.name != rows[i - 1].name:
            *sizes, score = PAPER[row.name]
            cells = [*(f"{size:,}" for size in sizes), f"{score:.2f}", f"{sizes[3] / sizes[2]:.2f}"]
            lines.append(
                f"| **{row.name}** | RADFed | {PAPER_CLIENTS[row.name]} | {' | '.join(cells)} |"
            )
        values = np.column_stack([row.values, row.values[:, 3] / row.values[:, 2]])
        cells = [spread(column, ".2f" if k > 3 else ",.0f") for k, column in enumerate(values.T)]
        lines.append(f"| | {row.data} | {len(row.tables[0]):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: NDArray[np.float64], form: str) -> str:
    """Mean ± standard deviation; the value alone where there is one, or where all agree."""
    mean = format(values.mean(), form)
    return mean if np.ptp(values) == 0 else f"{mean} ± {format(values.std(), form)}"
