"""Rejects settings of local training that read samples in another way than private steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import ClientView, Context, Correction, Done, LocalInfo, Variables, shown
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.client.sgd import SGD
from fedjax_sim.engine.reading import without_dead_code
from fedjax_sim.privacy import dp_sgd

ABSENT = "companion", "inexactness", "memory", "shared", "steps", "until"
"""Settings that must be None."""


def check_private(local: SGD) -> None:
    """Rejects settings that read samples without noise, or change the number of steps.

    Raises:
        ValueError: names the private steps and the setting.
    """
    if not isinstance(local.private, dp_sgd):
        raise ValueError(f"private must be dp_sgd(clip, noise_multiplier), got {local.private!r}")
    risk = local.objective
    alone = isinstance(risk, empirical_risk) and risk.adjust is None and risk.term is None
    wrong = {
        "objective": (alone, "an empirical_risk without adjust and term"),
        "last_batch": (local.last_batch == "keep", "'keep'"),
    }
    wrong |= {name: (getattr(local, name) is None, "None") for name in ABSENT}
    for name, (fits, instead) in wrong.items():
        if not fits:
            raise ValueError(
                f"{name} must be {instead} with private={shown(local.private)}, got "
                f"{shown(getattr(local, name))}"
            )
    for part in local.corrections:
        if reads_samples(part):
            raise ValueError(
                f"corrections must read a client's samples in its private gradients alone with "
                f"private={shown(local.private)}, got {shown(part)}"
            )


def reads_samples(correction: Correction) -> bool:
    """Returns whether a correction reads more of a client than the gradients of its steps.

    Its program is traced on a model of one weight; a correction that cannot be traced counts.

    >>> from fedjax_sim import corrections
    >>> [reads_samples(corrections.scaffold(option)) for option in (1, 2)]
    [True, False]
    """
    if correction.anchored or correction.ask is not None:
        return True
    w, ends = {"w": jnp.zeros(1)}, jnp.int32(1)
    view = ClientView(jnp.zeros((1, 1)), jnp.zeros(1), jnp.zeros(1, jnp.int32), ends, ends, 1)
    report = LocalInfo(jnp.float32(0), ends, ends)

    def both(read: Any, known: Any) -> Any:
        view, loss, samples, whole = read
        steps, params, path, own, common = known
        context = Context(Variables(params, {}), view, jax.random.key(0))
        done = Done(LocalInfo(loss, steps, samples), lambda: whole, path)
        states = context, own, common
        gradient = correction.direction(path, params, *states)
        return gradient, correction.finish(params, *states, done)

    return _depends(both, (view, report.loss, report.samples, w), (report.steps, w, w), correction)


def _depends(both: Callable[..., Any], read: Any, known: Any, correction: Correction) -> bool:
    """Returns whether a traced function depends on its first argument."""
    try:
        w = known[1]
        known = *known, correction.client_state(w), correction.shared_state(w)
        program = jax.make_jaxpr(both)(read, known).jaxpr
        used: Any = without_dead_code(program, (read, known))[1][0]
    except Exception:
        return True
    return any(jax.tree.leaves(used))
