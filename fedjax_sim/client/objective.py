"""What a client minimises."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    LossFn,
    Model,
    Objective,
    PyTree,
    Variables,
    concrete,
    part,
)
from fedjax_sim.client.losses import cross_entropy, masked_mean


class Adjust(Protocol):
    """Changes the logits in training, by what the client knows."""

    def __call__(self, logits: Array, context: Context, /) -> Array:
        """``f32[B, M]`` -> ``f32[B, M]``."""


class Term(Protocol):
    """A term of an objective beside the loss."""

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context, /
    ) -> Array:
        """``f32[]``; ``features [B, D]`` are the inputs of the model's head, if it has one."""


@part
def empirical_risk(
    model: Model,
    loss: LossFn = cross_entropy,
    l2: float = 0.0,
    *,
    adjust: Adjust | None = None,
    term: Term | None = None,
) -> Objective:
    r"""Mean loss over the real samples of a minibatch, and L2 regularisation.

    .. math:: \frac1{|b|}\sum_{i\in b}\ell_i(w) + \frac{\lambda}{2} \lVert w \rVert^2

    The norm is over matrices and kernels; biases, the scales of norms and all other vectors and
    scalars are left out, as in the code of RADFed's authors.

    Args:
        model: see :class:`fedjax_sim.base.Model`.
        loss: the loss of each sample.
        l2: λ; the training loss that is reported includes its term.
        adjust: changes the logits before the loss, see :mod:`fedjax_sim.terms`; None: nothing.
        term: what is added, see there; the training loss that is reported includes it. None: none.

    Returns:
        An objective for :func:`fedjax_sim.local_sgd`.

    Raises:
        ValueError: if l2 is negative.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, eq. 1; Xue et al. 2021
    <https://github.com/yxsub/RADFed>, the authors' code, for the norm (l2).

    Example:
        >>> from fedjax_sim import models
        >>> model = models.logistic((2,), 2)
        >>> params = {"Dense_0": {"Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}}
        >>> batch = Batch(jnp.zeros((1, 2)), jnp.array([0]), jnp.array([True]))
        >>> context = Context(Variables(params, {}), None, jax.random.key(0))
        >>> value = [
        ...     empirical_risk(model, l2=l2)(params, {}, batch, context)[0] for l2 in (0.0, 0.1)
        ... ]
        >>> round(float(value[1] - value[0]), 6)  # 0.1 / 2 · 4
        0.2
    """
    if concrete(l2) and not l2 >= 0:
        raise ValueError(f"l2 must be at least 0, got {l2}")

    def objective(
        params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        x, y, mask, *_ = batch
        variables, features = Variables(params, state), None
        options: dict[str, Any] = {"train": True, "mask": mask, "key": context.key}
        if term is None or model.features is None:
            logits, state = model.apply(variables, x, **options)
        else:
            (logits, features), state = model.features(variables, x, **options)
        given = logits if adjust is None else adjust(logits, context)
        risk = masked_mean(loss(given, y), mask)
        if term is not None:
            risk = risk + term(logits, features, batch, context)
        if concrete(l2) and not l2:
            return risk, state
        return risk + 0.5 * l2 * _squared_norm(params, risk.dtype), state

    return objective


def _squared_norm(params: PyTree, dtype: DTypeLike) -> Array:
    kernels = [w.astype(dtype) for w in jax.tree.leaves(params) if w.ndim > 1]
    return sum((jnp.sum(jnp.square(w)) for w in kernels), jnp.zeros((), dtype))
