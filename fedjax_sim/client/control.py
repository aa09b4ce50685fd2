"""Adaptive numbers of local steps: under a budget, and by loss (LoAdaBoost)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    Count,
    DrawnSteps,
    Finite,
    FinitePositive,
    LocalUpdate,
    Memory,
    Objective,
    Part,
    PyTree,
    Shared,
    Variables,
    Wrapper,
    concrete,
)
from fedjax_sim.client.reports import Score
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep

AT_ONCE = 64
"""The number of a client's samples whose loss is computed together."""

FARTHER = 10
"""The next τ is at most this times the last one."""

LEAST = 1e-5
"""The smallest measured β, which is divided by; 0 stands for no measurement."""

TINY = 1e-10
"""Distances between models up to this count as 0."""


class Plan(NamedTuple):
    """The server's decision.

    Attributes:
        steps: ``int32[]``, τ of the next round.
        left: ``f32[]``, the remaining budget.
    """

    steps: Array
    left: Array


class Measured(NamedTuple):
    """A client's measurements of its loss F_k.

    Attributes:
        smoothness: ``f32[]``, β_k; 0 at its first visit, when it has no model of its own yet.
        slope: ``f32[]``, ρ_k.
        gradient: ``[*p]``, the gradient of F_k at the received model.
    """

    smoothness: Array
    slope: Array
    gradient: PyTree


class Last(NamedTuple):
    """The model that a client trained at its last visit, and whether there was one."""

    model: Variables
    seen: Array


class _LastVisit(Memory):
    def init(self, variables: Variables) -> Last:
        return Last(variables, jnp.bool_(False))

    def keep(self, trained: Variables, context: Context) -> Last:
        return Last(trained, jnp.bool_(True))


class _PlannedSteps(DrawnSteps):
    """The number of steps in the server's :class:`Plan`, at most ``largest``."""

    largest: int

    @property
    def most(self) -> int:
        return self.largest

    def draw(self, key: Array, shared: Plan) -> Array:
        return shared.steps


class adaptive_steps(Wrapper):
    r"""A local update whose τ steps, the same for all clients, minimise a bound on the final loss.

    .. math:: \tau^* = \arg\min_{1 \le \tau \le \min(10 \tau_{last}, \tau_{max})}
              \frac{1 + \sqrt{1 + 4 T^2 \varphi \rho\, \eta\, h(\tau) / \tau}}{2 T \eta \varphi}
              + \rho\, h(\tau), \qquad T = \frac{(R - b - c)\,\tau}{c\,\tau + b}, \qquad
              h(\tau) = \tfrac\delta\beta \bigl((\eta\beta + 1)^\tau - 1\bigr) - \eta\,\delta\,\tau

    At every visit clients measure, between the received model w and the model w_k at the end of
    their last visit,

    .. math:: \rho_k = \frac{|F_k(w_k) - F_k(w)|}{\lVert w_k - w \rVert}, \qquad
              \beta_k = \frac{\lVert \nabla F_k(w_k) - \nabla F_k(w) \rVert}{\lVert w_k - w\rVert},
              \qquad \delta_k = \lVert \nabla F_k(w) - \nabla F(w) \rVert

    ρ, β and δ are the means over the cohort, weighted like the models; ρ and β leave out clients on
    their first visit. The composition's aggregator computes :math:`\nabla F` from their gradients.
    A round costs c τ + b of the budget R, and τ starts at 1. τ is limited by the remaining budget;
    once it is too small for a step, clients do not train. F_k is the loss of all samples of a
    client; the authors' code takes a minibatch in SGD.

    Each client keeps a model, sends an additional gradient and 8 bytes, and receives 8 bytes; a
    visit costs two gradients of all samples.

    Args:
        local: the local update; its epochs, ``shared`` and memory are overridden.
        objective: F.
        lr: η of local's optimiser, which the bound assumes to be SGD without momentum.
        budget: R, of any resource.
        step_cost: c, the cost of a local step.
        round_cost: b, the cost of an average.
        phi: φ, the control parameter.
        most: τ_max.

    Raises:
        ValueError: if the budget is too small for a round of one step, or local shares or remembers
            anything already.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1804.05271>, Algorithms 2 and 3, eq. 18.
    """

    objective: Objective
    lr: FinitePositive
    budget: FinitePositive
    step_cost: FinitePositive = 1.0
    round_cost: Finite = 10.0
    phi: FinitePositive = 0.025
    most: Count = 100

    sets = ("steps", "max_steps")

    def __post_init__(self) -> None:
        budget, step_cost, round_cost = self.budget, self.step_cost, self.round_cost
        if concrete(budget, step_cost, round_cost) and not budget > step_cost + round_cost:
            raise ValueError(
                f"budget must be more than a round of one step costs, {step_cost + round_cost}, "
                f"got {budget}"
            )
        _ = self.inner  # checks the settings of local

    @functools.cached_property
    def inner(self) -> LocalUpdate:
        return self.local.change(
            steps=_PlannedSteps(self.most),
            shared=_StepControl(self),
            memory=_LastVisit(),
            max_steps=None,
        )


class _StepControl(Shared):
    """The measurements and the decision of :class:`adaptive_steps`."""

    settings: adaptive_steps

    def init(self, variables: Variables) -> Plan:
        return Plan(jnp.int32(1), jnp.asarray(self.settings.budget, jnp.float32))

    def send(self, trained: Variables, context: Context) -> Measured:
        last: Last = context.memory
        objective = self.settings.objective
        there = _whole(objective, context, last.model)
        loss, gradient = _whole(objective, context, context.received)
        apart = tree.norm(tree.subtract(last.model.params, context.received.params))
        apart = apart.astype(jnp.float32)
        bent = tree.norm(tree.subtract(there[1], gradient)).astype(jnp.float32)
        far, distance = apart > TINY, jnp.maximum(apart, TINY)
        beta = jnp.maximum(jnp.where(far, bent / distance, 0), LEAST)
        rho = jnp.where(far, jnp.abs(there[0] - loss) / distance, 0)
        return Measured(jnp.where(last.seen, beta, 0), jnp.where(last.seen, rho, 0), gradient)

    def reduce(
        self, plan: Plan, sent: Measured, weights: Array, clients: int, aggregator: Aggregator
    ) -> Plan:
        step_cost, round_cost = self.settings.step_cost, self.settings.round_cost
        anyone = jnp.any(weights > 0)
        known = jnp.where(sent.smoothness > 0, weights, 0)
        beta, rho = (_mean(known, a) for a in (sent.smoothness, sent.slope))
        mean = aggregator(sent.gradient, jnp.where(anyone, weights, 1))
        away = jax.tree.map(lambda rows, m: rows - m[None], sent.gradient, mean)
        delta = _mean(weights, tree.norms(away).astype(jnp.float32))
        best = self._best(plan.steps, beta, delta, rho)
        best = jnp.where(jnp.any(known > 0), best, plan.steps)
        left = plan.left - step_cost * plan.steps.astype(jnp.float32) - round_cost
        allowed = jnp.floor((left - round_cost) / step_cost)
        allowed = jnp.clip(allowed, 0, self.settings.most).astype(jnp.int32)
        return tree.select(anyone & (plan.steps > 0), Plan(jnp.minimum(best, allowed), left), plan)

    def _best(self, last: Array, beta: Array, delta: Array, rho: Array) -> Array:
        """Returns τ*."""
        of = self.settings
        lr, phi = of.lr, of.phi
        count = jnp.arange(1, of.most + 1, dtype=jnp.int32)
        tau = count.astype(jnp.float32)
        beta = jnp.maximum(beta, LEAST)
        apart = delta / beta * jnp.expm1(tau * jnp.log1p(lr * beta)) - delta * lr * tau
        apart = jnp.where(count == 1, 0, jnp.maximum(apart, 0))
        affordable = of.budget - of.round_cost - of.step_cost
        steps = affordable * tau / (of.step_cost * tau + of.round_cost)
        root = jnp.sqrt(1 + 4 * steps**2 * phi * rho * lr * apart / tau)
        gap = (1 + root) / (2 * steps * lr * phi) + rho * apart
        good = jnp.isfinite(gap) & (count <= FARTHER * last)
        return count[jnp.argmin(jnp.where(good, gap, jnp.inf))]


def _mean(weights: Array, values: Array) -> Array:
    """Returns the weighted mean of ``[P]`` values; 0 if all weights are 0. Others may be NaN."""
    total, weight = (
        tree.row_sum(a) for a in (jnp.where(weights > 0, weights * values, 0), weights)
    )
    return total / jnp.where(weight > 0, weight, 1)


def _whole(objective: Objective, context: Context, model: Variables) -> tuple[Array, PyTree]:
    """Returns F_k and its gradient; every call draws the same random numbers."""
    client = context.client

    def add(carry: tuple[Array, Array, PyTree], batch: Batch) -> tuple[Array, Array, PyTree]:
        number, loss, total = carry
        here = context._replace(key=jax.random.fold_in(context.key, number))
        (value, _), grads = jax.value_and_grad(objective, has_aux=True)(
            model.params, model.state, batch, here
        )
        share = jnp.sum(batch.mask, dtype=jnp.int32) / jnp.maximum(client.size, 1)
        total = jax.tree.map(lambda t, g: t + share.astype(g.dtype) * g, total, grads)
        return number + 1, loss + share * value.astype(jnp.float32), total

    zeros = jax.tree.map(jnp.zeros_like, model.params)
    _, loss, gradient = sweep(client, AT_ONCE, add, (jnp.int32(0), jnp.float32(0), zeros))
    return loss, gradient


class _MedianLoss(Shared):
    """The median of the losses that the clients of the last cohort ended with."""

    loss: Score

    def init(self, variables: Variables) -> Array:
        return jnp.float32(jnp.inf)

    def send(self, trained: Variables, context: Context) -> Array:
        return self.loss(trained, context.client).astype(jnp.float32)

    def reduce(
        self, median: Array, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Array:
        came = (weights > 0) & jnp.isfinite(sent)
        count = jnp.sum(came, dtype=jnp.int32)
        order = jnp.sort(jnp.where(came, sent, jnp.inf))
        middle = (order[jnp.maximum(count - 1, 0) // 2] + order[count // 2]) / 2
        return jnp.where(count > 0, middle, median)


class _BelowMedian(Part):
    """Ends a visit before one of the epochs if the client's loss is at most the median."""

    loss: Score
    stops: tuple[int, ...]

    def __call__(self, variables: Variables, epoch: Array, context: Context) -> Array:
        asked = jnp.any(epoch == jnp.array(self.stops, jnp.int32))
        return asked & (self.loss(variables, context.client) <= context.shared)


class loadaboost(Wrapper):
    r"""A local update that trains on while its loss is above the median of the last cohort's.

    .. math:: E_0 = \lceil E / 2 \rceil, \qquad E_r = \min\bigl(E_{r-1} + E_0 - r + 1,\;
              \lfloor 3 E / 2 \rfloor\bigr), \qquad
              \text{until } F_k(w_k) \le \operatorname{med}_{j \in U_{t-1}} F_j(w_j)

    After :math:`E_r` epochs a client compares the loss of its model on its samples with the median
    of the losses that the last cohort ended with. Until there is a median, every client stops after
    E_0 epochs. A client sends and receives 4 bytes; a visit costs a forward pass before every epoch
    and one after the last.

    Args:
        local: the local update, of E whole epochs; its epochs, steps and ``shared`` are overridden.
        loss: ``(variables, client) -> f32[]``, F_k (:class:`fedjax_sim.reports.mean_loss`).

    Raises:
        ValueError: if local's number of epochs is not whole, or local shares anything already.

    Source: Huang et al. 2020 <https://arxiv.org/abs/1811.12629>, Algorithm 2.

    Example:
        >>> import fedjax_sim as fs, optax
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1), epochs=10)
        >>> loadaboost(local, fs.reports.mean_loss(problem.objective)).epochs
        15
    """

    loss: Score

    sets = ("steps", "until")

    def __post_init__(self) -> None:
        _ = self.inner  # checks the settings

    @functools.cached_property
    def inner(self) -> LocalUpdate:
        epochs = self.local.epochs
        if isinstance(epochs, Sequence) or epochs != int(epochs):
            raise ValueError(f"epochs of local must be a whole number to be halved, got {epochs}")
        half, most = math.ceil(epochs / 2), int(3 * epochs / 2)
        stops, more = [half], half
        while more > 0 and stops[-1] + more < most:
            stops.append(stops[-1] + more)
            more -= 1

        until, shared = _BelowMedian(self.loss, tuple(stops)), _MedianLoss(self.loss)
        return self.local.change(epochs=most, steps=None, until=until, shared=shared)
