"""Options that several methods have: weights of clients, SGD at the server."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.base import Server, Weighting
from fedjax_sim.server import weighting


def client_weights(equal_weights: bool) -> Weighting:
    """Returns equal weights, or the clients' numbers of samples."""
    return weighting.equal if equal_weights else weighting.by_samples


def server_sgd(
    server_lr: float, server_momentum: float | None = None, *, nesterov: bool = False
) -> Server:
    """Returns SGD on the mean update."""
    return server.optimizer(optax.sgd(server_lr, server_momentum, nesterov))
