"""Attacks of malicious clients, for testing defences.

An attack is the first part of ``compose(sending=...)``: codes and defences come after it. It acts
whenever a model is sent, and forges the trainable parameters. Clients that attack alone also forge
the messages sent along with the model (a control variate). A model's state is never forged: a
BatchNorm statistic out of its range would give the attacker away. Poisoned samples are a change of
the data, see :func:`label_flip` and :func:`backdoor`.
"""

from __future__ import annotations

from fedjax_sim.attacks._alone import gaussian, scaling, sign_flip
from fedjax_sim.attacks._backdoor import backdoor
from fedjax_sim.attacks._directed import fang_krum, fang_trim
from fedjax_sim.attacks._malicious import Malicious, byzantine, label_flip
from fedjax_sim.attacks._optimised import optimised
from fedjax_sim.attacks._together import alie, ipm, mimic

__all__ = ["backdoor", "byzantine", "label_flip"]
