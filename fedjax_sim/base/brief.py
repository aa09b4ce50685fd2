"""Short texts of values that hold arrays, for ``repr``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_sim.base.parts import shown

LONGEST = 600
"""Characters of a ``repr``."""


class Text(str):
    """A text that is shown without quotes."""

    __slots__ = ()


def brief(value: Any, entries: Mapping[str, Any]) -> str:
    """Returns ``Kind(name=..., ...)`` of the entries that are not None, arrays by dtype and shape.

    >>> brief((), {"x": np.zeros((2, 3)), "n": 4, "other": None, "name": "a"})
    "tuple(x=float64[2, 3], n=4, name='a')"
    """
    told = [f"{name}={brief_text(e)}" for name, e in entries.items() if e is not None]
    return _cut(f"{type(value).__name__}({', '.join(told)})", LONGEST)


def brief_fields(value: Any) -> str:
    """Returns :func:`brief` of the fields of a NamedTuple or a dataclass, without empty ones."""

    def empty(field: Any) -> bool:
        return field is False or (isinstance(field, str | tuple | list | Mapping) and not field)

    names = getattr(value, "_fields", None) or value.__dataclass_fields__
    fields = {name: getattr(value, name) for name in names}
    return brief(value, {name: e for name, e in fields.items() if not empty(e)})


def brief_text(value: Any) -> str:
    """Returns a value in a few words.

    >>> brief_text({"w": np.zeros(3), "b": np.zeros(2)}), brief_text(("a",) * 99)
    ('<2 arrays, 5 numbers>', '<99 str>')
    """
    if isinstance(value, Text):
        return value
    if isinstance(value, str):
        return repr(_cut(value, 60))
    if isinstance(value, list | tuple | Mapping) and len(value):
        leaves = jax.tree.leaves(value)
        arrays = [leaf for leaf in leaves if hasattr(leaf, "shape")]
        if arrays and len(arrays) == len(leaves):
            size = sum(int(np.prod(a.shape)) for a in arrays)
            return f"<{len(arrays)} array{'s' * (len(arrays) > 1)}, {size:,} numbers>"
        plain = shown(value)
        items = [*(value.values() if isinstance(value, Mapping) else value)]
        scalar = all(isinstance(item, bool | int | float | str | None) for item in items)
        if hasattr(value, "_fields") or (scalar and len(plain) <= 60):
            return plain
        return f"<{len(value)} {type(items[0]).__name__}>"
    return _cut(shown(value), 80)


def over_runs(values: Any) -> Text:
    """Returns the mean of numbers ``[R]``, ± their standard deviation if there are several.

    >>> print(over_runs(np.array([0.5, 0.7])), over_runs(np.array([0.5])), over_runs([]), sep="; ")
    0.6 ± 0.1; 0.5; unknown
    """
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return Text("unknown")
    spread = f" ± {known.std():.2g}" if known.size > 1 else ""
    return Text(f"{known.mean():.4g}{spread}")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}…{text[-1]}"
