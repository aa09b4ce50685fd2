"""Clients with a part of the model: what they save, and what it costs.

    python -m benchmarks.widths digits
    python -m benchmarks.widths digits --units 16
    python -m benchmarks.widths shakespeare --data-dir DATA

Digits: weak clients have a narrower network (HeteroFL, FedRolex), compared with FedAvg with the
whole network, with the narrowest one, and without the clients that cannot hold the whole one.
Shakespeare: adapters of a pretrained transformer, each role a client, in five variants and with
ranks by client. Prints a table in markdown; writes a record with every seed's numbers, and a
picture. The page is `benchmarks/results/widths.md`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from scipy import stats

import fedjax_sim as fs
from benchmarks.script import write_record
from fedjax_sim.base import Array, Now
from fedjax_sim.cli.curves import draw_curves
from fedjax_sim.run.evaluation import total_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "widths"
SHARES = (1.0, 0.5, 0.25)  # client k has SHARES[k % 3] of the units, or of the rank
SLOWER = (1.0, 3.0, 9.0)  # and is so many times slower than the fastest
STEP = 0.1  # seconds of the fastest client's step with the whole network
LINK = fs.clock.bandwidth(1e5, 4e5)  # bytes per second up and down, for every client
CLIENTS, EMD = 20, 1.4
ROLES, LARGER = 8, 20  # clients are the largest roles but for so many, which pretrain
WIDTH, LAYERS, HEADS, RANK = 32, 2, 4, 8

Results = dict[str, fs.Result]


def clock(step: float, *, slower: Sequence[float] = SLOWER) -> fs.base.Clock:
    """Returns devices on which a step of client k takes ``step * slower[k % len(slower)]``."""

    def compute(key: Array, client: Array, now: Now) -> Array:
        return step * jnp.array(slower, jnp.float32)[client % len(slower)]

    return fs.clock.simulated(compute, LINK)


def of_digits(args: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    """Returns the results by arm, and the accuracy of the narrowest part of each server model."""
    digits = fs.load_dataset("digits")
    assert digits.mean is not None
    assert digits.std is not None
    mean, std = digits.mean, digits.std

    def network(units: int) -> fs.Model:
        return fs.models.with_scaling(fs.models.mlp((8, 8, 1), 10, (units, units)), mean, std)

    def local_of(model: fs.Model) -> fs.LocalUpdate:
        return fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05, momentum=0.9), epochs=2)

    sample = fs.partition.limit_label_emd
    parts = [sample(digits.train_y, CLIENTS, emd=EMD, seed=seed) for seed in range(args.seeds)]
    strong = [fs.partition.partition_from_lists(p.lists[:: len(SHARES)]) for p in parts]
    whole, narrow = network(args.units), network(math.ceil(SHARES[-1] * args.units))
    slots, timed, methods = CLIENTS, clock(STEP), fs.algorithms
    sizes = [fs.tree.num_bytes(jax.eval_shape(m.init, jax.random.key(0))) for m in (narrow, whole)]
    local = local_of(whole)
    fedavg = methods.fedavg(local, clients_per_round=slots)
    heterofl = methods.heterofl(local, clients_per_round=slots, model=whole, equal_weights=False)
    fedrolex = methods.fedrolex(local, clients_per_round=slots, model=whole)
    small = methods.fedavg(local_of(narrow), clients_per_round=slots)
    alone = methods.fedavg(local, clients_per_round=len(strong[0].sizes))
    arms = {
        "FedAvg": (fedavg.replace(clock=timed), whole, parts),
        "HeteroFL": (heterofl.replace(clock=timed), whole, parts),
        "FedRolex": (fedrolex.replace(clock=timed), whole, parts),
        "FedAvg, quarter of the width": (
            small.replace(clock=clock(STEP * sizes[0] / sizes[1])),
            narrow,
            parts,
        ),
        "FedAvg, strong clients only": (
            alone.replace(clock=clock(STEP, slower=SLOWER[:1])),
            whole,
            strong,
        ),
    }
    found, narrowest = {}, {}
    has, least = fs.exchange.widths(whole, SHARES), len(SHARES) - 1
    for name, (algorithm, model, clients) in arms.items():
        found[name] = fs.simulate(
            algorithm,
            model,
            fs.client_data(digits.train_x, digits.train_y, clients),
            (digits.test_x, digits.test_y),
            rounds=args.rounds or 60,
            eval_every=args.eval_every or 4,
            classes=10,
            seeds=range(args.seeds),
            execution=fs.make_execution(1),
        )
        if model is whole:
            masks = has(jax.tree.map(lambda w: w[0], found[name].variables), *jnp.int32([least, 0]))
            cut = fs.tree.masked(masks, found[name].variables)
            logits, _ = jax.vmap(lambda w, m=model: m.apply(w, digits.test_x, train=False))(cut)
            right = np.argmax(logits, axis=-1) == digits.test_y
            narrowest[name] = np.asarray(right).mean(axis=1)
    return found, {"accuracy of the quarter of the server model": narrowest}


def of_shakespeare(args: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    """Returns the results by arm, and what the pretrained model scores on each role."""
    plays = fs.data.shakespeare_tokens(args.data_dir)
    owner, task = plays.train_client, plays.task
    assert owner is not None
    assert plays.test_client is not None
    assert plays.client_names is not None
    roles = np.argsort(-np.bincount(owner), kind="stable")[LARGER : LARGER + ROLES]
    others = fs.partition.partition_from_lists([np.flatnonzero(~np.isin(owner, roles))])
    clients = fs.data.take_clients(fs.partition.natural(owner), roles)
    data = fs.client_data(plays.train_x, plays.train_y, clients)
    test = fs.data.eval_set(plays.test_x, plays.test_y, fs.data.own_test(plays, clients))
    model = fs.models.transformer(
        plays.train_x.shape[1:], task.outputs, width=WIDTH, layers=LAYERS, heads=HEADS
    )

    def local_of(trained: fs.Model, lr: float, epochs: int, *leaves: str) -> fs.LocalUpdate:
        return fs.local_sgd(
            fs.empirical_risk(trained, task.loss),
            optax.adam(lr),
            epochs=epochs,
            trained=fs.leaves.named(*leaves) if leaves else None,
        )

    before = fs.simulate(
        fs.fedavg(local_of(model, 3e-3, 1), clients_per_round=1),
        model,
        fs.client_data(plays.train_x, plays.train_y, others),
        test,
        rounds=args.pretraining,
        eval_every=args.pretraining,
        task=task,
        execution=fs.make_execution(1),
    )
    start = jax.tree.map(lambda w: w[0], before.variables)
    known = fs.models.starting_from(model, start)
    wide, small = (fs.models.lora(known, rank=r) for r in (RANK, int(SHARES[-1] * RANK)))
    named, split, exact = fs.leaves.named, fs.exchange.split, fs.server.exact_lora
    frozen = split(frozen=named("trunk"))
    two = ("A", "B")
    arms: dict[str, tuple[fs.Model, tuple[str, ...], dict[str, Any]]] = {
        "FedIT": (wide, two, {"exchange": frozen}),
        "FFA": (wide, ("B",), {"exchange": split(frozen=named("trunk", "A"))}),
        "FedSA": (
            wide,
            two,
            {
                "exchange": split(own=named("B"), frozen=named("trunk")),
                "personal": fs.personal.as_received(),
            },
        ),
        "FedEx": (wide, two, {"exchange": frozen, "server": exact()}),
        "FLoRA": (wide, two, {"exchange": frozen, "server": exact(restart=True)}),
        "FedIT, ranks 8, 4 and 2": (
            wide,
            two,
            {"exchange": split(frozen=named("trunk"), covers=fs.exchange.ranks(SHARES))},
        ),
        "FedIT, rank 2": (small, two, {"exchange": frozen}),
        "FedAvg, no adapters": (known, (), {}),
    }
    found = {}
    for name, (trained, leaves, parts) in arms.items():
        local = local_of(trained, 1e-2 if leaves else 1e-3, 2, *leaves)
        found[name] = fs.simulate(
            fs.fedavg(local, clients_per_round=ROLES).replace(clock=clock(STEP), **parts),
            trained,
            data,
            test,
            rounds=args.rounds or 15,
            eval_every=args.eval_every or 1,
            task=task,
            seeds=range(args.seeds),
            personal="personal" in parts,
            execution=fs.make_execution(1),
        )
    by_role = before.evaluations[-1].test.by_client
    assert by_role is not None
    return found, {
        "roles": [plays.client_names[role] for role in roles],
        "samples": clients.sizes.tolist(),
        "pretrained": by_role["perplexity"][0],
    }


WORK: Mapping[str, tuple[Callable[..., tuple[Results, dict[str, Any]]], str]] = {
    "digits": (of_digits, "accuracy"),
    "shakespeare": (of_shakespeare, "perplexity"),
}


def scores(result: fs.Result, score: str) -> NDArray[np.float64]:
    """Returns the score of each evaluation and seed, ``[E, R]``; of own models, if any."""
    last = result.evaluations[-1]
    part: Any = "test" if last.personal is None else "personal"
    return result.series(score, by_client=last.test.by_client is not None, part=part)


def row(result: fs.Result, score: str) -> dict[str, Any]:
    """Returns what the record has of an arm: numbers of every seed, the traffic in bytes."""
    last = result.evaluations[-1]
    own = last.test if last.personal is None else last.personal
    by_client = {} if own.by_client is None else {f"{score} by client": own.by_client[score]}
    return {
        "rounds": [e.round for e in result.evaluations],
        score: scores(result, score),
        "bytes": np.stack([total_bytes(e) for e in result.evaluations]).mean(axis=1),
        "bytes up": last.bytes_up.mean(),
        "seconds": result.seconds.mean(axis=1),
        "wall seconds": last.wall_seconds,
        **by_client,
    }


def interval(values: NDArray[np.float64]) -> str:
    """Returns the mean of differences and its 95 % interval by Student's t.

    >>> interval(np.array([1.0, 2.0, 3.0]))
    '+2.00 [-0.48, +4.48]'
    """
    mean, n = values.mean(), len(values)
    if n < 2:
        return f"{mean:+.2f}"
    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def table(results: Results, score: str) -> str:
    """Returns the scores after the last round, and the differences to the first arm by seed."""
    scale = 100 if score == "accuracy" else 1
    last = {name: scale * scores(result, score)[-1] for name, result in results.items()}
    first = next(iter(last))
    lines = [["", score, f"- {first}", "MB up", "MB up and down", "seconds"], ["---"] * 6]
    for name, result in results.items():
        end = result.evaluations[-1]
        lines.append(
            [
                name,
                f"{last[name].mean():.2f} ± {last[name].std():.2f}",
                "" if name == first else interval(last[name] - last[first]),
                f"{end.bytes_up.mean() / 1e6:.2f}",
                f"{total_bytes(end).mean() / 1e6:.2f}",
                f"{result.seconds[-1].mean():.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.widths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", choices=WORK, help="what to train")
    add("--data-dir", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR)")
    add("--rounds", type=int, help="of every arm (default: digits 60, shakespeare 15)")
    add("--eval-every", type=int, help="rounds (default: digits 4, shakespeare 1)")
    add("--units", type=int, default=200, help="of each of the two hidden layers (digits)")
    add("--pretraining", type=int, default=8, help="epochs on the other roles")
    add("--seeds", type=int, default=5, help="runs of each arm")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains all arms; prints the table, writes the record and the picture."""
    args, started = parse(argv), time.time()
    train, score = WORK[args.data]
    results, more = train(args)
    print(table(results, score))
    arms = {name: row(result, score) for name, result in results.items()}
    name = args.data if args.units == 200 else f"{args.data}_{args.units}"
    write_record(args.out / f"{name}.json", started, arms=arms, **more)
    draw_curves(results, args.out / f"{name}.png", score)


if __name__ == "__main__":
    main()
