"""What a server keeps for its clients is what they keep themselves, beside any other part."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from composing import ALPHA, PART_LIST, crowd, part_named, refusal
from test_contracts import net

import fedjax_sim as fs
from fedjax_sim.client.descent import Common, Kept
from fedjax_sim.client.turns import Reflected
from fedjax_sim.personal._models import kept_of

ROUNDS = 3


def played(algorithm: fs.Algorithm) -> Any:
    """The state after a few rounds: one program."""

    @jax.jit
    def run(data: fs.ClientData) -> Any:
        key = jax.random.key(7)

        def step(state: Any, t: Any) -> Any:
            return algorithm.step(jax.random.fold_in(key, t), state, data)[0], None

        start = algorithm.init(key, net().init(jax.random.key(3)), data)
        return jax.lax.scan(step, start, jnp.arange(ROUNDS, dtype=jnp.int32))[0]

    return jax.device_get(run(crowd()))


def over_clients(reduce: Callable[..., Any], *kept: Any) -> Any:
    return jax.tree.map(lambda *rows: reduce(*rows).mean(axis=0), *kept)


def place(parts: Any, name: str) -> int:
    """Of a correction among those of the local update."""
    return [term.origin.name for term in parts.local.corrections].index(name)


def h_is_the_mean(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Kept, state.client_state)
    return state.opt_state, over_clients(lambda h: h, kept.corrections[place(parts, "dynamic")])


def w_is_the_mean_of_augmented_models(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Reflected, state.client_state)
    (inner,) = kept_of(Kept, kept.inner)
    h = inner.corrections[place(parts, "dynamic")]
    mean = over_clients(lambda w, h: w - h / ALPHA, kept.last, h)
    return state.server.params, mean


def c_is_the_mean(parts: Any, state: Any) -> tuple[Any, Any]:
    kept, common = kept_of(Kept, state.client_state), kept_of(Common, state.shared_state)
    i = place(parts, "scaffold")
    means = [over_clients(lambda c: c, one.corrections[i]) for one in kept]
    return [one.corrections[i] for one in common], means


def variates_sum_to_zero(parts: Any, state: Any) -> tuple[Any, Any]:
    (kept,) = kept_of(Kept, state.client_state)
    own = kept.corrections[place(parts, "scaffnew")]
    length = 0.1 / 0.2  # of the part in tests/test_contracts.py
    moved = jax.tree.map(
        lambda h, last, w: h + (w[None] - last) / length, own.h, own.last, state.server.params
    )
    mean = over_clients(lambda h: h, moved)
    return mean, jax.tree.map(np.zeros_like, mean)


INVARIANTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "correction dynamic": h_is_the_mean,
    "local fedadmm": w_is_the_mean_of_augmented_models,
    "correction scaffold": c_is_the_mean,
    "correction scaffnew": variates_sum_to_zero,
}


def holds_exactly(algorithm: fs.Algorithm) -> bool:
    """An attack or a robust rule makes an estimate of what the server keeps."""
    honest = not any(part.forges for part in algorithm.parts.sending)
    return honest and algorithm.parts.aggregator is fs.aggregators.mean


@pytest.mark.slow
@pytest.mark.parametrize("name", INVARIANTS)
def test_the_server_follows_what_clients_keep(name: str) -> None:
    """Beside a fourth of all parts, each a program; the other names take the others.

    ``EVERY_PAIR=1 pytest -m slow tests/test_followed.py`` takes all parts.
    """
    one, turn = part_named(name), [*INVARIANTS].index(name)
    taken = {one.role, "server"} if name == "local fedadmm" else {one.role}
    others = PART_LIST if "EVERY_PAIR" in os.environ else PART_LIST[turn :: len(INVARIANTS)]
    for other in [part for part in others if part.role not in taken]:
        made = refusal(one, other)
        if isinstance(made, str) or not holds_exactly(made):
            continue
        if one.name == "dynamic" and made.parts.local.reflects:
            continue  # FedADMM, whose server keeps no h
        state = played(made)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.server)), other
        ours, theirs = INVARIANTS[name](made.parts, state)
        theirs = jax.tree.map(lambda a, b: b, ours, theirs)
        scale = max(np.abs(a).max() for a in jax.tree.leaves((ours, theirs, state.server)))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=repr(other))
