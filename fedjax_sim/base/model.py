"""Models, losses and objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.parts import Part

if TYPE_CHECKING:
    from fedjax_sim.base.data import Batch, ClientView


class Variables(NamedTuple):
    """A model: trainable ``params`` and ``state`` (BatchNorm statistics and the like)."""

    params: PyTree
    state: PyTree

    def __repr__(self) -> str:
        return brief_fields(self)


class Leaves(Protocol):
    """Chooses leaves of a model."""

    def __call__(self, variables: Variables, /) -> Variables:
        """Returns a Python bool for each leaf; only names, shapes and dtypes are known."""


ModelInit: TypeAlias = Callable[[Array], Variables]
"""``(key) -> variables``: draws a model."""


class ModelApply(Protocol):
    """Evaluates a model on a minibatch."""

    def __call__(
        self,
        variables: Variables,
        x: PyTree,
        /,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        """Returns logits ``f32[B, M]``, or other outputs of the task, and the new state.

        The arguments are those of ``apply`` of a :class:`Model`.
        """


ModelFeatures: TypeAlias = Callable[..., tuple[tuple[Array, Array], PyTree]]
"""As :class:`ModelApply`, with the inputs of the head, ``[B, D]``, next to the outputs."""


class Model(NamedTuple):
    """Pure functions; see :mod:`fedjax_sim.models` for adapters.

    Attributes:
        init: ``(key) -> variables``, draws the variables.
        apply: ``(variables, x [B, *feature], *, train, mask=None, key=None) -> (outputs, state)``:
            the logits ``f32[B, M]``, or other outputs of the task, and the new state. x may be a
            pytree of such arrays, as the samples are. ``train``: whether dropout acts and BatchNorm
            uses the statistics of the minibatch. ``mask bool[B]``: True for the real rows of a
            padded minibatch; padding must not reach the state. ``key``: for dropout.
        features: as ``apply``, with ``(outputs, features [B, D])`` in place of the outputs: the
            inputs of the head; None for a model without a head.
        head: the leaves of the last layer, whose inputs are the features; None without a head.
    """

    init: ModelInit
    apply: ModelApply
    features: ModelFeatures | None = None
    head: Leaves | None = None


class LossFn(Protocol):
    """A per-sample loss."""

    def __call__(self, outputs: Array, y: Array, /) -> Array:
        """``[B, *output]``, ``[B, *target]`` -> ``f32[B]``."""


class Context(NamedTuple):
    """The context of a local step, in addition to weights and minibatch.

    Attributes:
        received: the model w_recv as the client received it.
        client: the client: its number, its samples.
        key: the key of the step, for dropout.
        memory: the client's memory of its last visit, see :class:`Memory`; () without one.
        shared: statistics of all clients, see :class:`fedjax_sim.base.Shared`; () without.
    """

    received: Variables
    client: ClientView
    key: Array
    memory: PyTree = ()
    shared: PyTree = ()


class Objective(Protocol):
    """The objective of a client on one minibatch."""

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context, /
    ) -> tuple[Array, PyTree]:
        """Returns the scalar loss and the new state.

        Args:
            params: the weights w_k being trained.
            state: the model's other variables.
            batch: the samples.
            context: memory, shared statistics and more.
        """


class Memory(Part):
    """A client's state for its objective, kept between visits."""

    def init(self, variables: Variables, /) -> PyTree:
        """Returns the memory before the first visit, for the variables of the initial model."""
        raise NotImplementedError

    def keep(self, trained: Variables, context: Context, /) -> PyTree:
        """Returns the memory for the next visit, its ``Context.memory``."""
        raise NotImplementedError


class Companion(Part):
    """A personal model that a client trains together with the shared one; it is never sent.

    Every step also descends on the loss of the model that the client uses, with respect to the
    companion's weights; the shared model before the step is a constant. The state of the companion
    becomes the state of the model that the client uses.
    """

    def init(self, variables: Variables, /) -> Variables:
        """Returns the initial companion for the initial model; their shapes may differ."""
        raise NotImplementedError

    def used(self, own: Variables, model: Variables, /) -> Variables:
        """Returns the model that the client uses, made of the companion and the shared model."""
        raise NotImplementedError

    @property
    def objective(self) -> Objective:
        """The loss of the model that the client uses."""
        raise NotImplementedError

    @property
    def project(self) -> Callable[[PyTree], PyTree] | None:
        """Projects its weights after every step; None: no projection."""
        return None


class Accompanied(NamedTuple):
    """The state of a client's :class:`Companion`.

    Attributes:
        own: the companion.
    """

    own: Variables
