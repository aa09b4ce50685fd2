"""Power of choice: clients by their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    LocalInfo,
    PerClient,
    PyTree,
    Selection,
    Variables,
)
from fedjax_sim.engine.clients import list_ends
from fedjax_sim.engine.draws import by_size


class Answers(NamedTuple):
    """The candidates' losses.

    Attributes:
        client: ``int32[d]``; N for a client without an answer.
        score: ``f32[d]``.
    """

    client: Array
    score: Array


class power_of_choice(Selection):
    r"""Power of choice: the clients with the largest losses of d candidates.

    .. math:: A \sim n_k / n, \; |A| = d, \qquad U = \text{the } m \text{ of } A
              \text{ with the largest } F_k(w)

    With a ``score`` the candidates are sent the server model and return its loss on their own
    samples, 4 bytes each; those that train are not sent it again. Without a score, the losses are
    those that clients reported at their last visits, which only costs the reports; clients without
    a report come first.

    Args:
        candidates: d, the number of clients drawn in proportion to :math:`n_k`, at least the number
            of slots; all clients if there are fewer.
        score: ``(variables, client) -> f32[]`` (:func:`fedjax_sim.reports.mean_loss`); None: the
            reported losses.

    Raises:
        ValueError: if candidates is below 1; in the first round, if there are more slots.

    Source: Cho et al. 2022 <https://arxiv.org/abs/2010.01243>, section 4: π_pow-d, and π_rpow-d
    by what is known.
    """

    candidates: Count
    score: Callable[[Variables, ClientView], Array] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return ("loss",) if self.score is None else ()

    @property
    def poll(self) -> Callable[[Array, PyTree, ClientData], Array] | None:
        return None if self.score is None else self._candidates

    @property
    def ask(self) -> Callable[[Variables, ClientView], Array] | None:
        return self.score

    def record_answers(self, state: Answers, client: Array, answers: Array) -> Answers:
        return Answers(client, answers)

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> PyTree:
        if self.score is None:
            return jnp.full(data.clients, jnp.inf, jnp.float32)
        size = min(self.candidates, data.clients)
        return Answers(jnp.full(size, data.clients, jnp.int32), jnp.zeros(size, jnp.float32))

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        slots = len(free)
        if slots > self.candidates:
            raise ValueError(
                f"candidates must be at least the {slots} slots, got {self.candidates}"
            )
        if self.score is None:
            client = self._candidates(key, state, data)
            loss = state.at[client].get(mode="fill", fill_value=-jnp.inf)
        else:
            client, loss = state
        largest = jax.lax.top_k(jnp.where(client < data.clients, loss, -jnp.inf), slots)[1]
        return client[largest], state

    def update(self, state: PyTree, client: Array, info: LocalInfo) -> PyTree:
        return state.at[client].set(info.loss, mode="drop") if self.score is None else state

    def _candidates(self, key: Array, state: PyTree, data: ClientData) -> Array:
        return by_size(key, min(self.candidates, data.clients), list_ends(data))
