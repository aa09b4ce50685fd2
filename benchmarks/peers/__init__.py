"""Other simulators, each in a virtual environment of its own: `python -m benchmarks.peers`."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".peers"
PINS = {
    # The newest JAX that it runs with: it calls `jax.tree_map`.
    "fedjax": ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3"),
    "pfl": ("pfl[pytorch]==0.6.0", "torch==2.13.0"),
    "flower": ("flwr[simulation]==1.39.0", "torch==2.13.0"),
}
"""What is installed for each; pip chooses the rest."""


def python_of(name: str) -> Path:
    """The Python of a simulator's environment, whether it is there or not."""
    return FOLDER / name / "bin" / "python"
