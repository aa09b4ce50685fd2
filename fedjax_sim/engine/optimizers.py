"""optax transformations for a client's step, and the server's adaptive optimisers.

Client transformations go at the two ends of an ``optax.chain``, the optimiser of
:func:`fedjax_sim.local.local_sgd`; server optimisers go into :func:`fedjax_sim.server.optimizer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import Array, PyTree, concrete
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Step, stream

__all__ = ["adagrad", "adam", "gradient_noise", "project_l2_ball", "yogi"]

EXTRA_ARGUMENTS = ("value", "grad", "value_fn", "obj_fn", "grad_fn", "key")
"""Extra arguments that a local update passes to an optimiser's ``update``, by optax's names."""


def check_optimizer(name: str, optimizer: Any, given: Sequence[str] = ()) -> None:
    """Rejects an optimiser whose ``update`` needs an extra argument that is not ``given``.

    Raises:
        ValueError: if it is not an optimiser, or needs another argument. Optimisers inside an
            ``optax.chain`` cannot be checked.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"{name} must be an optax.GradientTransformation, got {optimizer!r}")
    for p in inspect.signature(optimizer.update).parameters.values():
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in given:
            but = f" but {', '.join(given)}" * bool(given)
            raise ValueError(
                f"{name} must need no extra argument{but}, got one that needs {p.name}"
            )


def accepted_arguments(
    optimizer: optax.GradientTransformation, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the extra arguments that an optimiser's ``update`` accepts.

    By optax's convention it accepts all and ignores some; ``optax.contrib.sam`` does not.

    >>> sorted(accepted_arguments(optax.polyak_sgd(), {"value": 1.0, "key": 2}))
    ['key', 'value']
    >>> sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    >>> accepted_arguments(sam, {"value": 1.0, "key": 2, "grad_fn": 3})
    {'grad_fn': 3}
    """
    parameters = inspect.signature(optimizer.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(extra)
    return {name: value for name, value in extra.items() if name in parameters}


def project_l2_ball(radius: float) -> optax.GradientTransformation:
    r"""Projects the parameters onto a ball after every step; put it at the end of a chain.

    .. math:: w \leftarrow w \min\left(1, \frac{M}{\lVert w \rVert_2}\right)

    The norm is over all parameters. Inside the ball nothing changes, bit for bit.

    Args:
        radius: M.

    Returns:
        A transformation that needs the parameters.

    Raises:
        ValueError: if the radius is not positive.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 3.2 (M = 3).

    Example:
        >>> optimizer = optax.chain(optax.sgd(1.0), project_l2_ball(3.0))
        >>> w, gradient = jnp.array([2.0, 0.0]), jnp.array([-10.0, 0.0])
        >>> step, _ = optimizer.update(gradient, optimizer.init(w), w)
        >>> (w + step).tolist()
        [3.0, 0.0]
    """
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}")

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("project_l2_ball needs the parameters: update(updates, state, params)")
        moved = optax.apply_updates(params, updates)
        norm = tree.norm(moved)
        outside = norm > radius
        scale = jnp.where(outside, radius / norm, 1)

        def projected(step: Array, new: Array, old: Array) -> Array:
            back = scale.astype(new.dtype) * new - old
            return jnp.where(outside, back.astype(step.dtype), step)

        return jax.tree.map(projected, updates, moved, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def gradient_noise(sigma: float) -> optax.GradientTransformationExtraArgs:
    r"""Adds Gaussian noise to every gradient; put it at the start of a chain.

    .. math:: g \leftarrow g + \sigma \xi, \qquad \xi \sim \mathcal{N}(0, I)

    ``optax.add_noise`` draws from a key in its state, so every client gets the same noise.

    Args:
        sigma: σ, per coordinate.

    Returns:
        A transformation that needs the extra argument ``key``, which local updates pass.

    Raises:
        ValueError: if sigma is negative.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 4.2 (σ = 1e-4).

    Example:
        >>> noise = gradient_noise(0.1)
        >>> noisy, _ = noise.update(jnp.zeros(1000), noise.init(()), key=jax.random.key(0))
        >>> round(float(noisy.std()), 2)
        0.1
    """
    if not sigma >= 0:
        raise ValueError(f"sigma must be at least 0, got {sigma}")

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, *, key: Array, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del params, extra
        leaves, structure = jax.tree.flatten(updates)
        # Dropout and transforms of the minibatch draw from the same step's key.
        keys = jax.random.split(stream(key, Step.NOISE), len(leaves))
        noisy = [
            g + sigma * jax.random.normal(k, g.shape, g.dtype)
            for k, g in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class AdaptiveState(NamedTuple):
    """Moments of :func:`adagrad`, :func:`adam` and :func:`yogi`."""

    m: PyTree  # [*p], first moment
    v: PyTree  # [*p], second moment


def adagrad(
    learning_rate: float, *, beta1: float = 0.0, tau: float = 1e-3, v0: float | None = None
) -> optax.GradientTransformation:
    r"""Returns FedAdagrad's server optimiser.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v + \Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        learning_rate: η.
        beta1: β1; 0 in the paper.
        tau: τ, the degree of adaptivity.
        v0: v before the first step; None for τ².

    Returns:
        A transformation of the pseudo-gradient −Δ.

    Raises:
        ValueError: if a setting is out of range.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2.

    Note:
        ``optax.adagrad`` has no m, and τ inside the root.

    Example:
        >>> optimizer = adagrad(1.0, tau=1.0)
        >>> step, _ = optimizer.update(jnp.array([-1.0]), optimizer.init(jnp.zeros(1)))
        >>> round(float(step[0]), 6)  # 1 / (√2 + 1)
        0.414214
    """
    return _adaptive(learning_rate, beta1, tau, v0, lambda v, square: v + square)


def adam(
    learning_rate: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
) -> optax.GradientTransformation:
    r"""Returns FedAdam's server optimiser, without bias correction.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2)\,\Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        learning_rate: η.
        beta1: β1.
        beta2: β2.
        tau: τ, the degree of adaptivity.
        v0: v before the first step; None for τ².

    Returns:
        A transformation of the pseudo-gradient −Δ.

    Raises:
        ValueError: if a setting is out of range.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2.

    Note:
        FedJAX uses ``optax.adam``, which starts v at 0 and corrects the bias of m and v; Flower's
        FedAdam does so by its step size.

    Example:
        >>> optimizer = adam(1.0, tau=1.0)
        >>> step, _ = optimizer.update(jnp.array([-1.0]), optimizer.init(jnp.zeros(1)))
        >>> round(float(step[0]), 6)  # 0.1 / (√(0.99 + 0.01) + 1)
        0.05
    """
    _check_decay("beta2", beta2)
    return _adaptive(
        learning_rate, beta1, tau, v0, lambda v, square: beta2 * v + (1 - beta2) * square
    )


def yogi(
    learning_rate: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
) -> optax.GradientTransformation:
    r"""Returns FedYogi's server optimiser.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v - (1 - \beta_2)\,\Delta^2 \operatorname{sign}(v - \Delta^2), \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        learning_rate: η.
        beta1: β1.
        beta2: β2.
        tau: τ, the degree of adaptivity.
        v0: v before the first step; None for τ².

    Returns:
        A transformation of the pseudo-gradient −Δ; ``optax.yogi`` corrects the bias of m and v.

    Raises:
        ValueError: if a setting is out of range.

    Source: Reddi et al. 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2.

    Example:
        >>> optimizer = yogi(1.0, tau=0.5, v0=0.24)
        >>> step, _ = optimizer.update(jnp.array([-1.0]), optimizer.init(jnp.zeros(1)))
        >>> round(float(step[0]), 6)  # 0.1 / (√(0.24 + 0.01) + 0.5)
        0.1
    """
    _check_decay("beta2", beta2)

    def towards(v: Array, square: Array) -> Array:
        return v - (1 - beta2) * square * jnp.sign(v - square)

    return _adaptive(learning_rate, beta1, tau, v0, towards)


def _check_decay(name: str, value: float) -> None:
    if concrete(value) and not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def _adaptive(
    learning_rate: float,
    beta1: float,
    tau: float,
    v0: float | None,
    second: Callable[[Array, Array], Array],
) -> optax.GradientTransformation:
    """Implements Algorithm 2 of Reddi et al.; ``second(v, Δ²)`` is the new v."""
    _check_decay("beta1", beta1)
    if concrete(tau) and not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    if v0 is not None and concrete(v0) and not v0 >= 0:
        raise ValueError(f"v0 must be at least 0, got {v0}")

    def init(params: PyTree) -> AdaptiveState:
        start = tau**2 if v0 is None else v0
        return AdaptiveState(
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda w: jnp.full_like(w, start), params),
        )

    def update(
        gradient: PyTree, state: AdaptiveState, params: PyTree | None = None
    ) -> tuple[PyTree, AdaptiveState]:
        del params
        m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.m, gradient)
        v = jax.tree.map(lambda v, g: second(v, jnp.square(g)), state.v, gradient)
        # m averages −Δ, the gradient: hence the minus.
        updates = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), m, v)
        return updates, AdaptiveState(m, v)

    return optax.GradientTransformation(init, update)
