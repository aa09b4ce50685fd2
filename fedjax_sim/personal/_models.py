"""The model that a client itself uses: the one it is sent, a fine-tuned one, one of its own."""

from __future__ import annotations

import functools
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


@part
def as_received() -> Personal:
    """The model that the client would start from; if the server has several, the client's choice.

    Returns:
        The personal model.
    """
    return lambda key, received, client, client_state: received


@part
def fine_tuned(local: LocalUpdate) -> Personal:
    """The model that the client would start from, trained on the client's own samples.

    Args:
        local: trains it, as at a client's first visit; nothing of that is kept.

    Returns:
        The personal model.

    Source: Wang et al. 2019 <https://arxiv.org/abs/1910.10252>.
    """

    def tune(
        key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        start = local.client_state(received), local.shared_state(received)
        return local.train(key, received, client, *start).variables

    return tune


class Stored(NamedTuple):
    """A client's state of :class:`ditto`.

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
    received; w_k is trained, sent and reported as if there were no v_k. The first v_k is the
    initial server model; v_k never leaves the client, which keeps a model for it. The corrections
    of local's gradients are for w_k: they are no part of h_k and do not act on v_k.

    Args:
        local: trains w_k.
        lam: λ, the pull towards the shared model; 0 trains v_k alone.
        own: trains v_k, with its own corrections, if any; None: like w_k, on the same minibatches,
          without w_k's corrections. Its optimiser starts afresh at each visit.

    Raises:
        ValueError: if lam is negative.

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

    lam: float
    own: LocalUpdate | None = None

    def __post_init__(self) -> None:
        if concrete(self.lam) and not self.lam >= 0:
            raise ValueError(f"lam must be at least 0, got {self.lam}")
        _ = self._solver  # checks the settings of own

    @functools.cached_property
    def _solver(self) -> LocalUpdate:
        solver = self.own or self.local.change(corrections=None)
        return solver.change(corrections=(_towards_received(self.lam),))

    def change(self, **settings: Any) -> ditto:
        """Returns it with other settings of ``local`` and ``own``."""
        own = None if self.own is None else self.own.change(**settings)
        return self.replace(local=self.local.change(**settings), own=own)

    @property
    def peers(self) -> bool:
        return self.local.peers or self._solver.peers

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


@part
def stored() -> Personal:
    """The client's own model of :func:`ditto`, as its last visit left it.

    Returns:
        The personal model.
    """

    def own(key: Array, received: Variables, client: ClientView, client_state: PyTree) -> Variables:
        found = kept_of(Stored, client_state)
        if not found:
            raise ValueError("stored() needs a local update with a personal model; see ditto")
        mine: Variables = found[0].own
        return mine

    needs = (keeping(Stored, "a model of each client's own", "ditto(local, lam)"),)
    own.needs = needs  # type: ignore[attr-defined]
    return own


class Interpolation(NamedTuple):
    """The weights of an :func:`interpolated` model beside the shared one's.

    Attributes:
        v: v_k.
        alpha: ``f32[]``, α_k; None if it is not learned.
    """

    v: PyTree
    alpha: Array | None


@part
def interpolated(objective: Objective, alpha: float = 0.5, *, learned: bool = False) -> Companion:
    r"""Weights between the shared model's and the client's own: APFL.

    .. math:: \bar v_k = \alpha_k v_k + (1 - \alpha_k) w_k, \qquad
              v_k \leftarrow v_k - \eta \alpha_k \nabla F_b(\bar v_k)

    v_k starts as the initial model and stays with the client; statistics of BatchNorm are those of
    v̄_k. If α_k is learned, every step takes the optimiser's step on it too, and cuts it to [0, 1]:

    .. math:: \alpha_k \leftarrow \alpha_k - \eta \langle v_k - w_k, \nabla F_b(\bar v_k) \rangle

    The authors' code takes that step once a visit, by a mean of the gradients at v_k and at w_k, to
    which it adds 0.02 α_k.

    Args:
        objective: F_b.
        alpha: α, in [0, 1], or the first α_k; 0 is the shared model, 1 a model of the client alone.
        learned: whether every client learns its α_k.

    Returns:
        A companion, as large as the model.

    Raises:
        ValueError: if alpha is out of range.

    Source: Deng et al. 2020 <https://arxiv.org/abs/2003.13461>, Algorithm 1; Haddadpour et al. 2020
    <https://github.com/MLOPTPSU/FedTorch>, the authors' code.
    """
    if concrete(alpha) and not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")

    def init(variables: Variables) -> Variables:
        first = jnp.asarray(alpha, jnp.float32) if learned else None
        return variables._replace(params=Interpolation(variables.params, first))

    def used(own: Variables, model: Variables) -> Variables:
        share = own.params.alpha if learned else alpha
        return Variables(tree.interpolate(model.params, own.params.v, share), own.state)

    def project(params: Interpolation) -> Interpolation:
        return params._replace(alpha=jnp.clip(params.alpha, 0, 1))

    return Companion(init, used, objective, project if learned else None)


@part
def added(objective: Objective, leaves: Leaves) -> Companion:
    r"""Weights that a client adds to some of the shared model's: the personal head of FedRoD.

    .. math:: h_k \leftarrow h_k - \eta \nabla F_b(w_k + h_k)

    Of a last dense layer this is the sum of the logits of two heads. h_k starts at 0, so that a
    client that never trained uses the shared model; statistics of BatchNorm are the shared model's.

    Args:
        objective: F_b.
        leaves: the weights to which it adds, see :mod:`fedjax_sim.leaves`.

    Returns:
        A companion, as large as those leaves.

    Source: Chen and Chao 2022 <https://arxiv.org/abs/2107.00778>, section 4.
    """

    def init(variables: Variables) -> Variables:
        zeros = jax.tree.map(jnp.zeros_like, variables.params)
        return variables._replace(params=tree.only(leaves(variables).params, zeros))

    def used(own: Variables, model: Variables) -> Variables:
        zeros = jax.tree.map(jnp.zeros_like, model.params)
        return model._replace(params=tree.sum_of(model.params, tree.filled(own.params, zeros)))

    return Companion(init, used, objective)


@part
def accompanied(companion: Companion) -> Personal:
    """The model that a client with a companion uses, made of the model that it is sent.

    Args:
        companion: as ``local.change(companion=...)`` was given it.

    Returns:
        The personal model.
    """

    def used(
        key: Array, received: Variables, client: ClientView, client_state: PyTree
    ) -> Variables:
        found = kept_of(Accompanied, client_state)
        if len(found) != 1:
            raise ValueError(
                f"accompanied() needs a local update with one companion, got {len(found)}: see "
                "local.change(companion=...)"
            )
        return companion.used(found[0].own, received)

    needs = (keeping(Accompanied, "one companion", "local.change(companion=...)"),)
    used.needs = needs  # type: ignore[attr-defined]
    return used


def keeping(kind: type, what: str, instead: str) -> Need:
    """A local update whose clients keep one of a kind, seen on a model of one weight."""

    def met(parts: Any) -> bool:
        one = Variables({"w": jax.ShapeDtypeStruct((1,), jnp.float32)}, {})
        try:
            kept = jax.eval_shape(parts.local.client_state, one)
        except Exception:  # it looks for names of leaves: what is kept is known when it is read
            return True
        return len(kept_of(kind, kept)) == 1

    return Need("local", what, met, instead)


def kept_of(kind: type, client_state: PyTree) -> list[Any]:
    """What of this kind a client keeps; wrappers may have nested it deeper."""

    def is_kept(part: PyTree) -> bool:
        return isinstance(part, kind)

    return [part for part in jax.tree.leaves(client_state, is_leaf=is_kept) if is_kept(part)]


class _towards_received(Correction):
    """The pull λ (v - w) towards the received model w, from which v's state was made."""

    lam: float

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
