"""Where a local update starts: between the model that a client receives and its own last one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Context,
    Leaves,
    LocalUpdate,
    Objective,
    Personal,
    PyTree,
    Survey,
    Trained,
    Variables,
    Wrapper,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import WHOLE_MODEL
from fedjax_sim.engine.streams import Client, stream
from fedjax_sim.personal._models import keeping, kept_of


class Mixed(NamedTuple):
    """A client's state of :class:`adaptive_start`.

    Attributes:
        own: θ_k, the mixed leaves at the end of its last visit; None for the other leaves.
        share: W_k, of the same shapes.
        inner: its state of the wrapped local update.
    """

    own: PyTree
    share: PyTree
    inner: PyTree


class adaptive_start(Wrapper):
    r"""A local update that starts between the received leaves and the client's own last ones.

    .. math:: \hat w = \theta_k + W_k \odot (w_{recv} - \theta_k), \qquad
              W_k \leftarrow \bigl[\, W_k - \eta_W \nabla_W F_b(\hat w) \,\bigr]_0^1

    At each visit the shares W_k first take an epoch of such steps, on a random contiguous part of
    the client's samples in their stored order; then the model trains from ŵ. The shares start at 1
    and stay with the client, as do its last leaves θ_k, which start as the initial model's: it
    keeps those leaves twice. All other leaves are the received ones. At a client's first visit the
    authors repeat the epoch until the loss hardly changes. For ``local``, ŵ is the received model.

    Args:
        local: trains the model; the shares use its batch size.
        objective: F_b of the shares.
        leaves: the mixed leaves, see :mod:`fedjax_sim.leaves`.
        mix_lr: η_W.
        mix_share: the fraction of the samples, at least one sample.

    Raises:
        ValueError: if mix_lr is negative, or mix_share not in (0, 1].

    Source: Zhang et al. 2023 <https://arxiv.org/abs/2212.01197>, Algorithm 1; Zhang 2023
    <https://github.com/TsingZ0/FedALA>, the authors' code.
    """

    objective: Objective
    leaves: Leaves
    _: dataclasses.KW_ONLY
    mix_lr: float = 1.0
    mix_share: float = 0.8

    moves_start = True

    def __post_init__(self) -> None:
        _ = self._mix  # checks the settings

    @functools.cached_property
    def _mix(self) -> Callable[[Array, Variables, ClientView, Mixed], tuple[Variables, PyTree]]:
        return _mixing(self.local, self.objective, self.leaves, self.mix_lr, self.mix_share)

    @property
    def survey(self) -> Survey | None:
        return self.local.survey and self.local.survey.inside(lambda kept: kept.inner)

    def _chosen(self, variables: Variables) -> PyTree:
        return tree.only(self.leaves(variables).params, variables.params)

    def client_state(self, variables: Variables) -> Mixed:
        own = self._chosen(variables)
        return Mixed(own, jax.tree.map(jnp.ones_like, own), self.local.client_state(variables))

    def train(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: Mixed,
        shared_state: PyTree,
    ) -> Trained:
        start, share = self._mix(key, variables, client, client_state)
        trained = self.local.train(key, start, client, client_state.inner, shared_state)
        kept = Mixed(self._chosen(trained.variables), share, trained.client_state)
        return trained._replace(client_state=kept)


@part
def adaptively_mixed(
    local: LocalUpdate,
    objective: Objective,
    leaves: Leaves,
    *,
    mix_lr: float = 1.0,
    mix_share: float = 0.8,
) -> Personal:
    """Where a client of :func:`adaptive_start` would start now; nothing of it is kept.

    Needs the whole model to travel.

    Args:
        local: as :func:`adaptive_start` was given it, like all others.
        objective: F_b of the shares.
        leaves: those that are mixed.
        mix_lr: η_W.
        mix_share: the part of the samples.

    Returns:
        The personal model.

    Source: Zhang et al. 2023 <https://arxiv.org/abs/2212.01197>, Algorithm 1.
    """
    mixed = _mixing(local, objective, leaves, mix_lr, mix_share)

    def start(
        key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        found = kept_of(Mixed, client_state)
        if len(found) != 1:
            raise ValueError(
                f"adaptively_mixed() needs a local update with one adaptive_start, got {len(found)}"
            )
        return mixed(key, received, client, found[0])[0]

    # A leaf that stays with its client would be mixed with itself.
    mixing = keeping(Mixed, "one adaptive start", "adaptive_start(local, ...)")
    start.needs = (WHOLE_MODEL, mixing)  # type: ignore[attr-defined]
    return start


def _mixing(
    local: LocalUpdate, objective: Objective, leaves: Leaves, mix_lr: float, mix_share: float
) -> Callable[[Array, Variables, ClientView, Mixed], tuple[Variables, PyTree]]:
    """``(key, received, client, kept) -> (ŵ, W_k)``."""
    if concrete(mix_lr) and not mix_lr >= 0:
        raise ValueError(f"mix_lr must be at least 0, got {mix_lr}")
    if not 0 < mix_share <= 1:
        raise ValueError(f"mix_share must be in (0, 1], got {mix_share}")
    learner = local.change(
        optimizer=_boxed(mix_lr),
        epochs=1.0,
        max_steps=None,
        optimizer_state="reset",
        corrections=None,
        memory=None,
        companion=None,
        trained=None,
        inexactness=None,
        until=None,
        rate_by_round=None,
        shared=None,
    )

    def mixed(
        key: Array, received: Variables, client: ClientView, kept: Mixed
    ) -> tuple[Variables, PyTree]:
        theirs = tree.only(leaves(received).params, received.params)

        def between(share: PyTree) -> PyTree:
            some = jax.tree.map(lambda o, w, s: o + s * (w - o), kept.own, theirs, share)
            return tree.filled(some, received.params)

        def risk(
            share: PyTree, state: PyTree, batch: Batch, context: Context
        ) -> tuple[Array, PyTree]:
            context = context._replace(received=received)
            return objective(between(share), state, batch, context)

        own_key = stream(key, Client.MIXING)
        some = _stretch(own_key, client, mix_share)
        start = Variables(kept.share, received.state)
        update = learner.change(objective=risk)
        states = update.client_state(start), update.shared_state(start)
        share = update.train(own_key, start, some, *states).variables.params
        return received._replace(params=between(share)), share

    return mixed


def _stretch(key: Array, client: ClientView, share: float) -> ClientView:
    """A part of a client's samples that lies together in their stored order."""
    wanted = jnp.floor(share * client.size.astype(jnp.float32)).astype(jnp.int32)
    count = jnp.minimum(jnp.maximum(wanted, 1), client.size)
    first = jax.random.randint(key, (), 0, client.size - count + 1, jnp.int32)
    return dataclasses.replace(client, start=client.start + first, size=count, budget=None)


def _boxed(rate: float) -> optax.GradientTransformation:
    """SGD whose weights stay in [0, 1]."""

    def update(grads: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Any]:
        steps = tree.scale(rate, grads)
        return jax.tree.map(lambda w, s: jnp.clip(w - s, 0, 1) - w, params, steps), state

    return optax.GradientTransformation(lambda params: (), update)
