"""Tasks: the kind of targets, their loss and the scores of a model's outputs."""

from fedjax_sim.base import Metric, Sums, Task
from fedjax_sim.tasks._classification import classification
from fedjax_sim.tasks._multi_label import multi_label
from fedjax_sim.tasks._next_token import next_token
from fedjax_sim.tasks._regression import regression
from fedjax_sim.tasks.choice import scoring, task_of
from fedjax_sim.tasks.sums import add_up, plain_sums, ratio

__all__ = [
    "Metric",
    "Sums",
    "Task",
    "add_up",
    "classification",
    "multi_label",
    "next_token",
    "plain_sums",
    "ratio",
    "regression",
    "scoring",
]
