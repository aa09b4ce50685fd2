"""Hashes of what every named method computes, to see that a change of form changed no number.

    python -m benchmarks.fingerprints before.json        # on the one tree
    python -m benchmarks.fingerprints after.json --against before.json

Runs five rounds of two seeds with a cohort of 6 of 11 unequal clients, on 1 and on 4 devices (where
two of eight rows are padding), and hashes each field of the state and the metrics, bit for bit.
XLA's optimisations are off, which halves the time to compile: 5 to 10 s of a core for each method
and number of devices. Hashes differ between machines and versions of XLA: compare runs of one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_sim as fs
from fedjax_sim.base import ClientData, FedState
from fedjax_sim.cli.making import make, stand_in

SIZES = (5, 17, 33, 9, 24, 16, 40, 12, 1, 28, 7)
COHORT, ROUNDS, SEEDS = 6, 5, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "phase_shift": {"phases": 3},
    "radfed": {"redistribution_rounds": 2, "active_clients": 4},
    "radfedi": {"redistribution_rounds": 2},
    "radfedp": {"redistribution_rounds": 2},
    "radfedm": {"redistribution_rounds": 2},
    "radfeda": {"redistribution_rounds": 2},
    "fedprox": {"mu": 0.1},
    "scaffnew": {"clients_per_round": len(SIZES)},
    "stc": {"sparsity": 0.1},
    "fedavg_top_k": {"sparsity": 0.1},
    "fedavg_qsgd": {"levels": 127},
    "ifca": {"clusters": 3},
    "dynamic_clustering": {"cluster_limit": 80.0},
    "fedmix": {"mix_samples": 6},
    "astraea": {"mediator_size": 2},
    "fedbn": {"norms": "*bias"},
}


def digest(tree: Any) -> str:
    """A hash of all arrays, with their dtypes and shapes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        a = np.ascontiguousarray(leaf)
        found.update(f"{a.dtype}{a.shape}".encode() + a.tobytes())
    return found.hexdigest()[:16]


def federation() -> tuple[fs.Model, ClientData]:
    """Few digits at unequal clients, and samples of the server's own."""
    digits = fs.load_dataset("digits")
    total = sum(SIZES)
    partition = fs.partition.Partition(
        np.arange(total, dtype=np.int32), np.cumsum([0, *SIZES]).astype(np.int32)
    )
    x = digits.train_x.astype(np.float32) / 16
    data = fs.client_data(x, digits.train_y, partition, root=np.arange(total, total + 20))
    return fs.models.mlp((8, 8, 1), 10, widths=(8,)), jax.tree.map(jax.numpy.asarray, data)


def fingerprint(name: str, devices: int, model: fs.Model, data: ClientData) -> dict[str, str]:
    """The hashes of one method's state, by field, and of its metrics."""
    common = stand_in(
        model, lr=0.05, momentum=0.5, clients_per_round=COHORT,
        execution=fs.make_execution(devices=devices),
    )  # fmt: skip
    algorithm = make(name, common, **OPTIONS.get(name, {}))

    def begin(seed: jax.Array) -> FedState:
        key = jax.random.key(seed)
        return algorithm.init(jax.random.fold_in(key, 1), model.init(key), data)

    def step(seed: jax.Array, t: int, state: FedState) -> Any:
        return algorithm.step(jax.random.fold_in(jax.random.key(seed + 7), t), state, data)

    seeds = np.arange(SEEDS, dtype=np.uint32)
    state = jax.jit(jax.vmap(begin))(seeds)
    advance = jax.jit(jax.vmap(step, in_axes=(0, None, 0)))
    metrics = []
    for t in range(ROUNDS):
        state, row = advance(seeds, t, state)
        metrics.append(jax.device_get(row))
    return {name: digest(field) for name, field in state._asdict().items()} | {
        "metrics": digest(metrics)
    }


def main() -> int:
    """Writes the hashes; returns 1 if they differ from those to compare with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(fs.ALGORITHMS), metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 4], choices=range(1, 5))
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    before = json.loads(given.against.read_text(encoding="utf-8")) if given.against else {}
    model, data = federation()
    found, differing = {}, 0
    for name in given.methods:
        for devices in given.devices:
            run = f"{name} on {devices}"
            found[run] = fingerprint(name, devices, model, data)
            old = before.get(run, found[run])
            changed = [field for field, value in found[run].items() if value != old.get(field)]
            differing += bool(changed)
            print(run, f"differs: {', '.join(changed)}" if changed else "ok", flush=True)
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
