"""A mixture of parts means what it says, or is refused in a line that names two of them."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import mixture
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim.base import (
    Array,
    Batch,
    Cohort,
    Context,
    Diagnostic,
    FedState,
    Metrics,
    PyTree,
    Variables,
)

SLOTS = 4
REFUSED = re.compile(
    r"(?P<one>\w+(\[.+\])?) .+ (needs|has no effect with) .*\b(?P<other>\w+) .*: (use|see) .+"
)
ROLES = {
    "local", "clients_per_round", "selection", "flight", "broadcast", "redistribution", "refresh",
    "sending",
    "preaggregation", "aggregator", "server", "exchange",
}  # fmt: skip


def objective(
    params: PyTree, state: PyTree, batch: Batch, context: Context
) -> tuple[Array, PyTree]:
    """½ Σ d (w - x)², and statistics that go halfway to the samples in every step."""
    w = jnp.concatenate([params["first"], params["second"]])
    square = jnp.sum(mixture.CURVE[None] * (w[None] - batch.x) ** 2, axis=1)
    count = jnp.sum(batch.mask).astype(jnp.float32)
    mean = jnp.sum(jnp.where(batch.mask[:, None], batch.x, 0), axis=0) / count
    moved = jax.tree.map(lambda s: 0.5 * s + 0.5 * mean[: len(s)], state)
    return 0.5 * jnp.sum(jnp.where(batch.mask, square, 0)) / count, moved


class ages(Diagnostic):
    """The staleness of each client's model, by client."""

    def measure(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], PyTree]:
        def of(k: int) -> Array:
            return jnp.sum(jnp.where(cohort.client == k, cohort.tag, 0)).astype(jnp.float32)

        return {f"age {k}": of(k) for k in range(mixture.N)}, state


FLIGHTS: dict[str, Any] = {
    "every_round": fs.flight.every_round,
    "delayed": functools.partial(fs.flight.delayed, 2),
    "staggered": functools.partial(fs.flight.staggered, 2),
    "serverless": fs.flight.serverless,
}
BROADCASTS: dict[str, Any] = {
    "latest": fs.broadcast.latest,
    "stale": lambda: fs.broadcast.stale(2),
    "ifca": lambda: fs.broadcast.ifca(2, objective),
}
REDISTRIBUTIONS: dict[str, Any] = {
    "keep": None,
    "permute": fs.redistribution.permute,
    "mix": fs.redistribution.mix(fs.redistribution.metropolis(fs.redistribution.ring(SLOTS))),
}
SENDING: dict[str, Any] = {
    "flip": lambda setting: fs.sending.sign_flip(mixture.MALICIOUS, setting),
    "alie": lambda setting: fs.sending.alie(mixture.MALICIOUS, setting),
    "ipm": lambda setting: fs.sending.ipm(mixture.MALICIOUS, 0.6),
    "mimic": lambda setting: fs.sending.mimic(mixture.MALICIOUS, 3),
    "clip": fs.sending.clip_norm,
    "top_k": lambda setting: fs.sending.compressed(
        fs.compression.top_k(0.4), feedback=bool(setting)
    ),
    "ternary": lambda setting: fs.sending.compressed(
        fs.compression.ternary(0.4), feedback=bool(setting)
    ),
}
PREAGGREGATIONS: dict[str, Any] = {
    "none": lambda rho, mu: (),
    "normalise": lambda rho, mu: (fs.preaggregation.normalise(mixture.LR, rho, mu),),
    "q_fair": lambda rho, mu: (fs.preaggregation.q_fair(0.5, mixture.LR, rho),),
    "agnostic": lambda rho, mu: (fs.preaggregation.agnostic(0.2),),
    "staleness": lambda rho, mu: (fs.preaggregation.staleness(0.6, "polynomial"),),
    "nearest": lambda rho, mu: (fs.preaggregation.nearest_neighbour_mixing(0.25),),
    "dp": lambda rho, mu: (fs.preaggregation.gaussian_mechanism(0.5, 0.0, SLOTS),),
}
AGGREGATORS: dict[str, Any] = {
    "mean": fs.aggregators.mean,
    "median": fs.aggregators.coordinate_median,
    "trimmed": fs.aggregators.trimmed_mean(0.25),
}
MOMENTUM = fs.server.optimizer(optax.sgd(0.5, momentum=0.5))
SERVERS: dict[str, Any] = {
    "replace": fs.server.replace(),
    "mix": fs.server.mix(0.7),
    "momentum": MOMENTUM,
    "signs": fs.server.sign_agreement(2, MOMENTUM),
    "code": fs.server.compress_server(fs.server.replace(), fs.compression.ternary(0.4)),
}
FIRST = fs.leaves.named("first")
EXCHANGES: dict[str, Any] = {
    "everything": fs.exchange.everything(),
    "own": fs.exchange.split(own=fs.leaves.named("second")),
    "fragments": fs.exchange.fragments(FIRST, fs.leaves.all_but(FIRST)),
}
CORRECTIONS: dict[str, Any] = {
    "none": lambda rho: (),
    "proximal": lambda rho: (fs.corrections.proximal(0.3),),
    "scaffold": lambda rho: (fs.corrections.scaffold(),),
    "client_momentum": lambda rho: (fs.corrections.client_momentum(0.4, mixture.LR, rho),),
}


def often(usual: str, choices: dict[str, Any]) -> Any:
    """The usual choice half of the time: mixtures of everything at once are mostly refused."""
    return st.one_of(st.just(usual), st.sampled_from(list(choices)))


@st.composite
def specs(draw: Any, *exchanges: str) -> dict[str, Any]:
    settings_of = {"flip": 2.0, "alie": 1.0, "clip": 0.5}
    allowed = st.sampled_from(exchanges) if exchanges else often("everything", EXCHANGES)
    exchange = draw(allowed)
    most = 0 if exchange == "fragments" else 2  # of the parts that fragments refuse
    names = draw(st.lists(st.sampled_from(list(SENDING)), max_size=most, unique=True))
    plan = draw(st.sampled_from(list(FLIGHTS)))
    steady = {"every_round": False, "delayed": exchange == "fragments"}.get(plan, True)
    spec = {
        "exchange": exchange,
        "sending": [(n, settings_of.get(n, draw(st.sampled_from([0, 1])))) for n in names],
        "momentum": draw(st.sampled_from([0.0, 0.5])),
        "optimizer_state": draw(st.sampled_from(["reset", "reset", "keep", "average"])),
        "correction": draw(often("none", CORRECTIONS)),
        "flight": plan,
        "sticky": draw(st.sampled_from([steady, steady, steady, not steady])),
        "broadcast": draw(often("latest", BROADCASTS)),
        "redistribution": draw(
            st.sampled_from(list(REDISTRIBUTIONS)) if plan != "every_round"
            else often("keep", REDISTRIBUTIONS)
        ),
        "refresh": draw(st.sampled_from(["nothing", "drift"] if plan == "staggered" else
                                        ["nothing", "nothing", "nothing", "drift"])),
        "weighting": draw(st.sampled_from(["equal", "by_samples", "by_samples_visited"])),
        "preaggregation": draw(often("none", PREAGGREGATIONS)),
        "aggregator": draw(often("mean", AGGREGATORS)),
        "server": draw(often("replace", SERVERS)),
        "evaluated": draw(st.sampled_from(["server", "server", "in_flight"])),
        "statistics": draw(st.booleans()),
    }  # fmt: skip
    if exchange == "fragments" and draw(st.sampled_from([True, True, False])):
        spec |= {"preaggregation": "none", "broadcast": "latest", "redistribution": "keep"}
        spec |= {"refresh": "nothing", "sticky": steady}
        spec["correction"] = draw(st.sampled_from(["none", "proximal"]))
        spec["optimizer_state"] = draw(st.sampled_from(["reset", "keep"]))
    return spec


def flight_of(spec: dict[str, Any]) -> fs.base.Flight:
    """The flight, with the settings that it has."""
    settings = {
        "redistribution": REDISTRIBUTIONS[spec["redistribution"]],
        "refresh": fs.flight.drift_correction() if spec["refresh"] == "drift" else None,
        "evaluated": spec["evaluated"],
    }
    taken = {"every_round": (), "serverless": ("redistribution",)}.get(spec["flight"], settings)
    flight: fs.base.Flight = FLIGHTS[spec["flight"]](**{name: settings[name] for name in taken})
    return flight


def composed(spec: dict[str, Any], devices: int = 1) -> fs.Algorithm:
    rho = spec["momentum"]
    local: fs.LocalUpdate = fs.local_sgd(
        objective, optax.sgd(mixture.LR, momentum=rho or None), batch_size=mixture.BATCH,
        epochs=mixture.EPOCHS, optimizer_state=spec["optimizer_state"],
        corrections=CORRECTIONS[spec["correction"]](rho),
    )  # fmt: skip
    if spec["preaggregation"] in ("q_fair", "agnostic"):
        local = fs.reports.with_initial_loss(local, objective)
    mu = 0.3 if spec["correction"] == "proximal" else 0.0
    return fs.compose(
        local,
        SLOTS,
        selection=fs.selection.uniform(sticky=spec["sticky"]),
        flight=flight_of(spec),
        broadcast=BROADCASTS[spec["broadcast"]](),
        exchange=EXCHANGES[spec["exchange"]],
        sending=[SENDING[name](setting) for name, setting in spec["sending"]],
        weighting=getattr(fs.weighting, spec["weighting"]),
        preaggregation=PREAGGREGATIONS[spec["preaggregation"]](rho, mu),
        aggregator=AGGREGATORS[spec["aggregator"]],
        server=SERVERS[spec["server"]],
        diagnostics={"ages": ages()} if spec["broadcast"] == "stale" else None,
    ).on(fs.make_execution(devices=devices))


def population() -> fs.ClientData:
    start = np.concatenate([[0], np.cumsum(mixture.SIZES)]).astype(np.int32)
    x = np.repeat(mixture.TARGETS, mixture.SIZES, axis=0)
    return fs.ClientData(
        jnp.asarray(x), jnp.zeros(len(x), jnp.int32), jnp.arange(len(x), dtype=jnp.int32),
        jnp.asarray(start), capacity=int(mixture.SIZES.max()),
    )  # fmt: skip


def flat(variables: Variables) -> np.ndarray:
    return np.concatenate([np.asarray(a) for a in jax.tree.leaves(variables)])


# Of one part, whatever the others are.
OWN_REFUSALS = ("model must have no non-trainable variables", "mu must be 0 with momentum")


def check(spec: dict[str, Any]) -> str:
    """Runs the composition and its oracle; returns whether it "ran" or was "refused"."""
    statistics = jnp.zeros(mixture.STAT) if spec["statistics"] else ()
    first, second = np.split(mixture.START, [mixture.FIRST])
    weights = Variables({"first": jnp.asarray(first), "second": jnp.asarray(second)}, statistics)
    data, key = population(), jax.random.key(3)
    try:
        algorithm = composed(spec)
        state = algorithm.init(key, weights, data)
    except ValueError as error:
        line = str(error)
        if line.startswith(OWN_REFUSALS):
            return "refused"
        found = REFUSED.fullmatch(line)
        assert found, line
        assert found["one"] in ROLES, line
        assert any(f"{role} is " in line or f"with {role} " in line for role in ROLES), line
        return "refused"
    clusters = [flat(weights)]
    if spec["broadcast"] == "ifca":
        stack = state.broadcast.variables
        clusters = [flat(jax.tree.map(lambda a, j=j: a[j], stack)) for j in range(2)]

    def round_(key: Array, state: FedState) -> tuple[FedState, Metrics, Variables, Variables]:
        state, metrics = algorithm.step(key, state, data)
        last = algorithm.collect(key, state, data)[0]
        return state, metrics, algorithm.evaluated(key, state, data), last

    step = jax.jit(round_)
    rows, servers, evaluated = [], [], []
    for t in range(mixture.ROUNDS):
        state, metrics, score_of, final = step(jax.random.fold_in(key, t), state)
        rows.append(metrics)
        servers.append(flat(state.server))
        evaluated.append(flat(score_of))
    client, source = (np.array([getattr(m, n) for m in rows]) for n in ("client", "source"))
    ages = [[m.diagnostics.get(f"age {k}", 0) for k in range(mixture.N)] for m in rows]
    staleness = np.take_along_axis(np.array(ages, np.int32), client, axis=1)
    drawn = mixture.Drawn(client, source, staleness)
    oracle = mixture.run(spec, drawn, flat(weights).astype(np.float64), clusters)
    for name, ours, theirs in (
        ("server", servers, oracle.servers),
        ("evaluated", evaluated, oracle.evaluated),
        ("final", [flat(final)], [oracle.final]),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=name)
    assert [int(m.uploads) for m in rows] == oracle.uploads
    return "ran"


def mixtures(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@mixtures(12)
@given(specs())
def test_a_mixture_is_its_oracle_or_refused(spec: dict[str, Any]) -> None:
    check(spec)


PLAIN = {
    "exchange": "own", "sending": [], "momentum": 0.5, "optimizer_state": "keep",
    "correction": "none", "flight": "every_round", "sticky": False, "broadcast": "latest",
    "redistribution": "keep", "refresh": "nothing", "weighting": "equal", "preaggregation": "none",
    "aggregator": "mean", "server": "replace", "evaluated": "server", "statistics": True,
}  # fmt: skip
BESIDE_OWN_LEAVES: dict[str, dict[str, Any]] = {
    "clipped for privacy": {"preaggregation": "dp", "server": "momentum", "statistics": False},
    "stale models": {"broadcast": "stale", "preaggregation": "staleness", "server": "mix"},
    "stale models that stay in flight": {"broadcast": "stale", "flight": "delayed"},
    "an attack on the median": {"sending": [("flip", 2.0)], "aggregator": "median"},
    "colluders in flight": {"sending": [("alie", 1.0)], "flight": "delayed"},
    "a code of the server's": {"server": "code"},
}


@pytest.mark.parametrize("case", BESIDE_OWN_LEAVES)
def test_what_meets_leaves_that_stay_is_its_oracle(case: str) -> None:
    assert check(PLAIN | BESIDE_OWN_LEAVES[case]) == "ran"


@mixtures(6)
@given(specs("own", "fragments"))
def test_a_mixture_that_sends_a_part_is_its_oracle_or_refused(spec: dict[str, Any]) -> None:
    check(spec)


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [(), ("own",), ("fragments",)])
def test_many_mixtures(exchanges: tuple[str, ...]) -> None:
    """``MIXTURES=300 pytest -m slow tests/test_mixtures.py`` looks at more."""
    examples = int(os.environ.get("MIXTURES", "20"))
    counts = {"ran": 0, "refused": 0}

    @mixtures(examples)
    @given(specs(*exchanges))
    def each(spec: dict[str, Any]) -> None:
        counts[check(spec)] += 1

    each()
    assert min(counts.values()) >= examples // 5, counts
