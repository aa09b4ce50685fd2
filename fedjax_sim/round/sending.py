"""What the clients send in a round: codes, clips, noise and attacks act here, and nowhere else."""

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
from fedjax_sim.engine.clients import state_rows
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.collecting import measured_from
from fedjax_sim.round.exchanging import travelling
from fedjax_sim.round.parts import Parts


class _Task(NamedTuple):
    """What a row needs besides its update."""

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
) -> tuple[Trained, PyTree, Array]:
    """What leaves the clients of a round.

    Args:
        parts: of the algorithm.
        key: of the round.
        state: before it.
        data: the clients.
        slots: ``[P]``, with the clients that trained.
        trained: ``[P]``, what they give, see :func:`fedjax_sim.round.training.train`.
        start: ``[P, *p]``, the models that they received, if models travel; else ().
        due: ``bool[P]``, the rows that the server collects.

    Returns:
        What the clients give, as it is sent (a model that is not sent stays as it was trained);
        what they keep, ``[N, *]`` for each part; ``bool[P]``, the rows that sent a model.
    """
    visited = slots.client < data.clients
    sends = visited & (due | parts.models_travel)
    if not parts.sending:
        return trained, state.sending, sends
    known = start if parts.models_travel else measured_from(parts, state, slots)
    if not parts.in_flight:
        given, message, kept, sent = _through(
            parts, key, state, data, slots.client, sends, visited, known, trained.variables,
            trained.message,
        )  # fmt: skip
        return trained._replace(variables=given, message=message), kept, sent
    update = tree.subtract(trained.variables, known)
    update, message, kept, sent = _through(
        parts, key, state, data, slots.client, sends, visited, known, update, trained.message
    )
    models = tree.select_rows(sent, tree.add(known, update), trained.variables)
    return trained._replace(variables=models, message=message), kept, sent


def skipped(parts: Parts, visited: Array, sent: Array) -> Array:
    """``bool[P]``, the rows whose clients were screened out: of ``visited`` those not ``sent``."""
    return visited & ~sent & any(part.screens for part in parts.sending)


def undone(
    parts: Parts,
    state: FedState,
    data: ClientData,
    slots: Slots,
    skipped: Array,
    trained: Trained,
    mine: PyTree,
) -> tuple[Trained, PyTree]:
    """What the clients give and keep, where some are ``skipped bool[P]``: these as before.

    Of their reports only the steps and samples are left.

    Args:
        parts: of the algorithm.
        state: before the round.
        data: the clients.
        slots: ``[P]``, with the clients that trained.
        skipped: see :func:`skipped`.
        trained: ``[P]``, what they give.
        mine: ``[P, *p]``, the leaves that stay with them.
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
    """The slots ``[S]`` of which ``due bool[S]`` are uploaded beside those that were before.

    What is sent is measured from the newest server model, which a code would have to know: that one
    download a run is not counted.
    """
    if not parts.sending or parts.models_travel:  # then all were sent as they were trained
        return slots
    rows = jnp.arange(parts.execution.rows(len(due)), dtype=jnp.int32)
    padded = tree.take(slots, jnp.minimum(rows, len(due) - 1))
    sends = (
        (rows < len(due)) & due[jnp.minimum(rows, len(due) - 1)] & (padded.client < data.clients)
    )
    known = measured_from(parts, state, padded)
    update = tree.subtract(padded.variables, known)
    update, _, _, sent = _through(
        parts, key, state, data, padded.client, sends, sends, known, update, ()
    )
    models = tree.select_rows(sent, tree.add(known, update), padded.variables)
    return slots._replace(variables=tree.take(models, rows[: len(due)]))


def _through(
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
) -> tuple[Variables, PyTree, PyTree, Array]:
    """Updates and messages ``[P]`` through all parts, measured from models ``known [P or 1]``.

    The update of a row that does not send stays as it is, and the message of one that did not
    train.
    """
    kept, sent, whole, row = [], sends, update, state_rows(data, client)
    update = travelling(parts, update)
    for i, (part, own) in enumerate(zip(parts.sending, state.sending, strict=True)):
        part_key = stream(key, Round.SENDING, i)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(part_key, client)

        def one(_: PyTree, __: PyTree, own: PyTree, task: _Task, part: Any = part) -> PyTree:
            update, message, own = own
            given = part.send(task.key, own, update, message, task.client)
            update, own = tree.select(task.sends, (given.update, given.kept), (update, own))
            message = tree.select(task.trains, given.message, message)
            return update, message, own, task.sends & given.present

        mine = tree.take(own, row)
        if part.hear is not None:
            mine = _heard(part.hear, mine, travelling(parts, known))
        rows = (update, message, mine)
        # A client that has withheld its update has nothing to encode: its residual stays.
        tasks = parts.execution.replicate(_Task(keys, client, sent, trains))
        update, message, rows, present = parts.execution.run(one, (), (), rows, tasks)
        kept.append(jax.tree.map(lambda a, new: a.at[row].set(new, mode="drop"), own, rows))
        sent = sent & parts.execution.replicate(present)
        if part.together is not None:
            update = part.together(part_key, update, client, sent)
    return Variables(*tree.filled(update, whole)), message, tuple(kept), sent


def _heard(hear: Callable[[PyTree, Variables], PyTree], mine: PyTree, known: Variables) -> PyTree:
    """What clients ``[P]`` keep of the models ``known``, one for each or one for all."""
    if jax.tree.leaves(known)[0].shape[0] == 1:
        return jax.vmap(hear, in_axes=(0, None))(mine, jax.tree.map(lambda a: a[0], known))
    return jax.vmap(hear)(mine, known)
