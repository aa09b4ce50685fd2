"""The cohort: the server's knowledge of the collected models."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientData
from fedjax_sim.base.model import Variables


class LocalInfo(NamedTuple):
    """A client's report on its local update.

    Attributes:
        loss: ``f32[]``, mean training loss over the samples visited.
        steps: ``int32[]``, T_k, the minibatches it took.
        samples: ``int32[]``, the samples it visited.
        extra: ``f32[]`` by name, numbers that wrappers of a local update add. A number leaves the
          client, and counts as traffic, if a selection or a pre-aggregation ``reads`` it.
    """

    loss: Array
    steps: Array
    samples: Array
    extra: dict[str, Array] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)


class Cohort(NamedTuple):
    """The server's knowledge of the collected models, by row.

    A row holds the model of one slot. There are P rows, as many on each device, so that some may
    hold no slot. They are not sorted by slot, because that would gather all models across devices
    in every round.

    Attributes:
        server: the server model w_t, as it was at the start of the round.
        received: ``[P, *p]`` or ``[1, *p]``, the models from which updates are measured: the server
          model, or the model with which each slot left the server.
        client: ``int32[P]``, k; N if none was visited.
        present: ``bool[P]``, whether the row's model visited a client in this round.
        samples: ``int32[P]``, n_k; 0 if no client was visited.
        info: ``[P]``, the clients' reports.
        tag: ``[P]``, the broadcast's tag of the received model, for example its staleness.
        data: the population.
        chance: ``f32[P]``, the expected number of times that each client sends in the round; None
          unless the selection or a sending part draws clients by stated probabilities and the
          weights are divided by them.
        whole: ``f32[]``, the weight of all clients that could have sent, by which the weighted sum
          of the updates is divided; None: their own weight.
    """

    server: Variables
    received: Variables
    client: Array
    present: Array
    samples: Array
    info: LocalInfo
    tag: PyTree
    data: ClientData
    chance: Array | None = None
    whole: Array | None = None


class Gathered(NamedTuple):
    """The aggregate of a round.

    Attributes:
        updates: ``[P, *p]``, measured from ``cohort.received``, after all pre-aggregations; () if
          no part reads them.
        weights: ``f32[P]``; a row of weight 0 is absent, and may hold NaN.
        cohort: the server's knowledge of the rows.
    """

    updates: Variables
    weights: Array
    cohort: Cohort
