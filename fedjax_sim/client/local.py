"""Local updates: exact epochs of minibatch SGD on a client of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import optax

from fedjax_sim.base import (
    Companion,
    Correction,
    DrawnSteps,
    Leaves,
    LocalUpdate,
    Memory,
    Objective,
    Shared,
    Transform,
    Until,
    part,
)
from fedjax_sim.client.agreement import agreed
from fedjax_sim.client.boosting import boosted
from fedjax_sim.client.control import budgeted
from fedjax_sim.client.length import geometric
from fedjax_sim.client.reflected import reflected
from fedjax_sim.client.reports import (
    with_final_loss,
    with_importance,
    with_initial_loss,
    with_utility,
)
from fedjax_sim.client.sgd import SGD, LastBatch, OptimizerState
from fedjax_sim.client.skew import scouted
from fedjax_sim.client.turns import in_turn
from fedjax_sim.client.visiting import visiting
from fedjax_sim.engine.optimizers import GIVEN, check_optimizer
from fedjax_sim.personal import adaptive_start, ditto

__all__ = [
    "adaptive_start",
    "agreed",
    "boosted",
    "budgeted",
    "ditto",
    "geometric",
    "in_turn",
    "local_sgd",
    "reflected",
    "scouted",
    "with_final_loss",
    "with_importance",
    "with_initial_loss",
    "with_utility",
]


@part
def local_sgd(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    batch_size: int = 16,
    epochs: float = 1.0,
    last_batch: LastBatch = "keep",
    *,
    max_steps: int | None = None,
    optimizer_state: OptimizerState = "reset",
    corrections: Sequence[Correction] = (),
    transforms: Sequence[Transform] = (),
    peers: bool = False,
    inexactness: float | None = None,
    until: Until | None = None,
    memory: Memory | None = None,
    companion: Companion | None = None,
    trained: Leaves | None = None,
    rate_by_round: optax.Schedule | None = None,
    steps: DrawnSteps | None = None,
    shared: Shared | None = None,
) -> LocalUpdate:
    r"""E epochs of minibatch steps of an optax optimiser.

    .. math:: T_k = E \lceil n_k / B \rceil, \qquad w_k \leftarrow w_k - \eta\,\nabla F_b(w_k)

    Samples are reshuffled in each epoch by a key of (seed, round, client, epoch) alone, so a result
    does not depend on which clients ran beside this one or where.

    Args:
        objective: what is minimised, see :func:`fedjax_sim.empirical_risk`.
        optimizer: an ``optax.GradientTransformation``. A schedule counts the steps in the
            optimiser's state: it restarts at every visit unless ``optimizer_state`` is "keep" or
            "average". It is given the extra arguments that optax's optimisers may ask for:
            ``value``, ``grad`` and ``value_fn`` (also as ``obj_fn``) of the minibatch's loss,
            without the corrections; ``grad_fn(params, i)``, with them, as the gradients that it
            replaces; ``key``, the step's own.
        batch_size: B.
        epochs: E; a fraction runs ``round(E * ceil(n_k / B))`` steps.
        last_batch: what becomes of the short last minibatch: "keep" it (its loss is the mean over
            its real samples), "drop" it, or "refill" it from the epoch's beginning.
        max_steps: the most steps of a visit; 1 is parallel SGD.
        optimizer_state: the optimiser's state when a client receives a model: "reset"; "keep", the
            client's own after its last visit; "average", the mean over the last cohort, weighted as
            its models and sent along (momentum federated learning).
        corrections: change every gradient, in order, see :mod:`fedjax_sim.corrections`; the
            reported loss is without them.
        transforms: change each minibatch, in order.
        peers: whether a transform needs the other clients' samples.
        inexactness: γ; a client stops after the epoch that leaves
            :math:`\lVert\nabla h(w_k)\rVert \le \gamma \lVert\nabla h(w_{recv})\rVert`, where h
            includes the corrections. It costs a pass over the samples before every epoch. None:
            clients run all epochs.
        until: ends a visit before its last epoch, by what it has trained until then, see
            :func:`boosted`. None: clients run all epochs.
        memory: what the client remembers from visit to visit, for its objective.
        companion: what the client trains for itself beside the model, on the same minibatches; its
            optimiser starts afresh at each visit. Corrections, ``trained`` and ``inexactness`` are
            not for it.
        trained: the weights that are trained, see :mod:`fedjax_sim.leaves`; None: all.
        rate_by_round: a factor of every step by the number of the round, from 0, such as
            ``optax.exponential_decay(1.0, 100, 0.5)``; None: 1.
        steps: drawn, as many for all clients of a round, in place of E epochs: a client goes
            through its samples as often as they take. None: E epochs.
        shared: what the clients learn together beside the model, for their objective.

    Returns:
        A :class:`fedjax_sim.base.LocalUpdate`.

    Raises:
        ValueError: if a setting is out of range or not of its kind.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, Algorithm 1 (ClientUpdate); Vo,
    Rakotobe 2020 <vo2020how>, Algorithm 2 (inexactness).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedjax_sim import base, empirical_risk, models
        >>> model = models.logistic((2,), 2)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16, epochs=2)
        >>> x, y = jnp.zeros((40, 2)), jnp.zeros(40, jnp.int32)
        >>> client = base.ClientView(x, y, jnp.arange(40), jnp.int32(0), jnp.int32(40), 40)
        >>> key = jax.random.key(0)
        >>> int(local.train(key, model.init(key), client, ((), ()), ((), ())).info.steps)
        6
    """
    check_optimizer("optimizer", optimizer, GIVEN)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 < epochs <= 10_000:
        raise ValueError(f"epochs must be above 0 and at most 10000, got {epochs}")
    if last_batch not in ("keep", "drop", "refill"):
        raise ValueError(f"last_batch must be 'keep', 'drop' or 'refill', got {last_batch!r}")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}")
    if optimizer_state not in ("reset", "keep", "average"):
        raise ValueError(
            f"optimizer_state must be 'reset', 'keep' or 'average', got {optimizer_state!r}"
        )
    if inexactness is not None and not 0 <= inexactness < 1:
        raise ValueError(f"inexactness must be in [0, 1), got {inexactness}")
    if rate_by_round is not None and not callable(rate_by_round):
        raise ValueError(f"rate_by_round must be an optax schedule, got {rate_by_round!r}")
    if steps is not None:
        _check_drawn(steps, last_batch, max_steps)
    terms = _terms(corrections)
    named = [term.origin.name for term in terms]
    kinds = [name.removeprefix("adaptive_") for name in named]  # a fixed and an adaptive mu add up
    if twice := [name for name, kind in zip(named, kinds, strict=True) if kinds.count(kind) > 1]:
        raise ValueError(f"corrections must not correct twice, got {' and '.join(twice)}")
    sgd = SGD(
        objective,
        optax.with_extra_args_support(optimizer),
        batch_size,
        epochs,
        last_batch,
        max_steps,
        optimizer_state,
        terms,
        _functions(transforms),
        peers,
        inexactness,
        until,
        memory,
        companion,
        trained,
        rate_by_round,
        steps,
        shared,
    )

    def change(
        *,
        corrections: Sequence[Correction] | None = (),
        transforms: Sequence[Transform] = (),
        **settings: Any,
    ) -> LocalUpdate:
        mine = {field.name: getattr(sgd, field.name) for field in dataclasses.fields(sgd)}
        for name in ("shared", "memory", "companion"):
            if None not in (mine[name], settings.get(name)):
                raise ValueError(
                    f"{name} must be one of {mine[name]} and {settings[name]}: use "
                    f"change({name}=None) first for the second alone"
                )
        mine |= {
            "corrections": () if corrections is None else sgd.corrections + _terms(corrections),
            "transforms": sgd.transforms + _functions(transforms),
        }
        return local_sgd(**(mine | settings))

    return sgd.update(visiting(sgd), change)


def _check_drawn(steps: DrawnSteps, last_batch: LastBatch, max_steps: int | None) -> None:
    if not isinstance(steps, DrawnSteps):
        raise ValueError(f"steps must be drawn, such as by geometric(0.2), got {steps!r}")
    if max_steps is not None:
        raise ValueError(f"max_steps must be None if steps are drawn, got {max_steps}")
    if last_batch == "drop":
        raise ValueError(
            "last_batch must be 'keep' or 'refill' if steps are drawn, got 'drop': who has less "
            "than a minibatch would take none"
        )


def _terms(corrections: Sequence[Correction]) -> tuple[Correction, ...]:
    # A Correction alone is a sequence too, of its functions.
    if not isinstance(corrections, Sequence) or not all(
        isinstance(term, Correction) for term in corrections
    ):
        raise ValueError(
            "corrections must be a sequence of Correction, such as (scaffold(),), got "
            f"{corrections!r}"
        )
    return tuple(corrections)


def _functions(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    if not isinstance(transforms, Sequence) or not all(map(callable, transforms)):
        raise ValueError(f"transforms must be a sequence of functions, got {transforms!r}")
    return tuple(transforms)
