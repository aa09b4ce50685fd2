"""What a run of many evaluations holds, and how long it takes to save and to read it.

    python -m benchmarks.history --evaluations 100000

FedAvg on `fs.toy(4)`, two clients a round, two seeds, an evaluation after each round; one
checkpoint at the end, from which a second call of `simulate` continues. Prints a row in markdown.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import optax

import fedjax_sim as fs
from benchmarks.host import peak_memory
from benchmarks.reproduce.common import markdown
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import MB
from fedjax_sim.run import checkpoints
from fedjax_sim.run.checkpoint_files import newest_checkpoint
from fedjax_sim.run.records import Evaluations


def measured(evaluations: int, folder: Path) -> dict[str, Any]:
    """A row."""
    problem = fs.toy(4)
    local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    execution = fs.make_execution(devices=1)
    algorithm = fs.fedavg(local, clients_per_round=2)
    saving: list[float] = []
    write: Any = vars(checkpoints)["write_arrays"]

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        write(*args)
        saving.append(time.perf_counter() - began)

    vars(checkpoints)["write_arrays"] = timed
    held: list[int] = []

    def note(evaluation: fs.Evaluation) -> None:
        if not held:
            held.append(peak_memory())

    def run() -> fs.Result:
        return fs.simulate(
            algorithm, problem.model, problem.data, problem.test, rounds=evaluations,
            classes=problem.classes, seeds=(0, 1), execution=execution, on_evaluation=note,
            checkpoints=fs.Checkpoints(folder, seconds=1e9),
        )  # fmt: skip

    result = run()
    held.append(peak_memory())
    kept, one = Evaluations(), result.evaluations[0]
    began = time.process_time()
    for _ in range(evaluations):
        kept.append(one)
    appended = time.process_time() - began
    began = time.perf_counter()
    newest_checkpoint(folder)
    read = time.perf_counter() - began
    began = time.perf_counter()
    again = run()
    resumed = time.perf_counter() - began
    assert len(again.evaluations) == len(result.evaluations) == evaluations
    (file,) = folder.glob("*.npz")
    size = tree.num_bytes((kept.stacked(), result.metrics))
    return {
        "evaluations": f"{evaluations:,}",
        "append s (CPU)": f"{appended:.1f}",
        "MB of arrays": f"{size / MB:,.1f}",
        "process MB more": f"{(held[1] - held[0]) / MB:,.0f}",
        "MB on disk": f"{file.stat().st_size / MB:,.1f}",
        "write s": f"{saving[0]:.2f}",
        "read s": f"{read:.2f}",
        "go on s": f"{resumed:.1f}",
    }


def main() -> None:
    """Measures one length."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--evaluations", type=int, default=100_000, metavar="E")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(markdown([measured(args.evaluations, Path(folder))]))
    print(f"JAX {jax.__version__}")


if __name__ == "__main__":
    main()
