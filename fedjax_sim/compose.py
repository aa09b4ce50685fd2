"""The only place where the parts of an algorithm meet."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import receive as receives
from fedjax_sim import redistribution as redistributions
from fedjax_sim import server as servers
from fedjax_sim import tree
from fedjax_sim.aggregators.mean import mean
from fedjax_sim.base import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    FedState,
    LocalUpdate,
    Metrics,
    PyTree,
    Receive,
    Redistribution,
    Schedule,
    Selection,
    Server,
    Slots,
    Variables,
)
from fedjax_sim.execution import Execution, client_sizes, make_execution
from fedjax_sim.weighting import by_samples


def compose(
    local: LocalUpdate,
    *,
    selection: Selection,
    schedule: Schedule,
    redistribution: Redistribution = redistributions.keep,
    receive: Receive | None = None,
    weighting: Callable[[Array], Array] = by_samples,
    aggregator: Aggregator = mean,
    server: Server | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""One local round of every federated algorithm.

    .. code-block:: text

        slots   <- redistribute(slots)
        clients <- the selection's, for slots without one
        slots   <- the server model if the slot was due last round, else receive(slot)
        slots   <- local update on those clients
        server  <- server update(aggregate(due slots, weights))

    Args:
        local: trains one model on one client.
        selection: which client each slot visits.
        schedule: which slots are due when; it also fixes the number of slots.
        redistribution: where models go between rounds.
        receive: what a slot that was not due takes from the server; default nothing.
        weighting: ``n_k int32[S] -> a_k f32[S]``.
        aggregator: ``([S, *p], a_k) -> [*p]``.
        server: how the server model moves; default it is replaced.
        execution: devices and chunks; default :func:`fedjax_sim.execution.make_execution`.

    Returns:
        An :class:`fedjax_sim.base.Algorithm` of pure functions.
    """
    receive = receive or receives.nothing()
    server = server or servers.replace()
    execution = execution or make_execution()
    count = len(schedule.group)
    places = execution.places(count)
    carried = schedule.period > 1

    def init(key: Array, variables: Variables, data: ClientData) -> FedState:
        del key
        clients = data.start.shape[-1] - 1
        if clients < count:
            raise ValueError(
                f"clients_per_round must be at most the {clients} clients, got {count}"
            )
        seats = jnp.minimum(jnp.arange(places, dtype=jnp.int32), count)
        slots = Slots(tree.stack_copies(variables, places), seats, seats) if carried else None
        return FedState(
            round=jnp.int32(0),
            server=variables,
            server_samples=jnp.float32(0),
            opt_state=server.init(variables),
            slots=slots,
            selection=selection.init(data),
        )

    def visit(key: Array, state: FedState, data: ClientData) -> tuple[Slots, Array, PyTree]:
        """Slots as the clients receive them, which of them are fresh, the selection's state."""
        held = seat = jnp.arange(count, dtype=jnp.int32)
        if state.slots is not None:
            here = jnp.arange(places, dtype=jnp.int32)
            seat = seat.at[state.slots.id].set(here, mode="drop")  # an empty place has id S
            held = state.slots.client[seat]
        fresh = schedule.due(state.round - 1) | (state.round == 0)
        vacant = fresh if selection.held else jnp.ones(count, bool)
        clients, chosen = selection.draw(
            jax.random.fold_in(key, 0), state.selection, data, held, vacant
        )
        # The order in which a cohort was drawn must not show, not even in the last bit of a sum.
        clients = clients[jnp.lexsort((clients, jnp.asarray(schedule.group)))]
        order = execution.seats(client_sizes(data, clients))
        models = state.server  # common to all, unless models are in flight
        if state.slots is not None:
            source = redistribution(jax.random.fold_in(key, 1), count)
            models = tree.take(state.slots.variables, seat[source[order]])
        nobody = data.start.shape[0] - 1
        clients = jnp.where(order < count, clients[order], nobody)
        order, clients, fresh = execution.replicate((order, clients, fresh[order]))
        return Slots(models, order, clients), fresh, chosen

    def step(key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
        slots, fresh, chosen = visit(key, state, data)
        sizes, real = client_sizes(data, slots.client), slots.id < count
        models = slots.variables
        if carried:
            corrected = jax.vmap(receive.correct, in_axes=(None, None, 0, 0))(
                state.server, state.server_samples, models, sizes.astype(jnp.float32)
            )
            models = tree.select_rows(fresh, tree.stack_copies(state.server, places), corrected)
        local_key = jax.random.fold_in(key, 2)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(local_key, slots.client)
        sizes, keys = execution.replicate((sizes, keys))
        trained, info, executed = execution.train(
            local, keys, models, data, slots.client, common=not carried
        )

        due = schedule.due(state.round)[slots.id] & real
        new_server, opt_state, samples = _absorb(state, trained, sizes, due)
        moved = real & (not selection.held)
        visited = info.samples.astype(jnp.float32)
        metrics = Metrics(
            # Nobody visits a sample where every last batch is dropped: that is no divergence.
            loss=jnp.sum(info.loss * visited) / jnp.maximum(jnp.sum(visited), 1),
            samples=jnp.sum(info.samples),
            steps=jnp.sum(info.steps),
            executed=jnp.sum(executed),
            uploads=jnp.sum(due | moved, dtype=jnp.int32),
            downloads=jnp.sum(real & (fresh | moved | receive.downloads), dtype=jnp.int32),
        )
        new = FedState(
            round=state.round + 1,
            server=new_server,
            server_samples=samples,
            opt_state=opt_state,
            slots=slots._replace(variables=trained) if carried else None,
            selection=chosen,
        )
        return new, metrics

    def _absorb(
        state: FedState, models: Variables, sizes: Array, due: Array
    ) -> tuple[Variables, PyTree, Array]:
        def collect_due(_: None) -> tuple[Variables, PyTree, Array]:
            weights = execution.replicate(jnp.where(due, weighting(sizes), 0))
            aggregate = aggregator(models, weights)
            moved, opt_state = server.update(aggregate, state.server, state.opt_state)
            return moved, opt_state, jnp.sum(jnp.where(due, sizes, 0)).astype(jnp.float32)

        if not carried:
            return collect_due(None)
        unchanged = (state.server, state.opt_state, state.server_samples)
        return jax.lax.cond(jnp.any(due), collect_due, lambda _: unchanged, None)

    def collect(state: FedState, data: ClientData) -> tuple[Variables, Array]:
        if state.slots is None:
            return state.server, jnp.int32(0)
        slots, due = state.slots, schedule.due(state.round - 1)
        sizes, real = client_sizes(data, slots.client), slots.id < count
        everyone = jax.lax.cond(
            jnp.all(due),  # then the server has just absorbed them all
            lambda: state.server,
            lambda: _absorb(state, slots.variables, sizes, real)[0],
        )
        return everyone, jnp.sum(~due & selection.held, dtype=jnp.int32)

    return Algorithm(init=init, step=step, collect=collect, slots=count)
