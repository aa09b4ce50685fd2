"""What a model that stays in flight takes from the new server model."""

from __future__ import annotations

from fedjax_sim.base import Array, PyTree, Refresh, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import ONE_MODEL, STICKY


@part
def nothing() -> Refresh:
    """The local model goes on unchanged (RADFed)."""
    return Refresh(correct=None, downloads=False)


@part
def drift_correction() -> Refresh:
    r"""A pull towards the server model, weighed by the samples behind each of the two.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k

    Returns:
        A refresh that downloads the server model.

    Source: Cornelis 2022 <cornelis2022federated>, Algorithm 3 line 8.

    >>> import numpy as np
    >>> server, local = np.float32(0), np.float32(4)
    >>> float(drift_correction().correct(server, 30.0, local, 10.0))
    1.0
    """

    def correct(server: PyTree, server_samples: Array, local: PyTree, samples: Array) -> PyTree:
        pull = server_samples / (samples + server_samples)
        return tree.interpolate(local, server, pull)

    return Refresh(correct=correct, downloads=True, needs=(ONE_MODEL, STICKY))
