"""The ranges that parts and methods declare for their settings, each of which is checked."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import pytest

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.base import Count, Natural, NonNegative, Part, Positive, ranges
from fedjax_sim.base import Decay as DecayRange

Decay = Literal["slow", "fast"]  # a user's own type that has the name of one of ours


class own(Part):
    """A user's part."""

    count: Count | None
    natural: Natural = 0
    decay: Decay = "slow"
    most: int = 5


class later(own):
    """Inherits the ranges, whatever comes before the setting."""

    positive: Positive = 1.0


@pytest.mark.parametrize(
    ("of", "inside", "outside"),
    [
        (ranges.Count, (1, 7), (0, -1)),
        (ranges.Natural, (0, 7), (-1,)),
        (ranges.Positive, (1e-30, math.inf), (0.0, -1.0, math.nan)),
        (ranges.NonNegative, (0.0, math.inf), (-1e-30, math.nan)),
        (ranges.Share, (0, 1), (-0.01, 1.01, math.nan)),
        (DecayRange, (0, 0.99), (-0.01, 1, math.nan)),
        (ranges.Minority, (0, 0.49), (-0.01, 0.5, math.nan)),
        (ranges.Finite, (0, 1e30), (-0.01, math.inf, math.nan)),
        (ranges.FinitePositive, (1e-30, 1e30), (0, math.inf, math.nan)),
        (ranges.Fraction, (0.01, 1), (0, 1.01, math.nan)),
        (ranges.Within, (0.01, 0.99), (0, 1, math.nan)),
    ],
)
def test_ranges(of: Annotated[float, ...], inside: tuple[float], outside: tuple[float]) -> None:
    (within,) = of.__metadata__  # type: ignore[attr-defined]
    assert all(value in within for value in inside)
    assert not any(value in within for value in outside)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": None, "natural": -1}, "natural must be at least 0, got -1"),
        ({"count": 2**31}, "count must be within ±2147483647, got 2147483648"),
        ({"count": 1, "most": -(2**31)}, "most must be within ±2147483647, got -2147483648"),
        ({"count": 1, "positive": 0.0}, "positive must be positive, got 0.0"),
    ],
)
def test_a_part_checks_its_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        later(**settings)


def test_settings_by_position_are_checked() -> None:
    with pytest.raises(ValueError, match="natural must be at least 0, got -3"):
        own(1, -3)
    with pytest.raises(ValueError, match="count must be at least 1"):
        own(1).replace(count=0)


def test_a_type_that_has_the_name_of_a_range_is_not_one() -> None:
    assert own(None, decay="fast").decay == "fast"


def test_functions_check_and_traced_numbers_pass() -> None:
    @fs.part
    def made(mu: NonNegative) -> own:
        del mu
        return own(1)

    with pytest.raises(ValueError, match="mu must be at least 0, got -1"):
        made(-1)
    assert jax.jit(lambda mu: made(mu).natural)(-1.0) == 0


DECLARED = {
    "at least 1": """
        adaptive_proximal.patience astraea.mediator_epochs banded_mechanism.bands bucketing.size
        budgeted.most classification.classes delayed.rounds discrepancy.classes
        geometric_median.iterations learned.peers low_rank.rank mediators.clients_each
        moreau_envelope.inner_steps multi_krum.keep multi_label.labels next_token.vocabulary
        optimised.evaluations past_models.buffer peer_means.mix_samples
        per_fedavg.fine_tuning_steps periodic.at_work power_of_choice.candidates
        prototypes.classes radfed.redistribution_rounds regression.targets scouted.fewest
        scouted.rounds simulated.first stochastic_quantisation.levels suspicion.batch_size
        traced.first within_deadline.candidates""",
    "positive": """
        adaptive_mechanism.clip adaptive_mechanism.clients_per_round adaptive_proximal.step
        agreed.digest_lr banded_mechanism.clip calibrated.lr client_momentum.lr clip_norm.limit
        deep_q.lr distilled.lr dynamic.alpha fedadmm.rho gaussian_mechanism.clients_per_round
        gaussian_mechanism.clip geometric_median.eps model_contrast.temperature
        moreau_envelope.inner_lr moreau_envelope.lam normalise.lr
        not_true_distillation.temperature pfedme.beta poisson.clients_per_round q_fair.lr
        scaffnew.lr teacher_distillation.temperature tree_mechanism.clip""",
    "at least 0": """
        adaptive_proximal.start adaptively_mixed.mix_lr after_a_step.alpha agnostic.step
        balanced.gamma calibration.tau ditto.lam empirical_risk.l2 extrapolated.eps
        guided.penalty model_contrast.mu near_outputs.gamma near_prototypes.lam
        not_true_distillation.beta ozdayi.server_epochs proximal.mu q_fair.q
        sign_agreement.threshold stale.most suspicion.rho teacher_distillation.gamma""",
    "in [0, 1)": """
        client_momentum.momentum mixed_objective.mix_ratio normalise.momentum q_fair.momentum
        scaffnew.momentum simulated.failures suspicion.dropped traced.failures""",
    "in [0, 1]": """
        adaptive_mechanism.quantile bernoulli.p diurnal.share importance.gamma
        interpolated.alpha matchings.activity relevant_only.relevance sometimes.chance""",
    "in (0, 1]": """
        adaptively_mixed.mix_share client_momentum.alpha geometric.p mix.alpha random_mask.share
        scaffnew.p staleness.alpha ternary.sparsity top_k.sparsity""",
}
"""The settings with a range; those that are not here yet are checked too."""

Make = Callable[..., Any]


def declared() -> Iterator[tuple[Make, str, ranges.Range]]:
    """Yields each part or method, and the name and the range of each of its settings."""
    for info in pkgutil.walk_packages(fs.__path__, "fedjax_sim."):
        if "__main__" in info.name or info.name.startswith("fedjax_sim.cli."):
            continue
        for made in vars(importlib.import_module(info.name)).values():
            if getattr(made, "__module__", "") != info.name:
                continue
            limits: ranges.Limits = {}
            if inspect.isclass(made) and issubclass(made, base.Part):
                limits = made._limits
            elif hasattr(made, "__wrapped__") and inspect.isfunction(made):
                parameters = inspect.signature(made).parameters
                limits = ranges.limits(
                    (name, p.annotation, vars(sys.modules[info.name]))
                    for name, p in parameters.items()
                )
            yield from ((made, name, within) for name, (_, within) in limits.items())


SETTINGS = {
    f"{made.__module__}.{made.__name__}.{name}": (made, name, within)
    for made, name, within in declared()
    if within.words
}


@pytest.mark.parametrize("words", DECLARED)
def test_no_range_is_lost(words: str) -> None:
    found = {key for key, (*_, within) in SETTINGS.items() if within.words == words}
    assert {*DECLARED[words].split()} <= {".".join(key.split(".")[-2:]) for key in found}
    assert words != "positive" or sum(key.endswith(".dynamic.alpha") for key in found) == 2


def outside(within: ranges.Range) -> Iterator[float]:
    yield math.nan
    yield within.least if within.open_below else within.least - 1
    if within.most < math.inf:
        yield within.most if within.open_above else within.most + 1


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_out_of_its_range_is_rejected(key: str) -> None:
    made, name, within = SETTINGS[key]
    for value in outside(within):
        message = f"{name} must be {within.words}, got {value}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            made(**{name: value})
