"""The contracts: arguments, shapes and results of every part."""

from __future__ import annotations

from fedjax_sim.base.arrays import Array, PyTree, concrete
from fedjax_sim.base.client import (
    Aggregator,
    Correction,
    Done,
    Follow,
    Personal,
    SetupTraffic,
    SetupTrafficOf,
)
from fedjax_sim.base.clock import Availability, Clock, Elapsed, Law, Link, Now, evaluate_law
from fedjax_sim.base.cohort import Cohort, Gathered, LocalInfo
from fedjax_sim.base.data import (
    Batch,
    ClientData,
    ClientView,
    FetchedError,
    MissingRootError,
    Transform,
)
from fedjax_sim.base.exchange import Coverage, Exchange
from fedjax_sim.base.finish import Finish
from fedjax_sim.base.local_update import LocalUpdate, Survey, Wrapper
from fedjax_sim.base.model import (
    Accompanied,
    Companion,
    Context,
    Leaves,
    LossFn,
    Memory,
    Model,
    ModelApply,
    ModelFeatures,
    ModelInit,
    Objective,
    Variables,
)
from fedjax_sim.base.need import Need
from fedjax_sim.base.parts import (
    Origin,
    Part,
    origin_of,
    origins,
    part,
    plain_sgd,
    shown,
    with_origin,
    written_arguments,
)
from fedjax_sim.base.plan import (
    AnyRedistribution,
    Evaluated,
    Flight,
    LearnedRedistribution,
    Moves,
    Outlook,
    Participation,
    PerClient,
    Redistribution,
    Refresh,
    Selection,
)
from fedjax_sim.base.ranges import (
    Count,
    Decay,
    Finite,
    FinitePositive,
    Fraction,
    Minority,
    Natural,
    NonNegative,
    Positive,
    Share,
    Within,
)
from fedjax_sim.base.round import AtWork, FedState, Fragment, Metrics, SlotBytes, Slots, Traffic
from fedjax_sim.base.sending import Sending, SendTogether, Sent
from fedjax_sim.base.server import (
    Broadcast,
    Diagnostic,
    DownloadBytes,
    MechanismEpsilon,
    PreAggregation,
    Server,
    Weighting,
)
from fedjax_sim.base.shared import Shared
from fedjax_sim.base.steps import DrawnSteps, Until
from fedjax_sim.base.task import Metric, SampleWeight, Sums, Task, for_classes, with_loss
from fedjax_sim.base.train import Train, Trained, TrainInSteps, and_then

__all__ = [
    "Aggregator",
    "Array",
    "Availability",
    "Batch",
    "Broadcast",
    "ClientData",
    "ClientView",
    "Clock",
    "Cohort",
    "Companion",
    "Context",
    "Correction",
    "Count",
    "Coverage",
    "Decay",
    "Diagnostic",
    "Done",
    "DrawnSteps",
    "Elapsed",
    "Evaluated",
    "Exchange",
    "FedState",
    "Finish",
    "Finite",
    "FinitePositive",
    "Flight",
    "Fraction",
    "Gathered",
    "Law",
    "LearnedRedistribution",
    "Leaves",
    "Link",
    "LocalInfo",
    "LocalUpdate",
    "Memory",
    "Metrics",
    "Minority",
    "Model",
    "Natural",
    "Need",
    "NonNegative",
    "Now",
    "Objective",
    "Outlook",
    "Part",
    "Participation",
    "Personal",
    "Positive",
    "PreAggregation",
    "PyTree",
    "Redistribution",
    "Refresh",
    "Selection",
    "Sending",
    "Sent",
    "Server",
    "SetupTraffic",
    "Share",
    "Shared",
    "SlotBytes",
    "Slots",
    "Survey",
    "Train",
    "Trained",
    "Transform",
    "Until",
    "Variables",
    "Weighting",
    "Within",
    "Wrapper",
    "and_then",
    "for_classes",
    "part",
]
