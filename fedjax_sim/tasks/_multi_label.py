"""Multi-label classification: any number of labels for every sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Count, Metric, Sums, Task
from fedjax_sim.base.words import array_type
from fedjax_sim.tasks.sums import SHARE, Floats, plain_sums, ratio


def sigmoid_cross_entropy(outputs: Array, y: Array) -> Array:
    r"""Returns the mean over the labels of :math:`-\log \sigma(\pm f_l)`, ``f32[B]``."""
    return jnp.mean(jax.nn.softplus(outputs) - outputs * y.astype(outputs.dtype), axis=-1)


class _Answers(NamedTuple):
    """Counts by label, ``[..., L]``, of samples or groups, and of samples with all correct."""

    true_positive: Array
    predicted: Array
    actual: Array
    right: Array
    all_right: Array


class multi_label(Task):
    r"""Any subset of L labels per sample; outputs are logits, and a label above 0 is predicted.

    .. math:: F_1^{micro} = \frac{2 \sum_l \mathrm{TP}_l}{\sum_l (n_l + \hat n_l)}, \qquad
        F_1^{macro} = \frac1L \sum_l \frac{2\,\mathrm{TP}_l}{n_l + \hat n_l}

    with :math:`n_l` samples that have label l, :math:`\hat n_l` predictions of it, and
    :math:`\mathrm{TP}_l` of both; 0 / 0 counts as 0 in the macro F1 and is unknown in the micro F1.
    Scores are ``f1_micro``, which leads, and ``f1_macro``; ``label_accuracy``, the fraction of
    correct labels (one minus the Hamming loss); and ``subset_accuracy``, the fraction of samples
    with all labels correct. y is bool, or integers 0 and 1, ``[n, L]``; outputs are ``[B, L]``.

    Args:
        labels: L.

    Raises:
        ValueError: if labels is not positive.

    Example:
        >>> list(multi_label(5).metrics)
        ['f1_micro', 'f1_macro', 'label_accuracy', 'subset_accuracy']
    """

    labels: Count

    loss = staticmethod(sigmoid_cross_entropy)
    sums = staticmethod(plain_sums)

    @property
    def outputs(self) -> int:
        return self.labels

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return dict.fromkeys(("f1_micro", "f1_macro", "label_accuracy", "subset_accuracy"), SHARE)

    def check(self, name: str, y: Any) -> None:
        whole = y.dtype == bool or jnp.issubdtype(y.dtype, jnp.integer)
        if y.shape[1:] != (self.labels,) or not whole:
            raise ValueError(
                f"{name} must be bool, or integers 0 and 1, [n, {self.labels}], got {array_type(y)}"
            )
        if y.min() < 0 or y.max() > 1:
            raise ValueError(f"{name} must be 0 or 1, got {y.min()} to {y.max()}")

    def answers(self, outputs: Array, y: Array) -> _Answers:
        predicted, actual = outputs > 0, y.astype(bool)
        right = predicted == actual
        return _Answers(predicted & actual, predicted, actual, right, jnp.all(right, axis=-1))

    def scores(self, sums: Sums) -> dict[str, Floats]:
        """Returns scores of counts ``[..., L]``.

        >>> counts = _Answers(*np.array([[1, 0], [2, 0], [1, 0], [1, 2]]), np.array(1))
        >>> found = multi_label(2).scores(Sums(1.0, 2, counts))
        >>> {name: round(float(a), 3) for name, a in found.items()}
        {'f1_micro': 0.667, 'f1_macro': 0.333, 'label_accuracy': 0.75, 'subset_accuracy': 0.5}
        """
        both, predicted, actual, right, all_right = (np.asarray(a, np.float64) for a in sums.own)
        either, n = predicted + actual, np.asarray(sums.weight)
        macro = np.nan_to_num(ratio(2 * both, either)).mean(axis=-1)
        return {
            "f1_micro": ratio(2 * both.sum(axis=-1), either.sum(axis=-1)),
            "f1_macro": np.where(n > 0, macro, np.nan),
            "label_accuracy": ratio(right, n[..., None]).mean(axis=-1),
            "subset_accuracy": ratio(all_right, n),
        }
