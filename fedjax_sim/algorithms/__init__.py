"""Named methods; each is one composition. Their keyword parameters are the command's flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedjax_sim.algorithms.afl import afl
from fedjax_sim.algorithms.astraea import astraea
from fedjax_sim.algorithms.ditto import ditto
from fedjax_sim.algorithms.dp_fedavg import dp_fedavg
from fedjax_sim.algorithms.dynamic_clustering import dynamic_clustering
from fedjax_sim.algorithms.fedasync import fedasync
from fedjax_sim.algorithms.fedavg import fedavg
from fedjax_sim.algorithms.fedavg_qsgd import fedavg_qsgd
from fedjax_sim.algorithms.fedavg_top_k import fedavg_top_k
from fedjax_sim.algorithms.fedavgm import fedavgm
from fedjax_sim.algorithms.fedmix import fedmix
from fedjax_sim.algorithms.fednova import fednova
from fedjax_sim.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedjax_sim.algorithms.fedprox import fedprox
from fedjax_sim.algorithms.fine_tuned import fine_tuned
from fedjax_sim.algorithms.fltrust import fltrust
from fedjax_sim.algorithms.gossip import gossip
from fedjax_sim.algorithms.ifca import ifca
from fedjax_sim.algorithms.mfl import mfl
from fedjax_sim.algorithms.ozdayi import ozdayi
from fedjax_sim.algorithms.parallel_sgd import parallel_sgd
from fedjax_sim.algorithms.phase_shift import phase_shift
from fedjax_sim.algorithms.qffl import qffl
from fedjax_sim.algorithms.radfed import radfed
from fedjax_sim.algorithms.radfed_plus import radfeda, radfedi, radfedm, radfedp
from fedjax_sim.algorithms.robust import robust
from fedjax_sim.algorithms.scaffold import scaffold
from fedjax_sim.algorithms.stc import stc
from fedjax_sim.base import Algorithm

_METHODS: tuple[Callable[..., Algorithm], ...] = (
    fedavg,
    phase_shift,
    radfed,
    radfedi,
    radfedp,
    radfedm,
    radfeda,
    fedprox,
    scaffold,
    fednova,
    mfl,
    parallel_sgd,
    fedavgm,
    fedadagrad,
    fedadam,
    fedyogi,
    ozdayi,
    fedasync,
    gossip,
    qffl,
    afl,
    robust,
    fltrust,
    stc,
    fedavg_top_k,
    fedavg_qsgd,
    dp_fedavg,
    ifca,
    dynamic_clustering,
    ditto,
    fine_tuned,
    fedmix,
    astraea,
)

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = MappingProxyType(
    {method.__name__: method for method in _METHODS}
)

COMMON = ("clients_per_round", "execution", "objective", "classes", "lr", "momentum")
"""Parameters that mean the same in every method; the command gives them to those that have them."""

__all__ = [
    "ALGORITHMS",
    "COMMON",
    "afl",
    "astraea",
    "ditto",
    "dp_fedavg",
    "dynamic_clustering",
    "fedadagrad",
    "fedadam",
    "fedasync",
    "fedavg",
    "fedavg_qsgd",
    "fedavg_top_k",
    "fedavgm",
    "fedmix",
    "fednova",
    "fedprox",
    "fedyogi",
    "fine_tuned",
    "fltrust",
    "gossip",
    "ifca",
    "mfl",
    "ozdayi",
    "parallel_sgd",
    "phase_shift",
    "qffl",
    "radfed",
    "radfeda",
    "radfedi",
    "radfedm",
    "radfedp",
    "robust",
    "scaffold",
    "stc",
]
