"""Updates of models in flight with the new server model."""

from __future__ import annotations

from fedjax_sim.base import Array, Refresh, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import ONE_MODEL, STICKY

__all__ = ["drift_correction", "nothing"]


class nothing(Refresh):
    """Leaves the local model unchanged (RADFed)."""


class drift_correction(Refresh):
    r"""Pulls the local model towards the server model, weighted by the samples behind each.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k

    Source: Cornelis 2022 <cornelis2022federated>, Algorithm 3 line 8.

    >>> import numpy as np
    >>> server, local = np.float32(0), np.float32(4)
    >>> float(drift_correction().correct(server, 30.0, local, 10.0))
    1.0
    """

    downloads = True
    needs = (ONE_MODEL, STICKY)

    def correct(
        self, server: Variables, server_samples: Array, local: Variables, samples: Array
    ) -> Variables:
        return tree.interpolate(local, server, server_samples / (samples + server_samples))
