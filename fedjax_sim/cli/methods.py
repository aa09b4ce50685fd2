"""The named methods in the command: names, flags and their meanings."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.algorithms._robust import SHARES
from fedjax_sim.base.registry import UnknownNameError
from fedjax_sim.cli.flags import choices_of, documented, flag, kind, options
from fedjax_sim.cli.parts import ROLES, check_part

NEEDS: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (("gamma", "initial_scores"), {"importance": ()}),
    (("server_lr", "beta1", "beta2", "tau", "v0"), {"server_optimizer": ()}),
    (("beta2",), {"server_optimizer": ("adam", "yogi")}),
    (("slope",), {"decay": ("polynomial", "hinge")}),
    (("grace",), {"decay": ("hinge",)}),
    (("byzantine",), {"aggregator": SHARES, "mixing": ("nearest",)}),
    (("equal_weights",), {"aggregator": ("mean", "geometric_median"), "mixing": ("buckets",)}),
    (("bucket_size",), {"mixing": ("buckets",)}),
    (("clip_lr", "count_noise"), {"quantile": ()}),
)
"""Flags of our methods that have no effect unless an option has one of some values; () for any.

They are rejected in a method that has the first of the options, see :func:`check_effects`.
"""


def algorithm(text: str) -> str:
    """Returns the name of an algorithm; case, dashes and underscores are ignored.

    >>> algorithm("FedAvg"), algorithm("phase-shift")
    ('fedavg', 'phase_shift')
    >>> algorithm("gossipp")
    Traceback (most recent call last):
    ValueError: unknown algorithm 'gossipp'; did you mean gossip? --list shows all
    """
    try:
        return ALGORITHMS.resolve(text)[0]
    except UnknownNameError as error:
        message = str(error)
        message += f"{'' if message.endswith('?') else ';'} --list shows all"
        raise ValueError(message) from error


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Returns the keyword parameters of an algorithm that are flags.

    >>> list(parameters("phase_shift"))
    ['phases', 'mode']
    """
    return _options(function_of(name))


def owners_of(
    names: Iterable[str], chosen: Collection[str], taken: Collection[str]
) -> dict[str, list[str]]:
    """Returns the parameters that are flags, each with the algorithms that have it.

    No parameter may have the name of a flag of the command, ``taken``.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        try:
            own = parameters(name)
            if clashing := [flag(key) for key in own if key in taken]:
                raise ValueError(
                    f"{', '.join(clashing)} is a flag of the command itself; rename the parameter"
                )
        except ValueError as error:
            if name in chosen:
                raise ValueError(f"{name} cannot run here: {error}") from error
            continue
        for key in own:
            owners.setdefault(key, []).append(name)
    return owners


def add_options(
    parser: argparse.ArgumentParser,
    owners: Mapping[str, Sequence[str]],
    chosen: Sequence[str],
    *,
    helping: bool,
) -> None:
    """Adds a flag for every parameter of some algorithms."""
    group = parser.add_argument_group(f"flags of {', '.join(chosen)}, and their defaults there")
    for key, names in owners.items():
        hints = {name: parameters(name)[key].annotation for name in names}
        first, *others = [name for name in names if name in chosen] or names[:1]
        for other in others:
            if kind(hints[other]) != kind(hints[first]):
                raise ValueError(
                    f"{flag(key)} takes other values for {other} than for {first}: run them one by "
                    "one, with --compare none"
                )
        accepted = kind(hints[first])
        if key in ROLES and choices_of(hints[first]):  # one of them, or any part of that role
            accepted = {"type": functools.partial(check_part, key), "metavar": "TEXT"}
        group.add_argument(
            flag(key),
            default=argparse.SUPPRESS,
            help=_help(key, names) if helping else None,
            **accepted,
        )


def chosen_options(
    given: Mapping[str, Any], chosen: Mapping[str, Mapping[str, Any]], owners: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns the keyword arguments of each algorithm, from flags and from parentheses."""
    own = {name: parameters(name) for name in chosen}
    for key in sorted(given.keys() & set(owners)):
        having = [name for name in chosen if key in own[name]]
        if not having:
            whose = "; ".join(map(_flags_of, dict.fromkeys(map(name_of, chosen))))
            raise ValueError(f"{flag(key)} is not a flag of {whose}")
        if all(key in chosen[name] for name in having):
            raise ValueError(f"{flag(key)} has no effect next to {' and '.join(having)}")
    options = {
        name: {key: given[key] for key in own[name] if key in given} | {**chosen[name]}
        for name in chosen
    }
    for name, known in options.items():
        missing = [k for k, p in own[name].items() if p.default is p.empty and k not in known]
        if missing:
            raise ValueError(f"{name} needs {' and '.join(map(flag, missing))}")
    return options


def check_effects(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Rejects a flag that has no effect in any of its algorithms.

    >>> check_effects({"robust": {"byzantine": 0.1}})
    Traceback (most recent call last):
    ValueError: robust: --byzantine is for --aggregator trimmed_mean, krum, multi_krum or caf, or \
--mixing nearest, not coordinate_median
    >>> check_effects({"robust": {"byzantine": 0.1, "aggregator": "krum"}})
    """
    for key in dict.fromkeys(key for given in options.values() for key in given):
        complaints = [
            _complaint(name, key, given) for name, given in options.items() if key in given
        ]
        if None not in complaints:
            raise ValueError(complaints[0])


def _complaint(name: str, key: str, given: Mapping[str, Any]) -> str | None:
    """Returns why a flag of a method has no effect; None if it has one."""
    if name_of(name) not in ALGORITHMS.own:
        return None
    own = parameters(name)
    chosen = {option: given.get(option, parameter.default) for option, parameter in own.items()}
    for flags, wanted in NEEDS:
        first, *_ = wanted
        if key not in flags or first not in own:
            continue
        if any(chosen[o] in v if v else chosen[o] is not None for o, v in wanted.items()):
            continue
        words = ", or ".join(f"{flag(o)} {_either(v)}".rstrip() for o, v in wanted.items())
        instead = f", not {chosen[first]}" if wanted[first] and chosen[first] is not None else ""
        given_as = flag(f"no_{key}" if given[key] is False else key)
        return f"{name}: {given_as} is for {words}{instead}"
    return None


def _either(words: Sequence[str]) -> str:
    """Returns words as in "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


@functools.cache
def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return options(function, without=COMMON)


def function_of(name: str) -> Callable[..., Any]:
    """Returns the function of a method, given its name with or without settings."""
    return ALGORITHMS.resolve(name_of(name))[1]


def name_of(label: str) -> str:
    """Returns the method of a text such as ``fedprox(mu=0.1)``, without its settings."""
    return label.partition("(")[0]


def _help(key: str, owners: Sequence[str]) -> str:
    """Returns a line for each meaning of the parameter, with the defaults."""
    found: dict[str, list[str]] = {}
    for name in owners:
        text, parameter = documented(function_of(name)).get(key, ""), parameters(name)[key]
        default = "needed" if parameter.default is parameter.empty else parameter.default
        found.setdefault(text, []).append(f"{name} {default}")
    return "\n".join(f"{text} ({', '.join(of)})".strip() for text, of in found.items())


def _flags_of(name: str) -> str:
    flags = ", ".join(flag(key) for key in parameters(name))
    return f"{name}, whose flags are: {flags or 'none'}"
