"""Synthetic(α, β) of the FedProx paper: a linear classifier for each device."""

import numpy as np

from fedjax_sim.data.dataset import Dataset, from_arrays

FEATURES, CLASSES = 60, 10


def synthetic(
    alpha: float = 0.0, beta: float = 0.0, *, clients: int = 30, iid: bool = False, seed: int = 0
) -> Dataset:
    r"""Generates Synthetic(α, β), whose devices differ in their inputs and classifiers.

    Device k draws its classifier and the centre of its inputs once, then n_k samples:

    .. math::
        W_k, b_k &\sim N(u_k, 1), & u_k &\sim N(0, \alpha^2)
            && \text{in } R^{60 \times 10}, R^{10} \\
        v_k &\sim N(B_k, 1), & B_k &\sim N(0, \beta^2) && \text{in } R^{60} \\
        x &\sim N(v_k, \Sigma), & \Sigma_{jj} &= j^{-1.2} \\
        y &= \arg\max(x W_k + b_k), & n_k &= 50 + \lfloor LogNormal(4, 2) \rfloor

    α and β are standard deviations, as in the authors' code; the paper does not specify this. In
    these equations α has no effect, as u_k adds the same constant to all ten scores. The devices'
    classifiers differ even at α = 0, by the unit variance of W_k. In the IID version all devices
    share W and b ~ N(0, 1), and v_k = 0.

    Args:
        alpha: α, at least 0; 0 if iid.
        beta: β, at least 0; 0 if iid.
        clients: K, the number of devices, at least 1.
        iid: whether all devices have the same distribution.
        seed: random seed. Sizes depend only on seed and clients.

    Returns:
        The data set, with one natural client for each device and inputs that are not scaled. The
        test set is the last tenth of each device's samples, rounded up.

    Raises:
        ValueError: if an argument is out of range.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020 <https://arxiv.org/abs/1812.06127>,
    section 5.1; the authors' code, <https://github.com/litian96/FedProx>.

    Example:
        >>> data = synthetic(1, 1)
        >>> data.name, data.train_x.shape[1:], data.classes, len(data.client_names)
        ('synthetic(1, 1)', (60,), 10, 30)
    """
    for name, value in {"alpha": alpha, "beta": beta}.items():
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")
        if iid and value:
            raise ValueError(f"{name} must be 0 if iid is True, got {value}")
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    rng = np.random.default_rng(seed)
    sizes = 50 + rng.lognormal(4.0, 2.0, clients).astype(np.int64)
    u, b_mean = alpha * rng.normal(size=clients), beta * rng.normal(size=clients)
    spread = np.arange(1, FEATURES + 1) ** -0.6  # the square root of Σ's diagonal
    shared = rng.normal(size=(FEATURES + 1, CLASSES))  # W, and b as its last row
    x, y, test = [], [], []
    for k, n in enumerate(sizes):
        weights = shared if iid else u[k] + rng.normal(size=shared.shape)
        centre = 0.0 if iid else b_mean[k] + rng.normal(size=FEATURES)
        x.append(centre + spread * rng.normal(size=(n, FEATURES)))
        y.append(np.argmax(x[-1] @ weights[:-1] + weights[-1], axis=1))
        test.append(np.arange(n) >= n * 9 // 10)
    return from_arrays(
        "synthetic(iid)" if iid else f"synthetic({alpha:g}, {beta:g})",
        np.concatenate(x),
        np.concatenate(y),
        test=np.concatenate(test),
        client=np.repeat(np.arange(clients), sizes),
        scale=False,
        classes=CLASSES,
        test_set="the last tenth of each device's samples",
    )
