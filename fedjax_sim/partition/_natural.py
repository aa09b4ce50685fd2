"""Clients that the data came with: speaking roles, hospitals, writers."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import check_integer
from fedjax_sim.partition.table import Partition, partition_from_lists


def natural(groups: ArrayLike, *, min_size: int = 1, ids: ArrayLike | None = None) -> Partition:
    """One client for each natural group, in ascending order of their ids; nothing is random.

    Args:
        groups: ``int[n]``, the group of every sample.
        min_size: groups with fewer samples are left out, and their samples stay unused.
        ids: ``int[N]``, the groups that become clients 0 … N - 1; those of other groups stay
            unused. Two arrays whose groups differ, such as training and test samples, number their
            clients alike only if both are given the same ids.

    Returns:
        The partition; a sample of a kept group is used once.

    Raises:
        ValueError: if groups or ids are no list of integers, no group has min_size samples, an id
            comes twice, or one has fewer than min_size.

    Example:
        >>> p = natural([7, 3, 7, 7, 9], min_size=1)
        >>> p.name, p.sizes.tolist(), p.index.tolist()
        ('natural', [1, 3, 1], [1, 0, 2, 3, 4])
        >>> natural([9, 8, 3], ids=[3, 9]).index.tolist()
        [2, 0]
    """
    of_sample = _integers("groups", groups)
    known, rank, sizes = np.unique(of_sample, return_inverse=True, return_counts=True)
    if not 1 <= check_integer("min_size", min_size) <= sizes.max():
        raise ValueError(
            f"min_size must be in 1 to {sizes.max()}, the size of the largest group, got {min_size}"
        )
    kept = np.flatnonzero(sizes >= min_size)
    if ids is not None:
        wanted = _integers("ids", ids)
        if np.unique(wanted).size < wanted.size:
            raise ValueError(
                f"ids must be different, got {wanted.size - np.unique(wanted).size} twice"
            )
        lacking = np.setdiff1d(wanted, known[kept])
        if lacking.size:
            raise ValueError(
                f"ids must be groups with at least {min_size} samples, got {lacking[0]}"
                + (f" and {lacking.size - 1} more without" if lacking.size > 1 else "")
            )
        kept = np.searchsorted(known, wanted)
    by_group = np.split(np.argsort(rank, kind="stable"), np.cumsum(sizes)[:-1])
    name = f"natural({min_size})" if min_size > 1 else "natural"
    return partition_from_lists([by_group[group] for group in kept], name)


def _integers(name: str, values: ArrayLike) -> "np.ndarray[tuple[int], np.dtype[np.integer]]":
    found = np.asarray(values)
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{name} must be int [n], got {found.dtype} {list(found.shape)}")
    return found
