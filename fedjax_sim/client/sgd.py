"""A visit of local SGD: as a whole, or in stretches of steps, which are its epochs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Accompanied,
    Array,
    Batch,
    ClientView,
    Companion,
    Context,
    Correction,
    Count,
    Decay,
    Done,
    DrawnSteps,
    Leaves,
    LocalInfo,
    LocalUpdate,
    Memory,
    Objective,
    PyTree,
    Share,
    Shared,
    Trained,
    TrainInSteps,
    Transform,
    Until,
    Variables,
)
from fedjax_sim.client import own_settings
from fedjax_sim.client.descent import (
    Common,
    Kept,
    Plan,
    Progress,
    Visit,
    accompanied,
    corrected,
    descended,
    private_slope,
    whole_gradient,
    widened,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import common_count, minibatch, repeat, shuffled
from fedjax_sim.engine.clients import round_key
from fedjax_sim.engine.rounding import nearest, rounded
from fedjax_sim.engine.streams import Client, Epoch, Step, stream
from fedjax_sim.privacy import dp_sgd

LastBatch = Literal["keep", "drop", "refill"]
OptimizerState = Literal["reset", "keep", "average"]


class SGD(LocalUpdate):
    """The settings of :class:`fedjax_sim.local.local_sgd` and the training by them."""

    objective: Objective
    optimizer: optax.GradientTransformation
    batch_size: Count = 16
    epochs: float | Sequence[float] = 1.0
    last_batch: LastBatch = "keep"
    _: dataclasses.KW_ONLY
    max_steps: Count | None = None
    optimizer_state: OptimizerState = "reset"
    corrections: Sequence[Correction] = ()
    transforms: Sequence[Transform] = ()
    peers: bool = False
    inexactness: Decay | None = None
    until: Until | None = None
    memory: Memory | None = None
    companion: Companion | None = None
    trained: Leaves | None = None
    rate_by_round: optax.Schedule | None = None
    rate_by_client: Sequence[float] | None = None
    batch_by_client: Sequence[int] | None = None
    stragglers: Share = 0.0
    steps: DrawnSteps | None = None
    shared: Shared | None = None
    half_weights: bool = False
    private: dp_sgd | None = None

    @functools.cached_property
    def train(self) -> TrainInSteps:
        return TrainInSteps(self._whole, self._begin, self._stretch, self._step, self._end)

    def steps_for(self, samples: Any, client: Any = None) -> Any:
        if self.steps is not None:
            return 0 * samples + self.steps.most
        epochs, batches = own_settings.expected(self.epochs, client), self._batches(samples, client)
        return own_settings.steps_of(epochs, batches, self.max_steps)

    def _common_steps(self, client: ClientView) -> tuple[int, int] | None:
        """Returns the steps of a visit and of an epoch of all clients; None if they differ."""
        unknown = self.steps, self.inexactness, self.until, client.limit, client.budget
        total = common_count(client, self.steps_for)
        own = self.epochs, self.batch_by_client or self.batch_size
        differ = self.stragglers or not all(map(own_settings.is_common, own))
        if total is None or differ or any(end is not None for end in unknown):
            return None
        batches = common_count(client, lambda samples: min(self._batches(samples), total))
        return None if batches is None else (total, batches)

    def _batches(self, samples: Any, client: Any = None) -> Any:
        """Returns the minibatches in an epoch of ``client int32[*]``; None: the largest number."""
        size = own_settings.expected(self.batch_by_client or self.batch_size, client, least=True)
        return samples // size if self.last_batch == "drop" else -(-samples // size)

    @property
    def _most_epochs(self) -> int:
        """The largest number of epochs; drawn steps may be as many epochs of one minibatch."""
        most = math.ceil(own_settings.largest(self.epochs))
        return most if self.steps is None else self.steps.most

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(self.optimizer)

    def _first_state(self, variables: Variables) -> PyTree:
        return self._optimizer.init(self._chosen(variables)(variables.params))

    def _chosen(self, variables: Variables) -> Callable[[PyTree], PyTree]:
        """Returns a function that selects the trained weights, or their gradients."""
        if self.trained is None:
            return lambda params: params
        return functools.partial(tree.only, self.trained(variables).params)

    def _transformed(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        for i, change in enumerate(self.transforms):
            batch = change(stream(key, Step.TRANSFORM, i), batch, client)
        return batch

    def _whole_gradient(self, context: Context) -> Callable[[PyTree], PyTree]:
        # Whole gradients are compared: dropout and transforms draw the same numbers for all.
        own = context._replace(key=stream(context.key, Client.WHOLE_GRADIENT))
        return functools.partial(
            whole_gradient, self.objective, self._transformed, self.batch_size, own
        )

    def _slope(self, visit: Visit, params: PyTree) -> Array:
        """Returns ``f32[]``, the norm of the gradient of the client's problem at ``params``."""
        context, states = visit.context()
        whole, received = self._whole_gradient(context), visit.variables
        start = functools.partial(whole, received.params)
        grads = corrected(self.corrections, whole(params), params, context, states, start)
        return tree.norm(self._chosen(received)(grads))

    def _begin(self, *given: Any) -> tuple[Plan, Progress]:
        visit = Visit(*given)
        client, received = visit.client, visit.variables
        kept, common = Kept(*visit.client_state), Common(*visit.shared_state)
        if self.steps is None:
            epochs = own_settings.epochs_of(self.epochs, self.stragglers, visit.key, client)
            samples = client.size if client.budget is None else client.budget
            batches = self._batches(samples, client.id)
            total = own_settings.steps_of(epochs, batches, self.max_steps)
        else:
            total = self.steps.draw(round_key(client), common.shared)
        if client.limit is not None:
            total = jnp.minimum(total, client.limit)
        solved: PyTree = ()
        if self.inexactness is not None:
            solved = self.inexactness * self._slope(visit, received.params)
        # All epochs' keys at once: on CPU a threefry call costs more than a small client's step.
        numbers = jnp.arange(self._most_epochs, dtype=jnp.uint32)
        keys = jax.vmap(lambda e: stream(visit.key, Client.EPOCH, e))(numbers)
        zero = jnp.int32(0)
        none = jnp.zeros_like(jax.eval_shape(lambda: shuffled(visit.key, zero, client.capacity)))
        plan = Plan(total, keys, solved, zero, keys[0], none, zero)
        stored = {"keep": kept.optimizer, "average": common.optimizer}
        reset = self.optimizer_state == "reset"
        opt_state = self._first_state(received) if reset else stored[self.optimizer_state]
        path = None
        if any(d.path for d in self.corrections):
            path = jax.tree.map(jnp.zeros_like, received.params)
        # Losses of half precision are summed in float32, losses of float64 as they are.
        double = any(w.dtype == jnp.float64 for w in jax.tree.leaves(received.params))
        loss = jnp.zeros((), jnp.float64 if double else jnp.float32)
        companion: PyTree = ()
        if isinstance(kept.companion, Accompanied):
            companion = kept.companion.own, self._optimizer.init(kept.companion.own.params)
        if self.half_weights:
            if client.differentiable:
                raise ValueError("half_weights must be False to differentiate, got True")
            received = received._replace(params=nearest(received.params))
        return plan, Progress(received, opt_state, loss, zero, path, companion, zero)

    def _stretch(self, plan: Plan, progress: Progress, *given: Any) -> tuple[Plan, Array]:
        visit = Visit(*given)
        progress = widened(progress, visit.variables)
        client, last = visit.client, self._most_epochs - 1
        batches = self._batches(client.size, client.id)
        todo = jnp.clip(plan.total - plan.epoch * batches, 0, batches)
        todo = jnp.where(plan.epoch <= last, todo, 0)
        if self.inexactness is not None:
            slope = self._slope(visit, progress.variables.params)
            todo = jnp.where(slope > plan.solved, todo, 0)
        if self.until is not None:
            over = self.until(progress.variables, plan.epoch, visit.context()[0])
            ended = progress.steps < plan.epoch * batches  # before an earlier epoch
            todo = jnp.where(over | ended, 0, todo)
        key = plan.keys[jnp.minimum(plan.epoch, last)]
        order = shuffled(key, client.size, client.capacity, client.size_range)
        new = plan._replace(epoch=plan.epoch + 1, key=key, order=order, before=progress.steps)
        return new, todo

    def _step(self, plan: Plan, progress: Progress, *given: Any) -> Progress:
        new = self._moved(plan, progress, progress.steps - plan.before, Visit(*given))
        return new._replace(steps=progress.steps + 1)

    def _moved(self, plan: Plan, progress: Progress, b: Array, visit: Visit) -> Progress:
        """Returns the state after minibatch ``b`` of the epoch, whose step is not counted yet."""
        context, states = visit.context()
        context = context._replace(key=stream(plan.key, Epoch.STEP, b))
        progress = widened(progress, visit.variables)
        params, state = progress.variables
        chosen, zeros = self._chosen(progress.variables), jax.tree.map(jnp.zeros_like, params)
        own_size = own_settings.of_client(self.batch_by_client, visit.client.id)
        size, refill = self.batch_size, self.last_batch == "refill"
        samples = minibatch(context.client, plan.order, b, size, refill=refill, own=own_size)
        samples = self._transformed(context.key, samples, context.client)
        rate = own_settings.rate_of(self.rate_by_round, self.rate_by_client, context.client)
        step = functools.partial(descended, self._optimizer, key=context.key, factor=rate)

        def objective(some: PyTree) -> tuple[Array, PyTree]:
            return self.objective(tree.filled(some, params), state, samples, context)

        def start() -> PyTree:
            at = context.received
            return jax.grad(self.objective, has_aux=True)(at.params, at.state, samples, context)[0]

        def changed(grads: PyTree, some: PyTree) -> PyTree:
            there = tree.filled(some, params)
            grads = tree.filled(grads, zeros)
            return chosen(corrected(self.corrections, grads, there, context, states, start))

        private = None
        if self.private is not None:
            own = self.private, self.objective, self._transformed, self.batch_size
            private = private_slope(*own, progress.variables, chosen(params), context)
        old = chosen(params), progress.opt_state
        taken = step(objective, *old, corrected=changed, private=private)
        path, companion, loss = progress.path, progress.companion, progress.loss
        if path is not None:
            path = jax.tree.map(jnp.add, path, tree.filled(taken.gradient, zeros))
        count = jnp.sum(samples.mask, dtype=jnp.int32) if private is None else private.samples
        loss = loss + taken.loss.astype(loss.dtype) * count.astype(loss.dtype)
        if self.companion is not None:
            given = progress.variables, companion, samples, context
            companion = accompanied(self.companion, step, *given)
        # A client without samples takes no step whose result is used.
        has_samples = context.client.size > 0
        weights = tree.select_updated(has_samples, taken.weights, chosen(params))
        weights = tree.filled(weights, params)
        if self.half_weights:
            weights = rounded(stream(context.key, Step.ROUNDING), weights)
        return Progress(
            Variables(weights, tree.typed_like(taken.aux, state)),
            tree.typed_like(taken.opt_state, progress.opt_state),
            loss,
            progress.seen + count,
            path,
            companion,
            progress.steps,
        )

    def _end(self, plan: Plan, progress: Progress, *given: Any) -> Trained:
        visit = Visit(*given)
        context, states = visit.context()
        trained, opt_state, loss, seen, path, companion, taken = widened(progress, visit.variables)
        if self.half_weights:  # a server that averages keeps its digits in float32
            received = visit.variables.params
            start = tree.typed_like(nearest(received), received)
            moved = tree.sum_of(received, tree.subtract(trained.params, start))
            trained = trained._replace(params=moved)
        mean = loss / jnp.maximum(seen, 1).astype(loss.dtype)
        info = LocalInfo(mean.astype(jnp.float32), taken, seen)
        taken = jnp.maximum(taken, 1)
        path = jax.tree.map(lambda total: total / taken.astype(total.dtype), path)
        whole = functools.partial(self._whole_gradient(context), visit.variables.params)
        ends = [
            d.finish(trained.params, context, own, common, Done(info, whole, path))
            for d, own, common in zip(self.corrections, *states, strict=True)
        ]
        return Trained(
            trained,
            Kept(
                opt_state if self.optimizer_state == "keep" else (),
                tuple(end[0] for end in ends),
                () if self.memory is None else self.memory.keep(trained, context),
                () if self.companion is None else Accompanied(companion[0]),
            ),
            Common(
                opt_state if self.optimizer_state == "average" else (),
                tuple(end[1] for end in ends),
                () if self.shared is None else self.shared.send(trained, context),
            ),
            info,
        )

    def _whole(self, *given: Any) -> Trained:
        visit = Visit(*given)
        client = visit.client
        plan, start = self._begin(*visit)
        common, epochs = self._common_steps(client), self._most_epochs
        if common is not None:
            total, batches = common
            epochs = -(-total // max(batches, 1))
        limit = self.max_steps if self.steps is None else self.steps.most
        most = min(self._batches(client.capacity), limit or client.capacity)

        def epoch(e: Array, progress: Progress, client: ClientView) -> Progress:
            here = visit._replace(client=client)
            todo: Any  # a Python number if all clients take as many steps
            of_epoch, todo = self._stretch(plan._replace(epoch=e), progress, *here)
            if common is not None:
                whole = total == epochs * batches
                todo = batches if whole else jnp.minimum(batches, total - e * batches)

            def one(b: Array, progress: Progress, client: ClientView) -> Progress:
                return self._moved(of_epoch, progress, b, here._replace(client=client))

            progress = repeat(client, todo, most, one, progress)
            return progress._replace(steps=progress.steps + todo)

        if self.steps is None:
            end = jax.lax.fori_loop(0, epochs, lambda e, w: epoch(e, w, client), start)
        else:
            batches = self._batches(client.size, client.id)
            needed = jnp.where(batches > 0, -(-plan.total // jnp.maximum(batches, 1)), 0)
            end = repeat(client, needed, epochs, epoch, start)
        if common is not None:
            end = tree.select(client.size > 0, end, start)
        return self._end(plan, end, *visit)
