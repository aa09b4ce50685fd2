"""Settings, declared once: a field determines flag, default, check and record."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from fedjax_sim.cli.flags import flag, kind


class Setting(NamedTuple):
    """Metadata of a setting, in addition to its type and default.

    Attributes:
        help: the help text, or a function that returns it, if it lists entries of registries.
        limits: limits of a number, see :func:`fedjax_sim.cli.flags.number`.
        shown: the default in words; None: the default itself, "": nothing.
        metavar: the placeholder of the value.
        convert: reads the value; None: as the type determines.
        instead: an alternative flag, its help, and the function that reads its value.
        place: whether it is a path on this machine, which does not change results.
    """

    help: str | Callable[[], str]
    limits: Mapping[str, float]
    shown: str | None = None
    metavar: str | None = None
    convert: Callable[[str], Any] | None = None
    instead: tuple[str, str, Callable[[str], Any]] | None = None
    place: bool = False


def setting(default: Any, help: str | Callable[[], str], **more: Any) -> Any:
    """Returns a field of a :class:`Group`; ``more`` are fields of :class:`Setting` and limits."""
    known = {name: more.pop(name) for name in Setting._fields if name in more}
    return dataclasses.field(default=default, metadata={"setting": Setting(help, more, **known)})


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings of one subject; each field of a subclass is a ``setting(...)``.

    ``__post_init__`` checks rules between settings; its errors name flags.

    Attributes:
        title: the title of its flags in the help.
    """

    title: ClassVar[str] = ""

    @classmethod
    def add_flags(
        cls,
        add_to: argparse._ActionsContainer,
        *,
        helping: bool,
        without: Collection[str] = (),
    ) -> None:
        """Adds a flag for every setting; absent flags are not in the namespace.

        Help is only made if it will be printed; settings in ``without`` have no flag here.
        """
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in without:
                continue
            info: Setting = field.metadata["setting"]
            section = add_to
            if info.instead is not None:
                short, text, convert = info.instead
                section = add_to.add_mutually_exclusive_group()
                section.add_argument(
                    short,
                    dest=field.name,
                    type=convert,
                    metavar="X",
                    default=argparse.SUPPRESS,
                    help=text,
                )
            section.add_argument(
                flag(f"no_{field.name}" if field.default is True else field.name),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=_help(field, info) if helping else None,
                **_kind(field, info, hints[field.name]),
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Returns the settings of a namespace, with defaults for absent ones."""
        known = {**(defaults or {}), **given}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: known[name] for name in names if name in known})

    def record(self) -> dict[str, Any]:
        """Returns the settings by name, for a file, without paths on this machine."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if not field.metadata["setting"].place
        }

    def _default(self, name: str, value: Any) -> None:
        """Sets a default that depends on other settings; only for ``__post_init__``."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)


def _kind(field: dataclasses.Field[Any], info: Setting, hint: Any) -> dict[str, Any]:
    """Returns argparse's keywords for a setting."""
    if hint is bool:
        return {"action": "store_false" if field.default else "store_true"}
    read: dict[str, Any] = {"type": info.convert} if info.convert else kind(hint, **info.limits)
    return read if info.metavar is None else read | {"metavar": info.metavar}


def _help(field: dataclasses.Field[Any], info: Setting) -> str:
    text = info.help if isinstance(info.help, str) else info.help()
    shown = info.shown
    if shown is None and not isinstance(field.default, bool):
        shown = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    return f"{text} (default: {shown})" if shown else text
