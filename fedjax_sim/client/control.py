"""Local steps that follow what the clients measure of their losses, under a budget."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    DrawnSteps,
    LocalUpdate,
    Memory,
    Objective,
    PyTree,
    Shared,
    Variables,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep

AT_ONCE = 64  # samples of a client whose loss is computed together
FARTHER = 10  # the next τ is at most this times the last one
LEAST = 1e-5  # of a measured β, which is divided by; 0 says that nothing was measured
TINY = 1e-10  # a distance between models that is none


class Plan(NamedTuple):
    """What the server decides.

    Attributes:
        steps: ``int32[]``, τ of the next round.
        left: ``f32[]``, what is left of the budget.
    """

    steps: Array
    left: Array


class Measured(NamedTuple):
    """What a client says of its loss F_k.

    Attributes:
        smoothness: ``f32[]``, β_k; 0 in its first visit, in which it has no model of its own yet.
        slope: ``f32[]``, ρ_k.
        gradient: ``[*p]``, that of F_k at the model that it received.
    """

    smoothness: Array
    slope: Array
    gradient: PyTree


class Last(NamedTuple):
    """What a client keeps of its last visit.

    Attributes:
        model: that it trained.
        seen: ``bool[]``, whether there was one.
    """

    model: Variables
    seen: Array


@part
def budgeted(
    local: LocalUpdate,
    objective: Objective,
    lr: float,
    budget: float,
    step_cost: float = 1.0,
    round_cost: float = 10.0,
    phi: float = 0.025,
    most: int = 100,
) -> LocalUpdate:
    r"""As many local steps τ for all clients as a bound on the final loss says is best.

    .. math:: \tau^* = \arg\min_{1 \le \tau \le \min(10 \tau_{last}, \tau_{max})}
              \frac{1 + \sqrt{1 + 4 T^2 \varphi \rho\, \eta\, h(\tau) / \tau}}{2 T \eta \varphi}
              + \rho\, h(\tau), \qquad T = \frac{(R - b - c)\,\tau}{c\,\tau + b}, \\
              h(\tau) = \tfrac\delta\beta \bigl((\eta\beta + 1)^\tau - 1\bigr) - \eta\,\delta\,\tau

    with what clients measure in every visit, between the model w that they receive and w_k, with
    which their last visit ended:

    .. math:: \rho_k = \frac{|F_k(w_k) - F_k(w)|}{\lVert w_k - w \rVert}, \qquad
              \beta_k = \frac{\lVert \nabla F_k(w_k) - \nabla F_k(w) \rVert}{\lVert w_k - w\rVert},
              \qquad \delta_k = \lVert \nabla F_k(w) - \nabla F(w) \rVert

    ρ, β and δ are their means over the cohort, by the weights of the models; ρ and β leave out
    clients on their first visit. The composition's aggregator makes :math:`\nabla F` of their
    gradients. A round takes c τ + b of the budget R, and τ starts at 1. It is cut to what the
    budget still allows; if that is no step, clients train no more. The loss is that of all samples
    of a client, of which the authors' code takes a minibatch in SGD.

    Args:
        local: the local update; its epochs, ``shared`` and memory are overridden.
        objective: F.
        lr: η, that of local's optimiser, which the bound takes for SGD without momentum.
        budget: R, of any resource.
        step_cost: c, of it for a local step.
        round_cost: b, of it for an average.
        phi: φ, the control parameter.
        most: τ_max.

    Returns:
        The local update. Each client keeps a model, sends as much again as its weights and 8 bytes,
        and is sent 8 bytes; a visit costs two gradients of all samples.

    Raises:
        ValueError: if a setting is out of range, or the budget does not pay for a round of a step.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1804.05271>, Algorithms 2 and 3, eq. 18.

    Example:
        >>> import fedjax_sim as fs, optax
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> plan = budgeted(local, problem.objective, 0.1, 100.0).shared_state(problem.model.init(
        ...     jax.random.key(0))).shared
        >>> int(plan.steps), float(plan.left)
        (1, 100.0)
    """
    numbers = {"lr": lr, "budget": budget, "step_cost": step_cost, "phi": phi}
    for name, value in numbers.items():
        if concrete(value) and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if concrete(round_cost) and not 0 <= round_cost < float("inf"):
        raise ValueError(f"round_cost must be finite and not negative, got {round_cost}")
    if concrete(budget, step_cost, round_cost) and not budget > step_cost + round_cost:
        raise ValueError(
            f"budget must be more than a round of one step costs, {step_cost + round_cost}, got "
            f"{budget}"
        )
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")

    def start(variables: Variables) -> Plan:
        del variables
        return Plan(jnp.int32(1), jnp.asarray(budget, jnp.float32))

    def send(trained: Variables, context: Context) -> Measured:
        del trained
        last: Last = context.memory
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
        plan: Plan, sent: Measured, weights: Array, clients: int, aggregator: Aggregator
    ) -> Plan:
        del clients
        anyone = jnp.any(weights > 0)
        known = jnp.where(sent.smoothness > 0, weights, 0)
        beta, rho = (_mean(known, a) for a in (sent.smoothness, sent.slope))
        mean = aggregator(sent.gradient, jnp.where(anyone, weights, 1))
        away = jax.tree.map(lambda rows, m: rows - m[None], sent.gradient, mean)
        delta = _mean(weights, tree.norms(away).astype(jnp.float32))
        best = jnp.where(jnp.any(known > 0), chosen(plan.steps, beta, delta, rho), plan.steps)
        left = plan.left - step_cost * plan.steps.astype(jnp.float32) - round_cost
        allowed = jnp.floor((left - round_cost) / step_cost)
        allowed = jnp.clip(allowed, 0, most).astype(jnp.int32)
        return tree.select(anyone & (plan.steps > 0), Plan(jnp.minimum(best, allowed), left), plan)

    def chosen(last: Array, beta: Array, delta: Array, rho: Array) -> Array:
        count = jnp.arange(1, most + 1, dtype=jnp.int32)
        tau = count.astype(jnp.float32)
        beta = jnp.maximum(beta, LEAST)
        apart = delta / beta * jnp.expm1(tau * jnp.log1p(lr * beta)) - delta * lr * tau
        apart = jnp.where(count == 1, 0, jnp.maximum(apart, 0))
        steps = (budget - round_cost - step_cost) * tau / (step_cost * tau + round_cost)
        root = jnp.sqrt(1 + 4 * steps**2 * phi * rho * lr * apart / tau)
        gap = (1 + root) / (2 * steps * lr * phi) + rho * apart
        good = jnp.isfinite(gap) & (count <= FARTHER * last)
        return count[jnp.argmin(jnp.where(good, gap, jnp.inf))]

    told = DrawnSteps(lambda key, plan: plan.steps, most)
    memory = Memory(
        init=lambda variables: Last(variables, jnp.bool_(False)),
        keep=lambda trained, context: Last(trained, jnp.bool_(True)),
    )
    return local.change(
        steps=told, shared=Shared(start, send, reduce), memory=memory, max_steps=None
    )


def _mean(weights: Array, values: Array) -> Array:
    """Of ``[P]``; 0 without weights. What has none may be NaN."""
    total, weight = (
        tree.row_sum(a) for a in (jnp.where(weights > 0, weights * values, 0), weights)
    )
    return total / jnp.where(weight > 0, weight, 1)


def _whole(objective: Objective, context: Context, model: Variables) -> tuple[Array, PyTree]:
    """F_k and its gradient; every call draws the same random numbers."""
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
