"""The state before the first round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    AtWork,
    ClientData,
    FedState,
    Now,
    PyTree,
    Trained,
    TrainInSteps,
    Variables,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import count_state_rows, samples_of, visits
from fedjax_sim.round.exchanging import fragments, own, travelling
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import initial_slots


def initial_state(parts: Parts, variables: Variables, data: ClientData) -> FedState:
    """Returns the initial state of all parts, for the initial model ``variables``.

    Raises:
        ValueError: if there are fewer clients than slots and the selection does not allow idle
          slots, or more and it selects everyone; if the clock lacks some clients.
    """
    active = parts.clients_per_round
    if data.clients < active and not parts.selection.may_idle:
        raise ValueError(
            f"clients_per_round must be at most the {data.clients} clients, got {active}"
        )
    if parts.selection.everyone and data.clients > parts.slots:
        raise ValueError(
            f"clients_per_round must be all {data.clients} clients for selection "
            f"{shown(parts.selection)}, got {parts.slots}"
        )
    if parts.asynchronous and data.samples_per_round is not None:
        raise ValueError(
            f"samples_per_round needs models that return in the round in which they left, flight "
            f"is {shown(parts.flight)}: use flight=every_round()"
        )
    named = parts.local.clients
    if named not in (None, data.clients):
        raise ValueError(
            "epochs, rate_by_client and batch_by_client must have a number for each of the "
            f"{data.clients} clients, got {named} numbers"
        )
    known = None if parts.clock is None else parts.clock.clients
    if known is not None and data.clients > known:
        raise ValueError(
            f"clock {shown(parts.clock)} must know the {data.clients} clients, it has {known}"
        )
    learned, rows = parts.learned, count_state_rows(data)
    state = FedState(
        round=jnp.int32(0),
        server=variables,
        server_samples=jnp.float32(0),
        opt_state=server_state(parts, variables),
        slots=None,
        selection=parts.selection.init(variables, data, parts.execution),
        client_state=tree.stack_copies(parts.local.client_state(variables), rows),
        own=tree.stack_copies(own(parts, variables), rows),
        sending=tuple(
            tree.stack_copies(part.init(travelling(parts, variables), data), rows)
            for part in parts.sending
        ),
        shared_state=parts.local.shared_state(variables),
        broadcast=parts.broadcast.init(variables, data),
        preaggregation=tuple(
            part.init(travelling(parts, variables), data) for part in parts.preaggregation
        ),
        diagnostics={name: d.init(variables, data) for name, d in parts.diagnostics.items()},
        clock=() if parts.clock is None else Now(jnp.int32(0), jnp.float32(0)),
        at_work=_nobody(parts, variables, data),
        redistribution=() if learned is None else learned.init(parts.slots, data),
    )
    _check_reports(parts, state, data)
    if not parts.in_flight:
        return state
    trained, *_, tag = jax.eval_shape(lambda: first_visit(parts, state, data))
    return state._replace(slots=initial_slots(parts, state, trained.info, tag))


def server_state(parts: Parts, variables: Variables) -> PyTree:
    """Returns the server's state, or one for each fragment."""
    masks = fragments(parts, variables)
    if not masks:
        return parts.server.init(travelling(parts, variables))
    return tuple(parts.server.init(tree.only(mask, variables)) for mask in masks)


def _nobody(parts: Parts, variables: Variables, data: ClientData) -> PyTree:
    """Returns the clients in flight before the first round; () for synchronous rounds."""
    if not parts.asynchronous:
        return ()
    places = parts.clients_per_round
    zero = jnp.zeros(places, jnp.int32)
    seconds = zero.astype(jnp.float32)
    return AtWork(
        client=jnp.full(places, data.clients, jnp.int32),
        back=Now(zero, seconds),
        lost=zero > 0,
        down=seconds,
        seconds=seconds,
        length=seconds,
        idle=zero == 0,
        update=zero,
        row=zero,
        models=tree.stack_copies(variables, places + 1),
    )


def _check_reports(parts: Parts, state: FedState, data: ClientData) -> None:
    """Rejects a part that reads a number that the clients do not report."""
    readers: list[tuple[str, Any]] = [("selection", parts.selection)]
    readers += [("preaggregation", part) for part in parts.preaggregation]
    if learned := parts.learned:
        readers.append(("redistribution", learned))
    if not any(part.reads for _, part in readers):
        return
    info = jax.eval_shape(lambda: first_visit(parts, state, data))[0].info
    known = {*info._fields[:-1], *info.extra}
    for role, part in readers:
        if missing := set(part.reads) - known:
            raise ValueError(
                f"{role} {shown(part)} needs clients that report {min(missing)}, local is "
                f"{shown(parts.local)}, which reports {', '.join(sorted(known))}: see fs.reports"
            )


def first_visit(
    parts: Parts, state: FedState, data: ClientData
) -> tuple[Trained, PyTree, PyTree, PyTree]:
    """Runs a visit, for its shapes; returns its result, answer, shared state and tag.

    The visit has no steps, if possible: they change no shapes and take the most time to trace.
    """
    key = jax.random.key(0)
    task = visits(data, jnp.zeros(1, jnp.int32), peers=parts.local.peers)
    client = tree.take(task, jnp.int32(0)).view(
        samples_of(data), data, state.round, key, coverage=parts.exchange.coverage
    )
    received, tag = parts.broadcast.send(key, state.broadcast, state.server, client)
    client_state, told = parts.local.client_state(state.server), state.shared_state
    answer: PyTree = ()
    if parts.local.survey is not None:
        answer = parts.local.survey.ask(key, received, client, client_state, told)
        told = parts.local.survey.tell(told, answer)
    train, visit = parts.local.train, (key, received, client, client_state, told)
    if isinstance(train, TrainInSteps):
        trained = train.end(*train.begin(*visit), *visit)
    else:
        trained = train(*visit)
    return trained, answer, told, tag
