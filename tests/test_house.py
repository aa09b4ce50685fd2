"""What holds for the package as a whole: where files lie, and that no name hides another."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import mutate
import pytest

import fedjax_sim

ROOT = Path(fedjax_sim.__file__).parent
PACKAGES = [
    "fedjax_sim",
    *(m.name for m in pkgutil.walk_packages([str(ROOT)], "fedjax_sim.") if m.ispkg),
]


def test_the_root_is_a_page_of_contents() -> None:
    files = sorted(path.name for path in ROOT.iterdir() if path.is_file())
    assert len(files) <= 8, files


def test_no_module_is_long() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in ROOT.rglob("*.py")
    }
    assert lines
    assert {name: count for name, count in lines.items() if count > 350} == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_no_function_hides_a_module(name: str) -> None:
    """``fs.server.update`` must be the module of that file, whatever was imported before."""
    package = importlib.import_module(name)
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    hidden = [
        module
        for module in modules
        if inspect.isroutine(getattr(package, module, None))
        or inspect.isclass(getattr(package, module, None))
    ]
    assert hidden == []


def test_every_mutant_has_its_place() -> None:
    """`python tests/mutate.py` would stop at one that has none."""
    wrong = {
        (mutant.file, mutant.old): count
        for mutant in mutate.MUTANTS
        if (count := (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)) != 1
    }
    assert wrong == {}
