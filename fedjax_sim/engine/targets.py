"""Target devices that may be absent: XLA compiles for them on any machine."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from fedjax_sim.base import Array

# Answers to libtpu's queries to a TPU's host, for which it would wait for minutes without one.
_HOSTLESS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}
# NVIDIA's figures of an H100 with 80 GB, in XLA's GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FORMS = (
    "v5e:2x2, v6e:1x1 or another kind of TPU with the shape of its slice, or h100, or h100:4 for "
    "four"
)


_QUICKLY = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
_IN_PLACE = {"xla_cpu_copy_insertion_use_region_analysis": True}
_DISABLED = "xla_disable_hlo_passes"
_SHARING = "cpu-parallel-task-assigner"
_BARRIERS = "cse_barrier_expander"
_SHARED = 2**19  # bytes; XLA's cost model gives a thread at least half of it


def devices_of(target: str) -> tuple[jax.Device, ...]:
    """Returns the devices of a target, to compile for but not to run on.

    Args:
        target: a kind of TPU and the shape of its slice, ``v5e:2x2``; ``v5e:1x1`` is one chip, as
            in Colab. Or ``h100``, a GPU, or ``h100:4``, four GPUs in one machine.

    Returns:
        The devices, for :func:`fedjax_sim.make_execution`.

    Raises:
        ValueError: if the target is unknown.
        ImportError: if the compiler is missing: libtpu, in the extra ``aot``, or JAX's plugin for
            CUDA, in ``cuda12`` or ``cuda13``. Without a GPU, that plugin does not start unless
            ``JAX_PLATFORMS`` is ``cpu``.
    """
    if gpus := re.fullmatch(r"h100(?::([1-9]\d*))?", target):
        return _gpus(target, int(gpus[1] or 1))
    if re.fullmatch(r"v\d\w*:\d+(x\d+)+", target):
        return _tpus(target)
    raise ValueError(f"target must be like {FORMS}, got {target!r}")


def options_for(
    devices: Sequence[jax.Device], *, quick: bool = False, largest: int | None = None
) -> dict[str, Any] | None:
    """Returns XLA's options for programs on these devices; None for the defaults of the process.

    Options that this version of XLA does not have, or that ``XLA_FLAGS`` sets, are left out. On
    CPU:

    - *Compile effort.* ``quick`` programs are optimised at LLVM's level 1 and without XLA's fusion
      emitters, which set up a compiler of their own for each fusion. Rounds compile in about two
      thirds of the time and run slower: without emitters, W1 trains a fifth fewer samples/s.
    - *Threads.* XLA splits large operations between threads. With several CPU devices in a process,
      some operations then start before their input is complete, and gradients are sometimes wrong
      (``benchmarks/xla_sharing.py``), so nothing is split. With one device nothing is split
      if no array that the program makes (``largest`` bytes) is large enough for two threads:
      otherwise a gather of a few samples out of all counts as large, and waits for another thread
      in each step.
    - *Weights in place.* XLA schedules a step's update after the other uses of the weights, so that
      it need not copy them: the CNN of W2 trains 8 to 17 % faster.
    - *Barriers.* XLA drops them before it fuses operations, unless the pass that does so is left
      out: then :func:`fedjax_sim.models.layers.product` has a faster gradient. Not in ``quick``
      programs, which do not use it.

    For a GPU that does not exist, XLA cannot time its kernels for matrix products, and finds none
    for some of them, so cuBLAS computes all.

    Args:
        devices: the devices that the program runs on.
        quick: whether the program runs so briefly that compiling it takes longer.
        largest: bytes of the largest array that the program makes; None if unknown.
    """
    device = devices[0]
    if device.platform == "gpu" and device not in jax.devices():
        return {"xla_gpu_enable_triton_gemm": False}
    if device.platform != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = _QUICKLY if quick else _IN_PLACE
    options: dict[str, Any] = {
        k: v for k, v in wanted.items() if k not in flags and _supported(device, k, v)
    }
    several = len(jax.local_devices(backend="cpu")) > 1
    alone = several or (largest is not None and largest < _SHARED)
    if without := [_SHARING] * alone + [_BARRIERS] * (not quick):
        given = re.findall(rf"{_DISABLED}=(\S+)", flags)
        options[_DISABLED] = ",".join([*given[:1], *without])
    return options or None


@functools.cache
def _supported(device: jax.Device, name: str, value: Any) -> bool:
    """Returns whether this version of XLA has an option, by compiling with it."""
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(xla_option_probe).lower(one).compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def xla_option_probe(x: Array) -> Array:
    """Returns ``x + 1``: a program on which to try XLA's options, which is not counted."""
    return x + 1


def _gpus(target: str, count: int) -> tuple[jax.Device, ...]:
    shape = {"target_config": _H100, "topology": f"1x1x{count}"}  # of partitions, hosts, devices
    try:
        description = topologies.get_topology_desc(target, "cuda", **shape)
    except NotImplementedError as error:
        raise ImportError(
            f"{target} needs JAX's plugin for CUDA (pip install 'jax[cuda12]'), "
            "and JAX_PLATFORMS=cpu if there is no GPU"
        ) from error
    return tuple(description.devices)


def _tpus(target: str) -> tuple[jax.Device, ...]:
    try:
        import libtpu  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{target} needs libtpu: pip install 'jax[tpu]'") from error
    for name, value in _HOSTLESS.items():
        os.environ.setdefault(name, value)
    # A host has four chips by default, and a slice must be a multiple of it.
    one = set(target.partition(":")[2].split("x")) == {"1"}
    bounds: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if one else {}
    try:
        description = topologies.get_topology_desc(target, "tpu", **bounds)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"target must be like {FORMS}, got {target!r} ({reason})") from error
    return tuple(description.devices)


_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


class ProgramReport(NamedTuple):
    """XLA's figures for a compiled program; bytes and operations are per device.

    Attributes:
        name: "weights" (which draws them), "start", "advance" (rounds), "evaluate", "finish" or
            another program of :class:`fedjax_sim.run.programs.Programs`.
        seconds: seconds of tracing, lowering and compiling.
        arguments: bytes of its arguments: data, models, states.
        temporaries: the peak of additional bytes.
        flops: operations of one pass through each loop; None if unknown.
        accessed: bytes read and written in one pass through each loop; None if unknown.
        collectives: number of collectives of each kind.
    """

    name: str
    seconds: float
    arguments: int
    temporaries: int
    flops: float | None
    accessed: float | None
    collectives: Mapping[str, int]


def program_report(name: str, seconds: float, program: Compiled) -> ProgramReport:
    """Returns XLA's figures for a program."""
    memory: Any = program.memory_analysis()
    cost: Any = program.cost_analysis() or {}
    text = program.as_text() or ""
    # An asynchronous collective is two instructions; count the one that starts it.
    collectives = Counter(re.findall(rf" ({_COLLECTIVES})(?:-start)?\(", text))
    return ProgramReport(
        name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        cost.get("flops"),
        cost.get("bytes accessed"),
        dict(collectives),
    )
