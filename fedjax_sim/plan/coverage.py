"""Which entries of a model a client has, for ``exchange.split(covers=...)``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Leaves, Model, Need, Part, PyTree, Variables
from fedjax_sim.engine.needs import (
    AS_IT_IS,
    NO_FLIGHT,
    NO_WEIGHTS_SHARED,
    NOTHING_AFTER,
    ONE_MODEL,
    PLAIN_MEAN,
    SYNCHRONOUS,
    UNCHANGED,
)
from fedjax_sim.models.leaves import head, path_of
from fedjax_sim.models.wrappers import is_lora

NOT_POLLED = Need(
    "selection",
    "clients that receive a model only to train it",
    lambda parts: parts.selection.poll is None,
    "selection=uniform()",
)
READS_THE_MEAN = Need(
    "server",
    "a server that reads nothing but the mean update and sends whole numbers",
    lambda parts: (
        not parts.server.reads_updates
        and parts.server.dual is None
        and parts.server.download_bytes is None
    ),
    "server=replace(), mix(...) or optimizer(...)",
)
COVERED = (
    NO_FLIGHT,
    SYNCHRONOUS,
    ONE_MODEL,
    NOT_POLLED,
    AS_IT_IS,
    UNCHANGED,
    PLAIN_MEAN,
    READS_THE_MEAN,
    NO_WEIGHTS_SHARED,
    NOTHING_AFTER,
)
"""The needs of an exchange by which a client has some entries of a model."""


class widths(Part):
    r"""Gives each client a narrower network: a share r of the units of every hidden layer.

    .. math:: m_k = \bigl[\, (i - s) \bmod n < \lceil r_k n \rceil \,\bigr], \qquad
              w_i \leftarrow w_i + \frac{\sum_k p_k m_{k,i} \Delta_{k,i}}{\sum_k p_k m_{k,i}}

    for the n units of a layer. All clients have all inputs and outputs of the network. A client
    trains, sends and receives the weights between the units that it has; the server averages each
    weight over the clients that have it. s is 0: the first units, as in HeteroFL. With ``rolling``,
    s is the number of the round, as in FedRolex: each unit trains as often as any other.

    Devices compute with the whole network, in which the other units are 0, so a run is not faster.
    Bytes count only the client's part; on a clock, its local steps take this part's share of the
    time of whole steps. Pooled scores evaluate the server's whole model. Layers without a narrower
    version, such as attention, are rejected.

    Args:
        model: the model that is trained, of dense and convolutional layers in sequence.
        shares: r: client k has ``shares[k % len(shares)]``.
        rolling: whether the units change from round to round.

    Raises:
        ValueError: if a share is not in (0, 1], none is 1 although the units do not change, or the
            model has no head; in the first round, if a layer's inputs are not the outputs of an
            earlier one, or the model has adapters.

    Source: Diao et al. 2021 <https://arxiv.org/abs/2010.01264>, section 3 (HeteroFL); Alam et al.
    2022 <https://arxiv.org/abs/2212.01548>, Algorithm 1 (FedRolex).

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.mlp((4,), 3, widths=(6,))
        >>> half = fs.exchange.widths(model, (1.0, 0.5))
        >>> weights = jax.eval_shape(model.init, jax.random.key(0))
        >>> has = half(weights, jnp.int32(1), jnp.int32(0)).params
        >>> has["Dense_0"]["Dense_0"]["bias"].astype(int).tolist()
        [1, 1, 1, 0, 0, 0]
        >>> has["Dense_1"]["Dense_0"]["kernel"].astype(int).sum().item()  # 3 units, 3 classes
        9
    """

    model: Model
    shares: tuple[float, ...]
    _: dataclasses.KW_ONLY
    rolling: bool = False

    def __post_init__(self) -> None:
        _check_shares(self)
        head(self.model)  # raises if it has none

    def __call__(self, variables: Variables, client: Array, round: Array) -> PyTree:
        if is_lora(variables):
            raise ValueError("widths needs a model without adapters: use exchange.ranks(shares)")

        def has(units: int) -> Array:
            place = jnp.arange(units, dtype=jnp.int32)
            if self.rolling:
                place = (place - round) % units
            return place < _counts(self.shares, units, client)

        return _masks(self.model, variables, has)


class ranks(Part):
    r"""Gives each client the first columns of A and rows of B of a model with adapters.

    .. math:: W + \frac{\alpha}{r} \sum_{i \le s_k r} a_i b_i^\top

    The server averages each column and row over the clients that have it. HetLoRA pads with zeros
    instead, weights clients by the norm of A B and lets them prune their ranks.

    Args:
        shares: s: client k has a share ``shares[k % len(shares)]`` of the rank r, at least 1.

    Raises:
        ValueError: if a share is not in (0, 1] or none is 1; in the first round, if the model is
            not one of :func:`fedjax_sim.models.lora`.

    Source: Cho et al. 2024 <https://arxiv.org/abs/2401.06432>, section 3.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.lora(fs.models.logistic((4,), 3), rank=2)
        >>> weights = jax.eval_shape(model.init, jax.random.key(0))
        >>> has = fs.exchange.ranks((1.0, 0.5))(weights, jnp.int32(1), jnp.int32(0))
        >>> has.params["A"]["Dense_0/Dense_0/kernel"].astype(int).tolist()
        [[1, 0]]
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_shares(self)

    def __call__(self, variables: Variables, client: Array, round: Array) -> PyTree:
        if not is_lora(variables):
            raise ValueError(f"{self} needs a model of fs.models.lora(model, rank)")

        def whole(a: Array) -> Array:
            return jnp.ones((1,) * a.ndim, bool)

        def has(axis: int, a: Array) -> Array:
            rank = a.shape[axis]
            some = jnp.arange(rank, dtype=jnp.int32) < _counts(self.shares, rank, client)
            return jnp.expand_dims(some, 1 - axis)

        masks = jax.tree.map(whole, variables)
        a, b = (
            jax.tree.map(functools.partial(has, axis), variables.params[part])
            for part, axis in (("A", 1), ("B", 0))
        )
        return masks._replace(params=masks.params | {"A": a, "B": b})


class depths(Part):
    r"""Gives each client a shallower network: the first of its blocks, and all other layers.

    .. math:: m_{k,i} = \bigl[\, b(i) < \lceil r_k B \rceil \,\bigr]

    for a weight i of block b(i) of B, from 0; all clients have the weights outside of the blocks.
    Blocks that a client lacks are 0, so they should be residual: the layers of a transformer and
    the blocks of a ResNet then pass on their inputs. The server averages each block over the
    clients that have it. DepthFL's exits after each block and its distillation between them are a
    network and an objective of your own, as in the guide to methods;
    :class:`fedjax_sim.terms.ordered_dropout` trains every depth to predict without exits.

    Args:
        blocks: the leaves of each block, see :mod:`fedjax_sim.leaves`, the first block first.
        shares: r: client k has a share ``shares[k % len(shares)]`` of the blocks, at least one.

    Raises:
        ValueError: if there is no block, a share is not in (0, 1] or none is 1; in the first round,
            if a leaf is in two blocks.

    Source: Kim et al. 2023 <https://openreview.net/forum?id=pf8RIZTMU58>, section 3 (DepthFL).

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.transformer((8,), 5, width=4, layers=2, heads=1)
        >>> half = fs.exchange.depths([fs.leaves.named(f"layer_{i}") for i in range(2)], (1.0, 0.5))
        >>> weights = jax.eval_shape(model.init, jax.random.key(0))
        >>> has = half(weights, jnp.int32(1), jnp.int32(0)).params
        >>> [bool(has[name]["up"]["kernel"].all()) for name in ("layer_0", "layer_1")]
        [True, False]
    """

    blocks: Sequence[Leaves]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ValueError("blocks must be leaves, such as [leaves.named('layer_0')], got none")
        _check_shares(self)

    def __call__(self, variables: Variables, client: Array, round: Array) -> PyTree:
        count = _counts(self.shares, len(self.blocks), client)

        def has(leaf: Array, *chosen: bool) -> Array:
            if sum(chosen) > 1:
                first, *_, last = (i for i, inside in enumerate(chosen) if inside)
                raise ValueError(f"blocks must have no leaf in common, got {first} and {last}")
            block = chosen.index(True) if any(chosen) else 0  # which every client has
            return jnp.expand_dims(block < count, range(leaf.ndim))

        return jax.tree.map(has, variables, *(choose(variables) for choose in self.blocks))


def _check_shares(part: widths | ranks | depths) -> None:
    object.__setattr__(part, "shares", tuple(part.shares))
    if not part.shares or not all(0 < share <= 1 for share in part.shares):
        raise ValueError(f"shares must be numbers above 0 and at most 1, got {part.shares}")
    if max(part.shares) < 1 and not getattr(part, "rolling", False):
        raise ValueError(f"shares must have a 1, or no client trains the rest, got {part.shares}")


def _counts(shares: tuple[float, ...], units: int, client: Array) -> Array:
    """Returns how many of the units a client has."""
    # 0.1 of 30 units are 3, although the product is larger.
    counts = [math.ceil(share * units - 1e-9) for share in shares]
    return jnp.array(counts, jnp.int32)[client % len(counts)]


def _masks(model: Model, variables: Variables, has: Callable[[int], Array]) -> PyTree:
    """Returns the entries of each leaf that connect units chosen by ``has``, ``n -> bool[n]``.

    Raises:
        ValueError: names a leaf that has no narrower version.
    """
    ends: PyTree = head(model)(variables)
    order, outputs = _layers(model), [1]

    def of_kernel(path: str, shape: tuple[int, ...], last: bool) -> Array:
        *window, inputs, units = shape
        first, known = len(outputs) == 1, [n for n in outputs if inputs % n == 0]
        if (
            not path.endswith("kernel")
            or len(window) not in (0, 2)
            or not (first or inputs == 1 or known[1:])
        ):
            raise ValueError(
                f"widths needs dense and convolutional layers in sequence, got {path} {[*shape]}"
            )
        # A flattened picture has the channels of the last convolution on its last axis; 1 is the
        # input of a depthwise convolution.
        channels = inputs if inputs in outputs else known[-1]
        whole = first or inputs == 1
        ins = jnp.ones(inputs, bool) if whole else jnp.tile(has(channels), inputs // channels)
        outs = jnp.ones(units, bool) if last else has(units)
        outputs.append(units)
        return (ins[:, None] & outs[None]).reshape(*[1] * len(window), inputs, units)

    leaves = {path_of(e[1:]): leaf for e, leaf in jax.tree_util.tree_leaves_with_path(variables)}
    last = dict(zip(leaves, jax.tree.leaves(ends), strict=True))
    masks = {
        path: of_kernel(path, leaves[path].shape, last[path])
        for path in order
        if leaves[path].ndim > 1
    }
    for path, leaf in leaves.items():
        if leaf.ndim < 2:
            whole = last[path] or not leaf.ndim
            masks[path] = jnp.ones(leaf.shape, bool) if whole else has(len(leaf))
    return jax.tree.unflatten(jax.tree.structure(variables), [masks[path] for path in leaves])


@functools.lru_cache(maxsize=8)
def _layers(model: Model) -> list[str]:
    """Returns the paths of the weights in the order in which the model makes them."""
    paths: list[str] = []

    def walk(node: PyTree, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):  # a pytree would sort the names
            for name in node:
                walk(node[name], (*path, name))
        else:
            paths.append("/".join(path))

    def made(key: Array) -> Variables:
        variables = model.init(key)
        walk(variables.params, ())
        return variables

    jax.eval_shape(made, jax.random.key(0))
    return paths
