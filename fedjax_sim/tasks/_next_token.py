"""Language modelling: the next token at every position of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Count, Metric, Sums, Task
from fedjax_sim.base.words import array_type
from fedjax_sim.tasks.losses import cross_entropy
from fedjax_sim.tasks.sums import SHARE, Floats, plain_sums, ratio


class next_token(Task):
    r"""Prediction of the next token at every position of a sequence; outputs are logits.

    .. math:: \ell_i = -\frac1{T_i} \sum_{t\,\text{real}} \log p_{y_{i,t}}, \qquad
        \mathrm{PPL} = \exp \frac{\sum_i T_i\, \ell_i}{\sum_i T_i}

    for a sequence i with :math:`T_i` real tokens, whose y is not ``ignore``. In training every
    sequence of a minibatch has equal weight; in the scores every token has. Scores are
    ``perplexity``, which leads (lower is better), and ``accuracy``, the fraction of
    correct tokens. y is integers ``[n, T]``, outputs are ``[B, T, V]``.

    Args:
        vocabulary: V.
        ignore: the value of y at padding, in 0 … V - 1 or not.

    Raises:
        ValueError: if vocabulary is not positive.

    Example:
        >>> task = next_token(4)
        >>> y = jnp.array([[2, 1, -1]])
        >>> float(task.loss(jnp.zeros((1, 3, 4)), y)[0])  # log 4
        1.3862943649291992
        >>> task.weight(y).tolist()
        [2]
    """

    vocabulary: Count
    _: dataclasses.KW_ONLY
    ignore: int = -1

    sums = staticmethod(plain_sums)

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {"perplexity": Metric("lowest"), "accuracy": SHARE}

    def shape(self, target: tuple[int, ...]) -> tuple[int, ...]:
        return (*target, self.vocabulary)

    def check(self, name: str, y: Any) -> None:
        if y.ndim != 2 or not jnp.issubdtype(y.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers [n, T], the tokens, got {array_type(y)}")
        wrong = (y != self.ignore) & ((y < 0) | (y >= self.vocabulary))
        if wrong.any():
            raise ValueError(
                f"{name} must be in 0 to {self.vocabulary - 1}, or {self.ignore} for padding, got "
                f"{np.asarray(y)[np.asarray(wrong)][0]}"
            )

    def weight(self, y: Array) -> Array:
        return jnp.sum(y != self.ignore, axis=-1, dtype=jnp.int32)

    def loss(self, outputs: Array, y: Array) -> Array:
        each = jnp.where(y != self.ignore, cross_entropy(outputs, y), 0)
        return jnp.sum(each, axis=-1) / jnp.maximum(self.weight(y), 1).astype(each.dtype)

    def answers(self, outputs: Array, y: Array) -> Array:
        right = (jnp.argmax(outputs, axis=-1) == y) & (y != self.ignore)
        return jnp.sum(right, axis=-1, dtype=jnp.int32)

    def scores(self, sums: Sums) -> dict[str, Floats]:
        """Returns scores of counts ``[...]``.

        >>> found = next_token(4).scores(Sums(np.log(8.0), 3, 1))
        >>> {name: float(a) for name, a in found.items()}
        {'perplexity': 2.0, 'accuracy': 0.3333333333333333}
        """
        with np.errstate(over="ignore"):  # infinite if the loss is above 709
            perplexity = np.exp(ratio(sums.loss, sums.weight))
        return {"perplexity": perplexity, "accuracy": ratio(sums.own, sums.weight)}
