"""Programs compiled for devices that are not there, and what they would need."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.stages import Compiled

from fedjax_sim.engine.memory import compiled
from fedjax_sim.run.programs import Programs

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class Program(NamedTuple):
    """What XLA says of a program; bytes and operations are those of one device.

    Attributes:
        name: "weights" (which draws them), "start", "advance" (rounds), "evaluate", "finish" or
          another of :class:`fedjax_sim.run.programs.Programs`.
        seconds: of tracing, lowering and compiling.
        arguments: bytes that are there before it starts: data, models, states.
        temporaries: bytes that it needs besides, at most.
        flops: of one pass through each loop; None if XLA does not say.
        accessed: bytes read and written, likewise.
        collectives: how many of each kind its text has.
    """

    name: str
    seconds: float
    arguments: int
    temporaries: int
    flops: float | None
    accessed: float | None
    collectives: Mapping[str, int]


def compile_ahead(programs: Programs) -> Iterator[Program]:
    """Compiles one program after another for their devices; nothing runs.

    Raises:
        TooLargeError: if a program does not fit in a device's memory.
    """
    began = time.perf_counter()
    for name, lowered in programs.lowered():
        program = compiled(lowered, programs.options(name))
        yield told(name, time.perf_counter() - began, program)
        began = time.perf_counter()


def told(name: str, seconds: float, program: Compiled) -> Program:
    """What XLA says of a program."""
    memory: Any = program.memory_analysis()
    cost: Any = program.cost_analysis() or {}
    text = program.as_text() or ""
    # An asynchronous collective is two instructions, of which one starts it.
    found = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    return Program(
        name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        cost.get("flops"),
        cost.get("bytes accessed"),
        dict(found),
    )
