"""A grid as runs of one program, compared with as many separate runs.

    python -m benchmarks.sweep

FedProx on digits: 4 rates x 3 μ x 5 seeds, each seed with a partition of its own. Both ways in one
process, one after the other, compilations included and without a cache of programs. Prints a table
in markdown and writes a JSON file.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax

import fedjax_sim as fs
from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record
from fedjax_sim.engine.cores import use_cores

HERE = Path(__file__).resolve().parent
GRID = {"mu": [0.01, 0.1, 1.0], "lr": [0.003, 0.01, 0.03, 0.1]}


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="(default: 30)")
    parser.add_argument("--seeds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sweep.json")
    args = parser.parse_args()
    started = time.time()
    use_cores()
    digits = fs.load_dataset("digits")
    model = fs.models.mlp((8, 8, 1), 10)
    assert digits.mean is not None
    assert digits.std is not None
    model = fs.models.with_scaling(model, digits.mean, digits.std)
    objective = fs.empirical_risk(model)
    x, y, test = digits.train_x, digits.train_y, (digits.test_x, digits.test_y)
    seeds = range(args.seeds)
    parts = [fs.partition.dirichlet(y, 40, alpha=0.5, seed=seed) for seed in seeds]

    def fedprox(mu: float, lr: float) -> fs.Algorithm:
        local = fs.local_sgd(objective, optax.sgd(lr, momentum=0.9), epochs=2)
        return fs.algorithms.fedprox(local, clients_per_round=10, mu=mu)

    settings: dict[str, Any] = {"rounds": args.rounds, "classes": 10}
    began = time.perf_counter()
    swept = fs.sweep(
        fedprox,
        GRID,
        model,
        fs.client_data(x, y, parts),
        test,
        seeds=[*seeds],
        on_plan=print,
        **settings,
    )
    together = time.perf_counter() - began
    one_by_one, compiling, programs, difference = 0.0, 0.0, 0, 0.0
    for point in swept.points:
        algorithm = fedprox(**point.settings)  # of all its seeds: compiled once
        for i, seed in enumerate(seeds):
            began = time.perf_counter()
            data = fs.client_data(x, y, parts[i])
            alone = fs.simulate(algorithm, model, data, test, seeds=[seed], **settings)
            one_by_one += time.perf_counter() - began
            compiling += alone.compile_seconds
            programs += alone.xla_programs
            away = np.abs(point.result.score[:, i] - alone.score[:, 0])
            difference = max(difference, float(away.max()))
    first, count = swept.points[0].result, len(swept.points) * len(seeds)
    rows = [
        {
            "": "one program",
            "seconds": f"{together:.1f}",
            "of them compiling": f"{first.compile_seconds:.1f}",
            "XLA programs": first.xla_programs,
        },
        {
            "": f"{count} runs of their own",
            "seconds": f"{one_by_one:.1f}",
            "of them compiling": f"{compiling:.1f}",
            "XLA programs": programs,
        },
    ]
    print(f"\n{markdown(rows)}\n\nratio {together / one_by_one:.3f}; ")
    print(f"largest difference of a test accuracy after any round: {difference:.4f}")
    sizes = {"rounds": args.rounds, "seeds": args.seeds}
    write_record(args.out, started, grid=GRID, **sizes, table=rows, difference=difference)


if __name__ == "__main__":
    main()
