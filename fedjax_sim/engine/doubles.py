"""64-bit numbers in a thread, within a block."""

try:
    from jax import enable_x64
except ImportError:  # before JAX 0.8, which renamed it
    from jax.experimental import enable_x64  # type: ignore[attr-defined,no-redef]

__all__ = ["enable_x64"]
