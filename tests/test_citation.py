"""What an algorithm says of itself: the papers behind it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import optax
import pytest

import fedjax_sim as fs
from fedjax_sim import compression, selection, sending, server
from fedjax_sim.round.citation import references

PACKAGE = Path(fs.__file__).parent
LOCAL = fs.local_sgd(fs.empirical_risk(fs.models.logistic((4,), 2)), optax.sgd(0.1))
BIB = (PACKAGE / "round" / "references.bib").read_text("utf-8")
KEYS = re.findall(r"^@\w+\{([^,]+),", BIB, re.M)


def keys(algorithm: fs.Algorithm) -> list[str]:
    return re.findall(r"^@\w+\{([^,]+),", fs.cite(algorithm), re.M)


def cited() -> Iterator[tuple[str, str]]:
    """Every link in a docstring's Source, and where it stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            for section in re.findall(r"^Source:(.*?)(?=\n\n|\n>>>|\Z)", text, re.M | re.S):
                for link in re.findall(r"<([^<>\s]+)>", section):
                    yield link, f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', '')}"


def test_every_link_has_its_entry_and_every_entry_is_cited() -> None:
    links = dict(cited())
    known = references()
    assert not {link: place for link, place in links.items() if link not in known}
    assert {known[link] for link in links} == set(known.values())


def test_entries_are_well_formed() -> None:
    assert sorted(set(KEYS)) == KEYS
    for key in KEYS:
        entry = references()[key]
        for field in ("author", "title", "year"):
            assert re.search(rf"^  {field} = \{{.+\}},?$", entry, re.M), (key, field)


def test_every_source_of_a_method_has_a_link() -> None:
    for name, method in fs.ALGORITHMS.items():
        source = re.search(r"Source:(.*?)(?=\n\n|\Z)", method.__doc__ or "", re.S)
        assert source is not None, name
        assert re.search(r"<\S+>", source[1]), name


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("fedavg", "mcmahan2017communication"),
        ("scaffold", "karimireddy2020scaffold"),
        ("phase_shift", "cornelis2022federated"),
        ("radfed", "xue2021aggregation"),
        ("gossip", "lian2017can"),
    ],
)
def test_a_method_cites_its_paper_first(name: str, paper: str) -> None:
    assert keys(fs.ALGORITHMS[name](LOCAL, clients_per_round=4))[0] == paper


def test_nothing_is_cited_that_is_not_used() -> None:
    plain = keys(fs.fedavg(LOCAL, clients_per_round=4))
    assert plain == ["mcmahan2017communication"]
    # A slot that keeps its client is the thesis'; the rest of uniform draws is not.
    phased = keys(fs.phase_shift(LOCAL, clients_per_round=4, phases=2))
    assert "cornelis2022federated" in phased
    assert "xue2021aggregation" not in phased


def test_a_part_that_is_exchanged_changes_what_is_cited() -> None:
    scaffold = fs.algorithms.scaffold(LOCAL, clients_per_round=5)
    robust = scaffold.replace(aggregator=fs.aggregators.krum())
    assert set(keys(robust)) - set(keys(scaffold)) == {"blanchard2017machine"}


def test_parts_inside_parts_are_cited() -> None:
    algorithm = fs.compose(
        LOCAL,
        selection=selection.uniform(),
        clients_per_round=4,
        sending=(sending.compressed(compression.top_k(0.1)),),
        server=server.chain(server.sign_agreement(2.0, server.replace())),
    )
    found = keys(algorithm)
    assert "aji2017sparse" in found
    assert any(key.startswith("ozdayi") for key in found)
    assert len(found) == len(set(found))
