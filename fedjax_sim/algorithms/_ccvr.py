"""FedAvg, and a head that is calibrated in the end."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Model, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import finish, weighting


@part
def ccvr(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    classes: int,
    virtual_samples: int = 200,
    calibration_steps: int = 100,
    calibration_lr: float = 0.1,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""CCVR: FedAvg, and after the last round a head that learns from virtual features.

    .. math:: \tilde z \sim \mathcal N(\mu_j, \Sigma_j), \qquad
              (W, b) \leftarrow (W, b) - \eta_c \nabla \frac{1}{M V} \sum_{j, \tilde z}
              \ell(\tilde z W + b, j)

    μ_j and Σ_j are the mean and covariance of class j's features over the samples of all clients,
    which send the moments of their own; see :func:`fedjax_sim.finish.calibrated`. During the run
    FedAvg's model is evaluated, after the last round the calibrated one. Any method may end so:
    ``replace(finish=...)``.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        model: the model that it trains, whose outputs are those of its head.
        classes: M.
        virtual_samples: V, the features that are drawn of each class.
        calibration_steps: the steps on all of them.
        calibration_lr: η_c.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples. The moments of a
          class are over its samples all the same.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up; in the end N models down and from
        each client 4 M (D² + D + 1) bytes up, D the width of the head.

    Raises:
        ValueError: if the model has no features, its head is not a matrix and a bias at most, or a
            number is out of range.

    Source: Luo, Chen, Hu, Zhang, Liang, Feng, "No fear of heterogeneity: classifier calibration for
    federated learning with non-IID data", NeurIPS 2021 <https://arxiv.org/abs/2106.05001>,
    Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.ccvr(
        ...     local, clients_per_round=5, model=problem.model, classes=problem.classes
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        finish=finish.calibrated(
            model, classes, samples=virtual_samples, steps=calibration_steps, lr=calibration_lr
        ),
        execution=execution,
    )
