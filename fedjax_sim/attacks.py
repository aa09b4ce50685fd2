"""Attacks of malicious clients, to see what a defence withstands.

Attacks on models are pre-aggregations and come first among them, before any defence. They change
the trainable parameters of present malicious rows and nothing else: a BatchNorm statistic out of
its range would give the attacker away.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    Batch,
    ClientData,
    ClientView,
    Cohort,
    PreAggregation,
    PyTree,
    Transform,
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
def sign_flip(malicious: Malicious, scale: float = 4.0) -> PreAggregation:
    r"""Sends the opposite update, :math:`w_k \leftarrow w - s (w_k - w)`.

    Args:
        malicious: ``bool[N]``.
        scale: s.

    Returns:
        A pre-aggregation without state.

    Source: Li et al. 2019 <https://arxiv.org/abs/1811.03761>, section 5, with s = 4.
    """

    def flipped(key: Array, rows: PyTree, start: PyTree, hostile: Array, present: Array) -> PyTree:
        del key, hostile, present
        return jax.tree.map(lambda a, w: w - scale * (a - w), rows, start)

    return _on_models(malicious, flipped)


@part
def gaussian(malicious: Malicious, sigma: float) -> PreAggregation:
    r"""Sends noise around the model that was received, :math:`w_k \leftarrow w + N(0, \sigma^2 I)`.

    Args:
        malicious: ``bool[N]``.
        sigma: σ; every client draws its own noise in every round.

    Returns:
        A pre-aggregation without state.

    Raises:
        ValueError: if sigma is negative.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, section
    5, where the gradient itself is noise.
    """
    if not sigma >= 0:
        raise ValueError(f"sigma must be at least 0, got {sigma}")

    def noisy(key: Array, rows: PyTree, start: PyTree, hostile: Array, present: Array) -> PyTree:
        del hostile, present
        leaves, structure = jax.tree.flatten(rows)
        keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
        return jax.tree.map(
            lambda k, a, w: w + sigma * jax.random.normal(k, a.shape, a.dtype),
            keys,
            rows,
            start,
        )

    return _on_models(malicious, noisy)


@part
def alie(malicious: Malicious, z: float | None = None) -> PreAggregation:
    r"""A little is enough: a shift that hides in the spread of the models.

    .. math:: w_k \leftarrow \mu - z \sigma, \qquad
              z = \Phi^{-1}\Bigl(\frac{n - m - s}{n - m}\Bigr), \quad
              s = \Bigl\lfloor \frac n2 + 1 \Bigr\rfloor - m

    with the mean μ and standard deviation σ of every coordinate over what the m malicious of the n
    present rows would have sent honestly: they know each other's models and no others.

    Args:
        malicious: ``bool[N]``.
        z: the shift in standard deviations; None: by the formula, but at least 0: it is 0 if the
            malicious are too few to sway a majority, such as 2 of 10.

    Returns:
        A pre-aggregation without state.

    Source: Baruch et al. 2019 <https://arxiv.org/abs/1902.06156>, Algorithm 3 (the paper's own, not
    omniscient, variant).
    """

    def shifted(key: Array, rows: PyTree, start: PyTree, hostile: Array, present: Array) -> PyTree:
        del key, start
        n, m = (jnp.sum(a, dtype=jnp.int32) for a in (present, hostile))
        shift = _hidden_shift(n, m) if z is None else jnp.float32(z)
        who = hostile.astype(jnp.float32)
        mean = tree.mean(rows, who)
        square = tree.mean(jax.tree.map(lambda a, mu: jnp.square(a - mu[None]), rows, mean), who)
        sent = jax.tree.map(
            lambda mu, var: mu - shift.astype(mu.dtype) * jnp.sqrt(var), mean, square
        )
        return tree.stack_copies(sent, len(present))

    return _on_models(malicious, shifted)


@part
def label_flip(malicious: Malicious, classes: int) -> Transform:
    r"""Trains on wrong labels, :math:`y \leftarrow M - 1 - y`; for a local update's ``transforms``.

    Args:
        malicious: ``bool[N]``; the server's own samples are never poisoned.
        classes: M, the number of classes.

    Returns:
        A transform of minibatches.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 4.1.

    >>> client = ClientView(*(jnp.zeros(1),) * 5, capacity=1, id=jnp.int32(1))
    >>> batch = Batch(jnp.zeros(2), jnp.array([0, 7]), jnp.ones(2, bool))
    >>> label_flip(np.array([False, True]), 10)(None, batch, client).y.tolist()
    [9, 2]
    """

    def flip(key: Array, batch: Batch, client: ClientView, /) -> Batch:
        del key
        if client.id is None:
            return batch
        hostile = jnp.asarray(malicious)[client.id]
        return batch._replace(y=jnp.where(hostile, classes - 1 - batch.y, batch.y))

    return flip


Forge = Callable[[Array, PyTree, PyTree, Array, Array], PyTree]
"""``(key, rows [P, *p], start [P or 1, *p], hostile bool[P], present bool[P]) -> rows``."""


def _on_models(malicious: Malicious, forge: Forge) -> PreAggregation:
    """A pre-aggregation that puts forged parameters into the present malicious rows."""

    def init(variables: Variables, data: ClientData) -> PyTree:
        del variables
        if malicious.shape != (data.clients,):
            raise ValueError(
                f"malicious must be bool[{data.clients}], one for each client, got "
                f"shape {list(malicious.shape)}"
            )
        return ()

    def apply(
        key: Array, state: PyTree, models: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        present = weights > 0
        hostile = present & jnp.append(malicious, False)[cohort.client]
        forged = forge(key, models.params, cohort.received.params, hostile, present)
        params = tree.select_rows(hostile, forged, models.params)
        return Variables(params, models.state), weights, state

    return PreAggregation(init, apply)


def _hidden_shift(n: Array, m: Array) -> Array:
    """The z of Baruch et al. for m malicious of n rows, at least 0 and finite."""
    needed = n // 2 + 1 - m
    honest = jnp.maximum(n - m, 1)
    share = (honest - needed).astype(jnp.float32) / honest.astype(jnp.float32)
    return jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, 0.999))
