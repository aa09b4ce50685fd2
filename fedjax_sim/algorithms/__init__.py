"""Named methods, each one composition; their keyword parameters are flags of the command."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.base.registry import Registry
from fedjax_sim.base.signatures import takes
from fedjax_sim.round import Algorithm

# Methods are named here only; every list has this order.
# isort: off
from fedjax_sim.algorithms._averaging import fedavg as fedavg
from fedjax_sim.algorithms._delayed import phase_shift as phase_shift
from fedjax_sim.algorithms._delayed import radfed as radfed
from fedjax_sim.algorithms._radfed_plus import radfedi as radfedi
from fedjax_sim.algorithms._radfed_plus import radfedp as radfedp
from fedjax_sim.algorithms._radfed_plus import radfedm as radfedm
from fedjax_sim.algorithms._radfed_plus import radfeda as radfeda
from fedjax_sim.algorithms._drift import fedprox as fedprox
from fedjax_sim.algorithms._drift import scaffold as scaffold
from fedjax_sim.algorithms._drift import scaffnew as scaffnew
from fedjax_sim.algorithms._adaptive import adaptive_steps as adaptive_steps
from fedjax_sim.algorithms._adaptive import skewscout as skewscout
from fedjax_sim.algorithms._adaptive import loadaboost as loadaboost
from fedjax_sim.algorithms._drift import fednova as fednova
from fedjax_sim.algorithms._drift import feddyn as feddyn
from fedjax_sim.algorithms._drift import fedadmm as fedadmm
from fedjax_sim.algorithms._objectives import moon as moon
from fedjax_sim.algorithms._objectives import fedntd as fedntd
from fedjax_sim.algorithms._objectives import fedgkd as fedgkd
from fedjax_sim.algorithms._objectives import fedlc as fedlc
from fedjax_sim.algorithms._objectives import feddisco as feddisco
from fedjax_sim.algorithms._after import feddf as feddf
from fedjax_sim.algorithms._after import ccvr as ccvr
from fedjax_sim.algorithms._steps import fedsam as fedsam
from fedjax_sim.algorithms._steps import fedlesam as fedlesam
from fedjax_sim.algorithms._steps import fedexp as fedexp
from fedjax_sim.algorithms._steps import fedcm as fedcm
from fedjax_sim.algorithms._steps import mimelite as mimelite
from fedjax_sim.algorithms._steps import mime as mime
from fedjax_sim.algorithms._diloco import diloco as diloco
from fedjax_sim.algorithms._diloco import streaming_diloco as streaming_diloco
from fedjax_sim.algorithms._averaging import mfl as mfl
from fedjax_sim.algorithms._averaging import parallel_sgd as parallel_sgd
from fedjax_sim.algorithms._averaging import fedavgm as fedavgm
from fedjax_sim.algorithms._averaging import fedadagrad as fedadagrad
from fedjax_sim.algorithms._averaging import fedadam as fedadam
from fedjax_sim.algorithms._averaging import fedyogi as fedyogi
from fedjax_sim.algorithms._after import ozdayi as ozdayi
from fedjax_sim.algorithms._asynchronous import fedasync as fedasync
from fedjax_sim.algorithms._asynchronous import fedbuff as fedbuff
from fedjax_sim.algorithms._gossip import gossip as gossip
from fedjax_sim.algorithms._gossip import push_sum as push_sum
from fedjax_sim.algorithms._gossip import dada as dada
from fedjax_sim.algorithms._fair import qffl as qffl
from fedjax_sim.algorithms._fair import afl as afl
from fedjax_sim.algorithms._robust import robust as robust
from fedjax_sim.algorithms._robust import fltrust as fltrust
from fedjax_sim.algorithms._robust import zeno as zeno
from fedjax_sim.algorithms._compressed import cmfl as cmfl
from fedjax_sim.algorithms._compressed import stc as stc
from fedjax_sim.algorithms._compressed import fedavg_top_k as fedavg_top_k
from fedjax_sim.algorithms._compressed import fedavg_qsgd as fedavg_qsgd
from fedjax_sim.algorithms._compressed import fedavg_sketched as fedavg_sketched
from fedjax_sim.algorithms._private import dp_fedavg as dp_fedavg
from fedjax_sim.algorithms._private import dp_ftrl as dp_ftrl
from fedjax_sim.algorithms._clustered import ifca as ifca
from fedjax_sim.algorithms._clustered import dynamic_clustering as dynamic_clustering
from fedjax_sim.algorithms._personal import ditto as ditto
from fedjax_sim.algorithms._personal import fine_tuned as fine_tuned
from fedjax_sim.algorithms._adapted import per_fedavg as per_fedavg
from fedjax_sim.algorithms._adapted import pfedme as pfedme
from fedjax_sim.algorithms._personal import apfl as apfl
from fedjax_sim.algorithms._personal import fedrod as fedrod
from fedjax_sim.algorithms._personal import fedala as fedala
from fedjax_sim.algorithms._layers import fedper as fedper
from fedjax_sim.algorithms._layers import fedrep as fedrep
from fedjax_sim.algorithms._layers import lg_fedavg as lg_fedavg
from fedjax_sim.algorithms._layers import fedbn as fedbn
from fedjax_sim.algorithms._layers import fedbabu as fedbabu
from fedjax_sim.algorithms._knowledge import fedproto as fedproto
from fedjax_sim.algorithms._knowledge import fd as fd
from fedjax_sim.algorithms._knowledge import fedmd as fedmd
from fedjax_sim.algorithms._selected import power_of_choice as power_of_choice
from fedjax_sim.algorithms._selected import fedcs as fedcs
from fedjax_sim.algorithms._selected import hybrid_fl as hybrid_fl
from fedjax_sim.algorithms._selected import tifl as tifl
from fedjax_sim.algorithms._selected import oort as oort
from fedjax_sim.algorithms._selected import favor as favor
from fedjax_sim.algorithms._balanced import fedmix as fedmix
from fedjax_sim.algorithms._balanced import astraea as astraea
# isort: on

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    wanted="a function (local, *, clients_per_round, ...) -> Algorithm",
    fits=lambda value: takes(value, None, clients_per_round=1),
    makes=lambda: (Algorithm,),
    group="fedjax_sim.algorithms",
    own={
        name: value
        for name, value in tuple(globals().items())
        if getattr(value, "__module__", "").startswith(f"{__name__}._")
    },
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
