"""Classification: one of several classes for every sample."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Count, Metric, SampleWeight, Sums, Task
from fedjax_sim.base.words import array_type
from fedjax_sim.tasks.losses import cross_entropy
from fedjax_sim.tasks.sums import (
    MOST_RANKED,
    SHARE,
    WIN_BITS,
    Floats,
    Tally,
    add_up,
    mean_known,
    rank_wins,
    ratio,
    tally,
)


class _Answers(NamedTuple):
    """The predicted class of each sample, ``int32[n]``, and the scores that rank it, or ()."""

    predicted: Array
    ranking: Any


class classification(Task):
    r"""Classification into M classes; outputs are logits.

    .. math:: F_1 = \sum_y \frac{n_y}{n} \cdot \frac{2\,\mathrm{TP}_y}{n_y + \hat n_y}, \qquad
        \mathrm{AUC}_y = \frac{U_y}{n_y (n - n_y)}

    with :math:`n_y` samples of class y, :math:`\hat n_y` predictions of y, :math:`\mathrm{TP}_y`
    of them correct, and the Mann-Whitney statistic U_y. Scores are ``accuracy``, which leads;
    ``f1``, weighted by class; and ``auc``, the area under the ROC curve, for more than two classes
    the unweighted mean of one class against the rest. y is ``int32[n]`` in 0 … M - 1, outputs are
    ``[B, M]``. With ``backdoor`` test sets also have samples that carry a trigger, whose y is M + t
    if the attackers want the class t. ``attack_success`` (lower is better) is the share of
    them that is classified as t; all other scores and the loss ignore them. With ``unlabelled`` a
    sample may have no label, y = -1: the scores and :class:`fedjax_sim.empirical_risk` ignore it.

    Args:
        classes: M.
        auc: whether to compute the area under the ROC curve, which sorts the sets, once for two
            classes and M times for more (10,000 samples in 2 ms on a CPU core); None: only for two
            classes.
        backdoor: whether to score a backdoor, see :func:`fedjax_sim.attacks.backdoor`.
        unlabelled: whether y may be -1, for a sample without a label.

    Raises:
        ValueError: if classes is not positive.

    Example:
        >>> classification(2).metrics.keys() - classification(10).metrics.keys()
        {'auc'}
    """

    classes: Count
    _: dataclasses.KW_ONLY
    auc: bool | None = None
    backdoor: bool = False
    unlabelled: bool = False

    loss = staticmethod(cross_entropy)

    @property
    def _ranked(self) -> bool:
        return self.classes == 2 if self.auc is None else self.auc

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def metrics(self) -> Mapping[str, Metric]:
        found = dict.fromkeys(("accuracy", "f1", *(["auc"] if self._ranked else [])), SHARE)
        return found | ({"attack_success": Metric("lowest", percent=True)} if self.backdoor else {})

    @property
    def on_request(self) -> Mapping[str, Task]:
        return {} if self._ranked else {"auc": self.replace(auc=True)}

    @property
    def most(self) -> int | None:
        return MOST_RANKED if self._ranked else None

    def check(self, name: str, y: Any) -> None:
        if y.ndim != 1 or not jnp.issubdtype(y.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers [n], the classes, got {array_type(y)}")
        low, high = int(y.min()), int(y.max())
        triggers = self.backdoor and not name.startswith("data.")  # clients learn classes
        most = (2 if triggers else 1) * self.classes - 1
        least = -1 if self.unlabelled else 0
        if low < least or high > most:
            hint = f"; {self.replace(unlabelled=True)!r} takes -1 for no label" * (
                least > low == -1
            )
            raise ValueError(
                f"{name} must be in {least} to {most}, as classes is {self.classes}, got {low} to "
                f"{high}{hint}"
            )

    @property
    def weight(self) -> SampleWeight | None:
        if not (self.backdoor or self.unlabelled):
            return None
        return lambda y: ((y >= 0) & (y < self.classes)).astype(jnp.int32)

    def answers(self, outputs: Array, y: Array) -> _Answers:
        predicted = jnp.argmax(outputs, axis=-1).astype(jnp.int32)
        return _Answers(predicted, _ranking(outputs) if self._ranked else ())

    def sums(self, answers: _Answers, y: Array, group: Array, groups: int) -> Tally:
        if self.unlabelled:
            group, y = jnp.where(y < 0, groups, group), jnp.maximum(y, 0)
        if self.backdoor:
            triggered = y >= self.classes
            fooled = triggered & (answers.predicted == y - self.classes)
            clean = jnp.where(triggered, groups, group)
            made = self.replace(backdoor=False).sums(answers, y, clean, groups)
            found = add_up((fooled, triggered), group, groups)
            return made._replace(fooled=found[0], triggered=found[1])
        made = tally(answers.predicted, y, group, groups=groups, classes=self.classes)
        if not self._ranked:
            return made
        first = self.classes - answers.ranking.shape[-1]  # the first class that is ranked
        positive = y[:, None] == jnp.arange(first, self.classes, dtype=jnp.int32)[None]
        wins = jax.vmap(
            functools.partial(rank_wins, groups=groups), in_axes=(1, 1, None), out_axes=1
        )
        return made._replace(wins=wins(answers.ranking, positive, group))

    def scores(self, sums: Sums) -> dict[str, Floats]:
        """Returns scores of counts ``[..., M]``.

        >>> counts = Tally(*np.array([[1, 1], [1, 2], [2, 1]]), None)
        >>> found = classification(2, auc=False).scores(Sums(3.0, 3, counts))
        >>> {name: float(a.round(3)) for name, a in found.items()}
        {'accuracy': 0.667, 'f1': 0.667}
        """
        counts: Tally = sums.own
        correct, predicted, total = (np.asarray(a, np.float64) for a in counts[:3])
        n = total.sum(axis=-1)
        f1 = ratio((total * np.nan_to_num(ratio(2 * correct, total + predicted))).sum(axis=-1), n)
        found = {"accuracy": ratio(correct.sum(axis=-1), n), "f1": f1}
        if counts.wins is not None:
            found["auc"] = _auc(counts.wins, total)
        if counts.triggered is not None:
            found["attack_success"] = ratio(counts.fooled, counts.triggered)
        return found


def _ranking(logits: Array) -> Array:
    """Returns scores that rank samples by class, ``f32[B, C]``; they do not saturate."""
    if logits.shape[-1] == 2:
        return logits[:, 1:] - logits[:, :1]
    return jax.nn.log_softmax(logits)


def _auc(wins: Any, total: Floats) -> Floats:
    wins = np.asarray(wins, np.float64)
    positives = total[..., -wins.shape[-2] :]
    pairs = positives * (total.sum(axis=-1, keepdims=True) - positives)
    return mean_known(ratio((wins[..., 0] + 2.0**WIN_BITS * wins[..., 1]) / 2, pairs))
