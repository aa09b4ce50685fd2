"""FedDF: a server that distils the clients' models into the mean of their weights."""

from __future__ import annotations

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, Model, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def feddf(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    distill_steps: int = 100,
    distill_lr: float = 1e-3,
    distill_batch_size: int = 128,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedDF: the mean of the models learns what they say together of unlabelled samples.

    .. math:: q(x) = \sigma\Bigl(\frac{1}{m} \sum_{k \in U_t} f(w_k, x)\Bigr), \qquad
              w \leftarrow \sum_{k \in U_t} p_k w_k, \qquad
              w \leftarrow w - \eta_i\, \mathrm{Adam}\Bigl(\nabla \frac{1}{|b|} \sum_{x \in b}
              \mathrm{KL}\bigl(q(x) \,\|\, \sigma(f(w, x))\bigr)\Bigr)

    with :math:`p_k = n_k / \sum_j n_j`, the logits f of a model, and the softmax σ; b are
    minibatches of the server's own samples, of which the labels are not read. The rate η_i falls to
    0 along a cosine within a round.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        model: the model that it trains.
        distill_steps: minibatches by which the server learns in a round; 0 is FedAvg.
        distill_lr: Adam's rate in the first of them.
        distill_batch_size: samples of the server's in each.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a number is out of range.

    Source: Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated
    learning", NeurIPS 2020 <https://arxiv.org/abs/2006.07242>, Algorithm 1.

    Note:
        Adam, its rate and cosine, clipping and batch size are those of the authors' code. Its
        server learns longer, up to 10,000 steps, stops early and keeps the best model by accuracy
        on labelled validation samples; here it takes all steps. Its unlabelled samples come from
        another data set, those of ``--server-fraction`` from the clients' own, which is easier. All
        models are of one architecture here.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.feddf(
        ...     local, clients_per_round=5, model=problem.model, distill_steps=20
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.distilled(model, distill_steps, distill_lr, batch_size=distill_batch_size),
        execution=execution,
    )
