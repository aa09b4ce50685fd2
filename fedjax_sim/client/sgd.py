"""Minibatch SGD on one client, step by step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Change,
    ClientView,
    Correction,
    Done,
    LocalInfo,
    LocalUpdate,
    Objective,
    PyTree,
    Trained,
    Transform,
    Variables,
    concrete,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import rows_at, shuffled, sweep
from fedjax_sim.engine.loops import repeat
from fedjax_sim.engine.optimizers import taken
from fedjax_sim.engine.streams import Client, Epoch, Step, stream

LastBatch = Literal["keep", "drop", "refill"]
OptimizerState = Literal["reset", "keep", "average"]


@dataclasses.dataclass(frozen=True)
class SGD:
    """The arguments of :func:`fedjax_sim.local.local_sgd`, and the functions that they make."""

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int
    epochs: float
    last_batch: LastBatch
    max_steps: int | None
    optimizer_state: OptimizerState
    corrections: tuple[Correction, ...]
    transforms: tuple[Transform, ...]
    peers: bool
    inexactness: float | None

    def update(self, change: Change) -> LocalUpdate:
        """The local update; ``change`` makes another with other settings."""
        return LocalUpdate(
            client_state=self.client_state,
            shared_state=self.shared_state,
            train=self.train,
            reduce=self.reduce,
            change=change,
            steps=self.steps,
            epochs=self.epochs,
            batch_size=self.batch_size,
            peers=self.peers,
            corrections=self.corrections,
            response=self.response,
        )

    def client_state(self, variables: Variables) -> PyTree:
        """The optimiser's state if it is kept, and the corrections' states."""
        kept = self.optimizer.init(variables.params) if self.optimizer_state == "keep" else ()
        return kept, tuple(d.client_state(variables.params) for d in self.corrections)

    def shared_state(self, variables: Variables) -> PyTree:
        """The optimiser's state if it is averaged, and the corrections' states."""
        sent = self.optimizer.init(variables.params) if self.optimizer_state == "average" else ()
        return sent, tuple(d.shared_state(variables.params) for d in self.corrections)

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        samples: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> PyTree:
        """The mean state of the optimiser, and the corrections' shared states."""
        states, terms = messages
        if self.optimizer_state == "average":
            mean = aggregator(states, samples.astype(jnp.float32))
            states = tree.select(jnp.any(samples > 0), mean, shared_state[0])
        parts = zip(self.corrections, shared_state[1], terms, strict=True)
        return states, tuple(
            d.reduce(c, sent, samples, clients, aggregator) for d, c, sent in parts
        )

    def response(self, steps: int) -> list[float | Array]:
        """See :class:`fedjax_sim.base.Response`."""
        place, places, key = jnp.float32(0), [], jax.random.key(0)
        opt_state = self.optimizer.init(place)
        for _ in range(steps):
            try:
                update, opt_state = self.optimizer.update(
                    jnp.float32(-1), opt_state, place, key=key
                )
            except (TypeError, ValueError):  # it needs more than a gradient: the loss, say
                return [math.nan] * steps
            place = place + update
            places.append(float(place) if concrete(place) else place)
        return places

    def batches(self, size: Any) -> Any:
        """Minibatches in an epoch of ``size`` samples, a number or an array."""
        up = 0 if self.last_batch == "drop" else self.batch_size - 1
        return (size + up) // self.batch_size

    def steps(self, size: Array) -> Array:
        """T_k, the steps on a client of ``size int32[]`` samples."""
        if self.epochs == int(self.epochs):
            total = self.batches(size) * int(self.epochs)
        else:
            total = self.epochs * self.batches(size).astype(jnp.float32)
            total = jnp.round(total).astype(jnp.int32)
        return total if self.max_steps is None else jnp.minimum(total, self.max_steps)

    def train(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
    ) -> Trained:
        """See :class:`fedjax_sim.base.LocalUpdate`."""
        budget = client.size if client.budget is None else client.budget
        batches, total = self.batches(client.size), self.steps(budget)
        most: int = min(self.batches(client.capacity), self.max_steps or client.capacity)
        received, states = variables.params, (client_state[1], shared_state[1])
        step = functools.partial(self._step, received=received, states=states)
        # Whole gradients are compared: dropout and transforms draw the same numbers for all.
        whole = functools.partial(
            self._whole_gradient, stream(key, Client.WHOLE_GRADIENT), variables, client
        )
        go_on = self._unsolved(whole, received, states)

        # All epochs' keys at once: on CPU a threefry call costs more than a small client's step.
        numbers = jnp.arange(math.ceil(self.epochs), dtype=jnp.uint32)
        epoch_keys = jax.vmap(lambda e: stream(key, Client.EPOCH, e))(numbers)

        def epoch(e: Array, carry: PyTree) -> PyTree:
            epoch_key = epoch_keys[e]
            order = shuffled(epoch_key, client.size, client.capacity)
            todo = go_on(carry, jnp.clip(total - e * batches, 0, batches))

            def one(b: Array, carry: PyTree, client: ClientView) -> PyTree:
                return step(carry, stream(epoch_key, Epoch.STEP, b), order, b, client=client)

            model, opt_state, loss, seen, path, done = repeat(client, todo, most, one, carry)
            return model, opt_state, loss, seen, path, done + todo

        opt_state = {
            "reset": lambda: self.optimizer.init(received),
            "keep": lambda: client_state[0],
            "average": lambda: shared_state[0],
        }[self.optimizer_state]()
        path = (
            jax.tree.map(jnp.zeros_like, received)
            if any(d.path for d in self.corrections)
            else None
        )
        # Losses of half precision are summed in float32, those of float64 as they are.
        wide = jnp.float64 if _has_float64(received) else jnp.float32
        carry = (variables, opt_state, jnp.zeros((), wide), jnp.int32(0), path, jnp.int32(0))
        trained, opt_state, loss, seen, path, steps = jax.lax.fori_loop(
            0, math.ceil(self.epochs), epoch, carry
        )
        mean = loss / jnp.maximum(seen, 1).astype(wide)
        info = LocalInfo(mean.astype(jnp.float32), steps, seen)
        steps = jnp.maximum(steps, 1)
        path = jax.tree.map(lambda total: total / steps.astype(total.dtype), path)
        done = Done(info, functools.partial(whole, received), path)
        ends = [
            d.finish(trained.params, received, own, shared, done)
            for d, own, shared in zip(self.corrections, *states, strict=True)
        ]
        return Trained(
            trained,
            (opt_state if self.optimizer_state == "keep" else (), tuple(end[0] for end in ends)),
            (opt_state if self.optimizer_state == "average" else (), tuple(end[1] for end in ends)),
            info,
        )

    def _step(
        self,
        carry: PyTree,
        key: Array,
        order: Array,
        batch: Array,
        *,
        received: PyTree,
        states: PyTree,
        client: ClientView,
    ) -> PyTree:
        (params, state), opt_state, loss_sum, seen, path, done = carry
        samples = self._batch(key, order, batch, client)

        def objective(params: PyTree) -> tuple[Array, PyTree]:
            return self.objective(params, state, received, samples, key)

        (loss, new_state), grads = jax.value_and_grad(objective, has_aux=True)(params)
        if path is not None:
            path = jax.tree.map(jnp.add, path, grads)

        # What optax's optimisers may ask for. The functions are traced only by those that call
        # them. A line search refuses arguments that it leaves and value_fn does not name.
        def value_fn(
            params: PyTree, key: Any = None, obj_fn: Any = None, grad_fn: Any = None
        ) -> Array:
            del key, obj_fn, grad_fn
            return objective(params)[0]

        def grad_fn(params: PyTree, step: Any = None) -> PyTree:
            del step
            grads, _ = jax.grad(objective, has_aux=True)(params)
            return self._corrected(grads, params, received, states)

        extra = {
            "value": loss,
            "grad": grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": grad_fn,
            "key": key,
        }
        updates, new_opt_state = self.optimizer.update(
            self._corrected(grads, params, received, states),
            opt_state,
            params,
            **taken(self.optimizer, extra),
        )
        params = optax.apply_updates(params, updates)
        count = jnp.sum(samples.mask, dtype=jnp.int32)
        loss_sum = loss_sum + loss.astype(loss_sum.dtype) * count.astype(loss_sum.dtype)
        variables = Variables(params, _typed_like(new_state, state))
        opt_state = _typed_like(new_opt_state, opt_state)
        return variables, opt_state, loss_sum, seen + count, path, done

    def _batch(self, key: Array, order: Array, batch: Array, client: ClientView) -> Batch:
        position = batch * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        mask = position < client.size
        if self.last_batch == "refill":
            position, mask = position % client.size, jnp.ones_like(mask)
        sample = order[jnp.minimum(position, client.size - 1)]
        return self._transformed(key, rows_at(client, sample)._replace(mask=mask), client)

    def _transformed(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        for i, change in enumerate(self.transforms):
            batch = change(stream(key, Step.TRANSFORM, i), batch, client)
        return batch

    def _corrected(self, grads: PyTree, params: PyTree, received: PyTree, states: PyTree) -> PyTree:
        for d, client_state, shared_state in zip(self.corrections, *states, strict=True):
            grads = jax.tree.map(
                jnp.add, grads, d.gradient(params, received, client_state, shared_state)
            )
        return grads

    def _whole_gradient(
        self, key: Array, variables: Variables, client: ClientView, params: PyTree
    ) -> PyTree:
        """∇F_k at ``params``, in training mode, with the received state before every minibatch."""

        def add(carry: tuple[Array, PyTree], batch: Batch) -> tuple[Array, PyTree]:
            number, total = carry
            batch_key = jax.random.fold_in(key, number)
            samples = self._transformed(batch_key, batch, client)
            grads, _ = jax.grad(self.objective, has_aux=True)(
                params, variables.state, variables.params, samples, batch_key
            )
            share = jnp.sum(samples.mask, dtype=jnp.int32) / jnp.maximum(client.size, 1)
            total = jax.tree.map(lambda t, g: t + share.astype(g.dtype) * g, total, grads)
            return number + 1, total

        start = (jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
        return sweep(client, self.batch_size, add, start)[1]

    def _unsolved(
        self, whole: Callable[[PyTree], PyTree], received: PyTree, states: PyTree
    ) -> Callable[[PyTree, Array], Array]:
        """``(carry, todo) -> todo``, or 0 once the client's problem is solved to γ."""
        if self.inexactness is None:
            return lambda carry, todo: todo

        def slope(params: PyTree) -> Array:
            return tree.norm(self._corrected(whole(params), params, received, states))

        limit = self.inexactness * slope(received)
        return lambda carry, todo: jnp.where(slope(carry[0].params) > limit, todo, 0)


def _has_float64(params: PyTree) -> bool:
    return any(w.dtype == jnp.float64 for w in jax.tree.leaves(params))


def _typed_like(new: PyTree, old: PyTree) -> PyTree:
    """In the types that the loop carries: a norm may take the statistics of bf16 in float32."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)
