"""Attacks of clients that know what others would send."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._malicious import Malicious, hostile_rows, one_for_each
from fedjax_sim.base import Array, PyTree, Sending, Variables, part
from fedjax_sim.engine import tree


class Seen(NamedTuple):
    """What colluding clients see of a round, by row.

    Attributes:
        updates: ``[P, *p]``, what everyone would send.
        client: ``int32[P]``, k; N if none.
        hostile: ``bool[P]``, malicious clients that send.
        honest: ``bool[P]``, the others that send.
    """

    updates: Variables
    client: Array
    hostile: Array
    honest: Array


class Forge(Protocol):
    """The parameters that all malicious clients of a round send."""

    def __call__(self, key: Array, seen: Seen, /) -> PyTree:
        """``[*p]``."""


def colluding(malicious: Malicious, forge: Forge, *, omniscient: bool = True) -> Sending:
    """A part by which all malicious clients send the same parameters.

    Args:
        malicious: ``bool[N]``.
        forge: makes them.
        omniscient: whether they need honest updates; if none is sent, they send what they trained.
    """

    def together(key: Array, updates: Variables, client: Array, sends: Array) -> Variables:
        hostile = sends & hostile_rows(malicious, client)
        honest = sends & ~hostile
        forged = tree.stack_copies(forge(key, Seen(updates, client, hostile, honest)), len(client))
        lying = hostile & jnp.any(honest) if omniscient else hostile
        return updates._replace(params=tree.select_rows(lying, forged, updates.params))

    return Sending(init=one_for_each(malicious), together=together, forges=True)


def moments(rows: PyTree, who: Array) -> tuple[PyTree, PyTree]:
    """Mean and standard deviation of every coordinate over the rows ``who bool[P]``."""
    # Of no row at all the moments are not used, but NaN would do harm to derivatives.
    weights = jnp.where(jnp.any(who), who, True).astype(jnp.float32)
    mean = tree.mean(rows, weights)
    square = jax.tree.map(lambda a, mu: jnp.square(a - mu[None]), rows, mean)
    return mean, jax.tree.map(jnp.sqrt, tree.mean(square, weights))


def shifted(mean: PyTree, by: Array, deviation: PyTree) -> PyTree:
    """``mean - by deviation``, in the dtypes of the mean."""
    return jax.tree.map(lambda mu, sigma: mu - by.astype(mu.dtype) * sigma, mean, deviation)


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

    def forge(key: Array, seen: Seen) -> PyTree:
        del key
        m = jnp.sum(seen.hostile, dtype=jnp.int32)
        n = m + jnp.sum(seen.honest, dtype=jnp.int32)
        shift = hidden_shift(n, m) if z is None else jnp.float32(z)
        mean, deviation = moments(seen.updates.params, seen.hostile)
        return shifted(mean, shift, deviation)

    return colluding(malicious, forge, omniscient=False)


@part
def ipm(malicious: Malicious, epsilon: float = 0.5) -> Sending:
    r"""Inner-product manipulation: the mean of the honest updates, backwards.

    .. math:: \Delta_k \leftarrow -\frac{\varepsilon}{\lvert H \rvert} \sum_{j \in H} \Delta_j

    over the honest clients H that send, whose updates the attackers know. A small ε lies so near
    to the honest updates that distances do not tell it apart, while the inner product of aggregate
    and true mean becomes negative; a large one breaks the mean.

    Args:
        malicious: ``bool[N]``.
        epsilon: ε.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if epsilon is not positive and finite.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03936>, section 4.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")

    def forge(key: Array, seen: Seen) -> PyTree:
        del key
        mean, _ = moments(seen.updates.params, seen.honest)
        return tree.scale(-epsilon, mean)

    return colluding(malicious, forge)


@part
def mimic(malicious: Malicious, target: int = 0) -> Sending:
    r"""Every attacker sends what one honest client sends, :math:`\Delta_k \leftarrow \Delta_{i^*}`.

    What is sent is honest, so that nothing about it is suspicious; but the samples of one client
    count as many times as there are attackers, and under label skew a robust rule may take those of
    others for the outliers.

    Args:
        malicious: ``bool[N]``.
        target: i*, the client that is copied. If it is malicious or does not send in a round, it is
            the next one by number, after the last the first, that is honest and does.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if there is no such client.

    Source: Karimireddy et al. 2022 <https://arxiv.org/abs/2006.09365>, section 3; the paper also
    has attackers look for the client whose copies do most harm.
    """
    clients = len(malicious)
    if not 0 <= target < clients:
        raise ValueError(f"target must be in 0..{clients - 1}, got {target}")

    def forge(key: Array, seen: Seen) -> PyTree:
        del key
        after = (seen.client - target) % clients
        nearest = jnp.argmin(jnp.where(seen.honest, after, clients))
        return tree.take(seen.updates.params, nearest)

    return colluding(malicious, forge)


def hidden_shift(n: Array, m: Array) -> Array:
    """The z of Baruch et al. for m malicious of n rows, at least 0 and finite."""
    needed = n // 2 + 1 - m
    honest = jnp.maximum(n - m, 1)
    share = (honest - needed).astype(jnp.float32) / honest.astype(jnp.float32)
    return jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 0.999))
