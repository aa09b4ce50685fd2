"""Devices that are not there: XLA compiles for them on any machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

# What libtpu asks a TPU's host, told in advance: it waits for minutes for a host that is not there.
_HOSTLESS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once: none has a TPU
}
# What XLA asks a GPU: NVIDIA's numbers of an H100 with 80 GB, in XLA's GpuTargetConfigProto.
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
    "so many"
)


_QUICKLY = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
_LEFT_OUT = "xla_disable_hlo_passes"
_IN_PLACE = "xla_cpu_copy_insertion_use_region_analysis"
_SHARED = 2**19  # bytes; XLA's cost model gives a thread at least half of it


def devices_of(target: str) -> tuple[jax.Device, ...]:
    """The devices of a target, to compile for and not to run on.

    Args:
        target: a kind of TPU and the shape of a slice of it, ``v5e:2x2``; ``v5e:1x1`` is one chip,
            as in Colab. Or ``h100``, a GPU, or ``h100:4``, four of them in one machine.

    Returns:
        The devices, for :func:`fedjax_sim.make_execution`.

    Raises:
        ValueError: if there is no such target.
        ImportError: without what compiles for it: libtpu, of the extra ``aot``, or JAX's plugin for
            CUDA, of ``cuda12`` or ``cuda13``. Without a GPU that plugin does not start unless
            ``JAX_PLATFORMS`` is ``cpu``, which the command sets.
    """
    if gpus := re.fullmatch(r"h100(?::([1-9]\d*))?", target):
        return _gpus(target, int(gpus[1] or 1))
    if re.fullmatch(r"v\d\w*:\d+(x\d+)+", target):
        return _tpus(target)
    raise ValueError(f"compile_for must be like {FORMS}, got {target!r}")


def options_for(
    devices: Sequence[jax.Device], *, once: bool = False, largest: int | None = None
) -> dict[str, Any] | None:
    """XLA's options for what is compiled for these devices; None for those of the process.

    What runs ``once`` on CPU is optimised at LLVM's level 1 and without XLA's fusion emitters,
    which prepare a compiler of their own for each fusion; unless ``XLA_FLAGS`` says otherwise. What
    draws the weights of an MLP then takes 0.9 CPU seconds to compile, not 3.7, and gives the same
    bits. Rounds are not: without emitters they compile in half the time, but nothing that changes
    an array in place is vectorised, which took a fifth of W1's speed; at level 1 SCAFFOLD's on an
    MLP and two devices took 8.5 ms in place of 4.3.

    XLA on CPU shares an operation between threads by the bytes of its operands. A gather of a few
    samples counts with all samples of all clients, and waits for another thread in each step: of a
    million clients a round of logistic regression took twice as long. So nothing is shared if no
    array that the program makes, ``largest`` bytes, is as large as XLA gives to two threads. Larger
    models keep it: two CNNs lost 7 and 14 % of their speed without on two devices.

    A step changes its weights in place if XLA orders the update behind their other uses. Left to
    itself it copies a dense layer's in each step, lest the gradient of what lies before it still
    needs them: the CNN of W2 trains 8 to 17 % faster without.

    XLA times its kernels for products of matrices on the GPU. Without one it guesses, and finds
    none for some products: cuBLAS then takes all of them.
    """
    device = devices[0]
    if device.platform == "cpu":
        given, options = os.environ.get("XLA_FLAGS", ""), dict[str, Any]()
        if once:
            options |= {name: value for name, value in _QUICKLY.items() if name not in given}
        if largest is not None and largest < _SHARED and _LEFT_OUT not in given:
            options[_LEFT_OUT] = "cpu-parallel-task-assigner"
        if not once and _IN_PLACE not in given:
            options[_IN_PLACE] = True
        return options or None
    if device.platform == "gpu" and device not in jax.devices():
        return {"xla_gpu_enable_triton_gemm": False}
    return None


def _gpus(target: str, count: int) -> tuple[jax.Device, ...]:
    shape = {"target_config": _H100, "topology": f"1x1x{count}"}  # of partitions, hosts, devices
    try:
        description = topologies.get_topology_desc(target, "cuda", **shape)
    except NotImplementedError as error:
        raise ImportError(
            f"compile_for {target} needs JAX's plugin for CUDA (pip install 'fedjax-sim[cuda12]'), "
            "and JAX_PLATFORMS=cpu if there is no GPU"
        ) from error
    return tuple(description.devices)


def _tpus(target: str) -> tuple[jax.Device, ...]:
    try:
        import libtpu  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"compile_for {target} needs libtpu: pip install 'fedjax-sim[aot]'"
        ) from error
    for name, value in _HOSTLESS.items():
        os.environ.setdefault(name, value)
    # A host has four chips otherwise, of which a slice of one is no multiple.
    one = set(target.partition(":")[2].split("x")) == {"1"}
    bounds: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if one else {}
    try:
        description = topologies.get_topology_desc(target, "tpu", **bounds)
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"compile_for must be like {FORMS}, got {target!r} ({told})") from error
    return tuple(description.devices)
