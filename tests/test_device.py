"""What holds on one device of any kind: ``JAX_PLATFORMS=cuda,cpu pytest -m device`` on a GPU.

The other side of a comparison is a CPU device that is not the default one, with all clients under
one vmap: on a CPU, too, its programs are others than those of the default device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import some_slow

import fedjax_sim as fs
from benchmarks.methods import (
    CLASSES,
    COHORT,
    FEATURES,
    METHODS,
    MODEL,
    ROUNDS,
    gap,
    outcome,
    same_bits,
    trained,
)
from fedjax_sim.engine.doubles import enable_x64
from fedjax_sim.engine.draws import distinct
from fedjax_sim.models import convolutions

CPU = jax.devices("cpu")[-1]
HERE, ON_CPU = fs.make_execution(1), fs.make_execution([CPU], chunk=0)
# Of the largest entry of an array. Accelerators add and take roots in other ways than CPUs.
TOLERANCE = 1e-5 if jax.default_backend() == "cpu" else 1e-4
ONE_PHASE = functools.partial(fs.phase_shift, phases=1)
pytestmark = pytest.mark.device
ACCELERATED = jax.default_backend() != "cpu"
elsewhere = pytest.mark.skipif(not ACCELERATED, reason="other files look at this on CPU")


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """Accelerators multiply float32 with fewer bits unless they are told not to."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    "name", some_slow(METHODS if ACCELERATED else ["fedavg", "scaffold", "stc"])
)
def test_a_method_trains_as_on_another_device(name: str) -> None:
    here, there = (trained(METHODS[name], execution) for execution in (HERE, ON_CPU))
    for result, device in ((here, jax.devices()[0]), (there, CPU)):
        assert all(a.devices() == {device} for a in jax.tree.leaves(result.state))
    for drawn in ("client", "source", "samples", "steps"):
        assert same_bits(getattr(here.metrics, drawn), getattr(there.metrics, drawn)), drawn
    assert gap(outcome(here), outcome(there)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "median", "dp_fedavg"])
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    one, again = (outcome(trained(METHODS[name], HERE)) for _ in range(2))
    assert same_bits(one, again)


@elsewhere
@pytest.mark.slow
def test_phase_shift_of_one_phase_is_fedavg() -> None:
    one, other = (outcome(trained(method, HERE)) for method in (ONE_PHASE, fs.fedavg))
    assert gap(one, other) <= TOLERANCE


@elsewhere
@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 2 * COHORT])
def test_lanes_change_no_result(lanes: int) -> None:
    one, other = (trained(fs.fedavg, fs.make_execution(1, lanes=count)) for count in (0, lanes))
    assert one.steps == other.steps
    assert gap(outcome(other), outcome(one)) <= TOLERANCE


@pytest.mark.parametrize("way", some_slow(convolutions.LOWERINGS))
def test_a_convolution_and_its_gradients_are_exact(way: convolutions.Lowering) -> None:
    """Beside XLA's own in float64 on a CPU; under a vmap over kernels, as clients have them."""
    rng, pads = np.random.default_rng(0), ((1, 1), (1, 1))
    x, kernel, dy = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((2, 3, 8, 8, 16), (2, 3, 3, 16, 16), (2, 3, 8, 8, 16))
    )

    def computed(conv: Callable[..., jax.Array], *arrays: Any) -> Any:
        def both(x: Any, kernel: Any, dy: Any) -> Any:
            y, back = jax.vjp(conv, x, kernel)
            return y, *back(dy)

        return jax.device_get(jax.jit(jax.vmap(both))(*arrays))

    found = computed(lambda x, k: convolutions.conv(x, k, pads, way), x, kernel, dy)
    exact = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding=pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    with enable_x64(True), jax.default_device(CPU):
        wanted = computed(exact, *(a.astype(np.float64) for a in (x, kernel, dy)))
    assert gap(found, wanted) <= TOLERANCE


class _Dropped(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(CLASSES)(x))


def _dropped(key: jax.Array) -> jax.Array:
    model = fs.models.from_linen(_Dropped(), (FEATURES,))
    out, _ = model.apply(model.init(key), jnp.ones((8, FEATURES)), train=True, key=key)
    return out == 0


DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "bits": lambda key: jax.random.bits(key, (5,)),
    "permutation": lambda key: jax.random.permutation(key, 50),
    "cohort": lambda key: distinct(key, 5, 50),
    "cohort of many": lambda key: distinct(key, 5, 10**6),
    "dropout": _dropped,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_depends_on_its_key_alone(name: str) -> None:
    """Not on the device, nor on whether others are drawn beside it."""
    keys = jax.random.split(jax.random.key(7), 3)
    found = jax.device_get(jax.jit(jax.vmap(DRAWS[name]))(keys))
    assert len(np.unique(found, axis=0)) == len(keys)
    alone = jax.jit(DRAWS[name])
    cpu_keys = jax.device_put(keys, CPU)
    assert same_bits(found, np.stack([jax.device_get(alone(key)) for key in cpu_keys]))


@pytest.mark.slow
def test_bfloat16_is_near() -> None:
    half = fs.models.with_compute_dtype(MODEL, jnp.bfloat16)
    whole, mixed = (outcome(trained(fs.fedavg, HERE, model)) for model in (MODEL, half))
    assert TOLERANCE < gap(mixed, whole) < 0.05


@elsewhere
@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "phase_shift"])
def test_a_checkpoint_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    whole = trained(method, HERE, rounds=4, eval_every=2)
    trained(method, HERE, rounds=2, eval_every=2, checkpoints=tmp_path)
    resumed = trained(method, HERE, rounds=4, eval_every=2, checkpoints=tmp_path)
    assert resumed.evaluations[0].round == 2
    assert same_bits(outcome(resumed), outcome(whole))


@elsewhere
@pytest.mark.slow
def test_rounds_at_once_are_rounds_one_by_one() -> None:
    method = METHODS["radfed"]
    one, other = (outcome(trained(method, HERE, eval_every=every)) for every in (1, ROUNDS))
    assert gap(one, other) <= TOLERANCE
