"""Counts the kernels and the bytes of a local step in a program that XLA compiled for a GPU.

XLA reports neither for an absent GPU. Both are read from the text of the program: each
instruction of the step's loop body that is not free is one kernel, the body of an inner loop counts
as often as it runs, and a kernel reads its operands and writes its result once. A slice or a gather
reads what it returns.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
FREE = {
    *("after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier"),
    *("parameter", "partition-id", "replica-id", "tuple"),
    *("all-reduce-done", "all-gather-done", "async-done", "copy-done"),
}
READS_PART = {"dynamic-slice", "gather", "slice"}
GRADIENT = "transpose("  # of JAX's names of what reverse mode computes

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """A line of a program.

    Attributes:
        name: its name.
        size: bytes of its result, without a library's scratch memory.
        opcode: what it does.
        operands: names of its inputs.
        rest: the whole line.
    """

    name: str
    size: int
    opcode: str
    operands: list[str]
    rest: str


class Step(NamedTuple):
    """What one local step of all clients that train at once launches and moves.

    Attributes:
        kernels: launches.
        library: how many of them are calls of cuBLAS and cuDNN.
        mb: MB read and written.
        known: whether the loop over steps has an end that XLA knows.
    """

    kernels: int
    library: int
    mb: float
    known: bool


class Program:
    """A compiled program by its computations."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[1]] = []
            elif found := _LINE.match(line):
                name, shape, opcode, rest = found.groups()
                shape = re.sub(r", [su]8\[\d+\]", "", shape) if opcode == "custom-call" else shape
                operands = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
                current.append(Instruction(name, _size(shape), opcode, operands, line))

    def step(self) -> Step:
        """Counts the innermost loop that computes all gradients.

        Raises:
            ValueError: if the program has no loop over steps.
        """
        loops = [i for body in self.computations.values() for i in body if i.opcode == "while"]
        inside = [list(self._inside(_called(loop)[0])) for loop in loops]
        gradients = [sum(GRADIENT in i.rest for i in body) for body in inside]
        if not any(gradients):
            raise ValueError("the program must have a loop over local steps, got none")
        # A few lines of the gradient, such as zeros, stand before the loop; loops inside it, over
        # the time of a sequence, say, have only a part.
        most = [k for k, count in enumerate(gradients) if count > 0.9 * max(gradients)]
        loop = loops[min(most, key=lambda k: len(inside[k]))]
        kernels, library, size = self._cost(_called(loop)[0])
        return Step(kernels, library, size / 1e6, bool(_TRIPS.search(loop.rest)))

    def _inside(self, name: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation and of the ones that it runs."""
        for i in self.computations[name]:
            yield i
            for called in _called(i) if _runs(i) else ():
                yield from self._inside(called)

    def _cost(self, name: str) -> tuple[int, int, int]:
        """Returns kernels, library calls and bytes of one pass through a computation."""
        total, sizes = [0, 0, 0], {i.name: i.size for i in self.computations[name]}
        for i in self.computations[name]:
            if i.opcode in FREE:
                continue
            if _runs(i):
                costs = [self._cost(called) for called in _called(i)]
                trips = _TRIPS.search(i.rest)
                times = int(trips[1]) if trips else 1
                one = [times * c for c in max(costs)]
            else:
                one = [1, '"__cu' in i.rest, self._moved(i, sizes)]
            total = [a + b for a, b in zip(total, one, strict=True)]
        return total[0], total[1], total[2]

    def _moved(self, i: Instruction, sizes: dict[str, int]) -> int:
        """Returns the bytes that a kernel reads and writes."""
        if i.opcode in READS_PART:
            return 2 * i.size
        if i.opcode == "dynamic-update-slice":
            return 2 * sizes[i.operands[1]]
        if i.opcode != "fusion":
            return i.size + sum(sizes[name] for name in i.operands)
        inside = self.computations[_called(i)[0]]
        inner = {k.name: k for k in inside}
        moved = i.size
        updated = [k for k in inside if k.opcode == "dynamic-update-slice"]
        for k in updated:  # in place
            moved -= k.size - inner[k.operands[1]].size
        parameters = {
            int(k.rest.partition(" parameter(")[2].partition(")")[0]): k
            for k in inside
            if k.opcode == "parameter"
        }
        for number, name in enumerate(i.operands):
            parameter = parameters[number].name
            uses = list(_uses(parameter, inside))
            parts = [
                0 if k.opcode == "dynamic-update-slice" and k.operands[0] == at else k.size
                for at, k in uses
                if k.opcode in READS_PART | {"dynamic-update-slice"}
            ]
            moved += min(sum(parts), sizes[name]) if len(parts) == len(uses) else sizes[name]
        return max(moved, 0)


def _uses(name: str, inside: list[Instruction]) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions that use a value, also through bitcasts, and its name there."""
    for k in inside:
        if name in k.operands:
            if k.opcode == "bitcast":
                yield from _uses(k.name, inside)
            else:
                yield name, k


def _runs(i: Instruction) -> bool:
    """Returns whether an instruction's computations launch kernels of their own."""
    return i.opcode in ("while", "conditional", "call", "async-start")


def _called(i: Instruction) -> list[str]:
    """Returns the computations that an instruction calls; of a loop, its body."""
    found = _CALLED.findall(i.rest)
    return [name for group in found for name in re.findall(r"[\w.\-]+", group)]


def _size(shape: str) -> int:
    """Returns the bytes of a shape, or of a tuple of shapes."""
    total = 0
    for kind, dims in _SHAPE.findall(shape):
        count = 1
        for d in filter(None, dims.split(",")):
            count *= int(d)
        total += count * BYTES.get(kind, 0)
    return total
