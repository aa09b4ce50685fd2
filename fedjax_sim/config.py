"""The settings of ``python -m fedjax_sim.bench``; an algorithm's flags are its parameters."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS, COMMON
from fedjax_sim.catalogue import listing
from fedjax_sim.commands import add_data_flags
from fedjax_sim.data import parse_dataset
from fedjax_sim.flags import Parser, documented, flag, keywords, kind, number
from fedjax_sim.metrics import Metric
from fedjax_sim.models import MODELS
from fedjax_sim.partition.samplers import FORMS

Split = Literal["official", "clients", "holdout"]
Standardise = Literal["global", "local"]

# The flags that one way to split has alone, and their defaults.
_OF_SPLIT = {"folds": ("clients", 5), "test_fraction": ("holdout", 0.2)}


class Defaults(NamedTuple):
    """What a data set is trained with unless told otherwise."""

    model: str
    lr: float
    epochs: float
    rounds: int
    score: Metric = "accuracy"


DEFAULTS: Mapping[str, Defaults] = {
    "digits": Defaults("mlp", 0.02, 2, 30),
    # The thesis' settings.
    "mnist": Defaults("mnist_cnn", 0.001, 8, 15),
    "fashion_mnist": Defaults("fashion_cnn", 0.001, 8, 15),
    "cifar10": Defaults("cifar_cnn", 0.001, 8, 15),
    "tfds": Defaults("two_conv", 0.001, 8, 15),
    # Models and epochs of RADFed, and of FedProx for synthetic; not tuned here. Learning rates are
    # a tenth of those in RADFed's published commands (0.5, 0.2; none for eICU: as Covertype) and
    # FedProx (0.01), which have no momentum: 0.9, the default here, makes a step ten times as long.
    "shakespeare": Defaults("lstm", 0.05, 1, 15),
    "tiny_shakespeare": Defaults("lstm", 0.05, 1, 15),
    "covertype": Defaults("ffn", 0.02, 1, 30, "f1"),
    "eicu": Defaults("logistic", 0.02, 1, 30, "auc"),
    "eicu_demo": Defaults("logistic", 0.02, 1, 30, "auc"),
    "synthetic": Defaults("logistic", 0.001, 20, 30),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment; every default is filled in but those that need the machine or the data.

    Attributes:
        algo: a key of ``ALGORITHMS``.
        compare: the algorithms run beside it.
        options: the keyword arguments of each of them that were given.
        dataset: what :func:`fedjax_sim.data.load_dataset` takes.
        model: a key of ``MODELS``, or ``package.module:factory``.
        clients: N; None where the partition has its own (natural clients), as a file does.
        clients_per_round: None for all clients.
        rounds: rounds of FedAvg; an algorithm with a tempo runs that many times as many.
        epochs: E.
        batch_size: B.
        lr: of SGD.
        momentum: of SGD.
        l2: of :func:`fedjax_sim.objective.empirical_risk`.
        last_batch: see :class:`fedjax_sim.local.local_sgd`.
        partition: the text of a sampler, or a .npz file.
        server_fraction: share of the training samples that the server takes; None for none.
        share_beta: β of :func:`fedjax_sim.data.share`; None for no data sharing.
        share_alpha: its α; None for all of the shared set.
        rebalance: α of :func:`fedjax_sim.data.rebalance`; None for none.
        fedaug: EMD* of :func:`fedjax_sim.data.fedaug`; None for none.
        mirror: whether augmented copies may be mirrored, see :func:`fedjax_sim.augment.thesis`.
        seeds: one run for each.
        split: what is scored, see :mod:`fedjax_sim.problem`.
        folds: of ``clients``, else None.
        test_fraction: of ``holdout``, else None.
        standardise: of a table's numeric columns, by the statistics of all training clients or of
          each client.
        score: what the table shows, the picture draws and the best round is chosen by.
        eval_every: rounds between evaluations.
        devices: None for all.
        chunk: None for the backend's default.
        data_dir: a folder of data.
        out: the run folder; None for a new one in ``runs/``.
        cache: whether compiled programs are kept for the next run.
    """

    algo: str
    compare: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    dataset: str
    model: str
    clients: int | None
    clients_per_round: int | None
    rounds: int
    epochs: float
    batch_size: int
    lr: float
    momentum: float
    l2: float
    last_batch: Literal["keep", "drop", "refill"]
    partition: str
    server_fraction: float | None
    share_beta: float | None
    share_alpha: float | None
    rebalance: float | None
    fedaug: float | None
    mirror: bool
    seeds: tuple[int, ...]
    split: Split
    folds: int | None
    test_fraction: float | None
    standardise: Standardise
    score: Metric
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
    _fill_split(given)
    if given["share_alpha"] is not None and given["share_beta"] is None:
        raise ValueError("--share-alpha is for --share-beta")
    if not given["mirror"] and given["fedaug"] is None and given["rebalance"] is None:
        raise ValueError("--no-mirror is for --fedaug or --rebalance")
    default = DEFAULTS[parse_dataset(given["dataset"])[0]]
    for key in default._fields:
        given[key] = getattr(default, key) if given[key] is None else given[key]
    if given["partition"] is None:
        given["partition"] = f"emd({given['emd']:g})"
    if given["clients"] is None and not _has_clients(given["partition"]):
        given["clients"] = 40
    names = {f.name for f in dataclasses.fields(Config)}
    settings = {key: value for key, value in given.items() if key in names}
    settings |= {"compare": compare, "options": options, "seeds": tuple(range(given["seeds"]))}
    return Config(**settings)


def _has_clients(partition: str) -> bool:
    """Whether a partition's text fixes the number of clients."""
    return partition.startswith("natural") or partition.endswith(".npz")


def _fill_split(given: dict[str, Any]) -> None:
    """Defaults of the split's own flags; no other split may be given them."""
    split = given["split"]
    for name, (of, default) in _OF_SPLIT.items():
        if given[name] is not None and split != of:
            raise ValueError(f"{flag(name)} is for --split {of}, not {split}")
        if split == of and given[name] is None:
            given[name] = default
    if split == "official" and given["standardise"] == "local":
        raise ValueError(
            "--standardise local is for --split clients or holdout: a data set's own test set has "
            "no clients whose statistics could scale it"
        )


def parameters(algorithm: str) -> dict[str, inspect.Parameter]:
    """The keyword parameters of an algorithm that are flags.

    >>> list(parameters("phase_shift"))
    ['phases', 'mode']
    """
    return keywords(ALGORITHMS[algorithm], without=COMMON)


def _flags_of(algorithm: str) -> str:
    flags = ", ".join(flag(key) for key in parameters(algorithm))
    return f"{algorithm}, whose flags are: {flags or 'none'}"


def _parser() -> Parser:
    parser = Parser(
        prog="python -m fedjax_sim.bench",
        description="Runs a federated algorithm beside others on the same clients, seeds and "
        "initial weights; prints a table and writes a folder of results.",
        epilog="Example: python -m fedjax_sim.bench --algo phase_shift --phases 4",
        allow_abbrev=False,
    )
    _add_algorithms(parser)
    _add_experiment(parser)
    _add_data_side(parser)
    _add_scores(parser)
    _add_training(parser)
    _add_machine(parser)
    return parser


def _algorithm(text: str) -> str:
    """The key in ``ALGORITHMS``; case, dashes and underscores do not count.

    >>> _algorithm("FedAvg"), _algorithm("phase-shift")
    ('fedavg', 'phase_shift')
    >>> _algorithm("gossipp")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'gossipp' is no algorithm; did you mean gossip? --list shows all
    >>> _algorithm("krum")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'krum' is no algorithm; use robust --aggregator krum
    """
    keys = {_plain(name): name for name in ALGORITHMS}
    if _plain(text) in keys:
        return keys[_plain(text)]
    for name in ALGORITHMS:
        for key, parameter in parameters(name).items():
            if text in kind(parameter.annotation).get("choices", ()):
                raise argparse.ArgumentTypeError(
                    f"{text!r} is no algorithm; use {name} {flag(key)} {text}"
                )
    close = [keys[found] for found in difflib.get_close_matches(_plain(text), keys)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise argparse.ArgumentTypeError(f"{text!r} is no algorithm; {hint}--list shows all")


def _algorithm_or_none(text: str) -> str:
    return text if text == "none" else _algorithm(text)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


class _List(argparse.Action):
    """Prints the catalogue and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        del args
        print(listing())
        parser.exit()


def _add_algorithms(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ALGORITHMS)
    group = parser.add_argument_group("algorithm")
    group.add_argument(
        "--algo", type=_algorithm, default="phase_shift", metavar="NAME",
        help=f"one of {known} (default: phase_shift)",
    )  # fmt: skip
    group.add_argument(
        "--compare", nargs="+", type=_algorithm_or_none, default=["fedavg"], metavar="NAME",
        help="algorithms to run beside it, or none (default: fedavg)",
    )  # fmt: skip
    group.add_argument(
        "--list",
        action=_List,
        nargs=0,
        help="print every algorithm: paper, traffic, parts; and end",
    )
    own = parser.add_argument_group("flags of one algorithm or some, and their defaults there")
    owners: dict[str, list[str]] = {}
    for name in ALGORITHMS:
        for key in parameters(name):
            owners.setdefault(key, []).append(name)
    for key, names in owners.items():
        defaults = ", ".join(f"{name} {parameters(name)[key].default}" for name in names)
        own.add_argument(
            flag(key), default=argparse.SUPPRESS, **kind(parameters(names[0])[key].annotation),
            help=f"{documented(ALGORITHMS[names[0]]).get(key, '')} ({defaults})".strip(),
        )  # fmt: skip


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    count = number(int, at_least=1)
    group = parser.add_argument_group("experiment")
    add_data_flags(group.add_argument)
    group.add_argument(
        "--clients", type=count, metavar="N",
        help="how many in all (default: 40, of natural clients and those of a file all)",
    )  # fmt: skip
    group.add_argument(
        "--clients-per-round", type=count, metavar="N", help="active at once (default: all)"
    )
    group.add_argument(
        "--rounds", type=count, metavar="N", help=f"rounds of FedAvg ({_by_dataset('rounds')})"
    )
    group.add_argument(
        "--seeds", type=count, default=4, metavar="N",
        help="repetitions, seeds 0 to N-1: partition, initial weights, shuffles; the table's ± is "
        "their standard deviation, dividing by N (default: 4)",
    )  # fmt: skip
    group.add_argument(
        "--eval-every", type=count, default=1, metavar="N",
        help="rounds between evaluations (default: 1)",
    )  # fmt: skip
    skew = group.add_mutually_exclusive_group()
    skew.add_argument(
        "--emd", type=number(float, above=0), default=1.4, metavar="X",
        help="label skew: earth mover's distance of the partition (default: 1.4)",
    )  # fmt: skip
    skew.add_argument(
        "--partition", metavar="TEXT",
        help=f"a sampler: {', '.join(form.text for form in FORMS.values())}; or a .npz "
        "file of python -m fedjax_sim.partition, for all seeds (default: --emd)",
    )  # fmt: skip


def _add_data_side(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("against skew, for all algorithms alike")
    group.add_argument(
        "--server-fraction", type=number(float, above=0, below=1), metavar="X",
        help="share of the training samples, as many of each class, that the server takes from the "
        "clients: fltrust and ozdayi need them (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--fedaug", type=number(float, at_least=0, below=2), metavar="X",
        help="every client raises its rare classes by augmented copies to this EMD; epochs are of "
        "the unaltered samples (default: no augmentation)",
    )  # fmt: skip
    group.add_argument(
        "--rebalance", type=number(float, at_least=0), metavar="X",
        help="classes that are rare among all clients are raised by augmented copies: by a factor "
        "of X-th power, 1 to the mean (default: no augmentation)",
    )  # fmt: skip
    group.add_argument(
        "--no-mirror", dest="mirror", action="store_false",
        help="augmented copies are never mirrored: for digits and letters",
    )  # fmt: skip
    group.add_argument(
        "--share-beta", type=number(float, above=0, below=1), metavar="X",
        help="share of all training samples that becomes a common balanced set (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--share-alpha", type=number(float, above=0), metavar="X",
        help="share of the common set that each client gets, at most 1 (default: 1)",
    )  # fmt: skip


def _add_scores(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scores")
    group.add_argument(
        "--split", choices=typing.get_args(Split), default="official", metavar="NAME",
        help="what is scored: official: the data set's own test set; clients: all data are dealt, "
        "clients are cut into folds and in turn one fold is scored, one chooses the best round, "
        "the others train; holdout: a share of each client's own samples (default: official)",
    )  # fmt: skip
    group.add_argument(
        "--folds", type=number(int, at_least=3), metavar="N",
        help="of --split clients; all run at once, with every seed (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--test-fraction", type=number(float, above=0, below=1), metavar="X",
        help="share of --split holdout (default: 0.2)",
    )  # fmt: skip
    group.add_argument(
        "--standardise", choices=typing.get_args(Standardise), default="global", metavar="NAME",
        help="the numeric columns of tables: by the statistics of all training clients, or of "
        "each client by its own (default: global)",
    )  # fmt: skip
    group.add_argument(
        "--score", choices=typing.get_args(Metric), metavar="NAME",
        help="in table and picture, and for the best round: accuracy, f1 (weighted by class) or "
        "auc; by client it is the unweighted mean over test clients (default: accuracy, of "
        "covertype f1, of eicu auc)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("local training")
    group.add_argument(
        "--model", metavar="NAME",
        help=f"one of {', '.join(MODELS)}, or package.module:factory with "
        f"factory(shape, classes) -> Model or flax module ({_by_dataset('model')})",
    )  # fmt: skip
    group.add_argument(
        "--epochs", type=number(float, above=0), metavar="X",
        help=f"local epochs a round ({_by_dataset('epochs')})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=number(int, at_least=1), default=16, metavar="N",
        help="samples in a minibatch (default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--lr", type=number(float, above=0), metavar="X",
        help=f"learning rate of SGD ({_by_dataset('lr')})",
    )  # fmt: skip
    group.add_argument(
        "--momentum", type=number(float, at_least=0, below=1), default=0.9, metavar="X",
        help="of SGD (default: 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--l2", type=number(float, at_least=0), default=0.0, metavar="X",
        help="regularisation: X/2 times the squared norm of matrices and kernels (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--last-batch", choices=("keep", "drop", "refill"), default="keep",
        help="what becomes of an epoch's short last minibatch (default: keep)",
    )  # fmt: skip


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine and output")
    group.add_argument(
        "--devices", type=number(int, at_least=1), metavar="N",
        help="devices to use (default: all; on CPU one for each core that this process may use)",
    )  # fmt: skip
    group.add_argument(
        "--chunk", type=number(int, at_least=0), metavar="N",
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
