"""What a model that stays in flight takes from the new server model."""

from __future__ import annotations

from fedjax_sim import tree
from fedjax_sim.base import Array, PyTree, Receive


def nothing() -> Receive:
    """The local model goes on as it is (RADFed)."""
    return Receive(correct=lambda server, server_samples, local, samples: local, downloads=False)


def drift_correction() -> Receive:
    r"""A pull towards the server model, by the samples behind either.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k

    Source: Cornelis, listing 3 line 8.

    >>> import numpy as np
    >>> server, local = np.float32(0), np.float32(4)
    >>> float(drift_correction().correct(server, 30.0, local, 10.0))
    1.0
    """

    def correct(server: PyTree, server_samples: Array, local: PyTree, samples: Array) -> PyTree:
        pull = server_samples / (samples + server_samples)
        return tree.interpolate(local, server, pull)

    return Receive(correct=correct, downloads=True)
