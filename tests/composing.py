"""All parts by role, and compositions of some of them beside what they need."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import make_federation, with_root
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters.partial_eval import dce_jaxpr
from test_contracts import LABELS, PARTS, N, companion, net, risk

import fedjax_sim as fs
from fedjax_sim import corrections, terms
from fedjax_sim.base import LocalInfo, LocalUpdate, Trained

ALPHA, SLOTS = 0.1, 6
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


FLIGHT_SETTINGS = "redistribution", "refresh", "evaluated"
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
FLIGHT = {"flight": lambda: fs.flight.delayed(2)}
STAYS = {**FLIGHT, "selection": lambda: fs.selection.uniform(sticky=True)}
SERVERLESS = {**STAYS, "flight": fs.flight.serverless}
CLOCK = {"clock": lambda: fs.clock.simulated(fs.clock.lognormal(0.1, 1.0))}
LATE = {"clock": lambda: fs.clock.simulated(fs.clock.lognormal(0.1, 1.0), deadline=0.5)}
ASLEEP = {"clock": lambda: fs.clock.simulated(0.1, available=fs.clock.bernoulli(0.5))}
THREE, FOUR = ({"clients_per_round": functools.partial(int, n)} for n in (3, 4))
ALL = {
    "selection": fs.selection.everyone,
    "clients_per_round": lambda: N,
    "weighting": lambda: fs.weighting.equal,
}
EQUAL = {"weighting": lambda: fs.weighting.equal}
DYNAMIC = {**EQUAL, "correction": corrected(lambda: corrections.dynamic(ALPHA))}
LOSSES = {"local": lambda local: fs.local.with_initial_loss(local, risk())}
IMPORTANCE = {"local": lambda local: fs.local.with_importance(local, loss())}
FINAL = {"local": lambda local: fs.local.with_final_loss(local, risk())}
COMPANION = changed(companion=companion)
STALE = {"broadcast": lambda: fs.broadcast.stale(2)}
STARTS = {
    "local": lambda local: fs.local.adaptive_start(local, risk(), fs.leaves.head(net())),
}
BESIDE: dict[str, Mapping[str, Any]] = {
    "scaffnew": ALL, "server dynamic": DYNAMIC,
    "fedadmm": {**DYNAMIC, "server": fs.server.participation},
    "correction dynamic": {**EQUAL, "server": lambda: fs.server.dynamic(ALPHA)},
    "everyone": ALL, "with_replacement": EQUAL,
    "importance": IMPORTANCE, "importance, exact": IMPORTANCE,
    "mediators": FOUR,
    "guided": {**CLOCK, "local": lambda local: fs.local.with_utility(local, risk())},
    "selection tiers": CLOCK, "within_deadline": LATE, "awake": ASLEEP,
    "buffered": {**CLOCK, "clients_per_round": lambda: N}, "periodic": CLOCK,
    "staggered": STAYS, "drift_correction": STAYS, "in_flight": FLIGHT,
    "permute": FLIGHT, "redistribution mix": SERVERLESS, "push": {**SERVERLESS, **EQUAL},
    "matchings": SERVERLESS, "edges": STAYS,
    "learned": {**SERVERLESS, **EQUAL, **FINAL},
    "permanent": {**STAYS, "exchange": lambda: EXCHANGES["fragments"]()},
    "fragments": {**STAYS, "flight": fs.flight.permanent},
    "by_samples_visited": FLIGHT,
    "staleness": STALE, "discounted": STALE, "q_fair": LOSSES, "agnostic": LOSSES,
    "models_taken": {"broadcast": lambda: fs.broadcast.ifca(2, risk())},
    "stored": {"local": lambda local: fs.local.ditto(local, 0.1)},
    "accompanied": {"setting": COMPANION},
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
    "widths": lambda: fs.exchange.split(covers=fs.exchange.widths(net(), (1.0, 0.5))),
}
SETTINGS: dict[str, Change] = {
    "kept": changed(optimizer=momentum, optimizer_state=lambda: "keep"),
    "averaged": changed(optimizer=momentum, optimizer_state=lambda: "average"),
    "geometric": changed(steps=lambda: fs.local.geometric(0.2)),
    "private": changed(private=lambda: fs.local.dp_sgd(1.0, 0.5)),
    "companion": COMPANION,
    "partly": changed(trained=lambda: BIAS),
    "half_weights": changed(half_weights=lambda: True),
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
    "fedadmm": wrapping(fs.local.fedadmm),
    "in_turn": lambda local: fs.local.in_turn(local, local.change(epochs=2)),
    "adaptive_start": STARTS["local"],
    "fedmd": wrapping(fs.local.fedmd, net, lambda: LABELS),
    "loadaboost": wrapping(lambda local: fs.local.loadaboost(local.change(epochs=2), loss())),
    "adaptive_steps": wrapping(fs.local.adaptive_steps, risk, lambda: 0.1, lambda: 200.0),
    "skewscout": wrapping(fs.local.skewscout, lambda: fs.reports.accuracy(net(), 8)),
    "with_importance": wrapping(fs.local.with_importance, loss),
    "with_initial_loss": LOSSES["local"],
    "with_final_loss": FINAL["local"],
    "with_utility": wrapping(fs.local.with_utility, risk),
}
FLIGHTS: dict[str, Callable[[], Any]] = {
    "delayed": FLIGHT["flight"],
    "staggered": lambda: fs.flight.staggered(2),
    "permanent": fs.flight.permanent,
    "serverless": fs.flight.serverless,
    "buffered": lambda: fs.flight.buffered(SLOTS),
    "periodic": lambda: fs.flight.periodic(2.0),
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
    "edges": lambda: fs.redistribution.edges(2),
}
KINDS = {
    "selection": "Selection", "broadcast": "Broadcast", "refresh": "Refresh", "sending": "Sending",
    "weighting": "Weighting", "preaggregation": "PreAggregation", "aggregator": "Aggregator",
    "server": "Server", "diagnostics": "Diagnostic", "finish": "Finish", "personal": "Personal",
    "clock": "Clock",
}  # fmt: skip
PLAIN = {
    "uniform", "every_round", "latest", "by_samples", "mean", "replace", "traced"
}  # fmt: skip
"""What a composition has anyhow."""


def parts() -> Iterator[Part]:
    """All parts, by the tables of tests/test_contracts.py, which leave none out."""
    tables: dict[str, Mapping[str, Callable[..., Any]]] = {
        "setting": SETTINGS,
        "correction": PARTS["Correction"],
        "local": WRAPPERS,
        "flight": FLIGHTS,
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
                yield Part(role, name, make if role in LOCAL else functools.cache(make), beside)


PART_LIST = list(parts())
ROLES = {part.role for part in PART_LIST} | {"local", "clients_per_round"}


def part_named(name: str) -> Part:
    (found,) = (part for part in PART_LIST if repr(part) == name)
    return found


@functools.cache
def local_update() -> LocalUpdate:
    return fs.local_sgd(risk(), optax.sgd(0.1), batch_size=8)


class one_step(LocalUpdate):
    """A step towards the client's number, to trace what is not about training."""

    batch_size = 8
    stops = known = True

    def train(self, key: Any, variables: Any, client: Any, own: Any, common: Any) -> Trained:
        target = client.start.astype(jnp.float32)
        moved = jax.tree.map(lambda w: w - 0.1 * (w - target), variables)
        steps = jnp.minimum(client.size, 1)
        return Trained(moved, own, (), LocalInfo(target, steps, client.size))

    def steps_for(self, samples: Any, client: Any = None) -> Any:
        return 0 * samples + 1

    def change(self, **settings: Any) -> one_step:
        return self


def composed(*given: Part, method: fs.Algorithm | None = None) -> fs.Algorithm:
    """A composition of parts and what they need beside each other; or a method with them.

    Raises:
        ValueError: if it is refused.
    """
    chain: dict[str, list[Change]] = {kind: [] for kind in LOCAL}
    roles: dict[str, Any] = {}
    if method is None:
        roles = {"selection": fs.selection.uniform(), "clients_per_round": SLOTS}
        for role, make in (pair for part in given for pair in part.beside.items()):
            if role == "correction" and any(repr(part) == "correction dynamic" for part in given):
                continue  # it is the one that would be brought
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
    moves = {name: roles.pop(name) for name in FLIGHT_SETTINGS if name in roles}
    if moves:
        flight = roles.get("flight") or (method or fs.compose(local, SLOTS)).parts.flight
        try:
            roles["flight"] = flight.replace(**moves)
        except TypeError as error:
            name, move = next(iter(moves.items()))
            line = f"{name} {move} needs another flight, flight is {flight}: use delayed(rounds)"
            raise ValueError(line) from error
    if method is not None:
        return method.replace(local=local, **roles)
    return fs.compose(local, **roles).on(ONE)


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
    if not isinstance(made, fs.base.Part):
        return marking(made, number)
    kind = type(made)
    names = {name for of in kind.__mro__ for name in vars(of) if of is not fs.base.Part}
    hooks = {
        name: marking(getattr(made, name), number)
        for name in names
        if name == "__call__" or (name[0] != "_" and callable(getattr(made, name)))
    }
    marks: dict[str, Any] = {
        name: property(functools.partial(lambda hook, copy: hook, hook))
        for name, hook in hooks.items()
    }
    marks["__module__"] = kind.__module__  # a part of the package's, which needs no trial
    copy: Any = object.__new__(type(kind.__name__, (kind,), marks))
    vars(copy).update(vars(made))
    return copy


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


REFUSED = re.compile(r"(\w+)(\[.+\])? .+ (needs|has no effect with) .+: (use|see) .+")
OF_ONE_PART = (
    "in_turn must be of local updates", "corrections must not correct twice",
    "corrections must read a client's samples in its private gradients alone",
    "shared must be one of", "memory must be one of", "steps must be None",
    "shared must be None", "memory must be None", "companion must be None",
    "max_steps must be None", "epochs must be None", "until must be None",
    "phases must divide the", "buffer_size must be in 1..",
    "matrix must mix the", "edges must join the",
)  # fmt: skip


def refusal(*given: Part, method: fs.Algorithm | None = None) -> str | fs.Algorithm:
    """The composition, or the line that refuses it."""
    try:
        return composed(*given, method=method)
    except ValueError as error:
        line = str(error)
    if not line.startswith(OF_ONE_PART):
        assert REFUSED.fullmatch(line), (given, line)
        assert any(line.startswith((f"{role} ", f"{role}[")) for role in ROLES), (given, line)
        assert any(f", {role} is " in line or f"with {role} " in line for role in ROLES), line
    return line
