"""Attacks of clients that do not know each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.attacks._malicious import Attack
from fedjax_sim.base import Array, Finite, FinitePositive, PyTree, Sent, Variables


class _Alone(Attack):
    """An attack that replaces every floating-point leaf; integers stay as they are."""

    messages = True

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        hostile = self.hostile(client)
        leaves, structure = jax.tree.flatten((update.params, message))
        keys = jax.random.split(key, max(len(leaves), 1))
        sent = [
            jnp.where(hostile, self.forge(k, a), a) if jnp.issubdtype(a.dtype, jnp.floating) else a
            for k, a in zip(keys, leaves, strict=True)
        ]
        params, message = jax.tree.unflatten(structure, sent)
        return Sent(update._replace(params=params), message, kept)

    def forge(self, key: Array, leaf: Array) -> Array:
        """Returns the forged value that a malicious client sends instead of ``leaf``."""
        raise NotImplementedError


class sign_flip(_Alone):
    r"""Sends the negated, scaled update, :math:`\Delta_k \leftarrow -s\,\Delta_k`.

    Args:
        malicious: ``bool[N]``.
        scale: s.

    Raises:
        ValueError: if scale is not positive and finite.

    Source: Li et al. 2019 <https://arxiv.org/abs/1811.03761>, section 5, with s = 4.
    """

    scale: FinitePositive = 4.0

    def forge(self, key: Array, leaf: Array) -> Array:
        return jnp.asarray(-self.scale, leaf.dtype) * leaf


class scaling(_Alone):
    r"""Sends the scaled update, :math:`\Delta_k \leftarrow \gamma\,\Delta_k`.

    With γ = N/η, for a server that adds η/N times the sum of N updates, a single attacker's model
    replaces the server's once the honest updates are small. It is used with poisoned samples, see
    :func:`fedjax_sim.attacks.backdoor`.

    Args:
        malicious: ``bool[N]``.
        factor: γ.

    Raises:
        ValueError: if factor is not positive and finite.

    Source: Bagdasaryan et al. 2018 <https://arxiv.org/abs/1807.00459>, section 4.2, model
    replacement.
    """

    factor: FinitePositive | Array

    def forge(self, key: Array, leaf: Array) -> Array:
        return jnp.asarray(self.factor, leaf.dtype) * leaf


class gaussian(_Alone):
    r"""Sends noise instead of an update, :math:`\Delta_k \leftarrow N(0, \sigma^2 I)`.

    Args:
        malicious: ``bool[N]``.
        sigma: σ; every malicious client draws new noise in every round.

    Raises:
        ValueError: if sigma is negative or not finite.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, section
    5, where the gradient itself is noise.
    """

    sigma: Finite

    def forge(self, key: Array, leaf: Array) -> Array:
        return jnp.asarray(self.sigma, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
