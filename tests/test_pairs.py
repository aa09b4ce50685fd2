"""A round of every network of the papers on the data that it is for, real data where they are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import largest_change
from test_data import few_decoded

import fedjax_sim as fs
from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.defaults import DEFAULTS, TABLE
from fedjax_sim.data import DATASETS, Dataset, load_dataset, pooled
from fedjax_sim.models import convolutions, layers, nets

PAIRS = [
    ("digits", "mlp"),
    ("mnist", "mnist_cnn"),
    ("fashion_mnist", "fashion_cnn"),
    ("cifar10", "cifar_cnn"),
    ("cifar10", "two_conv"),
    ("cifar10", "resnet20"),
    ("cifar10", "mobilenet_v2"),
    ("shakespeare", "lstm"),
    ("tiny_shakespeare_tokens", "transformer"),
    ("covertype", "ffn"),
    ("eicu_demo", "ffn"),
    ("synthetic(1, 1)", "logistic"),
    ("diabetes", "linear"),
]
OTHER_TEXT = [("tiny_shakespeare", "lstm"), ("shakespeare_tokens", "transformer")]
"""Data whose network has another vocabulary and is else the one above."""
TRACED = {"mlp", "fashion_cnn", "two_conv", "logistic", "linear", "resnet20", "mobilenet_v2"}
"""Networks that other tests train, or whose layers are those of mnist_cnn and cifar_cnn.

tests/test_models.py trains a ResNet of fewer blocks and the layers of MobileNet that are trained.
"""
SAMPLES = 12


@functools.lru_cache(maxsize=1)
def dataset_of(name: str) -> Dataset:
    with few_decoded("train", "test"):
        return load_dataset(name)


@pytest.fixture
def data(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Networks look for their pretrained weights where the data are."""
    if name.split("(")[0] not in ("digits", "diabetes", "synthetic"):
        monkeypatch.setenv("FEDJAX_SIM_DATA_DIR", request.getfixturevalue("data_dir"))
    return dataset_of(name)


@pytest.fixture
def direct_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile in half the time of Winograd's, which tests/test_models.py finds equal."""
    direct = functools.partial(convolutions.conv, lowering="direct")
    for module in (layers, nets):
        monkeypatch.setattr(module, "conv", direct)


@pytest.mark.slow
@pytest.mark.usefixtures("direct_convolutions")
@pytest.mark.parametrize(("name", "net"), PAIRS)
def test_a_round(data: Dataset, net: str) -> None:
    """Of one program, in which each way of the network is traced once."""
    model, everyone, task = load_model(net, data), pooled(data), data.task
    x, y = everyone.train_x[:SAMPLES], everyone.train_y[:SAMPLES]
    task.check("y", y)
    clients = fs.client_data(x, y, fs.partition.iid(y, 3, seed=0))
    objective = fs.empirical_risk(model, task.loss, l2=1e-4)
    local = fs.local_sgd(objective, optax.sgd(1e-3), batch_size=4)
    algorithm = fs.fedavg(local, clients_per_round=2).on(fs.make_execution(devices=1))

    @jax.jit
    def go(key: Any, clients: fs.ClientData) -> Any:
        start = model.init(key)
        state, report = algorithm.step(key, algorithm.init(key, start, clients), clients)
        outputs, _ = model.apply(state.server, clients.x[:2], train=False)
        return start, state.server, report, task.loss(outputs, clients.y[:2])

    if net in TRACED:
        jax.eval_shape(go, jax.random.key(0), clients)
        return
    start, trained, report, loss = go(jax.random.key(0), clients)
    assert largest_change(start, trained) > 0
    assert report.samples == 2 * SAMPLES // 3
    assert np.isfinite(loss).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "net"), OTHER_TEXT)
def test_another_text_fits(data: Dataset, net: str) -> None:
    load_model(net, data)
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        data.task.check("y", y)
        assert x.max() < data.task.outputs


def test_no_data_set_is_left_out() -> None:
    """Some are tested by files that tests write: eICU must not be passed on, others are large."""
    covered = {name.split("(")[0] for name, _ in PAIRS + OTHER_TEXT}
    assert (
        covered | {"eicu", "cifar100", "emnist", "svhn", "femnist"}
        == {*DATASETS, "synthetic"}
        == set(DEFAULTS) - {"tfds", TABLE}
    )
    assert {net for _, net in PAIRS} == {*fs.models.MODELS} - {"gpt2"}  # its weights are in a file
