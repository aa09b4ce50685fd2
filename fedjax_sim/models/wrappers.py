"""A model around a model: other inputs, another type inside, low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fedjax_sim.base import Array, Leaves, Model, PyTree, Variables
from fedjax_sim.engine.streams import Weights, stream
from fedjax_sim.models.layers import fan_in_uniform
from fedjax_sim.models.leaves import named, path_of


def with_scaling(model: Model, mean: ArrayLike, std: ArrayLike) -> Model:
    r"""Scales raw inputs in the step, :math:`(x - \mu) / \sigma`, so that they may stay uint8.

    Args:
        model: takes ``f32[B, *feature]``.
        mean: μ, ``f32[C]``, in units of x, for the last axis.
        std: σ, ``f32[C]``.

    Returns:
        A model that takes ``[B, *feature]`` of any dtype.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> scaled = with_scaling(model, jnp.full(4, 128.0), jnp.full(4, 64.0))
        >>> x, variables = jnp.full((2, 4), 128, jnp.uint8), model.init(jax.random.key(0))
        >>> outputs, _ = scaled.apply(variables, x, train=False)
        >>> at_zero, _ = model.apply(variables, jnp.zeros((2, 4)), train=False)
        >>> bool((outputs == at_zero).all())
        True
    """

    def scaled(variables: Variables, x: Array) -> Array:
        ones = (1,) * (x.ndim - 1)
        centre, scale = (jnp.asarray(a).reshape(*ones, -1) for a in (mean, std))
        return (x.astype(jnp.float32) - centre) / scale

    return with_inputs(model, scaled)


def with_inputs(model: Model, change: Callable[[Variables, Array], Array]) -> Model:
    """A model that is given ``change(variables, x)`` in place of x."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            return run(variables, change(variables, x), **options)

        return apply

    return _around(model, around)


def _around(model: Model, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Model:
    """The model with its ``apply``, and its ``features`` if it has some, wrapped."""
    features = None if model.features is None else wrap(model.features)
    return model._replace(apply=wrap(model.apply), features=features)


def with_compute_dtype(model: Model, dtype: DTypeLike) -> Model:
    """Computes in another type: weights and inputs are cast in the step, the outputs back.

    The weights, their gradients and updates, BatchNorm's statistics and the loss stay in the type
    of the weights, float32: mixed precision, as an accelerator's matrix units want it.

    Args:
        model: computes in the type of its weights and inputs.
        dtype: of what it computes, ``jnp.bfloat16``.

    Returns:
        The model; its outputs are ``f32``.

    Raises:
        ValueError: at its first use, if the model does not compute in that type.

    Source: Micikevicius et al. 2018 <https://arxiv.org/abs/1710.03740>, without the scaling of the
    loss, which bfloat16 with its wide exponent does not need.

    Example:
        >>> import fedjax_sim as fs
        >>> model = with_compute_dtype(fs.models.logistic((4,), 3), jnp.bfloat16)
        >>> variables = model.init(jax.random.key(0))
        >>> model.apply(variables, jnp.ones((2, 4)), train=False)[0].dtype
        dtype('float32')
    """
    kind = jnp.dtype(dtype)

    def cast(a: Array) -> Array:
        return a.astype(kind) if jnp.issubdtype(a.dtype, jnp.floating) else a

    def widened(outputs: Array) -> Array:
        if outputs.dtype != kind:
            raise ValueError(
                f"model must compute in {kind} if its weights and inputs are, got {outputs.dtype}; "
                "scaling goes around it: with_scaling(with_compute_dtype(model, dtype), mean, std)"
            )
        return outputs.astype(jnp.float32)

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            inside = variables._replace(params=jax.tree.map(cast, variables.params))
            outputs, state = run(inside, cast(x), **options)
            return jax.tree.map(widened, outputs), state

        return apply

    return _around(model, around)


def with_frozen(model: Model, leaves: Leaves) -> Model:
    """Takes some weights as constants: their gradient is 0, whoever takes it.

    ``local_sgd(trained=...)`` leaves weights out of its own steps alone. Companions (APFL, FedRoD)
    and what an objective makes of the weights (Per-FedAvg, pFedMe) move all that have a gradient.

    Args:
        model: any.
        leaves: the weights, see :mod:`fedjax_sim.leaves`.

    Returns:
        The model. A term of the objective that reads the weights themselves, as ``l2`` does, still
        has a gradient.

    Example:
        >>> import fedjax_sim as fs
        >>> model = with_frozen(fs.models.logistic((4,), 3), named("*kernel"))
        >>> def total(params):
        ...     return model.apply(Variables(params, {}), jnp.ones((2, 4)), train=True)[0].sum()
        >>> slope = jax.grad(total)(model.init(jax.random.key(0)).params)["Dense_0"]["Dense_0"]
        >>> slope["kernel"].any().item(), slope["bias"].tolist()
        (False, [2.0, 2.0, 2.0])
    """

    def stopped(variables: Variables) -> Variables:
        chosen = leaves(variables).params
        params = jax.tree.map(
            lambda w, here: jax.lax.stop_gradient(w) if here else w, variables.params, chosen
        )
        return variables._replace(params=params)

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            return run(stopped(variables), x, **options)

        return apply

    return _around(model, around)


_KERNELS = named("*kernel")


def lora(model: Model, rank: int, leaves: Leaves = _KERNELS, alpha: float | None = None) -> Model:
    r"""LoRA: a trunk whose matrices W are adapted by products of two small ones.

    .. math:: W + \frac{\alpha}{r} A B, \qquad
              A \in \mathbb{R}^{m \times r},\ B \in \mathbb{R}^{r \times n}

    Its weights are ``trunk``, the model's own, and ``A`` and ``B`` with a matrix for each adapted
    leaf, by its path. A is drawn from :math:`U(-1/\sqrt{m}, 1/\sqrt{m})`, B is 0: at first the
    model is its trunk. What of it trains and what travels is for others to say; with
    ``names = fs.leaves.named`` and ``split = fs.exchange.split``

    - FedIT trains and shares both: ``local_sgd(trained=names("A", "B"))``,
      ``exchange=split(frozen=names("trunk"))``. The mean of the A times that of the B is not the
      mean of the products.
    - FFA-LoRA leaves A as it was drawn: ``trained=names("B")``,
      ``split(frozen=names("trunk", "A"))``. The mean of the B is that of the products.
    - FedSA-LoRA trains both and shares A: ``trained=names("A", "B")``,
      ``split(own=names("B"), frozen=names("trunk"))``. What counts are the clients' own models: the
      server's has the initial B, so that it stays the trunk.

    The product is added to W in every step, so that a matrix of any model can be adapted. A step
    then takes no less time than one that trains W: what is small is the traffic, and the state of
    the optimiser.

    Args:
        model: the trunk. If it is trained already, ``simulate(initial=)`` takes its weights: what
            ``init`` gives, with them in place of ``trunk``.
        rank: r.
        leaves: the matrices W; all kernels by default. A leaf of more axes is cut into the matrix
            that has the fewest rows and columns: attention's ``[D, heads, D / heads]`` is D × D, a
            convolution's ``[3, 3, C, C]`` is 9 C × C.
        alpha: α; None for r, a factor of 1.

    Returns:
        The model. Its head is the trunk's with the adapters of that. Its state, such as statistics
        of norms, is the trunk's, and travels unless the exchange says otherwise.

    Raises:
        ValueError: if the rank is not positive; at the first ``init``, if leaves are no
            matrices, or none.

    Source: Hu et al. 2022 <https://arxiv.org/abs/2106.09685>, section 4.1, and the authors' code
    <https://github.com/microsoft/LoRA>, for A; Zhang et al. 2024 <https://arxiv.org/abs/2305.05644>
    (FedIT); Sun et al. 2024 <https://arxiv.org/abs/2403.12313> (FFA-LoRA); Guo et al. 2025
    <https://arxiv.org/abs/2410.01463> (FedSA-LoRA).

    Example:
        >>> import fedjax_sim as fs
        >>> model = lora(fs.models.logistic((20,), 10), rank=2)
        >>> jax.eval_shape(model.init, jax.random.key(0)).params["B"]
        {'Dense_0/Dense_0/kernel': ShapeDtypeStruct(shape=(2, 10), dtype=float32)}
    """
    if not rank >= 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    factor = 1.0 if alpha is None else alpha / rank

    def init(key: Array) -> Variables:
        trunk = model.init(key)
        a, b, matrices = {}, {}, _chosen(leaves, trunk)
        if not matrices:
            raise ValueError("leaves must choose weights of the model, got none")
        for number, (path, w) in enumerate(matrices.items()):
            rows, columns = _sides(path, w.shape)
            draw = fan_in_uniform(rows)
            a[path] = draw(stream(key, Weights.ADAPTER, number), (rows, rank), w.dtype)
            b[path] = jnp.zeros((rank, columns), w.dtype)
        return Variables({"trunk": trunk.params, "A": a, "B": b}, trunk.state)

    def adapted(variables: Variables) -> Variables:
        trunk, a, b = (variables.params[part] for part in ("trunk", "A", "B"))

        def changed(entries: Any, w: Array) -> Array:
            path = path_of(entries)
            return w + (factor * (a[path] @ b[path])).reshape(w.shape) if path in a else w

        return Variables(jax.tree_util.tree_map_with_path(changed, trunk), variables.state)

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            return run(adapted(variables), x, **options)

        return apply

    def with_adapters(choose: Leaves) -> Leaves:
        def head(variables: Variables) -> Variables:
            trunk = variables._replace(params=variables.params["trunk"])
            chosen, paths = choose(trunk), _chosen(choose, trunk)
            a, b = ({path: path in paths for path in variables.params[part]} for part in "AB")
            return Variables({"trunk": chosen.params, "A": a, "B": b}, chosen.state)

        return head

    head = None if model.head is None else with_adapters(model.head)
    return _around(model, around)._replace(init=init, head=head)


def _chosen(leaves: Leaves, variables: Variables) -> dict[str, Array]:
    """The weights among some leaves, by path."""
    found = jax.tree_util.tree_leaves_with_path(variables.params)
    mask = jax.tree.leaves(leaves(variables).params)
    return {path_of(entries): w for (entries, w), here in zip(found, mask, strict=True) if here}


def _sides(path: str, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the matrix that has the fewest of them, among the cuts of a shape."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if not cuts:
        raise ValueError(f"leaves must be matrices, {path} has the shape {tuple(shape)}")
    return min(cuts, key=sum)
