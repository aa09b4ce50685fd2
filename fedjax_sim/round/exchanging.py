"""Which leaves travel, stay with a client, or stay as they are."""

from __future__ import annotations

import jax

from fedjax_sim.base import PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.round.parts import Parts


def _masks(parts: Parts, variables: Variables) -> tuple[PyTree, PyTree]:
    """The leaves that stay with the clients, and those that are frozen."""
    own, frozen = (
        jax.tree.map(lambda leaf: False, variables) if choose is None else choose(variables)
        for choose in (parts.exchange.own, parts.exchange.frozen)
    )
    if any(jax.tree.leaves(jax.tree.map(lambda a, b: a and b, own, frozen))):
        raise ValueError(f"exchange {parts.exchange} must not freeze what the clients train")
    return own, frozen


def _travels(parts: Parts, variables: Variables) -> PyTree:
    return jax.tree.map(lambda a, b: not (a or b), *_masks(parts, variables))


def travelling(parts: Parts, variables: Variables) -> Variables:
    """The leaves that travel; the others are None."""
    out: Variables = tree.only(_travels(parts, variables), variables)
    return out


def own(parts: Parts, variables: Variables) -> PyTree:
    """The leaves that stay with a client; () for none."""
    if parts.exchange.own is None:
        return ()
    return tree.only(_masks(parts, variables)[0], variables)


def frozen(parts: Parts, variables: Variables) -> PyTree:
    """The leaves that nobody trains."""
    return tree.only(_masks(parts, variables)[1], variables)


def with_own(mine: PyTree, received: Variables) -> Variables:
    """The model that a client uses: what it received, and what it kept."""
    if mine == ():
        return received
    out: Variables = tree.filled(mine, received)
    return out


def returned(parts: Parts, trained: Variables, received: Variables) -> Variables:
    """A trained model with the leaves that do not travel as they were received."""
    out: Variables = tree.filled(travelling(parts, trained), received)
    return out
