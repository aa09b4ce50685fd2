"""Methods that send fewer bytes."""

from __future__ import annotations

from fedjax_sim import compression, server
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import LocalUpdate
from fedjax_sim.base.ranges import Clusters
from fedjax_sim.client import sending
from fedjax_sim.round import Algorithm, compose

__all__ = ["cmfl", "fedavg_qsgd", "fedavg_sketched", "fedavg_top_k", "stc"]


@method
def cmfl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    relevance: float = 0.5,
    equal_weights: bool = False,
) -> Algorithm:
    r"""CMFL: FedAvg of the updates whose signs sufficiently agree with the server's last step.

    .. math:: w \leftarrow w + \sum_{k \in R} p_k \Delta_k, \qquad
              R = \Bigl\{ k \in U : \frac1n \sum_{i=1}^n \bigl[ \operatorname{sgn}(\Delta_{k,i}) =
              \operatorname{sgn}(\bar u_i) \bigr] \ge v \Bigr\}

    where :math:`\bar u` is the server's last step; a client that missed rounds uses the change
    since it last received the model: see :class:`fedjax_sim.sending.relevant_only`. If no client
    sends, w is unchanged.

    Args:
        clients_per_round: m: clients per round, sampled without replacement; the paper uses all.
        relevance: v: fraction of an update's signs that must agree; 0 is FedAvg. Random directions
          agree in one half.

    Returns:
        The algorithm. Memory: one model and the signs of one per client. Traffic per round: m
        models down, at most m up.

    Source: Wang, Wang, Li, "CMFL: mitigating communication overhead for federated learning", ICDCS
    2019 <https://doi.org/10.1109/ICDCS.2019.00099>.

    Note:
        The threshold is the same in all rounds.
    """
    return compose(
        local,
        clients_per_round,
        sending=(sending.relevant_only(relevance),),
        weighting=client_weights(equal_weights),
    )


@method
def stc(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    sparsity: float = 1 / 400,
    equal_weights: bool = True,
) -> Algorithm:
    r"""STC: sparse ternary compression in both directions, with error feedback on both sides.

    .. math:: \tilde\Delta_k = \mathrm{STC}(\Delta_k + r_k), \quad
              r_k \leftarrow \Delta_k + r_k - \tilde\Delta_k, \qquad
              \tilde\Delta = \mathrm{STC}\Bigl(r + \frac1m \sum_{k \in U_t} \tilde\Delta_k\Bigr),
              \quad r \leftarrow r + \frac1m \sum_k \tilde\Delta_k - \tilde\Delta, \qquad
              w_{t+1} = w_t + \tilde\Delta

    The paper weights clients equally and communicates after each minibatch: ``max_steps=1`` of the
    local update.

    Returns:
        The algorithm. Traffic per round: m messages up; m times ⌈N/m⌉ messages down, or m models if
        that is less. Non-trainable variables are sent whole.

    Source: Sattler, Wiedemann, Müller, Samek, "Robust and communication-efficient federated
    learning from non-i.i.d. data", 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 2.

    Example:
        >>> import jax, optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.stc(local, clients_per_round=5, sparsity=0.05)
        >>> problem.accuracy(algorithm, rounds=10) > 0.8
        True
        >>> variables = jax.eval_shape(problem.model.init, jax.random.key(0))
        >>> traffic = algorithm.traffic(variables, problem.data)
        >>> traffic.download, traffic.upload  # bytes; a model has 2,600
        (64, 32)
    """
    code = compression.ternary(sparsity)
    return compose(
        local,
        clients_per_round,
        sending=(compression.compressed(code),),
        weighting=client_weights(equal_weights),
        server=compression.compress_server(server.replace(), code),
    )


@method
def fedavg_top_k(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    sparsity: float = 1 / 100,
    feedback: bool = True,
    threshold: float | None = None,
    clusters: Clusters | None = None,
) -> Algorithm:
    r"""FedAvg with top-k uploads: the largest entries of each update, with error feedback.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} C(\Delta_k + r_k), \qquad
              r_k \leftarrow \Delta_k + r_k - C(\Delta_k + r_k)

    Args:
        feedback: add the unsent entries to the client's next update (error feedback).
        threshold: λ: send all entries of at least this magnitude, however many, instead of a fixed
          fraction: see :class:`fedjax_sim.compression.hard_threshold`.
        clusters: L: reduce the entries to L values by k-means and entropy-code them; with 3,
          ``sparsity=0.3`` and ``feedback=False`` it is FedZip: see
          :class:`fedjax_sim.compression.clustered`.

    Returns:
        The algorithm; with ``sparsity=1`` or ``threshold=0`` it is FedAvg, up to rounding. Traffic
        per round: m models down; m messages up, with 32 bits and a position for each entry sent, or
        the entropy of the clusters.

    Source: Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017
    <https://arxiv.org/abs/1704.05021>, which sends gradients instead of updates; Sahu, Dutta,
    Abdelmoniem, Banerjee, Canini, Kalnis, "Rethinking gradient sparsification as total error
    minimization", NeurIPS 2021 <https://arxiv.org/abs/2108.00951>, for the threshold; Malekijoo,
    Fadaeieslam, Malekijou, Homayounfar, Alizadeh-Shabdiz, Rawassizadeh, "FedZip: a compression
    framework for communication-efficient federated learning", 2021
    <https://arxiv.org/abs/2102.01593>, for the clusters.

    Example:
        >>> algorithm = fs.algorithms.fedavg_top_k(local, clients_per_round=5, sparsity=0.1)
        >>> problem.accuracy(algorithm, rounds=3) > 0.7
        True
    """
    code: compression.Compressor = compression.top_k(sparsity)
    if threshold is not None:
        code = compression.hard_threshold(threshold)
    if clusters is not None:
        code = compression.entropy_coded(compression.clustered(code, clusters))
    return compose(
        local,
        clients_per_round,
        sending=(compression.compressed(code, feedback=feedback),),
    )


@method
def fedavg_qsgd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    levels: int = 127,
    entropy_coded: bool = False,
) -> Algorithm:
    r"""FedAvg with QSGD (FedPAQ): uploads are rounded stochastically to s levels, without bias.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} Q_s(\Delta_k), \qquad
              \mathbb{E}\,Q_s(\Delta_k) = \Delta_k

    Args:
        levels: s: levels between 0 and an update's norm; 127 take 8 bits with the sign.
        entropy_coded: count frequent levels with fewer bits, as an entropy code sends them: see
          :class:`fedjax_sim.compression.entropy_coded`.

    Returns:
        The algorithm. Traffic per round: m models down; m messages up, with ⌈log2(2s + 1)⌉ bits per
        entry, fewer if entropy-coded.

    Source: Reisizadeh, Mokhtari, Hassani, Jadbabaie, Pedarsani, "FedPAQ: a communication-efficient
    federated learning method with periodic averaging and quantization", AISTATS 2020
    <https://arxiv.org/abs/1909.13014>, Algorithm 1, where all n_k are equal; Alistarh, Grubic, Li,
    Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
    NeurIPS 2017 <https://arxiv.org/abs/1610.02132>, section 3.1, for the quantiser.
    """
    code = compression.stochastic_quantisation(levels)
    return compose(
        local,
        clients_per_round,
        sending=(
            compression.compressed(
                compression.entropy_coded(code) if entropy_coded else code, feedback=False
            ),
        ),
    )


@method
def fedavg_sketched(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    share: float = 0.25,
    bits: int = 2,
    rotate: bool = True,
) -> Algorithm:
    r"""FedAvg with sketched uploads: a random subset of the entries, rotated and quantised.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} C(\Delta_k), \qquad
              \mathbb{E}\,C(\Delta_k) = \Delta_k

    where C keeps a fraction s of the entries, scaled by 1/s, rotates them at random and quantises
    them to b bits each: see :class:`fedjax_sim.compression.random_mask`,
    :class:`fedjax_sim.compression.rotated` and
    :class:`fedjax_sim.compression.uniform_quantisation`.

    Args:
        share: s: fraction of an update's entries that is sent; 1 sends all.
        bits: b: bits per entry.
        rotate: apply a random rotation before quantisation.

    Returns:
        The algorithm. Traffic per round: m models down; m messages up, with b bits for each of s n
        entries, which the rotation pads to a power of two.

    Source: Konečný, McMahan, Yu, Richtárik, Suresh, Bacon, "Federated learning: strategies for
    improving communication efficiency", 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    Note:
        Here, the entries of all layers form a single vector, quantised over one range.
    """
    levels = compression.uniform_quantisation(bits)
    code = compression.random_mask(share, compression.rotated(levels) if rotate else levels)
    return compose(
        local,
        clients_per_round,
        sending=(compression.compressed(code, feedback=False),),
    )
