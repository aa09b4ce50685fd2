"""The product of dense layers: with outer products in place of matrix products, the same slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.base import Array
from fedjax_sim.models.layers import outer_products, product

RNG = np.random.default_rng(0)
KERNEL, ALONG = (jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32) for _ in range(2))


def slopes(x: Array, kernel: Array, along: Array, multiply: object) -> tuple[Array, ...]:
    """Gradients by both arguments, and the second derivative along a direction."""

    def risk(x: Array, kernel: Array) -> Array:
        return jnp.sum(jnp.tanh(multiply(x, kernel)) ** 2)  # type: ignore[operator]

    gradient = jax.grad(risk, (0, 1))
    turned = jax.jvp(lambda k: gradient(x, k), (kernel,), (along,))[1]
    return (*gradient(x, kernel), *turned)


@pytest.mark.parametrize(("rows", "changed"), [(1, False), (2, True), (10, True), (17, False)])
def test_outer_products_are_the_gradient(rows: int, changed: bool) -> None:
    """Also in forward mode and under vmap over kernels; for one row or many nothing changes."""
    x = jnp.asarray(RNG.normal(size=(2, rows, 5)), jnp.float32)
    kernels = jnp.stack([KERNEL, ALONG])

    def both(multiply: object) -> jax.stages.Traced:
        one = lambda x, k: slopes(x, k, ALONG, multiply)  # noqa: E731
        return jax.jit(jax.vmap(one)).trace(x, kernels)

    traced = both(product)
    with outer_products(True):
        lowered = traced.lower()
    assert ("optimization_barrier" in lowered.as_text()) == changed
    expected = both(jnp.matmul).lower().compile()(x, kernels)
    for found, wanted in zip(lowered.compile()(x, kernels), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_programs_use_matrix_products_by_default() -> None:
    """Without XLA's optimisations, and on accelerators, the sum would be slower."""
    gradient = jax.jit(jax.grad(lambda k: product(jnp.ones((4, 5)), k).sum()))
    compiled = gradient.lower(KERNEL).compile()
    assert "dot(" in (compiled.as_text() or "")
