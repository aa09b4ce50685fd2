"""Methods that share statistics or outputs instead of models."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Model, Objective
from fedjax_sim.client import terms
from fedjax_sim.client.agreement import agreed
from fedjax_sim.plan import exchange
from fedjax_sim.round import Algorithm, compose


@method
def fedproto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    classes: int,
    lam: float = 1.0,
    equal_clients: bool = False,
) -> Algorithm:
    r"""FedProto: clients share the mean features of each class, and keep their models.

    .. math:: F_b(w_k) + \frac{\lambda}{|b|} \sum_{i \in b} \frac1D \lVert z_i - \bar C_{y_i}
              \rVert^2, \qquad
              \bar C_j = \frac{\sum_{k \in U} n_{k,j} C_{k,j}}{\sum_{k \in U} n_{k,j}}

    The features z are the inputs of the model's last dense layer, and C_{k,j} their mean over the
    client's samples of class j; see :func:`fedjax_sim.terms.prototypes`. A client predicts by its
    own model. (The paper's clients take the class of the nearest prototype; the authors' code
    reports both.) What is evaluated for all is the initial model: look at the personal scores.

    Args:
        clients_per_round: m, the cohort drawn without replacement; the authors take all.
        model: the model that it trains; the same for all clients.
        classes: M.
        lam: λ, the pull towards the prototypes; the paper takes 1, and 0.1 on CIFAR-10.
        equal_clients: weigh clients equally in a prototype, as in the authors' code, not by their
            samples of its class.

    Returns:
        The algorithm. Memory: a model for every client. Traffic per round: 4 M (D + 1) bytes down
        to each of m clients, as many up.

    Raises:
        ValueError: if the model has no features or no head, the objective is no ``empirical_risk``,
            lam is negative, or local shares anything as large as the model.

    Source: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across
    heterogeneous clients", AAAI 2022 <https://arxiv.org/abs/2105.00243>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedproto(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective,
        ...     classes=problem.classes,
        ... )
        >>> algorithm.parts.exchange
        nothing()
    """
    changed = local.change(
        objective=terms.remade(objective, term=terms.near_prototypes(lam)),
        shared=terms.prototypes(model, classes, equal_clients=equal_clients),
    )
    return compose(
        changed,
        clients_per_round,
        exchange=exchange.nothing(),
    )


@method
def fd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    classes: int,
    distill_weight: float = 1.0,
) -> Algorithm:
    r"""FD, federated distillation: clients learn from the others' mean output of each class.

    .. math:: F_b(w_k) - \frac{\gamma}{|b|} \sum_{i \in b} \sum_c \hat q_{k,y_i}(c)
              \log \sigma(f(w_k, x_i))_c

    with :math:`\hat q_{k,j}` the mean output of class j over the other clients of the last cohort
    that have it; see :func:`fedjax_sim.terms.near_outputs`. Every client keeps its model. What is
    evaluated for all is the initial model: look at the personal scores.

    Args:
        clients_per_round: m, the cohort drawn without replacement; the paper takes all.
        model: the model that it trains; the same for all clients.
        classes: M.
        distill_weight: γ, how much the others' outputs count; the paper does not say its own.

    Returns:
        The algorithm. Memory: a model for every client. Traffic per round: 4 M (M + 1) bytes down
        to each of m clients, 4 M² up.

    Raises:
        ValueError: if the objective is no ``empirical_risk``, γ is negative, or local shares
            anything as large as the model.

    Source: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device machine learning:
    federated distillation and augmentation under non-IID private data", 2018
    <https://arxiv.org/abs/1811.11479>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fd(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective,
        ...     classes=problem.classes,
        ... )
        >>> algorithm.parts.exchange
        nothing()
    """
    changed = local.change(
        objective=terms.remade(objective, term=terms.near_outputs(distill_weight)),
        shared=terms.class_outputs(model, classes),
        memory=terms.own_outputs(model, classes),
    )
    return compose(
        changed,
        clients_per_round,
        exchange=exchange.nothing(),
    )


@method
def fedmd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    classes: int,
    public_samples: int = 200,
    digest_epochs: int = 1,
    digest_lr: float = 1e-3,
    digest_batch_size: int = 128,
) -> Algorithm:
    r"""FedMD: clients share their logits on public samples, learn from the mean, keep their models.

    .. math:: \bar f(x_i) = \frac{1}{|U|} \sum_{k \in U} f(w_k, x_i), \qquad
              w_k \leftarrow \mathrm{train}\Bigl(\mathrm{Adam}\bigl(w_k,
              \tfrac{1}{M} \lVert f(w, x_i) - \bar f(x_i) \rVert_1,\, D_0\bigr),\, D_k\Bigr)

    see :func:`fedjax_sim.local.agreed`. All networks are equal here; the paper's differ. Its
    clients train on the public samples with their labels before the first round, which is
    ``--initial`` with the weights of such a run. Every round has the same public samples, where the
    authors' code draws 5,000 of many anew. What is evaluated for all is the initial model: look at
    the personal scores.

    Args:
        clients_per_round: m, the cohort drawn without replacement; the paper takes all.
        model: the model that it trains; the same for all clients.
        classes: M.
        public_samples: n, of the data's ``root`` the first so many; of fewer all.
        digest_epochs: over them at every visit; 0 is each client alone.
        digest_lr: Adam's rate.
        digest_batch_size: public samples of a minibatch.

    Returns:
        The algorithm, for data with ``root`` samples. Memory: a model for every client. Traffic per
        round: 4 n M + 4 bytes down to each of m clients, 4 n M up.

    Raises:
        ValueError: if a number is out of range, or local shares anything as large as the model; in
            the first round, if the data have no ``root``.

    Source: Li, Wang, "FedMD: heterogenous federated learning via model distillation", 2019
    <https://arxiv.org/abs/1910.03581>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedmd(
        ...     local, clients_per_round=5, model=problem.model, classes=problem.classes
        ... )
        >>> algorithm.parts.exchange
        nothing()
    """
    return compose(
        agreed(
            local,
            model,
            classes,
            samples=public_samples,
            digest_epochs=digest_epochs,
            digest_lr=digest_lr,
            digest_batch_size=digest_batch_size,
        ),
        clients_per_round,
        exchange=exchange.nothing(),
    )
