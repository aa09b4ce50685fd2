"""One round of every federated algorithm: the only place where the parts meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    AnyRedistribution,
    Array,
    Broadcast,
    ClientData,
    Clock,
    Diagnostic,
    Exchange,
    FedState,
    Finish,
    LocalUpdate,
    Metrics,
    Origin,
    Personal,
    PreAggregation,
    PyTree,
    Refresh,
    Schedule,
    Selection,
    Sending,
    Server,
    SetupTraffic,
    Traffic,
    Variables,
    Weighting,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import as_arrays
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.personal import as_received
from fedjax_sim.plan import exchange as exchanges
from fedjax_sim.plan import redistribution as redistributions
from fedjax_sim.round import collecting, finishing, measuring, placement, polling, timing, training
from fedjax_sim.round import sending as sendings
from fedjax_sim.round.own_models import score_own
from fedjax_sim.round.parts import Evaluated, Parts, named, tupled
from fedjax_sim.round.private import epsilon as epsilon_of
from fedjax_sim.round.start import initial_state
from fedjax_sim.round.traffic import setup_traffic, sizes
from fedjax_sim.server import broadcast as broadcasts
from fedjax_sim.server import refresh as refreshes
from fedjax_sim.server import update as servers
from fedjax_sim.server.weighting import by_samples


def compose(
    local: LocalUpdate,
    *,
    selection: Selection,
    schedule: Schedule,
    broadcast: Broadcast | None = None,
    redistribution: AnyRedistribution = redistributions.keep,
    refresh: Refresh | None = None,
    exchange: Exchange | None = None,
    sending: Sequence[Sending] = (),
    weighting: Weighting = by_samples,
    preaggregation: Sequence[PreAggregation] = (),
    aggregator: Aggregator = tree.mean,
    server: Server | None = None,
    diagnostics: Mapping[str, Diagnostic] | None = None,
    finish: Finish | None = None,
    personal: Personal | None = None,
    evaluated: Evaluated = "server",
    clock: Clock | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""One local round of every federated algorithm.

    .. code-block:: text

        slots   <- redistribute(slots)
        clients <- the selection's, for slots without one
        slots   <- the broadcast model if the slot was due last round, else refresh(slot)
        shared  <- what the clients say before they train, if the local update asks anything
        slots   <- local update on those clients
        updates <- sending(what the clients send: due slots, or all that move)
        server  <- server + server update(aggregate(preaggregation(updates, weights)))

    Args:
        local: trains one model on one client.
        selection: which client each slot visits.
        schedule: which slots are due when; it also fixes the number of slots.
        broadcast: which model a slot starts from; None: the server model.
        redistribution: where models go between rounds.
        refresh: what a slot that was not due takes from the server; None: nothing.
        exchange: what of a model travels; None: everything.
        sending: what clients send in place of their updates, in order: attacks, codes, clips.
        weighting: how much each model counts.
        preaggregation: change updates and weights before they are aggregated, in order.
        aggregator: reduces the updates to one.
        server: how the server model moves; None: by the aggregate.
        diagnostics: measure rounds, by name.
        finish: what clients and server do once more after the last round; None: nothing.
        personal: the model that a client itself uses; None: the evaluated one, with own leaves.
        evaluated: the "server"'s model, or the aggregate of those "in_flight", which is newer.
        clock: how long a round takes, and which clients are there; None: it takes no time.
        execution: devices and chunks; None: :func:`fedjax_sim.make_execution`.

    Returns:
        An :class:`Algorithm`.

    Raises:
        ValueError: if a part is of the wrong kind or does not fit another: one line names both
            and what would work; in the first round, if the aggregate lacks the model's shapes.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> fs.compose(
        ...     fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1)),
        ...     selection=fs.selection.uniform(),
        ...     schedule=fs.schedule.every_round(10),
        ...     aggregator=fs.aggregators.coordinate_median,
        ... )
        compose(
          local=local_sgd(empirical_risk(<Model>), <optax>),
          selection=uniform(),
          schedule=every_round(10),
          aggregator=coordinate_median,
        )
    """
    exchange = exchange or exchanges.everything()
    if personal is None and isinstance(exchange, Exchange) and exchange.own is not None:
        personal = as_received()
    return Algorithm(
        Parts(
            local,
            selection,
            schedule,
            broadcast or broadcasts.latest(),
            redistribution,
            refresh or refreshes.nothing(),
            exchange,
            tupled("sending", sending),
            weighting,
            tupled("preaggregation", preaggregation),
            aggregator,
            server or servers.replace(),
            named(diagnostics),
            finish,
            personal,
            evaluated,
            clock,
            execution or make_execution(),
        )
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Algorithm:
    """A federated algorithm: parts, and the pure functions that they make.

    Attributes:
        parts: by role, as :func:`compose` was given them or filled them in.
        origin: the call of the named method that it is; None for a plain ``compose``.
        replaced: the roles whose parts are no longer the named method's.
    """

    parts: Parts
    origin: Origin | None = None
    replaced: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """S, the models in flight."""
        return self.parts.slots

    @property
    def round_factor(self) -> float:
        """Rounds to run for each round of FedAvg that the user budgets."""
        return self.parts.schedule.round_factor

    @property
    def ends(self) -> bool:
        """Whether anything is left to do after the last round, see :meth:`collect`."""
        return self.parts.in_flight or self.parts.finish is not None

    @property
    def personal(self) -> Personal | None:
        """The model that a client itself uses; None if all use the evaluated one."""
        return self.parts.personal

    def replace(self, **parts: Any) -> Algorithm:
        """The same algorithm with some parts exchanged.

        Args:
            parts: by role, as :func:`compose` takes them.

        Raises:
            TypeError: if there is no such role.
            ValueError: as :func:`compose`.

        >>> import optax, fedjax_sim as fs
        >>> local = fs.local_sgd(fs.empirical_risk(fs.models.logistic((4,), 2)), optax.sgd(0.1))
        >>> robust = fs.algorithms.scaffold(local, clients_per_round=10).replace(
        ...     aggregator=fs.aggregators.coordinate_median
        ... )
        >>> robust.parts.aggregator.__name__, robust.replaced
        ('coordinate_median', ('aggregator',))
        """
        known = self.parts.by_role()
        if unknown := parts.keys() - known.keys():
            raise TypeError(f"{min(unknown)} is no part of an algorithm: one of {', '.join(known)}")
        made = compose(**(known | parts))
        replaced = (*self.replaced, *(role for role in parts if role not in self.replaced))
        return dataclasses.replace(made, origin=self.origin, replaced=replaced)

    def on(self, execution: Execution) -> Algorithm:
        """The same elsewhere: on other devices, or by other chunks or lanes."""
        return dataclasses.replace(self, parts=dataclasses.replace(self.parts, execution=execution))

    def __repr__(self) -> str:
        head = "compose" if self.origin is None else self.origin.name
        return "\n".join([f"{head}(", *self.parts.written(), ")"])

    def init(self, key: Array, variables: Variables, data: ClientData) -> FedState:
        """The state before the first round, for the initial model ``variables``."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        del key
        # On all devices, as a step leaves it: a second step would be compiled anew for the place.
        return self.parts.execution.place(initial_state(self.parts, variables, data))

    def step(self, key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
        """One local round; ``key`` is the round's own."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        parts = self.parts
        state, asked, back, placed, draw = polling.drawn(parts, key, state, data)
        due = placed.slot < self.slots
        if not parts.exchange.fragments:  # of which all slots hand over one
            due = parts.schedule.due(state.round)[placed.slot] & due
        state = training.surveyed(parts, key, state, data, placed)
        trips = polling.trips(parts, state, placed, due, data, asked)
        legs = timing.legs(parts, state, data, placed, trips)
        limit = timing.limits(parts, legs)
        trained, mine, placed, start, executed = training.train(
            parts, key, state, data, placed, due, limit
        )
        info = trained.info
        asleep = jnp.sum(draw.client != draw.assigned, dtype=jnp.int32)
        came = timing.outcome(parts, key, legs, limit, info.steps, placed, trips.visited, asleep)
        came = polling.waited(came, asked, back)
        placed, trained = timing.taken(parts, data, placed, trained, start, came.arrived)
        trained, sending, sent = sendings.send(
            parts, key, state, data, placed.slots, trained, start, due
        )
        skipped = sendings.skipped(parts, came.arrived, sent)
        trained, mine = sendings.undone(parts, state, data, placed.slots, skipped, trained, mine)
        client_state, own, shared_state = training.client_states(
            parts, state, data, placed, trained, mine
        )
        placed = training.moved_on(parts, placed, trained, came.arrived)
        cohort = collecting.cohort_of(parts, state, placed.slots, placed.samples, data)
        # A model in flight is due even if no client trained it now, unless its client is not there.
        here = due & came.arrived if parts.loses and parts.selection.sticky else due
        met, updates = (here, None) if parts.in_flight else (due & sent, trained.variables)
        updates, step = (updates, None) if parts.holds_updates else (None, updates)
        reduced = state._replace(shared_state=shared_state)
        new = collecting.absorb(parts, key, reduced, placed.slots, cohort, met, updates, step)
        numbers, kept = measuring.measure(parts, key, state, new, placed.slots, updates, cohort)
        metrics = Metrics(
            loss=measuring.loss(trained.info, skipped),
            samples=jnp.sum(info.samples, dtype=jnp.int32),
            steps=jnp.sum(info.steps, dtype=jnp.int32),
            executed=executed,
            # From client to client: up for the one, down for the other.
            uploads=jnp.sum((sent | came.dropped) & trips.uploads, dtype=jnp.int32)
            + draw.exchanged,
            downloads=jnp.sum(trips.downloads, dtype=jnp.int32) + draw.exchanged + draw.sent,
            fragments=jnp.sum(trips.fragments, dtype=jnp.int32),
            visits=jnp.sum(trips.visited, dtype=jnp.int32) + draw.lost,
            skipped=jnp.sum(skipped, dtype=jnp.int32),
            client=draw.client,
            source=draw.source,
            diagnostics=numbers,
            time=came.elapsed,
        )
        told = polling.measured(parts, trained.info, came)
        new = new._replace(
            round=state.round + 1,
            slots=placement.to_slots(parts, placed, draw) if parts.in_flight else None,
            selection=polling.learnt(
                parts, draw.selection, cohort, told, sent, (new.server, updates)
            ),
            client_state=client_state,
            own=own,
            sending=sending,
            shared_state=shared_state if parts.local.follow is None else new.shared_state,
            diagnostics=kept,
            clock=timing.later(state.clock, came.elapsed) if back is None else back.now,
            at_work=() if back is None else back.at_work,
        )
        return new, polling.with_answers(metrics, asked)

    def collect(self, key: Array, state: FedState, data: ClientData) -> tuple[Variables, Array]:
        """Uploads and aggregates every model still in flight, and finishes: the last act of a run.

        Returns:
            The server model after it, and the uploads ``int32[]`` that it took.
        """
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        server, uploads = finishing.gathered(self.parts, key, state, data)
        return finishing.finished(self.parts, key, server, data), uploads

    def evaluated(self, key: Array, state: FedState, data: ClientData) -> Variables:
        """The model that is evaluated: the server's, or the mean of all in flight."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        del key
        return collecting.evaluated(self.parts, state, data)

    def score_personal(
        self,
        key: Array,
        state: FedState,
        data: ClientData,
        score: Callable[[PyTree, Variables, PyTree], PyTree],
        constants: PyTree,
        tasks: PyTree,
        clients: Array | None = None,
    ) -> PyTree:
        """``score(constants, variables, task)`` with clients' own models: ``[K, ...]``."""
        received = self.evaluated(key, state, data)
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        return score_own(self.parts, key, received, state, data, score, constants, tasks, clients)

    def epsilon(self, data: ClientData, rounds: int, delta: float) -> float:
        """Computes ε of (ε, δ) differential privacy for a client, if all server models are shown.

        Raises:
            UnknownEpsilonError: names a part that is not known to keep the mechanism's analysis.
        """
        return epsilon_of(self.parts, data, rounds, delta)

    def traffic(self, variables: Variables, data: ClientData) -> Traffic:
        """The sizes of what travels in a round; takes shapes and gives Python integers."""
        return sizes(self.parts, variables, data)

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        """What travels once, before the first round; ``data.start`` must be that of one run."""
        return setup_traffic(self.parts, variables, data)
