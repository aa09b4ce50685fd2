"""Attacks of clients that know the updates of others."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._malicious import Attack
from fedjax_sim.base import Array, FinitePositive, PyTree, Variables
from fedjax_sim.engine import tree


class Seen(NamedTuple):
    """The updates of a round as colluding clients see them, by row."""

    updates: Variables  # [P, *p], the honest updates of all clients, the attackers included
    client: Array  # int32[P], k; N for a row without a client
    hostile: Array  # bool[P], True for malicious clients that send
    honest: Array  # bool[P], True for honest clients that send


class Colluding(Attack):
    """An attack of malicious clients that know each other; by default all send the same update."""

    @property
    def omniscient(self) -> bool:
        """Whether ``forge`` needs honest updates; without any, attackers send their true ones."""
        return True

    def together(self, key: Array, updates: Variables, client: Array, sends: Array) -> Variables:
        hostile = sends & self.hostile(client)
        honest = sends & ~hostile
        forged = self.forge_each(key, Seen(updates, client, hostile, honest))
        lying = hostile & jnp.any(honest) if self.omniscient else hostile
        return updates._replace(params=tree.select_rows(lying, forged, updates.params))

    def forge_each(self, key: Array, seen: Seen) -> PyTree:
        """Returns the parameters ``[P, *p]`` that attackers send, by row."""
        return tree.stack_copies(self.forge(key, seen), len(seen.client))

    def forge(self, key: Array, seen: Seen) -> PyTree:
        """Returns the parameters ``[*p]`` that all attackers send."""
        raise NotImplementedError


def moments(rows: PyTree, who: Array) -> tuple[PyTree, PyTree]:
    """Returns mean and standard deviation of every coordinate over the rows ``who bool[P]``."""
    # Without any row the moments are not used, but NaN would spoil derivatives.
    weights = jnp.where(jnp.any(who), who, True).astype(jnp.float32)
    mean = tree.mean(rows, weights)
    square = jax.tree.map(lambda a, mu: jnp.square(a - mu[None]), rows, mean)
    return mean, jax.tree.map(jnp.sqrt, tree.mean(square, weights))


def shifted(mean: PyTree, by: Array, deviation: PyTree) -> PyTree:
    """Returns ``mean - by deviation``, in the dtypes of the mean."""
    return jax.tree.map(lambda mu, sigma: mu - by.astype(mu.dtype) * sigma, mean, deviation)


class alie(Colluding):
    r"""A little is enough (ALIE): a shift that hides in the spread of the updates.

    .. math:: \Delta_k \leftarrow \mu - z \sigma, \qquad
              z = \Phi^{-1}\Bigl(\frac{n - m - s}{n - m}\Bigr), \quad
              s = \Bigl\lfloor \frac n2 + 1 \Bigr\rfloor - m

    with the mean μ and standard deviation σ of every coordinate over the honest updates of the m
    malicious clients among the n that send: the attackers only know their own updates. A single
    attacker of a round has no σ and sends its own update.

    Args:
        malicious: ``bool[N]``.
        z: the shift in standard deviations; None: by the formula, but at least 0. It is 0 if there
            are too few attackers to sway a majority, such as 2 of 10.

    Raises:
        ValueError: if z is not finite.

    Source: Baruch et al. 2019 <https://arxiv.org/abs/1902.06156>, Algorithm 3 (the paper's main
    variant, which is not omniscient).
    """

    z: float | None = None

    def __post_init__(self) -> None:
        if self.z is not None and not math.isfinite(self.z):
            raise ValueError(f"z must be finite, got {self.z}")

    @property
    def omniscient(self) -> bool:
        return False

    def forge(self, key: Array, seen: Seen) -> PyTree:
        m = jnp.sum(seen.hostile, dtype=jnp.int32)
        n = m + jnp.sum(seen.honest, dtype=jnp.int32)
        shift = hidden_shift(n, m) if self.z is None else jnp.float32(self.z)
        mean, deviation = moments(seen.updates.params, seen.hostile)
        return shifted(mean, shift, deviation)


class ipm(Colluding):
    r"""Inner-product manipulation (IPM): the negated mean of the honest updates.

    .. math:: \Delta_k \leftarrow -\frac{\varepsilon}{\lvert H \rvert} \sum_{j \in H} \Delta_j

    over the honest clients H that send, whose updates the attackers know. With a small ε the forged
    update is so close to the honest ones that distances do not reveal it, while the inner product
    of the aggregate and the true mean becomes negative; a large ε breaks the mean.

    Args:
        malicious: ``bool[N]``.
        epsilon: ε.

    Raises:
        ValueError: if epsilon is not positive and finite.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03936>, section 4.
    """

    epsilon: FinitePositive = 0.5

    def forge(self, key: Array, seen: Seen) -> PyTree:
        mean, _ = moments(seen.updates.params, seen.honest)
        return tree.scale(-self.epsilon, mean)


class mimic(Colluding):
    r"""Copies of one honest client's update, :math:`\Delta_k \leftarrow \Delta_{i^*}`.

    The forged updates are honest, so they do not look suspicious; but the samples of one client are
    counted again for every attacker, and under label skew a robust rule may treat the updates of
    the other clients as outliers.

    Args:
        malicious: ``bool[N]``.
        target: i*, the client that is copied. If it is malicious or does not send in a round, the
            next honest client that sends is copied, by number and cyclically.

    Raises:
        ValueError: if target is not a client.

    Source: Karimireddy et al. 2022 <https://arxiv.org/abs/2006.09365>, section 3; in the paper the
    attackers also search for the client whose copies do the most harm.
    """

    target: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.target < len(self.malicious):
            raise ValueError(f"target must be in 0..{len(self.malicious) - 1}, got {self.target}")

    def forge(self, key: Array, seen: Seen) -> PyTree:
        clients = len(self.malicious)
        after = (seen.client - self.target) % clients
        nearest = jnp.argmin(jnp.where(seen.honest, after, clients))
        return tree.take(seen.updates.params, nearest)


def hidden_shift(n: Array, m: Array) -> Array:
    """Returns the z of Baruch et al. for m malicious of n rows, at least 0 and finite."""
    needed = n // 2 + 1 - m
    honest = jnp.maximum(n - m, 1)
    share = (honest - needed).astype(jnp.float32) / honest.astype(jnp.float32)
    return jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 0.999))
