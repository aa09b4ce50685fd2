"""Methods that select the clients of a round."""

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

__all__ = ["favor", "fedcs", "hybrid_fl", "oort", "power_of_choice", "tifl"]


@method
def power_of_choice(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    candidates: int | None = None,
    known_losses: bool = False,
) -> Algorithm:
    r"""Power of choice: of d candidates sampled by data size, the m with the largest losses train.

    .. math:: w \leftarrow \frac{1}{m} \sum_{k \in U} w_k, \qquad
              U = \text{the } m \text{ of } A \text{ with the largest } F_k(w), \quad |A| = d

    Args:
        candidates: d: candidates; None: 2m. All clients if there are fewer.
        known_losses: use the losses of the clients' last rounds instead of polling candidates
          (π_rpow-d).

    Returns:
        The algorithm. Traffic per round: d models down, m up, and d losses; with known losses m
        models down, m up, and m losses.

    Source: Cho, Wang, Joshi, "Towards understanding biased client selection in federated learning",
    AISTATS 2022 <https://arxiv.org/abs/2010.01243>, section 4.
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
    r"""FedCS: of m random candidates, only clients that can meet the deadline train.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U = \{k \in A : s_k \le \text{deadline}\}, \quad |A| = m

    where s_k is the duration of the client's local update and transfers; see
    :class:`fedjax_sim.selection.within_deadline`.

    Args:
        clients_per_round: m: random candidates per round; only these are polled.

    Returns:
        The algorithm. Traffic per round: one model down and one up for each selected client, and
        three numbers from each candidate.

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
    r"""Hybrid-FL: FedCS, plus a model that the server trains on its own samples.

    .. math:: w \leftarrow \frac{n_0 w_0 + \sum_{k \in U} n_k w_k}{n_0 + \sum_{k \in U} n_k}, \qquad
              w_0 = \mathrm{train}(w, D_0), \qquad
              U = \{k \in A : s_k \le \text{deadline}\}, \quad |A| = m

    where s_k is the duration of the client's local update and transfers, see
    :class:`fedjax_sim.selection.within_deadline`, and D_0 is the data's ``root``: samples that
    clients agreed to share, balanced over the classes if :func:`fedjax_sim.data.take_root` took
    them. Here, the server has them from the start; in the paper, they arrive over the rounds, from
    volunteers that a heuristic chooses by their classes and by the idle seconds of the link. The
    server trains while the clients do, and is never late.

    Args:
        local: the local update of the clients and of the server.
        clients_per_round: m: random candidates per round; only these are polled.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: one model down and one up
        for each selected client, and three numbers from each candidate; n_0 samples up before the
        first round.

    Source: Yoshida, Nishio, Morikura, Yamamoto, Yonetani, "Hybrid-FL for wireless networks:
    cooperative learning mechanism using non-IID data", ICC 2020 <https://arxiv.org/abs/1905.07210>.
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
    r"""TiFL: samples each cohort from one tier of equally fast clients, mostly the least accurate.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U \subset \text{tier } t \sim P

    where P depends on the ranks of the tiers' accuracies, see :class:`fedjax_sim.selection.tiers`.

    Args:
        clients_per_round: m: clients per round, sampled uniformly from a tier; all of a smaller
          one.
        tiers: T: tiers, of equal size.
        interval: rounds between two evaluations of the tiers; None: T.
        credit: maximum number of rounds per tier; None: no limit.

    Returns:
        The algorithm. Traffic per round: m models down, m up; in rounds with an evaluation, also
        one number up for each evaluated client, and one model down for each that does not train;
        before the first round, one model to all clients and back.

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
    r"""Oort: prefers fast clients with large losses, and explores clients that never trained.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k

    where U is sampled by utility and duration, see :class:`fedjax_sim.selection.guided`.

    Args:
        objective: the objective of the local update; its sample losses define the utility.
        explore: ε: initial fraction of the cohort for clients that have not trained yet.
        explore_decay: δ: factor of ε per round.
        explore_least: ε_min: smallest value of ε.
        penalty: α: exponent of the penalty on slow clients; 0 ignores speed.
        pace: initial fraction of the known clients that counts as fast enough.
        pace_step: Δ: increase of this fraction when the utility declines.
        pace_rounds: W: rounds over which the utility is compared.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and m numbers.

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
    r"""FAVOR: a double deep Q-network selects the cohort from sketches of all clients' models.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U = \text{the } m \text{ largest of } Q(s, \cdot; \theta), \qquad
              r = \Xi^{A - \Omega} - 1

    The state s consists of sketches of the server model and of each client's last model; the reward
    r depends on the accuracy A of the next server model. Here, Q learns during the run; see
    :class:`fedjax_sim.selection.deep_q`, which takes the ``network`` of other runs.

    Args:
        target_accuracy: Ω: target accuracy, at which the reward is 0.
        reward_base: Ξ: base of the reward.
        explore: initial probability that a slot goes to a client drawn uniformly.
        explore_decay: factor of this probability per round.
        agent_lr: learning rate of the agent's RMSprop.
        agent_steps: training steps of the agent per round.
        sketch_size: numbers per sketch of a model; 100 in the paper.

    Returns:
        The algorithm; with explore and explore_decay of 1, its cohorts are uniform. Traffic per
        round: one model down for each client that is evaluated or trains; one number up for each
        evaluated client; m models up; before the first round, one model to all clients and back.

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
