"""How soon a run starts whose clients are in host memory, and what that takes.

    python -m benchmarks.host --clients 10000000 --method scaffold

Logistic regression 10-3 on one or two samples a client, `samples_mb` and `client_state_mb` 1, ten
clients a round, 20 rounds to the first evaluation of 200. `start` is the time from the call of
`simulate`, with the data in memory, to the first evaluation, less what was compiled. Memory is that
of the process beyond its data. Prints a row in markdown and writes a JSON file.
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedjax_sim as fs
from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.data.clients import in_host_memory
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import MB
from fedjax_sim.run import windows

HERE = Path(__file__).resolve().parent
FEATURES, CLASSES, EVERY, ROUNDS = 10, 3, 20, 200


def federation(clients: int) -> fs.ClientData:
    """Clients of one and two samples in turn."""
    rng = np.random.default_rng(0)
    start = np.zeros(clients + 1, np.int32)
    np.cumsum(1 + np.arange(clients) % 2, out=start[1:])
    total = int(start[-1])
    return fs.ClientData(
        x=in_host_memory(rng.standard_normal((total, FEATURES), np.float32)),
        y=in_host_memory(rng.integers(0, CLASSES, total, dtype=np.int32)),
        index=in_host_memory(np.arange(total, dtype=np.int32)),
        start=in_host_memory(start),
        capacity=2,
    )


def measured(method: str, clients: int) -> dict[str, Any]:
    """A row: the first call of `simulate`, which compiles, in a process that did nothing else."""
    data = federation(clients)
    model = fs.models.logistic((FEATURES,), CLASSES)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=2)
    execution = fs.make_execution(1, samples_mb=1, client_state_mb=1)
    algorithm = ALGORITHMS[method](local, clients_per_round=10).on(execution)
    sent: list[int] = []
    placed: Any = vars(windows)["placed"]

    def counted(moving: Any, execution: Any) -> Any:
        sent.append(tree.num_bytes(moving))
        return placed(moving, execution)

    vars(windows)["placed"] = counted
    first: list[float] = []
    before, began = peak_memory(), time.perf_counter()
    result = fs.simulate(
        algorithm, model, data, (data.x[:1000], data.y[:1000]), rounds=ROUNDS, classes=CLASSES,
        eval_every=EVERY, on_evaluation=lambda _: first.append(time.perf_counter() - began),
    )  # fmt: skip
    kept = jax.tree.leaves(None if result.state is None else result.state.client_state)
    return {
        "": method,
        "clients": f"{clients:,}",
        "compiling s": f"{result.compile_seconds:.2f}",
        "start s": f"{first[0] - result.compile_seconds:.2f}",
        "KB a window": f"{max(sent) / 1e3:,.1f}",
        "data MB": f"{tree.num_bytes(data) / MB:,.0f}",
        "host MB more": f"{(peak_memory() - before) / MB:,.0f}",
        "device MB": f"{result.device_bytes / MB:,.1f}",
        "rows of clients' states": f"{kept[0].rows.shape[1]:,}" if kept else "0",
    }


def peak_memory() -> int:
    """Bytes of this process at most so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measures one setting."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clients", type=int, default=10_000_000, metavar="N")
    parser.add_argument("--method", default="scaffold", metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host.json")
    args = parser.parse_args()
    started = time.time()
    row = measured(args.method, args.clients)
    print(markdown([row]))
    write_record(args.out, started, table=[row])


if __name__ == "__main__":
    main()
