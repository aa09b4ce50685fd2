"""The ranges and choices that parts and methods declare, each of which is checked."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fedjax_sim as fs
from fedjax_sim import base
from fedjax_sim.base import ranges

DECLARED = {
    "at least 1": """
        adaptive_proximal.patience fedmd.digest_batch_size astraea.mediator_epochs
        banded_mechanism.bands bucketing.size adaptive_steps.most buffered.size by_norm.iterations
        calibrated.samples ccvr.classes classification.classes consensus.samples delayed.rounds
        discrepancy.classes distilled.batch_size diurnal.period dynamic.slots
        dp_fedavg.clients_per_round fang_krum.evaluations fd.classes
        fedavg.clients_per_round fedmd.classes
        fedmd.public_samples geometric_median.iterations learned.peers local_sgd.batch_size
        low_rank.rank mediators.clients_each moreau_envelope.inner_steps multi_krum.keep
        multi_label.labels next_token.vocabulary optimised.evaluations past_models.buffer
        peer_means.mix_samples per_fedavg.fine_tuning_steps power_of_choice.candidates
        prototypes.classes radfed.redistribution_rounds regression.targets skewscout.fewest
        skewscout.rounds simulated.first squared_gradient.batch_size
        stochastic_quantisation.levels suspicion.batch_size tiers.count traced.first traced.period
        uniform.active within_deadline.candidates""",
    "positive": """
        adaptive_mechanism.clients_per_round adaptive_mechanism.clip adaptive_proximal.step
        fedmd.digest_lr banded_mechanism.clip by_norm.expected calibrated.lr
        client_momentum.lr clip_norm.limit deep_q.lr distilled.lr dp_ftrl.server_lr dp_sgd.clip
        dynamic.alpha fedadam.server_lr fedadam.tau fedadmm.rho fedamp.alpha fedavgm.server_lr
        fedbabu.fine_tuning_epochs fedrep.head_epochs fine_tuned.fine_tuning_epochs
        gaussian_mechanism.clients_per_round gaussian_mechanism.clip geometric_median.eps
        learned.mu_2 learned.penalty model_contrast.temperature moreau_envelope.inner_lr
        moreau_envelope.lam normalise.lr not_true_distillation.temperature pfedme.beta
        poisson.clients_per_round q_fair.lr scaffnew.lr scaffold.server_lr
        teacher_distillation.temperature tree_mechanism.clip""",
    "at least 0": """
        adaptive_proximal.start adaptive_start.mix_lr after_a_step.alpha agnostic.step
        fedmd.digest_epochs balanced.gamma calibrated.steps calibration.tau crop.padding
        discrepancy.a discrepancy.b distilled.steps ditto.lam empirical_risk.l2
        estimated_sharpness.rho extrapolated.eps fd.distill_weight fedadam.v0 fedamp.lam fedprox.mu
        feddisco.disco_a feddisco.disco_b fedasync.max_staleness guided.penalty
        hard_threshold.threshold learned.lr learned.mu_1 model_contrast.mu near_outputs.gamma
        near_prototypes.lam not_true_distillation.beta ozdayi.server_epochs proximal.mu q_fair.q
        sharpness_aware.rho sign_agreement.threshold stale.most staleness.grace staleness.slope
        suspicion.rho teacher_distillation.gamma""",
    "in [0, 1)": """
        client_momentum.momentum dp_ftrl.server_momentum fedadam.beta2 fedavgm.server_momentum
        global_momentum.beta local_sgd.inexactness mixed_objective.mix_ratio normalise.momentum
        q_fair.momentum scaffnew.momentum simulated.failures suspicion.dropped traced.failures""",
    "in [0, 1]": """
        adaptive_mechanism.quantile dp_fedavg.quantile bernoulli.p colour_jitter.contrast
        diurnal.share guided.explore importance.gamma interpolated.alpha local_sgd.stragglers
        matchings.activity relevant_only.relevance sometimes.chance""",
    "in (0, 1]": """
        adaptive_start.mix_share client_momentum.alpha geometric.p mix.alpha radfed.alpha
        random_mask.share scaffnew.coin scaffnew.p staleness.alpha ternary.sparsity
        top_k.sparsity""",
    "at least 0 and finite": """
        adaptive_mechanism.clip_lr dp_fedavg.clip_lr dp_sgd.noise_multiplier gaussian.sigma
        gaussian_mechanism.noise_multiplier noise.sigma noise.std rotation.degrees""",
    "in [0, 0.5)": """
        caf.byzantine krum.byzantine nearest_neighbour_mixing.byzantine perspective.tilt
        trimmed_mean.beta""",
    "positive and finite": """
        altered.white altered_copies.white bandwidth.down bandwidth.up constant.value ipm.epsilon
        lognormal.median pareto.least sign_flip.scale simulated.compute simulated.deadline
        simulated.idle simulated.watts""",
}
"""The settings with a range; those that are not here yet are checked too."""

Make = Callable[..., Any]


def declared() -> Iterator[tuple[Make, str, Any]]:
    """Yields each part or method, and the name and the range or choice of each of its settings."""
    for info in pkgutil.walk_packages(fs.__path__, "fedjax_sim."):
        if "__main__" in info.name or info.name.startswith("fedjax_sim.cli."):
            continue
        for made in vars(importlib.import_module(info.name)).values():
            if getattr(made, "__module__", "") != info.name:
                continue
            limits: ranges.Limits = {}
            if inspect.isclass(made) and issubclass(made, base.Part):
                limits = made._limits
            elif inspect.isfunction(made) and hasattr(made, "__wrapped__"):
                parameters = inspect.signature(made).parameters
                names = inspect.unwrap(made).__globals__
                limits = ranges.limits((n, p.annotation, names) for n, p in parameters.items())
            yield from ((made, name, within) for name, within in limits.items())


DECLARATIONS = {
    f"{made.__module__}.{made.__name__}.{name}": (made, name, within)
    for made, name, within in declared()
}
SETTINGS: dict[str, tuple[Make, str, ranges.Range]] = {
    key: found for key, found in DECLARATIONS.items() if getattr(found[2], "words", "")
}
CHOICES = {key: found for key, found in DECLARATIONS.items() if type(found[2]) is tuple}


@pytest.mark.parametrize("words", DECLARED)
def test_no_range_is_lost(words: str) -> None:
    found = {key for key, (*_, within) in SETTINGS.items() if within.words == words}
    assert {*DECLARED[words].split()} <= {".".join(key.split(".")[-2:]) for key in found}
    assert words != "positive" or sum(key.endswith(".dynamic.alpha") for key in found) == 2


def outside(within: ranges.Range) -> Iterator[float]:
    if not within.whole:
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
    kind = "a whole number" if within.whole else within.words
    with pytest.raises(ValueError, match=f"^{name} must be {re.escape(kind)}.*, got 'x'$"):
        made(**{name: "x"})


def test_no_choice_is_lost() -> None:
    wanted = """
        delayed.evaluated discounted.decay discrepancy.distance dp_fedavg.sampling dynamic.by
        fang_trim.knowledge fedadam.variant fedasync.decay gossip.topology importance.initial
        local_sgd.last_batch local_sgd.optimizer_state optimised.along phase_shift.mode
        radfeda.server_optimizer radfed.importance robust.aggregator robust.mixing scaffold.option
        simulated.late squared_gradient.kind staleness.decay traced.late"""
    assert {*wanted.split()} <= {".".join(key.split(".")[-2:]) for key in CHOICES}


@pytest.mark.parametrize("key", CHOICES)
def test_a_value_that_is_no_choice_is_rejected(key: str) -> None:
    made, name, _ = CHOICES[key]
    with pytest.raises(ValueError, match=f"^{name} must be .* or .*, got 'x'$"):
        made(**{name: "x"})
