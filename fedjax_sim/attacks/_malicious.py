"""Malicious clients, their poisoned labels and the base class of their attacks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, PyTree, Sending, Variables

Malicious = NDArray[np.bool_]
"""``bool[N]``, True for the clients that attack."""


def byzantine(clients: int, fraction: float, seed: int = 0) -> Malicious:
    """Draws a fixed random set of malicious clients.

    Args:
        clients: N.
        fraction: the fraction of clients that is malicious, rounded to whole clients.
        seed: the seed of the draw.

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


def label_flip(data: ClientData, malicious: Malicious, classes: int) -> ClientData:
    r"""Flips the labels that malicious clients see, :math:`y \leftarrow M - 1 - y`.

    A malicious client uses the wrong labels in everything that it computes: its gradients, the
    losses by which fair methods weight it and the losses by which it chooses a cluster. The
    server's own samples and the test sets are never poisoned.

    Args:
        data: the clients.
        malicious: ``bool[N]``.
        classes: M, the number of classes.

    Returns:
        The clients with their new labels; they share the samples of ``data``.

    Raises:
        ValueError: if malicious does not have an entry for each client, or the labels of data were
            changed before.

    Source: Fang et al. 2020 <https://arxiv.org/abs/1911.11815>, section 4.1.

    >>> data = ClientData(jnp.zeros(4), jnp.array([0, 1, 0, 2]), jnp.arange(4),
    ...                   jnp.array([0, 2, 4]), capacity=2)
    >>> label_flip(data, np.array([False, True]), 3).relabel.tolist()
    [[0, 1, 2], [2, 1, 0]]
    """
    check_malicious(malicious, data)
    if data.relabel is not None:
        raise ValueError("data must have its original labels, got labels that were changed before")
    honest = np.arange(classes, dtype=np.int32)
    seen = np.where(np.asarray(malicious)[:, None], classes - 1 - honest, honest)
    return dataclasses.replace(data, relabel=jnp.asarray(seen))


class Attack(Sending):
    """An attack of the clients ``malicious bool[N]``; the others send their true updates."""

    malicious: Malicious

    forges = True

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        check_malicious(self.malicious, data)
        return ()

    def hostile(self, client: Array) -> Array:
        """Returns whether ``client`` is malicious, in its shape; False for N, no client."""
        return jnp.append(jnp.asarray(self.malicious, bool), False)[client]


def check_malicious(malicious: Malicious, data: ClientData) -> None:
    """Rejects malicious clients of another population."""
    if np.shape(malicious) != (data.clients,):
        raise ValueError(
            f"malicious must be bool[{data.clients}], one for each client, got "
            f"shape {list(np.shape(malicious))}"
        )
