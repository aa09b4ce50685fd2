"""Programs of tests/test_users.py, each in a process as users have it: two CPU devices, no flags.

python users.py rounds          # prints how many different results 20 calls of 3 rounds have
python users.py network lstm    # runs a command twice; prints whether the records are equal
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax

import fedjax_sim as fs
from fedjax_sim.bench import main
from fedjax_sim.run.experiment import Experiment

IMAGES = (28, 28, 1)
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("cifar_cnn", "two_conv", "resnet20", "mobilenet_v2"), (32, 32, 3)),
    **dict.fromkeys(("lstm", "transformer"), (20,)),
}
"""One input of the networks that are not for MNIST."""


def samples(shape: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random inputs, tokens if they have one axis, and labels of ten classes."""
    rng, text = np.random.default_rng(0), len(shape) == 1
    x = rng.integers(0, 10 if text else 256, (count, *shape), np.int32 if text else np.uint8)
    return x, np.arange(count, dtype=np.int32) % 10


def rounds() -> None:
    """Trains a CNN with dropout for 3 rounds, in one call or one by one, ten times each."""
    fs.use_cores(2)
    x, y = samples(IMAGES, 12 * 128)
    model = fs.models.mnist_cnn(IMAGES, 10)
    data = fs.client_data((x / 255).astype(np.float32), y, fs.partition.iid(y, 12, seed=0))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05, momentum=0.9), batch_size=32)
    algorithm = fs.fedavg(local, clients_per_round=10)
    test = np.asarray(data.x[:50]), y[:50]
    trained = Experiment(algorithm, model, data, test, classes=10, eval_every=3).runner()
    found = set()
    for calls in [(3,), (1, 1, 1)] * 10:
        run = trained.start((0,))
        for count in calls:
            run, _, _ = trained.advance(run, count)
        found.add(b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(run.state.server)))
    print(len(found))


def network(name: str) -> None:
    """Runs one command twice, with a network of the package, and compares the records."""

    def random_samples(data_dir: str | None) -> fs.data.Dataset:
        del data_dir
        x, y = samples(SHAPES.get(name, IMAGES), 400)
        if name != "transformer":
            return fs.data.from_arrays("random", x, y, scale=x.ndim > 2)
        return fs.data.from_arrays("random", x, x, scale=False, task=fs.tasks.next_token(10))

    fs.data.DATASETS.register(random_samples)
    command = (
        f"--dataset random_samples --model {name} --partition iid --clients 8 --clients-per-round 4"
        " --rounds 2 --epochs 1 --batch-size 32 --lr 0.05 --seeds 1 --algo fedavg --compare none "
        "--devices 2 --out"
    ).split()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDJAX_SIM_CACHE_DIR"] = folder  # which the second run finds filled
        runs = [Path(folder, run) for run in "ab"]
        assert not any(main([*command, str(run)]) for run in runs)
        records = [(run / "metrics.jsonl").read_bytes() for run in runs]
    print("equal" if records[0] == records[1] else "different", len(records[0]))


if __name__ == "__main__":
    rounds() if sys.argv[1] == "rounds" else network(sys.argv[2])
