"""What holds for the package as a whole: where files lie, and that no name hides another."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import jax
import prose
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


HABITS = {
    "those of": 0.25, "that of": 0.1, "what is": 0.1, "of which": 0.15, "people's verbs": 0.1,
    "beside": 0.05, "none of": 0.5,
}  # fmt: skip
"""The most of each habit in 1,000 words of docstrings. These numbers may only fall."""


def test_docstrings_are_plain_english() -> None:
    found = prose.habits(ROOT)
    assert {name: n for name, n in found.items() if n > HABITS[name]} == {}
    assert prose.verbs_first(ROOT) > 0.95


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


PROMISED = 517
"""The most names that the package promises. This number may only fall."""


def test_few_names_are_promised_and_each_has_one_home() -> None:
    """A name is promised if it is in ``__all__`` of the package or of a module that is there.

    The package itself repeats the most common ones.
    """
    homes: dict[int, list[str]] = {}
    for path in fedjax_sim.__all__:
        value = getattr(fedjax_sim, path)
        if not inspect.ismodule(value):
            homes.setdefault(id(value), [])
            continue
        for name in value.__all__:
            homes.setdefault(id(getattr(value, name)), []).append(f"{path}.{name}")
    several = [paths for paths in homes.values() if len(paths) > 1]
    assert several == [["aggregators.mean", "tree.mean"]]  # a part, and a helper of parts
    assert len(homes) <= PROMISED, len(homes)


CORE = """
import sys
for name in ("dm_pix", "tensorflow_datasets", "sklearn", "matplotlib", "datasets", "PIL", "tqdm",
             "pandas"):
    sys.modules[name] = None  # an import of it fails
import numpy as np, optax
import fedjax_sim as fs
x, y = np.ones((24, 4), np.float32), np.arange(24, dtype=np.int32) % 3
model = fs.models.logistic((4,), 3)
local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1))
data = fs.client_data(x, y, fs.partition.iid(y, 4, seed=0))
for method in (fs.fedavg, fs.phase_shift):
    fs.simulate(method(local, clients_per_round=4), model, data, (x, y), rounds=1, classes=3)
"""


def test_training_needs_the_core_alone() -> None:
    """Data sets, pictures and augmentations import what they need where they need it."""
    done = subprocess.run(
        [sys.executable, "-c", CORE],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr


NO_DRAWS = {"fold_in", "key", "key_data", "split", "wrap_key_data"}
KEEPS_A_TYPE = {"permutation"}  # its array's


def draws_without_a_dtype(code: str) -> list[str]:
    """Calls of ``jax.random`` whose numbers x64 may change.

    Functions that take no dtype count too: they draw from the default float.
    """
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        module, _, name = ast.unparse(call.func).rpartition(".")
        if module != "jax.random" or name in NO_DRAWS | KEEPS_A_TYPE:
            continue
        takes = inspect.signature(getattr(jax.random, name))
        if name == "rademacher" or "dtype" not in takes.parameters:
            found.append(ast.unparse(call))
            continue
        options = {option.arg: option.value for option in call.keywords if option.arg}
        if "dtype" not in takes.bind(*call.args, **options).arguments:
            found.append(ast.unparse(call))
    return found


def test_a_draw_without_a_dtype_is_found() -> None:
    wrong = ["uniform(k)", "randint(k, (), 0, 9)", "bernoulli(k, 0.5)", "rademacher(k, (), int)"]
    right = ["uniform(k, (), f)", "normal(k, dtype=f)", "randint(k, (), 0, 9, i)", "split(k)"]
    code = "\n".join(f"jax.random.{call}" for call in wrong + right)
    assert draws_without_a_dtype(code) == [f"jax.random.{call}" for call in wrong]


def test_every_draw_has_a_dtype() -> None:
    wrong = {
        str(path.relative_to(ROOT)): calls
        for path in ROOT.rglob("*.py")
        if (calls := draws_without_a_dtype(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}
