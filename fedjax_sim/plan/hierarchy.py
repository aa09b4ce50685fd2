"""HierFAVG: edge servers between the clients and the cloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    LearnedRedistribution,
    Need,
    PyTree,
    Slots,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import PLAIN_MEAN, STICKY, UNCHANGED
from fedjax_sim.engine.reading import two_weights
from fedjax_sim.plan.moves import Mixing


def _by_samples(weighting: Callable[..., Any]) -> bool:
    """Returns whether two models have weights in proportion to their clients' samples."""
    given = two_weights(weighting, (2, 80))
    return given is None or bool(np.isclose(given[1], 40 * given[0]))


BY_SAMPLES = Need(
    "weighting",
    "clients that count by their samples",
    lambda parts: _by_samples(parts.weighting),
    "weighting=by_samples",
)


class edges(LearnedRedistribution):
    r"""Edge servers that each average the models of their own clients between two rounds.

    .. math:: w_k \leftarrow \sum_{j \in C_\ell} \frac{n_j}{\sum_{i \in C_\ell} n_i} w_j
              \quad \text{for } k \in C_\ell

    where :math:`C_\ell` are the clients of edge ℓ that train. Between two rounds each of them sends
    a model to its edge and receives one. When the models are due, each edge sends their mean to the
    cloud, one more upload; when new ones start, it receives one, a download.

    It needs slots that keep their clients, and the plain mean of the models by samples.

    Args:
        of: the number L of edges, for client k at edge k mod L; or the edge of each client, a
            sequence or an array of whole numbers.

    Raises:
        ValueError: if L is below 1 or an edge is not a whole number; in the first round, if ``of``
            has not one entry per client, or there are more edges than clients.

    Source: Liu et al. 2020 <https://arxiv.org/abs/1905.06641>, Algorithm 1.

    >>> edges((0, 0, 1)).relays
    2
    """

    of: int | Sequence[int]

    needs = (STICKY, PLAIN_MEAN, UNCHANGED, BY_SAMPLES)

    def __post_init__(self) -> None:
        given = np.asarray(self.of)
        if given.ndim > 1 or given.dtype.kind not in "iu":
            raise ValueError(f"edges must be a whole number, or one for each client, got {self.of}")
        if not given.ndim and given < 1:
            raise ValueError(f"edges must be at least 1, got {self.of}")
        object.__setattr__(self, "of", tuple(given.tolist()) if given.ndim else int(given))

    @property
    def relays(self) -> int:
        return self.of if isinstance(self.of, int) else len({*self.of})

    def init(self, slots: int, data: ClientData) -> PyTree:
        if isinstance(self.of, int):
            if self.of > data.clients:
                raise ValueError(f"edges must be at most the {data.clients} clients, got {self.of}")
        elif len(self.of) != data.clients:
            raise ValueError(
                f"edges must have one entry for each of the {data.clients} clients, got "
                f"{len(self.of)}"
            )
        return ()

    def move(self, key: Array, state: PyTree, slots: Slots) -> tuple[Mixing, PyTree]:
        if isinstance(self.of, int):
            edge = slots.client % self.of
        else:
            edge = jnp.asarray(np.asarray(self.of, np.int32))[slots.client]
        count = slots.samples_visited.astype(jnp.float32)
        weight = jnp.where(edge[:, None] == edge[None], count[None], 0)
        total = tree.row_sum(weight.T)[:, None]
        alone = jnp.eye(len(edge), dtype=jnp.float32)
        mean = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), alone)
        return Mixing(mean, relayed=slots.visits > 0), state
