"""Methods that choose the clients of a round."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim import server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import ClientView, Clock, LocalUpdate, Model, Objective, Variables
from fedjax_sim.client.reports import accuracy, mean_loss, with_utility
from fedjax_sim.plan import selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@method
def power_of_choice(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    candidates: int | None = None,
    known_losses: bool = False,
) -> Algorithm:
    r"""Power of choice: of d clients drawn by their samples, the m with the largest losses train.

    .. math:: w \leftarrow \frac{1}{m} \sum_{k \in U} w_k, \qquad
              U = \text{the } m \text{ of } A \text{ with the largest } F_k(w), \quad |A| = d

    Args:
        clients_per_round: m.
        objective: F.
        candidates: d; None for 2m; all clients if there are fewer.
        known_losses: choose by the losses of the clients' last visits, and ask nobody (π_rpow-d).

    Returns:
        The algorithm. Traffic per round: d models down, m up, and d losses; with known losses m
        models down, m up, and m losses.

    Raises:
        ValueError: if candidates is below m.

    Source: Cho, Wang, Joshi, "Towards understanding biased client selection in federated
    learning", AISTATS 2022 <https://arxiv.org/abs/2010.01243>, section 4.
    """
    among = 2 * clients_per_round if candidates is None else candidates
    if among < clients_per_round:
        raise ValueError(
            f"candidates must be at least the {clients_per_round} clients of a round, got {among}"
        )
    score = None if known_losses else mean_loss(objective, local.batch_size)
    return compose(
        local,
        clients_per_round,
        selection=selection.power_of_choice(among, score),
        weighting=weighting.equal,
    )


@method
def fedcs(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clock: Clock | None,
) -> Algorithm:
    r"""FedCS: of m random clients those train that the clock says will meet its deadline.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U = \{k \in A : s_k \le \text{deadline}\}, \quad |A| = m

    with s_k the seconds of a visit, see :func:`fedjax_sim.selection.within_deadline`.

    Args:
        clients_per_round: m, the candidates; the others are not asked.
        clock: gives the seconds; it needs a deadline.

    Returns:
        The algorithm. Traffic per round: a model down and one up for each client that is chosen,
        and three numbers of each candidate.

    Raises:
        ValueError: if the clock has no deadline.

    Source: Nishio, Yonetani, "Client selection for federated learning with heterogeneous resources
    in mobile edge", ICC 2019 <https://arxiv.org/abs/1804.08333>, section IV.
    """
    return compose(
        local,
        clients_per_round,
        selection=selection.within_deadline(clients_per_round),
        clock=clock,
    )


@method
def hybrid_fl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clock: Clock | None,
) -> Algorithm:
    r"""Hybrid-FL: FedCS, with a model of the server's own among those of the clients.

    .. math:: w \leftarrow \frac{n_0 w_0 + \sum_{k \in U} n_k w_k}{n_0 + \sum_{k \in U} n_k}, \qquad
              w_0 = \mathrm{train}(w, D_0), \qquad
              U = \{k \in A : s_k \le \text{deadline}\}, \quad |A| = m

    with s_k the seconds of a visit, see :func:`fedjax_sim.selection.within_deadline`, and D_0 the
    data's ``root``: samples that clients agreed to give away, all classes alike if
    :func:`fedjax_sim.data.take_root` took them. Here they are with the server from the start. In
    the paper they come in over the rounds, of volunteers that a heuristic chooses by their classes
    and by the link's free seconds. The server trains while the clients do, and is never late.

    Args:
        local: the local update, of the clients and of the server.
        clients_per_round: m, the candidates; the others are not asked.
        clock: gives the seconds; it needs a deadline.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: a model down and one up
        for each client that is chosen, and three numbers of each candidate; n_0 samples up before
        the first.

    Raises:
        ValueError: if the clock has no deadline, or local keeps something between its visits.

    Source: Yoshida, Nishio, Morikura, Yamamoto, Yonetani, "Hybrid-FL for wireless networks:
    cooperative learning mechanism using non-IID data", ICC 2020
    <https://arxiv.org/abs/1905.07210>.
    """
    return compose(
        local,
        clients_per_round,
        selection=selection.within_deadline(clients_per_round),
        server=server.train_beside(local),
        clock=clock,
    )


@method
def tifl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    clock: Clock | None,
    tiers: int = 5,
    interval: int | None = None,
    credit: int | None = None,
    evaluated: int | None = None,
) -> Algorithm:
    r"""TiFL: a round's clients are equally fast, and the worst tier comes most often.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U \subset \text{tier } t \sim P

    with P by the rank of the tiers' accuracies, see :func:`fedjax_sim.selection.tiers`.

    Args:
        clients_per_round: m, drawn uniformly from a tier; fewer if it has fewer.
        model: tells the accuracy of the clients' own samples.
        clock: gives the seconds.
        tiers: T, of equal size.
        interval: the rounds from one evaluation to the next; None for T.
        credit: the rounds of each tier at most; None for any number.
        evaluated: the clients that are evaluated; None for all.

    Returns:
        The algorithm. Traffic per round: m models down, m up; in each that evaluates a model to
        each client that is, and a number back; before the first a model to all and back.

    Raises:
        ValueError: if there is no clock, or a number is out of range.

    Source: Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan, Cheng, "TiFL: a tier-based
    federated learning system", HPDC 2020 <https://arxiv.org/abs/2001.09249>, Algorithm 2.
    """
    score = accuracy(model, local.batch_size)
    return compose(
        local,
        clients_per_round,
        selection=selection.tiers(
            tiers, score, interval=interval, credit=credit, evaluated=evaluated
        ),
        clock=clock,
    )


@method
def oort(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    clock: Clock | None,
    explore: float = 0.9,
    explore_decay: float = 0.98,
    explore_least: float = 0.2,
    penalty: float = 2.0,
    pace: float = 0.3,
    pace_step: float = 0.05,
    pace_rounds: int = 20,
) -> Algorithm:
    r"""Oort: clients with large losses that are fast enough train, and some that never did.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k

    with U by utility and seconds, see :func:`fedjax_sim.selection.guided`.

    Args:
        clients_per_round: m.
        objective: its loss of a sample makes the utility.
        clock: gives the seconds.
        explore: ε, the share of clients that have not trained yet.
        explore_decay: δ, by which ε shrinks in every round.
        explore_least: the least ε.
        penalty: α; 0 for clients of any speed.
        pace: the share of the clients known that are not too slow, at the start.
        pace_step: Δ, by which it grows if the utility shrinks.
        pace_rounds: W, the rounds whose utility is compared.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and m numbers.

    Raises:
        ValueError: if there is no clock, or a number is out of range.

    Source: Lai, Zhu, Madhyastha, Chowdhury, "Oort: efficient federated learning via guided
    participant selection", OSDI 2021 <https://arxiv.org/abs/2010.06081>, Algorithm 1.
    """
    return compose(
        with_utility(local, objective),
        clients_per_round,
        selection=selection.guided(
            explore=explore,
            decay=explore_decay,
            least=explore_least,
            penalty=penalty,
            share=pace,
            step=pace_step,
            window=pace_rounds,
        ),
        clock=clock,
    )


@method
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

    Returns:
        The algorithm; with explore and explore_decay of 1 its cohorts are uniform. Traffic per
        round: a model to each client that is evaluated, and a number back; m models up. Before the
        first a model to all and back.

    Raises:
        ValueError: if a number is out of range.

    Source: Wang, Kaplan, Niu, Li, "Optimizing federated learning on non-IID data with reinforcement
    learning", INFOCOM 2020 <https://doi.org/10.1109/INFOCOM41043.2020.9155494>.
    """

    def first(variables: Variables, client: ClientView) -> Variables:
        key, state, shared = jax.random.key(0), local.client_state, local.shared_state
        client = dataclasses.replace(client, round=jnp.int32(0), coin=key)
        visit = local.train(key, variables, client, state(variables), shared(variables))
        return visit.variables

    return compose(
        local,
        clients_per_round,
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
    )
