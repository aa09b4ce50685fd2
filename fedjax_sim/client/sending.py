"""Changes of what clients send: attacks, clipping, noise and compression, applied in order.

An attack comes first: a clip then bounds the forged update, and a code encodes it. Noise comes
before a code.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.attacks import (
    alie,
    fang_krum,
    fang_trim,
    gaussian,
    ipm,
    mimic,
    optimised,
    scaling,
    sign_flip,
)
from fedjax_sim.base import (
    Array,
    ClientData,
    Count,
    Need,
    Positive,
    PyTree,
    Sending,
    Sent,
    Share,
    Variables,
)
from fedjax_sim.compression import compressed, low_rank
from fedjax_sim.engine import tree
from fedjax_sim.engine.chances import inclusion
from fedjax_sim.engine.needs import NO_LOSS_READ, NOTHING_TOLD, ONE_MODEL, ONE_WITHHOLDS
from fedjax_sim.privacy import noise

__all__ = [
    "alie",
    "by_norm",
    "clip_norm",
    "compressed",
    "fang_krum",
    "fang_trim",
    "finite_only",
    "gaussian",
    "ipm",
    "low_rank",
    "mimic",
    "noise",
    "optimised",
    "relevant_only",
    "scaling",
    "sign_flip",
]


class Heading(NamedTuple):
    """The state of a client of :func:`relevant_only`.

    Attributes:
        last: the model that it received last; at the start, the initial model.
        signs: ``int8``, the signs of the last change between two received models that was not 0; 0
          before the first change.
    """

    last: PyTree
    signs: PyTree


class relevant_only(Sending):
    r"""Withholds updates whose signs agree too rarely with the server's last step (CMFL).

    .. math:: k \text{ sends if } \frac1n \sum_{i=1}^n
              \bigl[ \operatorname{sgn}(\Delta_{k,i}) = \operatorname{sgn}(\bar u_i) \bigr]
              \ge v

    over the n parameters. :math:`\bar u` is the difference between the model that the client
    receives now and the one that it received at its last visit, so that nothing has to be sent for
    it. If all clients train in every round it is the last global update, as in the paper. A client
    always sends before it has seen the server model change; if the model did not change (nobody
    sent), the last change counts. A withheld update is no upload.

    The state (:class:`Heading`) takes the memory of a model and a quarter for every client.

    Args:
        relevance: v, the fraction of signs that must agree; 0 withholds nothing.

    Source: Wang, Wang, Li 2019 <https://doi.org/10.1109/ICDCS.2019.00099>.

    >>> part = relevant_only(0.6)
    >>> w = Variables(jnp.zeros(3), {})
    >>> kept = part.hear(part.init(w, None), Variables(jnp.array([1.0, -2.0, 0.5]), {}))
    >>> sends = lambda *u: part.send(None, kept, Variables(jnp.array(u), {}), (), None).present
    >>> bool(sends(0.1, -0.1, -9.0)), bool(sends(0.1, 0.1, -9.0))  # 2 of 3, 1 of 3
    (True, False)
    """

    relevance: Share

    withholds = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return (ONE_MODEL,)

    def init(self, variables: Variables, data: ClientData) -> Heading:
        none = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.int8), variables.params)
        return Heading(variables.params, none)

    def hear(self, kept: Heading, received: Variables) -> Heading:
        moved = _signs(tree.subtract(received.params, kept.last))
        return Heading(received.params, tree.select(_any(moved), moved, kept.signs))

    def send(
        self, key: Array, kept: Heading, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        same = jax.tree.map(jnp.equal, _signs(update.params), kept.signs)
        size = sum(leaf.size for leaf in jax.tree.leaves(same))
        share = sum(jnp.sum(leaf, dtype=jnp.int32) for leaf in jax.tree.leaves(same)) / size
        return Sent(update, message, kept, ~_any(kept.signs) | (share >= self.relevance))


def _signs(step: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.sign(a).astype(jnp.int8), step)


def _any(signs: PyTree) -> Array:
    """Returns whether any sign is not 0, ``bool[]``."""
    return jnp.any(jnp.stack([jnp.any(leaf) for leaf in jax.tree.leaves(signs)]))


class by_norm(Sending):
    r"""Lets each client send with a probability that grows with its update (optimal sampling).

    .. math:: k \text{ sends with } p_k = \min(1, c\, a_k \lVert \Delta_k \rVert), \quad
              \sum_{k \in U} p_k = m, \qquad
              \Delta_t = \frac{1}{\sum_{j \in U} a_j}
              \sum_{k \text{ sends}} \frac{a_k}{p_k} \Delta_k

    for the cohort U with the weights a_k. Clients send independently. The aggregate is an unbiased
    estimate of the cohort's, and no other probabilities with the sum m have a smaller variance.
    The norm is taken over the trainable parameters. A client that does not send uploads its number.

    Args:
        expected: m, the expected number of clients that send; at least the cohort's size lets all
            clients send.
        iterations: computes p in so many rounds of sums that secure aggregation can compute (AOCS);
            a client sends two numbers in each. None: exactly, from one number of each client.

    Source: Chen et al. 2022 <https://arxiv.org/abs/2010.13723>, equation 7 and Algorithms 1 and 2;
    Chen et al. 2020 <https://github.com/SamuelHorvath/FL-optimal-client-sampling>, the authors'
    code, for the weights of a cohort.

    >>> updates = Variables(jnp.array([[1.0], [9.0], [3.0]]), ())
    >>> number = jnp.arange(3)
    >>> choose = by_norm(2).choose
    >>> choose(jax.random.key(0), updates, jnp.ones(3), number, number >= 0)[1].tolist()
    [0.25, 1.0, 0.75]
    """

    expected: Positive
    iterations: Count | None = None

    withholds = True

    @property
    def numbers(self) -> int:
        return 1 + 2 * (self.iterations or 0)

    def choose(
        self, key: Array, updates: Variables, weights: Array, client: Array, sends: Array
    ) -> tuple[Array, Array]:
        scores = jnp.where(sends, weights * tree.norms(updates.params), 0)
        if self.iterations is None:
            chance = inclusion(scores, self.expected)
        else:
            chance = self._approximate(scores, sends)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client)
        coin = jax.vmap(lambda own: jax.random.uniform(own, (), jnp.float32))(keys)
        return sends & (coin < chance), chance

    def _approximate(self, scores: Array, sends: Array) -> Array:
        """Returns p of AOCS, ``f32[P]``."""

        def scaled(values: Array, below: Array, expected: Array | float) -> Array:
            """Scales the values ``below bool[P]`` to the expected sum, to at most 1 each."""
            total = tree.row_sum(jnp.where(below, values, 0))
            factor = jnp.where(total > 0, expected / jnp.where(total > 0, total, 1), 1)
            return jnp.minimum(1, factor * values)

        def again(_: Array, chance: Array) -> Array:
            below = sends & (chance < 1)
            certain = tree.row_sum((sends & ~below).astype(jnp.float32))
            return scaled(chance, below, self.expected - certain)

        first = scaled(scores, sends, self.expected)
        found: Array = jax.lax.fori_loop(0, self.iterations or 0, again, first)
        return found


class finite_only(Sending):
    r"""Skips clients whose update contains NaN or infinity.

    .. math:: S_t \leftarrow \{k \in S_t : \Delta_k \text{ is finite}\}

    A skipped client sends nothing, has no weight, and restores its state from before the visit; it
    is counted in ``Metrics.skipped`` and ``Evaluation.skipped``. The round's loss is the loss of
    the other clients; if all are skipped it is NaN, which ends the run. Put it before codes and
    clips.

    >>> update = Variables(jnp.array([3.0, jnp.nan]), ())
    >>> sent = finite_only().send(jax.random.key(0), (), update, (), jnp.int32(0))
    >>> bool(sent.present), sent.update.params.tolist()
    (False, [0.0, 0.0])
    """

    withholds = screens = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return NOTHING_TOLD, NO_LOSS_READ, ONE_WITHHOLDS

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(update)]
        present = jnp.all(jnp.stack(finite))
        nothing = jax.tree.map(jnp.zeros_like, update)  # 0 times NaN would be NaN
        return Sent(tree.select(present, update, nothing), message, kept, present)


class clip_norm(Sending):
    r"""Scales every update down to a maximum norm.

    .. math:: \Delta_k \leftarrow \min\Bigl(1, \frac{C}{\lVert \Delta_k \rVert}\Bigr) \Delta_k

    As a defence it follows an attack and acts at the receiver: no message moves a model by more
    than C, in any hop. The norm is taken over the trainable parameters; the state (BatchNorm
    statistics) is unchanged. An update without a finite norm becomes 0.

    Args:
        limit: C.

    Source: Sun et al. 2019 <https://arxiv.org/abs/1911.07963>, section 4.

    >>> update = Variables(jnp.array([3.0, 4.0]), ())
    >>> sent = clip_norm(1.0).send(jax.random.key(0), (), update, (), jnp.int32(0)).update
    >>> sent.params.round(3).tolist()
    [0.6000000238418579, 0.800000011920929]
    """

    limit: Positive

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        norm = tree.norm(update.params)
        factor = jnp.minimum(1, self.limit / norm)  # 1 for no update: C / 0 is infinite

        def clipped(delta: Array) -> Array:
            return jnp.where(jnp.isfinite(norm), factor.astype(delta.dtype) * delta, 0)

        return Sent(update._replace(params=jax.tree.map(clipped, update.params)), message, kept)
