"""What the command makes of a data set unless told otherwise: who trains, who is scored on what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_data import few_decoded

import fedjax_sim as fs
from fedjax_sim import bench, data
from fedjax_sim.cli import dealing
from fedjax_sim.cli.build import build
from fedjax_sim.cli.commands import Source
from fedjax_sim.cli.defaults import TABLE, defaults_of
from fedjax_sim.cli.parser import parse
from fedjax_sim.data import DATASETS, Dataset, from_arrays
from fedjax_sim.partition import partition_from_lists

RNG = np.random.default_rng(0)
ALONE = ["--algo", "fedavg", "--compare", "none", "--seeds", "1"]
TRAIN, TEST = list("ccaaabbdd"), list("aaabzdddd")
"""The owners of samples: c has none to be scored on, z none to train on."""


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    x = RNG.normal(size=(18, 4)).astype(np.float32)
    y = np.arange(18) % 3
    np.savez("owned.npz", x_train=x[:9], y_train=y[:9], x_test=x[9:], y_test=y[9:],
             client_train=TRAIN, client_test=TEST)  # fmt: skip
    return "owned.npz"


def test_a_summary_says_how_the_data_were_taken() -> None:
    x, test = np.zeros((8, 2, 3), np.float32), np.arange(8) >= 5
    y = [0, 0, 1, 1, 1, 0, 2, 2]
    mine = from_arrays(
        "mine", x, y, test=test, class_names=["a", "b", "<b", "c"], notes=["Row 3 is left out."]
    )
    found = data.summary(mine)
    assert found.lone == {"training": {"b": 0.6}, "test": {"<b": 2 / 3}}
    assert found.text().splitlines() == [
        "mine: 5 training and 3 test samples, float32 [2, 3]",
        "task: classification(4), as y is one of 4 named classes",
        "classes: a 2 + 1, b 3 + 0, <b 0 + 2, c 0 + 0 (training + test samples)",
        "only the training set has: 'b' (60 % of it)",
        "only the test set has: '<b' (67 % of it)",
        "clients: none named in the data",
        "scored: on the test set",
        "loading: Row 3 is left out.",
    ]
    many = from_arrays("many", np.zeros((40, 1)), np.arange(40) % 20, test=np.arange(40) > 29)
    assert "classes: 20, of 1 to 2 training and 0 to 1 test samples" in data.summary(many).text()
    cranes = from_arrays("birds", x, y, test=test, class_names=["crane", "owl", "crane"])
    assert data.summary(cranes).classes == {"0": (2, 1), "1": (3, 0), "2": (0, 2)}
    target = fs.tasks.classification(3, backdoor=True)
    backdoor = from_arrays("backdoor", x, [*y[:-1], 4], test=test, task=target)
    assert data.summary(backdoor).classes == {"0": (2, 1), "1": (3, 0), "2": (0, 1)}
    numbers = from_arrays("numbers", np.zeros((5, 1)), RNG.normal(size=(5, 2)))
    assert (
        "task: regression(targets=2), as y is 2 numbers per sample" in data.summary(numbers).text()
    )
    assert json.loads(json.dumps(found.as_dict()))["classes"]["<b"] == [0, 2]


@pytest.mark.usefixtures("bare_command")
def test_natural_clients_are_scored_on_their_own_test_samples(
    owned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dataset", owned, "--algo", "ditto", "--compare", "none", "--rounds", "1"]
    argv += ["--model", "logistic", "--seeds", "2", "--lr", "0.5", "--devices", "1", "--no-cache"]
    assert bench.main([*argv, "--out", "run"]) == 0
    out = capsys.readouterr().out
    for line in (
        "clients: 4 natural ones, the default for data that name their clients",
        "scored: mean over 3 of 4 clients, each on its own samples in the test set; 1 test samples",
    ):
        assert line in out
    run = fs.load_run("run")
    assert run.settings["data"]["clients"].startswith("4 natural ones")
    assert run.summary["ditto"]["scored_clients_per_run"] == [3, 3]
    loaded = fs.load_dataset(owned)
    apply = jax.jit(lambda v, x: run.model.apply(v, x, train=False)[0])

    def right(variables: Any, own: np.ndarray) -> float:
        logits = np.asarray(apply(variables, loaded.test_x))[own]
        return float(np.mean(logits.argmax(axis=1) == loaded.test_y[own]))

    tests = [np.array(TEST) == name for name in "abcd"]
    servers, models = run.variables("ditto"), run.personal("ditto")
    for i, row in enumerate(run.clients):
        assert row["names"] == list("abcd")
        server = jax.tree.map(lambda a, i=i: a[i], servers)
        scores, own_scores = row["client_accuracy"], row["personal"]["client_accuracy"]
        for k, own in enumerate(tests):
            if not own.any():
                assert scores[k] is own_scores[k] is None
                continue
            assert scores[k] == pytest.approx(right(server, own))
            personal = jax.tree.map(lambda a, i=i, k=k: a[i, k], models)
            assert own_scores[k] == pytest.approx(right(personal, own))
        assert run.records[i]["client_accuracy"]["clients"] == 3


def test_which_test_samples_are_whose(owned: str) -> None:
    def problem(*flags: str) -> Any:
        return build(parse(["--dataset", owned, *ALONE, *flags, "--devices", "1"])).problem

    loaded = fs.load_dataset(owned)
    for lists in ([[0, 2], [5, 7]], [[0], [1]]):  # of several owners, and two of one
        assert data.own_test(loaded, partition_from_lists(lists)) is None
    for flags in ([], ["--split", "holdout"]):
        found = problem(*flags)
        assert found.own
        assert np.diff(found.test.start).tolist() == [3, 1, 0, 4]
        assert [*found.names[0]] == list("abcd")
    anew = problem("--split", "holdout", "--test-fraction", "0.5")
    assert np.diff(anew.test.start).sum() == 9  # z counts too, and has a single sample
    fresh = problem("--partition", "iid", "--split", "holdout")
    assert (fresh.held_out, len(fresh.data.y), fresh.names) == (0.2, 18, [()])
    assert not problem("--partition", "iid").own
    with pytest.raises(ValueError, match="--standardise local must come with --test-fraction"):
        problem("--split", "holdout", "--standardise", "local")
    # Where nobody owns the test samples, each client holds out some of its training samples.
    with np.load(owned) as arrays:
        np.savez(owned, **{k: a for k, a in arrays.items() if k != "client_test"})
    assert problem().test.clients == 1
    mine = problem("--split", "holdout")
    assert (mine.own, mine.held_out, len(mine.data.y)) == (True, 0.2, 9)


LABELS = {
    "ten": (np.arange(2000) % 10, "emd(1.4)"),
    "three": (np.arange(300) % 3, "emd(1)"),
    "two": (np.arange(300) % 2, "emd(0.7)"),
    "rare": (np.arange(4000) % 20 == 0, "emd(0.1)"),
    "rare among few": (np.arange(300) % 20 == 0, "iid"),
    "too rare": (np.arange(900) == 0, "iid"),
    "few samples": (np.arange(12) % 3, "emd(1)"),
    "one class": (np.zeros(50), "iid"),
}


@pytest.mark.parametrize("case", LABELS)
def test_some_partition_is_possible_without_a_word(case: str) -> None:
    labels, wanted = LABELS[case]
    n = len(labels)
    mine = from_arrays("mine", np.zeros((n, 1)), labels.astype(int), test=np.zeros(n, bool))
    deal = dealing.choose(None, None, mine, (0, 1, 2), flag="--partition")
    assert (deal.text, deal.clients) == (wanted, min(n // 2, 40))
    assert deal.why.startswith("the default")
    assert ("labels reach EMD" in deal.why) == (wanted not in ("iid", "emd(1.4)"))
    for p in dealing.deal_seeds(deal.text, mine, deal.clients, (0, 1, 2), origin=""):
        assert p.sizes.min() > 0


@pytest.mark.parametrize(("flags", "active"), [([], 2), (["--phases", "3"], 3)])
def test_two_phases_have_as_many_clients_each(flags: list[str], active: int) -> None:
    argv = ["--partition", "iid", "--clients", "3", "--compare", "none", "--seeds", "1"]
    assert build(parse([*argv, *flags, "--model", "logistic"])).clients_per_round == active


def test_a_table_of_classes_has_a_larger_rate() -> None:
    assert defaults_of("csv:a.csv,label=kind").lr == defaults_of(TABLE).lr == 0.1
    assert defaults_of("csv:a.csv,target=age,client=who").lr == 0.01


def cut(whole: Dataset) -> Dataset:
    """A few samples of every owner, or of all."""
    chosen = []
    for y, client in ((whole.train_y, whole.train_client), (whole.test_y, whole.test_client)):
        order = np.random.default_rng(0).permutation(len(y))[:150]
        if client is not None:
            _, first = np.unique(client, return_index=True)
            order = np.union1d(order, first)
        chosen.append(np.sort(order))
    fields = ("x", "y", "client")
    new: dict[str, Any] = {
        f"{part}_{field}": None if (a := getattr(whole, f"{part}_{field}")) is None else a[rows]
        for part, rows in zip(("train", "test"), chosen, strict=True)
        for field in fields
    }
    return whole._replace(**new)


def write_leaf(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        users = {u: {"x": RNG.normal(size=(4, 3)).tolist(), "y": [0, 1, 2, 1]} for u in "abc"}
        content = {"users": [*users], "user_data": users}
        (folder / part / "all.json").write_text(json.dumps(content))


OWN = {
    "two": "csv:two.csv,label=kind",
    "three": "csv:three.csv,label=kind",
    "owners": "csv:two.csv,label=kind,client=owner",
    "target": "csv:two.csv,target=b,client=owner",
    "npz": "owned.npz",
    "leaf": "leaf:leaf",
    "synthetic": "synthetic(1, 1)",
    "tfds": "tfds:mnist",
}


NOT_HERE = ("eicu", "cifar100", "emnist", "femnist", "svhn")
"""eICU may not be passed on, the others are large."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(DATASETS.own), *OWN])
def test_every_data_set_is_ready_by_its_name_alone(
    name: str, owned: str, data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run is traced; tests/test_pairs.py trains each network on its data."""
    if name in NOT_HERE:
        pytest.skip("the data folder of the tests does not have it")
    load = Source.load

    def few(source: Source) -> Dataset:
        with few_decoded("train", "test"):
            return cut(load(source))

    monkeypatch.setattr(Source, "load", few)
    for classes, kinds in (("two", 2), ("three", 3)):
        rows = [f"{i % 7},{(i * i) % 11},{i % kinds},{i % 5}" for i in range(60)]
        Path(f"{classes}.csv").write_text("\n".join(["a,b,kind,owner", *rows]))
    write_leaf(Path("leaf"))
    argv = ["--dataset", OWN.get(name, name), "--data-dir", data_dir, "--dry-run"]
    argv += ["--rounds", "1", "--seeds", "1", "--epochs", "1", "--compare", "none"]
    assert bench.main([*argv, "--devices", "1"]) == 0
