"""Lossy codes for updates, applied to the vector of all entries."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Count, Fraction, Part


class Compressor(Part):
    """A lossy code for a whole update, with all parameters in one vector."""

    def compress(self, key: Array, x: Array, /) -> Array:
        """Returns what the receiver decodes of ``x f32[n]``, ``f32[n]``."""
        raise NotImplementedError

    def bytes(self, n: int, /) -> int:
        """Returns the size of a message of n entries."""
        raise NotImplementedError


class _Sparse(Compressor):
    """A code that sends the largest entries: ``value_bits`` for each, and ``head_bits`` once."""

    sparsity: Fraction

    value_bits, head_bits = 32, 0

    def count(self, n: int) -> int:
        """Returns k, the number of entries that are sent."""
        return max(1, round(self.sparsity * n))

    def bytes(self, n: int) -> int:
        count = self.count(n)
        bits = count * (position_bits(count / n) + self.value_bits) + self.head_bits
        return math.ceil(bits / 8)


class ternary(_Sparse):
    r"""The signs of the largest entries times their mean magnitude (sparse ternary compression).

    .. math:: C(x)_i = \mu \operatorname{sign}(x_i) \text{ if } i \in K \text{ else } 0, \qquad
              \mu = \frac1k \sum_{i \in K} |x_i|, \quad k = \max(1, \operatorname{round}(p n))

    with K the k entries of largest magnitude, the first ones among equals. A message is the k
    positions, Golomb-coded (``position_bits``), k signs and μ in 32 bits.

    Args:
        sparsity: p, the fraction of an update's entries that is sent.

    Raises:
        ValueError: if sparsity is out of range.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 1.

    >>> x = jnp.array([1.0, -4.0, 0.5, 2.0])
    >>> ternary(0.5).compress(jax.random.key(0), x).tolist()
    [0.0, -3.0, 0.0, 3.0]
    >>> ternary(1 / 400).bytes(1_000_000), 4 * 1_000_000
    (3477, 4000000)
    """

    value_bits, head_bits = 1, 32

    def compress(self, key: Array, x: Array) -> Array:
        count = self.count(x.size)
        largest = _largest(x, count)
        magnitude = jnp.sum(jnp.where(largest, jnp.abs(x), 0)) / count
        return jnp.where(largest, magnitude * jnp.sign(x), 0)


class top_k(_Sparse):
    r"""The largest entries, unchanged.

    .. math:: C(x)_i = x_i \text{ if } i \in K \text{ else } 0

    K as in :func:`ternary`. A message is the k positions, Golomb-coded, and k values of 32 bits.

    Args:
        sparsity: p, the fraction of an update's entries that is sent; 1 changes nothing.

    Raises:
        ValueError: if sparsity is out of range.

    Source: Aji, Heafield 2017 <https://arxiv.org/abs/1704.05021>.

    >>> top_k(0.5).compress(jax.random.key(0), jnp.array([1.0, -4.0, 0.5, 2.0])).tolist()
    [0.0, -4.0, 0.0, 2.0]
    """

    def compress(self, key: Array, x: Array) -> Array:
        return jnp.where(_largest(x, self.count(x.size)), x, 0)


class stochastic_quantisation(Compressor):
    r"""Unbiased stochastic rounding of every entry to one of s levels of the norm (QSGD).

    .. math:: C(x)_i = \lVert x \rVert_2 \operatorname{sign}(x_i)\,\xi_i, \qquad
              \xi_i \in \{\tfrac{l}{s}, \tfrac{l+1}{s}\}, \quad
              \mathbb{E}\,\xi_i = \frac{|x_i|}{\lVert x \rVert_2}

    A message is the norm in 32 bits and a code of fixed length for each entry,
    :math:`\lceil \log_2(2s+1) \rceil` bits; the paper's Elias code is shorter if most entries are
    0, by an amount that depends on the data. Its error can exceed the entry itself: use it without
    feedback.

    Args:
        levels: s, the number of levels between 0 and the norm.

    Raises:
        ValueError: if levels is out of range.

    Source: Alistarh et al. 2017 <https://arxiv.org/abs/1610.02132>, section 3.1.

    >>> stochastic_quantisation(1).compress(jax.random.key(0), jnp.array([0.0, -2.0])).tolist()
    [0.0, -2.0]
    >>> stochastic_quantisation(7).bytes(1000)
    504
    """

    levels: Count

    def compress(self, key: Array, x: Array) -> Array:
        # Scaled so that the norm's square is in the range of floats; a power of two is exact.
        unit = jnp.ldexp(jnp.ones((), x.dtype), jnp.frexp(jnp.max(jnp.abs(x)))[1] - 1)
        x = x / unit
        norm = jnp.linalg.norm(x)
        scaled = self.levels * jnp.abs(x) / jnp.where(norm > 0, norm, 1)
        up = jax.random.uniform(key, x.shape, x.dtype) < scaled - jnp.floor(scaled)
        level = jnp.floor(scaled) + up.astype(x.dtype)
        return norm * jnp.sign(x) * level / self.levels * unit

    def bytes(self, n: int) -> int:
        return math.ceil((n * math.ceil(math.log2(2 * self.levels + 1)) + 32) / 8)


def position_bits(share: float) -> float:
    r"""Returns the bits of one Golomb-coded position if a random fraction of the entries is sent.

    .. math:: b^* + \frac{1}{1 - (1-p)^{2^{b^*}}}, \qquad
              b^* = 1 + \Bigl\lfloor \log_2 \frac{\log(\varphi - 1)}{\log(1-p)} \Bigr\rfloor

    with p = ``share`` and φ the golden ratio; b* is at least 0, and a position takes 0 bits if all
    entries are sent.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, on Golomb encoding.

    >>> round(position_bits(1 / 400), 2)
    10.11
    """
    if share == 1:
        return 0.0
    inverse_golden = (math.sqrt(5) - 1) / 2
    runs = math.log(inverse_golden) / math.log1p(-share)
    fixed = max(0, 1 + math.floor(math.log2(runs)))
    return float(fixed + 1 / (1 - (1 - share) ** 2**fixed))


def _largest(x: Array, count: int) -> Array:
    """Returns whether each entry of ``x`` is one of the ``count`` largest in magnitude."""
    if count == x.size:
        return jnp.ones(x.shape, bool)
    # Nonnegative floats are ordered like their bits: 31 passes find the count-th largest bit by
    # bit. 1.6 M entries on a CPU core take 20 ms for any count; top_k takes 16 ms for 1/400 of them
    # and 390 ms for half; a sort takes 410 ms.
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

    def refine(i: Array, bound: Array) -> Array:
        higher = bound | (jnp.int32(1) << (30 - i))
        return jnp.where(jnp.sum(bits >= higher, dtype=jnp.int32) >= count, higher, bound)

    bound = jax.lax.fori_loop(0, 31, refine, jnp.int32(0))
    above, tied = bits > bound, bits == bound
    room = count - jnp.sum(above, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= room))
