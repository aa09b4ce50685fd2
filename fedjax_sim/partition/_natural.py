"""Clients that the data came with: speaking roles, hospitals, writers."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import check_integer
from fedjax_sim.partition.table import Partition, partition_from_lists


def natural(groups: ArrayLike, *, min_size: int = 1) -> Partition:
    """One client for each natural group, in ascending order of their ids; nothing is random.

    Args:
        groups: ``int[n]``, the group of every sample.
        min_size: groups with fewer samples are left out, and their samples stay unused.

    Returns:
        The partition; a sample of a kept group is used once.

    Raises:
        ValueError: if groups are no list of integers, or no group has min_size samples.

    Example:
        >>> p = natural([7, 3, 7, 7, 9], min_size=1)
        >>> p.name, p.sizes.tolist(), p.index.tolist()
        ('natural', [1, 3, 1], [1, 0, 2, 3, 4])
    """
    ids = np.asarray(groups)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"groups must be int [n], got {ids.dtype} {list(ids.shape)}")
    _, rank, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    if not 1 <= check_integer("min_size", min_size) <= sizes.max():
        raise ValueError(
            f"min_size must be in 1 to {sizes.max()}, the size of the largest group, got {min_size}"
        )
    by_group = np.split(np.argsort(rank, kind="stable"), np.cumsum(sizes)[:-1])
    kept = [members for members in by_group if members.size >= min_size]
    return partition_from_lists(kept, f"natural({min_size})" if min_size > 1 else "natural")
