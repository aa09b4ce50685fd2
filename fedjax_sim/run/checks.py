"""What must hold before a run starts, and while it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, ClientData, Model
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.run.result import DivergedError
from fedjax_sim.run.tally import MOST_RANKED


def checked_seeds(seeds: Any) -> list[int]:
    """The seeds as integers; refuses what is no list of them."""
    given = np.asarray(seeds)
    if given.ndim == 1 and not given.size:
        raise ValueError("seeds must not be empty")
    whole = given.dtype.kind in "iu" and given.ndim == 1
    if not whole or given.min() < 0 or given.max() >= 2**32:
        raise ValueError(
            f"seeds must be whole numbers from 0 to 2**32 - 1, one for each run, got {seeds!r}"
        )
    return given.tolist()


def as_set(name: str, given: Any) -> EvalSet:
    """An evaluation set, made of a pair (x, y) if it is one."""
    if isinstance(given, EvalSet):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise ValueError(
            f"{name} must be a pair (x, y) or made by eval_set, got {type(given).__name__}{size}"
        )
    return eval_set(*given)


def check_model(model: Model, x: Any, classes: int) -> None:
    """Raises ValueError if the model's output on ``x [n, *feature]`` is not ``[B, classes]``."""
    sample = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)

    def both_ways(key: Array, v: Array) -> Array:
        variables = model.init(key)
        model.apply(variables, v, train=True, mask=jnp.ones(2, bool), key=key)
        return model.apply(variables, v, train=False)[0]

    try:
        logits = jax.eval_shape(both_ways, jax.eval_shape(lambda: jax.random.key(0)), sample)
    except Exception as e:  # any that the network raises: flax has errors of its own
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        if isinstance(e, ZeroDivisionError):
            reason += ", as when its layers leave nothing of an input so small"
        raise ValueError(f"the model rejects inputs of shape {x.shape[1:]}: {reason}") from e
    if logits.shape != (2, classes):
        raise ValueError(
            f"the model must return logits of shape [batch, {classes}], one per class; "
            f"for a batch of 2 it returns {list(logits.shape)}"
        )


def check_sets(
    data: ClientData, sets: Mapping[str, EvalSet], runs: int, *, ranked: bool, personal: bool
) -> None:
    """Refuses sets that fit neither the clients' data nor what is to be scored."""
    starts = {"data": data.start, **{name: s.start for name, s in sets.items()}}
    for name, start in starts.items():
        if start.ndim == 2 and len(start) != runs:
            raise ValueError(
                f"{name}.start has {len(start)} lists of clients, one for each run, but seeds has "
                f"{runs} runs"
            )
    for name, examples in sets.items():
        if examples.x.shape[1:] != data.x.shape[1:]:
            raise ValueError(
                f"{name}.x must have samples of shape {data.x.shape[1:]} as the clients have, "
                f"got {examples.x.shape[1:]}"
            )
        n = examples.index.shape[-1]
        if ranked and n > MOST_RANKED:
            raise ValueError(f"auc counts at most {MOST_RANKED:,} samples, {name} has {n:,}")
    clients = data.clients
    if personal and sets["test"].clients != clients:
        raise ValueError(
            f"personal=True needs a test set of the {clients} clients that train, "
            f"got one of {sets['test'].clients}"
        )


def check_finite(loss: Any, done: int, seeds: Sequence[int]) -> None:
    """Refuses a loss ``[R, rounds]`` that is not finite; ``done`` rounds came before."""
    bad = np.argwhere(~np.isfinite(loss.T))  # by round, then seed
    if len(bad):
        where, seed = bad[0]
        raise DivergedError(
            f"the loss became {loss[seed, where]} in round {done + where + 1} "
            f"(seed {seeds[seed]}): lower the learning rate, the clients' or the server's"
        )
