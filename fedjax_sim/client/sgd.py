"""Minibatch SGD on one client, step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Accompanied,
    Aggregator,
    Array,
    Batch,
    Change,
    ClientView,
    Companion,
    Context,
    Correction,
    DrawnSteps,
    Gathered,
    Leaves,
    LocalUpdate,
    Memory,
    Objective,
    PyTree,
    Shared,
    Train,
    Transform,
    Until,
    Variables,
)
from fedjax_sim.client.carried import Common, Kept
from fedjax_sim.client.correcting import corrected, survey_of
from fedjax_sim.client.descent import accompanied, descended, whole_gradient
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import minibatch
from fedjax_sim.engine.clients import number_of_round
from fedjax_sim.engine.optimizers import first_state
from fedjax_sim.engine.reach import response, stateless
from fedjax_sim.engine.streams import Client, Step, stream

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
    until: Until | None
    memory: Memory | None
    companion: Companion | None
    trained: Leaves | None
    rate_by_round: optax.Schedule | None
    steps: DrawnSteps | None
    shared: Shared | None

    def update(self, train: Train, change: Change) -> LocalUpdate:
        """The local update that trains so; ``change`` makes another with other settings."""
        return LocalUpdate(
            client_state=self.client_state,
            shared_state=self.shared_state,
            train=train,
            reduce=self.reduce,
            change=change,
            steps=self.length,
            epochs=self.epochs,
            batch_size=self.batch_size,
            peers=self.peers,
            corrections=self.corrections,
            response=functools.partial(response, self.optimizer),
            fresh=self.optimizer_state == "reset" or stateless(self.optimizer),
            stops=True,
            known=self.steps is None and self.inexactness is None and self.until is None,
            trained=self.trained,
            survey=survey_of(self.corrections, self.whole),
            follow=self.follow if any(made.follow for made in self._sharing()) else None,
            told=self.told if self.shared is not None and self.shared.told is not None else None,
            needs=tuple(need for made in self._needing() for need in made.needs),
        )

    def _sharing(self) -> tuple[Correction | Shared, ...]:
        return self.corrections if self.shared is None else (*self.corrections, self.shared)

    def _needing(self) -> tuple[Correction | Shared | Memory, ...]:
        return self._sharing() if self.memory is None else (*self._sharing(), self.memory)

    def client_state(self, variables: Variables) -> PyTree:
        """See :class:`Kept`."""
        return Kept(
            self.start(variables) if self.optimizer_state == "keep" else (),
            tuple(d.client_state(variables.params) for d in self.corrections),
            () if self.memory is None else self.memory.init(variables),
            () if self.companion is None else Accompanied(self.companion.init(variables)),
        )

    def shared_state(self, variables: Variables) -> PyTree:
        """See :class:`Common`."""
        return Common(
            self.start(variables) if self.optimizer_state == "average" else (),
            tuple(d.shared_state(variables.params) for d in self.corrections),
            () if self.shared is None else self.shared.init(variables),
        )

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> PyTree:
        """The mean state of the optimiser, and what corrections and ``shared`` make of theirs."""
        before, (states, terms, told) = Common(*shared_state), messages
        rest = weights, clients, aggregator
        if self.optimizer_state == "average":
            mean = aggregator(states, weights)
            states = tree.select(jnp.any(weights > 0), mean, before.optimizer)
        parts = zip(self.corrections, before.corrections, terms, strict=True)
        terms = tuple(d.reduce(c, sent, *rest) for d, c, sent in parts)
        if self.shared is not None:
            told = self.shared.reduce(before.shared, told, *rest)
        return Common(states, terms, told)

    def follow(self, shared_state: PyTree, step: Variables, gathered: Gathered) -> PyTree:
        """See :class:`fedjax_sim.base.Follow`."""
        before = Common(*shared_state)
        states = *before.corrections, before.shared
        *terms, told = (
            c if d is None or d.follow is None else d.follow(c, step, gathered)
            for d, c in zip((*self.corrections, self.shared), states, strict=True)
        )
        return before._replace(corrections=tuple(terms), shared=told)

    def told(self, shared_state: PyTree) -> PyTree:
        """See :class:`fedjax_sim.base.Told`."""
        common = Common(*shared_state)
        assert self.shared is not None
        assert self.shared.told is not None
        return common._replace(shared=self.shared.told(common.shared))

    def batches(self, size: Any) -> Any:
        """Minibatches in an epoch of ``size`` samples, a number or an array."""
        if self.last_batch == "drop":
            return size // self.batch_size
        return -(-size // self.batch_size)

    def length(self, size: Any) -> Any:
        """T_k, the steps on a client of ``size`` samples, a number or an array."""
        if self.steps is not None:
            return 0 * size + self.steps.most
        if self.epochs == int(self.epochs):
            total = self.batches(size) * int(self.epochs)
        else:
            total = self.epochs * self.batches(size).astype(jnp.float32)
            total = jnp.round(total).astype(jnp.int32)
        return total if self.max_steps is None else jnp.minimum(total, self.max_steps)

    def step(
        self,
        carry: PyTree,
        order: Array,
        batch: Array,
        *,
        context: Context,
        states: PyTree,
    ) -> PyTree:
        """One step; ``carry`` is that of a visit, see :mod:`fedjax_sim.client.visiting`."""
        before, opt_state, loss_sum, seen, path, beside, done = carry
        params, state = before
        chosen = self._chosen(before)
        refill = self.last_batch == "refill"
        samples = minibatch(context.client, order, batch, self.batch_size, refill=refill)
        samples = self._transformed(context.key, samples, context.client)
        schedule = self.rate_by_round
        rate = None if schedule is None else schedule(number_of_round(context.client))
        step = functools.partial(descended, self.optimizer, key=context.key, factor=rate)

        def objective(some: PyTree) -> tuple[Array, PyTree]:
            return self.objective(tree.filled(some, params), state, samples, context)

        def start() -> PyTree:
            at = context.received
            return jax.grad(self.objective, has_aux=True)(at.params, at.state, samples, context)[0]

        def changed(grads: PyTree, some: PyTree) -> PyTree:
            there = tree.filled(some, params)
            grads = self._filled(grads, there)
            return chosen(corrected(self.corrections, grads, there, context, states, start))

        taken = step(objective, chosen(params), opt_state, corrected=changed)
        if path is not None:
            path = jax.tree.map(jnp.add, path, self._filled(taken.gradient, params))
        count = jnp.sum(samples.mask, dtype=jnp.int32)
        loss_sum = loss_sum + taken.loss.astype(loss_sum.dtype) * count.astype(loss_sum.dtype)
        variables = Variables(tree.filled(taken.weights, params), tree.typed_like(taken.aux, state))
        opt_state = tree.typed_like(taken.opt_state, opt_state)
        if self.companion is not None:
            beside = accompanied(self.companion, step, before, beside, samples, context)
        return variables, opt_state, loss_sum, seen + count, path, beside, done

    def _transformed(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        for i, change in enumerate(self.transforms):
            batch = change(stream(key, Step.TRANSFORM, i), batch, client)
        return batch

    def _chosen(self, variables: Variables) -> Callable[[PyTree], PyTree]:
        """Takes the weights that are trained, or their gradients."""
        if self.trained is None:
            return lambda params: params
        return functools.partial(tree.only, self.trained(variables).params)

    def _filled(self, grads: PyTree, params: PyTree) -> PyTree:
        if self.trained is None:
            return grads
        return tree.filled(grads, jax.tree.map(jnp.zeros_like, params))

    def start(self, variables: Variables) -> PyTree:
        """A fresh state of the optimiser."""
        return first_state(self.optimizer, self._chosen(variables)(variables.params))

    def whole(self, context: Context) -> Callable[[PyTree], PyTree]:
        """``params -> ∇F_k``; see :func:`fedjax_sim.client.descent.whole_gradient`."""
        # Whole gradients are compared: dropout and transforms draw the same numbers for all.
        own = context._replace(key=stream(context.key, Client.WHOLE_GRADIENT))
        return functools.partial(
            whole_gradient, self.objective, self._transformed, self.batch_size, own
        )

    def slope(self, context: Context, states: PyTree) -> Callable[[PyTree], Array]:
        """``params -> f32[]``, the norm of the gradient of the client's problem."""
        whole, received = self.whole(context), context.received
        start = functools.partial(whole, received.params)

        def norm(params: PyTree) -> Array:
            grads = corrected(self.corrections, whole(params), params, context, states, start)
            return tree.norm(self._chosen(received)(grads))

        return norm
