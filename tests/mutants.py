"""Random mutants: ``python tests/mutants.py --seed 0 --count 150`` prints which ones tests kill.

A mutant changes one operator, condition or number of the package, or leaves out one argument that
is given by its name. It runs the tests that execute the changed line, then their files, until a
test fails. Which tests execute which line is recorded once, one test file after another, in the
folder ``RECORDS``: delete it after larger changes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

ROOT, RECORDS = Path(__file__).resolve().parents[1], Path.home() / ".cache" / "fedjax_sim_mutants"
OPERATORS = {
    ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"), ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
CONFTEST = "tests/conftest.py"  # doctests alone would not load it
EXTREMA = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


class Mutant(NamedTuple):
    """A change of a file: ``old``, from byte ``begin`` to ``end``, becomes ``new``."""

    file: Path
    line: int
    begin: int
    end: int
    old: str
    new: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yields the mutants of a file; annotations, messages and ``__repr__`` have none."""
    source = file.read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: ast.expr | ast.keyword) -> tuple[int, int]:
        begin, end = starts[node.lineno - 1], starts[(node.end_lineno or 0) - 1]
        return begin + node.col_offset, end + (node.end_col_offset or 0)

    def change(line: int, begin: int, end: int, *new: str) -> Iterator[Mutant]:
        old = source[begin:end].decode()
        yield from (Mutant(file.relative_to(ROOT), line, begin, end, old, text) for text in new)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        pairs: list[tuple[ast.expr, ast.expr, ast.AST]] = []
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
                return
            case ast.If(test=test) if re.search("TYPE_CHECKING|__name__", ast.unparse(test)):
                return
            case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test, *_]):
                begin, end = span(test)
                yield from change(test.lineno, begin, end, f"not ({source[begin:end].decode()})")
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = list(zip([left, *others], others, ops, strict=False))
            case ast.BinOp(left=left, op=op, right=right):
                pairs = [(left, right, op)]
            case ast.BoolOp(op=op, values=values):
                pairs = [(*pair, op) for pair in itertools.pairwise(values)]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in EXTREMA:
                end = span(node.func)[1]
                yield from change(node.lineno, end - len(name), end, EXTREMA[name])
            case ast.Constant(value=int(value)) if type(value) is int and abs(value) <= 100:
                yield from change(node.lineno, *span(node), str(value + 1))
            case ast.Constant(value=float(value)):
                yield from change(node.lineno, *span(node), str(2 * value or 1.0))
            case ast.keyword(arg=str()):
                yield from change(node.lineno, *span(node), "**{}")  # as if it were not given
        for left, right, operator in pairs:
            old, *new = OPERATORS.get(type(operator), [""])
            begin = source.index(old.encode(), span(left)[1], span(right)[0])
            yield from change(right.lineno, begin, begin + len(old), *new)
        for name, child in ast.iter_fields(node):
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST) and name not in ("annotation", "returns"):
                    yield from visit(one)

    yield from visit(ast.parse(source))


def draw(seed: int, count: int) -> list[Mutant]:
    """Draws mutants of distinct places; folders are weighted by their lines that have one."""
    rng, rooms = random.Random(seed), defaultdict[str, list[Mutant]](list)
    for file in sorted((ROOT / "fedjax_sim").rglob("*.py")):
        rooms[room_of(file)] += mutants_of(file)
    lines = [len({(mutant.file, mutant.line) for mutant in room}) for room in rooms.values()]
    drawn: dict[tuple[Path, int], Mutant] = {}
    while len(drawn) < count:
        mutant = rng.choice(rng.choices(list(rooms.values()), lines)[0])
        drawn.setdefault((mutant.file, mutant.begin), mutant)
    return list(drawn.values())


def room_of(file: Path) -> str:
    """Returns the name of the package's folder that contains a file."""
    return str((ROOT / file).relative_to(ROOT / "fedjax_sim").parent).partition(os.sep)[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Attributes lines to the test that executes them; pytest loads this file as a plugin."""
    if running := coverage.Coverage.current():
        running.switch_context(item.nodeid)


def record() -> coverage.CoverageData:
    """Records the lines that each test executes, unless this was done before."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    data, unfinished = coverage.CoverageData(no_disk=True), RECORDS / "unfinished"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    run = f"-m coverage run --include={ROOT}/* --data-file={unfinished} -m pytest -q -p mutants"
    for tests in [*(ROOT / "fedjax_sim").glob("[!_]*/"), *(ROOT / "tests").glob("test_*.py")]:
        file = RECORDS / f"{tests.stem}.coverage"
        if not file.exists():
            subprocess.run([sys.executable, *run.split(), CONFTEST, str(tests)], cwd=ROOT, env=env)
            unfinished.rename(file)
        found = coverage.CoverageData(str(file))
        found.read()
        data.update(found)
    return data


def choose(data: coverage.CoverageData, mutant: Mutant) -> list[list[str]]:
    """Chooses 60 tests of a mutant, first those that execute the fewest lines, and their files.

    A line that is executed when the package is imported has the tests of its whole file.
    """
    lines = data.contexts_by_lineno(str(ROOT / mutant.file))
    executed = Counter(itertools.chain(*lines.values()))
    tests = set(lines.get(mutant.line, ())) - {""} or set(executed) - {""}
    of_file = defaultdict[str, list[str]](list)
    for test in sorted(tests, key=lambda test: (executed[test], test)):
        of_file[test.partition("::")[0]].append(test)
    in_turn = itertools.chain(*itertools.zip_longest(*of_file.values()))
    return [list(filter(None, in_turn))[:60], list(of_file)]


def first_failure(tests: list[str], limit: float) -> str:
    """Runs tests until one fails, and returns its name; the empty string if all pass."""
    run = "-m pytest -q -x -rfE -p no:cacheprovider " + CONFTEST
    done = subprocess.run(
        [sys.executable, *run.split(), *tests], capture_output=True, text=True, timeout=limit
    )
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else found[1] if found else tests[0]


def judge(mutant: Mutant, groups: list[list[str]], limit: float) -> str:
    """Runs groups of tests with a mutant in the working directory; returns its fate."""
    source = mutant.file.read_bytes()
    for tests in filter(None, groups):
        mutant.file.write_bytes(source[: mutant.begin] + mutant.new.encode() + source[mutant.end :])
        try:
            failed = first_failure(tests, limit)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            mutant.file.write_bytes(source)
        if failed and not first_failure([failed], 10 * limit):
            return f"killed by {failed}"
    return "survived" if any(groups) else "not reached"


def main() -> None:
    """Prints the fate of each mutant, then the number of each fate in each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--timeout", type=float, default=300, help="seconds (default: 300)")
    args = parser.parse_args()
    os.nice(19)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(RECORDS / "programs")
    data, fates = record(), defaultdict[str, Counter[str]](Counter)
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "results")
        tree = shutil.copytree(ROOT, Path(folder) / "tree", ignore=ignored)
        os.environ["PYTHONPATH"] = str(tree)
        with contextlib.chdir(tree):
            for mutant in draw(args.seed, args.count):
                fate = judge(mutant, choose(data, mutant), args.timeout)
                fates[room_of(mutant.file)][fate.partition(" by ")[0]] += 1
                place = f"{mutant.file}:{mutant.line}"
                print(f"{place}: {mutant.old} -> {mutant.new}: {fate}", flush=True)
    for room, counts in [*sorted(fates.items()), ("all", sum(fates.values(), Counter()))]:
        print(room, dict(counts))


if __name__ == "__main__":
    main()
