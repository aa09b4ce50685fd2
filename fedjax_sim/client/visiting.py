"""A visit of local SGD: all of it at once, or in stretches of steps, which are its epochs."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Accompanied,
    Array,
    ClientView,
    Context,
    Done,
    LocalInfo,
    PyTree,
    Trained,
    TrainInSteps,
    Variables,
)
from fedjax_sim.client.carried import Common, Kept
from fedjax_sim.client.sgd import SGD
from fedjax_sim.engine.batches import shuffled
from fedjax_sim.engine.clients import coin_of_round
from fedjax_sim.engine.loops import repeat
from fedjax_sim.engine.streams import Client, Epoch, stream


class Visit(NamedTuple):
    """The arguments of :class:`fedjax_sim.base.Train`."""

    key: Array
    variables: Variables
    client: ClientView
    client_state: PyTree
    shared_state: PyTree

    def context(self) -> tuple[Context, PyTree]:
        """For the objective; the states of the corrections."""
        kept, common = Kept(*self.client_state), Common(*self.shared_state)
        context = Context(self.variables, self.client, self.key, kept.memory, common.shared)
        return context, (kept.corrections, common.corrections)


class Plan(NamedTuple):
    """What the steps of a visit read.

    Attributes:
        total: ``int32[]``, of all its steps.
        keys: ``[E]``, of its epochs.
        solved: ``f32[]``, the norm of the gradient at which it stops; () for none.
        epoch: ``int32[]``, the number of the next one.
        key: of the one under way.
        order: ``int32[capacity or more]``, that of its samples.
        before: ``int32[]``, the steps before it.
    """

    total: Array
    keys: Array
    solved: PyTree
    epoch: Array
    key: Array
    order: Array
    before: Array


class Walked(NamedTuple):
    """How far a visit has come.

    Attributes:
        variables: the model.
        opt_state: the optimiser's state.
        loss: ``f[]``, the sum over ``seen``.
        seen: ``int32[]``, samples.
        path: ``[*p]``, the sum of the gradients; None if nobody asks.
        beside: the companion and its optimiser's state; () for none.
        steps: ``int32[]``, those taken.
    """

    variables: Variables
    opt_state: PyTree
    loss: Array
    seen: Array
    path: PyTree
    beside: PyTree
    steps: Array


def visiting(sgd: SGD) -> TrainInSteps:
    """How clients train by ``sgd``."""
    return TrainInSteps(
        whole=functools.partial(_whole, sgd),
        begin=functools.partial(_begin, sgd),
        stretch=functools.partial(_stretch, sgd),
        step=functools.partial(_step, sgd),
        end=functools.partial(_end, sgd),
    )


def _epochs(sgd: SGD) -> int:
    """Drawn steps may take as many epochs, of one minibatch."""
    return math.ceil(sgd.epochs) if sgd.steps is None else sgd.steps.most


def _begin(sgd: SGD, *visit: Any) -> tuple[Plan, Walked]:
    now = Visit(*visit)
    client, received = now.client, now.variables
    kept, common = Kept(*now.client_state), Common(*now.shared_state)
    if sgd.steps is None:
        total = sgd.length(client.size if client.budget is None else client.budget)
    else:
        total = sgd.steps.draw(coin_of_round(client), common.shared)
    if client.limit is not None:
        total = jnp.minimum(total, client.limit)
    solved: PyTree = ()
    if sgd.inexactness is not None:
        solved = sgd.inexactness * sgd.slope(*now.context())(received.params)
    # All epochs' keys at once: on CPU a threefry call costs more than a small client's step.
    numbers = jnp.arange(_epochs(sgd), dtype=jnp.uint32)
    keys = jax.vmap(lambda e: stream(now.key, Client.EPOCH, e))(numbers)
    zero = jnp.int32(0)
    order = jax.eval_shape(lambda: shuffled(now.key, zero, client.capacity))
    none = jnp.zeros(order.shape, order.dtype)
    plan = Plan(total, keys, solved, zero, keys[0], none, zero)
    stored = {"keep": kept.optimizer, "average": common.optimizer}
    reset = sgd.optimizer_state == "reset"
    opt_state = sgd.start(received) if reset else stored[sgd.optimizer_state]
    path = None
    if any(d.path for d in sgd.corrections):
        path = jax.tree.map(jnp.zeros_like, received.params)
    # Losses of half precision are summed in float32, those of float64 as they are.
    double = any(w.dtype == jnp.float64 for w in jax.tree.leaves(received.params))
    loss = jnp.zeros((), jnp.float64 if double else jnp.float32)
    beside: PyTree = ()
    if isinstance(kept.companion, Accompanied):
        own = kept.companion.own
        beside = own, sgd.optimizer.init(own.params)
    return plan, Walked(received, opt_state, loss, zero, path, beside, zero)


def _stretch(sgd: SGD, plan: Plan, walked: Walked, *visit: Any) -> tuple[Plan, Array]:
    now = Visit(*visit)
    client, last = now.client, _epochs(sgd) - 1
    batches = sgd.batches(client.size)
    todo = jnp.clip(plan.total - plan.epoch * batches, 0, batches)
    todo = jnp.where(plan.epoch <= last, todo, 0)
    if sgd.inexactness is not None:
        slope = sgd.slope(*now.context())(walked.variables.params)
        todo = jnp.where(slope > plan.solved, todo, 0)
    if sgd.until is not None:
        over = sgd.until(walked.variables, plan.epoch, now.context()[0])
        ended = walked.steps < plan.epoch * batches  # before an earlier epoch
        todo = jnp.where(over | ended, 0, todo)
    key = plan.keys[jnp.minimum(plan.epoch, last)]
    order = shuffled(key, client.size, client.capacity)
    new = plan._replace(epoch=plan.epoch + 1, key=key, order=order, before=walked.steps)
    return new, todo


def _step(sgd: SGD, plan: Plan, walked: Walked, *visit: Any) -> Walked:
    new = _moved(sgd, plan, walked, walked.steps - plan.before, Visit(*visit))
    return new._replace(steps=walked.steps + 1)


def _moved(sgd: SGD, plan: Plan, walked: Walked, b: Array, now: Visit) -> Walked:
    """After minibatch ``b`` of the epoch; the step itself is not yet counted."""
    context, states = now.context()
    context = context._replace(key=stream(plan.key, Epoch.STEP, b))
    return Walked(*sgd.step(walked, plan.order, b, context=context, states=states))


def _end(sgd: SGD, plan: Plan, walked: Walked, *visit: Any) -> Trained:
    del plan
    now = Visit(*visit)
    context, states = now.context()
    trained, opt_state, loss, seen, path, beside, taken = walked
    mean = loss / jnp.maximum(seen, 1).astype(loss.dtype)
    info = LocalInfo(mean.astype(jnp.float32), taken, seen)
    taken = jnp.maximum(taken, 1)
    path = jax.tree.map(lambda total: total / taken.astype(total.dtype), path)
    done = Done(info, functools.partial(sgd.whole(context), now.variables.params), path)
    ends = [
        d.finish(trained.params, context, own, shared, done)
        for d, own, shared in zip(sgd.corrections, *states, strict=True)
    ]
    return Trained(
        trained,
        Kept(
            opt_state if sgd.optimizer_state == "keep" else (),
            tuple(end[0] for end in ends),
            () if sgd.memory is None else sgd.memory.keep(trained, context),
            () if sgd.companion is None else Accompanied(beside[0]),
        ),
        Common(
            opt_state if sgd.optimizer_state == "average" else (),
            tuple(end[1] for end in ends),
            () if sgd.shared is None else sgd.shared.send(trained, context),
        ),
        info,
    )


def _whole(sgd: SGD, *visit: Any) -> Trained:
    now = Visit(*visit)
    client = now.client
    plan, start = _begin(sgd, *now)
    limit = sgd.max_steps if sgd.steps is None else sgd.steps.most
    most = min(sgd.batches(client.capacity), limit or client.capacity)

    def epoch(e: Array, walked: Walked, client: ClientView) -> Walked:
        here = now._replace(client=client)
        of_epoch, todo = _stretch(sgd, plan._replace(epoch=e), walked, *here)

        def one(b: Array, walked: Walked, client: ClientView) -> Walked:
            return _moved(sgd, of_epoch, walked, b, here._replace(client=client))

        walked = repeat(client, todo, most, one, walked)
        return walked._replace(steps=walked.steps + todo)

    if sgd.steps is None:
        end = jax.lax.fori_loop(0, _epochs(sgd), lambda e, w: epoch(e, w, client), start)
    else:
        batches = sgd.batches(client.size)
        needed = jnp.where(batches > 0, -(-plan.total // jnp.maximum(batches, 1)), 0)
        end = repeat(client, needed, _epochs(sgd), epoch, start)
    return _end(sgd, plan, end, *now)
