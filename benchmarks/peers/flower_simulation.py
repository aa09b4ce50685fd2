"""Flower: its FedAvg in its simulation, PyTorch clients in Ray actors of one thread each."""

import logging
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ |= {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),  # of the actors
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks.baselines.torch_loop import NETS, load
from benchmarks.workloads import SEED, WORKLOADS, Timing, Workload


@lru_cache(maxsize=1)
def _ready(name: str) -> tuple[Any, ...]:
    """What an actor keeps: the network and the samples."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    return (workload, NETS[workload.net](), *load(workload), workload.federation().start)


def _client(name: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        workload, net, x, y, start = _ready(name)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), workload.lr, workload.momentum)
        first, end = start[int(context.node_config["partition-id"]) :][:2]
        order = first + torch.randperm(end - first)
        for rows in order.split(workload.batch):
            optimizer.zero_grad()
            cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        counts = MetricRecord({"num-examples": int(end - first)})
        trained = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": counts})
        return Message(content=trained, reply_to=message)

    return app


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds after one that starts the actors, as many as there are devices."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: list[Timing] = []
    server, begin = ServerApp(), time.perf_counter()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        torch.manual_seed(SEED)
        arrays, visited = ArrayRecord(NETS[workload.net]().state_dict()), 0

        def count(replies: list[RecordDict], weight: str) -> MetricRecord:
            nonlocal visited
            visited += sum(int(reply["metrics"][weight]) for reply in replies)
            return MetricRecord({})

        strategy = FedAvg(
            fraction_train=workload.cohort / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.cohort,
            min_available_nodes=workload.clients,
            train_metrics_aggr_fn=count,
        )
        strategy.start(grid, arrays, num_rounds=1)
        starting, visited = time.perf_counter() - begin, 0
        strategy.start(grid, arrays, num_rounds=rounds)
        seconds = time.perf_counter() - begin - starting
        found.append(Timing(seconds, visited, starting, f"{devices} actors"))

    run_simulation(
        server,
        _client(workload.name),
        workload.clients,
        backend_config={
            "init_args": {"num_cpus": devices},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return found[0]
