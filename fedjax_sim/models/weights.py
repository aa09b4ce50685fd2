"""Weights in files, models that start from given weights, and GPT-2's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Model, PyTree, Variables
from fedjax_sim.base.files import read_npz, write_npz
from fedjax_sim.base.words import shortened
from fedjax_sim.models._transformer import transformer
from fedjax_sim.models.leaves import path_of

Shapes = dict[str, Any]


def save_weights(file: str | os.PathLike[str], variables: Variables) -> None:
    """Writes the weights of one model to a .npz file, with one array per leaf.

    Arrays are named by the paths that :class:`fedjax_sim.leaves.named` matches; bfloat16, which
    .npz lacks, is stored as float32.

    Args:
        file: the file, which is overwritten.
        variables: parameters and state of a single run; index a multi-seed result first:
            ``jax.tree.map(lambda w: w[0], result.variables)``.

    Raises:
        ValueError: if two leaves have the same name.

    Example:
        >>> import tempfile, fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> file = Path(tempfile.mkdtemp()) / "weights.npz"
        >>> save_weights(file, model.init(jax.random.key(0)))
        >>> sorted(np.load(file))
        ['Dense_0/Dense_0/bias', 'Dense_0/Dense_0/kernel']
    """
    arrays = {path: _plain(np.asarray(leaf)) for path, leaf in _by_path(variables).items()}
    write_npz(Path(file), arrays)


def load_weights(file: str | os.PathLike[str], model: Model) -> Variables:
    """Reads weights that :func:`save_weights` has written.

    ``simulate(initial=)`` and :func:`fedjax_sim.models.starting_from` start from them.

    Args:
        file: the .npz file.
        model: the model of the weights.

    Returns:
        The variables, in the model's dtypes.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is not a .npz file of finite numbers, or leaves are missing, unknown or of
            other shapes; names them.

    Example:
        >>> import tempfile, fedjax_sim as fs
        >>> file = Path(tempfile.mkdtemp()) / "weights.npz"
        >>> save_weights(file, fs.models.logistic((4,), 3).init(jax.random.key(0)))
        >>> load_weights(file, fs.models.logistic((4,), 2))
        Traceback (most recent call last):
        ValueError: weights.npz: Dense_0/Dense_0/bias must have the shape [2], got [3]
    """
    source = Path(file)
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    return variables_of(source.name, read_npz(source), model)


def variables_of(name: str, found: Shapes, model: Model) -> Variables:
    """Returns arrays by path as a model's variables; ``name`` is the file in error messages."""
    like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    wanted = _by_path(like)
    missing = [path for path in wanted if path not in found]
    unknown = [path for path in found if path not in wanted]
    if missing or unknown:
        faults = [f"lacks {shortened(missing, 3)}"] * bool(missing)
        faults += [f"has {shortened(unknown, 3)}, which the model does not have"] * bool(unknown)
        raise ValueError(f"{name} must have the model's leaves: it {' and '.join(faults)}")
    for path, leaf in wanted.items():
        given = found[path]
        if given.shape != leaf.shape:
            runs = given.shape[1:] == leaf.shape
            hint = f": save the weights of one of the {len(given)} runs" if runs else ""
            raise ValueError(
                f"{name}: {path} must have the shape {list(leaf.shape)}, got "
                f"{list(given.shape)}{hint}"
            )
        numbers = np.issubdtype(given.dtype, np.floating) == jax.numpy.issubdtype(
            leaf.dtype, np.floating
        )
        if given.dtype.kind not in "biuf" or not numbers or not np.isfinite(given).all():
            raise ValueError(
                f"{name}: {path} must be finite numbers of {leaf.dtype}, got {given.dtype}"
            )
    leaves = [found[path].astype(leaf.dtype) for path, leaf in wanted.items()]
    loaded: Variables = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return loaded


def starting_from(model: Model, variables: Variables) -> Model:
    """Returns a model with fixed initial weights, for any key.

    Args:
        model: any model.
        variables: its weights, for instance from :func:`fedjax_sim.models.load_weights`.

    Returns:
        The model; inside :func:`fedjax_sim.models.lora` its weights are the trunk's.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> trained = model.init(jax.random.key(7))
        >>> tuned = fs.models.lora(starting_from(model, trained), rank=2)
        >>> tuned.init(jax.random.key(0)).params["trunk"] is trained.params
        True
    """

    def init(key: Array) -> Variables:
        del key
        return variables

    return model._replace(init=init)


def _by_path(variables: PyTree) -> Shapes:
    """Returns the leaves by path, without "params" and "state"."""
    found = jax.tree_util.tree_leaves_with_path(variables)
    named = {path_of(entries[1:]): leaf for entries, leaf in found}
    if len(named) < len(found):
        raise ValueError(
            "weights must have a unique name for each leaf, got two with the same name"
        )
    return named


def _plain(leaf: NDArray[Any]) -> NDArray[Any]:
    """Converts dtypes that .npz lacks, such as bfloat16, to float32."""
    return leaf if leaf.dtype.kind in "biuf" else leaf.astype(np.float32)


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
