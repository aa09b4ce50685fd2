"""Skew in features and wrong labels, applied to arrays before they become client data."""

from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.arrays import one_array
from fedjax_sim.partition.table import Partition, validate_partition

Number = TypeVar("Number", bound=np.generic)


def feature_noise(
    x: NDArray[Number], partition: Partition, *, sigma: float, seed: int
) -> NDArray[Number]:
    r"""Adds Gaussian noise to each client's samples, increasing with the client number.

    .. math:: \tilde x = x + \mathcal N\Bigl(0, \Bigl(\frac{\sigma k}{N - 1}\Bigr)^2\Bigr)
              \text{ at client } k = 0, \dots, N - 1

    Args:
        x: ``[n, ...]``, floating point; or uint8 for images, with noise scaled by 255 and results
            rounded and clipped.
        partition: of N clients; samples of no client are unchanged.
        sigma: σ, the standard deviation at the last client, at least 0.
        seed: random seed.

    Returns:
        A copy of x with the same shape and dtype.

    Raises:
        ValueError: if sigma or the seed is out of range, x is neither floating point nor uint8, or
            a sample belongs to several clients.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>, noise-based feature
    imbalance. The authors' README calls the level a variance; their code uses it as the standard
    deviation, as here.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.zeros((4, 2), np.float32)
        >>> noisy = feature_noise(x, partition_from_lists([[0, 1], [2, 3]]), sigma=0.1, seed=0)
        >>> noisy[:2].any(), noisy[2:].all()
        (np.False_, np.True_)
    """
    if not 0 <= sigma < np.inf:
        raise ValueError(f"sigma must be at least 0 and finite, got {sigma}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    x = np.asarray(one_array("x", x))
    image = x.dtype == np.uint8
    if not image and not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"x must be floating point or uint8, got {x.dtype}")
    level = sigma * np.linspace(0.0, 1.0, partition.sizes.size)
    rng, noisy = np.random.default_rng(seed), x.copy()
    for rows, deviation in zip(_client_rows(x, partition), level, strict=True):
        noise = rng.normal(0.0, deviation * (255 if image else 1), x[rows].shape)
        values = np.asarray(x[rows], np.float64) + noise
        noisy[rows] = np.clip(np.rint(values), 0, 255) if image else values
    return noisy


def feature_rotation(
    x: NDArray[Number], partition: Partition, *, groups: int = 4
) -> NDArray[Number]:
    """Rotates the images of client k by (k mod groups) · 360°/groups, without interpolation.

    The angle depends only on the client number, so that a partition of test samples over the same
    clients rotates them by the same angles.

    Args:
        x: ``[n, height, width, channels]`` or ``[n, height, width]``.
        partition: of N clients; samples of no client are unchanged.
        groups: number of angles, 2 (0° and 180°) or 4 (0°, 90°, 180°, 270°; square images only).

    Returns:
        A copy of x with the same shape and dtype.

    Raises:
        ValueError: if groups is not 2 or 4, x does not hold such images, or a sample belongs to
            several clients.

    Source: Ghosh et al. 2020 <https://arxiv.org/abs/2006.04088>, rotated MNIST.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.arange(8).reshape(2, 2, 2)
        >>> feature_rotation(x, partition_from_lists([[0], [1]]), groups=2).tolist()
        [[[0, 1], [2, 3]], [[7, 6], [5, 4]]]
    """
    if groups not in (2, 4):
        raise ValueError(f"groups must be 2 or 4, got {groups}")
    x = np.asarray(one_array("x", x))
    if x.ndim not in (3, 4) or (groups == 4 and x.shape[1] != x.shape[2]):
        wanted = "square images" if groups == 4 else "images"
        raise ValueError(f"x must be {wanted} [n, height, width(, channels)], got {list(x.shape)}")
    rotated = x.copy()
    for client, rows in enumerate(_client_rows(x, partition)):
        rotated[rows] = np.rot90(x[rows], client % groups * (4 // groups), axes=(1, 2))
    return rotated


def label_noise(
    y: NDArray[Number],
    partition: Partition,
    *,
    rate: ArrayLike,
    classes: int,
    kind: Literal["symmetric", "pair"] = "symmetric",
    seed: int,
) -> NDArray[Number]:
    r"""Replaces labels of each client by wrong ones, each with the client's probability.

    .. math:: P(\tilde y = j \mid y = i) = \begin{cases} \epsilon_k / (M - 1) & j \ne i
              & \text{symmetric} \\ \epsilon_k & j = i + 1 \bmod M & \text{pair} \end{cases}

    Test samples keep their labels if they are rows of other arrays, or come from the original y.

    Args:
        y: ``int[n]``, class labels in 0 … M - 1.
        partition: of N clients; samples of no client are unchanged.
        rate: ε, the probability that a label is wrong, for all clients or ``f64[N]`` by client,
            such as ``0.4 * fs.attacks.byzantine(N, 0.3)`` for a share of them.
        classes: M, at least 2.
        kind: "symmetric" for any other class, "pair" for the next one.
        seed: random seed.

    Returns:
        A copy of y with the same shape and dtype.

    Raises:
        ValueError: if a setting or a label is out of range, or a sample belongs to several clients.

    Source: Han et al. 2018 <https://arxiv.org/abs/1804.06872>, section 4; with rates by client Xu
    et al. 2022 <https://arxiv.org/abs/2204.04677>, section 4.1.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> clients = partition_from_lists([[0, 1], [2, 3]])
        >>> y = np.array([0, 2, 0, 2])
        >>> label_noise(y, clients, rate=[0, 1], classes=3, kind="pair", seed=0).tolist()
        [0, 2, 1, 0]
    """
    y, rates = np.asarray(y), np.asarray(rate, np.float64)
    clients = partition.sizes.size
    if rates.shape not in ((), (clients,)) or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(
            f"rate must be a number in [0, 1], or one for each of {clients} clients, got {rate!r}"
        )
    if kind not in ("symmetric", "pair"):
        raise ValueError(f"kind must be 'symmetric' or 'pair', got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if classes < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    if y.ndim != 1 or y.dtype.kind not in "iu" or not np.isin(y, np.arange(classes)).all():
        raise ValueError(
            f"y must be integers [n] in 0..{classes - 1}, got {np.array2string(y, threshold=6)}"
        )
    rng, noisy = np.random.default_rng(seed), y.copy()
    each = np.broadcast_to(rates, clients)
    for rows, chance in zip(_client_rows(y, partition), each, strict=True):
        wrong = rng.random(rows.size) < chance
        steps = rng.integers(1, classes, rows.size) if kind == "symmetric" else 1
        noisy[rows] = np.where(wrong, (y[rows].astype(np.int64) + steps) % classes, y[rows])
    return noisy


def _client_rows(x: NDArray[Number], partition: Partition) -> list[NDArray[np.int32]]:
    partition.check_unshared("share afterwards")
    validate_partition(partition, len(x))
    return partition.lists
