"""Weights of the collected models: ``(n_k int32[P], samples_visited int32[P]) -> a_k f32[P]``.

``samples_visited`` counts the samples of all clients that trained the model since it left the
server. A model that no client trained does not count, even if its weight is positive.
:class:`unbiased` also divides the weights by the expected number of visits of the clients.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array, Part, Weighting

__all__ = ["by_samples", "by_samples_visited", "equal", "unbiased"]


def by_samples(samples: Array, samples_visited: Array) -> Array:
    """Returns n_k of the client visited last (FedAvg).

    >>> by_samples(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [3.0, 5.0]
    """
    return samples.astype(jnp.float32)


def by_samples_visited(samples: Array, samples_visited: Array) -> Array:
    """Returns the samples of all clients visited (Astraea's mediators).

    >>> by_samples_visited(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [9.0, 9.0]
    """
    return samples_visited.astype(jnp.float32)


def equal(samples: Array, samples_visited: Array) -> Array:
    """Returns 1 for each model (RADFed).

    >>> equal(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [1.0, 1.0]
    """
    return jnp.ones(samples.shape, jnp.float32)


class unbiased(Part):
    r"""Makes the aggregate an unbiased estimate of the aggregate of all clients.

    .. math:: \Delta_t = \sum_{i=1}^m \frac{a_{k_i}}{\pi_{k_i} \sum_{j=1}^N a_j}\, \Delta_{k_i},
              \qquad \mathrm{E}[\Delta_t] = \frac{\sum_{k=1}^N a_k \Delta_k}{\sum_{j=1}^N a_j}

    where :math:`\pi_k` is the expected number of slots that visit client k, which the selection
    states (:attr:`fedjax_sim.base.Selection.expected_visits`): the probability of its draw if no
    client is drawn twice. The factors do not sum to 1 in a round, so the state (BatchNorm
    statistics) is averaged with them as weights.

    Args:
        weighting: the weights a_k of the aggregate of all clients.

    Source: Horvitz, Thompson 1952 <https://doi.org/10.1080/01621459.1952.10483446>; Rizk et al.
    2020 <https://arxiv.org/abs/2012.07383>, for equal a_k.

    >>> unbiased(equal)
    unbiased(weighting=equal)
    """

    weighting: Weighting = by_samples

    per_visit = True

    def __call__(self, samples: Array, samples_visited: Array) -> Array:
        return self.weighting(samples, samples_visited)
