"""Personal models: the received model, a fine-tuned one, or a model that the client keeps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Accompanied,
    Array,
    ClientView,
    Companion,
    Context,
    Correction,
    Done,
    Leaves,
    LocalUpdate,
    Need,
    NonNegative,
    Objective,
    Part,
    PyTree,
    Share,
    Survey,
    Trained,
    Variables,
    Wrapper,
)
from fedjax_sim.engine import tree


class as_received(Part):
    """The model from which the client would start; with several at the server, its choice."""

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        return received


class fine_tuned(Part):
    """The model from which the client would start, trained on the client's own samples.

    Args:
        local: the local update that trains it, as at a client's first visit; no state is kept.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1910.10252>.
    """

    local: LocalUpdate

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        start = self.local.client_state(received), self.local.shared_state(received)
        return self.local.train(key, received, client, *start).variables


class Stored(NamedTuple):
    """A client's state of :class:`fedjax_sim.local.ditto`.

    Attributes:
        own: v_k.
        inner: its state of the wrapped local update.
    """

    own: Variables
    inner: PyTree


class ditto(Wrapper):
    r"""A local update that also trains a personal model, which is pulled towards the shared one.

    .. math:: \min_{v_k} h_k(v_k; w_t) = F_k(v_k) + \frac{\lambda}{2} \lVert v_k - w_t \rVert^2

    At each visit v_k continues from its last value, towards the w_t that the client has just
    received, on the minibatches of w_k; w_k is trained, sent and reported as if there were no v_k.
    The first v_k is the initial server model; v_k never leaves the client, which keeps one more
    model. The optimiser, the memory and the shared state of v_k, such as drawn numbers of steps,
    are reset at each visit, and the corrections of local's gradients do not apply to it.

    Args:
        local: trains w_k.
        lam: λ, the pull towards the shared model; 0 trains v_k alone.

    Source: Li et al. 2021 <https://arxiv.org/abs/2012.04221>, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import empirical_risk, local_sgd, models
        >>> model = models.logistic((4,), 2)
        >>> local = ditto(local_sgd(empirical_risk(model), optax.sgd(0.1)), lam=0.1)
        >>> client = ClientView(jnp.ones((5, 4)), jnp.zeros(5, jnp.int32), jnp.arange(5),
        ...                     jnp.int32(0), jnp.int32(5), 5)
        >>> w = model.init(jax.random.key(0))
        >>> trained = local.train(jax.random.key(1), w, client, local.client_state(w), ((), ()))
        >>> own = trained.client_state.own
        >>> jax.tree.map(jnp.shape, own.params)["Dense_0"]["Dense_0"]["kernel"]
        (4, 2)
    """

    lam: NonNegative

    @functools.cached_property
    def _solver(self) -> LocalUpdate:
        alone = self.local.change(corrections=None)
        return alone.change(corrections=(_towards_received(self.lam),))

    @property
    def survey(self) -> Survey | None:
        return self.local.survey and self.local.survey.inside(lambda kept: kept.inner)

    def client_state(self, variables: Variables) -> Stored:
        return Stored(variables, self.local.client_state(variables))

    def train(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: Stored,
        shared_state: PyTree,
    ) -> Trained:
        trained = self.local.train(key, variables, client, client_state.inner, shared_state)
        # The correction pulls towards the model that its state is made from: the received one.
        start = self._solver.client_state(variables), self._solver.shared_state(variables)
        moved = self._solver.train(key, client_state.own, client, *start).variables
        return trained._replace(client_state=Stored(moved, trained.client_state))


class stored(Part):
    """The personal model of :class:`fedjax_sim.local.ditto` after the client's last visit."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (keeping(Stored, "a model of each client's own", "ditto(local, lam)"),)

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        (kept,) = kept_of(Stored, client_state)
        own: Variables = kept.own
        return own


class Interpolation(NamedTuple):
    """The weights of the companion of :func:`interpolated`.

    Attributes:
        v: v_k.
        alpha: ``f32[]``, α_k; None if it is not learned.
    """

    v: PyTree
    alpha: Array | None


class interpolated(Companion):
    r"""A personal model interpolated between shared weights and the client's own (APFL).

    .. math:: \bar v_k = \alpha_k v_k + (1 - \alpha_k) w_k, \qquad
              v_k \leftarrow v_k - \eta \alpha_k \nabla F_b(\bar v_k)

    v_k starts as the initial model and stays with the client; BatchNorm statistics belong to v̄_k.
    If α_k is learned, every step also takes the optimiser's step on it and clips it to [0, 1]:

    .. math:: \alpha_k \leftarrow \alpha_k - \eta \langle v_k - w_k, \nabla F_b(\bar v_k) \rangle

    The authors' code takes this step once per visit, with the mean of the gradients at v_k and at
    w_k plus 0.02 α_k.

    Args:
        objective: F_b.
        alpha: α, in [0, 1], or the first α_k; 0 is the shared model, 1 the client's own model.
        learned: whether every client learns its α_k.

    Source: Deng et al. 2020 <https://arxiv.org/abs/2003.13461>, Algorithm 1; Haddadpour et al. 2020
    <https://github.com/MLOPTPSU/FedTorch>, the authors' code.
    """

    objective: Objective
    alpha: Share = 0.5
    _: dataclasses.KW_ONLY
    learned: bool = False

    def init(self, variables: Variables) -> Variables:
        first = jnp.asarray(self.alpha, jnp.float32) if self.learned else None
        return variables._replace(params=Interpolation(variables.params, first))

    def used(self, own: Variables, model: Variables) -> Variables:
        share = own.params.alpha if self.learned else self.alpha
        return Variables(tree.interpolate(model.params, own.params.v, share), own.state)

    @property
    def project(self) -> Callable[[PyTree], PyTree] | None:
        return _clip_alpha if self.learned else None


def _clip_alpha(params: Interpolation) -> Interpolation:
    return params._replace(alpha=jnp.clip(params.alpha, 0, 1))


class added(Companion):
    r"""Weights that a client adds to some weights of the shared model (FedRoD's personal head).

    .. math:: h_k \leftarrow h_k - \eta \nabla F_b(w_k + h_k)

    For a last dense layer this is the sum of the logits of two heads. h_k starts at 0, so a client
    that never trained uses the shared model; BatchNorm statistics belong to the shared model.

    Args:
        objective: F_b.
        leaves: the weights to which it adds, see :mod:`fedjax_sim.leaves`.

    Source: Chen and Chao 2022 <https://arxiv.org/abs/2107.00778>, section 4.
    """

    objective: Objective
    leaves: Leaves

    def init(self, variables: Variables) -> Variables:
        zeros = jax.tree.map(jnp.zeros_like, variables.params)
        return variables._replace(params=tree.only(self.leaves(variables).params, zeros))

    def used(self, own: Variables, model: Variables) -> Variables:
        zeros = jax.tree.map(jnp.zeros_like, model.params)
        return model._replace(params=tree.sum_of(model.params, tree.filled(own.params, zeros)))


class accompanied(Part):
    """The model that a client with a companion uses, given the model that it would receive.

    Args:
        companion: the companion given to ``local.change(companion=...)``.
    """

    companion: Companion

    @property
    def needs(self) -> tuple[Need, ...]:
        return (keeping(Accompanied, "one companion", "local.change(companion=...)"),)

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        (kept,) = kept_of(Accompanied, client_state)
        return self.companion.used(kept.own, received)


def keeping(kind: type, what: str, instead: str) -> Need:
    """Returns the need of a local update whose clients keep exactly one state of this class."""

    def met(parts: Any) -> bool:
        one = Variables({"w": jax.ShapeDtypeStruct((1,), jnp.float32)}, {})
        try:
            kept = jax.eval_shape(parts.local.client_state, one)
        except Exception:  # it looks for names of leaves: the state is checked when it is read
            return True
        return len(kept_of(kind, kept)) == 1

    return Need("local", what, met, instead)


def kept_of(kind: type, client_state: PyTree) -> list[Any]:
    """Returns the states of a class in a client's state; wrappers may nest them."""

    def is_kept(part: PyTree) -> bool:
        return isinstance(part, kind)

    return [part for part in jax.tree.leaves(client_state, is_leaf=is_kept) if is_kept(part)]


class _towards_received(Correction):
    """The pull λ (v - w) towards the received model w, from which v's state was made."""

    lam: float

    reads_samples = False

    def client_state(self, params: PyTree) -> PyTree:
        return params

    def direction(
        self, gradient: PyTree, params: PyTree, context: Context, own: PyTree, common: PyTree
    ) -> PyTree:
        return jax.tree.map(
            lambda g, v, w: g + jnp.asarray(self.lam, v.dtype) * (v - w), gradient, params, own
        )

    def finish(
        self, params: PyTree, context: Context, own: PyTree, common: PyTree, done: Done
    ) -> tuple[PyTree, PyTree]:
        return own, ()
