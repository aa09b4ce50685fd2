"""The contracts of the parts: mypy holds their signatures, and every part its shapes and dtypes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import math
import pkgutil
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    SIZES,
    Federation,
    altered_data,
    assert_trees,
    context_of,
    known,
    make_federation,
    play,
    promising,
    some_slow,
)

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import (
    Batch,
    ClientData,
    ClientView,
    Cohort,
    Done,
    Gathered,
    LocalInfo,
    LocalUpdate,
    SetupTraffic,
    Slots,
    Variables,
)
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli.making import make, stand_in
from fedjax_sim.client import mixup
from fedjax_sim.client.agreement import consensus
from fedjax_sim.engine import streams
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.server import preaggregation

ROOT = Path(__file__).parents[1]

# ---- shapes and dtypes, of every part ----

N, LABELS, ROWS, SLOTS = len(SIZES), 3, 6, 4
KEY = jax.random.key(0)
MALICIOUS = np.isin(np.arange(N), [1, 4])


@functools.cache
def net() -> fs.Model:
    return fs.models.logistic((6,), LABELS)


@functools.cache
def risk() -> base.Objective:
    return fs.empirical_risk(net())


@functools.cache
def update() -> LocalUpdate:
    return fs.local_sgd(risk(), optax.sgd(0.1, momentum=0.5), batch_size=8)


def companion() -> base.Companion:
    return fs.personal.interpolated(risk(), learned=True)


def score(variables: Variables, client: ClientView) -> jax.Array:
    return client.size.astype(jnp.float32)


def traced() -> base.Clock:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.csv"
        lines = ["client,seconds_per_step,up_bytes_per_second,down_bytes_per_second"]
        file.write_text("\n".join([*lines, *(f"{k},1,1,1" for k in range(N))]), encoding="utf-8")
        return fs.clock.traced(file)


Make = Callable[[], Any]
PARTS: dict[str, dict[str, Make]] = {
    "Task": {
        "classification": lambda: fs.tasks.classification(LABELS),
        "classification, ranked": lambda: fs.tasks.classification(LABELS, auc=True),
        "classification, backdoor": lambda: fs.tasks.classification(LABELS, backdoor=True),
        "classification, unlabelled": lambda: fs.tasks.classification(LABELS, unlabelled=True),
        "regression": fs.tasks.regression,
        "multi_label": lambda: fs.tasks.multi_label(LABELS),
        "next_token": lambda: fs.tasks.next_token(LABELS),
    },
    "Selection": {
        "uniform": fs.selection.uniform,
        "uniform, sticky": lambda: fs.selection.uniform(sticky=True),
        "with_replacement": fs.selection.with_replacement,
        "importance": lambda: fs.selection.importance(score),
        "importance, exact": lambda: fs.selection.importance(score, exact=True),
        "poisson": lambda: fs.selection.poisson(2),
        "shuffled": fs.selection.shuffled,
        "cyclic": fs.selection.cyclic,
        "everyone": fs.selection.everyone,
        "mediators": lambda: fs.selection.mediators(SLOTS, 2, LABELS),
        "power_of_choice": lambda: fs.selection.power_of_choice(6, score),
        "within_deadline": lambda: fs.selection.within_deadline(6),
        "awake": fs.selection.awake,
        "tiers": lambda: fs.selection.tiers(2, score),
        "guided": fs.selection.guided,
        "deep_q": lambda: fs.selection.deep_q(score, lambda w, client: w, size=4, hidden=5),
    },
    "Flight": {
        "every_round": fs.flight.every_round,
        "delayed": lambda: fs.flight.delayed(3),
        "staggered": lambda: fs.flight.staggered(2),
        "permanent": fs.flight.permanent,
        "serverless": fs.flight.serverless,
        "buffered": lambda: fs.flight.buffered(SLOTS),
        "periodic": lambda: fs.flight.periodic(2.0),
    },
    "LearnedRedistribution": {
        "learned": lambda: fs.redistribution.learned(peers=2),
        "edges": lambda: fs.redistribution.edges(2),
    },
    "Redistribution": {
        "permute": lambda: fs.redistribution.permute,
        "mix": lambda: fs.redistribution.mix(
            fs.redistribution.metropolis(fs.redistribution.ring(SLOTS))
        ),
        "push": lambda: fs.redistribution.push(
            fs.redistribution.outgoing(fs.redistribution.one_sided(SLOTS, 2))
        ),
        "matchings": lambda: fs.redistribution.matchings(fs.redistribution.ring(SLOTS), 0.5),
    },
    "LocalUpdate": {
        "local_sgd": update,
        "local_sgd, own settings": lambda: update().change(
            epochs=range(1, N + 1),
            rate_by_client=[0.5] * N,
            stragglers=0.5,
            batch_by_client=range(1, N + 1),
        ),
        "local_sgd, averaged": lambda: update().change(optimizer_state="average"),
        "local_sgd, scaffold": lambda: update().change(corrections=(fs.corrections.scaffold(),)),
        "local_sgd, private": lambda: update().change(private=fs.local.dp_sgd(1.0, 0.5)),
        "local_sgd, accompanied": lambda: update().change(companion=companion()),
        "local_sgd, remembering outputs": lambda: update().change(
            shared=fs.terms.class_outputs(net(), LABELS),
            memory=fs.terms.own_outputs(net(), LABELS),
        ),
        "ditto": lambda: fs.local.ditto(update(), 0.1),
        "fedadmm": lambda: fs.local.fedadmm(update()),
        "in_turn": lambda: fs.local.in_turn(update(), update().change(optimizer_state="keep")),
        "adaptive_start": lambda: fs.personal.adaptive_start(
            update(), risk(), fs.leaves.head(net())
        ),
        "with_importance": lambda: fs.local.with_importance(update(), score),
        "with_initial_loss": lambda: fs.local.with_initial_loss(update(), risk()),
        "with_final_loss": lambda: fs.local.with_final_loss(update(), risk()),
        "with_utility": lambda: fs.local.with_utility(update(), risk()),
        "fedmd": lambda: fs.local.fedmd(update(), net(), LABELS),
        "loadaboost": lambda: fs.local.loadaboost(update(), fs.reports.mean_loss(risk())),
        "adaptive_steps": lambda: fs.local.adaptive_steps(update(), risk(), 0.1, 200.0),
        "skewscout": lambda: fs.local.skewscout(update(), fs.reports.accuracy(net())),
    },
    "Correction": {
        "proximal": lambda: fs.corrections.proximal(0.1),
        "adaptive_proximal": fs.corrections.adaptive_proximal,
        "scaffold": fs.corrections.scaffold,
        "dynamic": lambda: fs.corrections.dynamic(0.1),
        "global_momentum": lambda: fs.corrections.global_momentum(0.9),
        "client_momentum": lambda: fs.corrections.client_momentum(0.5, 0.1),
        "scaffnew": lambda: fs.corrections.scaffnew(0.2, 0.1),
        "mime": lambda: fs.corrections.mime(0.9),
    },
    "DrawnSteps": {
        "geometric": lambda: fs.local.geometric(0.2),
    },
    "Transform": {
        "peer_means": lambda: mixup.peer_means(3),
        "altered": lambda: fs.augment.altered([fs.augment.crop(1)]),
        "altered_copies": lambda: fs.augment.altered_copies([fs.augment.noise(0.1)]),
        "fedaug_augmentations": lambda: fs.augment.fedaug_augmentations((6, 6, 1)),
        "drifting": lambda: fs.augment.drifting(lambda key, batch, client: batch, lambda t: t >= 2),
    },
    "Objective": {
        "empirical_risk": lambda: fs.empirical_risk(net(), l2=0.1),
        "mixed_objective": lambda: mixup.mixed_objective(risk(), 0.1),
        "pseudo_labels": lambda: fs.terms.pseudo_labels(risk(), net(), 0.3),
        "received_labels": lambda: fs.terms.received_labels(risk(), net(), 0.3),
        "sharpness_aware": lambda: fs.terms.sharpness_aware(risk()),
        "estimated_sharpness": lambda: fs.terms.estimated_sharpness(risk()),
        "ordered_dropout": lambda: fs.terms.ordered_dropout(risk()),
        "after_a_step": lambda: fs.adaptation.after_a_step(risk(), 0.1),
        "moreau_envelope": lambda: fs.adaptation.moreau_envelope(risk()),
    },
    "Memory": {
        "last_model": fs.terms.last_model,
        "last_received": fs.terms.last_received,
        "own_outputs": lambda: fs.terms.own_outputs(net(), LABELS),
    },
    "Shared": {
        "class_outputs": lambda: fs.terms.class_outputs(net(), LABELS),
        "consensus": lambda: consensus(net(), LABELS, 5),
        "past_models": fs.terms.past_models,
        "prototypes": lambda: fs.terms.prototypes(net(), LABELS),
    },
    "Exchange": {
        "everything": fs.exchange.everything,
        "split": lambda: fs.exchange.split(own=fs.leaves.named("*bias")),
        "nothing": fs.exchange.nothing,
        "fragments": lambda: fs.exchange.fragments(fs.leaves.named("*")),
    },
    "Score": {
        "squared_gradient": lambda: fs.reports.squared_gradient(risk(), 8),
        "gradient_norm": lambda: fs.reports.gradient_norm(risk(), 8),
        "mean_loss": lambda: fs.reports.mean_loss(risk(), 8),
        "accuracy": lambda: fs.reports.accuracy(net(), 8),
    },
    "Compressor": {
        "ternary": lambda: fs.compression.ternary(0.2),
        "top_k": lambda: fs.compression.top_k(0.2),
        "hard_threshold": lambda: fs.compression.hard_threshold(1.5),
        "entropy_coded": lambda: fs.compression.entropy_coded(fs.compression.ternary(0.2)),
        "clustered": lambda: fs.compression.clustered(fs.compression.top_k(0.2), 3),
        "stochastic_quantisation": lambda: fs.compression.stochastic_quantisation(7),
        "random_mask": lambda: fs.compression.random_mask(0.2),
        "uniform_quantisation": lambda: fs.compression.uniform_quantisation(2),
        "rotated": lambda: fs.compression.rotated(fs.compression.uniform_quantisation(2)),
    },
    "Broadcast": {
        "latest": fs.broadcast.latest,
        "stale": lambda: fs.broadcast.stale(2),
        "ifca": lambda: fs.broadcast.ifca(2, risk()),
        "attentive": lambda: fs.broadcast.attentive(1.0, 20.0),
        "first_order": lambda: fs.broadcast.first_order(2, risk()),
        "dynamic": lambda: fs.broadcast.dynamic(90.0, "angle", ROWS, risk()),
    },
    "Refresh": {"drift_correction": fs.flight.drift_correction},
    "Sending": {
        "compressed": lambda: fs.sending.compressed(fs.compression.top_k(0.2)),
        "compressed, measured": lambda: fs.sending.compressed(fs.compression.hard_threshold(0.01)),
        "finite_only": fs.sending.finite_only,
        "low_rank": lambda: fs.sending.low_rank(2),
        "relevant_only": lambda: fs.sending.relevant_only(0.5),
        "by_norm": lambda: fs.sending.by_norm(2.0, 4),
        "clip_norm": lambda: fs.sending.clip_norm(0.05),
        "noise": lambda: fs.sending.noise(0.5),
        "sign_flip": lambda: fs.sending.sign_flip(MALICIOUS),
        "scaling": lambda: fs.sending.scaling(MALICIOUS, 2.0),
        "gaussian": lambda: fs.sending.gaussian(MALICIOUS, 0.5),
        "alie": lambda: fs.sending.alie(MALICIOUS, z=1.5),
        "ipm": lambda: fs.sending.ipm(MALICIOUS),
        "mimic": lambda: fs.sending.mimic(MALICIOUS),
        "fang_trim": lambda: fs.sending.fang_trim(MALICIOUS),
        "fang_trim, partial": lambda: fs.sending.fang_trim(MALICIOUS, knowledge="partial"),
        "fang_krum": lambda: fs.sending.fang_krum(MALICIOUS, fs.aggregators.krum(0.2), 2),
        "optimised": lambda: fs.sending.optimised(MALICIOUS, fs.aggregators.mean, evaluations=2),
    },
    "Weighting": {
        "by_samples": lambda: fs.weighting.by_samples,
        "by_samples_visited": lambda: fs.weighting.by_samples_visited,
        "equal": lambda: fs.weighting.equal,
        "unbiased": fs.weighting.unbiased,
    },
    "PreAggregation": {
        "normalise": lambda: preaggregation.normalise(0.1),
        "staleness": lambda: preaggregation.staleness(0.5, "polynomial"),
        "discounted": lambda: preaggregation.discounted("hinge"),
        "q_fair": lambda: preaggregation.q_fair(1.0, 0.1),
        "agnostic": lambda: preaggregation.agnostic(0.1),
        "discrepancy": lambda: preaggregation.discrepancy(LABELS),
        "trust": lambda: preaggregation.trust(update()),
        "suspicion": lambda: preaggregation.suspicion(risk()),
        "nearest_neighbour_mixing": preaggregation.nearest_neighbour_mixing,
        "bucketing": preaggregation.bucketing,
        "gaussian_mechanism": lambda: preaggregation.gaussian_mechanism(1.0, 0.5, 3),
        "adaptive_mechanism": lambda: preaggregation.adaptive_mechanism(
            1.0, 0.5, 3, count_noise=0.6
        ),
        "tree_mechanism": lambda: preaggregation.tree_mechanism(1.0, 0.5, 3),
        "banded_mechanism": lambda: preaggregation.banded_mechanism(1.0, 0.5, 3, bands=2),
    },
    "Aggregator": {
        "mean": lambda: fs.aggregators.mean,
        "coordinate_median": lambda: fs.aggregators.coordinate_median,
        "trimmed_mean": fs.aggregators.trimmed_mean,
        "geometric_median": fs.aggregators.geometric_median,
        "krum": fs.aggregators.krum,
        "multi_krum": fs.aggregators.multi_krum,
        "caf": fs.aggregators.caf,
    },
    "Server": {
        "replace": fs.server.replace,
        "optimizer": lambda: fs.server.optimizer(optax.sgd(0.5, momentum=0.9)),
        "mix": lambda: fs.server.mix(0.5),
        "chain": lambda: fs.server.chain(
            fs.server.mix(0.5), fs.server.optimizer(optax.sgd(0.5, momentum=0.9))
        ),
        "dynamic": lambda: fs.server.dynamic(0.1),
        "extrapolated": fs.server.extrapolated,
        "participation": fs.server.participation,
        "sign_agreement": lambda: fs.server.sign_agreement(
            2, fs.server.optimizer(optax.sgd(0.5, momentum=0.9))
        ),
        "train_beside": lambda: fs.server.train_beside(update()),
        "train_on_root": lambda: fs.server.train_on_root(update()),
        "distilled": lambda: fs.server.distilled(net(), steps=2, batch_size=8),
        "compress_server": lambda: fs.server.compress_server(
            fs.server.replace(), fs.compression.top_k(0.5)
        ),
    },
    "Diagnostic": {
        "model_divergence": fs.diagnostics.model_divergence,
        "central_divergence": lambda: fs.diagnostics.central_divergence(update()),
        "gradient_dissimilarity": lambda: fs.diagnostics.gradient_dissimilarity(risk()),
        "models_taken": fs.diagnostics.models_taken,
    },
    "Finish": {
        "calibrated": lambda: fs.finish.calibrated(net(), LABELS, samples=3, steps=2),
    },
    "Law": {
        "constant": lambda: fs.clock.constant(2.0),
        "lognormal": lambda: fs.clock.lognormal(0.1, 1.0),
        "pareto": lambda: fs.clock.pareto(0.1, 1.5),
        "tiers": lambda: fs.clock.tiers(1, 2, 10),
    },
    "Availability": {
        "bernoulli": lambda: fs.clock.bernoulli(0.5),
        "diurnal": lambda: fs.clock.diurnal(0.5),
    },
    "Link": {
        "bandwidth": lambda: fs.clock.bandwidth(1e6, fs.clock.tiers(1e6, 2e6)),
    },
    "Clock": {
        "simulated, deadline": lambda: fs.clock.simulated(
            0.5, available=fs.clock.bernoulli(0.5), failures=0.2, deadline=3.0
        ),
        "traced": traced,
    },
    "Personal": {
        "as_received": fs.personal.as_received,
        "fine_tuned": lambda: fs.personal.fine_tuned(update()),
        "stored": fs.personal.stored,
        "accompanied": lambda: fs.personal.accompanied(companion()),
        "adaptively_mixed": lambda: fs.personal.adaptively_mixed(
            fs.local.adaptive_start(update(), risk(), fs.leaves.head(net()))
        ),
    },
}


def cases(kind: str) -> pytest.MarkDecorator:
    """Every part of a kind."""
    return pytest.mark.parametrize("make", PARTS[kind].values(), ids=list(PARTS[kind]))


def makes(value: Any, kind: str) -> bool:
    """Whether a function returns a part of a kind, or a class is of it or is called like it."""
    if inspect.isfunction(value):
        return inspect.signature(value).return_annotation == kind
    if not (inspect.isclass(value) and issubclass(value, base.Part)):
        return False
    role = getattr(base, kind, fs.reports.accuracy if kind == "Score" else object)
    if issubclass(role, base.Part) and kind != "Score":
        return issubclass(value, role)
    calls = [vars(of).get("__call__") for of in (value, role)]
    own, wanted = ([*inspect.signature(c).parameters] if c else None for c in calls)
    return own is not None and own == wanted


@pytest.mark.parametrize("kind", PARTS)
def test_no_part_is_left_out(kind: str) -> None:
    """Looks for public functions that return such a part, and for classes of it."""
    found = set()
    for info in pkgutil.walk_packages(fs.__path__, "fedjax_sim."):
        if "__main__" in info.name or info.name.startswith("fedjax_sim.cli."):
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            if getattr(value, "__module__", "") == info.name and name[0].islower():
                found |= {name} if makes(value, kind) else set()
    found -= {
        "in_floats",
        "scoring",
        "task_of",
        "with_loss",
        "remade",
        "client_weights",
        "server_sgd",
        "Rule",
        "ByClock",
        "exact_lora",
    }  # which make one of another, classes that others are made of, one for adapters
    assert found <= {name.partition(",")[0] for name in PARTS[kind]}


def same_form(a: Any, b: Any) -> None:
    """Equal structure, shapes and dtypes."""
    a, b = (jax.tree.map(jnp.asarray, tree) for tree in (a, b))
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)


@pytest.fixture(scope="module")
def crowd(federation: Federation) -> ClientData:
    """Eight clients, and two samples of the server's own."""
    owned = federation.data
    index = np.concatenate([owned.index, owned.index[:2]])
    root = np.array([len(owned.index), len(index)], np.int32)
    return jax.device_put(altered_data(owned, index=index, root=root))


@pytest.fixture(scope="module")
def start() -> Variables:
    return net().init(jax.random.key(3))


def view(data: ClientData, client: int, *, peers: bool = False) -> ClientView:
    """One client; N is none, without samples."""
    task = visits(data, jnp.array([client], jnp.int32), peers=peers)
    return jax.tree.map(lambda a: a[0], task).view(samples_of(data), data)


def stack_of(variables: Variables, rows: int = ROWS, absent: Any = jnp.nan) -> Variables:
    """Models around ``variables``; the last two rows are ``absent``."""

    def near(w: jax.Array) -> jax.Array:
        noise = 0.1 * jax.random.normal(jax.random.key(w.size), (rows, *w.shape))
        return (w[None] + noise).at[-2:].set(absent)

    return jax.tree.map(near, variables)


WEIGHTS = jnp.array([3.0, 1.0, 2.0, 5.0, 0.0, 0.0])
VISITED = jnp.array([2, 0, 4, 1, 5, N], jnp.int32)  # client 5 trained, and does not count


def cohort_of(
    server: Variables, data: ClientData, absent: Any = jnp.nan, tag: Any = None
) -> Cohort:
    samples = jnp.array([16, 1, 40, 3, 5, 0], jnp.int32)
    losses = jnp.array([1.0, 2.0, 0.5, 1.5, 0.0, 0.0]).at[-2:].set(absent)
    info = LocalInfo(losses, jnp.array([2, 1, 5, 1, 1, 0]), samples, {"initial_loss": losses})
    received = jax.tree.map(lambda w: w[None], server)
    ages = jnp.array([0, 1, 1, 0, 1, 0], jnp.int32) if tag is None else tag
    return Cohort(server, received, VISITED, VISITED < N, samples, info, ages, data)


# -- the clock --

NOON = base.Now(jnp.int32(43_200), jnp.float32(0.5))


@cases("Law")
def test_law(make: Make) -> None:
    """Of each client alone: whoever else is asked."""
    law = make()
    client = jnp.array([5, 0, N, 3], jnp.int32)
    numbers = jax.jit(law)(KEY, client, NOON)
    chex.assert_shape(numbers, (4,))
    chex.assert_type(numbers, jnp.float32)
    assert (numbers > 0).all()
    assert jax.jit(law)(KEY, client[::-1], NOON).tolist() == numbers[::-1].tolist()
    assert jax.jit(law)(KEY, client[1:2], NOON).tolist() == numbers[1:2].tolist()


@cases("Availability")
def test_availability(make: Make) -> None:
    client = jnp.arange(N, dtype=jnp.int32)
    awake = jax.jit(make())(jax.random.split(KEY, N), client, NOON)
    chex.assert_shape(awake, (N,))
    chex.assert_type(awake, bool)


@cases("Link")
def test_link(make: Make) -> None:
    link = make()
    for law in (link.up, link.down):
        rates = jax.jit(lambda *of_clients, law=law: base.evaluate_law(law, *of_clients))
        chex.assert_shape(rates(KEY, jnp.arange(N, dtype=jnp.int32), NOON), (N,))


@cases("Clock")
def test_clock(make: Make, crowd: ClientData, start: Variables) -> None:
    algorithm = composed(clock=make())
    before = algorithm.init(KEY, start, crowd)
    after, metrics = jax.jit(algorithm.step)(KEY, before, crowd)
    same_form(after, before)
    chex.assert_shape(jax.tree.leaves(metrics.time), ())
    chex.assert_type(list(metrics.time), [float] * 4 + [int] * 4)
    assert int(after.clock.seconds) == int(metrics.time.seconds)


# -- the plan --


@cases("Selection")
def test_selection(make: Make, crowd: ClientData, start: Variables) -> None:
    part = make()
    execution = fs.make_execution(devices=1)
    before = part.init(start, crowd, execution)
    last, visited = jnp.array([1, 0, 3, 2], jnp.int32), jnp.zeros(SLOTS, jnp.int32)
    free = jnp.array([True, False, True, True]) if part.sticky else jnp.ones(SLOTS, bool)
    told = before
    if part.poll is not None:
        asked = jax.jit(part.poll)(KEY, before, crowd)
        chex.assert_type(asked, jnp.int32)
        assert len({*asked.tolist()}) == len(asked)
        answers: Any = ()
        if part.ask is not None:
            answers = jnp.stack([part.ask(start, view(crowd, int(k))) for k in asked])
        told = jax.jit(part.record_answers)(before, asked, answers)
        same_form(told, before)
    clients, after = jax.jit(part.draw)(KEY, told, crowd, last, free, visited)
    if part.timed is not None:
        outlook = base.Outlook(
            lambda client, uploads: jnp.ones(len(client)), lambda client: client < N, math.inf
        )
        timed = lambda *given: part.timed(*given, outlook)  # noqa: E731
        clients, after = jax.jit(timed)(KEY, told, crowd, last, free, visited)
    chex.assert_shape(clients, (SLOTS,))
    chex.assert_type(clients, jnp.int32)
    assert ((clients >= 0) & (clients <= N)).all()
    drawn = [k for k in clients.tolist() if k < N]
    assert part.repeats or len(set(drawn)) == len(drawn)
    if part.active is None:
        assert len(drawn) == SLOTS
    assert (clients == last)[~free].all()
    same_form(after, before)
    count = jnp.zeros(ROWS, jnp.int32)
    extra = dict.fromkeys((*part.reads, "seconds"), jnp.ones(ROWS))
    info = LocalInfo(jnp.zeros(ROWS), count, count, extra)
    rows = jnp.full(ROWS, N, jnp.int32).at[:SLOTS].set(clients)
    same_form(jax.jit(part.update)(after, rows, info), before)


@cases("Flight")
def test_flight(make: Make) -> None:
    part = make()
    assert part.period >= 1
    assert part.collected(SLOTS) == SLOTS
    kind = part.group(SLOTS)
    assert kind.shape == (SLOTS,)
    assert kind.dtype == np.int32
    for t in range(-1, 6):
        due = jax.jit(lambda t: part.due(t, SLOTS))(jnp.int32(t))
        chex.assert_shape(due, (SLOTS,))
        chex.assert_type(due, bool)
        for group in set(kind.tolist()):  # due together
            assert len(set(due[kind == group].tolist())) == 1


@cases("Redistribution")
def test_redistribution(make: Make, start: Variables) -> None:
    part, order = make(), jnp.array([2, 0, 3, 1, SLOTS, SLOTS], jnp.int32)
    count = jnp.arange(SLOTS, dtype=jnp.int32)
    info = LocalInfo(count.astype(jnp.float32), count, count)
    models = stack_of(start, SLOTS, 0.5)
    slots = Slots(models, count, count, count, info, (), models)

    def moved(key: jax.Array, slots: Slots) -> Any:
        moves = part(key, SLOTS)
        return moves.take(slots, order), moves.received()

    taken, received = jax.jit(moved)(KEY, slots)
    same_form(taken, jax.tree.map(lambda a: jnp.zeros((len(order), *a.shape[1:]), a.dtype), slots))
    chex.assert_shape(received, (SLOTS,))
    chex.assert_type(received, jnp.int32)
    chex.assert_tree_all_finite(taken)


@cases("LearnedRedistribution")
def test_learned_redistribution(make: Make, crowd: ClientData, start: Variables) -> None:
    part, order = make(), jnp.array([2, 0, 3, 1, SLOTS, SLOTS], jnp.int32)
    count = jnp.arange(SLOTS, dtype=jnp.int32)
    extra = {name: count.astype(jnp.float32) for name in part.reads}
    info = LocalInfo(count.astype(jnp.float32), count, count, extra)
    slots = Slots(stack_of(start, SLOTS, 0.5), count, count, count, info, (), ())

    def moved(key: jax.Array, state: Any, slots: Slots) -> Any:
        moves, state = part.move(key, state, slots)
        return moves.take(slots, order), moves.received(), state

    before = part.init(SLOTS, crowd)
    taken, received, after = jax.jit(moved)(KEY, before, slots)
    same_form(taken, jax.tree.map(lambda a: jnp.zeros((len(order), *a.shape[1:]), a.dtype), slots))
    chex.assert_shape(received, (SLOTS,))
    chex.assert_type(received, jnp.int32)
    chex.assert_tree_all_finite((taken, after))
    same_form(after, before)


# -- the clients --


@cases("LocalUpdate")
def test_local_update(make: Make, crowd: ClientData, start: Variables) -> None:
    local = make()
    own, common = local.client_state(start), local.shared_state(start)
    train, reduce = jax.jit(local.train), jax.jit(reducing(local))
    before = common
    for client, samples in ((3, SIZES[3]), (N, 0)):  # N is no client
        visit = dataclasses.replace(view(crowd, client), round=jnp.int32(0), coin=KEY)
        if local.survey is not None:
            answer = jax.jit(local.survey.ask)(KEY, start, visit, own, before)
            chex.assert_tree_all_finite(answer)
            common = local.survey.tell(before, answer)
        trained = train(KEY, start, visit, own, common)
        same_form(trained.variables, start)
        same_form(trained.client_state, own)
        chex.assert_shape(jax.tree.leaves(trained.info), ())
        chex.assert_type([trained.info.loss, *trained.info.extra.values()], jnp.float32)
        chex.assert_type([trained.info.steps, trained.info.samples], jnp.int32)
        chex.assert_tree_all_finite((trained.variables, trained.client_state, trained.info))
        assert int(trained.info.steps) <= int(local.steps_for(samples))
        if local.known:
            assert int(trained.info.steps) == local.epochs * -(-samples // 8)
        # Rows without samples are absent, whatever they sent.
        sent = jax.tree.map(
            lambda a: jnp.stack([a, a * jnp.asarray(jnp.nan).astype(a.dtype), a * 0]),
            trained.message,
        )
        reduced = reduce(common, sent, jnp.array([samples, 0, 0], jnp.float32))
        same_form(reduced, before)
        assert not any(np.isnan(a).any() for a in jax.tree.leaves(reduced))


def reducing(part: Any) -> Callable[..., Any]:
    """Its ``reduce`` for N clients."""
    mean = fs.aggregators.mean
    return lambda common, sent, weights: part.reduce(common, sent, weights, N, mean)


@cases("DrawnSteps")
def test_drawn_steps(make: Make) -> None:
    part = make()
    draw = jax.jit(part.draw)
    for seed in range(20):
        steps = draw(jax.random.key(seed), ())
        chex.assert_shape(steps, ())
        chex.assert_type(steps, jnp.int32)
        assert 1 <= int(steps) <= part.most


@cases("Correction")
def test_correction(make: Make, start: Variables) -> None:
    part, w = make(), start.params
    own, common = part.client_state(w), part.shared_state(w)
    context = context_of(w)
    before = common
    if part.ask is not None:
        common = part.tell(common, part.ask(lambda: w, context))
    same_form(jax.jit(part.direction)(w, w, context, own, common), w)
    info = LocalInfo(jnp.float32(1), jnp.int32(3), jnp.int32(9))

    def finish(path: Any) -> Any:
        return part.finish(
            w, context, own, common, Done(info, lambda: w, path if part.path else None)
        )

    kept, message = jax.jit(finish)(w)
    same_form(kept, own)
    sent = jax.tree.map(lambda a: jnp.stack([a, (a * 0).astype(a.dtype)]), message)
    sent = jax.tree.map(
        lambda a: a.at[1].set(jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, sent
    )
    for rows in ([9, 0], [0, 0]):
        reduced = jax.jit(reducing(part))(common, sent, jnp.array(rows, jnp.int32))
        same_form(reduced, before)
        if any(rows):
            chex.assert_tree_all_finite(reduced)


def minibatch(name: str, data: ClientData) -> Batch:
    y, mask = jnp.array([0, 2, 1], jnp.int32), jnp.array([True, True, False])
    if name in ("altered", "altered_copies", "fedaug_augmentations"):
        x = jnp.arange(3 * 36, dtype=jnp.uint8).reshape(3, 6, 6, 1)
        return Batch(x, y, mask, copy=jnp.array([True, False, True]))
    return Batch(data.x[:3], y, mask)


TARGETS: dict[str, Callable[[np.random.Generator, Any], np.ndarray]] = {
    "classification": lambda rng, task: (
        np.where(np.arange(9) % 2 * task.unlabelled, -1, rng.integers(0, LABELS, 9))
        + np.arange(9) % 2 * LABELS * task.backdoor
    ).astype(np.int32),
    "regression": lambda rng, task: rng.normal(size=(9, task.outputs)).astype(np.float32),
    "multi_label": lambda rng, task: rng.random((9, task.outputs)) < 0.5,
    "next_token": lambda rng, task: rng.integers(-1, task.outputs, (9, 4)).astype(np.int32),
}


@cases("Task")
def test_task(make: Make) -> None:
    """A group's sums are those of its samples alone; what is of no group may be NaN."""
    task, rng = make(), np.random.default_rng(0)
    y = TARGETS[known(task.origin).name](rng, task)
    task.check("y", y)
    outputs = rng.normal(size=(9, *task.shape(y.shape[1:]))).astype(np.float32)
    outputs[5] = np.nan
    group = np.array([0, 1, 0, 0, 1, 3, 1, 0, 1], np.int32)

    def sums(outputs: jax.Array, y: jax.Array, group: jax.Array, groups: int) -> base.Sums:
        chex.assert_type(task.loss(outputs, y), jnp.float32)
        weight = jnp.ones(len(y), jnp.int32) if task.weight is None else task.weight(y)
        kept = (task.loss(outputs, y), weight)
        loss, total = fs.tasks.add_up(kept, group, groups)
        return base.Sums(loss, total, task.sums(task.answers(outputs, y), y, group, groups))

    together = jax.jit(functools.partial(sums, groups=3))(outputs, y, group)
    scores = task.scores(jax.tree.map(np.asarray, together))
    assert set(scores) == set(task.metrics)
    assert task.score in task.metrics
    for g in range(3):
        mine = group == g
        alone = jax.jit(functools.partial(sums, groups=1))(outputs, y, (~mine).astype(np.int32))
        same_form(jax.tree.map(lambda a, g=g: a[g], together), jax.tree.map(lambda a: a[0], alone))
        for name, values in task.scores(jax.tree.map(np.asarray, alone)).items():
            np.testing.assert_allclose(scores[name][g], values[0], rtol=1e-5, err_msg=name)
            assert values.dtype == np.float64
            assert np.isnan(values[0]) == (g == 2), name


@cases("Transform")
def test_transform(make: Make, crowd: ClientData) -> None:
    part = make()
    batch = minibatch(part.origin.name, crowd)
    visit = dataclasses.replace(view(crowd, 1, peers=True), round=jnp.int32(0))
    out = jax.jit(part)(KEY, batch, visit)
    same_form(out._replace(peer=None), batch)
    if out.peer is not None:
        chex.assert_shape(out.peer.x, batch.x.shape[1:])
        chex.assert_type([out.peer.x, out.peer.y, out.peer.mask], [jnp.float32, jnp.int32, bool])


@cases("Objective")
def test_objective(make: Make, crowd: ClientData, start: Variables) -> None:
    batch = mixup.peer_means(3)(KEY, minibatch("", crowd), view(crowd, 1, peers=True))
    covers = fs.exchange.widths(net(), (1.0, 0.5))
    client = dataclasses.replace(view(crowd, 1), round=jnp.int32(0), coverage=covers)
    context = context_of(start.params)._replace(memory=start, client=client)
    loss, state = jax.jit(make())(start.params, start.state, batch, context)
    chex.assert_shape(loss, ())
    chex.assert_type(loss, jnp.float32)
    same_form(state, start.state)


@cases("Score")
def test_score(make: Make, crowd: ClientData, start: Variables) -> None:
    scored = jax.jit(make())
    for client in (4, N):
        value = scored(start, view(crowd, client))
        chex.assert_shape(value, ())
        chex.assert_type(value, jnp.float32)
        assert (value > 0) == (client < N)


@cases("Compressor")
def test_compressor(make: Make) -> None:
    part, x = make(), jax.random.normal(KEY, (50,))
    got = jax.jit(part.compress)(KEY, x)
    same_form(got, x)
    chex.assert_tree_all_finite(jax.jit(part.compress)(KEY, jnp.zeros(50)))
    assert isinstance(part.bytes(50), int)
    decoded, size = jax.jit(part.measure)(KEY, x)
    assert_trees(decoded, got)
    assert 0 < int(size) <= part.bytes(50) <= 4 * 50
    assert int(size) < 4 * 50
    assert part.measured or size == part.bytes(50)


@cases("Sending")
def test_sending(make: Make, crowd: ClientData, start: Variables) -> None:
    """Client by client, then the stack: the rows that do not send hold NaN, or a number."""
    part = make()
    before, message = part.init(start, crowd), ({"c": jnp.ones(3)}, jnp.int32(4))
    if part.hear is not None:
        same_form(jax.jit(part.hear)(before, start), before)
    for k in (0, 1):  # the second is malicious
        sent = jax.jit(part.send)(KEY, before, start, message, jnp.int32(k))
        same_form(sent.update, start)
        same_form(sent.message, message)
        same_form(sent.kept, before)
        same_form(jnp.asarray(sent.present), True)
        assert (sent.bytes is None) != part.measured
        chex.assert_tree_all_finite(sent.update)
        # Counters are not forged, nor are running statistics.
        assert sent.message[1] == 4
        assert_trees(sent.update.state, start.state)
    if part.bytes is not None:
        assert isinstance(part.bytes(start), int)
        assert 0 < part.bytes(start) <= fs.tree.num_bytes(start)
    if part.together is None:
        return
    client, sends = jnp.array([4, 0, 1, 3, 5, N], jnp.int32), jnp.arange(ROWS) < ROWS - 2

    def all_sent(absent: Any) -> Any:
        return jax.jit(part.together)(KEY, stack_of(start, absent=absent), client, sends)

    stack, others = all_sent(jnp.nan), all_sent(0.5)
    same_form(stack, stack_of(start))
    assert_trees(*(jax.tree.map(lambda a: a[:-2], rows) for rows in (stack, others)))
    chex.assert_tree_all_finite(jax.tree.map(lambda a: a[:-2], stack))


@cases("Finish")
def test_finish(make: Make, crowd: ClientData, start: Variables) -> None:
    """A client without samples adds nothing."""
    part = make()
    told, nothing = (jax.jit(part.tell)(start, view(crowd, k)) for k in (3, N))
    same_form(told, nothing)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(nothing))
    moved = jax.jit(part.move)(KEY, start, told)
    same_form(moved, start)
    chex.assert_tree_all_finite(moved)


@cases("Personal")
def test_personal(make: Make, crowd: ClientData, start: Variables) -> None:
    local = fs.local.ditto(update().change(companion=companion()), 0.1)
    own = fs.personal.adaptive_start(local, risk(), fs.leaves.head(net())).client_state(start)
    same_form(jax.jit(make())(KEY, start, view(crowd, 3), own), start)


# -- the server --


@cases("Broadcast")
def test_broadcast(make: Make, crowd: ClientData, start: Variables) -> None:
    part = make()
    before, client = part.init(start, crowd), view(crowd, 3)
    model, tag = jax.jit(part.send)(KEY, before, start, client)
    same_form(model, start)
    evaluated, without = jax.jit(functools.partial(part.send, None))(before, start, client)
    same_form(evaluated, start)
    same_form(without, tag)
    if part.offered is not None:
        offered = jax.jit(part.offered)(before)
        chex.assert_shape(offered, ())
        chex.assert_type(offered, jnp.int32)
    tags = jax.tree.map(lambda a: jnp.zeros((ROWS, *a.shape), a.dtype), tag)

    moved_on = jax.jit(lambda *arguments: part.update(*arguments, fs.aggregators.mean))

    def after(absent: Any) -> Any:
        updates, cohort = stack_of(start, absent=absent), cohort_of(start, crowd, absent, tags)
        # Of a broadcast with several models each row knows its own.
        known = jax.tree.map(lambda a: jnp.repeat(a, ROWS, axis=0), cohort.received)
        gathered = Gathered(updates, WEIGHTS, cohort._replace(received=known))
        return moved_on(before, start, gathered)

    new = after(jnp.nan)
    same_form(new, before)
    chex.assert_tree_all_finite(new)
    assert_trees(new, after(0.5))


@cases("Refresh")
def test_refresh(make: Make, start: Variables) -> None:
    local, correct = jax.tree.map(lambda a: a + 1, start), make().correct
    if correct is not None:  # else the model in flight stays as it is
        same_form(jax.jit(correct)(start, jnp.float32(9), local, jnp.float32(3)), start)


@cases("Weighting")
def test_weighting(make: Make) -> None:
    weights = jax.jit(make())(jnp.array([3, 0, 5], jnp.int32), jnp.array([3, 0, 9], jnp.int32))
    chex.assert_shape(weights, (3,))
    chex.assert_type(weights, jnp.float32)
    assert (weights >= 0).all()


@cases("PreAggregation")
def test_preaggregation(make: Make, crowd: ClientData, start: Variables) -> None:
    """Rows of weight 0 hold NaN, or a number: it makes no difference to the others."""
    part = make()
    before = part.init(start, crowd)

    def applied(absent: Any) -> Any:
        updates, cohort = stack_of(start, absent=absent), cohort_of(start, crowd, absent)
        return jax.jit(part.apply)(KEY, before, updates, WEIGHTS, cohort)

    updates, weights, after = applied(jnp.nan)
    same_form(updates, stack_of(start))
    same_form(weights, WEIGHTS)
    same_form(after, before)
    assert (weights >= 0).all()
    present = np.flatnonzero(np.asarray(weights) > 0)
    rows = jax.tree.map(lambda a: a[present], updates)
    chex.assert_tree_all_finite((rows, after))
    others, same_weights, same_after = applied(0.5)
    assert_trees(rows, jax.tree.map(lambda a: a[present], others))
    assert_trees((weights, after), (same_weights, same_after))


@cases("Aggregator")
def test_aggregator(make: Make, start: Variables) -> None:
    reduced = jax.jit(make())(stack_of(start), WEIGHTS)
    same_form(reduced, start)
    chex.assert_tree_all_finite(reduced)


@cases("Server")
def test_server(make: Make, crowd: ClientData, start: Variables) -> None:
    part, step = make(), jax.tree.map(jnp.ones_like, start)
    before = part.init(start)

    def updated(absent: Any) -> Any:
        cohort = cohort_of(start, crowd, absent)
        gathered = Gathered(stack_of(start, absent=absent), WEIGHTS, cohort)
        return jax.jit(part.update)(KEY, step, start, before, gathered)

    taken, after = updated(jnp.nan)
    same_form(taken, start)
    chex.assert_tree_all_finite((taken, after))
    assert_trees((taken, after), updated(0.5))
    same_form(after, before)
    if part.download_bytes is not None:
        whole = sum(a.nbytes for a in jax.tree.leaves(start))
        assert 0 < part.download_bytes(start, 1) <= part.download_bytes(start, 99) <= whole


@cases("Diagnostic")
def test_diagnostic(make: Make, crowd: ClientData, start: Variables) -> None:
    """Here the last row alone visited no client."""
    part, server = make(), jax.tree.map(lambda a: a + 1, start)
    before = part.init(start, crowd)

    def measured(absent: Any) -> Any:
        models = jax.tree.map(
            lambda a: a.at[-2].set(a[0]).at[-1].set(absent), stack_of(start, absent=0.5)
        )
        return jax.jit(part.measure)(KEY, before, server, models, cohort_of(start, crowd))

    numbers, after = measured(jnp.nan)
    same_form(after, before)
    chex.assert_shape(list(numbers.values()), ())
    chex.assert_type(list(numbers.values()), jnp.float32)
    chex.assert_tree_all_finite((numbers, after))
    assert_trees((numbers, after), measured(0.5))


def test_a_cohort_says_which_rows_are_there() -> None:
    """Of six slots four train, on four devices: four of eight rows have no client."""

    class Rows(base.Diagnostic):
        def measure(self, key: Any, state: Any, server: Any, models: Any, cohort: Cohort) -> Any:
            chex.assert_shape([cohort.client, cohort.present, cohort.samples], (8,))
            chex.assert_type([cohort.client, cohort.present, cohort.samples], [int, bool, int])
            chex.assert_trees_all_equal_shapes_and_dtypes(
                jax.tree.map(lambda a: a[0], models), cohort.server
            )
            known = (cohort.client < cohort.data.clients) == cohort.present
            sized = (cohort.samples > 0) == cohort.present
            found = {"present": jnp.sum(cohort.present), "agree": jnp.sum(known & sized)}
            return {name: number.astype(jnp.float32) for name, number in found.items()}, state

    algorithm = fs.compose(
        update(),
        selection=fs.selection.uniform(active=4),
        clients_per_round=6,
        flight=fs.flight.delayed(2, redistribution=fs.redistribution.permute),
        diagnostics={"rows": Rows()},
    ).on(fs.make_execution(devices=4))
    run = play(algorithm, net(), make_federation().data, 2)
    assert [m.diagnostics for m in run.metrics] == [{"present": 4, "agree": 8}] * 2
    chex.assert_shape(run.states[-1].slots.client, (6,))
    assert (run.states[-1].slots.client == N).sum() == 2


# ---- the state of a run, on any number of devices (its form for all methods: test_flags.py) ----

UNEQUAL = (5, 17, 33, 9, 24, 16, 40, 12, 1, 28, 7)
COHORT, ROUNDS = 6, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "phase_shift": {"phases": 3},
    "radfed": {"redistribution_rounds": 3, "active_clients": 4},
    "push_sum": {},
    "dada": {},
    "scaffold": {},
    "fedasync": {"buffer_size": 2},
    "ifca": {"clusters": 3},
    "fedamp": {},
    "fedfomo": {},
    "astraea": {"mediator_size": 2},
    "fedbn": {"norms": "*bias"},  # the network has no norms
    "streaming_diloco": {"fragments": 1},  # of its one layer
    "scaffnew": {"clients_per_round": len(UNEQUAL)},
}
METHODS = some_slow(["phase_shift", "dada", "fedasync", "streaming_diloco"])
"""Results of each shape of round on any number of devices: tests/test_methods.py."""


def named(name: str, local: LocalUpdate, **options: Any) -> fs.Algorithm:
    """A method with what the command would fill in."""
    common = stand_in(
        net(), local=local, objective=risk(), classes=LABELS, momentum=0.5,
        clients_per_round=COHORT, clock=fs.clock.simulated(0.5, deadline=60.0),
    )  # fmt: skip
    return make(name, common, **(OPTIONS.get(name, {}) | options))


class Rounds:
    """A method on some devices, round by round; states come and go as NumPy arrays."""

    def __init__(self, name: str, devices: int) -> None:
        execution = fs.make_execution(devices=devices)
        algorithm = named(name, update()).on(execution)
        data = jax.device_put(make_federation(UNEQUAL).data, execution.replicated)
        self.begin = lambda: algorithm.init(KEY, net().init(KEY), data)
        self.step = jax.jit(
            lambda t, state: algorithm.step(jax.random.fold_in(KEY, t), state, data)
        )

    def run(self, state: Any, first: int, last: int) -> list[Any]:
        """States after each round, and what the rounds reported, from ``state`` on."""
        out = []
        for t in range(first, last):
            state, metrics = jax.device_get(self.step(t, state))
            out.append((state, metrics._replace(executed=())))  # which depends on the devices
        return out


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> dict[int, Rounds]:
    """The method on 1 and 4 devices, on which 6 models take 8 rows and 11 clients take 12."""
    return {devices: Rounds(request.param, devices) for devices in (1, 4)}


def alike(a: Any, b: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
    assert_trees(a, b, rtol=2e-5, atol=2e-5)


def test_states_are_the_same_on_any_number_of_devices(method: dict[int, Rounds]) -> None:
    """And a run that goes on on another number ends where it would have ended."""
    start = jax.device_get(jax.jit(method[1].begin)())
    chex.assert_trees_all_equal_shapes_and_dtypes(start, jax.eval_shape(method[4].begin))
    alone = method[1].run(start, 0, ROUNDS)
    chex.assert_trees_all_equal_shapes_and_dtypes(start, *(state for state, _ in alone))
    half = alone[ROUNDS // 2 - 1][0]
    several = method[4].run(start, 0, ROUNDS)
    alike(several, alone)
    alike(method[4].run(half, ROUNDS // 2, ROUNDS), alone[ROUNDS // 2 :])
    back = several[ROUNDS // 2 - 1][0]
    alike(method[1].run(back, ROUNDS // 2, ROUNDS), alone[ROUNDS // 2 :])


# ---- algorithms that know their parts ----


@pytest.mark.parametrize("name", ALGORITHMS)
def test_repr_fits_a_screen(name: str) -> None:
    algorithm = named(name, update())
    lines = repr(algorithm).splitlines()
    assert lines[0] == f"{name}("
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 220
    assert "0x" not in repr(algorithm)  # no addresses
    roles = [field.name for field in dataclasses.fields(algorithm.parts)]
    assert [line.split("=")[0].strip() for line in lines[1:-1]] == [
        role for role in roles if f"\n  {role}=" in repr(algorithm)
    ]


def test_repr_tells_what_differs() -> None:
    local = fs.local_sgd(risk(), optax.sgd(0.1), epochs=2, corrections=(fs.corrections.scaffold(),))
    algorithm = fs.compose(
        local,
        selection=fs.selection.uniform(),
        clients_per_round=10,
        flight=fs.flight.delayed(rounds=3),
        sending=[fs.sending.clip_norm(2.0)],
        aggregator=fs.aggregators.trimmed_mean(0.1),
    )
    assert repr(algorithm).splitlines() == [
        "compose(",
        "  local=local_sgd(empirical_risk(<Model>), <optax>, epochs=2, corrections=(scaffold(),)),",
        "  clients_per_round=10,",
        "  selection=uniform(),",
        "  flight=delayed(3),",
        "  sending=(clip_norm(2.0),),",
        "  aggregator=trimmed_mean(beta=0.1),",
        ")",
    ]
    median = algorithm.replace(aggregator=fs.aggregators.coordinate_median)
    assert "  aggregator=coordinate_median," in repr(median).splitlines()


def test_replace_exchanges_a_part_and_no_other() -> None:
    execution = fs.make_execution(devices=1)
    plain = fs.algorithms.scaffold(update(), clients_per_round=3).on(execution)
    clip, median = fs.sending.clip_norm(0.5), fs.aggregators.coordinate_median
    robust = plain.replace(sending=(clip,), aggregator=median)
    before, after = plain.parts.by_role(), robust.parts.by_role()
    assert [role for role in before if before[role] != after[role]] == ["sending", "aggregator"]
    assert robust.replaced == ("sending", "aggregator")
    assert robust.origin is plain.origin
    again = robust.replace(aggregator=fs.aggregators.mean)
    assert again.replaced == ("sending", "aggregator")
    data = jax.device_put(make_federation().data)

    def program(algorithm: fs.Algorithm) -> tuple[str, list[Any]]:
        def run() -> Any:
            return algorithm.step(KEY, algorithm.init(KEY, net().init(KEY), data), data)

        traced = jax.make_jaxpr(run)()
        return re.sub("0x[0-9a-f]+", "", str(traced)), traced.consts

    given = {role: part for role, part in after.items() if role != "execution"}
    ours, theirs = program(robust), program(fs.compose(**given).on(execution))
    assert ours[0] == theirs[0]
    assert_trees(ours[1], theirs[1])


def test_replace_refuses_what_is_no_part() -> None:
    plain = fs.fedavg(update(), clients_per_round=3)
    with pytest.raises(
        TypeError,
        match="aggregation is not a part of an algorithm: one of local, clients_per_round, sel",
    ):
        plain.replace(aggregation=fs.aggregators.mean)
    with pytest.raises(ValueError, match="server must be a Server, got the class replace"):
        plain.replace(server=fs.server.replace)
    with pytest.raises(ValueError, match="server must be a Server, got 0"):
        plain.replace(server=0)


def test_a_part_refuses_parts_that_are_not_called() -> None:
    make, top_k = fs.sending.compressed, fs.compression.top_k
    message = "compressor must be a part, got the class top_k: use top_k"
    with pytest.raises(ValueError, match=message):
        make(top_k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        make(compressor=top_k)  # type: ignore[arg-type]


def test_a_part_that_has_the_name_of_a_default_is_shown() -> None:
    def mean(stacked: Any, weights: Any) -> Any:
        return fs.tree.mean(stacked, weights)

    plain = fs.compose(update(), 3)
    assert "aggregator" not in repr(plain)
    assert "\n  aggregator=mean,\n" in repr(plain.replace(aggregator=mean))


def test_a_wrong_call_of_a_part_names_its_function() -> None:
    with pytest.raises(TypeError, match=r"^fedavg\(\) missing .*: 'clients_per_round'"):
        fs.fedavg(update())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^delayed.__init__\(\) got an unexpected .* 'num_rounds'"):
        fs.flight.delayed(3, num_rounds=2)  # type: ignore[call-arg]


# ---- what compose refuses ----


def composed(**parts: Any) -> fs.Algorithm:
    """FedAvg with other parts."""
    plain: dict[str, Any] = {
        "local": update(),
        "selection": fs.selection.uniform(),
        "clients_per_round": 4,
    }
    return fs.compose(**(plain | parts)).on(fs.make_execution(1))


class reporter(base.Diagnostic):
    name: str

    def measure(self, key: Any, state: Any, server: Any, models: Any, cohort: Any) -> Any:
        return {self.name: jnp.float32(1)}, state


def corrected(*terms: base.Correction, **settings: Any) -> LocalUpdate:
    return update().change(corrections=terms, **settings)


def feddyn(**parts: Any) -> dict[str, Any]:
    """FedDyn's parts with others."""
    plain = {
        "local": corrected(fs.corrections.dynamic(0.1)),
        "weighting": fs.weighting.equal,
        "server": fs.server.dynamic(0.1),
    }
    return plain | parts


FEDADMM = {
    "local": fs.local.fedadmm(corrected(fs.corrections.dynamic(0.1))),
    "server": fs.server.participation(),
}
IFCA = fs.broadcast.ifca(2, risk())
FEDDF = fs.server.distilled(net())
FEDLESAM = update().change(memory=fs.terms.last_received())
TWO_ROUNDS = {"flight": fs.flight.delayed(2)}
ONE_BY_ONE = {
    "flight": fs.flight.buffered(2),
    "clock": fs.clock.simulated(1.0, fs.clock.bandwidth(9.0, 9.0)),
}


def delayed(**settings: Any) -> dict[str, Any]:
    return {"flight": fs.flight.delayed(2, **settings)}


def gathering(source: Any) -> Any:
    """A redistribution by these slots."""
    return lambda key, slots: fs.redistribution.Gather(jnp.asarray(source, jnp.int32))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Of the wrong kind, in every role.
    "local": ({"local": risk}, "local must be a LocalUpdate, got <functools"),
    "selection": (
        {"selection": fs.selection.uniform}, "selection must be a Selection, got the class uniform",
    ),
    "clients_per_round": ({"clients_per_round": 0}, "clients_per_round must be at least 1, got 0"),
    "flight": ({"flight": 4}, "flight must be a Flight, got 4"),
    "broadcast": (
        {"broadcast": fs.broadcast.latest}, "broadcast must be a Broadcast, got the class latest",
    ),
    "redistribution": (
        delayed(redistribution="permute"), "redistribution must be a function, got 'permute'",
    ),
    "refresh": (
        delayed(refresh="drift"), "refresh must be a Refresh, got 'drift'"
    ),
    "exchange": (
        {"exchange": fs.exchange.everything},
        "exchange must be an Exchange, got the class everything",
    ),
    "sending": (
        {"sending": fs.sending.clip_norm(1.0)},
        "sending must be a sequence of parts, such as (part,), got clip_norm(1.0)",
    ),
    "of sending": (
        {"sending": [preaggregation.trust(update())]}, "sending must be a sequence of Sending, got",
    ),
    "weighting": ({"weighting": "equal"}, "weighting must be a function, got 'equal'"),
    "preaggregation": (
        {"preaggregation": preaggregation.agnostic(0.1)},
        "preaggregation must be a sequence of parts, such as (part,), got agnostic(0.1)",
    ),
    "of preaggregation": (
        {"preaggregation": (fs.sending.clip_norm(1.0),)},
        "preaggregation must be a sequence of PreAggregation, got clip_norm(1.0)",
    ),
    "aggregator": ({"aggregator": "mean"}, "aggregator must be a function, got 'mean'"),
    "no aggregator": ({"aggregator": None}, "aggregator must be a function, got None"),
    "server": ({"server": fs.server.replace}, "server must be a Server, got the class replace"),
    "diagnostics": (
        {"diagnostics": [fs.diagnostics.model_divergence()]},
        "diagnostics must be a dict of parts by name, got [model_divergence()]",
    ),
    "of diagnostics": (
        {"diagnostics": {"DL": fs.diagnostics.model_divergence}},
        "diagnostics['DL'] must be a Diagnostic, got the class model_divergence",
    ),
    "finish": (
        {"finish": fs.finish.calibrated}, "finish must be a Finish, got the class calibrated"
    ),
    "personal": ({"personal": "stored"}, "personal must be a function, got 'stored'"),
    "clock": (
        {"clock": fs.clock.simulated}, "clock must be a Clock, got the class simulated",
    ),
    "weights that are none": (
        {"weighting": lambda samples, visited: jnp.log(samples)},
        "weighting must give each model a positive finite number, <lambda> gave [0.0, 3.68",
    ),
    "absent rows": (
        {"aggregator": lambda rows, weights: jax.tree.map(lambda a: a.mean(0), rows)},
        "aggregator must leave out rows of weight 0, as there are on several devices: their values",
    ),
    # Slots that there are not: indexing would clamp them.
    "slot 99": (
        delayed(redistribution=gathering([0, 99, 1, 2])),
        "redistribution must give each of the 4 slots one of 0..3, <lambda> gave [0, 99, 1, 2]",
    ),
    "slot -1": (
        delayed(redistribution=gathering([0, -1, 1, 2])), "<lambda> gave [0, -1, 1, 2]",
    ),
    "three slots": (delayed(redistribution=gathering([0, 1, 2])), "gave [0, 1, 2]"),
    # Parts that would do nothing, or another thing than they say.
    "phases of clients that leave": (
        {"flight": fs.flight.staggered(2)},
        "flight staggered(2) needs slots that keep their clients, selection is uniform(): use "
        "selection=uniform(sticky=True)",
    ),
    "pulls on models that left their client": (
        delayed(refresh=fs.flight.drift_correction()),
        "refresh drift_correction() needs slots that keep their clients, selection is uniform()",
    ),
    "attacks on no model": (
        {"exchange": fs.exchange.nothing(), "sending": [fs.sending.ipm(MALICIOUS)]},
        "needs a model that is sent, exchange is nothing(): use exchange=everything()",
    ),
    "a rule for no rows": (
        {"exchange": fs.exchange.nothing(), "aggregator": fs.aggregators.coordinate_median},
        "aggregator coordinate_median has no effect with exchange nothing(), by which no model is",
    ),
    "weights of no rows": (
        {"exchange": fs.exchange.nothing(), "weighting": fs.weighting.equal},
        "weighting equal has no effect with exchange nothing(), by which no model is sent",
    ),
    # A server that follows what clients keep.
    "FedDyn with two alphas": (
        feddyn(server=fs.server.dynamic(0.5)), "needs the same alpha, server is dynamic(0.5): use",
    ),
    "FedDyn without clients": (
        feddyn(local=update()), "server dynamic(0.1) needs clients with the same alpha, local is",
    ),
    "FedDyn without a server": (
        feddyn(server=fs.server.replace()), "needs the same alpha, server is replace(): use server",
    ),
    "FedDyn that withholds": (
        feddyn(sending=[fs.sending.relevant_only(0.5)]), "needs honest clients that send their",
    ),
    "FedDyn from another start": (
        feddyn(
            local=fs.personal.adaptive_start(
                corrected(fs.corrections.dynamic(0.1)), risk(), fs.leaves.head(net())
            )
        ), "needs clients that train from the model that they received, local is adaptive_start(",
    ),
    "FedDyn of what is frozen": (
        feddyn(exchange=fs.exchange.split(frozen=fs.leaves.head(net()))),
        "use exchange=everything(), or local.change(trained=...) without what is frozen",
    ),
    "FedADMM by samples": (FEDADMM, "needs clients that count equally, weighting is by_samples"),
    # One state for several models.
    "SCAFFOLD of clusters": (
        {"local": corrected(fs.corrections.scaffold()), "broadcast": IFCA},
        "corrections=(scaffold(),)) needs the server's latest model for all, broadcast is ifca(",
    ),
    # What is read of updates must be there.
    "an ensemble of scaled models": (
        {"server": FEDDF, "preaggregation": [preaggregation.trust(update())]},
        "needs pre-aggregations that change only the weights, preaggregation is (tr",
    ),
    "an ensemble without a guard": (
        {"server": FEDDF, "aggregator": fs.aggregators.coordinate_median},
        "server distilled(<Model>) needs the plain mean, aggregator is coordinate_median: use",
    ),
    "an ensemble of reflections": (
        FEDADMM | {"server": FEDDF, "weighting": fs.weighting.equal},
        "needs clients that send the model that they trained, local is fedadmm(local_sgd(",
    ),
    "a count of buckets": (
        {"server": fs.server.participation(), "preaggregation": [preaggregation.bucketing()]},
        "server participation() needs one client's update in each row, preaggregation is (bucket",
    ),
    "FedLESAM of clusters": (
        {"local": FEDLESAM, "broadcast": IFCA}, "needs the server's latest model for all, broadcas",
    ),
    "CMFL one by one": (
        {"sending": [fs.sending.relevant_only(0.5)], **ONE_BY_ONE},
        "relevant_only(0.5) needs a clock without a link if models return one by one, as its mess",
    ),
    "a server that wraps the plain one": (
        {"broadcast": IFCA, "server": fs.server.sign_agreement(2, fs.server.replace())},
        "needs a server model that is replaced by the aggregate, server is sign_agreement(2, repl",
    ),
    "mediators of other slots": (
        {"selection": fs.selection.mediators(3, 2, LABELS)},
        "selection mediators(3, 2, 3) needs exactly 3 slots, clients_per_round is 4",
    ),
    "groups of fewer slots": (
        {"broadcast": fs.broadcast.dynamic(90.0, "angle", 3, risk())},
        "needs at most 3 slots, clients_per_round is 4: use clients_per_round=3",
    ),
    "no cohort": (
        {"clients_per_round": None}, "clients_per_round must be a whole number at least 1, got N",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_compose_refuses_in_one_line(case: str) -> None:
    parts, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        composed(**parts)
    assert len(str(caught.value).splitlines()) == 1
    plain = composed()
    with pytest.raises(ValueError, match=re.escape(message)):  # another way in
        plain.replace(**parts)


def test_a_part_is_what_it_promises_whatever_its_name() -> None:
    class replace(fs.server.mix):
        pass

    class promising(replace):
        replaces = True

    with pytest.raises(
        ValueError, match=r"needs a server model that is replaced .* replace\(0.5\)"
    ):
        composed(broadcast=IFCA, server=replace(0.5))
    composed(broadcast=IFCA, server=promising(0.5))


def test_halves_of_a_method_may_be_traced() -> None:
    """A sweep over α gives both of FedDyn's halves the same number, which nobody knows."""
    jax.eval_shape(
        lambda alpha: (
            composed(
                **feddyn(
                    local=corrected(fs.corrections.dynamic(alpha)), server=fs.server.dynamic(alpha)
                )
            ).slots
        ),
        jnp.float32(0.1),
    )


def test_rows_that_weigh_nothing_are_left_out() -> None:
    """By a sum of weighted rows too; a rule that needs another model is not judged."""
    composed(aggregator=lambda rows, weights: jax.tree.map(lambda a: weights @ a, rows))
    composed(aggregator=lambda rows, weights: {"mine": rows["mine"].mean(0)})


def test_every_role_is_checked() -> None:
    roles = {field.name for field in dataclasses.fields(composed().parts)}
    assert roles - {"execution"} <= set(REFUSED)  # which compose does not take


@pytest.mark.parametrize("share", [0.1, 0.2, 1 / 3, 0.45])
def test_a_cohort_is_large_enough_for_its_rule(share: float) -> None:
    """With f = ⌊share n⌋, a model at least: Krum's proof asks for n > 2f + 2, a trim for 2f + 1."""

    def fits(rule: base.Aggregator, slots: int) -> bool:
        try:
            composed(aggregator=rule, clients_per_round=slots)
        except ValueError as error:
            line = rf"aggregator \w+\(.*\) needs a larger .* clients_per_round is {slots}:"
            if re.match(line, str(error)) is None:
                raise
            return False
        return True

    krum, trimmed = fs.aggregators.krum(share), fs.aggregators.trimmed_mean(share)
    for slots in range(1, 24):
        f = int(share * slots + 1e-9)
        assert fits(krum, slots) == (f >= 1 and slots > 2 * f + 2)
        assert fits(fs.aggregators.multi_krum(share), slots) == fits(krum, slots)
        assert fits(trimmed, slots) == (f >= 1)
        assert fits(fs.aggregators.krum(0.0), slots)
        assert fits(fs.aggregators.coordinate_median, slots)


def test_the_models_that_meet_count_and_not_those_in_flight() -> None:
    phases: dict[str, Any] = {"selection": fs.selection.uniform(sticky=True)}
    rule = fs.aggregators.trimmed_mean(0.2)
    phases["flight"] = fs.flight.staggered(2)
    composed(aggregator=rule, clients_per_round=10, **phases)
    with pytest.raises(ValueError, match="clients_per_round is 8"):  # 4 are collected together
        composed(aggregator=rule, clients_per_round=8, **phases)


def test_two_diagnostics_with_one_name_are_refused(federation: Federation) -> None:
    algorithm = composed(diagnostics={"a": reporter("loss"), "b": reporter("loss")})
    message = "diagnostics must report different names, 'b' and an earlier one report 'loss'"
    with pytest.raises(ValueError, match=message):
        play(algorithm, net(), federation.data, 1)


@pytest.mark.parametrize("role", ["preaggregation", "selection"])
def test_a_number_that_no_client_reports_is_refused(federation: Federation, role: str) -> None:
    """A typo in ``reads``, which would only count as traffic."""
    part: Any
    if role == "selection":
        part = promising(fs.selection.uniform(), reads=("initial_los",))
        algorithm = composed(local=fs.local.with_initial_loss(update(), risk()), selection=part)
    else:
        part = promising(preaggregation.agnostic(0.1), reads=("initial_los",))
        local = fs.local.with_initial_loss(update(), risk())
        algorithm = composed(local=local, preaggregation=(part,))
    message = (
        f"{role} {fs.base.shown(part)} needs clients that report initial_los, local is "
        "with_initial_loss(local_sgd("
    )
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        algorithm.init(KEY, net().init(KEY), jax.device_put(federation.data))
    assert "which reports initial_loss, loss, samples, steps: see fs.reports" in str(caught.value)


# ---- local updates lose nothing ----


class sending_first(base.Wrapper):
    def setup_traffic(self, variables: Any, data: Any) -> SetupTraffic:
        count = self.local.setup_traffic
        up, down = (0, 0) if count is None else count(variables, data)
        return SetupTraffic(up + 7, down + 11)


def marked() -> LocalUpdate:
    """A wrapper of the user's, which a change must keep."""
    return sending_first(update())


WRAPPERS: dict[str, Callable[[LocalUpdate], LocalUpdate]] = {
    "in_turn": lambda local: fs.local.in_turn(local),
    "adaptive_start": lambda local: fs.personal.adaptive_start(
        local, risk(), fs.leaves.head(net())
    ),
    "two": lambda local: fs.local.with_importance(fs.local.with_initial_loss(local, risk()), score),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_changed_wrapper_is_the_wrapper_of_the_changed(
    name: str, crowd: ClientData, start: Variables
) -> None:
    wrapper, settings = WRAPPERS[name], {"epochs": 2, "batch_size": 4}
    after, before = wrapper(marked()).change(**settings), wrapper(marked().change(**settings))
    assert (after.epochs, after.batch_size, after.peers) == (2, 4, before.peers)
    assert after.setup_traffic is not None
    assert after.setup_traffic(start, crowd) == SetupTraffic(7, 11)
    if name != "in_turn":  # several optimisers, one after another, have no common response
        assert after.response is not None
        assert after.response(2) == pytest.approx([0.1, 0.25])  # 0.1, then 0.1 (1 + 0.5) more
    assert int(after.steps_for(17)) == 2 * 5
    client = view(crowd, 3, peers=after.peers)
    ends = [
        jax.jit(local.train)(
            KEY, start, client, local.client_state(start), local.shared_state(start)
        )
        for local in (after, before)
    ]
    assert_trees(ends[0], ends[1])
    # Once more, on top of that change.
    more = after.change(corrections=(fs.corrections.proximal(0.5),))
    assert more.setup_traffic is not None
    assert more.setup_traffic(start, crowd) == SetupTraffic(7, 11)
    assert more.epochs == 2
    assert [fs.base.shown(term) for term in more.corrections] == ["proximal(0.5)"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_methods_keep_what_a_local_update_brings(
    name: str, crowd: ClientData, start: Variables
) -> None:
    """Six of them change it, and FedMix's exchange of means was lost in those once."""
    if name in ("dp_fedavg", "dp_ftrl", "dp_sgd", "favor"):
        with pytest.raises(ValueError, match="needs clients that see no samples of others"):
            named(name, marked())
        return
    plain, ours = (named(name, local) for local in (update(), marked()))
    before, after = (a.setup_traffic(start, crowd) for a in (plain, ours))
    assert (after.up - before.up, after.down - before.down) == (7, 11)


def test_fedmix_keeps_its_traffic(crowd: ClientData, start: Variables) -> None:
    local = named("fedmix", update()).parts.local
    means = mixup.peer_means(keywords(ALGORITHMS["fedmix"])["mix_samples"].default)
    exchanged = means.setup_traffic(start, crowd)
    for changed in (local.change(epochs=3), local.change(batch_size=4).change(epochs=3)):
        assert changed.setup_traffic is not None
        assert changed.setup_traffic(start, crowd) == exchanged
        assert changed.peers
    assert named("fedprox", local).setup_traffic(start, crowd) == exchanged


# ---- random streams ----


STREAMS = {
    "Seed": {"WEIGHTS": 0, "ROUNDS": 1},
    "Weights": {"ADAPTER": 2**30},
    "Round": {
        "SELECTION": 0,
        "REDISTRIBUTION": 1,
        "CLIENTS": 2,
        "PREAGGREGATION": 3,
        "SERVER": 4,
        "PERSONAL": 5,
        "DIAGNOSTIC": 6,
        "DISPATCH": 2**30 - 6,
        "POLL": 2**30 - 5,
        "AWAKE": 2**30 - 4,
        "LOST": 2**30 - 3,
        "FINISH": 2**30 - 2,
        "COIN": 2**30 - 1,
        "DEAL": 2**30,
        "SENDING": 2**30 + 1,
    },
    "Dispatch": {"CLIENT": 0, "AWAKE": 1, "LOST": 2},
    "Client": {
        "EPOCH": 0,
        "TURN": 2**30,
        "STRAGGLER": 2**31 - 10,
        "FIRST_VISIT": 2**31 - 9,
        "FINAL_LOSS": 2**31 - 8,
        "AGREEMENT": 2**31 - 7,
        "TICKET": 2**31 - 6,
        "MIXING": 2**31 - 5,
        "INITIAL_LOSS": 2**31 - 4,
        "COMPRESSION": 2**31 - 3,
        "WHOLE_GRADIENT": 2**31 - 2,
        "BROADCAST": 2**31 - 1,
    },
    "Device": {"COMPUTE": 0, "UP": 1, "DOWN": 2},
    "Epoch": {"STEP": 1},
    "Step": {
        "TRANSFORM": 2**30,
        "PSEUDO_LABELS": 2**31 - 7,
        "WIDTH": 2**31 - 6,
        "PRIVATE": 2**31 - 5,
        "ROUNDING": 2**31 - 4,
        "LAYER": 2**31 - 3,
        "ADAPTATION": 2**31 - 2,
        "NOISE": 2**31 - 1,
    },
}


def test_random_streams_never_change() -> None:
    """A result is only repeated by the numbers that it was drawn with."""
    levels: dict[str, Any] = {
        name: level for name, level in vars(streams).items() if isinstance(level, enum.EnumMeta)
    }
    tables = {
        name: {stream.name: int(stream) for stream in level} for name, level in levels.items()
    }
    assert tables == STREAMS


class counted(base.Task):
    """A user's task with a setting that has the name of a promise."""

    classes: int


def test_a_setting_may_have_the_name_of_a_hook() -> None:
    """It has no default: the role's property is not taken for one."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'classes'"):
        counted()  # type: ignore[call-arg]
    part = counted(3)
    assert (part.classes, str(part), part.replace(classes=4)) == (3, "counted(3)", counted(4))
    assert not hasattr(counted, "classes")
    assert fs.tasks.regression().classes is None
