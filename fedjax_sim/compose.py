"""The only place where the parts of an algorithm meet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedjax_sim import dispatch as dispatches
from fedjax_sim import receive as receives
from fedjax_sim import redistribution as redistributions
from fedjax_sim import server as servers
from fedjax_sim import tree
from fedjax_sim.base import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    Cohort,
    Dispatch,
    FedState,
    LocalInfo,
    LocalUpdate,
    Metrics,
    Opening,
    Personal,
    Probe,
    PyTree,
    Receive,
    Redistribution,
    Schedule,
    Screen,
    Selection,
    Server,
    Slots,
    Traffic,
    Trained,
    Variables,
)
from fedjax_sim.execution import (
    Execution,
    Visits,
    client_sizes,
    make_execution,
    samples_of,
    visits,
)
from fedjax_sim.weighting import by_samples

_Part = TypeVar("_Part")


def compose(
    local: LocalUpdate,
    *,
    selection: Selection,
    schedule: Schedule,
    dispatch: Dispatch | None = None,
    redistribution: Redistribution = redistributions.keep,
    receive: Receive | None = None,
    weighting: Callable[[Array, Array], Array] = by_samples,
    screens: Sequence[Screen] = (),
    aggregator: Aggregator = tree.mean,
    server: Server | None = None,
    probes: Mapping[str, Probe] | None = None,
    personal: Personal | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""One local round of every federated algorithm.

    .. code-block:: text

        slots   <- redistribute(slots)
        clients <- the selection's, for slots without one
        slots   <- the dispatch's model if the slot was due last round, else receive(slot)
        slots   <- local update on those clients
        server  <- server update(aggregate(screens(due slots, weights)))

    Args:
        local: trains one model on one client.
        selection: which client each slot visits.
        schedule: which slots are due when; it also fixes the number of slots.
        dispatch: which model a slot starts from; default the server model.
        redistribution: where models go between rounds.
        receive: what a slot that was not due takes from the server; default nothing.
        weighting: ``(n_k int32[P], seen int32[P]) -> a_k f32[P]``.
        screens: change models and weights before they are aggregated, in order.
        aggregator: ``([P, *p], a_k) -> [*p]``.
        server: how the server model moves; default it is replaced.
        probes: measure rounds, by name.
        personal: the model that a client itself uses; default the one that is evaluated for all.
        execution: devices and chunks; default :func:`fedjax_sim.execution.make_execution`.

    Returns:
        An :class:`fedjax_sim.base.Algorithm` of pure functions.

    Raises:
        ValueError: if a part is of the wrong kind; in the first round, if the aggregate has not the
            model's shapes.
    """
    loop = _Loop(
        _a(LocalUpdate, local=local),
        _a(Selection, selection=selection),
        _a(Schedule, schedule=schedule),
        _a(Dispatch, dispatch=dispatch or dispatches.latest()),
        redistribution,
        _a(Receive, receive=receive or receives.nothing()),
        weighting,
        tuple(_a(Screen, screens=screen) for screen in screens),
        aggregator,
        _a(Server, server=server or servers.replace()),
        dict(probes or {}),
        personal,
        execution or make_execution(),
    )
    return Algorithm(
        init=loop.init,
        step=loop.step,
        collect=loop.collect,
        evaluated=loop.evaluated,
        traffic=loop.traffic,
        opening=loop.opening,
        slots=loop.slots,
        personal=None if personal is None else loop.personally,
    )


def _a(kind: type[_Part], **named: _Part) -> _Part:
    """The part, if it is of its kind and not, say, the function that makes one."""
    ((name, part),) = named.items()
    if not isinstance(part, kind):
        article = "a sequence of" if name == "screens" else "a"
        raise ValueError(f"{name} must be {article} {kind.__name__}, got {part!r}")
    return part


class _Task(NamedTuple):
    """What a place needs besides models and memory."""

    key: Array
    visit: Visits
    fresh: Array
    tag: PyTree


class _Loop(NamedTuple):
    """The parts, and the functions that they make."""

    local: LocalUpdate
    selection: Selection
    schedule: Schedule
    dispatch: Dispatch
    redistribution: Redistribution
    receive: Receive
    weighting: Callable[[Array, Array], Array]
    screens: tuple[Screen, ...]
    aggregator: Aggregator
    server: Server
    probes: dict[str, Probe]
    personal: Personal | None
    execution: Execution

    @property
    def slots(self) -> int:
        """S."""
        return len(self.schedule.group)

    @property
    def carried(self) -> bool:
        """Whether models are in flight from one round to the next."""
        return self.schedule.period > 1

    @property
    def recalls(self) -> bool:
        """Whether the slots remember what they left the server with."""
        return self.dispatch.several and bool(self.screens)

    @property
    def wander(self) -> bool:
        """Whether models go from client to client."""
        kept = self.selection.held and self.redistribution is redistributions.keep
        return self.carried and not kept

    def init(self, key: Array, variables: Variables, data: ClientData) -> FedState:
        del key
        if _clients(data) < self.slots and not self.selection.spare:
            raise ValueError(
                f"clients_per_round must be at most the {_clients(data)} clients, got {self.slots}"
            )
        state = FedState(
            round=jnp.int32(0),
            server=variables,
            server_samples=jnp.float32(0),
            opt_state=self.server.init(variables),
            slots=None,
            selection=self.selection.init(variables, data, self.execution),
            memory=tree.stack_copies(self.local.memory(variables), _clients(data)),
            shared=self.local.shared(variables),
            dispatch=self.dispatch.init(variables),
            screens=tuple(screen.init(variables, data) for screen in self.screens),
            probes={name: probe.init(variables, data) for name, probe in self.probes.items()},
        )
        return state._replace(slots=self._at_rest(state, data)) if self.carried else state

    def _at_rest(self, state: FedState, data: ClientData) -> Slots:
        """The slots before the first round, in which all are fresh."""
        places = self.execution.places(self.slots)
        id_ = jnp.minimum(jnp.arange(places, dtype=jnp.int32), self.slots)
        _, info, tag = jax.eval_shape(lambda: self._first_visit(state, data))
        none = jnp.zeros(places, jnp.int32)
        info, tag = jax.tree.map(lambda a: jnp.zeros((places, *a.shape), a.dtype), (info, tag))
        return Slots(
            variables=tree.stack_copies(state.server, places),
            id=id_,
            client=jnp.where(id_ < self.slots, id_, _clients(data)),
            visits=none,
            seen=none,
            info=info,
            tag=tag,
            received=tree.stack_copies(state.server, places) if self.recalls else (),
        )

    def _first_visit(self, state: FedState, data: ClientData) -> tuple[PyTree, LocalInfo, PyTree]:
        """Message, report and tag of a visit, for their shapes."""
        key = jax.random.key(0)
        task = visits(data, jnp.zeros(1, jnp.int32), peers=self.local.peers)
        client = tree.take(task, jnp.int32(0)).view(samples_of(data), data)
        received, tag = self.dispatch.send(key, state.dispatch, state.server, client)
        memory = self.local.memory(state.server)
        trained = self.local.train(key, received, client, memory, state.shared)
        return trained.message, trained.info, tag

    def step(self, key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
        slots, fresh, chosen, exchanged = self._place(key, state, data)
        trained, slots = self._train(key, state, data, slots, fresh)
        memory, shared = self._learnt(state, data, slots.client, trained)
        visited = slots.client < _clients(data)
        slots = self._moved(slots, fresh, visited, trained, client_sizes(data, slots.client))
        due = self.schedule.due(state.round)[slots.id] & (slots.id < self.slots)
        cohort = self._cohort(state, slots, data)
        new = self._absorb(key, state, slots, cohort, due)
        measured = {
            name: probe.measure(
                jax.random.fold_in(key, 6 + i),
                state.probes[name],
                new.server,
                slots.variables,
                cohort,
            )
            for i, (name, probe) in enumerate(self.probes.items())
        }
        moved = visited & (not self.selection.held)
        sent_down = visited & (fresh | moved | self.receive.downloads)
        choice = self.dispatch.offered
        offered = 1 if choice is None else jnp.where(fresh, choice(state.dispatch), 1)
        samples = trained.info.samples.astype(jnp.float32)
        metrics = Metrics(
            # Nobody visits a sample where every last batch is dropped: that is no divergence.
            loss=jnp.sum(trained.info.loss * samples) / jnp.maximum(jnp.sum(samples), 1),
            samples=jnp.sum(trained.info.samples),
            steps=jnp.sum(trained.info.steps),
            executed=jnp.sum(self.execution.executed(trained.info.steps)),
            # From client to client: up for the one, down for the other.
            uploads=jnp.sum(visited & (due | moved), dtype=jnp.int32) + exchanged,
            downloads=jnp.sum(jnp.where(sent_down, offered, 0), dtype=jnp.int32) + exchanged,
            visits=jnp.sum(visited, dtype=jnp.int32),
            probes={k: v for values, _ in measured.values() for k, v in values.items()},
        )
        new = new._replace(
            round=state.round + 1,
            slots=slots if self.carried else None,
            selection=self.selection.update(chosen, slots.client, trained.info),
            memory=memory,
            shared=shared,
            probes={name: state for name, (_, state) in measured.items()},
        )
        return new, metrics

    def _place(
        self, key: Array, state: FedState, data: ClientData
    ) -> tuple[Slots, Array, PyTree, Array]:
        """The slots before training, which are fresh, the selection's state, models exchanged."""
        count, nobody = self.slots, _clients(data)
        held = seat = jnp.arange(count, dtype=jnp.int32)
        counts = jnp.zeros(count, jnp.int32)
        source = seat
        if state.slots is not None:
            here = jnp.arange(len(state.slots.id), dtype=jnp.int32)
            seat = seat.at[state.slots.id].set(here, mode="drop")  # an empty place has id S
            held = state.slots.client[seat]
            source = self.redistribution(jax.random.fold_in(key, 1), count)
        mixed = source.ndim == 2
        if state.slots is not None:
            counts = state.slots.visits[seat if mixed else seat[source]]
        fresh = self.schedule.due(state.round - 1) | (state.round == 0)
        exchanged = jnp.sum(jnp.where(fresh, 0, self._received(source)), dtype=jnp.int32)
        vacant = fresh if self.selection.held else jnp.ones(count, bool)
        clients, chosen = self.selection.draw(
            jax.random.fold_in(key, 0),
            state.selection,
            data,
            held,
            vacant,
            jnp.where(fresh, 0, counts),
        )
        # The order in which a cohort was drawn must not show, not even in the last bit of a sum;
        # a slot that is to rest rests. Models in flight meet the next clients by chance: in the
        # order of their numbers, a slot that keeps its model would meet low or high ones only.
        group = jnp.asarray(self.schedule.group)
        by: tuple[Array, ...] = clients == nobody, group
        if self.carried and not self.selection.held:
            luck = jax.random.uniform(jax.random.fold_in(key, 2**30), (count,))
            by = jnp.where(fresh, 0, luck), *by
        awake = jnp.lexsort(by)
        clients = clients.at[awake].set(clients[jnp.lexsort((clients, group))])
        order = self.execution.seats(client_sizes(data, clients))
        if state.slots is None:
            carry = Slots((), order, order, order, order, (), (), ())  # type: ignore[arg-type]
        elif mixed:
            by_slot = tree.take(state.slots, seat)
            models = tree.mix(source, by_slot.variables)
            carry = tree.take(by_slot._replace(variables=models), order)
        else:
            carry = tree.take(state.slots, seat[source[order]])
        clients = jnp.where(order < count, clients[order], nobody)
        order, clients, fresh = self.execution.replicate((order, clients, fresh[order]))
        return carry._replace(id=order, client=clients), fresh, chosen, exchanged

    def _received(self, source: Array) -> Array:
        """The models that each slot's client gets from other clients, ``int32[S]``.

        Where slots move on to other clients every model travels, whatever its slot is.
        """
        seat = jnp.arange(self.slots, dtype=jnp.int32)
        if not self.selection.held:
            return jnp.zeros_like(seat)
        if source.ndim == 1:
            return (source != seat).astype(jnp.int32)
        return jnp.sum((source != 0) & (seat[:, None] != seat[None]), axis=1, dtype=jnp.int32)

    def _train(
        self, key: Array, state: FedState, data: ClientData, slots: Slots, fresh: Array
    ) -> tuple[Trained, Slots]:
        """One local update per place, ``[P]``, and the slots with what the dispatch gave them."""

        def visit(pixels: PyTree, common: PyTree, own: PyTree, task: _Task) -> PyTree:
            server, samples, sent, shared = common
            model, memory, left_with = own
            client = task.visit.view(pixels, data)
            send_key = jax.random.fold_in(task.key, 2**31 - 1)
            received, tag = self.dispatch.send(send_key, sent, server, client)
            origin = received if self.recalls else ()
            if self.carried:
                n_k = client.size if client.budget is None else client.budget
                n_k = n_k.astype(jnp.float32)
                corrected = self.receive.correct(server, samples, model, n_k)
                # A slot that rests takes nothing: it has no samples to weigh the server's against.
                stays = tree.select(n_k > 0, corrected, model)
                received, tag, origin = tree.select(
                    task.fresh, (received, tag, origin), (stays, task.tag, left_with)
                )
            return self.local.train(task.key, received, client, memory, shared), tag, origin

        local_key = jax.random.fold_in(key, 2)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(local_key, slots.client)
        tasks = _Task(keys, visits(data, slots.client, peers=self.local.peers), fresh, slots.tag)
        common = (state.server, state.server_samples, state.dispatch, state.shared)
        own = (slots.variables, tree.take(state.memory, slots.client), slots.received)
        trained, tag, received = self.execution.run(
            visit, samples_of(data), common, own, self.execution.replicate(tasks)
        )
        # Every device needs the reports of all, for the metrics at least.
        trained = trained._replace(info=self.execution.gather(trained.info))
        return trained, slots._replace(tag=tag, received=received)

    def _learnt(
        self, state: FedState, data: ClientData, client: Array, trained: Trained
    ) -> tuple[PyTree, PyTree]:
        """What the clients keep, and what they share, after their visits."""
        memory = jax.tree.map(
            lambda kept, rows: kept.at[client].set(rows, mode="drop"), state.memory, trained.memory
        )
        shared = self.local.absorb(
            state.shared, trained.message, client_sizes(data, client), _clients(data)
        )
        return memory, shared

    def _moved(
        self,
        slots: Slots,
        fresh: Array,
        visited: Array,
        trained: Trained,
        sizes: Array,
    ) -> Slots:
        """The slots after training."""
        since = jnp.where(fresh, 0, 1) if self.carried else jnp.zeros_like(sizes)
        info = trained.info
        if self.carried:  # a slot that rested keeps its last report
            info = tree.select_rows(visited, info, slots.info)
        return slots._replace(
            variables=trained.variables,
            visits=since * slots.visits + visited.astype(jnp.int32),
            seen=since * slots.seen + sizes,
            info=info,
        )

    def _cohort(self, state: FedState, slots: Slots, data: ClientData) -> Cohort:
        everywhere = jax.tree.map(lambda w: w[None], state.server)
        return Cohort(
            server=state.server,
            received=slots.received if self.recalls else everywhere,
            client=slots.client,
            samples=client_sizes(data, slots.client),
            info=slots.info,
            tag=slots.tag,
            data=data,
        )

    def _absorb(
        self, key: Array, state: FedState, slots: Slots, cohort: Cohort, due: Array
    ) -> FedState:
        """The server's part of the state after it took the models that are due, if any is."""
        # The clients' part would only be carried through the branches.
        state = state._replace(slots=None, selection=(), memory=(), shared=(), probes=())

        def take_due(_: None) -> FedState:
            counted = due & (slots.visits > 0)
            weights = jnp.where(counted, self.weighting(cohort.samples, slots.seen), 0)
            models, weights, screened = slots.variables, self.execution.replicate(weights), []
            for i, (screen, kept) in enumerate(zip(self.screens, state.screens, strict=True)):
                screen_key = jax.random.fold_in(jax.random.fold_in(key, 3), i)
                models, weights, kept = screen.apply(screen_key, kept, models, weights, cohort)
                screened.append(kept)
            aggregate = self.aggregator(models, weights)
            _check_shapes(aggregate, state.server)
            moved, opt_state = self.server.update(
                jax.random.fold_in(key, 4),
                aggregate,
                state.server,
                state.opt_state,
                cohort.data,
            )
            sent = self.dispatch.absorb(
                state.dispatch, moved, models, weights, cohort, self.aggregator
            )
            new = state._replace(
                server=moved,
                server_samples=jnp.sum(jnp.where(counted, cohort.samples, 0)).astype(jnp.float32),
                opt_state=opt_state,
                dispatch=sent,
                screens=tuple(screened),
            )
            # A cohort of nobody (Poisson's, say) moves nothing.
            return tree.select(jnp.any(weights > 0), new, state)

        if not self.carried:
            return take_due(None)
        return jax.lax.cond(jnp.any(due), take_due, lambda _: state, None)

    def collect(self, key: Array, state: FedState, data: ClientData) -> tuple[Variables, Array]:
        if state.slots is None:
            return state.server, jnp.int32(0)
        slots, due = state.slots, self.schedule.due(state.round - 1)
        everyone = jax.lax.cond(
            jnp.all(due),  # then the server has just absorbed them all
            lambda: state.server,
            lambda: (
                self._absorb(
                    key, state, slots, self._cohort(state, slots, data), slots.id < self.slots
                ).server
            ),
        )
        return everyone, jnp.sum(~due & self.selection.held, dtype=jnp.int32)

    def evaluated(self, key: Array, state: FedState, data: ClientData) -> Variables:
        """The mean of all models where there is no server, else the server's."""
        return self.collect(key, state, data)[0] if self.schedule.never else state.server

    def personally(
        self,
        key: Array,
        state: FedState,
        data: ClientData,
        score: Callable[[PyTree, Variables, PyTree], PyTree],
        constants: PyTree,
        tasks: PyTree,
    ) -> PyTree:
        """See :class:`fedjax_sim.base.Algorithm`, ``personal``."""
        assert self.personal is not None
        own_model, count = self.personal, _clients(data)
        everyone = jnp.arange(count, dtype=jnp.int32)
        place = self.execution.seats(client_sizes(data, everyone))

        def one(fixed: PyTree, common: PyTree, memory: PyTree, task: PyTree) -> PyTree:
            (pixels, constants), (server, sent), (key, visit, task) = fixed, common, task
            client = visit.view(pixels, data)
            received, _ = self.dispatch.send(None, sent, server, client)
            return score(constants, own_model(key, received, client, memory), task)

        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, 5), place)
        own = (keys, visits(data, place, peers=self.local.peers), tree.take(tasks, place))
        # All clients, but no more of them at once than a round trains.
        at_once = self.execution.places(self.slots) // len(self.execution.devices)
        execution = dataclasses.replace(self.execution, chunk=self.execution.chunk or at_once)
        out = execution.run(
            one,
            (samples_of(data), constants),
            (self.evaluated(key, state, data), state.dispatch),
            tree.take(state.memory, place),
            self.execution.replicate(own),
        )
        return jax.tree.map(
            lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype).at[place].set(a, mode="drop"),
            self.execution.replicate(out),
        )

    def traffic(self, variables: Variables, data: ClientData) -> Traffic:
        def besides(variables: Variables, data: ClientData) -> tuple[PyTree, PyTree]:
            once = self._replace(schedule=self.schedule._replace(period=1))  # no slots
            state = once.init(jax.random.key(0), variables, data)
            return self._first_visit(state, data)[0], state.shared

        message, shared = map(tree.num_bytes, jax.eval_shape(besides, variables, data))
        reads = {*self.selection.reads, *(name for part in self.screens for name in part.reads)}
        told = len(reads) + (self.dispatch.offered is not None)
        return Traffic(
            self._upload_bytes(variables),
            self._download_bytes(variables, _clients(data)),
            message + 4 * told,
            shared,
        )

    def _upload_bytes(self, variables: Variables) -> int:
        """To a server that knows what the client received, or whole to other clients."""
        held = self.selection.held
        if self.schedule.never or (held and self.wander):
            return tree.num_bytes(variables)
        return self.local.upload_bytes(variables, self.schedule.period if held else 1)

    def _download_bytes(self, variables: Variables, clients: int) -> int:
        """To a client that has the server model of its last download, the mean time ago."""
        others = self.wander or self.dispatch.offered is not None  # than the server's models
        if self.server.download_bytes is None or others:
            return tree.num_bytes(variables)
        active = self.selection.active or self.slots
        every_round = self.receive.downloads or not self.carried
        downloads = active * (self.schedule.period if every_round else 1)  # in a period
        updates = len(set(self.schedule.group.tolist()))
        return self.server.download_bytes(variables, math.ceil(clients * updates / downloads))

    def opening(self, variables: Variables, data: ClientData) -> Opening:
        parts = (self.local.opening, self.selection.opening)
        sent = [part(variables, data) for part in parts if part is not None]
        return Opening(sum(o.up for o in sent), sum(o.down for o in sent))


def _check_shapes(aggregate: PyTree, server: Variables) -> None:
    got, wanted = (
        jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (aggregate, server)
    )
    if got != wanted:
        raise ValueError(f"aggregator must return what the server holds, {wanted}, got {got}")


def _clients(data: ClientData) -> int:
    """N; also the number of nobody, the client of a place that is empty or rests."""
    return data.start.shape[-1] - 1
