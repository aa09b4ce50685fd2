"""Messages of the clients in a round, after compression, clipping, noise and attacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    FedState,
    PyTree,
    Slots,
    Trained,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes, state_rows
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.collecting import expected_visits, measured_from, weights_of
from fedjax_sim.round.exchanging import travelling
from fedjax_sim.round.parts import Parts


class Messages(NamedTuple):
    """What is known of the messages of a round."""

    kept: PyTree  # [N, *] for each part, the clients' states
    sent: Array  # bool[P], the rows that sent a model
    # f32[P], the probability with which each row was to send; None if all were
    chance: Array | None
    bytes: Array | None  # int32[P], the bytes of each update; None if these are known beforehand


class _Task(NamedTuple):
    """Values that a row needs in addition to its update."""

    key: Array
    client: Array
    sends: Array
    trains: Array


def send(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    slots: Slots,
    trained: Trained,
    start: PyTree,
    due: Array,
    most: int | None,
) -> tuple[Trained, Messages]:
    """Applies the sending parts to the updates of a round; models that are not sent stay trained.

    ``start [P, *p]`` are the models that the clients received, if models travel, else (); the
    server collects the rows ``due bool[P]``. An update takes at most ``most`` bytes; None: they are
    not counted.
    """
    visited = slots.client < data.clients
    sends = visited & (due | parts.models_travel)
    if not parts.sending:
        return trained, Messages(state.sending, sends, None, None)
    known = start if parts.models_travel else measured_from(parts, state, slots)
    update = trained.variables
    if parts.in_flight:
        update = tree.subtract(update, known)
    update, message, messages = _apply_sending(
        parts, key, state, data, slots.client, sends, visited, known, update, trained.message, most
    )
    if parts.in_flight:
        update = tree.select_rows(messages.sent, tree.add(known, update), trained.variables)
    return trained._replace(variables=update, message=message), messages


def drop_late(
    state: FedState, data: ClientData, slots: Slots, messages: Messages, arrived: Array
) -> Messages:
    """Discards the messages of rows that have not ``arrived bool[P]``; keeps their bytes."""
    late = state_rows(data, jnp.where(arrived, data.clients, slots.client))

    def restored(before: Array, after: Array) -> Array:
        return after.at[late].set(before.at[late].get(mode="clip"), mode="drop")

    kept = jax.tree.map(restored, state.sending, messages.kept)
    return messages._replace(kept=kept, sent=messages.sent & arrived)


def skipped(parts: Parts, visited: Array, sent: Array) -> Array:
    """Returns the rows whose updates were rejected, ``bool[P]``: visited but not sent."""
    return visited & ~sent & any(part.screens for part in parts.sending)


def restore_skipped(
    parts: Parts,
    state: FedState,
    data: ClientData,
    slots: Slots,
    skipped: Array,
    trained: Trained,
    mine: PyTree,
) -> tuple[Trained, PyTree]:
    """Restores the state of ``skipped bool[P]`` clients; their reports keep steps and samples.

    ``mine [P, *p]`` are the leaves that stay with the clients.
    """
    if not any(part.screens for part in parts.sending):
        return trained, mine
    before = tree.take((state.client_state, state.own), state_rows(data, slots.client))
    kept, mine = tree.select_rows(skipped, before, (trained.client_state, mine))
    told = trained.info.loss, trained.info.extra
    loss, extra = tree.select_rows(skipped, jax.tree.map(jnp.zeros_like, told), told)
    info = trained.info._replace(loss=loss, extra=extra)
    return trained._replace(client_state=kept, info=info), mine


def send_rest(
    parts: Parts, key: Array, state: FedState, data: ClientData, slots: Slots, due: Array
) -> Slots:
    """Uploads the slots ``due bool[S]`` at the end of a run; returns all slots ``[S]``.

    Updates are relative to the newest server model; the download that compression would need for
    this, once per run, is not counted.
    """
    if not parts.sending or parts.models_travel:  # then all were sent unchanged
        return slots
    rows = jnp.arange(parts.execution.rows(len(due)), dtype=jnp.int32)
    padded = tree.take(slots, jnp.minimum(rows, len(due) - 1))
    sends = (
        (rows < len(due)) & due[jnp.minimum(rows, len(due) - 1)] & (padded.client < data.clients)
    )
    known = measured_from(parts, state, padded)
    update = tree.subtract(padded.variables, known)
    update, _, messages = _apply_sending(
        parts, key, state, data, padded.client, sends, sends, known, update, ()
    )
    models = tree.select_rows(messages.sent, tree.add(known, update), padded.variables)
    return slots._replace(variables=tree.take(models, rows[: len(due)]))


def _apply_sending(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    client: Array,
    sends: Array,
    trains: Array,
    known: Variables,
    update: Variables,
    message: PyTree,
    most: int | None = None,
) -> tuple[Variables, PyTree, Messages]:
    """Returns the updates ``[P]``, the shared messages and the :class:`Messages` after all parts.

    Updates are relative to the models ``known [P or 1]``. Updates of rows that do not send are
    unchanged, as are messages of rows that did not train.
    """
    kept, sent, whole, row = [], sends, update, state_rows(data, client)
    update, chance = travelling(parts, update), None
    sizes = None if most is None else jnp.full(len(client), most, jnp.int32)
    for i, (part, own) in enumerate(zip(parts.sending, state.sending, strict=True)):
        part_key = stream(key, Round.SENDING, i)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(part_key, client)
        if part.choose is not None:
            weights = _weights_of(parts, state, data, client, sent)
            sent, of_part = parts.execution.replicate(
                part.choose(part_key, update, weights, client, sent)
            )
            chance = of_part if chance is None else chance * of_part

        def one(_: PyTree, __: PyTree, own: PyTree, task: _Task, part: Any = part) -> PyTree:
            update, message, own = own
            given = part.send(task.key, own, update, message, task.client)
            if (given.bytes is not None) != part.measured:
                raise ValueError(
                    f"sending {part} must set Sent.bytes if it is measured, and only then, got "
                    f"measured={part.measured} and bytes={given.bytes}"
                )
            size: PyTree = ()
            if given.bytes is not None:
                size = jnp.asarray(given.bytes, jnp.int32)
            update, own = tree.select(task.sends, (given.update, given.kept), (update, own))
            message = tree.select(task.trains, given.message, message)
            return update, message, own, (task.sends & given.present, size)

        mine = tree.take(own, row)
        if part.hear is not None:
            mine = _apply_hear(part.hear, mine, travelling(parts, known))
        rows = (update, message, mine)
        # A client that withholds its update has nothing to encode; its residual stays.
        tasks = parts.execution.replicate(_Task(keys, client, sent, trains))
        update, message, rows, told = parts.execution.run(one, (), (), rows, tasks)
        present, size = parts.execution.replicate(told)
        kept.append(jax.tree.map(lambda a, new: a.at[row].set(new, mode="drop"), own, rows))
        sent = sent & present
        if part.measured and sizes is not None:
            sizes = jnp.minimum(sizes, size)
        if part.together is not None:
            update = part.together(part_key, update, client, sent)
    models = Variables(*tree.filled(update, whole))
    return models, message, Messages(tuple(kept), sent, chance, sizes)


def _weights_of(
    parts: Parts, state: FedState, data: ClientData, client: Array, sends: Array
) -> Array:
    """Returns the server's weights of the clients ``int32[P]`` if all that send are chosen."""
    samples = client_sizes(data, client, state.round)
    weights = weights_of(parts, samples, samples, sends)
    return weights / expected_visits(parts, state, data, client)


def _apply_hear(
    hear: Callable[[PyTree, Variables], PyTree], mine: PyTree, known: Variables
) -> PyTree:
    """Applies ``hear`` to the state of clients ``[P]``, with a model for each or one for all."""
    if jax.tree.leaves(known)[0].shape[0] == 1:
        return jax.vmap(hear, in_axes=(0, None))(mine, jax.tree.map(lambda a: a[0], known))
    return jax.vmap(hear)(mine, known)
