"""Personal models: the received model, a fine-tuned one, or a model that the client keeps."""

from fedjax_sim.personal._models import (
    accompanied,
    added,
    as_received,
    ditto,
    fine_tuned,
    interpolated,
    stored,
)
from fedjax_sim.personal._starts import adaptive_start, adaptively_mixed

__all__ = [
    "accompanied",
    "adaptively_mixed",
    "added",
    "as_received",
    "fine_tuned",
    "interpolated",
    "stored",
]
