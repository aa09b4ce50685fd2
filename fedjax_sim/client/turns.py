"""Local updates that wrap others: several in one visit, and FedADMM's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientView,
    LocalInfo,
    LocalUpdate,
    Need,
    PyTree,
    Survey,
    Trained,
    Variables,
    Wrapper,
)
from fedjax_sim.engine.needs import MIRROR
from fedjax_sim.engine.streams import Client, stream


def _joined(name: str, join: Callable[[Iterable[Any]], Any]) -> Any:
    """Returns a property of :class:`in_turn` that joins the values of its local updates."""
    return property(lambda self: join(getattr(local, name) for local in self.locals_))


def _chained(lists: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(lists))


class in_turn(LocalUpdate):
    """Local updates one after another, each from the weights of the previous one.

    Each has its own client and shared states; each treats the model that it starts from as the
    received one. ``change`` changes all of them. It reports the mean loss over the samples of all
    visits, the sums of their steps and samples, and the last value of each other number.

    Args:
        locals_: at least one.

    Raises:
        ValueError: if there is none, or one has a shared state that follows the server's step
            (client_momentum, past_models, skewscout) or a survey (mime), or they have settings for
            different numbers of clients.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.mlp((8, 8, 1), 10)
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
        >>> head, body = fs.leaves.head(model), fs.leaves.all_but(fs.leaves.head(model))
        >>> both = in_turn(local.change(trained=head, epochs=2), local.change(trained=body))
        >>> both.epochs
        3.0
    """

    locals_: tuple[LocalUpdate, ...]

    def __init__(self, *locals_: LocalUpdate) -> None:
        if not locals_:
            raise ValueError("in_turn needs at least one local update")
        if any(local.follow for local in locals_):
            raise ValueError(
                "in_turn must be of local updates that share what their clients send: "
                "client_momentum, past_models and skewscout follow the server's step, that of all"
            )
        if any(local.survey for local in locals_):
            raise ValueError(
                "in_turn must be of local updates without a survey: mime's is of the model that "
                "all clients have"
            )
        if len(several := _clients(locals_)) > 1:
            raise ValueError(
                "in_turn must be of local updates with settings for the same clients, got "
                f"{' and '.join(map(str, sorted(several)))} clients"
            )
        object.__setattr__(self, "locals_", locals_)

    def change(self, **settings: Any) -> in_turn:
        return in_turn(*(local.change(**settings) for local in self.locals_))

    def client_state(self, variables: Variables) -> PyTree:
        return tuple(local.client_state(variables) for local in self.locals_)

    def shared_state(self, variables: Variables) -> PyTree:
        return tuple(local.shared_state(variables) for local in self.locals_)

    def train(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
    ) -> Trained:
        visits: list[Trained] = []
        for i, (local, own, common) in enumerate(
            zip(self.locals_, client_state, shared_state, strict=True)
        ):
            own_key = stream(key, Client.TURN, i) if i else key
            visits.append(local.train(own_key, variables, client, own, common))
            variables = visits[-1].variables
            if client.limit is not None:
                left = client.limit - visits[-1].info.steps
                client = dataclasses.replace(client, limit=left)
        return Trained(
            variables,
            tuple(visit.client_state for visit in visits),
            tuple(visit.message for visit in visits),
            _combine([visit.info for visit in visits]),
        )

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> PyTree:
        return tuple(
            local.reduce(common, sent, weights, clients, aggregator)
            for local, common, sent in zip(self.locals_, shared_state, messages, strict=True)
        )

    def steps_for(self, samples: Any, client: Any = None) -> Any:
        return sum(local.steps_for(samples, client) for local in self.locals_)

    @property
    def clients(self) -> int | None:
        return next(iter(_clients(self.locals_)), None)

    @property
    def epochs(self) -> float | Sequence[float]:
        total = sum((np.asarray(local.epochs) for local in self.locals_), np.float64(0))
        return cast(float | Sequence[float], total.tolist())

    @property
    def batch_size(self) -> int:
        return self.locals_[0].batch_size

    moves_start = True
    peers, reflects = _joined("peers", any), _joined("reflects", any)
    fresh, stops, known = (_joined(name, all) for name in ("fresh", "stops", "known"))
    corrections, needs = _joined("corrections", _chained), _joined("needs", _chained)
    setup_traffic = _joined("setup_traffic", lambda of: next(filter(None, of), None))


def _clients(locals_: Sequence[LocalUpdate]) -> set[int]:
    return {local.clients for local in locals_ if local.clients is not None}


def _combine(infos: list[LocalInfo]) -> LocalInfo:
    """Returns the report of several visits."""
    samples = sum((info.samples for info in infos), jnp.int32(0))
    total = sum((info.loss * info.samples.astype(jnp.float32) for info in infos), jnp.float32(0))
    extra: dict[str, jax.Array] = {}
    for info in infos:
        extra |= info.extra
    mean = total / jnp.maximum(samples, 1).astype(jnp.float32)
    return LocalInfo(mean, sum((info.steps for info in infos), jnp.int32(0)), samples, extra)


class Reflected(NamedTuple):
    """A client's state of :class:`fedadmm`.

    Attributes:
        last: its weights at the end of its last visit; before the first, the initial weights.
        inner: its state of the wrapped local update.
    """

    last: PyTree
    inner: PyTree


class fedadmm(Wrapper):
    r"""A local update that sends the reflection of its new model's weights by its last ones.

    .. math:: w_k \mapsto 2 w_k - w_k^{last}

    With :class:`fedjax_sim.corrections.dynamic` it is the client of FedADMM: the dual variable,
    which is minus FedDyn's h_k, changes by :math:`\rho\,(w_k - w_t)`, so that the change of the
    augmented model :math:`w_k + y_k / \rho` is
    :math:`(w_k - w_k^{last}) + (w_k - w_t) = (2 w_k - w_k^{last}) - w_t`, an update of w_t.

    The model's state (BatchNorm statistics) is sent unreflected. Every client keeps the weights of
    a model.

    Args:
        local: the local update.

    Source: Gong et al. 2022 <https://arxiv.org/abs/2204.03529>, Algorithm 1.
    """

    reflects = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*self.local.needs, *MIRROR)

    @property
    def survey(self) -> Survey | None:
        return self.local.survey and self.local.survey.inside(lambda kept: kept.inner)

    def client_state(self, variables: Variables) -> Reflected:
        return Reflected(variables.params, self.local.client_state(variables))

    def train(
        self,
        key: jax.Array,
        variables: Variables,
        client: ClientView,
        client_state: Reflected,
        shared_state: PyTree,
    ) -> Trained:
        trained = self.local.train(key, variables, client, client_state.inner, shared_state)
        new = trained.variables.params
        sent = jax.tree.map(lambda w, last: w + (w - last), new, client_state.last)
        return trained._replace(
            variables=trained.variables._replace(params=sent),
            client_state=Reflected(new, trained.client_state),
        )
