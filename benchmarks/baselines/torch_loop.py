"""PyTorch, one client after another: in one process, or dealt to several.

In PyTorch's favour: samples become float32 once, before the clock starts, and lie sorted by
client; images are channels-last in memory (+15 to 35 % in the BatchNorm CNN on CPU); the model is
one flat vector, so that loading, summing and sending a model is one copy; the optimiser is made
once. Its `fused` and `foreach` forms were tried: on CPU neither is faster than the default.
"""

import heapq
import itertools
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.workloads import (
    BOTTLENECKS,
    CLASSES,
    SEED,
    SIDE,
    STEM,
    TOP,
    VOCABULARY,
    Net,
    Timing,
    Workload,
)

TRIAL_SECONDS = 0.5
ALIGN = 16  # floats in a cache line: oneDNN is slower on weights that start elsewhere


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_mlp(14 * 14 * 64, 128, CLASSES),
    )


def _bn_cnn() -> nn.Sequential:
    net = nn.Sequential()
    widths = (3, 32, 32, 64, 64, 128, 128)
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        net.extend((nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()))
        if layer % 2:
            net.append(nn.MaxPool2d(2))
    return net.extend((nn.Flatten(), *_mlp(4 * 4 * 128, 128, CLASSES)))


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(x))[0][:, -1])
        return logits


class _Bottleneck(nn.Module):
    """An inverted residual block; without BatchNorms, its convolutions have a bias instead."""

    def __init__(self, given: int, expansion: int, channels: int, stride: int, norm: bool) -> None:
        super().__init__()
        inner = expansion * given
        self.residual = stride == 1 and given == channels

        def layer(n_in: int, n_out: int, size: int = 1, **options: int) -> list[nn.Module]:
            conv = nn.Conv2d(n_in, n_out, size, padding=size // 2, bias=not norm, **options)
            return [conv, nn.BatchNorm2d(n_out)] if norm else [conv]

        self.layers = nn.Sequential(
            *([*layer(given, inner), nn.ReLU6()] if expansion > 1 else []),
            *layer(inner, inner, 3, stride=stride, groups=inner),
            nn.ReLU6(),
            *layer(inner, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


class _Frozen(nn.Module):
    """The layers of MobileNetV2 that are frozen, hidden from `parameters()`."""

    def __init__(self) -> None:
        super().__init__()
        trunk = nn.Sequential(nn.Conv2d(3, STEM, 3, stride=2, padding=1), nn.ReLU6())
        given = STEM
        for expansion, channels, stride in BOTTLENECKS[:-1]:
            trunk.append(_Bottleneck(given, expansion, channels, stride, norm=False))
            given = channels
        self.hidden = [trunk]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = interpolate(2 * x - 1, (SIDE, SIDE), mode="bilinear")
        return self.hidden[0].to(x.device)(x)


def _mobile_tail() -> nn.Sequential:
    (*_, (_, given, _), (expansion, channels, stride)) = BOTTLENECKS
    return nn.Sequential(
        _Bottleneck(given, expansion, channels, stride, norm=True),
        nn.Conv2d(channels, TOP, 1, bias=False),
        nn.BatchNorm2d(TOP),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(TOP, CLASSES),
    )


NETS: dict[Net, Callable[[], nn.Module]] = {
    "mlp": lambda: _mlp(784, 200, 200, CLASSES),
    "logreg": lambda: _mlp(784, CLASSES),
    "cnn": _cnn,
    "bn_cnn": _bn_cnn,
    "lstm": _LSTM,
    "mobilenet": lambda: nn.Sequential(_Frozen(), _mobile_tail()),
    "mobilenet_tail": _mobile_tail,
}


def load(workload: Workload) -> tuple[Tensor, Tensor]:
    """Inputs as float32 in [0, 1], or tokens, and labels, both sorted by client."""
    data = workload.federation()
    stored = torch.from_numpy(data.x[data.index])
    x = stored.long() if workload.net == "lstm" else stored.float().div_(255)
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2)  # a view: channels-last in memory
    return x, torch.from_numpy(data.y[data.index]).long()


def flatten(net: nn.Module) -> Tensor:
    """Move parameters and running statistics into one vector, which is returned."""
    held = [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]
    ends = list(itertools.accumulate(-(-t.numel() // ALIGN) * ALIGN for t in held))
    flat = torch.zeros(ends[-1], device=held[0].device)
    for tensor, begin in zip(held, [0, *ends], strict=False):
        view = flat[begin : begin + tensor.numel()].view_as(tensor)
        view.copy_(tensor.detach())
        tensor.data = view
    return flat


class Trainer:
    """A model, its optimiser and the samples of all clients."""

    def __init__(self, workload: Workload, x: Tensor, y: Tensor) -> None:
        """Build the model with the seed of the benchmark, on the device of the samples."""
        torch.manual_seed(SEED)
        self.net = NETS[workload.net]().to(x.device)
        self.flat = flatten(self.net)
        self.initial = self.flat.clone()
        self.batch = workload.batch
        self.start: list[int] = workload.federation().start.tolist()
        self.x, self.y = x, y
        parameters = self.net.parameters()
        self.sgd = torch.optim.SGD(parameters, lr=workload.lr, momentum=workload.momentum)

    def train(self, client: int) -> int:
        """One epoch of SGD from the model in `flat`; the number of samples."""
        begin, end = self.start[client], self.start[client + 1]
        self.sgd.state.clear()
        order = torch.randperm(end - begin, device=self.x.device) + begin
        x, y = self.x[order], self.y[order]
        for first in range(0, end - begin, self.batch):
            xs, ys = x[first : first + self.batch], y[first : first + self.batch]
            self.sgd.zero_grad()
            cross_entropy(self.net(xs), ys).backward()
            self.sgd.step()
        return end - begin

    def weighted_sum(self, model: Tensor, clients: Iterable[int], out: Tensor) -> int:
        """Sum of the clients' models times their sample counts, into `out`; returns the samples."""
        out.zero_()
        samples = 0
        for client in clients:
            self.flat.copy_(model)
            n = self.train(client)
            out.add_(self.flat, alpha=n)
            samples += n
        return samples


def _check(workload: Workload, model: Tensor) -> None:
    if not bool(model.isfinite().all()):
        raise FloatingPointError(f"{workload.name}: the trained model is not finite")


def _rate(trainer: Trainer, clients: Iterable[int], seconds: float) -> float:
    samples, began = 0, time.perf_counter()
    for client in itertools.cycle(clients):
        trainer.flat.copy_(trainer.initial)
        samples += trainer.train(client)
        spent = time.perf_counter() - began
        if spent > seconds:
            return samples / spent
    raise ValueError("an empty cohort")


def _best_threads(trainer: Trainer, clients: list[int]) -> int:
    rates = {}
    for threads in (n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)):
        torch.set_num_threads(threads)
        _rate(trainer, clients, TRIAL_SECONDS / 4)  # the first steps start the threads
        rates[threads] = _rate(trainer, clients, TRIAL_SECONDS)
    return max(rates, key=lambda threads: rates[threads])


@lru_cache(maxsize=1)
def _sequential(workload: Workload) -> tuple[Trainer, str]:
    x, y = load(workload)
    if torch.cuda.is_available():
        trainer = Trainer(workload, x.cuda(), y.cuda())
        _rate(trainer, workload.cohorts(1)[0].tolist(), TRIAL_SECONDS)
        return trainer, torch.cuda.get_device_name()
    trainer = Trainer(workload, x, y)
    threads = _best_threads(trainer, workload.cohorts(1)[0].tolist())
    torch.set_num_threads(threads)
    return trainer, f"{threads} thread{'s' * (threads > 1)}"


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Time `rounds` rounds in one process, at its best number of threads; `devices` is not used."""
    del devices
    trainer, note = _sequential(workload)
    cohorts: list[list[int]] = workload.cohorts(rounds).tolist()
    model, total, samples = trainer.initial.clone(), torch.empty_like(trainer.initial), 0
    began = time.perf_counter()
    for cohort in cohorts:
        n = trainer.weighted_sum(model, cohort, total)
        torch.div(total, n, out=model)
        samples += n
    if model.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    _check(workload, model)
    return Timing(seconds, samples, 0.0, note)


def deal(clients: list[int], sizes: list[int], hands: int) -> list[list[int]]:
    """Deal clients, longest first, each to the hand with the fewest samples so far."""
    heap: list[tuple[int, int]] = [(0, hand) for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for client in sorted(clients, key=lambda c: -sizes[c]):
        load_, hand = heap[0]
        dealt[hand].append(client)
        heapq.heapreplace(heap, (load_ + sizes[client], hand))
    return dealt


def _serve(
    pipe: Connection, workload: Workload, x: Tensor, y: Tensor, model: Tensor, total: Tensor
) -> None:
    """Worker: for every list of clients from the pipe, write their weighted sum into `total`."""
    torch.set_num_threads(1)
    trainer = Trainer(workload, x, y)
    model.copy_(trainer.initial)  # the same numbers from every worker
    _rate(trainer, [0], TRIAL_SECONDS / 4)
    pipe.send(0)
    while True:
        pipe.send(trainer.weighted_sum(model, pipe.recv(), total))


class Pool:
    """Persistent workers that share the samples, the model and one partial sum each."""

    def __init__(self, workload: Workload, workers: int) -> None:
        """Start the workers and wait until all of them are warm."""
        context = mp.get_context("spawn")
        x, y = load(workload)
        width = flatten(NETS[workload.net]()).numel()
        self.model, self.partial = torch.zeros(width), torch.zeros(workers, width)
        for tensor in (x, y, self.model, self.partial):
            tensor.share_memory_()
        self.sizes: list[int] = workload.federation().sizes.tolist()
        self.pipes: list[Connection] = []
        for total in self.partial:
            ours, theirs = context.Pipe()
            arguments = (theirs, workload, x, y, self.model, total)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            theirs.close()  # so that a dead worker is an EOFError here and not a hang
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()
        self.initial = self.model.clone()

    def round(self, cohort: list[int]) -> int:
        """Train a cohort and average it into `model`; the number of samples."""
        for pipe, clients in zip(
            self.pipes, deal(cohort, self.sizes, len(self.pipes)), strict=True
        ):
            pipe.send(clients)
        samples: int = sum(pipe.recv() for pipe in self.pipes)
        torch.sum(self.partial, 0, out=self.model)
        self.model /= samples
        return samples


_pool = lru_cache(maxsize=1)(Pool)


def run_processes(workload: Workload, rounds: int, devices: int) -> Timing:
    """Time `rounds` rounds dealt to `devices` processes of one thread each, on CPU."""
    before, began = _pool.cache_info().misses, time.perf_counter()
    pool = _pool(workload, devices)
    fresh = _pool.cache_info().misses > before
    start_seconds = time.perf_counter() - began if fresh else 0.0
    cohorts: list[list[int]] = workload.cohorts(rounds).tolist()
    pool.model.copy_(pool.initial)
    began = time.perf_counter()
    samples = sum(pool.round(cohort) for cohort in cohorts)
    seconds = time.perf_counter() - began
    _check(workload, pool.model)
    return Timing(seconds, samples, start_seconds, f"{devices} processes")
