"""Leaves that travel, stay with a client, or are frozen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Gathered, PyTree, Variables, shown
from fedjax_sim.engine import tree
from fedjax_sim.round.parts import Parts


def _masks(parts: Parts, variables: Variables) -> tuple[PyTree, PyTree]:
    """Returns masks of the leaves that stay with the clients, and of the frozen leaves."""
    own, frozen = (
        jax.tree.map(lambda leaf: False, variables) if choose is None else choose(variables)
        for choose in (parts.exchange.own, parts.exchange.frozen)
    )
    if any(jax.tree.leaves(jax.tree.map(lambda a, b: a and b, own, frozen))):
        raise ValueError(f"exchange {parts.exchange} must not freeze what the clients train")
    return own, frozen


def travels(parts: Parts, variables: Variables) -> PyTree:
    """Returns whether each leaf travels."""
    return jax.tree.map(lambda a, b: not (a or b), *_masks(parts, variables))


def travelling(parts: Parts, variables: Variables) -> Variables:
    """Returns the leaves that travel; the others are None."""
    out: Variables = tree.only(travels(parts, variables), variables)
    return out


def received(parts: Parts, variables: Variables) -> PyTree:
    """Returns whether each leaf is sent to clients: it travels, or the server moves it.

    Raises:
        ValueError: if the server moves a leaf that is not frozen.
    """
    sent, choose = travels(parts, variables), parts.server.moves
    if choose is None:
        return sent
    frozen, moved = _masks(parts, variables)[1], choose(variables)
    if any(jax.tree.leaves(jax.tree.map(lambda a, b: a and not b, moved, frozen))):
        raise ValueError(
            f"exchange {parts.exchange} must freeze what server {shown(parts.server)} moves"
        )
    return jax.tree.map(lambda a, b: a or b, sent, moved)


def own(parts: Parts, variables: Variables) -> PyTree:
    """Returns the leaves that stay with a client; () if there are none."""
    if parts.exchange.own is None:
        return ()
    return tree.only(_masks(parts, variables)[0], variables)


def constant(parts: Parts, variables: Variables) -> PyTree:
    """Returns the frozen leaves that the server does not move."""
    frozen, sent = _masks(parts, variables)[1], received(parts, variables)
    return tree.only(jax.tree.map(lambda a, b: a and not b, frozen, sent), variables)


def with_own(mine: PyTree, received: Variables) -> Variables:
    """Combines the received model and the client's own leaves."""
    if mine == ():
        return received
    out: Variables = tree.filled(mine, received)
    return out


def returned(parts: Parts, trained: Variables, received: Variables) -> Variables:
    """Returns a trained model whose leaves that do not travel are as received."""
    out: Variables = tree.filled(travelling(parts, trained), received)
    return out


def covered(parts: Parts, model: PyTree, client: Array, round: Array) -> PyTree:
    """Returns a model or an update with 0 in the entries that the client ``int32[]`` lacks."""
    if parts.exchange.coverage is None:
        return model
    return tree.masked(_coverage(parts, model, client, round), model)


def _coverage(parts: Parts, model: PyTree, client: Array, round: Array) -> PyTree:
    """Returns the entries that the client ``int32[]`` has: a mask that fits each leaf."""
    assert parts.exchange.coverage is not None
    return parts.exchange.coverage(model, client, round)


def over_covered(parts: Parts, mean: Variables, gathered: Gathered, round: Array) -> Variables:
    """Averages each entry over the clients that have it, given the mean over all clients."""
    if parts.exchange.coverage is None:
        return mean
    clients = gathered.cohort.client
    has = jax.vmap(lambda client: _coverage(parts, mean, client, round))(clients)
    share = tree.mean(jax.tree.map(lambda m: m.astype(jnp.float32), has), gathered.weights)
    out: Variables = jax.tree.map(
        lambda a, p: tree.in_dtype(jnp.where(p > 0, a / jnp.where(p > 0, p, 1), 0), a.dtype),
        mean,
        share,
    )
    return out


def covered_bytes(
    parts: Parts, variables: Variables, clients: Array, round: Array, leaves: PyTree
) -> Array:
    """Returns the bytes of each client's part of some leaves, ``int32[K]``.

    Raises:
        ValueError: if the model is too large for the integers.
    """
    if (size := tree.num_bytes(variables)) >= 2**31:
        raise ValueError(
            f"exchange {parts.exchange} needs a model of less than 2 GiB, got {size:,} bytes"
        )

    def of(client: Array) -> Array:
        def size(a: Array, has: Array, chosen: bool) -> Array:
            repeats = chosen * a.size // has.size * a.dtype.itemsize
            return jnp.sum(has, dtype=jnp.int32) * repeats

        each = jax.tree.map(size, variables, _coverage(parts, variables, client, round), leaves)
        return sum(jax.tree.leaves(each), jnp.int32(0))

    return jax.vmap(of)(clients)


def fragments(parts: Parts, variables: Variables) -> list[PyTree]:
    """Returns a mask of each fragment's leaves; [] if all travel in every round."""
    masks: list[PyTree] = [choose(variables) for choose in parts.exchange.fragments]
    if not masks:
        return []
    counts = jax.tree.map(lambda *chosen: sum(chosen), *masks)
    if counts != jax.tree.map(int, travels(parts, variables)) or not all(
        any(jax.tree.leaves(mask)) for mask in masks
    ):
        raise ValueError(
            f"exchange {parts.exchange} must have every leaf that travels in exactly one "
            "fragment, and no empty fragment"
        )
    return masks


def with_fragment(parts: Parts, turn: Array, server: Variables, model: Variables) -> Variables:
    """Returns the model with the fragment ``turn int32[]`` of the server model."""
    masks = fragments(parts, server)

    def newest(old: Array, new: Array, *chosen: bool) -> Array:
        mine = chosen.index(True) if any(chosen) else -1
        return jnp.where(turn % len(masks) == mine, new, old)

    out: Variables = jax.tree.map(newest, model, server, *masks)
    return out
