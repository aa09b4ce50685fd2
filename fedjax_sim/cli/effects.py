"""Which flags of the named methods hang on other flags: one without effect is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.algorithms._robust import SHARES
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.methods import name_of, parameters


class Needs(NamedTuple):
    """Flags that do something only if an option has a value.

    Attributes:
        flags: the parameters.
        option: the parameter on which they hang.
        values: those of the option with which they do something; () for any but None.
        otherwise: another option with which they do something too, and its values.
    """

    flags: tuple[str, ...]
    option: str
    values: tuple[str, ...] = ()
    otherwise: tuple[str, tuple[str, ...]] | None = None

    def met(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the flags do something beside these values of the options."""
        value = chosen[self.option]
        if value in self.values if self.values else value is not None:
            return True
        if self.otherwise is None:
            return False
        option, values = self.otherwise
        return chosen[option] in values

    def complaint(self, key: str, given: Any, value: Any) -> str:
        """What is to be said of a flag that is given beside this value of the option."""
        wanted = _wanted(self.option, self.values)
        if self.otherwise:
            wanted += f", or {_wanted(*self.otherwise)}"
        instead = "" if value is None or not self.values else f", not {value}"
        return f"{flag(f'no_{key}' if given is False else key)} is for {wanted}{instead}"


def _wanted(option: str, values: tuple[str, ...]) -> str:
    """An option and its values, as in ``--decay polynomial or hinge``."""
    *most, last = values or ("",)
    told = f"{', '.join(most)} or {last}" if most else last
    return f"{flag(option)} {told}".rstrip()


NEEDS = (
    Needs(("gamma", "initial_scores"), "importance"),
    Needs(("server_lr", "beta1", "beta2", "tau", "v0"), "server_optimizer"),
    Needs(("beta2",), "server_optimizer", ("adam", "yogi")),
    Needs(("slope",), "decay", ("polynomial", "hinge")),
    Needs(("grace",), "decay", ("hinge",)),
    Needs(("byzantine",), "aggregator", SHARES, ("mixing", ("nearest",))),
    Needs(("equal_weights",), "aggregator", ("mean", "geometric_median"), ("mixing", ("buckets",))),
    Needs(("bucket_size",), "mixing", ("buckets",)),
    Needs(("clip_lr", "count_noise"), "quantile"),
)
"""In every method of ours that has both the flag and the option."""


def check_effects(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a flag that does nothing in any of the algorithms that have it.

    Args:
        options: the keyword arguments of each algorithm that were given.

    Raises:
        ValueError: names the flag, the option on which it hangs and the values that it needs.

    >>> check_effects({"robust": {"byzantine": 0.1}})
    Traceback (most recent call last):
    ValueError: robust: --byzantine is for --aggregator trimmed_mean, krum, multi_krum or caf, or \
--mixing nearest, not coordinate_median
    >>> check_effects({"robust": {"byzantine": 0.1, "aggregator": "krum"}})
    """
    for key in dict.fromkeys(key for given in options.values() for key in given):
        told = [_complaint(name, key, given) for name, given in options.items() if key in given]
        if None not in told:
            raise ValueError(told[0])


def _complaint(name: str, key: str, given: Mapping[str, Any]) -> str | None:
    if name_of(name) not in ALGORITHMS.own:
        return None
    own = parameters(name)
    chosen = {option: given.get(option, parameter.default) for option, parameter in own.items()}
    for needs in NEEDS:
        if key in needs.flags and needs.option in own and not needs.met(chosen):
            return f"{name}: {needs.complaint(key, given[key], chosen[needs.option])}"
    return None
