"""Any two parts: refused in a line that names them, or each changes what comes out."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_federation, with_root
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters.partial_eval import dce_jaxpr
from test_contracts import LABELS, PARTS, N, companion, net, risk, update
from test_contracts import named as algorithm

import fedjax_sim as fs
from fedjax_sim import corrections, terms
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import LocalUpdate
from fedjax_sim.client.carried import Common, Kept
from fedjax_sim.client.reflected import Reflected
from fedjax_sim.personal._models import kept_of

ROUNDS, ALPHA, SLOTS = 3, 0.1, 6
ONE = fs.make_execution(devices=1)
Change = Callable[[LocalUpdate], LocalUpdate]


class Part(NamedTuple):
    """A part, and how it is put into a composition.

    Attributes:
        role: of ``compose``; of a part of the local update, which kind it is.
        name: among those of its role.
        make: makes it; a part of the local update is made of another one.
        beside: what it needs to act, by role, where the other part does not bring something else.
    """

    role: str
    name: str
    make: Callable[..., Any]
    beside: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.role} {self.name}"


LOCAL = ("setting", "correction", "local")
"""Kinds of parts of the local update, in the order in which they are put on it."""
SEQUENCES = ("sending", "preaggregation")


def changed(**settings: Callable[[], Any]) -> Change:
    return lambda local: local.change(**{name: make() for name, make in settings.items()})


def corrected(make: Callable[[], Any]) -> Change:
    return changed(corrections=lambda: (make(),))


def with_term(term: Callable[[], Any], **settings: Callable[[], Any]) -> Change:
    return changed(objective=lambda: terms.remade(risk(), term=term()), **settings)


def wrapping(wrap: Callable[..., LocalUpdate], *more: Callable[[], Any]) -> Change:
    return lambda local: wrap(local, *(make() for make in more))


def momentum() -> Any:
    return optax.sgd(0.1, momentum=0.5)


def loss() -> Any:
    return fs.reports.mean_loss(risk(), 8)


BIAS = fs.leaves.named("*bias")
FLIGHT = {"schedule": lambda: fs.schedule.delayed(SLOTS, 2)}
STAYS = {**FLIGHT, "selection": lambda: fs.selection.uniform(sticky=True)}
SERVERLESS = {**STAYS, "schedule": lambda: fs.schedule.serverless(SLOTS)}
CLOCK = {"clock": lambda: fs.clock.simulated(fs.clock.lognormal(0.1, 1.0))}
LATE = {"clock": lambda: fs.clock.simulated(fs.clock.lognormal(0.1, 1.0), deadline=0.5)}
ASLEEP = {"clock": lambda: fs.clock.simulated(0.1, available=fs.clock.bernoulli(0.5))}
THREE, FOUR = ({"schedule": functools.partial(fs.schedule.every_round, n)} for n in (3, 4))
ALL = {
    "selection": fs.selection.everyone,
    "schedule": lambda: fs.schedule.every_round(N),
    "weighting": lambda: fs.weighting.equal,
}
EQUAL = {"weighting": lambda: fs.weighting.equal}
DYNAMIC = {**EQUAL, "correction": corrected(lambda: corrections.dynamic(ALPHA))}
LOSSES = {"local": lambda local: fs.local.with_initial_loss(local, risk())}
FINAL = {"local": lambda local: fs.local.with_final_loss(local, risk())}
STALE = {"broadcast": lambda: fs.broadcast.stale(2)}
STARTS = {
    "local": lambda local: fs.local.adaptive_start(local, risk(), fs.leaves.head(net())),
}
BESIDE: dict[str, Mapping[str, Any]] = {
    "scaffnew": ALL, "server dynamic": DYNAMIC,
    "reflected": {**DYNAMIC, "server": fs.server.participation},
    "correction dynamic": {**EQUAL, "server": lambda: fs.server.dynamic(ALPHA)},
    "everyone": ALL, "importance": {"local": lambda local: fs.local.with_importance(local, loss())},
    "mediators": FOUR,
    "guided": {**CLOCK, "local": lambda local: fs.local.with_utility(local, risk())},
    "selection tiers": CLOCK, "within_deadline": LATE, "awake": ASLEEP,
    "buffered": CLOCK, "periodic": CLOCK,
    "staggered": STAYS, "drift_correction": STAYS, "in_flight": FLIGHT,
    "permute": FLIGHT, "redistribution mix": SERVERLESS, "push": {**SERVERLESS, **EQUAL},
    "matchings": SERVERLESS,
    "learned": {**SERVERLESS, **EQUAL, **FINAL},
    "permanent": {**STAYS, "exchange": lambda: EXCHANGES["fragments"]()},
    "fragments": {**STAYS, "schedule": lambda: fs.schedule.permanent(SLOTS)},
    "by_samples_visited": FLIGHT,
    "staleness": STALE, "discounted": STALE, "q_fair": LOSSES, "agnostic": LOSSES,
    "models_taken": {"broadcast": lambda: fs.broadcast.ifca(2, risk())},
    "stored": {"local": lambda local: fs.local.ditto(local, 0.1)},
    "accompanied": {"setting": changed(companion=companion)},
    "adaptively_mixed": STARTS,
    "gaussian_mechanism": THREE, "adaptive_mechanism": THREE,
    "tree_mechanism": {**THREE, "selection": fs.selection.shuffled},
    "banded_mechanism": {**THREE, "selection": fs.selection.cyclic},
}  # fmt: skip
EXCHANGES: dict[str, Callable[[], Any]] = {
    "own": lambda: fs.exchange.split(own=BIAS),
    "frozen": lambda: fs.exchange.split(frozen=BIAS),
    "nothing": fs.exchange.nothing,
    "fragments": lambda: fs.exchange.fragments(BIAS, fs.leaves.all_but(BIAS)),
}
SETTINGS: dict[str, Change] = {
    "kept": changed(optimizer=momentum, optimizer_state=lambda: "keep"),
    "averaged": changed(optimizer=momentum, optimizer_state=lambda: "average"),
    "geometric": changed(steps=lambda: fs.local.geometric(0.2)),
    "companion": changed(companion=companion),
    "partly": changed(trained=lambda: BIAS),
    "sharpness_aware": changed(objective=lambda: terms.sharpness_aware(risk(), 0.5)),
    "estimated_sharpness": changed(
        objective=lambda: terms.estimated_sharpness(risk(), 0.5), memory=terms.last_received
    ),
    "moreau_envelope": changed(objective=lambda: fs.adaptation.moreau_envelope(risk())),
    "contrast": with_term(lambda: terms.model_contrast(net()), memory=terms.last_model),
    "outputs": with_term(
        terms.near_outputs,
        shared=lambda: terms.class_outputs(net(), LABELS),
        memory=lambda: terms.own_outputs(net(), LABELS),
    ),
    "prototypes": with_term(terms.near_prototypes, shared=lambda: terms.prototypes(net(), LABELS)),
    "teacher": with_term(lambda: terms.teacher_distillation(net(), 1.0), shared=terms.past_models),
}
WRAPPERS: dict[str, Change] = {
    "ditto": wrapping(fs.local.ditto, lambda: 0.1),
    "reflected": wrapping(fs.local.reflected),
    "in_turn": lambda local: fs.local.in_turn(local, local.change(epochs=2)),
    "adaptive_start": STARTS["local"],
    "agreed": wrapping(fs.local.agreed, net, lambda: LABELS),
    "boosted": wrapping(lambda local: fs.local.boosted(local.change(epochs=2), loss())),
    "budgeted": wrapping(fs.local.budgeted, risk, lambda: 0.1, lambda: 200.0),
    "scouted": wrapping(fs.local.scouted, lambda: fs.reports.accuracy(net(), 8)),
    "with_importance": wrapping(fs.local.with_importance, loss),
    "with_initial_loss": LOSSES["local"],
    "with_final_loss": FINAL["local"],
    "with_utility": wrapping(fs.local.with_utility, risk),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "delayed": FLIGHT["schedule"],
    "staggered": lambda: fs.schedule.staggered(SLOTS, 2),
    "permanent": lambda: fs.schedule.permanent(SLOTS),
    "serverless": SERVERLESS["schedule"],
    "buffered": lambda: fs.schedule.buffered(SLOTS, at_work=N),
    "periodic": lambda: fs.schedule.periodic(2.0, at_work=SLOTS),
}
RING = fs.redistribution.ring(SLOTS)
REDISTRIBUTIONS: dict[str, Callable[[], Any]] = {
    "permute": lambda: fs.redistribution.permute,
    "mix": lambda: fs.redistribution.mix(fs.redistribution.metropolis(RING)),
    "push": lambda: fs.redistribution.push(
        fs.redistribution.outgoing(fs.redistribution.one_sided(SLOTS, 2))
    ),
    "matchings": lambda: fs.redistribution.matchings(RING, 0.5),
    "learned": lambda: fs.redistribution.learned(peers=2),
}
KINDS = {
    "selection": "Selection", "broadcast": "Broadcast", "refresh": "Refresh", "sending": "Sending",
    "weighting": "Weighting", "preaggregation": "PreAggregation", "aggregator": "Aggregator",
    "server": "Server", "diagnostics": "Diagnostic", "finish": "Finish", "personal": "Personal",
    "clock": "Clock",
}  # fmt: skip
PLAIN = {
    "uniform", "every_round", "latest", "keep", "nothing", "by_samples", "mean", "replace", "traced"
}  # fmt: skip
"""What a composition has anyhow."""


def parts() -> Iterator[Part]:
    """All parts, by the tables of tests/test_contracts.py, which leave none out."""
    tables: dict[str, Mapping[str, Callable[..., Any]]] = {
        "setting": SETTINGS,
        "correction": PARTS["Correction"],
        "local": WRAPPERS,
        "schedule": SCHEDULES,
        "redistribution": REDISTRIBUTIONS,
        "exchange": EXCHANGES,
        "evaluated": {"in_flight": lambda: "in_flight"},
    }
    tables |= {role: {**PARTS[kind]} for role, kind in KINDS.items()}
    tables["clock"] = {**tables["clock"], **CLOCK}
    for role, table in tables.items():
        for name, make in table.items():
            if name not in PLAIN or role == "exchange":
                beside = BESIDE.get(f"{role} {name}", BESIDE.get(name, {}))
                yield Part(role, name, functools.cache(make), beside)


PART_LIST = list(parts())
ROLES = {part.role for part in PART_LIST} | {"local"}


def part_named(name: str) -> Part:
    (found,) = (part for part in PART_LIST if repr(part) == name)
    return found


@functools.cache
def local_update() -> LocalUpdate:
    return fs.local_sgd(risk(), optax.sgd(0.1), batch_size=8)


def composed(*given: Part, method: fs.Algorithm | None = None) -> fs.Algorithm:
    """A composition of parts and what they need beside each other; or a method with them.

    Raises:
        ValueError: if it is refused.
    """
    chain: dict[str, list[Change]] = {kind: [] for kind in LOCAL}
    roles: dict[str, Any] = {}
    if method is None:
        roles = {"selection": fs.selection.uniform(), "schedule": fs.schedule.every_round(SLOTS)}
        for role, make in (pair for part in given for pair in part.beside.items()):
            if role == "correction" and any(part.role == role for part in given):
                continue
            if role in LOCAL:
                chain[role].append(make)
            else:
                roles[role] = make()
    for i, part in enumerate(given):
        if part.role == "correction":
            chain[part.role].append(corrected(functools.partial(marked, part, i)))
        elif part.role in LOCAL:
            chain[part.role].append(part.make)
        elif part.role in SEQUENCES:
            roles[part.role] = (*roles.get(part.role, ()), marked(part, i))
        elif part.role == "diagnostics":
            roles["diagnostics"] = {"it": part.make()}
        else:
            roles[part.role] = marked(part, i)
    local = local_update() if method is None else method.parts.local
    for change in (change for kind in LOCAL for change in dict.fromkeys(chain[kind])):
        local = change(local)
    if method is not None:
        return method.replace(local=local, **roles)
    return fs.compose(local, execution=ONE, **roles)


MARKED = (
    "sending", "preaggregation", "weighting", "aggregator", "server", "broadcast",
    "redistribution", "refresh", "correction",
)  # fmt: skip
"""Roles whose parts bear marks; the others change how a round is made, or are seen as they are."""


def bears_marks(part: Part) -> bool:
    """But for the mechanisms, which look for themselves among the parts."""
    return part.role in MARKED and not part.name.endswith("_mechanism")


def marked(part: Part, number: int) -> Any:
    """The part, of which every array that it has made itself bears the number."""
    made = part.make()
    if not bears_marks(part):
        return made
    if not hasattr(made, "_fields"):
        return marking(made, number)
    functions = {name: value for name, value in made._asdict().items() if callable(value)}
    return made._replace(**{name: marking(value, number) for name, value in functions.items()})


def marking(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_marks(*args: Any, **options: Any) -> Any:
        given = {id(leaf) for leaf in jax.tree.leaves((args, options))}

        def mark(leaf: Any) -> Any:
            if id(leaf) in given or not isinstance(leaf, jax.Array):
                return leaf
            return checkpoint_name(leaf, f"part {number}")

        return jax.tree.map(mark, function(*args, **options))

    return with_marks


def at_work(algorithm: fs.Algorithm) -> set[str]:
    """The marks of which the models, or what is reported, depend on the arrays."""
    data, key = crowd(), jax.random.key(7)
    w = net().init(jax.random.key(3))
    state = jax.eval_shape(lambda: algorithm.init(key, w, data))

    def step(state: Any) -> Any:
        state, metrics = algorithm.step(key, state, data)
        return state, (state.server, state.slots, state.own, state.client_state, metrics)

    closed, shape = jax.make_jaxpr(step, return_shape=True)(state)
    kept = len(jax.tree.leaves(shape[0]))
    used = [False] * kept + [True] * (len(closed.out_avals) - kept)
    while True:  # what a round reads of the state, the round before must have made
        live, read = dce_jaxpr(closed.jaxpr, used)
        if not any(now and not before for now, before in zip(read, used[:kept], strict=True)):
            return set(names(live))
        used[:kept] = [a or b for a, b in zip(used[:kept], read, strict=True)]


def names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from names(getattr(inner, "jaxpr", inner))


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@functools.cache
def crowd() -> fs.ClientData:
    """Clients, and samples of the server's own."""
    data = make_federation().data
    return jax.device_put(with_root(data, np.setdiff1d(np.arange(len(data.x)), data.index)))


# ---- every pair is refused, or both parts do something ----

REFUSED = re.compile(r"(\w+)(\[.+\])? .+ (needs|has no effect with) .+: (use|see) .+")
OF_ONE_LOCAL_UPDATE = (
    "in_turn must be of local updates", "corrections must not correct twice",
    "shared must be one of", "memory must be one of",
)  # fmt: skip
AT_THE_START = "clients_per_round must be all 8 clients for selection everyone(), got "
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(PART_LIST, 2)
    if one.role != other.role or one.role in SEQUENCES
]


def refusal(*given: Part, method: fs.Algorithm | None = None) -> str | fs.Algorithm:
    """The composition, or the line that refuses it."""
    try:
        return composed(*given, method=method)
    except ValueError as error:
        line = str(error)
    if not line.startswith(OF_ONE_LOCAL_UPDATE):
        assert REFUSED.fullmatch(line), (given, line)
        assert any(line.startswith((f"{role} ", f"{role}[")) for role in ROLES), (given, line)
        assert any(f", {role} is " in line or f"with {role} " in line for role in ROLES), line
    return line


def check(*given: Part) -> bool:
    """Whether the parts fit together; then each that bears marks does something."""
    made = refusal(*given)
    if isinstance(made, str) or not any(map(bears_marks, given)):
        return not isinstance(made, str)
    try:
        found = at_work(made)
    except ValueError as error:
        if not str(error).startswith(AT_THE_START):
            raise
        return False
    for i, part in enumerate(given):
        assert f"part {i}" in found or not bears_marks(part), (part, "does nothing in", given)
    return True


def test_an_attack_on_no_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were not refused."""
    attack, nothing = part_named("sending alie"), part_named("exchange nothing")
    assert not check(attack, nothing)
    assert check(attack, part_named("exchange own"))
    monkeypatch.setattr("fedjax_sim.round.fit._derived", lambda parts: ())
    with pytest.raises(AssertionError, match="sending alie, 'does nothing in'"):
        check(attack, nothing)


@pytest.mark.parametrize("part", PART_LIST, ids=repr)
def test_every_part_fits_what_it_needs(part: Part) -> None:
    assert isinstance(refusal(part), fs.Algorithm)


SEED, SAMPLE, PIECES = 36, 200, 12


def test_some_pairs() -> None:
    fit = [check(*pair) for pair in random.Random(SEED).sample(PAIRS, SAMPLE)]
    assert 0.6 < np.mean(fit) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_every_pair(piece: int) -> None:
    """Of 6,900 a quarter is refused."""
    fit = [check(*pair) for pair in PAIRS[piece::PIECES]]
    assert 0.6 < np.mean(fit) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_with_parts_of_all_roles_that_it_leaves_open(name: str) -> None:
    method = algorithm(name, update())
    fixed = {line.strip().partition("=")[0] for line in method.parts.written()} - {"local"}
    for part in PART_LIST:
        of_a_graph = part.role == "redistribution" and method.slots != SLOTS
        if part.role not in fixed | {"setting"} and not of_a_graph:
            refusal(part, method=method)


# ---- a server that follows what clients keep ----


def played(algorithm: fs.Algorithm) -> Any:
    """The state after a few rounds: one program."""

    @jax.jit
    def run(data: fs.ClientData) -> Any:
        key = jax.random.key(7)

        def step(state: Any, t: Any) -> Any:
            return algorithm.step(jax.random.fold_in(key, t), state, data)[0], None

        start = algorithm.init(key, net().init(jax.random.key(3)), data)
        return jax.lax.scan(step, start, jnp.arange(ROUNDS, dtype=jnp.int32))[0]

    return jax.device_get(run(crowd()))


def over_clients(reduce: Callable[..., Any], *kept: Any) -> Any:
    return jax.tree.map(lambda *rows: reduce(*rows).mean(axis=0), *kept)


def place(parts: Any, name: str) -> int:
    """Of a correction among those of the local update."""
    return [term.origin.name for term in parts.local.corrections].index(name)


def h_is_the_mean(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Kept, state.client_state)
    return state.opt_state, over_clients(lambda h: h, kept.corrections[place(parts, "dynamic")])


def w_is_the_mean_of_augmented_models(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Reflected, state.client_state)
    (inner,) = kept_of(Kept, kept.inner)
    h = inner.corrections[place(parts, "dynamic")]
    mean = over_clients(lambda w, h: w - h / ALPHA, kept.last, h)
    return state.server.params, mean


def c_is_the_mean(parts: Any, state: Any) -> tuple[Any, Any]:
    kept, common = kept_of(Kept, state.client_state), kept_of(Common, state.shared_state)
    i = place(parts, "scaffold")
    means = [over_clients(lambda c: c, one.corrections[i]) for one in kept]
    return [one.corrections[i] for one in common], means


def variates_sum_to_zero(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Kept, state.client_state)
    own = kept.corrections[place(parts, "scaffnew")]
    length = 0.1 / 0.2  # of the part in tests/test_contracts.py
    moved = jax.tree.map(
        lambda h, last, w: h + (w[None] - last) / length, own.h, own.last, state.server.params
    )
    mean = over_clients(lambda h: h, moved)
    return mean, jax.tree.map(np.zeros_like, mean)


INVARIANTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "correction dynamic": h_is_the_mean,
    "local reflected": w_is_the_mean_of_augmented_models,
    "correction scaffold": c_is_the_mean,
    "correction scaffnew": variates_sum_to_zero,
}


def holds_exactly(algorithm: fs.Algorithm) -> bool:
    """An attack or a robust rule makes an estimate of what the server keeps."""
    honest = not any(part.forges for part in algorithm.parts.sending)
    return honest and algorithm.parts.aggregator is fs.aggregators.mean


@pytest.mark.slow
@pytest.mark.parametrize("name", INVARIANTS)
@pytest.mark.parametrize("piece", range(4))
def test_the_server_follows_what_clients_keep(name: str, piece: int) -> None:
    one = part_named(name)
    taken = {one.role, "server"} if name == "local reflected" else {one.role}
    for other in [part for part in PART_LIST if part.role not in taken][piece::4]:
        made = refusal(one, other)
        if isinstance(made, str) or not holds_exactly(made):
            continue
        state = played(made)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.server)), other
        ours, theirs = INVARIANTS[name](made.parts, state)
        theirs = jax.tree.map(lambda a, b: b, ours, theirs)
        scale = max(np.abs(a).max() for a in jax.tree.leaves((ours, theirs, state.server)))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=repr(other))
