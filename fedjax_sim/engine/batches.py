"""Minibatches of one client: a random order of its samples, and loops over all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from fedjax_sim.base import (
    Array,
    Batch,
    ClientData,
    ClientView,
    FetchedError,
    MissingRootError,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.vmapped import everywhere, greatest

T = TypeVar("T")


def root_view(data: ClientData) -> ClientView:
    """Returns the server's own samples as a client's view.

    Raises:
        MissingRootError: if the server has no samples.
    """
    if data.root is None:
        raise MissingRootError(
            "root of the data must be the server's own samples, got None: see client_data"
        )
    return ClientView(
        data.x,
        data.y,
        data.index,
        start=data.root[0],
        size=data.root[1] - data.root[0],
        capacity=data.capacity,
        copies=data.copies,
        differentiable=data.differentiable,
    )


def on_root(train: Callable[..., T]) -> Callable[..., T]:
    """Applies training to the server's own samples, :func:`root_view`.

    On CPU the runs that a vmap adds (seeds) train one after another: a vmapped convolution is
    grouped there, and 3 runs of an epoch took 4 times (ResNet-20) to 6 times (the CNN for MNIST) as
    long as one.
    """

    def on_data(key: Array, variables: Variables, data: ClientData, *others: PyTree) -> T:
        return train(key, variables, root_view(data), *others)

    def train_on_root(*args: Any) -> T:
        if args[2].differentiable:  # reverse mode has no rule for a custom vmap
            return on_data(*args)
        # A setting that training closes over, such as its rate, may be batched over the runs too.
        converted, settings = jax.closure_convert(on_data, *args)

        def with_settings(settings: PyTree, *args: Any) -> T:
            end: T = converted(*args, *settings) if settings else on_data(*args)
            return end

        one_by_one = sequential_vmap(with_settings)
        out: T = jax.lax.platform_dependent(settings, *args, cpu=one_by_one, default=with_settings)
        return out

    return train_on_root


def rows_at(client: ClientView, position: Array) -> Batch:
    """Returns the samples at ``position int32[B]`` of a client's list.

    Padding, from n_k on, repeats the client's own last sample: never another client's data.

    Raises:
        FetchedError: if they are not on the device.
    """
    if client.x is None:
        raise FetchedError
    mask = position < client.size
    row = client.index[client.start + jnp.minimum(position, client.size - 1)]
    copy = None
    if client.copies:
        total = len(client.y)
        copy = row >= total
        row = jnp.where(copy, row - total, row)
    x, label = tree.take((client.x, client.y), row)
    if client.relabel is not None:
        label = jnp.where(label < 0, label, client.relabel[label])
    return Batch(x, label, mask, copy)


def of_class(batch: Batch, classes: int) -> Array:
    """Returns one-hot labels ``f32[B, M]``, with zeros for padding."""
    known = jnp.arange(classes, dtype=batch.y.dtype)[None]
    return ((batch.y[:, None] == known) & batch.mask[:, None]).astype(jnp.float32)


def minibatch(
    client: ClientView,
    order: Array,
    number: Array,
    size: int,
    *,
    refill: bool,
    own: Array | int | None = None,
) -> Batch:
    """Returns one minibatch of an epoch.

    Args:
        client: the client.
        order: ``int32[capacity]``, its samples in the order of the epoch.
        number: ``int32[]``, index of the minibatch.
        size: B.
        refill: whether to fill a smaller last minibatch with the first samples of the epoch.
        own: B_k, at most B: the rows from B_k on are padding; None: B.

    >>> client = ClientView(jnp.arange(9.0), jnp.zeros(9, jnp.int32), jnp.arange(9), jnp.int32(2),
    ...                     jnp.int32(5), 5)
    >>> batch = minibatch(client, jnp.arange(5), jnp.int32(1), 3, refill=False, own=2)
    >>> batch.x[batch.mask].tolist()
    [4.0, 5.0]
    """
    place = jnp.arange(size, dtype=jnp.int32)
    position = number * (size if own is None else own) + place
    mask = position < client.size
    if refill:
        position, mask = position % client.size, jnp.ones_like(mask)
    if own is not None:
        mask = mask & (place < own)
    sample = order[jnp.minimum(position, client.size - 1)]
    return rows_at(client, sample)._replace(mask=mask)


def sweep(
    client: ClientView,
    batch_size: int,
    add: Callable[[PyTree, Batch], PyTree],
    start: PyTree,
) -> PyTree:
    """Folds ``add(carry, batch)`` over a client's samples in their stored order, each once.

    Args:
        client: the client.
        batch_size: B; the last batch is padded, see ``Batch.mask``.
        add: function that adds a batch to the carry.
        start: the initial carry.

    >>> client = ClientView(jnp.arange(9.0), jnp.zeros(9, jnp.int32), jnp.arange(9), jnp.int32(2),
    ...                     jnp.int32(5), 5)
    >>> add = lambda total, batch: total + jnp.sum(batch.x, where=batch.mask)
    >>> float(sweep(client, 2, add, jnp.float32(0)))  # 2 + 3 + 4 + 5 + 6
    20.0
    """
    steps = jnp.arange(batch_size, dtype=jnp.int32)

    def body(b: Array, carry: PyTree, client: ClientView) -> PyTree:
        return add(carry, rows_at(client, b * batch_size + steps))

    def batches(size: Any) -> Any:
        return (size + batch_size - 1) // batch_size

    most = -(-client.capacity // batch_size)
    return repeat(client, batches(client.size), most, body, start, common_count(client, batches))


def of_each(client: ClientView, batch_size: int, of_batch: Callable[[Batch], Array]) -> Array:
    """Applies a function of minibatches to all of a client's samples, in their stored order.

    Args:
        client: the client.
        batch_size: B.
        of_batch: function that returns a row for each sample of a batch, ``[B, *s]``.

    Returns:
        ``[capacity or more, *s]``; rows from n_k on are padding.
    """

    def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
        done, found = carry
        found = jax.lax.dynamic_update_slice_in_dim(found, of_batch(batch), done, axis=0)
        return done + batch_size, found

    one = jax.eval_shape(of_batch, rows_at(client, jnp.zeros(1, jnp.int32)))
    length = -(-client.capacity // batch_size) * batch_size
    none = jnp.zeros((length, *one.shape[1:]), one.dtype)
    found: Array = sweep(client, batch_size, add, (jnp.int32(0), none))[1]
    return found


def shuffled(
    key: Array, size: Array, capacity: int, size_range: tuple[int, int] | None = None
) -> Array:
    """Draws a uniformly random order of ``0..size-1``, in a buffer of at least ``capacity``.

    Sorts hashed positions over the smallest power of two that holds the client, so the cost follows
    the client's own size, not the largest client's. (Ties, of probability n²/2³³, keep their order.
    The hash is two rounds of a 32-bit finaliser around the words of the key: one fused loop, where
    threefry is five dependent ones and takes a third of a logistic regression's step time.)

    Args:
        key: PRNG key.
        size: ``int32[]``, n_k.
        capacity: the largest n_k (static).
        size_range: see :class:`ClientView <fedjax_sim.base.ClientView>`: no buffer is smaller.

    Returns:
        ``int32[P]``, P the power of two at or above ``capacity``; entries from ``size`` on are
        padding, all of them at least ``size``.

    >>> sorted(shuffled(jax.random.key(0), jnp.int32(5), 40)[:5].tolist())
    [0, 1, 2, 3, 4]
    """
    high, low = jax.random.key_data(key)[..., 0], jax.random.key_data(key)[..., -1]
    fewest = 1 if size_range is None else size_range[0]
    smallest, largest = (max(5, math.ceil(math.log2(max(n, 1)))) for n in (fewest, capacity))

    def at(power: int) -> Array:
        words = 2**power
        slot = jnp.arange(words, dtype=jnp.int32)
        bits = hashed(hashed(slot.astype(jnp.uint32) + high) ^ low)
        bits = jnp.where(slot < size, bits, jnp.uint32(2**32 - 1))
        order = jax.lax.sort((bits, slot), num_keys=1, is_stable=True)[1]
        return jnp.concatenate([order, jnp.arange(words, 2**largest, dtype=jnp.int32)])

    powers = range(smallest, largest + 1)
    if len(powers) == 1:
        return at(smallest)
    level = sum((size > 2**p).astype(jnp.int32) for p in powers[:-1])
    # Under vmap all clients sort as the largest one does; the order of a smaller one is the same.
    return jax.lax.switch(greatest(level), [functools.partial(at, p) for p in powers])


def random_minibatch(key: Array, client: ClientView, size: int) -> Batch:
    """Draws a minibatch of distinct samples; all samples if there are no more than B."""
    order = shuffled(key, client.size, client.capacity, client.size_range)
    return minibatch(client, order, jnp.int32(0), size, refill=False)


def hashed(x: Array) -> Array:
    """Applies a bijection of uint32 without visible structure (multiply, xor-shift)."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(multiplier)
    return x ^ (x >> jnp.uint32(15))


def common_count(client: ClientView, count: Callable[[Any], Any]) -> int | None:
    """Returns the static ``count(n_k)`` of all clients that have samples; None if they differ.

    Args:
        client: the client; if it is ``differentiable`` or its ``size_range`` is unknown, the result
          is None too.
        count: function that is monotone in n_k.

    >>> client = ClientView(jnp.ones(9), jnp.zeros(9), jnp.arange(9), jnp.int32(0), jnp.int32(3), 5,
    ...                     size_range=(3, 4))
    >>> common_count(client, lambda size: -(-size // 2)), common_count(client, lambda size: size)
    (2, None)
    """
    if client.size_range is None or client.differentiable:
        return None
    with jax.ensure_compile_time_eval():
        fewest, most = (int(count(np.int32(size))) for size in client.size_range)
    return fewest if fewest == most else None


def repeat(
    client: ClientView,
    count: Array,
    most: int,
    body: Callable[[Array, PyTree, ClientView], PyTree],
    start: PyTree,
    common: int | None = None,
) -> PyTree:
    """Runs ``fori_loop(0, count, body, start)``, if need be as a loop that JAX can differentiate.

    Reverse mode needs a static length. It stores the carry before each of ``most`` steps, and
    recomputes the rest of a step in the backward pass.

    Args:
        client: the client whose samples the steps read; if it is ``differentiable``, ``most`` steps
            run, idle from ``count`` on.
        count: ``int32[]``, the number of steps.
        most: static upper bound of ``count``.
        body: ``(i, carry, client) -> carry``.
        start: the initial carry.
        common: static ``count`` of all clients but those without steps, see :func:`common_count`;
            None if they differ. Under vmap a ``count`` of each client would make the loop select
            the old or the new carry after every step.

    >>> client = ClientView(jnp.ones(5), jnp.zeros(5), jnp.arange(5), jnp.int32(0), jnp.int32(3), 5,
    ...                     differentiable=True)
    >>> def power(x):
    ...     return repeat(client, client.size, 5, lambda i, carry, _: carry * x, jnp.float32(1))
    >>> float(jax.grad(power)(2.0))  # of x³
    12.0
    """
    if not client.differentiable:
        length = count if common is None else common
        end = jax.lax.fori_loop(0, length, lambda i, carry: body(i, carry, client), start)
        return end if common is None else tree.select(count > 0, end, start)
    step, closed = jax.closure_convert(body, jnp.int32(0), start, client)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(carry: PyTree, i: Array) -> tuple[PyTree, None]:
        runs = i < count

        def step_if_running(carry: PyTree) -> PyTree:
            # Under vmap an idle step is computed too, and its derivative may be infinite: times 0
            # that is NaN. (Not for the samples, of which each client would get a copy.)
            values = carry, closed
            held, fixed = tree.select(runs, values, jax.lax.stop_gradient(values))
            return tree.select(runs, step(i, held, client, *fixed), carry)

        # Under vmap this stays a branch, which is skipped once all clients are done.
        return jax.lax.cond(everywhere(~runs), lambda carry: carry, step_if_running, carry), None

    return jax.lax.scan(one, start, jnp.arange(most, dtype=jnp.int32))[0]
