"""The README's Python runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_the_example_trains() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    scope: dict[str, Any] = {}
    exec(blocks[0], scope)
    assert scope["result"].accuracy[-1, 0] > 0.5  # chance is 0.1
