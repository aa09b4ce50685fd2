"""One label of several classes for every sample."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Answers, Array, Sums, SumsOf, Task, part
from fedjax_sim.tasks.losses import cross_entropy
from fedjax_sim.tasks.sums import SHARE, Floats, mean_known, ratio
from fedjax_sim.tasks.tally import MOST_RANKED, WIN_BITS, Tally, rank_wins, tally


class _Answers(NamedTuple):
    """Of each sample: the class answered, ``int32[n]``, and scores that rank, or ()."""

    predicted: Array
    ranking: Any


@part
def classification(classes: int, *, auc: bool | None = None) -> Task:
    r"""Each sample has one of M classes, and outputs are logits.

    .. math:: F_1 = \sum_y \frac{n_y}{n} \cdot \frac{2\,\mathrm{TP}_y}{n_y + \hat n_y}, \qquad
        \mathrm{AUC}_y = \frac{U_y}{n_y (n - n_y)}

    with :math:`n_y` samples of class y, :math:`\hat n_y` answers y, :math:`\mathrm{TP}_y` of them
    right, and U_y of Mann and Whitney. Scores are ``accuracy``; ``f1``, weighted by class; and
    ``auc``, the area under the ROC curve, of more than two classes the unweighted mean of each
    against the rest. y are ``int32[n]`` in 0 … M - 1, outputs ``[B, M]``.

    Args:
        classes: M.
        auc: whether to compute the area under the ROC curve, which sorts the sets, once for two
            classes and M times for more (10,000 samples in 2 ms on a CPU core); None: of two
            classes.

    Returns:
        The task, led by the accuracy.

    Raises:
        ValueError: if classes is not positive.

    Example:
        >>> classification(2).metrics.keys() - classification(10).metrics.keys()
        {'auc'}
    """
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    ranked = classes == 2 if auc is None else auc

    def check(name: str, y: Any) -> None:
        if y.ndim != 1 or not jnp.issubdtype(y.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers [n], the classes, got {y.dtype} {list(y.shape)}"
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"{name} must be in 0 to {classes - 1}, as classes is {classes}, "
                f"got {low} to {high}"
            )

    answers, sums = _counting(classes, ranked)
    return Task(
        name="classification",
        outputs=classes,
        loss=cross_entropy,
        shape=lambda target: (classes,),
        check=check,
        answers=answers,
        sums=sums,
        scores=_scores,
        metrics={"accuracy": SHARE, "f1": SHARE} | ({"auc": SHARE} if ranked else {}),
        score="accuracy",
        classes=classes,
        most=MOST_RANKED if ranked else None,
    )


@functools.cache  # of as many classes they are the same functions, so that programs are shared
def _counting(classes: int, ranked: bool) -> tuple[Answers, SumsOf]:
    def answers(logits: Array, y: Array) -> _Answers:
        del y
        predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return _Answers(predicted, _ranking(logits) if ranked else ())

    def sums(answers: _Answers, y: Array, group: Array, groups: int) -> Tally:
        made = tally(answers.predicted, y, group, groups=groups, classes=classes)
        if not ranked:
            return made
        first = classes - answers.ranking.shape[-1]  # the first class that is ranked
        positive = y[:, None] == jnp.arange(first, classes, dtype=jnp.int32)[None]
        wins = jax.vmap(
            functools.partial(rank_wins, groups=groups), in_axes=(1, 1, None), out_axes=1
        )
        return made._replace(wins=wins(answers.ranking, positive, group))

    return answers, sums


def _ranking(logits: Array) -> Array:
    """Scores that rank samples by class, ``f32[B, C]``: nothing saturates as a probability does."""
    if logits.shape[-1] == 2:
        return logits[:, 1:] - logits[:, :1]
    return jax.nn.log_softmax(logits)


def _scores(sums: Sums) -> dict[str, Floats]:
    """Of counts ``[..., M]``.

    >>> counts = Tally(*np.array([[1, 1], [1, 2], [2, 1]]), None)
    >>> {name: float(a.round(3)) for name, a in _scores(Sums(3.0, 3, counts)).items()}
    {'accuracy': 0.667, 'f1': 0.667}
    """
    counts: Tally = sums.own
    correct, predicted, total = (np.asarray(a, np.float64) for a in counts[:3])
    n = total.sum(axis=-1)
    f1 = np.nan_to_num(ratio(2 * correct, total + predicted))
    found = {"accuracy": ratio(correct.sum(axis=-1), n), "f1": ratio((total * f1).sum(axis=-1), n)}
    return found if counts.wins is None else found | {"auc": _auc(counts.wins, total)}


def _auc(wins: Any, total: Floats) -> Floats:
    wins = np.asarray(wins, np.float64)
    positives = total[..., -wins.shape[-2] :]
    pairs = positives * (total.sum(axis=-1, keepdims=True) - positives)
    return mean_known(ratio((wins[..., 0] + 2.0**WIN_BITS * wins[..., 1]) / 2, pairs))
