"""Samplers by name, with their text form for the command line and their expected EMD."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.dirichlet import dirichlet_over_classes, dirichlet_over_clients
from fedjax_sim.partition.expected import (
    expected_dirichlet,
    expected_ll,
    expected_ll_q,
    expected_none,
    expected_q,
    expected_target,
)
from fedjax_sim.partition.limit_label import limit_label, limit_label_emd
from fedjax_sim.partition.limit_label_q import limit_label_q, q_sampler
from fedjax_sim.partition.matched import matched_dirichlet
from fedjax_sim.partition.natural import natural
from fedjax_sim.partition.quantity import iid, quantity_skew
from fedjax_sim.partition.robin_hood import robin_hood
from fedjax_sim.partition.table import Partition


@functools.wraps(natural)
def _natural(
    labels: ArrayLike, clients: int | None, *, groups: ArrayLike | None, seed: int, **options: Any
) -> Partition:
    """`natural` called like the others: the groups fix the number of clients, no seed is needed."""
    if groups is None or np.shape(groups) != np.shape(labels):
        given = "None" if groups is None else f"of shape {list(np.shape(groups))}"
        raise ValueError(
            f"groups={given}: natural needs data with a natural group for each of the "
            f"{np.size(labels)} samples"
        )
    partition = natural(groups, **options)
    if clients not in (None, partition.sizes.size):
        raise ValueError(
            f"clients={clients}: there are {partition.sizes.size} natural groups with at least "
            f"{options.get('min_size', 1)} samples; use clients={partition.sizes.size}"
        )
    return partition


@functools.wraps(matched_dirichlet)
def _matched(
    labels: ArrayLike,
    clients: int,
    *,
    features: Mapping[str, ArrayLike] | None,
    theta: float | None = None,
    **options: Any,
) -> Partition:
    """`matched_dirichlet`, which looks at the features of the data if theta is given."""
    used = None if theta is None else features
    return matched_dirichlet(labels, clients, theta=theta, features=used, **options)


def _fraction(word: str) -> float:
    over, _, under = word.partition("/")
    return float(over) / float(under or 1)


def _balanced(word: str) -> bool:
    if word != "balanced":
        raise ValueError
    return True


class Form(NamedTuple):
    """How a sampler is written, called and judged.

    Attributes:
        text: Its text form, optional arguments in brackets.
        sampler: `(labels, clients, *, seed, **arguments, **inputs) -> Partition`; an adapter wraps
            what it calls, whose signature and docstring then make the flags.
        arguments: Names of all arguments in the order of the text, and what reads each one.
        required: How many of them must be given.
        expected: `(classes, clients, **arguments)` -> EMD on balanced labels, or None if unknown.
        inputs: Which of "groups" and "features" the sampler takes.
    """

    text: str
    sampler: Callable[..., Partition]
    arguments: Mapping[str, Callable[[str], Any]]
    required: int
    expected: Callable[..., float | None] | None = None
    inputs: tuple[str, ...] = ()


FORMS: dict[str, Form] = {
    "iid": Form("iid", iid, {}, 0, expected_none),
    "ll": Form(
        "ll(t, f[, min_per_class])",
        limit_label,
        {"labels_per_client": int, "fraction": _fraction, "min_per_class": int},
        2,
        expected_ll,
    ),
    "ll_q": Form(
        "ll_q(t, q)",
        limit_label_q,
        {"labels_per_client": int, "q": _fraction},
        2,
        expected_ll_q,
    ),
    "q": Form("q(q)", q_sampler, {"q": _fraction}, 1, expected_q),
    "emd": Form("emd(target)", limit_label_emd, {"emd": _fraction}, 1, expected_target),
    "robin_hood": Form(
        "robin_hood(target[, tolerance])",
        robin_hood,
        {"emd": _fraction, "tolerance": _fraction},
        1,
        expected_target,
    ),
    "dirichlet": Form(
        "dirichlet(alpha[, min_size[, balanced]])",
        dirichlet_over_clients,
        {"alpha": _fraction, "min_size": int, "balanced": _balanced},
        1,
        expected_dirichlet,
    ),
    "dirichlet_classes": Form(
        "dirichlet_classes(alpha)", dirichlet_over_classes, {"alpha": _fraction}, 1
    ),
    "quantity": Form("quantity(alpha)", quantity_skew, {"alpha": _fraction}, 1, expected_none),
    "matched": Form(
        "matched(mu, lambda[, theta])",
        _matched,
        {"mu": _fraction, "lam": _fraction, "theta": _fraction},
        2,
        inputs=("features",),
    ),
    "natural": Form("natural[(min_size)]", _natural, {"min_size": int}, 0, inputs=("groups",)),
}

SAMPLERS: dict[str, Callable[..., Partition]] = {name: form.sampler for name, form in FORMS.items()}


class Sample(Protocol):
    """A sampler with its settings: what `parse_sampler` returns."""

    def __call__(
        self,
        labels: ArrayLike,
        clients: int | None,
        seed: int,
        *,
        groups: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> Partition:
        """Make a partition.

        Args:
            labels: int [n].
            clients: Number of clients K; None takes all of the natural ones.
            seed: Of all that is random.
            groups: int [n], natural group of every sample, for samplers that use it.
            features: int [n] of every categorical feature by name, for samplers that use them.

        Returns:
            The partition.
        """


def parse_sampler(text: str) -> tuple[str, Sample]:
    """Turn a text such as "ll(2, 0.875)" into a sampler.

    Args:
        text: One of the text forms in `FORMS`, such as `iid`, `ll(t, f)`, `ll_q(t, q)`, `q(q)`,
            `emd(target)`, `robin_hood(target)`, `dirichlet(alpha)` (over clients),
            `dirichlet_classes(alpha)`, `quantity(alpha)`, `matched(mu, lambda)` or `natural`;
            numbers may be fractions such as 7/9.

    Returns:
        The key in `SAMPLERS`, and a function (labels, clients, seed) -> Partition.

    Raises:
        ValueError: None of these forms. (Ranges are checked when the sampler is called.)

    >>> name, sample = parse_sampler("ll(1, 7/9)")
    >>> name, sample(np.arange(180) % 2, 2, 0).sizes.tolist()
    ('ll', [90, 90])
    """
    name, options = parse_form(text)
    return name, bind_sampler(name, options)


def bind_sampler(name: str, options: Mapping[str, Any]) -> Sample:
    """Give a sampler its settings.

    Args:
        name: A key of `SAMPLERS`.
        options: Keyword arguments of that sampler.

    Returns:
        A function (labels, clients, seed) -> Partition, which hands the sampler those of the data's
        groups and features that it takes.

    >>> bind_sampler("ll", {"labels_per_client": 1})(np.arange(180) % 2, 2, 0).name
    'll(1, 1)'
    """
    form = FORMS[name]

    def sample(
        labels: ArrayLike,
        clients: int | None,
        seed: int,
        *,
        groups: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> Partition:
        given = {"groups": groups, "features": features}
        inputs = {key: given[key] for key in form.inputs}
        return form.sampler(labels, clients, seed=seed, **options, **inputs)

    return sample


def expected_emd(text: str, classes: int, clients: int) -> float | None:
    """EMD that a sampler has by its formula, on balanced labels and without sampling noise.

    Args:
        text: A text form, as for `parse_sampler`.
        classes: Number of classes M.
        clients: Number of clients K.

    Returns:
        EMD, or the mean over seeds where it is random; None if the sampler has no formula.

    Raises:
        ValueError: None of the text forms.

    References:
        Cornelis (thesis), eq. 3.6, 3.8 and 3.13, fig. 3.1.

    >>> round(expected_emd("ll(2, 7/8)", 10, 100), 4), round(expected_emd("q(0.8)", 10, 100), 4)
    (1.4, 1.4)
    >>> round(expected_emd("dirichlet(0.5)", 10, 10), 2)
    0.86
    """
    name, options = parse_form(text)
    expected = FORMS[name].expected
    return None if expected is None else expected(classes, clients, **options)


def parse_form(text: str) -> tuple[str, dict[str, Any]]:
    """Read a text form.

    Args:
        text: As for `parse_sampler`.

    Returns:
        The key in `SAMPLERS`, and the keyword arguments that the text gives.

    Raises:
        ValueError: None of the text forms.

    >>> parse_form("ll(1, 7/8)")
    ('ll', {'labels_per_client': 1, 'fraction': 0.875})
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    name, inside = (match[1], (match[2] or "").strip()) if match else ("", "")
    words = [word.strip() for word in inside.split(",")] if inside else []
    form = FORMS.get(name)
    if form is None or not form.required <= len(words) <= len(form.arguments):
        raise _no_such_form(text)
    try:
        pairs = zip(form.arguments.items(), words, strict=False)
        return name, {key: read(word) for (key, read), word in pairs}
    except (ValueError, ZeroDivisionError) as error:
        raise _no_such_form(text) from error


def _no_such_form(text: str) -> ValueError:
    forms = ", ".join(form.text for form in FORMS.values())
    return ValueError(f"sampler={text!r} is not understood; allowed: {forms}")
