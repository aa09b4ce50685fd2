"""Texts of calls: what they are read as, what is rejected, and parts from what they print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedjax_sim as fs
from fedjax_sim.base import calls, shown
from fedjax_sim.base.binding import build
from fedjax_sim.base.calls import Call, Name, UnreadableError, alternatives, parse, write
from fedjax_sim.base.registry import trusting
from fedjax_sim.cli.build import build as build_all
from fedjax_sim.cli.making import make, stand_in
from fedjax_sim.cli.parser import parse as parse_command
from fedjax_sim.cli.parts import ROLES, check_part, make_part
from fedjax_sim.cli.resuming import check_settings
from fedjax_sim.cli.studies.plan import read_study

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
LITERALS = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("ab'\"\\|*,() ", max_size=6),
    st.booleans(),
    st.none(),
)


def record(*args: Any, **named: Any) -> tuple[Any, ...]:
    return args, named


@given(args=st.lists(LITERALS, max_size=3), named=st.dictionaries(WORDS, LITERALS, max_size=3))
def test_literals_are_read_as_python_reads_them(args: list[Any], named: dict[str, Any]) -> None:
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in named.items())]
    tree = parse(f"f({', '.join(words)})")
    assert build(tree, {"f": record}.__getitem__) == (tuple(args), named)
    assert parse(write(tree)) == tree


def test_names_have_dashes_dots_and_modules() -> None:
    tree = parse("Label-Sets( 2, my.module:f.g( x = -1/4 ), lambda=(1, [a,]), norms=*bias)")
    assert write(tree) == "Label-Sets(2, my.module:f.g(x=-1/4), lambda=(1, [a]), norms=*bias)"
    assert isinstance(tree, Call)
    assert tree.named["norms"] == Name("*bias")
    assert calls.word(tree.args[1].named["x"]) == "-0.25"


def test_a_choice_of_a_parameter_needs_no_quotes() -> None:
    text = "simulated(1, deadline=3, late=partial)"
    assert shown(make_part("clock", text, {})) == "simulated(1, deadline=3, late='partial')"


def test_alternatives_stand_at_any_depth() -> None:
    found = [write(tree) for tree in alternatives("f(g(1|2), x=(a|b, 1e-3)) | h")]
    assert found == [
        "f(g(1), x=(a, 1e-3))",
        "f(g(1), x=(b, 1e-3))",
        "f(g(2), x=(a, 1e-3))",
        "f(g(2), x=(b, 1e-3))",
        "h",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "f(", "f(1 + 2)", "f(2**9)", "f(**x)", "f(*x)", "f()()", "f(x=1, x=2)", "f(x for x in y)",
     "[1][0]", "f'{x}'", "x if y else z", "f(y := 1)", "1/0", "1e999", "f(1/x)", "-x", "f(1|2)",
     "__import__('os').system('true')", "f(" * 30 + ")" * 30, "-" * 9000 + "1", "1/" * 9000 + "1",
     "(" * 9000, "f(" + "1," * calls.LONGEST + ")"],
)  # fmt: skip
def test_what_is_not_a_value_or_a_call_is_rejected(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"must|cannot") as caught:
        parse(text)
    assert len(str(caught.value)) < 500


def test_many_alternatives_are_counted_before_they_are_made() -> None:
    with pytest.raises(ValueError, match="stands for 1,024 texts: use at most 1,000"):
        alternatives(f"f({', '.join(['1|2'] * 10)})")


OBJECTS = re.compile(r"<optax>|\w+\[[\d, ]+\]|\bfirst\b")
"""What a part prints of an optax optimiser, an array and a function that has no public name."""


def test_parts_are_read_back_from_what_they_print() -> None:
    """A model in a part is read as the name ``model``; other Python objects have no text."""
    common, roles = stand_in(), set[str]()
    objects, wrong = list[str](), list[str]()
    for name in sorted(fs.ALGORITHMS.own):
        for role, value in make(name, common).parts.by_role().items():
            if role not in (*ROLES, "clock") or value in (None, (), {}):
                continue
            text = shown(list(value.values()) if isinstance(value, dict) else value)
            if OBJECTS.search(text):
                objects.append(text)
                continue
            roles.add(role)
            again = make_part(role, text.replace("<Model>", "model"), {"model": common.model})
            if shown(list(again.values()) if isinstance(again, dict) else again) != text:
                wrong.append(f"{name}: {text}")
    counted = f"{len(objects)} that hold an optimiser, an array or a function were left out"
    assert not wrong, f"{len(wrong)} parts are not read back ({counted}): {wrong}"
    # Every method trains by an optimiser; an objective or a setting of ours stands beside it.
    assert roles == {*ROLES, "clock"} - {"local"}, counted


def test_an_argument_that_does_not_fit_is_named() -> None:
    for text, message in {
        "krum(byzantin=0.2)": "byzantin is not an argument of krum; did you mean byzantine?",
        "krum(0.2, 3, 4)": "must be written krum(byzantine=0.2): too many positional arguments",
        "krum('x')": "byzantine must be a number, got 'x'",
        "krum(None)": "byzantine must be a number, got None",
        "krum(mean)": "byzantine must be a number, got mean",
        "kurm(0.2)": "unknown aggregator 'kurm'; did you mean krum?",
        "uniform": "uniform is not a part for this role, as calls of these are: caf, ",
        "(mean, mean)": "must be one part, got 2",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            make_part("aggregator", text, {})
    with pytest.raises(ValueError, match=r"^gradient_dissimilarity\(\) must be written "):
        make_part("diagnostics", "gradient_dissimilarity", {})


def test_the_number_of_classes_has_a_name() -> None:
    common = stand_in()
    made = make_part("finish", "calibrated(model, classes)", common._asdict())
    assert shown(made) == "calibrated(<Model>, 10)"


def test_names_of_other_modules_are_parts_that_the_caller_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from fedjax_sim.base import Aggregator\n"
        "def half(times: int) -> Aggregator:\n"
        "    def rule(stack, weights, key=None):\n        return stack / times\n    return rule\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert check_part("aggregator", "theirs:half( 2 )") == "theirs:half(2)"
    assert make_part("aggregator", "theirs:half(2)", {})(4.0, None) == 2.0
    for text in ("theirs:half(2)", "chain(mix(0.5), theirs:half)", "theirs:half"):
        with trusting(["fedjax"]), pytest.raises(ValueError, match="--trust theirs"):
            check_part("server", text)
    with pytest.raises(ValueError, match="declares by its return type which part it makes"):
        make_part("aggregator", "os:system('true')", {})


COMMAND = ["--clients", "8", "--model", "logistic", "--seeds", "1", "--devices", "1"]
COMMAND += ["--emd", "0.9", "--rounds", "2"]


def parts_by(*argv: str) -> dict[str, str]:
    """Returns the aggregator of each method of a command, as it prints."""
    setup = build_all(parse_command([*COMMAND, *argv]))
    return {name: shown(made.parts.aggregator) for name, made in setup.algorithms.items()}


def test_a_flag_replaces_a_part_of_every_method_and_a_text_that_of_one() -> None:
    found = parts_by(
        "--algo", "fedavg(aggregator=trimmed_mean(0.25|0.3))", "--compare", "fedprox",
        "--aggregator", "krum(0.3)",
    )  # fmt: skip
    assert found == {
        "fedavg(aggregator=trimmed_mean(0.25))": "trimmed_mean(beta=0.25)",
        "fedavg(aggregator=trimmed_mean(0.3))": "trimmed_mean(beta=0.3)",
        "fedprox": "krum(byzantine=0.3)",
    }


def test_a_choice_of_a_method_stays_its_own() -> None:
    """``robust`` has an option of that name, with other defaults than the part's."""
    both = ["--algo", "robust", "--compare", "fedavg", "--aggregator"]
    assert parts_by(*both, "geometric_median") == {"robust": "geometric_median()", "fedavg": "mean"}
    assert set(parts_by(*both, "geometric_median()").values()) == {"geometric_median()"}


def test_a_part_may_name_what_the_run_has() -> None:
    argv = ["--algo", "fedavg", "--compare", "none"]
    argv += ["--local", "with_final_loss(local.change(corrections=(proximal(0.1),)), objective)"]
    argv += ["--diagnostics", "model_divergence", "--sending", "(clip_norm(1), noise(0.1))"]
    made = build_all(parse_command([*COMMAND, *argv])).algorithms["fedavg"]
    assert re.search(r"with_final_loss\(.*\(proximal\(0.1\),\)", shown(made.parts.local))
    assert shown(made.parts.sending) == "(clip_norm(1), noise(0.1))"
    assert [*made.parts.diagnostics] == ["model_divergence"]


def test_a_study_and_a_resumed_run_read_parts(tmp_path: Path) -> None:
    (file := tmp_path / "s.toml").write_text(
        "methods = ['fedavg(server=mix(0.5))']\n[run]\ndataset = 'digits'\nrounds = 2\n"
        "[grid]\naggregator = ['mean', 'trimmed_mean(0.1)']\n"
    )
    cells = read_study(file).cells
    assert [cell.config.parts.aggregator for cell in cells] == ["mean", "trimmed_mean(0.1)"]
    begun, other = (
        parse_command([*COMMAND, "--server", "mix(0.5)"]),
        parse_command([*COMMAND, "--server", "mix(1)"]),
    )
    check_settings(tmp_path, begun, begun)
    with pytest.raises(ValueError, match=re.escape("--server is mix(1), and mix(0.5) in the run")):
        check_settings(tmp_path, begun, other)
    with pytest.raises(ValueError, match=re.escape("--server is mix(1), and not given in the run")):
        check_settings(tmp_path, parse_command(COMMAND), other)
    assert "server" not in parse_command(COMMAND).record()
