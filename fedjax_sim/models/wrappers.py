"""Models that wrap a model: scaled inputs, mixed precision, frozen weights, LoRA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fedjax_sim.base import Array, Leaves, Model, PyTree, Variables
from fedjax_sim.base.arrays import concrete, one_array
from fedjax_sim.engine.streams import Weights, stream
from fedjax_sim.models.layers import dense_product, fan_in_uniform
from fedjax_sim.models.leaves import named, path_of


def with_scaling(model: Model, mean: ArrayLike, std: ArrayLike) -> Model:
    r"""Scales raw inputs in each step, :math:`(x - \mu) / \sigma`, so data may stay uint8.

    Args:
        model: a model that takes ``f32[B, *feature]``.
        mean: μ, ``f32[C]`` for the last axis, in units of x.
        std: σ, ``f32[C]``.

    Returns:
        A model that takes ``[B, *feature]`` of any dtype.

    Raises:
        ValueError: if a σ is not positive; 0, of a constant column, would give NaN.

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
    if concrete(mean, std) and not np.all(np.asarray(std) > 0):
        raise ValueError(f"std must be positive, got {np.min(std):g}: give 1 for constant columns")

    def scaled(variables: Variables, x: Array) -> Array:
        x = one_array("x", x, "with_scaling: ")
        ones = (1,) * (x.ndim - 1)
        centre, scale = (jnp.asarray(a).reshape(*ones, -1) for a in (mean, std))
        return (x.astype(jnp.float32) - centre) / scale

    return with_inputs(model, scaled)


def with_inputs(model: Model, change: Callable[[Variables, Array], Array]) -> Model:
    """Returns a model that receives ``change(variables, x)`` instead of x."""
    return _wrapped(model, lambda variables, x: (variables, change(variables, x)))


def _wrapped(
    model: Model,
    before: Callable[[Variables, PyTree], tuple[Variables, PyTree]],
    after: Callable[[Array], Array] = lambda outputs: outputs,
) -> Model:
    """Changes what ``apply`` and ``features`` of a model receive, and the arrays they return."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: PyTree, **options: Any) -> tuple[Any, PyTree]:
            outputs, state = run(*before(variables, x), **options)
            return jax.tree.map(after, outputs), state

        return apply

    features = None if model.features is None else wrap(model.features)
    return model._replace(apply=wrap(model.apply), features=features)


def with_compute_dtype(model: Model, dtype: DTypeLike) -> Model:
    """Returns a model that computes in another dtype, for mixed precision.

    Each step casts weights and inputs, and casts the outputs back. Weights, gradients, updates,
    BatchNorm statistics and the loss stay in float32.

    Args:
        model: a model that computes in the dtype of its weights and inputs.
        dtype: dtype to compute in, such as ``jnp.bfloat16``.

    Returns:
        The model; its outputs are ``f32``.

    Raises:
        ValueError: if dtype is not floating point; at the first use, if the model does not compute
            in it.

    Source: Micikevicius et al. 2018 <https://arxiv.org/abs/1710.03740>, without loss scaling, which
    bfloat16 does not need because of its wide exponent.

    Example:
        >>> import fedjax_sim as fs
        >>> model = with_compute_dtype(fs.models.logistic((4,), 3), jnp.bfloat16)
        >>> variables = model.init(jax.random.key(0))
        >>> model.apply(variables, jnp.ones((2, 4)), train=False)[0].dtype
        dtype('float32')
    """
    kind = jnp.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(f"dtype must be floating point, such as jnp.bfloat16, got {kind}")

    def cast(a: Array) -> Array:
        return a.astype(kind) if jnp.issubdtype(a.dtype, jnp.floating) else a

    def widened(outputs: Array) -> Array:
        if outputs.dtype != kind:
            raise ValueError(
                f"model must compute in {kind} if its weights and inputs are, got {outputs.dtype}; "
                "apply scaling outside: with_scaling(with_compute_dtype(model, dtype), mean, std)"
            )
        return outputs.astype(jnp.float32)

    def narrowed(variables: Variables, x: PyTree) -> tuple[Variables, PyTree]:
        params, x = jax.tree.map(cast, (variables.params, x))
        return variables._replace(params=params), x

    return _wrapped(model, narrowed, widened)


def with_frozen(model: Model, leaves: Leaves) -> Model:
    """Returns a model in which some weights are constants: their gradient is always 0.

    ``local_sgd(trained=...)`` excludes weights only from its own steps. Companions (APFL, FedRoD)
    and objectives that take steps themselves (Per-FedAvg, pFedMe) change all weights that have a
    gradient.

    Args:
        model: any model.
        leaves: the constant weights, see :mod:`fedjax_sim.leaves`.

    Returns:
        The model. A term of the objective that reads the weights directly, such as ``l2``, still
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

    def stopped(variables: Variables, x: PyTree) -> tuple[Variables, PyTree]:
        chosen = leaves(variables).params
        params = jax.tree.map(
            lambda w, here: jax.lax.stop_gradient(w) if here else w, variables.params, chosen
        )
        return variables._replace(params=params), x

    return _wrapped(model, stopped)


_KERNELS = named("*kernel")


def lora(model: Model, rank: int, leaves: Leaves = _KERNELS, alpha: float | None = None) -> Model:
    r"""Returns a LoRA model: a trunk whose matrices W are adapted by products of small matrices.

    .. math:: W + \frac{\alpha}{r} A B, \qquad
              A \in \mathbb{R}^{m \times r},\ B \in \mathbb{R}^{r \times n}

    Its weights are ``trunk``, the weights of the model, and ``A`` and ``B``, with one matrix per
    adapted leaf, by path. A is drawn from :math:`U(-1/\sqrt{m}, 1/\sqrt{m})` and B is 0, so the
    model starts as its trunk. Local update and exchange determine which weights train and which are
    sent; with ``names = fs.leaves.named`` and ``split = fs.exchange.split``

    - FedIT trains and shares both: ``local_sgd(trained=names("A", "B"))``,
      ``exchange=split(frozen=names("trunk"))``. The product of the mean A and the mean B is not the
      mean of the products.
    - FFA-LoRA keeps A at its initial value: ``trained=names("B")``,
      ``split(frozen=names("trunk", "A"))``. Averaging B averages the products.
    - FedSA-LoRA trains both and shares A: ``trained=names("A", "B")``,
      ``split(own=names("B"), frozen=names("trunk"))``. Evaluate the clients' personal models: the
      server model has the initial B, so it stays the trunk.

    Where W is the kernel of flax's ``Dense`` or ``DenseGeneral``, the adapters run next to the
    layer, :math:`x W + \frac{\alpha}{r} (x A) B`: W has no gradient unless it trains, and clients
    that train at once share one product with W. Elsewhere A B is added to W in every step, so a
    step is not faster than a step that trains W: in convolutions, embeddings and LSTMs, under
    ``nn.scan`` or ``nn.remat``, in models that are not flax.linen modules, and in a model that
    casts its weights (use ``with_compute_dtype(lora(model, rank), dtype)``).

    Args:
        model: the trunk. To use trained weights, put them in place of ``trunk`` in the result of
            ``init`` and pass it to ``simulate(initial=)``.
        rank: r.
        leaves: the matrices W; all kernels by default. A leaf with more axes is reshaped to the
            matrix with the fewest rows and columns: ``[D, heads, D / heads]`` of attention to
            D × D, ``[3, 3, C, C]`` of a convolution to 9 C × C.
        alpha: α; None: r, for a factor of 1.

    Returns:
        The model. Its head is the trunk's head with its adapters. Its state, such as statistics of
        norms, is the trunk's, and is sent unless the exchange excludes it.

    Raises:
        ValueError: if rank is not positive; at the first ``init``, if leaves chooses no weights, or
            weights that are not matrices.

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

    def adapted(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: PyTree, **options: Any) -> tuple[Any, PyTree]:
            trunk, a, b = (variables.params[part] for part in ("trunk", "A", "B"))
            adapters: dict[int, _Adapter] = {}

            def merged(entries: Any, w: Array) -> Array:
                path = path_of(entries)
                if path not in a:
                    return w
                whole = w + (factor * (a[path] @ b[path])).reshape(w.shape)
                adapters[id(whole)] = _Adapter(whole, w, a[path], factor * b[path])
                return whole

            params = jax.tree_util.tree_map_with_path(merged, trunk)
            with nn.intercept_methods(functools.partial(_beside, adapters)):
                out: tuple[Any, PyTree] = run(Variables(params, variables.state), x, **options)
            return out

        return apply

    def with_adapters(choose: Leaves) -> Leaves:
        def head(variables: Variables) -> Variables:
            trunk = variables._replace(params=variables.params["trunk"])
            chosen, paths = choose(trunk), _chosen(choose, trunk)
            a, b = ({path: path in paths for path in variables.params[part]} for part in "AB")
            return Variables({"trunk": chosen.params, "A": a, "B": b}, chosen.state)

        return head

    head = None if model.head is None else with_adapters(model.head)
    features = None if model.features is None else adapted(model.features)
    return Model(init, adapted(model.apply), features, head)


def is_lora(variables: Variables) -> bool:
    """Returns whether a model is one of :func:`lora`."""
    return isinstance(variables.params, Mapping) and {*variables.params} == {"trunk", "A", "B"}


class _Adapter(NamedTuple):
    """A kernel ``whole = w + A B``, with matrices A and B."""

    whole: Array
    w: Array
    a: Array
    b: Array


def _beside(
    adapters: Mapping[int, _Adapter],
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: nn.module.InterceptorContext,
) -> Any:
    """Calls a method of a layer; a dense layer of an adapted matrix computes ``x w + (x A) B``.

    Such a layer is known by its kernel, which is the array ``whole`` itself. Nothing uses ``whole``
    then, so XLA does not compute it.
    """
    layer: Any = context.module
    if context.method_name != "__call__" or type(layer) not in (nn.Dense, nn.DenseGeneral):
        return call(*args, **kwargs)
    if layer.dot_general not in (None, dense_product) or layer.dot_general_cls is not None:
        return call(*args, **kwargs)  # x w may be rounded
    params = layer.variables.get("params", {})
    adapter = adapters.get(id(params.get("kernel")))
    x = args[0] if args else kwargs["inputs"]
    summed = 0 if adapter is None else _summed_axes(layer, x)
    if adapter is None or not summed or math.prod(x.shape[x.ndim - summed :]) != len(adapter.a):
        return call(*args, **kwargs)
    plain = layer.clone(parent=None, name=None)
    y: Any = plain.apply({"params": {**params, "kernel": adapter.w}}, x)
    x, a, b = (v.astype(y.dtype) for v in (x, adapter.a, adapter.b))
    return y + ((x.reshape(*x.shape[: x.ndim - summed], -1) @ a) @ b).reshape(y.shape)


def _summed_axes(layer: nn.Dense | nn.DenseGeneral, x: Array) -> int:
    """Returns over how many of its last axes a dense layer sums x; 0 if over other axes too."""
    if isinstance(layer, nn.Dense):
        return 1
    axis = (layer.axis,) if isinstance(layer.axis, int) else tuple(layer.axis)
    last = tuple(range(x.ndim - len(axis), x.ndim))
    return len(axis) if tuple(i % x.ndim for i in axis) == last and not layer.batch_dims else 0


def _chosen(leaves: Leaves, variables: Variables) -> dict[str, Array]:
    """Returns the weights that leaves chooses, by path."""
    found = jax.tree_util.tree_leaves_with_path(variables.params)
    mask = jax.tree.leaves(leaves(variables).params)
    return {path_of(entries): w for (entries, w), here in zip(found, mask, strict=True) if here}


def _sides(path: str, shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of the matrix with the fewest of both that a shape splits into."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if not cuts:
        raise ValueError(f"leaves must be matrices, {path} has the shape {tuple(shape)}")
    return min(cuts, key=sum)
