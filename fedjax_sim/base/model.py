"""Models, their losses, and what a client minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree

if TYPE_CHECKING:
    from fedjax_sim.base.data import Batch


class Variables(NamedTuple):
    """A model: trainable ``params`` and ``state`` (BatchNorm statistics and the like)."""

    params: PyTree
    state: PyTree


class ModelInit(Protocol):
    """Draws a model."""

    def __call__(self, key: Array, /) -> Variables:
        """Returns fresh variables."""


class ModelApply(Protocol):
    """Evaluates a model on a minibatch."""

    def __call__(
        self,
        variables: Variables,
        x: Array,
        /,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        """Returns logits ``f32[B, M]`` and the new state.

        Args:
            variables: the model.
            x: ``[B, *feature]``.
            train: whether dropout acts and BatchNorm uses the statistics of the minibatch.
            mask: ``bool[B]``, True for the real rows of a padded minibatch; padding must not reach
                the state. None: all are real.
            key: for dropout.
        """


class Model(NamedTuple):
    """A pair of pure functions; see :mod:`fedjax_sim.models` for adapters.

    Attributes:
        init: draws the variables.
        apply: evaluates the model.
    """

    init: ModelInit
    apply: ModelApply


class LossFn(Protocol):
    """A per-sample loss."""

    def __call__(self, logits: Array, labels: Array, /) -> Array:
        """``f32[B, M]``, ``int32[B]`` -> ``f32[B]``."""


class Objective(Protocol):
    """What a client minimises on one minibatch."""

    def __call__(
        self, params: PyTree, state: PyTree, received: PyTree, batch: Batch, key: Array, /
    ) -> tuple[Array, PyTree]:
        """Returns the scalar loss and the new state.

        Args:
            params: the weights w_k being trained.
            state: the model's other variables.
            received: w_recv, the weights as this client received them.
            batch: the samples.
            key: for dropout.
        """
