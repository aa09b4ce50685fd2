"""Parts of a composition as texts: ``--aggregator "krum(byzantine=0.3)"``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from fedjax_sim.base import Companion, calls
from fedjax_sim.base.binding import build
from fedjax_sim.base.registry import Registry, UnknownNameError, error_text
from fedjax_sim.base.signatures import returned, takes
from fedjax_sim.cli.flags import documented, flag, naming, offering
from fedjax_sim.cli.making import Common
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.round import Algorithm, compose

MODULES = {
    "selection": "plan.selection",
    "flight": "plan.flight",
    "redistribution": "plan.redistribution",
    "exchange": "plan.exchange",
    "clock": "plan.clock",
    "broadcast": "server.broadcast",
    "weighting": "server.weighting",
    "preaggregation": "server.preaggregation",
    "aggregators": "server.aggregators",
    "server": "server",
    "diagnostics": "server.diagnostics",
    "finish": "server.finish",
    "personal": "personal",
    "sending": "client.sending",
    "local": "client.local",
    "corrections": "client.corrections",
    "compression": "compression",
    "reports": "client.reports",
    "terms": "client.terms",
    "adaptation": "client.adaptation",
    "fs": "client.objective",
    "mixup": "client.mixup",
    "augment": "client.augment",
    "leaves": "models.leaves",
    "privacy": "privacy",
    "attacks": "attacks",
}
"""The modules that have parts, by the names under which users find them."""

GIVEN = Common._fields
"""Names in a text that stand for what the run has: ``local`` is the method's local update."""


@functools.cache
def registry(role: str) -> Registry[Any]:
    """Returns the parts by name that a part of a role may use, those of the same role first."""
    first = _module_of(role)
    own: dict[str, Any] = {}
    # Seconds are functions, as other parts are, so that only the names of its own tell a clock.
    for module in dict.fromkeys([first, *MODULES] if role != "clock" else [role]):
        found = dict(parts_in(module))
        own = found | own | {f"{module}.{name}": value for name, value in found.items()}
    return Registry(
        role,
        wanted="a function that declares by its return type which part it makes",
        fits=_declares,
        makes=lambda: (object,),
        own=own,
    )


def part_names(role: str) -> list[str]:
    """Returns the names of the parts of a role.

    >>> part_names("clock"), part_names("personal")[2:]
    (['simulated', 'traced'], ['as_received', 'fine_tuned', 'stored'])
    """
    classes, functions = _kinds(role)
    # A companion is in the module of personal models, but is a setting of ``local``.
    return [
        name
        for name, value in parts_in(_module_of(role))
        if issubclass(made := _made(value), classes)
        or (functions and not issubclass(made, Companion))
    ]


def check_part(role: str, text: str) -> str:
    """Returns the canonical text of a part.

    >>> check_part("aggregator", "krum( byzantine = 0.3)")
    'krum(byzantine=0.3)'
    """
    node = calls.parse(text)
    top = [node] if isinstance(node, calls.Name) else []
    outer = node.name if isinstance(node, calls.Call) else node
    for name in [*top, *calls.names(node)]:
        if name.partition(".")[0] not in GIVEN:
            try:
                registry(role).resolve(name)
            except UnknownNameError as error:
                raise (offering(error, part_names(role)) if name == outer else error) from error
    return calls.write(node)


def value(role: str, node: calls.Node, given: Mapping[str, Any]) -> Any:
    """Returns the value of a tree in a part of a role.

    A single name is called if it makes a part and needs no arguments.
    """

    def find(name: str) -> Any:
        head, _, attribute = name.partition(".")
        if head in given and attribute in ("", "change"):
            return getattr(given[head], attribute) if attribute else given[head]
        return registry(role).resolve(name)[1]

    found = build(node, find)
    return found() if isinstance(node, calls.Name) and _declares(found) and takes(found) else found


def make_part(role: str, text: str, given: Mapping[str, Any]) -> Any:
    """Returns the part of a text, or all parts if the role takes several.

    >>> make_part("selection", "uniform", {})
    uniform()
    >>> make_part("flight", "delayed(3, redistribution=permute)", {})
    delayed(3, redistribution=permute)
    """
    classes, functions = _kinds(role)
    node = calls.parse(text)
    each = node if isinstance(node, tuple | list) else (node,)
    found = [value(role, one, given) for one in each]
    for one, part in zip(each, found, strict=True):
        if not isinstance(part, classes) and not (functions and callable(part)):
            if isinstance(one, calls.Name) and _declares(part):
                value(role, calls.Call(str(one)), given)  # raises, with the arguments that it needs
            names = ", ".join(part_names(role))
            raise ValueError(
                f"{calls.write(one)} is not a part for this role, as calls of these are: {names}"
            )
    if role in ("sending", "preaggregation"):
        return tuple(found)
    if role == "diagnostics":
        return {getattr(one, "name", str(one)): part for one, part in zip(each, found, strict=True)}
    if len(found) != 1:
        raise ValueError(f"must be one part, got {len(found)}")
    return found[0]


def parts_in(module: str) -> Iterator[tuple[str, Any]]:
    """Yields the functions and classes that a module promises, by their names."""
    found = importlib.import_module(f"fedjax_sim.{MODULES[module]}")
    for name in found.__all__:
        if name.islower():
            yield name, getattr(found, name)


def _module_of(role: str) -> str:
    return "aggregators" if role == "aggregator" else role


def _made(value: Any) -> type:
    """Returns a class itself, or the return type that a function declares."""
    made = value if isinstance(value, type) else returned(value)
    return made if isinstance(made, type) else object


def _declares(value: Any) -> bool:
    """Returns whether a value is a class of parts, or a function with such a return type."""
    return any(one.__module__.startswith("fedjax_sim.") for one in _made(value).__mro__)


@functools.cache
def _kinds(role: str) -> tuple[tuple[type, ...], bool]:
    """Returns the classes of a role's parts, and whether functions are parts, by a protocol."""
    members = [*_members(typing.get_type_hints(compose)[role])]
    classes = [member for member in members if not getattr(member, "_is_protocol", False)]
    return tuple(classes), len(classes) < len(members)


def _members(hint: Any) -> Iterator[type]:
    """Yields the types in a type such as ``Sequence[Sending] | None``."""
    members = typing.get_args(hint)
    for member in members:
        yield from _members(member)
    if not members and isinstance(hint, type):
        yield hint


def _role(name: str) -> Any:
    def help_of() -> str:
        meaning = documented(compose)[name].partition("; None:")[0]
        return f"{meaning}; one of {', '.join(part_names(name))}"

    return setting(
        None,
        help_of,
        shown="the method's",
        metavar="TEXT",
        convert=functools.partial(check_part, name),
    )


@dataclasses.dataclass(frozen=True)
class Parts(Group):
    """Parts that replace the methods' own, see :func:`fedjax_sim.compose`."""

    title: ClassVar[str] = "parts that replace the methods' own, as calls such as 'krum(0.3)'"

    local: str | None = _role("local")
    selection: str | None = _role("selection")
    flight: str | None = _role("flight")
    broadcast: str | None = _role("broadcast")
    exchange: str | None = _role("exchange")
    sending: str | None = _role("sending")
    weighting: str | None = _role("weighting")
    preaggregation: str | None = _role("preaggregation")
    aggregator: str | None = _role("aggregator")
    server: str | None = _role("server")
    diagnostics: str | None = _role("diagnostics")
    finish: str | None = _role("finish")
    personal: str | None = _role("personal")

    @property
    def texts(self) -> dict[str, str]:
        """Returns the texts that were given, by role."""
        return {role: text for role in ROLES if (text := getattr(self, role)) is not None}

    def record(self) -> dict[str, Any]:
        """Returns the texts that were given, for a file."""
        return self.texts


ROLES = tuple(field.name for field in dataclasses.fields(Parts))
"""The roles of :func:`fedjax_sim.compose` that have a flag; the clock has one of its own."""


def replaced(algorithm: Algorithm, texts: Mapping[str, str], common: Common) -> Algorithm:
    """Returns the algorithm with parts replaced by those of some texts."""
    if not texts:
        return algorithm
    given, found = common._replace(local=algorithm.parts.local)._asdict(), {}
    for role, text in texts.items():
        try:
            found[role] = make_part(role, text, given)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"{flag(role)} {text}: {error_text(error)}") from error
    if common.clock is not None:  # a part may need it
        found["clock"] = common.clock
    with naming(" ".join(f"{flag(role)} {text}" for role, text in texts.items())):
        return algorithm.replace(**found)
