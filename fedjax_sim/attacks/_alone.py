"""Attacks of clients that know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._malicious import Malicious, hostile_rows, one_for_each
from fedjax_sim.base import Array, PyTree, Sending, Sent, Variables, part


@part
def sign_flip(malicious: Malicious, scale: float = 4.0) -> Sending:
    r"""Sends the opposite of everything, :math:`\Delta_k \leftarrow -s\,\Delta_k`.

    Args:
        malicious: ``bool[N]``.
        scale: s.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if scale is not positive and finite.

    Source: Li et al. 2019 <https://arxiv.org/abs/1811.03761>, section 5, with s = 4.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return _forged(malicious, lambda key, a: jnp.asarray(-scale, a.dtype) * a)


@part
def gaussian(malicious: Malicious, sigma: float) -> Sending:
    r"""Sends noise in place of an update, :math:`\Delta_k \leftarrow N(0, \sigma^2 I)`.

    Args:
        malicious: ``bool[N]``.
        sigma: σ; every client draws its own noise in every round.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if sigma is negative or not finite.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, section
    5, where the gradient itself is noise.
    """
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma must be at least 0 and finite, got {sigma}")
    return _forged(
        malicious,
        lambda key, a: jnp.asarray(sigma, a.dtype) * jax.random.normal(key, a.shape, a.dtype),
    )


def _forged(malicious: Malicious, forge: Callable[[Array, Array], Array]) -> Sending:
    """A part by which malicious clients send ``forge(key, leaf)``; integers stay as they are."""

    def send(key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array) -> Sent:
        hostile = hostile_rows(malicious, client)
        leaves, structure = jax.tree.flatten((update.params, message))
        keys = jax.random.split(key, max(len(leaves), 1))
        sent = [
            jnp.where(hostile, forge(k, a), a) if jnp.issubdtype(a.dtype, jnp.floating) else a
            for k, a in zip(keys, leaves, strict=True)
        ]
        params, message = jax.tree.unflatten(structure, sent)
        return Sent(update._replace(params=params), message, kept)

    return Sending(init=one_for_each(malicious), send=send, messages=True, forges=True)
