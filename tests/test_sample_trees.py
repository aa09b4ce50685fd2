"""Samples of several arrays: the run of one array to the bit, sequences with masks, bad input."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, altered_data, assert_trees, known, some_slow, with_root

import fedjax_sim as fs
from fedjax_sim.base import Batch
from fedjax_sim.client import augment, mixup
from fedjax_sim.partition import partition_from_lists
from fedjax_sim.run.checks import check_sets
from fedjax_sim.run.prefetch import PrefetchBlocks

BYTES = 6 * 4 + 4
"""Of a sample of the federation: x and y."""


class Joined(nn.Module):
    """A linear model of all arrays of x, side by side."""

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        return nn.Dense(3)(jnp.concatenate(jax.tree.leaves(x), axis=-1))


def split(x: Any) -> Any:
    """Returns the columns of x in three arrays, whose order is that of the leaves."""
    return {"a": x[:, :1], "b": (x[:, 1:4], x[:, 4:])}


def both(federation: Federation) -> tuple[fs.ClientData, fs.ClientData]:
    """Clients whose samples are one array, and the same in three; the server has some too."""
    data = with_root(federation.data, range(5))
    return data, altered_data(data, x=split(data.x))


@functools.cache
def model_of(trees: bool) -> fs.Model:
    one = split(np.zeros((1, 6), np.float32))
    return fs.models.from_linen(Joined(), jax.tree.map(lambda a: a[0], one) if trees else (6,))


@functools.cache
def algorithm_of(method: str, trees: bool) -> fs.Algorithm:
    local = fs.local_sgd(fs.empirical_risk(model_of(trees)), optax.sgd(0.1), batch_size=8)
    if method == "root":
        server = fs.server.train_on_root(local)
        return fs.compose(local, 3, server=server)
    return fs.ALGORITHMS[method](local, clients_per_round=3)


def run(
    method: str, federation: Federation, *, trees: bool, rounds: int = 4, **options: Any
) -> fs.Result:
    data = both(federation)[trees]
    x, y = federation.test
    options = {"execution": fs.make_execution(devices=1)} | options
    return fs.simulate(
        algorithm_of(method, trees), model_of(trees), data, (split(x) if trees else x, y),
        rounds=rounds, classes=3, eval_every=2, **options,
    )  # fmt: skip


def all_of(result: fs.Result) -> Any:
    return result.variables, result.metrics, [e.test for e in result.evaluations]


WHERE: dict[str, Callable[[], fs.Execution]] = {
    "at_once": lambda: fs.make_execution(devices=1),
    "fetched": lambda: fs.make_execution(devices=1, samples_mb=2 * 200 * (BYTES + 8) / 1e6),
    "devices": lambda: fs.make_execution(devices=4),
}
RUNS = [("fedavg", "fetched"), ("radfed", "at_once"), ("radfed", "devices"), ("root", "at_once")]


@pytest.mark.parametrize(("method", "where"), some_slow(RUNS, quick=2))
def test_arrays_that_the_model_joins_are_one_array(
    method: str, where: str, federation: Federation
) -> None:
    one, several = (
        run(method, federation, trees=trees, execution=WHERE[where]()) for trees in (False, True)
    )
    assert_trees(all_of(one), all_of(several))  # to the bit
    assert known(one.variables).params["Dense_0"]["kernel"].any()


def test_bytes_are_of_all_arrays(federation: Federation) -> None:
    for data in both(federation):
        assert data.sample_bytes == BYTES
        assert PrefetchBlocks(data, 2 * 200 * (BYTES + 8) / 1e6 + 1e-9).capacity == 200


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_with_the_same_arrays_alone(
    federation: Federation, tmp_path: Path
) -> None:
    whole = run("radfed", federation, trees=True)
    run("radfed", federation, trees=True, rounds=2, checkpoints=tmp_path)
    other = federation._replace(data=altered_data(federation.data, x=2 * federation.data.x))
    with pytest.raises(fs.CheckpointError, match="data"):
        run("radfed", other, trees=True, checkpoints=tmp_path)
    resumed = run("radfed", federation, trees=True, checkpoints=tmp_path)
    assert_trees(all_of(whole), all_of(resumed))


def test_images_of_a_sample_are_altered(federation: Federation) -> None:
    rng = np.random.default_rng(0)
    images, rows = rng.integers(0, 256, (4, 5, 5, 1), np.uint8), jnp.ones((4, 2))
    change = augment.altered_copies([augment.noise(0.1)])
    copy = jnp.array([True, False, True, False])
    one = Batch(jnp.asarray(images), jnp.zeros(4, jnp.int32), jnp.ones(4, bool), copy)
    several = one._replace(x={"picture": one.x, "rows": rows})
    key = jax.random.key(1)
    altered: Any = change(key, several, None).x  # type: ignore[arg-type]
    assert_trees(altered, {"picture": change(key, one, None).x, "rows": rows})  # type: ignore[arg-type]
    assert (altered["picture"] != images).any(axis=(1, 2, 3)).tolist() == copy.tolist()


def test_padded_sequences() -> None:
    """A loop over the sequences, some of them empty; vectors too."""
    rng = np.random.default_rng(0)
    for feature in ((), (3,)):
        sequences = [rng.normal(size=(n, *feature)) for n in (4, 0, 1, 5)]
        for length, given in ((5, None), (7, 7)):
            padded = fs.data.pad(sequences, given)
            assert padded["values"].shape == (4, length, *feature)
            for values, mask, sequence in zip(*padded.values(), sequences, strict=True):
                assert np.array_equal(values[: len(sequence)], sequence)
                assert not values[len(sequence) :].any()
                assert mask.tolist() == [i < len(sequence) for i in range(length)]
    tokens = fs.data.pad([[1, 2], []])["values"]
    assert (tokens.dtype.kind, tokens.tolist()) == ("i", [[1, 2], [0, 0]])


OWNERS = partition_from_lists([[0, 1], [2]])
ONES = np.ones((3, 2), np.float32)
BATCH = Batch({"a": jnp.ones((2, 2)), "b": jnp.ones(2)}, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))


def data_of(x: Any, y: Any = (0, 1, 1)) -> fs.ClientData:
    return fs.client_data(x, y, OWNERS)


def against(x: Any) -> None:
    """Compares a test set with the clients' samples."""
    sets = {"test": fs.data.eval_set(x, [0, 1, 1])}
    check_sets(data_of({"a": ONES, "b": ONES}), sets, 1, personal=False)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (
        lambda: data_of({"a": ONES, "b": ONES[:2]}),
        "x['b'] and y must have as many rows, got 2 and 3",
    ),
    "objects": (
        lambda: data_of({"a": ONES, "b": np.array([[1], [2, 3], []], object)}),
        "x['b'] must be numbers [3, ...], got object [3]: see fs.data.pad",
    ),
    "ragged": (
        lambda: data_of({"a": [[1], [2, 3], []]}),
        "x['a'] must have rows of one length, got lists of several: see fs.data.pad",
    ),
    "texts": (lambda: data_of(["a", "b", "c"]), "x must be numbers [3, ...], got <U1 [3]"),
    "scalars": (
        lambda: data_of((ONES, np.float32(2))),
        "x[1] must be numbers [3, ...], got float32 []",
    ),
    "masked": (
        lambda: data_of({"a": np.ma.masked_equal(ONES, 1)}),
        "x['a'] must have no masked values, got 6",
    ),
    "nothing": (lambda: data_of({}), "x must have at least one array, got {}"),
    "targets": (
        lambda: data_of(ONES, {"a": [0, 1, 1]}),
        "y must be one array, got a pytree with y['a']",
    ),
    "structure": (
        lambda: against(ONES),
        "test must have x['a'], x['b'] as the clients have, got x",
    ),
    "shape": (
        lambda: against({"a": ONES, "b": ONES[:, :1]}),
        "test.x['b'] must have samples of shape (2,) as the clients have, got (1,)",
    ),
    "dtype": (
        lambda: against({"a": ONES.astype(np.int32), "b": ONES}),
        "test.x['a'] must be float32 as the clients' samples are, got int32",
    ),
    "infinite": (
        lambda: against({"a": ONES, "b": np.inf * ONES}),
        "test.x['b'] must be finite in float32, got inf at [0, 0]",
    ),
    "data set": (
        lambda: fs.data.from_arrays("mine", {"a": ONES}, [0, 1, 1]),  # type: ignore[arg-type]
        "x must be one array, got a pytree with x['a']",
    ),
    "scaling": (
        lambda: fs.models.with_scaling(model_of(True), 0.0, 1.0).apply(
            model_of(True).init(jax.random.key(0)), split(np.ones((1, 6))), train=False
        ),
        "with_scaling: x must be one array, got a pytree with x['a'], x['b'][0], x['b'][1]",
    ),
    "no images": (
        lambda: augment.altered([])(jax.random.key(0), BATCH, None),  # type: ignore[arg-type]
        "augmentations are for images, uint8 [B, H, W, C], got float32 [2, 2] as x['a'], float32",
    ),
    "means": (
        lambda: mixup.peer_means(2).setup_traffic(None, data_of({"a": ONES})),  # type: ignore[arg-type]
        "FedMix: x must be one array, got a pytree with x['a']",
    ),
    "too long": (
        lambda: fs.data.pad([[1, 2, 3], [4]], 2),
        "length must be at least 3, the longest sequence, got 2: to cut, give [s[:2] for s in",
    ),
    "vectors": (
        lambda: fs.data.pad([np.ones((2, 3)), np.ones((1, 4))]),
        "sequences must have entries of one shape, got (3,), (4,)",
    ),
    "empty": (
        lambda: fs.data.pad([[], []]),
        "sequences must have entries of one shape, got no entry",
    ),
    "words": (lambda: fs.data.pad(["a b", "c"]), "sequences must be numbers [2, ...], got <U3 [2]"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_array(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()
