"""The techniques of Ozdayi et al. against non-IID data."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, concrete, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def ozdayi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    threshold: float = 2.0,
    literal_signs: bool = False,
    backwards: bool = False,
    server_epochs: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Sign agreement, momentum on the server, and training on the server's own samples.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} p_k \Delta_k, \qquad
              w \leftarrow \mathrm{train}(w + \eta\,\eta_\theta \odot v,\, D_0), \qquad
              \eta_{\theta,i} = \Bigl[\, \bigl| \textstyle\sum_k
              \operatorname{sgn}(\Delta_k)_i \bigr| \ge \theta \,\Bigr]

    with :math:`p_k = n_k / \sum_j n_j` and :math:`\Delta_k = w_k - w`. The paper's fourth
    technique, projected gradient descent with noise, is a part of the clients' optimiser
    (:func:`fedjax_sim.optimizers.project_l2_ball`). The defaults are the best of the paper's grid
    search, which had two clients. Sign agreement is the server's learning rate for each coordinate
    (eq. 3): v takes in all coordinates, w moves in those that the clients agree on. The authors'
    robust learning rate, against backdoors, goes backwards in the others: ``backwards``, where
    :math:`\eta_{\theta,i}` is -1 in place of 0, without momentum and epochs of the server's.

    Args:
        local: the local update, of the clients and of the server.
        clients_per_round: m, the cohort drawn without replacement.
        server_lr: η, the server's learning rate.
        server_momentum: β, the server's momentum; 0 is none.
        threshold: θ; a coordinate moves if the signs of the clients' updates add up to θ or more in
          absolute value; 0 moves all.
        literal_signs: compare θ with the sum of signs itself, as printed, not with its absolute
          value; a coordinate that all agree to decrease then stops.
        backwards: where too few agree, go in the other direction, not nowhere.
        server_epochs: epochs on the server's own samples; 0 is none, and needs no such samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, local keeps something between its visits, or
            literal_signs and backwards are both set.

    Source: Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated learning in non-IID
    settings", 2020 <https://arxiv.org/abs/2010.15582>, sections 3.1, 3.3 and 3.4; Ozdayi,
    Kantarcioglu, Gel, "Defending against backdoors in federated learning with robust learning
    rate", AAAI 2021 <https://arxiv.org/abs/2007.03767>, eq. 3 (backwards).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.ozdayi(
        ...     local, clients_per_round=5, server_momentum=0.5, threshold=3.0
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    if not server_epochs >= 0:
        raise ValueError(f"server_epochs must be at least 0, got {server_epochs}")
    momentum = server.optimizer(optax.sgd(server_lr, momentum=server_momentum))
    signs = {"literal": literal_signs, "backwards": backwards}
    trained = [server.train_on_root(local.change(epochs=server_epochs))] if server_epochs else []
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.chain(server.sign_agreement(threshold, momentum, **signs), *trained),
        execution=execution,
    )
