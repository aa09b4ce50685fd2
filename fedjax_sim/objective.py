"""What a client minimises."""

from __future__ import annotations

from fedjax_sim.base import Array, LossFn, Model, Objective, PyTree, Variables
from fedjax_sim.losses import cross_entropy, masked_mean


def empirical_risk(model: Model, loss: LossFn = cross_entropy) -> Objective:
    r"""Mean loss over the real samples of a minibatch, :math:`\frac1{|b|}\sum_{i\in b}\ell_i(w)`.

    Args:
        model: see :class:`fedjax_sim.base.Model`.
        loss: per-sample loss.

    Returns:
        An objective for :func:`fedjax_sim.local.local_sgd`.

    Source: McMahan et al. 2017, eq. 1.
    """

    def objective(
        params: PyTree,
        state: PyTree,
        received: PyTree,
        x: Array,
        y: Array,
        mask: Array,
        key: Array,
    ) -> tuple[Array, PyTree]:
        del received
        logits, state = model.apply(Variables(params, state), x, train=True, mask=mask, key=key)
        return masked_mean(loss(logits, y), mask), state

    return objective
