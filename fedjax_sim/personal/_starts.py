"""Local updates that start between the received model and the client's last one (FedALA)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Context,
    Fraction,
    Leaves,
    Need,
    NonNegative,
    Objective,
    Part,
    PyTree,
    Survey,
    Trained,
    Variables,
    Wrapper,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import WHOLE_MODEL
from fedjax_sim.engine.streams import Client, stream
from fedjax_sim.personal._models import keeping, kept_of

NO_SETTINGS: dict[str, Any] = dict.fromkeys(
    ("steps", "max_steps", "corrections", "memory", "companion", "trained", "inexactness", "until",
     "rate_by_round", "rate_by_client", "batch_by_client", "shared")
) | {"half_weights": False}  # fmt: skip
"""Settings of the local update that do not apply to the shares."""


class Mixed(NamedTuple):
    """A client's state of :class:`fedjax_sim.local.adaptive_start`.

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
    and stay with the client, as do its last leaves θ_k, which start as the initial model's: a
    client keeps two copies of these leaves. All other leaves are as received. At a client's first
    visit the authors repeat the epoch until the loss hardly changes. For ``local``, ŵ is the
    received model.

    Args:
        local: trains the model; the shares use its batch size.
        objective: F_b of the shares.
        leaves: the mixed leaves, see :mod:`fedjax_sim.leaves`.
        mix_lr: η_W.
        mix_share: the fraction of the samples, at least one sample.

    Source: Zhang et al. 2023 <https://arxiv.org/abs/2212.01197>, Algorithm 1; Zhang 2023
    <https://github.com/TsingZ0/FedALA>, the authors' code.
    """

    objective: Objective
    leaves: Leaves
    _: dataclasses.KW_ONLY
    mix_lr: NonNegative = 1.0
    mix_share: Fraction = 0.8

    moves_start = True

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
        start, share = self.mixed(key, variables, client, client_state)
        trained = self.local.train(key, start, client, client_state.inner, shared_state)
        kept = Mixed(self._chosen(trained.variables), share, trained.client_state)
        return trained._replace(client_state=kept)

    def mixed(
        self, key: Array, received: Variables, client: ClientView, kept: Mixed
    ) -> tuple[Variables, PyTree]:
        """Returns ŵ and the new W_k."""
        theirs = self._chosen(received)

        def between(share: PyTree) -> PyTree:
            some = jax.tree.map(lambda o, w, s: o + s * (w - o), kept.own, theirs, share)
            return tree.filled(some, received.params)

        def risk(
            share: PyTree, state: PyTree, batch: Batch, context: Context
        ) -> tuple[Array, PyTree]:
            context = context._replace(received=received)
            return self.objective(between(share), state, batch, context)

        own_key = stream(key, Client.MIXING)
        some = _stretch(own_key, client, self.mix_share)
        start = Variables(kept.share, received.state)
        update = self.local.change(
            objective=risk,
            optimizer=_boxed(self.mix_lr),
            epochs=1.0,
            optimizer_state="reset",
            **NO_SETTINGS,
        )
        states = update.client_state(start), update.shared_state(start)
        share = update.train(own_key, start, some, *states).variables.params
        return received._replace(params=between(share)), share


class adaptively_mixed(Part):
    """The model from which FedALA would start now; the whole model must travel.

    Args:
        start: the local update of the composition.

    Source: Zhang et al. 2023 <https://arxiv.org/abs/2212.01197>.
    """

    start: adaptive_start

    @property
    def needs(self) -> tuple[Need, ...]:
        # A leaf that stays with its client would be mixed with itself.
        mixing = keeping(Mixed, "one adaptive start", "adaptive_start(local, ...)")
        return (WHOLE_MODEL, mixing)

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        (kept,) = kept_of(Mixed, client_state)
        return self.start.mixed(key, received, client, kept)[0]


def _stretch(key: Array, client: ClientView, share: float) -> ClientView:
    """Draws a contiguous block of a client's samples in their stored order."""
    wanted = jnp.floor(share * client.size.astype(jnp.float32)).astype(jnp.int32)
    count = jnp.minimum(jnp.maximum(wanted, 1), client.size)
    first = jax.random.randint(key, (), 0, client.size - count + 1, jnp.int32)
    return client.part(client.start + first, count, budget=None)


def _boxed(rate: float) -> optax.GradientTransformation:
    """Returns SGD that keeps the weights in [0, 1]."""

    def update(grads: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Any]:
        steps = tree.scale(rate, grads)
        return jax.tree.map(lambda w, s: jnp.clip(w - s, 0, 1) - w, params, steps), state

    return optax.GradientTransformation(lambda params: (), update)
