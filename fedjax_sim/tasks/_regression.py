"""Regression: numbers as targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Count, Metric, Sums, Task
from fedjax_sim.base.words import array_type
from fedjax_sim.tasks.losses import squared_error
from fedjax_sim.tasks.sums import Floats, add_up, mean_known, ratio


class _Errors(NamedTuple):
    """Errors of samples or sums over groups of samples, by target: ``[..., D]``."""

    squared: Array
    absolute: Array
    spread: Array


class regression(Task):
    r"""Regression of D numbers per sample; outputs are in the units of y.

    .. math:: \mathrm{MSE} = \frac1n \sum_i (\hat y_i - y_i)^2, \quad
        \mathrm{MAE} = \frac1n \sum_i |\hat y_i - y_i|, \quad
        R^2 = 1 - \frac{\sum_i (\hat y_i - y_i)^2}{\sum_i (y_i - \bar y)^2}

    over the n samples of a group with mean :math:`\bar y`; averaged over several targets without
    weights. Scores are ``mse``, which leads, and ``mae`` (lower is better), and ``r2``,
    which is unknown if all y of a group are equal. y is ``f32[n, D]``, or ``f32[n]`` if D is 1;
    outputs are ``[B, D]``.

    Args:
        targets: D.

    Raises:
        ValueError: if targets is not positive.

    Example:
        >>> regression().metrics["mse"].best
        'lowest'
    """

    targets: Count = 1

    loss = staticmethod(squared_error)

    @property
    def outputs(self) -> int:
        return self.targets

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {"mse": Metric("lowest"), "mae": Metric("lowest"), "r2": Metric()}

    def check(self, name: str, y: Any) -> None:
        shapes = ((), (1,)) if self.targets == 1 else ((self.targets,),)
        if y.shape[1:] not in shapes or not jnp.issubdtype(y.dtype, jnp.floating):
            wanted = "[n] or [n, 1]" if self.targets == 1 else f"[n, {self.targets}]"
            raise ValueError(f"{name} must be floats {wanted}, got {array_type(y)}")
        if not np.isfinite([y.min(), y.max()]).all():  # NaN is both
            raise ValueError(f"{name} must be finite, got {y.min()} to {y.max()}")

    def answers(self, outputs: Array, y: Array) -> Any:
        return outputs - y.reshape(outputs.shape)

    def sums(self, answers: Any, y: Array, group: Array, groups: int) -> Any:
        error, y = answers, y.reshape(answers.shape)
        own = jnp.minimum(group, groups - 1)
        n = add_up(jnp.ones((len(y), 1), y.dtype), group, groups)
        # From the group's mean: Σy² - nȳ² would lose all digits for y far from 0. And first from
        # its least y, so that the spread of equal y is exactly 0.
        y = y - jax.ops.segment_min(y, group, groups)[own]
        away = y - (add_up(y, group, groups) / jnp.maximum(n, 1))[own]
        errors = _Errors(jnp.square(error), jnp.abs(error), jnp.square(away))
        return add_up(errors, group, groups)

    def scores(self, sums: Sums) -> dict[str, Floats]:
        """Returns scores of sums ``[..., D]``.

        >>> errors = _Errors(*np.array([[1.0], [1.0], [4.0]]))
        >>> {name: float(a) for name, a in regression().scores(Sums(1.0, 2, errors)).items()}
        {'mse': 0.5, 'mae': 0.5, 'r2': 0.75}
        """
        errors, n = _Errors(*sums.own), np.asarray(sums.weight)[..., None]
        return {
            "mse": ratio(errors.squared, n).mean(axis=-1),
            "mae": ratio(errors.absolute, n).mean(axis=-1),
            "r2": mean_known(1 - ratio(errors.squared, errors.spread)),
        }
