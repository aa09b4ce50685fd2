"""The ε that each client spends by adding noise itself, for its samples or for its updates."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

from fedjax_sim.privacy._accounting import accountants, gaussian


@dataclasses.dataclass(frozen=True)
class SamplePrivacy:
    """The privacy of a client's samples under :class:`fedjax_sim.local.dp_sgd`.

    Attributes:
        noise_multiplier: σ.
        batch_size: B.
        steps: T_k of a visit, by n_k; the largest if clients have epochs of their own.
    """

    noise_multiplier: float
    batch_size: int
    steps: Mapping[int, int]

    protects: ClassVar[str] = "each sample of a client"

    def delta(self, clients: int, largest: int) -> float:
        """Returns the default δ, n_k^-1.1 of the largest client."""
        return float(largest**-1.1)

    def order(self, samples: int, visits: int) -> float:
        """Ranks clients by ε, at no cost: q_k √T_k, to which it is proportional for many steps."""
        return min(1.0, self.batch_size / samples) * math.sqrt(visits * self.steps[samples])

    def epsilon(self, samples: int, visits: int, delta: float) -> float:
        """Returns :func:`sample_epsilon` of the steps of all visits."""
        return sample_epsilon(
            self.noise_multiplier,
            samples=samples,
            batch_size=self.batch_size,
            steps=visits * self.steps[samples],
            delta=delta,
        )


@dataclasses.dataclass(frozen=True)
class UpdatePrivacy:
    """The privacy of a client whose updates are clipped and get noise before they are sent.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the clip.
    """

    noise_multiplier: float

    protects: ClassVar[str] = "all samples of a client, even from the server"

    def delta(self, clients: int, largest: int) -> float:
        """Returns the default δ, N^-1.1."""
        return float(clients**-1.1)

    def order(self, samples: int, visits: int) -> float:
        """Ranks clients by ε: the number of updates."""
        return visits

    def epsilon(self, samples: int, visits: int, delta: float) -> float:
        """Returns ε of as many Gaussian mechanisms; two clipped updates are at most 2C apart."""
        _check(self.noise_multiplier, delta, 1)
        if not visits or not self.noise_multiplier:
            return math.inf if visits else 0.0
        return gaussian(2 * math.sqrt(visits) / self.noise_multiplier, delta)


ClientPrivacy = SamplePrivacy | UpdatePrivacy
"""The privacy of clients that add noise themselves."""


def sample_epsilon(
    noise_multiplier: float, *, samples: int, batch_size: int, steps: int, delta: float
) -> float:
    """Computes ε of (ε, δ) differential privacy of a client's single samples, for DP-SGD.

    Neighbours differ in one sample, whose gradients are zero in one of them; n_k is public, and the
    weights after every step may be public too. A step is a Gaussian mechanism on a Poisson sample
    of probability q_k = min(1, B/n_k). Exact if q_k is 1; otherwise an upper bound, from privacy
    loss distributions in steps of 0.001, which takes up to a second.

    Args:
        noise_multiplier: σ, the noise's standard deviation divided by C; 0 gives infinity.
        samples: n_k.
        batch_size: B.
        steps: the client's steps in all its visits; 0 gives 0.
        delta: δ; must be below 1/n_k to be meaningful.

    Returns:
        ε.

    Raises:
        ValueError: if a setting is out of range.
        ImportError: if q_k is below 1 and dp-accounting is not installed (extra ``privacy``).

    Source: Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>, for the subsampled Gaussian
    mechanism; Google 2022 <https://github.com/google/differential-privacy>, for dp-accounting,
    whose ``PLDAccountant`` is used.

    Example:
        >>> settings = {"samples": 600, "batch_size": 16, "delta": 1e-5}
        >>> round(sample_epsilon(1.1, steps=10 * 38, **settings), 2)  # ten visits of an epoch
        2.74
    """
    _check(noise_multiplier, delta, samples)
    for name, value, least in (("samples", samples, 0), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if steps == 0 or samples == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    return _sampled(noise_multiplier, min(1.0, batch_size / samples), steps, delta)


@functools.cache
def _sampled(noise_multiplier: float, q: float, steps: int, delta: float) -> float:
    """Computes ε of Poisson-subsampled Gaussian mechanisms."""
    if q == 1:
        return gaussian(math.sqrt(steps) / noise_multiplier, delta)
    dp_accounting, pld, _ = accountants()
    neighbours = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(neighbours, value_discretization_interval=1e-3)
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, step), steps)
    return float(accountant.get_epsilon(delta))


def _check(noise_multiplier: float, delta: float, samples: int) -> None:
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
    if not 0 < delta < 1 / max(samples, 1):
        raise ValueError(
            f"delta must be above 0 and below 1/n_k = {1 / max(samples, 1):.3g}, got {delta}"
        )
