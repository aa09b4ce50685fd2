"""Models, their losses, and what a client minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown

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
        """Returns logits ``f32[B, M]``, or other outputs of the task, and the new state.

        Args:
            variables: the model.
            x: ``[B, *feature]``.
            train: whether dropout acts and BatchNorm uses the statistics of the minibatch.
            mask: ``bool[B]``, True for the real rows of a padded minibatch; padding must not reach
                the state. None: all are real.
            key: for dropout.
        """


class ModelFeatures(Protocol):
    """Evaluates a model on a minibatch, and shows what its head sees."""

    def __call__(
        self,
        variables: Variables,
        x: Array,
        /,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[tuple[Array, Array], PyTree]:
        """Returns logits ``f32[B, M]`` with features ``[B, D]``, and the new state.

        The arguments are those of :class:`ModelApply`, of whose results the others are.
        """


class Model(NamedTuple):
    """Pure functions; see :mod:`fedjax_sim.models` for adapters.

    Attributes:
        init: draws the variables.
        apply: evaluates the model.
        features: the same, with the inputs of its head; None if there is no such thing.
        head: the leaves of its last layer, whose inputs are the features; None likewise.
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
    """What a client knows in a step besides its weights and the minibatch.

    Attributes:
        received: the model w_recv as the client received it.
        client: the client: its number, its samples.
        key: the step's own, for dropout.
        memory: what it remembers of its last visit, see :class:`Memory`; () for nothing.
        shared: what all clients told the server, see :class:`fedjax_sim.base.Shared`; or ().
    """

    received: Variables
    client: ClientView
    key: Array
    memory: PyTree = ()
    shared: PyTree = ()


class Objective(Protocol):
    """What a client minimises on one minibatch."""

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context, /
    ) -> tuple[Array, PyTree]:
        """Returns the scalar loss and the new state.

        Args:
            params: the weights w_k being trained.
            state: the model's other variables.
            batch: the samples.
            context: what else the client knows.
        """


class MemoryInit(Protocol):
    """What a client remembers before its first visit."""

    def __call__(self, variables: Variables, /) -> PyTree:
        """``variables`` are those of the initial model."""


class MemoryKeep(Protocol):
    """What a client remembers of a visit."""

    def __call__(self, trained: Variables, context: Context, /) -> PyTree:
        """Returns what the next visit finds in ``Context.memory``."""


class Memory(NamedTuple):
    """What a client remembers from visit to visit, for its objective.

    Attributes:
        init: before the first visit.
        keep: of a visit.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: MemoryInit
    keep: MemoryKeep
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class CompanionInit(Protocol):
    """A companion before a client's first visit."""

    def __call__(self, variables: Variables, /) -> Variables:
        """``variables`` are those of the initial model; what is returned may have any shapes."""


class CompanionUsed(Protocol):
    """The model that a client with a companion uses."""

    def __call__(self, own: Variables, model: Variables, /) -> Variables:
        """Returns a model, of the companion ``own`` and of ``model`` as it is or as it trains."""


class CompanionProject(Protocol):
    """Where the weights of a companion may be."""

    def __call__(self, params: PyTree, /) -> PyTree:
        """Returns weights that are allowed, near those that a step has led to."""


class Companion(NamedTuple):
    """What a client trains for itself beside the model, in the same steps; it does not travel.

    In every step its weights descend by the loss of the model that the client uses, in which the
    trained model, as it was before the step, is a constant; its state becomes that model's.

    Attributes:
        init: before the first visit.
        used: the model that the client uses, made of both.
        objective: the loss of that model.
        project: of the weights, after every step; None: they may be anywhere.
        origin: the call that made it.
    """

    init: CompanionInit
    used: CompanionUsed
    objective: Objective
    project: CompanionProject | None = None
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class Accompanied(NamedTuple):
    """What a client keeps of its :class:`Companion`.

    Attributes:
        own: the companion.
    """

    own: Variables
