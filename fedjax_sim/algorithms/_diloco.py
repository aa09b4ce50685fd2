"""DiLoCo: long local training, and Nesterov steps of the server; at once, or by fragments."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Server, concrete
from fedjax_sim.models import leaves
from fedjax_sim.plan import exchange, schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

MOST_FRAGMENTS = 1000


"""No model has so many layers, and each is a choice of its own."""


@method
def diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 0.7,
    server_momentum: float = 0.9,
) -> Algorithm:
    r"""DiLoCo: clients keep their optimiser's state; the server takes Nesterov steps.

    .. math:: v \leftarrow \beta v + \bar\Delta, \qquad w \leftarrow w + \eta_g
              (\beta v + \bar\Delta), \qquad \bar\Delta = \frac1m \sum_{k \in U} (w_k - w)

    Local SGD as language models are trained with it: the inner optimiser is that of local, AdamW in
    the paper, and goes on where it was at the client's last visit.

    Args:
        local: the local update; the paper takes 500 steps of AdamW a round (``max_steps``).
        server_lr: η_g, the server's learning rate.
        server_momentum: β, the server's momentum.

    Returns:
        The algorithm. Memory: an optimiser's state for every client. Traffic per round: m models
        down, m up.

    Raises:
        ValueError: if server_lr is not positive or server_momentum not in [0, 1).

    Source: Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen, "DiLoCo:
    distributed low-communication training of language models", 2023
    <https://arxiv.org/abs/2311.08105>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.diloco(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        local.change(optimizer_state="keep"),
        clients_per_round,
        weighting=weighting.equal,
        server=_nesterov(server_lr, server_momentum),
    )


@method
def streaming_diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    fragments: int = 2,
    server_lr: float = 0.7,
    server_momentum: float = 0.9,
) -> Algorithm:
    r"""Streaming DiLoCo: a fragment of the model is synchronised in every round, in turn.

    .. math:: p = t \bmod P, \qquad v^p \leftarrow \beta v^p + \bar\Delta^p, \qquad
              w^p \leftarrow w^p + \eta_g (\beta v^p + \bar\Delta^p), \qquad
              w_k^p \leftarrow w^p

    with :math:`\bar\Delta^p = \frac1m \sum_{k \in U} (w_k^p - w^p)`, all that the clients have
    done to fragment p since it was last synchronised, P rounds ago. Phase shift staggers groups of
    clients like this, and Streaming DiLoCo the layers of one model: p, p + P, p + 2P ... are
    fragment p. A client goes on with the fragments whose turn it is not, and with its optimiser's
    state. The m clients that the first round draws are the workers of the whole run; another
    schedule lets others come.

    A round here is the steps from one fragment's turn to the next one's, the paper's H / P. The
    paper's communication also overlaps with τ local steps, after which a worker mixes the new
    fragment with its own (α), and sends numbers of four bits; here it is exact and takes no time.

    Args:
        local: the local update, of H / P steps (``max_steps``), by AdamW in the paper.
        clients_per_round: m, the workers.
        fragments: P; at most the layers of the model. 1 is DiLoCo, of clients that stay.
        server_lr: η_g, the server's learning rate.
        server_momentum: β, the server's momentum.

    Returns:
        The algorithm. Memory: m models, and an optimiser's state for every client. Traffic per
        round: a P-th of m models down, as much up; in the first round m models down.

    Raises:
        ValueError: if fragments is below 1, server_lr not positive or server_momentum not in
            [0, 1); in the first round, if the model has fewer layers than fragments.

    Source: Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Ramé,
    Szlam, Ranzato, Barham, "Streaming DiLoCo with overlapping communication: towards a distributed
    free lunch", 2025 <https://arxiv.org/abs/2501.18512>, Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.streaming_diloco(local, clients_per_round=5, fragments=1)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    if not 1 <= fragments <= MOST_FRAGMENTS:
        raise ValueError(f"fragments must be in 1..{MOST_FRAGMENTS}, got {fragments}")
    return compose(
        local.change(optimizer_state="keep"),
        selection=selection.uniform(sticky=True),
        schedule=schedule.permanent(clients_per_round),
        exchange=exchange.fragments(*(leaves.strided(p, fragments) for p in range(fragments))),
        weighting=weighting.equal,
        server=_nesterov(server_lr, server_momentum),
    )


def _nesterov(server_lr: float, server_momentum: float) -> Server:
    """The outer optimiser."""
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    return server.optimizer(optax.sgd(server_lr, server_momentum, nesterov=True))
