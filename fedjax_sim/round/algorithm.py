"""Composes parts into a federated algorithm: its state, its rounds and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Aggregator,
    Array,
    Broadcast,
    ClientData,
    Clock,
    Diagnostic,
    Exchange,
    FedState,
    Finish,
    Flight,
    LocalUpdate,
    Metrics,
    Origin,
    Personal,
    PreAggregation,
    PyTree,
    Selection,
    Sending,
    Server,
    SetupTraffic,
    Traffic,
    Variables,
    Weighting,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import as_arrays
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.personal import as_received
from fedjax_sim.plan import exchange as exchanges
from fedjax_sim.plan import flight as flights
from fedjax_sim.plan import selection as selections
from fedjax_sim.round import collecting, finishing, private, stages
from fedjax_sim.round.own_models import score_own
from fedjax_sim.round.parts import Parts, as_dict, as_tuple
from fedjax_sim.round.start import initial_state
from fedjax_sim.round.traffic import setup_traffic, sizes
from fedjax_sim.server import broadcast as broadcasts
from fedjax_sim.server import update as servers
from fedjax_sim.server.weighting import by_samples


def compose(
    local: LocalUpdate,
    clients_per_round: int,
    *,
    selection: Selection | None = None,
    flight: Flight | None = None,
    broadcast: Broadcast | None = None,
    exchange: Exchange | None = None,
    sending: Sequence[Sending] = (),
    weighting: Weighting = by_samples,
    preaggregation: Sequence[PreAggregation] = (),
    aggregator: Aggregator = tree.mean,
    server: Server | None = None,
    diagnostics: Mapping[str, Diagnostic] | None = None,
    finish: Finish | None = None,
    personal: Personal | None = None,
    clock: Clock | None = None,
) -> Algorithm:
    r"""Composes a federated algorithm from parts.

    .. code-block:: text

        slots   <- redistribute(slots)
        clients <- selection, for slots without a client
        slots   <- the broadcast model if the slot was due last round, else refresh(slot)
        shared  <- answers of the clients before they train, if the local update needs any
        slots   <- local update on those clients
        updates <- sending(updates of due slots, or of all that move)
        server  <- server + server update(aggregate(preaggregation(updates, weights)))

    Args:
        local: trains one model on one client.
        clients_per_round: m, the number of clients that train at once, one per slot.
        selection: chooses the client that each slot visits; None: ``selection.uniform()``.
        flight: when the server collects models, and how they move between clients until then;
          None: ``flight.every_round()``.
        broadcast: the model that a slot starts from; None: the server model.
        exchange: the leaves of a model that travel; None: all.
        sending: changes of what clients send, in order: attacks, codes, clips.
        weighting: the weight of each model.
        preaggregation: changes of updates and weights before the aggregation, in order.
        aggregator: reduces the updates to one.
        server: moves the server model; None: by the aggregate.
        diagnostics: measurements of rounds, by name.
        finish: the exchange of clients and server after the last round; None: no exchange.
        personal: the model that a client itself uses; None: the evaluated model, with the client's
          own leaves.
        clock: the duration of rounds and the availability of clients; None: no clock.

    Returns:
        An :class:`Algorithm`.

    Raises:
        ValueError: if a part is of the wrong kind or does not fit another (one line names both and
          what would work); in the first round, if the aggregate does not have the model's shapes.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> fs.compose(
        ...     fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1)),
        ...     clients_per_round=10,
        ...     aggregator=fs.aggregators.coordinate_median,
        ... )
        compose(
          local=local_sgd(empirical_risk(<Model>), <optax>),
          clients_per_round=10,
          selection=uniform(),
          aggregator=coordinate_median,
        )
    """
    exchange = exchanges.everything() if exchange is None else exchange
    if personal is None and isinstance(exchange, Exchange) and exchange.own is not None:
        personal = as_received()
    return Algorithm(
        Parts(
            local,
            clients_per_round,
            selections.uniform() if selection is None else selection,
            flights.every_round() if flight is None else flight,
            broadcasts.latest() if broadcast is None else broadcast,
            exchange,
            as_tuple("sending", sending),
            weighting,
            as_tuple("preaggregation", preaggregation),
            aggregator,
            servers.replace() if server is None else server,
            as_dict(diagnostics),
            finish,
            personal,
            clock,
            make_execution(),
        )
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Algorithm:
    """A federated algorithm: its parts, and pure functions of them.

    Attributes:
        parts: the arguments of :func:`compose` by role, with defaults.
        origin: the call of the named method; None for a plain ``compose``.
        replaced: roles in which the parts differ from the named method's.
    """

    parts: Parts
    origin: Origin | None = None
    replaced: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """S, the number of models in flight."""
        return self.parts.slots

    @property
    def round_factor(self) -> float:
        """Rounds to run for each round of FedAvg that the user budgets."""
        parts = self.parts
        return parts.flight.round_factor * parts.clients_per_round / parts.slots

    @property
    def ends(self) -> bool:
        """Whether :meth:`collect` has anything to do after the last round."""
        return self.parts.in_flight or self.parts.finish is not None

    @property
    def personal(self) -> Personal | None:
        """The clients' personal model; None if all clients use the evaluated model."""
        return self.parts.personal

    def replace(self, **parts: Any) -> Algorithm:
        """Returns the algorithm with some parts replaced.

        Args:
            parts: new parts by role, as for :func:`compose`.

        Raises:
            TypeError: if a role is unknown.
            ValueError: as in :func:`compose`.

        >>> import optax, fedjax_sim as fs
        >>> local = fs.local_sgd(fs.empirical_risk(fs.models.logistic((4,), 2)), optax.sgd(0.1))
        >>> robust = fs.algorithms.scaffold(local, clients_per_round=10).replace(
        ...     aggregator=fs.aggregators.coordinate_median
        ... )
        >>> robust.parts.aggregator.__name__, robust.replaced
        ('coordinate_median', ('aggregator',))
        """
        known = self.parts.by_role()
        execution = known.pop("execution")
        if unknown := parts.keys() - known.keys():
            raise TypeError(
                f"{min(unknown)} is not a part of an algorithm: one of {', '.join(known)}"
            )
        made = compose(**(known | parts))
        replaced = (*self.replaced, *(role for role in parts if role not in self.replaced))
        return dataclasses.replace(made, origin=self.origin, replaced=replaced).on(execution)

    def on(self, execution: Execution) -> Algorithm:
        """Returns the same algorithm on other devices, or with other chunks or lanes.

        Raises:
            ValueError: if it is not an :class:`fedjax_sim.Execution`.
        """
        return dataclasses.replace(self, parts=dataclasses.replace(self.parts, execution=execution))

    def __repr__(self) -> str:
        head = "compose" if self.origin is None else self.origin.name
        return "\n".join([f"{head}(", *self.parts.written(), ")"])

    def init(self, key: Array, variables: Variables, data: ClientData) -> FedState:
        """Returns the state before the first round, for the initial model ``variables``."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        del key
        # On all devices, like the result of a step: else the second step would be compiled again.
        return self.parts.execution.place(initial_state(self.parts, variables, data))

    def step(self, key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
        """Runs one round with the key ``key``: see :mod:`fedjax_sim.round.stages`."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        return stages.step(self.parts, key, state, data)

    def collect(self, key: Array, state: FedState, data: ClientData) -> tuple[Variables, Array]:
        """Uploads and aggregates all models in flight, and finishes the run.

        Returns:
            The final server model, and the number of uploads ``int32[]``.
        """
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        server, uploads = finishing.collect(self.parts, key, state, data)
        return finishing.finish(self.parts, key, server, data), uploads

    def evaluated(self, key: Array, state: FedState, data: ClientData) -> Variables:
        """Returns the model to evaluate: the server model, or the aggregate of those in flight."""
        data = as_arrays(data, differentiable=self.parts.execution.differentiable)
        del key
        return collecting.evaluated(self.parts, state, data)

    def score_personal(
        self,
        key: Array,
        state: FedState,
        data: ClientData,
        score: Callable[[PyTree, Variables, PyTree], PyTree],
        constants: PyTree,
        tasks: PyTree,
        clients: Array | None = None,
        *,
        adapt: ClientData | None = None,
    ) -> PyTree:
        """Runs ``score(constants, variables, task)`` with personal models; returns ``[K, ...]``.

        With samples in ``adapt``, the models belong to other clients, which never trained.
        """
        received = self.evaluated(key, state, data)
        whose, new = (data, False) if adapt is None else (adapt, True)
        whose = as_arrays(whose, differentiable=self.parts.execution.differentiable)
        given = score, constants, tasks, clients
        return score_own(self.parts, key, received, state, whose, *given, adapt=new)

    def epsilon(self, data: ClientData, rounds: int, delta: float) -> float:
        """Computes ε of (ε, δ) differential privacy for a client if all server models are public.

        Raises:
            UnknownEpsilonError: names a part that is not known to keep the mechanism's analysis.
        """
        return private.accountant(self.parts, data)(rounds=rounds, delta=delta)

    def client_epsilon(self, data: ClientData, visits: Any, delta: float) -> NDArray[np.float64]:
        """Computes ε of (ε, δ) differential privacy of each client that adds noise itself.

        With ``local_sgd(private=dp_sgd(...))`` it protects each sample of a client, see
        :func:`fedjax_sim.privacy.sample_epsilon`, which runs for each pair of n_k and visits.
        Otherwise, with ``sending=(clip_norm(C), noise(σ))``, it protects all samples of a client
        (local differential privacy). The guarantee holds against anyone who sees a client's
        messages.

        Args:
            data: the clients.
            visits: ``int[..., N]``, how often each client trained, such as ``Result.visits``.
            delta: δ.

        Returns:
            ``f64[..., N]``, ε; 0 for a client that never trained.

        Raises:
            UnknownEpsilonError: if no noise is added at the clients; names a part that is not known
                to keep the analysis.
        """
        return private.client_epsilon(self.parts, data, visits, delta)

    def traffic(self, variables: Variables, data: ClientData) -> Traffic:
        """Returns the bytes of the messages in a round, as integers; takes arrays or shapes."""
        return sizes(self.parts, variables, data)

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        """Returns the bytes sent before the first round; ``data.start`` must be of a single run."""
        return setup_traffic(self.parts, variables, data)
