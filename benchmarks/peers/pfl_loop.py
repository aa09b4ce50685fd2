"""pfl-research: its FedAvg on its simulated backend, with the PyTorch networks, in one process."""

import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

from benchmarks.baselines.torch_loop import NETS, load
from benchmarks.workloads import Timing, Workload


class _Net(torch.nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.layers = NETS[workload.net]()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.layers(x), y)

    @staticmethod
    def metrics(x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """None: a forward pass over each client before and after its visit is not our work."""
        del x, y
        return {}


@lru_cache(maxsize=1)
def _clients(workload: Workload) -> list[Dataset]:
    x, y = load(workload)
    start = workload.federation().start
    return [Dataset([x[a:b], y[a:b]], user_id=str(k)) for k, (a, b) in enumerate(pairwise(start))]


def _endless(cohorts: Any) -> Iterator[int]:
    while True:
        yield from map(int, cohorts.ravel())


@lru_cache(maxsize=1)
def _threads(workload: Workload, most: int) -> tuple[int, float]:
    """1 or `most`, whichever is faster, and the seconds that the trial took."""
    begin = time.perf_counter()
    took = {}
    for threads in dict.fromkeys((1, most)):
        torch.set_num_threads(threads)
        _train(workload, 1)  # the first round starts the threads
        took[threads] = _train(workload, 1)
    return min(took, key=lambda threads: took[threads]), time.perf_counter() - begin


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds in one process, at its best number of threads."""
    threads, trial = _threads(workload, devices)
    torch.set_num_threads(threads)
    seconds = _train(workload, rounds)
    samples = int(workload.federation().sizes[workload.cohorts(rounds)].sum())
    return Timing(seconds, samples, trial, f"{threads} thread{'s' * (threads > 1)}")


def _train(workload: Workload, rounds: int) -> float:
    """The seconds of so many rounds."""
    clients, cohorts = _clients(workload), workload.cohorts(rounds)
    order = _endless(cohorts)
    data = FederatedDataset(clients.__getitem__, lambda: next(order))
    net = _Net(workload)
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, workload.momentum),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    settings = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=workload.cohort,
        val_cohort_size=0,
    )
    visit = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch
    )
    backend = SimulatedBackend(data, data, [WeightByDatapoints()])
    begin = time.perf_counter()
    FederatedAveraging().run(settings, backend, model, visit, send_metrics_to_platform=False)
    return time.perf_counter() - begin
