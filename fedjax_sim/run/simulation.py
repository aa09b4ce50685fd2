"""Runs an algorithm, all seeds at once, and a small problem for examples and first tries."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, FedState, LossFn, Model, Objective, Task, Variables
from fedjax_sim.base.brief import brief
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import EvalSet, client_data, load_dataset
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.models import logistic, with_scaling
from fedjax_sim.partition import limit_label_emd
from fedjax_sim.round import Algorithm
from fedjax_sim.run.checkpoints import Checkpoints, rounds_saved
from fedjax_sim.run.checks import whole_number
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.progress import is_watched, progress_bar, reporting
from fedjax_sim.run.result import Result
from fedjax_sim.run.stop import Stop


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
    progress: bool | None = None,
) -> Result:
    """Runs ``rounds`` rounds for every seed, and evaluates the models at intervals.

    Rounds are one XLA program; a call runs it for about ten seconds, at most to the next
    evaluation. Results do not depend on this. Runs share a leading axis of the program. A second
    call with the same algorithm compiles nothing if shapes and settings are the same: seeds,
    weights, clients and the number of rounds may differ. The algorithm's parts must be pure
    functions for that, as for ``jax.jit``. On CPU, a run that trains for a few seconds is compiled
    with less effort than a longer one, depending on its rounds and the size of its steps: results
    may differ by rounding.

    Args:
        algorithm: e.g. :func:`fedjax_sim.fedavg`.
        model: the model that its local update trains.
        data: the clients; ``start`` may be ``[R, N + 1]``, a partition for each run.
        test: (x, y), or samples by client, see :func:`fedjax_sim.data.eval_set`: one list for all
            runs or one for each.
        rounds: number of local rounds.
        classes: M, short for ``task=fs.tasks.classification(M)``.
        task: the targets and the scores, see :mod:`fedjax_sim.tasks`; either this or ``classes``.
        seeds: one for each of the R runs; they determine initial weights, cohorts, shuffles and
          dropout. Runs that differ in their clients (folds) may share a seed.
        eval_every: rounds between evaluations; the last round is always evaluated.
        validation: like ``test``, scored in the same rounds, for :meth:`Result.validated`.
          :func:`fedjax_sim.data.client_holdout` takes it from the clients' training samples.
        auc: as in :func:`fedjax_sim.tasks.classification`, given with ``classes``.
        personal: whether client k of the test set is client k of ``data``: an algorithm with
            personal models is then scored by these too. The same holds for a validation set with
            clients. Clients of a set with ``adapt``, see :func:`fedjax_sim.data.eval_set`, are
            others: they adapt first, and this is False.
        loss: loss on the sets; None: the task's loss.
        execution: where and how to run; None: as the algorithm was composed.
        on_compiled: called before the first round, with the bytes that the run needs on each
            device.
        on_evaluation: called with each evaluation as soon as it is known. If it raises, or the run
            is interrupted, the exception has the result so far as ``result``.
        on_rounds: called with the number of rounds done: after each evaluation, and about every
            ten seconds in between.
        initial: initial weights, of one model or ``[R, *p]``; None: the model draws them by the
            seed.
        record: function that returns what to keep of the state ``[R, ...]`` at each evaluation:
            ``lambda state: state.server`` for the weights, ``state.broadcast`` for clusters,
            ``state.client_state`` for personal models and control variates.
        checkpoints: a folder, or :class:`fedjax_sim.Checkpoints`: the run is saved there and
            resumes from the newest checkpoint in the folder, bit for bit on the same devices.
            ``on_evaluation`` is also called for restored evaluations. If ``rounds`` is larger than
            in the saved run, the run is extended.
        stop: rule that ends the run at an evaluation before the last round, see
            :mod:`fedjax_sim.stop`; models in flight are then collected.
        progress: whether to show a progress bar; None: in a terminal or a notebook.

    Returns:
        The result of the run.

    Raises:
        ValueError: if a setting is out of range or of the wrong kind, or the model does not fit the
          data or is not the one that the local update trains.
        TooLargeError: if the run does not fit in a device's memory; names both sizes.
        DivergedError: if a loss is not finite; names the round and the seed.
        CheckpointError: if the folder has checkpoints of another run or of more rounds, or if
            ``stop`` would have ended the saved run earlier.

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
    experiment = Experiment(
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
    with contextlib.ExitStack() as stack:
        if is_watched() if progress is None else progress:
            name = "compose" if algorithm.origin is None else algorithm.origin.name
            done = 0 if checkpoints is None else rounds_saved(checkpoints)
            bar = progress_bar(name, whole_number("rounds", rounds), done)
            report = stack.enter_context(bar)
            on_evaluation, on_rounds = reporting(report, on_evaluation, on_rounds)
        return experiment.run(
            rounds,
            initial=initial,
            record=record,
            on_compiled=on_compiled,
            on_evaluation=on_evaluation,
            on_rounds=on_rounds,
            checkpoints=checkpoints,
            stop=stop,
        )


class Toy(NamedTuple):
    """Handwritten digits on a few clients, and logistic regression.

    Attributes:
        model: model that takes the images as they are stored.
        objective: empirical risk of the model.
        data: the clients; the server has samples of its own.
        test: x and y of the test set.
        classes: M.
    """

    model: Model
    objective: Objective
    data: ClientData
    test: tuple[NDArray[Any], NDArray[np.int32]]
    classes: int

    def __repr__(self) -> str:
        return brief(
            self, {"clients": self.data.clients, "classes": self.classes, "x": self.data.x}
        )

    def accuracy(self, algorithm: Algorithm, rounds: int = 5, seed: int = 0) -> float:
        """Returns the accuracy on the test set after some rounds, on one device."""
        result = simulate(
            algorithm,
            self.model,
            self.data,
            self.test,
            rounds=rounds,
            classes=self.classes,
            seeds=(seed,),
            eval_every=rounds,
            execution=make_execution(devices=1),  # compiles faster than for several
        )
        return float(result.accuracy[-1, 0])


@functools.cache
def toy(clients: int = 10, emd: float = 0.5) -> Toy:
    """Returns scikit-learn's digits, split over clients with label skew; nothing is downloaded.

    Args:
        clients: N.
        emd: earth mover's distance of the partition; 0: no label skew.

    Returns:
        The problem.

    >>> import optax, fedjax_sim as fs
    >>> problem = toy()
    >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
    >>> problem.accuracy(fs.fedavg(local, clients_per_round=5)) > 0.8
    True
    """
    digits = load_dataset("digits")
    assert digits.mean is not None
    assert digits.std is not None
    scaled = with_scaling(logistic((8, 8, 1), 10), digits.mean, digits.std)
    held = len(digits.train_y) // 20  # the server's own samples, from the end
    x, y = digits.train_x, digits.train_y
    partition = limit_label_emd(y[:-held], clients, emd=emd, seed=0)
    root = np.arange(len(y) - held, len(y), dtype=np.int32)
    data = client_data(x, y, partition, root=root)
    return Toy(scaled, empirical_risk(scaled), data, (digits.test_x, digits.test_y), 10)
