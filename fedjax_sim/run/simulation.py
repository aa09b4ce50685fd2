"""Runs an algorithm: a few XLA programs for the whole experiment, all seeds at once."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, FedState, LossFn, Model, Task, Variables, origins, with_loss
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import (
    as_set,
    check_model,
    check_parts,
    check_sets,
    check_targets,
    checked_seeds,
)
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.identity import code, digest
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.result import Evaluation, Result
from fedjax_sim.run.rounds import run_rounds
from fedjax_sim.run.stop import Stop, check_stop
from fedjax_sim.run.varied import Varied
from fedjax_sim.tasks import classification


def simulate(
    algorithm: Algorithm,
    model: Model,
    data: ClientData,
    test: tuple[Any, Any] | EvalSet,
    *,
    rounds: int,
    classes: int | None = None,
    task: Task | None = None,
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,),
    eval_every: int = 1,
    validation: tuple[Any, Any] | EvalSet | None = None,
    auc: bool | None = None,
    personal: bool = False,
    loss: LossFn | None = None,
    execution: Execution | None = None,
    on_compiled: Callable[[int], None] | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    on_rounds: Callable[[int], None] | None = None,
    initial: Variables | None = None,
    record: Callable[[FedState], Any] | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    stop: Stop | None = None,
) -> Result:
    """Runs ``rounds`` rounds for every seed, and evaluates the models on the way.

    Rounds are one XLA program, called for about ten seconds of rounds at a time and up to the next
    evaluation; the result does not depend on where it is cut. Runs are one more leading axis of it.
    A second call with the same algorithm compiles nothing, if shapes and settings are the same:
    other seeds, weights, clients or more rounds may be given. Its parts must be pure functions for
    that, as for ``jax.jit``. On CPU a run that trains for a few seconds is compiled with less
    effort than a longer one, by its rounds and the size of its steps: results may differ by
    rounding.

    Args:
        algorithm: e.g. :func:`fedjax_sim.fedavg`.
        model: the model that its local update trains.
        data: the clients; ``start`` may be ``[R, N + 1]``, a partition for each run.
        test: (x, y), or samples by client: :func:`fedjax_sim.data.eval_set`, one list for all runs
          or one for each.
        rounds: local rounds.
        classes: M, short for ``task=fs.tasks.classification(M)``.
        task: what y is and what is scored, see :mod:`fedjax_sim.tasks`; this or ``classes``.
        seeds: one of the R runs for each; they decide initial weights, cohorts, shuffles and
          dropout. Runs that differ in their clients (folds) may share a seed.
        eval_every: rounds between evaluations; the last round is always evaluated.
        validation: like ``test``, scored at the same rounds: :meth:`Result.validated` then needs no
          weights kept.
        auc: as in :func:`fedjax_sim.tasks.classification`, beside ``classes``.
        personal: whether client k of the test set is client k of ``data``: an algorithm with
          personal models is then scored by these too. Give ``natural`` the same ids for both.
        loss: for the loss on the sets; None: the task's.
        execution: where and how it runs; None: as the algorithm was composed to.
        on_compiled: called before the first round, with the bytes that the run will need on each
            device.
        on_evaluation: called as soon as each evaluation is known. If it raises, or the run is
            interrupted, the exception has what is known by then as ``result``.
        on_rounds: called with the rounds that are done: after each evaluation, and about every ten
            seconds between two.
        initial: the weights to start from, of one model or ``[R, *p]``; None: the model's own,
            drawn by the seed.
        record: what to keep of the state ``[R, ...]`` at each evaluation: ``lambda state:
            state.server`` for the weights, ``state.broadcast`` for clusters,
            ``state.client_state`` for own models and control variates.
        checkpoints: a folder, or :class:`fedjax_sim.Checkpoints`: the run saves itself there, and
            goes on from the newest checkpoint that the folder has, to the bit on the same devices;
            it warns of functions whose code has changed since.
            ``on_evaluation`` is called for what was restored too. More ``rounds`` than the saved
            run had are run on top.
        stop: ends the run at an evaluation before the last round, see :mod:`fedjax_sim.stop`;
            models in flight are collected then.

    Returns:
        The run.

    Raises:
        ValueError: if a setting is out of range or of the wrong kind, the model does not fit the
            data, or is not that of the local update.
        TooLargeError: if the run does not fit in a device's memory; says both sizes.
        DivergedError: if a loss is not finite; says the round and the seed.
        CheckpointError: if the folder has checkpoints of another run, or of more rounds.
            Or if ``stop`` would have ended the saved run before.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> model = fs.models.with_scaling(model, digits.mean, digits.std)
        >>> data = fs.client_data(digits.train_x, digits.train_y,
        ...                       fs.partition.iid(digits.train_y, 10, seed=0))
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), epochs=3)
        >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), model, data,
        ...                      (digits.test_x, digits.test_y), rounds=3, classes=10)
        >>> bool(result.accuracy[-1, 0] > 0.8)
        True
    """
    rounds = whole("rounds", rounds)

    def make() -> Experiment:
        made = experiment(
            algorithm,
            model,
            data,
            test,
            classes=classes,
            task=task,
            seeds=seeds,
            eval_every=eval_every,
            validation=validation,
            auc=auc,
            personal=personal,
            loss=loss,
            execution=execution,
        )
        if stop is not None:
            own = ["personal"] if personal and algorithm.personal is not None else []
            held = [] if validation is None else ["validation"]
            check_stop(stop, made.programs.task, ["test", *held, *own])
        return made

    return run_rounds(
        make,
        rounds,
        seeds,
        initial=initial,
        record=record,
        on_compiled=on_compiled,
        on_evaluation=on_evaluation,
        on_rounds=on_rounds,
        checkpoints=checkpoints,
        stop=stop,
    )


def experiment(
    algorithm: Algorithm,
    model: Model,
    data: ClientData,
    test: tuple[Any, Any] | EvalSet,
    *,
    classes: int | None = None,
    task: Task | None = None,
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,),
    eval_every: int = 1,
    validation: tuple[Any, Any] | EvalSet | None = None,
    auc: bool | None = None,
    personal: bool = False,
    loss: LossFn | None = None,
    execution: Execution | None = None,
    varied: Varied | None = None,
) -> Experiment:
    """The programs of :func:`simulate`, which has the same arguments; nothing is computed.

    Raises:
        ValueError: if a setting is out of range or of the wrong kind, the model does not fit the
            data, or is not that of the local update.
    """
    check_kinds(algorithm, model, data)
    eval_every = whole("eval_every", eval_every)
    task, seeds = _chosen(task, classes, auc), checked_seeds(seeds)
    if loss is not None:
        task = with_loss(task, loss)
    given = {"test": test} if validation is None else {"test": test, "validation": validation}
    sets = {name: as_set(name, s) for name, s in given.items()}
    check_targets(data, sets, task)
    check_parts(algorithm, task)
    check_model(model, data.x, data.y, task)
    check_trained(algorithm, model)
    check_sets(data, sets, len(seeds), personal=personal, most=task.most)
    programs = Programs(
        algorithm,
        model,
        task,
        data,
        tuple(sets.values()),
        len(seeds),
        eval_every,
        execution=execution,
        personal=personal,
        varied=varied,
    )
    return Experiment(programs)


def _chosen(task: Task | None, classes: int | None, auc: bool | None) -> Task:
    """The task that is given, or the one of so many classes."""
    if task is None and classes is None:
        raise ValueError("task must be given, such as fs.tasks.regression(), or classes")
    if task is None:
        return classification(whole("classes", classes), auc=auc)
    for name, value in (("classes", classes), ("auc", auc)):
        if value is not None:
            raise ValueError(f"{name} must be left out beside a task, which says it, got {value}")
    if not isinstance(task, Task):
        raise ValueError(f"task must be a Task, see fs.tasks, got {type(task).__name__}")
    return task


def check_kinds(algorithm: Any, model: Any, data: Any) -> None:
    """Refuses what is no algorithm, no model and no clients' data; says what makes one."""
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


def whole(name: str, given: Any) -> int:
    """A number of rounds or classes as an integer; refuses what is none."""
    value = np.asarray(given)
    if value.dtype.kind not in "iu" or value.ndim or value < 1:
        raise ValueError(f"{name} must be a whole number at least 1, got {given!r}")
    if value >= 2**31:
        raise ValueError(f"{name} must be at most {2**31 - 1}, got {given!r}")
    return int(value)


def check_trained(algorithm: Algorithm, model: Model) -> None:
    """Refuses another model than the one that the parts are made for.

    One that was made again, by the same calls, is the same.
    """

    def shapes(of: Model) -> Any:
        return jax.eval_shape(of.init, jax.eval_shape(lambda: jax.random.key(0)))

    for origin in origins((algorithm.parts.local, algorithm.parts.finish)):
        trained = origin.arguments.get("model")
        if isinstance(trained, Model) and trained is not model:
            ours, its = shapes(model), shapes(trained)
            if ours != its:
                raise ValueError(
                    f"model must be the one that the local update trains, of {_size(its):,} "
                    f"numbers in other shapes, got one of {_size(ours):,}"
                )
            if digest(model) != digest(trained) or code(model) != code(trained):
                raise ValueError(
                    "model must be the one that the local update trains, got one of the same "
                    "shapes that computes otherwise: give simulate the model that "
                    f"{origin.name} was given"
                )


def _size(shapes: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
