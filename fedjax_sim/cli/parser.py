"""The command line of ``python -m fedjax_sim.bench``; an algorithm's flags are its parameters."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base.registry import imported, trusting
from fedjax_sim.cli.catalogue import listing
from fedjax_sim.cli.commands import Source
from fedjax_sim.cli.config import GROUPS, Config
from fedjax_sim.cli.defaults import defaults_of, of_method
from fedjax_sim.cli.flags import Parser, choices_of, naming
from fedjax_sim.cli.methods import (
    add_options,
    check_effects,
    chosen_options,
    function_of,
    name_of,
    owners_of,
    parameters,
)
from fedjax_sim.cli.parts import ROLES, Parts
from fedjax_sim.cli.resuming import add_trust, arguments, check_settings, split_arguments
from fedjax_sim.cli.scoring import Split
from fedjax_sim.cli.written import TRAINED, check_used, labels_in, parse_label

ALGO, COMPARE = "phase_shift", ("fedavg",)

OWN_MODELS = frozenset(
    {"ifca", "dynamic_clustering", "ditto", "fine_tuned"}
    | {"fedper", "fedrep", "lg_fedavg", "fedbn", "fedbabu"}
    | {"per_fedavg", "pfedme", "apfl", "fedrod", "fedala", "fedproto", "fd", "fedmd", "dada"}
    | {"fedamp", "fedfomo"}
)
"""The methods whose point is models of the clients' own."""

_TAKEN = {"algo", "compare", "list", "help", "version", "trust", "emd"}.union(
    *({field.name for field in dataclasses.fields(group)} for group in GROUPS.values())
) - {*ROLES}
"""Names that no parameter of an algorithm may have."""


class _Chosen(NamedTuple):
    """The algorithms of a command line, which determine its other flags."""

    algorithms: tuple[str, ...]  # with settings of their own
    names: tuple[str, ...]  # of their methods
    listed: tuple[str, ...]  # the methods whose flags the command has
    helping: bool


def parse(argv: Sequence[str]) -> Config:
    """Returns the settings of a command line, checked as far as possible without data.

    >>> parse(["--phases", "4"]).options["phase_shift"]
    {'phases': 4}
    """
    folder, trust, others = split_arguments(argv)
    if folder is not None:
        begun, before = _begun(folder, trust)
        with trusting(trust):
            config = _config([*before, *others, "--resume", str(folder)])
    else:
        config = _config(others)
        machine, out = config.machine, config.machine.out
        if out is None or not machine.or_resume or not (Path(out) / "config.json").exists():
            return config
        folder = Path(out)
        begun, _ = _begun(folder, [*trust, *imported])  # which this command line has named already
        machine = dataclasses.replace(machine, resume=out, out=None)
        config = dataclasses.replace(config, machine=machine)
    check_settings(folder, begun, config)
    return config


def _begun(folder: Path, trust: Collection[str]) -> tuple[Config, list[str]]:
    """Returns the settings of the run in a folder, and the arguments that started it."""
    with naming(f"--resume {folder}"):
        return parse_folder(folder, trust), arguments(folder)


def parse_folder(folder: Path, trust: Collection[str]) -> Config:
    """Reads the settings of the run in a folder."""
    with trusting(trust):
        return _config(arguments(folder))


def _config(argv: Sequence[str]) -> Config:
    chosen = _chosen(argv)
    owners = owners_of(chosen.listed, chosen.names, _TAKEN)
    given = vars(_parser(chosen, owners).parse_args(argv))
    parts = {
        role: given.pop(role)
        for role in ROLES
        if role in given and not _own(role, given[role], chosen)
    }
    own = {label: parse_label(label) for label in chosen.algorithms}
    options = chosen_options(given, {label: one.options for label, one in own.items()}, owners)
    check_effects(options)
    check_used(given, chosen.algorithms)
    defaults = defaults_of(given.get("dataset", Source.dataset))._asdict()
    defaults |= {"split": _split(chosen.algorithms, given)}
    groups: dict[str, Any] = {name: group.of(given, defaults) for name, group in GROUPS.items()}
    groups["parts"] = Parts(**parts)
    algo, *compare = chosen.algorithms
    trained = {
        label: of_method(function_of(label), {**given, **one.training}, defaults["lr"])
        | one.training
        for label, one in own.items()
    }
    return Config(algo, tuple(compare), options, trained, **groups)


def _own(key: str, value: str, chosen: _Chosen) -> bool:
    """Returns whether a flag with the name of a role has a value of a method's own option."""
    options = [own[key] for name in chosen.names if key in (own := parameters(name))]
    return any(value in (choices_of(option.annotation) or [value]) for option in options)


def _split(algorithms: Iterable[str], given: Mapping[str, Any]) -> Split:
    """Returns the default of ``--split``, which also scores clients' own models if there are any.

    A partition file belongs to the split for which it was made, mostly the official one.
    """
    from_file = given.get("partition", "").endswith(".npz")
    own = given.get("lora_variant") == "fedsa" or OWN_MODELS & {*map(name_of, algorithms)}
    return "holdout" if own and not from_file else "official"


def _chosen(argv: Sequence[str]) -> _Chosen:
    """Reads --algo and --compare, which determine the other flags."""
    parser = Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    _add_names(parser, ())
    given, _ = parser.parse_known_args(argv)
    algo, compare = given.algo or (ALGO,), given.compare or [COMPARE]
    if ("none",) in compare and len(compare) > 1:
        raise ValueError("--compare: 'none' excludes other methods")
    beside = [label for labels in compare for label in labels if label != "none"]
    algorithms = tuple(dict.fromkeys([*algo, *beside]))
    names = tuple(dict.fromkeys(map(name_of, algorithms)))
    listed = () if given.help else ALGORITHMS
    return _Chosen(algorithms, names, tuple(dict.fromkeys([*listed, *names])), given.help)


def _parser(chosen: _Chosen, owners: Mapping[str, Sequence[str]]) -> Parser:
    parser = Parser(
        prog="python -m fedjax_sim.bench",
        usage="%(prog)s [--algo NAME] [--compare NAME ...] [FLAG ...]",
        description="Compares federated algorithms on the same clients, seeds and initial "
        "weights; prints a table and writes a folder of results.",
        epilog="Example: python -m fedjax_sim.bench --algo phase_shift --phases 4. --algo NAME "
        "--help prints the flags of that algorithm, --list all algorithms with their flags.",
    )
    group = parser.add_argument_group("algorithm")
    _add_names(group, ALGORITHMS if chosen.helping else ())
    group.add_argument(
        "--list",
        action=_List,
        nargs="*",
        metavar="WORD",
        help="print all algorithms with paper, flags and traffic, or only entries that "
        "contain every WORD, and exit",
    )
    add_trust(group)
    add_options(parser, owners, chosen.names, helping=chosen.helping)
    for settings in GROUPS.values():
        section = parser.add_argument_group(settings.title)
        settings.add_flags(section, helping=chosen.helping, without=owners)
    return parser


def _add_names(add_to: argparse._ActionsContainer, known: Iterable[str]) -> None:
    add_to.add_argument(
        "--algo",
        type=labels_in,
        metavar="NAME",
        help=f"one of {', '.join(known)}, or package.module:function; settings in parentheses "
        "apply to this algorithm only, as in 'fedprox(mu=0.1, lr=0.05)', and mu=0.1|1 runs both: "
        f"its own options, {', '.join(TRAINED)} (default: {ALGO})",
    )
    add_to.add_argument(
        "--compare",
        nargs="+",
        type=lambda text: (text,) if text == "none" else labels_in(text),
        metavar="NAME",
        help="algorithms to compare with it, in the same form, or none "
        f"(default: {' '.join(COMPARE)})",
    )


class _List(argparse.Action):
    """Prints the catalogue, or the entries with some words, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, given: Any, words: Any, *args: Any) -> None:
        del given, args
        print(listing(words))
        parser.exit()
