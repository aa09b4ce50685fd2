"""Local updates: exact epochs of minibatch SGD on a client of any size."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree
from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Done,
    Drift,
    LocalInfo,
    LocalUpdate,
    Objective,
    PyTree,
    Trained,
    Transform,
    Variables,
)
from fedjax_sim.batches import rows_at, shuffled, sweep

LastBatch = Literal["keep", "drop", "refill"]
OptimizerState = Literal["reset", "keep", "average"]


def local_sgd(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    batch_size: int = 16,
    epochs: float = 1.0,
    last_batch: LastBatch = "keep",
    *,
    max_steps: int | None = None,
    optimizer_state: OptimizerState = "reset",
    drift: Sequence[Drift] = (),
    transforms: Sequence[Transform] = (),
    peers: bool = False,
    inexactness: float | None = None,
) -> LocalUpdate:
    r"""E epochs of minibatch steps of an optax optimiser.

    .. math:: T_k = E \lceil n_k / B \rceil, \qquad w_k \leftarrow w_k - \eta\,\nabla F_b(w_k)

    Samples are reshuffled each epoch by a key of (seed, round, client, epoch) alone, so a result
    does not depend on which clients ran beside this one or where.

    Args:
        objective: see :mod:`fedjax_sim.objective`.
        optimizer: an ``optax.GradientTransformation``; it is given ``key``, the step's own, as an
            extra argument. A schedule counts the steps in the optimiser's state: it restarts at
            every visit unless ``optimizer_state`` is "keep" or "average".
        batch_size: B.
        epochs: E; a fraction runs ``round(E * ceil(n_k / B))`` steps.
        last_batch: what becomes of the short last minibatch: ``keep`` it (its loss is the mean over
            its real samples), ``drop`` it, or ``refill`` it from the epoch's beginning.
        max_steps: the most steps of a visit; 1 is parallel SGD.
        optimizer_state: of the optimiser when a client receives a model: ``reset``; ``keep`` the
            client's own of its last visit; ``average``: the mean over the last cohort, weighted by
            n_k, is sent along (momentum federated learning).
        drift: terms added to every gradient, see :mod:`fedjax_sim.drift`; the reported loss is
            without them.
        transforms: change each minibatch, in order.
        peers: whether a transform needs the other clients' samples.
        inexactness: γ; a client stops after the epoch that leaves
            :math:`\lVert\nabla h(w_k)\rVert \le \gamma \lVert\nabla h(w_{recv})\rVert`, h with the
            drift terms. Costs a pass over the samples before every epoch. None: never.

    Returns:
        A :class:`fedjax_sim.base.LocalUpdate`.

    Raises:
        ValueError: if a setting is out of range or not of its kind.

    Source: McMahan et al. 2017, Algorithm 1 (ClientUpdate); Vo, Rakotobe, Algorithm 2 (γ).

    Example:
        >>> from fedjax_sim import models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((2,), 2)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16, epochs=2)
        >>> client = ClientView(jnp.zeros((40, 2)), jnp.zeros(40, jnp.int32), jnp.arange(40),
        ...                     jnp.int32(0), jnp.int32(40), 40)
        >>> key = jax.random.key(0)
        >>> int(local.train(key, model.init(key), client, ((), ()), ((), ())).info.steps)
        6
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"optimizer must be an optax.GradientTransformation, got {optimizer!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not epochs > 0:
        raise ValueError(f"epochs must be positive, got {epochs}")
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
    sgd = _SGD(
        objective,
        optax.with_extra_args_support(optimizer),
        batch_size,
        epochs,
        last_batch,
        max_steps,
        optimizer_state,
        _terms(drift),
        _functions(transforms),
        peers,
        inexactness,
    )
    return sgd.update()


@dataclasses.dataclass(frozen=True)
class _SGD:
    """The arguments of :func:`local_sgd`, and the functions that they make."""

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int
    epochs: float
    last_batch: LastBatch
    max_steps: int | None
    optimizer_state: OptimizerState
    drift: tuple[Drift, ...]
    transforms: tuple[Transform, ...]
    peers: bool
    inexactness: float | None

    def update(self) -> LocalUpdate:
        return LocalUpdate(
            memory=self.memory,
            shared=self.shared,
            train=self.train,
            absorb=self.absorb,
            change=self.change,
            upload_bytes=lambda variables, visits: tree.num_bytes(variables),
            epochs=self.epochs,
            batch_size=self.batch_size,
            peers=self.peers,
        )

    def change(
        self,
        *,
        drift: Sequence[Drift] | None = (),
        transforms: Sequence[Transform] = (),
        **settings: Any,
    ) -> LocalUpdate:
        """``drift`` None drops the terms that are there."""
        mine = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mine |= {
            "drift": () if drift is None else self.drift + _terms(drift),
            "transforms": self.transforms + _functions(transforms),
        }
        return local_sgd(**(mine | settings))

    def memory(self, variables: Variables) -> PyTree:
        kept = self.optimizer.init(variables.params) if self.optimizer_state == "keep" else ()
        return kept, tuple(d.memory(variables.params) for d in self.drift)

    def shared(self, variables: Variables) -> PyTree:
        sent = self.optimizer.init(variables.params) if self.optimizer_state == "average" else ()
        return sent, tuple(d.shared(variables.params) for d in self.drift)

    def absorb(self, shared: PyTree, messages: PyTree, samples: Array, clients: int) -> PyTree:
        states, terms = messages
        if self.optimizer_state == "average":
            mean = tree.mean(states, samples.astype(jnp.float32))
            states = tree.select(jnp.any(samples > 0), mean, shared[0])
        parts = zip(self.drift, shared[1], terms, strict=True)
        return states, tuple(d.absorb(c, sent, samples, clients) for d, c, sent in parts)

    def batches(self, size: Array) -> Array:
        """Minibatches in an epoch of ``size int32[]`` samples."""
        spare = 0 if self.last_batch == "drop" else self.batch_size - 1
        return (size + spare) // self.batch_size

    def steps(self, size: Array) -> Array:
        """T_k, the steps on a client of ``size int32[]`` samples."""
        if self.epochs == int(self.epochs):
            total = self.batches(size) * int(self.epochs)
        else:
            total = self.epochs * self.batches(size).astype(jnp.float32)
            total = jnp.round(total).astype(jnp.int32)
        return total if self.max_steps is None else jnp.minimum(total, self.max_steps)

    def train(
        self, key: Array, variables: Variables, client: ClientView, memory: PyTree, shared: PyTree
    ) -> Trained:
        budget = client.size if client.budget is None else client.budget
        batches, total = self.batches(client.size), self.steps(budget)
        received, corrections = variables.params, (memory[1], shared[1])
        step = functools.partial(
            self._step, received=received, corrections=corrections, client=client
        )
        # Dropout and transforms draw the same for every whole gradient: their norms are compared.
        whole = functools.partial(
            self._whole_gradient, jax.random.fold_in(key, 2**31 - 2), variables, client
        )
        go_on = self._unsolved(whole, received, corrections)

        # All epochs' keys at once: on CPU a threefry call costs more than a small client's step.
        numbers = jnp.arange(math.ceil(self.epochs), dtype=jnp.uint32)
        epoch_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)

        def epoch(e: Array, carry: PyTree) -> PyTree:
            epoch_key = epoch_keys[e]
            order = shuffled(epoch_key, client.size, client.capacity)
            todo = go_on(carry, jnp.clip(total - e * batches, 0, batches))
            model, opt_state, loss, seen, path, done = jax.lax.fori_loop(
                0, todo, lambda b, c: step(c, jax.random.fold_in(epoch_key, b + 1), order, b), carry
            )
            return model, opt_state, loss, seen, path, done + todo

        opt_state = {
            "reset": lambda: self.optimizer.init(received),
            "keep": lambda: memory[0],
            "average": lambda: shared[0],
        }[self.optimizer_state]()
        path = jax.tree.map(jnp.zeros_like, received) if any(d.path for d in self.drift) else None
        carry = (variables, opt_state, jnp.float32(0), jnp.int32(0), path, jnp.int32(0))
        trained, opt_state, loss, seen, path, taken = jax.lax.fori_loop(
            0, math.ceil(self.epochs), epoch, carry
        )
        info = LocalInfo(loss / jnp.maximum(seen, 1).astype(jnp.float32), taken, seen)
        steps = jnp.maximum(taken, 1)
        path = jax.tree.map(lambda total: total / steps.astype(total.dtype), path)
        done = Done(info, functools.partial(whole, received), path)
        ends = [
            d.finish(trained.params, received, *own, done)
            for d, *own in zip(self.drift, *corrections, strict=True)
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
        corrections: PyTree,
        client: ClientView,
    ) -> PyTree:
        (params, state), opt_state, loss_sum, seen, path, done = carry
        samples = self._batch(key, order, batch, client)
        (loss, state), grads = jax.value_and_grad(self.objective, has_aux=True)(
            params, state, received, samples, key
        )
        if path is not None:
            path = jax.tree.map(jnp.add, path, grads)
        grads = self._corrected(grads, params, received, corrections)
        updates, opt_state = self.optimizer.update(grads, opt_state, params, key=key)
        params = optax.apply_updates(params, updates)
        count = jnp.sum(samples.mask, dtype=jnp.int32)
        loss_sum = loss_sum + loss * count.astype(jnp.float32)
        return Variables(params, state), opt_state, loss_sum, seen + count, path, done

    def _batch(self, key: Array, order: Array, batch: Array, client: ClientView) -> Batch:
        position = batch * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        mask = position < client.size
        if self.last_batch == "refill":
            position, mask = position % client.size, jnp.ones_like(mask)
        place = order[jnp.minimum(position, client.size - 1)]
        return self._transformed(key, rows_at(client, place)._replace(mask=mask), client)

    def _transformed(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        for i, change in enumerate(self.transforms):
            batch = change(jax.random.fold_in(key, i + 1), batch, client)
        return batch

    def _corrected(
        self, grads: PyTree, params: PyTree, received: PyTree, corrections: PyTree
    ) -> PyTree:
        for d, memory, shared in zip(self.drift, *corrections, strict=True):
            grads = jax.tree.map(jnp.add, grads, d.gradient(params, received, memory, shared))
        return grads

    def _whole_gradient(
        self, key: Array, variables: Variables, client: ClientView, params: PyTree
    ) -> PyTree:
        """∇F_k at ``params``, in training mode, the received state before every minibatch."""

        def add(carry: tuple[Array, PyTree], batch: Batch) -> tuple[Array, PyTree]:
            number, total = carry
            batch_key = jax.random.fold_in(key, number)
            samples = self._transformed(batch_key, batch, client)
            grads, _ = jax.grad(self.objective, has_aux=True)(
                params, variables.state, variables.params, samples, batch_key
            )
            share = jnp.sum(samples.mask) / jnp.maximum(client.size, 1)
            total = jax.tree.map(lambda t, g: t + share.astype(g.dtype) * g, total, grads)
            return number + 1, total

        start = (jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
        return sweep(client, self.batch_size, add, start)[1]

    def _unsolved(
        self, whole: Callable[[PyTree], PyTree], received: PyTree, corrections: PyTree
    ) -> Callable[[PyTree, Array], Array]:
        """``(carry, todo) -> todo``, or 0 once the client's problem is solved to γ."""
        if self.inexactness is None:
            return lambda carry, todo: todo

        def slope(params: PyTree) -> Array:
            return tree.norm(self._corrected(whole(params), params, received, corrections))

        limit = self.inexactness * slope(received)
        return lambda carry, todo: jnp.where(slope(carry[0].params) > limit, todo, 0)


def _terms(drift: Sequence[Drift]) -> tuple[Drift, ...]:
    # A Drift alone is a sequence too, of its functions.
    if not isinstance(drift, Sequence) or not all(isinstance(term, Drift) for term in drift):
        raise ValueError(f"drift must be a sequence of Drift, such as (scaffold(),), got {drift!r}")
    return tuple(drift)


def _functions(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    if not isinstance(transforms, Sequence) or not all(map(callable, transforms)):
        raise ValueError(f"transforms must be a sequence of functions, got {transforms!r}")
    return tuple(transforms)
