"""Rejects settings of local training that read samples outside of private steps."""

from __future__ import annotations

from fedjax_sim.base import shown
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.client.sgd import SGD
from fedjax_sim.privacy import dp_sgd

ABSENT = "batch_by_client", "companion", "inexactness", "memory", "shared", "steps", "until"
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
        if part.reads_samples:
            raise ValueError(
                f"corrections must read a client's samples in its private gradients alone with "
                f"private={shown(local.private)}, got {shown(part)} with reads_samples = True"
            )
