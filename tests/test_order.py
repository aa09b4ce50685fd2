"""Sums over devices are added in one order, whoever connects the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import known, unordered_sums
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedjax_sim.engine import tree
from fedjax_sim.engine.order import AXIS, device_sum, in_order

DEVICES = 4


def mesh(devices: int = DEVICES) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def compiled(fn: Callable[..., Any], *args: Any, devices: int = DEVICES) -> tuple[Any, str]:
    """What ``fn`` gives for stacks whose rows are split, if they can be, and its program."""

    def within(*args: Any) -> Any:
        with in_order(mesh(devices)):
            return fn(*args)

    def split(a: Any) -> NamedSharding:
        rows = [AXIS] if a.ndim and len(a) % devices == 0 else []
        return NamedSharding(mesh(devices), PartitionSpec(*rows))

    places = jax.tree.map(split, args)
    program = jax.jit(within, in_shardings=places).lower(*args).compile()
    return program(*jax.device_put(args, places)), known(program.as_text())


def drawn(*shape: int) -> NDArray[np.float32]:
    """Of many magnitudes: in another order they add up to other bits."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


def one_by_one(parts: NDArray[np.float32]) -> NDArray[np.float32]:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def test_parts_are_added_in_the_order_of_the_devices() -> None:
    counts = np.arange(DEVICES, dtype=np.int32)
    parts: dict[str, Any] = {"w": drawn(DEVICES, 3, 7), "b": drawn(DEVICES, 5), "n": counts}
    found, program = compiled(device_sum, parts)
    for name, values in parts.items():
        np.testing.assert_array_equal(found[name], one_by_one(values))
    assert np.any(one_by_one(parts["w"][::-1]) != one_by_one(parts["w"]))
    assert not unordered_sums(program)
    # One exchange for each type, and in it each device adds a part of the numbers.
    assert program.count(" all-to-all(") == 2


WEIGHTS = np.abs(drawn(10))
MATRIX = np.stack([WEIGHTS, 2 * WEIGHTS])
# What sums rows, and the same by NumPy.
SUMS: dict[str, tuple[Callable[[jax.Array], Any], Callable[[NDArray[np.float32]], Any]]] = {
    "row_sum": (tree.row_sum, lambda rows: rows.sum(axis=0)),
    "of numbers": (lambda rows: tree.row_sum(rows[:, 0]), lambda rows: rows[:, 0].sum()),
    "mean": (
        lambda rows: tree.mean(rows, jnp.asarray(WEIGHTS[: len(rows)])),
        lambda rows: np.average(rows, axis=0, weights=WEIGHTS[: len(rows)]),
    ),
    "mix to one": (
        lambda rows: tree.mix(jnp.asarray(WEIGHTS[: len(rows)]), rows),
        lambda rows: WEIGHTS[: len(rows)] @ rows,
    ),
    "mix": (
        lambda rows: tree.mix(jnp.asarray(MATRIX[:, : len(rows)]), rows),
        lambda rows: MATRIX[:, : len(rows)] @ rows,
    ),
    "under two vmaps": (
        lambda rows: jax.vmap(jax.vmap(tree.row_sum, in_axes=1))(jnp.stack([rows, -rows])),
        lambda rows: np.stack([rows.sum(axis=0), -rows.sum(axis=0)]),
    ),
}


@pytest.mark.parametrize("rows", [8, 3, 1, 10])
@pytest.mark.parametrize("name", SUMS)
def test_rows_are_added_on_each_device_and_then_in_order(name: str, rows: int) -> None:
    fn, wanted = SUMS[name]
    stack = drawn(rows, 9)
    found, program = compiled(fn, stack)
    np.testing.assert_allclose(found, wanted(stack), rtol=1e-5, atol=2e-5)
    assert not unordered_sums(program)


def test_of_a_row_a_device_the_bits_are_known() -> None:
    stack = drawn(DEVICES, 9)
    np.testing.assert_array_equal(compiled(tree.row_sum, stack)[0], one_by_one(stack))


def test_left_to_xla_the_order_is_anyones() -> None:
    """On two devices there is but one order; a device alone adds as ever."""
    stack = drawn(8, 9)
    assert unordered_sums(compiled(lambda rows: rows.sum(axis=0), stack)[1])
    assert unordered_sums(compiled(tree.row_sum, stack, devices=2)[1])
    alone = jax.shard_map(tree.row_sum, mesh=mesh(), in_specs=PartitionSpec(AXIS),
                          out_specs=PartitionSpec(AXIS))  # fmt: skip
    found, program = compiled(alone, stack)
    np.testing.assert_array_equal(found, stack.reshape(DEVICES, 2, 9).sum(axis=1).ravel())
    assert "all-" not in program
