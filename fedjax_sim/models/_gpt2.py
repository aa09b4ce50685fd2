"""Pretrained GPT-2 weights for the transformer, from a folder of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedjax_sim.base import Model
from fedjax_sim.base.words import shortened
from fedjax_sim.models._transformer import transformer
from fedjax_sim.models.weights import starting_from, variables_of

_FILES = ("config.json", "model.safetensors")
_LAYER = {
    "LayerNorm_0": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "LayerNorm_1": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_REQUIRED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def gpt2(shape: Sequence[int], classes: int, folder: str = "gpt2", remat: bool = False) -> Model:
    """Predicts the next token with pretrained weights of GPT-2, from which every run starts.

    The network is :func:`fedjax_sim.models.transformer` with ``bias=True``. Its head is a copy of
    the token embeddings, which may be trained apart from them; GPT-2 ties the two. It has no
    dropout. With :func:`fedjax_sim.models.lora` the weights are the frozen trunk.

    Args:
        shape: ``(T,)``, the window length, at most the ``n_positions`` of the weights.
        classes: M, the size of the vocabulary, which must be that of the weights.
        folder: the folder with ``config.json`` and ``model.safetensors``, such as
            ``hf download openai-community/gpt2 --local-dir gpt2`` makes. No code in them runs.
        remat: see :func:`fedjax_sim.models.transformer`.

    Returns:
        A model with ``f32[B, t, M]`` logits.

    Raises:
        ImportError: if the package safetensors is missing.
        FileNotFoundError: if the folder lacks one of the two files.
        ValueError: if the files are of another architecture, vocabulary or length.

    Source: Radford et al. 2019 <radford2019language>.

    Example:
        >>> gpt2((64,), 50257, "w")
        Traceback (most recent call last):
        FileNotFoundError: w lacks config.json: hf download openai-community/gpt2 --local-dir w
    """
    source = Path(folder)
    for file in _FILES:
        if not (source / file).is_file():
            advice = f"hf download openai-community/gpt2 --local-dir {source}"
            raise FileNotFoundError(f"{source} lacks {file}: {advice}")
    config = _read_config(source / _FILES[0])
    if len(shape) != 1 or not 1 <= shape[0] <= config["n_positions"]:
        raise ValueError(
            f"shape must be (tokens,), at most {config['n_positions']} for the weights in {source},"
            f" got {tuple(shape)}"
        )
    if classes != config["vocab_size"]:
        raise ValueError(
            f"{source} has a vocabulary of {config['vocab_size']}, the data one of {classes}: "
            "tokenise the text with the tokenizer of the weights"
        )
    width, layers, heads = (config[name] for name in ("n_embd", "n_layer", "n_head"))
    model = transformer(shape, classes, width, layers, heads, remat, bias=True)
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError("gpt2 reads model.safetensors: pip install safetensors") from error
    arrays = load_file(source / _FILES[1])
    weights = variables_of(_FILES[1], _renamed(arrays, layers, shape[0]), model)
    return starting_from(model, weights)


def _read_config(file: Path) -> dict[str, Any]:
    """Reads the sizes; settings that the file leaves out have the values of ``_REQUIRED``."""
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name in ("n_positions", "vocab_size", "n_embd", "n_layer", "n_head"):
            config[name] = int(config[name])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be the configuration of a GPT-2: {error!r}") from error
    for name, value in _REQUIRED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{file}: {name} must be {value!r}, got {config[name]!r}")
    return config


def _renamed(
    arrays: Mapping[str, NDArray[Any]], layers: int, length: int
) -> dict[str, NDArray[Any]]:
    """Returns the arrays by the names of our leaves, without buffers such as attention masks."""
    found = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    theirs = {"LayerNorm_0": "ln_f"} | {
        f"layer_{i}/{ours}": f"h.{i}.{name}" for i in range(layers) for ours, name in _LAYER.items()
    }
    names = {"tokens": "wte.weight", "places": "wpe.weight"}
    for ours, name in theirs.items():
        first = "scale" if "LayerNorm" in ours else "kernel"
        names |= {f"{ours}/{first}": f"{name}.weight", f"{ours}/bias": f"{name}.bias"}
    missing = [name for name in names.values() if name not in found]
    if missing:
        raise ValueError(
            f"{_FILES[1]} must have the arrays of a GPT-2: it lacks {shortened(missing, 3)}"
        )
    weights = {ours: found[name] for ours, name in names.items()}
    weights["places"] = weights["places"][:length]
    weights["next/kernel"] = weights["tokens"].T
    return weights
