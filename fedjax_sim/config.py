"""The settings of ``python -m fedjax_sim.bench``; an algorithm's flags are its parameters."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.data import DATASETS
from fedjax_sim.models import MODELS

# Set for every algorithm alike, so no flag of one of them.
_COMMON = ("clients_per_round", "execution")


class Defaults(NamedTuple):
    """What a data set is trained with unless told otherwise."""

    model: str
    lr: float
    epochs: float
    rounds: int


DEFAULTS: Mapping[str, Defaults] = {
    "digits": Defaults("mlp", 0.02, 2, 30),
    # The thesis' settings.
    "mnist": Defaults("mnist_cnn", 0.001, 8, 15),
    "fashion_mnist": Defaults("fashion_cnn", 0.001, 8, 15),
    "cifar10": Defaults("cifar_cnn", 0.001, 8, 15),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment; every default is filled in but those that need the machine or the data.

    Attributes:
        algo: a key of ``ALGORITHMS``.
        compare: the algorithms run beside it.
        options: the keyword arguments of each of them that were given.
        dataset: a key of ``DATASETS``.
        model: a key of ``MODELS``, or ``package.module:factory``.
        clients: N; a partition file has its own.
        clients_per_round: None for all clients.
        rounds: rounds of FedAvg; an algorithm with a tempo runs that many times as many.
        epochs: E.
        batch_size: B.
        lr: of SGD.
        momentum: of SGD.
        last_batch: see :class:`fedjax_sim.local.LocalSGD`.
        partition: the text of a sampler, or a .npz file.
        seeds: one run for each.
        eval_every: rounds between evaluations.
        devices: None for all.
        chunk: None for the backend's default.
        data_dir: a TFDS folder.
        out: the run folder; None for a new one in ``runs/``.
        cache: whether compiled programs are kept for the next run.
    """

    algo: str
    compare: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    dataset: str
    model: str
    clients: int
    clients_per_round: int | None
    rounds: int
    epochs: float
    batch_size: int
    lr: float
    momentum: float
    last_batch: Literal["keep", "drop", "refill"]
    partition: str
    seeds: tuple[int, ...]
    eval_every: int
    devices: int | None
    chunk: int | None
    data_dir: str | None
    out: str | None
    cache: bool

    @property
    def algorithms(self) -> tuple[str, ...]:
        """All that run, in order."""
        return (self.algo, *self.compare)


def flag(name: str) -> str:
    """The flag of a parameter.

    >>> flag("redistribution_rounds")
    '--redistribution-rounds'
    """
    return "--" + name.replace("_", "-")


def parse(argv: Sequence[str]) -> Config:
    """Settings from the command line.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The settings, each within its range as far as that is known without data.

    Raises:
        ValueError: if an argument is unknown or out of range; names the flag and what is allowed.

    >>> parse(["--phases", "4"]).options["phase_shift"]
    {'phases': 4}
    """
    given = vars(_parser().parse_args(argv))
    compare = tuple(dict.fromkeys(n for n in given["compare"] if n not in ("none", given["algo"])))
    chosen = (given["algo"], *compare)
    if "none" in given["compare"] and len(given["compare"]) > 1:
        raise ValueError("--compare: 'none' stands alone")
    options = {name: {k: given[k] for k in parameters(name) if k in given} for name in chosen}
    every = {key for name in ALGORITHMS for key in parameters(name)}
    for key in sorted(every & given.keys()):
        if not any(key in options[name] for name in chosen):
            raise ValueError(f"{flag(key)} is no flag of {'; '.join(map(_flags_of, chosen))}")
    default = DEFAULTS[given["dataset"]]
    for key in default._fields:
        given[key] = getattr(default, key) if given[key] is None else given[key]
    if given["partition"] is None:
        given["partition"] = f"emd({given['emd']:g})"
    names = {f.name for f in dataclasses.fields(Config)}
    settings = {key: value for key, value in given.items() if key in names}
    settings |= {"compare": compare, "options": options, "seeds": tuple(range(given["seeds"]))}
    return Config(**settings)


def parameters(algorithm: str) -> dict[str, Any]:
    """The keyword parameters of an algorithm that are flags, and their types.

    >>> parameters("radfed")
    {'redistribution_rounds': <class 'int'>}
    """
    function = ALGORITHMS[algorithm]
    hints = typing.get_type_hints(function)
    return {
        p.name: hints[p.name]
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in _COMMON
    }


def _flags_of(algorithm: str) -> str:
    flags = ", ".join(flag(key) for key in parameters(algorithm))
    return f"{algorithm}, whose flags are: {flags or 'none'}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        raise ValueError(message.removeprefix("argument "))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fedjax_sim.bench",
        description="Runs a federated algorithm beside others on the same clients, seeds and "
        "initial weights; prints a table and writes a folder of results.",
        epilog="Example: python -m fedjax_sim.bench --algo phase_shift --phases 4",
        allow_abbrev=False,
    )
    _add_algorithms(parser)
    _add_experiment(parser)
    _add_training(parser)
    _add_machine(parser)
    return parser


def _add_algorithms(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ALGORITHMS)
    group = parser.add_argument_group("algorithm")
    group.add_argument(
        "--algo", choices=ALGORITHMS, default="phase_shift", metavar="NAME",
        help=f"one of {known} (default: phase_shift)",
    )  # fmt: skip
    group.add_argument(
        "--compare", nargs="+", choices=(*ALGORITHMS, "none"), default=["fedavg"], metavar="NAME",
        help="algorithms to run beside it, or none (default: fedavg)",
    )  # fmt: skip
    seen: set[str] = set()
    for name, function in ALGORITHMS.items():
        own = parser.add_argument_group(f"flags of {name}")
        documented = _documented(function)
        for key, hint in parameters(name).items():
            if key not in seen:
                seen.add(key)
                default = inspect.signature(function).parameters[key].default
                text = f"{documented.get(key, '')} (default: {default})"
                own.add_argument(
                    flag(key), default=argparse.SUPPRESS, help=text.strip(), **_kind(hint)
                )


def _kind(hint: Any) -> dict[str, Any]:
    """What argparse must know of a parameter of this type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (h for h in typing.get_args(hint) if h is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in (int, float, str):
        return {"type": hint, "metavar": "N" if hint is int else "X"}
    raise TypeError(f"a parameter of type {hint} cannot be a flag: use int, float, bool or Literal")


def _documented(function: Callable[..., Any]) -> dict[str, str]:
    """The entries of a docstring's "Args", by name."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(function) or "", re.M | re.S)
    entries = re.split(r"^ {2,4}(\w+): ", section[1], flags=re.M)[1:] if section else []
    pairs = zip(entries[::2], entries[1::2], strict=True)
    plain = str.maketrans({"`": None, "%": "%%"})  # argparse formats help texts with %
    return {name: " ".join(text.split()).rstrip(".").translate(plain) for name, text in pairs}


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    count = _number(int, at_least=1)
    group = parser.add_argument_group("experiment")
    group.add_argument(
        "--dataset", choices=DATASETS, default="digits", metavar="NAME",
        help=f"one of {', '.join(DATASETS)} (default: digits, which needs no download)",
    )  # fmt: skip
    group.add_argument("--data-dir", metavar="DIR", help="TFDS folder (default: TFDS's own)")
    group.add_argument(
        "--clients", type=count, default=40, metavar="N", help="how many in all (default: 40)"
    )
    group.add_argument(
        "--clients-per-round", type=count, metavar="N", help="active at once (default: all)"
    )
    group.add_argument(
        "--rounds", type=count, metavar="N", help=f"rounds of FedAvg ({_by_dataset('rounds')})"
    )
    group.add_argument(
        "--seeds", type=count, default=4, metavar="N",
        help="repetitions, seeds 0 to N-1: partition, initial weights, shuffles (default: 4)",
    )  # fmt: skip
    group.add_argument(
        "--eval-every", type=count, default=1, metavar="N",
        help="rounds between evaluations (default: 1)",
    )  # fmt: skip
    skew = group.add_mutually_exclusive_group()
    skew.add_argument(
        "--emd", type=_number(float, above=0), default=1.4, metavar="X",
        help="label skew: earth mover's distance of the partition (default: 1.4)",
    )  # fmt: skip
    skew.add_argument(
        "--partition", metavar="TEXT",
        help="a sampler: iid, ll(t, f[, min_per_class]), dirichlet(alpha), "
        "dirichlet_classes(alpha), emd(target); or a saved partition.npz for all seeds "
        "(default: --emd)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("local training")
    group.add_argument(
        "--model", metavar="NAME",
        help=f"one of {', '.join(MODELS)}, or package.module:factory with "
        f"factory(shape, classes) -> Model or flax module ({_by_dataset('model')})",
    )  # fmt: skip
    group.add_argument(
        "--epochs", type=_number(float, above=0), metavar="X",
        help=f"local epochs a round ({_by_dataset('epochs')})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=_number(int, at_least=1), default=16, metavar="N",
        help="samples in a minibatch (default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--lr", type=_number(float, above=0), metavar="X",
        help=f"learning rate of SGD ({_by_dataset('lr')})",
    )  # fmt: skip
    group.add_argument(
        "--momentum", type=_number(float, at_least=0, below=1), default=0.9, metavar="X",
        help="of SGD (default: 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--last-batch", choices=("keep", "drop", "refill"), default="keep",
        help="what becomes of an epoch's short last minibatch (default: keep)",
    )  # fmt: skip


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine and output")
    group.add_argument(
        "--devices", type=_number(int, at_least=1), metavar="N",
        help="devices to use (default: all; on CPU one for each core that this process may use)",
    )  # fmt: skip
    group.add_argument(
        "--chunk", type=_number(int, at_least=0), metavar="N",
        help="models that a device trains at once, 0 for all (default: 1 on CPU, else 0)",
    )  # fmt: skip
    group.add_argument(
        "--out", metavar="DIR",
        help="new folder for the results (default: runs/<dataset>-<algo>-<date>-<time>)",
    )  # fmt: skip
    group.add_argument(
        "--no-cache", dest="cache", action="store_false",
        help="do not keep compiled programs for the next run",
    )  # fmt: skip


def _by_dataset(key: str) -> str:
    values = [f"{name} {getattr(default, key)}" for name, default in DEFAULTS.items()]
    return "default: " + ", ".join(values)


def _number(
    kind: type[int] | type[float],
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Callable[[str], float]:
    limits = {"at least": at_least, "above": above, "below": below}
    wanted = " and ".join(f"{word} {x:g}" for word, x in limits.items() if math.isfinite(x))

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and at_least <= value and above < value < below:
            return value
        noun = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {noun} {wanted}, got {text!r}")

    return convert
