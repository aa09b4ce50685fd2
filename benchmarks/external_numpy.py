"""FedAvg on MNIST in plain NumPy: rounds until 97 %, by initialisation and learning rate.

The MLP of Table 1 of McMahan et al. (2017), IID, 10 of 100 clients a round, B = 10, E = 1. It
shares only the data with the package, and takes about a minute:

    python -m benchmarks.external_numpy --init torch --lr 0.1 --seed 0
"""

import argparse
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import fedjax_sim as fs

Weights = list[NDArray[np.float32]]
CLIENTS, COHORT, SAMPLES, BATCH, MOST = 100, 10, 600, 10, 300
SIZES = (784, 200, 200, 10)
INITS: dict[str, Callable[[np.random.Generator, int, int], NDArray[np.float64]]] = {
    "torch": lambda rng, a, b: rng.uniform(-1, 1, (a, b)) / np.sqrt(a),
    "lecun": lambda rng, a, b: rng.normal(size=(a, b)) / np.sqrt(a),
    "glorot": lambda rng, a, b: rng.uniform(-1, 1, (a, b)) * np.sqrt(6 / (a + b)),
}


def forward(w: Weights, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Returns both hidden layers and the logits."""
    first = np.maximum(x @ w[0] + w[1], 0)
    second = np.maximum(first @ w[2] + w[3], 0)
    return first, second, second @ w[4] + w[5]


def step(w: Weights, x: NDArray[np.float32], one_hot: NDArray[np.float32], lr: float) -> None:
    """Takes a step of SGD, in place."""
    first, second, logits = forward(w, x)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    last = (p / p.sum(axis=1, keepdims=True) - one_hot) / len(x)
    middle = (last @ w[4].T) * (second > 0)
    lowest = (middle @ w[2].T) * (first > 0)
    slopes = [(x, lowest), (first, middle), (second, last)]
    for i, (below, slope) in enumerate(slopes):
        w[2 * i] -= np.float32(lr) * (below.T @ slope)
        w[2 * i + 1] -= np.float32(lr) * slope.sum(axis=0)


def main() -> None:
    """Runs one seed and prints the number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init", choices=INITS, default="torch")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mnist, rng = fs.load_dataset("mnist"), np.random.default_rng(args.seed)
    x, test = (
        (np.asarray(images).reshape(len(images), -1) / 255).astype(np.float32)
        for images in (mnist.train_x, mnist.test_x)
    )
    y, one_hot = np.asarray(mnist.train_y), np.eye(10, dtype=np.float32)
    server: Weights = []
    for a, b in itertools.pairwise(SIZES):
        server += [INITS[args.init](rng, a, b).astype(np.float32), np.zeros(b, np.float32)]
    owned, accuracy, rounds = rng.permutation(len(x)).reshape(CLIENTS, SAMPLES), 0.0, 0
    while accuracy < 0.97 and rounds < MOST:
        mean = [np.zeros_like(w) for w in server]
        for k in rng.choice(CLIENTS, COHORT, replace=False):
            w, order = [w.copy() for w in server], owned[k][rng.permutation(SAMPLES)]
            for batch in order.reshape(-1, BATCH):
                step(w, x[batch], one_hot[y[batch]], args.lr)
            mean = [m + v / np.float32(COHORT) for m, v in zip(mean, w, strict=True)]
        server, rounds = mean, rounds + 1
        accuracy = float((forward(server, test)[2].argmax(axis=1) == mnist.test_y).mean())
    print(
        f"{args.init}, lr {args.lr:g}, seed {args.seed}: {100 * accuracy:.2f} % in {rounds} rounds"
    )


if __name__ == "__main__":
    main()
