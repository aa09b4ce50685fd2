"""FAVOR: clients chosen by deep Q-learning."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import ClientView, LocalUpdate, Model, Variables, part
from fedjax_sim.client.reports import accuracy
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def favor(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    target_accuracy: float = 0.99,
    reward_base: float = 64.0,
    explore: float = 0.5,
    explore_decay: float = 0.95,
    agent_lr: float = 1e-3,
    agent_steps: int = 1,
    sketch_size: int = 100,
    evaluated: int | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FAVOR: a double deep Q-network sees the models of all clients and chooses the cohort.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U = \text{the } m \text{ largest of } Q(s, \cdot; \theta), \qquad
              r = \Xi^{A - \Omega} - 1

    with a state s of sketches of the server model and of each client's last, and a reward r by the
    accuracy A of the next server model, see :func:`fedjax_sim.selection.deep_q`. The authors train
    Q in many federated runs before the one in which it chooses; here it learns in the run itself,
    from one round to the next. To choose by what other runs have learnt, give
    ``selection.deep_q`` their ``network``.

    Args:
        local: the local update.
        clients_per_round: m.
        model: tells the accuracy of the clients' own samples.
        target_accuracy: Ω, the accuracy that is aimed at; its reward is 0.
        reward_base: Ξ.
        explore: the chance of a slot to go to a client drawn uniformly, in the first round.
        explore_decay: by which that is multiplied in every round.
        agent_lr: of the agent's RMSprop.
        agent_steps: of the agent in a round.
        sketch_size: the numbers in which the agent sees a model; the authors' 100.
        evaluated: the clients that tell the accuracy in each round; None for all.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with explore and explore_decay of 1 its cohorts are uniform. Traffic per
        round: a model to each client that is evaluated, and a number back; m models up. Before the
        first a model to all and back.

    Raises:
        ValueError: if a number is out of range.

    Source: Wang, Kaplan, Niu, Li, "Optimizing federated learning on non-IID data with reinforcement
    learning", INFOCOM 2020 <https://doi.org/10.1109/INFOCOM41043.2020.9155494>.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.favor(
        ...     local, clients_per_round=5, model=problem.model, sketch_size=8
        ... )
        >>> problem.accuracy(algorithm, rounds=10) > 0.8
        True
    """

    def first(variables: Variables, client: ClientView) -> Variables:
        key, state, shared = jax.random.key(0), local.client_state, local.shared_state
        client = dataclasses.replace(client, round=jnp.int32(0), coin=key)
        visit = local.train(key, variables, client, state(variables), shared(variables))
        return visit.variables

    return compose(
        local,
        selection=selection.deep_q(
            accuracy(model, local.batch_size),
            first,
            target=target_accuracy,
            base=reward_base,
            explore=explore,
            decay=explore_decay,
            lr=agent_lr,
            steps=agent_steps,
            size=sketch_size,
            evaluated=evaluated,
        ),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
