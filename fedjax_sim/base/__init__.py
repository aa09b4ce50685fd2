"""The contracts: arguments, shapes and results of every part."""

from __future__ import annotations

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.arrays import concrete as concrete
from fedjax_sim.base.client import Aggregator, Correction, Done, Personal, SetupTraffic
from fedjax_sim.base.client import Follow as Follow
from fedjax_sim.base.client import SetupTrafficOf as SetupTrafficOf
from fedjax_sim.base.clock import Availability, Clock, Elapsed, Law, Link, Now
from fedjax_sim.base.clock import evaluate_law as evaluate_law
from fedjax_sim.base.cohort import Cohort, Gathered, LocalInfo
from fedjax_sim.base.data import Batch, ClientData, ClientView, Transform
from fedjax_sim.base.data import FetchedError as FetchedError
from fedjax_sim.base.data import MissingRootError as MissingRootError
from fedjax_sim.base.exchange import Exchange
from fedjax_sim.base.finish import Finish
from fedjax_sim.base.local_update import LocalUpdate, Survey, Wrapper
from fedjax_sim.base.model import Accompanied as Accompanied
from fedjax_sim.base.model import Companion, Context, Leaves, Memory, Model, Objective, Variables
from fedjax_sim.base.model import LossFn as LossFn
from fedjax_sim.base.model import ModelApply as ModelApply
from fedjax_sim.base.model import ModelFeatures as ModelFeatures
from fedjax_sim.base.model import ModelInit as ModelInit
from fedjax_sim.base.need import Need
from fedjax_sim.base.parts import Origin as Origin
from fedjax_sim.base.parts import Part, part
from fedjax_sim.base.parts import origin_of as origin_of
from fedjax_sim.base.parts import origins as origins
from fedjax_sim.base.parts import plain_sgd as plain_sgd
from fedjax_sim.base.parts import shown as shown
from fedjax_sim.base.parts import with_origin as with_origin
from fedjax_sim.base.parts import written_arguments as written_arguments
from fedjax_sim.base.plan import AnyRedistribution as AnyRedistribution
from fedjax_sim.base.plan import (
    Evaluated,
    Flight,
    LearnedRedistribution,
    Outlook,
    Participation,
    Redistribution,
    Refresh,
    Selection,
)
from fedjax_sim.base.plan import Moves as Moves
from fedjax_sim.base.plan import PerClient as PerClient
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
from fedjax_sim.base.round import AtWork as AtWork
from fedjax_sim.base.round import FedState, Metrics, Slots
from fedjax_sim.base.round import Fragment as Fragment
from fedjax_sim.base.round import Traffic as Traffic
from fedjax_sim.base.sending import Sending, Sent
from fedjax_sim.base.sending import SendTogether as SendTogether
from fedjax_sim.base.server import Broadcast, Diagnostic, PreAggregation, Server, Weighting
from fedjax_sim.base.server import DownloadBytes as DownloadBytes
from fedjax_sim.base.server import MechanismEpsilon as MechanismEpsilon
from fedjax_sim.base.shared import Shared
from fedjax_sim.base.steps import DrawnSteps, Until
from fedjax_sim.base.task import Metric as Metric
from fedjax_sim.base.task import SampleWeight as SampleWeight
from fedjax_sim.base.task import Sums as Sums
from fedjax_sim.base.task import Task as Task
from fedjax_sim.base.task import for_classes
from fedjax_sim.base.task import with_loss as with_loss
from fedjax_sim.base.train import Train, Trained, and_then
from fedjax_sim.base.train import TrainInSteps as TrainInSteps

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
