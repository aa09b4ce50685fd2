"""A client that sends more than the model that it trained."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from fedjax_sim.base import ClientView, LocalUpdate, PyTree, Trained, Variables, part, wrap
from fedjax_sim.engine.needs import MIRROR


class Reflected(NamedTuple):
    """What a client of :func:`reflected` keeps.

    Attributes:
        last: its weights at the end of its last visit; before the first, the initial ones.
        inner: what the local update inside keeps.
    """

    last: PyTree
    inner: PyTree


@part
def reflected(local: LocalUpdate) -> LocalUpdate:
    r"""A local update that sends its new model's reflection of its last one.

    .. math:: w_k \mapsto 2 w_k - w_k^{last}

    Beside :func:`fedjax_sim.corrections.dynamic` it is the client of FedADMM: the dual variable,
    which is minus FedDyn's h_k, moves by :math:`\rho\,(w_k - w_t)`, so that the change of the
    augmented model :math:`w_k + y_k / \rho` is
    :math:`(w_k - w_k^{last}) + (w_k - w_t) = (2 w_k - w_k^{last}) - w_t`, an update of w_t.

    The state (BatchNorm statistics) is sent as it was trained.

    Args:
        local: the local update.

    Returns:
        The local update; its client state has the weights of a model for every client.

    Source: Gong et al. 2022 <https://arxiv.org/abs/2204.03529>, Algorithm 1.
    """

    def wrapper(local: LocalUpdate) -> LocalUpdate:
        def client_state(variables: Variables) -> Reflected:
            return Reflected(variables.params, local.client_state(variables))

        def train(
            key: jax.Array,
            variables: Variables,
            client: ClientView,
            client_state: Reflected,
            shared_state: PyTree,
        ) -> Trained:
            trained = local.train(key, variables, client, client_state.inner, shared_state)
            new = trained.variables.params
            sent = jax.tree.map(lambda w, last: w + (w - last), new, client_state.last)
            return trained._replace(
                variables=trained.variables._replace(params=sent),
                client_state=Reflected(new, trained.client_state),
            )

        return dataclasses.replace(
            local,
            client_state=client_state,
            train=train,
            reflects=True,
            needs=(*local.needs, *MIRROR),
            survey=local.survey and local.survey.inside(lambda kept: kept.inner),
        )

    return wrap(wrapper, local)
