"""Finds the dependencies of functions: of programs on inputs, and of weights on samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Gathered,
    LocalInfo,
    PyTree,
    Server,
    Variables,
    concrete,
)
from fedjax_sim.engine import tree


def without_dead_code(jaxpr: Jaxpr, inputs: PyTree) -> tuple[Jaxpr, PyTree]:
    """Eliminates dead code of a program; also returns which inputs its results depend on.

    >>> made = jax.make_jaxpr(lambda a: 2 * a["x"])(given := {"x": 1.0, "y": 2.0})
    >>> without_dead_code(made.jaxpr, given)[1]
    {'x': True, 'y': False}
    """
    rest, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return rest, jax.tree.unflatten(jax.tree.structure(inputs), used)


def reads_clients(server: Server) -> bool | None:
    """Returns whether a server's move depends on more of a round than the aggregate.

    Its program is traced on a model of one weight and two clients.

    Returns:
        True if it reads updates, weights, reports or samples of single clients; None if it cannot
        be traced, for example because it looks for names of leaves.

    >>> class by_loss(Server):
    ...     def update(self, key, step, server, state, gathered):
    ...         return jax.tree.map(lambda a: a * gathered.cohort.info.loss[0], step), state
    >>> reads_clients(by_loss())
    True
    """
    one, rows, ids = Variables({"w": jnp.zeros(1)}, {}), jnp.zeros(2), jnp.arange(2)
    data = ClientData(jnp.zeros((2, 1)), ids, ids, jnp.arange(3), capacity=1)
    reports = LocalInfo(rows, ids, ids)
    start = tree.stack_copies(one, 1)
    cohort = Cohort(one, start, ids, ids >= 0, ids, reports, (), data)

    def move(gathered: Gathered, key: Array, step: Variables, state: PyTree) -> PyTree:
        return server.update(key, step, gathered.cohort.server, state, gathered)

    try:
        gathered = Gathered(tree.stack_copies(one, 2), rows, cohort)
        given = gathered, jax.random.key(0), one, server.init(one)
        used: Any = without_dead_code(jax.make_jaxpr(move)(*given).jaxpr, given)[1][0]
    except Exception:
        return None
    clients = used.cohort._replace(server=(), received=())  # both are the server's own
    return any(jax.tree.leaves(used._replace(cohort=clients)))


def moves_by_mean(server: Server) -> bool:
    """Returns whether a server's move is known to depend only on the aggregate.

    This is assumed of a server that cannot be traced, unless clients send more than updates.
    """
    more = server.setup_traffic is not None or server.reads_updates
    return not more and not reads_clients(server)


def two_weights(weighting: Callable[..., Any], visited: tuple[int, int]) -> Any:
    """Returns the weights of models of 1 and 40 samples, ``f[2]``; None if a setting is traced."""
    with jax.ensure_compile_time_eval():
        given = weighting(jnp.array([1, 40]), jnp.array(visited))
    return np.asarray(given) if concrete(given) else None
