"""Objectives that evaluate the loss after further steps: Per-FedAvg's and pFedMe's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, Context, Count, NonNegative, Positive, PyTree
from fedjax_sim.client.objective import ObjectiveWrapper
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import random_minibatch
from fedjax_sim.engine.streams import Step, stream

__all__ = ["after_a_step", "moreau_envelope"]


class after_a_step(ObjectiveWrapper):
    r"""The loss after one more step, whose gradient is Per-FedAvg's.

    .. math:: F_b(w'), \qquad w' = w - \alpha \nabla F_{b'}(w)

    Its gradient is ∇F_b(w') without the Hessian (FO), and with it (HF)

    .. math:: \bigl(I - \alpha \nabla^2 F_{b''}(w)\bigr) \nabla F_b(w')

    b' and b'' are drawn in every step from all samples of the client, without the local update's
    transforms. Each has B samples, even if b has fewer, or all samples of a smaller client. The
    product with the Hessian is exact; the authors approximate it by a difference of two gradients.
    BatchNorm's statistics are those of b. It costs one more gradient, with the Hessian about three.
    A hypergradient treats the step as a constant. The reported loss is the loss at w'.

    Args:
        objective: F_b.
        alpha: α, the rate of the step; with 0 it is the objective itself.
        hessian: whether the gradient includes the Hessian.

    Source: Fallah et al. 2020 <https://arxiv.org/abs/2002.07948>, Algorithm 1 and section 5.
    """

    alpha: NonNegative = 0.01
    _: dataclasses.KW_ONLY
    hessian: bool = False

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        def step(params: PyTree, number: int) -> PyTree:
            key = jax.random.fold_in(stream(context.key, Step.ADAPTATION), number)
            other = random_minibatch(key, context.client, len(batch.mask))
            slope, _ = jax.grad(self.objective, has_aux=True)(
                params, state, other, context._replace(key=key)
            )
            return tree.scale(self.alpha, slope)

        there = tree.subtract(params, step(jax.lax.stop_gradient(params), 0))
        if self.hessian:
            # Adds 0, whose derivative is the derivative of the step on b''.
            moved = step(params, 1)
            there = tree.subtract(there, tree.subtract(moved, jax.lax.stop_gradient(moved)))
        return self.objective(there, state, batch, context)


class moreau_envelope(ObjectiveWrapper):
    r"""The smallest loss of a model near the weights, whose gradient is pFedMe's.

    .. math:: \min_\theta F_b(\theta) + \frac{\lambda}{2} \lVert \theta - w \rVert^2, \qquad
              \nabla = \lambda (w - \tilde\theta)

    θ̃ is the result of K steps of rate δ on the minibatch, starting from w. The authors' code
    starts from the θ̃ of the previous minibatch and adds a weight decay of 0.001. The steps change
    all weights, including those that the local update does not train. BatchNorm's statistics are
    those at θ̃. It costs K gradients and a loss. A hypergradient treats θ̃ as a constant. The
    reported loss is the minimum, with its second term.

    Args:
        objective: F_b.
        lam: λ, the pull towards w.
        inner_steps: K.
        inner_lr: δ.

    Source: Dinh, Tran, Nguyen 2020 <https://arxiv.org/abs/2006.08848>, Algorithm 1; Dinh 2020
    <https://github.com/CharlieDinh/pFedMe>, the authors' code.

    Example:
        >>> import jax.numpy as jnp
        >>> def bowl(params, state, batch, context):
        ...     return 0.5 * jnp.sum(params**2), state
        >>> envelope = moreau_envelope(bowl, 1.0, inner_steps=50, inner_lr=0.5)
        >>> slope = jax.grad(envelope, has_aux=True)(jnp.array([4.0]), (), None, None)[0]
        >>> round(float(slope[0]), 4)  # of w² / 4
        2.0
    """

    lam: Positive = 15.0
    _: dataclasses.KW_ONLY
    inner_steps: Count = 5
    inner_lr: Positive = 0.09

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        here = jax.lax.stop_gradient(params)

        def step(_: int, theta: PyTree) -> PyTree:
            slope, _ = jax.grad(self.objective, has_aux=True)(theta, state, batch, context)
            pull = tree.scale(self.lam, tree.subtract(theta, here))
            return tree.subtract(theta, tree.scale(self.inner_lr, tree.sum_of(slope, pull)))

        theta = jax.lax.stop_gradient(jax.lax.fori_loop(0, self.inner_steps, step, here))
        loss, state = self.objective(theta, state, batch, context)
        apart = jax.tree.leaves(tree.subtract(params, theta))
        square = sum(jnp.vdot(w, w).astype(loss.dtype) for w in apart)
        return loss + jnp.asarray(self.lam / 2, loss.dtype) * square, state
