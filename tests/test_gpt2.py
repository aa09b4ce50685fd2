"""Pretrained weights: a file of Hugging Face's names trains as the transformer by hand says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees, play
from safetensors.numpy import save_file
from test_transformer import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, by_hand, windows

import fedjax_sim as fs
from fedjax_sim.cli.build import load_model
from fedjax_sim.data import from_arrays

POSITIONS = LENGTH + 2
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_positions": POSITIONS,
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
}
Arrays = dict[str, np.ndarray]


def theirs() -> Arrays:
    """Arrays as transformers' ``GPT2Model`` has them; no two leaves can be exchanged unnoticed."""
    rng = np.random.default_rng(5)

    def draw(*shape: int, mean: float = 0) -> np.ndarray:
        return rng.normal(mean, 0.3, shape).astype(np.float32)

    arrays = {"wte.weight": draw(VOCABULARY, WIDTH), "wpe.weight": draw(POSITIONS, WIDTH)}
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    norms = ["ln_f"]
    for i in range(LAYERS):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        arrays[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 4, 4), np.float32))  # the causal mask
        for name, (inputs, outputs) in sizes.items():
            arrays[f"h.{i}.{name}.weight"] = draw(inputs * WIDTH, outputs * WIDTH)
            arrays[f"h.{i}.{name}.bias"] = draw(outputs * WIDTH)
    for name in norms:
        arrays |= {f"{name}.weight": draw(WIDTH, mean=1), f"{name}.bias": draw(WIDTH)}
    return arrays


def write(folder: Path, arrays: Arrays, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(arrays, folder / "model.safetensors")
    return folder


def as_by_hand(arrays: Arrays) -> dict[str, Any]:
    """The same weights as ``by_hand`` takes them, written out apart from the package's table."""

    def pair(name: str, first: str) -> Arrays:
        return {first: arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def layer(i: int) -> dict[str, Any]:
        return {
            "LayerNorm_0": pair(f"h.{i}.ln_1", "scale"),
            "LayerNorm_1": pair(f"h.{i}.ln_2", "scale"),
            "qkv": pair(f"h.{i}.attn.c_attn", "kernel"),
            "out": pair(f"h.{i}.attn.c_proj", "kernel"),
            "up": pair(f"h.{i}.mlp.c_fc", "kernel"),
            "down": pair(f"h.{i}.mlp.c_proj", "kernel"),
        }

    return {
        "tokens": arrays["wte.weight"],
        "places": arrays["wpe.weight"],
        "LayerNorm_0": pair("ln_f", "scale"),
        "next": {"kernel": arrays["wte.weight"].T},
    } | {f"layer_{i}": layer(i) for i in range(LAYERS)}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_its_logits_are_gpt_2s(tmp_path: Path, prefix: str) -> None:
    arrays = theirs()
    folder = write(tmp_path, {prefix + name: array for name, array in arrays.items()})
    x, task = windows(2), fs.tasks.next_token(VOCABULARY)
    text = from_arrays("text", x, x.astype(np.int32), scale=False, task=task)
    model = load_model(f"gpt2(folder='{folder}')", text)
    found, _ = jax.jit(lambda v, x: model.apply(v, x, train=False))(
        model.init(jax.random.key(0)), x
    )
    wanted = np.stack([by_hand(as_by_hand(arrays), window) for window in x])
    assert wanted.std() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_adapters_train_beside_it(tmp_path: Path) -> None:
    arrays = theirs()
    pretrained = fs.models.gpt2((LENGTH,), VOCABULARY, str(write(tmp_path, arrays)))
    adapted = fs.models.lora(pretrained, rank=2)
    x = windows(6)
    y = np.roll(x, -1, axis=1).astype(np.int32)
    y[:, :3] = -1  # the prompt, which is not learned
    local = fs.local_sgd(
        fs.empirical_risk(adapted, fs.tasks.next_token(VOCABULARY).loss),
        optax.sgd(1.0),
        trained=fs.leaves.named("A", "B"),
    )
    split = fs.exchange.split(frozen=fs.leaves.named("trunk"))
    algorithm = fs.fedavg(local, clients_per_round=2).replace(exchange=split)
    data = fs.client_data(x, y, fs.partition.iid(np.zeros(6, int), 2, seed=0))
    params = play(algorithm, adapted, data, rounds=1).servers[-1].params
    trunk = as_by_hand(arrays) | {"places": arrays["wpe.weight"][:LENGTH]}
    assert_trees(params["trunk"], trunk)
    del params["trunk"]
    assert all(leaf.any() for leaf in jax.tree.leaves(params))


BAD = [
    ({"vocab_size": 11}, "has a vocabulary of 11, the data one of 10"),
    ({"n_positions": 4}, r"shape must be \(tokens,\), at most 4 for the weights in .*, got \(6,\)"),
    ({"model_type": "llama"}, "model_type must be 'gpt2', got 'llama'"),
    ({"n_head": None}, "config.json must be the configuration of a GPT-2"),
    ({"n_layer": 3}, "it lacks h.2.ln_1.weight"),
    ({"n_embd": 8}, r"LayerNorm_0/bias must have the shape \[8\], got \[16\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_other_weights_are_rejected(tmp_path: Path, changes: Any, message: str) -> None:
    folder = write(tmp_path, theirs(), **changes)
    with pytest.raises(ValueError, match=message):
        fs.models.gpt2((LENGTH,), VOCABULARY, str(folder))
