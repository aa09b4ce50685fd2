"""``--initial`` and ``--lora``: the initial weights of a run, and low-rank adapters."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax

from fedjax_sim.base import LocalUpdate, Model, Server, shown
from fedjax_sim.cli.flags import flag, naming
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import WHOLE_MODEL
from fedjax_sim.models import load_weights, lora, starting_from, with_frozen
from fedjax_sim.models.leaves import named
from fedjax_sim.plan.exchange import split
from fedjax_sim.round import Algorithm
from fedjax_sim.server import exact_lora


class _Variant(NamedTuple):
    """The leaves of an adapted model that train, stay or are frozen; the server."""

    trained: tuple[str, ...]
    own: tuple[str, ...]
    frozen: tuple[str, ...]
    server: Callable[..., Server] | None = None


VARIANTS = {
    "fedit": _Variant(("A", "B"), (), ("trunk",)),
    "ffa": _Variant(("B",), (), ("trunk", "A")),
    "fedsa": _Variant(("A", "B"), ("B",), ("trunk",)),
    "fedex": _Variant(("A", "B"), (), ("trunk",), exact_lora),
    "flora": _Variant(("A", "B"), (), ("trunk",), functools.partial(exact_lora, True)),
}


Lora = Literal["fedit", "ffa", "fedsa", "fedex", "flora"]


@dataclasses.dataclass(frozen=True)
class Weights(Group):
    """Initial weights, and low-rank adapters."""

    title: ClassVar[str] = "initial weights and adapters, for all algorithms"

    initial: str | None = setting(
        None,
        ".npz file of fedjax_sim.save_weights with the initial weights for all seeds",
        shown="random weights, drawn by the seed",
        metavar="FILE",
    )
    lora: int | None = setting(
        None,
        "rank of adapters A B, which are added to all matrices and kernels of the model; the "
        "model itself is frozen: give it trained weights by --initial",
        shown="no adapters",
        at_least=1,
    )
    lora_alpha: float | None = setting(
        None,
        "scale of --lora: A B is multiplied by X divided by the rank",
        shown="the rank",
        above=0,
    )
    lora_variant: Lora | None = setting(
        None,
        "variant of --lora. fedit: A and B are trained and shared; ffa: A is fixed; fedsa: A "
        "is shared, and each client keeps its own B; fedex: as fedit, but the server adds the "
        "missing part of the mean of A B to the model; flora: the server adds the mean of A B to "
        "the model, and each round begins with new adapters",
        shown="fedit",
    )

    def __post_init__(self) -> None:
        """Rejects settings of adapters without adapters."""
        if self.lora is not None:
            self._default("lora_alpha", float(self.lora))
            self._default("lora_variant", "fedit")
            return
        for name in ("lora_alpha", "lora_variant"):
            if getattr(self, name) is not None:
                raise ValueError(f"{flag(name)} is for --lora")


def started(model: Model, weights: Weights) -> Model:
    """Returns the model with the weights of ``--initial``, if given."""
    if weights.initial is None:
        return model
    with naming(f"--initial {weights.initial}", (OSError, ValueError)):
        return starting_from(model, load_weights(weights.initial, model))


def adapted(model: Model, weights: Weights) -> Model:
    """Returns the model with the adapters of ``--lora``, if given."""
    if weights.lora is None:
        return model
    made = lora(model, weights.lora, alpha=weights.lora_alpha)
    with naming(f"--lora {weights.lora}"):
        jax.eval_shape(made.init, jax.eval_shape(lambda: jax.random.key(0)))
    # Companions and adapted objectives move whatever has a gradient.
    return with_frozen(made, named(*_variant(weights).frozen))


def trunk_bytes(model: Model, weights: Weights) -> int:
    """Returns the bytes of a model, without adapters."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    trunk = shapes.params if weights.lora is None else shapes.params["trunk"]
    return tree.num_bytes(shapes._replace(params=trunk))


def local_of(local: LocalUpdate, weights: Weights) -> LocalUpdate:
    """Returns the local update that trains only the adapters, if any."""
    if weights.lora is None:
        return local
    return local.change(trained=named(*_variant(weights).trained))


def exchanged(algorithm: Algorithm, weights: Weights) -> Algorithm:
    """Returns the algorithm that exchanges only the adapters, if any."""
    if weights.lora is None:
        return algorithm
    if not WHOLE_MODEL.met(algorithm.parts):
        raise ValueError(
            f"--lora {weights.lora} is for methods whose whole model travels, not for exchange "
            f"{algorithm.parts.exchange}"
        )
    variant = _variant(weights)
    own = named(*variant.own) if variant.own else None
    parts: dict[str, Any] = {"exchange": split(own, named(*variant.frozen))}
    with naming(f"--lora {weights.lora}"):
        if variant.server is not None:
            if not algorithm.parts.server.replaces:
                raise ValueError(
                    f"--lora-variant {weights.lora_variant} is for methods whose server only "
                    f"averages, not for server {shown(algorithm.parts.server)}"
                )
            parts["server"] = variant.server(alpha=weights.lora_alpha)
        return algorithm.replace(**parts)


def describe(weights: Weights, model: Model) -> str:
    """Returns the line about the adapters; "" for none."""
    if weights.lora is None:
        return ""
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    kept = tree.only(named(*_variant(weights).trained)(shapes), shapes)
    tunes, total = (sum(leaf.size for leaf in jax.tree.leaves(of)) for of in (kept, shapes))
    trunk = (
        "as the model begins: give it trained weights by --initial FILE"
        if weights.initial is None
        else f"that of {weights.initial}"
    )
    return f"\nlora: {tunes:,} of {total:,} weights train; the frozen trunk is {trunk}"


def fingerprint(file: str | None) -> str | None:
    """Returns the SHA-256 of a file."""
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _variant(weights: Weights) -> _Variant:
    return VARIANTS[weights.lora_variant or "fedit"]
