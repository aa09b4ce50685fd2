"""Which flags of the named methods hang on other flags: one without effect is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.methods import parameters


class Needs(NamedTuple):
    """Flags that do something only if an option has a value.

    Attributes:
        flags: the parameters.
        option: the parameter on which they hang.
        values: those of the option with which they do something; () for any but None.
    """

    flags: tuple[str, ...]
    option: str
    values: tuple[str, ...] = ()

    def complaint(self, key: str, given: Any, value: Any) -> str | None:
        """What is to be said of a flag that is given beside this value of the option; or None."""
        if key not in self.flags or (value in self.values if self.values else value is not None):
            return None
        *most, last = self.values or ("",)
        wanted = f" {', '.join(most)} or {last}" if most else f" {last}".rstrip()
        instead = "" if value is None or not self.values else f", not {value}"
        name = flag(f"no_{key}" if given is False else key)
        return f"{name} is for {flag(self.option)}{wanted}{instead}"


NEEDS = (
    Needs(("gamma", "initial_scores"), "importance"),
    Needs(("server_lr", "beta1", "beta2", "tau", "v0"), "server_optimizer"),
    Needs(("beta2",), "server_optimizer", ("adam", "yogi")),
    Needs(("slope",), "decay", ("polynomial", "hinge")),
    Needs(("grace",), "decay", ("hinge",)),
    Needs(("byzantine",), "aggregator", ("trimmed_mean", "krum", "multi_krum")),
    Needs(("equal_weights",), "aggregator", ("mean", "geometric_median")),
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
    ValueError: robust: --byzantine is for --aggregator trimmed_mean, krum or multi_krum, not \
coordinate_median
    >>> check_effects({"robust": {"byzantine": 0.1, "aggregator": "krum"}})
    """
    for key in dict.fromkeys(key for given in options.values() for key in given):
        told = [_complaint(name, key, given) for name, given in options.items() if key in given]
        if None not in told:
            raise ValueError(told[0])


def _complaint(name: str, key: str, given: Mapping[str, Any]) -> str | None:
    if name not in ALGORITHMS.own:
        return None
    own = parameters(name)
    for needs in NEEDS:
        if needs.option in own:
            value = given.get(needs.option, own[needs.option].default)
            if told := needs.complaint(key, given[key], value):
                return f"{name}: {told}"
    return None
