"""Codes by what a seed draws: a mask, a rotation, a subspace."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree, Sending, Sent, Variables, part
from fedjax_sim.compression._codes import Compressor
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation, signs

SEED = 8  # bytes


@part
def random_mask(share: float, then: Compressor | None = None, *, scaled: bool = True) -> Compressor:
    r"""A random share of the entries.

    .. math:: C(x)_i = \frac nk x_i \text{ if } i \in K \text{ else } 0, \qquad
              k = \max(1, \operatorname{round}(s n))

    with K drawn anew for every message. A message is the k values and a seed of 64 bits, which
    gives the receiver K. Scaled, the code is without bias: use it without feedback.

    Args:
        share: s, the share of an update's entries that is sent; 1 changes nothing.
        then: a code for the k values, a vector of its own; None: 32 bits for each.
        scaled: whether the values are scaled by n/k, as in the paper's sketched updates. Not
            scaled, C(x) is the update kept within a random mask, as after one step of the paper's
            structured updates, whose clients train within it.

    Returns:
        A compressor.

    Raises:
        ValueError: if share is out of range.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, sections 2 and 3.

    >>> code = random_mask(0.25)
    >>> sorted(code.compress(jax.random.key(0), jnp.ones(8)).tolist())
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0]
    >>> code.bytes(8)
    16
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")

    def kept(size: int) -> int:
        return max(1, round(share * size))

    def compress(key: Array, x: Array) -> Array:
        count = kept(x.size)
        mask_key, own_key = jax.random.split(key)
        chosen = jnp.arange(x.size, dtype=jnp.int32)
        if count < x.size:
            chosen = permutation(mask_key, x.size)[:count]
        values = x[chosen]
        values = values if then is None else then.compress(own_key, values)
        return jnp.zeros_like(x).at[chosen].set(x.size / count * values if scaled else values)

    def size(n: int) -> int:
        count = kept(n)
        seed = SEED if count < n else 0
        return seed + (4 * count if then is None else then.bytes(count))

    return Compressor(compress, size)


@part
def uniform_quantisation(bits: int) -> Compressor:
    r"""Every entry rounded at random, without bias, to levels from the least entry to the largest.

    .. math:: C(x)_i \in \Bigl\{ x_{min} + \frac{l}{2^b - 1} (x_{max} - x_{min}) \Bigr\}, \quad
              l \in \{0, \dots, 2^b - 1\}, \qquad \mathbb{E}\,C(x) = x

    A message is b bits for each entry, and the two ends in 32 bits each.

    Args:
        bits: b.

    Returns:
        A compressor, to be used without feedback.

    Raises:
        ValueError: if bits is not in 1..16.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    >>> uniform_quantisation(1).compress(jax.random.key(0), jnp.array([-1.0, 3.0])).tolist()
    [-1.0, 3.0]
    >>> uniform_quantisation(1).bytes(1000)
    133
    """
    if not 1 <= bits <= 16:
        raise ValueError(f"bits must be in 1..16, got {bits}")
    most = 2**bits - 1

    def compress(key: Array, x: Array) -> Array:
        least, width = jnp.min(x), jnp.max(x) - jnp.min(x)
        scaled = most * (x - least) / jnp.where(width > 0, width, 1)
        up = jax.random.uniform(key, x.shape, x.dtype) < scaled - jnp.floor(scaled)
        return least + width * (jnp.floor(scaled) + up.astype(x.dtype)) / most

    return Compressor(compress, lambda n: math.ceil((n * bits + 64) / 8))


@part
def rotated(code: Compressor) -> Compressor:
    r"""A code of the randomly rotated update, so that no entry is much larger than others.

    .. math:: C'(x) = R^\top C(R x), \qquad R = H D

    D is a diagonal of random signs, H the Walsh-Hadamard matrix over the square root of its size;
    x is filled up with zeros to the next power of two. The seed of D takes 64 bits.

    Args:
        code: C.

    Returns:
        A compressor.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    >>> from fedjax_sim.compression import top_k
    >>> back = rotated(top_k(1)).compress(jax.random.key(0), jnp.array([3.0, -1.0, 2.0]))
    >>> back.round(4).tolist()
    [3.0, -1.0, 2.0]
    """

    def compress(key: Array, x: Array) -> Array:
        sign_key, own_key = jax.random.split(key)
        room = _room(x.size)
        sign = signs(sign_key, (room,), x.dtype)
        given = _hadamard(sign * jnp.pad(x, (0, room - x.size)))
        return (sign * _hadamard(code.compress(own_key, given)))[: x.size]

    return Compressor(compress, lambda n: SEED + code.bytes(_room(n)))


@part
def low_rank(rank: int) -> Sending:
    r"""Sends what of an update's matrices lies in random subspaces.

    .. math:: C(H) = A B, \qquad B = A^\top H, \qquad A \in \mathbb{R}^{d_1 \times r}, \quad
              A^\top A = I

    The columns of A span a subspace drawn anew for every message. B is sent, r d_2 numbers, and a
    seed of 64 bits gives the receiver A. A kernel is the matrix of its last axis by all others; if
    d_1 is at most r it goes whole, and so do vectors. The paper's clients train B itself: after one
    step of SGD that is this projection of the whole update, after more steps it is not.

    Args:
        rank: r.

    Returns:
        A part of ``sending`` without state.

    Raises:
        ValueError: if rank is not positive.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 2.

    >>> w = Variables({"kernel": jnp.ones((100, 10)), "bias": jnp.ones(10)}, {})
    >>> low_rank(5).bytes(w)  # 4 · (5 · 10 + 10) and a seed; 4,040 whole
    248
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")

    def coded(leaf: Array | jax.ShapeDtypeStruct) -> bool:
        return leaf.ndim > 1 and math.prod(leaf.shape[:-1]) > rank

    def projected(key: Array, leaf: Array) -> Array:
        if not coded(leaf):
            return leaf
        matrix = leaf.reshape(-1, leaf.shape[-1]).astype(jnp.float32)
        space, _ = jnp.linalg.qr(jax.random.normal(key, (len(matrix), rank), jnp.float32))
        back = space @ (space.T @ matrix)
        return back.reshape(leaf.shape).astype(leaf.dtype)

    def send(key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array) -> Sent:
        del client
        leaves, form = jax.tree.flatten(update.params)
        keys = jax.random.split(key, len(leaves))
        out = [projected(own, leaf) for own, leaf in zip(keys, leaves, strict=True)]
        return Sent(update._replace(params=jax.tree.unflatten(form, out)), message, kept)

    def size(variables: Variables) -> int:
        total = SEED + tree.num_bytes(variables.state)
        for leaf in jax.tree.leaves(variables.params):
            entries = rank * leaf.shape[-1] if coded(leaf) else math.prod(leaf.shape)
            total += entries * leaf.dtype.itemsize
        return total

    return Sending(init=lambda variables, data: (), send=send, bytes=size)


def _room(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def _hadamard(x: Array) -> Array:
    """H x over the square root of its size, a power of two; its own inverse."""
    size, half = x.size, 1
    while half < size:
        pairs = x.reshape(-1, 2, half)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return x / math.sqrt(size)
