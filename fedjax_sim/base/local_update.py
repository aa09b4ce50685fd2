"""Local updates, their wrappers, and the exchange before local training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.client import Aggregator, Correction, Follow, SetupTrafficOf
from fedjax_sim.base.model import Leaves, Variables
from fedjax_sim.base.parts import Part
from fedjax_sim.base.train import Train


class Survey(NamedTuple):
    """An exchange within a round, before local training: clients send answers and get a result.

    The answers are uploaded, and the resulting shared state is downloaded. ``LocalUpdate.reduce``
    computes the next round's shared state from it.

    Attributes:
        ask: computes the answer of one client, arrays, from the arguments of :class:`Train`.
        tell: ``(shared_state, aggregate) -> shared_state``, the state with which the round's
          clients train, given the aggregate of the answers by the models' weights and aggregator.
    """

    ask: Callable[..., PyTree]
    tell: Callable[[PyTree, PyTree], PyTree]

    def inside(self, inner: Callable[[PyTree], PyTree]) -> Survey:
        """Returns the survey of a wrapper; ``inner`` selects the wrapped one's client state."""

        def ask(
            key: Array, variables: Variables, client: Any, client_state: PyTree, common: PyTree
        ) -> PyTree:
            return self.ask(key, variables, client, inner(client_state), common)

        return Survey(ask, self.tell)


class LocalUpdate(Part):
    """Trains one model on one client; ``compose`` batches it over a cohort.

    A subclass overrides ``train``, ``steps_for``, and every other member whose default is wrong for
    it.
    """

    def client_state(self, variables: Variables, /) -> PyTree:
        """Returns the initial state of each client, for the initial model; () for no state."""
        return ()

    def shared_state(self, variables: Variables, /) -> PyTree:
        """Returns the initial state that the server keeps and sends along with every model."""
        return ()

    @property
    def train(self) -> Train:
        """Trains one model on one client: a method like ``Train``, or a ``TrainInSteps``.

        ``(key, variables, client, client_state, shared_state) -> Trained``.
        """
        raise NotImplementedError

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
        /,
    ) -> PyTree:
        """Returns the next shared state.

        Args:
            shared_state: the current one.
            messages: ``[P, *]``, the clients' messages by row, as they were sent.
            weights: ``f32[P]``, the weights of the clients' models in the composition; a row of
                weight 0 is absent.
            clients: N.
            aggregator: the composition's aggregator, to use instead of a weighted mean: a robust
              rule then protects control variates as well as models.
        """
        return shared_state

    def change(self, **settings: Any) -> LocalUpdate:
        """Returns the local update with other settings; a wrapper changes the one that it wraps."""
        return self.replace(**settings)

    def steps_for(self, samples: Any, client: Any = None, /) -> Any:
        """Returns T_k for n_k = ``samples``, a number or an array; if T_k is random, its maximum.

        Args:
            samples: n_k.
            client: ``int32[*]``, k, of the same shape; None: the largest T_k of all clients with
              n_k.
        """
        raise NotImplementedError

    @property
    def clients(self) -> int | None:
        """The number of clients with settings of their own; None: all have the same settings."""
        return None

    @property
    def epochs(self) -> float | Sequence[float]:
        """E, or E_k of each client."""
        return 1.0

    @property
    def batch_size(self) -> int:
        """B."""
        raise NotImplementedError

    @property
    def peers(self) -> bool:
        """Whether ``train`` reads ``ClientView.starts``, the samples of other clients."""
        return False

    @property
    def corrections(self) -> Sequence[Correction]:
        """The corrections of its gradients."""
        return ()

    @property
    def response(self) -> Callable[[int], Sequence[float | Array]] | None:
        """Returns the weight after 1, 2, ... steps of gradient -1, from 0 and a fresh optimiser.

        The weights are numbers, or arrays if the rate is traced. None: unknown.
        """
        return None

    @property
    def fresh(self) -> bool:
        """Whether the optimiser's state is reset at the start of every visit."""
        return True

    @property
    def stops(self) -> bool:
        """Whether ``train`` takes at most ``ClientView.limit`` steps."""
        return False

    @property
    def known(self) -> bool:
        """Whether a visit takes exactly T_k steps."""
        return False

    @property
    def trained(self) -> Leaves | None:
        """The leaves that it trains; None: all."""
        return None

    @property
    def private(self) -> Any:
        """The private steps, if only they read samples; None: no private steps."""
        return None

    @property
    def moves_start(self) -> bool:
        """Whether it trains from another model than the received one."""
        return False

    @property
    def reflects(self) -> bool:
        """Whether it sends twice its new model minus its last one."""
        return False

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    @property
    def follow(self) -> Follow | None:
        """Updates the shared state with the aggregate, without uploads; None: unchanged."""
        return None

    @property
    def downloaded(self) -> Callable[[PyTree], PyTree] | None:
        """Selects the part of the shared state that is sent to clients; None: all of it."""
        return None

    @property
    def survey(self) -> Survey | None:
        """The exchange before local training; None if there is none."""
        return None


class Wrapper(LocalUpdate):
    """A local update that changes another one, and delegates to it everything else.

    Args:
        local: the wrapped local update; ``change`` changes its settings.
    """

    local: LocalUpdate

    @property
    def inner(self) -> LocalUpdate:
        """The local update that it delegates to: ``local``, or ``local`` with other settings."""
        return self.local

    sets: ClassVar[tuple[str, ...]] = ()
    """The settings of ``local`` that ``inner`` has in their place."""

    def change(self, **settings: Any) -> LocalUpdate:
        """Returns the wrapper of the changed local update.

        Raises:
            ValueError: if the wrapper sets one of the settings itself.
        """
        for name in self.sets:
            if (value := settings.get(name)) is not None:
                raise ValueError(
                    f"{name} must be None, as {type(self).__name__} sets it, got {value}"
                )
        return self.replace(local=self.local.change(**settings))


for _hook in (*vars(LocalUpdate), "needs"):
    if not _hook.startswith("_") and _hook not in ("change", "private"):
        _doc = getattr(LocalUpdate, _hook).__doc__
        setattr(Wrapper, _hook, property(operator.attrgetter(f"inner.{_hook}"), doc=_doc))
