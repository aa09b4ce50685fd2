"""`python -m fedjax_sim.report`: its numbers, its files, and what it says to bad input."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import known
from matplotlib.colors import to_hex
from scipy import stats

from fedjax_sim import bench
from fedjax_sim.cli.reporting import contents, pictures
from fedjax_sim.cli.reporting.command import main
from fedjax_sim.cli.reporting.compare import (
    best_settings,
    decisive,
    difference,
    grouped,
    over_runs,
    worst_tenth,
)
from fedjax_sim.cli.reporting.read import read_folders
from fedjax_sim.cli.reporting.tables import scores, targets
from fedjax_sim.partition.pictures import line_style

FILES = {"report.html", "report.md", "table.csv", "table.tex",
         "curves.svg", "curves.pdf", "clients.svg", "clients.pdf", "partition_1.png"}  # fmt: skip
HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(1)>&amp; $x_1$ %_{|}~^\\#"""
VOID = {"meta", "img", "br", "link", "input", "hr"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command."""
    folder = tmp_path_factory.mktemp("report") / "real"
    flags = "--algo fedavg --compare scaffold --rounds 2 --clients 12 --seeds 3 --model logistic"
    others = ["--emd", "1.2", "--no-cache", "--no-checkpoints", "--devices", "1"]
    others += ["--out", str(folder)]
    assert bench.main([*flags.split(), *others]) == 0
    return folder


@pytest.fixture(scope="module")
def reported(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its report."""
    out = tmp_path_factory.mktemp("reported") / "new" / "out"
    assert main([str(real), "--out", str(out)]) == 0
    return out


Scores = Mapping[str, Sequence[Sequence[float | None]]]


@pytest.fixture
def make(real: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder as the command would, of scores that are given."""

    def write(
        name: str,
        scores: Scores,
        *,
        validation: Scores | None = None,
        own: Mapping[str, Mapping[str, Any]] | None = None,
        summary: Mapping[str, Mapping[str, Any]] | None = None,
        folds: int = 1,
        **settings: Any,
    ) -> Path:
        """``scores`` are ``[T][R]`` by method; None is a loss that is not finite."""
        folder = tmp_path / name
        folder.mkdir(parents=True)
        algo, *compare = scores
        runs = len(scores[algo][0])
        seeds = [*range(runs // folds)]
        config = json.loads((real / "config.json").read_text())
        config |= {"algo": algo, "compare": compare, "options": {n: {} for n in scores}}
        config |= {"seeds": seeds, "partition_hashes": [f"{seed:064x}" for seed in seeds]}
        config |= {"partitions": ["emd(1.2)"] * len(seeds)}
        if validation is not None:
            config |= {"split": "clients", "folds": folds}
        config |= settings
        for method, given in (own or {}).items():
            config["options"][method] = dict(given)
        rows, told = [], dict[str, Any]()
        for method, series in scores.items():
            for t, at in enumerate(series, 1):
                for r, value in enumerate(at):
                    row = {
                        "algorithm": method,
                        "seed": seeds[r // folds],
                        **({"fold": r % folds} if folds > 1 else {}),
                        "round": t,
                        "accuracy": value,
                        "client_accuracy": {"mean": value},
                        "test_loss": None if value is None else 1.0,
                        "bytes_up": 1000 * t,
                        "bytes_down": 2000 * t,
                        "samples": 100 * t,
                    }
                    if validation is not None:
                        row["validation"] = {
                            "client_accuracy": {"mean": validation[method][t - 1][r]}
                        }
                    rows.append(row)
            headline = "accuracy" if config["split"] == "official" else "client_accuracy"
            told[method] = {"score": headline, "rounds": len(series), "traffic_ratio": 1.0}
            told[method] |= (summary or {}).get(method, {})
        told |= {"versions": {"jax": "1"}, "devices": ["cpu"], "command": ""}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text(json.dumps(told))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def rows_of(out: Path) -> dict[str, dict[str, str]]:
    with (out / "table.csv").open(newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Page(HTMLParser):
    """What a page has; its elements must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_table_is_that_counted_by_hand(real: Path, reported: Path) -> None:
    found = rows_of(reported)
    records, clients = lines(real / "metrics.jsonl"), lines(real / "clients.jsonl")
    assert [*found] == ["fedavg", "scaffold"]
    last = {n: [r for r in records if (r["algorithm"], r["round"]) == (n, 2)] for n in found}
    for name, row in found.items():
        scores = [r["accuracy"] for r in last[name]]
        assert [r["seed"] for r in last[name]] == [0, 1, 2]
        assert float(row["final_mean"]) == pytest.approx(np.mean(scores), abs=1e-12)
        assert float(row["final_std"]) == pytest.approx(np.std(scores), abs=1e-12)
        for column in ("bytes_up", "bytes_down", "samples"):
            assert float(row[column]) == np.mean([r[column] for r in last[name]])
        tenths = [
            np.mean(sorted(r["client_accuracy"])[:2]) for r in clients if r["algorithm"] == name
        ]  # of 12 clients, rounded up
        assert float(row["worst_tenth_mean"]) == pytest.approx(np.mean(tenths))
        assert float(row["worst_tenth_std"]) == pytest.approx(np.std(tenths))
        assert (row["runs"], row["rounds"], row["validated_mean"]) == ("3", "2", "")
    ours, theirs = ([r["accuracy"] for r in last[name]] for name in ("scaffold", "fedavg"))
    row, gains = found["scaffold"], np.subtract(ours, theirs)
    assert (row["baseline"], row["pairs"]) == ("fedavg", "3")
    assert float(row["difference_mean"]) == pytest.approx(gains.mean())
    assert float(row["difference_std"]) == pytest.approx(gains.std())
    assert float(row["p"]) == pytest.approx(stats.wilcoxon(gains[gains != 0]).pvalue)
    assert float(row["least_p"]) == 2.0 ** (1 - np.count_nonzero(gains))


def test_all_files_are_there_and_nothing_else(reported: Path) -> None:
    assert {path.name for path in reported.iterdir()} == FILES
    assert [*reported.parent.iterdir()] == [reported]
    for path in reported.glob("*.pdf"):
        assert path.read_bytes().startswith(b"%PDF-")


def test_the_page_is_well_formed_and_needs_nothing_else(real: Path, reported: Path) -> None:
    page = Page(reported / "report.html")
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "base", "metadata"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "srcset", "data"} and tag != "a":
                assert known(value).startswith(("data:image/png;base64,", "data:image/svg+xml;"))
    assert "@import" not in page.text
    assert "prefers-color-scheme: dark" in page.text
    pictures = [image["alt"] for image in page.all("img")]
    assert len(pictures) == 3
    assert pictures[-1] == "Clients and their samples, of real"
    config = json.loads((real / "config.json").read_text())
    for told in (
        shlex.join(config["arguments"]),
        *config["partition_hashes"],
        "digits, emd(1.2), 12 clients",
    ):
        assert told in page.text


def test_markdown_has_the_same_tables(reported: Path) -> None:
    text, row = (reported / "report.md").read_text(), rows_of(reported)["fedavg"]
    mean, std = (100 * float(row[f"final_{name}"]) for name in ("mean", "std"))
    assert f"{mean:.2f} ± {std:.2f}" in text
    assert "![" in text
    assert "](curves.svg)" in text
    assert "Fewer than 6 pairs that differ cannot reach p = 0.05:" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def check_latex(text: str) -> list[str]:
    """The rows of a table, which must be whole."""
    head, *lines = text.splitlines()
    assert head == r"% \usepackage{booktabs}"
    note = [line for line in lines if line.startswith("% ")]
    body = lines[len(note) :]
    assert note
    assert max(map(len, note)) <= 100
    columns = len(known(re.fullmatch(r"\\begin\{tabular\}\{(lr+)\}", body[0]))[1])
    assert (body[1], body[-2], body[-1]) == (r"\toprule", r"\bottomrule", r"\end{tabular}")
    rows = [line for line in body[2:-2] if line != r"\midrule"]
    for row in rows:
        assert row.endswith(r" \\")
        bare = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum|text\w+)\{\}", "", row[:-3])
        bare = re.sub(r"\\[&%$#_{}]", "", bare)
        bare = re.sub(r"\$(\\pm|-|\^\{\\dagger\})\$", "", bare)
        assert bare.count("{") == bare.count("}")
        assert not re.search(r"[%$#_~^<>|]", bare)
        if "multicolumn" not in bare:
            assert bare.count("&") == columns - 1
    return rows


@pytest.mark.usefixtures("undrawn")
def test_latex_is_a_table_of_booktabs_with_the_best_in_bold(make: Callable[..., Path]) -> None:
    better = {"fedavg": [[0.5, 0.6]], "scaffold": [[0.7, 0.8]]}
    run = make("run", better)
    assert main([str(run)]) == 0
    head, fedavg, scaffold = check_latex((run / "report" / "table.tex").read_text())
    assert head.startswith(r"method & runs & final \% & difference & p & rounds & ")
    assert fedavg.startswith(r"fedavg & 2 & 55.00 $\pm$ 5.00 & - & - & 1 & 1.0 & 2.0 & ")
    assert scaffold.startswith(
        r"scaffold & 2 & \textbf{75.00 $\pm$ 5.00} & +20.00 $\pm$ 0.00 & 0.5"
    )


def test_folds_are_not_independent(make: Callable[..., Path]) -> None:
    """Of five folds three train for one that is scored; all pairs equal have no p."""
    theirs = np.linspace(0.2, 0.6, 10)
    gains = np.array([0.05, 0.02, 0.03, -0.01, 0.04, 0.02, 0.01, 0.03, 0.02, 0.04])
    scores = {"a": [theirs.tolist()], "b": [(theirs + gains).tolist()], "c": [theirs.tolist()]}
    (group,) = grouped(read_folders([make("run", scores, folds=5)]).trials, None)
    _, b, c = (difference(t, known(group.baseline), "final") for t in group.trials)
    t = stats.ttest_1samp(gains, 0).statistic / np.sqrt(1 + 10 / 3)
    assert known(b.p) == pytest.approx(2 * stats.t.sf(t, 9))
    assert (b.least, c.p, c.equal) == (None, None, 10)


def test_equal_pairs_do_not_count(make: Callable[..., Path]) -> None:
    # 0.3 - 0.2 and 0.7 - 0.6 differ in the last bit: they are one rank.
    run = make(
        "run",
        {"a": [[0.2, 0.6, 0.5, 0.1]], "b": [[0.3, 0.7, 0.5, 0.0]], "c": [[0.2, 0.6, 0.5, 0.1]]},
    )
    (group,) = grouped(read_folders([run]).trials, None)
    _, b, c = (difference(t, known(group.baseline), "final") for t in group.trials)
    assert (len(b.values), b.equal, b.least) == (4, 1, 0.25)
    exact = stats.wilcoxon([1, 1, -1], method=stats.PermutationMethod()).pvalue
    assert known(b.p) == pytest.approx(exact)
    assert (c.equal, c.p) == (4, None)


def test_pairs_are_of_the_same_seed_fold_and_partition(make: Callable[..., Path]) -> None:
    ours = make("ours", {"a": [[0.1, 0.2, 0.3]]})
    more = make("more", {"b": [[0.4, 0.5, 0.6, 0.7]]})
    other = make("other", {"c": [[0.9, 0.9]]}, partition_hashes=["f" * 64, f"{1:064x}"])
    apart = make("apart", {"d": [[0.9]]}, dataset="mnist")
    first, second = grouped(read_folders([ours, more, other, apart]).trials, "a")
    a, b, c = first.trials
    np.testing.assert_allclose(difference(b, a, "final").values, [0.3, 0.3, 0.3])
    np.testing.assert_allclose(difference(c, a, "final").values, [0.9 - 0.2])
    assert (second.labels, second.baseline) == (("d",), None)


def test_the_round_is_chosen_on_the_validation_set_alone(make: Callable[..., Path]) -> None:
    test = {"a": [[0.9, 0.1], [0.4, 0.5], [0.6, 0.9]], "b": [[0.2, 0.2]] * 3}
    held = {"a": [[0.1, 0.1], [0.8, 0.7], [0.8, None]], "b": [[0.2, 0.2]] * 3}
    run = make("run", test, validation=held, folds=2)
    (group,) = grouped(read_folders([run]).trials, None)
    a = group.trials[0]
    assert decisive(group.trials) == "validated"
    assert known(over_runs(a, "validated")).values.tolist() == [0.4, 0.5]  # the first of equals
    assert known(over_runs(a, "validation")).values.tolist() == [0.8, 0.7]
    assert known(over_runs(a, "final")).values.tolist() == [0.6, 0.9]
    without = make("without", test)
    (group,) = grouped(read_folders([without]).trials, None)
    assert decisive(group.trials) == "final"
    assert over_runs(group.trials[0], "validated") is None


@pytest.mark.parametrize("best", ["highest", "lowest"])
def test_settings_are_tuned_on_the_validation_set_alone(
    best: str, make: Callable[..., Path]
) -> None:
    test = {"p(mu=1)": [[0.1, 0.1]], "p(mu=2)": [[0.9, 0.9]], "a": [[0.5, 0.5]]}
    held = {"p(mu=1)": [[0.8, 0.7]], "p(mu=2)": [[0.2, 0.3]], "a": [[0.5, 0.5]]}
    metric = {"best": best, "percent": best == "highest"}
    run = make("run", test, validation=held, folds=2, metric=metric)
    (group,) = grouped(read_folders([run]).trials, "a")
    chosen = known(best_settings(group))
    assert chosen.baseline is chosen.trials[1]
    assert [trial.algorithm for trial in chosen.trials] == [
        "p(mu=1)" if best == "highest" else "p(mu=2)",
        "a",
    ]
    (group,) = grouped(read_folders([make("without", test)]).trials, "a")
    assert best_settings(group) is None


@pytest.mark.usefixtures("undrawn")
def test_a_tuned_method_may_be_the_baseline(make: Callable[..., Path]) -> None:
    test = {"a": [[0.5, 0.5]], "p(mu=1)": [[0.6, 0.6]], "p(mu=2)": [[0.9, 0.9]]}
    held = {"a": [[0.5, 0.5]], "p(mu=1)": [[0.8, 0.7]], "p(mu=2)": [[0.2, 0.3]]}
    run = make("run", test, validation=held, folds=2)
    assert main([str(run), "--baseline", "p"]) == 0
    found = rows_of(run / "report")
    assert [row["tuned"] for row in found.values()] == ["True", "True", "False"]
    assert {row["baseline"] for row in found.values()} == {"p(mu=1)"}
    assert float(found["a"]["difference_mean"]) == pytest.approx(-0.1)
    a, p = check_latex((run / "report" / "table.tex").read_text())[1:]
    assert (a[:3], p[:9]) == ("a &", "p(mu=1) &")
    text = (run / "report" / "report.md").read_text()
    assert "(tried: 1 for a, 2 for p)." in text
    assert text.index("### Differences") < text.index("### All settings") < text.index("p(mu=2)")


@pytest.mark.usefixtures("undrawn")
def test_a_tuned_table_has_the_methods_that_diverged_and_its_title(
    make: Callable[..., Path],
) -> None:
    test = {"p(mu=1)": [[0.6, 0.6]], "p(mu=2)": [[0.9, 0.9]], "d": []}
    why = {"d": {"diverged": "the loss became nan in round 1 (seed 0)"}}
    run = make("run", test, validation={**test}, folds=2, summary=why)
    other = make("other", {"a": [[0.5, 0.5]]}, dataset="mnist")  # a table with other columns
    assert main([str(run), str(other)]) == 0
    tex = (run / "report" / "table.tex").read_text()
    assert re.search(r"^d & 2 & diverged at round 1 & ", tex, re.M)
    assert len(re.findall(r"^\\multicolumn\{\d+\}\{l\}\{\\emph\{(digits|mnist), ", tex, re.M)) == 2


def test_the_worst_tenth_is_the_highest_if_the_lowest_is_best(make: Callable[..., Path]) -> None:
    run = make("run", {"a": [[0.5]]}, metric={"best": "lowest", "percent": False})
    values = [*np.linspace(0, 1, 21), None]
    row = {"algorithm": "a", "seed": 0, "round": 1, "client_accuracy": values}
    (run / "clients.jsonl").write_text(json.dumps(row))
    (trial,) = read_folders([run]).trials
    assert known(worst_tenth(trial)).mean == pytest.approx(np.mean([1, 0.95, 0.9]))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are drawn; nothing is written."""
    from matplotlib.figure import Figure

    drawn: list[Any] = []

    @contextmanager
    def picture(path: Path, width: float, height: float, title: str) -> Iterator[Any]:
        drawn.append(Figure(figsize=(width, height), layout="constrained"))
        yield drawn[-1]

    monkeypatch.setattr(pictures, "picture", picture)
    return drawn


def test_a_diagram_of_ranks_shows_them(figures: list[Any], tmp_path: Path) -> None:
    """Each method at its rank in its colour; bars join those that are closer than the distance."""
    averages = {"c": 3.5, "a": 1.2, "b": 2.0, "d": 3.9}
    styles = {name: line_style(i) for i, name in enumerate(averages)}
    pictures.draw_ranks(averages, 1.0, tmp_path / "p.svg", "t", styles)
    (axis,) = figures[0].axes
    drawn = {
        line.get_color(): line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) > 2
    }
    assert drawn == {styles[name]["color"]: rank for name, rank in averages.items()}
    bars = [line.get_xdata() for line in axis.lines if line.get_linewidth() == 2.4]
    np.testing.assert_allclose(bars, [[1.15, 2.05], [3.45, 3.95]])
    texts = [text.get_text() for text in axis.texts]
    assert texts[4:] == ["critical difference 1.00", "a (1.20)", "b (2.00)", "c (3.50)", "d (3.90)"]


def test_histograms_are_of_all_clients_of_all_runs(
    make: Callable[..., Path], figures: list[Any]
) -> None:
    run = make("run", {"a": [[0.5, 0.5]], "b": [[0.5, 0.5]]})
    values = {("a", 0): [0.0, 0.5, None], ("a", 1): [0.5, 1.0], ("b", 0): [1], ("b", 1): [1]}
    rows = [
        {"algorithm": name, "seed": seed, "client_accuracy": of}
        for (name, seed), of in values.items()
    ]
    (run / "clients.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (group,) = grouped(read_folders([run]).trials, None)
    shown = [*zip(group.labels, group.trials, strict=True)]
    styles = {"a": line_style(1), "b": line_style(4)}
    pictures.draw_histograms(shown, run / "p.svg", "t", styles)
    a, b = figures[0].axes
    colours = [to_hex(axis.patches[0].get_facecolor()) for axis in (a, b)]
    assert colours == [style["color"] for style in styles.values()]
    assert a.get_xlim() == b.get_xlim()
    heights = [[bar.get_height() for bar in axis.patches] for axis in (a, b)]
    assert (heights[0][0], heights[0][10], heights[0][-1]) == (0.25, 0.5, 0.25)
    assert (sum(heights[0]), heights[1][-1]) == (1, 1)
    (worst,) = a.lines
    assert worst.get_xdata()[0] == pytest.approx(25)  # of 0 and 50 %, the worst of each run
    assert [axis.get_title() for axis in (a, b)] == ["a", "b"]


def test_a_long_curve_keeps_its_ends(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "draw_series", lambda curves, *_: drawn.extend(curves))
    run = make("run", {"a": [[t / 2000] for t in range(1201)], "b": [[0.5]]})
    (group,) = grouped(read_folders([run]).trials, None)
    pictures.draw_curves(group, tmp_path, "", "title")
    a, b = drawn[:2]
    assert (len(a.rounds), a.rounds[0], a.rounds[-1]) == (pictures.POINTS, 1, 1201)
    np.testing.assert_allclose(a.scores[:, 0], (np.array(a.rounds) - 1) / 2000)
    np.testing.assert_allclose(a.sent, 3000 * np.array(a.rounds))
    np.testing.assert_allclose(a.across["training samples visited"], 100 * np.array(a.rounds))
    assert b.rounds == [1]


def test_what_diverged_has_no_number(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {"a": [[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]], "b": [[0.4, 0.4], [0.5, None], [0.6, None]],
            "c": [[0.4, 0.4]], "d": []}  # fmt: skip
    why = "the loss became nan in round {} (seed 0): lower the learning rate"
    told = {"c": {"diverged": why.format(2)}, "d": {"diverged": why.format(1)}}
    run = make("run", lost, summary=told)
    assert main([str(run)]) == 0
    found = rows_of(run / "report")
    assert [found[name]["diverged_round"] for name in "abcd"] == ["", "2", "2", "1"]
    assert [found[name]["final_mean"] == "" for name in "abcd"] == [False, True, True, True]
    text = (run / "report" / "report.md").read_text()
    assert "| b | 2 | diverged at round 2 (1 of 2 runs) |" in text
    assert "| c | 2 | diverged at round 2 |" in text
    assert "| d | 2 | diverged at round 1 |" in text
    check_latex((run / "report" / "table.tex").read_text())
    for name in ("report.md", "report.html", "table.tex", "table.csv"):
        assert not re.search(r"\bnan\b|\binf\b", (run / "report" / name).read_text(), re.I)
    # All of it, and as the baseline.
    draw_nothing(monkeypatch)
    assert main([str(run), "--baseline", "d"]) == 0
    text = (run / "report" / "report.md").read_text()
    assert "| a | 0 | - | baseline diverged at round 1 | - | - |" in text
    one = {"seeds": [0], "partitions": ["iid"], "partition_hashes": ["0"]}
    gone = make("gone", {"d": [[]]}, summary=told, **one)
    assert main([str(gone)]) == 0
    assert "diverged at round 1" in (gone / "report" / "report.md").read_text()


def test_a_score_that_is_not_known_is_no_number(make: Callable[..., Path]) -> None:
    run = make("run", {"a": [[0.5, 0.7]]})
    rows = lines(run / "metrics.jsonl")
    rows[0]["accuracy"] = None  # its loss is finite
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([str(run)]) == 0
    assert "| a | 2 | 70.00 ± 0.00 (1 of 2 runs) |" in (run / "report" / "report.md").read_text()


def test_the_success_of_a_backdoor_is_a_column(make: Callable[..., Path]) -> None:
    found = {"attack_success_last": 0.25, "attack_success_last_std": 0.05}
    run = make("run", {"a": [[0.5, 0.7]], "b": [[0.5, 0.7]]}, summary={"a": found})
    assert main([str(run)]) == 0
    rows = (run / "report" / "report.md").read_text().splitlines()
    (head,) = (row for row in rows if "attack success %" in row)
    at = head.split("|").index(" attack success % ")
    shown = [row.split("|")[at].strip() for row in rows[rows.index(head) + 2 :][:2]]
    assert shown == ["25.00 ± 5.00", "-"]


def test_own_models_are_a_series_of_their_own(make: Callable[..., Path]) -> None:
    aim = {"target": 0.1, "target_rounds_per_run": [1, 1], "target_bytes_per_run": [3e3, 3e3]}
    aim |= {"attack_success_last": 0.25, "attack_success_last_std": 0}
    aim |= {f"personal_{name}": value for name, value in aim.items() if "attack" in name}
    aim["personal_attack_success_last"] = 0.5
    run = make("run", {"a": [[0.5, 0.6]], "b": [[0.1, 0.1]]}, split="holdout", test_fraction=0.2,
               summary={"a": aim, "b": {**aim, "own_leaves": True}})  # fmt: skip
    rows = lines(run / "metrics.jsonl")
    for row in rows:
        row["personal"] = {"client_accuracy": {"mean": row["accuracy"] + 0.2}}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for baseline in ("a", "a, own models", "b, own models", "b"):
        (group,) = grouped(read_folders([run]).trials, baseline)
        assert group.labels == ("a", "a, own models", "b, own models")
        finals = [known(over_runs(trial, "final")).mean for trial in group.trials]
        assert finals == pytest.approx([0.55, 0.75, 0.3])
        assert group.label(known(group.baseline)) in (baseline, f"{baseline}, own models")
        assert [row[0] for row in known(targets(group)).rows] == ["a", "b, own models"]
        found = scores(group)
        fooled = [row[found.head.index("attack success %")] for row in found.rows]
        assert fooled == ["25.00 ± 0.00", "50.00 ± 0.00", "50.00 ± 0.00"]


@pytest.mark.usefixtures("undrawn")
def test_methods_without_a_score_are_told(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"b": {"own_leaves": True}}
    run = make("run", {"a": [[0.5, 0.6]], "b": [[0.1, 0.1]]}, summary=own)
    assert main([str(run), "--wide"]) == 0
    told = "No score of b: some leaves stay with the clients; --split holdout scores their own"
    assert told in capsys.readouterr().out
    report = run / "report"
    assert told in (report / "report.md").read_text().replace("\\", "")
    for table in ("table.tex", "wide.tex"):
        assert "No score of b: some leaves" in " ".join((report / table).read_text().split("\n% "))
    only = make("only", {"b": [[0.1, 0.1]]}, summary=own)
    assert main([str(only)]) == 2
    assert told in capsys.readouterr().err
    assert main([str(run), str(only), "--out", str(run / "both")]) == 0
    assert "No score of run: b, only: b: some leaves" in capsys.readouterr().out


def write_study(folder: Path, *cells: str, **more: Any) -> None:
    """Writes the record of a study."""
    listed = [{"folder": f"cells/{name}", "settings": {}} for name in cells]
    (folder / "study.json").write_text(json.dumps({"cells": listed, **more}))


@pytest.mark.usefixtures("undrawn")
def test_a_study_is_its_cells_that_are_finished(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, score in (("one", 0.5), ("two", 0.6), ("three", 0.7), ("four", 0.1)):
        make(f"study/cells/{name}", {"a": [[score]], "b": [[score]]}, lr=score)
    make("study/cells/earlier", {"c": [[0.9]]})  # of a file that had this cell
    study, cells = tmp_path / "study", tmp_path / "study" / "cells"
    write_study(study, "five", "four", "one", "three", "two")
    (cells / "three" / "summary.json").unlink()
    (cells / "five").mkdir()  # not begun
    summary = json.loads((cells / "four" / "summary.json").read_text())
    del summary["b"]
    (cells / "four" / "summary.json").write_text(json.dumps(summary))
    reading = read_folders([study])
    assert [*reading.runs] == ["four", "one", "two"]
    assert [(t.run, t.algorithm) for t in reading.trials] == [
        ("four", "a"), ("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")
    ]  # fmt: skip
    assert reading.unfinished == ["five", "four: b", "three"]
    assert main([str(study)]) == 0
    told = capsys.readouterr().out.splitlines()[-3:]
    assert told == [f"not finished: {name}" for name in ("five", "four: b", "three")]
    text = (study / "report" / "report.md").read_text()
    assert "Not finished: five; four: b; three." in text
    assert "| run | lr |" in text
    for path in cells.glob("*/summary.json"):
        path.unlink()
    assert main([str(study), "--out", str(tmp_path / "new")]) == 2
    assert f"nothing is finished in {study}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_study_beside_another_run_has_no_table_of_columns(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """The run may lack their setting."""
    cell, other = (make(name, {"a": [[0.5]]}) for name in ("study/cells/0", "other"))
    study, listed = tmp_path / "study", [{"folder": f"cells/{cell.name}", "settings": {"emd": 1}}]
    (study / "study.json").write_text(json.dumps({"cells": listed, "columns": "emd"}))
    for folders, wide in (([study], True), ([study, other], False)):
        out = tmp_path / f"{wide}"
        assert main([*map(str, folders), "--out", str(out)]) == 0
        assert (out / "wide.tex").exists() == wide


def test_a_study_keeps_the_names_of_its_rows(
    make: Callable[..., Path], undrawn: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two methods, each with two settings, on two partitions; each partition chooses others."""
    texts = [f"{name}(lr={rate})" for name in ("fedavg", "fedprox") for rate in (0.1, 0.2)]
    for i, partition in enumerate(("iid", "dirichlet(0.1)")):
        scores = {text: [[0.1 * j, 0.2 * j]] for j, text in enumerate(texts[:: (1, -1)[i]], 1)}
        settings: dict[str, Any] = {"partition": partition, "validation": scores, "folds": 2}
        make(f"study/cells/{i}", {text: scores[text] for text in texts}, **settings)
    rows = {"Ours": texts[2:], "FedAvg": texts[:2]}
    study = tmp_path / "study"
    write_study(study, "0", "1", rows=rows, baseline="FedAvg")
    blank: Any = vars(pictures)["draw_series"]
    drawn: dict[str, list[tuple[str, str]]] = {}

    def draw(curves: Any, path: Path, *given: Any) -> None:
        drawn[path.stem] = [(curve.name, curve.style["color"]) for curve in curves]
        blank(path, *given)

    monkeypatch.setattr(pictures, "draw_series", draw)
    for asked in ([], ["--baseline", "FedAvg"], ["--baseline", "fedavg"]):
        assert main([str(study), *asked]) == 0
        assert "Report of 2 methods with 4 settings in 2 runs: " in capsys.readouterr().out
        with (study / "report" / "table.csv").open(newline="") as file:
            found = [*csv.DictReader(file)]
        assert not (study / "report" / "wide.tex").exists()
        baselines = {(row["run"], row["baseline"]) for row in found}
        assert baselines == {("0", f"FedAvg: {texts[1]}"), ("1", f"FedAvg: {texts[0]}")}
    assert {row["method"] for row in found} == {
        *(f"FedAvg: {text}" for text in texts[:2]),
        *(f"Ours: {text}" for text in texts[2:]),
    }
    text = (study / "report" / "report.md").read_text()
    assert "(tried: 2 for FedAvg, 2 for Ours)." in text
    # Among all settings tints of the method's colour, and else that colour.
    every = {curve for name, curves in drawn.items() if "all" in name for curve in curves}
    assert every == {
        (f"{row}: {text}", line_style(i, j, 2)["color"])
        for i, row in enumerate(("FedAvg", "Ours"))
        for j, text in enumerate(rows[row])
    }
    chosen = {c for name, curves in drawn.items() if "all" not in name for c in curves}
    assert chosen == {
        (f"{row}: {text}", line_style(i)["color"])
        for i, row in enumerate(("FedAvg", "Ours"))
        for text in rows[row]
    }
    assert main([str(study), "--wide"]) == 0
    with (study / "report" / "wide.csv").open(newline="") as file:
        wide = {row["method"]: row for row in csv.DictReader(file)}
    for row, means in {"FedAvg": (0.3, 0.6), "Ours": (0.6, 0.3)}.items():
        got = [float(wide[row][f"{name} mean"]) for name in ("iid", "dirichlet(0.1)")]
        assert got == pytest.approx(means)
        assert wide[row]["average rank"] == "1.5"


@pytest.fixture
def paper(make: Callable[..., Path], tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A study of 4 methods on 3 partitions with 10 seeds, and its scores ``[3, 4, 10]``."""
    rng = np.random.default_rng(0)
    shift = np.array([[0, 0.2, 0.01, -0.2], [0, 0.1, 0, -0.1], [0, 0.001, 0.1, -0.3]])
    scores = 0.5 + shift[..., None] + rng.normal(0, 0.02, (3, 4, 10))
    scores[2, 0] = scores[2, 1]  # equal: the third column has two second-bests
    texts = ["fedavg", "fedprox(mu=0.1)", "scaffold", "radfed"]
    cells = []
    for i, partition in enumerate(("iid", "dirichlet(1)", "dirichlet(0.1)")):
        told = dict(zip(texts, ([[*of]] for of in scores[i].tolist()), strict=True))
        make(f"study/cells/cell{9 - i}", told, partition=partition, data={"clients": str(i)})
        cells.append({"folder": f"cells/cell{9 - i}", "settings": {"partition": partition}})
    rows = {f"Row {text[:6]} & _": [text] for text in texts}
    record = {"rows": rows, "baseline": next(iter(rows)), "cells": cells, "columns": "partition"}
    (tmp_path / "study" / "study.json").write_text(json.dumps(record))
    return tmp_path / "study", scores


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_a_paper(paper: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """Its cells, marks and ranks are those of numpy and scipy; the study asks for it itself."""
    study, scores = paper
    assert main([str(study)]) == 0
    out = study / "report"
    columns = ("iid", "dirichlet(1)", "dirichlet(0.1)")
    with (out / "wide.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["method"] for row in found] == [
        f"Row {name} & _" for name in ("fedavg", "fedpro", "scaffo", "radfed")
    ]
    means = scores.mean(axis=2)
    for i, row in enumerate(found):
        got = np.array([[float(row[f"{c} {key}"]) for key in ("mean", "std")] for c in columns])
        np.testing.assert_allclose(got.T, [means[:, i], scores[:, i].std(axis=1)])
    # The third comparison of nine has no pair that differs.
    p = [
        [
            1.0 if j == 1 and i == 2 else stats.wilcoxon(scores[i, j], scores[i, 0]).pvalue
            for j in (1, 2, 3)
        ]
        for i in range(3)
    ]
    order, corrected, least = np.argsort(np.ravel(p), kind="stable"), np.empty(9), 0.0
    for place, which in enumerate(order):
        least = corrected[which] = min(1, max(least, np.ravel(p)[which] * (9 - place)))
    got = np.array([[float(row[f"{c} p, Holm"]) for row in found[1:]] for c in columns])
    np.testing.assert_allclose(got.ravel(), corrected)
    significant = got < 0.05
    assert 0 < significant.sum() < 9
    ranks = np.array([stats.rankdata(-np.round(of, 12)) for of in means])
    assert [float(row["average rank"]) for row in found] == pytest.approx(ranks.mean(axis=0))
    cells = [
        [
            f"{100 * means[i, j]:.2f} ± {100 * scores[i, j].std():.2f}"
            + "†" * bool(j and significant[i, j - 1])
            for i in range(3)
        ]
        for j in range(4)
    ]
    page = Page(out / "report.html")
    lines = (out / "report.md").read_text(encoding="utf-8").replace("\\", "").splitlines()
    tex = check_latex((out / "wide.tex").read_text(encoding="utf-8"))
    head = ("method", *columns, "average rank")
    start = lines.index(f"| {' | '.join(head)} |")
    assert tex[0] == rf"{' & '.join(head)} \\"
    for j, row in enumerate(found):
        last = f"{ranks.mean(axis=0)[j]:.2f}"
        shown = [
            {1.0: "**{}**", 2.0: "<ins>{}</ins>", 2.5: "<ins>{}</ins>"}.get(
                ranks[i, j], "{}"
            ).format(cell)
            for i, cell in enumerate(cells[j])
        ]
        assert lines[start + 2 + j].startswith(f"| {row['method']} | {' | '.join(shown)} | ")
        assert last in lines[start + 2 + j]
        assert all(cell in page.text for cell in cells[j])
        texed = tex[1 + j].replace(r"$\pm$", "±").replace(r"$^{\dagger}$", "†")
        assert 2 * texed.count(r"\textbf") == lines[start + 2 + j].count("**")
        assert texed.count(r"\underline") == lines[start + 2 + j].count("<ins>")
    assert "(divisor R) over R = 10 runs" in page.text
    test = stats.friedmanchisquare(*np.round(means.T, 12))
    assert f"χ² = {test.statistic:.3g}, p = {test.pvalue:.3g}" in page.text
    assert {"ranks.svg", "ranks.pdf"} <= {path.name for path in out.iterdir()}


@pytest.mark.usefixtures("undrawn")
def test_other_settings_make_tables_of_their_own(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless they go with the columns, as ``clients`` does; a method may lack a column."""
    places = [(lr, alpha) for lr in (0.1, 0.2) for alpha in (1, 2)]
    folders = [
        make(f"{lr}-{alpha}", {"a": [[lr]], **({"b": [[alpha / 10]]} if lr + alpha < 2.2 else {})},
             lr=lr, partition=f"dirichlet({alpha})", clients=10 * alpha)
        for lr, alpha in places
    ]  # fmt: skip
    argv = [str(folder) for folder in folders]
    out = folders[0] / "report"
    assert main([*argv, "--wide"]) == 0
    assert re.findall("^## Methods.*", (out / "report.md").read_text(), re.MULTILINE) == [
        "## Methods by partition, lr = 0.1", "## Methods by partition, lr = 0.2"
    ]  # fmt: skip
    with (out / "wide.csv").open(newline="") as file:
        names = [(row["table"], row["method"]) for row in csv.DictReader(file)]
    assert names == [(f"lr = {lr}", name) for lr in (0.1, 0.2) for name in "ab"]
    tex = check_latex((out / "wide.tex").read_text())
    assert tex[0].startswith("method & dirichlet(1) & dirichlet(2) & average rank")
    assert tex[-1] == r"b & 10.00 & - & 2.00 \\"
    assert "Average rank: over 1 column with all methods" in (out / "report.md").read_text()
    assert main([*argv, "--wide", "lr"]) == 0
    page = (out / "report.md").read_text()
    assert "## Methods by lr, clients = 10, partition = dirichlet(1)" in page
    capsys.readouterr()
    assert main([*argv, "--wide", "lrr"]) == 2
    assert "the runs have no setting 'lrr'; did you mean lr?" in capsys.readouterr().err
    assert main([*argv, "--wide", "dataset"]) == 0  # one column


def test_folders_of_one_name_are_told_apart(make: Callable[..., Path], tmp_path: Path) -> None:
    for study in ("x", "y"):
        make(f"{study}/cells/run", {"a": [[0.5]]})
        write_study(tmp_path / study, "run")
    make("run", {"a": [[0.5]]})
    reading = read_folders([tmp_path / "x", tmp_path / "y", tmp_path / "run", tmp_path / "run"])
    assert [*reading.runs] == ["x/run", "y/run", f"{tmp_path.name}/run"]


def test_names_do_nothing_but_be_read(make: Callable[..., Path], tmp_path: Path) -> None:
    label, folder = f"a(x={HOSTILE})", tmp_path / "<b>$_%&"
    shutil.copytree(make("plain", {label: [[0.5, 0.5]], "b": [[0.6, 0.7]]}), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dataset": f"csv:{HOSTILE}", "partition": f"m:f({HOSTILE})", "arguments": [HOSTILE]}
    config |= {"partitions": [HOSTILE] * 2, "model": f"m:{HOSTILE}"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "clients.png").write_bytes(b"no picture")
    out = tmp_path / "out"
    assert main([str(folder), str(tmp_path / "plain"), "--out", str(out)]) == 0
    page = Page(out / "report.html")
    assert not {tag for tag, _ in page.elements} & {"script", "b"}
    assert all(known(image["src"]).startswith("data:image/") for image in page.all("img"))
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    for told in (label, f"csv:{HOSTILE}", f"m:f({HOSTILE})", f"m:{HOSTILE}", "<b>$_%&"):
        assert told in page.text
    check_latex((out / "table.tex").read_text())
    text = (out / "report.md").read_text()
    assert not re.search(r"(?<!\\)<", text)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    with (out / "table.csv").open(newline="") as file:
        assert {row["algorithm"] for row in csv.DictReader(file)} == {label, "b"}


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Pictures take their time: they are empty."""

    def draw(*given: Any) -> None:
        (path,) = (each for each in given if isinstance(each, Path))
        path.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="1pt"/>')

    patch.setattr(pictures, "draw_series", draw)
    patch.setattr(pictures, "draw_histograms", draw)
    patch.setattr(contents, "draw_ranks", draw)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def test_a_report_replaces_an_earlier_one_and_nothing_else(
    make: Callable[..., Path], undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = make("run", {"a": [[0.5]], "b": [[0.5]]}), make("other", {"a": [[0.5]]})
    out = run / "report"
    assert main([str(run), "--wide"]) == 0
    mine = {"notes.txt", "table_mine.tex", "curves_final.pdf", "report.tex"}
    for name in mine:
        (out / name).write_text("mine")
    assert main([str(other), "--out", str(out)]) == 0
    wanted = FILES - {"clients.svg", "clients.pdf", "partition_1.png"} | mine
    assert {path.name for path in out.iterdir()} == wanted
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main([str(other), "--out", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before  # no date in it
    capsys.readouterr()
    assert main([str(other), "--out", str(run)]) == 2
    assert f"--out {run} has other files, and no report" in capsys.readouterr().err


def damage(name: str, content: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_text(content, encoding="utf-8")

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def settings(**changed: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def shorten(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def nothing(run: Path) -> None:
    """Leaves the run as it is."""


WORD = {"algorithm": "a", "seed": 0, "round": 1, "accuracy": "good", "test_loss": 1,
        "bytes_up": 1, "bytes_down": 1}  # fmt: skip
BAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no folder": (nothing, "absent", "absent is not a folder"),
    "no run": (remove("config.json"), "run", "has no run: it lacks config.json"),
    "an empty study": (damage("study.json", "{}"), "run", "nothing is finished in run"),
    "not finished": (remove("summary.json"), "run", "nothing is finished in run"),
    "an unset variable": (nothing, "run --out=", "--out: must name a folder, got ''"),
    "a long name": (nothing, "x" * 300, "File name too long"),
    "a damaged line": (
        damage("metrics.jsonl", '{"round": 1}\n{"rou'), "run",
        "run/metrics.jsonl, line 2 is damaged",
    ),
    "a record of nothing": (
        damage("metrics.jsonl", "{}"), "run",
        "the records of run are damaged: they lack 'algorithm'",
    ),
    "a word for a score": (
        damage("metrics.jsonl", json.dumps(WORD)), "run",
        "the records of run are damaged: 'good' is not a number",
    ),
    "a lost record": (shorten, "run", "metrics.jsonl is damaged: it lacks the last round of b"),
    "a damaged summary": (damage("summary.json", "{"), "run", "run/summary.json is damaged"),
    "an older version": (
        damage("config.json", '{"format": 1, "algo": "a", "compare": ["b"]}'), "run",
        "run/config.json is of format 1, and this fedjax_sim reads 2",
    ),
    "an unknown baseline": (
        nothing, "run --baseline c", "--baseline must be one of a, b, got 'c'"
    ),
    "a method twice in a column": (
        nothing, "run run2 --wide", "a occurs twice at partition = emd(1.2), in run and in run2"
    ),
    "several baselines": (
        nothing, "run other --baseline a",
        "--baseline a is several here: name one of 'a [run]', 'a [other]'",
    ),
    "a folder in a file": (
        nothing, "run --out run/config.json/new", "--out run/config.json/new: "
    ),
    "an unknown flag": (nothing, "run --basline a", "unrecognized arguments: --basline"),
    "nothing to report": (nothing, "", "the following arguments are required: DIR"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str,
    make: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, argv, told = BAD[case]
    run = make("run", {"a": [[0.5]], "b": [[0.5]]})
    make("run2", {"a": [[0.5, 0.5]]})
    make("other", {"a": [[0.5]]}, split="official")
    change(run)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedjax_sim.report: error: ")
    assert told in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("undrawn")
def test_scores_of_several_kinds_have_chapters_of_their_own(make: Callable[..., Path]) -> None:
    """And data that are standardised otherwise: no method is tuned or compared across them."""
    make("run", {"a": [[0.5, 0.6]], "b": [[0.7, 0.7]]})
    make("other", {"a": [[0.1, 0.2]]}, split="clients")
    out = make("local", {"a": [[0.3, 0.3]]}, standardise="local").parent
    assert main([str(out / name) for name in ("run", "other", "local")]) == 0
    page = (out / "run" / "report" / "report.md").read_text(encoding="utf-8")
    chapters = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert sum("accuracy on the test set" in title for title in chapters) == 2
    assert sum("mean accuracy over test clients" in title for title in chapters) == 1
    assert sum("standardised by each client" in title for title in chapters) == 1
    rows = list(csv.DictReader((out / "run" / "report" / "table.csv").read_text().splitlines()))
    assert [(row["method"], row["pairs"]) for row in rows] == [
        ("a", ""), ("b", "2"), ("a", ""), ("a", "")
    ]  # fmt: skip
