"""Samplers by name, with their text forms and expected EMDs."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.base import calls
from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import takes
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
    expected_none,
    expected_q,
    expected_target,
)
from fedjax_sim.partition.forms import (
    Form,
    form_from_signature,
    read_options,
    read_switch,
)
from fedjax_sim.partition.table import Partition


@functools.wraps(natural)
def _natural(
    labels: ArrayLike, clients: int | None, *, groups: ArrayLike | None, seed: int, **options: Any
) -> Partition:
    """Calls :func:`natural` with the arguments of other samplers; the groups fix the clients."""
    if groups is None or np.shape(groups) != np.shape(labels)[:1]:
        shape = "none" if groups is None else f"shape {list(np.shape(groups))}"
        raise ValueError(
            f"groups must be a natural group for each of the {len(np.asarray(labels))} samples, "
            f"which the data must have, got {shape}"
        )
    partition = natural(groups, **options)
    if clients not in (None, partition.sizes.size):
        raise ValueError(
            f"clients must be {partition.sizes.size}, the number of natural groups with at least "
            f"{options.get('min_size', 1)} samples, got {clients}"
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


FORMS: dict[str, Form] = {
    "iid": Form("iid", iid, {}, 0, expected_none),
    "ll": Form(
        "ll(t, f[, min_per_class])",
        limit_label,
        {"labels_per_client": int, "fraction": float, "min_per_class": int},
        2,
        expected_ll,
    ),
    "ll_q": Form(
        "ll_q(t, q)",
        limit_label_q,
        {"labels_per_client": int, "q": float},
        2,
        expected_ll_q,
    ),
    "q": Form("q(q)", q_sampler, {"q": float}, 1, expected_q),
    "emd": Form(
        "emd(target[, in_turn[, min_per_class]])",
        limit_label_emd,
        {"emd": float, "in_turn": read_switch("in_turn"), "min_per_class": int},
        1,
        expected_target,
    ),
    "robin_hood": Form(
        "robin_hood(target[, tolerance])",
        robin_hood,
        {"emd": float, "tolerance": float},
        1,
        expected_target,
    ),
    "dirichlet": Form(
        "dirichlet(alpha[, min_size[, balanced]])",
        dirichlet,
        {"alpha": float, "min_size": int, "balanced": read_switch("balanced")},
        1,
        expected_dirichlet,
    ),
    "dirichlet_classes": Form("dirichlet_classes(alpha)", dirichlet_classes, {"alpha": float}, 1),
    "shards": Form("shards[(each)]", shards, {"shards_per_client": int}, 0),
    "label_sets": Form("label_sets(t)", label_sets, {"labels_per_client": int}, 1),
    "quantity": Form("quantity(alpha)", quantity, {"alpha": float}, 1, expected_none),
    "power_law": Form("power_law(a)", power_law, {"exponent": float}, 1, expected_none),
    "matched": Form(
        "matched(mu, lambda[, theta])",
        _matched,
        {"mu": float, "lam": float, "theta": float},
        2,
        inputs=("features",),
    ),
    "natural": Form("natural[(min_size)]", _natural, {"min_size": int}, 0, inputs=("groups",)),
}

SAMPLERS: Registry[Callable[..., Partition]] = Registry(
    "sampler",
    wanted="a function (labels, clients, *, seed, ...) -> Partition",
    fits=lambda value: takes(value, (0,), 1, seed=0),
    makes=lambda: (Partition,),
    group="fedjax_sim.partitions",
    own={name: form.sampler for name, form in FORMS.items()},
)
"""Samplers by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""


class Sample(Protocol):
    """A sampler with its settings, returned by :func:`fedjax_sim.partition.parse_sampler`."""

    def __call__(
        self,
        labels: ArrayLike,
        clients: int | None,
        seed: int,
        *,
        groups: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> Partition:
        """Samples a partition.

        Args:
            labels: ``int[n]``.
            clients: K; None for all natural clients.
            seed: random seed.
            groups: ``int[n]``, natural group of each sample, for samplers that use it.
            features: ``int[n]`` of each categorical feature by name, for samplers that use them.
        """


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
    return name, bind_sampler(name, options)


def bind_sampler(name: str, options: Mapping[str, Any]) -> Sample:
    """Binds keyword arguments to a sampler of ``SAMPLERS``, which may take groups and features.

    >>> bind_sampler("ll", {"labels_per_client": 1})(np.arange(180) % 2, 2, 0).name
    'll(1, 1)'
    """
    name, sampler = SAMPLERS.resolve(name)
    form = form_of(name, sampler)

    def sample(
        labels: ArrayLike,
        clients: int | None,
        seed: int,
        *,
        groups: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> Partition:
        available = {"groups": groups, "features": features}
        inputs = {key: available[key] for key in form.inputs}
        partition: Any = sampler(labels, clients, seed=seed, **options, **inputs)
        if not isinstance(partition, Partition):
            raise ValueError(f"{name} must return a Partition, got {type(partition).__name__}")
        return partition

    return sample


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
    expected = form_of(name, SAMPLERS.resolve(name)[1]).expected
    return None if expected is None else expected(classes, clients, **options)


def parse_form(text: str, *, bare: bool = False) -> tuple[str, dict[str, Any]]:
    """Parses a text form into a key of ``SAMPLERS`` and keyword arguments.

    Required arguments may be missing if ``bare``, as flags give them.

    >>> parse_form("ll(1, 7/8)")
    ('ll', {'labels_per_client': 1, 'fraction': 0.875})
    """
    try:
        call = calls.as_call(calls.parse(text), text)
        name, sampler = SAMPLERS.resolve(call.name)
    except UnknownNameError as error:
        meant = did_you_mean(call.name, SAMPLERS)
        raise _not_understood(text, list(SAMPLERS.items()), meant) from error
    except calls.UnreadableError as error:
        raise _not_understood(text, list(SAMPLERS.items())) from error
    form = form_of(name, sampler)
    try:
        return name, read_options(form.arguments, call, 0 if bare else form.required)
    except (ValueError, KeyError) as error:
        known = {**SAMPLERS.known, name: sampler}
        raise _not_understood(text, list(known.items())) from error


def form_of(name: str, sampler: Callable[..., Partition]) -> Form:
    """Returns the text form of a sampler, made from the signature for a user's sampler."""
    return form_from_signature(name, sampler) if SAMPLERS.is_foreign(name) else FORMS[name]


def _not_understood(
    text: str, allowed: Sequence[tuple[str, Callable[..., Partition]]], meant: Sequence[str] = ()
) -> ValueError:
    forms = ", ".join(form_of(name, sampler).text for name, sampler in allowed)
    texts = [re.sub(r"^\s*[^\s(]+", name, text) for name in meant]
    hint = f"did you mean {' or '.join(texts)}? " if texts else ""
    return ValueError(f"sampler must be the text of one, got {text!r}; {hint}allowed: {forms}")
