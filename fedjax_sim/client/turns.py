"""Several local updates in one visit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientView,
    LocalInfo,
    LocalUpdate,
    PyTree,
    Trained,
    Variables,
    part,
    wrap,
)
from fedjax_sim.engine.streams import Client, stream


@part
def in_turn(*locals_: LocalUpdate) -> LocalUpdate:
    """Local updates one after another, each from the weights of the one before.

    Each keeps and shares what it would alone; to each, the model that it starts from is the one
    that was received. ``change`` changes all of them.

    Args:
        locals_: at least one.

    Returns:
        The local update; it reports the mean loss over the samples of all visits and the sums of
        their steps and samples, and numbers of one name by the last that has it.

    Raises:
        ValueError: if there is none, or one shares what follows from the server's step
            (client_momentum, past_models) or from a survey (mime).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.mlp((8, 8, 1), 10)
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
        >>> head, body = fs.leaves.head(model), fs.leaves.all_but(fs.leaves.head(model))
        >>> both = in_turn(local.change(trained=head, epochs=2), local.change(trained=body))
        >>> both.epochs
        3.0
    """
    if not locals_:
        raise ValueError("in_turn needs at least one local update")

    def wrapper(*locals_: LocalUpdate) -> LocalUpdate:
        if any(local.follow for local in locals_):
            raise ValueError(
                "in_turn must be of local updates that share what their clients send: "
                "client_momentum and past_models follow the server's step, which is of all of "
                "them together"
            )

        if any(local.survey for local in locals_):
            raise ValueError(
                "in_turn must be of local updates without a survey: that of mime is of the model "
                "that all clients have, which is another one in every turn but the first"
            )

        def client_state(variables: Variables) -> PyTree:
            return tuple(local.client_state(variables) for local in locals_)

        def shared_state(variables: Variables) -> PyTree:
            return tuple(local.shared_state(variables) for local in locals_)

        def train(
            key: Array,
            variables: Variables,
            client: ClientView,
            client_state: PyTree,
            shared_state: PyTree,
        ) -> Trained:
            visits: list[Trained] = []
            for i, (local, own, common) in enumerate(
                zip(locals_, client_state, shared_state, strict=True)
            ):
                own_key = stream(key, Client.TURN, i) if i else key
                visits.append(local.train(own_key, variables, client, own, common))
                variables = visits[-1].variables
                if client.limit is not None:
                    left = client.limit - visits[-1].info.steps
                    client = dataclasses.replace(client, limit=left)
            return Trained(
                variables,
                tuple(visit.client_state for visit in visits),
                tuple(visit.message for visit in visits),
                _together([visit.info for visit in visits]),
            )

        def reduce(
            shared_state: PyTree,
            messages: PyTree,
            weights: Array,
            clients: int,
            aggregator: Aggregator,
        ) -> PyTree:
            return tuple(
                local.reduce(common, sent, weights, clients, aggregator)
                for local, common, sent in zip(locals_, shared_state, messages, strict=True)
            )

        def steps(samples: Any) -> Any:
            return sum(local.steps(samples) for local in locals_)

        return dataclasses.replace(
            locals_[0],
            client_state=client_state,
            shared_state=shared_state,
            train=train,
            reduce=reduce,
            steps=steps,
            epochs=sum(local.epochs for local in locals_),
            peers=any(local.peers for local in locals_),
            corrections=tuple(term for local in locals_ for term in local.corrections),
            response=locals_[0].response if len(locals_) == 1 else None,
            fresh=all(local.fresh for local in locals_),
            stops=all(local.stops for local in locals_),
            known=all(local.known for local in locals_),
            trained=locals_[0].trained if len(locals_) == 1 else None,
            moves_start=len(locals_) > 1 or any(local.moves_start for local in locals_),
            needs=tuple(need for local in locals_ for need in local.needs),
        )

    return wrap(wrapper, *locals_)


def _together(infos: list[LocalInfo]) -> LocalInfo:
    """The report of several visits."""
    samples = sum((info.samples for info in infos), jnp.int32(0))
    total = sum((info.loss * info.samples.astype(jnp.float32) for info in infos), jnp.float32(0))
    extra: dict[str, jax.Array] = {}
    for info in infos:
        extra |= info.extra
    mean = total / jnp.maximum(samples, 1).astype(jnp.float32)
    return LocalInfo(mean, sum((info.steps for info in infos), jnp.int32(0)), samples, extra)
