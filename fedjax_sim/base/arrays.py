"""Names for arrays and pytrees."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array
PyTree = Any
"""A nested container of arrays; ``[S, *p]`` marks a stack of S of them on a leading axis."""
