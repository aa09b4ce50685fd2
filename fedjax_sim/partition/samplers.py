"""Samplers by name, with their text forms and expected EMDs."""

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.base import binding, calls
from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import keywords, takes
from fedjax_sim.base.spelling import did_you_mean
from fedjax_sim.partition._dirichlet import dirichlet, dirichlet_classes
from fedjax_sim.partition._label_free import iid, natural, power_law, quantity
from fedjax_sim.partition._limit_label import limit_label, limit_label_q, q_sampler
from fedjax_sim.partition._matched import matched
from fedjax_sim.partition._shards import label_sets, shards
from fedjax_sim.partition._target_emd import limit_label_emd, robin_hood
from fedjax_sim.partition.expected import (
    expected_dirichlet,
    expected_ll,
    expected_ll_q,
    expected_target,
)
from fedjax_sim.partition.table import Partition


def _natural(
    labels: ArrayLike,
    clients: int | None,
    *,
    groups: ArrayLike | None,
    min_size: int = 1,
    seed: int,
) -> Partition:
    """Calls :func:`natural` with the arguments of other samplers; the groups fix the clients."""
    if groups is None:
        raise ValueError("the data name no clients: use another sampler, such as dirichlet(0.5)")
    if np.shape(groups) != np.shape(labels)[:1]:
        raise ValueError(
            f"groups must be a natural group for each of the {len(np.asarray(labels))} samples, "
            f"got shape {list(np.shape(groups))}"
        )
    partition = natural(groups, min_size=min_size)
    if clients not in (None, partition.sizes.size):
        raise ValueError(
            f"clients must be {partition.sizes.size}, the number of natural groups with at least "
            f"{min_size} samples, got {clients}"
        )
    return partition


@functools.wraps(matched)
def _matched(
    labels: ArrayLike,
    clients: int,
    *,
    features: Mapping[str, ArrayLike] | None,
    theta: float | None = None,
    **options: Any,
) -> Partition:
    """Calls :func:`matched`, with the features of the data only if theta is given."""
    used = None if theta is None else features
    return matched(labels, clients, theta=theta, features=used, **options)


DATA = ("seed", "groups", "features")
"""Keyword arguments that a sampler receives from the run and the data, not from the user."""

_NAMED = (robin_hood, dirichlet, dirichlet_classes, shards, label_sets, quantity, power_law)

SAMPLERS: Registry[Callable[..., Partition]] = Registry(
    "sampler",
    wanted="a function (labels, clients, *, seed, ...) -> Partition",
    fits=lambda value: takes(value, (0,), 1, seed=0),
    makes=lambda: (Partition,),
    own={
        "iid": iid,
        "ll": limit_label,
        "ll_q": limit_label_q,
        "q": q_sampler,
        "emd": limit_label_emd,
        **{own.__name__: own for own in _NAMED},
        "matched": _matched,
        "natural": _natural,
    },
)
"""Samplers by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""

EXPECTED: Mapping[str, Callable[..., float | None]] = {
    "ll": expected_ll,
    "ll_q": expected_ll_q,
    "q": functools.partial(expected_ll_q, labels_per_client=1),
    "dirichlet": expected_dirichlet,
    **dict.fromkeys(("emd", "robin_hood"), expected_target),
    **dict.fromkeys(("iid", "quantity", "power_law"), lambda classes, clients, **_: 0.0),
}
"""``(classes, clients, **arguments) -> EMD`` on balanced labels, or None if unknown, by sampler."""


@dataclass(frozen=True)
class Sample:
    """A sampler with its settings, returned by :func:`fedjax_sim.partition.parse_sampler`.

    Attributes:
        sampler: a key of ``SAMPLERS``, or the place of a sampler to import.
        options: its keyword arguments.

    >>> Sample("ll", {"labels_per_client": 1})(np.arange(180) % 2, 2, 0).name
    'll(1, 1)'
    """

    sampler: str
    options: Mapping[str, Any]

    def __call__(
        self,
        labels: ArrayLike,
        clients: int | None,
        seed: int,
        *,
        groups: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> Partition:
        """Samples a partition of the labels ``int[n]`` for K clients; None for all natural clients.

        Samplers that use them get the natural group of each sample, ``int[n]``, and ``int[n]`` of
        each categorical feature by name.
        """
        name, sampler = SAMPLERS.resolve(self.sampler)
        own, available = keywords(sampler), {"groups": groups, "features": features}
        inputs = {key: value for key, value in available.items() if key in own}
        partition: Any = sampler(labels, clients, seed=seed, **self.options, **inputs)
        if not isinstance(partition, Partition):
            raise ValueError(f"{name} must return a Partition, got {type(partition).__name__}")
        return partition


def parse_sampler(text: str) -> tuple[str, Sample]:
    """Parses the text form of a sampler, such as "ll(2, 0.875)".

    Args:
        text: text form of a sampler, such as ``iid``, ``ll(t, f)``, ``ll_q(t, q)``,
            ``q(q)``, ``emd(target)``, ``robin_hood(target)``, ``dirichlet(alpha)`` (over clients),
            ``dirichlet_classes(alpha)``, ``shards``, ``label_sets(t)``, ``quantity(alpha)``,
            ``power_law(a)``, ``matched(mu, lambda)`` or ``natural``, or
            ``package.module:function(alpha=0.3)`` for a sampler to import. Arguments may be given
            by name; numbers may be fractions such as 7/9.

    Returns:
        The key in ``SAMPLERS``, and a function ``(labels, clients, seed) -> Partition``.

    Raises:
        ValueError: if the text has no such form. Ranges are checked when the sampler is called.

    Example:
        >>> name, sample = parse_sampler("ll(1, 7/9)")
        >>> name, sample(np.arange(180) % 2, 2, 0).sizes.tolist()
        ('ll', [90, 90])
    """
    name, options = parse_form(text)
    return name, Sample(name, options)


def expected_emd(text: str, classes: int, clients: int) -> float | None:
    """Computes a sampler's EMD by its formula, for balanced labels and without sampling noise.

    Args:
        text: a text form, as for :func:`fedjax_sim.partition.parse_sampler`.
        classes: M.
        clients: K.

    Returns:
        The EMD, or its mean over seeds if it is random; None if the sampler has no formula.

    Raises:
        ValueError: if the text has no such form, or a setting is out of range for these classes.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.6, 3.8 and 3.13, fig. 3.1.

    Example:
        >>> round(expected_emd("ll(2, 7/8)", 10, 100), 4), round(expected_emd("q(0.8)", 10, 100), 4)
        (1.4, 1.4)
        >>> round(expected_emd("dirichlet(0.5)", 10, 10), 2)
        0.86
    """
    name, options = parse_form(text)
    return EXPECTED[name](classes, clients, **options) if name in EXPECTED else None


def parse_form(text: str) -> tuple[str, dict[str, Any]]:
    """Parses a text form into a key of ``SAMPLERS`` and keyword arguments.

    >>> parse_form("ll(1, 7/8)")
    ('ll', {'labels_per_client': 1, 'fraction': 0.875})
    """
    try:
        call = calls.as_call(calls.parse(text), text)
        name, sampler = SAMPLERS.resolve(call.name)
    except (UnknownNameError, calls.UnreadableError) as error:
        near = did_you_mean(text.partition("(")[0].strip(), SAMPLERS)
        raise _not_understood(text, {n: SAMPLERS[n] for n in near} or SAMPLERS) from error
    own = keywords(sampler, DATA)
    try:
        given = binding.arguments(call, {key: p.default is p.empty for key, p in own.items()})
        return name, {
            key: reader(own[key].annotation, key)(calls.word(node)) for key, node in given.items()
        }
    except (ValueError, KeyError) as error:
        raise _not_understood(text, {name: sampler}) from error


def _not_understood(text: str, allowed: Mapping[str, Callable[..., Partition]]) -> ValueError:
    forms = " or ".join(form_of(*named) for named in allowed.items())
    return ValueError(f"sampler {text!r} must be written {forms}")


def form_of(name: str, sampler: Callable[..., Partition]) -> str:
    """Returns the text form of a sampler, with the defaults of optional arguments.

    >>> def shards(labels, clients, *, seed, each: int, mixed: bool = False): ...
    >>> form_of("mine:shards", shards)
    'mine:shards(each, mixed=False)'
    """
    own = sorted(keywords(sampler, DATA).values(), key=lambda p: p.default is not p.empty)
    words = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in own]
    return f"{name}({', '.join(words)})" if words else name


def reader(hint: Any, name: str) -> Callable[[str], Any]:
    """Returns a reader of values of a type; the name of a switch turns it on.

    >>> reader(bool, "balanced")("balanced"), reader(float | None, "theta")("1")
    (True, 1.0)
    """
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is Literal:
        return lambda word: {str(choice): choice for choice in kinds}[word]
    readers: dict[Any, Callable[[str], Any]] = {
        bool: {"True": True, "False": False, name: True}.__getitem__,
        int: int,
        float: float,
    }
    return next((read for kind, read in readers.items() if kind in kinds), str)
