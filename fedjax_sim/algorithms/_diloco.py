"""DiLoCo: long local training with Nesterov steps of the server, of all or of fragments."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.algorithms._options import server_sgd
from fedjax_sim.base import Decay, LocalUpdate, Positive
from fedjax_sim.models import leaves
from fedjax_sim.plan import exchange, flight, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["diloco", "streaming_diloco"]

MOST_FRAGMENTS = 1000
"""Limit on fragments, as each is a part of its own; no model has so many layers."""


@method
def diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 0.7,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    r"""DiLoCo: clients keep their optimiser state; the server applies Nesterov momentum.

    .. math:: v \leftarrow \beta v + \bar\Delta, \qquad w \leftarrow w + \eta_g
              (\beta v + \bar\Delta), \qquad \bar\Delta = \frac1m \sum_{k \in U} (w_k - w)

    Local SGD as used to train language models: the inner optimiser is the local update's (AdamW in
    the paper) and continues with the state of the client's previous round.

    Args:
        local: the local update; the paper takes 500 steps of AdamW per round (``max_steps``).
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Memory: one optimiser state per client. Traffic per round: m models down, m
        up.

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
        server=server_sgd(server_lr, server_momentum, nesterov=True),
    )


@method
def streaming_diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    fragments: int = 2,
    server_lr: Positive = 0.7,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    r"""Streaming DiLoCo: synchronises one fragment of the model per round, in turn.

    .. math:: p = t \bmod P, \qquad v^p \leftarrow \beta v^p + \bar\Delta^p, \qquad
              w^p \leftarrow w^p + \eta_g (\beta v^p + \bar\Delta^p), \qquad
              w_k^p \leftarrow w^p

    where :math:`\bar\Delta^p = \frac1m \sum_{k \in U} (w_k^p - w^p)` is the clients' change of
    fragment p since its last synchronisation, P rounds ago. Layers p, p + P, p + 2P, ... form
    fragment p: layers are staggered here as phase shift staggers groups of clients. Clients
    continue with the other fragments and with their optimiser state. The m clients sampled in the
    first round are the workers of the whole run; another flight lets others join.

    A round lasts from one synchronisation to the next, H / P steps in the paper. The paper also
    overlaps communication with τ local steps, after which a worker mixes the new fragment with its
    own (α), and sends 4-bit numbers; here, communication is exact and takes no time.

    Args:
        local: the local update, with H / P steps (``max_steps``); AdamW in the paper.
        clients_per_round: m: workers.
        fragments: P: fragments, at most the number of layers. 1 is DiLoCo with permanent clients.
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Memory: m models, and one optimiser state per client. Traffic per round: a
        P-th of m models down, as much up; in the first round m models down.

    Raises:
        ValueError: if fragments, server_lr or server_momentum is out of range; in the first round,
            if the model has fewer layers than fragments.

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
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.permanent(),
        exchange=exchange.fragments(*(leaves.strided(p, fragments) for p in range(fragments))),
        weighting=weighting.equal,
        server=server_sgd(server_lr, server_momentum, nesterov=True),
    )
