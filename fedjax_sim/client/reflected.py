"""FedADMM's clients, which send more than the model that they trained."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim.base import ClientView, Need, PyTree, Survey, Trained, Variables, Wrapper
from fedjax_sim.engine.needs import MIRROR


class Reflected(NamedTuple):
    """A client's state of :class:`reflected`.

    Attributes:
        last: its weights at the end of its last visit; before the first, the initial weights.
        inner: its state of the wrapped local update.
    """

    last: PyTree
    inner: PyTree


class reflected(Wrapper):
    r"""A local update that sends the reflection of its new model's weights by its last ones.

    .. math:: w_k \mapsto 2 w_k - w_k^{last}

    With :class:`fedjax_sim.corrections.dynamic` it is the client of FedADMM: the dual variable,
    which is minus FedDyn's h_k, changes by :math:`\rho\,(w_k - w_t)`, so that the change of the
    augmented model :math:`w_k + y_k / \rho` is
    :math:`(w_k - w_k^{last}) + (w_k - w_t) = (2 w_k - w_k^{last}) - w_t`, an update of w_t.

    The model's state (BatchNorm statistics) is sent as it was trained. Every client keeps the
    weights of a model.

    Args:
        local: the local update.

    Source: Gong et al. 2022 <https://arxiv.org/abs/2204.03529>, Algorithm 1.
    """

    reflects = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*self.local.needs, *MIRROR)

    @property
    def survey(self) -> Survey | None:
        return self.local.survey and self.local.survey.inside(lambda kept: kept.inner)

    def client_state(self, variables: Variables) -> Reflected:
        return Reflected(variables.params, self.local.client_state(variables))

    def train(
        self,
        key: jax.Array,
        variables: Variables,
        client: ClientView,
        client_state: Reflected,
        shared_state: PyTree,
    ) -> Trained:
        trained = self.local.train(key, variables, client, client_state.inner, shared_state)
        new = trained.variables.params
        sent = jax.tree.map(lambda w, last: w + (w - last), new, client_state.last)
        return trained._replace(
            variables=trained.variables._replace(params=sent),
            client_state=Reflected(new, trained.client_state),
        )
