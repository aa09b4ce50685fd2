"""What strangers send is data: crafted folders and files run nothing and end in one line."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedjax_sim as fs
from fedjax_sim import bench, study
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import registry
from fedjax_sim.base.registry import Registry, trusting
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.cli.reporting.command import main as report
from fedjax_sim.cli.resuming import to_go_on
from fedjax_sim.cli.sinks import SINKS
from fedjax_sim.data import DATASETS
from fedjax_sim.models import MODELS
from fedjax_sim.partition import SAMPLERS
from fedjax_sim.run.environment import environment

STORED = Path(__file__).parent / "folders" / "run"
CANARY = """
from pathlib import Path
Path({ran!r}).touch()
import fedjax_sim as fs
from fedjax_sim.cli.sinks import Sink

def algo(local, *, clients_per_round: int) -> fs.Algorithm:
    return fs.fedavg(local, clients_per_round=clients_per_round)

def dataset(folder) -> fs.data.Dataset:
    return fs.load_dataset("digits")

def model(shape, classes) -> fs.Model:
    return fs.models.logistic(shape, classes)

def partition(labels, clients, *, seed) -> fs.partition.Partition:
    return fs.partition.iid(labels, clients, seed=seed)

def sink(name, settings, folder) -> Sink:
    return Sink(print, print)

@fs.models.MODELS.register
def registered(shape, classes):
    return fs.models.logistic(shape, classes)
"""
"""A module that leaves a file when it is imported; its functions are declared for their roles."""

SEEN: list[str] | None = None
"""What the process did that nothing may do, since a test began to look."""

FORBIDDEN = (
    "os.system", "os.exec", "os.spawn", "os.posix_spawn", "subprocess.Popen", "pty.spawn",
    "webbrowser.open", "socket.connect", "socket.getaddrinfo", "urllib.Request",
)  # fmt: skip


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if SEEN is None:
        return
    outside = event in ("open", "os.remove", "os.rename", "os.truncate") and "/outside/" in str(
        given
    )
    if (
        outside
        or event in FORBIDDEN
        or (event == "import" and given[0] in ("canary", "antigravity"))
    ):
        SEEN.append(f"{event} {given}")


sys.addaudithook(_audit)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the canary, where Python looks for modules; and a folder outside."""
    global SEEN
    work, outside, ran = (tmp_path / name for name in ("work", "outside", "ran"))
    for folder in (work, outside):
        folder.mkdir()
    (work / "canary.py").write_text(CANARY.format(ran=str(ran)))
    (outside / "secret.csv").write_text("a,label\n" + "1,x\n2,y\n" * 5)
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    monkeypatch.setattr(MODELS, "_values", dict(MODELS))
    before = sorted((path, path.lstat().st_mtime_ns) for path in outside.rglob("*"))
    environment()  # asks git, once in a process
    SEEN = []
    yield work
    seen, SEEN = SEEN, None
    trusted = "canary" in sys.modules
    sys.modules.pop("canary", None)
    assert trusted or (seen, ran.exists()) == ([], False)
    assert sorted((path, path.lstat().st_mtime_ns) for path in outside.rglob("*")) == before


def sample(cases: Iterable[Any], every: int) -> list[Any]:
    """All cases, of which one in ``every`` is not slow."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if i % every else [])
        for i, case in enumerate(cases)
    ]


def stored() -> dict[str, Any]:
    """The settings of the stored run."""
    found: dict[str, Any] = json.loads((STORED / "config.json").read_text())
    return found


def run_folder(**changed: Any) -> Path:
    """A run's folder with other settings."""
    folder = Path("run")
    shutil.copytree(STORED, folder)
    (folder / "config.json").write_text(json.dumps(stored() | changed))
    (folder / "checkpoints" / "fedavg").mkdir(parents=True)
    for name in ("checkpoints/fedavg/1.npz", "clients.png", "curves.png"):
        (folder / name).touch()
    return folder


def load(folder: Path) -> int:
    try:
        fs.load_run(folder).model  # noqa: B018
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


DOORS: dict[str, Callable[[Path], int]] = {
    "resume": lambda folder: bench.main(["--resume", str(folder)]),
    "load": load,
    "report": lambda folder: report([str(folder), "--out", "page"]),
}


def line_of(door: Callable[[Path], int], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line by which something is rejected."""
    capsys.readouterr()
    assert door(place) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


# Names


CALLABLES = (
    "os:system", "os:remove", "builtins:exec", "builtins:eval", "subprocess:run", "shutil:rmtree",
    "pickle:loads", "importlib:import_module", "functools:partial", "operator:call", "math:sqrt",
    "unittest.mock:MagicMock", "pathlib:Path", "code:interact", "runpy:run_path", "os:environ.get",
)  # fmt: skip
REGISTRIES: dict[str, Registry[Any]] = {
    "algo": ALGORITHMS, "dataset": DATASETS, "model": MODELS, "partition": SAMPLERS, "sink": SINKS
}  # fmt: skip


@pytest.mark.parametrize("text", CALLABLES)
@pytest.mark.parametrize("role", REGISTRIES)
def test_no_callable_of_the_standard_library_has_a_role(role: str, text: str, here: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a declared|must be a"):
        REGISTRIES[role].resolve(text)


@pytest.mark.parametrize("role", REGISTRIES)
def test_what_is_declared_has_its_role_and_no_other(role: str, here: Path) -> None:
    for other, values in REGISTRIES.items():
        if other == role:
            assert values.resolve(f"canary:{role}")[0] == f"canary:{role}"
        else:
            with pytest.raises(ValueError, match=r"is not a declared|must be a"):
                values.resolve(f"canary:{role}")
    assert MODELS.resolve("canary:registered")[1] is MODELS["registered"]


def named(kind: str, role: str, text: str) -> tuple[Callable[[Path], int], Path]:
    """What opens a file of some kind that has a name in some role, and the file."""
    if "study" not in kind:
        words = stored()["arguments"]
        words += [f"--{role}", text] if role in ("compare", "algo") else [f"--{role}={text}"]
        if role == "partition":
            words = [w for w in words if w != "--emd" and w != "0.9"]
        folder = run_folder(arguments=words)
        return DOORS["load" if kind == "load" else "resume"], folder
    methods = [text if role in ("algo", "compare") else "fedavg"]
    row = f"{role} = [{text!r}]" if "grid" in kind else f"{role} = {text!r}"
    table = "" if role in ("algo", "compare") else f"[{'grid' if 'grid' in kind else 'run'}]\n{row}"
    Path("study").mkdir()
    file = Path("study", "study.toml")
    file.write_text(f"methods = {methods}\n{table}\n")
    argv = {"resumed study": ["--resume", "study"], "study": [str(file), "--out", "new"]}
    return (lambda _: study.main(argv.get(kind, [str(file), "--dry-run"]))), file


KINDS = ("resume", "load", "study", "dry study", "dry study grid", "resumed study")
TEXTS = ("canary:{role}", "os:system", "antigravity:fly", "canary.sub:x")
NAMED = [
    (kind, role, text.format(role="algo" if role == "compare" else role))
    for text, role, kind in itertools.product(TEXTS, (*REGISTRIES, "compare"), KINDS)
    if not ("study" in kind and role in ("sink", "compare"))
]


@pytest.mark.parametrize(("kind", "role", "text"), sample(NAMED, 11))
def test_names_in_files_are_not_imported(
    kind: str, role: str, text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = text.partition(":")[0]
    err = line_of(*named(kind, role, text), capsys)
    assert f"add --trust {module}, or trust=[{module!r}]" in err
    assert not Path("new").exists()


def test_every_setting_is_read_with_its_names(here: Path) -> None:
    """One that names a function, but does so only when the run is built, would import it there."""
    for field, value in parse([]).record().items():
        if not isinstance(value, str | None):
            continue
        with trusting([]), suppress(ValueError):
            read = parse([f"--{field.replace('_', '-')}", "canary:model"])
            with pytest.raises((ValueError, OSError)):  # no name: a score, or a file
                build(read)


def test_trust_is_of_the_caller_and_of_whole_packages(here: Path) -> None:
    folder = run_folder(arguments=["--trust", "canary", "--model", "canary:model"])
    with pytest.raises(ValueError, match="add --trust canary"):
        fs.load_run(folder, trust=["can", "canary.sub"]).model  # noqa: B018
    run = fs.load_run(folder, trust=["canary"])
    assert run.model.init is not None


def test_a_study_takes_what_is_trusted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, file = named("dry study", "algo", "canary:algo")
    assert study.main([str(file), "--dry-run", "--trust", "canary"]) == 0
    assert "--algo canary:algo" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a = " + "[" * 99999, "a = " + "9" * 5000, "[", "\udcff"])
def test_another_study(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(text, errors="surrogateescape")
    err = line_of(lambda file: study.main([str(file), "--dry-run"]), Path("s.toml"), capsys)
    assert "s.toml: is not TOML" in err


def test_the_line_that_says_how_to_go_on_names_the_modules(here: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjax_sim.base.registry.imported", {})
        patch.setattr("fedjax_sim.cli.resuming.imported", registry.imported)
        MODELS.resolve("canary:model")
        assert to_go_on("fedjax_sim.bench", Path("a b")) == (
            "python -m fedjax_sim.bench --resume 'a b' --trust canary"
        )


# Folders


@pytest.mark.slow
def test_a_stored_folder_goes_on(here: Path) -> None:
    folder = Path("run")
    shutil.copytree(STORED, folder)
    run = fs.load_run(folder)
    assert (run.algorithms, run.model.init is not None) == (("fedprox(mu=0.1)", "fedavg"), True)
    before = (folder / "metrics.jsonl").read_text()
    assert report([str(folder), "--out", "page"]) == 0
    assert bench.main(["--resume", str(folder)]) == 0
    found = json.loads((folder / "config.json").read_text())
    newer = found.keys() - stored().keys()  # flags that the folder does not know
    assert found == stored() | {name: found[name] for name in ("arguments", "jax", *newer)}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(before.splitlines())


@pytest.mark.slow
def test_processes_leave_the_working_folder_alone(here: Path) -> None:
    """As users start them, from a stranger's folder."""
    folder = run_folder(arguments=["--dataset", "canary:dataset"])
    for argv in (["bench", "--resume", str(folder)], ["study", "--resume", str(folder)]):
        done = subprocess.run(
            [sys.executable, "-m", f"fedjax_sim.{argv[0]}", *argv[1:]],
            capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.PIPE,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert SEEN is not None
    SEEN.clear()  # these processes


# Data


def image_folder(change: Callable[[Path], None]) -> str:
    from PIL import Image

    for i, kind in enumerate("aabb"):
        Path("images", kind).mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(Path("images", kind, f"{i}.png"))
    change(Path("images"))
    return "folder:images"


def huge(folder: Path) -> None:
    """Two classes of images that claim the memory of several machines."""
    from PIL import Image

    Image.new("L", (9000, 9000)).save(folder / "a" / "0.png")
    for i in range(5000):
        os.link(folder / "a" / "0.png", folder / "b" / f"x{i}.png")


def vast(folder: Path) -> None:
    """A file of 67 bytes that claims 100,000 x 100,000 pixels."""
    from PIL import Image

    Image.new("L", (1, 1)).save(folder / "a" / "0.png")
    content = bytearray((folder / "a" / "0.png").read_bytes())
    content[16:24] = 2 * (100_000).to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (folder / "a" / "0.png").write_bytes(content)


def tfds(*changes: tuple[str, str], then: Callable[[Path], None] = lambda folder: None) -> str:
    """A TFDS folder whose files say something else."""
    feature = "tensorflow_datasets.core.features."
    features = {
        "pythonClassName": f"{feature}features_dict.FeaturesDict",
        "featuresDict": {
            "features": {
                "image": {
                    "pythonClassName": f"{feature}image_feature.Image",
                    "image": {"dtype": "uint8", "shape": {"dimensions": ["2", "2", "1"]}},
                },
                "label": {
                    "pythonClassName": f"{feature}class_label_feature.ClassLabel",
                    "classLabel": {"numClasses": "3"},
                },
            }
        },
    }
    keys = {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}}
    split = {
        "name": "train", "shardLengths": ["6"], "numBytes": "60",
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }  # fmt: skip
    info = {
        "name": "shapes", "version": "1.0.0", "fileFormat": "array_record",
        "moduleName": "canary", "supervisedKeys": keys, "splits": [split],
    }  # fmt: skip
    folder = Path("data", "shapes", "1.0.0")
    folder.mkdir(parents=True)
    for name, content in (("features", features), ("dataset_info", info)):
        text = json.dumps(content)
        for before, after in changes:
            text = text.replace(before, after)
        (folder / f"{name}.json").write_text(text)
    then(folder)
    return "tfds:shapes"


def script() -> str:
    """A folder of Hugging Face with a script."""
    folder = Path("face")
    folder.mkdir()
    (folder / "rows.csv").write_text("a,label\n" + "1,x\n2,y\n" * 5)
    (folder / "face.py").write_text("import canary")
    return "hf:face,label=label"


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def pipe(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


def piped(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(name)
    return text


IMAGE = "tensorflow_datasets.core.features.image_feature.Image"
CLASS = "features.json must name classes of TFDS"
DATA: dict[str, tuple[Callable[[], str], str]] = {
    "a class": (lambda: tfds((IMAGE, "canary.Image")), CLASS),
    "a module": (lambda: tfds((IMAGE, "canary")), CLASS),
    "a class of a class": (lambda: tfds((f'"{IMAGE}"', '"tensorflow_datasets.x.Image"')), CLASS),
    "a large set": (lambda: tfds(('"6"', '"60000000000000"')), "this machine has"),
    "large images": (lambda: tfds(('"2"', '"2000000"')), "this machine has"),
    "no features": (lambda: tfds(then=written("features.json", "[1]")), "is not ready"),
    "deep features": (lambda: tfds(then=written("features.json", "[" * 99999)), "is not ready"),
    "a script": (script, "cannot be read"),
    "a pipe of an image": (lambda: image_folder(pipe("a/x.png")), "not a regular file"),
    "large pictures": (lambda: image_folder(huge), "this machine has"),
    "a picture of 10^10 pixels": (lambda: image_folder(vast), "that Pillow reads"),
    "no image": (lambda: image_folder(written("a/x.png", "\x89PNG")), "that Pillow reads"),
    "a pipe of a table": (lambda: piped("x.csv", "csv:x.csv,label=a"), "there is no file"),
    "a pipe of arrays": (lambda: piped("x.npz", "x.npz"), "there is no file"),
    "a pipe of LEAF": (lambda: piped("l/train/x.json", "leaf:l"), "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("case", sample(((name,) for name in DATA), 7))
def test_data_are_read_as_data(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, wanted = DATA[case]
    text = make()
    argv = ["--dataset", text, "--data-dir", "data", "--rounds", "1"]
    assert wanted in line_of(lambda _: bench.main(argv), here, capsys)


def test_a_pipe_or_a_long_field_is_no_trace(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("x.csv")
    argv = ["--clock", "x.csv", "--rounds", "1", "--dry-run"]
    assert "not a regular file" in line_of(lambda _: bench.main(argv), here, capsys)
    Path("y.csv").write_text("client,up\n0," + "1" * 200_000)
    argv[1] = "y.csv"
    assert "y.csv must be csv" in line_of(lambda _: bench.main(argv), here, capsys)


@pytest.mark.parametrize("flags", [["--dry-run"], ["--resume", "run"]])
@pytest.mark.parametrize("name", ["mnist", "hf:nobody/pets"])
def test_only_a_new_run_downloads(
    flags: list[str],
    name: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FEDJAX_SIM_DATA_DIR", raising=False)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(here / "tfds"))
    if "--resume" in flags:
        run_folder(arguments=["--dataset", name])
    else:
        flags = [*flags, "--dataset", name]
    err = line_of(lambda _: bench.main(flags), here, capsys)
    assert "is not ready" in err or "cannot be loaded" in err
