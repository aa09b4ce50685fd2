"""The Python in README, guide and recipes runs as printed; the pages name what is there."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, make_federation, play

import fedjax_sim as fs
from fedjax_sim import bench

ROOT = Path(__file__).parents[1]
AT = {"client": 0.02, "server": 1.0}
METHODS, RUNS = "docs/guide/methods.md", "docs/guide/runs.md"
CHOOSING, COMING_FROM, FAQ = "docs/guide/choosing.md", "docs/guide/coming_from.md", "docs/faq.md"
ARTIFACT = "docs/artifact/README.md"
PAGES = [
    "README.md", "CONTRIBUTING.md", "docs/devices.md", "docs/glossary.md", "docs/releasing.md",
    METHODS, RUNS, "docs/guide/data.md", "docs/guide/command.md",
    "docs/recipes.md", "docs/architecture.md", CHOOSING, COMING_FROM, FAQ, ARTIFACT,
]  # fmt: skip


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    """Which compiles faster than several; the pages leave it to the machine."""
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(fs.make_execution, 1)
        patch.setattr("fedjax_sim.round.algorithm.make_execution", one)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_the_examples_train_and_show_their_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "use_cores", lambda: None)  # JAX has started
    monkeypatch.setattr(fs, "make_execution", functools.partial(fs.make_execution, 1))
    example, exchange = python_blocks("README.md")
    codes, private, steps, adapters, narrower, drawn, shallow, exits, gradients = python_blocks(
        METHODS
    )
    loading, watching, comparing, calling, sweeps = python_blocks(RUNS)
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
    exec(codes, scope)
    assert scope["short"].parts.measured
    exec(private, scope)
    assert 0 < scope["spent"] < 5
    exec(steps, scope)
    assert 0 < scope["spent"].min() < scope["spent"].max() < 6
    exec(adapters, scope)
    weights = [a.size for a in jax.tree.leaves(scope["adapted"].init(jax.random.key(0)))]
    assert sum(weights) == 55_210 + 3_496
    assert scope["tuned"].evaluations[-1].bytes_up[0] == 30 * 10 * 4 * 3_496
    assert scope["tuned"].accuracy[-1, 0] > scope["result"].accuracy[-1, 0]
    command = ["--algo", "scaffold", "--compare", "none", "--rounds", "1", "--model", "logistic"]
    command += ["--devices", "1"]
    assert bench.main([*command, "--out", str(tmp_path / "mine")]) == 0
    exec(loading.replace("runs/mine", str(tmp_path / "mine")), scope)
    assert {len(a) for a in jax.tree.leaves(scope["weights"])} == {4}
    capsys.readouterr()
    exec(watching, scope)
    rounds = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert rounds == [*range(1, len(rounds) + 1)]
    assert 2 < len(rounds) < 30
    exec(exchange, scope)  # the other pages have another `local`
    fewer = comparing.replace("rounds=10", "rounds=2").replace("range(6)", "range(2)")
    exec(fewer.replace("runs/composed", str(tmp_path / "composed")), scope)
    assert scope["found"].to_pandas()["method"].tolist() == ["FedAvg", "SCAFFOLD"]
    assert fs.load_run(tmp_path / "composed", model=scope["model"]).variables("SCAFFOLD")
    exec(calling.replace("rounds=20", "rounds=2, devices=1, model='logistic'"), scope)
    assert [*scope["results"]] == ["phase_shift(phases=4)", "fedavg"]
    exec(sweeps.replace("rounds=10,", "rounds=2,"), scope)
    told = re.findall(r"on_plan=print,  # (.*)", sweeps)
    assert capsys.readouterr().out.splitlines()[-1:] == told
    assert len(scope["sweep"].table()) == 9 * 3 * 2
    exec(narrower, scope)
    assert scope["narrow"].accuracy[-1, 0] > 0.5
    exec(drawn + shallow, scope)
    assert scope["fjord"].parts.exchange == scope["heterofl"].parts.exchange
    assert len(scope["shallow"].covers.blocks) == 4
    exec(gradients.replace("range(3)", "range(2)"), scope)  # each is traced
    measure = jax.jit(scope["loss_after"])
    np.testing.assert_allclose(scope["loss"], measure(AT), rtol=1e-5)
    for name, slope in scope["slopes"].items():
        ends = [float(measure(AT | {name: AT[name] * by})) for by in (1.01, 0.99)]
        wanted = (ends[0] - ends[1]) / (0.02 * AT[name])
        # Kinks of the network lie between the ends; tests/test_differentiable.py is exact.
        np.testing.assert_allclose(slope, wanted, rtol=0.1)
    exec(exits, scope)
    assert scope["exits"].accuracy[-1, 0] > 0.5
    check_distilled(**{name: scope[name] for name in ("deep", "distilled")})


def check_distilled(deep: fs.Model, distilled: Any) -> None:
    """DepthFL's loss by pairs of exits, for a client with one exit, with two and with three."""
    rng = np.random.default_rng(0)
    weights = deep.init(jax.random.key(0))
    batch = fs.base.Batch(rng.random((5, 8, 8, 1)) * 16, jnp.arange(5), jnp.arange(5) < 4)
    logits, _ = deep.apply(weights, batch.x, train=True)
    p = np.asarray(jax.nn.softmax(logits), np.float64)[:4]
    for exits in (1, 2, 3):
        client = types.SimpleNamespace(id=jnp.int32(3 + exits - 1))
        context: Any = types.SimpleNamespace(client=client)
        wanted = 0.0
        for n in range(4):
            for i in range(exits):
                wanted -= np.log(p[n, i, n]) / 4
                for j in set(range(exits)) - {i}:
                    gap = np.sum(p[n, j] * np.log(p[n, j] / p[n, i]))
                    wanted += gap / (exits - 1) / 4
        found = distilled(weights.params, weights.state, batch, context)[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_programs_in_the_style_of_other_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-written proximal term is the package's; a median, FedAdam and noise learn."""
    monkeypatch.setattr(fs, "use_cores", lambda: None)  # JAX has started
    scope: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam promotes
        for block in python_blocks(COMING_FROM):
            exec(block.replace("rounds=20, classes", "rounds=5, classes"), scope)
    assert int(scope["state"].round) == 2
    assert all(scope[name].accuracy[-1, 0] > 0.3 for name in ("flower", "fedjax", "pfl"))
    fedprox = fs.algorithms.fedprox(scope["local"], clients_per_round=10, mu=0.1)
    problem = (scope[name] for name in ("model", "data", "test"))
    ours = fs.simulate(fedprox, *problem, rounds=5, classes=10)
    assert_trees(scope["fluke"].variables, ours.variables, rtol=1e-6)


@pytest.mark.slow
def test_the_examples_of_data_train() -> None:
    scope: dict[str, Any] = {}
    for block in python_blocks("docs/guide/data.md"):
        exec(block, scope)
        assert len([line for line in block.splitlines() if line]) <= 15
    chance = {"graphs": 1 / 3, "pairs": 1 / 2, "joined": 1 / 10, "semi": 1 / 10}
    chance["contrasted"] = 1 / 10
    assert all(scope[name].accuracy[-1, 0] > share + 0.3 for name, share in chance.items())
    assert scope["vae"].evaluations[-1].test.pooled.elbo[0] < 30  # 64 log 2 knows nothing


SHOWN = re.findall(r"^\$ python -m fedjax_sim.bench (.*)\n(.*)$", text_of(FAQ), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "message"), SHOWN)
def test_the_errors_are_those_that_users_meet(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*shlex.split(command), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def commands(page: str) -> list[str]:
    """The arguments of bench in a page's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", text_of(page), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("fedjax_sim.bench ")[2] for line in lines if "fedjax_sim.bench" in line]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(CHOOSING))
def test_the_commands_compose(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*shlex.split(command), "--dry-run"]) == 0
    assert "local steps" in capsys.readouterr().out


def test_calls_of_methods_are_those_of_methods() -> None:
    """Every name and setting in the sentences of docs/guide/choosing.md is one of a method."""
    for name, settings in re.findall(r"`([a-z_]+)\((\w+=[^`]*)\)`", text_of(CHOOSING)):
        made = inspect.signature(fs.ALGORITHMS[name]).parameters
        for setting in re.findall(r"(\w+)=", settings):
            assert setting in made or setting == "epochs", f"{name}({setting}=)"
    words = set(re.findall(r"`([a-z_]+)`", text_of(CHOOSING)))
    assert len(words & set(fs.ALGORITHMS)) > 35


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """The definitions of docs/recipes.md; every block has its own imports."""
    defined: dict[str, Any] = {}
    for block in python_blocks("docs/recipes.md"):
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
    made = fs.compose(local, 3, server=recipes["running_mean"](), **parts)
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
        step, state = server.update(None, aggregate - model, model, state, None)
        model = model + step
    np.testing.assert_allclose(float(model), 3, rtol=1e-6)


def test_a_selection_that_learns(recipes: dict[str, Any], federation: Federation) -> None:
    """All eight come once, then the four whose losses were largest; a loss is 4 bytes."""
    model = fs.models.logistic(federation.data.x.shape[1:], federation.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=16)
    chosen = recipes["power_of_choice"](8)
    made = fs.fedavg(local, clients_per_round=4).replace(selection=chosen)
    out = play(made, model, federation.data, 3)
    first, second, third = (set(m.client.tolist()) for m in out.metrics)
    assert first | second == set(range(8))
    losses = np.asarray(out.states[1].selection)
    assert third == set(np.argsort(losses)[4:].tolist())
    assert made.traffic(out.final, federation.data).message == 4


def test_what_clients_share(recipes: dict[str, Any], federation: Federation) -> None:
    """It is the package's FedProto."""
    model = fs.models.mlp((6,), federation.classes, widths=(4,))
    risk = fs.empirical_risk(model)
    local = fs.local_sgd(risk, optax.sgd(0.1), batch_size=16)
    common: dict[str, Any] = {"clients_per_round": 4, "model": model}
    ours = recipes["prototypical"](local, zeros=jnp.zeros((federation.classes, 4)), **common)
    named = fs.algorithms.fedproto(local, objective=risk, classes=federation.classes, **common)
    own, theirs = (play(a, model, federation.data, 3).states[-1].own for a in (ours, named))
    assert_trees(own, theirs, rtol=1e-5, atol=1e-6)


def test_a_part_of_sending(recipes: dict[str, Any]) -> None:
    part = recipes["withheld_below"](5.0)
    update = fs.Variables(jnp.array([3.0, 4.0]), ())
    sent = [part.send(None, (), fs.tree.scale(by, update), (), 0) for by in (1.0, 0.9)]
    assert [bool(s.present) for s in sent] == [True, False]


def test_a_task(recipes: dict[str, Any]) -> None:
    """A linear model of counts is learnt, and the scores are those of its λ."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = rng.poisson(np.exp(x @ [0.5, -0.3] + 1)).astype(np.float32)
    task, model = recipes["poisson"](), fs.models.logistic((2,), 1)
    data = fs.client_data(x, y, fs.partition.iid(y, 3, seed=0))
    local = fs.local_sgd(fs.empirical_risk(model, task.loss), optax.sgd(0.05))
    fedavg = fs.fedavg(local, clients_per_round=3)
    result = fs.simulate(fedavg, model, data, (x, y), rounds=20, eval_every=20, task=task)
    layer = jax.tree.map(lambda a: a[0], result.variables.params["Dense_0"]["Dense_0"])
    rate = np.exp(x @ layer["kernel"][:, 0] + layer["bias"])
    np.testing.assert_allclose(result.score[-1], np.abs(rate - y).mean(), rtol=1e-4)
    np.testing.assert_allclose(layer["kernel"][:, 0], [0.5, -0.3], atol=0.2)


def test_an_aggregator(recipes: dict[str, Any]) -> None:
    stack = {"w": jnp.array([[1.0, 5.0], [3.0, 2.0], [jnp.nan, 9.0]])}
    out = recipes["maximum"](stack, jnp.array([1.0, 2.0, 0.0]))
    assert out["w"].tolist() == [3, 5]


READ = [*PAGES, *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/tutorials/*.md"))]
READ += [str(path.relative_to(ROOT)) for path in ROOT.glob("notebooks/*.ipynb")]


@pytest.mark.parametrize("page", READ)
def test_every_name_is_promised(page: str) -> None:
    """A page uses a module's names only if they are in its ``__all__``."""
    text = text_of(page).replace('\\n",', "").replace('    "', "")  # of a notebook
    names = re.findall(r"\bfs((?:\.[A-Za-z]\w*)+)", text)
    for module, imported in re.findall(
        r"^ *from fedjax_sim((?:\.\w+)*) import (\([^)]*\)|[^\n(]+)", text, re.MULTILINE
    ):
        names += [f"{module}.{name}" for name in re.findall(r"[A-Za-z]\w*", imported)]
    for name in set(names):
        found: Any = fs
        for attribute in name.strip(".").split("."):
            if isinstance(found, ModuleType):
                assert attribute in found.__all__, name
            fields = getattr(found, "__annotations__", {})
            found = fields[attribute] if attribute in fields else getattr(found, attribute)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "benchmarks/README.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page)):
        assert ((ROOT / page).parent / link).exists(), link


def test_the_objective_of_the_recipes_remembers(recipes: dict[str, Any]) -> None:
    """It pulls towards the client's last model, from the second step of a visit on."""
    data = make_federation((5,)).data

    def bowl(w: Any, state: Any, batch: Any, context: Any) -> Any:
        return 0.5 * jnp.vdot(w, w), state

    local = fs.local_sgd(
        recipes["near_own"](bowl, 1.0), optax.sgd(0.5), epochs=2, memory=recipes["own_model"]()
    )
    start = jnp.array([8.0, 0.0])
    model = fs.Model(lambda key: fs.Variables(start, ()), lambda *_, **__: None)  # type: ignore[arg-type]
    out = play(fs.fedavg(local, clients_per_round=1), model, data, 2)
    # 8 - 8 / 2, and there the slope is 4 - (8 - 4); of the second visit 4 - 4 / 2, and 2 - (4 - 2).
    assert [float(w.params[0]) for w in out.servers] == [4.0, 2.0]


@pytest.mark.parametrize("page", [METHODS, "docs/glossary.md", "docs/round.svg"])
def test_every_role_is_explained(page: str) -> None:
    text = text_of(page)
    for role in inspect.signature(fs.compose).parameters.keys() - {"clients_per_round"}:
        assert re.search(rf"(?:`|>(?:\d+ )?){role}(?:`|<)", text), role


def test_the_table_of_parts_says_where_they_are() -> None:
    """A choice in the third column is a name of the module in the second."""
    rows = re.findall(r"^\| [^|]+ \| `fs\.(\w+)` \| ([^|]+) \|", text_of(METHODS), re.MULTILINE)
    assert len(rows) == 16 + 3  # one per role with a module, and three inside a local update
    for where, choices in rows:
        module = getattr(fs, where)
        if isinstance(module, ModuleType):
            for name in re.findall(r"`(\w+)[`(]", choices):
                assert name in module.__all__, f"{where}.{name}"


def test_the_house_is_described() -> None:
    """docs/architecture.md names every folder and module of the package's root."""
    text = text_of("docs/architecture.md")
    for path in Path(fs.__file__).parent.iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"`{path.name}/`" in text, path.name
        elif path.suffix == ".py" and path.stem != "__init__":
            assert f"`{path.stem}`" in text, path.stem


def test_a_release_has_one_number_and_one_date() -> None:
    """The package, CITATION.cff and the newest heading of CHANGELOG.md."""
    number, day = re.findall(r"^## ([\d.]+) \((.+)\)$", text_of("CHANGELOG.md"), re.MULTILINE)[0]
    cited = dict(re.findall(r"^([\w-]+): (.+)$", text_of("CITATION.cff"), re.MULTILINE))
    assert (number, day) == (fs.__version__, cited["date-released"])
    assert cited["version"] == number


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Its cells; the source of each is one text."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: str(path.stem))
def test_a_notebook_is_stored_with_what_it_shows(notebook: Path) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    # Nothing that differs from one execution to the next.
    assert all(cell["metadata"] == {} for cell in cells(notebook))
    assert str(ROOT) not in notebook.read_text(encoding="utf-8")
    assert notebook.stat().st_size < 300_000


def test_the_notebooks_begin_alike() -> None:
    assert len({cells(notebook)[1]["source"] for notebook in NOTEBOOKS}) == 1


class _FirstCell:
    """The notebooks' first code cell on a machine of a test's own, which lacks the package.

    Attributes:
        ran: the arguments of pip.
        error: what pip prints; it succeeds if that is empty.
        cores: how often it asks for a device of each core.
    """

    def __init__(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.monkeypatch = machine, monkeypatch
        self.ran: list[list[str]] = []
        self.error, self.cores = "", 0
        glob = Path.glob

        def near(folder: Path, pattern: str) -> list[Path]:
            """Nothing outside the machine."""
            if folder in (Path("/kaggle/input"), Path("/dev")):
                folder = machine / folder.relative_to("/")
            return list(glob(folder, pattern)) if folder.is_relative_to(machine) else []

        monkeypatch.setattr(Path, "glob", near)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(subprocess, "run", self._pip)
        monkeypatch.setattr(fs, "use_cores", self._use_cores)  # JAX has started
        self.installs()

    def _use_cores(self) -> None:
        self.cores += 1

    def _pip(self, command: list[str], **options: Any) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        self.ran.append([word for word in command[4:] if not word.startswith("--")])
        return SimpleNamespace(returncode=int(bool(self.error)), stderr=self.error)

    def installs(self, **more: str) -> None:
        """Sets the distributions: Colab's JAX and more."""
        names = {"jax": "0.7.2", "jaxlib": "0.7.1", "flax": "0.11.2", "numpy": "2.0.2"} | {
            name.replace("_", "-"): version for name, version in more.items()
        }
        found = [SimpleNamespace(name=name, version=v) for name, v in names.items()]
        self.monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)

    def imports_from(self, origin: str | None) -> None:
        """Sets the package's ``__init__.py``; None for a folder without one."""
        specs = {"fedjax_sim": SimpleNamespace(origin=origin)}
        self.monkeypatch.setattr(importlib.util, "find_spec", specs.get)

    def add(self, name: str) -> Path:
        """Makes a clone or a wheel."""
        path = self.machine / name
        if path.suffix == ".whl":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return path
        (path / "fedjax_sim").mkdir(parents=True)
        (path / "fedjax_sim" / "bench.py").touch()
        (path / "pyproject.toml").touch()
        return path

    def run(self, folder: str = "content/notebooks") -> None:
        """Runs it in a folder."""
        here = self.machine / folder
        here.mkdir(parents=True, exist_ok=True)
        self.monkeypatch.chdir(here)
        exec(cells(NOTEBOOKS[0])[1]["source"], {})


@pytest.fixture
def first_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _FirstCell:
    return _FirstCell(tmp_path, monkeypatch)


WHEEL = "fedjax_sim-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    "place",
    [
        "content/notebooks",  # the clone itself
        "content/notebooks/fedjax_sim",
        f"content/notebooks/{WHEEL}",
        "content",
        f"kaggle/input/{WHEEL}",
        f"kaggle/input/datasets/somebody/mine/{WHEEL}",
    ],
)
def test_a_notebook_installs_the_wheel_or_clone_around(place: str, first_cell: _FirstCell) -> None:
    """What JAX is there stays, and pip alone says which other packages are missing."""
    source = first_cell.add(place)
    first_cell.run()
    kept = ["jax==0.7.2", "jaxlib==0.7.1", "flax==0.11.2"]
    assert first_cell.ran == [[str(source), *kept]]
    assert first_cell.cores == 1


def test_a_notebook_prefers_a_wheel_and_what_is_near(first_cell: _FirstCell) -> None:
    newer = WHEEL.replace("0.1.0", "0.2.0")
    for place in (
        "content/notebooks/a",
        "content",
        "content/notebooks",
        f"kaggle/input/mine/{WHEEL}",
        f"content/notebooks/{WHEEL}",
        f"content/notebooks/{newer}",
    ):
        source = first_cell.add(place)
        first_cell.run()
        assert first_cell.ran.pop()[0] == str(source)


def test_a_notebook_without_a_wheel_or_clone_says_what_to_upload(first_cell: _FirstCell) -> None:
    """Another project is not a clone."""
    first_cell.add("content/notebooks/other-0.1.0-py3-none-any.whl")
    (first_cell.add("content/notebooks/other") / "fedjax_sim" / "bench.py").unlink()
    with pytest.raises(SystemExit, match=r"^fedjax_sim is missing: .*on Colab by Files.*\.$"):
        first_cell.run()
    assert first_cell.ran == []


def test_a_notebook_stops_if_pip_fails(first_cell: _FirstCell) -> None:
    source = first_cell.add("content")
    first_cell.error = "ERROR: no network"
    with pytest.raises(SystemExit, match=f"pip could not install {source}:\nERROR: no network"):
        first_cell.run()


def test_a_notebook_uses_the_package_that_is_there(first_cell: _FirstCell) -> None:
    """Installed, or on the path; a clone as the current folder may lack what it needs."""
    clone = first_cell.add("content/fedjax_sim")
    origin = str(clone / "fedjax_sim" / "__init__.py")
    for importable, folder, installed in [
        (None, "content", True),  # the clone, as an empty package
        (origin, "content/fedjax_sim", True),
        (origin, "content", False),
    ]:
        first_cell.imports_from(importable)
        first_cell.run(folder)
        assert bool(first_cell.ran) == installed
        first_cell.ran.clear()
    first_cell.imports_from(None)
    first_cell.installs(fedjax_sim="0.1.0")
    first_cell.run("content")
    assert first_cell.ran == []


@pytest.mark.parametrize("device", ["nvidia0", "accel0", "vfio/0"])
def test_a_notebook_wants_the_accelerator_that_is_there(
    device: str, first_cell: _FirstCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_cell.installs(fedjax_sim="0.1.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    for name in ("nvidiactl", "vfio/vfio"):  # are there without a device too
        path = first_cell.machine / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    first_cell.run()
    (first_cell.machine / "dev" / device).touch()
    with pytest.raises(SystemExit, match=f"does not see the accelerator .*{device}: .*restart"):
        first_cell.run()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    first_cell.run()


def test_the_pictures_are_small() -> None:
    for page in PAGES:
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)", text_of(page)):
            assert ((ROOT / page).parent / picture).stat().st_size < 100_000, picture
