"""Named methods, each one composition; their keyword parameters are flags of the command."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.algorithms._method import METHODS
from fedjax_sim.base.registry import Registry
from fedjax_sim.base.signatures import takes
from fedjax_sim.round import Algorithm

# Every list has the order of these lines, and of the methods in each file.
# isort: off
from fedjax_sim.algorithms._averaging import *
from fedjax_sim.algorithms._delayed import *
from fedjax_sim.algorithms._radfed_plus import *
from fedjax_sim.algorithms._drift import *
from fedjax_sim.algorithms._adaptive import *
from fedjax_sim.algorithms._objectives import *
from fedjax_sim.algorithms._after import *
from fedjax_sim.algorithms._steps import *
from fedjax_sim.algorithms._asynchronous import *
from fedjax_sim.algorithms._robust import *
from fedjax_sim.algorithms._compressed import *
from fedjax_sim.algorithms._private import *
from fedjax_sim.algorithms._clustered import *
from fedjax_sim.algorithms._personal import *
from fedjax_sim.algorithms._adapted import *
from fedjax_sim.algorithms._layers import *
from fedjax_sim.algorithms._knowledge import *
from fedjax_sim.algorithms._selected import *
from fedjax_sim.algorithms._balanced import *
# isort: on

__all__ = [*METHODS]

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    wanted="a function (local, *, clients_per_round, ...) -> Algorithm",
    fits=lambda value: takes(value, None, clients_per_round=1),
    makes=lambda: (Algorithm,),
    own=METHODS,
)
"""The methods by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""

COMMON = (
    "clients_per_round",
    "execution",
    "model",
    "objective",
    "classes",
    "lr",
    "momentum",
    "clock",
)
"""Parameters that the command fills in for every method that has them."""
