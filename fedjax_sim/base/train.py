"""How a client trains: as a whole, or in steps, and for how long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.cohort import LocalInfo
from fedjax_sim.base.data import ClientView
from fedjax_sim.base.model import Context, Variables
from fedjax_sim.base.parts import Part


class Trained(NamedTuple):
    """The result of a local update.

    Attributes:
        variables: the trained model.
        client_state: the client's state for its next visit.
        message: the message that accompanies the model; () without one.
        info: the client's report.
    """

    variables: Variables
    client_state: PyTree
    message: PyTree
    info: LocalInfo


class Train(Protocol):
    """Trains one model on one client."""

    def __call__(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
        /,
    ) -> Trained:
        """``key`` is the client's own for this round, ``variables`` the model it received."""


@dataclasses.dataclass(frozen=True)
class TrainInSteps:
    """A :class:`Train` that can also stop between two of its steps.

    Then a device that trains several clients at once need not wait for the longest: see the lanes
    of :func:`fedjax_sim.make_execution`. All functions end with the arguments of :class:`Train`.
    Results of ``begin``, ``stretch`` and ``end`` for a client without samples may be discarded:
    they are computed for all lanes together, and only some are due.

    Attributes:
        whole: the whole visit, a :class:`Train`.
        begin: ``(...) -> (plan, carry)``: the inputs of its steps, and the state they change.
        stretch: ``(plan, carry, ...) -> (plan, int32[])``, the inputs and the number of the next
          steps, such as an epoch; 0 if the visit is over.
        step: ``(plan, carry, ...) -> carry``.
        end: ``(plan, carry, ...) -> Trained``.
    """

    whole: Train
    begin: Callable[..., tuple[PyTree, PyTree]]
    stretch: Callable[..., tuple[PyTree, Any]]
    step: Callable[..., PyTree]
    end: Callable[..., Trained]

    def __call__(self, *visit: Any) -> Trained:
        """See :class:`Train`."""
        return self.whole(*visit)


def and_then(train: Train, change: Callable[..., Trained]) -> Train:
    """Returns ``train`` with a change of its result.

    Args:
        train: the ``train`` of a local update.
        change: ``(trained, key, variables, client, client_state, shared_state) -> Trained``.

    Returns:
        A :class:`Train` that can stop between two steps if ``train`` can.
    """

    def whole(*visit: Any) -> Trained:
        return change(train(*visit), *visit)

    if not isinstance(train, TrainInSteps):
        return whole

    def end(plan: PyTree, carry: PyTree, *visit: Any) -> Trained:
        return change(train.end(plan, carry, *visit), *visit)

    return dataclasses.replace(train, whole=whole, end=end)


class DrawnSteps(Part):
    """A random number of local steps, the same for all clients of a round."""

    def draw(self, key: Array, shared: PyTree, /) -> Array:
        """Returns ``int32[]``; with 0 steps a client sends back the received model.

        Args:
            key: a key common to all clients of the round.
            shared: the statistics of ``local_sgd(shared=...)``, or ().
        """
        raise NotImplementedError

    @property
    def most(self) -> int:
        """The largest number that it draws (static)."""
        raise NotImplementedError


class Until(Protocol):
    """Ends a visit before its last epoch."""

    def __call__(self, variables: Variables, epoch: Array, context: Context, /) -> Array:
        """Returns ``bool[]``, whether to stop before ``epoch``, numbered from 0."""
