"""Settings that may differ between clients: epochs, learning rate and minibatch size."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, ClientView
from fedjax_sim.engine.clients import round_number
from fedjax_sim.engine.streams import Client, stream

Own: TypeAlias = float | Sequence[float]
"""A number for all clients, or one for each."""


def checked(
    epochs: Any, rates: Any, sizes: Any, batch_size: int
) -> tuple[Own, Sequence[float] | None, Sequence[int] | None]:
    """Returns epochs, rates and minibatches: each one number, or a tuple with one per client.

    Raises:
        ValueError: names the setting, the number and its client.

    >>> checked(np.array([1, 5]), [0.5, 1], None, 16), checked(2.0, None, [4.0, 16.0], 16)
    (((1, 5), (0.5, 1.0), None), (2.0, None, (4, 16)))
    """
    if np.ndim(epochs):
        epochs = _each("epochs", epochs, 10_000)
    elif not (isinstance(epochs, numbers.Real) or hasattr(epochs, "dtype")):
        raise ValueError(f"epochs must be a number, or one for each client, got {epochs!r}")
    elif not 0 < epochs <= 10_000:
        raise ValueError(f"epochs must be above 0 and at most 10000, got {epochs}")
    rates = None if rates is None else _each("rate_by_client", rates, math.inf)
    sizes = None if sizes is None else _each("batch_by_client", sizes, batch_size)
    if sizes is not None:
        if any(size != int(size) for size in sizes):
            raise ValueError(f"batch_by_client must be whole numbers, got {sizes}")
        sizes = tuple(map(int, sizes))
    given = {"epochs": epochs, "rate_by_client": rates, "batch_by_client": sizes}
    counts = {name: len(values) for name, values in given.items() if isinstance(values, tuple)}
    if len({*counts.values()}) > 1:
        names = " and ".join(counts)
        raise ValueError(f"{names} must have as many numbers, got {[*counts.values()]}")
    return epochs, rates, sizes


def _each(name: str, given: Any, most: float) -> tuple[float, ...]:
    """Returns one number above 0 for each client."""
    values = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not len(values):
        raise ValueError(f"{name} must be a list of a number for each client, got {given}")
    wrong = ~((values > 0) & (values <= most) & (values < math.inf))
    if wrong.any():
        k, most_text = int(wrong.argmax()), "finite" if most == math.inf else f"at most {most:g}"
        raise ValueError(f"{name} must be above 0 and {most_text}, got {values[k]} for client {k}")
    return tuple(values.tolist())


def is_common(values: Own | None) -> bool:
    """Returns whether all clients have the same number, or None."""
    return not isinstance(values, Sequence) or len({*values}) == 1


def largest(values: Any) -> Any:
    """Returns the largest number of a client."""
    return max(values) if isinstance(values, Sequence) else values


def of_client(values: Own | None, client: Any) -> Any:
    """Returns the numbers of ``client int32[*]``, an array of JAX or NumPy; the number of all.

    Raises:
        ValueError: if ``client`` is None, the server, and clients have different numbers.

    >>> of_client((1, 2, 5), np.arange(3)).tolist(), of_client((2, 2), None)
    ([1, 2, 5], 2)
    """
    if is_common(values):
        return largest(values)
    if client is None:
        raise ValueError(
            "epochs, rate_by_client and batch_by_client must be equal for all clients where the "
            "server trains on its own samples: use one number of epochs, and None for the others"
        )
    table = np.asarray(values, np.float32)
    if (table == np.rint(table)).all():
        table = table.astype(np.int32)
    return (jnp.asarray(table) if isinstance(client, jax.Array) else table)[client]


def common(values: Own | None) -> float:
    """Returns the number common to all clients, 1 for None; NaN if they differ."""
    if values is None:
        return 1.0
    return largest(values) if is_common(values) else math.nan


def expected(values: Own, client: Any, *, least: bool = False) -> Any:
    """Returns the numbers of ``client``, see :func:`of_client`; for None, the largest or least."""
    if client is None and least:
        return min(values) if isinstance(values, Sequence) else values
    return largest(values) if client is None else of_client(values, client)


def epochs_of(values: Own, stragglers: float, key: Array, client: ClientView) -> Any:
    """Returns E_k of a visit, with the client's key of the round; an array unless common.

    Neither the server nor a client that is only being evaluated is a straggler.
    """
    epochs = of_client(values, client.id)
    if not stragglers or client.coin is None:
        return epochs
    luck = jax.random.uniform(stream(key, Client.STRAGGLER), (2,), jnp.float32)
    epochs = jnp.asarray(epochs).astype(jnp.float32)
    fewer = 1 + jnp.floor(luck[1] * (jnp.ceil(epochs) - 1))
    return jnp.where(luck[0] < stragglers, jnp.minimum(fewer, epochs), epochs)


def steps_of(epochs: Any, batches: Any, most: int | None) -> Any:
    """Returns the steps of E_k epochs of so many minibatches, at most ``most``.

    >>> [int(steps_of(epochs, 3, 5)) for epochs in (1, 2.0, 0.5)]
    [3, 5, 2]
    """
    if isinstance(epochs, int | float):
        epochs = int(epochs) if epochs == int(epochs) else epochs
        whole = isinstance(epochs, int)
    else:
        whole = epochs.dtype.kind == "i"
    if whole:
        total = batches * epochs
    else:
        total = jnp.round(epochs * jnp.asarray(batches, jnp.float32)).astype(jnp.int32)
    return total if most is None else jnp.minimum(total, most)


def rate_of(
    by_round: Callable[[Array], Any] | None, by_client: Own | None, client: ClientView
) -> Any:
    """Returns the factor of a client's steps; None: 1."""
    rate = None if by_round is None else by_round(round_number(client, "rate_by_round"))
    if by_client is None:
        return rate
    factor = of_client(by_client, client.id)
    if not is_common(by_client):
        factor = factor.astype(jnp.float32)
    elif factor == 1:  # not even a bit of the result changes
        return rate
    return factor if rate is None else rate * factor
