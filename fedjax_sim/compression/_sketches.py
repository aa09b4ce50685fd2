"""Codes that depend on a random seed: a mask, a rotation, a subspace."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Count, Fraction, PyTree, Sending, Sent, Variables
from fedjax_sim.compression._codes import Compressor
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import permutation, signs

SEED = 8  # bytes


class random_mask(Compressor):
    r"""A random subset of the entries.

    .. math:: C(x)_i = \frac nk x_i \text{ if } i \in K \text{ else } 0, \qquad
              k = \max(1, \operatorname{round}(s n))

    with a new K for every message. A message is the k values and a seed of 64 bits, from which the
    receiver draws K. The scaled code is unbiased: use it without feedback.

    Args:
        share: s, the fraction of an update's entries that is sent; 1 changes nothing.
        then: a code for the vector of the k values; None: 32 bits for each.
        scaled: whether the values are scaled by n/k, as in the paper's sketched updates. Without
            scaling, C(x) is the update restricted to a random mask, as after one step of the
            paper's structured updates, whose clients train within the mask.

    Raises:
        ValueError: if share is out of range.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, sections 2 and 3.

    >>> code = random_mask(0.25)
    >>> sorted(code.compress(jax.random.key(0), jnp.ones(8)).tolist())
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0]
    >>> code.bytes(8)
    16
    """

    share: Fraction
    then: Compressor | None = None
    _: dataclasses.KW_ONLY
    scaled: bool = True

    def count(self, n: int) -> int:
        """Returns k, the number of entries that are sent."""
        return max(1, round(self.share * n))

    @property
    def measured(self) -> bool:
        return self.then is not None and self.then.measured

    def compress(self, key: Array, x: Array) -> Array:
        return self.measure(key, x)[0]

    def measure(self, key: Array, x: Array) -> tuple[Array, Array | int]:
        count = self.count(x.size)
        mask_key, value_key = jax.random.split(key)
        chosen = jnp.arange(x.size, dtype=jnp.int32)
        if count < x.size:
            chosen = permutation(mask_key, x.size)[:count]
        values = x[chosen]
        size: Array | int = 4 * count
        if self.then is not None:
            values, size = self.then.measure(value_key, values)
        values = x.size / count * values if self.scaled else values
        return jnp.zeros_like(x).at[chosen].set(values), self._seed(x.size) + size

    def bytes(self, n: int) -> int:
        count = self.count(n)
        return self._seed(n) + (4 * count if self.then is None else self.then.bytes(count))

    def _seed(self, n: int) -> int:
        return SEED if self.count(n) < n else 0


class uniform_quantisation(Compressor):
    r"""Unbiased stochastic rounding to levels between the smallest and the largest entry.

    .. math:: C(x)_i \in \Bigl\{ x_{min} + \frac{l}{2^b - 1} (x_{max} - x_{min}) \Bigr\}, \quad
              l \in \{0, \dots, 2^b - 1\}, \qquad \mathbb{E}\,C(x) = x

    A message is b bits for each entry, and the two extremes in 32 bits each. Use it without
    feedback.

    Args:
        bits: b.

    Raises:
        ValueError: if bits is not in 1..16.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    >>> uniform_quantisation(1).compress(jax.random.key(0), jnp.array([-1.0, 3.0])).tolist()
    [-1.0, 3.0]
    >>> uniform_quantisation(1).bytes(1000)
    133
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits must be in 1..16, got {self.bits}")

    def compress(self, key: Array, x: Array) -> Array:
        most = 2**self.bits - 1
        least, width = jnp.min(x), jnp.max(x) - jnp.min(x)
        scaled = most * (x - least) / jnp.where(width > 0, width, 1)
        up = jax.random.uniform(key, x.shape, x.dtype) < scaled - jnp.floor(scaled)
        return least + width * (jnp.floor(scaled) + up.astype(x.dtype)) / most

    def bytes(self, n: int) -> int:
        return math.ceil((n * self.bits + 64) / 8)


class rotated(Compressor):
    r"""A code applied to the randomly rotated update, in which no entry is much larger than others.

    .. math:: C'(x) = R^\top C(R x), \qquad R = H D

    D is a diagonal matrix of random signs, H the Walsh-Hadamard matrix divided by the square root
    of its size; x is padded with zeros to the next power of two. The seed of D takes 64 bits.

    Args:
        code: C.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 3.

    >>> from fedjax_sim.compression import top_k
    >>> back = rotated(top_k(1)).compress(jax.random.key(0), jnp.array([3.0, -1.0, 2.0]))
    >>> back.round(4).tolist()
    [3.0, -1.0, 2.0]
    """

    code: Compressor

    @property
    def measured(self) -> bool:
        return self.code.measured

    def compress(self, key: Array, x: Array) -> Array:
        return self.measure(key, x)[0]

    def measure(self, key: Array, x: Array) -> tuple[Array, Array | int]:
        sign_key, code_key = jax.random.split(key)
        size = _padded_size(x.size)
        sign = signs(sign_key, (size,), x.dtype)
        given = _hadamard(sign * jnp.pad(x, (0, size - x.size)))
        coded, sent = self.code.measure(code_key, given)
        return (sign * _hadamard(coded))[: x.size], SEED + sent

    def bytes(self, n: int) -> int:
        return SEED + self.code.bytes(_padded_size(n))


class low_rank(Sending):
    r"""Projects an update's matrices onto random subspaces.

    .. math:: C(H) = A B, \qquad B = A^\top H, \qquad A \in \mathbb{R}^{d_1 \times r}, \quad
              A^\top A = I

    The columns of A span a new random subspace for every message. A message is B, r d_2 numbers,
    and a seed of 64 bits from which the receiver draws A. A kernel is a matrix with its last axis
    as columns; if d_1 is at most r it is sent whole, as vectors are. The paper's clients train B
    itself: after one step of SGD this equals the projection of the whole update, after more steps
    it does not.

    Args:
        rank: r.

    Raises:
        ValueError: if rank is not positive.

    Source: Konečný et al. 2016 <https://arxiv.org/abs/1610.05492>, section 2.

    >>> w = Variables({"kernel": jnp.ones((100, 10)), "bias": jnp.ones(10)}, {})
    >>> low_rank(5).bytes(w)  # 4 · (5 · 10 + 10) and a seed; 4,040 whole
    248
    """

    rank: Count

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array
    ) -> Sent:
        leaves, form = jax.tree.flatten(update.params)
        keys = jax.random.split(key, len(leaves))
        out = [self._projected(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]
        return Sent(update._replace(params=jax.tree.unflatten(form, out)), message, kept)

    def bytes(self, variables: Variables) -> int:
        total = SEED + tree.num_bytes(variables.state)
        for leaf in jax.tree.leaves(variables.params):
            entries = self.rank * leaf.shape[-1] if self._coded(leaf) else math.prod(leaf.shape)
            total += entries * leaf.dtype.itemsize
        return total

    def _coded(self, leaf: Array | jax.ShapeDtypeStruct) -> bool:
        return leaf.ndim > 1 and math.prod(leaf.shape[:-1]) > self.rank

    def _projected(self, key: Array, leaf: Array) -> Array:
        if not self._coded(leaf):
            return leaf
        matrix = leaf.reshape(-1, leaf.shape[-1]).astype(jnp.float32)
        normal = jax.random.normal(key, (len(matrix), self.rank), jnp.float32)
        space, _ = jnp.linalg.qr(normal)
        back = space @ (space.T @ matrix)
        return back.reshape(leaf.shape).astype(leaf.dtype)


def _padded_size(size: int) -> int:
    """Returns the smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _hadamard(x: Array) -> Array:
    """Returns H x for a vector whose size is a power of two; it is its own inverse."""
    size, half = x.size, 1
    while half < size:
        pairs = x.reshape(-1, 2, half)
        x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return x / math.sqrt(size)
