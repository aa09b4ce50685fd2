"""Objectives of local training, and wrappers of objectives."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    LossFn,
    Model,
    NonNegative,
    Objective,
    Part,
    PyTree,
    Variables,
    concrete,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Step, stream
from fedjax_sim.tasks.losses import cross_entropy, labelled, masked_mean

__all__ = ["empirical_risk"]


class Adjust(Protocol):
    """Adjusts the logits in training, given the client's context."""

    def __call__(self, logits: Array, context: Context, /) -> Array:
        """``f32[B, M]`` -> ``f32[B, M]``."""


class Term(Protocol):
    """A term that is added to the loss."""

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context, /
    ) -> Array:
        """``f32[]``; ``features [B, D]`` are the inputs of the model's head, if it has one."""


class empirical_risk(Part):
    r"""The mean loss over the real samples of a minibatch, with L2 regularisation.

    .. math:: \frac1{|b|}\sum_{i\in b}\ell_i(w) + \frac{\lambda}{2} \lVert w \rVert^2

    The norm is over matrices and kernels; biases, the scales of norms and all other vectors and
    scalars are left out, as in the code of RADFed's authors. The reported training loss includes
    all terms. Samples without a label, y = -1, have no loss: the mean is over the others, and 0 if
    there are none.

    ``objective.replace(term=...)`` is the same objective with another term; objectives that wrap
    another one pass it on.

    Args:
        model: see :class:`fedjax_sim.base.Model`.
        loss: the loss of each sample.
        l2: λ.
        adjust: adjusts the logits before the loss, see :mod:`fedjax_sim.terms`; None: unchanged.
        term: a term that is added to the loss, see there; None: no term.

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

    model: Model
    loss: LossFn = cross_entropy
    l2: NonNegative = 0.0
    _: dataclasses.KW_ONLY
    adjust: Adjust | None = None
    term: Term | None = None

    needs_labels = True

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        x, y, mask, *_ = batch
        variables, features = Variables(params, state), None
        options: dict[str, Any] = {"train": True, "mask": mask, "key": context.key}
        if self.term is None or self.model.features is None:
            logits, state = self.model.apply(variables, x, **options)
        else:
            (logits, features), state = self.model.features(variables, x, **options)
        adjusted = logits if self.adjust is None else self.adjust(logits, context)
        risk = masked_mean(self.loss(adjusted, y), labelled(y, mask))
        if self.term is not None:
            risk = risk + self.term(logits, features, batch, context)
        if concrete(self.l2) and not self.l2:
            return risk, state
        return risk + 0.5 * self.l2 * _squared_norm(params, risk.dtype), state


class ObjectiveWrapper(Part):
    """A wrapper of an objective, to which ``replace`` passes the settings that it lacks."""

    objective: Objective

    def replace(self, **settings: Any) -> Self:
        """Returns the objective with settings replaced, its own or the wrapped one's."""
        return _replaced(self, settings)


def remade(objective: Objective, **changes: Any) -> Objective:
    """Returns an objective with a ``term`` or an ``adjust``; wrappers pass it on.

    Raises:
        ValueError: if the objective has one already, or no such setting, like a plain function.
    """
    for name, new in changes.items():
        inner: Any = objective
        while isinstance(inner, ObjectiveWrapper):
            inner = inner.objective
        if (present := getattr(inner, name, None)) is not None:
            raise ValueError(
                f"{name} of the objective must be one of {shown(present)} and {shown(new)}: use "
                f"objective.replace({name}=None) for the second alone"
            )
    return _replaced(objective, changes)


def _replaced(objective: Any, changes: dict[str, Any]) -> Any:
    own = isinstance(objective, Part)
    names = {field.name for field in dataclasses.fields(objective)} if own else set()
    passed = {name: value for name, value in changes.items() if name not in names}
    changes = {name: value for name, value in changes.items() if name in names}
    if passed and "objective" not in names:
        raise ValueError(
            f"objective must be an empirical_risk, or wrap one, to have another {min(passed)}, got "
            f"{shown(objective)}"
        )
    if passed:
        changes["objective"] = _replaced(changes.get("objective", objective.objective), passed)
    return dataclasses.replace(objective, **changes)


def _squared_norm(params: PyTree, dtype: DTypeLike) -> Array:
    kernels = [w.astype(dtype) for w in jax.tree.leaves(params) if w.ndim > 1]
    return sum((jnp.sum(jnp.square(w)) for w in kernels), jnp.zeros((), dtype))


class ordered_dropout(ObjectiveWrapper):
    r"""The loss of a random smaller network in every step, at most as large as the client's.

    .. math:: F_b(m_p \odot w), \qquad p \sim \mathrm{uniform}\{ s : s \le p_{max} \}

    m_p are the entries of a client with the share p, s are the shares of all clients and p_max is
    the client's own, see :class:`fedjax_sim.exchange.widths`, ``depths`` and ``ranks``. The
    reported loss is the loss of that network; on a clock, a step takes the time of the client's own
    network.

    Args:
        objective: F_b.

    Raises:
        ValueError: in the first step, if the clients have no shares of the model.

    Source: Horváth et al. 2021 <https://arxiv.org/abs/2102.13451>, Algorithm 1.
    """

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        client = context.client
        covers, shares = client.coverage, getattr(client.coverage, "shares", None)
        if covers is None or shares is None or client.id is None or client.round is None:
            raise ValueError(
                "ordered_dropout needs clients that train shares of the model: use "
                "exchange=split(covers=widths(model, shares))"
            )
        sizes = sorted({*shares})
        places = jnp.array([shares.index(p) for p in sizes], jnp.int32)
        count = jnp.array([sizes.index(p) + 1 for p in shares], jnp.int32)[client.id % len(shares)]
        drawn = jax.random.randint(stream(context.key, Step.WIDTH), (), 0, count, jnp.int32)
        has = covers(Variables(params, state), places[drawn], client.round).params
        return self.objective(tree.masked(has, params), state, batch, context)
