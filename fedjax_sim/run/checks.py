"""Checks before a run starts, and of the results of its rounds."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, Model, PyTree, Task, Variables, origins
from fedjax_sim.base.arrays import named_leaves
from fedjax_sim.base.words import array_type
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.engine import tree
from fedjax_sim.round import Algorithm
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.identity import digest
from fedjax_sim.run.result import DivergedError
from fedjax_sim.tasks import classification

MOST_RUNS = 100_000
"""The most runs of one simulation, each with a model of its own."""


def checked_seeds(seeds: Any) -> list[int]:
    """Returns the seeds as integers; rejects anything else than a list of seeds."""
    if isinstance(seeds, Sized) and len(seeds) > MOST_RUNS:  # before an array of a range, say
        raise ValueError(f"seeds must be at most {MOST_RUNS:,}, got {len(seeds):,}")
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
    """Returns an evaluation set, made from a pair (x, y) if need be."""
    if isinstance(given, EvalSet):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise ValueError(
            f"{name} must be a pair (x, y) or made by eval_set, got {type(given).__name__}{size}"
        )
    try:
        return eval_set(*given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_model(model: Model, x: Any, y: Any, task: Task) -> None:
    """Raises ValueError if the model's output on ``x [n, *feature]`` is not the task's."""
    samples = tree.row_shapes((x, y), 2)

    def both_ways(x: PyTree) -> Any:
        key = jax.random.key(0)
        variables = model.init(key)
        trained = model.apply(variables, x, train=True, mask=jnp.ones(2, bool), key=key)
        return variables, trained, model.apply(variables, x, train=False)

    try:
        variables, *results = jax.eval_shape(both_ways, samples[0])
    except Exception as e:  # any that the network raises: flax has errors of its own
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        if isinstance(e, ZeroDivisionError):
            reason += ": an input this small may shrink to nothing in its layers"
        shapes = jax.tree.map(lambda a: a.shape[1:], x)
        raise ValueError(f"the model rejects inputs of shape {shapes}: {reason}") from e
    if not isinstance(variables, Variables):
        raise ValueError(f"init must return fs.Variables, got {type(variables).__name__}")
    pair: Any = jax.tree.structure((0, variables.state))
    for result in results:
        if jax.tree.structure(result) != pair:
            raise ValueError(
                "apply must return (outputs, state), with a state as init returns it, got "
                f"{jax.tree.map(array_type, result)}"
            )
    outputs, wanted = results[1][0], task.shape(y.shape[1:])
    if outputs.shape != (2, *wanted):
        target = "".join(f", {length}" for length in y.shape[1:])
        raise ValueError(
            f"the model must return outputs [batch, {', '.join(map(str, wanted))}], as the task is "
            f"{task!r} with y [n{target}]; for a batch of 2 it returns {list(outputs.shape)}"
        )
    loss = jax.eval_shape(task.loss, outputs, samples[1])
    if loss.shape != (2,):
        raise ValueError(f"loss must return one value per sample, [2], got {list(loss.shape)}")


def check_sets(
    data: ClientData,
    sets: Mapping[str, EvalSet],
    runs: int,
    *,
    personal: bool,
    most: int | None = None,
) -> None:
    """Rejects sets that do not fit the clients' data or the scores."""
    starts = {"data": data.start, **{name: s.start for name, s in sets.items()}}
    for name, start in starts.items():
        if start.ndim == 2 and len(start) != runs:
            raise ValueError(
                f"{name}.start has {len(start)} lists of clients, one for each run, but seeds has "
                f"{runs} runs"
            )
    for name, examples in sets.items():
        _check_inputs(name, examples, data)
        n = examples.index.shape[-1]
        if most is not None and n > most:
            raise ValueError(f"auc counts at most {most:,} samples, {name} has {n:,}")
    for name, x in _each_once("x", data, sets).items():
        _check_numbers(name, x)
    clients = data.clients
    if personal and any(examples.adapt is not None for examples in sets.values()):
        raise ValueError("personal=True is for clients that train, eval_set(adapt=...) for others")
    if sets["test"].adapt is None and any(s.adapt is not None for s in sets.values()):
        raise ValueError("validation has clients that adapt, test must have some too: give both")
    for name, examples in sets.items() if personal else ():
        pooled = name == "validation" and examples.clients == 1
        if examples.clients != clients and not pooled:
            raise ValueError(
                f"personal=True needs a {name} set of the {clients} clients that train, "
                f"got one of {examples.clients}"
            )


def _check_inputs(name: str, examples: EvalSet, data: ClientData) -> None:
    """Rejects inputs of another structure, shape or dtype than the clients' samples."""
    wanted, given = named_leaves("x", data.x), named_leaves("x", examples.x)
    if wanted.keys() != given.keys():
        raise ValueError(
            f"{name} must have {', '.join(wanted)} as the clients have, got {', '.join(given)}"
        )
    for leaf, theirs in wanted.items():
        shapes = [a.shape[1:] for a in (theirs, given[leaf])]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name}.{leaf} must have samples of shape {shapes[0]} as the clients have, "
                f"got {shapes[1]}"
            )
        kinds = [jax.dtypes.canonicalize_dtype(a.dtype) for a in (theirs, given[leaf])]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{name}.{leaf} must be {kinds[0]} as the clients' samples are, got {kinds[1]}"
            )


def check_targets(data: ClientData, sets: Mapping[str, EvalSet], task: Task) -> None:
    """Rejects targets, in samples or in ``data.relabel``, that the task does not have.

    A label that is not a class would have no gradient and no score.
    """
    for name, y in _each_once("y", data, sets).items():
        task.check(name, y)
    for name, examples in sets.items():
        if examples.y.shape[1:] != data.y.shape[1:]:
            raise ValueError(
                f"{name}.y must have targets of shape {data.y.shape[1:]} as the clients have, "
                f"got {examples.y.shape[1:]}"
            )
    if data.relabel is None:
        return
    if task.classes is None:
        raise ValueError(f"data.relabel is for class labels, the task is {task!r}")
    if data.relabel.shape[-2:] != (data.clients, task.classes):
        raise ValueError(
            f"data.relabel must be int32 [{data.clients}, {task.classes}], a row for each client, "
            f"got {list(data.relabel.shape)}"
        )
    task.check("data.relabel", data.relabel.reshape(-1))


def check_parts(algorithm: Algorithm, task: Task) -> None:
    """Rejects an algorithm with a part that reads class labels, if the task has none."""
    if task.classes is not None:
        return
    for origin in origins(algorithm.parts.by_role()):
        if getattr(origin.factory, "for_classes", False):
            raise ValueError(f"{origin.name} needs class labels, the task is {task!r}")


def check_labels(algorithm: Algorithm, data: ClientData, task: Task) -> None:
    """Rejects an objective that needs labels if no client has one."""
    if task.classes is None:
        return
    y, relabel = data.y, data.relabel
    hidden = relabel is not None and int(relabel.max()) < 0
    if not hidden and int(y.min()) >= 0:
        return
    entries = np.asarray(data.index)[: int(np.max(data.start))] % len(y)
    if not hidden and (np.asarray(y)[entries] >= 0).any():
        return
    found = [(o, o.factory) for o in origins(algorithm.parts.local)]
    if any(getattr(factory, "learns_unlabelled", False) for _, factory in found):
        return
    for origin, factory in found:
        if getattr(factory, "needs_labels", False) and origin.arguments.get("term") is None:
            raise ValueError(
                f"{origin.name} needs labels, and no client has one (y is -1): use "
                "fs.terms.pseudo_labels or received_labels, such as semifl does"
            )


def _each_once(field: str, data: ClientData, sets: Mapping[str, EvalSet]) -> dict[str, Array]:
    """Returns the arrays of a field of the data and the sets by name; shared arrays once."""
    named: dict[str, Array] = {}
    for name, pool in {"data": data, **sets}.items():
        for leaf, array in named_leaves(f"{name}.{field}", getattr(pool, field)).items():
            if all(array is not other for other in named.values()):
                named[leaf] = array
    return named


def _check_numbers(name: str, x: Array) -> None:
    """Rejects values that are NaN or infinite in JAX's dtype.

    Compares the extremes, which needs no temporary array as large as x; NaN is both.
    """
    kind = jax.dtypes.canonicalize_dtype(x.dtype)
    floating = jnp.issubdtype(kind, jnp.floating)
    if not floating and kind == x.dtype:
        return
    limits: Any = (jnp.finfo if floating else jnp.iinfo)(kind)
    if not (x.min() >= limits.min and x.max() <= limits.max):
        wanted = "finite in" if floating else "within"
        at = tuple(np.argwhere(~((x >= limits.min) & (x <= limits.max)))[0].tolist())
        raise ValueError(f"{name} must be {wanted} {kind}, got {x[at]} at {list(at)}")


def check_cohorts(
    client: NDArray[np.int32], done: int, clients: int, repeats: bool = False
) -> None:
    """Rejects a selection of one client twice, unless it ``repeats``, or of an unknown client.

    ``client int32[R, rounds, S]`` has the client of each slot after ``done`` rounds; N for an empty
    slot.

    >>> check_cohorts(np.array([[[0, 1], [4, 4], [2, 2]]]), done=0, clients=4)
    Traceback (most recent call last):
    ValueError: selection must give each slot a client of its own, in round 3 it gave 2 to two slots
    """
    if client.min() < 0 or client.max() > clients:
        wrong = client[(client < 0) | (client > clients)][0]
        raise ValueError(f"selection must give clients 0..{clients - 1}, or {clients}, got {wrong}")
    ordered = np.sort(client, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < clients)
    if twice.any() and not repeats:
        run, round_, slot = np.argwhere(twice)[0]
        raise ValueError(
            "selection must give each slot a client of its own, in round "
            f"{done + round_ + 1} it gave {ordered[run, round_, slot]} to two slots"
        )


def check_finite(loss: Any, done: int, seeds: Sequence[int]) -> None:
    """Rejects a loss ``[R, rounds]`` that is not finite, after ``done`` earlier rounds."""
    bad = np.argwhere(~np.isfinite(loss.T))  # by round, then seed
    if len(bad):
        where, seed = bad[0]
        raise DivergedError(
            f"the loss became {loss[seed, where]} in round {done + where + 1} "
            f"(seed {seeds[seed]}): lower the learning rate, the clients' or the server's"
        )


def check_losses(local: Any, evaluation: Evaluation, seeds: Sequence[int]) -> None:
    """Rejects losses that are not finite: ``[R, rounds]`` before an evaluation, and in it.

    Raises:
        DivergedError: names the round and the seed.
    """
    last = evaluation.round
    check_finite(local, last - local.shape[1], seeds)
    check_finite(evaluation.test_loss[:, None], last - 1, seeds)
    if evaluation.personal is not None:
        check_finite(evaluation.personal.pooled.loss[:, None], last - 1, seeds)


def check_kinds(algorithm: Any, model: Any, data: Any) -> None:
    """Rejects arguments of the wrong kind; names a function that makes the right kind."""
    wanted: tuple[tuple[str, Any, type, str], ...] = (
        ("algorithm", algorithm, Algorithm, "what fs.compose or a named method returns"),
        ("model", model, Model, "a Model, see fs.models"),
        ("data", data, ClientData, "a ClientData, see fs.client_data"),
    )
    for name, given, kind, what in wanted:
        if not isinstance(given, kind):
            function = isinstance(given, types.FunctionType)
            got = f"the function {given.__name__}" if function else type(given).__name__
            raise ValueError(f"{name} must be {what}, got {got}")


def whole_number(name: str, given: Any) -> int:
    """Returns a positive number of rounds or classes as an integer; rejects others."""
    value = np.asarray(given)
    if value.dtype.kind not in "iu" or value.ndim or value < 1:
        raise ValueError(f"{name} must be a whole number at least 1, got {given!r}")
    if value >= 2**31:
        raise ValueError(f"{name} must be at most {2**31 - 1}, got {given!r}")
    return int(value)


def task_of(task: Task | None, classes: int | None, auc: bool | None) -> Task:
    """Returns the task, or a classification task with ``classes`` classes."""
    if task is None and classes is None:
        raise ValueError("task must be given, such as fs.tasks.regression(), or classes")
    if task is None:
        return classification(whole_number("classes", classes), auc=auc)
    for name, value in (("classes", classes), ("auc", auc)):
        if value is not None:
            raise ValueError(f"{name} must be left out if there is a task, got {value}")
    if not isinstance(task, Task):
        raise ValueError(f"task must be a Task, see fs.tasks, got {type(task).__name__}")
    return task


def check_trained(algorithm: Algorithm, model: Model) -> None:
    """Rejects a model other than the one for which the parts were made.

    A model that was made again by the same calls counts as the same.
    """

    def shapes(of: Model) -> Any:
        return jax.eval_shape(of.init, jax.eval_shape(lambda: jax.random.key(0)))

    def size(of: Model) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(shapes(of)))

    for origin in origins((algorithm.parts.local, algorithm.parts.finish)):
        trained = origin.arguments.get("model")
        if isinstance(trained, Model) and trained is not model:
            if shapes(model) != shapes(trained):
                raise ValueError(
                    f"model must be the one that the local update trains, of {size(trained):,} "
                    f"numbers in other shapes, got one of {size(model):,}"
                )
            if digest(model) != digest(trained):
                raise ValueError(
                    "model must be the one that the local update trains, got one of the same "
                    "shapes that computes otherwise: give simulate the model that "
                    f"{origin.name} was given"
                )
