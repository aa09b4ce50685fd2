"""Noise that clients add themselves, and Gaussian noise for all mechanisms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Finite, Need, PyTree, Sending, Sent, Variables
from fedjax_sim.engine import tree


def _before_codes(parts: Any) -> bool:
    """Returns whether no noise is added to an update that is encoded already."""
    coded = [part.bytes is not None for part in parts.sending]
    noisy = [isinstance(part, noise) for part in parts.sending]
    return True not in coded or True not in noisy[coded.index(True) :]


BEFORE_CODES = Need(
    "sending",
    "to come before codes, whose messages have no room for it",
    _before_codes,
    "sending=(noise(sigma), compressed(...))",
)


class noise(Sending):
    r"""Adds noise to every client's update.

    .. math:: \Delta_k \leftarrow \Delta_k + N(0, \sigma^2 I)

    With :func:`fedjax_sim.sending.clip_norm` right before it, a client's message is private even
    for the server: :meth:`fedjax_sim.Algorithm.client_epsilon`.

    Args:
        sigma: σ.

    Raises:
        ValueError: if sigma is negative or not finite.
    """

    sigma: Finite

    needs = (BEFORE_CODES,)

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        drawn = normal(key, update.params, self.sigma)
        return Sent(update._replace(params=tree.add(update.params, drawn)), message, kept)


def normal(key: Array, like: PyTree, deviation: float | Array) -> PyTree:
    """Draws independent N(0, deviation²) in the shape of ``like``."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    noise = [
        jnp.asarray(deviation, a.dtype) * jax.random.normal(k, a.shape, a.dtype)
        for k, a in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noise)
