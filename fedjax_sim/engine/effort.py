"""How much a program computes, estimated before it is compiled."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Jaxpr

from fedjax_sim.engine.memory import programs_of


def step_flops(jaxpr: Jaxpr, loops: int = 2) -> float:
    """Returns the FLOPs of the matrix products and convolutions of a local step.

    A step stands in two loops whose length is data, over rounds and over steps; scans within it
    count with their length. What is done once a round, or once a visit, does not count.

    Args:
        jaxpr: the program of some rounds.
        loops: how many loops of unknown length what counts stands in.

    >>> import jax, jax.numpy as jnp
    >>> step = lambda _, x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]
    >>> visit = lambda x, n: (jax.lax.fori_loop(0, n, step, x), None)
    >>> round = lambda _, x: jax.lax.scan(visit, x @ x, jnp.arange(5))[0]
    >>> rounds = lambda n, x: jax.lax.fori_loop(0, n, round, x)
    >>> step_flops(jax.make_jaxpr(rounds)(9, jnp.ones((2, 2))).jaxpr)  # 3 products of 16 FLOPs
    48.0
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inside, times = loops - (name == "while"), 1
        if name == "scan" and loops <= 0:
            times = params["length"]
        total += times * sum(step_flops(program, inside) for program in programs_of(equation))
        if loops > 0 or name not in ("dot_general", "conv_general_dilated"):
            continue
        numbers = params["dimension_numbers"]
        arrays: list[Any] = [a.aval for a in (*equation.invars, *equation.outvars)]
        left, right, out = arrays
        if name == "dot_general":
            terms = math.prod(left.shape[axis] for axis in numbers[0][0])
        else:
            terms = right.size // right.shape[numbers.rhs_spec[0]]
        total += 2.0 * terms * out.size
    return total
