"""Attacks of malicious clients, to see what a defence withstands.

An attack is a part of what clients send (``compose(sending=...)``), and the first of them: codes
and defences come after it. It acts whenever a model is sent, and forges the trainable parameters
and, but for ALIE, the messages beside them (a control variate). It leaves the model's state alone:
a BatchNorm statistic out of its range would give the attacker away. Poisoned labels are a matter of
the data, see :func:`label_flip`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    ClientData,
    PyTree,
    Sending,
    Sent,
    Variables,
    part,
)
from fedjax_sim.engine import tree

Malicious = NDArray[np.bool_]


def byzantine(clients: int, fraction: float, seed: int = 0) -> Malicious:
    """A fixed random choice of malicious clients.

    Args:
        clients: N.
        fraction: the share of them that is malicious, rounded to whole clients.
        seed: of the choice.

    Returns:
        ``bool[N]`` (NumPy), True for a malicious client.

    Raises:
        ValueError: if fraction is not in [0, 1].

    >>> int(byzantine(50, 0.2).sum())
    10
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}")
    order = np.random.default_rng(seed).permutation(clients)
    return order < round(fraction * clients)


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


@part
def alie(malicious: Malicious, z: float | None = None) -> Sending:
    r"""A little is enough: a shift that hides in the spread of the updates.

    .. math:: \Delta_k \leftarrow \mu - z \sigma, \qquad
              z = \Phi^{-1}\Bigl(\frac{n - m - s}{n - m}\Bigr), \quad
              s = \Bigl\lfloor \frac n2 + 1 \Bigr\rfloor - m

    with the mean μ and standard deviation σ of every coordinate over what the m malicious of the n
    clients that send would have sent honestly: they know each other's updates and no others.

    Args:
        malicious: ``bool[N]``.
        z: the shift in standard deviations; None: by the formula, but at least 0: it is 0 if the
            malicious are too few to sway a majority, such as 2 of 10.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if z is not finite.

    Source: Baruch et al. 2019 <https://arxiv.org/abs/1902.06156>, Algorithm 3 (the paper's own, not
    omniscient, variant).
    """
    if z is not None and not math.isfinite(z):
        raise ValueError(f"z must be finite, got {z}")

    def together(key: Array, updates: Variables, client: Array, sends: Array) -> Variables:
        del key
        hostile = sends & jnp.append(malicious, False)[client]
        n, m = (jnp.sum(a, dtype=jnp.int32) for a in (sends, hostile))
        shift = _hidden_shift(n, m) if z is None else jnp.float32(z)
        # If no malicious client sends, the mean is not used.
        who = jnp.where(jnp.any(hostile), hostile, True).astype(jnp.float32)
        rows, mean = updates.params, tree.mean(updates.params, who)
        square = tree.mean(jax.tree.map(lambda a, mu: jnp.square(a - mu[None]), rows, mean), who)
        sent = jax.tree.map(
            lambda mu, var: mu - shift.astype(mu.dtype) * jnp.sqrt(var), mean, square
        )
        forged = tree.stack_copies(sent, len(client))
        return updates._replace(params=tree.select_rows(hostile, forged, updates.params))

    return Sending(init=_one_for_each(malicious), together=together)


def label_flip(data: ClientData, malicious: Malicious, classes: int) -> ClientData:
    r"""The same clients, of which the malicious see wrong labels, :math:`y \leftarrow M - 1 - y`.

    The labels are wrong in everything that a client computes: the gradients, and the losses by
    which fair methods weigh it and by which it chooses a cluster. The server's own samples and the
    test sets are never poisoned.

    Args:
        data: the clients.
        malicious: ``bool[N]``.
        classes: M, the number of classes.

    Returns:
        The clients, on the same samples.

    Raises:
        ValueError: if malicious does not have an entry for each client, or the labels of data are
            changed already.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 4.1.

    >>> data = ClientData(jnp.zeros(4), jnp.array([0, 1, 0, 2]), jnp.arange(4),
    ...                   jnp.array([0, 2, 4]), capacity=2)
    >>> label_flip(data, np.array([False, True]), 3).relabel.tolist()
    [[0, 1, 2], [2, 1, 0]]
    """
    _check_malicious(malicious, data)
    if data.relabel is not None:
        raise ValueError("data must have their own labels, got some that were changed before")
    honest = np.arange(classes, dtype=np.int32)
    seen = np.where(np.asarray(malicious)[:, None], classes - 1 - honest, honest)
    return dataclasses.replace(data, relabel=jnp.asarray(seen))


def _forged(malicious: Malicious, forge: Callable[[Array, Array], Array]) -> Sending:
    """A part by which malicious clients send ``forge(key, leaf)``; integers stay as they are."""

    def send(key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array) -> Sent:
        hostile = jnp.append(malicious, False)[client]
        leaves, structure = jax.tree.flatten((update.params, message))
        keys = jax.random.split(key, max(len(leaves), 1))
        sent = [
            jnp.where(hostile, forge(k, a), a) if jnp.issubdtype(a.dtype, jnp.floating) else a
            for k, a in zip(keys, leaves, strict=True)
        ]
        params, message = jax.tree.unflatten(structure, sent)
        return Sent(update._replace(params=params), message, kept)

    return Sending(init=_one_for_each(malicious), send=send)


def _one_for_each(malicious: Malicious) -> Callable[[Variables, ClientData], PyTree]:
    """``Sending.init`` of an attack, which keeps nothing."""

    def init(variables: Variables, data: ClientData) -> PyTree:
        del variables
        _check_malicious(malicious, data)
        return ()

    return init


def _check_malicious(malicious: Malicious, data: ClientData) -> None:
    if np.shape(malicious) != (data.clients,):
        raise ValueError(
            f"malicious must be bool[{data.clients}], one for each client, got "
            f"shape {list(np.shape(malicious))}"
        )


def _hidden_shift(n: Array, m: Array) -> Array:
    """The z of Baruch et al. for m malicious of n rows, at least 0 and finite."""
    needed = n // 2 + 1 - m
    honest = jnp.maximum(n - m, 1)
    share = (honest - needed).astype(jnp.float32) / honest.astype(jnp.float32)
    return jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 0.999))
