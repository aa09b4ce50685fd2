"""Pictures: what they show, in which colours, and that a file is what its name says."""

import ast
import importlib.util
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import known

import fedjax_sim
import fedjax_sim as fs
from fedjax_sim.base import Metric
from fedjax_sim.cli import partitioning, running
from fedjax_sim.cli import report as run_report
from fedjax_sim.cli.build import build
from fedjax_sim.cli.curves import Curve, draw_curves, draw_series
from fedjax_sim.cli.parser import parse
from fedjax_sim.partition import draw_partition, draw_skew
from fedjax_sim.partition.pictures import COLOURS, line_style, literal, picture
from fedjax_sim.run import Result


def fake_result(scores: np.ndarray, own: np.ndarray | None = None) -> Result:
    """As much of a run as its picture shows: ``[T, R]`` scores, a byte up and down in a round."""

    def series(metric: str, *, by_client: bool, part: str) -> np.ndarray:
        return (scores if part == "test" else known(own)).copy()

    evaluations = [
        SimpleNamespace(
            round=t + 1,
            bytes_up=np.full(scores.shape[1], t + 1.0),
            bytes_down=np.full(scores.shape[1], t + 1.0),
            test=SimpleNamespace(by_client=None),
            personal=own,
            seconds=None,
        )
        for t in range(len(scores))
    ]
    return cast(
        Result,
        SimpleNamespace(
            evaluations=evaluations,
            series=series,
            task=fs.tasks.classification(2),
        ),
    )


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are written, to look at."""
    from matplotlib.figure import Figure

    written, savefig = [], Figure.savefig

    def spy(self: Figure, *args: Any, **kwargs: Any) -> None:
        written.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return written


def is_what_its_name_says(path: Path) -> bool:
    content, kind = path.read_bytes(), path.suffix.lower()
    if kind == ".svg":
        return xml.etree.ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
    return content.startswith({".png": b"\x89PNG", ".pdf": b"%PDF-"}[kind])


@pytest.mark.parametrize("name", ["p.png", "p.pdf", "p.svg", "p.PDF"])
def test_a_picture_is_what_its_name_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / name
    contents = []
    for _ in range(2):
        with picture(path, 2, 1, "title") as figure:
            figure.subplots().plot([1, 2], clip_on=True)
        assert is_what_its_name_says(path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]  # no date, no random names
    assert b"/Type3" not in contents[0]  # fonts that publishers refuse
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("name", ["p.jpg", "p", "p.pdf.gz"])
def test_a_picture_of_no_known_format_is_refused(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"path must end in one of \.png, \.pdf, \.svg, got .*p"),
        picture(tmp_path / "new" / name, 2, 1),
    ):
        raise AssertionError("nothing is drawn")
    assert not [*tmp_path.iterdir()]


def test_a_picture_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), picture(tmp_path / "p.png", 2, 1):
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]


def test_no_two_of_twenty_lines_look_alike() -> None:
    assert len({(look["color"], look["linestyle"]) for look in map(line_style, range(20))}) == 20
    # In grey print, neighbours differ by their dashes.
    assert all(line_style(i)["linestyle"] != line_style(i + 1)["linestyle"] for i in range(20))


def test_curves_say_what_they_are_of(tmp_path: Path, figures: list[Any]) -> None:
    scores = np.array([[0.5, 0.7], [0.6, 0.8]])
    names = ["radfed", "mine:_f", "cost_$a$", "_hidden"]
    draw_curves({n: fake_result(scores) for n in names}, tmp_path / "p.svg", "f1", "digits, iid")
    assert is_what_its_name_says(tmp_path / "p.svg")
    (figure,) = figures
    assert figure.get_suptitle() == "digits, iid"
    left, right = figure.axes
    np.testing.assert_allclose(left.lines[0].get_xydata(), [[1, 60], [2, 70]])
    np.testing.assert_allclose(right.lines[0].get_xydata(), [[2, 60], [4, 70]])
    assert (left.get_xlabel(), right.get_xlabel()) == ("rounds", "B sent, up and down")
    assert left.get_ylabel() == "test f1 (%),\nmean ± std of 2 runs"
    assert [line.get_color() for line in left.lines] == list(COLOURS[:4])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "radfed: 70.0 %, 4 B",
        "mine:_f: 70.0 %, 4 B",
        r"cost_\$a\$: 70.0 %, 4 B",
        "'_hidden': 70.0 %, 4 B",
    ]


def test_the_unit_of_the_axis_is_that_of_the_most_bytes(tmp_path: Path, figures: list[Any]) -> None:
    few, many = (
        Curve(name, [1], np.array([sent]), np.array([[0.5]]))
        for name, sent in (("few", 336.0), ("many", 95_000.0))
    )
    draw_series([few, many], tmp_path / "p.png", "accuracy", Metric(percent=True))
    right = figures[0].axes[1]
    assert right.get_xlabel() == "kB sent, up and down"
    assert right.lines[1].get_xdata().tolist() == [95.0]
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["few: 50.0 %, 336 B", "many: 50.0 %, 95,000 B"]


def test_curves_leave_out_runs_whose_score_is_not_known(tmp_path: Path, figures: list[Any]) -> None:
    scores = np.array([[np.nan, np.nan], [0.6, np.nan], [0.6, 0.8]])
    draw_curves({"a": fake_result(scores)}, tmp_path / "p.png", "auc")
    left = figures[0].axes[0]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [np.nan, 60, 70])
    heights = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((60, 80))


def test_own_models_are_drawn_where_clients_have_them(tmp_path: Path, figures: list[Any]) -> None:
    scores = np.array([[0.2], [0.3]])
    results = {"fedavg": fake_result(scores), "fedper": fake_result(scores, own=2 * scores)}
    draw_curves(results, tmp_path / "p.png", "accuracy")
    all_, own = figures[0].axes[0].lines
    np.testing.assert_allclose((all_.get_ydata(), own.get_ydata()), [[20, 30], [40, 60]])
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "fedavg: 30.0 %, 4 B",
        "fedper, own models: 60.0 %, 4 B",
    ]


def test_curves_are_drawn_against_what_all_of_them_have(tmp_path: Path, figures: list[Any]) -> None:
    scores = np.array([[0.1, 0.3], [0.4, 0.6], [np.nan, np.nan]])
    sent, samples = np.array([1e6, 2e6, 3e6]), np.array([10.0, 20, 30])
    lost = Curve("a", [1, 2, 3], sent, scores, {"samples": samples}, "diverged at round 3")
    for curves in ([lost, replace(lost, across={})], [lost]):
        draw_series(curves, tmp_path / "p.svg", "client_f1", fs.tasks.Metric(percent=True))
    two, three = figures
    assert (len(two.axes), len(three.axes)) == (2, 3)
    rounds = np.array([1.0, 2, 3])
    for axis, x in zip(three.axes, (rounds, rounds, samples), strict=True):
        (line,) = axis.lines
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), [20, 50, np.nan])  # the line ends there
    assert three.axes[2].get_xlabel() == "samples"
    assert three.axes[0].get_ylabel().startswith("test f1 (%), mean over clients")
    (legend,) = three.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a: diverged at round 3"]


def test_names_are_taken_literally() -> None:
    assert literal("a $x$ b") == r"a \$x\$ b"
    assert [literal(name) for name in ("ok", " ", "\n", "", "_a")] == [
        "ok", "' '", r"'\n'", "''", "'_a'"
    ]  # fmt: skip


def test_without_the_module_resource_no_peak_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is none: the report imports, and says "-" and null."""
    assert 1 < (run_report.peak_memory_mb() or 0) < 1e6
    monkeypatch.setitem(sys.modules, "resource", None)
    spec = importlib.util.spec_from_file_location("report_on_windows", run_report.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert run_report.peak_memory_mb() is None
    numbers: dict[str, Any] = {"score": "accuracy", "score_last_per_run": [0], "accuracy_last": 0,
        "bytes_up": 1, "bytes_down": 1, "traffic_ratio": 1, "rounds": 1, "samples_per_second": 1,
        "compile_seconds": 0, "run_seconds": 0, "utilisation": 1, "xla_programs": 1}  # fmt: skip
    known = numbers | {"peak_memory_mb": 1234.0}
    unknown = numbers | {"peak_memory_mb": None}
    rows = run_report.table({"a": known, "b": unknown}).splitlines()[-2:]
    assert [row.split()[-1] for row in rows] == ["1,234", "-"]


POSIX = {"resource", "fcntl", "termios", "tty", "pty", "pwd", "grp", "posix", "syslog"}


def test_no_module_needs_posix_to_be_imported() -> None:
    root = Path(fedjax_sim.__file__).parent
    found = [
        (str(path.relative_to(root)), name)
        for path in root.rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom)
            else []
        )
        if name in POSIX
    ]  # fmt: skip
    assert found == []


def skewed(clients: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(classes, 0.3), clients)
    return np.array([rng.multinomial(rng.integers(9, 99), share) for share in shares])


def is_heat_map(figure: Any) -> bool:
    return bool(figure.axes[0].images)


def test_bars_are_the_table(tmp_path: Path, figures: list[Any]) -> None:
    from matplotlib.colors import to_rgba

    tables = [skewed(7), skewed(5, seed=1)]
    draw_partition(tables, tmp_path / "p.pdf", ["a", "b"])
    assert is_what_its_name_says(tmp_path / "p.pdf")
    (figure,) = figures
    for axis, table in zip(figure.axes, tables, strict=True):
        found = np.zeros_like(table)
        ends = np.zeros(len(table))
        assert not axis.patches  # one collection of a class, not one patch of a class and client
        assert len(axis.collections) == 10
        for label, collection in enumerate(axis.collections):
            assert collection.get_facecolor()[0] == pytest.approx(to_rgba(COLOURS[label]))
            for path in collection.get_paths():
                (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                client = round((top + bottom) / 2)
                assert left == ends[client]  # each begins where the last one ended
                ends[client], found[client, label] = right, right - left
        np.testing.assert_array_equal(found, table)
        assert axis.get_xlim()[1] >= max(t.sum(axis=1).max() for t in tables)


@pytest.mark.parametrize(
    ("clients", "classes", "heat"),
    [(200, 10, False), (201, 10, True), (5, 11, True), (500, 1, False)],
)
def test_many_clients_or_classes_make_a_heat_map(
    clients: int, classes: int, heat: bool, tmp_path: Path, figures: list[Any]
) -> None:
    draw_partition([skewed(clients, classes), skewed(3, classes)], tmp_path / "p.png", ["a", "b"])
    assert is_heat_map(figures[0]) == heat


def test_without_classes_sizes_are_drawn(tmp_path: Path, figures: list[Any]) -> None:
    tables = [skewed(501, 1), skewed(30, 1, seed=1)]
    draw_partition(tables, tmp_path / "p.png", ["a", "b"])
    draw_skew(tables, tmp_path / "s.png", ["a", "b"])
    sizes, skew = figures
    assert not is_heat_map(sizes)
    assert len(skew.axes) == 1
    assert skew.axes[0].get_ylabel() == "samples / even part"


def test_a_heat_map_is_the_shares(tmp_path: Path, figures: list[Any]) -> None:
    tables = [skewed(300), skewed(4, seed=1)]
    draw_partition(tables, tmp_path / "p.svg", ["a", "b"])
    (figure,) = figures
    scales = set()
    for heat, beside, table in zip(figure.axes[0:4:2], figure.axes[1:4:2], tables, strict=True):
        (image,) = heat.images
        drawn, sizes = np.asarray(image.get_array()), table.sum(axis=1)
        # Clients of one largest class stand together, the purest first.
        largest, purity = drawn.argmax(axis=1), drawn.max(axis=1)
        assert np.all(np.diff(largest) >= 0)
        assert np.all(np.diff(purity)[np.diff(largest) == 0] <= 0)
        rows = {tuple(row) for row in table / sizes[:, None]}
        assert {tuple(row) for row in drawn} == rows
        scales.add(image.get_clim())
        assert image.get_extent() == [-0.5, 9.5, len(table), 0]
        (area,) = beside.collections
        assert set(area.get_paths()[0].vertices[:, 0]) == {0, *sizes}
        assert beside.get_xlabel() == "$n_k$"
    assert scales == {(0, max((t / t.sum(axis=1)[:, None]).max() for t in tables))}
    assert len({axis.get_xlim() for axis in figure.axes[1:4:2]}) == 1


def test_titles_and_names_of_classes_are_written(tmp_path: Path, figures: list[Any]) -> None:
    names = ["cat", "dog", "$5"]
    for clients in (4, 201):
        draw_partition(
            [skewed(clients, 3)], tmp_path / "p.png", ["seed 0"], title="pets, iid", classes=names
        )
    bars, heat = figures
    drawn = [literal(name) for name in names]
    assert [text.get_text() for text in bars.legends[0].get_texts()] == drawn
    assert [text.get_text() for text in heat.axes[0].get_xticklabels()] == drawn
    for figure in figures:
        assert figure.get_suptitle() == "pets, iid"
        assert figure.axes[0].get_title().startswith("seed 0\nEMD 0.")
    with pytest.raises(ValueError, match="classes must be 3 names, got 2"):
        draw_partition([skewed(4, 3)], tmp_path / "p.png", ["a"], classes=names[:2])
    draw_skew([skewed(4)], tmp_path / "p.svg", ["a"], title="pets, iid")
    assert is_what_its_name_says(tmp_path / "p.svg")
    assert figures[-1].get_suptitle() == "pets, iid"


def test_the_partition_command_draws_what_is_asked_for(
    tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--sampler", "dirichlet(0.5)", "--clients", "9", "--pictures", "pdf"]
    assert partitioning.command([*argv, "--out", str(tmp_path / "run")]) == 0
    assert all(is_what_its_name_says(tmp_path / "run" / f"{n}.pdf") for n in ("clients", "skew"))
    assert not [*(tmp_path / "run").glob("*.png")]
    assert {f.get_suptitle() for f in figures} == {"digits, dirichlet(0.5), 9 clients"}
    assert partitioning.command([*argv[:-1], "jpg"]) == 2
    assert "must be one of png, pdf, svg, got 'jpg'" in capsys.readouterr().err


def test_the_run_draws_what_is_asked_for(tmp_path: Path, figures: list[Any]) -> None:
    argv = ["--algo", "fedavg", "--compare", "none", "--clients", "10", "--seeds", "1"]
    config = parse([*argv, "--pictures", "svg", "--out", str(tmp_path / "run")])
    setup = build(config)
    folder = running.open_folder(setup, "")
    running.draw_clients(setup, folder.picture("clients"))
    folder.draw_results({}, {"a": fake_result(np.ones((2, 1)))}, "accuracy", "t")
    for name in ("clients", "curves"):
        assert is_what_its_name_says(tmp_path / "run" / f"{name}.svg")
    assert [f.get_suptitle() for f in figures] == ["digits, emd(1.4), 10 clients", "t"]
    folder.close()  # it has no record
    assert not [*tmp_path.iterdir()]
