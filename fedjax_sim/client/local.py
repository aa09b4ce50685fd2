"""Local updates: exact epochs of minibatch SGD on a client of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from fedjax_sim.base import (
    Accompanied,
    Aggregator,
    Array,
    Companion,
    Correction,
    DrawnSteps,
    Gathered,
    Memory,
    Need,
    PyTree,
    SetupTraffic,
    SetupTrafficOf,
    Shared,
    Survey,
    Transform,
    Variables,
)
from fedjax_sim.base.parts import check_kind
from fedjax_sim.client import own_settings
from fedjax_sim.client.agreement import fedmd
from fedjax_sim.client.control import adaptive_steps, loadaboost
from fedjax_sim.client.descent import Common, Kept, survey_of
from fedjax_sim.client.private import check_private
from fedjax_sim.client.reports import (
    with_final_loss,
    with_importance,
    with_initial_loss,
    with_utility,
)
from fedjax_sim.client.sgd import SGD
from fedjax_sim.client.skew import skewscout
from fedjax_sim.client.skipping import geometric
from fedjax_sim.client.turns import fedadmm, in_turn
from fedjax_sim.engine import tree
from fedjax_sim.engine.optimizers import EXTRA_ARGUMENTS, check_optimizer
from fedjax_sim.engine.reach import response, stateless
from fedjax_sim.personal import adaptive_start, ditto
from fedjax_sim.privacy import dp_sgd
from fedjax_sim.privacy._clipped import check_model

__all__ = [
    "adaptive_start",
    "adaptive_steps",
    "ditto",
    "dp_sgd",
    "fedadmm",
    "fedmd",
    "geometric",
    "in_turn",
    "loadaboost",
    "local_sgd",
    "skewscout",
    "with_final_loss",
    "with_importance",
    "with_initial_loss",
    "with_utility",
]


class local_sgd(SGD):
    r"""Local training: E epochs of minibatch steps of an optax optimiser.

    .. math:: T_k = E \lceil n_k / B \rceil, \qquad w_k \leftarrow w_k - \eta\,\nabla F_b(w_k)

    Samples are reshuffled in each epoch by a key of only (seed, round, client, epoch), so results
    do not depend on the rest of the cohort or on the device. ``local.change(...)`` replaces
    settings, but appends to ``corrections`` and ``transforms``; ``corrections=None`` removes the
    present ones.

    Args:
        objective: see :class:`fedjax_sim.empirical_risk`.
        optimizer: an ``optax.GradientTransformation``. A schedule counts the steps in the
            optimiser's state: it restarts at every visit unless ``optimizer_state`` is "keep" or
            "average". The optimiser receives optax's extra arguments: ``value``, ``grad`` and
            ``value_fn`` (also as ``obj_fn``) of the minibatch's loss, without the corrections;
            ``grad_fn(params, i)``, with the corrections; ``key``, the step's own.
        batch_size: B.
        epochs: E; a fraction runs ``round(E * ceil(n_k / B))`` steps. Or E_k, one for each client.
        last_batch: how to handle the last, smaller minibatch: "keep" it (its loss is the mean over
            its real samples), "drop" it, or "refill" it from the epoch's beginning.
        max_steps: the largest number of steps in a visit; 1 is parallel SGD.
        optimizer_state: the optimiser's state when a client receives a model: "reset"; "keep", the
            client's own after its last visit; "average", the mean over the last cohort, weighted
            like its models and sent along (momentum federated learning).
        corrections: change every gradient, in order, see :mod:`fedjax_sim.corrections`; the
            reported loss is without them.
        transforms: change each minibatch, in order.
        peers: whether a transform needs the other clients' samples.
        inexactness: γ; a client stops after the epoch that leaves
            :math:`\lVert\nabla h(w_k)\rVert \le \gamma \lVert\nabla h(w_{recv})\rVert`, where h
            includes the corrections. It costs a pass over the samples at the start and one before
            every epoch. None: clients run all epochs.
        until: ends a visit before its last epoch, given the model so far, see :class:`loadaboost`.
            None: clients run all epochs.
        memory: the client's state for its objective, kept between visits.
        companion: a personal model that the client also trains, on the same minibatches; its
            optimiser starts afresh at each visit. Corrections, ``trained`` and ``inexactness`` do
            not apply to it.
        trained: the leaves that are trained, see :mod:`fedjax_sim.leaves`; None: all.
        rate_by_round: maps the number of the round, from 0, to a factor of every step, such as
            ``optax.exponential_decay(1.0, 100, 0.5)``; None: 1.
        rate_by_client: a factor of every step for each client, such as ``[1.0, 0.5, 2.0]``; None:
            1. Parts that assume a learning rate (FedNova, FedCM) need equal ones.
        batch_by_client: B_k, the minibatch size of each client, at most ``batch_size``. Devices
          still compute with ``batch_size``, so smaller ones save no time per step. None: B.
        stragglers: the probability that a client does fewer epochs in a round: 1 to ⌈E⌉ - 1, each
            equally likely, as in FedProx' experiments with slow devices. It still sends its model.
        steps: a random number of steps, the same for all clients of a round, in place of E epochs,
            such as ``geometric(0.2)``; None: E epochs.
        shared: statistics that the clients share besides the model, for their objective.
        half_weights: whether a visit holds its float32 weights in bfloat16 between two steps,
            rounded up or down at random (Gupta et al. 2015), to move fewer bytes. Steps compute in
            the dtype of the received weights, or in that of the model, see
            :func:`fedjax_sim.models.with_compute_dtype`; the optimiser's state keeps its dtype.
            Clients return the received weights plus the change by their steps.
        private: makes every step private for single samples, see :class:`dp_sgd`; None: plain
            steps.

    Raises:
        ValueError: if a setting is out of range or of the wrong kind; in the first round, if it
          does not have one number for each client.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, Algorithm 1 (ClientUpdate); Vo,
    Rakotobe 2020 <vo2020how>, Algorithm 2 (inexactness); Gupta et al. 2015
    <https://arxiv.org/abs/1502.02551>, section 3 (half_weights); Li et al. 2020
    <https://arxiv.org/abs/1812.06127>, section 5.2 (stragglers).

    Example:
        >>> import jax, optax
        >>> from fedjax_sim import base, empirical_risk, models
        >>> model = models.logistic((2,), 2)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16, epochs=2)
        >>> x, y = jnp.zeros((40, 2)), jnp.zeros(40, jnp.int32)
        >>> client = base.ClientView(x, y, jnp.arange(40), jnp.int32(0), jnp.int32(40), 40)
        >>> key = jax.random.key(0)
        >>> int(local.train(key, model.init(key), client, ((), ()), ((), ())).info.steps)
        6
    """

    stops = True

    def __post_init__(self) -> None:
        if not callable(self.objective):
            kind = type(self.objective).__name__
            raise ValueError(f"objective must be a function: use empirical_risk(model), got {kind}")
        extra = EXTRA_ARGUMENTS if self.private is None else ("key",)
        check_optimizer("optimizer", self.optimizer, extra)
        given = self.epochs, self.rate_by_client, self.batch_by_client
        own = own_settings.checked(*given, self.batch_size)
        for name, values in zip(("epochs", "rate_by_client", "batch_by_client"), own, strict=True):
            object.__setattr__(self, name, values)
        if self.rate_by_round is not None and not callable(self.rate_by_round):
            raise ValueError(f"rate_by_round must be an optax schedule, got {self.rate_by_round!r}")
        roles: dict[str, type] = {"memory": Memory, "shared": Shared, "companion": Companion}
        for name, kind in roles.items():
            if (part := getattr(self, name)) is not None:
                check_kind(f"{name} must be a", kind, part)
        self._check_steps()
        object.__setattr__(self, "transforms", _transforms(self.transforms))
        object.__setattr__(self, "corrections", _corrections(self.corrections))
        kinds = [d.kind for d in self.corrections]
        twice = [type(d).__name__ for d in self.corrections if kinds.count(d.kind) > 1]
        if twice:
            raise ValueError(f"corrections must not correct twice, got {' and '.join(twice)}")
        if self.private is not None:
            check_private(self)

    def _check_steps(self) -> None:
        if self.steps is None:
            return
        if isinstance(self.epochs, tuple):
            raise ValueError(f"epochs must be one number if steps are drawn, got {self.epochs}")
        if self.stragglers:
            raise ValueError(f"stragglers must be 0 if steps are drawn, got {self.stragglers}")
        if not isinstance(self.steps, DrawnSteps):
            raise ValueError(f"steps must be drawn, such as by geometric(0.2), got {self.steps!r}")
        if self.max_steps is not None:
            raise ValueError(f"max_steps must be None if steps are drawn, got {self.max_steps}")
        if self.last_batch == "drop":
            raise ValueError(
                "last_batch must be 'keep' or 'refill' if steps are drawn, got 'drop': a client "
                "with less than a minibatch would take no step"
            )

    def change(
        self,
        *,
        corrections: Sequence[Correction] | None = (),
        transforms: Sequence[Transform] = (),
        **settings: Any,
    ) -> local_sgd:
        """Returns the local update with other settings.

        Args:
            corrections: are appended to the present ones; None removes these.
            transforms: are appended to the present ones.
            settings: replace the present ones.

        Raises:
            ValueError: if a setting is out of range, or would replace another part.
        """
        for name in ("shared", "memory", "companion"):
            present = getattr(self, name)
            if None not in (present, settings.get(name)):
                raise ValueError(
                    f"{name} must be one of {present} and {settings[name]}: use "
                    f"change({name}=None) first for the second alone"
                )
        added = None if corrections is None else _corrections(corrections)
        return self.replace(
            corrections=() if added is None else (*self.corrections, *added),
            transforms=(*self.transforms, *_transforms(transforms)),
            **settings,
        )

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        counts = [t.setup_traffic for t in self.transforms if hasattr(t, "setup_traffic")]
        if not counts:
            return None
        return lambda *given: SetupTraffic(
            *map(sum, zip(*(c(*given) for c in counts), strict=True))
        )

    @property
    def fresh(self) -> bool:
        return self.optimizer_state == "reset" or stateless(self._optimizer)

    @property
    def known(self) -> bool:
        drawn = self.stragglers or self.steps is not None
        return not drawn and self.inexactness is None and self.until is None

    @property
    def clients(self) -> int | None:
        given = self.epochs, self.rate_by_client, self.batch_by_client
        return next((len(values) for values in given if isinstance(values, tuple)), None)

    def response(self, steps: int) -> Sequence[float | Array]:
        rate = own_settings.common(self.rate_by_client)
        return [rate * place for place in response(self._optimizer, steps)]

    @property
    def needs(self) -> tuple[Need, ...]:
        parts = *self._sharing, *(p for p in (self.memory, self.private) if p is not None)
        return tuple(need for part in parts for need in part.needs)

    @functools.cached_property
    def survey(self) -> Survey | None:
        return survey_of(self.corrections, self._whole_gradient)

    @property
    def follow(self) -> Callable[[PyTree, Variables, Gathered], PyTree] | None:
        return self._follow if any(part.follow for part in self._sharing) else None

    @property
    def downloaded(self) -> Callable[[PyTree], PyTree] | None:
        if self.shared is None or self.shared.downloaded is None:
            return None
        select = self.shared.downloaded
        return lambda state: Common(*state)._replace(shared=select(Common(*state).shared))

    @property
    def _sharing(self) -> tuple[Correction | Shared, ...]:
        return (*self.corrections, *([] if self.shared is None else [self.shared]))

    def client_state(self, variables: Variables) -> Kept:
        if self.private is not None:
            check_model(variables)
        return Kept(
            self._first_state(variables) if self.optimizer_state == "keep" else (),
            tuple(d.client_state(variables.params) for d in self.corrections),
            () if self.memory is None else self.memory.init(variables),
            () if self.companion is None else Accompanied(self.companion.init(variables)),
        )

    def shared_state(self, variables: Variables) -> Common:
        return Common(
            self._first_state(variables) if self.optimizer_state == "average" else (),
            tuple(d.shared_state(variables.params) for d in self.corrections),
            () if self.shared is None else self.shared.init(variables),
        )

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> Common:
        before, (states, terms, sent) = Common(*shared_state), messages
        rest = weights, clients, aggregator
        if self.optimizer_state == "average":
            mean = aggregator(states, weights)
            states = tree.select(jnp.any(weights > 0), mean, before.optimizer)
        parts = zip(self.corrections, before.corrections, terms, strict=True)
        terms = tuple(d.reduce(c, message, *rest) for d, c, message in parts)
        if self.shared is not None:
            sent = self.shared.reduce(before.shared, sent, *rest)
        return Common(states, terms, sent)

    def _follow(self, shared_state: PyTree, step: Variables, gathered: Gathered) -> Common:
        before = Common(*shared_state)
        states = *before.corrections, before.shared
        *terms, shared = (
            c if part is None or part.follow is None else part.follow(c, step, gathered)
            for part, c in zip((*self.corrections, self.shared), states, strict=True)
        )
        return before._replace(corrections=tuple(terms), shared=shared)


def _corrections(given: Sequence[Correction]) -> tuple[Correction, ...]:
    if not isinstance(given, Sequence) or not all(isinstance(d, Correction) for d in given):
        raise ValueError(
            f"corrections must be a sequence of Correction, such as (scaffold(),), got {given!r}"
        )
    return tuple(given)


def _transforms(given: Sequence[Transform]) -> tuple[Transform, ...]:
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise ValueError(f"transforms must be a sequence of functions, got {given!r}")
    return tuple(given)
