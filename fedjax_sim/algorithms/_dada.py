"""Dada: clients without a server that learn whom to learn from."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client.reports import with_final_loss
from fedjax_sim.engine.execution import Execution
from fedjax_sim.personal import as_received
from fedjax_sim.plan import redistribution, schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def dada(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    mu_1: float = 1.0,
    mu_2: float = 0.5,
    penalty: float = 1.0,
    peers: int = 5,
    mixing_lr: float = 0.5,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Dada: every client has a model of its own, and learns which others to draw it towards.

    .. math:: \min_{w \ge 0,\, \theta} \sum_k d_k c_k L_k(\theta_k)
              + \frac{\mu_1}{2} \sum_{k<l} w_{kl} \lVert \theta_k - \theta_l \rVert^2
              + \mu_2 \Bigl( \lambda \sum_{k<l} w_{kl}^2 - \sum_k \log(d_k + \delta) \Bigr)

    A round trains the models apart; between two rounds clients meet in pairs, which set the weight
    :math:`w_{kl}` of their edge, and everyone moves towards its neighbours; see
    :func:`fedjax_sim.redistribution.learned`. The paper's models are weights of given classifiers,
    which it boosts one by one; here they are those of any network and trained by the local update,
    as the linear ones are that the paper compares with. What is evaluated for all is the mean of
    the models: look at the personal scores.

    Args:
        local: the local update.
        clients_per_round: m, the nodes: a client each, drawn once; usually all clients.
        objective: the objective of the local update, whose value is L.
        mu_1: μ₁, how much distances between models count.
        mu_2: μ₂, how much the graph's own shape counts.
        penalty: λ, how much large weights cost; with a smaller one the graph is sparser.
        peers: κ, the clients that each meets between two rounds.
        mixing_lr: η of the step towards the neighbours; 0 leaves every client alone.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; :func:`fedjax_sim.simulate` returns the graph, in
        ``state.redistribution``. A visit costs one forward pass more. A model between clients
        counts both as sent up and as sent down, with 12 bytes of losses, degrees and weights.
        Traffic per round: a model for each of the m clients from each of its neighbours, and at
        most m κ / 2 from others that are met.

    Raises:
        ValueError: if a number is out of range.

    Source: Zantedeschi, Bellet, Tommasi, "Fully decentralized joint learning of personalized models
    and collaboration graphs", AISTATS 2020 <https://arxiv.org/abs/1901.08460>; its authors' code
    2020 <https://github.com/vzantedeschi/Dada>, for the linear models and for the defaults of
    μ₁, μ₂ and κ.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.dada(
        ...     local, clients_per_round=10, objective=problem.objective
        ... )
        >>> algorithm.parts.redistribution
        learned()
    """
    return compose(
        with_final_loss(local, objective),
        selection=selection.uniform(sticky=True),
        schedule=schedule.serverless(clients_per_round),
        redistribution=redistribution.learned(mu_1, mu_2, penalty, peers=peers, lr=mixing_lr),
        weighting=weighting.equal,
        personal=as_received(),
        execution=execution,
    )
