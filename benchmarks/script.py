"""What the scripts that train share: records of what was found."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_sim.run.environment import commit, environment

commit()  # of the code that runs, whatever is edited meanwhile


def write_record(path: Path, started: float, **content: Any) -> None:
    """Writes a JSON file of results and their provenance; `started` is a `time.time()`."""
    record = {
        **environment(started=started),
        "seconds": round(time.time() - started, 1),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False, default=_listed)
    path.write_text(text + "\n", encoding="utf-8")


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.round(4).tolist()
    raise TypeError(f"no JSON form of {type(value).__name__}")
