"""Any mix of parts trains: random compositions on an easy convex problem."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, make_federation, play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim import (
    aggregators,
    attacks,
    compression,
    corrections,
    optimizers,
    redistribution,
    refresh,
    schedule,
    selection,
    sending,
    server,
    weighting,
)
from fedjax_sim.base import LocalUpdate

SLOTS, ROUNDS = 4, 12

CORRECTIONS: dict[str, Any] = {
    "none": (),
    "proximal": (corrections.proximal(0.1),),
    "scaffold": (corrections.scaffold(),),
    "both": (corrections.proximal(0.1), corrections.scaffold(option=1)),
}
# Which slots are due when goes with whether a slot keeps its client.
SCHEDULES: dict[str, Any] = {
    "every round": (schedule.every_round(SLOTS), False),
    "delayed": (schedule.delayed(SLOTS, 3), False),
    "delayed, sticky": (schedule.delayed(SLOTS, 3), True),
    "staggered": (schedule.staggered(SLOTS, 2), True),
}
CODES: dict[str, Any] = {
    "none": (),
    "top-k": (compression.compressed(compression.top_k(0.5)),),
    "ternary": (compression.compressed(compression.ternary(0.3)),),
    "quantised": (compression.compressed(compression.stochastic_quantisation(16), feedback=False),),
}
# Around a code: one client of eight goes backwards, and is bounded; or all bound and blur.
FIRST: dict[str, Any] = {"none": (), "flipped": (attacks.sign_flip(np.arange(8) == 3, 0.5),)}
LAST: dict[str, Any] = {
    "none": (),
    "clipped": (sending.clip_norm(1.0),),
    "noisy": (sending.clip_norm(1.0), sending.noise(1e-3)),
}
AGGREGATORS: dict[str, Any] = {
    "mean": aggregators.AGGREGATORS["mean"],
    "median": aggregators.coordinate_median,
    "trimmed": aggregators.trimmed_mean(0.25),
    "geometric": aggregators.geometric_median(),
    "krum": aggregators.multi_krum(0.0, keep=2),
}
SERVERS: dict[str, Any] = {
    "replace": server.replace(),
    "mix": server.mix(0.7),
    "momentum": server.optimizer(optax.sgd(0.5, momentum=0.5)),
    "yogi": server.optimizer(optimizers.yogi(0.05)),
    "agreed": server.sign_agreement(1, server.replace()),
}


def one_of(choices: dict[str, Any]) -> Any:
    return st.sampled_from(list(choices))


@st.composite
def compositions(draw: Any) -> dict[str, Any]:
    """Parts that fit together: what would have no effect, or not enough models, is refused."""
    plan = draw(one_of(SCHEDULES))
    flies, sticky = plan != "every round", SCHEDULES[plan][1]
    rules = {k: rule for k, rule in AGGREGATORS.items() if (k, plan) != ("trimmed", "staggered")}
    return {
        "optimizer_state": draw(st.sampled_from(["reset", "keep", "average"])),
        "corrections": draw(one_of(CORRECTIONS)),
        "sending": [draw(one_of(parts)) for parts in (FIRST, CODES, LAST)],
        "schedule": plan,
        "active": None if sticky else draw(st.sampled_from([None, 3])),
        "redistribution": draw(st.sampled_from(["keep", "permute"])) if flies else "keep",
        "refresh": draw(st.sampled_from(["nothing", "drift_correction"])) if sticky else "nothing",
        "weighting": draw(st.sampled_from(["by_samples_visited", "equal"])),
        "aggregator": draw(one_of(rules)),
        "server": draw(one_of(SERVERS)),
    }


def composed(local: LocalUpdate, parts: dict[str, Any]) -> fs.Algorithm:
    plan, sticky = SCHEDULES[parts["schedule"]]
    first, code, last = parts["sending"]
    local = local.change(
        corrections=CORRECTIONS[parts["corrections"]], optimizer_state=parts["optimizer_state"]
    )
    return fs.compose(
        local,
        selection=selection.uniform(sticky=sticky, active=parts["active"]),
        schedule=plan,
        redistribution=getattr(redistribution, parts["redistribution"]),
        refresh=getattr(refresh, parts["refresh"])(),
        sending=FIRST[first] + CODES[code] + LAST[last],
        weighting=getattr(weighting, parts["weighting"]),
        aggregator=AGGREGATORS[parts["aggregator"]],
        server=SERVERS[parts["server"]],
    )


@pytest.fixture(scope="module")
def easy() -> Federation:
    """IID clients of unequal sizes: logistic regression is convex, and no method is in the way."""
    return make_federation((12, 20, 16, 33, 9, 24, 18, 16), tests=100)


def check_it_learns(easy: Federation, parts: dict[str, Any]) -> None:
    model = fs.models.logistic((6,), easy.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05, momentum=0.5), batch_size=8)
    result = fs.simulate(
        composed(local, parts), model, easy.data, easy.test,
        rounds=ROUNDS, classes=easy.classes, eval_every=ROUNDS - 1,
    )  # fmt: skip
    first = model.init(jax.random.fold_in(jax.random.key(0), 0))
    logits, _ = model.apply(first, jnp.asarray(easy.test[0]), train=False)
    before = float(optax.softmax_cross_entropy_with_integer_labels(logits, easy.test[1]).mean())
    after = float(result.evaluations[-1].test_loss[0])
    assert np.isfinite(after)
    assert after < 0.9 * before
    assert result.xla_programs <= 4


def test_an_idle_slot_takes_no_correction(easy: Federation) -> None:
    """Its client has no samples, and before the first aggregation nor has the server: 0 / 0."""
    model = fs.models.logistic((6,), easy.classes)
    algorithm = fs.compose(
        fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=8),
        selection=selection.uniform(active=SLOTS - 1),
        schedule=schedule.delayed(SLOTS, 3),
        refresh=refresh.drift_correction()._replace(
            needs=()
        ),  # which ask for slots that never rest
        weighting=weighting.equal,
    )
    final = play(algorithm, model, easy.data, 4).final
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final))


@pytest.mark.slow
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(parts=compositions())
def test_random_compositions_learn(easy: Federation, parts: dict[str, Any]) -> None:
    check_it_learns(easy, parts)
