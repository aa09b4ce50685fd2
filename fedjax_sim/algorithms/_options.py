"""Options that several methods have: weights of clients, SGD at the server."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.base import Server, Weighting, concrete
from fedjax_sim.server import weighting


def client_weights(equal_weights: bool) -> Weighting:
    """Returns equal weights, or the clients' numbers of samples."""
    return weighting.equal if equal_weights else weighting.by_samples


def server_sgd(
    server_lr: float, server_momentum: float | None = None, *, nesterov: bool = False
) -> Server:
    """Returns SGD on the mean update.

    Raises:
        ValueError: if server_lr is not positive or server_momentum is not in [0, 1).
    """
    check_server_lr(server_lr)
    if server_momentum is not None and concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    return server.optimizer(optax.sgd(server_lr, server_momentum, nesterov))


def check_server_lr(server_lr: float) -> None:
    """Raises ValueError if server_lr is known and not positive."""
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
