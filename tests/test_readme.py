"""The Python in README and CONTRIBUTING runs as printed, and the pages name what is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, play

import fedjax_sim as fs

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/releasing.md"]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


def test_the_examples_train_and_show_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    example, exchange = python_blocks("README.md")
    scope: dict[str, Any] = {}
    exec(example, scope)
    assert scope["result"].accuracy[-1, 0] > 0.5  # chance is 0.1
    capsys.readouterr()
    exec(exchange, scope)
    assert scope["robust_scaffold"].replaced == ("aggregator",)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```text\n(scaffold\(.*?)```", text_of("README.md"), re.DOTALL)
    assert printed.startswith(shown)
    assert "karimireddy2020scaffold" in printed


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """What CONTRIBUTING defines; every block brings its imports."""
    defined: dict[str, Any] = {}
    for block in python_blocks("CONTRIBUTING.md"):
        scope: dict[str, Any] = {}
        exec(block, scope)
        defined |= scope
    return defined


def test_an_algorithm(recipes: dict[str, Any], federation: Federation) -> None:
    model = fs.models.logistic(federation.data.x.shape[1:], federation.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=16)
    made = recipes["fedavg_delayed"](local, clients_per_round=4)
    out = play(made, model, federation.data, 4)
    assert [int(m.uploads) for m in out.metrics] == [0, 4, 0, 4]
    assert [int(m.downloads) for m in out.metrics] == [4, 0, 4, 0]


def test_parts(recipes: dict[str, Any], federation: Federation) -> None:
    """Three rounds of three clients each of the eight, in turn, and their largest coordinates."""
    model = fs.models.logistic(federation.data.x.shape[1:], federation.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=16)
    parts = {"selection": recipes["in_turn"](), "aggregator": recipes["maximum"]}
    every_round = fs.schedule.every_round(3)
    made = fs.compose(local, schedule=every_round, server=recipes["running_mean"](), **parts)
    out = play(made, model, federation.data, 3)
    visited = [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    expected = [federation.sizes[clients].sum() for clients in visited]
    assert [int(m.samples) for m in out.metrics] == expected
    assert [int(s.opt_state) for s in out.states] == [2, 3, 4]
    shown = repr(made)
    assert all(name in shown for name in ("in_turn()", "maximum", "running_mean()"))


def test_a_server_update_is_the_mean_of_all_aggregates(recipes: dict[str, Any]) -> None:
    server = recipes["running_mean"]()
    model, state = jnp.float32(100), server.init(jnp.float32(100))
    for aggregate in (1.0, 2.0, 6.0):
        model, state = server.update(None, jnp.float32(aggregate), model, state, None)
    np.testing.assert_allclose(float(model), 3, rtol=1e-6)


def test_an_aggregator(recipes: dict[str, Any]) -> None:
    stack = {"w": jnp.array([[1.0, 5.0], [3.0, 2.0], [jnp.nan, 9.0]])}
    out = recipes["maximum"](stack, jnp.array([1.0, 2.0, 0.0]))
    assert out["w"].tolist() == [3, 5]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_there(page: str) -> None:
    for name in set(re.findall(r"\bfs((?:\.[A-Za-z]\w*)+)", text_of(page))):
        found: Any = fs
        for attribute in name.strip(".").split("."):
            fields = getattr(found, "__annotations__", {})
            found = fields[attribute] if attribute in fields else getattr(found, attribute)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "benchmarks/README.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page)):
        assert ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", ["README.md", "docs/glossary.md", "docs/round.svg"])
def test_every_role_is_explained(page: str) -> None:
    text = text_of(page)
    for role in inspect.signature(fs.compose).parameters:
        assert re.search(rf"(?:`|>\d+ ){role}(?:`|<)", text), role


def test_the_table_of_parts_says_where_they_are() -> None:
    """A choice in the third column is a name of the module in the second."""
    rows = re.findall(r"^\| [^|]+ \| `fs\.(\w+)` \| ([^|]+) \|", text_of("README.md"), re.MULTILINE)
    assert len(rows) == 13 + 3  # a row for each role, and three for what is inside a local update
    for where, choices in rows:
        module = getattr(fs, where)
        if isinstance(module, ModuleType):
            for name in re.findall(r"`(\w+)[`(]", choices):
                assert callable(getattr(module, name)), f"{where}.{name}"


def test_the_house_is_described() -> None:
    """CONTRIBUTING names every folder and module of the package's root."""
    text = text_of("CONTRIBUTING.md")
    for path in Path(fs.__file__).parent.iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"`{path.name}/`" in text, path.name
        elif path.suffix == ".py" and path.stem != "__init__":
            assert f"`{path.stem}`" in text, path.stem


def test_the_pictures_are_small() -> None:
    for page in PAGES:
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)", text_of(page)):
            assert ((ROOT / page).parent / picture).stat().st_size < 100_000, picture
