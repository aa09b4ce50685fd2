"""Personal models: the received model, a fine-tuned one, or a model that the client keeps."""

from fedjax_sim.personal._models import accompanied as accompanied
from fedjax_sim.personal._models import added as added
from fedjax_sim.personal._models import as_received as as_received
from fedjax_sim.personal._models import ditto as ditto
from fedjax_sim.personal._models import fine_tuned as fine_tuned
from fedjax_sim.personal._models import interpolated as interpolated
from fedjax_sim.personal._models import stored as stored
from fedjax_sim.personal._starts import adaptive_start as adaptive_start
from fedjax_sim.personal._starts import adaptively_mixed as adaptively_mixed

__all__ = [
    "accompanied",
    "adaptively_mixed",
    "added",
    "as_received",
    "fine_tuned",
    "interpolated",
    "stored",
]
