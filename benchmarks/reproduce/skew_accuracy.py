"""Does EMD predict accuracy, whichever sampler made the skew? Figure 3.4 of Cornelis' thesis.

    python -m fedjax_sim.study benchmarks/reproduce/thesis_3_4.toml --trust benchmarks --out FOLDER
    python -m benchmarks.reproduce.skew_accuracy FOLDER --data-dir DATA

Reads the finished cells of the study, measures the skew of each partition again, and prints the
table and the rank correlations; writes skew_accuracy.json and a picture. Cells that only the JSON
file has, from an earlier study, stay in it.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import fedjax_sim as fs
from benchmarks.reproduce.common import markdown, parser, picture, plain, spread
from benchmarks.script import write_record
from fedjax_sim.partition import parse_sampler

MEASURES = {"EMD": "EMD", "C-score": "C-score", "B2": "B²", "BCGV": "BCGV"}
SAMPLERS = {
    "emd": "limit-label", "ll_q": "limit-label-q", "robin_hood": "EMD-based",
    "dirichlet": "Dirichlet",
}  # fmt: skip
RESAMPLES = 2000

Record = dict[str, Any]


def cells_of(folder: Path, labels: Mapping[str, Any]) -> list[Record]:
    """The finished cells of a study: by seed, the accuracy after the last round and the skew.

    B² and BCGV are those at the server model after the first round: they depend on the model, and
    later models differ more.
    """
    found = []
    for path in sorted(folder.glob("cells/*/summary.json")):
        config, summary = (
            json.loads((path.parent / name).read_bytes()) for name in ("config.json", path.name)
        )
        text, seeds = config["partition"], config["seeds"]
        _, sample = parse_sampler(text)
        y = labels[config["dataset"]]
        dealt = [sample(y, config["clients"], seed) for seed in seeds]
        tables = [fs.partition.label_table(y, one, y.max() + 1) for one in dealt]
        lines = map(
            json.loads, (path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        )
        first = {line["seed"]: line for line in lines if line["round"] == 1}
        found.append({
            "partition": text,
            "settings": [one.name for one in dealt],
            "accuracy": [100 * a for a in summary["fedavg"]["score_last_per_run"]],
            "EMD": [fs.partition.emd(table) for table in tables],
            "C-score": [fs.partition.c_score(table) for table in tables],
            **{name: [first[seed][name] for seed in seeds] for name in ("B2", "BCGV")},
            "minutes": summary["fedavg"]["run_seconds"] / 60,
            "commit": summary["commit"],
        })  # fmt: skip
    return found


def correlations(cells: Sequence[Record]) -> list[Record]:
    """Spearman's ρ of accuracy and each measure over all runs, with a 95 % bootstrap interval."""
    accuracy = np.concatenate([c["accuracy"] for c in cells])

    def rho(a: Any, b: Any) -> float:
        return float(stats.spearmanr(a, b).statistic)

    rows = []
    for name in MEASURES:
        x = np.concatenate([c[name] for c in cells])
        low, high = stats.bootstrap(
            (x, accuracy), rho, paired=True, vectorized=False, n_resamples=RESAMPLES,
            method="percentile", rng=0,
        ).confidence_interval  # fmt: skip
        rows.append(
            {
                "measure": MEASURES[name],
                "ρ": rho(x, accuracy),
                "from": float(low),
                "to": float(high),
            }
        )
    return rows


def draw(cells: Sequence[Record], path: Path) -> None:
    """Accuracy against each measure, a mark for each run."""
    figure = picture(11, 3)
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    for axis, measure in zip(axes, MEASURES, strict=True):
        for i, (sampler, called) in enumerate(SAMPLERS.items()):
            mine = [c for c in cells if c["partition"].startswith(f"{sampler}(")]
            x, y = ([v for c in mine for v in c[name]] for name in (measure, "accuracy"))
            axis.plot(x, y, "os^D"[i], label=called, markersize=4, alpha=0.8)
        axis.set_xlabel(MEASURES[measure])
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(fontsize=7, frameon=False)
    plain(axes)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the cells, print what they say, write the record and the picture."""
    made = parser(__doc__, "skew_accuracy")
    made.add_argument("folder", type=Path, help="of the study")
    args, started = made.parse_args(argv), time.time()
    path = args.out / "skew_accuracy.json"
    labels = {"benchmarks.reproduce.common:mnist": fs.load_dataset("mnist", args.data_dir).train_y}
    new = cells_of(args.folder, labels)
    if not new:
        sys.exit(f"{args.folder} has no finished cell of benchmarks/reproduce/thesis_3_4.toml")
    before = json.loads(path.read_bytes())["cells"] if path.exists() else []
    cells = [*new, *(c for c in before if c["partition"] not in {n["partition"] for n in new})]
    cells.sort(key=lambda c: (round(float(np.mean(c["EMD"])), 1), c["partition"]))
    shown = ("accuracy", *MEASURES)
    rows = [
        {"partition": c["partition"], **{MEASURES.get(k, k): spread(c[k]) for k in shown}}
        for c in cells
    ]
    print(markdown(rows))
    found = correlations(cells) if len(cells) == 4 * 5 else []
    print(f"\n{markdown(found)}" if found else f"\n{len(cells)} of 20 cells: no correlation yet")
    write_record(path, started, cells=cells, correlations=found)
    draw(cells, args.out / "accuracy.png")


if __name__ == "__main__":
    main()
