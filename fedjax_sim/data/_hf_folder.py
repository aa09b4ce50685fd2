"""Local Hugging Face data sets, read without network and without files outside their folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from fedjax_sim.base.files import check_archive, check_memory
from fedjax_sim.data.folder import check_inside

FILES = {".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("dataset_dict.json", "state.json")


def read_local(datasets: Any, place: Path, config: str | None, scratch: str) -> Any:
    """Reads a folder written by ``save_to_disk``, another folder, or a .parquet or .arrow file.

    ``config`` selects a configuration of another folder; the library writes into ``scratch``.
    """
    if place.is_file():
        if place.suffix not in FILES or config is not None:
            raise ValueError(
                f"a file must be .parquet or .arrow, without config=, got {place.name}"
            )
        kind = FILES[place.suffix]
        loaded = _read(datasets.load_dataset, kind, data_files=str(place), cache_dir=scratch)
    elif any((place / name).is_file() for name in SAVED):
        if config is not None:
            raise ValueError(f"config={config} is for the Hub's data sets, not for a folder")
        check_inside(place)
        splits = _read(_splits, place)
        _check_names(place, splits)
        _check_names(place, _read(_parts, place, splits))
        loaded = _read(datasets.load_from_disk, str(place))
    else:
        check_inside(place)
        for file in place.rglob("*"):
            if file.is_file():
                _read(check_archive, file)
        _check_names(place, _read(_card_files, place))
        loaded = _read(datasets.load_dataset, str(place), config, cache_dir=scratch)
    for rows in loaded.values() if isinstance(loaded, dict) else [loaded]:
        check_memory(rows.data.nbytes)
    check_images(datasets, loaded, [Path(scratch).resolve(), place.resolve()])
    return loaded


def _splits(place: Path) -> list[str]:
    """Returns the folders of the splits that ``save_to_disk`` wrote; [""] without splits."""
    listed = place / SAVED[0]
    return json.loads(listed.read_text("utf-8"))["splits"] if listed.is_file() else [""]


def _parts(place: Path, splits: Sequence[str]) -> list[str]:
    """Returns the names of the splits' files."""
    states = [json.loads((place / split / SAVED[1]).read_text("utf-8")) for split in splits]
    return [part["filename"] for state in states for part in state["_data_files"]]


def _card_files(place: Path) -> list[str]:
    """Returns the file patterns that the folder's card lists."""
    import yaml  # type: ignore[import-untyped, unused-ignore]
    from huggingface_hub import DatasetCard

    cards = []
    if (place / "README.md").is_file():
        cards.append(DatasetCard.load(place / "README.md").data.to_dict())
    if (place / ".huggingface.yaml").is_file():
        cards.append(yaml.safe_load((place / ".huggingface.yaml").read_text("utf-8")) or {})
    configs = [config for card in cards for config in card.get("configs") or ()]
    return [*_texts([[config.get("data_files"), config.get("data_dir")] for config in configs])]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _check_names(place: Path, names: Sequence[str]) -> None:
    for name in names:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or ":" in name or name.startswith("~"):
            raise ValueError(f"{place} must name files of its own, got {name!r}")


def check_images(datasets: Any, loaded: Any, roots: Sequence[Path]) -> None:
    """Raises ValueError if images stored outside the rows are not in one of the ``roots``."""
    parts = [*loaded.values()] if isinstance(loaded, dict) else [loaded]
    for rows in parts:
        for column, feature in rows.features.items():
            if not isinstance(feature, datasets.Image):
                continue
            plain = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))
            for chunk in plain.with_format("arrow")[:].column(column).chunks:
                absent = chunk.field("bytes").is_null()
                for name in chunk.field("path").filter(absent).drop_null().unique().to_pylist():
                    path = Path(name).resolve()
                    if not any(path.is_relative_to(root) for root in roots):
                        raise ValueError(f"{roots[-1]} must name files of its own, got {name!r}")


def _read(load: Any, *args: Any, **settings: Any) -> Any:
    try:
        return load(*args, **settings)
    except Exception as error:  # pyarrow, fsspec and the builders raise many types
        raise ValueError(f"cannot be read: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Returns an error's message on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} …"
