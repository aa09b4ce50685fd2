"""Samplers by name, and their text form for the command line."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import check_arguments, even_sizes
from fedjax_sim.partition.dirichlet import dirichlet_over_classes, dirichlet_over_clients
from fedjax_sim.partition.limit_label import limit_label, limit_label_emd
from fedjax_sim.partition.table import Partition, partition_from_lists


def iid(labels: ArrayLike, clients: int, *, seed: int) -> Partition:
    """Shuffle all samples and cut them into equal parts; classes are not stratified.

    Args:
        labels: int [n]; only their number matters.
        clients: Number of clients K.
        seed: Of the shuffle.

    Returns:
        The partition; every sample is used once, and sizes differ by at most 1.

    Raises:
        ValueError: clients is not in 1 … n.

    >>> iid(np.zeros(10, int), 4, seed=0).sizes.tolist()
    [3, 3, 2, 2]
    """
    y, _, rng = check_arguments(labels, clients, seed)
    cuts = np.cumsum(even_sizes(y.size, clients))[:-1]
    return partition_from_lists(np.split(rng.permutation(y.size), cuts), "iid")


SAMPLERS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "ll": limit_label,
    "dirichlet": dirichlet_over_clients,
    "dirichlet_classes": dirichlet_over_classes,
    "emd": limit_label_emd,
}

# Text form, required arguments and all arguments in order.
_FORMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "iid": ("iid", 0, ()),
    "ll": ("ll(t, f[, min_per_class])", 2, ("labels_per_client", "fraction", "min_per_class")),
    "dirichlet": ("dirichlet(alpha)", 1, ("alpha",)),
    "dirichlet_classes": ("dirichlet_classes(alpha)", 1, ("alpha",)),
    "emd": ("emd(target)", 1, ("emd",)),
}
_INTEGERS = {"labels_per_client", "min_per_class"}


def parse_sampler(text: str) -> tuple[str, Callable[[ArrayLike, int, int], Partition]]:
    """Turn a text such as "ll(2, 0.875)" into a sampler.

    Args:
        text: `iid`, `ll(t, f)`, `ll(t, f, min_per_class)`, `dirichlet(alpha)` (over clients),
            `dirichlet_classes(alpha)` or `emd(target)`; numbers may be fractions such as 7/9.

    Returns:
        The key in `SAMPLERS`, and a function (labels, clients, seed) -> Partition.

    Raises:
        ValueError: None of these forms. (Ranges are checked when the sampler is called.)

    >>> name, sample = parse_sampler("ll(1, 7/9)")
    >>> name, sample(np.arange(180) % 2, 2, 0).sizes.tolist()
    ('ll', [90, 90])
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    name, inside = (match[1], (match[2] or "").strip()) if match else ("", "")
    words = [word.strip() for word in inside.split(",")] if inside else []
    if name not in _FORMS or not _FORMS[name][1] <= len(words) <= len(_FORMS[name][2]):
        raise _no_such_form(text)
    try:
        options = {
            key: _number(key, word) for key, word in zip(_FORMS[name][2], words, strict=False)
        }
    except (ValueError, ZeroDivisionError) as error:
        raise _no_such_form(text) from error
    function = SAMPLERS[name]

    def sample(labels: ArrayLike, clients: int, seed: int) -> Partition:
        return function(labels, clients, seed=seed, **options)

    return name, sample


def _number(key: str, word: str) -> Any:
    if key in _INTEGERS:
        return int(word)
    over, _, under = word.partition("/")
    return float(over) / float(under or 1)


def _no_such_form(text: str) -> ValueError:
    forms = ", ".join(form for form, _, _ in _FORMS.values())
    return ValueError(f"sampler={text!r} is not understood; allowed: {forms}")
