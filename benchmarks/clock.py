"""Who learns what in how much time: methods on devices that differ, at equal simulated seconds.

    python -m benchmarks.clock --data-dir DATA
    python -m benchmarks.clock --datasets digits
    python -m benchmarks.clock --methods "RADFed, S = 4" "phase shift, n = 4" --out FOLDER

100 clients under label skew (EMD 1.4), 20 of which train at once, on scikit-learn's digits and on
2,000 images of MNIST (a fifth of its test set is scored), with devices by three laws; then
synchronous methods on one uplink that all who upload share. Every method has as much simulated
time. Prints tables in markdown; writes of each data set a JSON file and, as PDF and PNG, a picture.
Nothing is tuned: rates, α, tiers and the rest are each method's defaults, and a deadline is twice
what the median client takes.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

import fedjax_sim as fs
from benchmarks.reproduce.common import dealt, fewer, markdown, spread
from benchmarks.script import write_record
from fedjax_sim import algorithms as methods
from fedjax_sim.base import Clock, Law, Link, LocalUpdate, Now, Objective
from fedjax_sim.cli.problem import Problem
from fedjax_sim.data import Dataset
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.engine.memory import MB
from fedjax_sim.engine.streams import Device, stream

RESULTS = Path(__file__).resolve().parent / "results" / "clock"
CLIENTS, COHORT, BATCH, EPOCHS, LR = 100, 20, 10, 2, 0.1
SAMPLES = {"digits": None, "mnist": 2000}
SCORED = {"digits": 1, "mnist": 5}  # of so many test samples one
TARGET = {"digits": 0.85, "mnist": 0.8}
LAWS: dict[str, Law] = {
    "lognormal(1, 1)": fs.clock.lognormal(1.0, 1.0),
    "tiers(1, 2, 10)": fs.clock.tiers(1, 2, 10),
    "pareto(0.5, 1.2)": fs.clock.pareto(0.5, 1.2),
}
OWN = fs.clock.bandwidth(0.1 * MB, 0.4 * MB)
SHARED = fs.clock.bandwidth(0.1 * MB, 0.4 * MB, shared=True)
MOST = 10**5  # rounds; time ends every run before


class World(NamedTuple):
    """What a method is made with.

    Attributes:
        local: local training.
        model: the model.
        objective: its empirical risk.
        law: of the devices.
        link: of the clients.
        deadline: seconds.
    """

    local: LocalUpdate
    model: fs.Model
    objective: Objective
    law: Law
    link: Link
    deadline: float

    def clock(self, **rules: Any) -> Clock:
        """Its devices, with rules of the server."""
        return fs.clock.simulated(self.law, self.link, **rules)

    def timed(self, algorithm: fs.Algorithm, **rules: Any) -> fs.Algorithm:
        """The algorithm on them."""
        return algorithm.replace(clock=self.clock(**rules))


def shifted(world: World, phases: int) -> fs.Algorithm:
    """Phase shift, scored by the mean of the models in flight, as RADFed is."""
    made = fs.phase_shift(world.local, clients_per_round=COHORT, phases=phases)
    return world.timed(made.replace(flight=made.parts.flight.replace(evaluated="in_flight")))


Make = Callable[[World], fs.Algorithm]
ALONE: dict[str, Make] = {
    "FedAvg": lambda w: w.timed(fs.fedavg(w.local, clients_per_round=COHORT)),
    "FedAvg, deadline": lambda w: w.timed(
        fs.fedavg(w.local, clients_per_round=COHORT), deadline=w.deadline
    ),
    "FedAvg, 26 for 20": lambda w: w.timed(fs.fedavg(w.local, clients_per_round=26), first=COHORT),
    "FedProx, partial work": lambda w: w.timed(
        methods.fedprox(w.local, clients_per_round=COHORT, mu=0.1),
        deadline=w.deadline,
        late="partial",
    ),
    "FedAsync": lambda w: methods.fedasync(w.local, clients_per_round=COHORT, clock=w.clock()),
    "FedBuff, K = 5": lambda w: methods.fedbuff(
        w.local, clients_per_round=COHORT, buffer_size=5, clock=w.clock()
    ),
    "TiFL": lambda w: methods.tifl(
        w.local, clients_per_round=COHORT, model=w.model, clock=w.clock()
    ),
    "FedCS": lambda w: methods.fedcs(
        w.local, clients_per_round=COHORT, clock=w.clock(deadline=w.deadline)
    ),
    "Oort": lambda w: methods.oort(
        w.local, clients_per_round=COHORT, objective=w.objective, clock=w.clock()
    ),
    "RADFed, S = 4": lambda w: w.timed(
        fs.radfed(w.local, clients_per_round=COHORT, redistribution_rounds=4)
    ),
    "phase shift, n = 4": lambda w: shifted(w, 4),
}
TOGETHER: dict[str, Make] = {
    "FedAvg": ALONE["FedAvg"],
    "RADFed, S = 4": ALONE["RADFed, S = 4"],
    **{f"phase shift, n = {n}": functools.partial(shifted, phases=n) for n in (1, 2, 4)},
}


class Found(NamedTuple):
    """The outcome of a method.

    Attributes:
        rounds: at its evaluations, [E].
        seconds: there, [E, seeds].
        accuracy: there, in percent.
        mb: sent by then, up and down.
        to_target: seconds until the target, of each seed; None for not in time.
        mb_to_target: MB until then.
        by_speed: accuracy on the clients' own samples, of the fastest, the middle and the slowest
            third of the clients, [3, seeds].
        visits: the share of the visits that each third made, [3].
    """

    rounds: NDArray[np.int64]
    seconds: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    mb: NDArray[np.float64]
    to_target: list[float | None]
    mb_to_target: list[float | None]
    by_speed: NDArray[np.float64]
    visits: NDArray[np.float64]

    @property
    def curve(self) -> dict[str, NDArray[np.float64]]:
        """The lines of the picture, over the evaluations."""
        mean, deviation = self.accuracy.mean(axis=1), self.accuracy.std(axis=1)
        return {"seconds": self.seconds.mean(axis=1), "mean": mean, "deviation": deviation}


def speeds(law: Law) -> NDArray[np.float64]:
    """Seconds of a step, by client."""
    key = stream(jax.random.key(0), Device.COMPUTE)
    now = Now(jnp.int32(0), jnp.float32(0))
    return np.asarray(law(key, jnp.arange(CLIENTS, dtype=jnp.int32), now), np.float64)


def thirds(law: Law) -> NDArray[np.int64]:
    """The third of each client by its speed, 0 the fastest: ``[N]``."""
    rank = np.argsort(np.argsort(speeds(law), kind="stable"), kind="stable")
    return np.asarray(3 * rank // CLIENTS)


def deadline(law: Law, problem: Problem, local: LocalUpdate, size: int) -> float:
    """Twice the seconds that the median client takes for a visit."""
    steps = np.asarray(local.steps_for(np.diff(np.atleast_2d(problem.data.start)[0])))
    visits = steps * speeds(law) + size / (0.1 * MB) + size / (0.4 * MB)
    return float(2 * np.median(visits))


def run(make: Make, world: World, dataset: Dataset, problem: Problem, seconds: float) -> Found:
    """One method, all seeds, until its time is over."""
    algorithm, seeds = make(world), [r["seed"] for r in problem.runs]
    # After as many visits each, but a model that is still in flight is not scored.
    every = max(1, round(algorithm.round_factor), COHORT // algorithm.slots)
    result = fs.simulate(
        algorithm,
        world.model,
        problem.data,
        problem.test,
        rounds=MOST,
        classes=dataset.classes,
        seeds=seeds,
        eval_every=every,
        stop=fs.stop.seconds(seconds),
    )
    place, target = thirds(world.law), TARGET[dataset.name]
    reached = result.reached("accuracy", target)
    in_time = [s is not None and s <= seconds for s in reached.seconds or []]
    assert result.variables is not None
    x = jnp.asarray(dataset.train_x)
    outputs = jax.jit(jax.vmap(lambda v: world.model.apply(v, x, train=False)[0]))(result.variables)
    right = np.asarray(outputs.argmax(axis=-1)) == dataset.train_y
    by_speed = np.zeros((3, len(seeds)))
    for r in range(len(seeds)):
        start = np.atleast_2d(problem.data.start)[r]
        owner = np.repeat(np.arange(CLIENTS), np.diff(start))
        rows = np.asarray(problem.data.index)[start[0] : start[-1]]
        for third in range(3):
            by_speed[third, r] = right[r, rows[place[owner] == third]].mean()
    seen = result.metrics.client[result.metrics.client < CLIENTS]
    count = np.bincount(place[seen], minlength=3)
    sent = [(e.bytes_up + e.bytes_down) / MB for e in result.evaluations]
    return Found(
        rounds=np.array([e.round for e in result.evaluations]),
        seconds=result.seconds,
        accuracy=100 * result.accuracy,
        mb=np.array(sent, np.float64),
        to_target=_within(in_time, reached.seconds or [], 1),
        mb_to_target=_within(in_time, reached.bytes, MB),
        by_speed=100 * by_speed,
        visits=count / max(1, count.sum()),
    )


def _within(
    in_time: Sequence[bool], values: Sequence[float | None], unit: float
) -> list[float | None]:
    return [v / unit if ok and v else None for ok, v in zip(in_time, values, strict=True)]


def row(name: str, found: Found, seconds: float) -> dict[str, Any]:
    """A line of a table, as of the last evaluation in time."""
    count = (found.seconds <= seconds).sum(axis=0)
    at, seeds = np.maximum(count - 1, 0), np.arange(len(count))
    accuracy = spread(found.accuracy[at, seeds]) if count.all() else "a first round took longer"
    return {
        "": name,
        "rounds": round(found.rounds[at].mean()),
        "accuracy %": accuracy,
        "seconds to target": _mean(found.to_target),
        "MB to target": _mean(found.mb_to_target),
        "MB": f"{found.mb[at, seeds].mean():.0f}",
        "fastest third %": f"{found.by_speed[0].mean():.1f}",
        "slowest third %": f"{found.by_speed[2].mean():.1f}",
        "visits of the slowest %": f"{100 * found.visits[2]:.0f}",
    }


def seeds_of(found: Found, seconds: float) -> dict[str, Any]:
    """The numbers of every seed: for the record."""
    count = (found.seconds <= seconds).sum(axis=0)
    last = [found.accuracy[i - 1, r] if i else None for r, i in enumerate(count)]
    return {
        "accuracy": last, "seconds_to_target": found.to_target, "mb_to_target": found.mb_to_target,
        "by_speed": found.by_speed, "curve": found.curve,
    }  # fmt: skip


def _mean(values: Sequence[float | None]) -> str:
    """The mean over those that got there, and how many did if not all."""
    known = [v for v in values if v is not None]
    if not known:
        return "not reached"
    some = "" if len(known) == len(values) else f" ({len(known)} of {len(values)})"
    return f"{np.mean(known):,.0f}{some}"


def picture(path: Path, curves: Mapping[str, Mapping[str, Found]], seconds: float) -> None:
    """Accuracy against simulated seconds, ± a standard deviation, a panel for each law."""
    figure = Figure(figsize=(4.6 * len(curves) + 2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    colours = [*(f"C{i}" for i in range(10)), "black"]
    for panel, (law, found) in zip(panels, curves.items(), strict=True):
        for colour, (name, one) in zip(colours, found.items(), strict=True):
            when, mean, deviation = one.curve.values()
            panel.plot(when, mean, color=colour, label=name, linewidth=1.3)
            panel.fill_between(
                when, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0
            )
        panel.set(title=law, xlabel="simulated seconds", xlim=(0, seconds))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy in %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    for kind in ("pdf", "png"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=120)


def main() -> None:
    """Runs all methods on all worlds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR, else TFDS's own)")
    add("--datasets", nargs="+", default=[*SAMPLES], choices=[*SAMPLES], metavar="NAME")
    add("--seeds", type=int, default=3, help="(default: 3)")
    add("--seconds", type=float, default=1000.0, help="simulated, of each run (default: 1000)")
    names = [*dict.fromkeys((*ALONE, *TOGETHER))]
    add("--methods", nargs="+", default=names, choices=names, metavar="NAME",
        help="rows of the tables; the picture needs all (default: all)")  # fmt: skip
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    started = time.time()
    use_cores()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"target": TARGET, "seeds": args.seeds, "budget_seconds": args.seconds}
    for name in args.datasets:
        dataset = fewer(fs.load_dataset(name, args.data_dir), SAMPLES[name])
        scored = slice(None, None, SCORED[name])
        dataset = dataset._replace(test_x=dataset.test_x[scored], test_y=dataset.test_y[scored])
        model = fs.models.mlp(dataset.train_x.shape[1:], dataset.classes)
        assert dataset.mean is not None
        assert dataset.std is not None
        model = fs.models.with_scaling(model, dataset.mean, dataset.std)
        objective = fs.empirical_risk(model)
        local = fs.local_sgd(objective, optax.sgd(LR), batch_size=BATCH, epochs=EPOCHS)
        problem = dealt(dataset, "emd(1.4)", CLIENTS, args.seeds)
        size = sum(a.nbytes for a in jax.tree.leaves(model.init(jax.random.key(0))))
        curves: dict[str, dict[str, Found]] = {}
        record: dict[str, Any] = {}
        for law_name, law in LAWS.items():
            late = deadline(law, problem, local, size)
            for link, makes in ((OWN, ALONE), (SHARED, TOGETHER)):
                case = f"{law_name}, shared uplink" if link.shared else law_name
                world = World(local, model, objective, law, link, late)
                found = {}
                for method in [m for m in makes if m in args.methods]:
                    began = time.perf_counter()
                    found[method] = run(makes[method], world, dataset, problem, args.seconds)
                    took = time.perf_counter() - began
                    print(f"{name}, {case}, {method}: {took:.0f} s", file=sys.stderr, flush=True)
                table = [row(method, one, args.seconds) for method, one in found.items()]
                print(
                    f"\n## {name}, {case}, deadline {late:.1f} s\n\n{markdown(table)}", flush=True
                )
                each = {method: seeds_of(one, args.seconds) for method, one in found.items()}
                record[f"{name}, {case}"] = {"deadline": late, "table": table, "seeds": each}
                write_record(args.out / f"{name}.json", started, **settings, worlds=record)
                if not link.shared:
                    curves[law_name] = found
        if args.methods == names:
            picture(args.out / name, curves, args.seconds)


if __name__ == "__main__":
    main()
